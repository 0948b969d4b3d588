"""Host memory for results, page-locked where that is faster."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np

from cupyfa.runtime.backend import Backend
from cupyfa.runtime.transfer import settings

_POOLED = 1 << 20  # bytes from which a result is worth page-locked memory of its own


def fresh(backend: Backend, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Host memory for a result, page-locked if large and of a size that was asked for before.

    Page-locked memory goes back to a pool, for later results, when the caller drops the array.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _POOLED or not pinned_results.admits(size):
        return np.empty(shape, dtype)
    return np.asarray(_Result(backend, size)).view(dtype).reshape(shape)


class _Results:
    """The bytes of results in page-locked memory, and the sizes that were asked for."""

    def __init__(self) -> None:
        # Re-entrant: a result may be dropped at any time, also while this thread holds the lock.
        self.bytes, self.asked, self._lock = 0, set[int](), threading.RLock()

    def admits(self, size: int) -> bool:
        """Whether a result of this size may be page-locked; if so, its bytes are counted."""
        taken = _pooled(size)
        with self._lock:
            admitted = size in self.asked and self.bytes + taken <= settings.now.pinned_results
            self.asked.add(size)
            self.bytes += taken if admitted else 0
            return admitted

    def drop(self, size: int) -> None:
        """A result was freed."""
        with self._lock:
            self.bytes -= _pooled(size)


pinned_results = _Results()


class _Result:
    """Page-locked memory of an array; NumPy keeps it as the array's base."""

    def __init__(self, backend: Backend, size: int) -> None:
        self._size = size  # set first, for __del__ subtracts it even if pinning fails
        self._memory = backend.pinned(size)
        self.__array_interface__ = self._memory.__array_interface__

    def __del__(self) -> None:
        pinned_results.drop(self._size)


def _pooled(size: int) -> int:
    """The bytes that CuPy's pool takes: a power of two."""
    return 1 << (size - 1).bit_length() if size else 0
