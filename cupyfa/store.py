"""What the library keeps on disk between processes: a folder of its own, and small facts in it."""

from __future__ import annotations

import json
import os
import re
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any


def user_cache() -> Path | None:
    """The folder this user's programs keep their caches in; None for a user without a home."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return None


def folder() -> Path:
    """A folder that can be written to, and found in again if the user has such a one.

    CUPYFA_CACHE_DIR if that is set, else ``cupyfa`` among the user's caches; for want of both,
    one that lasts as long as the process.
    """
    chosen = os.environ.get("CUPYFA_CACHE_DIR")
    base = user_cache()
    path = Path(chosen) if chosen else base / "cupyfa" if base else None
    return path if path and can_write(path) else Path(_temporary().name)


def can_write(path: Path) -> bool:
    """Whether files can be made in a folder; makes the folder if it is not there."""
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
        warnings.warn(f"{path} cannot be written, so it is not remembered ({error})", stacklevel=2)


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file so that others see all of it or nothing. Raises OSError if it cannot."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="cupyfa-")  # removed when the process ends
