"""The buffers of a backend and the threads that copy."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from operator import length_hint
from typing import Any, cast

from cupyfa.runtime.backend import Backend, Lane
from cupyfa.runtime.transfer import settings
from cupyfa.runtime.transfer.buffers import Buffers, Move, bring, send
from cupyfa.runtime.transfer.settings import Transfer

hosts: weakref.WeakKeyDictionary[Backend, Host] = weakref.WeakKeyDictionary()
lock = threading.Lock()


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
