"""NumPy arrays to and from the device at the speed of the bus, and problems that do not fit it.

A problem is cut into pieces along batch and key heads. While one piece is computed, the next ones
are on their way to the device and the results of those before are on their way back. A copy that
goes on by itself needs pinned memory, so several threads copy chunks of the caller's arrays to a
few pinned buffers, whatever their strides, and chunks of results out of others; that is also what
touches new memory first, which one thread alone would take longer for than the bus does. Arrays
that are pinned already are read and written where they are.

The device holds a few pieces at a time, so a problem may be larger than its memory. Where a single
head is, its rows are cut too, and its keys: then partial results are merged by their lse.
"""

from __future__ import annotations

from typing import Any

from cupyfa.runtime.transfer import settings
from cupyfa.runtime.transfer.call import compute
from cupyfa.runtime.transfer.host import hosts, lock
from cupyfa.runtime.transfer.pieces import Pieces
from cupyfa.runtime.transfer.results import fresh, pinned_results
from cupyfa.runtime.transfer.settings import Transfer

__all__ = ["Pieces", "Transfer", "compute", "configure", "fresh", "held", "release"]


def configure(**changes: Any) -> Transfer:
    """Chooses how NumPy arrays are moved from now on; returns all that is chosen.

    The names are those of ``Transfer``. Buffers that were made otherwise are freed.
    """
    now = settings.choose(changes)
    if changes:
        release()
    return now


def held() -> int:
    """Bytes of page-locked memory that buffers and results take now."""
    with lock:
        return pinned_results.bytes + sum(host.bytes for host in hosts.values())


def release() -> None:
    """Gives the buffers back to the system; calls in progress keep theirs until they end."""
    with lock:
        backends = list(hosts)
        hosts.clear()  # their threads end once nothing is left to do
        pinned_results.asked.clear()
    for backend in backends:
        backend.trim_pinned()
