"""The interface of a backend: a place with memory, and a way to launch kernels on it.

There are two: ``cuda`` (CuPy) and ``simulator`` (a C++ compiler). Their arrays are CuPy's and
NumPy's.
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
# Starts a launch: (stream, address of a table with each argument's address, 0).
Start = Callable[[int | None, int, int], Any]


class Region(NamedTuple):
    """Memory that a launch may access: the array of one of its arguments."""

    name: str
    argument: int  # which has the address of the array's element 0
    low: int  # bytes from there to the region
    bytes: int
    itemsize: int = 1  # bytes of an element
    constant: bool = False  # an input, which the launch only reads
    offset: int = 0  # of the address in the argument, in bytes
    awaited: bool = False  # whether launches before this one of the plan access it, one writing
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

    context: AbstractContextManager  # in which memory is taken and kernels are launched for it

    def enter(self) -> None:
        """Makes this thread one that may add work."""

    def copy(self, to: int, source: int, size: int) -> None:
        """Starts a copy of ``size`` bytes between addresses, one of them the device's."""

    def record(self) -> Mark:
        """The point where the work ends now."""

    def mark(self, again: Mark | None) -> Mark:
        """The same for threads to sleep on; may reuse a mark of this device, if not needed."""

    def wait(self, mark: Mark) -> None:
        """Work that is added from now on begins after another lane's mark."""

    def synchronize(self) -> None:
        """Returns when all work is done."""


class Backend(ABC):
    """A place with memory and a way to launch kernels on it."""

    name: str
    compile_errors: tuple[type[Exception], ...] = ()  # raised by ``prepare`` for a kernel's text
    failures: tuple[type[Exception], ...] = ()  # which ``working_on`` turns into DeviceError
    calls: CallCache  # cleared when the limits change
    spaces: dict[Any, Any]  # workspaces that calls share, by device and stream
    devices: int = 1  # visible ones
    models: Sequence[str] = ("",)  # of the visible devices, by number
    compiles_in_parallel = False  # whether threads compile at the same time
    writes_in_place = True  # whether results are written to a caller's array before all is done
    # What decides how kernels see an array of this backend, except for its address; the address.
    form: Callable[[Any], tuple[Any, ...]] = staticmethod(attrgetter("shape", "strides", "dtype"))
    address: Callable[[Any], int]  # of element 0
    # A new contiguous array with unspecified elements.
    empty: Callable[[tuple[int, ...], np.dtype], Any]
    allocator: Callable[[], Any] = staticmethod(lambda: None)  # where ``empty`` takes memory from
    read_limits: Any  # of a device; cached
    device: int = 0  # the number of the current one
    stream: int | None = None  # the address of the current CUDA stream, if calls return at once
    is_capturing: bool = False  # whether the work in the current stream is captured as a graph

    def forms(self, arrays: Sequence[Any]) -> tuple[Form, ...]:
        """What decides how a call sees its arrays: shape, strides, dtype of each, and the device.

        All lie in this backend's memory, or all on the host. Of arrays of the host that a device
        cannot reach the strides do not matter.
        """
        if self.owns(arrays[0]):
            return tuple(map(self.form, arrays))
        device = self.device
        return tuple([(tuple(x.shape), None, x.dtype, device) for x in arrays])

    def move_beside(self, q: Any, array: Any) -> Any:
        """NumPy's or CuPy's array in the memory where q is; anything else as it is."""
        if isinstance(q, np.ndarray):
            return array.get() if hasattr(array, "get") else array  # of CuPy's arrays
        if not isinstance(array, np.ndarray):
            return array
        with self.working_on(q):
            return self.upload(array)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process has a backend of its own, without the calls that are kept here."""
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
        """A view of another library's array in this backend's memory, as an array of its own."""
        return array

    def adopt_tensors(self, tensors: Sequence[Any]) -> list[Any] | None:
        """Views of torch's tensors, if they lie in this backend's memory and current stream."""
        return None

    @abstractmethod
    def upload(self, array: np.ndarray) -> Any:
        """An array of this backend with these elements; arrays of its own are returned as such."""

    @abstractmethod
    def download(self, array: Any) -> np.ndarray:
        """The elements as a NumPy array, after all work before is done."""

    @abstractmethod
    def view(self, memory: Any, shape: Sequence[int], dtype: np.dtype, offset: int, strides: Any):
        """An array over bytes of this backend: element 0 at a byte offset, strides in bytes."""

    @abstractmethod
    def at(self, address: int, shape: Sequence[int], dtype: np.dtype, strides: Any) -> Any:
        """The array with element 0 at an address; it does not keep the memory alive."""

    @abstractmethod
    def tensor_map(self, mapped: Mapped) -> np.ndarray:
        """The struct TensorMap of tma.cuh for an array, as the value of an argument."""

    @abstractmethod
    def prepare(self, launch: PlannedLaunch) -> Any:
        """The compiled kernel of a launch; raises before anything has run."""

    @abstractmethod
    def starter(
        self, kernel: Any, launch: PlannedLaunch, sizes: Sequence[int], regions: Sequence[Region]
    ) -> Start:
        """The function that starts a launch.

        ``sizes`` are the bytes of its arguments, ``regions`` all memory it may access.
        """

    @abstractmethod
    def matmul(self, a: Any, b: Any, out: Any, scale: float, *, tf32: bool = False) -> None:
        """out = a b * scale over the last two axes; heads of b are shared by groups of a's.

        If out has fewer heads than a, its heads are sums over the groups. Its elements have the
        dtype of a and b, or are sums: float32 for 16-bit numbers. ``tf32`` allows rounding float32
        to that, where it is faster.
        """

    @abstractmethod
    def time(self, call: Callable[[], Any], *, cold: bool = False) -> float:
        """Milliseconds of a call, measured on the device; waits until it is done.

        With ``cold`` everything in the device's caches is overwritten before.
        """

    def capture(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """A function that replays the launches of a call at once, as a CUDA graph does."""
        return call

    def current(self) -> tuple[int, int | None]:
        """The current device and stream."""
        return self.device, self.stream

    def use(self, device: int) -> None:
        """Makes a device current in this thread."""
        return

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """The context in which a device is the current one of this thread."""
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

    # For a backend whose memory is not the host's.

    def lanes(self) -> AbstractContextManager[tuple[Lane, Lane, Lane]]:
        """Three lanes for one call: to the device, on it, and back."""
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
        """Registers and spilled bytes of a thread, where known."""
        return {}

    def blocks_per_sm(self, prepared: Any, launch: PlannedLaunch) -> int | None:
        """Blocks of a launch that a multiprocessor runs at a time, where known."""
        return None

    def versions(self) -> dict[str, str]:
        """The versions of the driver, libraries and compilers, by name."""
        return {}

    def reordered(self, seed: int) -> Backend:
        """The same backend with another order of threads, where that can be chosen."""
        return self

    def working_on(self, array: Any) -> AbstractContextManager:
        """The context to work on an array in: its device, and errors as DeviceError."""
        return nullcontext()


def gist(message: str) -> str:
    """The most informative line of a compiler's or library's message."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if "Original error:" in lines:  # CuPy puts its advice above
        lines = lines[lines.index("Original error:") + 1 :]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
