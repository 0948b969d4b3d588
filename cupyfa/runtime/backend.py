"""The interface of a backend, which manages memory and launches kernels.

There are two: ``cuda``, whose arrays are CuPy's, and ``simulator``, which compiles kernels for the
CPU and uses NumPy arrays.
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
# Starts a launch: (stream, address of a table with each argument's address, 0). The last one is
# the parameter ``extra`` of cuLaunchKernel, which is not used.
Start = Callable[[int | None, int, int], Any]


class Region(NamedTuple):
    """Memory that a launch may access: the array of one of its arguments."""

    name: str
    argument: int  # the index of the argument that has the address of element 0
    low: int  # bytes from element 0 to the start of the region
    bytes: int
    itemsize: int = 1  # bytes of an element
    constant: bool = False  # whether the launch only reads the region
    offset: int = 0  # bytes from the start of the argument to the address in it
    awaited: bool = False  # whether the launch must wait for earlier launches that access it
    kept: bool = False  # whether the next launch reads it without waiting for this one


class Mapped(NamedTuple):
    """The contents of a tensor map: sizes, and strides in bytes, innermost first."""

    address: int  # 0 if there are no elements
    dtype: str
    sizes: tuple[int, int, int, int]  # columns, rows, heads, batch
    strides: tuple[int, int, int]  # of rows, heads, batch
    box_rows: int

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 1 if self.dtype == "uint8" else 2


class Mark(Protocol):
    """A point in a lane's work."""

    @property
    def done(self) -> bool:
        """Whether all work before it is done."""

    def wait(self) -> None:
        """Returns when all work before it is done."""


class Lane(Protocol):
    """A stream: its work is done in order, concurrently with that of other lanes."""

    context: AbstractContextManager  # to allocate memory and launch kernels in this lane

    def enter(self) -> None:
        """Prepares this thread to add work."""

    def copy(self, to: int, source: int, size: int) -> None:
        """Starts a copy of ``size`` bytes between addresses, one of them the device's."""

    def record(self) -> Mark:
        """Marks the current end of the work."""

    def mark(self, again: Mark | None) -> Mark:
        """Like ``record``, for threads that sleep until it; may reuse ``again``, an old mark."""

    def wait(self, mark: Mark) -> None:
        """Makes work that is added from now on wait for a mark of another lane."""

    def synchronize(self) -> None:
        """Returns when all work is done."""


