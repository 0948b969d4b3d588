"""``cupyfa compare``."""

import sys
from collections import Counter

import click

from cupyfa.lab.bench.comparison import compare as compared, differences
from cupyfa.lab.bench.results import Results
from cupyfa.lab.commands import WRONG, command_options
from cupyfa.lab.report.tables import comparisons, render


def _fraction(percentage: str) -> float:
    """Converts a percentage to a fraction: 5% is 0.05."""
    try:
        share = float(percentage.removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < 1e6:
        raise click.BadParameter(f"{percentage!r} is not a percentage such as 5%")
    return share


@click.command()
@click.argument("before", metavar="A.json", type=click.Path())
@click.argument("after", metavar="B.json", type=click.Path())
@click.option(
    "--fail-slower",
    type=_fraction,
    metavar="PERCENT",
    help="Exit with 1 if a row of B is slower by more than this beyond the noise, or is missing.",
)
@command_options.format_option
def compare(before: str, after: str, fail_slower: float | None, form: str) -> None:
    """Compare two files of `cupyfa bench --save`: A before, B after.

    The verdict is FASTER or SLOWER if the medians differ by more than two standard errors. Else it
    is SAME, or UNCLEAR if two standard errors exceed ten percent. The errors include the spread of
    the rounds, the drift within each run, and the drift between the runs, measured on kernels whose
    code did not change; they are at least one percent. Times of the simulator are not compared.
    """
    old, new = Results.load(before), Results.load(after)
    for difference in differences(old, new):
        command_options.note(difference)
    found = compared(old, new)
    table = comparisons(found) if form == "table" else render([x.row() for x in found], form)
    click.echo(table)
    counts = Counter(one.verdict for one in found)
    if counts:
        command_options.note(f"{', '.join(f'{n} {x}' for x, n in counts.items())}")
    slower = [one for one in found if one.certain_slowdown > (fail_slower or 0)]
    gone = counts["WRONG"] + counts["only before"] + counts["not timed after"]
    if fail_slower is not None and (slower or gone):
        sys.exit(WRONG)
