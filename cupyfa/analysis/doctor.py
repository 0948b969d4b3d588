"""What of all that cupyfa needs is here, what is wrong with it, and the command that mends it.

Whatever may hang or crash, a driver or a compiler, is asked in a process of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cupyfa import store
from cupyfa.analysis import caches
from cupyfa.bench.peers import PACKAGES
from cupyfa.ladder import LADDER
from cupyfa.ladder.kernel import Launch
from cupyfa.planner import source as sources
from cupyfa.planner.evaluate import source_path
from cupyfa.runtime import environment
from cupyfa.runtime.backend import gist
from cupyfa.runtime.environment import Progress, no_progress, version_of

OK, MISSING, FAULT = "ok", "missing", "fault"
_CUDA = "cupyfa.runtime.cuda.device"
_LITTLE_SPACE, _LITTLE_MEMORY = 2**28, 2**29  # bytes
_LEAST_CAPABILITY = 75
_CUDA_HOME = Path("/usr/local/cuda")
_IN_DOCKER = Path("/.dockerenv")
_SIMULATOR_INSTEAD = "cupyfa run fa2 --backend simulator"  # where no command brings a GPU
_ANOTHER_CUPY_CACHE = "export CUPY_CACHE_DIR=/var/tmp/cupy"
_ANOTHER_CACHE = "export CUPYFA_CACHE_DIR=/var/tmp/cupyfa"
# What CUDA says, what that means, and what mends it.
_CUDA_ERRORS = {
    "StubLibrary": ("the libcuda that is loaded is a stub", "unset LD_LIBRARY_PATH"),
    "CompatNotSupported": ("libcuda is of cuda-compat, not for this GPU", "unset LD_LIBRARY_PATH"),
    "SystemDriverMismatch": ("libcuda and the kernel's driver are of two versions", "sudo reboot"),
    "SystemNotReady": ("the GPUs' fabric is not up", "sudo systemctl start nvidia-fabricmanager"),
    "DevicesUnavailable": ("another program has the GPU for itself", "nvidia-smi"),
    "NoDevice": ("no device is visible", "nvidia-smi"),
    "InitializationError": ("the driver does not start", "sudo modprobe nvidia_uvm"),
    "cudaErrorUnknown": ("the driver does not start", "sudo modprobe nvidia_uvm"),
    "No space left": ("a disk is full", "cupyfa cache clear"),
}
_TOOLS = {
    "nvdisasm": ("cupyfa show --sass", "conda install -c nvidia cuda-nvdisasm"),
    "ncu": ("cupyfa profile", "conda install -c nvidia nsight-compute"),
    "nsys": ("cupyfa profile --tool nsys", "sudo apt install nsight-systems-cli"),
    "compute-sanitizer": ("the tests", "conda install -c nvidia cuda-sanitizer-api"),
    "addr2line": ("lines of source in the simulator's faults", "sudo apt install binutils"),
}
_EXTRAS = {"jax": "'jax[cuda12]'"}
_CHILD = """
import importlib, json, sys
module, function = sys.argv[1].split(":")
try:
    said = [getattr(importlib.import_module(module), function)(), None]
except Exception as error:
    said = [None, type(error).__name__ + ": " + str(error)]
