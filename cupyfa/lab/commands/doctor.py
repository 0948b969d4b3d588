"""``cupyfa doctor``."""

import sys

import click

from cupyfa.lab.analysis.diagnosis import doctor as examined, runs_on
from cupyfa.lab.commands import UNSUPPORTED, command_options
from cupyfa.lab.report.tables import render


@click.command()
@command_options.format_option
def doctor(form: str) -> None:
    """Report what is installed, and whether a kernel runs.

    Lists versions, devices and caches, and reports whether each backend compiles and runs a kernel.
    The exit code is 3 if neither a GPU nor the simulator can run kernels.
    """
    with command_options.progress_bar("examining") as progress:
        findings = examined(progress)
    rows = [vars(x) for x in findings]
    if form == "table":
        rows = [{name: row[name] for name in ("thing", "state", "found")} for row in rows]
    click.echo(render(rows, form))
    places = runs_on(findings)
    command_options.note(f"cupyfa can run on: {', '.join(places) or 'nothing'}")
    sys.exit(0 if places else UNSUPPORTED)
