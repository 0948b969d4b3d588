"""Page-locked host memory, and the threads that copy arrays through it in chunks."""

from __future__ import annotations

import math
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import length_hint
from typing import Any, cast

import numpy as np

from cupyfa.problem.problem import whole
from cupyfa.runtime.backend import Backend, Lane, Mark

_POOLED = 1 << 20  # bytes; smaller results are not page-locked
_LEAST = {"pinned_results": 0, "chunk_bytes": 16}  # a chunk must hold one element of any dtype
Move = Callable[..., None]  # the function ``send`` or ``bring``


@dataclass(frozen=True)
class Transfer:
    """Settings for copies of NumPy arrays to and from the GPU, and for the memory that they use.

    Each device has its own threads and buffers.

    threads: number of threads that copy into page-locked memory, and of threads that copy out of
        it; by default one per core, at most 12.
    chunk_bytes: size of one buffer, the most that a thread copies at a time.
    buffers: number of buffers per direction; each is allocated when it is first needed.
    piece_bytes: target size of a piece, without arrays that several pieces share.
    pieces: number of pieces on the device at a time.
    device_bytes: device memory that a call may use; by default (None) most of the free memory.
    pinned_results: bytes of a device's results that may be in page-locked memory at a time, where
        the device writes them directly. Only results of a size that was requested before use it.
    """

    threads: int = min(12, len(os.sched_getaffinity(0)))
    chunk_bytes: int = 8 << 20
    buffers: int = 12
    piece_bytes: int = 33 << 20
    pieces: int = 6
    device_bytes: int | None = None
    pinned_results: int = 1 << 30

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None or name != "device_bytes":
                whole(name, value, _LEAST.get(name, 1))

    @property
    def most_held(self) -> int:
        """Maximum bytes of page-locked memory for a device's buffers, in both directions."""
        return 2 * self.buffers * self.chunk_bytes


_settings = Transfer()  # used by all calls from now on
_lock = threading.Lock()
# One Host per device, so that no device waits for the copies of another.
hosts: weakref.WeakKeyDictionary[Backend, dict[int, Host]] = weakref.WeakKeyDictionary()
_results: weakref.WeakSet[_Result] = weakref.WeakSet()
_sizes: set[int] = set()  # sizes in bytes of the results requested so far


def configure(**changes: Any) -> Transfer:
    """Sets how NumPy arrays are copied to and from the GPU, from the next call on.

    Names are the fields of ``Transfer``. Returns all settings. Raises TypeError for unknown names
    and ValueError for invalid values. Buffers that were allocated with other settings are freed.
    """
    global _settings
    if unknown := changes.keys() - vars(_settings).keys():
        known = ", ".join(vars(_settings))
        raise TypeError(f"unknown settings {', '.join(sorted(unknown))}; the settings are {known}")
    if changes:
        _settings = replace(_settings, **changes)
        release()
    return _settings


def held() -> int:
    """Returns the bytes of page-locked memory in use for NumPy arrays: buffers and live results.

    Buffers use up to ``configure().most_held`` bytes per device. Buffers that calls of other
    threads still use after ``release`` are not counted.
    """
    with _lock:
        of_devices = [host.bytes for each in hosts.values() for host in each.values()]
        return sum(x.bytes for x in _results) + sum(of_devices)


def release() -> None:
    """Frees the page-locked memory of buffers and of results that no longer exist.

    Calls in other threads continue; the next call allocates buffers again.
    """
    with _lock:
        backends = list(hosts)
        hosts.clear()  # their threads end after the tasks that are already queued
        _sizes.clear()
    for backend in backends:
        backend.trim_pinned()


class _Result:
    """Page-locked memory of a result; NumPy keeps it alive as the array's base."""

    def __init__(self, size: int, device: int | None) -> None:
        self.bytes = 1 << (size - 1).bit_length()  # CuPy's pool rounds up to a power of two
        self.device = device

    def allocated(self, backend: Backend, size: int) -> np.ndarray:
        self._memory = backend.pinned(size)
        self.__array_interface__ = self._memory.__array_interface__
        return np.asarray(self)


