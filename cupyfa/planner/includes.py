"""Follows a text's includes: one number for the content of all the files it reaches."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:<([^>\n]+)>|"([^"\n]+)")', re.MULTILINE)


def hashed(*parts: str | bytes) -> str:
    """sha256 over all parts and their lengths."""
    import hashlib

    total = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogateescape") if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()


def digest(files: Mapping[Path, bytes]) -> str:
    """sha256 over the names and the content of files."""
    return hashed(*(part for path, content in files.items() for part in (path.name, content)))


def reached(text: str, folders: Sequence[Path]) -> dict[Path, bytes]:
    """Every file that the text includes, directly or not, as they are met, and their content.

    Files are looked for as a compiler does, in the folders in their order; a name in quotes first
    beside the file that includes it. Those found nowhere are left to the compiler, and so are
    names that a macro stands for.
    """
    found: dict[Path, bytes] = {}
    _follow(text, None, folders, found)
    return found


def _follow(
    text: str, beside: Path | None, folders: Sequence[Path], found: dict[Path, bytes]
) -> None:
    for bracketed, quoted in _INCLUDE.findall(text):
        places = [beside, *folders] if quoted and beside else folders
        file = _first_file([place / (bracketed or quoted) for place in places])
        if file and file[0] not in found:
            path, content = file
            found[path] = content
            _follow(content.decode(errors="replace"), path.parent, folders, found)


def _first_file(candidates: Sequence[Path]) -> tuple[Path, bytes] | None:
    for path in candidates:
        if ".." in path.parts:
            path = path.resolve()  # so that files that include each other are met but once
        try:
            return path, path.read_bytes()
        except (OSError, ValueError):  # not there, a folder, a link to nowhere, not a name
            continue
    return None
