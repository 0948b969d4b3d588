"""Record + problem + device limits → every number of a launch, or why it cannot be.

Pure integers: nothing here needs a GPU or a compiler.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from math import exp, fsum, log, prod, sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from cupyfa.dtypes import DTYPES, DType
from cupyfa.kernel import MOST_BOX_ROWS, Kernel, Launch, Matmul, cdiv
from cupyfa.ladder import LADDER
from cupyfa.operations import OPERATIONS
from cupyfa.problem import MOST_ELEMENTS, Problem

BOX_ALIGNMENT = 16  # bytes
_LARGEST_GRID = (2**31 - 1, 65535, 65535)
_MOST_ROUNDS = 65536  # whose launches are planned one by one
Allocations = Mapping[str, tuple[tuple[int, ...], np.dtype]]


class Unsupported(NotImplementedError):
    """A valid problem that this kernel or device cannot do; the message says who can.

    ``reason`` says why in few words and without sizes, for counting.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message


@dataclass(frozen=True)
class Tuned:
    """The constants of a kernel that were measured fastest on a device, and their TFLOP/s.

    ``dtype`` is the problem's ``arithmetic``: it names a precision where that is another.
    ``folder`` tells a kernel from outside from others of its name; it is None for the ladder's.
    """

    kernel: str
    folder: str | None
    dtype: str
    d: int
    dv: int
    constants: tuple[tuple[str, int], ...]
    tflops: float


_ALIKE = 0.98  # speeds that differ by less than one measurement from another may


@dataclass(frozen=True)
class Limits:
    """What a device grants one block, how it is named in messages, and what was tuned on it.

    ``arch``, a compute capability, is None where anything runs, as in the simulator. ``no_matmul``
    says why there are no matrix products here, if that is so. ``multiprocessors`` are those of an
    H100 SXM where no device is. ``clock`` is the highest of a multiprocessor, in GHz, where known.
    """

    device: str
    shared_bytes: int
    threads: int = 1024
    arch: str | None = None
    no_matmul: str | None = None
    multiprocessors: int = 132
    clock: float | None = None
    tuned: tuple[Tuned, ...] = field(default=(), hash=False, repr=False)


@dataclass(frozen=True)
class PlannedLaunch:
    """One launch with every number decided; its file, constants and dtypes make the source text.

    ``operand`` is the dtype of what is multiplied, if the inputs are rounded to another. ``boxes``
    are the rows of a box by array, ``numbers`` the arguments that only this launch has. ``target``
    is the architecture to compile for, as "90a", if that is not just the device's. ``moves`` are
    how many times arrays are read or written, where the record says so.
    """

    launch: Launch
    path: Path
    dtype: DType
    operand: DType
    constants: Mapping[str, int | bool]
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    boxes: Mapping[str, int] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    target: str | None = None
    moves: Mapping[str, int] = field(default_factory=dict)

    @property
    def entry(self) -> str:
        """The name of the kernel function."""
        return self.launch.entry


@dataclass(frozen=True)
class Plan:
    """Everything one call does, decided before it is done."""

    kernel: Kernel
    problem: Problem
    constants: Mapping[str, int]
    steps: tuple[PlannedLaunch | Matmul, ...]
    scratch: Allocations
    outputs: Allocations

    @property
    def rounding(self) -> str | None:
        """The precision that operands are rounded to by design; None if they are what they are."""
        return _rounding(self.kernel, self.problem)

    @property
    def launches(self) -> tuple[PlannedLaunch, ...]:
        """The steps that launch a kernel."""
        return tuple(step for step in self.steps if isinstance(step, PlannedLaunch))

    @property
    def programs(self) -> tuple[PlannedLaunch, ...]:
        """The launches that have to be compiled: one of those that rounds repeat."""
        return tuple({id(x.launch): x for x in self.launches}.values())

    @property
    def scratch_bytes(self) -> int:
        """Bytes of temporary memory beside inputs and outputs."""
        return sum(
            prod(self.stored_shape(name)) * dtype.itemsize
            for name, (_, dtype) in self.scratch.items()
        )

    @property
    def boxed(self) -> set[str]:
        """The arrays that are copied by boxes: their rows begin at multiples of BOX_ALIGNMENT."""
        return {name for launch in self.launches for name in launch.boxes}

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """That of the memory for an output or temporary, whose rows may have columns to spare."""
        shape, dtype = {**self.outputs, **self.scratch}[name]
        if name not in self.boxed:
            return shape
        return (*shape[:-1], aligned_width(shape[-1], dtype.itemsize))


