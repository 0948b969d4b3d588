"""``cupyfa tune``."""

import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import click

from cupyfa import cache_folder
from cupyfa.lab.bench import tuning
from cupyfa.lab.bench.tuning import RIGHT, UNTRIED, Candidate
from cupyfa.lab.commands import WRONG, command_options
from cupyfa.lab.commands.watching import timeout_option, watched
from cupyfa.lab.report.tables import drop, drop_followers, render, short_row, table_or_fields, text
from cupyfa.problem.problem import Problem
from cupyfa.runtime.choose_backend import backend_to_measure

_SPARE = ("spread_%", "regs", "spilled")  # columns dropped in narrow terminals
_SHORT = {"registers": "regs", "spilled_bytes": "spilled", "shared_bytes": "shared"}


@click.command()
@command_options.kernel_argument
@command_options.problem_options(several=("d", "dtype"))
@click.option("--fresh", is_flag=True, help="Ignore stored measurements.")
@click.option(
    "--budget", type=command_options.SECONDS, default=120.0, help="Seconds to spend per problem."
)
@timeout_option
@command_options.backend_option
@command_options.format_option
def tune(kernel: str, timeout: float | None, backend: str, form: str, **how: Any) -> None:
    """Find the fastest tile sizes of KERNEL on this device.

    KERNEL is a name from `cupyfa list`, `auto`, or `script.py:name` for a record of your own. The
    fastest tile sizes on a GPU are stored; later plans for the same kernel, dtype, d and dv use
    them first. -d and --dtype may be repeated. The exit code is 1 if all candidates of a problem
    fail.

    Each candidate is timed briefly. The eight fastest and the default tiles, the finalists, are
    then timed in alternation. The table lists finalists above the line and other candidates below
    it, both ordered by speed.

    \b
    first ms  the first, short timing, or why there is none
    ms        finalists: median over the rounds, corrected for drift of the device's speed
    x own     finalists: speedup over the default tiles, in the same rounds
    spread %  from the 20th to the 80th percentile of the times
    rounds    finalists: number of rounds in alternation
    regs      registers per thread
    spilled   bytes spilled per thread
    shared    bytes of shared memory per block
    """
    on, given = backend_to_measure(backend), command_options.given_sizes(how)
    with watched(on, timeout) as watch, command_options.progress_bar("tuning") as progress:
        found = tuning.tune(kernel, backend=on, progress=progress, watch=watch, **given)
    by_problem: dict[Problem, list[Candidate]] = defaultdict(list)
    for x in found:
        by_problem[x.measurement.problem].append(x)
    if form == "table":
        _print_notes(found)
        click.echo("\n\n".join(map(_table, by_problem.values())))
    else:
        click.echo(render([candidate.row() for candidate in found], form))
    right = {p: best for p, (best, *_) in by_problem.items() if best.state == RIGHT}
    for p, best in right.items():
        tiles = text(best.measurement.constants) or "the kernel has no tile sizes"
        columns = "" if p.is_softmax else f", d={p.d}"
        command_options.note(f"fastest for {p.arithmetic}{columns}: {tiles}")
    if right and on.name == "simulator":
        command_options.note(
            "plans ignore these tiles, because simulator times do not predict GPU times"
        )
    sys.exit(0 if len(right) == len(by_problem) else WRONG)


def _table(candidates: Sequence[Candidate]) -> str:
    """Renders a table of one problem's candidates, with a line below the finalists."""
    finalists = sum(x.rounds > 0 for x in candidates)
    rows = [_short(candidate) for candidate in candidates]
    if not finalists:
        drop(rows, "ms", "rounds")
    drop_followers(rows)
    return table_or_fields(rows, spare=_SPARE, rule=finalists)


def _short(candidate: Candidate) -> dict[str, Any]:
    """Returns a candidate's row for an 80-column terminal; its state replaces a missing time."""
    row = short_row(candidate.row())
    row["first_ms"] = row["first_ms"] or candidate.state
    row["rounds"] = candidate.rounds or None
    for name, digits in (("spread_%", 2), ("x_own", 3)):
        row[name] = None if row[name] is None else round(row[name], digits)
    return {_SHORT.get(name, name): x for name, x in row.items() if name not in ("note", "state")}


def _print_notes(found: Sequence[Candidate]) -> None:
    """Prints each reason why candidates failed, and the number of untried candidates."""
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for x in found:
        if x.measurement.note:
            constants = text(x.measurement.constants) or x.measurement.kernel
            reasons[x.state, x.measurement.note].append(constants)
    for (state, note), alike in reasons.items():
        more = len(alike) - 1
        others = f" and {more} {'other' if more == 1 else 'others'}" if more else ""
        command_options.note(f"{alike[0]}{others}: {state}: {note}")
    if untried := sum(x.state == UNTRIED for x in found):
        were = "was" if untried == 1 else "were"
        remedy = (
            "run the command again to continue"
            if cache_folder.is_kept()
            else "use a larger --budget"
        )
        command_options.note(f"{untried} {were} not tried in time; {remedy}")
