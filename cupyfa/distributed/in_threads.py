"""Runs ranks as threads of one process, for tests and for trying out programs."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from cupyfa.distributed.communicator import Group, Message, Pending, require_seconds
from cupyfa.errors import DeviceError
from cupyfa.problem.problem import whole
from cupyfa.runtime.choose_backend import backend_named

_STEP = 0.1  # seconds per wait


def threads(ranks: int, function: Callable[[Group], Any], *, timeout: float = 60) -> list[Any]:
    """Calls ``function(group)`` in one thread per rank, all on the caller's device.

    Returns the results in the order of ranks. If one rank raises, ranks that wait for it raise
    DeviceError, and this function raises the first error. timeout: how many seconds a rank waits
    for another rank.
    """
    groups = groups_of_threads(whole("ranks", ranks, 1), timeout)
    use_device = _device_of_caller()
    errors: list[BaseException] = []  # in chronological order

    def run(group: Group) -> Any:
        try:
            use_device()
            return function(group)
        except BaseException as error:
            errors.append(error)
            group.abort_for(error)

    results: list[Future[Any]] = []
    with ThreadPoolExecutor(ranks) as pool:
        try:
            results.extend(pool.submit(run, x) for x in groups)
            _wait_for(results)
        except BaseException as stop:  # raised only after all ranks have stopped
            _end_all(groups, results, f"threads() raised {type(stop).__name__}")
            raise
    if errors:
        del errors[1:]
        raise errors.pop()  # popped, since a reference in this frame would keep ranks' arrays alive
    return [x.result() for x in results]


def _wait_for(results: Sequence[Future[Any]]) -> None:
    """Waits in short steps, so that Ctrl-C works even if a library makes system calls restart."""
    while wait(results, timeout=_STEP).not_done:
        pass


def _end_all(groups: Sequence[Group], results: Sequence[Future[Any]], reason: str) -> None:
    """Aborts all ranks and waits until they have ended, even if Ctrl-C is pressed again."""
    try:
        for x in groups:
            x.abort(reason)
        _wait_for(results)
    except KeyboardInterrupt:
        _end_all(groups, results, reason)
        raise


def _device_of_caller() -> Callable[[], None]:
    """Returns a function that selects the caller's CUDA device in a new thread (default: 0)."""
    try:
        cuda = backend_named("cuda")
    except DeviceError:
        return lambda: None
    device = cuda.device
    return partial(cuda.use, device) if device else lambda: None


def groups_of_threads(ranks: int, timeout: float) -> Sequence[Group]:
    """Makes one group for ``ranks`` threads; returns each thread's view."""
    require_seconds(timeout)
    groups: list[_ThreadGroup] = []
    groups.extend(_ThreadGroup(rank, ranks, timeout, groups) for rank in range(ranks))
    return groups


class _ThreadGroup(Group):
    """One thread's view of a group. groups: the views of all threads, in the order of ranks."""

    def __init__(
        self, rank: int, ranks: int, timeout: float, groups: Sequence[_ThreadGroup]
    ) -> None:
        super().__init__(rank, ranks, timeout)
        self._groups = groups
        # One queue of messages per sending rank; None marks the end of the group.
        self._boxes = [queue.SimpleQueue[Any]() for _ in range(ranks)]

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        self.require_alive()
        for x, to in sends:
            self._groups[to].put(self.rank, x.copy())
            self.sent += x.nbytes

        def wait() -> None:
            for x, source in recvs:
                x[...] = self._take(source)

        return wait

    def put(self, source: int, message: Any) -> None:
        """Delivers a message from rank ``source`` to this rank."""
        self._boxes[source].put(message)

    def abort(self, reason: str) -> None:
        """Ends the group; messages that were sent before can still be received."""
        for x in self._groups:
            x.reason = x.reason or reason
            x.put(self.rank, None)

    def _take(self, source: int) -> Any:
        """Returns the next message from a rank; raises DeviceError if the group ends first."""
        try:
            message = self._boxes[source].get(timeout=self.timeout)
        except queue.Empty:
            self.abort_late(f"a message of rank {source}")
            message = None
        if message is None:
            raise self.ended()
        return message
