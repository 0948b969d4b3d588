"""Types of the planner: device limits, planned launches and plans."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import log, prod
from pathlib import Path
from typing import Any, Self

import numpy as np

from cupyfa.ladder.kernel import Kernel, Launch, Matmul, cdiv
from cupyfa.ladder.operations import Operation
from cupyfa.numerics.shown import Shown, html_table
from cupyfa.problem.dtypes import DType
from cupyfa.problem.optional_inputs import LENGTHS
from cupyfa.problem.problem import Problem, round_up

BOX_ALIGNMENT = 16  # bytes
FIRST_AXES = (0, 1, 2)
# struct Tensor of tensor.cuh; strides count elements.
TENSOR = np.dtype([("data", "u8"), ("batch", "i8"), ("head", "i8"), ("row", "i8")])
NO_MODS = "struct Mods {};"  # for unmodified scores
_FIRST_WITH_EARLY_LAUNCHES = 90  # first compute capability with programmatic dependent launch
Allocations = Mapping[str, tuple[tuple[int, ...], np.dtype]]
Slices = Mapping[str, tuple[slice, ...]]  # indices by array name; whole arrays are omitted


@dataclass(frozen=True)
class Tuned:
    """A kernel's fastest constants on a device, with the measured TFLOP/s."""

    kernel: str
    folder: str | None  # folder of a user's kernel; None for the ladder
    dtype: str  # ``Problem.arithmetic``, such as "float16"
    d: int
    dv: int
    constants: tuple[tuple[str, int], ...]
    tflops: float


@dataclass(frozen=True)
class Limits:
    """Properties of a device that planning depends on, and constants tuned for the device."""

    device: str  # the device's name in messages
    shared_bytes: int
    threads: int = 1024
    arch: str | None = None  # compute capability; None for the simulator, which runs any kernel
    no_matmul: str | None = None  # why cuBLAS products are unavailable; None if they are available
    multiprocessors: int = 132  # number of SMs; by default that of an H100 SXM
    clock: float | None = None  # maximum clock in GHz, if known
    tuned: tuple[Tuned, ...] = field(default=(), hash=False, repr=False)

    def may_begin_early(self, launch: Launch) -> bool:
        """Returns whether a launch uses programmatic dependent launch on this device."""
        has_it = self.arch is None or int(self.arch) >= _FIRST_WITH_EARLY_LAUNCHES
        return launch.begins_early and has_it


@dataclass(frozen=True, repr=False)
class Argument(Shown):
    """An argument of a kernel: an array of the call, or a value that the plan computes."""

    name: str
    form: str = ""  # array arguments: "" for a Tensor, "data" for a pointer, "map" for a TMA map
    value: Any = None  # a number or a NumPy record; None for an array
    # For a Tensor: the array axes that provide its batch, head and row stride; None for stride 0.
    strides: tuple[int | None, ...] = FIRST_AXES
    arrays: tuple[tuple[str, int], ...] = ()  # names and offsets of the arrays inside a struct


@dataclass(frozen=True)
class Recording:
    """Selects the blocks and events that a launch records; see kernels/timeline/timeline.cuh."""

    first: int  # index of the first recorded block
    blocks: int  # number of recorded blocks
    capacity: int  # maximum number of entries per warp
    detailed: bool = True  # whether to record every phase, or only begin, end and results of blocks


@dataclass(frozen=True, repr=False)
class PlannedLaunch(Shown):
    """A launch with evaluated formulas; file, constants and dtypes determine its source text."""

    launch: Launch
    path: Path
    dtype: DType
    operand: DType  # dtype to which inputs are rounded for matrix products
    result: DType  # dtype of O, dQ, dK and dV
    constants: Mapping[str, int | float]
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    boxes: Mapping[str, int] = field(default_factory=dict)  # rows per TMA box, by array name
    box_heads: Mapping[str, int] = field(default_factory=dict)  # heads per box, if more than one
    arguments: tuple[Argument, ...] = ()
    mods: str = NO_MODS  # C++ source of struct Mods and of the expressions
    target: str | None = (
        None  # target architecture, such as "90a"; None for the architecture of the device
    )
    recording: Recording | None = None
    begins_early: bool = False  # whether the launch uses programmatic dependent launch
    unawaited: frozenset[str] = frozenset()  # arrays that it reads without waiting, if it does
    keeps: frozenset[str] = frozenset()  # arrays that the next launch may read without waiting
    slices: Slices = field(default_factory=dict)  # the heads that the launch sees

    @classmethod
    def of_helper(
        cls,
        launch: Launch,
        dtype: DType,
        blocks: int,
        constants: Mapping[str, int | float],
        *arguments: Argument,
        **more: Any,
    ) -> Self:
        """Makes a launch of a helper kernel, with a 1-D grid of blocks of constants["threads"]."""
        return cls(
            launch=launch,
            path=Path(str(launch.file)),
            dtype=dtype,
            operand=dtype,
            result=dtype,
            constants=constants,
            grid=(blocks, 1, 1),
            threads=int(constants["threads"]),
            shared_bytes=0,
            arguments=arguments,
            **more,
        )

    @property
    def entry(self) -> str:
        return self.launch.entry

    @property
    def warps(self) -> int:
        return cdiv(self.threads, 32)

    @property
    def numbers(self) -> Mapping[str, int]:
        """Values of the numbers that the launch's record declares, by name."""
        return {x.name: int(x.value) for x in self.arguments if x.name in self.launch.numbers}


@dataclass(frozen=True, eq=False, repr=False)
class PlannedMatmul(Matmul):
    """A matrix product of all heads, or of those that ``slices`` selects."""

    slices: Slices = field(default_factory=dict)


