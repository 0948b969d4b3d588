"""Counts and removes the cache files of cupyfa and of CuPy."""

import os
import re
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from cupyfa import cache_folder

FACTS = ("peaks", "tuned", "tuning")
KINDS = {
    "compiled": "compiled kernels, at most CUPYFA_CACHE_MB (1000)",
    "peaks": "measured peak rates of devices",
    "tuned": "the fastest tile sizes on each device",
    "tuning": "measurements of `cupyfa tune`",
    "zig": "the cache of zig, the compiler of the ziglang wheel",
    "leftovers": "unfinished files of killed processes, at least an hour old",
    "cupy": "kernels that CuPy compiled, for all programs",
}
_HOUR = 3600
_RANDOM = "[a-z0-9_]{8}"  # the random part of a name from tempfile
_NAMES = {
    "compiled": cache_folder.COMPILED.pattern,
    **{kind: r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.json" for kind in FACTS},
    "zig": r"zig",
    "leftovers": rf"build-{_RANDOM}|\..+-{_RANDOM}",
    "cupy": r"[0-9a-f]{32,64}(_2)?\.(cubin|ltoir)(\.cu)?",
}


def kept(kind: str) -> dict[str, Any]:
    """Returns the number, total bytes, newest modification time and folder of files of a kind."""
    stats = [stat for item in _items(kind) for stat in _files(item).values()]
    newest = max((datetime.fromtimestamp(stat.st_mtime) for stat in stats), default=None)
    folder = folder_of(kind)
    return {
        "kind": kind,
        "files": len(stats),
        "bytes": sum(stat.st_size for stat in stats),
        "newest": newest.isoformat(sep=" ", timespec="seconds") if newest else None,
        "path": str(folder) if folder else None,
    }


def clear(kind: str, *, dry_run: bool = False) -> dict[str, Any]:
    """Removes the files of one of KINDS, or only counts them if ``dry_run``.

    Returns the number of removed files, their total bytes, and the number of files that remain.
    Warns if a file cannot be removed.
    """
    files = size = left = 0
    refused: OSError | None = None
    for item in _items(kind):
        before = _files(item)
        try:
            if item.is_dir() and not dry_run:
                shutil.rmtree(item)
            elif not dry_run:
                item.unlink(missing_ok=True)
        except OSError as error:
            refused = error
        after = {} if dry_run else _files(item)
        files += len(before) - len(after)
        size += sum(stat.st_size for path, stat in before.items() if path not in after)
        left += len(after)
    if refused is not None:
        warnings.warn(f"{refused.filename} cannot be removed ({refused.strerror})", stacklevel=2)
    return {"kind": kind, "files": files, "bytes": size, "left": left}


def folder_of(kind: str) -> Path | None:
    """Returns the folder that holds a kind of files; None if the user has no home directory."""
    if kind == "cupy":
        return Path(os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache"))
    base = cache_folder.chosen_folder()
    return base / kind if base and kind in FACTS else base


def _items(kind: str) -> Iterator[Path]:
    folders = [folder_of(x) for x in (kind, *(FACTS if kind == "leftovers" else ()))]
    if kind == "cupy" and (base := cache_folder.chosen_folder()):
        folders.append(base / "cupy")  # where CuPy's files go if its default folder is not writable
    for entry in (x for folder in dict.fromkeys(folders) if folder for x in _entries(folder)):
        is_folder = entry.name == "zig" or entry.name.startswith("build-")
        plain = entry.is_dir if is_folder else entry.is_file
        if re.fullmatch(_NAMES[kind], entry.name) and plain(follow_symlinks=False):
            with suppress(FileNotFoundError):  # another process may have removed it
                changed = entry.stat(follow_symlinks=False).st_mtime
                # Newer build folders and temporary files may still be in use.
                if kind != "leftovers" or time.time() - changed > _HOUR:
                    yield Path(entry.path)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Lists a folder. If the folder cannot be read, warns and returns an empty list."""
    leads_out = folder.name in FACTS and folder.is_symlink()
    if leads_out or not os.path.lexists(folder):
        return []
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        warnings.warn(f"{folder} cannot be read and is skipped ({error})", stacklevel=2)
        return []


def _files(item: Path) -> dict[Path, os.stat_result]:
    """Maps a file, or all files below a folder, to their status; does not follow links."""
    if not item.is_dir():
        paths = [item]
    else:
        paths = [Path(place) / name for place, _, names in os.walk(item) for name in names]
    found = {}
    for path in paths:
        with suppress(FileNotFoundError):  # another process may have removed it
            found[path] = path.lstat()
    return found
