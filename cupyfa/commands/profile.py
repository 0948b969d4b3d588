"""``cupyfa profile``."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from typing import Any

import click

from cupyfa.analysis import profile as profiling
from cupyfa.bench import sweeps
from cupyfa.commands.options import (
    backend_option,
    format_option,
    input_options,
    problem_of,
    problem_options,
    progress_bar,
    tile_options,
    tile_sizes,
)
from cupyfa.errors import Unsupported
from cupyfa.ladder import lookup as records
from cupyfa.ladder.kernel import Kernel
from cupyfa.report import tables as report
from cupyfa.verify.case import Case


@click.command()
@click.argument("kernel")
@problem_options
@input_options
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the inputs.")
@click.option(
    "--tool",
    type=click.Choice(list(profiling.TOOLS)),
    help="ncu reads counters, nsys measures the time of each kernel.  [default: ncu]",
)
@click.option(
    "--print", "only_print", is_flag=True, help="Print the command lines and do not run them."
)
@click.option(
    "--once", is_flag=True, hidden=True, help="Run the kernel twice: the program that is profiled."
)
@backend_option
@tile_options
@format_option
def profile(
    kernel: str,
    seed: int,
    values: str,
    layout: str,
    tool: str | None,
    only_print: bool,
    once: bool,
    backend: str,
    form: str,
    Br: int | None,
    Bc: int | None,
    constants: tuple[str, ...],
    **sizes: Any,
) -> None:
    """Profile KERNEL with Nsight Compute or Nsight Systems.

    KERNEL is a name from `cupyfa list`, or `script.py:name` for a record of your own. Default
    sizes: -B 4 -H 16 -M 2048 -d 64 and N = M, for a softmax -M 16384 -N 4096.
    """
    record = records.record_named(kernel)
    given = tile_sizes(Br, Bc, constants)
    case = _case(record, seed, values, layout, sizes)
    if backend == "simulator":
        remedy = "leave --backend out" if only_print else "--print prints the commands"
        raise Unsupported(f"the simulator has no counters; profile on a GPU: {remedy}")
    if once:
        profiling.launch_twice(kernel, case, given)
        return
    if only_print or not shutil.which(tool or "ncu"):
        told = _commands(tool, kernel, case, given)
        lines = "\n".join(row["command"] for row in told)  # as a shell takes them
        click.echo(lines if form == "table" else report.render(told, form))
    if only_print:
        return
    with progress_bar("profiling") as progress:
        if tool == "nsys":
            found = profiling.timeline(kernel, case, progress=progress, tiles=given)
            rows = [x.row() for x in found]
        else:
            counted = profiling.profile(kernel, case, progress=progress, tiles=given)
            rows = [x.row() for x in counted]
    click.echo(report.render(rows, form))


def _case(record: Kernel, seed: int, values: str, layout: str, sizes: Mapping[str, Any]) -> Case:
    """The case of the sizes given, and the standard ones for the others."""
    given = {name: value for name, value in sizes.items() if value is not None}
    dtype = sweeps.usual_dtype(record, precision=given.get("precision"))
    sizes = {**sweeps.USUAL[record.operation], "dtype": dtype, **given}
    problem = problem_of(record.operation, record, seed, {"N": sizes["M"], **sizes})
    return Case(record.operation, problem, seed, values, layout)


def _commands(
    tool: str | None, kernel: str, case: Case, given: Mapping[str, int]
) -> list[dict[str, str]]:
    """The command lines of a tool, or of each, as rows."""
    made = {
        "ncu": profiling.ncu_command(kernel, case, given),
        "nsys": profiling.nsys_command(kernel, case, given),
    }
    return [{"tool": x, "command": shlex.join(made[x])} for x in made if tool in (None, x)]