sys.stdout.write("\\n" + json.dumps(said))
"""


@dataclass(frozen=True)
class Finding:
    """One thing: its state, "ok", "missing" or "fault", what was found, and what mends it.

    ``hinders`` names the backends that cannot run as long as this is so.
    """

    thing: str
    state: str
    found: str
    remedy: str = ""
    hinders: tuple[str, ...] = ()

    def row(self) -> dict[str, Any]:
        return {**vars(self), "hinders": list(self.hinders)}


@dataclass(frozen=True)
class Probe:
    """How a thing is looked at, and which backends cannot do without it.

    ``look`` makes a Finding, or several. With a ``question``, "module:function", it is given what
    that answered in another process, and None or what went wrong there.
    """

    thing: str
    look: Callable[..., Finding | list[Finding]]
    hinders: tuple[str, ...] = ()
    question: str | None = None
    seconds: float = 60.0


def doctor(progress: Progress = no_progress) -> list[Finding]:
    """Looks at everything that cupyfa needs or can use, and says what mends what is wrong.

    Raises nothing: a look that fails is itself a fault.
    """
    asked = {probe.thing: _asked(probe.question) for probe in PROBES if probe.question}
    findings: list[Finding] = []
    try:
        for done, probe in enumerate(PROBES):
            progress(done, len(PROBES), probe.thing)
            findings += _looked(probe, asked.get(probe.thing), findings)
    finally:
        for process in asked.values():
            _end(process)
    return findings


def runs_on(findings: list[Finding]) -> list[str]:
    """The backends that nothing hinders."""
    hindered = {backend for finding in findings for backend in finding.hinders}
    return [backend for backend in ("cuda", "simulator") if backend not in hindered]


def _looked(
    probe: Probe, process: subprocess.Popen[str] | None, before: list[Finding]
) -> list[Finding]:
    """What a probe finds, with the backends that it hinders."""
    cupy = next((x for x in before if x.thing == "CuPy" and x.state != OK), None)
    try:
        if cupy and (probe.question or "").startswith(_CUDA):
            found: Any = Finding(probe.thing, MISSING, "not looked at without CuPy", cupy.remedy)
        elif process:
            found = probe.look(*_answer(process, probe.seconds))
        else:
            found = probe.look()
    except Exception as error:
        found = Finding(probe.thing, FAULT, f"{type(error).__name__}: {gist(str(error))}")
    findings = found if isinstance(found, list) else [found]
    return [x if x.state == OK else replace(x, hinders=probe.hinders) for x in findings]


# -------------------------------------------------------------------------------------------------
# Other processes


def _asked(question: str) -> subprocess.Popen[str]:
    """A process that answers a question; its group is its own, to be ended with all it starts."""
    here = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, question],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _answer(process: subprocess.Popen[str], seconds: float) -> tuple[Any, str | None]:
    """What a process answered, and None or what went wrong."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None, f"no answer within {seconds:.0f} seconds"
    if process.returncode < 0:
        return None, f"the process was ended by {signal.Signals(-process.returncode).name}"
    if process.returncode:
        return None, (err.strip().splitlines() or ["the process failed without a word"])[-1]
    answer, error = json.loads(out.splitlines()[-1])
    return answer, error


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a process that still runs, without waiting for it: it may hang in a driver."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


# -------------------------------------------------------------------------------------------------
# Python's side


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("Python", OK, f"{version}, {sys.executable}")


def _numpy() -> Finding:
    if int(np.__version__.partition(".")[0]) < 2:
        return Finding("NumPy", FAULT, np.__version__, "pip install --upgrade 'numpy>=2'")
    return Finding("NumPy", OK, np.__version__)


def _ml_dtypes() -> Finding:
    version = version_of("ml_dtypes") or "of no version"
    if np.ones(3, ml_dtypes.bfloat16).astype(np.float32).sum() != 3:
        remedy = "pip install --force-reinstall --no-deps ml_dtypes"
        return Finding("ml_dtypes", FAULT, f"{version} does not go with this NumPy", remedy)
    return Finding("ml_dtypes", OK, version)


def _kernels() -> Finding:
    paths = {
        sources.KERNELS / source_path(kernel, launch)
        for kernels in LADDER.values()
        for kernel in kernels.values()
        for launch in kernel.launches
        if isinstance(launch, Launch)
    }
    lost = sorted(
        path for path in [*paths, sources.INCLUDE / "tile" / "tensor.cuh"] if not path.is_file()
    )
    if lost:
        remedy = "pip install --force-reinstall --no-deps cupyfa"
        return Finding("kernels", FAULT, f"{lost[0]} is not there", remedy)
    return Finding("kernels", OK, str(sources.KERNELS))


