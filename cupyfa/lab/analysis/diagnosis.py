"""Reports versions, devices, caches, and whether each backend compiles and runs a kernel.

Calls that may hang or crash in a driver or a compiler run in child processes.
"""

import importlib
import json
import os
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
from platform import python_version
from typing import Any

from cupyfa import cache_folder
from cupyfa.lab.analysis import caches
from cupyfa.numerics.shown import Rows, ShownRow
from cupyfa.runtime import environment
from cupyfa.runtime.backend import gist
from cupyfa.runtime.environment import Progress, no_progress, version_of

OK, MISSING, FAULT = "ok", "missing", "fault"
_CUDA = "cupyfa.runtime.cuda.device"
_LEAST_CAPABILITY = 75
_CHILD = """
import importlib, json, sys
module, function = sys.argv[1].split(":")
try:
    answer = [getattr(importlib.import_module(module), function)(), None]
except Exception as error:
    answer = [None, type(error).__name__ + ": " + str(error)]
sys.stdout.write("\\n" + json.dumps(answer))
"""


@dataclass(frozen=True, repr=False)
class Finding(ShownRow):
    """A component's state ("ok", "missing" or "fault") and the backends that it makes unusable."""

    thing: str
    state: str
    found: str
    hinders: tuple[str, ...] = ()

    def row(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Probe:
    """How to examine a component, and the backends that cannot work without the component."""

    thing: str
    look: Callable[..., Finding | list[Finding]]
    hinders: tuple[str, ...] = ()
    # "module:function" to call in a child process. `look` receives the returned value and None,
    # or None and an error message.
    question: str | None = None
    seconds: float = 60.0


def doctor(progress: Progress = no_progress) -> list[Finding]:
    """Examines the components that cupyfa needs or can use, and reports exceptions as faults."""
    asked = {probe.thing: _ask(probe.question) for probe in PROBES if probe.question}
    findings: list[Finding] = []
    try:
        for done, probe in enumerate(PROBES):
            progress(done, len(PROBES), probe.thing)
            has_cupy = not any(x.thing == "CuPy" and x.state != OK for x in findings)
            findings += _examined(probe, asked.get(probe.thing), has_cupy)
    finally:
        for process in asked.values():
            _end(process)
    return Rows(findings)


def runs_on(findings: list[Finding]) -> list[str]:
    hindered = {backend for finding in findings for backend in finding.hinders}
    return [backend for backend in ("cuda", "simulator") if backend not in hindered]


def _examined(probe: Probe, process: subprocess.Popen[str] | None, has_cupy: bool) -> list[Finding]:
    try:
        if not has_cupy and (probe.question or "").startswith(_CUDA):
            found: Any = Finding(probe.thing, MISSING, "not examined without CuPy")
        elif process:
            found = probe.look(*_answer(process, probe.seconds))
        else:
            found = probe.look()
    except Exception as error:
        found = Finding(probe.thing, FAULT, f"{type(error).__name__}: {gist(str(error))}")
    findings = found if isinstance(found, list) else [found]
    return [x if x.state == OK else replace(x, hinders=probe.hinders) for x in findings]


def _ask(question: str) -> subprocess.Popen[str]:
    """Starts a child process, in a new process group, that calls "module:function"."""
    here = str(Path(__file__).resolve().parents[3])
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
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None, f"no answer within {seconds:.0f} seconds"
    if process.returncode < 0:
        return None, f"the process was ended by {signal.Signals(-process.returncode).name}"
    if process.returncode:
        return None, (err.strip().splitlines() or ["the process failed without a message"])[-1]
    answer, error = json.loads(out.splitlines()[-1])
    return answer, error


def _end(process: subprocess.Popen[str]) -> None:
    """Kills the process if it is still running, and closes its pipes.

    Waits at most 1 s for its exit, since it may hang in a driver.
    """
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()


def _package(name: str) -> Finding:
    version = version_of(name)
    return Finding(name, OK if version else MISSING, version or "not installed")


def _folder(thing: str, path: Path | None, variable: str) -> Finding:
    """Reports a cache directory; it is a fault if the directory is not writable."""
    if path is None or not cache_folder.can_write(path):
        return Finding(thing, FAULT, f"{path} cannot be written; {cache_folder.remedy(variable)}")
    return Finding(thing, OK, f"{path}, {_size(shutil.disk_usage(path).free)} free")


def _own_folder(path: Path | None) -> Finding:
    """Reports cupyfa's cache directory; write access for other users is also a fault."""
    if path is not None and cache_folder.can_write(path) and (why := cache_folder.refusal(path)):
        return Finding("cache", FAULT, f"{path} {why}; {cache_folder.remedy()}")
    return _folder("cache", path, "CUPYFA_CACHE_DIR")


def _cupy() -> Finding:
    wheels = sorted(set(packages_distributions().get("cupy", [])))
    if not wheels:
        return Finding("CuPy", MISSING, "not installed")
    if len(wheels) > 1:
        return Finding(
            "CuPy", FAULT, f"several wheels are installed; keep one of {', '.join(wheels)}"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(_CUDA)
    return Finding("CuPy", OK, f"{version_of(wheels[0])} ({wheels[0]})")


def _driver(answer: Mapping[str, int] | None, error: str | None) -> Finding:
    """Reports the driver. ``answer`` maps driver and CuPy to CUDA versions; 12090 means 12.9."""
    if answer is None:
        return Finding("driver", FAULT, gist(error or ""))
    version = environment.kernel_driver()
    cuda = {name: f"{x // 1000}.{x % 1000 // 10}" for name, x in answer.items()}
    if not answer["driver"]:
        return Finding("driver", FAULT if version else MISSING, environment.without_driver())
    found = f"{version or 'unknown version'}, for CUDA up to {cuda['driver']}"
    if answer["driver"] // 1000 < answer["runtime"] // 1000:
        return Finding("driver", FAULT, f"{found}; CuPy needs CUDA {cuda['runtime']}")
    return Finding("driver", OK, found)


def _gpus(answer: list[dict[str, Any]] | None, error: str | None) -> list[Finding]:
    """Reports each GPU in ``answer``; a GPU that failed to run a test kernel is a fault."""
    if answer is None:
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if chosen is None else f" (CUDA_VISIBLE_DEVICES is {chosen!r})"
        state = FAULT if environment.kernel_driver() else MISSING
        return [Finding("GPU", state, gist(error or "") + hidden)]
    return [_gpu(f"GPU {i}", device) for i, device in enumerate(answer)]


def _gpu(thing: str, device: Mapping[str, Any]) -> Finding:
    if device["error"]:
        return Finding(thing, FAULT, gist(device["error"]))
    found = (
        f"{device['name']}, sm_{device['arch']}, {_size(device['free'])} of "
        f"{_size(device['total'])} free, {device['shared_bytes']:,} bytes of shared memory a block"
    )
    if int(device["arch"]) < _LEAST_CAPABILITY:
        return Finding(thing, FAULT, f"{found}; cupyfa needs sm_{_LEAST_CAPABILITY} or newer")
    return Finding(thing, OK, f"{found}; compiles and runs a kernel")


def _nvrtc(answer: Mapping[str, str] | None, error: str | None) -> Finding:
    if answer is None:
        return Finding("NVRTC", FAULT, gist(error or ""))
    return Finding("NVRTC", OK, f"{answer['nvrtc']}, compiles for sm_{answer['arch']}")


def _cublas(answer: str | None, error: str | None) -> Finding:
    missing = "not found; the baselines need it"
    return Finding("cuBLAS", OK if answer else MISSING, answer or missing)


def _simulator(answer: str | None, error: str | None) -> Finding:
    if error is None:
        return Finding("simulator", OK, f"compiles and runs a kernel with {answer}")
    return Finding("simulator", MISSING if "CompilerNotFound" in error else FAULT, gist(error))


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"


# Probes in output order.
PROBES = (
    Probe("Python", lambda: Finding("Python", OK, f"{python_version()}, {sys.executable}")),
    Probe("numpy", partial(_package, "numpy")),
    Probe("ml_dtypes", partial(_package, "ml_dtypes")),
    Probe(  # precedes the probe of CuPy, which may redirect CuPy's cache
        "CuPy's cache", lambda: _folder("CuPy's cache", caches.folder_of("cupy"), "CUPY_CACHE_DIR")
    ),
    Probe("CuPy", _cupy, ("cuda",)),
    Probe("driver", _driver, ("cuda",), f"{_CUDA}:cuda_versions"),
    Probe("GPU", _gpus, ("cuda",), f"{_CUDA}:try_devices"),
    Probe("NVRTC", _nvrtc, ("cuda",), f"{_CUDA}:try_nvrtc"),
    Probe("cuBLAS", _cublas, (), f"{_CUDA}:cublas_version"),
    Probe("simulator", _simulator, ("simulator",), "cupyfa.runtime.simulator:try_out", 180.0),
    Probe("cache", lambda: _own_folder(cache_folder.chosen_folder())),
)
