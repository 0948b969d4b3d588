"""``cupyfa roofline``."""

import sys
from pathlib import Path
from typing import Any

import click

from cupyfa.lab.analysis.roofline_model import THIS, measured_roofs, roofline as roofs_of, roofs
from cupyfa.lab.analysis.roofline_plot import draw_roofs
from cupyfa.lab.bench.peaks import DEVICES
from cupyfa.lab.bench.results import Results
from cupyfa.lab.commands import WRONG, command_options
from cupyfa.lab.commands.bench import split, sweep_option
from cupyfa.lab.commands.saving import check_target
from cupyfa.lab.report import plots
from cupyfa.lab.report.tables import render


@click.command()
@command_options.some_kernels_argument("naive", "tiled")
@command_options.problem_options(small=False)
@sweep_option
@command_options.backward_option
@click.option(
    "--device",
    type=click.Choice([*DEVICES, THIS]),
    help="A device by its data sheet, or this GPU by its measured rates of large products and "
    "copies.  [default: this if there is one, else h100]",
)
@click.option(
    "--plot", type=command_options.FILE, help="Draw the roofline to an .svg or .png file."
)
@click.option(
    "--from",
    "saved",
    type=click.Path(dir_okay=False),
    help="Measurements of an earlier `bench --save` or `ladder --save`; arguments select rows.",
)
@command_options.format_option
def roofline(
    kernels: tuple[str, ...],
    swept: tuple[str, ...],
    device: str | None,
    plot: Path | None,
    saved: str | None,
    backward: bool,
    form: str,
    **sizes: Any,
) -> None:
    """Compute which resource bounds attention, and the minimum time.

    KERNEL is `naive` (S and P are stored in memory), `tiled` (each input is read once, the output
    is written once), a name from `cupyfa list`, `auto`, or `script.py:name` for a record of your
    own; the default is `naive`, `tiled` and every rung that supports the problem. FLOP/B is the
    arithmetic intensity: below the device's balance memory is the bound, above it arithmetic or
    exponentials. With `--from` the table also shows the measurements of a file.
    """
    if plot:
        plots.check(plot)
        check_target(plot)
    several, tiles = split(swept, sizes)
    if tiles:
        raise ValueError(
            f"{', '.join(tiles)} is not a size or option; -p accepts only sizes and options"
        )
    sizes |= several
    if saved:
        command_options.refuse_idle("--from reads the operation from a file", "backward")
        rows = measured_roofs(Results.load(saved), kernels, device=device or "auto", **sizes)
    else:
        with command_options.progress_bar("computing") as progress:
            rows = roofs_of(
                kernels,
                device=device or "auto",
                backward=backward,
                progress=progress,
                **sizes,
            )
    if plot:
        draw_roofs(rows, plot)
    click.echo(roofs(rows) if form == "table" else render([row.row() for row in rows], form))
    sys.exit(WRONG if any(row.measured and row.measured.passed is False for row in rows) else 0)