def _peer(package: str) -> Finding:
    if version := version_of(package):
        return Finding(package, OK, version)
    names = ",".join(name for name in PACKAGES if PACKAGES[name] == package)
    remedy = f"pip install {_EXTRAS.get(package, package)}"
    return Finding(package, MISSING, f"for cupyfa bench --against {names}", remedy)


def _environment() -> Finding:
    telling = r"CUDA_.*|CUPY_.*|CUPYFA_.*|LD_LIBRARY_PATH|LD_PRELOAD|XDG_CACHE_HOME"
    found = [f"{name}={os.environ[name]}" for name in os.environ if re.fullmatch(telling, name)]
    return Finding("environment", OK, " ".join(sorted(found)) or "nothing set")


def _cache() -> Finding:
    path = store.chosen_folder()
    if path is None or not store.can_write(path):
        found = f"{path} cannot be written: all is compiled again in every process"
        return Finding("cache", FAULT, found, _ANOTHER_CACHE)
    return _with_space("cache", path, "cupyfa cache clear")


def _cupy_cache() -> Finding:
    path = caches.folder_of("cupy")
    assert path is not None
    if not store.can_write(path):
        found = f"{path} cannot be written; {store.folder() / 'cupy'} is used instead"
        return Finding("CuPy's cache", FAULT, found, _ANOTHER_CUPY_CACHE)
    return _with_space("CuPy's cache", path, "cupyfa cache clear --cupy")


def _with_space(thing: str, path: Path, remedy: str) -> Finding:
    free = shutil.disk_usage(path).free
    found = f"{path}, {_size(free)} free"
    return (
        Finding(thing, OK, found) if free > _LITTLE_SPACE else Finding(thing, FAULT, found, remedy)
    )


def _tool(name: str) -> Finding:
    use, remedy = _TOOLS[name]
    if path := shutil.which(name):
        restricted = "RmProfilingAdminOnly: 1" in environment.told_by_driver("params")
        if name == "ncu" and restricted and os.geteuid():
            found = f"{path}, but the driver shows counters to root alone"
            return Finding(name, MISSING, found, "sudo -E env PATH=$PATH cupyfa profile …")
        return Finding(name, OK, path)
    homes = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), _CUDA_HOME]
    for folder in [f"{home}/bin" for home in homes if home]:
        if shutil.which(name, path=folder):
            found = f"in {folder}, which is not on the PATH"
            return Finding(name, MISSING, found, f"export PATH={folder}:$PATH")
    return Finding(name, MISSING, f"for {use}", remedy)


def _simulator(answer: str | None, error: str | None) -> Finding:
    if error is None:
        return Finding("simulator", OK, f"compiles and runs with {answer}")
    if "CompilerNotFound" in error and not os.environ.get("CUPYFA_COMPILER"):
        return Finding("simulator", MISSING, gist(error), "pip install ziglang")
    if os.environ.get("CUPYFA_COMPILER"):
        remedy = "unset CUPYFA_COMPILER"
    elif "failed to map" in error or "not permitted" in error:
        remedy = _ANOTHER_CACHE  # the folder's file system does not allow programs
    elif "No space left" in error:
        remedy = "cupyfa cache clear"
    else:
        remedy = "pip install ziglang && export CUPYFA_COMPILER=zig"
    return Finding("simulator", FAULT, gist(error), remedy)


# -------------------------------------------------------------------------------------------------
# CUDA's side


def _cupy() -> Finding:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy's own warning of two CuPys
        return _cupy_as_it_is()


