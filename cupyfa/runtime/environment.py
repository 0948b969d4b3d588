"""Describes the environment of a measurement: device, versions, command line."""

import datetime
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cupyfa.runtime.backend import Backend
from cupyfa.version import __version__

PROC = Path("/proc/driver/nvidia")

# A callback by which long functions report progress: (done, total, description of the work).
Progress = Callable[[int, int, str], None]


def no_progress(done: int, total: int, what: str) -> None:
    """Ignores a progress report."""


def describe(backend: Backend) -> dict[str, str]:
    """Returns the device, all versions, the time and the command line."""
    return {
        "device": backend.limits.device,
        "backend": backend.name,
        **({"driver": driver} if backend.name == "cuda" and (driver := kernel_driver()) else {}),
        **backend.versions(),
        "cupyfa": __version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command(),
    }


def command() -> str:
    """Returns the command line of this process, quoted for a shell."""
    import shlex  # imported here: importing cupyfa does not need it

    program = Path(sys.argv[0] or "python").name
    name = "cupyfa" if program in ("cli.py", "__main__.py", "cupyfa") else program
    return shlex.join([name, *sys.argv[1:]])


def version_of(package: str) -> str | None:
    """Returns the version of an installed package, or None if it is not installed."""
    from importlib import metadata  # slow: it imports fifty modules

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def kernel_driver() -> str | None:
    """Returns the version of NVIDIA's driver, or None if no driver is installed."""
    try:
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", (PROC / "version").read_text())
    except OSError:
        return None
    return found[0] if found else None


def without_driver() -> str:
    """Describes the installed driver when CUDA cannot use it."""
    version = kernel_driver()
    return f"version {version}, but libcuda does not work" if version else "no NVIDIA driver"
