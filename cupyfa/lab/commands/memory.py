"""``cupyfa memory``."""

from typing import Any

import click

from cupyfa.lab.analysis.footprint import memory as footprints
from cupyfa.lab.commands import command_options
from cupyfa.lab.report.tables import render


@click.command()
@command_options.some_kernels_argument()
@command_options.problem_options(small=False)
@command_options.backward_option
@click.option("--no-ncu", is_flag=True, help="Do not run Nsight Compute.")
@command_options.backend_option
@command_options.format_option
def memory(
    kernels: tuple[str, ...], backward: bool, no_ncu: bool, backend: str, form: str, **sizes: Any
) -> None:
    """Count the memory that attention and its kernels need.

    KERNEL is a name from `cupyfa list`, `auto`, or `script.py:name` for a record of your own.
    The default is every kernel that can do the problem. Without a GPU, plans are for an H100.

    \b
    inputs, outputs  arrays of the call
    scratch          temporary memory
    moved            read and written, by the formula of naive or tiled attention
    peak             most memory allocated during a run, measured on a GPU
    DRAM             read and written by the kernels, measured by Nsight Compute
    """
    with command_options.progress_bar("counting") as progress:
        rows = footprints(
            kernels, backward=backward, backend=backend, ncu=not no_ncu, progress=progress, **sizes
        )
    table = [row.row() for row in rows]
    if form in ("table", "md"):
        table = [{name: _shown(name, x) for name, x in row.items()} for row in table]
    if form == "table":
        click.echo(f"{rows[0].device}: {rows[0].problem}")
        left_out = {x for x in table[0] if not any(row[x] or row[x] == 0 for row in table)}
        left_out |= {"device", "tile", *rows[0].problem.row()}
        table = [{x: row[x] for x in row if x not in left_out} for row in table]
    click.echo(render(table, form))


def _shown(name: str, value: Any) -> Any:
    """MB in three digits, or as a whole number from 100 on; other values as they are."""
    if value is None or not name.endswith("_MB"):
        return value
    return round(value) if value >= 100 else float(f"{value:.3g}")
