"""The interface for communication between ranks, and collectives built on it."""

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

Pending = Callable[[], Any]  # waits for an operation that was started, and returns its result
Message = tuple[Any, int]  # a contiguous array, and the rank to send it to or receive it from


class Group(OfThisProcess, ABC):
    """One rank's view of a group of ranks that compute together.

    rank: this rank's index. ranks: the number of ranks. timeout: how many seconds a rank waits for
    another rank. sent: the number of bytes that this rank has sent. reason: why the group has
    ended, or an empty string.

    All ranks must make the same calls in the same order. A failure ends the group: each further
    call raises DeviceError.
    """

    rank: int
    ranks: int
    timeout: float
    _instead = "call cupyfa.distributed.group() in each process"

    def __init__(self, rank: int, ranks: int, timeout: float) -> None:
        self.rank, self.ranks, self.timeout = rank, ranks, timeout
        self.reason = ""
        self.sent = 0
        self.calls = 0  # number of calls of attention and backward
        # All ranks but this one, starting with the next one to spread the traffic.
        self._others = [(rank + step) % ranks for step in range(1, ranks)]
        self.kept: dict[Any, Any] = {}  # cache of small arrays for later calls
        self.known: dict[Any, Any] = {}  # cache of checked calls

    @abstractmethod
    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        """Starts to send and receive arrays; returns the function that waits for the transfers.

        The arrays must not change until that function has been called.
        """

    def abort(self, reason: str) -> None:
        """Ends the group: waiting ranks raise DeviceError, at once or after the time-out."""
        self.reason = self.reason or reason

    def settle(self) -> None:
        """Waits until all started messages have arrived.

        Does nothing in groups where Pending itself waits until a message has arrived.
        """
        return

    def require_place(self, in_gpu: bool) -> None:
        """Raises TypeError if the group cannot send arrays from this kind of memory."""
        return

    def agree(self, message: bytes) -> list[bytes]:
        """Exchanges equal-sized messages with all ranks, waits, and returns them by rank."""
        return [x.tobytes() for x in self.gather(np.frombuffer(message, np.uint8))()]

    def gather(self, array: Any) -> Pending:
        """Starts an all-gather of arrays of equal shape; the result is [ranks, …]."""
        whole = new(array, (self.ranks, *array.shape))
        whole[self.rank] = array
        others = self._others
        arrived = self.exchange([(array, s) for s in others], [(whole[s], s) for s in others])

        def wait() -> Any:
            arrived()
            return whole

        return wait

    def reduce_scatter(self, parts: Any) -> Pending:
        """Starts a reduce-scatter of parts [ranks, …], which sums in the order of ranks."""
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

    def close(self) -> None:
        """Ends the group; all ranks must call it.

        Waits for all ranks, so that no rank exits while another rank still needs its messages.
        Raises ValueError if another rank makes a different call. Does nothing if the group has
        ended already.
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
        """Ends the group if the block raises, so that the other ranks do not wait for this one."""
        try:
            yield
        except BaseException as error:
            self.abort_for(error)
            raise

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Like ``agreeing``, but also waits for all messages at the end of the block."""
        with self.agreeing():
            yield
            self.settle()

    def abort_for(self, error: BaseException) -> None:
        self.abort(f"rank {self.rank} raised {type(error).__name__}: {error}")

    def abort_late(self, source: str) -> None:
        """Ends the group because nothing arrived from ``source`` within the time-out."""
        self.abort(
            f"rank {self.rank} waited {self.timeout:g} s for {source}: a rank has died, hangs or "
            "needs a longer timeout"
        )

    def ended(self) -> DeviceError:
        """Returns the error of calls after the group has ended."""
        return DeviceError(
            f"the group of rank {self.rank} has ended: {self.reason}; make a new group"
        )

    def require_alive(self) -> None:
        """Raises DeviceError if the group has ended."""
        if self.reason:
            raise self.ended()


def require_seconds(timeout: Any) -> None:
    """Raises ValueError unless ``timeout`` is a positive number of seconds."""
    if not isinstance(timeout, Real) or not 0 < float(timeout) <= TIMEOUT_MAX:
        raise ValueError(
            f"timeout is {described(timeout)}; pass a number of seconds above 0, at most "
            f"{TIMEOUT_MAX:.0f}"
        )
