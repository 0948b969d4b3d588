"""The ladder's measurements on the pages of the project."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cupyfa import store
from cupyfa.bench import sweeps
from cupyfa.bench.results import BASELINE, BEFORE, Measurement, Results
from cupyfa.ladder import LADDER
from cupyfa.problem import Problem
from cupyfa.report import tables as report

README, ITS_TRANSLATIONS = "README.md", ("README.zh-CN.md",)
USUAL_LENGTH = sweeps.USUAL["forward"]["M"]
_VERSIONS = ("driver", "cuda", "nvrtc", "cupy", "compiler", "cupyfa")
_FILES = re.compile(r" --(readme|(save|plot|from)[ =]\S+)")  # no part of what is measured


def at_length(rows: Sequence[Measurement], M: int | None) -> list[Measurement]:
    """The rungs of one length: M, or else the usual one, or, if nothing was timed there, the
    longest of those at which most rungs were.

    Raises ValueError if none was measured, one twice, or other things differ than the length and
    what float32 is rounded to, of which each rung has its own.
    """
    others = ", ".join(dict.fromkeys(row.kernel for row in rows))
    rows = [row for row in rows if row.kernel in LADDER[row.operation]]
    if not rows:
        raise ValueError(
            f"there is no rung to make a ladder of{f', but {others}' if others else ''}; measure "
            "rungs with cupyfa ladder --save"
        )
    lengths = sorted({row.problem.M for row in rows})
    timed = Counter(row.problem.M for row in rows if row.milliseconds)
    if M is None:
        M = USUAL_LENGTH if timed[USUAL_LENGTH] else max(lengths, key=lambda x: (timed[x], x))
    chosen = [row for row in rows if row.problem.M == M]
    problems = {row.problem for row in chosen}
    is_twice = len(chosen) > len({row.kernel for row in chosen})
    if len(problems) > 1 and (is_twice or len({_unrounded(x) for x in problems}) > 1):
        raise ValueError(f"a ladder is of one problem; here are {', '.join(map(str, problems))}")
    if not chosen:
        raise ValueError(f"M={M} was not measured; there are {', '.join(map(str, lengths))}")
    return chosen


def problem_of(rows: Sequence[Measurement]) -> Problem:
    """The problem that rungs have in common."""
    first = rows[0].problem
    return first if all(row.problem == first for row in rows) else _unrounded(first)


def _unrounded(problem: Problem) -> Problem:
    return problem.with_options(precision=None)


def rungs(rows: Sequence[Measurement]) -> list[dict[str, Any]]:
    """The rows of a ladder's table, from those that ``at_length`` finds."""
    return [
        {
            "rung": row.kernel,
            "adds": LADDER[row.operation][row.kernel].adds,
            "ms": row.time,
            "TFLOP/s": _short(row.tflops),
            "%_of_baseline": _short(_percent(row)),
            "%_of_peak": _short(row.percent_of_peak),
            "x_rung_before": _short(row.factors.get(BEFORE)),
        }
        for row in rows
    ]


def described(results: Results, problem: Problem) -> str:
    """What a ladder was measured on, as a line of Markdown."""
    about = results.environment
    versions = [f"{name} {about[name]}" for name in _VERSIONS if name in about]
    command = _FILES.sub("", about["command"])
    return (
        f"Measured on {about['device']} ({', '.join(versions)}): {problem}; `{command}`. "
        "Shares and steps are medians over the rounds, in which the rungs take turns."
    )


def title(results: Results, problem: Problem) -> str:
    """What a picture of several lengths was measured on."""
    sizes = re.sub(r" [MN]=\d+| scale=\S+", "", str(problem))
    return f"{results.environment['device']}: {sizes}"


def publish(folder: Path, results: Results, rows: Sequence[Measurement]) -> list[Path]:
    """Writes a ladder between the markers of README.md and its translations; returns the files.

    The markers name its operation. Raises ValueError if there is no README.md in the folder, or if
    a page has no markers.
    """
    pages = [folder / name for name in (README, *ITS_TRANSLATIONS) if (folder / name).is_file()]
    if not pages or pages[0].name != README:
        raise ValueError(f"{folder} has no {README}; run this in a checkout of the project")
    table = report.markdown(rungs(rows))
    text = f"{table}\n\n{described(results, problem_of(rows))}\n"
    changed = {page: _marked(page, rows[0].operation, text) for page in pages}
    for page, content in changed.items():
        store.write_whole(page, content.encode())
    return pages


def _marked(page: Path, operation: str, text: str) -> str:
    """The page with the text between the markers of an operation."""
    first, last = f"<!-- measured {operation} -->", f"<!-- /measured {operation} -->"
    content, count = re.subn(
        f"(?<={first}\n).*?(?={last})",
        lambda _: text,
        page.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    if count != 1:
        raise ValueError(f"{page} needs one {first} and one {last} after it")
    return content


def _percent(row: Measurement) -> float | None:
    """The speed as a share of the baseline's."""
    first = next(iter(LADDER[row.operation]))
    share = 1.0 if row.kernel == first and row.time else row.factors.get(BASELINE)
    return None if share is None else 100 * share


def _short(value: float | None) -> float | None:
    """Three digits of it."""
    return None if value is None else float(f"{value:.3g}")