def aligned_width(columns: int, itemsize: int) -> int:
    """The least number of columns, from this one, that are a multiple of BOX_ALIGNMENT bytes."""
    step = max(BOX_ALIGNMENT // itemsize, 1)
    return cdiv(columns, step) * step


def select(
    kernel: str | Kernel,
    operation: str,
    problem: Problem,
    limits: Limits,
    *,
    deterministic: bool = False,
) -> Kernel:
    """The record of a kernel given by name, by itself, or as "auto".

    With ``deterministic`` it is one whose results are the same bits in every run: Unsupported is
    raised of others.
    """
    if deterministic:
        return _deterministic(kernel, operation, problem, limits)
    if isinstance(kernel, Kernel):
        if kernel.operation != operation:
            raise ValueError(f"kernel {kernel.name} computes {kernel.operation}, not {operation}")
        return kernel
    if not isinstance(kernel, str):
        kind = type(kernel).__name__
        raise TypeError(f"kernel is a {kind}; give a kernel's name, a Kernel of your own or 'auto'")
    if kernel == "auto":
        return _fastest(operation, problem, limits)
    if kernel not in LADDER[operation]:
        other = next((x for x in LADDER if kernel in LADDER[x]), None)
        raise ValueError(
            f"kernel {kernel!r} {f'computes {other}' if other else 'is unknown'}; "
            f"the {operation} kernels are "
            f"{', '.join(LADDER[operation])}, or 'auto'"
        )
    return LADDER[operation][kernel]


def _deterministic(
    kernel: str | Kernel, operation: str, problem: Problem, limits: Limits
) -> Kernel:
    ordered = {name: x for name, x in LADDER[operation].items() if not x.unordered}
    if isinstance(kernel, str) and kernel == "auto":
        return _fastest(operation, problem, limits, ordered)
    record = select(kernel, operation, problem, limits)
    if record.unordered:
        raise Unsupported(
            f"{record.name} adds up {', '.join(record.unordered)} in any order, so their last bits "
            f"differ from run to run; deterministic kernels: {', '.join(ordered) or 'none'}",
            "it is not deterministic",
        )
    return record


def plan(kernel: Kernel, problem: Problem, limits: Limits, **given: int) -> Plan:
    """The plan of a kernel for a problem on a device, with constants the caller may fix.

    Zero columns are planned as one, whose elements are 0.

    Raises ValueError for constants that the kernel does not have or that break its rules, and
    Unsupported if the kernel or the device cannot do the problem.
    """
    _check_arrays(kernel)
    problem = _with_columns(kernel, problem)
    try:
        return _first_fit(kernel, problem, limits, given)
    except Unsupported as refused:
        remedy = _remedy(kernel, problem, limits, given)
        raise Unsupported(f"{refused}; {remedy}", refused.reason) from None


def can(kernel: Kernel, problem: Problem, limits: Limits) -> bool:
    """Whether the kernel can do the problem on the device with constants of its own choice."""
    try:
        _first_fit(kernel, _with_columns(kernel, problem), limits, {})
    except Unsupported:
        return False
    return True


def candidates(kernel: Kernel, problem: Problem, limits: Limits) -> list[Plan]:
    """The plans to choose from by measuring: the record's own choice, then all others that fit,
    those that differ least from it first.

    Raises Unsupported if the kernel's own choice of constants cannot be.
    """
    own = plan(kernel, problem, replace(limits, tuned=()))
    combined = [dict(zip(kernel.candidates, x)) for x in product(*kernel.candidates.values())]
    plans = []
    for constants in (
        combined
        if kernel.candidates
        else map(dict, kernel.tiles_for(own.problem, limits.arch, limits.multiprocessors))
    ):
        with suppress(Unsupported, ValueError):
            plans.append(_with_constants(kernel, own.problem, limits, constants))

    def difference(other: Plan) -> float:
        return sum(abs(log(other.constants[x] / own.constants[x])) for x in own.constants)

    others = [x for x in plans if x.constants != own.constants]
    return [own, *sorted(others, key=difference)]


def largest_d(kernel: Kernel, dtype: str, limits: Limits) -> int | None:
    """The largest head dimension that fits the device: 0 if none does, None if every one does."""

    def too_large(d: int) -> bool:
        return not can(kernel, Problem.of_sizes(M=1, d=d, dtype=dtype), limits)

    unbounded = limits.shared_bytes + 1  # not even one byte for each column would fit
    return bisect_left(range(1, unbounded), True, key=too_large) if too_large(unbounded) else None


def source_path(kernel: Kernel, launch: Launch) -> Path:
    """A launch's file: in the folder of a kernel from outside, else relative to kernels/."""
    file = Path(launch.file or f"{launch.entry}.cu")
    if kernel.folder is not None:
        return Path(kernel.folder).resolve() / file
    return file if launch.file else kernel.operation / file


def folder_of(kernel: Kernel) -> str | None:
    """The folder of a kernel from outside, None for one of the ladder."""
    return None if kernel.folder is None else str(Path(kernel.folder).resolve())


def _fastest(
    operation: str, problem: Problem, limits: Limits, ladder: Mapping[str, Kernel] | None = None
) -> Kernel:
    """The kernel that was measured fastest among those that can do the problem on the device.

    Measured here, or else on an H100: such speeds are scaled by what this device made of those
    that were measured on both. Of kernels that are alike it is the ladder's last. Of a precision
    that was not measured it is the one that was measured fastest for inputs of that dtype, or else
    the ladder's last. Of an operation of which nothing was measured it is the last whose results
    are the same in every run. Before all of these comes one that was made for such problems.
    """
    problem = _accurate(problem)
    arithmetic = problem.arithmetic
    kernels = (LADDER[operation] if ladder is None else ladder).values()
    if special := [k for k in kernels if _is_made_for(k, problem, limits)]:
        return special[-1]
    general = [k for k in kernels if k.made_for is None and k.suits(problem.precision)]
    measured = [k for k in general if arithmetic in k.tflops]
    able = [k for k in measured if can(k, problem, limits)]
    if not able:
        others = [k for k in general if can(k, problem, limits)]
        if others and not any(k.tflops for k in general):
            return ([k for k in others if not k.unordered] or others)[-1]
        if others and arithmetic != problem.dtype.name:
            return max(reversed(others), key=lambda k: _speed_of_operands(k, problem))
        names = ", ".join(k.name for k in others)
        remedy = f"name one that can: {names}" if others else "no other kernel can"
        raise Unsupported(
            f"'auto' knows no measured kernel for {problem} on {limits.device}; {remedy}"
        )
    recorded = {kernel.name: kernel.tflops[arithmetic] for kernel in measured}
    here = {name: _measured_here(name, problem, limits) for name in recorded}
    both = [x / _nearest(recorded[name], d) for name in here for d, x in here[name].items()]
    scale = exp(fsum(map(log, both)) / len(both)) if both else 1.0  # their geometric mean
    scaled = {name: {d: scale * x for d, x in recorded[name].items()} for name in recorded}
    speeds = {k.name: _nearest(scaled[k.name] | here[k.name], problem.d) for k in able}
    return [k for k in able if speeds[k.name] >= _ALIKE * max(speeds.values())][-1]


def _is_made_for(kernel: Kernel, problem: Problem, limits: Limits) -> bool:
    """Whether the kernel was made for such problems, can do this one here, and was measured."""
    if kernel.made_for is None or problem.arithmetic not in kernel.tflops:
        return False
    try:
        its = plan(kernel, problem, limits)
    except Unsupported:
        return False
    c = SimpleNamespace(**its.constants, multiprocessors=limits.multiprocessors)
    return bool(_evaluated(kernel, "made_for", kernel.made_for, its.problem, c))


def _speed_of_operands(kernel: Kernel, problem: Problem) -> float:
    """TFLOP/s for inputs that need no rounding to the problem's precision; 0 if not measured."""
    speeds = kernel.tflops.get(problem.precision or "")
    return _nearest(speeds, problem.d) if speeds else 0.0


def _measured_here(name: str, problem: Problem, limits: Limits) -> dict[int, float]:
    """TFLOP/s of a kernel of the ladder on this device by d: with dv = d, or of this d and dv."""
    mine = [t for t in limits.tuned if (t.kernel, t.folder) == (name, None)]
    here = {t.d: t.tflops for t in mine if t.dtype == problem.arithmetic and t.d == t.dv}
    exact = {t.d: t.tflops for t in mine if _is_for(t, problem)}
    return here | exact


def _nearest(speeds: Mapping[int, float], d: int) -> float:
    """The speed at the head dimension that is nearest by its ratio.

    Below the least one, products cost less and weights as much: the speed is between the same and
    one that falls with d, and the geometric mean of both is taken.
    """
    nearest = min(speeds, key=lambda measured: abs(log(max(measured, 1) / max(d, 1))))
    share = max(d, 1) / max(nearest, 1) if nearest == min(speeds) else 1.0
    return speeds[nearest] * sqrt(min(share, 1.0))


def _remedy(kernel: Kernel, problem: Problem, limits: Limits, given: Mapping[str, int]) -> str:
    if given and can(kernel, problem, limits):
        return f"leave {', '.join(given)} to the plan"
    problem = _accurate(problem)
    others = [
        k
        for k in LADDER[kernel.operation].values()
        if k is not kernel and k.suits(problem.precision)
    ]
    able = [k.name for k in others if can(k, problem, limits)]
    return f"kernels that can: {', '.join(able)}" if able else "no other kernel can either"


def _accurate(problem: Problem) -> Problem:
    """The problem for a kernel that nobody named: float32 is rounded only if that is asked for."""
    if problem.dtype.name != "float32" or problem.precision or not problem.d:
        return problem
    return replace(problem, precision="float32")


def _rounding(kernel: Kernel, problem: Problem) -> str | None:
    if problem.precision is None:
        return kernel.rounding
    return None if problem.precision == "float32" else problem.precision


def _with_columns(kernel: Kernel, problem: Problem) -> Problem:
    """The problem with one column where it has none; softmax has neither d nor dv."""
    if any("d" in axes.split() for axes in OPERATIONS[kernel.operation].inputs.values()):
        return replace(problem, d=max(problem.d, 1), dv=max(problem.dv, 1))
    return problem


def _first_fit(kernel: Kernel, problem: Problem, limits: Limits, given: Mapping[str, int]) -> Plan:
    """The plan with the constants tuned for the problem, or the first of the kernel's tiles that
    fits; the last one's refusal if none does.
    """
    _check_able(kernel, problem, limits)
    problem = kernel.resolved(problem)
    _check_given(kernel, given)
    given = {name: int(value) for name, value in given.items()}
    for constants in _tuned_for(kernel, problem, limits):
        with suppress(Exception):  # the record, and what it can take, may have changed since
            return _with_constants(kernel, problem, limits, {**constants, **given})
    refused: Exception | None = None
    for tile in kernel.tiles_for(problem, limits.arch, limits.multiprocessors):
        try:
            return _with_constants(kernel, problem, limits, {**tile, **given})
        except Unsupported as error:
            refused = error
        except ValueError as error:
            refused = refused or error
    assert refused is not None, "a kernel has at least one tile"
    raise refused


def _tuned_for(kernel: Kernel, problem: Problem, limits: Limits) -> Iterator[dict[str, int]]:
    for tuned in limits.tuned:
        if tuned.kernel == kernel.name and _is_for(tuned, problem):
            constants = dict(tuned.constants)
            if constants.keys() == kernel.tiles[0].keys() and tuned.folder == folder_of(kernel):
                yield constants


def _is_for(tuned: Tuned, problem: Problem) -> bool:
    return (tuned.dtype, tuned.d, tuned.dv) == (problem.arithmetic, problem.d, problem.dv)


def _check_able(kernel: Kernel, problem: Problem, limits: Limits) -> None:
    """Refuses what the kernel cannot do, or the machine lacks, whatever the constants."""
    needed = {
        "causal": problem.right is not None,
        "window": problem.left is not None,
        "gqa": problem.heads != problem.kv_heads,
        "dv": problem.d != problem.dv,
    }
    lacking = [name for name in needed if needed[name] and name not in kernel.features]
    matmuls = any(isinstance(step, Matmul) for step in kernel.launches)
    arch = kernel.arch_for(problem.dtype.name)
    can_do = kernel.precisions_of(problem.dtype.name)
    here = "this" if limits.device == f"sm_{limits.arch}" else limits.device
    if not kernel.takes(problem.dtype.name):
        reason = f"its dtypes are {', '.join(kernel.dtypes)}"
    elif problem.precision and problem.precision not in can_do:
        own = problem.dtype.name
        reason = f"it computes {own} in {' or '.join(can_do or (own,))}"
    elif lacking:
        reason = f"it lacks {', '.join(lacking)}"
    elif kernel.target and limits.arch not in (None, kernel.target.removesuffix("a")):
        reason = f"it runs on sm_{kernel.target} alone, {here} is sm_{limits.arch}"
    elif not kernel.target and limits.arch is not None and int(limits.arch) < int(arch):
        reason = f"it needs sm_{arch} for {problem.dtype.name}, {here} is sm_{limits.arch}"
    elif kernel.largest_d is not None and max(problem.d, problem.dv) > kernel.largest_d:
        reason = f"its head dimensions end at {kernel.largest_d}"
    elif matmuls and limits.no_matmul:
        reason = limits.no_matmul
    else:
        return
    raise Unsupported(f"{kernel.name} cannot do {problem}: {reason}", reason)


def _check_arrays(kernel: Kernel) -> None:
    """Whether a record's arrays are those of its operation and scratch of its own."""
    if kernel.operation not in OPERATIONS:
        known = ", ".join(OPERATIONS)
        raise ValueError(f"{kernel.name} computes {kernel.operation!r}; operations are {known}")
    operation = OPERATIONS[kernel.operation]
    given = {**operation.inputs, **operation.outputs}
    if taken := given.keys() & kernel.scratch.keys():
        raise ValueError(
            f"{kernel.name}: {', '.join(sorted(taken))} is an array of the operation, not scratch; "
            "give the scratch another name"
        )
    products = [step for step in kernel.launches if isinstance(step, Matmul)]
    named = {name.removesuffix(".T") for x in products for name in (x.a, x.b, x.out)}
    if unknown := named - given.keys() - kernel.scratch.keys():
        raise ValueError(
            f"{kernel.name}: a Matmul names {', '.join(sorted(unknown))}; arrays are "
            f"{', '.join([*given, *kernel.scratch])}"
        )


def _check_given(kernel: Kernel, given: Mapping[str, int]) -> None:
    known = tuple(kernel.tiles[0])
    for name, value in given.items():
        if name not in known:
            raise ValueError(
                f"{kernel.name} has no constant {name!r}; it has {', '.join(known) or 'none'}"
            )
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r} is no tile size; give a whole number from 1")


