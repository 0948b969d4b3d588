"""The backend made of a host C++ compiler: the same kernels on the CPU, every access checked.

What it does not see, or sees otherwise than a device:

- Races through global memory, within a block or between blocks.
- A race between lanes of a warp of which only some met in __syncwarp: a partial mask orders the
  whole warp.
- Races of one-byte accesses: two threads may use the two bytes that share one record.
- A loop that spins on memory until another thread writes it: threads change only in collectives,
  so the launch hangs.
- Recursion that overflows a thread's stack (256 KB): it hits a guard page, and the process ends.
- Threads that return while others wait for them in a barrier: reported as a fault, though devices
  since sm_70 forgive it.
- The limit of 48 KB on static shared memory.
- `extern __shared__` in a header or behind a macro: only in a kernel's own text does it link.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cupyfa import sources
from cupyfa.backends import Backend, span
from cupyfa.backends.simulator import dynamic_shared, machine
from cupyfa.planning import Limits, PlannedLaunch


class Simulator(Backend):
    """Runs kernels on the CPU, one fiber per thread, blocks spread over the cores.

    ``schedule`` is a seed for another order of the threads (None: in turn), ``workers`` the
    number of blocks that run at a time (None: one per core). A block has as much shared memory
    as on an H100. Faults in the kernel raise machine.SimulatorFault.
    """

    name = "simulator"
    limits = Limits(device="the simulator", shared_bytes=dynamic_shared.CAPACITY)

    def __init__(self, *, schedule: int | None = None, workers: int | None = None) -> None:
        self.schedule = schedule
        self.workers = workers

    def owns(self, array: Any) -> bool:
        return isinstance(array, np.ndarray)

    def upload(self, array: np.ndarray) -> np.ndarray:
        return array

    def download(self, array: Any) -> np.ndarray:
        return array

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return np.empty(shape, dtype)

    def view(self, memory: Any, shape: Sequence[int], dtype: np.dtype, offset: int, strides: Any):
        return np.ndarray(shape, dtype, memory, offset, strides)

    def address(self, array: Any) -> int:
        return array.ctypes.data

    def prepare(self, launch: PlannedLaunch) -> machine.CompiledKernel:
        return machine.build(sources.text(launch), sources.include_folders(launch), launch.entry)

    def launch(
        self, prepared: Any, launch: PlannedLaunch, arguments: list, arrays: Mapping
    ) -> None:
        machine.run(
            prepared,
            [np.asarray(argument) for argument in arguments],
            grid=launch.grid,
            threads=launch.threads,
            shared_bytes=launch.shared_bytes,
            buffers=[machine.Buffer(name, *span(self, array)) for name, array in arrays.items()],
            schedule=self.schedule,
            workers=self.workers,
        )

    def matmul(self, a: Any, b: Any, out: Any, scale: float) -> None:
        sums = np.float64 if out.dtype == np.float64 else np.float32
        group = a.shape[1] // b.shape[1] if b.shape[1] else 1
        with np.errstate(all="ignore"):  # infinities and NaN are data here
            product = a.astype(sums) @ b.astype(sums).repeat(group, axis=1)
            out[...] = product * sums(scale)

    def time(self, call: Callable[[], Any], repeat: int) -> list[float]:
        milliseconds = []
        for _ in range(repeat):
            start = time.perf_counter()
            call()
            milliseconds.append(1e3 * (time.perf_counter() - start))
        return milliseconds

    def versions(self) -> dict[str, str]:
        return {"compiler": machine.compiler_version()}
