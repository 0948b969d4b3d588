"""Ends a command whose kernel does not return."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import click

from cupyfa.lab.bench.watch import Watch
from cupyfa.lab.commands import UNSUPPORTED, command_options
from cupyfa.runtime.backend import Backend

_CLEAR_LINE = "\r\x1b[2K"
_OFTEN = 10  # times within a timeout that the watcher looks
LONGEST = {"cuda": 60.0, "simulator": 600.0}  # default seconds

_is_own_process = False


def own_process() -> None:
    """Allows to end this process: it runs nothing but one command."""
    global _is_own_process
    _is_own_process = True


timeout_option = click.option(
    "--timeout",
    type=command_options.TIMEOUT,
    help="Seconds after which a running kernel has failed.  "
    "[default: {:g}; in the simulator {:g}]".format(*LONGEST.values()),
)


def timeout_on(backend: Backend, timeout: float | None) -> float:
    """The value of ``timeout_option``, or its default. Raises ValueError for NaN."""
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout is {timeout}; give seconds, more than 0")
    return LONGEST.get(backend.name, 60.0) if timeout is None else timeout


@contextmanager
def watched(backend: Backend, timeout: float | None) -> Iterator[Watch]:
    """A watch on calls; one that takes too long ends the process of the command.

    Nothing else runs while kernels are timed, since the watcher sleeps.
    """
    watch = Watch(timeout_on(backend, timeout))
    if not _is_own_process:
        yield watch
        return
    ended = threading.Event()
    threading.Thread(target=_look, args=(watch, ended), daemon=True).start()
    try:
        yield watch
    finally:
        ended.set()


def _look(watch: Watch, ended: threading.Event) -> None:
    while not ended.wait(watch.timeout / _OFTEN):
        if call := watch.overdue:
            _end(watch, call)


def _end(watch: Watch, call: str) -> None:
    if sys.stderr and sys.stderr.isatty():  # the progress bar
        click.echo(_CLEAR_LINE, err=True, nl=False)
    why = f"no answer within {watch.timeout:g} s; raise --timeout to wait longer"
    click.echo(f"cupyfa: {call}: {why}", err=True)
    os._exit(UNSUPPORTED)