def _check_rules(kernel: Kernel, problem: Problem, constants: Mapping[str, int]) -> None:
    c = SimpleNamespace(**constants, d=problem.d, dv=problem.dv)
    for rule, holds in kernel.rules.items():
        if not _evaluated(kernel, f"rule {rule!r}", holds, c):
            raise ValueError(
                f"{kernel.name} with {_listed(constants)} breaks its rule: {rule}; "
                "choose others, or leave them to the plan"
            )


def _with_constants(
    kernel: Kernel, problem: Problem, limits: Limits, constants: Mapping[str, int]
) -> Plan:
    _check_rules(kernel, problem, constants)
    steps = _evaluated(kernel, "when", kernel.steps, problem)
    return Plan(
        kernel=kernel,
        problem=problem,
        constants=constants,
        steps=tuple(
            step
            if isinstance(step, Matmul)
            else _planned(kernel, step, problem, limits, constants, turn)
            for step, turn in _in_turn(kernel, problem, limits, steps, constants)
        ),
        scratch=_scratch(kernel, problem, limits, steps, constants),
        outputs=_allocations(_outputs(kernel), problem),
    )


def _in_turn(
    kernel: Kernel,
    problem: Problem,
    limits: Limits,
    steps: Sequence[Launch | Matmul],
    constants: Mapping[str, int],
) -> list[tuple[Launch | Matmul, int]]:
    """All steps with the round that each is in, which are repeated where the kernel has rounds."""
    repeated = [x for x in steps if isinstance(x, Launch) and x.in_rounds]
    if not repeated:
        return [(step, 0) for step in steps]
    c = SimpleNamespace(**constants, multiprocessors=limits.multiprocessors)
    rounds = _evaluated(kernel, "rounds", kernel.rounds, problem, c)
    if not isinstance(rounds, int | np.integer) or rounds < 1:
        raise ValueError(
            f"{kernel.name}: the record's formula for rounds gives {rounds!r} for {problem}; "
            "it must give a whole number from 1"
        )
    if rounds > _MOST_ROUNDS:
        reason = f"it would take {rounds:,} rounds, of {_MOST_ROUNDS:,} at most"
        raise Unsupported(f"{kernel.name} cannot do {problem}: {reason}", reason)
    first = steps.index(repeated[0])
    others = [step for step in steps if step not in repeated]
    return [
        *((step, 0) for step in others[:first]),
        *((step, turn) for turn in range(rounds) for step in repeated),
        *((step, 0) for step in others[first:]),
    ]


