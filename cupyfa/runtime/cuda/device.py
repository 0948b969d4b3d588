"""The CUDA backend, built on CuPy: device arrays, launches, streams and events."""

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from operator import attrgetter
from typing import Any

import cupy
import numpy as np
from cupy.cuda import nvrtc
from cupy.cuda.stream import get_current_stream
from cupy_backends.cuda.api import driver, runtime

from cupyfa.errors import DeviceError, DeviceLost, OutOfMemory, Unsupported
from cupyfa.planner import source as sources, tuned
from cupyfa.planner.plan import Limits, PlannedLaunch
from cupyfa.problem.dtypes import E4M3, INPUTS
from cupyfa.runtime import environment
from cupyfa.runtime.arrays import extent
from cupyfa.runtime.backend import Backend, Mapped, Region, Start
from cupyfa.runtime.call_cache import CallCache
from cupyfa.runtime.cuda import compiler
from cupyfa.runtime.kernel_arguments import BOX_ROW_BYTES, blank_map

ARRAY = cupy.ndarray
_raw_kernel = cache(cupy.RawKernel)
_STATIC_LIMIT = 48 * 1024  # bytes; more shared memory must be requested
_CAPTURING = range(900, 909)  # CUDA errors of calls that are not permitted during a capture
_IN_CAPTURES = (
    "while a CUDA graph is captured, call in the captured stream, on arrays in GPU memory, without "
    "check=True"
)
_RELAXED = 2  # CUstreamCaptureMode
_LEGACY = 0  # handle of the legacy default stream, which is CuPy's current stream by default
_OTHER_STREAM = (
    "torch's current stream is being captured as a CUDA graph, but CuPy's current stream is the "
    "legacy stream, which cannot be captured: call inside "
    "`with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):`"
)
# Cycles for which a spin kernel delays the device, so that the host can queue the timed call before
# it starts. If the host is slower, the call is timed again with more cycles (0.3 ms, then 3 ms).
_HEAD_STARTS = (600_000, 6_000_000)
_HOLD = """
extern "C" __global__ void hold(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}
"""


def unavailable() -> str | None:
    """Returns the reason why there is no CUDA device here, or None if there is one."""
    try:
        return None if runtime.getDeviceCount() else "no CUDA device is visible"
    except runtime.CUDARuntimeError as error:
        has_driver = runtime.driverGetVersion() > 0
        why = str(error).partition(":")[2].strip() if has_driver else environment.without_driver()
        return f"no CUDA device ({why or error})"


class _Working:
    """A context that makes a device current and turns CUDA errors into a one-line DeviceError.

    It also relaxes the thread's capture mode, so that allocations do not invalidate a capture, as
    they would in the modes that ``torch.cuda.graph`` uses.
    """

    def __init__(self, device: Any) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._device.__enter__()
        self._mode, self._exchange = ctypes.c_int(_RELAXED), _exchange_of_capture_modes()
        self._exchange(ctypes.byref(self._mode))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._exchange(ctypes.byref(self._mode))
        found = _device_error(error) if error is not None else None
        self._device.__exit__(kind, error, trace)
        try:
            if found is not None:
                raise found from None
        finally:  # tracebacks refer to the frames of the call and would keep its arrays alive
            del found, error, trace


def _device_error(error: BaseException) -> DeviceError | None:
    """Returns the DeviceError for a device failure, or None for any other error."""
    if isinstance(error, cupy.cuda.memory.OutOfMemoryError):
        free, total = runtime.memGetInfo()
        return OutOfMemory(
            f"out of memory: {error}; the device has {free:,} of {total:,} bytes free: "
            "free arrays, or use smaller sizes"
        )
    if isinstance(error, runtime.CUDARuntimeError | driver.CUDADriverError):
        no_memory = any(x in str(error) for x in ("MemoryAllocation", "OUT_OF_MEMORY"))
        what = f"the device failed: {error}"
        if error.status in _CAPTURING:  # the context is not lost
            return DeviceError(f"{what}; {_IN_CAPTURES}")
        return OutOfMemory(what) if no_memory else _failed(what)
    if type(error).__name__ == "CUBLASError":  # cuBLAS may not be installed
        return _failed(f"cuBLAS failed: {error}")
    return None


