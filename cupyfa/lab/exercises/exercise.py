"""Exercises: their files, their examples, and the mistakes that the judge recognizes."""

from __future__ import annotations

import re
import runpy
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cupyfa.errors import nearest

TASKS = Path(__file__).with_name("tasks")
# A solution marks its holes, the lines that a learner writes, with these Python or C++ comments.
_HOLE = re.compile(
    r"^(?P<indent>[ ]*)(?P<mark>\#|//)\ hole\n(?P<code>.*?)^[ ]*(?P=mark)\ end\n",
    re.M | re.S | re.X,
)


@dataclass(frozen=True)
class Example:
    """The arguments of one call, and the arrays that it must compute.

    A Python function receives ``arguments`` by name and returns the arrays of ``expected``, as a
    tuple if there are several. A kernel receives the arguments in order (arrays as pointers, int
    and float by value) and writes to the arrays that are keys of ``expected``. grid, block,
    shared_bytes: configuration of the kernel's launch. tolerance: maximum error of an element,
    relative to the array's largest number.
    """

    name: str
    arguments: Mapping[str, Any]
    expected: Mapping[str, Any]
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (32, 1, 1)
    shared_bytes: int = 0
    tolerance: float = 1e-5


@dataclass(frozen=True)
class Mistake:
    """A known wrong solution: how it differs from the right one, and what is wrong, by language."""

    change: tuple[tuple[str, str], ...]
    cause: Mapping[str, str]


@dataclass(frozen=True)
class Exercise:
    """A task with its files; ``entry`` is the function or kernel that a solution defines."""

    name: str
    group: Mapping[str, str]
    title: Mapping[str, str]
    entry: str
    starter: str
    hints: Mapping[str, tuple[str, ...]]
    mistakes: tuple[Mistake, ...]
    pages: tuple[str, ...] = field(default=())  # documentation pages on the topic

    @property
    def folder(self) -> Path:
        """The folder in this package that contains the task's files."""
        return TASKS / self.name

    @cached_property
    def file(self) -> str:
        """The name of the file that a learner completes."""
        return f"{self.name}.cu" if (self.folder / "solution.cu").is_file() else f"{self.name}.py"

    @property
    def is_kernel(self) -> bool:
        """Whether a solution is a CUDA kernel, to be run in the simulator, rather than Python."""
        return self.file.endswith(".cu")

    def statement(self, language: str) -> str:
        """Returns the task's description as Markdown."""
        suffix = "" if language == "en" else f".{language}"
        return (self.folder / f"task{suffix}.md").read_text(encoding="utf-8")

    def _marked_solution(self) -> str:
        return (self.folder / f"solution{Path(self.file).suffix}").read_text(encoding="utf-8")

    def solution(self) -> str:
        """Returns the right solution, without the comments that mark its holes."""
        return _HOLE.sub(lambda hole: hole["code"], self._marked_solution())

    def to_complete(self) -> str:
        """Returns the file that a learner starts with."""
        starters = iter(self.starter.strip("\n").split("\n---\n"))

        def emptied(hole: re.Match[str]) -> str:
            lines = next(starters).splitlines()
            return "".join(f"{hole['indent']}{line}".rstrip() + "\n" for line in lines)

        return _HOLE.sub(emptied, self._marked_solution())

    def wrong_solution(self, mistake: Mistake) -> str:
        """Returns the right solution, changed so that it contains a mistake."""
        text = self.solution()
        for before, after in mistake.change:
            if text.count(before) != 1:
                raise ValueError(f"{self.name}: {before!r} is not exactly once in the solution")
            text = text.replace(before, after)
        return text

    def examples(self) -> list[Example]:
        """Returns the example calls on which a solution is judged."""
        cases = runpy.run_path(str(self.folder / "cases.py"))
        return list(cases["examples"](np.random.default_rng(0)))


def exercises() -> dict[str, Exercise]:
    """Returns all exercises by name, in the order of the course."""
    contents = tomllib.loads((TASKS / "contents.toml").read_text(encoding="utf-8"))
    return {name: _read(name, group) for group in contents["groups"] for name in group["exercises"]}


def exercise_named(name: str) -> Exercise:
    """Returns an exercise. For an unknown name, raises ValueError with a suggestion."""
    known = exercises()
    if name not in known:
        raise ValueError(
            f"exercise {name!r} is unknown{nearest(name, known)}; cupyfa exercise list shows all"
        )
    return known[name]


def _read(name: str, group: Mapping[str, Any]) -> Exercise:
    task = tomllib.loads((TASKS / name / "task.toml").read_text(encoding="utf-8"))
    return Exercise(
        name=name,
        group={language: group[language] for language in ("en", "zh")},
        title=task["title"],
        entry=task["entry"],
        starter=task["starter"],
        hints={language: tuple(hints) for language, hints in task["hints"].items()},
        mistakes=tuple(
            Mistake(tuple((a, b) for a, b in x["change"]), x["cause"]) for x in task["mistakes"]
        ),
        pages=tuple(task.get("pages", ())),
    )


def arrays_in(example: Example) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the array arguments of an example with their names."""
    for name, value in example.arguments.items():
        if isinstance(value, np.ndarray):
            yield name, value
