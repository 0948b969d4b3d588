"""``cupyfa compare``."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import click

from cupyfa.bench import compare as comparing
from cupyfa.bench.results import Results
from cupyfa.commands import WRONG
from cupyfa.commands.options import format_option
from cupyfa.report import tables as report


class Percent(click.ParamType):
    """A percentage, as a fraction: 5% is 0.05."""

    name = "percent"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if isinstance(value, float):
            return value
        try:
            share = float(value.removesuffix("%")) / 100
        except ValueError:
            share = -1.0
        if not 0 <= share < 1e6:
            self.fail(f"{value!r} is no percentage; write 5%", param, ctx)
        return share


@click.command()
@click.argument("before", metavar="A.json", type=click.Path())
@click.argument("after", metavar="B.json", type=click.Path())
@click.option(
    "--fail-slower",
    type=Percent(),
    metavar="PERCENT",
    help="End with exit code 1 if B is slower somewhere, by more than this beyond the noise, or "
    "lacks what A has.",
)
@format_option
def compare(before: str, after: str, fail_slower: float | None, form: str) -> None:
    """Compare what `cupyfa bench --save` wrote: A before, B after.

    A row is the SAME unless its medians differ by more than two standard errors, told from the
    rounds and one percent at the least.
    """
    old, new = Results.load(before), Results.load(after)
    for difference in comparing.differences(old, new):
        click.echo(f"note: {difference}", err=True)
    found = comparing.compare(old, new)
    for_programs = [one.row() for one in found]
    click.echo(report.comparisons(found) if form == "table" else report.render(for_programs, form))
    counts = Counter(one.verdict for one in found)
    if counts:
        click.echo(f"note: {', '.join(f'{n} {x}' for x, n in counts.items())}", err=True)
    slower = [one for one in found if one.certain_slowdown > (fail_slower or 0)]
    gone = counts["WRONG"] + counts["only before"] + counts["not timed after"]
    if fail_slower is not None and (slower or gone):
        sys.exit(WRONG)
