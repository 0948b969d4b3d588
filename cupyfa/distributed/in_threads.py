"""Ranks that are threads of this process: to try a program, and for tests."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any

import numpy as np

from cupyfa.distributed.communicator import (
    Group,
    Message,
    Pending,
    ended,
    require_seconds,
    waited,
)
from cupyfa.errors import DeviceError
from cupyfa.problem.problem import whole
from cupyfa.runtime.choose_backend import backend_named


def threads(ranks: int, function: Callable[[Group], Any], *, timeout: float = 60) -> list[Any]:
    """Calls ``function(group)`` in a thread for each rank, all on this process's device.

    Returns the results in the order of ranks. If a rank raises, the others raise DeviceError where
    they wait for it; the first error is raised here. timeout: the seconds that a rank waits.
    """
    room = _Room(whole("ranks", ranks, 1))
    require_seconds(timeout)
    use_device = _device_of_caller()
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []  # in the order of time

    def run(rank: int) -> None:
        group = ThreadGroup(room, rank, timeout)
        try:
            use_device()
            results[rank] = function(group)
        except BaseException as error:
            errors.append(error)
            group.abort(f"rank {rank} raised {type(error).__name__}: {error}")
        finally:
            ends[rank].set()

    def wait() -> None:
        for thread, end in zip(started, ends):
            if thread.ident is not None:
                end.wait()
                thread.join()

    def wait_for_all() -> None:
        """Also if Ctrl-C comes again."""
        try:
            wait()
        except KeyboardInterrupt:
            wait_for_all()
            raise

    # Where Ctrl-C interrupts join(), Python 3.12 takes the thread for one that has ended.
    ends = [threading.Event() for _ in range(ranks)]
    started = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    try:
        for x in started:
            x.start()
        wait()
    except BaseException as stop:  # no rank is at work any more when it is raised
        room.end(f"threads() raised {type(stop).__name__}")
        wait_for_all()
        raise
    if errors:
        del errors[1:]
        raise errors.pop()  # kept in this frame, it would keep the arrays of ranks
    return results


def _device_of_caller() -> Callable[[], None]:
    """What makes the current CUDA device that of another thread, which begins with device 0."""
    try:
        cuda = backend_named("cuda")
    except DeviceError:
        return lambda: None
    device = cuda.device
    return partial(cuda.use, device) if device else lambda: None


def alone(timeout: float) -> Group:
    """The group of one rank."""
    return ThreadGroup(_Room(1), 0, timeout)


class ThreadGroup(Group):
    """The group as one thread sees it."""

    def __init__(self, room: _Room, rank: int, timeout: float) -> None:
        super().__init__(rank, room.ranks, timeout)
        self._room = room
        self._collected = 0

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        self._require_alive()
        for x, to in sends:
            self._room.boxes[to].put(self.rank, x.copy())
            self.sent += x.nbytes

        def wait() -> None:
            for x, source in recvs:
                take = partial(self._room.boxes[self.rank].take, source)
                x[...] = self._waiting(take, f"a message of rank {source}")

        return wait

    def gather(self, array: Any) -> Pending:
        """The same array for all ranks, so that many of them do not copy it as often."""
        self.sent += array.nbytes * (self.ranks - 1)
        return self._all(array.copy(), np.stack)

    def agree(self, message: bytes) -> list[bytes]:
        self.sent += len(message) * (self.ranks - 1)
        return self._all(message, list)()

    @property
    def reason(self) -> str:
        return self._room.reason

    def abort(self, reason: str) -> None:
        self._room.end(reason)

    def _all(self, value: Any, join: Callable[[list[Any]], Any]) -> Pending:
        self._require_alive()
        turn, self._collected = self._collected, self._collected + 1
        self._room.deposit(turn, self.rank, value, join)
        take = partial(self._room.collected, turn)
        return lambda: self._waiting(take, "the messages of all ranks")

    def _waiting(self, take: Callable[[float], Any], what: str) -> Any:
        """What a room gives until the time is over. Raises DeviceError if it gives nothing."""
        try:
            return take(monotonic() + self.timeout)
        except TimeoutError:
            self.abort(waited(self.rank, self.timeout, what))
        except _Ended:
            pass
        raise self._ended() from None

    def _require_alive(self) -> None:
        if self.reason:
            raise self._ended()

    def _ended(self) -> DeviceError:
        return ended(self.rank, self._room.reason)


class _Ended(Exception):
    """The group has ended while a rank waited."""


class _Box:
    """Messages to one rank, by the ranks that sent them."""

    def __init__(self, room: _Room) -> None:
        self._room = room
        self.changed = threading.Condition()
        self._from: dict[int, deque[Any]] = defaultdict(deque)

    def put(self, source: int, message: Any) -> None:
        with self.changed:
            self._from[source].append(message)
            self.changed.notify()

    def take(self, source: int, deadline: float) -> Any:
        with self.changed:
            _wait(self.changed, self._room, lambda: bool(self._from[source]), deadline)
            return self._from[source].popleft()


class _Room:
    """What the threads share."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.reason = ""  # why the group has ended
        self.boxes = [_Box(self) for _ in range(ranks)]
        self._changed = threading.Condition()
        self._given: dict[int, list[Any]] = defaultdict(lambda: [None] * self.ranks)
        self._counts: dict[int, int] = defaultdict(int)
        self._joined: dict[int, Any] = {}

    def deposit(self, turn: int, rank: int, value: Any, join: Callable[[list[Any]], Any]) -> None:
        """Adds what a rank gives in a turn; the last of them joins all."""
        with self._changed:
            self._given[turn][rank] = value
            self._counts[turn] += 1
            if self._counts[turn] == self.ranks:
                self._joined[turn] = join(self._given.pop(turn))
                self._changed.notify_all()

    def collected(self, turn: int, deadline: float) -> Any:
        """What all ranks gave; the last that takes it removes it."""
        with self._changed:
            _wait(self._changed, self, lambda: turn in self._joined, deadline)
            self._counts[turn] -= 1
            if self._counts[turn]:
                return self._joined[turn]
            del self._counts[turn]
            return self._joined.pop(turn)

    def end(self, reason: str) -> None:
        self.reason = self.reason or reason
        for x in (self._changed, *(box.changed for box in self.boxes)):
            with x:
                x.notify_all()


def _wait(
    changed: threading.Condition, room: _Room, is_there: Callable[[], bool], deadline: float
) -> None:
    """Raises _Ended or TimeoutError if it does not come. Messages that have come are still read."""
    while not is_there():
        if room.reason:
            raise _Ended
        if not changed.wait(deadline - monotonic()) and not is_there():
            raise TimeoutError
