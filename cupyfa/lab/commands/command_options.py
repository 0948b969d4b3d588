"""Options shared by several commands, and their conversion to arguments of the library."""

import re
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from itertools import pairwise
from operator import contains
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cupyfa.errors import printable
from cupyfa.lab.bench import sweeps
from cupyfa.lab.report.tables import FORMATS
from cupyfa.lab.verify.case import LAYOUTS, TOKENS, VALUES
from cupyfa.ladder import LADDER
from cupyfa.ladder.kernel import Kernel
from cupyfa.ladder.lookup import kernels as ladder_kernels, record_named, unknown_kernel
from cupyfa.planner.choose_kernel import select
from cupyfa.planner.plan import Limits
from cupyfa.problem import shape_language
from cupyfa.problem.dtypes import INPUTS
from cupyfa.problem.optional_inputs import OPTIONAL_INPUTS
from cupyfa.problem.options import OPTIONS, Option
from cupyfa.problem.problem import Problem
from cupyfa.problem.wrt import WRT
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.choose_backend import NAMES, backend_named
from cupyfa.runtime.simulator import MOST_MULTIPROCESSORS, MULTIPROCESSORS, Simulator

Command = TypeVar("Command", bound=Callable[..., Any])

_OF_DTYPE = "Dtype of q, k and v, or of the rows of a softmax."
DTYPE = "float32, or the first dtype that the kernel supports"
_SIZES = {
    "batch": ("-B", "Batch size."),
    "heads": ("-H", "Heads of Q."),
    "kv_heads": (None, "Heads of K and V, a divisor of the heads of Q."),
    "M": ("-M", "Queries, or the rows of a softmax."),
    "N": ("-N", "Keys, or the columns of a softmax."),
    "d": ("-d", "Head dimension."),
    "dv": (None, "Value dimension."),
}
_FOLLOW = {"kv_heads": "-H", "N": "-M", "dv": "-d"}


class Integer(click.IntRange):
    """An integer range that help texts show as INTEGER, without its limits."""

    name = "integer"


class Number(click.FloatRange):
    """A float range that help texts show as FLOAT, without its limits."""

    name = "float"


SECONDS = Number(0)
FIRST_NOTE = 10.0  # seconds until the first progress note if stderr is not a terminal
TIMEOUT = Number(0, 10**6, min_open=True)
FILE = click.Path(dir_okay=False, path_type=Path)
dtype_choice = click.Choice(list(INPUTS))
format_option = click.option(
    "--format", "form", type=click.Choice(FORMATS), default="table", help="Output format."
)
backend_option = click.option(
    "--backend",
    type=click.Choice(NAMES),
    default="auto",
    help="auto is cuda if there is a GPU, else the simulator.",
)
backward_option = click.option(
    "--backward", is_flag=True, help="Gradients instead of the forward pass."
)
seed_option = click.option("--seed", type=Integer(0), default=0, help="Seed of the random inputs.")
every_option = click.option("--all", "every", is_flag=True, help="Every kernel of the ladder.")
reruns_option = click.option(
    "--reruns",
    type=Integer(0),
    default=0,
    help="Further runs, whose results must be equal bit by bit.",
)


def _combined(
    command: Callable[..., Any], names: Sequence[str], name: str, combine: Callable[..., Any]
) -> Any:
    """Wraps a command so that its parameter ``name`` is computed from the options ``names``."""

    @wraps(command)
    def call(*args: Any, **given: Any) -> Any:
        value = combine(*(given.pop(x) for x in names))
        return command(*args, **{name: value}, **given)

    return call


def _with(command: Command, *options: Callable[[Command], Command]) -> Command:
    """Adds options to a command; its help lists them in this order."""
    for option in reversed(options):
        command = option(command)
    return command


