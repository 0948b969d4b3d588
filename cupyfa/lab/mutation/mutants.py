"""The mutants of a kernel: copies of its files, each with one change."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from pathlib import Path

from cupyfa.lab.mutation.kinds import Change, changes
from cupyfa.ladder.kernel import Kernel, Launch
from cupyfa.planner import source
from cupyfa.planner.evaluate import source_path
from cupyfa.runtime import simulator

# Headers with the same names replace these in the simulator, so a change of them has no effect.
_REPLACED = Path(simulator.__file__).parent / "include"


@dataclass(frozen=True)
class Mutant:
    """A kernel with one change, numbered from 1 in the order of files and places.

    root, file: the folder that contains the kernel's files, and the changed file in it.
    line, column: the place of the change, from 1.
    """

    number: int
    root: Path
    file: Path
    line: int
    column: int
    change: Change = field(repr=False)
    code: bytes = field(repr=False, compare=False)  # the file before the change

    @property
    def kind(self) -> str:
        return self.change.kind

    @property
    def place(self) -> str:
        """The place of the change as file:line:column."""
        shown = self.root.name / self.file if self.root == source.KERNELS else self.file
        return f"{shown}:{self.line}:{self.column}"

    @property
    def path(self) -> Path:
        return self.root / self.file

    @property
    def before(self) -> str:
        """The lines with the code to replace, joined into one."""
        return _lines(self.code, self.change.start, self.change.end)

    @property
    def after(self) -> str:
        """The same lines after the change."""
        start, added = self.change.start, len(self.change.new.encode())
        return _lines(self.changed(), start, start + added)

    def changed(self, new: str | None = None) -> bytes:
        """Returns the file after the change, or with ``new`` in the place of the change."""
        text = (self.change.new if new is None else new).encode()
        return self.code[: self.change.start] + text + self.code[self.change.end :]

    def copy_to(self, folder: Path, content: bytes) -> None:
        """Fills an empty folder with links to the kernel's files, and the changed file."""
        here, there = self.root, folder
        for part in self.file.parts:
            there.mkdir(exist_ok=True)
            for path in here.iterdir():
                if path.name != part:
                    (there / path.name).symlink_to(path)
            here, there = here / part, there / part
        there.write_bytes(content)


def _lines(code: bytes, start: int, end: int) -> str:
    first = code.rfind(b"\n", 0, start) + 1
    last = code.find(b"\n", end)
    return " ".join(code[first : last if last >= 0 else len(code)].decode().split())


def mutants_of(kernel: Kernel) -> list[Mutant]:
    """Returns all mutants of a kernel's files: first those of its .cu files, then of headers.

    The numbers depend on the files alone. Files of a kernel outside the library are those in its
    folder. Raises MissingParser without tree-sitter, and OSError for a missing file.
    """
    root, files = files_of(kernel)
    found = (x for file in files for x in mutants_in(root, file))
    return [replace(x, number=number) for number, x in enumerate(found, 1)]


def mutants_in(root: Path, file: Path) -> Iterator[Mutant]:
    """Yields the mutants with a change in one file, numbered from 1."""
    code = (root / file).read_bytes()
    for number, change in enumerate(changes(code), 1):
        line = code.count(b"\n", 0, change.start) + 1
        column = change.start - code.rfind(b"\n", 0, change.start)
        yield Mutant(number, root, file, line, column, change, code)


def files_of(kernel: Kernel) -> tuple[Path, list[Path]]:
    """Returns the folder of a kernel's files, and the files that mutants change, relative to it."""
    launches = [x for x in kernel.launches if isinstance(x, Launch)]
    own = dict.fromkeys(source.KERNELS / source_path(kernel, x) for x in launches)
    options = kernel.operation != "softmax"
    reached = {header for path in own for header in source.reachable(path, options=options)}
    root = source.KERNELS
    if kernel.folder is not None:
        folder = Path(kernel.folder).resolve()
        root = folder if any(x.is_relative_to(folder) for x in reached) else root
    headers = sorted(x for x in reached - own.keys() if x.is_relative_to(root))
    files = [*(x for x in own if x.is_relative_to(root)), *headers]
    replaced = {source.INCLUDE / x.relative_to(_REPLACED) for x in _REPLACED.rglob("*.cuh")}
    return root, [x.relative_to(root) for x in files if x not in replaced]


def sample(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Returns ``count`` mutants, or all if there are fewer, in the order of their numbers.

    The kinds take turns, since the most frequent ones are the easiest to find.
    """
    by_kind: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        by_kind[mutant.kind].append(mutant)
    chance = random.Random(seed)
    for of_kind in by_kind.values():
        chance.shuffle(of_kind)
    order = sorted(by_kind)
    chance.shuffle(order)
    turns = chain.from_iterable(zip_longest(*(by_kind[kind] for kind in order)))
    drawn = [x for x in turns if x is not None][:count]
    return sorted(drawn, key=lambda x: x.number)