def _arrays_of(steps: Sequence[Launch | Matmul]) -> set[str]:
    """The names, of arrays and numbers, that steps take."""
    taken = (f"{x.a} {x.b} {x.out}" if isinstance(x, Matmul) else x.args for x in steps)
    return {name.partition(".")[0] for name in " ".join(taken).split()}


def _operand(kernel: Kernel, problem: Problem) -> DType:
    """The dtype of what is multiplied; tf32 is kept in float32."""
    return DTYPES.get(_rounding(kernel, problem) or "", problem.dtype)


def _planned(
    kernel: Kernel,
    launch: Launch,
    problem: Problem,
    limits: Limits,
    constants: Mapping[str, int],
    turn: int = 0,
) -> PlannedLaunch:
    c = SimpleNamespace(**constants)
    of_grid = SimpleNamespace(**constants, multiprocessors=limits.multiprocessors, round=turn)
    blocks = _evaluated(kernel, f"grid of {launch.entry}", launch.grid, problem, of_grid)
    counts = tuple(blocks) if isinstance(blocks, Sequence) else (blocks,)
    threads = _evaluated(kernel, f"threads of {launch.entry}", launch.threads, problem, c)
    shared_bytes = _evaluated(kernel, f"shared of {launch.entry}", launch.shared, problem, c)
    _check_formulas(kernel, launch, problem, counts, threads, shared_bytes)
    x, y, z, *_ = (*counts, 1, 1)
    sizes = _listed({**constants, "d": problem.d, "dv": problem.dv})
    if threads > limits.threads:
        raise Unsupported(
            f"{kernel.name} with {sizes} needs {threads:,} threads a block; "
            f"{limits.device} allows {limits.threads:,}",
            "too many threads a block",
        )
    if any(size > most for size, most in zip((x, y, z), _LARGEST_GRID)):
        raise Unsupported(
            f"{kernel.name} with {sizes} needs a grid of {x:,} x {y:,} x {z:,} blocks; "
            "CUDA allows 2,147,483,647 x 65,535 x 65,535",
            "too many blocks",
        )
    if shared_bytes > limits.shared_bytes:
        raise Unsupported(
            f"{kernel.name} with {sizes} needs {shared_bytes:,} bytes of shared memory a block; "
            f"{limits.device} has {limits.shared_bytes:,}",
            "too little shared memory",
        )
    return PlannedLaunch(
        launch=launch,
        path=source_path(kernel, launch),
        dtype=problem.dtype,
        operand=_operand(kernel, problem),
        constants={
            **constants,
            **{
                name: _evaluated(kernel, f"{name} of {launch.entry}", formula, problem, c)
                for name, formula in launch.constants.items()
            },
            "d": problem.d,
            "dv": problem.dv,
            "causal": problem.right is not None,
            "windowed": problem.left is not None,
            "threads": threads,
            "shared_bytes": shared_bytes,
        },
        grid=(x, y, z),
        threads=threads,
        shared_bytes=shared_bytes,
        boxes=_boxes(kernel, launch, problem, c),
        numbers=_numbers(kernel, launch, problem, of_grid),
        target=kernel.target,
        moves={
            name: int(_evaluated(kernel, f"moves of {name}", formula, problem, of_grid))
            for name, formula in launch.moves.items()
        },
    )


