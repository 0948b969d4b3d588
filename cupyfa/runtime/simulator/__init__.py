"""The simulator backend: compiles kernels for the CPU, runs them and checks every memory access.

docs/checking.md lists the errors that it detects, and those that it does not.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cupyfa.errors import CompileError
from cupyfa.planner import source as sources
from cupyfa.planner.plan import Limits, PlannedLaunch
from cupyfa.problem.problem import whole
from cupyfa.runtime.arrays import extent
from cupyfa.runtime.backend import Backend, Mapped, Region, Start
from cupyfa.runtime.call_cache import CallCache
from cupyfa.runtime.kernel_arguments import blank_map
from cupyfa.runtime.simulator import dynamic_shared, lines, machine

# Mirrors struct TensorMap of the simulator's tma.cuh; strides are in bytes.
_MAP = np.dtype(
    [("address", "u8"), ("strides", "i8", 3), ("sizes", "i4", 4), ("box", "i4", 2)]
    + [("itemsize", "i4"), ("unused", "V68")]
)

MOST_MULTIPROCESSORS = 1024
MULTIPROCESSORS = 4  # few, so that persistent blocks process several tiles


@cache
def _limits(device: int) -> Limits:
    """Returns the limits of an H100, except for its architecture and number of SMs."""
    return Limits("the simulator", dynamic_shared.CAPACITY, multiprocessors=MULTIPROCESSORS)


class Simulator(Backend):
    """A backend that runs kernels on the CPU: one fiber per CUDA thread, blocks on several cores.

    ``schedule`` seeds the order of threads (None: by index). ``workers`` is the number of blocks
    that run at a time (None: one per core). ``multiprocessors`` is the number of SMs for which
    persistent blocks and splits are planned (None: MULTIPROCESSORS). A block has as much shared
    memory as on an H100. A fault in a kernel raises SimulatorFault.
    """

    name = "simulator"
    address = staticmethod(lambda array: array.__array_interface__["data"][0])
    empty: Any = staticmethod(np.empty)
    writes_in_place = False  # a kernel that faults must leave the caller's arrays untouched
    compile_errors = (CompileError,)
    read_limits = staticmethod(_limits)

    def __init__(
        self,
        *,
        schedule: int | None = None,
        workers: int | None = None,
        multiprocessors: int | None = None,
    ) -> None:
        self.schedule = None if schedule is None else whole("schedule", schedule, 0)
        self.workers = None if workers is None else whole("workers", workers, 1)
        if multiprocessors is not None:
            whole("multiprocessors", multiprocessors, 1, MOST_MULTIPROCESSORS)
        self.multiprocessors = multiprocessors
        self.calls, self.spaces = CallCache(), {}

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Simulator, **self._asked()), ()

    def __repr__(self) -> str:
        return f"<simulator: schedule {self.schedule}, workers {self.workers}>"

    @property
    def limits(self) -> Limits:
        usual, asked = super().limits, self.multiprocessors
        return usual if asked is None else replace(usual, multiprocessors=asked)

    def owns(self, array: Any) -> bool:
        return isinstance(array, np.ndarray)

    def upload(self, array: np.ndarray) -> np.ndarray:
        return array

    def download(self, array: Any) -> np.ndarray:
        return array

    def view(self, memory: Any, shape: Sequence[int], dtype: np.dtype, offset: int, strides: Any):
        return np.ndarray(shape, dtype, memory, offset, strides)

    def at(self, address: int, shape: Sequence[int], dtype: np.dtype, strides: Any) -> np.ndarray:
        low, high = extent(as_strided(np.empty(0, dtype), shape, strides))
        memory: Any = (ctypes.c_char * (high - low)).from_address(address + low)
        return np.ndarray(shape, dtype, memory, -low, strides)

    def tensor_map(self, mapped: Mapped) -> np.ndarray:
        made, m = blank_map(), mapped
        made.view(_MAP)[...] = (m.address, m.strides, m.sizes, m.box, m.itemsize, b"")
        return made

    def compile_launch(self, launch: PlannedLaunch) -> machine.CompiledKernel:
        text, folders = sources.text(launch), sources.include_folders(launch)
        try:
            is_own = launch.path.is_absolute()  # a kernel outside the library
            return machine.build(text, folders, launch.entry, inlines=is_own)
        except CompileError as error:
            if re.search(rf"{machine.ENTRY}:\d+:\d+: error: .*\b{launch.entry}\b", str(error)):
                raise sources.without_entry(launch) from None
            raise

    def starter(
        self, kernel: Any, launch: PlannedLaunch, sizes: Sequence[int], regions: Sequence[Region]
    ) -> Start:
        block = launch.grid, launch.threads, launch.shared_bytes
        return machine.starter(
            kernel,
            sizes,
            regions,
            *block,
            self.schedule,
            self.workers,
            early=launch.begins_early,
            waits_first=bool(launch.keeps),
            one_waits=bool(launch.unawaited),
        )

    def variable(self, prepared: Any, name: str, size: int) -> np.ndarray:
        found = (ctypes.c_uint8 * size).in_dll(prepared.code, name)
        return np.ctypeslib.as_array(found).view(np.uint8)

    def matmul(self, a: Any, b: Any, out: Any, scale: float, *, tf32: bool = False) -> None:
        sums = np.float64 if out.dtype == np.float64 else np.float32
        group = a.shape[1] // b.shape[1] if b.shape[1] else 1
        with np.errstate(all="ignore"):  # infinities and NaN are valid data
            product = a.astype(sums) @ b.astype(sums).repeat(group, axis=1)
            if product.shape != out.shape:
                batch, heads, *matrix = out.shape
                product = product.reshape(batch, heads, a.shape[1] // heads, *matrix).sum(axis=2)
            out[...] = product * sums(scale)

    def time(self, call: Callable[[], Any], *, cold: bool = False) -> float:
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)

    def reordered(self, seed: int) -> Simulator:
        return self.like(schedule=seed)

    def like(self, **changes: int | None) -> Simulator:
        """Returns a copy of this simulator with changed settings."""
        return Simulator(**{**self._asked(), **changes})

    def _asked(self) -> dict[str, int | None]:
        return {x: getattr(self, x) for x in ("schedule", "workers", "multiprocessors")}

    def versions(self) -> dict[str, str]:
        return {"compiler": machine.compiler_version().splitlines()[0]}


def try_out() -> str:
    """Compiles and runs a trial kernel for ``doctor``; returns a description of the compiler."""
    x = np.ones(32, np.float32)
    never_the_same = f"// {time.time_ns()}\n"
    text = 'extern "C" __global__ void trial(float* x) { x[threadIdx.x] += 1; }'
    kernel = machine.build(never_the_same + text, (), "trial")
    argument = np.array([x.ctypes.data])
    table = np.array([argument.ctypes.data])
    regions = [Region("x", 0, 0, x.nbytes)]
    try:
        machine.starter(kernel, [8], regions, (1, 1, 1), 32, 0)(None, table.ctypes.data, 0)
    finally:
        kernel.path.unlink(missing_ok=True)
    if (x != 2).any():
        raise RuntimeError(
            "a test kernel returned a wrong result; set CUPYFA_COMPILER to another compiler"
        )
    return machine.compiler_choice() + ("" if lines.can_read() else f"; {lines.REMEDY}")
