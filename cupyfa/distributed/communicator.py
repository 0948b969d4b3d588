"""The interface for communication of ranks, and the operations built on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from threading import TIMEOUT_MAX
from typing import Any

import numpy as np

from cupyfa.distributed.agreement import difference
from cupyfa.distributed.packing import new
from cupyfa.errors import DeviceError, OfThisProcess, described

Pending = Callable[[], Any]  # waits for what was started, and gives its result
Message = tuple[Any, int]  # a contiguous array, and the rank that it goes to or comes from


class Group(OfThisProcess, ABC):
    """A group of ranks that compute together, from the view of one of them.

    rank: the number of this one, from 0. ranks: how many there are. timeout: the seconds after
    which a rank that waits for another gives up. sent: bytes that this rank has sent. reason: why
    the group has ended; empty if it has not.

    Every rank makes the same calls with the group in the same order. After a failure the group has
    ended: each further call raises DeviceError.
    """

    rank: int
    ranks: int
    timeout: float
    _instead = "call cupyfa.distributed.group() in each process"

    def __init__(self, rank: int, ranks: int, timeout: float) -> None:
        self.rank, self.ranks, self.timeout = rank, ranks, timeout
        self.reason = ""
        self.sent = 0
        self.calls = 0  # of attention and its gradients
        self.kept: dict[Any, Any] = {}  # small arrays that calls use again
        self.known: dict[Any, Any] = {}  # calls that were checked

    @abstractmethod
    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        """Starts to send and receive arrays, which must not change until the result is awaited."""

    def abort(self, reason: str) -> None:
        """Ends the group: ranks that wait raise DeviceError, now or after the time-out."""
        self.reason = self.reason or reason

    def settle(self) -> None:
        """Waits until all started messages have arrived, for groups that do not wait earlier."""
        return

    def require_place(self, in_gpu: bool) -> None:
        """Raises TypeError for arrays in a memory from which nothing is sent."""
        return

    def agree(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, in their order; all are of one size. The process waits."""
        return [x.tobytes() for x in self.gather(np.frombuffer(message, np.uint8))()]

    def gather(self, array: Any) -> Pending:
        """Starts to collect an array of every rank, all of one shape: [ranks, …]."""
        whole = new(array, (self.ranks, *array.shape))
        whole[self.rank] = array
        others = self._others
        arrived = self.exchange([(array, s) for s in others], [(whole[s], s) for s in others])

        def wait() -> Any:
            arrived()
            return whole

        return wait

    def reduce_scatter(self, parts: Any) -> Pending:
        """Starts to add up parts[rank] of all ranks, parts [ranks, …], in the order of ranks."""
        received = new(parts, parts.shape)
        received[self.rank] = parts[self.rank]
        others = self._others
        arrived = self.exchange([(parts[s], s) for s in others], [(received[s], s) for s in others])

        def wait() -> Any:
            arrived()
            total = received[0].copy()
            for s in range(1, self.ranks):
                total += received[s]
            return total

        return wait

    @property
    def _others(self) -> list[int]:
        """The other ranks, each rank beginning with the one after it."""
        return [(self.rank + step) % self.ranks for step in range(1, self.ranks)]

    def close(self) -> None:
        """Ends the group, when it is not needed any more; all ranks call it.

        A rank waits here for the others: none goes while another one still needs its messages.
        Raises ValueError if another rank makes a call instead. Does nothing if it has ended.
        """
        if self.reason:
            return
        try:
            found = difference(self, {"call": "close()"})
        finally:
            self.abort("it was closed")
        if found is not None:
            raise found

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
        else:
            self.abort_for(error)

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Work of all ranks: if it fails here, the group ends, and the others do not wait."""
        try:
            yield
        except BaseException as error:
            self.abort_for(error)
            raise

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Work of all ranks, like ``agreeing``, that ends when all messages have arrived."""
        with self.agreeing():
            yield
            self.settle()

    def abort_for(self, error: BaseException) -> None:
        """Ends the group because of an error that this rank raised."""
        self.abort(f"rank {self.rank} raised {type(error).__name__}: {error}")

    def abort_late(self, source: str) -> None:
        """Ends the group because nothing arrived from ``source`` within the time-out."""
        self.abort(
            f"rank {self.rank} waited {self.timeout:g} s for {source}, which is dead, hangs or is "
            "slower"
        )

    def ended(self) -> DeviceError:
        """The error of a rank whose group has ended."""
        return DeviceError(
            f"the group of rank {self.rank} has ended: {self.reason}; make a new one"
        )

    def require_alive(self) -> None:
        """Raises DeviceError if the group has ended."""
        if self.reason:
            raise self.ended()


def require_seconds(timeout: Any) -> None:
    """Raises ValueError for a time-out that is no number of seconds above 0."""
    if not isinstance(timeout, Real) or not 0 < float(timeout) <= TIMEOUT_MAX:
        raise ValueError(
            f"timeout is {described(timeout)}; give seconds above 0, at most {TIMEOUT_MAX:.0f}"
        )
