"""Groups of processes with one GPU each, which exchange arrays in GPU memory by NCCL."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from cupyfa.distributed.communicator import Group, Message, Pending
from cupyfa.distributed.packing import new
from cupyfa.errors import Unsupported

if TYPE_CHECKING:
    from cupyfa.runtime.cuda.nccl import Nccl

_SPIN = 1e-3  # seconds for which a rank polls before it starts to sleep
_PAUSE = 1e-4
_ABORTING = 5.0  # maximum seconds to wait until NCCL has aborted


class NcclGroup(Group):
    """One process's view of a group of NCCL ranks.

    Messages are queued on a stream, and kernels wait for them on the GPU. A call returns when its
    last message has arrived, so that it can raise if a message is lost; kernels may still be
    running. A watchdog thread ends the group if this process waits for a message or in an NCCL call
    for longer than the time-out. It also ends the group if no queued message arrives for that long,
    because the process may be blocked in a CUDA call.
    """

    def __init__(self, rank: int, ranks: int, timeout: float, engine: Nccl) -> None:
        super().__init__(rank, ranks, timeout)
        self._engine = engine
        self._queued: list[tuple[Any, list[Any]]] = []  # events, and the arrays to keep alive
        self._ending = threading.Lock()
        self._deadline: float | None = None  # when the current wait of this process times out
        self._done = threading.Event()
        self._aborted = threading.Event()
        threading.Thread(target=self._watch, name="cupyfa watchdog", daemon=True).start()

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        self.sent += sum(x.nbytes for x, _ in sends)
        with self._waiting():
            event = self._engine.exchange(sends, recvs)
        return self._pending(event, (sends, recvs), None)

    def gather(self, array: Any) -> Pending:
        whole = new(array, (self.ranks, *array.shape))
        self.sent += array.nbytes * (self.ranks - 1)
        with self._waiting():
            event = self._engine.gather(array, whole)
        return self._pending(event, (array, whole), whole)

    def agree(self, message: bytes) -> list[bytes]:
        self.sent += len(message) * (self.ranks - 1)
        with self._waiting():
            event, read = self._engine.agree(message)
        self._await(event)
        return read()

    def settle(self) -> None:
        with self._waiting():  # raises if the group has ended
            for event, _ in self._queued[:]:
                self._await(event)
            self._queued.clear()

    def require_place(self, in_gpu: bool) -> None:
        if self._engine.is_capturing:
            raise Unsupported(
                "the current stream is being captured as a CUDA graph, but distributed calls wait "
                "for other ranks on the host; make the call outside the capture"
            )
        if not in_gpu:
            raise TypeError(
                "q, k and v are in host memory, but NCCL sends arrays in GPU memory; convert them "
                "with cupy.asarray"
            )

    def abort(self, reason: str) -> None:
        with self._ending:
            if self.reason:
                return
            self.reason = reason
        self._done.set()
        try:
            with suppress(*self._engine.failures):  # abort raises if the GPU has failed
                self._engine.abort()
        finally:
            self._aborted.set()
        self._queued.clear()  # frees the arrays even if the program keeps the group

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._await_abort()

    def abort_for(self, error: BaseException) -> None:
        super().abort_for(error)
        self._await_abort()

    def _await_abort(self) -> None:
        """Waits until NCCL has aborted, since a program that exits meanwhile may crash."""
        self._aborted.wait(_ABORTING)

    def _pending(self, event: Any, arrays: Any, result: Any) -> Pending:
        """Queues an event; keeps its arrays until the compute stream waits for the event.

        After that their memory may be reused, because later work runs after the event in stream
        order.
        """
        kept = [arrays, result]
        self._queued.append((event, kept))

        def wait() -> Any:
            self._engine.follow(event)
            _, result = kept
            kept.clear()
            return result

        return wait

    def _await(self, event: Any) -> None:
        """Waits for an event; raises DeviceError if the group ends meanwhile."""
        begin = monotonic()
        with self._waiting():
            while not event.done:
                self.require_alive()
                if monotonic() - begin > _SPIN:
                    if failure := self._engine.failure():
                        self.abort(f"NCCL of rank {self.rank} failed: {failure}")
                    sleep(_PAUSE)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Sets a deadline for a block that may wait, and turns NCCL errors into DeviceError."""
        self.require_alive()
        self._deadline = monotonic() + self.timeout
        try:
            yield
        except self._engine.failures as error:
            self.abort(f"NCCL of rank {self.rank} failed: {error}")
            raise self.ended() from error
        finally:
            self._deadline = None
        self.require_alive()

    def _watch(self) -> None:
        """Runs the watchdog thread until the group ends; ends the group if the GPU fails."""
        try:
            self._end_if_late()
        except Exception as error:
            self.abort(f"the GPU of rank {self.rank} failed: {error}")

    def _end_if_late(self) -> None:
        self._engine.use()
        oldest, since = None, 0.0  # the oldest pending event, and when it became the oldest
        while not self._done.wait(min(self.timeout / 4, 1)):
            now, deadline, before = monotonic(), self._deadline, oldest
            oldest = next((x for x, _ in self._queued[:] if not x.done), None)
            if oldest is not before:
                since = now
            is_late = deadline is not None and now > deadline
            if is_late or (oldest is not None and now - since > self.timeout):
                self.abort_late("messages of the other ranks")
