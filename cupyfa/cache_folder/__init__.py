"""The cache directory and the small JSON files in it.

Compiled kernels are loaded into the process, so the directory is used only if no other user can
change its content: see ``refusal``. Links in it are not followed, and files that belong to other
users count as missing.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupyfa import errors
from cupyfa.cache_folder import records

if TYPE_CHECKING:
    import tempfile

COMPILED = re.compile(r"\w[\w-]*-[0-9a-f]{32}\.(so|cubin)")  # names of compiled kernels
_IN_USE = 3600  # seconds since its last use during which a compiled kernel is not removed
_TRIM_EVERY = 20  # new files after which a process trims the cache
_MOST_FACTS = 64 << 20  # the most bytes of a JSON file in the cache
_MOST_COMPILED = 1 << 30  # the most bytes of a compiled kernel
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_written = count()
_elsewhere: dict[Path, Path] = {}  # substitutes for folders that cannot be written


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
    """The chosen directory, without links, or a temporary one of this process if it is refused."""
    path = chosen_folder()
    return Path(os.path.realpath(path) if path and not refusal(path) else _temporary().name)


def refusal(path: Path | None) -> str | None:
    """Why a directory is not used, in words that follow its name; None if it is used.

    It is created if it does not exist. It must be writable and belong to this user, and nobody else
    may be able to write it, or to put another one in its place: the directories above it belong to
    this user or to root, and others cannot write them unless they are sticky, as /tmp is. Links on
    the way must have the same owners.
    """
    if path is None or not can_write(path):
        return "cannot be written"
    given, real = Path(os.path.abspath(path)), Path(os.path.realpath(path))
    trusted = {0, os.geteuid()}
    for link in filter(Path.is_symlink, (given, *given.parents)):
        if link.lstat().st_uid not in trusted:
            return f"is not used: the link {link} belongs to another user"
    if real.stat().st_uid != os.geteuid():
        return "is not used: it belongs to another user"
    for place in (real, *real.parents):
        status = place.stat()
        is_sticky = place != real and status.st_mode & stat.S_ISVTX
        if status.st_mode & _OTHERS_WRITE and not is_sticky:
            return f"is not used: other users can write {place} (chmod go-w takes that away)"
        if status.st_uid not in trusted:
            return f"is not used: {place} belongs to another user"
    return None


def is_kept() -> bool:
    """Whether stored files remain for later processes."""
    return refusal(chosen_folder()) is None


def warn_unless_kept() -> None:
    """Warns, once per process, if stored files are removed when the process ends."""
    path = chosen_folder()
    if why := refusal(path):
        _warn_unkept(path, why)


def remedy(variable: str = "CUPYFA_CACHE_DIR") -> str:
    """The remedy for a folder that cannot be written."""
    return f"set {variable} to a writable folder of your own"


def give_cupy_a_folder() -> None:
    """Sets a writable CUPY_CACHE_DIR, without which the import of CuPy fails, if there is none."""
    usual = os.path.expanduser("~/.cupy/kernel_cache")
    if not can_write(Path(os.environ.get("CUPY_CACHE_DIR", usual))):
        os.environ["CUPY_CACHE_DIR"] = str(folder() / "cupy")


def can_write(path: Path) -> bool:
    """Whether files can be created in a directory, which is created if it does not exist."""
    import tempfile

    try:
        _make_folder(path)
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False


def _make_folder(path: Path) -> None:
    """Makes a directory, and those above it, for this user alone, whatever the umask is."""
    try:
        path.mkdir(mode=0o700)
    except FileNotFoundError:
        _make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError:  # it exists, perhaps on a read-only file system
        if not path.is_dir():
            raise


def facts_file(kind: str, about: str) -> Path:
    """The file of one kind ("peaks", "tuned", …) about a device or another subject."""
    return folder() / kind / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', about)}.json"


def recall(path: Path) -> dict[str, Any]:
    """The content of a file; {} without one, and {} with a warning for a damaged one."""
    try:
        facts = records.parsed(_read_own(path, _MOST_FACTS))
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
        _make_folder(path.parent)
        _replace(path, json.dumps(facts, indent=1).encode(), is_own=True)
    except OSError as error:
        why = error.strerror
        warnings.warn(f"{path} cannot be written, so nothing is stored ({why})", stacklevel=2)


def can_write_to(path: Path) -> bool:
    """Whether ``write_whole`` could write a file now, without creating a directory."""
    try:
        if is_stream(path):
            return os.access(path, os.W_OK)
        folder = Path(os.path.realpath(path)).parent
        return folder.is_dir() and can_write(folder)
    except OSError:  # no permission to enter a directory, or too long a name
        return False


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file atomically; follows links, and appends to pipes, devices and open files."""
    try:
        if is_stream(path):
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
    """Returns a compiled kernel without its digest, or None, and updates its time of last use.

    Raises ValueError for an invalid limit, which otherwise only a compilation would notice.
    """
    limit()
    place = place_of(path)
    content = unsealed(place)
    if content is not None:
        with suppress(OSError):  # the folder is read-only
            os.utime(place, follow_symlinks=False)
    return content


