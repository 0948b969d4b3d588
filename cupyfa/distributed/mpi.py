"""Ranks that are MPI processes and send each other NumPy arrays, by mpi4py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any

from cupyfa.distributed.communicator import Group, Message, Pending, ended, waited

_PAUSE = 1e-4
# Requests that are not done, and their arrays: MPI may write there, also after the group has ended.
_unfinished: dict[object, tuple[list[Any], Any]] = {}


class MpiGroup(Group):
    """The group as one process sees it. communicator: of mpi4py, with these ranks alone."""

    def __init__(self, communicator: Any, timeout: float) -> None:
        super().__init__(communicator.Get_rank(), communicator.Get_size(), timeout)
        self._reason = ""
        # A communicator of its own: messages of the program's others do not mix with these.
        self._mpi, made = communicator.Idup()
        self._pending([made], self._mpi)()

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        self._require_alive()
        self.sent += sum(x.nbytes for x, _ in sends)
        # MPI keeps the order of the messages from one rank to another.
        requests = [self._mpi.Irecv(_bytes(x), source) for x, source in recvs]
        requests += [self._mpi.Isend(_bytes(x), to) for x, to in sends]
        return self._pending(requests, (sends, recvs))

    def agree(self, message: bytes) -> list[bytes]:
        self._require_alive()
        self.sent += len(message) * (self.ranks - 1)
        whole = bytearray(len(message) * self.ranks)
        self._pending([self._mpi.Iallgather(message, whole)], (message, whole))()
        return [
            bytes(whole[first : first + len(message)])
            for first in range(0, len(whole), len(message))
        ]

    def require_place(self, in_gpu: bool) -> None:
        if in_gpu:
            raise TypeError(
                "arrays lie in GPU memory, and this group sends NumPy arrays by MPI: make it with "
                'group(over="nccl")'
            )

    @property
    def reason(self) -> str:
        return self._reason

    def close(self) -> None:
        has_ended = bool(self._reason)
        super().close()
        if not has_ended:
            self._mpi.Free()  # all ranks have agreed to close

    def abort(self, reason: str) -> None:
        self._reason = self._reason or reason

    def _pending(self, requests: list[Any], arrays: Any) -> Pending:
        key = object()
        _unfinished[key] = requests, arrays

        def wait() -> None:
            self._await(lambda: all(x.Test() for x in requests))
            del _unfinished[key]

        return wait

    def _require_alive(self) -> None:
        if self._reason:
            raise ended(self.rank, self._reason)

    def _await(self, is_done: Callable[[], bool]) -> None:
        deadline = monotonic() + self.timeout
        while not is_done():
            if self._reason or monotonic() > deadline:
                self.abort(waited(self.rank, self.timeout, "messages of the other ranks"))
                raise ended(self.rank, self._reason)
            sleep(_PAUSE)


def _bytes(array: Any) -> Any:
    """A contiguous array as MPI takes it, whatever its dtype."""
    return array.reshape(-1).view("u1") if array.size else bytearray()
