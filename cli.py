"""The command line: gathers the commands and ends with one line and an exit code on errors."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import click

from cupyfa import __version__
from cupyfa.commands import BAD_ARGUMENTS, INTERRUPTED, UNSUPPORTED, WRONG
from cupyfa.commands.compile import compile_kernels
from cupyfa.commands.listing import list_kernels
from cupyfa.commands.run import run
from cupyfa.commands.show import show

# By name, for one of them is CuPy's, which is imported only where there is work for it.
EXIT_CODES = {
    "WrongResult": WRONG,
    "SimulatorFault": WRONG,
    "Unsupported": UNSUPPORTED,
    "DeviceError": UNSUPPORTED,
    "CompilerNotFound": UNSUPPORTED,
    "MemoryError": UNSUPPORTED,
    "CompileError": BAD_ARGUMENTS,
    "CompileException": BAD_ARGUMENTS,
    "ValueError": BAD_ARGUMENTS,
    "TypeError": BAD_ARGUMENTS,
    "OSError": BAD_ARGUMENTS,
}


class Program(click.Group):
    """Ends with one line on stderr and the exit code that an error stands for."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            sys.exit(super().main(*args, **{**kwargs, "standalone_mode": False}))
        except click.Abort:
            sys.exit(INTERRUPTED)
        except click.ClickException as error:
            context = getattr(error, "ctx", None)
            remedy = f" See {context.command_path} --help." if context else ""
            fail(f"{error.format_message()}{remedy}", BAD_ARGUMENTS)
        except Exception as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            known = next((name for name in names if name in EXIT_CODES), None)
            if known is None:
                raise
            fail(str(error), EXIT_CODES[known])


def fail(message: str, code: int) -> None:
    """Ends the program with a message on stderr."""
    click.echo(f"cupyfa: {message}", err=True)
    sys.exit(code)


def notes_to_stderr() -> None:
    """Shows the library's warnings as plain notes, away from the data on stdout."""

    def show(message: Any, *_: Any, **__: Any) -> None:
        click.echo(f"note: {message}", err=True)

    warnings.showwarning = show


@click.group(
    cls=Program,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="cupyfa")
@click.pass_context
def main(context: click.Context) -> None:
    """FlashAttention without torch: run, check and measure attention kernels.

    Exit codes: 0 done and right, 1 wrong result, 2 bad arguments, 3 unsupported here.
    """
    notes_to_stderr()
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for command in (list_kernels, run, compile_kernels, show):
    main.add_command(command)


if __name__ == "__main__":
    main()
