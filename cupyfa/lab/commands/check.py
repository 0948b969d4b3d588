"""``cupyfa check``."""

import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import click
import numpy as np

from cupyfa.lab.commands import INTERRUPTED, UNSUPPORTED, WRONG, command_options
from cupyfa.lab.commands.signals import take_time
from cupyfa.lab.report.tables import fields, render, table_of
from cupyfa.lab.verify import checker as checking
from cupyfa.lab.verify.failures import WRONG_RESULT, Failure
from cupyfa.lab.verify.fuzz import SAMPLES
from cupyfa.lab.verify.grids import GRIDS
from cupyfa.lab.verify.tasks import Task, name_of
from cupyfa.ladder.lookup import record_named
from cupyfa.problem.options import Precision
from cupyfa.runtime.backend import Backend

MOST_JOBS = 16
_MESSAGE_LINES = 8
_COLUMNS = ("kernel", "failure", "output", "error", "bound", "ratio", "worst_at")


@click.command()
@command_options.kernels_argument
@click.option(
    "--grid",
    type=click.Choice(list(GRIDS)),
    default="fuzz",
    show_default=True,
    help=" ".join(f"{name}: {what}." for name, what in GRIDS.items()),
)
@click.option(
    "--samples",
    type=command_options.Integer(1, checking.MOST_SAMPLES),
    help="Number of cases to draw of each grid, with as many pairs of sizes and options as "
    "possible.  "
    f"[default: all; of fuzz {SAMPLES['simulator']} for each kernel, {SAMPLES['cuda']} on a GPU]",
)
@click.option(
    "--seed",
    type=command_options.Integer(0),
    default=0,
    help="Seed of the drawn cases and of the inputs.",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=command_options.dtype_choice,
    help="Check this dtype instead of the grid's dtypes.",
)
@command_options.attention_options
@command_options.array_options
@command_options.reruns_option
@click.option(
    "--schedules",
    type=command_options.Integer(1),
    default=1,
    help="Simulator: the number of orders of threads to run each case in. With 1, about half "
    "of the cases run in an order of their own.",
)
@click.option("--dry-run", is_flag=True, help="List the cases, and run nothing.")
@click.option(
    "--jobs",
    type=command_options.Integer(0),
    help="Number of processes, which share the visible GPUs; 0 means this process, "
    "without a timeout.  "
    f"[default: one per core, at most {MOST_JOBS} per GPU]",
)
@click.option(
    "--timeout",
    type=command_options.Number(0, min_open=True),
    default=60.0,
    help="Seconds after which a running kernel has failed.",
)
@click.option(
    "--failures",
    type=click.Path(file_okay=False, path_type=Path),
    default="cupyfa-failures",
    help="Folder for the files of failures, which `cupyfa replay` reads.",
)
@command_options.backend_options
@command_options.format_option
def check(
    kernels: list[str],
    dtypes: tuple[str, ...],
    precision: Precision | None,
    jobs: int | None,
    backend: Backend,
    form: str,
    dry_run: bool,
    **how: Any,
) -> None:
    """Check kernels against the reference on a grid of cases.

    KERNEL is a name from `cupyfa list`, `auto`, or `script.py:name` for a record of your own. Each
    failure is printed with a command that repeats it; the first failures of each kernel are also
    saved to files for `cupyfa replay`. Failures of the fuzz grid are first reduced to small cases.
    Attention options replace the grid's options. With --format csv or md only the counts are
    printed. The exit code is 1 if any case fails.
    """
    if jobs == 0:
        command_options.refuse_idle("--jobs 0 has no timeout", "timeout")
    if dry_run:
        how = {name: x for name, x in how.items() if name not in ("reruns", "timeout", "failures")}
        how |= {"dtypes": dtypes or None, "precision": precision, "backend": backend}
        click.echo(render(_planned(checking.tasks_of(kernels, **how), backend), form))
        return
    if not precision and "float32" in (dtypes or ("float32",)):
        _print_precisions(kernels)
    cores = len(os.sched_getaffinity(0))
    take_time()  # so that results can still be printed after a signal
    try:
        with command_options.progress_bar("checking") as progress:
            done = checking.check(
                kernels,
                dtypes=dtypes or None,
                precision=precision,
                backend=backend,
                jobs=min(cores, MOST_JOBS * backend.devices) if jobs is None else jobs,
                progress=progress,
                **how,
            )
    except checking.Interrupted as interrupted:
        _print(interrupted.checked, err=True)
        command_options.note("interrupted")
        cause = interrupted.__cause__
        sys.exit(cause.code if isinstance(cause, SystemExit) else INTERRUPTED)
    if form == "table":
        _print(done)
    else:
        rows = [{**tally.row(), **_details(tally, done, form)} for tally in done.tallies]
        click.echo(render(rows, form))
        command_options.note(done)
    if done.right < done.runs:
        sys.exit(WRONG)
    sys.exit(0 if done.runs else UNSUPPORTED)


