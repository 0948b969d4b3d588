"""``cupyfa profile``."""

import shlex
import shutil
from collections.abc import Sequence
from typing import Any

import click

from cupyfa.errors import Unsupported
from cupyfa.lab.analysis import nsight as profiling
from cupyfa.lab.analysis.resources import gpu, limits_of
from cupyfa.lab.bench import sweeps
from cupyfa.lab.commands import command_options
from cupyfa.lab.report.tables import render
from cupyfa.lab.verify.case import Case
from cupyfa.ladder.lookup import operation_of, record_named
from cupyfa.planner.choose_kernel import select

_WITHOUT_A_GPU = "90"  # the architecture that "auto" chooses a kernel for


def _in_lines(command: Sequence[str]) -> str:
    """A command for a shell in lines of one option each, lists of many names in lines of few."""
    lines = [shlex.quote(command[0])]
    for word in command[1:]:
        quoted = shlex.quote(word)
        if word.startswith("-"):
            lines.append(f"  {quoted}")
        elif word.count(",") > 1:
            # Within a word a line may end anywhere, but must not begin with a space.
            lines[-1] += " " + quoted.replace(",", ",\\\n")
        else:
            lines[-1] += f" {quoted}"
    return " \\\n".join(lines)


@click.command()
@command_options.kernel_argument
@command_options.problem_options(small=False)
@command_options.input_options
@command_options.tile_options
@click.option(
    "--tool",
    type=click.Choice(list(profiling.TOOLS)),
    help="ncu reads counters, nsys measures the time of each kernel.  [default: ncu]",
)
@click.option(
    "--print", "only_print", is_flag=True, help="Print the command lines and do not run them."
)
@click.option("--once", is_flag=True, hidden=True, help="Run as the program that is profiled.")
@command_options.backend_option
@command_options.format_option
def profile(
    kernel: str,
    seed: int,
    values: str,
    layout: str,
    tool: str | None,
    only_print: bool,
    once: bool,
    backend: str,
    tiles: dict[str, int],
    form: str,
    **sizes: Any,
) -> None:
    """Profile KERNEL with Nsight Compute or Nsight Systems.

    KERNEL is a name from `cupyfa list`, `auto`, or `script.py:name` for a record of your own.
    """
    operation = operation_of(kernel)
    command_options.refuse_foreign([operation], *sizes)
    records = [] if kernel == "auto" else [record_named(kernel)]
    (problem,) = sweeps.problems(operation, sizes, *records)
    if kernel == "auto":
        here = gpu()
        limits = here.limits if here else limits_of(_WITHOUT_A_GPU)
        kernel = select("auto", operation, problem, limits).name
    case = Case(operation, problem, seed, values, layout)
    if backend == "simulator":
        remedy = "leave --backend out" if only_print else "--print prints the commands"
        raise Unsupported(f"the simulator has no counters; profile on a GPU: {remedy}")
    if once:
        profiling.launch_twice(kernel, case, tiles)
        return
    if only_print or not shutil.which(tool or "ncu"):
        commands = {
            "ncu": profiling.ncu_command(kernel, case, tiles),
            "nsys": profiling.nsys_command(kernel, case, tiles),
        }
        chosen = {x: command for x, command in commands.items() if tool in (None, x)}
        rows = [{"tool": x, "command": shlex.join(command)} for x, command in chosen.items()]
        in_lines = "\n\n".join(map(_in_lines, chosen.values()))
        click.echo(in_lines if form == "table" else render(rows, form))
    if only_print:
        return
    with command_options.progress_bar("profiling") as progress:
        run: Any = profiling.timeline if tool == "nsys" else profiling.profile
        rows = [x.row() for x in run(kernel, case, progress=progress, tiles=tiles)]
    click.echo(render(rows, form))