def _cupy_as_it_is() -> Finding:
    wheels = sorted(set(packages_distributions().get("cupy", [])))
    if len(wheels) > 1:
        names = " ".join(wheels)
        remedy = f"pip uninstall -y {names} && pip install cupy-cuda12x"
        return Finding(
            "CuPy", FAULT, f"{len(wheels)} are installed over each other: {names}", remedy
        )
    wheel = wheels[0] if wheels else "cupy-cuda12x"
    try:
        importlib.import_module(_CUDA)
    except ModuleNotFoundError as error:
        if not wheels:
            return Finding("CuPy", MISSING, "for the GPU", "pip install cupy-cuda12x")
        return Finding("CuPy", FAULT, str(error), f"pip install --force-reinstall {wheel}")
    except Exception as error:
        remedy = f"pip install --force-reinstall {wheel}"
        return Finding("CuPy", FAULT, gist(str(error)) or type(error).__name__, remedy)
    return Finding("CuPy", OK, f"{version_of(wheel)} ({wheel})")


def _driver(answer: Mapping[str, int] | None, error: str | None) -> Finding:
    """``answer`` is the newest CUDA of the driver and CuPy's, as 12090 for 12.9."""
    if answer is None:
        return Finding("driver", FAULT, gist(error or ""), _SIMULATOR_INSTEAD)
    newest, needed = answer["driver"], answer["runtime"]
    version = environment.kernel_driver()
    libraries = [str(path) for path in _libcudas()]
    if not newest:
        if version:
            found = f"the system has driver {version}, but no libcuda that works"
            return Finding("driver", FAULT, found, _remedy_for_libcuda(libraries))
        if _has_gpu():
            return Finding("driver", FAULT, "none for the GPU", "sudo ubuntu-drivers install")
        return Finding("driver", MISSING, "none, and no NVIDIA GPU either", _SIMULATOR_INSTEAD)
    found = f"{version or 'of unknown version'}, for CUDA up to {_dotted(newest)}"
    if len(libraries) > 1:
        found += f"; {len(libraries)} libcudas: {', '.join(libraries)}"
    if newest // 1000 >= needed // 1000:
        return Finding("driver", OK, found)
    older = f"cupy-cuda{newest // 1000}x"
    usable = newest >= 12000
    remedy = f"pip uninstall -y cupy-cuda{needed // 1000}x && pip install {older}"
    found = f"{found}, older than CuPy's {_dotted(needed)}"
    return Finding("driver", FAULT, found, remedy if usable else "sudo ubuntu-drivers install")


def _gpus(answer: list[dict[str, Any]] | None, error: str | None) -> list[Finding]:
    """``answer`` are the devices, on each of which a kernel was compiled, run and found right."""
    if answer is None:
        return [_no_gpu("GPU", error or "")]
    return [_gpu(f"GPU {i}", device) for i, device in enumerate(answer)]


def _gpu(thing: str, device: Mapping[str, Any]) -> Finding:
    if device["error"]:
        return _no_gpu(thing, device["error"])
    found = (
        f"{device['name']}, sm_{device['arch']}, {_size(device['free'])} of "
        f"{_size(device['total'])} free, {device['shared_bytes']:,} bytes of shared memory a block"
    )
    if int(device["arch"]) < _LEAST_CAPABILITY:
        return Finding(thing, FAULT, f"{found}: too old", _SIMULATOR_INSTEAD)
    if device["free"] < _LITTLE_MEMORY:
        return Finding(thing, FAULT, found, "nvidia-smi")
    return Finding(thing, OK, found)


def _no_gpu(thing: str, error: str) -> Finding:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if "NoDevice" in error and chosen is not None:
        found = f"none is visible: CUDA_VISIBLE_DEVICES is {chosen!r}"
        return Finding(thing, FAULT, found, "unset CUDA_VISIBLE_DEVICES")
    if "InsufficientDriver" in error:
        state = FAULT if environment.kernel_driver() or _has_gpu() else MISSING
        return Finding(thing, state, "none without a driver", _SIMULATOR_INSTEAD)
    if "nvrtc" in error.lower() or "CompileException" in error:
        return Finding(thing, FAULT, gist(error), _remedy_for_nvrtc(error))
    for name, (meaning, remedy) in _CUDA_ERRORS.items():
        if name in error:
            return Finding(thing, FAULT, f"{meaning} ({gist(error)})", remedy)
    return Finding(thing, FAULT, gist(error), "nvidia-smi")


