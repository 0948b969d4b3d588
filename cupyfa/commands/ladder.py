"""``cupyfa ladder``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from cupyfa.bench import bench as benchmark
from cupyfa.bench.results import Measurement, Results
from cupyfa.commands import WRONG
from cupyfa.commands.bench import budget_option, check_target, save_option, told_so_far
from cupyfa.commands.options import (
    backend_option,
    format_option,
    given_options,
    problem_options,
    progress_bar,
)
from cupyfa.ladder import LADDER
from cupyfa.ladder.kernel import Kernel
from cupyfa.planner import source as sources
from cupyfa.report import plots as plotting
from cupyfa.report import publish as pages
from cupyfa.report import tables as report
from cupyfa.runtime import environment
from cupyfa.runtime.select import backend_named

LENGTHS = (256, 512, 1024, 2048, 4096)
_PATIENCE = 5  # budgets


@click.command()
@click.option("--backward", is_flag=True, help="The gradients' rungs.")
@partial(problem_options, dtype="float16")
@budget_option
@click.option("--readme", is_flag=True, help="Write the table into README.md of this checkout.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw TFLOP/s over N, 256 to 4096, to an .svg or .png file.",
)
@save_option
@click.option(
    "--from",
    "source",
    type=click.Path(dir_okay=False),
    help="Take what an earlier --save wrote, and measure nothing.",
)
@backend_option
@format_option
def ladder(
    backward: bool,
    budget: float,
    readme: bool,
    plot: Path | None,
    save: Path | None,
    source: str | None,
    backend: str,
    form: str,
    **sizes: Any,
) -> None:
    """Measure the rungs that take a dtype in turn, and what each gains over the rung before.

    The problem is batch 4, heads 16, M = N = 2048, d = 64 (a small one in the simulator) in
    float16, which most rungs take, and in which the baseline's products run on tensor cores.
    """
    if source and (idle := given_options("backward", "budget", "backend", *(sizes.keys() - {"M"}))):
        names, has = ", ".join(idle.values()), "has" if len(idle) == 1 else "have"
        raise ValueError(f"--from measures nothing, so {names} {has} no say; leave one out")
    check_target(save)
    if plot:
        plotting.check(plot)
        check_target(plot)
    sweep = plot is not None
    rungs = LADDER["backward" if backward else "forward"]

    def tell(results: Results, M: int | None, *, err: bool = False) -> list[Measurement]:
        try:
            if save:
                results.save(save)
        finally:  # that neither is lost where there is no room for the other
            rows = pages.at_length(results.rows, M)
            _show(results, rows, form, err=err)
        return rows

    if source:
        results = Results.load(source)
    else:
        results = _measure(rungs, backend, budget, sweep, sizes, partial(tell, err=True))
    rows = tell(results, sizes["M"])
    if plot:
        plotting.draw(results.rows, plot, pages.title(results, pages.problem_of(rows)))
    if readme:
        for page in pages.publish(sources.ROOT, results, rows):
            click.echo(f"note: wrote {page}", err=True)
    sys.exit(WRONG if any(row.passed is False for row in results.rows) else 0)


def _show(results: Results, rows: Sequence[Measurement], form: str, *, err: bool = False) -> None:
    """The rungs of one length as a table, after the notes on those of all."""
    for row in results.rows:
        if row.note:
            click.echo(f"note: {row.kernel} on {row.problem}: {row.note}", err=True)
    if form == "table":
        click.echo(f"{results.environment['device']}: {pages.problem_of(rows)}", err=err)
    click.echo(report.render(pages.rungs(rows), form), err=err)


def _measure(
    rungs: Mapping[str, Kernel],
    backend: str,
    budget: float,
    sweep: bool,
    sizes: dict[str, Any],
    tell: Callable[[Results, int | None], object],
) -> Results:
    """All rungs at one length, or at several; slow ones are left out of the longer ones.

    Tells of what was measured until then, if that ends before all is.
    """
    if sweep and sizes["N"] is not None:
        raise ValueError("--plot goes through lengths with N = M; leave -N out")
    engine = backend_named(backend)
    about = environment.describe(engine)

    def told(rows: list[Measurement]) -> None:
        M = sizes["M"]
        tell(Results(about, rows), M if M in {row.problem.M for row in rows} else None)

    with told_so_far(told) as keep, progress_bar("measuring") as progress:
        rows = benchmark.bench(
            [
                x.name
                for x in rungs.values()
                if x.takes(sizes["dtype"]) and x.suits(sizes["precision"])
            ],
            backend=engine,
            budget=budget,
            patience=_PATIENCE * budget if sweep else None,
            progress=progress,
            so_far=keep,
            **{
                **sizes,
                "M": sorted({*LENGTHS, sizes["M"] or LENGTHS[-1]}) if sweep else sizes["M"],
            },
        )
    return Results(about, rows)