def keep_compiled(path: Path, content: bytes) -> None:
    """Writes a compiled kernel, and now and then removes the least recently used ones.

    If it cannot be written where it belongs, this process keeps it elsewhere and warns: see
    ``place_of``.
    """
    warn_unless_kept()
    try:
        _replace(path, sealed(content), is_own=True)
    except OSError as error:  # the disk is full, or a directory has this name
        other = Path(_temporary().name) / path.name
        if other == path:
            raise
        errors.warn(f"{path} cannot be written, so it is not stored ({error.strerror})")
        _replace(other, sealed(content), is_own=True)
        _elsewhere[path] = other
    if next(_written) % _TRIM_EVERY == 0:
        trim(path.parent)


def place_of(path: Path) -> Path:
    """The path at which the compiled kernel for this path is actually stored."""
    return _elsewhere.get(path, path)


def trim(folder: Path) -> None:
    """Removes the least recently used compiled kernels above the limit.

    Kernels used in the last hour are kept: another process may be about to load them. A process
    that loses a kernel nevertheless compiles it again. Two processes may trim at the same time.
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
    """Adds a digest to the content, because loading a truncated binary would end the process."""
    from hashlib import sha256

    return content + sha256(content).digest()


def unsealed(path: Path) -> bytes | None:
    """The content of a sealed file; None if it is missing or damaged."""
    try:
        content = _read_own(path, _MOST_COMPILED)
    except OSError:
        return None
    return content[:-32] if content[32:] and sealed(content[:-32]) == content else None


def is_stream(path: Path) -> bool:
    """Whether a path must not be replaced: not a regular file, or an open one (/dev/stdout)."""
    is_open = os.path.abspath(path).startswith(("/dev/fd/", "/dev/std", "/proc/"))
    return path.exists() and (is_open or not path.is_file())


def _read_own(path: Path, most: int) -> bytes:
    """The content of a file of the cache, if this user alone can have written it.

    Does not follow links or wait for pipes. Raises OSError for all other files.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with _opened(path.parent, os.O_NOFOLLOW) as folder:
        handle = os.open(path.name, flags, dir_fd=folder)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
        if status.st_uid != os.geteuid() or status.st_mode & _OTHERS_WRITE:
            raise PermissionError(errno.EPERM, "other users can write it", os.fspath(path))
        if status.st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", os.fspath(path))
        return file.read(most)


@contextmanager
def _opened(folder: Path, flags: int = 0) -> Iterator[int]:
    """Opens a directory; paths relative to the descriptor stay valid if directories are renamed."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags)
    try:
        yield handle
    finally:
        os.close(handle)


def _replace(path: Path, content: bytes, *, is_own: bool = False) -> None:
    """Writes a file whole or not at all. is_own: a file of the cache, which others cannot read."""
    if not is_own:
        path.parent.mkdir(parents=True, exist_ok=True)
    with _opened(path.parent, os.O_NOFOLLOW if is_own else 0) as folder:
        name = f".{path.name}-{os.urandom(4).hex()}"
        mode = 0o600 if is_own else 0o666
        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode, dir_fd=folder)
        try:
            if not is_own:
                with suppress(FileNotFoundError):  # keep the permissions of an existing file
                    os.chmod(name, stat.S_IMODE(path.stat().st_mode), dir_fd=folder)
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            raise


@cache
def _warn_unkept(chosen: Path | None, why: str) -> None:
    what = chosen or "the cache folder"
    errors.warn(f"{what} {why}, so nothing is stored; {remedy()}")


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    import tempfile

    return tempfile.TemporaryDirectory(prefix="cupyfa-")  # removed when the process ends