def _failed(what: str) -> DeviceError:
    """Returns DeviceLost if all further calls would fail, as after a trap, else DeviceError."""
    try:
        runtime.deviceSynchronize()
    except runtime.CUDARuntimeError as found:
        if found.status in _CAPTURING:
            return DeviceError(what)
        return DeviceLost(
            f"{what}; this process's CUDA context is lost, with all data on the device: "
            "restart the process. cupyfa check runs kernels in separate processes"
        )
    return DeviceError(what)


class _Mark:
    def __init__(self, event: Any) -> None:
        self.event = event

    @property
    def done(self) -> bool:
        return self.event.done

    def wait(self) -> None:
        self.event.synchronize()


class _Lane:
    def __init__(self) -> None:
        self._device = runtime.getDevice()
        # The context is the Stream itself, whose __enter__ is written in C: a signal inside a
        # Python __enter__ would leave the stream current.
        self.context = self._stream = cupy.cuda.Stream(non_blocking=True)

    def enter(self) -> None:
        if _ready.__dict__.get("device") != self._device:
            runtime.setDevice(self._device)
            _ready.device = self._device

    def copy(self, to: int, source: int, size: int) -> None:
        runtime.memcpyAsync(to, source, size, runtime.memcpyDefault, self._stream.ptr)

    def record(self) -> _Mark:
        event = cupy.cuda.Event(disable_timing=True)
        event.record(self._stream)
        return _Mark(event)

    def mark(self, again: Any) -> _Mark:
        if again is None:
            again = _Mark(cupy.cuda.Event(block=True, disable_timing=True))
        again.event.record(self._stream)
        return again

    def wait(self, mark: Any) -> None:
        self._stream.wait_event(mark.event)

    def synchronize(self) -> None:
        self._stream.synchronize()


_ready = threading.local()  # its ``device`` is the device that a copy thread made current


@cache
def _limits(device: int) -> Limits:
    attributes = cupy.cuda.Device(device).attributes
    properties = runtime.getDeviceProperties(device)
    name = properties["name"].decode()
    return Limits(
        device=name,
        shared_bytes=attributes["MaxSharedMemoryPerBlockOptin"],
        threads=attributes["MaxThreadsPerBlock"],
        arch=cupy.cuda.Device(device).compute_capability,
        multiprocessors=attributes["MultiProcessorCount"],
        clock=attributes.get("ClockRate", 0) / 1e6 or None,  # GHz; CUDA reports kHz
        no_matmul=_no_cublas(),
        tuned=tuned.on(name),
    )


@cache
def _models() -> tuple[str, ...]:
    devices = range(runtime.getDeviceCount())
    return tuple(runtime.getDeviceProperties(i)["name"].decode() for i in devices)


def _no_cublas() -> str | None:
    try:
        from cupy.cuda import cublas  # noqa: F401
    except ImportError:
        package = "nvidia-cublas-cu12" if runtime.runtimeGetVersion() < 13000 else "nvidia-cublas"
        return f"its matrix products need cuBLAS: pip install {package}"
    return None