def _details(tally: checking.Tally, done: checking.Checked, form: str) -> dict[str, Any]:
    """Returns nested details for a row of JSON; rows of other formats stay flat."""
    if form != "json":
        return {}
    return {
        "covered": dict(tally.covered),
        "because": dict(tally.not_run),
        "failures": [x.row() for x in done.failures if x.outcome.kernel == tally.kernel],
    }


def _planned(tasks: Sequence[Task], backend: Backend) -> list[dict[str, Any]]:
    """Returns a row for each case and kernel: its constants, its schedule and what it covers."""
    named = cache(record_named)
    records = [
        (task, name_of(kernel), named(kernel) if isinstance(kernel, str) else kernel)
        for task in tasks
        for kernel in task.kernels
    ]
    return [
        {
            "kernel": name,
            "case": str(task.case),
            "constants": dict(task.constants) or None,
            "schedule": task.schedule,
            "covers": [x for x, has in checking.covered(task, record, backend).items() if has],
        }
        for task, name, record in records
    ]


def _print_precisions(names: Sequence[str]) -> None:
    """Prints which kernels compute float32 in lower precision, which widens their error bounds."""
    for record in map(record_named, (name for name in names if name != checking.AUTO)):
        if record.float32_as and "float32" not in record.float32_as:
            command_options.note(f"{record.name} computes float32 in {record.float32_as[0]}")


def _print(done: checking.Checked, *, err: bool = False) -> None:
    """Prints the first failures of each kernel, the tallies, and a one-line summary."""
    shown: list[Failure] = []
    for tally in done.tallies:
        failed = [x for x in done.failures if x.outcome.kernel == tally.kernel]
        examined = [x for x in failed if x.file or x.found_on]
        shown += (examined or failed)[: checking.EXAMINED]
    if shown:
        rows = [x.row() for x in shown]
        columns = [x for x in _COLUMNS if any(row[x] is not None for row in rows)]
        table = [{"": i, **{x: row[x] for x in columns}} for i, row in enumerate(rows, 1)]
        click.echo(f"{table_of(table, share=False)}\n", err=err)
        for i, failure in enumerate(shown, 1):
            click.echo(f"{_lines(i, failure)}\n", err=err)
    if more := len(done.failures) - len(shown):
        click.echo(f"{more:,} more failure{'s' * (more != 1)}: --format json lists all\n", err=err)
    if len(done.tallies) > 1:
        click.echo(f"{table_of([tally.row() for tally in done.tallies])}\n", err=err)
    covered = {
        f"{x.kernel} covered": ", ".join(f"{name} {count:,}" for name, count in x.covered.items())
        for x in done.tallies
        if x.covered
    }
    if covered:
        click.echo(fields(covered), err=err, nl=False)
    click.echo(str(done), err=err)


def _lines(number: int, failure: Failure) -> str:
    """Renders the case, message, command and file of a failure."""
    outcome = failure.outcome
    # For finite errors the table already shows the numbers.
    infinite = [str(x) for x in outcome.verdicts if np.isinf(x.ratio)]
    message = infinite if outcome.kind == WRONG_RESULT else outcome.message.splitlines()
    more = failure.cases - 1  # other failures that shrink to the same case
    others = f", and {more:,} more" if more else ""
    lines = [
        f"{failure.case}",
        *([f"found on {failure.found_on}{others}"] if failure.found_on else []),
        *message[:_MESSAGE_LINES],
        failure.command,
        *([str(failure.file)] if failure.file else []),
    ]
    indent = " " * len(f"{number}  ")
    return f"{number}  " + f"\n{indent}".join(lines)
