"""The cache directory, with compiled kernels and small JSON files.

Compiled kernels are loaded into the process, so the directory is used only if no other user can
change its contents; see ``refusal``. Symbolic links in it are not followed, and files that belong
to other users are treated as missing.
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
_IN_USE = 3600  # seconds after its last use before a compiled kernel may be removed
_TRIM_EVERY = 20  # a process trims the cache after this many new files
_MOST_FACTS = 64 << 20  # largest JSON file in the cache, in bytes
_MOST_COMPILED = 1 << 30  # largest compiled kernel, in bytes
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_written = count()
_elsewhere: dict[Path, Path] = {}  # actual paths of kernels whose cache path cannot be written


def user_cache() -> Path | None:
    """Returns the directory of this user's caches, or None for a user without a home."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return None


def chosen_folder() -> Path | None:
    """Returns CUPYFA_CACHE_DIR if it is set, else ``cupyfa`` in the user's cache directory."""
    if chosen := os.environ.get("CUPYFA_CACHE_DIR"):
        return Path(chosen)
    base = user_cache()
    return base / "cupyfa" if base else None


def folder() -> Path:
    """Returns the chosen directory with links resolved, or a temporary one if it is refused."""
    path = chosen_folder()
    return Path(os.path.realpath(path) if path and not refusal(path) else _temporary().name)


def refusal(path: Path | None) -> str | None:
    """Returns why a directory is not used, as a phrase that follows its name; None if it is used.

    A missing directory is created. The directory must be writable and belong to this user, and no
    other user may be able to write to it or replace it: its parent directories must belong to this
    user or to root, and must not be writable by others unless they are sticky, as /tmp is. Links
    along the path must belong to this user or to root.
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
            return f"is not used: other users can write to {place} (chmod go-w prevents that)"
        if status.st_uid not in trusted:
            return f"is not used: {place} belongs to another user"
    return None


def is_kept() -> bool:
    """Returns whether stored files outlive this process."""
    return refusal(chosen_folder()) is None


def warn_unless_kept() -> None:
    """Warns, once per process, if stored files are removed when the process ends."""
    path = chosen_folder()
    if why := refusal(path):
        _warn_unkept(path, why)


def remedy(variable: str = "CUPYFA_CACHE_DIR") -> str:
    """Returns the remedy for a folder that cannot be written, for messages."""
    return f"set {variable} to a writable folder of your own"


def give_cupy_a_folder() -> None:
    """Sets CUPY_CACHE_DIR if CuPy's cache is not writable; importing CuPy would otherwise fail."""
    usual = os.path.expanduser("~/.cupy/kernel_cache")
    if not can_write(Path(os.environ.get("CUPY_CACHE_DIR", usual))):
        os.environ["CUPY_CACHE_DIR"] = str(folder() / "cupy")


def can_write(path: Path) -> bool:
    """Returns whether files can be created in a directory; creates a missing directory."""
    import tempfile

    try:
        _make_folder(path)
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False


def _make_folder(path: Path) -> None:
    """Creates a directory and its parents for this user alone, whatever the umask is."""
    try:
        path.mkdir(mode=0o700)
    except FileNotFoundError:
        _make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError:  # the directory exists, perhaps on a read-only file system
        if not path.is_dir():
            raise


def facts_file(kind: str, about: str) -> Path:
    """Returns the path of the JSON file with facts of a kind about a subject, such as a device."""
    return folder() / kind / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', about)}.json"