class Cuda(Backend):
    """The current CUDA device; work is queued in CuPy's current stream."""

    name = "cuda"
    compile_errors = (compiler.CompileException,)
    failures = (cupy.cuda.memory.OutOfMemoryError, runtime.CUDARuntimeError, driver.CUDADriverError)
    form = staticmethod(attrgetter("shape", "strides", "dtype", "data.device_id"))
    address = staticmethod(attrgetter("data.ptr"))
    empty = staticmethod(cupy.ndarray)
    allocator = staticmethod(cupy.cuda.get_allocator)
    read_limits = staticmethod(_limits)
    compiles_in_parallel = True

    def __init__(self) -> None:
        self.calls, self.spaces = CallCache(), {}
        self._kernels: dict[tuple[Any, ...], compiler.Kernel] = {}
        self._building: dict[tuple[Any, ...], threading.Lock] = {}
        self._lock = threading.Lock()
        self._lanes: dict[int, list[tuple[_Lane, _Lane, _Lane]]] = {}  # idle lanes, by device

    @property
    def devices(self) -> int:  # type: ignore[override]
        """The number of visible devices if all are of one model, else 1."""
        return len(self.models) if len(set(self.models)) == 1 else 1

    @property
    def models(self) -> Sequence[str]:  # type: ignore[override]
        return _models()

    def owns(self, array: Any) -> bool:
        return isinstance(array, cupy.ndarray)

    def holders(self, array: Any) -> tuple[Any, ...]:
        return array, array.data, array.data.mem

    def adopt(self, array: Any) -> Any:
        if self.owns(array):
            return array
        if (as_bytes := _bytes_of(array)) is not None:
            return cupy.from_dlpack(as_bytes).view(E4M3)
        return cupy.from_dlpack(array) if hasattr(array, "__dlpack__") else cupy.asarray(array)

    def adopt_tensors(self, tensors: Sequence[Any]) -> list[Any] | None:
        """Views tensors by their addresses, since DLPack takes longer than the rest of a call.

        Returns None if torch's stream is not CuPy's, or for tensors that DLPack may reject.
        """
        torch: Any = sys.modules["torch"]
        device, stream = self.current()
        if (theirs := torch.cuda.current_stream(device).cuda_stream) != stream:
            if stream == _LEGACY and runtime.streamIsCapturing(theirs):
                raise Unsupported(_OTHER_STREAM, "CuPy's legacy stream cannot be captured")
            return None
        try:
            seen = [_of_tensor(torch, x, device) for x in tensors]
        except Exception:  # an unknown kind of tensor, which DLPack handles
            return None
        return None if any(x is None for x in seen) else seen

    def upload(self, array: np.ndarray) -> Any:
        self._refuse_capture()
        if array.dtype == E4M3:  # CuPy does not support e4m3
            return cupy.asarray(array.view(np.uint8)).view(E4M3)
        return cupy.asarray(array)

    def download(self, array: Any) -> np.ndarray:
        self._refuse_capture()
        if array.dtype == E4M3:
            return cupy.asnumpy(array.view(np.uint8)).view(E4M3)
        return cupy.asnumpy(array)

    def view(self, memory: Any, shape: Sequence[int], dtype: np.dtype, offset: int, strides: Any):
        return cupy.ndarray(shape, dtype, memory.data + offset, strides)

    def at(self, address: int, shape: Sequence[int], dtype: np.dtype, strides: Any) -> Any:
        return _unowned(address, shape, dtype, strides, runtime.getDevice())

    def tensor_map(self, mapped: Mapped) -> np.ndarray:
        somewhere = mapped.address or _somewhere(cupy.cuda.Device().id).data.ptr
        return _encoded(mapped._replace(address=somewhere))

    def compile_launch(self, launch: PlannedLaunch) -> Any:
        text = sources.text(launch)
        key = (cupy.cuda.Device().id, text, launch.target, launch.entry)
        with self._lock:
            lock = self._building.setdefault(key[1:], threading.Lock())
        with lock:  # other kernels compile in parallel; other devices find this one in the cache
            kernel = self._kernels.get(key)
            if kernel is None:
                capability = cupy.cuda.Device().compute_capability
                kernel = self._kernels[key] = compiler.load(launch, text, capability)
        most = kernel.attribute("MAX_THREADS_PER_BLOCK")
        if launch.threads > most:
            raise Unsupported(
                f"{launch.entry} uses {kernel.attribute('NUM_REGS')} registers per thread, too "
                f"many for a block of {launch.threads} threads: at most {most} threads fit; choose "
                "smaller tiles, or add __launch_bounds__(threads) to spill registers",
                "too many registers per block",
            )
        # All launches of a kernel share one function, so the function's limit of dynamic shared
        # memory is never lowered.
        granted = max(_STATIC_LIMIT, kernel.attribute("MAX_DYNAMIC_SHARED_SIZE_BYTES"))
        if launch.shared_bytes > granted:
            kernel.set_attribute("MAX_DYNAMIC_SHARED_SIZE_BYTES", launch.shared_bytes)
        return kernel

    def starter(
        self, kernel: Any, launch: PlannedLaunch, sizes: Sequence[int], regions: Sequence[Region]
    ) -> Start:
        function, block = kernel.kernel.ptr, (launch.threads, 1, 1)
        if launch.begins_early and (launch_kernel := _launch_kernel_ex()) is not None:
            return _early_starter(launch_kernel, function, launch)
        return partial(driver.launchKernel, function, *launch.grid, *block, launch.shared_bytes)

    def matmul(self, a: Any, b: Any, out: Any, scale: float, *, tf32: bool = False) -> None:
        from cupyfa.runtime.cuda import cublas

        cublas.matmul(a, b, out, scale, tf32=tf32)

    def time(self, call: Callable[[], Any], *, cold: bool = False) -> float:
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        for head_start in _HEAD_STARTS:
            if cold:  # overwrite the whole L2 cache
                size = 4 * cupy.cuda.Device().attributes["L2CacheSize"]
                cupy.empty(size, np.uint8).data.memset_async(0, size)
            _raw_kernel(_HOLD, "hold")((1,), (1,), (head_start,))
            start.record()
            call()
            end.record()
            was_ahead = not start.done
            end.synchronize()
            if was_ahead:
                break
        return cupy.cuda.get_elapsed_time(start, end)

    def capture(self, call: Callable[[], Any]) -> Callable[[], Any]:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            try:
                call()
            finally:
                graph = stream.end_capture()
        return graph.launch

    @property
    def stream(self) -> int | None:  # type: ignore[override]
        return get_current_stream().ptr

    @property
    def is_capturing(self) -> bool:  # type: ignore[override]
        return runtime.streamIsCapturing(get_current_stream().ptr)

    @property
    def device(self) -> int:  # type: ignore[override]
        return runtime.getDevice()

    def current(self) -> tuple[int, int]:
        device = runtime.getDevice()
        return device, get_current_stream(device).ptr

    def use(self, device: int) -> None:
        runtime.setDevice(device)

    def synchronize(self) -> None:
        cupy.cuda.Device().synchronize()

    def _refuse_capture(self) -> None:
        """Raises Unsupported for copies between host and GPU during a capture."""
        if (stream := get_current_stream().ptr) and runtime.streamIsCapturing(stream):
            raise Unsupported(
                "this call copies numbers between the host and the GPU, but a CUDA graph is being "
                "captured, and replays of the graph would not repeat these copies; pass arrays in "
                "GPU memory, leave out check=True, and make the call once before the capture",
                "copies between host and GPU cannot be captured",
            )

    @contextmanager
    def lanes(self) -> Iterator[Any]:
        self._refuse_capture()
        free = self._lanes.setdefault(runtime.getDevice(), [])
        try:
            lanes = free.pop()
        except IndexError:
            lanes = (_Lane(), _Lane(), _Lane())
        try:
            yield lanes
        finally:
            free.append(lanes)

    def pinned(self, size: int) -> np.ndarray:
        return np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size)

    def is_pinned(self, array: np.ndarray) -> bool:
        start = array.__array_interface__["data"][0]
        low, high = (0, array.nbytes) if array.flags.c_contiguous else extent(array)
        first, last = map(runtime.pointerGetAttributes, (start + low, start + high - 1))
        return first.type == last.type == runtime.memoryTypeHost

    def free_bytes(self) -> int:
        return runtime.memGetInfo()[0] + cupy.get_default_memory_pool().free_bytes()

    def trim_pinned(self) -> None:
        cupy.get_default_pinned_memory_pool().free_all_blocks()

    def trim(self) -> None:
        self.spaces.clear()
        for prepared in list(self.calls.prepared.values()):
            prepared.forget()
        cupy.get_default_memory_pool().free_all_blocks()

    def variable(self, prepared: Any, name: str, size: int) -> Any:
        address, dtype = prepared.variable(name), np.dtype(np.uint8)
        return _unowned(address, (size,), dtype, (1,), runtime.getDevice(), owner=prepared)

    def resources(self, prepared: Any) -> dict[str, int]:
        names = {"registers": "NUM_REGS", "spilled bytes": "LOCAL_SIZE_BYTES"}
        return {what: prepared.attribute(name) for what, name in names.items()}

    def blocks_per_sm(self, prepared: Any, launch: PlannedLaunch) -> int | None:
        return driver.occupancyMaxActiveBlocksPerMultiprocessor(
            prepared.kernel.ptr, launch.threads, launch.shared_bytes
        )

    def versions(self) -> dict[str, str]:
        return {
            "cupy": cupy.__version__,
            "cuda of the driver": _dotted(runtime.driverGetVersion()),
            "cuda": _dotted(runtime.runtimeGetVersion()),
            "nvrtc": ".".join(map(str, nvrtc.getVersion())),
        }

    def working_on(self, array: Any) -> _Working:
        return _Working(array.device if self.owns(array) else cupy.cuda.Device())


