"""Compiles kernels with NVRTC and keeps the binaries in the cache directory."""

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import cupy
from cupy.cuda import nvrtc
from cupy.cuda.compiler import CompileException
from cupy.cuda.function import Module
from cupy_backends.cuda.api import driver

from cupyfa import cache_folder
from cupyfa.planner import source as sources
from cupyfa.planner.plan import PlannedLaunch

_NOT_FOUND = 500  # CUDA_ERROR_NOT_FOUND
_ATTRIBUTE = "CU_FUNC_ATTRIBUTE_"


class Kernel:
    def __init__(self, binary: bytes, entry: str) -> None:
        self._module = Module()
        self._module.load(binary)
        self.kernel = self._module.get_function(entry)

    def attribute(self, name: str) -> int:
        """Returns a CU_FUNC_ATTRIBUTE, such as NUM_REGS."""
        return driver.funcGetAttribute(getattr(driver, _ATTRIBUTE + name), self.kernel.ptr)

    def variable(self, name: str) -> int:
        """Returns the address of a global variable."""
        return int(self._module.get_global_var(name))

    def set_attribute(self, name: str, value: int) -> None:
        driver.funcSetAttribute(self.kernel.ptr, getattr(driver, _ATTRIBUTE + name), value)


def load(launch: PlannedLaunch, text: str, capability: str) -> Kernel:
    """Loads the kernel of a launch from the cache directory, or compiles it for the current device.

    Raises CompileException with NVRTC's message.
    """
    arch, to_ptx = _target(launch.target or capability)
    version = ".".join(map(str, nvrtc.getVersion()))
    key = "\0".join((text, arch, version, cupy.__version__))
    path = cache_folder.folder() / f"{launch.entry}-{sha256(key.encode()).hexdigest()[:32]}.cubin"
    try:
        binary = cache_folder.compiled(path)
        if binary is None:
            name, folders = f"{launch.entry}.cu", sources.include_folders(launch)
            binary, _ = compile_text(text, name, arch, folders, to_ptx=to_ptx, log=False)
            with suppress(OSError):  # for example, the disk is full
                cache_folder.keep_compiled(path, binary)
        return Kernel(binary, launch.entry)
    except driver.CUDADriverError as error:
        if error.status != _NOT_FOUND:
            raise
        raise sources.without_entry(launch) from None


def _target(arch: str) -> tuple[str, bool]:
    """Returns the target architecture, and whether to emit PTX for it.

    PTX is emitted if NVRTC does not know ``arch``, since a newer driver can compile PTX for it.
    """
    known = nvrtc.getSupportedArchs()
    if not arch.isdigit() or int(arch) in known:
        return arch, False
    return str(max((x for x in known if x < int(arch)), default=min(known))), True


def compile_text(
    text: str,
    name: str,
    arch: str,
    folders: Sequence[Any],
    *,
    to_ptx: bool = False,
    log: bool = True,
    lines: bool = False,
) -> tuple[bytes, str]:
    """Compiles source code to a cubin, or with ``to_ptx`` to PTX; also returns the log.

    lines: whether to add the source line of each instruction.

    Works without a GPU. Raises cupy.cuda.compiler.CompileException with NVRTC's message.
    """
    target = f"compute_{arch}" if to_ptx else f"sm_{arch}"
    options = ["--std=c++17", f"-arch={target}", "-ftz=true", "--device-as-default-execution-space"]
    options += ["--device-int128"]
    options += ["--diag-suppress=177"]  # warnings about unused constants
    options += ["-lineinfo"] * lines
    if log:
        options += ["--ptxas-options=-v", "--no-cache"]  # NVRTC's cache does not store logs
    options += [f"-I{folder}" for folder in (*folders, *_include_folders())]
    program = nvrtc.createProgram(text, name, [], [])
    try:
        nvrtc.compileProgram(program, options)
        made = nvrtc.getPTX(program) if to_ptx else nvrtc.getCUBIN(program)
        return made, nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError:
        found = nvrtc.getProgramLog(program)
        raise CompileException(found, text, name, options, "nvrtc") from None
    finally:
        nvrtc.destroyProgram(program)


@cache
def _include_folders() -> tuple[Path, ...]:
    """Returns the include folders of CUDA, of CuPy and of CuPy's copy of CCCL."""
    from cuda.pathfinder import find_nvidia_header_directory

    toolkit, found = cupy.cuda.get_cuda_path(), find_nvidia_header_directory("cudart")
    cuda = [Path(found)] if found else []
    if toolkit:
        cuda.append(Path(toolkit) / "include")
    own = Path(cupy.__file__).parent / "_core" / "include"
    return (*cuda, own, *(own / "cupy" / "_cccl" / x for x in ("libcudacxx", "cub", "thrust")))
