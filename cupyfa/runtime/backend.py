"""The interface of a backend, which manages memory and launches kernels.

There are two backends: ``cuda`` uses CuPy arrays; ``simulator`` compiles kernels for the CPU and
uses NumPy arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np

from cupyfa.planner.plan import Limits, PlannedLaunch
from cupyfa.runtime.call_cache import CallCache

Form = tuple[Any, ...]
# Starts a launch: start(stream, address of the table of argument addresses, 0). The last argument
# is cuLaunchKernel's parameter ``extra``, which is unused.
Start = Callable[[int | None, int, int], Any]


class Region(NamedTuple):
    """Memory that a launch may access through one of its array arguments."""

    name: str
    argument: int  # index of the argument that contains the address of element 0
    low: int  # bytes from element 0 to the start of the region
    bytes: int
    itemsize: int = 1  # bytes of an element
    constant: bool = False  # whether the launch only reads the region
    offset: int = 0  # bytes from the start of the argument to that address
    awaited: bool = False  # whether the launch must wait for earlier launches before any access
    kept: bool = False  # whether the next launch reads the region without waiting for this launch


class Mapped(NamedTuple):
    """The contents of a tensor map: sizes, and strides in bytes, innermost first."""

    address: int  # 0 for an array without elements
    dtype: str
    sizes: tuple[int, int, int, int]  # columns, rows, heads, batch; or columns, heads, rows, batch
    strides: tuple[int, int, int]  # of the axes after the columns
    box: tuple[int, int]  # sizes of a box along the second and third axis

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 1 if self.dtype == "uint8" else 2


class Mark(Protocol):
    """A point in a lane's queue of work, like a CUDA event."""

    @property
    def done(self) -> bool:
        """Whether all work queued before the mark is done."""

    def wait(self) -> None:
        """Waits until all work queued before the mark is done."""


class Lane(Protocol):
    """A stream, which runs its work in order and concurrently with other lanes."""

    context: AbstractContextManager  # makes the lane current, for allocations and kernel launches

    def enter(self) -> None:
        """Prepares the calling thread to queue work."""

    def copy(self, to: int, source: int, size: int) -> None:
        """Queues a copy of ``size`` bytes between a host address and a device address."""

    def record(self) -> Mark:
        """Returns a mark at the current end of the queue."""

    def mark(self, again: Mark | None) -> Mark:
        """Like ``record``, but threads that wait for the mark sleep instead of spinning.

        ``again`` is an old mark that may be reused, or None.
        """

    def wait(self, mark: Mark) -> None:
        """Makes work that is queued from now on wait for another lane's mark."""

    def synchronize(self) -> None:
        """Waits until all queued work is done."""