class Backend(ABC):
    """Manages the memory of its devices and launches kernels on them."""

    name: str
    compile_errors: tuple[type[Exception], ...] = ()  # raised by ``compile_launch`` for bad source
    failures: tuple[type[Exception], ...] = ()  # ``working_on`` turns them into DeviceError
    calls: CallCache  # cleared when the limits change
    spaces: dict[Any, Any]  # workspaces that calls share, by device and stream
    devices: int = 1  # the number of visible devices
    models: Sequence[str] = ("",)  # the names of the visible devices' models, by device number
    compiles_in_parallel = False  # whether several threads can compile at the same time
    writes_in_place = True  # whether kernels may write to a caller's array; else it is filled last
    # Shape, strides, dtype and device of an array of this backend, and the address of element 0.
    form: Callable[[Any], tuple[Any, ...]] = staticmethod(attrgetter("shape", "strides", "dtype"))
    address: Callable[[Any], int]
    # A new contiguous array with unspecified elements.
    empty: Callable[[tuple[int, ...], np.dtype], Any]
    allocator: Callable[[], Any] = staticmethod(lambda: None)  # where ``empty`` takes memory from
    read_limits: Any  # a cached function that returns the Limits of a device
    device: int = 0  # the number of the current device
    stream: int | None = None  # the current CUDA stream; None if calls wait for their results
    is_capturing: bool = False  # whether the work in the current stream is captured as a graph

    def forms(self, arrays: Sequence[Any]) -> tuple[Form, ...]:
        """Returns the forms of arrays, part of a call's key: shape, strides, dtype and device.

        The arrays lie all in this backend's memory or all on the host. The strides of host arrays
        are left out if the device cannot access them, since pieces of them are copied.
        """
        if self.owns(arrays[0]):
            return tuple(map(self.form, arrays))
        device = self.device
        return tuple([(tuple(x.shape), None, x.dtype, device) for x in arrays])

    def move_beside(self, q: Any, array: Any) -> Any:
        """Copies a NumPy or CuPy array to the memory of q, if needed; returns others unchanged."""
        if isinstance(q, np.ndarray):
            return array.get() if hasattr(array, "get") else array  # of CuPy's arrays
        if not isinstance(array, np.ndarray):
            return array
        with self.working_on(q):
            return self.upload(array)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles only the type: another process makes its own backend, without cached calls."""
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
        """Reads ``limits`` again, after a kernel was tuned."""
        self.read_limits.cache_clear()
        self.calls.clear()

    def holders(self, array: Any) -> tuple[Any, ...]:
        """The objects that keep the memory of a new array alive, the array among them."""
        return (array,)

    @abstractmethod
    def owns(self, array: Any) -> bool:
        """Whether the array already lies in this backend's memory."""

    def adopt(self, array: Any) -> Any:
        """Returns another library's array in this backend's memory as a view of its own type."""
        return array

    def adopt_tensors(self, tensors: Sequence[Any]) -> list[Any] | None:
        """Returns views of torch tensors, or None if they need DLPack."""
        return None

    @abstractmethod
    def upload(self, array: np.ndarray) -> Any:
        """Copies an array into this backend's memory; returns an array of its own unchanged."""

    @abstractmethod
    def download(self, array: Any) -> np.ndarray:
        """Waits for earlier work and returns the elements as a NumPy array."""

    @abstractmethod
    def view(self, memory: Any, shape: Sequence[int], dtype: np.dtype, offset: int, strides: Any):
        """Returns an array over bytes of this backend: ``offset`` and strides are in bytes."""

    @abstractmethod
    def at(self, address: int, shape: Sequence[int], dtype: np.dtype, strides: Any) -> Any:
        """Returns an array with element 0 at an address; it does not keep the memory alive."""

    @abstractmethod
    def tensor_map(self, mapped: Mapped) -> np.ndarray:
        """Encodes the struct TensorMap of tma.cuh for an array, as the value of an argument."""

    @abstractmethod
    def compile_launch(self, launch: PlannedLaunch) -> Any:
        """Compiles the kernel of a launch, or finds it in the cache, without running it."""

    @abstractmethod
    def starter(
        self, kernel: Any, launch: PlannedLaunch, sizes: Sequence[int], regions: Sequence[Region]
    ) -> Start:
        """Returns the function that starts a launch.

        ``sizes`` are the sizes of its arguments in bytes, ``regions`` all memory it may access.
        """

    @abstractmethod
    def matmul(self, a: Any, b: Any, out: Any, scale: float, *, tf32: bool = False) -> None:
        """Computes out = a b * scale over the last two axes; groups of heads of a share one of b.

        If out has fewer heads than a, its heads are sums over the groups. out has the dtype of a
        and b, or the dtype of their sums: float32 for 16-bit numbers. ``tf32`` allows rounding
        float32 inputs to TF32, where that is faster.
        """

    @abstractmethod
    def time(self, call: Callable[[], Any], *, cold: bool = False) -> float:
        """Returns the milliseconds of a call, measured on the device; waits until it is done.

        With ``cold`` the caches of the device are overwritten first.
        """

    def capture(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Returns a function that replays the launches of a call at once, as a CUDA graph."""
        return call

    def current(self) -> tuple[int, int | None]:
        """The current device and stream."""
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

    # For backends with memory of their own, apart from the host's.

    def lanes(self) -> AbstractContextManager[tuple[Lane, Lane, Lane]]:
        """Three lanes for one call: copies to the device, kernels, and copies back."""
        raise NotImplementedError

    def pinned(self, size: int) -> np.ndarray:
        """`size` bytes of page-locked host memory."""
        return np.empty(size, np.uint8)

    def is_pinned(self, array: np.ndarray) -> bool:
        """Whether all of an array, which must have elements, lies in page-locked memory."""
        raise NotImplementedError

    def free_bytes(self) -> int:
        """Bytes of the device's memory that can be allocated."""
        raise NotImplementedError

    def trim_pinned(self) -> None:
        """Gives page-locked memory in the pool back to the system."""
        return

    def trim(self) -> None:
        """Gives memory in the pool back to the device, for other libraries to use."""
        return

    @abstractmethod
    def variable(self, prepared: Any, name: str, size: int) -> Any:
        """The bytes of a global variable of a compiled kernel, as an array of this backend."""

    def resources(self, prepared: Any) -> dict[str, int]:
        """Returns registers and spilled bytes per thread, or {} if they are unknown."""
        return {}

    def blocks_per_sm(self, prepared: Any, launch: PlannedLaunch) -> int | None:
        """Returns how many blocks of a launch a multiprocessor runs at a time, or None."""
        return None

    def versions(self) -> dict[str, str]:
        """The versions of the driver, libraries and compilers, by name."""
        return {}

    def reordered(self, seed: int) -> Backend:
        """Returns a copy of this backend with another order of threads, or itself on a GPU."""
        return self

    def working_on(self, array: Any) -> AbstractContextManager:
        """Makes the device of an array current; errors in the context become DeviceError."""
        return nullcontext()


def gist(message: str) -> str:
    """The most informative line of a compiler's or library's message."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if "Original error:" in lines:  # CuPy puts its advice above
        lines = lines[lines.index("Original error:") + 1 :]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
