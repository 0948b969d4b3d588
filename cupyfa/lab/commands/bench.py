"""``cupyfa bench``."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import click

from cupyfa import cache_folder
from cupyfa.errors import Unsupported
from cupyfa.lab.bench import peers, sweeps
from cupyfa.lab.bench.benchmark import bench as measure
from cupyfa.lab.bench.results import Measurement, Results
from cupyfa.lab.commands import WRONG, command_options
from cupyfa.lab.commands.signals import take_time
from cupyfa.lab.commands.watching import timeout_option, watched
from cupyfa.lab.report.tables import measurements, render
from cupyfa.runtime import environment
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.choose_backend import backend_to_measure

# The heading omits settings with these default values.
DEFAULTS = {"values": "normal", "layout": "bhsd", "caches": "cold", "launches": "one by one"}
budget_option = click.option(
    "--budget",
    type=command_options.SECONDS,
    default=1.0,
    help="Seconds to spend on each kernel and problem.",
)
save_option = click.option(
    "--save",
    type=command_options.FILE,
    help="Write all measurements to a JSON file, after each problem, for `cupyfa compare`.",
)
sweep_option = click.option(
    "-p",
    "swept",
    multiple=True,
    metavar="NAME=VALUES",
    help="Several values of a size or an option, in bench also of a tile size such as Br: 64,128, "
    "512:16384:*2 or 64:256:+64. May be repeated to use all combinations.",
)


@click.command()
@command_options.kernels_argument
@command_options.problem_options()
@click.option("--tokens", type=command_options.Integer(1), help="batch * M, instead of the batch.")
@click.option("--width", type=command_options.Integer(1), help="heads * d, instead of the heads.")
@click.option(
    "--cache",
    type=click.Choice(sweeps.CACHES),
    help="Decoding: -M new tokens, 1 by default, and --lengths or -N cached keys per sequence.",
)
@click.option(
    "--page",
    type=command_options.Integer(1),
    help="Keys in a page of a paged cache, in place of --page-size.  [16]",
)
@command_options.input_options
@command_options.tile_options
@sweep_option
@click.option("--hot", is_flag=True, help="Do not overwrite the caches before each launch.")
@click.option("--graph", is_flag=True, help="Replay launches as a CUDA graph.")
@click.option(
    "--against", metavar="PEERS", help=f"Other libraries, where installed: {','.join(peers.NAMES)}."
)
@click.option("--alone", is_flag=True, help="Measure a single kernel without comparison.")
@budget_option
@click.option(
    "--patience",
    type=command_options.SECONDS,
    help="Skip a kernel if a smaller problem shows that it would take longer than these seconds.",
)
@timeout_option
@save_option
@command_options.backend_option
@command_options.format_option
def bench(
    kernels: list[str],
    swept: tuple[str, ...],
    tiles: dict[str, int],
    hot: bool,
    against: str | None,
    timeout: float | None,
    save: Path | None,
    backend: str,
    form: str,
    **how: Any,
) -> None:
    """Check kernels, and measure them on one or more problems.

    KERNEL is a name from `cupyfa list`, `auto`, or `script.py:name` for a record of your own. A
    single kernel is compared with its baseline and with the rung before it. Kernels alternate in
    rounds; a column "x ..." is the median speedup over another kernel.
    """
    on = backend_to_measure(backend)
    check_target(save, on)
    if how["graph"] and on.name == "simulator":
        raise Unsupported("the simulator does not support CUDA graphs; omit --graph")
    sizes, several = split(swept, {**how, **tiles})
    all_tiles = {name: [value] for name, value in tiles.items()} | several
    others = [name.strip() for name in (against or "").split(",") if name.strip()]
    about = {name: str(how[name]) for name in ("values", "layout", "seed")}
    about["caches"] = "hot" if hot else "cold"
    about["launches"] = "a CUDA graph" if how["graph"] else "one by one"
    heading = {"device": on.limits.device}
    heading |= {name: word for name, word in about.items() if word != DEFAULTS.get(name)}
    heading |= {name: str(values[0]) for name, values in all_tiles.items() if len(values) == 1}

    made_with = environment.describe(on) | peers.versions(others) | about

    def show(rows: list[Measurement], *, err: bool = False) -> None:
        try:  # save first: after a signal there may be no time to print
            if save:
                Results(made_with, rows).save(save)
        finally:
            data = [{"kernel": x.kernel, "device": on.limits.device} | x.row() for x in rows]
            table = measurements(rows, heading) if form == "table" else render(data, form)
            click.echo(table, err=err)

    with (
        watched(on, timeout) as watch,
        partial_results(partial(show, err=True), save, made_with) as keep,
        command_options.progress_bar("measuring") as progress,
    ):
        rows = measure(
            kernels,
            backend=on,
            against=others,
            tiles=all_tiles,
            cold=not hot,
            progress=progress,
            so_far=keep,
            watch=watch,
            **{**how, **sizes},
        )
    show(rows)
    if any(row.problem.cached for row in rows):
        command_options.note(
            "GB/s counts keys and values; % of peak is relative to the rate of a sum over an array"
        )
    if any(row.problem.modifiers.mask for row in rows):
        command_options.note(
            "TFLOP/s and % of peak also count the pairs that mask and mask_mod hide"
        )
    sys.exit(WRONG if any(row.passed is False for row in rows) else 0)


@contextmanager
def partial_results(
    show: Callable[[list[Measurement]], object], save: Path | None, made_with: Mapping[str, str]
) -> Iterator[Callable[[list[Measurement]], None]]:
    """Yields a callback for ``so_far`` of ``bench`` that saves the rows after each problem.

    The saved rows survive if the process is killed. If a signal or an error ends the benchmark, the
    rows measured so far are also printed. A file that cannot be written is reported at the end.
    """
    # A stream such as /dev/stdout is written only once, after the last problem.
    is_file = save is not None and not cache_folder.is_stream(save)
    rows: list[Measurement] = []

    def keep(measured: list[Measurement]) -> None:
        rows[:] = measured
        if save and is_file:
            with suppress(OSError):
                Results(made_with, rows).save(save)
        take_time()  # so that the rows can still be shown after a signal

    try:
        yield keep
    except BaseException as ended:
        if rows:
            show(rows)
            is_asked = isinstance(ended, KeyboardInterrupt | SystemExit)
            why = "interrupted" if is_asked else "ended by an error"
            command_options.note(f"{why}; these are the measurements so far")
        raise


def split(swept: Sequence[str], given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits NAME=VALUES arguments into sizes and tiles. Raises ValueError for repeated names."""
    sizes: dict[str, Any] = {}
    tiles: dict[str, Any] = {}
    for text in swept:
        name, values = sweeps.parsed(text)
        group = sizes if name in (*sweeps.AXES, "tokens", "width") else tiles
        if name in group:
            raise ValueError(f"-p {name} is repeated; list all values of {name} in one -p")
        if given.get(name) is not None:
            raise ValueError(
                f"{name} is set twice, to {given[name]} and by -p {text}; omit one of the options"
            )
        group[name] = values
    return sizes, tiles


def check_target(save: Path | None, on: Backend | None = None) -> None:
    """Raises ValueError, before time is spent on measuring, if a file cannot be written.

    If ``on`` is the simulator, a file that contains GPU times must not be overwritten.
    """
    if save and not cache_folder.can_write_to(save):
        folder = (save.resolve() if save.is_symlink() else save).parent
        if os.path.isdir(folder):
            raise ValueError(
                f"{save} cannot be written in the folder {folder}; choose another folder"
            )
        raise ValueError(f"{save} cannot be written; check that the folder {folder} exists")
    is_simulated = on is not None and on.name == "simulator"
    if save and is_simulated and save.is_file() and (device := _measured_on(save)):
        raise ValueError(
            f"{save} contains times of {device}, which simulator times would overwrite; choose "
            "another file, or remove this file"
        )


def _measured_on(file: Path) -> str | None:
    """Returns the name of the GPU that a results file was measured on, or None."""
    try:
        about = Results.load(file).environment
    except (OSError, ValueError):
        return None
    return about.get("device") if about.get("backend") == "cuda" else None
