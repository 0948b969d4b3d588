"""Follows the includes of a text, and hashes the files that it reaches."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from functools import lru_cache
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
    met: set[str] = set()  # paths as texts: a Path for each candidate would take most of the time
    searched = [str(x) for x in folders]

    def follow(text: str, own: Sequence[str]) -> None:
        for bracketed, quoted in _included(text):
            places = [*own, *searched] if quoted else searched
            candidates = (os.path.join(place, bracketed or quoted) for place in places)
            path, content = _first_file(candidates, met)
            if path and content is not None:
                met.add(path)
                found[Path(path)] = content
                follow(content.decode(errors="replace"), [os.path.dirname(path)])

    follow(text, [])
    return found


@lru_cache(maxsize=256)  # more than all files of the project
def _included(text: str) -> list[tuple[str, str]]:
    return _INCLUDE.findall(text)


def _first_file(candidates: Iterable[str], met: Set[str]) -> tuple[str, bytes | None]:
    """The first file that is there, and its content unless it was met before."""
    for path in candidates:
        if "./" in path:  # files that include each other are met only once
            path = str(Path(path).resolve() if "../" in path else Path(path))
        if path in met:
            return path, None
        with suppress(OSError, ValueError), open(path, "rb") as file:  # a folder, not a name, …
            return path, file.read()
    return "", None
