"""What the library keeps on disk between processes: a folder of its own, and small facts in it."""

from __future__ import annotations

import json
import os
import re
import stat
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tempfile


def user_cache() -> Path | None:
    """The folder this user's programs keep their caches in; None for a user without a home."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return None


def chosen_folder() -> Path | None:
    """CUPYFA_CACHE_DIR if that is set, else ``cupyfa`` among the user's caches."""
    if chosen := os.environ.get("CUPYFA_CACHE_DIR"):
        return Path(chosen)
    base = user_cache()
    return base / "cupyfa" if base else None


def folder() -> Path:
    """A folder that can be written to: the chosen one, or one that goes when the process ends."""
    path = chosen_folder()
    return path if path and can_write(path) else Path(_temporary().name)


def give_cupy_a_folder() -> None:
    """Sees to it that CuPy, which keeps what it compiled, has a folder that it can write to.

    To be called before it is imported: it makes its folder then, and fails if it cannot.
    """
    usual = os.path.expanduser("~/.cupy/kernel_cache")
    if not can_write(Path(os.environ.get("CUPY_CACHE_DIR", usual))):
        os.environ["CUPY_CACHE_DIR"] = str(folder() / "cupy")


def can_write(path: Path) -> bool:
    """Whether files can be made in a folder; makes the folder if it is not there."""
    import tempfile

    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False


def facts_file(kind: str, about: str) -> Path:
    """The file of facts of a kind ("peaks", "tuned", …) about something, a device for example."""
    return folder() / kind / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', about)}.json"


def recall(path: Path) -> dict[str, Any]:
    """The facts in a file: none if it is not there, and none, with a warning, if it is damaged."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} cannot be read and is passed over ({error})", stacklevel=2)
        return {}
    if isinstance(facts, dict):
        return facts
    warnings.warn(f"{path} holds no facts and is passed over; delete it", stacklevel=2)
    return {}


def remember(path: Path, facts: dict[str, Any]) -> None:
    """Writes facts to a file, whole or not at all; where that cannot be, warns and goes on."""
    try:
        write_whole(path, json.dumps(facts, indent=1).encode())
    except OSError as error:
        why = error.strerror
        warnings.warn(f"{path} cannot be written, so it is not remembered ({why})", stacklevel=2)


def can_write_to(path: Path) -> bool:
    """Whether ``write_whole`` could write a file now, without making a folder for it."""
    try:
        if _is_stream(path):
            return os.access(path, os.W_OK)
        folder = Path(os.path.realpath(path)).parent
        return folder.is_dir() and can_write(folder)
    except OSError:  # a folder that may not be entered, or too long a name
        return False


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file, the one that a link leads to, so that others see all of it or nothing.

    What is no file but a pipe or a device, or what this process has open, is written on. Raises
    OSError, with the path, if it cannot be.
    """
    try:
        if _is_stream(path):
            with path.open("ab") as stream:
                stream.write(content)
        else:
            _replace(Path(os.path.realpath(path)), content)
    except OSError as error:  # which may name a file that is not there any more, or none
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def _is_stream(path: Path) -> bool:
    """Whether no file may be put in place of what stands there: it is none, or /dev/stdout and
    the like lead to one that others go on to write.
    """
    is_open = os.path.abspath(path).startswith(("/dev/fd/", "/dev/std", "/proc/"))
    return path.exists() and (is_open or not path.is_file())


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.parent / f".{path.name}-{os.urandom(4).hex()}"
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with suppress(FileNotFoundError):  # who may read the file stays as it was
            os.chmod(name, stat.S_IMODE(path.stat().st_mode))
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    import tempfile

    return tempfile.TemporaryDirectory(prefix="cupyfa-")  # removed when the process ends
