"""``cupyfa replay``."""

import sys
from pathlib import Path

import click

from cupyfa.commands import WRONG, options
from cupyfa.runtime.backend import Backend
from cupyfa.verify.check import replay as replayed
from cupyfa.verify.failures import RIGHT, Outcome


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--kernel", help="Run this kernel instead of the one that failed.")
@options.backend_options
def replay(file: Path, kernel: str | None, backend: Backend) -> None:
    """Run a failure of `cupyfa check` again on the inputs in its FILE.

    Prints the results of then and now. The exit code is 1 if it fails again.
    """
    done = replayed(file, kernel, backend)
    then, now = done.stored.outcome, done.now
    made_with = done.stored.made_with
    click.echo(str(done.stored.case))
    click.echo(f"then  {_words(then)}, on {made_with['device']} with cupyfa {made_with['cupyfa']}")
    click.echo(f"now   {_words(now)}, on {done.device}")
    click.echo("PASS" if now.kind == RIGHT else "FAIL")
    sys.exit(0 if now.kind == RIGHT else WRONG)


def _words(outcome: Outcome) -> str:
    message = "; ".join(map(str, outcome.verdicts)) or outcome.message
    return f"{outcome.kernel}: {outcome.kind}; {message}"
