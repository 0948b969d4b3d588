"""Where plans run: the interface of a backend, and a run on top of it.

A backend is a place with memory and a way to launch: ``cuda`` (CuPy) or ``simulator`` (a C++
compiler). Its arrays are CuPy's or NumPy's; all else about them is the same to this module.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np

from cupyfa.ladder.kernel import Matmul
from cupyfa.planner.plan import BOX_ALIGNMENT, Limits, Plan, PlannedLaunch, aligned_width

# How a kernel receives an array: the struct Tensor of tensor.cuh, strides in elements.
TENSOR = np.dtype([("data", "u8"), ("batch", "i8"), ("head", "i8"), ("row", "i8")])
BOX_ROW_BYTES = 128  # of tma.cuh
_BOXED = ("float16", "bfloat16", "uint8")  # of what boxes can be
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_LARGEST_STRIDE = 2**40  # bytes, of a tensor map


class Mapped(NamedTuple):
    """What a tensor map says of an array: sizes, and bytes from one to the next, inmost first."""

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
        """Whether all before it is done."""

    def wait(self) -> None:
        """Returns when it is."""


class Lane(Protocol):
    """Work that is done in order, beside that of other lanes: a stream."""

    context: AbstractContextManager  # in which memory is taken and kernels are launched for it

    def enter(self) -> None:
        """Makes this thread one that may add to it."""

    def copy(self, to: int, source: int, size: int) -> None:
        """Starts a copy of so many bytes between addresses, of which one is the device's."""

    def record(self) -> Mark:
        """The point where its work ends now."""

    def mark(self, again: Mark | None) -> Mark:
        """The same for threads to sleep until: a mark that is no longer of use may become it."""

    def wait(self, mark: Mark) -> None:
        """What is added from now on begins after another lane's mark."""

    def synchronize(self) -> None:
        """Returns when all is done."""


class Launcher(Protocol):
    """The launches of a plan, but for the addresses of its arrays."""

    def __call__(self, addresses: Sequence[int], stream: int | None) -> None:
        """Launches them in a stream of the current device."""


