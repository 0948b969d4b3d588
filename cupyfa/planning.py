"""Record + problem + device limits → every number of a launch, or why it cannot be.

Pure integers: nothing here needs a GPU or a compiler.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log, prod
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from cupyfa.dtypes import DType
from cupyfa.kernel import Kernel, Launch, Matmul
from cupyfa.ladder import LADDER
from cupyfa.operations import OPERATIONS
from cupyfa.problem import Problem

_LARGEST_GRID = (2**31 - 1, 65535, 65535)
Allocations = Mapping[str, tuple[tuple[int, ...], np.dtype]]


class Unsupported(NotImplementedError):
    """A valid problem that this kernel or device cannot do; the message says who can."""


@dataclass(frozen=True)
class Limits:
    """What a device grants one block, and how it is named in messages.

    ``arch`` None runs anything, as the simulator does. ``no_matmul`` says why there are no matrix
    products here, if that is so.
    """

    device: str
    shared_bytes: int
    threads: int = 1024
    arch: str | None = None
    no_matmul: str | None = None


@dataclass(frozen=True)
class PlannedLaunch:
    """One launch with every number decided; its file, constants and dtype make the source text."""

    launch: Launch
    path: Path
    dtype: DType
    constants: Mapping[str, int | bool]
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int

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
    def launches(self) -> tuple[PlannedLaunch, ...]:
        """The steps that launch a kernel."""
        return tuple(step for step in self.steps if isinstance(step, PlannedLaunch))

    @property
    def scratch_bytes(self) -> int:
        """Bytes of temporary memory beside inputs and outputs."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.scratch.values())


def select(kernel: str | Kernel, operation: str, problem: Problem, limits: Limits) -> Kernel:
    """The record of a kernel given by name, by itself, or as "auto"."""
    if isinstance(kernel, Kernel):
        if kernel.operation != operation:
            raise ValueError(f"kernel {kernel.name} computes {kernel.operation}, not {operation}")
        return kernel
    if kernel == "auto":
        return _fastest(operation, problem, limits)
    if kernel not in LADDER[operation]:
        raise ValueError(
            f"kernel {kernel!r} is unknown; the {operation} kernels are "
            f"{', '.join(LADDER[operation])}, or 'auto'"
        )
    return LADDER[operation][kernel]


def plan(kernel: Kernel, problem: Problem, limits: Limits, **given: int) -> Plan:
    """The plan of a kernel for a problem on a device, with constants the caller may fix.

    Zero columns are planned as one, whose elements are 0.

    Raises ValueError for constants that the kernel does not have or that break its rules, and
    Unsupported if the kernel or the device cannot do the problem.
    """
    if any("d" in axes.split() for axes in OPERATIONS[kernel.operation].inputs.values()):
        problem = replace(problem, d=max(problem.d, 1), dv=max(problem.dv, 1))
    try:
        return _first_fit(kernel, problem, limits, given)
    except Unsupported as refused:
        remedy = _remedy(kernel, problem, limits, given)
        raise Unsupported(f"{refused}; {remedy}") from None


def can(kernel: Kernel, problem: Problem, limits: Limits) -> bool:
    """Whether the kernel can do the problem on the device with constants of its own choice."""
    try:
        _first_fit(kernel, problem, limits, {})
    except Unsupported:
        return False
    return True


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
        return kernel.folder.resolve() / file
    return file if launch.file else kernel.operation / file


def _fastest(operation: str, problem: Problem, limits: Limits) -> Kernel:
    """The kernel that was measured fastest among those that can do the problem on the device."""
    measured = [k for k in LADDER[operation].values() if problem.dtype.name in k.tflops]
    able = [k for k in measured if can(k, problem, limits)]
    if not able:
        raise Unsupported(f"no kernel can do {problem} on {limits.device}")
    return max(able, key=lambda kernel: _measured(kernel, problem))


def _measured(kernel: Kernel, problem: Problem) -> float:
    """What the kernel reached at the measured head dimension that is nearest by its ratio."""
    speeds = kernel.tflops[problem.dtype.name]
    return speeds[min(speeds, key=lambda d: abs(log(max(d, 1) / max(problem.d, 1))))]


def _remedy(kernel: Kernel, problem: Problem, limits: Limits, given: Mapping[str, int]) -> str:
    if given and can(kernel, problem, limits):
        return f"leave {', '.join(given)} to the plan"
    others = [k for k in LADDER[kernel.operation].values() if k is not kernel]
    able = [k.name for k in others if can(k, problem, limits)]
    return f"kernels that can: {', '.join(able)}" if able else "no other kernel can either"


