"""``cupyfa memory``."""

from __future__ import annotations

from typing import Any

import click

from cupyfa.analysis import memory as footprint
from cupyfa.commands.options import (
    backend_option,
    format_option,
    kernels_argument,
    problem_options,
    progress_bar,
)
from cupyfa.report import tables as report


@click.command()
@kernels_argument
@problem_options
@click.option("--backward", is_flag=True, help="Of gradients, in place of the forward pass.")
@click.option("--steps", is_flag=True, help="Every step, and what it moves of which array.")
@click.option("--no-ncu", is_flag=True, help="Without Nsight Compute, which takes its time.")
@backend_option
@format_option
def memory(
    kernels: tuple[str, ...],
    backward: bool,
    steps: bool,
    no_ncu: bool,
    backend: str,
    form: str,
    **sizes: Any,
) -> None:
    """Count the bytes that attention holds and moves: written down, in tiles, and by kernel.

    KERNEL is a name from `cupyfa list` or `script.py:name`; without any it is all that can do it.
    Sizes left out are -B 4 -H 16 -M 2048 -d 64 and N = M. Bytes moved are what loops ask for, of
    which caches answer a part. Without a GPU plans are for an H100; on one, the memory that is
    allocated is measured, and with Nsight Compute at hand what the memory moves.
    """
    with progress_bar("counting") as progress:
        rows = footprint.memory(
            kernels, backward=backward, backend=backend, ncu=not no_ncu, progress=progress, **sizes
        )
    if steps:
        table = [row for each in rows for row in each.step_rows()]
    else:
        table = [row.row() for row in rows]
    if form == "table":
        click.echo(f"{rows[0].device}: {rows[0].problem}")
        table = _for_people(table)
    click.echo(report.render(table, form))


def _for_people(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without what none of them has, and without tiles, which `cupyfa list` names."""
    left_out = {"tile"} | {x for x in rows[0] if not any(row[x] or row[x] == 0 for row in rows)}
    return [{x: row[x] for x in row if x not in left_out} for row in rows]
