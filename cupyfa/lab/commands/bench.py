"""``cupyfa bench``."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from cupyfa.errors import Unsupported
from cupyfa.lab.bench import peaks, peers, suite, sweeps
from cupyfa.lab.bench.benchmark import Method, bench as measure
from cupyfa.lab.bench.results import Measurement, Results
from cupyfa.lab.commands import UNSUPPORTED, WRONG, command_options
from cupyfa.lab.commands.saving import check_target, partial_results, save_option
from cupyfa.lab.commands.watching import timeout_option, watched
from cupyfa.lab.report.suite_table import suite_table
from cupyfa.lab.report.tables import measurements, render
from cupyfa.runtime import environment
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.choose_backend import backend_named, backend_to_measure

# Parameters that --suite takes; all others would change its problems or kernels.
_OF_SUITE = {"is_suite", "only", "values", "layout", "seed", "hot", "graph", "against", "budget"}
_OF_SUITE |= {"timeout", "save", "backend", "form"}
# The heading omits settings with these default values.
DEFAULTS = {"values": "normal", "layout": "bhsd", "caches": "cold", "launches": "one by one"}
budget_option = click.option(
    "--budget",
    type=command_options.SECONDS,
    default=1.0,
    help="Seconds to spend on each kernel and problem.",
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
@command_options.some_kernels_argument()
@command_options.every_option
@click.option(
    "--suite",
    "is_suite",
    is_flag=True,
    help="Instead of KERNEL: problems of published models, each with the kernel that auto selects, "
    "against all installed libraries.",
)
@click.option(
    "--only",
    multiple=True,
    metavar="WORDS",
    help="With --suite: the rows whose model and phase contain these words, such as llama or "
    "'gemma decode'. May be repeated to add rows.",
)
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
    kernels: Sequence[str],
    every: bool,
    is_suite: bool,
    only: tuple[str, ...],
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

    With --suite, a row has the fastest of the other libraries, and the ratio of its time to that of
    the kernel. The exit code is 3 if a row could not be measured.
    """
    chosen: Sequence[suite.Workload] = ()
    if is_suite:
        _refuse_with_suite(kernels)
        chosen = suite.selected(only)
        on = backend_named(backend)
    elif only:
        raise ValueError("--only selects rows of the suite; add --suite or omit --only")
    else:
        on = backend_to_measure(backend)
    check_target(save, on)
    if how["graph"] and on.name == "simulator":
        raise Unsupported("the simulator does not support CUDA graphs; omit --graph")
    others = [name.strip() for name in (against or "").split(",") if name.strip()]
    about = {name: str(how[name]) for name in ("values", "layout", "seed")}
    about["caches"] = "hot" if how["hot"] else "cold"
    about["launches"] = "a CUDA graph" if how["graph"] else "one by one"
    heading = {"device": on.limits.device}
    heading |= {name: word for name, word in about.items() if word != DEFAULTS.get(name)}
    if is_suite:
        others = others or suite.installed_peers()
        run, shown = _of_suite(chosen, on, others, heading, form, how)
    else:
        names = command_options.kernel_names(kernels, every)
        run, shown = _of_kernels(names, on, others, heading, form, how)
    made_with = environment.describe(on) | peers.versions(others) | about

    def show(rows: list[Measurement], *, err: bool = False) -> None:
        try:  # save first: after a signal there may be no time to print
            if save:
                Results(made_with, rows).save(save)
        finally:
            click.echo(shown(rows), err=err)

    with (
        watched(on, timeout) as watch,
        partial_results(partial(show, err=True), save, made_with) as keep,
        command_options.progress_bar("measuring") as progress,
    ):
        rows = run(progress=progress, so_far=keep, watch=watch)
    show(rows)
    if not is_suite:
        _note_figures(rows)
    if any(row.passed is False for row in rows):
        sys.exit(WRONG)
    is_incomplete = is_suite and not all(row.time for row in suite.of_kernels(rows))
    sys.exit(UNSUPPORTED if is_incomplete else 0)


# A function that measures, and one that renders the measured rows.
_Benchmark = tuple[Callable[..., list[Measurement]], Callable[[list[Measurement]], str]]


def _of_kernels(
    kernels: Sequence[str],
    on: Backend,
    others: Sequence[str],
    heading: Mapping[str, str],
    form: str,
    how: Mapping[str, Any],
) -> _Benchmark:
    """Returns the benchmark of named kernels on the problems that the options describe."""
    given = {name: x for name, x in how.items() if name not in ("swept", "tiles", "hot")}
    sizes, several = split(how["swept"], {**given, **how["tiles"]})
    tiles = {name: [value] for name, value in how["tiles"].items()} | several
    heading = {**heading, **{x: str(y[0]) for x, y in tiles.items() if len(y) == 1}}
    asked: Any = {"backend": on, "against": others, "tiles": tiles, "cold": not how["hot"]}

    def shown(rows: list[Measurement]) -> str:
        if form == "table":
            return measurements(rows, heading)
        data = [{"kernel": x.kernel, "device": on.limits.device} | x.row() for x in rows]
        return render(data, form)

    return partial(measure, kernels, **asked, **{**given, **sizes}), shown


def _of_suite(
    chosen: Sequence[suite.Workload],
    on: Backend,
    others: Sequence[str],
    heading: Mapping[str, str],
    form: str,
    how: Mapping[str, Any],
) -> _Benchmark:
    """Returns the benchmark of workloads of the suite."""
    method = Method(on, cold=not how["hot"], graph=how["graph"], budget=how["budget"])
    inputs = {name: how[name] for name in ("values", "layout", "seed")}
    read_rate = None if on.name == "simulator" else peaks.read_rate(on)

    def shown(rows: list[Measurement]) -> str:
        return suite_table(suite.standings(chosen, rows, read_rate), heading, form)

    return partial(suite.measure, chosen, method, others, **inputs), shown


def _refuse_with_suite(kernels: Sequence[str]) -> None:
    """Raises ValueError for kernels, and for options that would change the suite."""
    if kernels:
        raise ValueError(
            f"--suite measures the kernel that auto selects for each row; omit {' '.join(kernels)} "
            "or --suite"
        )
    names = {x.name for x in click.get_current_context().command.params if x.name}
    why = "the rows of --suite have sizes, options and kernels of their own"
    command_options.refuse_idle(why, *names - _OF_SUITE)


def _note_figures(rows: Sequence[Measurement]) -> None:
    if any(row.problem.cached for row in rows):
        command_options.note(
            "GB/s counts keys and values; % of peak is relative to the rate of a sum over an array"
        )
    if any(row.problem.modifiers.mask for row in rows):
        command_options.note(
            "TFLOP/s and % of peak also count the pairs that mask and mask_mod hide"
        )


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