def _of_tensor(torch: Any, x: Any, device: int) -> Any:
    """Views an ordinary torch tensor on this device; returns None for any other tensor."""
    dtype, address = _dtypes_of(torch).get(x.dtype), x.data_ptr()
    plain = type(x) is torch.Tensor and x.layout is torch.strided
    if not plain or x.requires_grad or x.is_neg() or x.get_device() != device or not address:
        return None
    if dtype is None:
        return None
    strides = tuple(dtype.itemsize * step for step in x.stride())
    return _unowned(address, tuple(x.shape), dtype, strides, device, owner=x)


def _bytes_of(array: Any) -> Any:
    """Views an e4m3 tensor as bytes, which CuPy can import; returns None for other arrays."""
    torch: Any = sys.modules.get("torch")
    theirs = getattr(torch, E4M3.name, None)
    if theirs is None or getattr(array, "dtype", None) is not theirs:
        return None
    return array.view(torch.uint8)


def _unowned(
    address: int,
    shape: Sequence[int],
    dtype: np.dtype,
    strides: Sequence[int],
    device: int,
    owner: Any = None,
) -> Any:
    """Creates an array over memory that ``owner`` keeps alive; strides may be negative."""
    reach = [(n - 1) * step for n, step in zip(shape, strides)] if 0 not in shape else []
    low = sum(x for x in reach if x < 0)
    size = sum(map(abs, reach)) + dtype.itemsize
    memory = cupy.cuda.UnownedMemory(address + low, size, owner, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, -low), strides)