def _boxes(
    kernel: Kernel, launch: Launch, problem: Problem, c: SimpleNamespace
) -> Mapping[str, int]:
    """The rows of a launch's boxes."""
    boxes = {}
    for name, formula in launch.boxes.items():
        rows = _evaluated(kernel, f"box of {name}", formula, problem, c)
        if not isinstance(rows, int | np.integer) or not 1 <= rows <= MOST_BOX_ROWS:
            raise ValueError(
                f"{kernel.name}: the record's formula for a box of {name} gives {rows!r} rows for "
                f"{problem}; it must give 1 to {MOST_BOX_ROWS}"
            )
        boxes[name] = int(rows)
    return boxes


def _numbers(
    kernel: Kernel, launch: Launch, problem: Problem, c: SimpleNamespace
) -> Mapping[str, int]:
    """The arguments that only this launch has."""
    numbers = {}
    for name, formula in launch.numbers.items():
        number = _evaluated(kernel, f"{name} of {launch.entry}", formula, problem, c)
        if not isinstance(number, int | np.integer) or not -(2**31) <= number < 2**31:
            raise ValueError(
                f"{kernel.name}: the record's formula for {name} gives {number!r} for {problem}; "
                "it must give a whole number of 32 bits"
            )
        numbers[name] = int(number)
    return numbers