def recall(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, or {} if the file is missing or damaged.

    Warns if the file is damaged.
    """
    try:
        facts = records.parsed(_read_own(path, _MOST_FACTS))
        if isinstance(facts, dict):
            return facts
        warnings.warn(f"{path} is not a JSON object and is ignored; delete it", stacklevel=2)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} cannot be read and is ignored ({error})", stacklevel=2)
    return {}


def remember(path: Path, facts: dict[str, Any]) -> None:
    """Writes a JSON file atomically; warns if it cannot be written."""
    try:
        _make_folder(path.parent)
        _replace(path, json.dumps(facts, indent=1).encode(), is_own=True)
    except OSError as error:
        why = error.strerror
        warnings.warn(f"{path} cannot be written, so nothing is stored ({why})", stacklevel=2)


def can_write_to(path: Path) -> bool:
    """Returns whether ``write_whole`` could write a file now, without creating a directory."""
    try:
        if is_stream(path):
            return os.access(path, os.W_OK)
        folder = Path(os.path.realpath(path)).parent
        return folder.is_dir() and can_write(folder)
    except OSError:  # no permission to enter a directory, or the name is too long
        return False


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file atomically; follows links, and appends to pipes, devices and open files."""
    try:
        if is_stream(path):
            with path.open("ab") as stream:
                stream.write(content)
        else:
            _replace(Path(os.path.realpath(path)), content)
    except OSError as error:  # the error may contain the path of a temporary file
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def limit() -> int:
    """Returns CUPYFA_CACHE_MB, the limit of compiled kernels (default 1000 MB), in bytes."""
    given = os.environ.get("CUPYFA_CACHE_MB") or "1000"
    if not (given.isdecimal() and given.isascii()):
        raise ValueError(f"CUPYFA_CACHE_MB is {given!r}; set a whole number of MB, or unset it")
    return int(given) * 10**6


def compiled(path: Path) -> bytes | None:
    """Returns a compiled kernel without its digest, or None; updates the file's time of last use.

    Raises ValueError for an invalid limit, even if nothing has to be compiled.
    """
    limit()
    place = place_of(path)
    content = unsealed(place)
    if content is not None:
        with suppress(OSError):  # the folder may be read-only
            os.utime(place, follow_symlinks=False)
    return content


def keep_compiled(path: Path, content: bytes) -> None:
    """Writes a compiled kernel, and occasionally removes the least recently used kernels.

    If ``path`` cannot be written, warns and stores the kernel in a temporary folder of this
    process; see ``place_of``.
    """
    warn_unless_kept()
    try:
        _replace(path, sealed(content), is_own=True)
    except OSError as error:  # for example, the disk is full, or a directory has this name
        other = Path(_temporary().name) / path.name
        if other == path:
            raise
        errors.warn(f"{path} cannot be written, so it is not stored ({error.strerror})")
        _replace(other, sealed(content), is_own=True)
        _elsewhere[path] = other
    if next(_written) % _TRIM_EVERY == 0:
        trim(path.parent)


def place_of(path: Path) -> Path:
    """Returns the path at which the compiled kernel for ``path`` is actually stored."""
    return _elsewhere.get(path, path)


def trim(folder: Path) -> None:
    """Removes the least recently used compiled kernels until the cache is within its limit.

    Kernels used in the last hour are kept, because another process may be about to load them. A
    process whose kernel was removed nevertheless compiles it again. Processes may trim in parallel.
    """
    found = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # another process may have removed the file
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
    """Appends a digest to the content, because a truncated binary would crash the process."""
    from hashlib import sha256

    return content + sha256(content).digest()


def unsealed(path: Path) -> bytes | None:
    """Returns the content of a sealed file, or None if it is missing or damaged."""
    try:
        content = _read_own(path, _MOST_COMPILED)
    except OSError:
        return None
    return content[:-32] if content[32:] and sealed(content[:-32]) == content else None


def is_stream(path: Path) -> bool:
    """Returns whether a path is a stream, such as a pipe or /dev/stdout, to be written in place."""
    is_open = os.path.abspath(path).startswith(("/dev/fd/", "/dev/std", "/proc/"))
    return path.exists() and (is_open or not path.is_file())


def _read_own(path: Path, most: int) -> bytes:
    """Reads a file of the cache. Raises OSError if another user might have written it.

    Does not follow links, and rejects pipes and other files that are not regular.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with _opened(path.parent, os.O_NOFOLLOW) as folder:
        handle = os.open(path.name, flags, dir_fd=folder)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        if status.st_uid != os.geteuid() or status.st_mode & _OTHERS_WRITE:
            raise PermissionError(errno.EPERM, "file writable by other users", os.fspath(path))
        if status.st_size > most:
            raise OSError(errno.EFBIG, f"file larger than {most:,} bytes", os.fspath(path))
        return file.read(most)


@contextmanager
def _opened(folder: Path, flags: int = 0) -> Iterator[int]:
    """Opens a directory; paths relative to its descriptor stay valid if directories are renamed."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags)
    try:
        yield handle
    finally:
        os.close(handle)


def _replace(path: Path, content: bytes, *, is_own: bool = False) -> None:
    """Writes a file atomically. is_own: whether only this user may read it, as for cache files."""
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