class Backend(ABC):
    """A place with memory and a way to launch kernels on it."""

    name: str
    limits: Limits
    compile_errors: tuple[type[Exception], ...] = ()  # what ``prepare`` raises for a kernel's text
    failures: tuple[type[Exception], ...] = ()  # what ``working_on`` makes a DeviceError of
    bound: dict[Any, Any]  # calls by what decides them; forgotten when the limits change
    spaces: dict[Any, Any]  # memory for their temporaries, by device, stream and kind of call
    devices: int = 1  # that a process finds

    @abstractmethod
    def owns(self, array: Any) -> bool:
        """Whether the array already lies in this backend's memory."""

    def adopt(self, array: Any) -> Any:
        """An array of another library in this backend's memory as one of its own, uncopied."""
        return array

    def adopt_tensors(self, tensors: Sequence[Any]) -> list[Any] | None:
        """Torch's tensors as arrays of this backend, if they lie there and need no waiting for."""
        return None

    @abstractmethod
    def upload(self, array: np.ndarray) -> Any:
        """An array of this backend with these elements; arrays of its own stay what they are."""

    @abstractmethod
    def download(self, array: Any) -> np.ndarray:
        """The elements as a NumPy array, after all work before it is done."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """A new contiguous array with unspecified elements."""

    @abstractmethod
    def view(self, memory: Any, shape: Sequence[int], dtype: np.dtype, offset: int, strides: Any):
        """An array over bytes of this backend: element 0 at a byte offset, strides in bytes."""

    @abstractmethod
    def address(self, array: Any) -> int:
        """The address of element 0."""

    @abstractmethod
    def tensor_map(self, mapped: Mapped) -> np.ndarray:
        """The struct TensorMap of tma.cuh for an array, as the value of an argument."""

    @abstractmethod
    def prepare(self, launch: PlannedLaunch) -> Any:
        """The compiled kernel of a launch; raises before anything has run."""

    @abstractmethod
    def launch(
        self, prepared: Any, launch: PlannedLaunch, arguments: list, arrays: Mapping
    ) -> None:
        """Starts a prepared kernel; ``arrays`` are all it may touch."""

    @abstractmethod
    def matmul(self, a: Any, b: Any, out: Any, scale: float, *, tf32: bool = False) -> None:
        """out = a b * scale over the last two axes; heads of b are shared by groups of a's.

        If out has fewer heads than a, its heads are sums over the groups. Its elements are those of
        a and b, or sums: float32 for 16-bit numbers.
        ``tf32`` lets float32 be rounded to that, where it is faster.
        """

    @abstractmethod
    def time(self, call: Callable[[], Any], *, cold: bool = False) -> float:
        """Milliseconds of a call, measured where the work is done, and with ``cold`` after
        everything in that place's caches was overwritten. Waits until it is done.
        """

    def form(self, array: Any) -> tuple[Any, ...]:
        """What decides how kernels see an array of this backend, but for its address."""
        return tuple(array.shape), tuple(array.strides), array.dtype

    def launcher(self, plan: Plan, arrays: Mapping[str, Any]) -> Launcher | None:
        """What launches a plan again on arrays of these forms, by their addresses in this order.

        None if there is no such short way.
        """
        return None

    def capture(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """What replays the launches of a call at once, as a CUDA graph; the call, if all is one."""
        return call

    @property
    def stream(self) -> int | None:
        """The address of the CUDA stream that work goes to, if there is one."""
        return None

    @property
    def is_capturing(self) -> bool:
        """Whether that stream's work becomes a graph."""
        return False

    @property
    def device(self) -> int:
        """The number of the current device."""
        return 0

    def synchronize(self) -> None:
        """Waits until all work is done."""
        return

    # What a backend has whose memory is not the host's.

    def lanes(self) -> AbstractContextManager[tuple[Lane, Lane, Lane]]:
        """Three lanes for a call of its own: to the device, on it, and back."""
        raise NotImplementedError

    def pinned(self, size: int) -> np.ndarray:
        """So many bytes of host memory that the device copies by itself."""
        return np.empty(size, np.uint8)

    def is_pinned(self, array: np.ndarray) -> bool:
        """Whether all of an array, that has elements, lies in such memory."""
        raise NotImplementedError

    def free_bytes(self) -> int:
        """Bytes of the device's memory that can be had."""
        raise NotImplementedError

    def trim_pinned(self) -> None:
        """Gives pinned memory that is kept for later back to the system."""
        return

    def trim(self) -> None:
        """Gives memory that is kept for later back to the device, for other libraries to use."""
        return

    def peak(self, call: Callable[[], Any]) -> int | None:
        """The most bytes of the device's memory that a call holds, where that can be told."""
        call()
        return None

    def resources(self, prepared: Any) -> dict[str, int]:
        """Registers and spilled bytes of a thread, where known."""
        return {}

    def blocks_per_sm(self, prepared: Any, launch: PlannedLaunch) -> int | None:
        """Blocks of a launch that a multiprocessor runs at a time, where known."""
        return None

    def versions(self) -> dict[str, str]:
        """The driver, libraries and compilers that take part, by name."""
        return {}

    @abstractmethod
    def refresh(self) -> None:
        """Reads ``limits`` again: something was tuned."""

    def reordered(self, seed: int) -> Backend:
        """The same place, running threads in another order where that can be chosen."""
        return self

    def working_on(self, array: Any) -> AbstractContextManager:
        """The context to work on an array in: its device, and errors as DeviceError."""
        return nullcontext()


def run(
    backend: Backend,
    plan: Plan,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    prepared: Sequence[Any] | None = None,
) -> None:
    """Runs a plan on arrays of the backend and fills the outputs.

    Everything is compiled before anything is launched, so that an error leaves them untouched.
    """
    if prepared is None:
        prepared = [backend.prepare(launch) for launch in plan.launches]
    scratch = {name: allocated(backend, plan, name) for name in plan.scratch}
    execute(backend, plan, prepared, {**inputs, **outputs, **scratch})


def execute(
    backend: Backend, plan: Plan, prepared: Sequence[Any], arrays: Mapping[str, Any]
) -> None:
    """Launches the steps of a plan on arrays that are all there."""
    values = [arguments(backend, plan, launch, arrays) for launch in plan.launches]
    launches = iter(zip(prepared, values))
    for step in plan.steps:
        if isinstance(step, Matmul):
            _multiply(backend, plan, step, arrays)
            continue
        kernel, its_arguments = next(launches)
        if all(step.grid):  # an empty problem has no blocks, and CUDA refuses an empty grid
            used = {name for name, _ in step.launch.arrays}
            touched = {name: array for name, array in arrays.items() if name in used}
            backend.launch(kernel, step, its_arguments, touched)


def arguments(
    backend: Backend, plan: Plan, step: PlannedLaunch, arrays: Mapping[str, Any]
) -> list[Any]:
    """The values of a launch's arguments, each with the bytes that the kernel's parameter has."""
    return [
        _passed(backend, step, x.name, x.form, arrays[x.name]) if x.value is None else x.value
        for x in step.arguments
    ]


def _passed(backend: Backend, step: PlannedLaunch, name: str, form: str, array: Any) -> Any:
    """The value of an argument that is an array."""
    if form == "map":
        return backend.tensor_map(mapped(backend, step, name, array))
    address = backend.address(array)
    return np.uint64(address) if form else tensor(array, address)


