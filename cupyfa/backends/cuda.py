"""The backend made of CuPy: NVRTC through RawModule, device arrays, streams and events."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import cupy
import numpy as np
from cupy.cuda import nvrtc
from cupy_backends.cuda.api import driver, runtime

from cupyfa import sources
from cupyfa.backends import Backend, DeviceError
from cupyfa.planning import Limits, PlannedLaunch

_STATIC_LIMIT = 48 * 1024  # more shared memory than this has to be asked for


def unavailable() -> str | None:
    """Why there is no CUDA device here, or None if there is one."""
    try:
        return None if runtime.getDeviceCount() else "no CUDA device is visible"
    except runtime.CUDARuntimeError as error:
        return f"no CUDA device ({str(error).partition(':')[2].strip() or error})"


def compile_without_gpu(
    text: str, name: str, arch: str, folders: Sequence[Any], *, to_ptx: bool = False
) -> tuple[bytes, str]:
    """The cubin of a source text for an architecture, and the compiler's log. Needs no GPU.

    With ``to_ptx`` the PTX instead. Raises cupy.cuda.compiler.CompileException with NVRTC's words.
    """
    from cuda.pathfinder import find_nvidia_header_directory

    target = f"compute_{arch}" if to_ptx else f"sm_{arch}"
    options = ["--std=c++17", f"-arch={target}", "-ftz=true", "--ptxas-options=-v"]  # as CuPy does
    options += ["--no-cache"]  # what comes out of NVRTC's own cache comes without a log
    options += ["--diag-suppress=177"]  # a constant that this kernel does not use
    options += [f"-I{folder}" for folder in folders]
    options += [f"-I{find_nvidia_header_directory('cudart')}"]
    program = nvrtc.createProgram(text, name, [], [])
    try:
        nvrtc.compileProgram(program, options)
        made = nvrtc.getPTX(program) if to_ptx else nvrtc.getCUBIN(program)
        return made, nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError:
        log = nvrtc.getProgramLog(program)
        raise cupy.cuda.compiler.CompileException(log, text, name, options, "nvrtc") from None
    finally:
        nvrtc.destroyProgram(program)


@contextmanager
def device_errors() -> Iterator[None]:
    """Turns the device's failures into DeviceError, in one line."""
    try:
        yield
    except cupy.cuda.memory.OutOfMemoryError as error:
        free, total = runtime.memGetInfo()
        raise DeviceError(
            f"out of memory: {error}; the device has {free:,} of {total:,} bytes free"
        ) from None
    except (runtime.CUDARuntimeError, driver.CUDADriverError) as error:
        raise DeviceError(f"the device failed: {error}") from None


class Cuda(Backend):
    """The current CUDA device. Work goes to CuPy's current stream."""

    name = "cuda"

    def __init__(self) -> None:
        self._modules: dict[tuple[int, str], Any] = {}
        self._lock = threading.Lock()

    @property
    def limits(self) -> Limits:  # type: ignore[override]
        """The limits of the current device, by its attributes."""
        return _limits(cupy.cuda.Device().id)

    def owns(self, array: Any) -> bool:
        return isinstance(array, cupy.ndarray)

    def adopt(self, array: Any) -> Any:
        if self.owns(array):
            return array
        return cupy.from_dlpack(array) if hasattr(array, "__dlpack__") else cupy.asarray(array)

    def upload(self, array: np.ndarray) -> Any:
        return cupy.asarray(array)

    def download(self, array: Any) -> np.ndarray:
        return cupy.asnumpy(array)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        return cupy.empty(shape, dtype)

    def view(self, memory: Any, shape: Sequence[int], dtype: np.dtype, offset: int, strides: Any):
        return cupy.ndarray(shape, dtype, memory.data + offset, strides)

    def address(self, array: Any) -> int:
        return array.data.ptr

    def prepare(self, launch: PlannedLaunch) -> Any:
        text = sources.text(launch)
        key = (cupy.cuda.Device().id, text)
        with self._lock:
            if key not in self._modules:
                self._modules[key] = self._build(text, launch)
            return self._modules[key]

    def _build(self, text: str, launch: PlannedLaunch) -> Any:
        options = tuple(f"-I{folder}" for folder in sources.include_folders(launch))
        kernel = cupy.RawModule(code=text, options=options).get_function(launch.entry)
        if launch.shared_bytes > _STATIC_LIMIT:
            kernel.max_dynamic_shared_size_bytes = launch.shared_bytes
        return kernel

    def launch(
        self, prepared: Any, launch: PlannedLaunch, arguments: list, arrays: Mapping
    ) -> None:
        prepared(launch.grid, (launch.threads, 1, 1), arguments, shared_mem=launch.shared_bytes)

    def matmul(self, a: Any, b: Any, out: Any, scale: float) -> None:
        from cupyfa.backends import cublas

        cublas.matmul(a, b, out, scale)

    def time(self, call: Callable[[], Any], repeat: int) -> list[float]:
        events = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(repeat)]
        for start, end in events:
            start.record()
            call()
            end.record()
        events[-1][1].synchronize()
        return [cupy.cuda.get_elapsed_time(start, end) for start, end in events]

    def resources(self, prepared: Any) -> dict[str, int]:
        return {"registers": prepared.num_regs, "spilled bytes": prepared.local_size_bytes}

    def versions(self) -> dict[str, str]:
        return {
            "cupy": cupy.__version__,
            "driver": _dotted(runtime.driverGetVersion()),
            "cuda": _dotted(runtime.runtimeGetVersion()),
            "nvrtc": ".".join(map(str, nvrtc.getVersion())),
        }

    @contextmanager
    def working_on(self, array: Any) -> Iterator[None]:
        device = array.device if self.owns(array) else cupy.cuda.Device()
        with device_errors(), device:
            yield


def _dotted(version: int) -> str:
    """CUDA's version numbers as people write them: 12090 is 12.9."""
    return f"{version // 1000}.{version % 1000 // 10}"


@cache
def _limits(device: int) -> Limits:
    attributes = cupy.cuda.Device(device).attributes
    properties = runtime.getDeviceProperties(device)
    return Limits(
        device=properties["name"].decode(),
        shared_bytes=attributes["MaxSharedMemoryPerBlockOptin"],
        threads=attributes["MaxThreadsPerBlock"],
        arch=cupy.cuda.Device(device).compute_capability,
        no_matmul=_no_cublas(),
    )


def _no_cublas() -> str | None:
    try:
        from cupy.cuda import cublas  # noqa: F401
    except ImportError:
        return "its matrix products need cuBLAS: pip install 'cupyfa[cublas]'"
    return None
