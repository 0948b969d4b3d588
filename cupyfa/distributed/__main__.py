"""``python -m cupyfa.distributed -n 2 script.py``: a process for each GPU of this host."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

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
    started = _start(ranks, port or _free_port(), [sys.executable, script, *arguments])
    raise SystemExit(_wait(started, grace))


def _start(ranks: int, port: int, command: Sequence[str]) -> list[subprocess.Popen]:
    common = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
    common["MASTER_ADDR"] = "localhost"
    return [
        subprocess.Popen(command, env={**common, "RANK": str(x), "LOCAL_RANK": str(x)})
        for x in range(ranks)
    ]


def _wait(started: Sequence[subprocess.Popen], grace: float) -> int:
    """The first exit status besides 0, when all have ended."""
    ends: queue.Queue[int] = queue.Queue()
    for x in started:
        threading.Thread(target=lambda x=x: ends.put(x.wait()), daemon=True).start()
    status, missing = 0, len(started)
    while missing:
        try:
            code = ends.get(timeout=grace if status else None)
        except KeyboardInterrupt:  # which the processes got, too
            status = status or 128 + signal.SIGINT
            continue
        except queue.Empty:
            for x in started:
                x.kill()
            grace = 60.0
            continue
        missing -= 1
        if code and not status:
            status = 128 - code if code < 0 else code
    return status


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port: int = found.getsockname()[1]
    return port


if __name__ == "__main__":
    main(prog_name="python -m cupyfa.distributed")
