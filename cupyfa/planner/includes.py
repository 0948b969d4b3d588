"""Follows the includes of a text, and hashes the files that it reaches."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
    """Every file that the text includes, directly or not, in order, and their content.

    Folders are searched in their order, as a compiler does; for a name in quotes first the folder
    of the file that includes it. Missing files and names made by macros are left to the compiler.
    """
    found: dict[Path, bytes] = {}

    def follow(text: str, own: Sequence[Path]) -> None:
        for bracketed, quoted in _INCLUDE.findall(text):
            places = [*own, *folders] if quoted else folders
            path, content = _first_file([place / (bracketed or quoted) for place in places])
            if path and path not in found:
                found[path] = content
                follow(content.decode(errors="replace"), [path.parent])

    follow(text, [])
    return found


def _first_file(candidates: Sequence[Path]) -> tuple[Path | None, bytes]:
    for path in candidates:
        if ".." in path.parts:
            path = path.resolve()  # so that files that include each other are met only once
        with suppress(OSError, ValueError):  # not there, a folder, a link to nowhere, not a name
            return path, path.read_bytes()
    return None, b""
