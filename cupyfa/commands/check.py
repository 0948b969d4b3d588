"""``cupyfa check``."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from cupyfa.commands import INTERRUPTED, UNSUPPORTED, WRONG, options
from cupyfa.commands.signals import take_time
from cupyfa.ladder.lookup import record_named
from cupyfa.options import Precision
from cupyfa.report.tables import render, table_of
from cupyfa.runtime.backend import Backend
from cupyfa.verify import check as checking
from cupyfa.verify.failures import WRONG_RESULT, Failure
from cupyfa.verify.grids import FUZZ_SAMPLES, GRIDS

_MOST_JOBS = 16
_MESSAGE_LINES = 8
_COLUMNS = ("kernel", "failure", "output", "error", "bound", "ratio", "worst_at")


@click.command()
@options.kernels_argument
@click.option(
    "--grid",
    type=click.Choice(list(GRIDS)),
    default="smoke",
    help=" ".join(f"{name}: {what}." for name, what in GRIDS.items()),
)
@click.option(
    "--samples",
    type=click.IntRange(1, checking.MOST_SAMPLES),
    help="Number of cases to draw, with as many pairs of sizes and options as possible.  "
    f"[default: all; of fuzz {FUZZ_SAMPLES}]",
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, help="Seed of the drawn cases and of the inputs."
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=options.dtype_choice,
    help="Check this dtype instead of the grid's dtypes.",
)
@options.attention_options
@options.reruns_option
@click.option(
    "--jobs",
    type=click.IntRange(0),
    help="Number of processes, which share the visible GPUs; 0 means this process.  "
    f"[default: one per core, at most {_MOST_JOBS} per GPU]",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    help="Seconds after which a running kernel has failed.",
)
@click.option(
    "--failures",
    type=click.Path(file_okay=False, path_type=Path),
    default="cupyfa-failures",
    help="Folder for the files of failures, which `cupyfa replay` reads.",
)
@options.backend_options
@options.format_option
def check(
    kernels: list[str],
    dtypes: tuple[str, ...],
    precision: Precision | None,
    jobs: int | None,
    backend: Backend,
    form: str,
    **how: Any,
) -> None:
    """Check kernels against the reference on a grid of cases.

    KERNEL is a name from `cupyfa list`, or `script.py:name` for a record of your own. Each failure
    is printed with a command that repeats it; the first failures of each kernel also have a file
    for `cupyfa replay`. Failures of the fuzz grid are first reduced to small cases. The exit code
    is 1 if there is a failure.
    """
    if not precision and "float32" in (dtypes or ("float32",)):
        _print_precisions(kernels)
    cores = len(os.sched_getaffinity(0))
    take_time()  # to print the results so far after a signal
    try:
        with options.progress_bar("checking") as progress:
            done = checking.check(
                kernels,
                dtypes=dtypes or None,
                precision=precision,
                backend=backend,
                jobs=min(cores, _MOST_JOBS * backend.devices) if jobs is None else jobs,
                progress=progress,
                **how,
            )
    except checking.Interrupted as interrupted:
        _print(interrupted.checked, err=True)
        options.note("interrupted")
        cause = interrupted.__cause__
        sys.exit(cause.code if isinstance(cause, SystemExit) else INTERRUPTED)
    if form == "table":
        _print(done)
    else:
        rows = [
            {
                **tally.row(),
                "because": dict(tally.not_run),
                "failures": [x.row() for x in done.failures if x.outcome.kernel == tally.kernel],
            }
            for tally in done.tallies
        ]
        click.echo(render(rows, form))
        options.note(done)
    sys.exit(WRONG if done.right < done.runs else 0 if done.runs else UNSUPPORTED)


def _print_precisions(names: Sequence[str]) -> None:
    """The kernels that compute float32 in a lower precision, which their error bounds follow."""
    for record in map(record_named, names):
        if record.float32_as and "float32" not in record.float32_as:
            options.note(f"{record.name} computes float32 in {record.float32_as[0]}")


def _print(done: checking.Checked, *, err: bool = False) -> None:
    """The first failures of each kernel, the tallies, and the sum in one line."""
    shown: list[Failure] = []
    for tally in done.tallies:
        failed = [x for x in done.failures if x.outcome.kernel == tally.kernel]
        shown += failed[: checking.EXAMINED]
    if shown:
        rows = [x.row() for x in shown]
        table = [{"": i, **{x: row[x] for x in _COLUMNS}} for i, row in enumerate(rows, 1)]
        click.echo(f"{table_of(table, share=False)}\n", err=err)
        for i, failure in enumerate(shown, 1):
            click.echo(f"{_lines(i, failure)}\n", err=err)
    if more := len(done.failures) - len(shown):
        click.echo(f"{more:,} more failures: --format json lists all\n", err=err)
    if len(done.tallies) > 1:
        click.echo(f"{table_of([tally.row() for tally in done.tallies])}\n", err=err)
    click.echo(str(done), err=err)


def _lines(number: int, failure: Failure) -> str:
    """Case, message, command and file of a failure."""
    outcome = failure.outcome
    message = [] if outcome.kind == WRONG_RESULT else outcome.message.splitlines()
    lines = [
        f"{failure.case}",
        *([f"found on {failure.found_on}"] if failure.found_on else []),
        *message[:_MESSAGE_LINES],
        failure.command,
        *([str(failure.file)] if failure.file else []),
    ]
    indent = " " * len(f"{number}  ")
    return f"{number}  " + f"\n{indent}".join(lines)