class KernelName(click.ParamType):
    """A kernel's name or one of the words ``others``, with shell completion."""

    name = "KERNEL"

    def __init__(self, others: Sequence[str] = ("auto",)) -> None:
        self._others = others
        self._names = [*(x.name for x in ladder_kernels()), *others]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the name. Raises ValueError if it is unknown and does not name a script."""
        if value not in self._names and ".py" not in value:
            raise unknown_kernel(value, self._others)
        return value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        found = [CompletionItem(name) for name in self._names if name.startswith(incomplete)]
        return found or [CompletionItem(incomplete, type="file")]  # may be a script


kernel_argument = click.argument("kernel", type=KernelName())


def some_kernels_argument(*others: str) -> Callable[[Command], Command]:
    """Adds the optional argument KERNEL..., as a tuple ``kernels``."""
    return click.argument(
        "kernels", nargs=-1, metavar="[KERNEL]...", type=KernelName(("auto", *others))
    )


def kernels_argument(command: Command) -> Command:
    """Adds KERNEL... and --all, as a list of names ``kernels``."""
    return _with(
        _combined(command, ("kernels", "every"), "kernels", kernel_names),
        some_kernels_argument(),
        every_option,
    )


def backend_options(command: Command) -> Command:
    """Adds --backend, --schedule and --multiprocessors, as one argument ``backend``."""
    return _with(
        _combined(command, ("backend", "schedule", "multiprocessors"), "backend", backend_with),
        backend_option,
        click.option(
            "--schedule",
            type=Integer(0),
            help="Simulator: seed of the order in which threads run.",
        ),
        click.option(
            "--multiprocessors",
            type=Integer(1, MOST_MULTIPROCESSORS),
            help="Simulator: number of multiprocessors, on which the choice of persistent blocks "
            f"and splits depends.  [default: {MULTIPROCESSORS}]",
        ),
    )


class _Value(click.ParamType):
    """The value of an attention option, converted by the option's own parser."""

    def __init__(self, option: Option) -> None:
        self.name, self._parse = option.metavar or "TEXT", option.parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


def attention_options(command: Command) -> Command:
    """Adds the attention options, each None by default."""
    for name, option in reversed(OPTIONS.items()):
        optional: dict[str, Any] = {"is_flag": False, "flag_value": option.flag}
        command = click.option(
            _long(name),
            type=click.Choice(option.choices) if option.choices else _Value(option),
            metavar=option.metavar,
            help=option.help,
            **(optional if option.flag else {}),
        )(command)
    return command


def array_options(command: Command) -> Command:
    """Adds options for the forms of optional arrays, such as a bias; each is None by default."""
    made = [
        click.option(
            _long(x.name),
            metavar="AXES",
            is_flag=False,
            flag_value=x.usual_axes,
            help=f"{x.help}  [default if used without a value: {x.usual_axes}]",
        )
        for x in OPTIONAL_INPUTS.values()
        if x.usual_axes
    ]
    captured = click.option(
        "--captured",
        multiple=True,
        metavar="NAME=VALUE",
        callback=lambda context, option, given: _captured(given),
        help="A number that --score-mod and --mask-mod use, such as cap=30.0, or the dtype "
        "and sizes of an array, slope=f32[heads] or doc=i32[M]; may be repeated.",
    )
    wrt = click.option(
        _long(WRT),
        metavar="NAMES",
        help="Arrays such as bias,slope: bias, alibi_slopes, sink and captured arrays of floats. "
        "Backward kernels also compute their gradients; tangent kernels also move them.",
    )
    flags = {
        shape_language.BLOCK_MASK: "Make --mask and --mask-mod a block mask, whose empty tiles "
        "kernels skip.",
        shape_language.DLSE: "Backward kernels: read the gradient of lse as a further input.",
        shape_language.RETURN_MAX: "Forward kernels: return the largest score of each row as a "
        "further output.",
    }
    pages = click.option(
        _long(shape_language.PAGE_SIZE),
        type=int,
        help="Give batch elements different lengths, and store keys in pages of this many: "
        "16, 32, 64, 128 or 256.",
    )
    return _with(
        _combined(command, tuple(_LENGTHS), shape_language.LENGTHS_OF, _lengths),
        *(*made, captured, wrt),
        *(click.option(_long(x), is_flag=True, default=None, help=y) for x, y in flags.items()),
        pages,
        *(click.option(_long(x), metavar="LENGTHS", help=y) for x, y in _LENGTHS.items()),
    )


