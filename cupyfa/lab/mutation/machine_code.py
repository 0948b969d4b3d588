"""Machine code of programs, compiled without a GPU: its lines, and whether it differs."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from cupyfa.planner import source
from cupyfa.planner.plan import PlannedLaunch

USUAL_ARCH = "90"  # for launches that run on several architectures, if the backend has none
ONE_READER = threading.Lock()  # source.reading is a setting of the process

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


def compiled_lines(
    launches: Sequence[PlannedLaunch], arch: str = USUAL_ARCH, jobs: int = 1
) -> dict[Path, set[int]]:
    """Returns the lines of each file to which an instruction of any launch belongs."""
    found: dict[Path, set[int]] = defaultdict(set)

    def lines(pair: tuple[PlannedLaunch, _Program]) -> list[tuple[Path, int]]:
        launch, program = pair
        return _lines_of(_code(*program, to_ptx=True, lines=True).decode(), launch)

    with ThreadPoolExecutor(jobs) as threads:
        for pairs in threads.map(lines, zip(launches, _programs(launches, {}, arch))):
            for path, line in pairs:
                found[path].add(line)
    return found


def _lines_of(ptx: str, launch: PlannedLaunch) -> list[tuple[Path, int]]:
    """Returns the files and lines that directives of PTX name."""
    own, shown = source.KERNELS / launch.path, source.shown(launch.path)
    files = {
        number: own if name.endswith(shown) else Path(name)
        for number, name in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', ptx, re.MULTILINE)
    }
    places = re.findall(r"^\s*\.loc\s+(\d+)\s+(\d+)", ptx, re.MULTILINE)
    return [(files[number], int(line)) for number, line in dict.fromkeys(places)]


def _programs(
    launches: Sequence[PlannedLaunch], copies: Mapping[Path, Path], arch: str
) -> list[_Program]:
    with ONE_READER, source.reading(copies):
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


def _code(
    text: str, name: str, arch: str, folders: tuple[Path, ...], to_ptx: bool, lines: bool = False
) -> bytes:
    from cupyfa.runtime.cuda.compiler import compile_text

    return compile_text(text, name, arch, folders, to_ptx=to_ptx, log=False, lines=lines)[0]


_usual_code = lru_cache(maxsize=256)(_code)
