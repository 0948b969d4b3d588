"""``cupyfa replay``."""

import sys
from pathlib import Path

import click

from cupyfa.commands import WRONG, options
from cupyfa.report.tables import render
from cupyfa.runtime.backend import Backend
from cupyfa.verify.check import replay as replayed
from cupyfa.verify.failures import RIGHT, Outcome


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--kernel",
    type=options.KernelName(),
    metavar="KERNEL",
    help="Run this kernel instead of the one that failed.",
)
@options.backend_options
@options.format_option
def replay(file: Path, kernel: str | None, backend: Backend, form: str) -> None:
    """Run a failure of `cupyfa check` again on the inputs in its FILE.

    Prints the results of then and now. The exit code is 1 if it fails again.
    """
    done = replayed(file, kernel, backend)
    then, now = done.stored.outcome, done.now
    made_with = done.stored.made_with
    if form == "table":
        click.echo(str(done.stored.case))
        on = f"on {made_with['device']} with cupyfa {made_with['cupyfa']}"
        click.echo(f"then  {then.kernel}: {_words(then)}, {on}")
        click.echo(f"now   {now.kernel}: {_words(now)}, on {done.device}")
        click.echo("PASS" if now.kind == RIGHT else "FAIL")
    else:
        about = {"then": (then, made_with["device"]), "now": (now, done.device)}
        rows = [
            {"when": when, "kernel": x.kernel, "device": device, "result": x.kind}
            | {"passed": x.kind == RIGHT, "message": _message(x), "case": str(done.stored.case)}
            for when, (x, device) in about.items()
        ]
        click.echo(render(rows, form))
    sys.exit(0 if now.kind == RIGHT else WRONG)


def _words(outcome: Outcome) -> str:
    return f"{outcome.kind}; {_message(outcome)}"


def _message(outcome: Outcome) -> str:
    return "; ".join(map(str, outcome.verdicts)) or outcome.message
