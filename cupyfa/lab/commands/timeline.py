"""``cupyfa timeline``."""

import json
from itertools import combinations
from math import inf
from pathlib import Path
from typing import Any

import click

from cupyfa.lab.analysis import timeline_page, timeline_recorder as timelines, timeline_trace
from cupyfa.lab.analysis.timeline_plot import draw
from cupyfa.lab.analysis.timeline_summary import lines, rounded, shares
from cupyfa.lab.commands import command_options
from cupyfa.lab.commands.saving import check_target
from cupyfa.lab.report import plots
from cupyfa.lab.report.tables import FORMATS, render, table_of
from cupyfa.lab.verify.case import Case
from cupyfa.runtime.choose_backend import backend_named

PERFETTO = "perfetto"
ALL = "all"


class _Block(click.ParamType):
    """The index of a block, or "all"."""

    name = "NUMBER|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == ALL or isinstance(value, int):
            return value
        if not (str(value).isdecimal() and str(value).isascii()):
            self.fail(f"{value!r} is neither a block number nor {ALL}", param, ctx)
        return int(value)


class _Window(click.ParamType):
    """A time window such as 0:5000."""

    name = "START:END"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        try:
            start, end = map(float, value.split(":"))
        except ValueError:
            start = end = 0.0
        if not -inf < start < end < inf:
            self.fail(f"{value!r} is not a window START:END, for example 0:5000", param, ctx)
        return start, end


@click.command()
@command_options.kernel_argument
@command_options.problem_options()
@command_options.input_options
@command_options.tile_options
@click.option("--launch", help="The launch to record: its entry point, or its number from 0.")
@click.option(
    "--block",
    type=_Block(),
    default=0,
    help="The block whose warps are shown; all: when and where each block runs.",
)
@click.option(
    "--plot", type=command_options.FILE, help="Draw the timeline to an .svg or .png file."
)
@click.option(
    "--zoom", type=_Window(), help="The times that the picture shows.  [default: both ends]"
)
@click.option(
    "--save",
    type=command_options.FILE,
    help="Write a trace for https://ui.perfetto.dev.",
)
@click.option(
    "--html",
    type=command_options.FILE,
    help="Write a page that plays the simulated block step by step.",
)
@command_options.backend_option
@click.option(
    "--format",
    "form",
    type=click.Choice((*FORMATS, PERFETTO)),
    default="table",
    help="Output format; perfetto prints the trace.",
)
def timeline(
    kernel: str,
    seed: int,
    values: str,
    layout: str,
    launch: str | None,
    block: int | str,
    plot: Path | None,
    zoom: tuple[float, float] | None,
    save: Path | None,
    html: Path | None,
    backend: str,
    tiles: dict[str, int],
    form: str,
    **sizes: Any,
) -> None:
    """Record what each warp does and waits for.

    One launch of KERNEL is recorded: the phases of one block, or when and where each block runs.
    KERNEL is a name from `cupyfa list`, `auto`, or `script.py:name` for a record of your own. The
    table shows the share of each phase in the time of the block's warps. On a GPU times are clock
    cycles of the multiprocessor; the simulator counts steps.
    """
    on = backend_named(backend)
    check_target(plot)
    check_target(save)
    if plot:
        plots.check(plot)
    check_target(html)
    files = {"--save": save, "--plot": plot, "--html": html}
    for (one, first), (other, second) in combinations(files.items(), 2):
        if first and second and first.resolve() == second.resolve():
            raise ValueError(f"{one} and {other} both write {first}; choose two different files")
    if zoom and not plot:
        command_options.refuse_idle("without --plot, nothing is plotted", "zoom")
    small = on.name == "simulator"
    record, problem = command_options.kernel_and_problem(kernel, sizes, on.limits, small=small)
    case = Case(record.operation, problem, seed, values, layout)
    with command_options.progress_bar("recording") as progress, on.working_on(None):
        found = timelines.record(
            record,
            case,
            on,
            launch=launch,
            block=None if block == ALL else int(block),
            tiles=tiles,
            progress=progress,
        )
    if save:
        timeline_trace.save(found, save)
    if html:
        timeline_page.save(found, case, html)
    if plot:
        draw(found, plot, zoom)
    if form == PERFETTO:
        click.echo(json.dumps(timeline_trace.trace(found)))
        return
    if found.other_launches and launch is None:
        others = ", ".join(found.other_launches)
        command_options.note(
            f"recorded {found.entry}; to record another launch, use --launch NAME: {others}"
        )
    rows = [x.row() for x in shares(found)]
    if form != "table":
        for line in lines(found):
            command_options.note(line)
        click.echo(render(rows, form))
        return
    click.echo("\n".join([*lines(found), ""]))
    click.echo(table_of(rows, share=False, shown=rounded))
