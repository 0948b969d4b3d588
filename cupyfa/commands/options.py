"""Options that commands share, and what they mean to the library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cupyfa.bench import sweeps, trial
from cupyfa.dtypes import DTYPES
from cupyfa.ladder import LADDER
from cupyfa.ladder.kernel import Kernel
from cupyfa.options import OPTIONS, Option
from cupyfa.problem import Problem
from cupyfa.report import tables as report
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.select import NAMES, backend_named
from cupyfa.runtime.simulator import Simulator
from cupyfa.verify.case import LAYOUTS, VALUES

Command = TypeVar("Command", bound=Callable[..., Any])

size = click.IntRange(0)
dtype_choice = click.Choice(list(DTYPES))
format_option = click.option(
    "--format",
    "form",
    type=click.Choice(report.FORMATS),
    default="table",
    show_default=True,
    help="For people, or for programs.",
)
backend_option = click.option(
    "--backend",
    type=click.Choice(NAMES),
    default="auto",
    show_default=True,
    help="auto is cuda if there is a device.",
)
schedule_option = click.option(
    "--schedule",
    type=click.IntRange(0),
    help="Simulator: a seed for another order of the threads.",
)
reruns_option = click.option(
    "--reruns",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Run so often again: every bit must be the same.",
)
every_option = click.option("--all", "every", is_flag=True, help="Every kernel of the ladder.")
kernels_argument = click.argument("kernels", nargs=-1, metavar="[KERNEL]...")


DTYPE = "float32, or the first that the kernel can do"


class _Value(click.ParamType):
    """The value of an option of attention, as its text says it."""

    def __init__(self, option: Option) -> None:
        self.name, self._parse = option.metavar or "TEXT", option.parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def attention_options(command: Command) -> Command:
    """The options of attention, each None unless given."""
    for name, option in reversed(OPTIONS.items()):
        optional: dict[str, Any] = {"is_flag": False, "flag_value": option.flag}
        command = click.option(
            f"--{name.replace('_', '-')}",
            type=click.Choice(option.choices) if option.choices else _Value(option),
            metavar=option.metavar,
            help=option.help,
            **(optional if option.flag else {}),
        )(command)
    return command


def with_flag_values(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command line; an option that stands without its value is given one.

    Else it would take the argument that follows, such as the name of a kernel.
    """
    flags = {f"--{name}": x for name, x in OPTIONS.items() if x.flag}
    following = [*arguments[1:], ""]
    return [
        f"{word}={flags[word].flag}"
        if word in flags and after not in (flags[word].choices or ())
        else word
        for word, after in zip(arguments, following)
    ]


def problem_options(command: Command, dtype: str | None = None, usual: str = DTYPE) -> Command:
    """The sizes and options of one problem, of this dtype by default or of the usual one."""
    for option in reversed(
        (
            click.option("-B", "--batch", type=size),
            click.option("-H", "--heads", type=size),
            click.option(
                "--kv-heads", type=size, help="Divides heads.  [default: heads, if that is given]"
            ),
            click.option("-M", "M", type=size, help="Queries, or the rows of a softmax."),
            click.option("-N", "N", type=size, help="Keys, or the columns of a softmax."),
            click.option("-d", type=size, help="Head dimension."),
            click.option("--dv", type=size, help="Value dimension.  [default: d]"),
            click.option("--dtype", type=dtype_choice, default=dtype, show_default=dtype or usual),
            attention_options,
        )
    ):
        command = option(command)
    return command


def input_options(command: Command) -> Command:
    """What the inputs of a problem are made of."""
    for option in (
        click.option(
            "--values",
            type=click.Choice(list(VALUES)),
            default="normal",
            show_default=True,
            help="What the numbers are.",
        ),
        click.option(
            "--layout",
            type=click.Choice(list(LAYOUTS)),
            default="bhsd",
            show_default=True,
            help="How the arrays lie in memory.",
        ),
    ):
        command = option(command)
    return command


def tile_options(command: Command) -> Command:
    """The constants of a kernel that a user may fix."""
    for option in (
        click.option(
            "-c",
            "--constant",
            "constants",
            multiple=True,
            metavar="NAME=VALUE",
            help="Any constant of the kernel, as often as there are some.",
        ),
        click.option("--Bc", "Bc", type=int, help="Rows of a tile of K and V."),
        click.option("--Br", "Br", type=int, help="Rows of a tile of Q."),
    ):
        command = option(command)
    return command


def problem_of(operation: str, record: Kernel | None, seed: int, sizes: dict[str, Any]) -> Problem:
    """The problem of the sizes given, and random ones that suit the kernel for the others."""
    drawn = trial.random_sizes(seed)
    if record is not None and "gqa" not in record.features:
        drawn["kv_heads"] = drawn["heads"]
    given = {name: value for name, value in sizes.items() if value is not None}
    usual = sweeps.usual_dtype(*([record] if record else []), precision=given.get("precision"))
    given = {"dtype": usual, **given}
    if operation == "softmax":
        _refuse(sweeps.foreign(operation, given))
        sizes = {**drawn, **given}
        return Problem.of_row_sizes(sizes["M"], sizes["N"], sizes["dtype"])
    if "heads" in given:
        drawn["kv_heads"] = given["heads"]
    elif "kv_heads" in given:
        drawn["heads"] = given["kv_heads"]
    return Problem.of_sizes(**{**drawn, **given})


def refuse_foreign(operations: Collection[str], *names: str) -> None:
    """Refuses those of the named options that were given and that a softmax, if all is, lacks."""
    if set(operations) == {"softmax"}:
        given = given_options(*names)
        _refuse([given[name].lstrip("-") for name in sweeps.foreign("softmax", given)])


def _refuse(foreign: Sequence[str]) -> None:
    if foreign:
        names = ", ".join(sorted(foreign))
        raise ValueError(f"a softmax is M rows of N scores and has no {names}; leave it out")


def given_options(*names: str) -> dict[str, str]:
    """Which of these parameters of the running command the user gave, and how they are spelt."""
    context = click.get_current_context()
    return {
        parameter.name: parameter.opts[-1]
        for parameter in context.command.params
        if parameter.name in names
        and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    }


def tile_sizes(Br: int | None, Bc: int | None, constants: tuple[str, ...]) -> dict[str, int]:
    """The constants fixed on the command line."""
    given = {name: value for name, value in (("Br", Br), ("Bc", Bc)) if value is not None}
    for constant in constants:
        name, _, value = constant.partition("=")
        if not name or not value.isdecimal():
            raise ValueError(
                f"constant {constant!r} is not NAME=VALUE with a whole number, for example Br=64"
            )
        if name in given:
            raise ValueError(f"{name} is given twice, as {given[name]} and {value}; leave one out")
        given[name] = int(value)
    return given


def kernel_names(kernels: Sequence[str], every: bool) -> list[str]:
    """The names given, or with ``--all`` those of the whole ladder."""
    if every == bool(kernels):
        raise ValueError(f"name kernels, or give --all{', not both' if every else ''}")
    return [name for group in LADDER.values() for name in group] if every else list(kernels)


def engine_named(backend: str, schedule: int | None) -> Backend:
    """The backend, if it is the simulator in the order of threads that was asked for."""
    engine = backend_named(backend)
    if schedule is None:
        return engine
    if not isinstance(engine, Simulator):
        raise ValueError("--schedule orders the simulator's threads; add --backend simulator")
    return Simulator(schedule=schedule)


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr, if that is a terminal: a function to call with done, total, and what is on.

    It is what the library's functions take as ``progress``.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[what]}"),
    )
    console = Console(file=sys.stderr)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(label, total=None, what="")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, what=what)
