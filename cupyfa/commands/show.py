"""``cupyfa show``."""

from typing import Any

import click

from cupyfa.analysis.resources import compile_launch, compiled_row, limits_of, ptx, sass
from cupyfa.bench import sweeps
from cupyfa.commands import options
from cupyfa.ladder.lookup import record_named
from cupyfa.planner.select import plan
from cupyfa.planner.source import text
from cupyfa.report.tables import plan_lines, table_or_fields

VIEWS = {
    "source": "The exact text that is compiled.",
    "plan": "Grid, threads, shared memory, arguments.",
    "ptx": "PTX, from NVRTC.",
    "sass": "Machine code, from nvdisasm.",
    "resources": "Registers, spills, shared memory, occupancy and what limits it.  [default]",
}
_DEFAULTS = {"batch": 1, "heads": 1, "M": 1024, "d": 64}


def view_options(command: options.Command) -> options.Command:
    """A flag for each of VIEWS; with one name for all, two given flags would go unnoticed."""
    for name in reversed(VIEWS):
        command = click.option(f"--{name}", is_flag=True, help=VIEWS[name])(command)
    return command


@click.command()
@click.argument("kernel")
@view_options
@click.option("--arch", default="90", help="Compute capability.")
@options.problem_options()
@options.tile_options
def show(kernel: str, arch: str, constants: dict[str, int], **sizes: Any) -> None:
    """Show the source text, plan, PTX, machine code or resources of KERNEL.

    KERNEL is a name from `cupyfa list`, or `script.py:name` for a record of your own. Needs no GPU.
    Default sizes: -B 1 -H 1 -M 1024 -d 64 and N = M.
    """
    views = [name for name in VIEWS if sizes.pop(name)]
    if len(views) > 1:
        raise ValueError(f"--{' and --'.join(views)} are {len(views)} views; ask for one at a time")
    view = views[0] if views else "resources"
    record = record_named(kernel)
    options.refuse_foreign([record.operation], *sizes)
    given = {**_DEFAULTS, **options.given_sizes(sizes)}
    (problem,) = sweeps.problems(record.operation, {"N": given["M"], **given}, record)
    planned = plan(record, problem, limits_of(arch), **constants)
    for launch in planned.programs:
        if view in ("sass", "resources"):
            made = compile_launch(launch, arch)
            click.echo(
                sass(made) if view == "sass" else table_or_fields([compiled_row(planned, made)])
            )
        elif view == "plan":
            click.echo(plan_lines(planned, launch))
        else:
            click.echo(text(launch) if view == "source" else ptx(launch, arch))
