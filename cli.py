"""The command-line program. Errors are reported as one line on stderr and an exit code."""

from __future__ import annotations

import errno
import os
import signal
import sys
import warnings
from typing import Any

import click

from cupyfa import __version__
from cupyfa.errors import printable
from cupyfa.lab.commands import BAD_ARGUMENTS, INTERRUPTED, UNSUPPORTED, WRONG, mistakes
from cupyfa.lab.commands.bench import bench
from cupyfa.lab.commands.cache import cache
from cupyfa.lab.commands.check import check
from cupyfa.lab.commands.command_options import note, on_command_line, with_flag_values
from cupyfa.lab.commands.compare import compare
from cupyfa.lab.commands.compile import compile_kernels
from cupyfa.lab.commands.doctor import doctor
from cupyfa.lab.commands.exercises import exercise
from cupyfa.lab.commands.ladder import ladder
from cupyfa.lab.commands.listing import list_kernels
from cupyfa.lab.commands.mutate import mutate
from cupyfa.lab.commands.new import new
from cupyfa.lab.commands.replay import replay
from cupyfa.lab.commands.roofline import roofline
from cupyfa.lab.commands.run import run
from cupyfa.lab.commands.show import show
from cupyfa.lab.commands.signals import ended_by_signals
from cupyfa.lab.commands.timeline import timeline
from cupyfa.lab.commands.tune import tune
from cupyfa.lab.commands.variables import check_variables
from cupyfa.lab.commands.watching import own_process

# Exceptions by name, so that CuPy and other libraries need not be imported.
EXIT_CODES = {
    "WrongResult": WRONG,
    "SimulatorFault": WRONG,
    "Unsupported": UNSUPPORTED,
    "DeviceError": UNSUPPORTED,
    "CompilerNotFound": UNSUPPORTED,
    "MemoryError": UNSUPPORTED,
    "MissingParser": UNSUPPORTED,
    "CompileError": BAD_ARGUMENTS,
    "CompileException": BAD_ARGUMENTS,
    "ValueError": BAD_ARGUMENTS,
    "TypeError": BAD_ARGUMENTS,
    "OSError": BAD_ARGUMENTS,
}

# Error numbers of a full disk; their exit code differs from that of wrong arguments.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Program(click.Group):
    """The command group; reports an error as one line on stderr and exits with its code."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[mistakes.ARGUMENTS] = args
        return super().parse_args(ctx, with_flag_values(args))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        mistakes.refuse_one_dash(command, rest, ctx)
        return name, command, rest

    def main(self, *args: Any, **kwargs: Any) -> Any:
        if not args and kwargs.get("args") is None:
            own_process()
        try:
            with ended_by_signals():
                sys.exit(super().main(*args, **{**kwargs, "standalone_mode": False}))
        except click.Abort:
            note("interrupted")
            sys.exit(INTERRUPTED)
        except click.ClickException as error:
            if type(error).__name__ == "NoArgsIsHelpError":  # raised by click since 8.2
                click.echo(error.format_message())
                sys.exit(0)
            fail(mistakes.message_of(error), BAD_ARGUMENTS)
        except Exception as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            known = next((name for name in names if name in EXIT_CODES), None)
            if known is None:
                raise
            full = isinstance(error, OSError) and error.errno in NO_ROOM
            if full:
                drop_unwritten_output()
            end = fail_at_once if "DeviceLost" in names else fail
            end(message_of(error), UNSUPPORTED if full else EXIT_CODES[known])

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except BrokenPipeError:  # the reader of the output has exited: exit as for SIGPIPE
            sys.stdout = None  # type: ignore[assignment]  # prevents a flush at exit
            sys.exit(128 + signal.SIGPIPE)


def drop_unwritten_output() -> None:
    """Keeps Python from reporting at exit a second time that stdout cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        sys.stdout = None  # type: ignore[assignment]


def message_of(error: Exception) -> str:
    """Returns an error's message in one line, except for compiler output and carets."""
    if isinstance(error, MemoryError):
        return f"{error or 'out of memory'}; use smaller sizes"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'the output'}: {error.strerror}"
    if type(error).__name__ in ("CompileError", "CompileException"):
        return str(error)
    return in_one_line(on_command_line(str(error)))


def in_one_line(message: str) -> str:
    """Joins the lines of a message, unless a caret points to a position in an expression."""
    lines = message.splitlines()
    return message if any(x.strip() == "^" for x in lines) else " ".join(lines)


def fail(message: str, code: int) -> None:
    """Ends the program with a message on stderr."""
    click.echo(f"cupyfa: {printable(message)}", err=True)
    sys.exit(code)


def fail_at_once(message: str, code: int) -> None:
    """Ends the program without freeing arrays, which is impossible on a lost device."""
    click.echo(f"cupyfa: {printable(message)}", err=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def notes_to_stderr() -> None:
    """Shows the library's warnings as notes on stderr; stdout is for data."""

    def show(message: Any, *_: Any, **__: Any) -> None:
        note(message)

    warnings.showwarning = show


@click.group(
    cls=Program,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(__version__, prog_name="cupyfa")
@click.pass_context
def main(context: click.Context) -> None:
    """FlashAttention without torch: run, check and measure attention kernels.

    Begin with `cupyfa doctor` and `cupyfa run fa2`. `cupyfa COMMAND --help` explains a command.

    Exit codes: 0 done and right, 1 wrong result, 2 bad arguments, 3 unsupported here.
    """
    notes_to_stderr()
    check_variables()
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for command in (
    list_kernels,
    new,
    run,
    check,
    replay,
    mutate,
    roofline,
    compile_kernels,
    show,
    timeline,
    cache,
    doctor,
    tune,
    bench,
    compare,
    ladder,
    exercise,
):
    main.add_command(command)


if __name__ == "__main__":
    main()