@cache
def _dtypes_of(torch: Any) -> dict[Any, np.dtype]:
    known = ((getattr(torch, name, None), dtype.numpy) for name, dtype in INPUTS.items())
    return {theirs: dtype for theirs, dtype in known if theirs is not None}


def _dotted(version: int) -> str:
    """Formats a CUDA version number: 12090 becomes "12.9"."""
    return f"{version // 1000}.{version % 1000 // 10}"


@cache
def _somewhere(device: int) -> Any:
    """Allocates memory for tensor maps of empty arrays, because the driver requires an address."""
    return cupy.empty(BOX_ROW_BYTES, np.uint8)


# Enumeration values from cuda.h.
_MAP_DTYPES = {"uint8": 0, "float16": 6, "bfloat16": 9}  # CUtensorMapDataType
_NOT_INTERLEAVED, _SWIZZLED_128B, _PROMOTED_256B, _FILLED_WITH_ZEROS = 0, 3, 3, 0


@lru_cache(maxsize=1024)  # programs use the same few arrays again and again
def _encoded(mapped: Mapped) -> np.ndarray:
    """Encodes a tensor map in memory with the alignment that the driver needs.

    Raises DeviceError with the contents if the driver rejects them, and DeviceLost if the device
    has failed before.
    """
    encoded = blank_map()
    rank = len(mapped.sizes)
    box = (BOX_ROW_BYTES // mapped.itemsize, *mapped.box, *(1,) * (rank - 3))
    error = _encode_tiled()(
        encoded.ctypes.data,
        _MAP_DTYPES[mapped.dtype],
        rank,
        mapped.address,
        (ctypes.c_uint64 * rank)(*mapped.sizes),
        (ctypes.c_uint64 * (rank - 1))(*mapped.strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*(1,) * rank),
        _NOT_INTERLEAVED,
        _SWIZZLED_128B,
        _PROMOTED_256B,
        _FILLED_WITH_ZEROS,
    )
    if error:
        raise _failed(f"cuTensorMapEncodeTiled failed for {mapped}: CUresult {error}")
    return encoded


class _LaunchAttribute(ctypes.Structure):
    """The driver's struct CUlaunchAttribute, with an int as the value."""

    _fields_ = (("id", ctypes.c_int), ("value", ctypes.c_int * 17))  # value[0] is padding


class _LaunchConfig(ctypes.Structure):
    """The driver's struct CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
_CAPTURES_EARLY_LAUNCHES = 12030  # first CUDA version whose graphs support dependent launches


def _early_starter(
    launch_kernel: Callable[..., int], function: int, launch: PlannedLaunch
) -> Start:
    """Returns the function that starts a launch as a programmatic dependent launch.

    Launchers with such launches queue them under a lock, so only one thread at a time calls the
    function. It therefore reuses its ctypes objects, and writes only values that have changed.
    """
    attribute = _LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION)
    attribute.value[1] = 1
    config = _LaunchConfig(
        launch.grid,
        (launch.threads, 1, 1),
        launch.shared_bytes,
        attributes=ctypes.pointer(attribute),
        attribute_count=1,
    )
    by_reference, of_function = ctypes.byref(config), ctypes.c_void_p(function)
    of_pointers, last, last_stream = ctypes.c_void_p(), 0, None

    def start(stream: int | None, pointers: int, extra: int) -> None:
        nonlocal last, last_stream
        if stream != last_stream:
            config.stream = last_stream = stream
        if pointers != last:
            of_pointers.value = last = pointers
        if status := launch_kernel(by_reference, of_function, of_pointers, None):
            driver.check_status(status)

    return start


@cache
def _launch_kernel_ex() -> Any:
    """Returns the driver's cuLaunchKernelEx, which CuPy does not wrap.

    Returns None if the driver lacks it or cannot capture its launches in graphs.
    """
    version = ctypes.c_int()
    try:
        library = driver_library()
        library.cuDriverGetVersion(ctypes.byref(version))
        function = library.cuLaunchKernelEx
    except (OSError, AttributeError):
        return None
    return function if version.value >= _CAPTURES_EARLY_LAUNCHES else None


@cache
def _exchange_of_capture_modes() -> Callable[[Any], object]:
    """Returns the driver's function that exchanges the stream capture mode of this thread."""
    try:
        return driver_library().cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # drivers without this function do not support captures
        return id


@cache
def driver_library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _encode_tiled() -> Any:
    """Returns the driver's cuTensorMapEncodeTiled, which CuPy does not wrap."""
    try:
        function = driver_library().cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise DeviceError(
            f"the driver has no cuTensorMapEncodeTiled ({error}); install a driver for CUDA 12 or "
            "newer"
        ) from None
    function.argtypes = [
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p),
        *(ctypes.c_void_p,) * 4,
        *(ctypes.c_int,) * 4,
    ]
    return function


