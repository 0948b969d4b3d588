"""Comparison of a mutant's machine code with that of its kernel, compiled without a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from cupyfa.planner import source
from cupyfa.planner.plan import PlannedLaunch

USUAL_ARCH = "90"  # for launches that run on several architectures, if the backend has none
_one_reader = threading.Lock()  # source.reading is a setting of the process

# A program: text, name of the file, architecture, include folders.
_Program = tuple[str, str, str, tuple[Path, ...]]


def differ(
    launches: Sequence[PlannedLaunch], copies: Mapping[Path, Path], arch: str = USUAL_ARCH
) -> bool:
    """Returns whether any launch has other machine code if its files are read from copies.

    copies: copies of folders, as for ``source.reading``.
    """
    return any(
        _differs(*pair)
        for pair in zip(_programs(launches, {}, arch), _programs(launches, copies, arch))
    )


def _programs(
    launches: Sequence[PlannedLaunch], copies: Mapping[Path, Path], arch: str
) -> list[_Program]:
    with _one_reader, source.reading(copies):
        return [
            (source.text(x), f"{x.entry}.cu", x.target or arch, source.include_folders(x))
            for x in launches
        ]


def _differs(right: _Program, changed: _Program) -> bool:
    """Compares PTX first, which takes a part of the time of compiling to machine code."""
    from cupyfa.runtime.cuda.compiler import CompileException

    try:
        pairs: Iterator[tuple[bytes, bytes]] = (
            (_usual_code(*right, to_ptx), _code(*changed, to_ptx)) for to_ptx in (True, False)
        )
        return all(one != other for one, other in pairs)
    except CompileException:
        return True


def _code(text: str, name: str, arch: str, folders: tuple[Path, ...], to_ptx: bool) -> bytes:
    from cupyfa.runtime.cuda.compiler import compile_text

    return compile_text(text, name, arch, folders, to_ptx=to_ptx, log=False)[0]


_usual_code = lru_cache(maxsize=256)(_code)
