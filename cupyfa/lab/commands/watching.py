"""Stops kernels that hang: the command continues without the kernel, or ends."""

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from cupyfa.lab.bench.watch import Watch
from cupyfa.lab.commands import UNSUPPORTED, command_options
from cupyfa.runtime.backend import Backend

_CLEAR_LINE = "\r\x1b[2K"
_STATE = "_CUPYFA_STATE"  # variable that names a file with results from before a restart
_OFTEN = 10  # number of checks by the watcher within a timeout
LONGEST = {"cuda": 60.0, "simulator": 600.0}  # default timeouts in seconds

_is_own_process = False


def own_process() -> None:
    """Permits ``watched`` to restart this process, which runs only one command."""
    global _is_own_process
    _is_own_process = True


timeout_option = click.option(
    "--timeout",
    type=command_options.TIMEOUT,
    help="Seconds after which a running kernel has failed.  "
    "[default: {:g}; in the simulator {:g}]".format(*LONGEST.values()),
)


def timeout_on(backend: Backend, timeout: float | None) -> float:
    """Returns the value of ``timeout_option``, or its default. Raises ValueError for NaN."""
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout is {timeout}; it must be more than 0 seconds")
    return LONGEST.get(backend.name, 60.0) if timeout is None else timeout


@contextmanager
def watched(backend: Backend, timeout: float | None, *, ends: bool = False) -> Iterator[Watch]:
    """Yields a watch on kernel calls. If a call hangs, the command restarts and skips the call.

    With ``ends``, a hung call ends the command instead.

    The restart runs the same command line in the same process: exec replaces the program, which
    ends its threads and frees the GPU. The watcher thread sleeps between checks, so it does not
    disturb timings.
    """
    watch = Watch(timeout_on(backend, timeout))
    if not _is_own_process:
        yield watch
        return
    if state := os.environ.pop(_STATE, None):
        watch.load(Path(state))
        Path(state).unlink()
        command_options.note(f"{watch.hung[-1]}: {watch.verdict}; continuing without this call")
    ended = threading.Event()
    stop = _end if ends else _restart
    threading.Thread(target=_look, args=(watch, ended, stop), daemon=True).start()
    try:
        yield watch
    finally:
        ended.set()


def _look(watch: Watch, ended: threading.Event, stop: Callable[[Watch, str], None]) -> None:
    while not ended.wait(watch.timeout / _OFTEN):
        if call := watch.overdue:
            stop(watch, call)


def _clear_line() -> None:
    if sys.stderr and sys.stderr.isatty():
        click.echo(_CLEAR_LINE, err=True, nl=False)


def _end(watch: Watch, call: str) -> None:
    _clear_line()
    why = f"no answer within {watch.timeout:g} s; raise --timeout to wait longer"
    click.echo(f"cupyfa: {call}: {why}", err=True)
    os._exit(UNSUPPORTED)


def _restart(watch: Watch, call: str) -> None:
    handle, state = tempfile.mkstemp(prefix="cupyfa-", suffix=".json")
    os.close(handle)
    watch.save(Path(state), call)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    _clear_line()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # listdir's own descriptor is already closed
            os.set_inheritable(descriptor, descriptor <= 2)  # exec closes the GPU's descriptors
    os.environ[_STATE] = state
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