def _outputs(kernel: Kernel) -> Mapping[str, tuple[str, str]]:
    """The operation's outputs, without lse if the kernel does not compute it."""
    outputs = OPERATIONS[kernel.operation].outputs
    return {x: outputs[x] for x in outputs if x != "lse" or "lse" in kernel.features}


def _scratch(
    kernel: Kernel,
    problem: Problem,
    limits: Limits,
    steps: Sequence[Launch | Matmul],
    constants: Mapping[str, int],
) -> Allocations:
    """The scratch that the steps name: of its axes, or of as many elements as a formula says."""
    c, arrays = SimpleNamespace(**constants, multiprocessors=limits.multiprocessors), {}
    dtypes, named = _dtypes(problem, _operand(kernel, problem)), _arrays_of(steps)
    for name, (axes, kind) in kernel.scratch.items():
        if name not in named:
            continue
        if isinstance(axes, str):
            shape = problem.shape(axes)
        else:
            shape = (_evaluated(kernel, f"scratch {name}", axes, problem, c),)
            if not isinstance(shape[0], int | np.integer) or shape[0] < 0:
                raise ValueError(
                    f"{kernel.name}: the record's formula for scratch {name} gives {shape[0]!r} "
                    f"for {problem}; it must give a whole number from 0"
                )
        if prod(shape) >= MOST_ELEMENTS:
            size = f"{prod(shape):,} elements"
            reason = f"its scratch would have {size}, and an array has fewer than 2**59"
            raise Unsupported(f"{kernel.name} cannot do {problem}: {reason}", reason)
        arrays[name] = (shape, dtypes[kind])
    return arrays


