"""``cupyfa show``."""

from __future__ import annotations

from typing import Any

import click

from cupyfa import compiling, planning, records, report, sources, sweeps
from cupyfa.commands.options import (
    DTYPE,
    dtype_choice,
    precision_option,
    size,
    tile_options,
    tile_sizes,
    window_option,
)
from cupyfa.problem import Problem


@click.command()
@click.argument("kernel")
@click.option("--source", "what", flag_value="source", help="The exact text that is compiled.")
@click.option("--plan", "what", flag_value="plan", help="Grid, threads, shared memory, arguments.")
@click.option("--ptx", "what", flag_value="ptx", help="PTX, from NVRTC.")
@click.option("--sass", "what", flag_value="sass", help="Machine code, if nvdisasm is there.")
@click.option(
    "--resources",
    "what",
    flag_value="resources",
    help="Registers, spills, shared memory, occupancy and what limits it.  [default]",
)
@click.option("--arch", default="90", show_default=True, help="Compute capability.")
@click.option("-M", "M", type=size, default=1024, show_default=True, help="Queries.")
@click.option("-N", "N", type=size, help="Keys.  [default: M]")
@click.option("-B", "--batch", type=size, default=1, show_default=True)
@click.option("-H", "--heads", type=size, default=1, show_default=True)
@click.option("-d", type=click.IntRange(1), default=64, show_default=True, help="Head dimension.")
@click.option("--dv", type=click.IntRange(1), help="Value dimension.  [default: d]")
@click.option("--dtype", type=dtype_choice, show_default=DTYPE)
@precision_option
@click.option("--causal", is_flag=True, help="With a causal mask.")
@window_option
@tile_options
def show(
    kernel: str,
    what: str | None,
    arch: str,
    Br: int | None,
    Bc: int | None,
    constants: tuple[str, ...],
    **sizes: Any,
) -> None:
    """Show what KERNEL becomes: source text, plan, PTX, machine code or resources.

    KERNEL is as for `cupyfa run`. Needs no GPU.
    """
    record = records.record_named(kernel)
    sizes["dtype"] = sizes["dtype"] or sweeps.usual_dtype(record, precision=sizes["precision"])
    if record.operation == "softmax":
        M, N = sizes["M"], sizes["N"]
        problem = Problem.of_row_sizes(M, M if N is None else N, sizes["dtype"])
    else:
        problem = Problem.of_sizes(**sizes)
    limits = compiling.limits_of(arch)
    plan = planning.plan(record, problem, limits, **tile_sizes(Br, Bc, constants))
    for launch in plan.programs:
        if what == "source":
            click.echo(sources.text(launch))
        elif what == "plan":
            click.echo(report.plan_lines(plan, launch))
        elif what == "ptx":
            click.echo(compiling.ptx(launch, arch))
        elif what == "sass":
            click.echo(compiling.sass(compiling.compile_launch(launch, arch)))
        else:
            compiled = compiling.compile_launch(launch, arch)
            click.echo(report.fields(report.compiled_row(plan, compiled)))
