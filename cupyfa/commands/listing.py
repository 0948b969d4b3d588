"""``cupyfa list``."""

from __future__ import annotations

import click

from cupyfa.bench.sweeps import usual_dtype
from cupyfa.commands.options import DTYPE, backend_option, dtype_choice, format_option
from cupyfa.ladder import LADDER
from cupyfa.planner import select as planning
from cupyfa.report import tables as report
from cupyfa.runtime.select import backend_named


@click.command("list")
@click.option(
    "--dtype",
    type=dtype_choice,
    show_default=DTYPE,
    help="What the largest d is told for.",
)
@backend_option
@format_option
def list_kernels(dtype: str | None, backend: str, form: str) -> None:
    """The kernels, what each adds, and what it can do."""
    limits = backend_named(backend).limits
    rows = [
        report.kernel_row(kernel, planning.largest_d(kernel, dtype or usual_dtype(kernel), limits))
        for kernels in LADDER.values()
        for kernel in kernels.values()
    ]
    click.echo(report.listing(rows) if form == "table" else report.render(rows, form))
    click.echo(
        f"note: d is told for {dtype or DTYPE}, as far as the {limits.shared_bytes:,} bytes of "
        f"shared memory reach that {limits.device} gives a block",
        err=True,
    )
