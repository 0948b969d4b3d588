"""The types of planning: devices, launches and plans."""

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
# The struct Tensor of tensor.cuh, strides in elements.
TENSOR = np.dtype([("data", "u8"), ("batch", "i8"), ("head", "i8"), ("row", "i8")])
NO_MODS = "struct Mods {};"  # of scores that are not modified
Allocations = Mapping[str, tuple[tuple[int, ...], np.dtype]]


@dataclass(frozen=True)
class Tuned:
    """The constants of a kernel that were measured fastest on a device, and their TFLOP/s."""

    kernel: str
    folder: str | None  # of a user's kernel
    dtype: str  # the problem's ``arithmetic``
    d: int
    dv: int
    constants: tuple[tuple[str, int], ...]
    tflops: float


@dataclass(frozen=True)
class Limits:
    """The limits of a device for one block, its name in messages, and the constants tuned on it."""

    device: str
    shared_bytes: int
    threads: int = 1024
    arch: str | None = None  # the compute capability; None where anything runs (the simulator)
    no_matmul: str | None = None  # why matrix products are missing, if they are
    multiprocessors: int = 132  # of an H100 SXM
    clock: float | None = None  # the highest one, in GHz, where known
    tuned: tuple[Tuned, ...] = field(default=(), hash=False, repr=False)


@dataclass(frozen=True, repr=False)
class Argument(Shown):
    """One argument of a kernel: an array of the call, or a value that the plan decides."""

    name: str
    form: str = ""  # how an array is passed: "" a Tensor, "data" a pointer, "map" a TMA tensor map
    value: Any = None  # a number or a NumPy record; None for an array
    # For a Tensor: the axes that give its strides of batch, head and row; None for stride 0.
    strides: tuple[int | None, ...] = FIRST_AXES
    arrays: tuple[tuple[str, int], ...] = ()  # of a struct: name and offset of each


@dataclass(frozen=True)
class Recording:
    """The blocks and events that a launch records: see kernels/timeline/timeline.cuh."""

    first: int  # the first block that is recorded
    blocks: int  # the number of recorded blocks
    capacity: int  # the most entries per warp
    detailed: bool = True  # records every phase; else only begin, end and results of blocks


@dataclass(frozen=True, repr=False)
class PlannedLaunch(Shown):
    """One launch with every number decided; its file, constants and dtypes make the source text."""

    launch: Launch
    path: Path
    dtype: DType
    operand: DType  # the dtype that inputs are rounded to for products
    result: DType  # the dtype of O, dQ, dK and dV
    constants: Mapping[str, int | float]
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    boxes: Mapping[str, int] = field(default_factory=dict)  # the rows per box, by array
    arguments: tuple[Argument, ...] = ()
    mods: str = NO_MODS  # C++ source of struct Mods and the expressions' functions
    target: str | None = None  # the architecture to compile for, as "90a", if not the device's
    recording: Recording | None = None  # what it records of its run, if anything
    begins_early: bool = False  # whether the device can begin it while the launch before it ends
    keeps: frozenset[str] = frozenset()  # arrays that the next launch reads without waiting

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
        """A launch outside the ladder: a one-dimensional grid, constants["threads"] per block."""
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
        """The warps of a block."""
        return cdiv(self.threads, 32)

    @property
    def numbers(self) -> Mapping[str, int]:
        """The arguments that only this launch has, by name."""
        return {x.name: int(x.value) for x in self.arguments if x.name in self.launch.numbers}


def nearest_d(measured: Iterable[int], d: int) -> int:
    """Of measured head dimensions the one with the nearest ratio to d."""
    return min(measured, key=lambda x: abs(log(max(x, 1) / max(d, 1))))


@dataclass(frozen=True, repr=False)
class Plan:
    """Everything one call does, decided before it is done."""

    kernel: Kernel
    problem: Problem
    constants: Mapping[str, int]
    steps: tuple[PlannedLaunch | Matmul, ...]
    scratch: Allocations
    outputs: Allocations
    floats: Mapping[str, float] = field(default_factory=dict)  # arguments that the kernel declares

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
        """What it computes."""
        return self.kernel.computes({**self.constants, **self.floats})

    @property
    def rounding(self) -> str | None:
        """The precision that operands are rounded to by design, if to any."""
        return rounding_of(self.kernel, self.problem)

    @property
    def tflops(self) -> tuple[int, float] | None:
        """The TFLOP/s of its kernel in the record, measured on an H100 with this d; None if not.

        "auto" compares these where nothing was measured on the device itself.
        """
        measured = self.kernel.tflops.get(self.problem.arithmetic)
        if not measured:
            return None
        d = nearest_d(measured, self.problem.d)
        return d, measured[d]

    @property
    def speed(self) -> str:
        """The same in words; empty if not measured."""
        if self.tflops is None:
            return ""
        (d, tflops), kind = self.tflops, self.problem.arithmetic
        return f"{tflops:.3g} TFLOP/s on an H100 with {kind}{f', d={d}' if d else ''}"

    @property
    def launches(self) -> tuple[PlannedLaunch, ...]:
        return tuple(step for step in self.steps if isinstance(step, PlannedLaunch))

    @property
    def programs(self) -> tuple[PlannedLaunch, ...]:
        """The launches that have to be compiled: the first of those that rounds repeat."""
        first: dict[int, PlannedLaunch] = {}
        for x in self.launches:
            first.setdefault(id(x.launch), x)
        return tuple(first.values())

    def rounds_of(self, program: PlannedLaunch) -> int:
        return sum(x.launch is program.launch for x in self.launches)

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
        """The arrays that are copied by boxes: their rows begin at multiples of BOX_ALIGNMENT."""
        return {name for launch in self.launches for name in launch.boxes}

    @cached_property
    def paired(self) -> dict[str, int]:
        """Arrays that kernels read several elements at a time, and the bytes of each such read."""
        found = self.problem.modifiers
        copied = found.held if any(x.constants.get("bias_bytes") for x in self.programs) else None
        return {
            x.input: BOX_ALIGNMENT if x is copied else 2 * x.numpy.itemsize
            for x in found.arrays
            if x.in_pairs
        }

    @cached_property
    def pointed(self) -> set[str]:
        """The arrays that are passed as bare pointers, and therefore must be contiguous."""
        passed = {x.name for launch in self.launches for x in launch.arguments if x.form == "data"}
        return passed | {x.input for x in self.problem.modifiers.arrays if x.name in LENGTHS}

    @cached_property
    def arrays(self) -> Allocations:
        p = self.problem
        inputs = self.operation.inputs_of(p)
        own = {name: (x.shape(p), x.dtype(p)) for name, x in inputs.items()}
        return {**own, **self.outputs, **self.scratch}

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array's memory, whose rows may be padded."""
        shape, dtype = self.arrays[name]
        if name not in self.boxed and name not in self.paired:
            return shape
        return (*shape[:-1], aligned_width(shape[-1], dtype.itemsize))

    def stored_bytes(self, name: str) -> int:
        return prod(self.stored_shape(name)) * self.arrays[name][1].itemsize


def aligned_width(columns: int, itemsize: int) -> int:
    """Rounds a number of columns up until they fill a multiple of BOX_ALIGNMENT bytes."""
    return round_up(columns, max(BOX_ALIGNMENT // itemsize, 1))


def rounding_of(kernel: Kernel, problem: Problem) -> str | None:
    if problem.precision is None:
        return kernel.rounding
    return None if problem.precision == "float32" else problem.precision