# Functions for ``doctor``, which calls each of them in a separate process.

_TRIAL = """
#include <cuda_fp16.h>
extern "C" __global__ void trial(__half* x) { x[threadIdx.x] = __hadd(x[threadIdx.x], x[0]); }
"""


def cuda_versions() -> dict[str, int]:
    """Returns the CUDA versions of the driver (0 without one) and of CuPy; 12090 means 12.9."""
    return {"driver": runtime.driverGetVersion(), "runtime": runtime.runtimeGetVersion()}


def try_devices() -> list[dict[str, Any]]:
    """Returns the properties of each device, with "error" if a test kernel fails on it."""
    return [_tried(index) for index in range(runtime.getDeviceCount())]


def _tried(index: int) -> dict[str, Any]:
    error = None
    with cupy.cuda.Device(index) as device:
        properties = runtime.getDeviceProperties(index)
        try:
            x = cupy.ones(32, np.float16)
            cupy.RawKernel(_TRIAL, "trial")((1,), (32,), (x,))
            if not (x.get() == 2).all():
                error = "the test kernel returned a wrong result"
            free, total = device.mem_info
        except Exception as caught:  # report errors of the driver, NVRTC or the cache unchanged
            error, (free, total) = f"{type(caught).__name__}: {caught}", (0, 0)
        return {
            "name": properties["name"].decode(),
            "arch": device.compute_capability,
            "shared_bytes": device.attributes["MaxSharedMemoryPerBlockOptin"],
            "free": free,
            "total": total,
            "error": error,
        }


def try_nvrtc() -> dict[str, str]:
    """Compiles a kernel; returns NVRTC's version and the architecture."""
    arch = "90" if unavailable() else cupy.cuda.Device().compute_capability
    compiler.compile_text(_TRIAL, "trial.cu", arch, ())
    return {"nvrtc": ".".join(map(str, nvrtc.getVersion())), "arch": arch}


def cublas_version() -> str:
    """Returns the version of cuBLAS, or "found" without a device."""
    from cupy.cuda import cublas, device

    return "found" if unavailable() else str(cublas.getVersion(device.get_cublas_handle()))
