"""``cupyfa tune``."""

import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import click

from cupyfa.bench import tune as tuning
from cupyfa.bench.tune import RIGHT, UNTRIED, Candidate
from cupyfa.commands import WRONG, options
from cupyfa.problem import Problem
from cupyfa.report.tables import render, table_or_fields, text

_SHORT = {"registers": "regs", "spilled_bytes": "spilled", "shared_bytes": "shared"}


@click.command()
@click.argument("kernel")
@options.problem_options(several=("d", "dtype"))
@click.option("--budget", type=options.SECONDS, default=120.0, help="Seconds for each problem.")
@click.option("--fresh", is_flag=True, help="Ignore stored measurements.")
@options.backend_option
@options.format_option
def tune(kernel: str, form: str, **how: Any) -> None:
    """Measure the tile sizes of KERNEL on this device, and store the fastest.

    KERNEL is a name from `cupyfa list`, or `script.py:name` for a record of your own. Later plans
    for the same kernel, dtype, d and dv begin with the fastest. Default sizes: -B 4 -H 16 -M 2048
    -d 64 and N = M, for a softmax -M 16384 -N 4096, and smaller ones in the simulator; -d and
    --dtype may be repeated. The exit code is 1 if no candidate of a problem is right.

    \b
    x own    speed-up over the default tiles
    rounds   how often a finalist was timed; 0 if only the first timing was made
    regs     registers of a thread
    shared   bytes of shared memory of a block
    """
    with options.progress_bar("tuning") as progress:
        found = tuning.tune(kernel, progress=progress, **options.given_sizes(how))
    if form == "table":
        _print_notes(found)
        rows = [_short(candidate) for candidate in found]
        click.echo(table_or_fields(rows))
    else:
        click.echo(render([candidate.row() for candidate in found], form))
    best: dict[Problem, Candidate] = {}
    for x in found:
        best.setdefault(x.measurement.problem, x)
    for p, x in best.items():
        if x.state == RIGHT:
            constants = text(x.measurement.constants) or "there are no tiles to choose"
            columns = "" if p.is_softmax else f", d={p.d}"
            options.note(f"fastest for {p.arithmetic}{columns}: {constants}")
    sys.exit(0 if all(x.state == RIGHT for x in best.values()) else WRONG)


def _short(candidate: Candidate) -> dict[str, Any]:
    """A row for 80 columns, with the state in place of a missing time."""
    row = candidate.row()
    row["ms"] = row["ms"] or candidate.state
    for name, digits in (("spread_%", 2), ("x_own", 3)):
        row[name] = None if row[name] is None else round(row[name], digits)
    return {_SHORT.get(name, name): x for name, x in row.items() if name not in ("note", "state")}


def _print_notes(found: Sequence[Candidate]) -> None:
    """The reasons why candidates are not right, each once, and how many are untried."""
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for x in found:
        if x.measurement.note:
            constants = text(x.measurement.constants) or x.measurement.kernel
            reasons[x.state, x.measurement.note].append(constants)
    for (state, note), alike in reasons.items():
        more = len(alike) - 1
        others = f" and {more} {'other' if more == 1 else 'others'}" if more else ""
        options.note(f"{alike[0]}{others}: {state}: {note}")
    if untried := sum(x.state == UNTRIED for x in found):
        were = "was" if untried == 1 else "were"
        remedy = "the same command continues" if tuning.is_kept() else "give a larger --budget"
        options.note(f"{untried} {were} not tried in time; {remedy}")