def new_result(backend: Backend, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Allocates a host result, page-locked if it is large and its size was requested before.

    Page-locked memory returns to a pool, for later results, when the caller drops the array.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _POOLED:
        return np.empty(shape, dtype)
    with _lock:  # count the result before its allocation, because other threads may allocate
        result = _Result(size, backend.device)
        taken = sum(x.bytes for x in _results if x.device == result.device)
        admitted = size in _sizes and taken + result.bytes <= _settings.pinned_results
        _sizes.add(size)
        if admitted:
            _results.add(result)
    if not admitted:
        return np.empty(shape, dtype)
    return result.allocated(backend, size).view(dtype).reshape(shape)


class _Buffer:
    memory: np.ndarray | None = None
    address = 0
    mark: Mark | None = None  # recorded after the last copy to or from the buffer

    def allocate(self, backend: Backend, size: int) -> None:
        self.memory = backend.pinned(size)
        self.address = self.memory.ctypes.data

    def copied(self, lane: Lane) -> None:
        """Records a mark after a copy to or from the buffer."""
        self.mark = lane.mark(self.mark)

    def wait(self) -> None:
        if self.mark is not None:
            self.mark.wait()


class Buffers:
    """The page-locked buffers for copies in one direction.

    The buffer that became free last is taken first: its memory may still be in the caches.
    """

    def __init__(self, backend: Backend, chosen: Transfer) -> None:
        self._backend, self._size = weakref.ref(backend), chosen.chunk_bytes
        self._busy: deque[_Buffer] = deque()  # each with a copy in progress
        self._all = [_Buffer() for _ in range(chosen.buffers)]
        self._free = list(self._all)
        self._lock = threading.Lock()  # unlike a Condition, never left locked by Ctrl-C
        self._given = threading.Condition(self._lock)

    @property
    def made(self) -> int:
        return sum(x.memory is not None for x in self._all)

    def take(self) -> _Buffer:
        """Returns a buffer without a copy in progress; allocates its memory on first use."""
        with self._lock:
            while not self._busy and not self._free:
                self._given.wait()
            while self._busy and ((mark := self._busy[0].mark) is None or mark.done):
                self._free.append(self._busy.popleft())
            is_free = bool(self._free)
            buffer = self._free.pop() if is_free else self._busy.popleft()
        try:
            if not is_free:
                buffer.wait()
            if buffer.memory is None:
                backend = self._backend()
                assert backend is not None
                buffer.allocate(backend, self._size)
        except BaseException:
            self.give(buffer)
            raise
        return buffer

    def give(self, buffer: _Buffer) -> None:
        with self._lock:
            self._busy.append(buffer)
            self._given.notify()


def send(
    lane: Lane, buffers: Buffers, source: np.ndarray, address: int, shape: tuple[int, ...]
) -> None:
    """Copies a part of an array to a buffer, and starts the copy from there to the device."""
    lane.enter()
    buffer = buffers.take()
    try:
        there = np.ndarray(shape, source.dtype, buffer.memory)
        np.copyto(there[..., : source.shape[-1]], source)
        lane.copy(address, buffer.address, there.nbytes)
        buffer.copied(lane)
    finally:
        buffers.give(buffer)


def bring(
    lane: Lane, buffers: Buffers, target: np.ndarray, address: int, shape: tuple[int, ...]
) -> None:
    """Copies a part of a result from the device to a buffer, and from there to the result array."""
    lane.enter()
    buffer = buffers.take()
    try:
        here = np.ndarray(shape, target.dtype, buffer.memory)
        lane.copy(buffer.address, address, here.nbytes)
        buffer.copied(lane)
        buffer.wait()
        np.copyto(target, here[..., : target.shape[-1]])
    finally:
        buffers.give(buffer)


class Copies:
    """The copies of a piece in one direction, most of which are made by threads.

    ``tasks`` are copies that are not yet submitted to threads. ``end`` is a mark after the
    last copy, or None if threads copy.
    """

    def __init__(self, lane: Lane, buffers: Buffers, chunks: Sequence[tuple[Any, ...]]) -> None:
        self.end = None if chunks else lane.record()
        self.tasks = iter([(self, lane, buffers, *chunk) for chunk in chunks])
        self._left, self._error = len(chunks), cast(BaseException | None, None)
        self._lock, self._all = threading.Lock(), threading.Lock()
        if chunks:
            self._all.acquire()

    def count(self, error: BaseException | None) -> None:
        """Records that a thread has finished a task, and the error if the task failed."""
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if not self._left:
                self._all.release()

    def sleep(self) -> None:
        """Waits until threads have finished all submitted tasks."""
        if not length_hint(self.tasks):
            with self._all:
                return

    def wait(self) -> None:
        """Waits until all tasks are finished; raises the error of a task that failed."""
        self.sleep()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame, and so to the call's arrays


class Host:
    """A device's buffers, and the threads that copy into them and out of them."""

    def __init__(self, backend: Backend, chosen: Transfer) -> None:
        self.chosen, self.device = chosen, backend.device
        self.buffers = {move: Buffers(backend, chosen) for move in (send, bring)}
        self._tasks: dict[Move, queue.SimpleQueue] = {}
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        return sum(x.made for x in self.buffers.values()) * self.chosen.chunk_bytes

    def submit(self, move: Move, copies: Copies) -> None:
        if not length_hint(copies.tasks):
            return
        with self._lock:
            if move not in self._tasks:
                tasks: queue.SimpleQueue = queue.SimpleQueue()
                # The threads hold no reference to this Host, so that it can be deleted.
                for i in range(self.chosen.threads):
                    name = f"cupyfa_{move.__name__}_{self.device}_{i}"
                    threading.Thread(
                        target=_serve, args=(move, tasks), name=name, daemon=True
                    ).start()
                self._tasks[move] = tasks
        # Runs in one step of the interpreter, so that Ctrl-C finds all tasks submitted or none.
        deque(map(self._tasks[move].put, copies.tasks), maxlen=0)

    def __del__(self) -> None:
        for tasks in self._tasks.values():
            for _ in range(self.chosen.threads):
                tasks.put(None)  # ends one thread, after the remaining tasks


def _serve(move: Move, tasks: queue.SimpleQueue) -> None:
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
    """Returns the Host of the current device; creates it on first use."""
    device = backend.device
    with _lock:
        of_devices = hosts.setdefault(backend, {})
        if device not in of_devices:
            of_devices[device] = Host(backend, _settings)
        return of_devices[device]