def _nvrtc(answer: Mapping[str, str] | None, error: str | None) -> Finding:
    """``answer`` is what compiled a kernel with cuda_fp16.h, and for which architecture."""
    if answer is None:
        return Finding("NVRTC", FAULT, gist(error or ""), _remedy_for_nvrtc(error or ""))
    return Finding("NVRTC", OK, f"{answer['nvrtc']}, compiles for sm_{answer['arch']}")


def _cublas(answer: str | None, error: str | None) -> Finding:
    if answer is None:
        return Finding("cuBLAS", MISSING, "for the baselines", f"pip install {_wheel('cublas')}")
    return Finding("cuBLAS", OK, answer)


def _remedy_for_nvrtc(error: str) -> str:
    if "cannot open source file" in error or "could not open source file" in error:
        return f"pip install --force-reinstall {_wheel('cuda-runtime')}"
    return f"pip install --upgrade --force-reinstall {_wheel('cuda-nvrtc')}"


def _remedy_for_libcuda(libraries: list[str]) -> str:
    if os.environ.get("LD_LIBRARY_PATH") and libraries:
        return "unset LD_LIBRARY_PATH"
    if _IN_DOCKER.exists():
        return "docker run --gpus all …"
    return "sudo ldconfig"


def _wheel(library: str) -> str:
    """The name of NVIDIA's wheel of a library, for the CUDA of the CuPy that is installed."""
    is_13 = version_of("cupy-cuda13x") and not version_of("cupy-cuda12x")
    return f"nvidia-{library}" if is_13 else f"nvidia-{library}-cu12"


def _has_gpu() -> bool:
    """Whether there is a display controller of NVIDIA's."""
    for device in Path("/sys/bus/pci/devices").glob("*"):
        with suppress(OSError):
            vendor, kind = (device / "vendor").read_text(), (device / "class").read_text()
            if vendor.startswith("0x10de") and kind.startswith("0x03"):
                return True
    return False


def _libcudas() -> list[Path]:
    """The different files that programs may take for the driver's library, by rank."""
    listed = ""
    with suppress(OSError, subprocess.SubprocessError):
        ldconfig = shutil.which("ldconfig", path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin")
        command = [ldconfig or "ldconfig", "-p"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    folders = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    paths = [Path(folder) / "libcuda.so.1" for folder in folders]
    paths += [Path(path) for path in re.findall(r"libcuda\.so\.1 .*=> (\S+)", listed)]
    return list(dict.fromkeys(path.resolve() for path in paths if path.exists()))


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"


# In the order in which they are told.
PROBES = (
    Probe("Python", _python, ("cuda", "simulator")),
    Probe("NumPy", _numpy, ("cuda", "simulator")),
    Probe("ml_dtypes", _ml_dtypes, ("cuda", "simulator")),
    Probe("kernels", _kernels, ("cuda", "simulator")),
    Probe("environment", _environment),
    Probe("CuPy's cache", _cupy_cache),  # before CuPy is given another
    Probe("CuPy", _cupy, ("cuda",)),
    Probe("driver", _driver, ("cuda",), f"{_CUDA}:cuda_versions"),
    Probe("GPU", _gpus, ("cuda",), f"{_CUDA}:try_devices"),
    Probe("NVRTC", _nvrtc, ("cuda",), f"{_CUDA}:try_nvrtc"),
    Probe("cuBLAS", _cublas, (), f"{_CUDA}:cublas_version"),
    Probe("simulator", _simulator, ("simulator",), "cupyfa.runtime.simulator:try_out", 180.0),
    Probe("cache", _cache),
    *(Probe(name, partial(_tool, name)) for name in _TOOLS),
    *(Probe(package, partial(_peer, package)) for package in dict.fromkeys(PACKAGES.values())),
)
