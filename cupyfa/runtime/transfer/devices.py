"""One problem on several devices: a thread for each starts its copies and kernels."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping

import numpy as np

from cupyfa.errors import DeviceError
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.environment import Progress
from cupyfa.runtime.transfer.call import Call, piece_bytes, room, starts_of
from cupyfa.runtime.transfer.host import host_of
from cupyfa.runtime.transfer.pieces import Pieces
from cupyfa.runtime.transfer.shares import Share, shares

Arrays = Mapping[str, np.ndarray]


def spread(
    backend: Backend,
    pieces: Pieces,
    inputs: Arrays,
    outputs: Arrays,
    devices: tuple[int, ...],
    progress: Progress | None,
) -> None:
    """Fills host arrays with what a plan computes from host arrays, each device a share of it.

    An error on one device ends the work of all. No thread uses the arrays any more when this
    returns or raises.
    """
    chosen = host_of(backend).chosen
    rooms = []
    for device in devices:
        with backend.on(device):
            rooms.append(room(backend, chosen, pieces.bytes))
    free, starts = min(rooms), starts_of(inputs)
    made = shares(pieces, devices, piece_bytes(chosen, free), free, starts)
    _Spread(backend, dict(zip(devices, made)), inputs, outputs, free).run(progress)


class _Stopped(Exception):
    """Ends the work of a device after an error elsewhere."""


class _Spread:
    """The threads of one call; the calling thread sleeps, and reports progress."""

    def __init__(
        self,
        backend: Backend,
        shares: Mapping[int, Share],
        inputs: Arrays,
        outputs: Arrays,
        free: int,
    ) -> None:
        self._backend, self._shares = backend, shares
        self._inputs, self._outputs, self._free = inputs, outputs, free
        self._lock = threading.Lock()
        self._at_work: set[int] = set()  # devices
        self._is_stopped = False
        self._error: BaseException | None = None  # the first one
        # What threads report: a device's progress, or None at its end.
        self._events: queue.SimpleQueue[tuple[int, int, str] | None] = queue.SimpleQueue()

    def run(self, progress: Progress | None) -> None:
        try:
            for device in self._shares:
                with self._backend.on(device):
                    host_of(self._backend).callers.submit(self._serve, device)
            self._listen(progress)
        finally:
            self._settle()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # it refers to this frame, and so to the arrays

    def _listen(self, progress: Progress | None) -> None:
        """Returns when all threads have ended; reports the sum of their progress."""
        left, told = len(self._shares), -1
        done = dict.fromkeys(self._shares, 0)
        total = sum(len(x.pieces.pieces) for x in self._shares.values())
        while left:
            event = self._events.get()
            if event is None:
                left -= 1
                continue
            device, done[device], what = event
            if progress is not None and (now := sum(done.values())) > told:
                told = now
                progress(now, total, what)

    def _settle(self) -> None:
        """Returns when no thread is at work and none can begin, even if Ctrl-C comes again."""
        try:
            while True:
                with self._lock:
                    self._is_stopped = True
                    if not self._at_work:
                        return
                self._events.get()
        except KeyboardInterrupt:
            self._settle()
            raise

    # In the threads

    def _serve(self, device: int) -> None:
        with self._lock:
            if not self._is_stopped:
                self._at_work.add(device)
        try:
            if device in self._at_work:
                self._compute(device)
        except BaseException as error:
            self._fail(device, error)
        finally:
            with self._lock:
                self._at_work.discard(device)
            self._events.put(None)

    def _compute(self, device: int) -> None:
        def report(done: int, total: int, what: str) -> None:
            if self._is_stopped:
                raise _Stopped
            self._events.put((device, done, what))

        backend = self._backend
        backend.use(device)
        with backend.working_on(None), backend.lanes() as lanes:
            share = self._shares[device]
            Call(backend, lanes, share, self._inputs, self._outputs, self._free).run(report)

    def _fail(self, device: int, error: BaseException) -> None:
        if isinstance(error, DeviceError):
            error.args = (f"device {device}: {error}",)
        with self._lock:
            self._is_stopped = True
            if self._error is None and not isinstance(error, _Stopped):
                self._error = error
