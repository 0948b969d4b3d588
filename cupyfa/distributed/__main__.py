"""``python -m cupyfa.distributed -n 2 script.py``: a process for each GPU of this host."""

from __future__ import annotations

import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from time import monotonic
from typing import NoReturn

import click

_AS_GIVEN = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command(context_settings=_AS_GIVEN)
@click.option("-n", "ranks", type=click.IntRange(1), required=True, help="How many processes.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Where ranks meet; by default a free port."
)
@click.option(
    "--grace",
    type=click.FloatRange(0),
    default=5.0,
    show_default=True,
    help="Seconds that the others have to end by themselves after one has failed.",
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def main(ranks: int, port: int | None, grace: float, script: str, arguments: Sequence[str]) -> None:
    """Starts SCRIPT in several processes of this host, each with a rank.

    cupyfa.distributed.group() of the script finds the others. If a process fails, the others end,
    and its exit status is that of the command.
    """
    signal.signal(signal.SIGTERM, _terminated)
    started: list[subprocess.Popen] = []
    try:
        _start(started, ranks, port or _free_port(), [sys.executable, script, *arguments])
        status = _wait(started, grace)
    finally:
        _end(started, grace)
    raise SystemExit(status)


def _terminated(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _start(started: list[subprocess.Popen], ranks: int, port: int, command: Sequence[str]) -> None:
    """Adds the processes to a list, also if one of them cannot be started."""
    common = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
    common["MASTER_ADDR"] = "localhost"
    for x in range(ranks):
        environment = {**common, "RANK": str(x), "LOCAL_RANK": str(x)}
        started.append(subprocess.Popen(command, env=environment))


def _wait(started: Sequence[subprocess.Popen], grace: float) -> int:
    """The first exit status besides 0, when all have ended."""
    ends: queue.Queue[int] = queue.Queue()
    for x in started:
        threading.Thread(target=lambda x=x: ends.put(x.wait()), daemon=True).start()
    status, missing, deadline = 0, len(started), math.inf
    while missing:
        left = max(deadline - monotonic(), 0)
        try:
            code = ends.get(timeout=None if left == math.inf else left)
            missing -= 1
        except KeyboardInterrupt:  # which the processes got, too
            code = -signal.SIGINT
        except queue.Empty:
            for x in started:
                x.kill()
            deadline = math.inf
            continue
        if code and not status:
            status, deadline = 128 - code if code < 0 else code, monotonic() + grace
    return status


def _end(started: Sequence[subprocess.Popen], grace: float) -> None:
    """Ends the processes that still run, because this one has to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    running = [x for x in started if x.poll() is None]
    for x in running:
        x.terminate()
    deadline = monotonic() + grace
    for x in running:
        try:
            x.wait(max(deadline - monotonic(), 0))
        except subprocess.TimeoutExpired:
            x.kill()
            x.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port: int = found.getsockname()[1]
    return port


if __name__ == "__main__":
    main(prog_name="python -m cupyfa.distributed")
