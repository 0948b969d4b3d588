"""Writes tables of measurements into the documentation page of the ladder and its translation."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cupyfa import cache_folder
from cupyfa.lab.bench import sweeps
from cupyfa.lab.bench.results import BASELINE, BEFORE, Measurement, Results
from cupyfa.lab.report.tables import markdown, three_digits
from cupyfa.ladder import LADDER
from cupyfa.problem.problem import Problem

PAGES = ("docs/ladder.md", "docs/zh/ladder.md")
USUAL_LENGTH = sweeps.USUAL["forward"]["M"]
_VERSIONS = ("driver", "cuda", "nvrtc", "cupy", "compiler", "cupyfa")
_FILES = re.compile(r" --(docs|(save|plot|from)[ =]\S+)")  # options that do not influence times


def at_length(rows: Sequence[Measurement], M: int | None) -> list[Measurement]:
    """Returns the rows of rungs at one length, by default USUAL_LENGTH.

    If no rung was timed at the default length, selects the length with the most timed rungs, or the
    longest of several such lengths. Raises ValueError if there is no rung, if a rung occurs twice,
    or if problems differ in more than the length and the precision, which each rung chooses.
    """
    others = ", ".join(dict.fromkeys(row.kernel for row in rows))
    rows = [row for row in rows if row.kernel in LADDER[row.operation]]
    if not rows:
        raise ValueError(
            f"the results contain no rung{f', but {others}' if others else ''}; measure rungs "
            "with cupyfa ladder --save"
        )
    lengths = sorted({row.problem.M for row in rows})
    timed = Counter(row.problem.M for row in rows if row.milliseconds)
    if M is None:
        M = USUAL_LENGTH if timed[USUAL_LENGTH] else max(lengths, key=lambda x: (timed[x], x))
    chosen = [row for row in rows if row.problem.M == M]
    problems = {row.problem for row in chosen}
    is_twice = len(chosen) > len({row.kernel for row in chosen})
    if len(problems) > 1 and (is_twice or len({_unrounded(x) for x in problems}) > 1):
        found = ", ".join(map(str, problems))
        raise ValueError(
            f"a ladder requires measurements of a single problem; the results contain {found}"
        )
    if not chosen:
        raise ValueError(f"M={M} was not measured; choose from {', '.join(map(str, lengths))}")
    return chosen


def problem_of(rows: Sequence[Measurement]) -> Problem:
    """Returns the problem that all rows share; omits the precision if it differs between rows."""
    first = rows[0].problem
    return first if all(row.problem == first for row in rows) else _unrounded(first)


def _unrounded(problem: Problem) -> Problem:
    return problem.with_options(precision=None)


def rungs(rows: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Returns the rows of a ladder's table for measurements from ``at_length``."""
    first = next(iter(LADDER[rows[0].operation]))
    table = []
    for row in rows:
        share = 1.0 if row.kernel == first and row.time else row.factors.get(BASELINE)
        rates = {
            "TFLOP/s": row.tflops,
            "%_of_baseline": None if share is None else 100 * share,
            "%_of_peak": row.percent_of_peak,
            "x_rung_before": row.factors.get(BEFORE),
        }
        adds = LADDER[row.operation][row.kernel].adds
        table.append({"rung": row.kernel, "adds": adds, "ms": row.time, **rates})
    return table


def shown_rungs(rows: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Returns the rows of ``rungs`` with rates rounded to three digits, for display."""
    return [
        {name: x if name == "ms" else three_digits(x) for name, x in row.items()}
        for row in rungs(rows)
    ]


def described(results: Results, problem: Problem) -> str:
    """Describes device, versions, problem and command of a measurement in Markdown."""
    about = results.environment
    versions = [f"{name} {about[name]}" for name in _VERSIONS if name in about]
    command = _FILES.sub("", about["command"])
    return (
        f"Measured on {about['device']} ({', '.join(versions)}): {problem}; `{command}`. "
        "Rungs are timed in alternation; percentages and factors are medians over the rounds."
    )


def title(results: Results, problem: Problem) -> str:
    """Returns the title of a plot over several lengths: the device and the other sizes."""
    sizes = re.sub(r" [MN]=\d+| scale=\S+", "", str(problem))
    return f"{results.device}: {sizes}"


def pages_of(folder: Path, backend: str) -> list[Path]:
    """Returns the paths of the pages.

    Raises ValueError if a page is missing or the backend is "simulator".
    """
    for name in PAGES:
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder} does not contain {name}; run this command in a checkout of the project"
            )
    if backend == "simulator":
        raise ValueError(f"simulator times must not be written to {PAGES[0]}; measure on a GPU")
    return [folder / name for name in PAGES]


def publish(folder: Path, results: Results, rows: Sequence[Measurement]) -> list[Path]:
    """Writes a ladder's table between the markers for its operation in each page.

    Returns the paths of the pages.

    Raises ValueError as ``pages_of`` does, and if a page lacks the markers.
    """
    table = f"{markdown(shown_rungs(rows))}\n\n{described(results, problem_of(rows))}\n"
    first, last = (f"<!-- {sign}measured {rows[0].operation} -->" for sign in ("", "/"))
    between = re.compile(f"(?<={first}\n).*?(?={last})", re.DOTALL)
    changed = {}
    for page in pages_of(folder, results.environment.get("backend", "")):
        changed[page], count = between.subn(lambda _: table, page.read_text(encoding="utf-8"))
        if count != 1:
            raise ValueError(f"{page} must contain {first} once, followed by {last} once")
    for page, content in changed.items():
        cache_folder.write_whole(page, content.encode())
    return list(changed)
