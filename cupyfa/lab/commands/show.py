"""``cupyfa show``."""

from typing import Any

import click

from cupyfa.lab.analysis.resources import compile_launch, compiled_row, limits_of, ptx, sass
from cupyfa.lab.commands import command_options
from cupyfa.lab.report.tables import Row, plan_lines, plan_row, render, table_or_fields
from cupyfa.planner.choose_kernel import passed_over, plan
from cupyfa.planner.plan import Plan, PlannedLaunch
from cupyfa.planner.source import inlined, text

VIEWS = {
    "source": "The exact source that is compiled.",
    "inlined": "The source as one file that includes the project's headers.",
    "plan": "Grid, threads, shared memory, arguments.",
    "ptx": "PTX, from NVRTC.",
    "sass": "Machine code, from nvdisasm.",
    "resources": "Registers, spills, shared memory, occupancy and what limits it.  [default]",
}


def view_options(command: command_options.Command) -> command_options.Command:
    """Adds a flag for each of VIEWS; separate parameters let the command detect conflicts."""
    for name in reversed(VIEWS):
        command = click.option(f"--{name}", is_flag=True, help=VIEWS[name])(command)
    return command


@click.command()
@command_options.kernel_argument
@view_options
@click.option("--arch", default="90", help="Compute capability.")
@command_options.problem_options(small=False)
@command_options.tile_options
@command_options.format_option
def show(kernel: str, arch: str, tiles: dict[str, int], form: str, **sizes: Any) -> None:
    """Show the source, plan, PTX or machine code of KERNEL.

    KERNEL is a name from `cupyfa list`, `auto`, or `script.py:name` for a record of your own.
    Needs no GPU.
    """
    views = [name for name in VIEWS if sizes.pop(name)]
    if len(views) > 1:
        raise ValueError(f"--{' and --'.join(views)} cannot be combined; choose one of them")
    view = views[0] if views else "resources"
    arch = command_options.architecture(arch)
    limits = limits_of(arch)
    record, problem = command_options.kernel_and_problem(kernel, sizes, limits)
    planned = plan(record, problem, limits, **tiles)
    if form == "table" and view == "plan":
        found = passed_over(record, problem, limits) if kernel == "auto" else None
        click.echo(plan_lines(planned, found))
    elif form == "table":
        for launch in planned.programs:
            row = _row(view, planned, launch, arch)
            click.echo(table_or_fields([row]) if view == "resources" else row[view])
    else:
        click.echo(render([_row(view, planned, x, arch) for x in planned.programs], form))


def _row(view: str, planned: Plan, launch: PlannedLaunch, arch: str) -> Row:
    """Returns a view of a launch as a table row."""
    if view == "plan":
        return plan_row(planned, launch)
    if view == "resources":
        return compiled_row(planned, compile_launch(launch, arch))
    if view == "sass":
        return {"entry": launch.entry, view: sass(compile_launch(launch, arch))}
    texts = {"source": text, "inlined": inlined}
    made = texts[view](launch) if view in texts else ptx(launch, arch)
    return {"entry": launch.entry, view: made}