class Backend(ABC):
    """Manages the memory of its devices and launches kernels on them."""

    name: str
    compile_errors: tuple[type[Exception], ...] = ()  # raised by ``compile_launch`` for bad source
    failures: tuple[type[Exception], ...] = ()  # ``working_on`` turns them into DeviceError
    calls: CallCache  # cleared when the limits change
    spaces: dict[Any, Any]  # workspaces that calls share, by device and stream
    devices: int = 1  # the number of visible devices
    models: Sequence[str] = ("",)  # the model name of each visible device
    compiles_in_parallel = False  # whether several threads can compile at the same time
    writes_in_place = True  # whether kernels write to a caller's array; else results are copied
    # Returns an array's shape, strides, dtype and, on a GPU, its device.
    form: Callable[[Any], tuple[Any, ...]] = staticmethod(attrgetter("shape", "strides", "dtype"))
    address: Callable[[Any], int]  # returns the address of element 0
    empty: Callable[[tuple[int, ...], np.dtype], Any]  # allocates a contiguous array
    allocator: Callable[[], Any] = staticmethod(lambda: None)  # returns the allocator of ``empty``
    read_limits: Any  # a cached function that returns the Limits of a device
    device: int = 0  # the number of the current device
    stream: int | None = None  # the current CUDA stream; None if calls wait for their results
    is_capturing: bool = False  # whether the current stream is being captured into a CUDA graph

    def forms(self, arrays: Sequence[Any]) -> tuple[Form, ...]:
        """Returns each array's shape, strides, dtype and device, for the key of a call.

        All arrays must be in this backend's memory, or all on the host. Host arrays that the device
        cannot access have no strides in the key, because they are copied in pieces anyway.
        """
        if self.owns(arrays[0]):
            return tuple(map(self.form, arrays))
        device = self.device
        return tuple([(tuple(x.shape), None, x.dtype, device) for x in arrays])

    def move_beside(self, q: Any, array: Any) -> Any:
        """Copies a NumPy or CuPy array to q's memory if needed; returns other values unchanged."""
        if isinstance(q, np.ndarray):
            return array.get() if hasattr(array, "get") else array  # CuPy arrays have get()
        if not isinstance(array, np.ndarray):
            return array
        with self.working_on(q):
            return self.upload(array)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles only the type: another process creates its own backend, without cached calls."""
        return type(self), ()

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    @property
    def limits(self) -> Limits:
        """The limits of the current device."""
        return self.read_limits(self.device)

    def refresh(self) -> None:
        """Drops cached limits and calls, after a kernel was tuned."""
        self.read_limits.cache_clear()
        self.calls.clear()

    def holders(self, array: Any) -> tuple[Any, ...]:
        """Returns the objects that keep an array's memory alive, including the array."""
        return (array,)

    @abstractmethod
    def owns(self, array: Any) -> bool:
        """Returns whether the array already lies in this backend's memory."""

    def adopt(self, array: Any) -> Any:
        """Views another library's array as this backend's array type."""
        return array

    def adopt_tensors(self, tensors: Sequence[Any]) -> list[Any] | None:
        """Returns views of torch tensors, or None if they must be imported through DLPack."""
        return None

    @abstractmethod
    def upload(self, array: np.ndarray) -> Any:
        """Copies an array to this backend's memory; returns this backend's arrays unchanged."""

    @abstractmethod
    def download(self, array: Any) -> np.ndarray:
        """Waits for earlier work and copies an array to the host."""

    @abstractmethod
    def view(self, memory: Any, shape: Sequence[int], dtype: np.dtype, offset: int, strides: Any):
        """Returns an array over a buffer of this backend; ``offset`` and strides are in bytes."""

    @abstractmethod
    def at(self, address: int, shape: Sequence[int], dtype: np.dtype, strides: Any) -> Any:
        """Returns an array whose element 0 is at ``address``; does not keep the memory alive."""

    @abstractmethod
    def tensor_map(self, mapped: Mapped) -> np.ndarray:
        """Encodes a tensor map as the struct TensorMap of tma.cuh, to be passed to a kernel."""

    @abstractmethod
    def compile_launch(self, launch: PlannedLaunch) -> Any:
        """Compiles the kernel of a launch, or loads it from the cache, without running it."""

    @abstractmethod
    def starter(
        self, kernel: Any, launch: PlannedLaunch, sizes: Sequence[int], regions: Sequence[Region]
    ) -> Start:
        """Returns the function that starts a launch.

        sizes: sizes of the arguments, in bytes. regions: all memory that the launch may access.
        """

    @abstractmethod
    def matmul(self, a: Any, b: Any, out: Any, scale: float, *, tf32: bool = False) -> None:
        """Computes out = scale * (a @ b) per head; a group of heads of a may share a head of b.

        If out has fewer heads than a, each of its heads is the sum over a group. out has the dtype
        of a and b, or the dtype of their accumulators: float32 for 16-bit inputs. ``tf32`` allows
        rounding float32 inputs to TF32, where that is faster.
        """

    @abstractmethod
    def time(self, call: Callable[[], Any], *, cold: bool = False) -> float:
        """Measures a call on the device, in milliseconds, and waits until it is done.

        With ``cold``, the caches of the device are overwritten first.
        """

    def capture(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Returns a function that replays all launches of a call as one CUDA graph."""
        return call

    def current(self) -> tuple[int, int | None]:
        """Returns the current device and stream."""
        return self.device, self.stream

    def use(self, device: int) -> None:
        """Makes a device current in this thread."""
        return

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Makes a device current in this thread while the context is open."""
        before = self.device
        if device == before:
            yield
            return
        self.use(device)
        try:
            yield
        finally:
            self.use(before)

    def synchronize(self) -> None:
        """Waits until all work is done."""
        return

    # The following methods are for backends whose memory is separate from host memory.

    def lanes(self) -> AbstractContextManager[tuple[Lane, Lane, Lane]]:
        """Returns a context with three lanes: copies to the device, kernels, and copies back."""
        raise NotImplementedError

    def pinned(self, size: int) -> np.ndarray:
        """Allocates page-locked host memory of this many bytes."""
        return np.empty(size, np.uint8)

    def is_pinned(self, array: np.ndarray) -> bool:
        """Returns whether a nonempty array lies entirely in page-locked memory."""
        raise NotImplementedError

    def free_bytes(self) -> int:
        """Returns the bytes of device memory that can be allocated."""
        raise NotImplementedError

    def trim_pinned(self) -> None:
        """Frees unused page-locked memory of the pool."""
        return

    def trim(self) -> None:
        """Frees unused memory of the pool, so that other libraries can allocate it."""
        return

    @abstractmethod
    def variable(self, prepared: Any, name: str, size: int) -> Any:
        """Returns a compiled kernel's global variable as an array of bytes of this backend."""

    def resources(self, prepared: Any) -> dict[str, int]:
        """Returns registers and spilled bytes per thread, or {} if they are unknown."""
        return {}

    def blocks_per_sm(self, prepared: Any, launch: PlannedLaunch) -> int | None:
        """Returns how many blocks of a launch fit on a multiprocessor, or None if unknown."""
        return None

    def versions(self) -> dict[str, str]:
        """Returns the versions of the driver, libraries and compilers, by name."""
        return {}

    def reordered(self, seed: int) -> Backend:
        """Returns a copy that runs threads in another order; a GPU backend returns itself."""
        return self

    def working_on(self, array: Any) -> AbstractContextManager:
        """Makes the device of an array current; errors in the context become DeviceError."""
        return nullcontext()


def gist(message: str) -> str:
    """Returns the most informative line of a compiler's or library's message."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if "Original error:" in lines:  # CuPy prints its advice before this line
        lines = lines[lines.index("Original error:") + 1 :]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