def nearest_d(measured: Iterable[int], d: int) -> int:
    """Returns the measured head dimension whose ratio to d is closest to 1."""
    return min(measured, key=lambda x: abs(log(max(x, 1) / max(d, 1))))


@dataclass(frozen=True, repr=False)
class Plan:
    """The launches, buffers and arguments of one call, computed before it runs."""

    kernel: Kernel
    problem: Problem
    constants: Mapping[str, int]
    steps: tuple[PlannedLaunch | PlannedMatmul, ...]
    scratch: Allocations
    outputs: Allocations
    floats: Mapping[str, float] = field(default_factory=dict)  # float arguments of the record

    def __repr__(self) -> str:
        tiles = "".join(f" {name}={value}" for name, value in self.constants.items())
        names = ", ".join(dict.fromkeys(x.entry for x in self.programs)) or "nothing"
        return f"<plan of {self.kernel.name}{tiles}: {self.problem}; launches {names}>"

    def _repr_html_(self) -> str:
        launches = [
            {"launch": x.entry, "grid": x.grid, "threads": x.threads, "shared": x.shared_bytes}
            for x in self.launches
        ]
        about = {"kernel": self.kernel.name, "tile": self.constants, "problem": str(self.problem)}
        return html_table([about]) + html_table(launches)

    @cached_property
    def operation(self) -> Operation:
        """The operation that the kernel computes with these constants."""
        return self.kernel.computes({**self.constants, **self.floats})

    @property
    def rounding(self) -> str | None:
        """The precision to which the kernel rounds operands by design, if any."""
        return rounding_of(self.kernel, self.problem)

    @property
    def tflops(self) -> tuple[int, float] | None:
        """The nearest measured d, and the kernel's TFLOP/s for it on an H100; None if unmeasured.

        "auto" compares these speeds on devices without measurements.
        """
        measured = self.kernel.tflops.get(self.problem.arithmetic)
        if not measured:
            return None
        d = nearest_d(measured, self.problem.d)
        return d, measured[d]

    @property
    def speed(self) -> str:
        """``tflops`` as text for messages; empty without a measurement."""
        if self.tflops is None:
            return ""
        (d, tflops), kind = self.tflops, self.problem.arithmetic
        return f"{tflops:.3g} TFLOP/s on an H100 with {kind}{f', d={d}' if d else ''}"

    @property
    def launches(self) -> tuple[PlannedLaunch, ...]:
        return tuple(step for step in self.steps if isinstance(step, PlannedLaunch))

    @property
    def programs(self) -> tuple[PlannedLaunch, ...]:
        """The launches to compile; every round runs the program of the first round."""
        first: dict[int, PlannedLaunch] = {}
        for x in self.launches:
            first.setdefault(id(x.launch), x)
        return tuple(first.values())

    def rounds_of(self, program: PlannedLaunch) -> int:
        return sum(x.launch is program.launch for x in self.launches)

    @property
    def unordered(self) -> set[str]:
        """Outputs that are summed in arbitrary order, so that their last bits may differ."""
        more = self.kernel.unordered_with.items()
        found = (x for name, x in more if any(y.constants.get(name) for y in self.launches))
        return set(self.kernel.unordered).union(*found)

    @property
    def scratch_bytes(self) -> int:
        return sum(map(self.stored_bytes, self.scratch))

    @property
    def input_bytes(self) -> int:
        return sum(x.bytes(self.problem) for x in self.operation.inputs_of(self.problem).values())

    @property
    def output_bytes(self) -> int:
        return sum(map(self.stored_bytes, self.outputs))

    @cached_property
    def boxed(self) -> set[str]:
        """Arrays that TMA copies box by box, and whose rows are aligned to BOX_ALIGNMENT."""
        return {name for launch in self.launches for name in launch.boxes}

    @cached_property
    def paired(self) -> dict[str, int]:
        """Arrays that kernels load with vector loads, and the bytes of each load."""
        found = self.problem.modifiers
        copied = found.held if any(x.constants.get("bias_bytes") for x in self.programs) else None
        return {
            x.input: BOX_ALIGNMENT if x is copied else 2 * x.numpy.itemsize
            for x in found.arrays
            if x.in_pairs
        }

    @cached_property
    def pointed(self) -> set[str]:
        """Arrays that are passed as bare pointers and therefore must be contiguous."""
        passed = {x.name for launch in self.launches for x in launch.arguments if x.form == "data"}
        return passed | {x.input for x in self.problem.modifiers.arrays if x.name in LENGTHS}

    @cached_property
    def arrays(self) -> Allocations:
        p = self.problem
        inputs = self.operation.inputs_of(p)
        own = {name: (x.shape(p), x.dtype(p)) for name, x in inputs.items()}
        return {**own, **self.outputs, **self.scratch}

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of an array in memory, including padding of rows."""
        shape, dtype = self.arrays[name]
        if name not in self.boxed and name not in self.paired:
            return shape
        return (*shape[:-1], aligned_width(shape[-1], dtype.itemsize))

    def stored_bytes(self, name: str) -> int:
        return prod(self.stored_shape(name)) * self.arrays[name][1].itemsize


def aligned_width(columns: int, itemsize: int) -> int:
    """Rounds a number of columns up to a multiple of BOX_ALIGNMENT bytes."""
    return round_up(columns, max(BOX_ALIGNMENT // itemsize, 1))


def rounding_of(kernel: Kernel, problem: Problem) -> str | None:
    if problem.precision is None:
        return kernel.rounding
    return None if problem.precision == "float32" else problem.precision
