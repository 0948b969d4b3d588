"""NumPy arrays to and from the device at the speed of the bus, and problems that do not fit it.

A problem is cut into pieces along batch and key heads. While one piece is computed, the next
pieces are copied to the device and earlier results are copied back. Asynchronous copies need
page-locked memory: several threads copy chunks of the caller's arrays, with any strides, into a
few page-locked buffers, and chunks of results out of others. One thread would be slower than the
bus, above all in memory that is touched for the first time. Arrays that are page-locked already
are copied directly.

The device holds a few pieces at a time, so a problem may be larger than its memory. A head that is
larger by itself is cut along its rows and its keys; partial results are merged by their lse.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cupyfa.runtime.transfer import settings
from cupyfa.runtime.transfer.call import compute
from cupyfa.runtime.transfer.host import hosts, lock
from cupyfa.runtime.transfer.pieces import Pieces
from cupyfa.runtime.transfer.results import fresh, pinned_results
from cupyfa.runtime.transfer.settings import Transfer

__all__ = ["Pieces", "Transfer", "compute", "configure", "fresh", "held", "release"]


def configure(**changes: Any) -> Transfer:
    """Sets how NumPy arrays are copied to and from the GPU, from the next call on.

    The names are the fields of ``Transfer``. Returns all settings. Raises TypeError for other names
    and ValueError for wrong values. Buffers that were made with other settings are freed.
    """
    if unknown := changes.keys() - vars(settings.now).keys():
        known = ", ".join(vars(settings.now))
        raise TypeError(f"{', '.join(sorted(unknown))}: unknown; there are {known}")
    if changes:
        settings.now = replace(settings.now, **changes)
        release()
    return settings.now


def held() -> int:
    """Bytes of page-locked memory in use for NumPy arrays: buffers, and results not yet freed.

    Buffers take up to ``configure_transfer().most_held``. Buffers that calls of other threads still
    use after ``free_buffers`` are not counted.
    """
    with lock:
        return pinned_results.bytes + sum(host.bytes for host in hosts.values())


def release() -> None:
    """Frees the page-locked memory of buffers and of results that no longer exist.

    Calls of other threads go on; the next call allocates buffers again.
    """
    with lock:
        backends = list(hosts)
        hosts.clear()  # their threads end once nothing is left to do
        pinned_results.asked.clear()
    for backend in backends:
        backend.trim_pinned()
