"""Handles signals that end a command."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LIKE_CTRL_C = (signal.SIGTERM, signal.SIGHUP)
_USUAL_PATIENCE, _LONG_PATIENCE = 1.0, 10.0  # seconds that a command may take after a signal
# Signals within this many seconds count as one: `timeout` sends its signal twice, and a process
# with many threads may notice the second one late.
_TOGETHER = 1.0
_patience = _USUAL_PATIENCE


def take_time() -> None:
    """Extends the command's time limit after a signal, so that it can print its results."""
    global _patience
    _patience = _LONG_PATIENCE


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Makes signals end a command within two seconds, after it has cleaned up.

    A command that called ``take_time`` gets more time, unless a second signal arrives at least one
    second after the first.

    SIGTERM and SIGHUP raise SystemExit in the main thread, as Ctrl-C raises KeyboardInterrupt. If
    the main thread is stuck in a library, for example while it waits for a GPU, the process exits
    without cleaning up.
    """
    global _patience
    _patience = _USUAL_PATIENCE
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heeded = [number for number in _LIKE_CTRL_C if signal.getsignal(number) is signal.SIG_DFL]
    for number in heeded:
        signal.signal(number, _end)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_insist, args=(reading,), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)
        for number in heeded:
            ends = signal.getsignal(number) is not _end
            # A signal that arrives while the process exits must not change its exit status.
            signal.signal(number, signal.SIG_IGN if ends else signal.SIG_DFL)


def _end(number: int, _: Any) -> None:
    for each in _LIKE_CTRL_C:  # from now on `_insist` handles signals
        signal.signal(each, lambda *_: None)
    sys.exit(128 + number)


def _insist(reading: int) -> None:
    """Exits the process if the command has not ended within ``_patience`` after a signal."""
    number, first, deadline = 0, 0.0, float("inf")
    while time.monotonic() < deadline:
        left = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        if select.select([reading], [], [], left)[0]:
            signals = os.read(reading, 4096)
            if not signals:  # the command has ended and closed its end of the pipe
                os.close(reading)
                return
            asked = [x for x in signals if x in (signal.SIGINT, *_LIKE_CTRL_C)]
            if asked:
                now = time.monotonic()
                if not number:
                    number, first, deadline = asked[0], now, now + _patience
                elif now > first + _TOGETHER:  # the user sent a second signal
                    break
    os._exit(128 + number)