def kernel_and_problem(
    name: str, sizes: dict[str, Any], limits: Limits, *, small: bool = False
) -> tuple[Kernel, Problem]:
    """Returns the named kernel, or the kernel that "auto" selects, and the problem to compute."""
    records = [] if name == "auto" else [record_named(name)]
    operation = records[0].operation if records else "forward"
    refuse_foreign([operation], *sizes)
    (problem,) = sweeps.problems(operation, sizes, *records, small=small)
    return select(records[0] if records else "auto", operation, problem, limits), problem


def architecture(given: str) -> str:
    """Returns the compute capability of an architecture: "90" for "sm_90"."""
    return given.strip().removeprefix("sm_")


_LENGTHS = {
    "lengths": "Lengths of the sequences of a ragged batch, in place of -B, -M and -N: "
    "349,263,0,115. 7/9 means 9 rows of which 7 are used, _3 at an end 3 rows of no sequence.",
    "lengths_q": "Lengths of the queries, if they differ from the keys'; with --lengths-k.",
    "lengths_k": "Lengths of the keys; with --lengths-q.",
}


def _lengths(both: str | None, q: str | None, k: str | None) -> Any:
    if q is None and k is None:
        return both
    if both is not None or q is None or k is None:
        raise ValueError("use either --lengths, or both --lengths-q and --lengths-k")
    return q, k


def _captured(given: Sequence[str]) -> dict[str, Any] | None:
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = (x.strip() for x in text.partition("="))
        if not (name and equals and value):
            raise ValueError(
                f"captured {text!r} is not NAME=VALUE, for example cap=30.0 or slope=f32[heads]"
            )
        if name in found:
            raise ValueError(f"captured input {name} is set twice; omit one --captured {name}=")
        found[name] = shape_language.value_of(value)
    return found or None


def _long(name: str) -> str:
    """Returns the long option of a parameter: "--page-size" for "page_size"."""
    return f"--{name.replace('_', '-')}"


# Maps each option with an optional value to the implied value, a predicate for valid values, and a
# description of the valid values.
_FLAGS: Mapping[str, tuple[str, Callable[[str], bool], str]] = {
    _long(name): (x.flag, partial(contains, x.choices or ()), " or ".join(x.choices or ()))
    for name, x in OPTIONS.items()
    if x.flag
} | {
    _long(name): (flag, shape_language.is_form, f"axes, as {flag}")
    for name, flag in shape_language.USUAL.items()
}


def with_flag_values(arguments: Sequence[str]) -> list[str]:
    """Appends the implied value to each option that is used without a value.

    Otherwise click would read the next argument, such as a kernel's name, as the option's value.
    """
    following = [*arguments[1:], ""]
    return [
        f"{word}={_FLAGS[word][0]}" if word in _FLAGS and not _FLAGS[word][1](after) else word
        for word, after in zip(arguments, following)
    ]


def misplaced_value(message: str, arguments: Sequence[str]) -> str:
    """Returns a hint about an option's syntax if a message rejects the argument after the option.

    Returns "" for any other message.
    """
    for word, after in pairwise(arguments):
        if word in _FLAGS and f"extra argument ({after})" in message:
            return f"; {word} takes {_FLAGS[word][2]}"
    return ""


_ARGUMENTS = "|".join((*OPTIONS, *shape_language.NAMES, "backward", "page"))
_REMEDY = re.compile(rf"\b({_ARGUMENTS})=(?:True\b)?(?=[ ,;]|$)", re.MULTILINE)
_REMEDY_BACKEND = re.compile(r'\bbackend="(\w+)"')
_REMEDY_CAPTURED = re.compile(r'\bin captured=\{"(\w+)": \.\.\.\}')


