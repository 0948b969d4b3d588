"""What the formulas of a record make of a problem and constants: launches, scratch, outputs.

Pure integers: nothing here needs a GPU or a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite, prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from cupyfa.dtypes import DTYPES, DType
from cupyfa.errors import Unsupported
from cupyfa.ladder.kernel import MOST_BOX_ROWS, Constant, Kernel, Launch, Matmul
from cupyfa.operations import OPERATIONS
from cupyfa.planner.plan import Allocations, Argument, Limits, Plan, PlannedLaunch, rounding_of
from cupyfa.problem import MOST_ELEMENTS, Problem

_LARGEST_GRID = (2**31 - 1, 65535, 65535)
# The struct Sizes of extent.cuh, and a struct without members, which has one byte in C++.
SIZES = np.dtype([(name, "i4") for name in ("M", "N", "causal_offset", "window_offset")])
_NO_MODS = np.zeros((), "V1")
_BYTES = {"": "V32", "data": "V8", "map": "V128"}  # of an array's argument, by its form
_MOST_ROUNDS = 65536  # whose launches are planned one by one


def plan_of(kernel: Kernel, problem: Problem, limits: Limits, constants: Mapping[str, int]) -> Plan:
    """The plan with just these constants.

    Raises ValueError for constants that break a rule and formulas that give nonsense, Unsupported
    for launches that are too large for the device.
    """
    _check_rules(kernel, problem, constants)
    steps = evaluated(kernel, "when", kernel.steps, problem)
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


def source_path(kernel: Kernel, launch: Launch) -> Path:
    """A launch's file: in the folder of a kernel from outside, else relative to kernels/."""
    file = Path(launch.file or f"{launch.entry}.cu")
    if kernel.folder is not None:
        return Path(kernel.folder).resolve() / file
    return file if launch.file else kernel.operation / file


