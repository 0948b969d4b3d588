"""``cupyfa roofline``."""

import sys
from pathlib import Path
from typing import Any

import click

from cupyfa.analysis.roofline import THIS, roofline as roofs_of, roofs
from cupyfa.analysis.roofline_plot import draw_roofs
from cupyfa.bench.peaks import DEVICES
from cupyfa.commands import WRONG, options
from cupyfa.commands.bench import check_target, split, sweep_option
from cupyfa.report import plots
from cupyfa.report.tables import render


@click.command()
@options.some_kernels_argument("naive", "tiled")
@options.problem_options(small=False, usual="float16, or the first that the kernels can do")
@sweep_option
@click.option("--backward", is_flag=True, help="The gradients.")
@click.option(
    "--device",
    type=click.Choice([*DEVICES, THIS]),
    help="A device by its data sheet, or this GPU by its measured rates of large products and "
    "copies.  [default: this if there is one, else h100]",
)
@click.option("--no-measure", is_flag=True, help="Do not measure kernels on this GPU.")
@click.option(
    "--budget", type=options.SECONDS, default=0.2, help="Seconds for each kernel that is measured."
)
@click.option("--plot", type=options.FILE, help="Draw the roofline to an .svg or .png file.")
@options.format_option
def roofline(
    kernels: tuple[str, ...],
    swept: tuple[str, ...],
    device: str | None,
    no_measure: bool,
    plot: Path | None,
    form: str,
    **sizes: Any,
) -> None:
    """Compute what bounds attention on a device, and the least time that it takes.

    KERNEL is `naive` (S and P go through memory), `tiled` (each input is read once, the output is
    written once), a name from `cupyfa list`, `auto`, or `script.py:name` for a record of your own;
    the default is the first two and every rung that can do the problem. FLOP/B is the intensity;
    below the device's balance memory is the bound, above it arithmetic or the exponentials. On this
    GPU kernels are also measured.
    """
    if plot:
        plots.check(plot)
        check_target(plot)
    several, tiles = split(swept, sizes)
    if tiles:
        raise ValueError(f"{', '.join(tiles)} is not a size; -p takes sizes and options")
    with options.progress_bar("measuring") as progress:
        rows = roofs_of(
            kernels,
            device=device or "auto",
            measure=not no_measure,
            progress=progress,
            **{**sizes, **several},
        )
    if plot:
        draw_roofs(rows, plot)
    click.echo(roofs(rows) if form == "table" else render([row.row() for row in rows], form))
    sys.exit(WRONG if any(row.measured and row.measured.passed is False for row in rows) else 0)
