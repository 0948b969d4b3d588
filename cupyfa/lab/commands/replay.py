"""``cupyfa replay``."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from cupyfa.lab.commands import WRONG, command_options
from cupyfa.lab.commands.watching import timeout_on, timeout_option
from cupyfa.lab.report.tables import render, replayed_lines
from cupyfa.lab.verify.checker import Replayed, replay as replayed
from cupyfa.lab.verify.failures import RIGHT
from cupyfa.runtime.backend import Backend


@click.command()
@click.argument(
    "files",
    metavar="FILE...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@click.option(
    "--kernel",
    type=command_options.KernelName(),
    metavar="KERNEL",
    help="Run this kernel instead of the kernel that failed.",
)
@timeout_option
@command_options.backend_options
@command_options.format_option
def replay(
    files: Sequence[Path], kernel: str | None, timeout: float | None, backend: Backend, form: str
) -> None:
    """Run failures of `cupyfa check` again, on their stored inputs.

    A FILE holds the inputs of a failure and the kernel's results. Prints the stored and the new
    results. The exit code is 1 if a kernel fails again. Scripts named in a FILE are not run;
    pass the kernel of a script with --kernel.
    """
    found = []
    for file in files:
        done = replayed(file, kernel, backend, timeout=timeout_on(backend, timeout))
        found.append((file, done))
        if form == "table":
            click.echo(replayed_lines(done))
    if form != "table":
        click.echo(render([row for one in found for row in _rows(*one)], form))
    sys.exit(0 if all(done.now.kind == RIGHT for _, done in found) else WRONG)


def _rows(file: Path, done: Replayed) -> list[dict[str, Any]]:
    outcomes = {
        "then": (done.stored.outcome, done.stored.made_with.get("device")),
        "now": (done.now, done.device),
    }
    return [
        {
            **{"file": str(file), "when": when, "kernel": x.kernel, "device": device},
            **{"result": x.kind, "passed": x.kind == RIGHT},
            "message": "; ".join(map(str, x.verdicts)) or x.message,
            "case": str(done.stored.case),
        }
        for when, (x, device) in outcomes.items()
    ]