def on_command_line(message: str) -> str:
    """Replaces Python arguments in a message of the library with command-line options."""
    message = _REMEDY_CAPTURED.sub(
        r"by --captured \1=VALUE, a number or a form such as f32[heads]", message
    )
    message = _REMEDY_BACKEND.sub(r"--backend \1", message)
    return _REMEDY.sub(lambda found: _long(found[1]), message)


def size_option(
    name: str, *, small: bool = True, **attributes: Any
) -> Callable[[Command], Command]:
    """Returns a size option; with ``small`` its default is smaller in the simulator."""
    short, text = _SIZES[name]
    long = _long(name) if len(name) > 1 else None
    if "default" not in attributes:
        text += f"  [default: {_usual_size(name, small)}]"
    attributes = {"type": Integer(0), "help": text, **attributes}
    return click.option(*filter(None, (short, long)), name, **attributes)


def _usual_size(name: str, small: bool) -> str:
    """Describes the default of a size for attention and for softmax."""

    def of(operation: str) -> str:
        usual = sweeps.USUAL[operation].get(name)
        few = sweeps.SMALL[operation].get(name, usual) if small else usual
        return f"{usual}{f' ({few} in the simulator)' if few != usual else ''}"

    attention = _FOLLOW.get(name) or of("forward")
    return f"{attention}; softmax: {of('softmax')}" if name in "MN" else attention


def problem_options(
    *,
    dtype: str | None = None,
    several: Collection[str] = (),
    small: bool = True,
) -> Callable[[Command], Command]:
    """Adds the options of a problem: sizes, dtype, attention options and optional arrays.

    several: options that may be repeated. small: whether default sizes are smaller in the
    simulator.
    """

    def decorate(command: Command) -> Command:
        of_dtype: Any = {"default": dtype, "help": _OF_DTYPE}
        if not dtype:
            of_dtype = {"help": f"{_OF_DTYPE}  [default: {DTYPE}]"}
        multiple: Any = {name: {"multiple": name in several} for name in (*_SIZES, "dtype")}
        return _with(
            command,
            *(size_option(name, small=small, **multiple[name]) for name in _SIZES),
            click.option("--dtype", type=dtype_choice, **multiple["dtype"], **of_dtype),
            attention_options,
            array_options,
        )

    return decorate


def input_options(command: Command) -> Command:
    """Adds --layout, --values and --seed, which determine the inputs."""
    layouts, values = (click.Choice(list(x)) for x in (LAYOUTS, VALUES))
    return _with(
        command,
        click.option("--layout", type=layouts, default="bhsd", help="Order of the axes in memory."),
        click.option("--values", type=values, default="normal", help="Distribution of the inputs."),
        seed_option,
    )


def case_options(command: Command) -> Command:
    """Adds --padded, --descales and --new-keys, which only ``run`` needs."""
    names = {
        "padded": "Use different lengths of queries (q), keys (k) or both (q,k) in the batch.",
        "descales": "Inputs in float8_e4m3fn that have a scale factor: q,k,v or a subset.",
    }
    return _with(
        command,
        *(click.option(_long(x), metavar="NAMES", default="", help=y) for x, y in names.items()),
        click.option(
            "--new-keys",
            "tokens",
            type=click.Choice(list(TOKENS)),
            default="cached",
            help="With --page-size: how the cache receives the keys of the new tokens. "
            + " ".join(f"{name}: {what}." for name, what in TOKENS.items()),
        ),
    )


def tile_options(command: Command) -> Command:
    """Adds --Br, --Bc and -t, as a dictionary ``tiles``."""
    return _with(
        _combined(command, ("Br", "Bc", "tiles"), "tiles", _tiles),
        click.option("--Br", "Br", type=int, help="Rows of a tile of Q."),
        click.option("--Bc", "Bc", type=int, help="Rows of a tile of K and V."),
        click.option(
            "-t",
            "--tile",
            "tiles",
            multiple=True,
            metavar="NAME=VALUE",
            help="A tile size of the kernel, by its name in `cupyfa list`; may be repeated.",
        ),
    )


