"""Page-locked buffers, through which threads copy arrays in chunks."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

from cupyfa.runtime.backend import Backend, Lane, Mark
from cupyfa.runtime.transfer.settings import Transfer

Move = Callable[..., None]  # send or bring


class _Buffer:
    def __init__(self, memory: np.ndarray) -> None:
        self.memory, self.address = memory, memory.ctypes.data
        self.mark: Mark | None = None  # after the last copy to or from it
        self.sent = False  # whether that copy may be in progress

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return np.ndarray(shape, dtype, self.memory)

    @property
    def is_free(self) -> bool:
        return not self.sent or self.mark is None or self.mark.done

    def copied(self, lane: Lane) -> None:
        """A copy to or from it was started."""
        self.mark, self.sent = lane.mark(self.mark), True

    def wait(self) -> None:
        if self.sent and self.mark is not None:
            self.mark.wait()
        self.sent = False


class Buffers:
    """The page-locked buffers of one direction.

    The buffer that became free last is taken first: its memory may still be in the caches.
    """

    def __init__(self, backend: Backend, chosen: Transfer) -> None:
        self._backend = weakref.ref(backend)
        self._size, self._most = chosen.chunk_bytes, chosen.buffers
        self._busy: deque[_Buffer] = deque()  # each with a copy in progress
        self._free: list[_Buffer] = []
        self._lock = threading.Lock()  # Ctrl-C cannot leave it held, unlike a Condition
        self._given, self.made = threading.Condition(self._lock), 0

    def take(self) -> _Buffer:
        """A buffer without a copy in progress."""
        with self._lock:
            while not self._busy and not self._free and self.made == self._most:
                self._given.wait()
            while self._busy and self._busy[0].is_free:
                self._free.append(self._busy.popleft())
            if self._free:
                return self._free.pop()
            if make := self.made < self._most:
                self.made += 1
            else:
                buffer = self._busy.popleft()
        if make:
            return self._new()
        try:
            buffer.wait()
        except BaseException:
            self.give(buffer)
            raise
        return buffer

    def give(self, buffer: _Buffer) -> None:
        with self._lock:
            self._busy.append(buffer)
            self._given.notify()

    def _new(self) -> _Buffer:
        backend = self._backend()
        assert backend is not None
        try:
            return _Buffer(backend.pinned(self._size))
        except BaseException:
            with self._lock:
                self.made -= 1
                self._given.notify()  # a waiting thread may make one, or fail as well
            raise


def send(
    lane: Lane, buffers: Buffers, source: np.ndarray, address: int, shape: tuple[int, ...]
) -> None:
    """Copies a part of an array to a buffer, and starts the copy from there to the device."""
    lane.enter()
    buffer = buffers.take()
    try:
        there = buffer.array(shape, source.dtype)
        np.copyto(there[..., : source.shape[-1]], source)
        lane.copy(address, buffer.address, there.nbytes)
        buffer.copied(lane)
    finally:
        buffers.give(buffer)


def bring(
    lane: Lane, buffers: Buffers, target: np.ndarray, address: int, shape: tuple[int, ...]
) -> None:
    """Copies a part of a result to a buffer, and from there to where the caller has it."""
    lane.enter()
    buffer = buffers.take()
    try:
        here = buffer.array(shape, target.dtype)
        lane.copy(buffer.address, address, here.nbytes)
        buffer.copied(lane)
        buffer.wait()
        np.copyto(target, here[..., : target.shape[-1]])
    finally:
        buffers.give(buffer)
