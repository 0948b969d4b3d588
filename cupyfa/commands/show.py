"""``cupyfa show``."""

from __future__ import annotations

from typing import Any

import click

from cupyfa.analysis import resources as compiling
from cupyfa.analysis.tables import compiled_row
from cupyfa.bench import sweeps
from cupyfa.commands.options import (
    DTYPE,
    Command,
    attention_options,
    dtype_choice,
    refuse_foreign,
    size,
    tile_options,
    tile_sizes,
)
from cupyfa.ladder import lookup as records
from cupyfa.planner import select as planning
from cupyfa.planner import source as sources
from cupyfa.problem import Problem
from cupyfa.report import tables as report

VIEWS = {
    "source": "The exact text that is compiled.",
    "plan": "Grid, threads, shared memory, arguments.",
    "ptx": "PTX, from NVRTC.",
    "sass": "Machine code, if nvdisasm is there.",
    "resources": "Registers, spills, shared memory, occupancy and what limits it.  [default]",
}


def view_options(command: Command) -> Command:
    """A flag for each of VIEWS; flags that shared one name would hide that two were given."""
    for name in reversed(VIEWS):
        command = click.option(f"--{name}", is_flag=True, help=VIEWS[name])(command)
    return command


@click.command()
@click.argument("kernel")
@view_options
@click.option("--arch", default="90", show_default=True, help="Compute capability.")
@click.option("-M", "M", type=size, default=1024, show_default=True, help="Queries.")
@click.option("-N", "N", type=size, help="Keys.  [default: M]")
@click.option("-B", "--batch", type=size, default=1, show_default=True)
@click.option("-H", "--heads", type=size, default=1, show_default=True)
@click.option("-d", type=click.IntRange(1), default=64, show_default=True, help="Head dimension.")
@click.option("--dv", type=click.IntRange(1), help="Value dimension.  [default: d]")
@click.option("--dtype", type=dtype_choice, show_default=DTYPE)
@attention_options
@tile_options
def show(
    kernel: str,
    arch: str,
    Br: int | None,
    Bc: int | None,
    constants: tuple[str, ...],
    **sizes: Any,
) -> None:
    """Show what KERNEL becomes: source text, plan, PTX, machine code or resources.

    KERNEL is a name from `cupyfa list`, or `script.py:name` for a record of your own. Needs no
    GPU.
    """
    views = [name for name in VIEWS if sizes.pop(name)]
    if len(views) > 1:
        raise ValueError(f"--{' and --'.join(views)} are {len(views)} views; ask for one at a time")
    what = views[0] if views else "resources"
    record = records.record_named(kernel)
    refuse_foreign([record.operation], *sizes)
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
            click.echo(report.fields(compiled_row(plan, compiled)))
