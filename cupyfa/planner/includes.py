"""Processing of #include lines: finds, hashes and inlines the files that a source includes."""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

# Patterns are strings, which ``re`` compiles on first use, because compiled ones slow the import.
_INCLUDE = r'(?m:^[ \t]*#[ \t]*include[ \t]*(?:<([^>\n]+)>|"([^"\n]+)"))'
# Matches the next comment, string or character literal.
NO_CODE = r"""(?s://[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])')"""
_LINE = rf"{_INCLUDE}[^\n]*\n?|{NO_CODE}"
_ONCE = r"(?m)^[ \t]*#[ \t]*pragma[ \t]+once\b[^\n]*\n?"
_LEFT_AT_ONCE = r"(?m)^// ---- [^\n]*, continued\n\s*(?=// ---- )"


def hashed(*parts: str | bytes) -> str:
    """Returns the SHA-256 of all parts and their lengths."""
    import hashlib

    total = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogateescape") if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()


def digest(files: Mapping[Path, bytes]) -> str:
    """Returns the SHA-256 of names and contents of files."""
    return hashed(*(part for path, content in files.items() for part in (path.name, content)))


def reached(text: str, folders: Sequence[Path]) -> dict[Path, bytes]:
    """Returns path and content of every file that the text includes, directly or indirectly.

    Folders are searched in order, as by a compiler. For a name in quotes, the including file's
    folder comes first. Missing files and names formed by macros are left to the compiler.
    """
    found: dict[Path, bytes] = {}
    met: set[str] = set()  # strings, because Path objects would dominate the run time
    searched = [str(x) for x in folders]

    def follow(text: str, own: Sequence[str]) -> None:
        for bracketed, quoted in _included(text):
            candidates = _candidates(bracketed, quoted, own, searched)
            path, content = _first_file(candidates, met)
            if path and content is not None:
                met.add(path)
                found[Path(path)] = content
                follow(content.decode(errors="replace"), [os.path.dirname(path)])

    follow(text, [])
    return found


def inlined(
    texts: Mapping[str, str], folders: Sequence[Path], title_of: Callable[[Path], str]
) -> str:
    """Concatenates texts below title lines, and replaces the first include of a file with the file.

    Title lines mark where a file begins and where the including file continues. ``#pragma once`` is
    removed, because compilers warn about it in a main file.
    """
    met: set[str] = set()
    searched = [str(x) for x in folders]

    def inline(text: str, title: str, own: Sequence[str]) -> str:
        def replace(line: re.Match[str]) -> str:
            if not (line[1] or line[2]):  # not an include
                return line[0]
            path, content = _first_file(_candidates(line[1], line[2], own, searched), met)
            if content is None:  # not found, or inlined before
                return "" if path else line[0]
            met.add(path)
            header = re.sub(_ONCE, "", content.decode(errors="replace"))
            inner = inline(header, title_of(Path(path)), [os.path.dirname(path)])
            return f"{inner}// ---- {title}, continued\n"

        return f"// ---- {title}\n{re.sub(_LINE, replace, text).rstrip()}\n\n"

    together = "".join(inline(text, title, []) for title, text in texts.items())
    return re.sub(_LEFT_AT_ONCE, "", together).rstrip("\n") + "\n"


@lru_cache(maxsize=256)  # exceeds the number of files in kernels/
def _included(text: str) -> list[tuple[str, str]]:
    return re.findall(_INCLUDE, text)


def _candidates(
    bracketed: str, quoted: str, own: Sequence[str], searched: Sequence[str]
) -> Iterable[str]:
    """Yields the paths to try for an include; for a quoted name, ``own`` comes first."""
    folders = [*own, *searched] if quoted else searched
    return (os.path.join(folder, bracketed or quoted) for folder in folders)


def _first_file(candidates: Iterable[str], met: Set[str]) -> tuple[str, bytes | None]:
    """Returns the first existing candidate, and its content unless it is in ``met``."""
    for path in candidates:
        if "./" in path:  # normalize, so that ``met`` recognizes files that include each other
            path = str(Path(path).resolve() if "../" in path else Path(path))
        if path in met:
            return path, None
        with suppress(OSError, ValueError), open(path, "rb") as file:  # not a file
            return path, file.read()
    return "", None
