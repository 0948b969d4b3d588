"""Files of measurements: the option --save, and what a benchmark that ends early leaves."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from cupyfa import cache_folder
from cupyfa.lab.bench.results import Measurement, Results
from cupyfa.lab.commands import command_options
from cupyfa.lab.commands.signals import take_time
from cupyfa.runtime.backend import Backend

save_option = click.option(
    "--save",
    type=command_options.FILE,
    help="Write all measurements to a JSON file, after each problem, for `cupyfa compare`.",
)


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
