"""``cupyfa check``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from cupyfa.commands import INTERRUPTED, UNSUPPORTED, WRONG
from cupyfa.commands.options import (
    attention_options,
    backend_option,
    dtype_choice,
    engine_named,
    every_option,
    format_option,
    kernel_names,
    kernels_argument,
    progress_bar,
    reruns_option,
    schedule_option,
)
from cupyfa.commands.signals import take_time
from cupyfa.ladder import lookup as records
from cupyfa.report import tables as report
from cupyfa.verify import check as checking
from cupyfa.verify.failures import WRONG_RESULT, Failure
from cupyfa.verify.grids import FUZZ_SAMPLES, GRIDS

_MOST_JOBS = 16
_MESSAGE_LINES = 8


@click.command()
@kernels_argument
@every_option
@click.option(
    "--grid",
    type=click.Choice(list(GRIDS)),
    default="smoke",
    show_default=True,
    help=" ".join(f"{name}: {what}." for name, what in GRIDS.items()),
)
@click.option(
    "--samples",
    type=click.IntRange(1, checking.MOST_SAMPLES),
    help="Draw so many of the cases, so that as many pairs of sizes and options as may be meet.  "
    f"[default: all; of fuzz {FUZZ_SAMPLES}]",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Of what is drawn, and of the inputs.",
)
@click.option(
    "--dtype", "dtypes", multiple=True, type=dtype_choice, help="In place of the grid's own."
)
@attention_options
@reruns_option
@click.option(
    "--jobs",
    type=click.IntRange(0),
    help="Processes that work at a time; 0 works in this one.  "
    f"They take the visible GPUs in turn.  [default: one per core, at most {_MOST_JOBS} a GPU]",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds after which a kernel without an answer has failed.",
)
@click.option(
    "--failures",
    type=click.Path(file_okay=False, path_type=Path),
    default="cupyfa-failures",
    show_default=True,
    help="Folder for the files of failures, which `cupyfa replay` reads.",
)
@backend_option
@schedule_option
@format_option
def check(
    kernels: tuple[str, ...],
    every: bool,
    grid: str,
    samples: int | None,
    seed: int,
    dtypes: tuple[str, ...],
    reruns: int,
    jobs: int | None,
    timeout: float,
    failures: Path,
    backend: str,
    schedule: int | None,
    form: str,
    **options: Any,
) -> None:
    """Check kernels against the reference on a grid of cases.

    KERNEL is a name from `cupyfa list`, or `script.py:name` for a record of your own. A
    failure is told with a command that repeats it and, of the first few of each kernel, with a
    file that `cupyfa replay` reads; those of fuzz are made small first. Exit code 1 if there is
    one.
    """
    engine = engine_named(backend, schedule)
    names = kernel_names(kernels, every)
    if not options["precision"] and "float32" in (dtypes or ("float32",)):
        _say_what_is_rounded(names)
    cores = len(os.sched_getaffinity(0))
    take_time()  # to tell what was found, should a signal come
    try:
        with progress_bar("checking") as progress:
            done = checking.check(
                names,
                grid=grid,
                samples=samples,
                seed=seed,
                dtypes=dtypes or None,
                backend=engine,
                reruns=reruns,
                jobs=min(cores, _MOST_JOBS * engine.devices) if jobs is None else jobs,
                timeout=timeout,
                failures=failures,
                progress=progress,
                **options,
            )
    except checking.Interrupted as interrupted:
        _show(interrupted.checked, err=True)
        click.echo("cupyfa: interrupted", err=True)
        cause = interrupted.__cause__
        sys.exit(cause.code if isinstance(cause, SystemExit) else INTERRUPTED)
    if form == "table":
        _show(done)
    else:
        rows = [
            {
                **tally.row(),
                "because": dict(tally.not_run),
                "failures": [x.row() for x in done.failures if x.outcome.kernel == tally.kernel],
            }
            for tally in done.tallies
        ]
        click.echo(report.render(rows, form))
        click.echo(f"note: {done}", err=True)
    sys.exit(WRONG if done.right < done.runs else 0 if done.runs else UNSUPPORTED)


def _say_what_is_rounded(names: Sequence[str]) -> None:
    """Which kernels have another precision than float32, and so are held to that."""
    for record in map(records.record_named, names):
        if record.float32_as and "float32" not in record.float32_as:
            click.echo(f"note: {record.name} computes float32 in {record.float32_as[0]}", err=True)


def _show(done: checking.Checked, *, err: bool = False) -> None:
    """The first failures of each kernel, the tallies, and all in one line."""
    shown: list[Failure] = []
    for tally in done.tallies:
        failed = [x for x in done.failures if x.outcome.kernel == tally.kernel]
        shown += failed[: checking.EXAMINED]
    if shown:
        rows = [x.row() for x in shown]
        columns = ("kernel", "failure", "output", "error", "bound", "ratio", "worst_at")
        table = [{"": i, **{x: row[x] for x in columns}} for i, row in enumerate(rows, 1)]
        click.echo(f"{report.render(table, 'table')}\n", err=err)
        for i, failure in enumerate(shown, 1):
            click.echo("\n".join(_lines(i, failure)) + "\n", err=err)
    if more := len(done.failures) - len(shown):
        click.echo(f"{more:,} more failures: --format json lists all\n", err=err)
    if len(done.tallies) > 1:
        rows = [tally.row() for tally in done.tallies]
        click.echo(f"{report.render(rows, 'table')}\n", err=err)
    click.echo(str(done), err=err)


def _lines(number: int, failure: Failure) -> list[str]:
    """What there is to say of a failure beside its numbers."""
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
    return [f"{number}  {lines[0]}", *(f"{indent}{line}" for line in lines[1:])]
