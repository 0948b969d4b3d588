"""``cupyfa list``."""

import click

from cupyfa.lab.analysis.resources import gpu
from cupyfa.lab.bench.sweeps import usual_dtype
from cupyfa.lab.commands import command_options
from cupyfa.lab.report.tables import kernel_row, listing, render
from cupyfa.ladder import LADDER
from cupyfa.ladder.kernel import Kernel
from cupyfa.planner.choose_kernel import largest_d
from cupyfa.planner.plan import Limits
from cupyfa.runtime.choose_backend import backend_named


@click.command("list")
@click.option(
    "--dtype",
    type=command_options.dtype_choice,
    help=f"The dtype of the largest d.  [default: {command_options.DTYPE}]",
)
@command_options.backend_option
@command_options.format_option
def list_kernels(dtype: str | None, backend: str, form: str) -> None:
    """List the kernels: what each adds, and what it supports."""
    # Nothing runs here, so "auto" is resolved without the note on the chosen backend.
    gpu_here = gpu() if backend == "auto" else None
    limits = (gpu_here or backend_named("simulator" if backend == "auto" else backend)).limits
    rows = [
        kernel_row(kernel, _largest_d(kernel, dtype or usual_dtype(kernel), limits))
        for kernels in LADDER.values()
        for kernel in kernels.values()
    ]
    click.echo(listing(rows) if form == "table" else render(rows, form))
    command_options.note(
        f"largest d for {dtype or command_options.DTYPE}, with the smallest tile, in the "
        f"{limits.shared_bytes:,} bytes of shared memory of a block on {limits.device}"
    )


def _largest_d(kernel: Kernel, dtype: str, limits: Limits) -> int | str | None:
    if not kernel.takes(dtype):
        return None
    found = largest_d(kernel, dtype, limits)
    return "any" if found is None else found
