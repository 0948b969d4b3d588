"""The cache directory and the small JSON files in it."""

from __future__ import annotations

import json
import os
import re
import stat
import time
import warnings
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupyfa import errors

if TYPE_CHECKING:
    import tempfile

COMPILED = re.compile(r"\w[\w-]*-[0-9a-f]{32}\.(so|cubin)")  # names of compiled kernels
_IN_USE = 3600  # seconds since its last use in which a compiled kernel stays
_TRIM_EVERY = 20  # new files of a process
_written = count()


def user_cache() -> Path | None:
    """The directory of this user's caches; None for a user without a home."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return None


def chosen_folder() -> Path | None:
    """CUPYFA_CACHE_DIR if it is set, else ``cupyfa`` in the user's cache directory."""
    if chosen := os.environ.get("CUPYFA_CACHE_DIR"):
        return Path(chosen)
    base = user_cache()
    return base / "cupyfa" if base else None


def folder() -> Path:
    """A writable directory: the chosen one, or a temporary one of this process."""
    path = chosen_folder()
    return path if path and can_write(path) else Path(_temporary().name)


def is_kept() -> bool:
    """Whether what is stored is there for later processes."""
    return folder() == chosen_folder()


def warn_unless_kept() -> None:
    """Warns, once in a process, if what is stored ends with it."""
    if not is_kept():
        _warn_unkept(chosen_folder())


def remedy(variable: str = "CUPYFA_CACHE_DIR") -> str:
    """What to do about a folder that cannot be written."""
    return f"set {variable} to a writable folder"


def give_cupy_a_folder() -> None:
    """Sets a writable CUPY_CACHE_DIR, without which the import of CuPy fails, if there is none."""
    usual = os.path.expanduser("~/.cupy/kernel_cache")
    if not can_write(Path(os.environ.get("CUPY_CACHE_DIR", usual))):
        os.environ["CUPY_CACHE_DIR"] = str(folder() / "cupy")


def can_write(path: Path) -> bool:
    """Whether files can be created in a directory, which is created if it does not exist."""
    import tempfile

    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False


def facts_file(kind: str, about: str) -> Path:
    """The file of one kind ("peaks", "tuned", …) about a device or another subject."""
    return folder() / kind / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', about)}.json"


def recall(path: Path) -> dict[str, Any]:
    """The content of a file; {} without one, and {} with a warning for a damaged one."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(facts, dict):
            return facts
        warnings.warn(f"{path} has no JSON object and is ignored; delete it", stacklevel=2)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} cannot be read and is ignored ({error})", stacklevel=2)
    return {}


def remember(path: Path, facts: dict[str, Any]) -> None:
    """Writes a file completely or not at all; warns if that is not possible."""
    try:
        write_whole(path, json.dumps(facts, indent=1).encode())
    except OSError as error:
        why = error.strerror
        warnings.warn(f"{path} cannot be written, so nothing is stored ({why})", stacklevel=2)


def can_write_to(path: Path) -> bool:
    """Whether ``write_whole`` could write a file now, without creating a directory."""
    try:
        if _is_stream(path):
            return os.access(path, os.W_OK)
        folder = Path(os.path.realpath(path)).parent
        return folder.is_dir() and can_write(folder)
    except OSError:  # no permission to enter a directory, or too long a name
        return False


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file atomically; follows links, and appends to pipes, devices and open files."""
    try:
        if _is_stream(path):
            with path.open("ab") as stream:
                stream.write(content)
        else:
            _replace(Path(os.path.realpath(path)), content)
    except OSError as error:  # its own path may be that of a temporary file
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def limit() -> int:
    """The bytes that compiled kernels may take: CUPYFA_CACHE_MB, by default 1000, in MB of 10^6."""
    given = os.environ.get("CUPYFA_CACHE_MB") or "1000"
    if not (given.isdecimal() and given.isascii()):
        raise ValueError(f"CUPYFA_CACHE_MB is {given!r}; give a whole number of MB, or unset it")
    return int(given) * 10**6


def compiled(path: Path) -> bytes | None:
    """A compiled kernel, without its seal; None if there is none. Its time becomes that of use.

    Raises ValueError for a wrong limit, which else only the first compilation would notice.
    """
    limit()
    content = unsealed(path)
    if content is not None:
        with suppress(OSError):  # a folder that is only read
            os.utime(path)
    return content


def keep_compiled(path: Path, content: bytes) -> None:
    """Writes a compiled kernel, and now and then removes the least recently used ones."""
    warn_unless_kept()
    write_whole(path, sealed(content))
    if next(_written) % _TRIM_EVERY == 0:
        trim(path.parent)


def trim(folder: Path) -> None:
    """Removes the least recently used compiled kernels above the limit.

    Those of the last hour stay: another process may be about to load them. One that loses a kernel
    all the same compiles it again, and two processes may trim at a time.
    """
    found = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # removed by another process
                if COMPILED.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime, status.st_size, entry.path))
    excess = sum(size for _, size, _ in found) - limit()
    for used, size, path in sorted(found):
        if excess <= 0 or used > time.time() - _IN_USE:
            return
        with suppress(OSError):
            os.unlink(path)
            excess -= size


def sealed(content: bytes) -> bytes:
    """Content for a file with its digest: loading a binary that was cut ends the process."""
    from hashlib import sha256

    return content + sha256(content).digest()


def unsealed(path: Path) -> bytes | None:
    """The content of a sealed file; None if there is none, or a damaged one."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    return content[:-32] if content[32:] and sealed(content[:-32]) == content else None


def _is_stream(path: Path) -> bool:
    """Whether a path must not be replaced: it is no regular file, or it is open (/dev/stdout)."""
    is_open = os.path.abspath(path).startswith(("/dev/fd/", "/dev/std", "/proc/"))
    return path.exists() and (is_open or not path.is_file())


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.parent / f".{path.name}-{os.urandom(4).hex()}"
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with suppress(FileNotFoundError):  # the permissions stay
            os.chmod(name, stat.S_IMODE(path.stat().st_mode))
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise


@cache
def _warn_unkept(chosen: Path | None) -> None:
    what = chosen or "the cache folder"
    errors.warn(f"{what} cannot be written, so nothing is stored; {remedy()}")


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    import tempfile

    return tempfile.TemporaryDirectory(prefix="cupyfa-")  # removed when the process ends