def _first_fit(kernel: Kernel, problem: Problem, limits: Limits, given: Mapping[str, int]) -> Plan:
    """The plan with the first of the kernel's tiles that fits; the last one's refusal if none."""
    _check_able(kernel, problem, limits)
    _check_given(kernel, given)
    given = {name: int(value) for name, value in given.items()}
    refused: Exception | None = None
    for tile in kernel.tiles:
        constants = {**tile, **given}
        try:
            _check_rules(kernel, constants)
            return _with_constants(kernel, problem, limits, constants)
        except Unsupported as error:
            refused = error
        except ValueError as error:
            refused = refused or error
    assert refused is not None, "a kernel has at least one tile"
    raise refused


def _check_able(kernel: Kernel, problem: Problem, limits: Limits) -> None:
    """Refuses what the kernel cannot do, or the machine lacks, whatever the constants."""
    needed = {
        "causal": problem.causal is not None,
        "gqa": problem.heads != problem.kv_heads,
        "dv": problem.d != problem.dv,
    }
    lacking = [name for name in needed if needed[name] and name not in kernel.features]
    matmuls = any(isinstance(step, Matmul) for step in kernel.launches)
    if problem.dtype.name not in kernel.dtypes:
        reason = f"its dtypes are {', '.join(kernel.dtypes)}"
    elif lacking:
        reason = f"it lacks {', '.join(lacking)}"
    elif limits.arch is not None and int(limits.arch) < int(kernel.arch):
        reason = f"it needs sm_{kernel.arch}, {limits.device} is sm_{limits.arch}"
    elif matmuls and limits.no_matmul:
        reason = limits.no_matmul
    else:
        return
    raise Unsupported(f"{kernel.name} cannot do {problem}: {reason}")


def _check_given(kernel: Kernel, given: Mapping[str, int]) -> None:
    known = tuple(kernel.tiles[0])
    for name, value in given.items():
        if name not in known:
            raise ValueError(
                f"{kernel.name} has no constant {name!r}; it has {', '.join(known) or 'none'}"
            )
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r} is no tile size; give a whole number from 1")


def _check_rules(kernel: Kernel, constants: Mapping[str, int]) -> None:
    for rule, holds in kernel.rules.items():
        if not holds(SimpleNamespace(**constants)):
            raise ValueError(f"{kernel.name} with {_listed(constants)} breaks its rule: {rule}")


def _with_constants(
    kernel: Kernel, problem: Problem, limits: Limits, constants: Mapping[str, int]
) -> Plan:
    return Plan(
        kernel=kernel,
        problem=problem,
        constants=constants,
        steps=tuple(
            step if isinstance(step, Matmul) else _planned(kernel, step, problem, limits, constants)
            for step in kernel.steps(problem)
        ),
        scratch=_allocations(kernel.scratch, problem),
        outputs=_allocations(_outputs(kernel), problem),
    )


def _planned(
    kernel: Kernel,
    launch: Launch,
    problem: Problem,
    limits: Limits,
    constants: Mapping[str, int],
) -> PlannedLaunch:
    c = SimpleNamespace(**constants)
    blocks = launch.grid(problem, c)
    counts = tuple(blocks) if isinstance(blocks, Sequence) else (blocks,)
    threads = launch.threads(problem, c)
    shared_bytes = launch.shared(problem, c)
    _check_formulas(kernel, launch, problem, counts, threads, shared_bytes)
    x, y, z, *_ = (*counts, 1, 1)
    sizes = _listed({**constants, "d": problem.d, "dv": problem.dv})
    if threads > limits.threads:
        raise Unsupported(
            f"{kernel.name} with {sizes} needs {threads:,} threads a block; "
            f"{limits.device} allows {limits.threads:,}"
        )
    if any(size > most for size, most in zip((x, y, z), _LARGEST_GRID)):
        raise Unsupported(
            f"{kernel.name} with {sizes} needs a grid of {x:,} x {y:,} x {z:,} blocks; "
            "CUDA allows 2,147,483,647 x 65,535 x 65,535"
        )
    if shared_bytes > limits.shared_bytes:
        raise Unsupported(
            f"{kernel.name} with {sizes} needs {shared_bytes:,} bytes of shared memory a block; "
            f"{limits.device} has {limits.shared_bytes:,}"
        )
    return PlannedLaunch(
        launch=launch,
        path=source_path(kernel, launch),
        dtype=problem.dtype,
        constants={
            **constants,
            "d": problem.d,
            "dv": problem.dv,
            "causal": problem.causal is not None,
            "threads": threads,
            "shared_bytes": shared_bytes,
        },
        grid=(x, y, z),
        threads=threads,
        shared_bytes=shared_bytes,
    )


def _outputs(kernel: Kernel) -> Mapping[str, tuple[str, str]]:
    """The operation's outputs, without lse if the kernel does not compute it."""
    outputs = OPERATIONS[kernel.operation].outputs
    return {x: outputs[x] for x in outputs if x != "lse" or "lse" in kernel.features}


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
    dtypes = {"scalar": problem.dtype.numpy, "real": problem.dtype.sums}
    return {name: (problem.shape(axes), dtypes[kind]) for name, (axes, kind) in arrays.items()}


def _listed(constants: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in constants.items())
