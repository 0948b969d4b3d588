"""The page-locked buffers of a backend, and the threads that copy arrays through them in chunks."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from operator import length_hint
from typing import Any, cast

import numpy as np

from cupyfa.runtime.backend import Backend, Lane, Mark
from cupyfa.runtime.transfer import settings
from cupyfa.runtime.transfer.settings import Transfer

hosts: weakref.WeakKeyDictionary[Backend, Host] = weakref.WeakKeyDictionary()
lock = threading.Lock()
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


class Copies:
    """The copies of a piece in one direction, most of them made by threads.

    ``tasks`` are the copies for threads that are not yet submitted. ``end`` marks the end of copies
    without threads.
    """

    def __init__(self, lane: Lane, buffers: Buffers, chunks: Sequence[tuple[Any, ...]]) -> None:
        self.end = None if chunks else lane.record()
        self.tasks = iter([(self, lane, buffers, *chunk) for chunk in chunks])
        self._left, self._error = len(chunks), cast(BaseException | None, None)
        self._lock, self._all = threading.Lock(), threading.Lock()
        if chunks:
            self._all.acquire()

    def count(self, error: BaseException | None) -> None:
        """Counts a copy that was started (out of a buffer: completed), or failed."""
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if not self._left:
                self._all.release()

    def sleep(self) -> None:
        """Returns when threads have started all copies that were submitted."""
        if not length_hint(self.tasks):
            with self._all:
                return

    def wait(self) -> None:
        """Returns when all copies are started; raises the error of one that failed."""
        self.sleep()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # it refers to this frame, and so to the call and its arrays


class Host:
    """The buffers and threads of a backend."""

    def __init__(self, backend: Backend, chosen: Transfer) -> None:
        self.chosen = chosen
        self.buffers = {move: Buffers(backend, chosen) for move in (send, bring)}
        self._tasks: dict[Move, queue.SimpleQueue] = {}
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        return sum(x.made for x in self.buffers.values()) * self.chosen.chunk_bytes

    def submit(self, move: Move, copies: Copies) -> None:
        """Submits copies to the threads."""
        if not length_hint(copies.tasks):
            return
        with self._lock:
            if move not in self._tasks:
                tasks: queue.SimpleQueue = queue.SimpleQueue()
                for i in range(self.chosen.threads):  # which refer to nothing else
                    name = f"cupyfa_{move.__name__}_{i}"
                    threading.Thread(
                        target=_serve, args=(move, tasks), name=name, daemon=True
                    ).start()
                self._tasks[move] = tasks
        # In one step of the interpreter, so that Ctrl-C finds all tasks submitted, or none.
        deque(map(self._tasks[move].put, copies.tasks), maxlen=0)

    def __del__(self) -> None:
        for tasks in self._tasks.values():
            for _ in range(self.chosen.threads):
                tasks.put(None)  # after the remaining tasks


def _serve(move: Move, tasks: queue.SimpleQueue) -> None:
    """Makes copies until the queue ends."""
    while (task := tasks.get()) is not None:
        copies, *arguments = task
        error = None
        try:
            move(*arguments)
        except BaseException as caught:
            error = caught
        copies.count(error)
        del task, copies, arguments, error  # they refer to the caller's arrays


def host_of(backend: Backend) -> Host:
    with lock:
        if backend not in hosts:
            hosts[backend] = Host(backend, settings.now)
        return hosts[backend]
