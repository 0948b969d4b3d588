"""The settings of the transfer of NumPy arrays."""

from __future__ import annotations

import os
from dataclasses import dataclass

from cupyfa.problem import whole

_LEAST = {"pinned_results": 0, "chunk_bytes": 16}  # any chunk has room for an element


@dataclass(frozen=True)
class Transfer:
    """How NumPy arrays are moved, and so how much memory is held.

    threads: threads that copy into page-locked memory, and as many that copy out of it.
    chunk_bytes: size of one buffer, the most that a thread copies at a time.
    buffers: buffers of each direction, made when first needed.
    piece_bytes: size of all arrays of a piece, as far as it can be chosen.
    pieces: pieces on the device at a time.
    device_bytes: device memory that a call may take; None is most of what is free.
    pinned_results: bytes of results that may lie in page-locked memory at a time, where the
        device writes them directly; used for results of a size that was asked for before.
    """

    threads: int = min(12, len(os.sched_getaffinity(0)))
    chunk_bytes: int = 8 << 20
    buffers: int = 12
    piece_bytes: int = 33 << 20
    pieces: int = 6
    device_bytes: int | None = None
    pinned_results: int = 1 << 30

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None or name != "device_bytes":
                whole(name, value, _LEAST.get(name, 1))

    @property
    def most_held(self) -> int:
        """The most bytes of page-locked memory that buffers take, both directions together."""
        return 2 * self.buffers * self.chunk_bytes


now = Transfer()  # the settings of all calls from now on
