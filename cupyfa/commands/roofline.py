"""``cupyfa roofline``."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from cupyfa.analysis import roofline as roofs
from cupyfa.analysis.roofline_plot import draw_roofs
from cupyfa.analysis.tables import roofs as roofs_table
from cupyfa.bench.devices import DEVICES
from cupyfa.commands import WRONG
from cupyfa.commands.bench import check_target, split
from cupyfa.commands.options import format_option, problem_options, progress_bar
from cupyfa.report import plots as plotting
from cupyfa.report import tables as report


@click.command()
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@partial(problem_options, usual="float16, or the first that the kernels can do")
@click.option(
    "-p",
    "swept",
    multiple=True,
    metavar="NAME=VALUES",
    help="Several values of a size, of dtype or causal: 64,128, 512:16384:*2 or 64:256:+64.",
)
@click.option("--backward", is_flag=True, help="The gradients.")
@click.option(
    "--device",
    type=click.Choice([*DEVICES, roofs.THIS]),
    help="One of those known by their data sheets, or this GPU by what it reaches in large "
    "products and copies.  [default: this if there is one, else h100]",
)
@click.option(
    "--no-measure", is_flag=True, help="Do not measure kernels, if the device is the one here."
)
@click.option(
    "--budget",
    type=click.FloatRange(0),
    default=0.2,
    show_default=True,
    help="Seconds for each kernel that is measured.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the roofline to an .svg or .png file.",
)
@format_option
def roofline(
    kernels: tuple[str, ...],
    swept: tuple[str, ...],
    backward: bool,
    device: str | None,
    no_measure: bool,
    budget: float,
    plot: Path | None,
    form: str,
    **sizes: Any,
) -> None:
    """Tell what bounds attention on a device, and the least time that it takes.

    KERNEL is `naive` (scores and weights in memory), `tiled` (each input read once, the output
    written once), a name from `cupyfa list`, or `script.py:name` for a record of your own; without
    any, the first two and every rung that can do the problem. FLOPs over bytes is the intensity;
    below the device's balance the memory is the bound, above it the arithmetic, or the
    exponentials. Sizes left out are batch 4, heads 16, M = N = 2048, d = 64. On the device itself
    kernels are measured, too.
    """
    if plot:
        plotting.check(plot)
        check_target(plot)
    several, constants = split(swept, sizes)
    if constants:
        raise ValueError(f"{', '.join(constants)} is no size; -p takes sizes, dtype and causal")
    with progress_bar("measuring") as progress:
        rows = roofs.roofline(
            kernels,
            device=device or "auto",
            backward=backward,
            measure=not no_measure,
            budget=budget,
            progress=progress,
            **{**sizes, **several},
        )
    if plot:
        draw_roofs(rows, plot)
    click.echo(
        roofs_table(rows) if form == "table" else report.render([row.row() for row in rows], form)
    )
    sys.exit(WRONG if any(row.measured and row.measured.passed is False for row in rows) else 0)
