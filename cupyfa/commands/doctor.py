"""``cupyfa doctor``."""

from __future__ import annotations

import sys

import click

from cupyfa.analysis import doctor as diagnosis
from cupyfa.commands import UNSUPPORTED
from cupyfa.commands.options import progress_bar
from cupyfa.report import tables as report

_COLOURS = {diagnosis.OK: "green", diagnosis.MISSING: "yellow", diagnosis.FAULT: "red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def doctor(as_json: bool) -> None:
    """Look at everything that cupyfa needs or can use, and say what mends what is wrong.

    Ends with 3 if it can run neither on a GPU nor in the simulator.
    """
    with progress_bar("looking at") as progress:
        findings = diagnosis.doctor(progress)
    if as_json:
        click.echo(report.render([x.row() for x in findings], "json"))
    else:
        width = max(len(x.thing) for x in findings)
        for x in findings:
            state = click.style(f"{x.state:7}", fg=_COLOURS[x.state])
            click.echo(f"{x.thing:{width}}  {state}  {x.found}".rstrip())
            if x.remedy:
                click.echo(f"{'':{width}}           {x.remedy}")
    places = diagnosis.runs_on(findings)
    click.echo(f"note: cupyfa can run on: {', '.join(places) or 'nothing'}", err=True)
    sys.exit(0 if places else UNSUPPORTED)