def _check_rules(kernel: Kernel, problem: Problem, constants: Mapping[str, int]) -> None:
    c = SimpleNamespace(**constants, d=problem.d, dv=problem.dv)
    for rule, holds in kernel.rules.items():
        if not evaluated(kernel, f"rule {rule!r}", holds, c):
            raise ValueError(
                f"{kernel.name} with {_listed(constants)} breaks its rule: {rule}; "
                "choose others, or leave them to the plan"
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
    rounds = _whole(kernel, "rounds", kernel.rounds, problem, c, least=1)
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
    return DTYPES.get(rounding_of(kernel, problem) or "", problem.dtype)


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
    blocks = evaluated(kernel, f"grid of {launch.entry}", launch.grid, problem, of_grid)
    counts = tuple(blocks) if isinstance(blocks, Sequence) else (blocks,)
    threads = evaluated(kernel, f"threads of {launch.entry}", launch.threads, problem, c)
    shared_bytes = evaluated(kernel, f"shared of {launch.entry}", launch.shared, problem, c)
    _check_formulas(kernel, launch, problem, counts, threads, shared_bytes)
    x, y, z, *_ = (*counts, 1, 1)
    what = f"{kernel.name} with {_listed({**constants, 'd': problem.d, 'dv': problem.dv})}"
    _check_limits(what, limits, (x, y, z), threads, shared_bytes)
    return PlannedLaunch(
        launch=launch,
        path=source_path(kernel, launch),
        dtype=problem.dtype,
        operand=_operand(kernel, problem),
        constants={
            **constants,
            **{
                name: _constant(kernel, f"{name} of {launch.entry}", formula, problem, c)
                for name, formula in launch.constants.items()
            },
            "d": problem.d,
            "dv": problem.dv,
            **problem.options.constants,
            "threads": threads,
            "shared_bytes": shared_bytes,
        },
        grid=(x, y, z),
        threads=threads,
        shared_bytes=shared_bytes,
        boxes=_boxes(kernel, launch, problem, c),
        mods=tuple(problem.options.mods),
        arguments=_arguments(kernel, launch, problem, of_grid),
        target=kernel.target,
    )


def _check_limits(
    what: str, limits: Limits, grid: tuple[int, int, int], threads: int, shared_bytes: int
) -> None:
    """Whether a device grants a launch so much."""
    if threads > limits.threads:
        raise Unsupported(
            f"{what} needs {threads:,} threads a block; {limits.device} allows {limits.threads:,}",
            "too many threads a block",
        )
    if any(size > most for size, most in zip(grid, _LARGEST_GRID)):
        x, y, z = grid
        raise Unsupported(
            f"{what} needs a grid of {x:,} x {y:,} x {z:,} blocks; "
            "CUDA allows 2,147,483,647 x 65,535 x 65,535",
            "too many blocks",
        )
    if shared_bytes > limits.shared_bytes:
        raise Unsupported(
            f"{what} needs {shared_bytes:,} bytes of shared memory a block; "
            f"{limits.device} has {limits.shared_bytes:,}",
            "too little shared memory",
        )


def _boxes(
    kernel: Kernel, launch: Launch, problem: Problem, c: SimpleNamespace
) -> Mapping[str, int]:
    """The rows of a launch's boxes."""
    return {
        name: _whole(
            kernel, f"rows of a box of {name}", formula, problem, c, least=1, most=MOST_BOX_ROWS
        )
        for name, formula in launch.boxes.items()
    }


def _arguments(
    kernel: Kernel, launch: Launch, problem: Problem, c: SimpleNamespace
) -> tuple[Argument, ...]:
    """The arguments of a launch, in order; those that are no arrays with their values.

    An optional input that this problem has not is passed as zeros, so that a kernel has the same
    parameters for every problem.
    """
    operation = OPERATIONS[kernel.operation]
    arrays = [*operation.inputs, *_outputs(kernel), *kernel.scratch]
    values = _values(problem) | {
        name: np.int32(_whole(kernel, name, formula, problem, c, least=-(2**31), most=2**31 - 1))
        for name, formula in launch.numbers.items()
    }
    for name, form in launch.arrays:
        if name not in arrays and (form or name not in values):
            raise ValueError(
                f"{launch.entry}: argument {name!r} is unknown; arrays are "
                f"{', '.join(arrays)}; numbers and structs are {', '.join(values)}"
            )
    absent = operation.inputs.keys() - operation.inputs_of(problem)
    return tuple(
        Argument(name, form, np.zeros((), _BYTES[form]))
        if name in absent
        else Argument(name, form, None if name in arrays else values[name])
        for name, form in launch.arrays
    )


def _values(p: Problem) -> dict[str, Any]:
    """The values of the arguments that every kernel may have, by name."""
    ends = {"causal_offset": p.causal_offset, "window_offset": p.window_offset}
    integers = {
        **{name: getattr(p, name) for name in ("M", "N", "heads", "kv_heads", "batch", "group")},
        **ends,
        "diagonal": p.causal_offset,  # the names that records had for these before
        "lower": p.window_offset,
    }
    sizes, mods = np.array((p.M, p.N, *ends.values()), SIZES), p.options.mods
    layout = np.dtype([(name, p.dtype.sums) for name in mods])
    return {
        **{name: np.int32(value) for name, value in integers.items()},
        "scale": p.dtype.sums.type(p.scale),
        "sizes": sizes,
        "mods": np.array(tuple(mods.values()), layout) if mods else _NO_MODS,
    }


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
            shape = (_whole(kernel, f"scratch {name}", axes, problem, c, least=0),)
        if prod(shape) >= MOST_ELEMENTS:
            size = f"{prod(shape):,} elements"
            reason = f"its scratch would have {size}, and an array has fewer than 2**59"
            raise Unsupported(f"{kernel.name} cannot do {problem}: {reason}", reason)
        arrays[name] = (shape, dtypes[kind])
    return arrays


def evaluated(kernel: Kernel, what: str, formula: Callable[..., Any], *values: Any) -> Any:
    """What a record's formula gives. Raises ValueError if it raises anything."""
    try:
        return formula(*values)
    except Exception as error:
        raise ValueError(
            f"{kernel.name}: the record's {what} fails with {type(error).__name__}: {error}; "
            f"it was called with {', '.join(map(str, values))}"
        ) from error


def _whole(
    kernel: Kernel,
    what: str,
    formula: Callable[..., Any],
    problem: Problem,
    c: SimpleNamespace,
    *,
    least: int,
    most: int | None = None,
) -> int:
    """A whole number that a record's formula gives. Raises ValueError for anything else."""
    number = evaluated(kernel, what, formula, problem, c)
    whole = isinstance(number, int | np.integer)
    if not whole or number < least or (most is not None and number > most):
        raise ValueError(
            f"{kernel.name}: the record's formula for {what} gives {number!r} for {problem}; it "
            f"must give a whole number from {least}{'' if most is None else f' to {most}'}"
        )
    return int(number)


def _constant(
    kernel: Kernel, what: str, formula: Constant, problem: Problem, c: SimpleNamespace
) -> int | float:
    """A constant for a launch's text: a bool, a whole number, or a float in single precision."""
    value = evaluated(kernel, what, formula, problem, c)
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer) and -(2**31) <= value < 2**31:
        return int(value)
    if isinstance(value, float | np.floating):
        with np.errstate(over="ignore"):
            single = float(np.float32(value))
        if isfinite(single):
            return single
    raise ValueError(
        f"{kernel.name}: the record's constant {what} is {value!r} for {problem}; give a bool, a "
        "whole number of 32 bits or a finite float"
    )


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
