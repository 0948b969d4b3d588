"""NCCL communication between processes with one GPU each."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import cupy
import numpy as np

_REMEDY = 'pip install "nvidia-nccl-cu12>=2.18.1,<3", or with CUDA 13 nvidia-nccl-cu13'
# With this priority, communication begins before kernels that are queued at the same time.
_HIGHEST_PRIORITY = -5  # a device uses the nearest priority that it supports


@cache
def library() -> Any:
    """Returns CuPy's NCCL module. Raises ImportError if NCCL is not installed."""
    # NVLink multicast, which NCCL enables by default, needs the host's fabric manager; on shared
    # hosts, a process that crashes can break it for all others.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with warnings.catch_warnings(action="ignore"):
        from cupy.cuda import nccl
    if not nccl.available:
        raise ImportError(f"NCCL is not installed: {_REMEDY}")
    return nccl


def unique_id() -> bytes:
    """Creates a communicator's 128-byte id. Only rank 0 calls this; its process must stay alive."""
    return bytes(library().get_unique_id())


class Nccl:
    """A rank of a communicator, on the current device, with its own stream.

    The constructor waits for all ranks and connects all pairs.
    """

    def __init__(self, rank: int, ranks: int, name: bytes) -> None:
        self._nccl = library()
        self._ranks = ranks
        self._device = cupy.cuda.Device()
        self._stream = cupy.cuda.Stream(non_blocking=True, priority=_HIGHEST_PRIORITY)
        self._communicator = self._nccl.NcclCommunicator(ranks, name, rank)
        self._connect(rank)

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """The exceptions of NCCL and CUDA; a call may report the failure of an earlier kernel."""
        return (self._nccl.NcclError, cupy.cuda.runtime.CUDARuntimeError)

    @property
    def is_capturing(self) -> bool:
        """Whether the work of the current stream is captured as a CUDA graph."""
        return bool(cupy.cuda.get_current_stream().is_capturing())

    def exchange(self, sends: Sequence[tuple[Any, int]], recvs: Sequence[tuple[Any, int]]) -> Any:
        """Queues messages (contiguous array, rank); returns an event recorded after them."""
        self._follow_computation()
        uint8 = self._nccl.NCCL_UINT8
        self._nccl.groupStart()  # outside a group, a send may block until its recv is queued
        try:
            for x, peer in sends:
                if x.nbytes:
                    self._communicator.send(x.data.ptr, x.nbytes, uint8, peer, self._stream.ptr)
            for x, peer in recvs:
                if x.nbytes:
                    self._communicator.recv(x.data.ptr, x.nbytes, uint8, peer, self._stream.ptr)
        finally:
            self._nccl.groupEnd()
        return self._event()

    def gather(self, array: Any, into: Any) -> Any:
        """Queues an all-gather into [ranks, …]; returns an event recorded after it."""
        self._follow_computation()
        if array.nbytes:
            self._gather(array, into)
        return self._event()

    def agree(self, message: bytes) -> tuple[Any, Callable[[], list[bytes]]]:
        """Queues an all-gather of messages; returns an event, and a function that reads them."""
        with self._stream:
            own = cupy.asarray(np.frombuffer(message, np.uint8))
            whole = cupy.empty((self._ranks, len(message)), np.uint8)
        self._gather(own, whole)

        def read() -> list[bytes]:
            return [x.tobytes() for x in whole.get(stream=self._stream)]

        return self._event(), read

    def follow(self, event: Any) -> None:
        """Makes work queued in the current stream from now on wait for an event."""
        cupy.cuda.get_current_stream().wait_event(event)

    def use(self) -> None:
        """Makes the device current in the calling thread, so that it can query events."""
        self._device.use()

    def failure(self) -> str:
        """Returns the asynchronous error that NCCL has detected, or ""."""
        try:
            self._communicator.check_async_error()
        except self.failures as error:
            return str(error)
        return ""

    def abort(self) -> None:
        """Aborts all queued operations, even while another thread waits in a call."""
        self._communicator.abort()

    def _gather(self, array: Any, into: Any) -> None:
        self._communicator.allGather(
            array.data.ptr, into.data.ptr, array.nbytes, self._nccl.NCCL_UINT8, self._stream.ptr
        )

    def _connect(self, rank: int) -> None:
        """Connects all ranks by exchanging first messages, which is slow and may block."""
        room = cupy.zeros((2, self._ranks), np.uint8)
        others = [x for x in range(self._ranks) if x != rank]
        sends, recvs = ([(row[x : x + 1], x) for x in others] for row in room)
        self.exchange(sends, recvs)
        self.gather(room[0, :1], room[1])
        self._stream.synchronize()

    def _follow_computation(self) -> None:
        """Makes messages queued from now on wait for work in the current stream."""
        event = cupy.cuda.Event(disable_timing=True)
        event.record(cupy.cuda.get_current_stream())
        self._stream.wait_event(event)

    def _event(self) -> Any:
        event = cupy.cuda.Event(disable_timing=True)
        event.record(self._stream)
        return event
