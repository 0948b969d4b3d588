"""``cupyfa ladder``."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from cupyfa.errors import printable
from cupyfa.lab.bench.benchmark import bench
from cupyfa.lab.bench.results import Measurement, Results
from cupyfa.lab.commands import WRONG, command_options
from cupyfa.lab.commands.bench import budget_option
from cupyfa.lab.commands.saving import check_target, partial_results, save_option
from cupyfa.lab.commands.watching import timeout_option, watched
from cupyfa.lab.report import plots, publish
from cupyfa.lab.report.tables import render
from cupyfa.ladder import LADDER
from cupyfa.planner import source
from cupyfa.runtime import environment
from cupyfa.runtime.choose_backend import backend_to_measure

LENGTHS = (256, 512, 1024, 2048, 4096)
# Rungs skip lengths at which a launch would take longer than this multiple of the budget.
_PATIENCE = 5


@click.command()
@command_options.backward_option
@command_options.problem_options(dtype="float16")
@budget_option
@timeout_option
@click.option("--docs", is_flag=True, help="Write the table into docs/ladder.md of this checkout.")
@click.option(
    "--plot",
    type=command_options.FILE,
    help="Draw TFLOP/s over N, from 256 to 4096, to an .svg or .png file.",
)
@save_option
@click.option(
    "--from",
    "saved",
    type=click.Path(dir_okay=False),
    help="Read the measurements from a file of an earlier --save.",
)
@command_options.backend_option
@command_options.format_option
def ladder(
    backward: bool,
    budget: float,
    timeout: float | None,
    docs: bool,
    plot: Path | None,
    save: Path | None,
    saved: str | None,
    backend: str,
    form: str,
    **sizes: Any,
) -> None:
    """Measure all rungs, and compare each with the rung before it.

    Rungs that do not support the dtype are skipped. The default is float16, which most rungs
    support and for which the baseline uses tensor cores.
    """
    if saved:
        unused = ("backward", "budget", "timeout", "backend", *(sizes.keys() - {"M"}))
        command_options.refuse_idle("--from measures nothing", *unused)
    check_target(save)
    if plot:
        plots.check(plot)
        check_target(plot)
        if sizes["N"] is not None:
            raise ValueError("--plot sweeps lengths with N = M; omit -N")
    results = Results.load(saved) if saved else None
    on = None if results else backend_to_measure(backend)
    check_target(save, on)
    if docs:  # check the pages before time is spent on measuring
        measured_on = on.name if on else ""
        if results:
            measured_on = results.environment.get("backend", "")
        publish.pages_of(source.ROOT, measured_on)

    def show(results: Results, M: int | None, *, err: bool = False) -> list[Measurement]:
        try:
            if save:
                results.save(save)
        finally:  # show the results even if they cannot be saved
            rows = publish.at_length(results.rows, M)
            _print(results, rows, form, err=err)
        return rows

    if results is None:
        operation = "backward" if backward else "forward"
        how = operation, backend, budget, timeout, bool(plot), sizes
        results = _measure(*how, partial(show, err=True), save)
    rows = show(results, sizes["M"])
    if plot:
        plots.draw(results.rows, plot, publish.title(results, publish.problem_of(rows)))
    if docs:
        for page in publish.publish(source.ROOT, results, rows):
            command_options.note(f"wrote {page}")
    sys.exit(WRONG if any(row.passed is False for row in results.rows) else 0)


def _print(results: Results, rows: list[Measurement], form: str, *, err: bool) -> None:
    """Prints the notes of all results, and a table of ``rows``, which have the same length."""
    for row in results.rows:
        if row.note:
            command_options.note(f"{row.kernel} on {row.problem}: {row.note}")
    device, is_data = results.environment["device"], form in ("json", "csv")
    table = publish.rungs(rows) if is_data else publish.shown_rungs(rows)
    if form == "table":
        click.echo(printable(f"{device}: {publish.problem_of(rows)}"), err=err)
    else:
        table = [{"device": device, **x.problem.row(), **row} for x, row in zip(rows, table)]
    click.echo(render(table, form), err=err)


def _measure(
    operation: str,
    backend: str,
    budget: float,
    timeout: float | None,
    sweep: bool,
    sizes: dict[str, Any],
    show: Callable[[Results, int | None], object],
    save: Path | None,
) -> Results:
    """Measures all rungs at one length, or at LENGTHS; slow rungs then skip the longest lengths."""
    on, M = backend_to_measure(backend), sizes["M"]
    about = environment.describe(on)
    rungs = LADDER[operation].values()
    of = sizes["dtype"], sizes["precision"]
    names = [x.name for x in rungs if x.takes(of[0]) and x.suits(*of)]
    if sweep:
        sizes = {**sizes, "M": sorted({*LENGTHS, M or LENGTHS[-1]})}

    def show_partial(rows: list[Measurement]) -> None:
        show(Results(about, rows), M if M in {row.problem.M for row in rows} else None)

    with (
        watched(on, timeout) as watch,
        partial_results(show_partial, save, about) as keep,
        command_options.progress_bar("measuring") as progress,
    ):
        rows = bench(
            names,
            backend=on,
            budget=budget,
            patience=_PATIENCE * budget if sweep else None,
            progress=progress,
            so_far=keep,
            watch=watch,
            **sizes,
        )
    return Results(about, rows)
