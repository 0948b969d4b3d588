"""``cupyfa bench``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click

from cupyfa import store
from cupyfa.bench import bench as benchmark
from cupyfa.bench import peers, sweeps
from cupyfa.bench.results import Measurement, Results
from cupyfa.commands import WRONG
from cupyfa.commands.options import (
    backend_option,
    every_option,
    format_option,
    input_options,
    kernel_names,
    kernels_argument,
    problem_options,
    progress_bar,
)
from cupyfa.commands.signals import take_time
from cupyfa.errors import Unsupported
from cupyfa.report import tables as report
from cupyfa.runtime import environment
from cupyfa.runtime.select import backend_named

USUAL = {  # what goes without saying
    "values": "normal",
    "layout": "bhsd",
    "seed": "",
    "caches": "cold",
    "launches": "one by one",
}
budget_option = click.option(
    "--budget",
    type=click.FloatRange(0),
    default=1.0,
    show_default=True,
    help="Seconds for each kernel and problem.",
)
save_option = click.option(
    "--save",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write everything to a JSON file, for `cupyfa compare`.",
)


@click.command()
@kernels_argument
@every_option
@problem_options
@input_options
@click.option(
    "-p",
    "swept",
    multiple=True,
    metavar="NAME=VALUES",
    help="Several values of a size, of dtype or causal, or of a constant such as Br: 64,128, "
    "512:16384:*2 or 64:256:+64. All combinations are measured.",
)
@click.option("--tokens", type=click.IntRange(1), help="batch * M; gives the batch.")
@click.option("--width", type=click.IntRange(1), help="heads * d; gives the heads.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the inputs.")
@click.option("--hot", is_flag=True, help="Leave the caches as the launch before left them.")
@click.option("--graph", is_flag=True, help="Replay launches as a CUDA graph.")
@budget_option
@click.option(
    "--against",
    metavar="PEERS",
    default="",
    help=f"Other libraries, where installed: {','.join(peers.NAMES)}.",
)
@click.option(
    "--patience",
    type=click.FloatRange(0),
    help="Leave a kernel out where, by a smaller problem, it would take longer than these seconds.",
)
@click.option("--alone", is_flag=True, help="A single kernel without its baseline and rung before.")
@save_option
@backend_option
@format_option
def bench(
    kernels: tuple[str, ...],
    every: bool,
    swept: tuple[str, ...],
    hot: bool,
    against: str,
    save: Path | None,
    backend: str,
    form: str,
    **how: Any,
) -> None:
    """Measure kernels on one problem or many, each checked before it is timed.

    KERNEL is as for `cupyfa run`; one by itself is measured beside its baseline and the rung
    before it, and those of the same name are told as they are given. Sizes left out are batch 4,
    heads 16, M = N = 2048, d = 64, and small ones in the simulator. Kernels alternate in rounds,
    and a factor x is the median over the rounds of how many times faster a kernel is.
    """
    engine = backend_named(backend)
    check_target(save)
    if how["graph"] and engine.name == "simulator":
        raise Unsupported("the simulator has no CUDA graphs; leave --graph out")
    sizes, constants = split(swept, how)
    others = [name.strip() for name in against.split(",") if name.strip()]
    about = {
        "values": how["values"],
        "layout": how["layout"],
        "seed": str(how["seed"]),
        "caches": "hot" if hot else "cold",
        "launches": "a CUDA graph" if how["graph"] else "one by one",
    }
    said = {"device": engine.limits.device} | {x: about[x] for x in about if about[x] != USUAL[x]}
    said |= {name: str(values[0]) for name, values in constants.items() if len(values) == 1}

    def tell(rows: list[Measurement], *, err: bool = False) -> None:
        found = [{"kernel": x.kernel, "device": engine.limits.device} | x.row() for x in rows]
        table = form == "table"
        try:  # first, for it is quick, and there may be no time for more
            if save:
                made_with = environment.describe(engine) | peers.versions(others) | about
                Results(made_with, rows).save(save)
        finally:  # that neither is lost where there is no room for the other
            told = report.measurements(rows, said) if table else report.render(found, form)
            click.echo(told, err=err)

    with told_so_far(partial(tell, err=True)) as keep, progress_bar("measuring") as progress:
        rows = benchmark.bench(
            kernel_names(kernels, every),
            backend=engine,
            against=others,
            constants=constants,
            cold=not hot,
            progress=progress,
            so_far=keep,
            **{**how, **sizes},
        )
    tell(rows)
    sys.exit(WRONG if any(row.passed is False for row in rows) else 0)


@contextmanager
def told_so_far(
    tell: Callable[[list[Measurement]], object],
) -> Iterator[Callable[[list[Measurement]], None]]:
    """What ``benchmark.bench`` calls with its rows so far; tells of them if it ends badly."""
    rows: list[Measurement] = []

    def keep(measured: list[Measurement]) -> None:
        rows[:] = measured
        take_time()  # to tell of them, should a signal come

    try:
        yield keep
    except BaseException as ended:
        if rows:
            tell(rows)
            is_asked = isinstance(ended, KeyboardInterrupt | SystemExit)
            why = "interrupted" if is_asked else "ended by an error"
            click.echo(f"note: {why}; this is what was measured until then", err=True)
        raise


def split(
    swept: Sequence[str], options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sizes and the constants among NAME=VALUES, none of which an option gives, too."""
    sizes: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    for text in swept:
        name, values = sweeps.parsed(text)
        group = sizes if name in (*sweeps.AXES, "tokens", "width") else constants
        if name in group:
            raise ValueError(f"-p {name} is given twice; list its values in one")
        if options.get(name) is not None:
            raise ValueError(
                f"{name} is given twice, as {options[name]} and by -p {text}; leave one out"
            )
        group[name] = values
    return sizes, constants


def check_target(save: Path | None) -> None:
    """Refuses a file that cannot be written before the time is spent."""
    if save and not store.can_write_to(save):
        target = save.resolve() if save.is_symlink() else save
        raise ValueError(f"{save} cannot be written; is there a folder {target.parent}?")
