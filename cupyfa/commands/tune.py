"""``cupyfa tune``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from cupyfa.bench import tune as tuning
from cupyfa.bench.tune import Candidate
from cupyfa.commands import WRONG
from cupyfa.commands.options import (
    attention_options,
    backend_option,
    dtype_choice,
    format_option,
    progress_bar,
    size,
)
from cupyfa.problem import Problem
from cupyfa.report import tables as report


@click.command()
@click.argument("kernel")
@click.option("-B", "--batch", type=size, help="[default: 4]")
@click.option("-H", "--heads", type=size, help="[default: 16]")
@click.option("--kv-heads", type=size, help="Divides heads.  [default: heads]")
@click.option("-M", "M", type=size, help="Queries.  [default: 2048; of a softmax, 16384 rows]")
@click.option("-N", "N", type=size, help="Keys.  [default: M; of a softmax, 4096 columns]")
@click.option("-d", multiple=True, type=size, help="Head dimension, one or more.  [default: 64]")
@click.option("--dv", type=size, help="Value dimension.  [default: d]")
@click.option("--dtype", multiple=True, type=dtype_choice, help="One or more.  [default: float32]")
@attention_options
@click.option(
    "--budget",
    type=click.FloatRange(0),
    default=120.0,
    show_default=True,
    help="Seconds for each problem.",
)
@click.option("--fresh", is_flag=True, help="Measure all again, also what is remembered.")
@backend_option
@format_option
def tune(kernel: str, budget: float, fresh: bool, backend: str, form: str, **sizes: Any) -> None:
    """Try the tile sizes of KERNEL on this device, and remember the fastest.

    KERNEL is a name from `cupyfa list`, or `script.py:name` for a record of your own. Later plans
    for the same kernel, dtype, d and dv begin with what was fastest. The simulator takes smaller
    sizes by default. Ends with 1 if, of some problem, no candidate is right.
    """
    given = {name: x for name, x in sizes.items() if x is not None and x != ()}
    with progress_bar("tuning") as progress:
        found = tuning.tune(
            kernel,
            backend=backend,
            budget=budget,
            fresh=fresh,
            progress=progress,
            **given,
        )
    if form == "table":
        tell_notes(found)
        rows = [short(candidate) for candidate in found]
        click.echo(report.render(rows, form) if len(rows) > 1 else report.fields(rows[0]))
    else:
        click.echo(report.render([candidate.row() for candidate in found], form))
    best: dict[Problem, Candidate] = {}
    for x in found:
        best.setdefault(x.measurement.problem, x)
    for x in best.values():
        if x.state == tuning.RIGHT:
            p, constants = x.measurement.problem, report.text(x.measurement.constants)
            fastest = constants or "there are no tiles to choose"
            columns = "" if p.is_softmax else f", d={p.d}"
            click.echo(f"note: fastest for {p.arithmetic}{columns}: {fastest}", err=True)
    sys.exit(0 if all(x.state == tuning.RIGHT for x in best.values()) else WRONG)


def short(candidate: Candidate) -> dict[str, Any]:
    """A row for 80 columns: who has no time has a state in its place."""
    row = candidate.row()
    row["ms"] = row["ms"] or candidate.state
    for name, digits in (("spread_%", 2), ("x_own", 3)):
        row[name] = None if row[name] is None else round(row[name], digits)
    names = {"registers": "regs", "spilled_bytes": "spilled", "shared_bytes": "shared"}
    return {names.get(name, name): x for name, x in row.items() if name not in ("note", "state")}


def tell_notes(found: Sequence[Candidate]) -> None:
    """Why candidates are not right, once for all of whom it is the same."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for x in found:
        if x.measurement.note:
            constants = report.text(x.measurement.constants) or x.measurement.kernel
            reasons.setdefault((x.state, x.measurement.note), []).append(constants)
    for (state, note), alike in reasons.items():
        more = len(alike) - 1
        others = f" and {more} {'other' if more == 1 else 'others'}" if more else ""
        click.echo(f"note: {alike[0]}{others}: {state}: {note}", err=True)
    if untried := sum(x.state == tuning.UNTRIED for x in found):
        were = "was" if untried == 1 else "were"
        remedy = "the same command goes on" if tuning.is_kept() else "give a larger --budget"
        click.echo(f"note: {untried} {were} not tried in time; {remedy}", err=True)