def _tiles(Br: int | None, Bc: int | None, tiles: tuple[str, ...]) -> dict[str, int]:
    given = {name: value for name, value in (("Br", Br), ("Bc", Bc)) if value is not None}
    for tile in tiles:
        name, _, value = tile.partition("=")
        if not name or not value.isdecimal():
            raise ValueError(
                f"tile {tile!r} is not NAME=VALUE with a whole number, for example Br=64"
            )
        if name in given:
            raise ValueError(f"{name} is set twice, to {given[name]} and {value}; omit one value")
        given[name] = int(value)
    return given


def given_sizes(sizes: dict[str, Any]) -> dict[str, Any]:
    """Drops the sizes and options that the command line does not set."""
    return {name: value for name, value in sizes.items() if value is not None and value != ()}


def refuse_foreign(operations: Collection[str], *names: str) -> None:
    """Raises ValueError for options that softmax lacks, if softmax is the only operation."""
    if set(operations) == {"softmax"}:
        given = given_options(*names, *(_LENGTHS if shape_language.LENGTHS_OF in names else ()))
        sweeps.refuse_foreign(["softmax"], {x.lstrip("-"): name for name, x in given.items()})


def given_options(*names: str) -> dict[str, str]:
    """Maps the parameters among ``names`` that the command line sets to their options."""
    context = click.get_current_context()
    return {
        parameter.name: parameter.opts[-1]
        for parameter in context.command.params
        if parameter.name in names
        and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    }


def refuse_idle(why: str, *names: str) -> None:
    """Raises ValueError if the command line sets one of ``names``, which would have no effect."""
    if idle := given_options(*names):
        has = "has" if len(idle) == 1 else "have"
        raise ValueError(
            f"{why}, so {', '.join(idle.values())} {has} no effect; omit one of these options"
        )


def kernel_names(kernels: Sequence[str], every: bool) -> list[str]:
    """Returns the given kernel names, or all names of the ladder if ``every``."""
    if every == bool(kernels):
        raise ValueError(f"use either kernel names or --all{', not both' if every else ''}")
    return [name for group in LADDER.values() for name in group] if every else list(kernels)


def backend_with(name: str, schedule: int | None, multiprocessors: int | None) -> Backend:
    """Returns the named backend; configures the simulator's thread order and multiprocessors."""
    backend = backend_named(name)
    if schedule is None and multiprocessors is None:
        return backend
    if not isinstance(backend, Simulator):
        option = "--multiprocessors" if schedule is None else "--schedule"
        raise ValueError(f"{option} applies only to the simulator; add --backend simulator")
    return Simulator(schedule=schedule, multiprocessors=multiprocessors)


def note(text: object) -> None:
    """Prints a note to stderr, wrapped if stderr is a terminal."""
    words = f"note: {printable(str(text))}"
    if sys.stderr and sys.stderr.isatty():
        how: Any = {"break_long_words": False, "break_on_hyphens": False}
        width = shutil.get_terminal_size().columns
        words = textwrap.fill(words, width, subsequent_indent="  ", **how)
    click.echo(words, err=True)


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int, str], None]]:
    """Yields a ``progress`` function that draws a bar on a terminal, or else prints notes."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[what]}"),
    )
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        with _noted(label) as progress:
            yield progress
        return
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=None, what="")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, what=what)


@contextmanager
def _noted(label: str) -> Iterator[Callable[[int, int, str], None]]:
    """Prints progress notes to stderr after FIRST_NOTE seconds, then at doubling intervals."""
    now, ended, begun = [label], threading.Event(), monotonic()

    def notes() -> None:
        wait = FIRST_NOTE
        while not ended.wait(wait):
            note(f"{now[0]} ({monotonic() - begun:.0f} s)")
            wait *= 2

    def progress(done: int, total: int, what: str) -> None:
        now[0] = f"{label}: {what}; {done} of {total} done"

    thread = threading.Thread(target=notes, daemon=True)
    thread.start()
    try:
        yield progress
    finally:
        ended.set()
        thread.join()