def mapped(backend: Backend, step: PlannedLaunch, name: str, array: Any) -> Mapped:
    """What a tensor map is to say of an array. Raises ValueError if there is none for such a one.

    An axis of one element is never walked along: its stride becomes one that is allowed. One of no
    elements counts as such, and the kernel must not read what is not there.
    """
    dtype, address = array.dtype, backend.address(array) if array.size else 0
    what = f"{step.entry}: {name}.map is of {dtype.name} {array.shape}"
    if dtype.name not in _BOXED or len(array.shape) != 4:
        raise ValueError(
            f"{what}; boxes are of [batch, heads, rows, columns] in {' or '.join(_BOXED)}"
        )
    if not can_be_boxed(array, address):
        raise ValueError(
            f"{what}, strides {array.strides}, from {address:#x}; address and strides must be "
            f"multiples of {BOX_ALIGNMENT} bytes, strides above 0: copy it to an array like that"
        )
    batch, heads, rows, columns = (max(size, 1) for size in array.shape)
    allowed = aligned_width(columns, dtype.itemsize) * dtype.itemsize
    of_batch, of_head, of_row = (
        stride if array.size and size > 1 else allowed
        for size, stride in zip(array.shape, array.strides[:3])
    )
    sizes, strides = (columns, rows, heads, batch), (of_row, of_head, of_batch)
    return Mapped(address, dtype.name, sizes, strides, step.boxes[name])


def can_be_boxed(array: Any, address: int) -> bool:
    """Whether a tensor map can describe an array with the columns side by side.

    Its rows have to begin at multiples of 16 bytes, and its strides must be above 0.
    """
    strides = [s for n, s in zip(array.shape[:-1], array.strides) if n > 1] if array.size else []
    return (not array.size or address % BOX_ALIGNMENT == 0) and all(
        0 < s < _LARGEST_STRIDE and s % BOX_ALIGNMENT == 0 for s in strides
    )


def blank_map() -> np.ndarray:
    """Memory for a struct TensorMap: zeros, at an address that one may have."""
    memory = np.zeros(_MAP_BYTES + _MAP_ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _MAP_ALIGNMENT
    return memory[start : start + _MAP_BYTES].view(f"V{_MAP_BYTES}").reshape(())


def allocated(backend: Backend, plan: Plan, name: str) -> Any:
    """New memory for an output or temporary of a plan, as its kernel can take it."""
    shape, dtype = {**plan.outputs, **plan.scratch}[name]
    memory = backend.empty(plan.stored_shape(name), dtype)
    return memory if memory.shape == shape else memory[..., : shape[-1]]


def tensor(array: Any, address: int) -> np.ndarray:
    """The struct Tensor of an array [batch, heads, rows] or [batch, heads, rows, columns]."""
    batch, head, row = (stride // array.dtype.itemsize for stride in array.strides[:3])
    return np.array((address, batch, head, row), TENSOR)


def _multiply(backend: Backend, plan: Plan, step: Matmul, arrays: Mapping[str, Any]) -> None:
    a, b = (
        arrays[name.removesuffix(".T")].swapaxes(-1, -2) if name.endswith(".T") else arrays[name]
        for name in (step.a, step.b)
    )
    scale = plan.problem.scale if step.scaled else 1.0
    backend.matmul(a, b, arrays[step.out], scale)


def extent(array: Any) -> tuple[int, int]:
    """Where an array's elements begin and end, in bytes from its element 0."""
    if array.size == 0:
        return 0, 0
    reach = [(size - 1) * stride for size, stride in zip(array.shape, array.strides)]
    low, high = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach)
    return low, high + array.dtype.itemsize


def span(backend: Backend, array: Any) -> tuple[int, int]:
    """The lowest address of an array's elements, and the bytes from there to their end."""
    low, high = extent(array)
    return backend.address(array) + low, high - low


def is_masked(array: Any) -> bool:
    """Whether it is a MaskedArray: none, where nobody has imported numpy.ma, which takes long."""
    kind = getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())
    return isinstance(array, kind)


def overlap(backend: Backend, a: Any, b: Any) -> bool:
    """Whether two arrays may share memory: whether their spans meet."""
    (start_a, size_a), (start_b, size_b) = span(backend, a), span(backend, b)
    return start_a < start_b + size_b and start_b < start_a + size_a


def gist(message: str) -> str:
    """The one line of a compiler's or a library's message that says most."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if "Original error:" in lines:  # as CuPy puts it below its advice
        lines = lines[lines.index("Original error:") + 1 :]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