def _evaluated(kernel: Kernel, what: str, formula: Callable[..., Any], *values: Any) -> Any:
    """What a record's formula gives. Raises ValueError if it raises anything."""
    try:
        return formula(*values)
    except Exception as error:
        raise ValueError(
            f"{kernel.name}: the record's {what} fails with {type(error).__name__}: {error}; "
            f"it was called with {', '.join(map(str, values))}"
        ) from error


def _check_formulas(
    kernel: Kernel,
    launch: Launch,
    problem: Problem,
    grid: tuple[int, ...],
    threads: int,
    shared_bytes: int,
) -> None:
    """Whether a record's formulas give numbers that a launch can have."""
    numbers = (*grid, threads, shared_bytes)
    whole = all(isinstance(number, int | np.integer) and number >= 0 for number in numbers)
    empty = 0 in problem.shape("batch heads M")
    if not whole or threads < 1 or not 1 <= len(grid) <= 3 or (0 in grid and not empty):
        raise ValueError(
            f"{kernel.name}: the record's formulas for {launch.entry} give grid={grid}, "
            f"threads={threads!r}, shared={shared_bytes!r} for {problem}; they must give whole "
            "numbers, one to three for the grid, and at least one block and thread"
        )


def _allocations(arrays: Mapping[str, tuple[str, str]], problem: Problem) -> Allocations:
    dtypes = _dtypes(problem)
    return {name: (problem.shape(axes), dtypes[kind]) for name, (axes, kind) in arrays.items()}


def _dtypes(problem: Problem, operand: DType | None = None) -> dict[str, np.dtype]:
    """What kinds of arrays are made of."""
    scalar = problem.dtype.numpy
    operand_dtype = operand.numpy if operand else scalar
    return {
        "scalar": scalar,
        "real": problem.dtype.sums,
        "operand": operand_dtype,
        "byte": np.dtype(np.uint8),
    }


def _listed(constants: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in constants.items())
