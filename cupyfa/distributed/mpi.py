"""Groups of MPI processes, which exchange NumPy arrays by mpi4py."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic, sleep
from typing import Any

from cupyfa.distributed.communicator import Group, Message, Pending

_PAUSE = 1e-4
# Pending requests, with their arrays kept alive: MPI may write even after the group has ended.
_unfinished: dict[object, tuple[list[Any], Any]] = {}


class MpiGroup(Group):
    """One process's view of a group of MPI ranks. communicator: an mpi4py Comm of all ranks."""

    def __init__(self, communicator: Any, timeout: float) -> None:
        super().__init__(communicator.Get_rank(), communicator.Get_size(), timeout)
        # Duplicate the communicator to keep the group's messages apart from the program's own.
        self._mpi, made = communicator.Idup()
        self._pending([made], self._mpi)()

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        self.require_alive()
        self.sent += sum(x.nbytes for x, _ in sends)
        # No tags: MPI delivers the messages between two ranks in order.
        requests = [self._mpi.Irecv(_bytes(x), source) for x, source in recvs]
        requests += [self._mpi.Isend(_bytes(x), to) for x, to in sends]
        return self._pending(requests, (sends, recvs))

    def require_place(self, in_gpu: bool) -> None:
        if in_gpu:
            raise TypeError(
                "q, k and v are in GPU memory, but this group sends NumPy arrays by MPI; use "
                'group(over="nccl")'
            )

    def close(self) -> None:
        has_ended = bool(self.reason)
        super().close()
        if not has_ended:
            self._mpi.Free()  # collective: safe because all ranks have agreed to close

    def _pending(self, requests: list[Any], arrays: Any) -> Pending:
        key = object()
        _unfinished[key] = requests, arrays

        def wait() -> None:
            deadline = monotonic() + self.timeout
            while not all(x.Test() for x in requests):
                if not self.reason and monotonic() > deadline:
                    self.abort_late("messages of the other ranks")
                self.require_alive()
                sleep(_PAUSE)
            del _unfinished[key]

        return wait


def _bytes(array: Any) -> Any:
    """Views a contiguous array as bytes, because MPI does not support all dtypes."""
    return array.reshape(-1).view("u1") if array.size else bytearray()
