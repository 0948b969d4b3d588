"""NumPy arrays to and from the device at the speed of the bus, and problems that do not fit it.

A problem is cut into pieces along batch and key heads. While one piece is computed, the next ones
are on their way to the device and the results of those before are on their way back. A copy that
goes on by itself needs pinned memory, so several threads copy chunks of the caller's arrays to a
few pinned buffers, whatever their strides, and chunks of results out of others; that is also what
touches new memory first, which one thread alone would take longer for than the bus does. Arrays
that are pinned already are read and written where they are.

The device holds a few pieces at a time, so a problem may be larger than its memory. Where a single
head is, its rows are cut too, and its keys: then partial results are merged by their lse.
"""

from __future__ import annotations

import math
import os
import queue
import sys
import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from operator import length_hint
from typing import Any, NamedTuple, cast

import numpy as np

from cupyfa.errors import OutOfMemory
from cupyfa.ladder.kernel import cdiv
from cupyfa.operations import OPERATIONS
from cupyfa.planner import select as planning
from cupyfa.planner.plan import Limits, Plan, aligned_width
from cupyfa.problem import Problem, whole
from cupyfa.runtime.backend import Backend, Lane, Launcher, Mark, allocated, execute

_INLINE = 1 << 18  # bytes that one thread copies sooner than others wake up
_CHUNK_COST = 1 << 17  # bytes that a thread copies in the time that Python takes for a chunk
_POOLED = 1 << 20  # bytes of results that are worth a place of their own in pinned memory
_LEAST = {"pinned_results": 0, "chunk_bytes": 16}  # an element has a place in any chunk
_ALIGNMENT = 512  # bytes, of what CuPy's memory pool hands out
_SPARE = 0.9  # of the memory that is free, what a call may take
_MOST_LAYOUTS = 64  # of pieces, that are kept for a plan
Orders = Mapping[str, tuple[int, ...]]  # of the axes of arrays in memory, outer ones first
Slot = Mapping[str, tuple[Any, int]]  # memory on the device for the arrays of a piece, and where
Move = Callable[..., None]  # one of _send and _bring


@dataclass(frozen=True)
class Transfer:
    """How NumPy arrays are moved: each number, and so the memory that is held, can be chosen.

    threads: that copy to pinned memory, and as many more that copy out of it.
    chunk_bytes: of one buffer, what a thread copies at a time at most. buffers: of each direction;
    made when they are first needed.
    piece_bytes: of all arrays of a piece, as far as that can be chosen. pieces: on the device at a
    time. device_bytes: that a call may take on the device; None is most of what is free.
    pinned_results: bytes of results that may lie in pinned memory at a time, for the device to
    write by itself; it takes results of a size that was asked for before.
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
        """Bytes of pinned memory that buffers may take, both ways together."""
        return 2 * self.buffers * self.chunk_bytes


@dataclass(frozen=True)
class Piece:
    """A part of a problem: ranges of its batch, its key heads, its rows and its keys."""

    batch: range
    kv_heads: range
    rows: range
    keys: range

    def problem(self, whole: Problem) -> Problem:
        return whole.part(len(self.batch), len(self.kv_heads), self.rows, self.keys)

    def of(self, array: np.ndarray, axes: str, group: int) -> np.ndarray:
        """This part of an array with such axes."""
        heads = range(self.kv_heads.start * group, self.kv_heads.stop * group)
        ranges = {"batch": self.batch, "kv_heads": self.kv_heads, "heads": heads}
        ranges |= {"M": self.rows, "N": self.keys}
        index = (ranges.get(axis) for axis in axes.split())
        return array[tuple(slice(r.start, r.stop) if r is not None else slice(None) for r in index)]


_chosen = Transfer()
_hosts: weakref.WeakKeyDictionary[Backend, _Host] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def configure(**changes: Any) -> Transfer:
    """Chooses how NumPy arrays are moved from now on; returns all that is chosen.

    The names are those of ``Transfer``. Buffers that were made otherwise are freed.
    """
    global _chosen
    if unknown := changes.keys() - {x.name for x in fields(Transfer)}:
        known = ", ".join(x.name for x in fields(Transfer))
        raise TypeError(f"{', '.join(sorted(unknown))}: unknown; there are {known}")
    if changes:
        _chosen = replace(_chosen, **changes)
        release()
    return _chosen


def held() -> int:
    """Bytes of pinned memory that buffers and results take now."""
    with _lock:
        return _results.bytes + sum(host.bytes for host in _hosts.values())


def release() -> None:
    """Gives the buffers back to the system; calls that go on keep theirs until they end."""
    with _lock:
        engines = list(_hosts)
        _hosts.clear()  # with them their threads end, once nothing is left to do
        _results.asked.clear()
    for engine in engines:
        engine.trim_pinned()


def fresh(engine: Backend, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Host memory for a result, pinned if it is large and one of its size was asked for before.

    Pinned memory goes back to a pool, for later results, when the caller drops the array.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _POOLED or not _results.admits(size):
        return np.empty(shape, dtype)
    return np.asarray(_Result(engine, size)).view(dtype).reshape(shape)


def compute(
    engine: Backend,
    plan: Plan,
    inputs: Mapping[str, np.ndarray],
    outputs: Mapping[str, np.ndarray],
    progress: Callable[[int, int, str], None] | None = None,
    parts: Parts | None = None,
) -> None:
    """Fills host arrays with what a plan makes of host arrays, in pieces.

    The arrays are [batch, heads, rows, columns] with any strides; outputs that are not given are
    not brought back. Everything is compiled, and the memory taken, before any output is written.
    ``parts`` are those of a call before, of the same plan on the same device.
    Raises OutOfMemory, with what it takes, for a problem of which no piece fits the device.
    """
    host = _host_of(engine)
    size = _needed(plan, plan)
    free = host.chosen.device_bytes or (
        int(_SPARE * engine.free_bytes())
        if size > host.chosen.piece_bytes
        else host.chosen.pieces * size
    )
    parts = parts or Parts(plan, engine.limits)
    pieces = parts.cut(min(host.chosen.piece_bytes, free // 2), free)
    with engine.lanes() as lanes:
        _Call(engine, host, lanes, parts, pieces, inputs, outputs, free).run(progress)


# Pieces


def cut(plan: Plan, limits: Limits, wanted: int, most: int) -> list[Piece]:
    """The pieces of a plan's problem that need as many bytes on the device as wanted, or fewer.

    Only batch and heads are cut for that, and rows where no array is needed for all of them. What
    then needs more than the most bytes is cut along rows and keys, if the outputs allow it.
    """
    p, operation = plan.problem, OPERATIONS[plan.kernel.operation]
    axes_of_outputs = [axes.split() for axes, _ in operation.outputs.values()]
    axes = [x.split() for x in operation.axes_of(p).values()]
    by_rows = all("M" in x for x in axes_of_outputs)
    by_keys = (
        "O" in operation.outputs
        and "lse" in plan.outputs
        and "causal" in (plan.kernel.features if p.is_masked else ("causal",))
    )

    @cache
    def size(b: int, h: int, m: int, n: int) -> int:
        part = p.part(b, h, range(m), range(n))
        return _needed(plan, part_of(plan, limits, part))

    def largest(total: int, fits: Callable[[int], bool]) -> int:
        """As many as fit, at least one; evenly."""
        found = max(bisect_left(range(1, total + 1), True, key=lambda x: not fits(x)), 1)
        return cdiv(total, cdiv(total, found)) if total else 1

    b, h, m, n = p.batch, p.kv_heads, p.M, p.N
    if _needed(plan, plan) > wanted:
        b = largest(b, lambda x: size(x, h, m, n) <= wanted)
        if size(b, h, m, n) > wanted:
            h = largest(h, lambda x: size(b, x, m, n) <= wanted)
        if size(b, h, m, n) > wanted and all("M" in x for x in axes):
            m = largest(m, lambda x: size(b, h, x, n) <= wanted)
    while size(b, h, m, n) > most:
        rows, keys = by_rows and m > 1, by_keys and n > 1
        if not (rows or keys):
            what = "its smallest piece" if by_rows or by_keys else "one head of it"
            raise OutOfMemory(
                f"{plan.kernel.name} on {p}: {what} needs {size(b, h, m, n):,} bytes on the "
                f"device, and {most:,} may be taken; free memory there, or name another kernel"
            )
        if rows and (m * p.group >= n or not keys):
            m = cdiv(m, 2)
        else:
            n = cdiv(n, 2)
    return [
        Piece(*ranges)
        for ranges in product(
            _ranges(p.batch, b), _ranges(p.kv_heads, h), _ranges(p.M, m), _ranges(p.N, n)
        )
    ]


class Parts:
    """What was found out of a plan's pieces, for the next call of any thread."""

    def __init__(self, plan: Plan, limits: Limits) -> None:
        self.plan, self.limits = plan, limits
        self._cut: tuple[int, int, list[Piece]] | None = None  # what was wanted, what it needs
        self._plans: dict[Problem, Plan] = {}
        self._of: dict[Piece, Plan] = {}
        self._prepared: dict[Problem, list[Any]] = {}
        self._layouts: dict[Any, _Layout] = {}

    def cut(self, wanted: int, most: int) -> list[Piece]:
        """``cut``, which is done again only for another wish, or for a head that does not fit."""
        found = self._cut
        if found is None or found[0] != wanted:
            pieces = cut(self.plan, self.limits, wanted, sys.maxsize)
            self._of = {}
            found = self._cut = wanted, _needed(self.plan, self.of(pieces[0])), pieces
        if found[1] <= most:
            return found[2]
        self._of = {}
        return cut(self.plan, self.limits, wanted, most)

    def of(self, piece: Piece) -> Plan:
        """The plan of a piece."""
        if (plan := self._of.get(piece)) is None:
            problem = piece.problem(self.plan.problem)
            if problem not in self._plans:
                self._plans[problem] = part_of(self.plan, self.limits, problem)
            plan = self._of[piece] = self._plans[problem]
        return plan

    def prepared(self, engine: Backend, plan: Plan) -> list[Any]:
        """The kernels of a piece's plan."""
        if plan.problem not in self._prepared:
            self._prepared[plan.problem] = [engine.prepare(launch) for launch in plan.launches]
        return self._prepared[plan.problem]

    def layout(self, piece: Piece, orders: Orders) -> _Layout:
        """How the arrays of a piece lie on the device, by the order of each one's axes there."""
        plan = self.of(piece)
        key = plan.problem, *orders.items()
        if (found := self._layouts.get(key)) is None:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            found = self._layouts[key] = _Layout(plan, orders)
        return found


def part_of(plan: Plan, limits: Limits, problem: Problem) -> Plan:
    """The plan of a part of a plan's problem, with the same constants."""
    if problem == plan.problem:
        return plan
    return planning.plan(plan.kernel, problem, limits, **plan.constants)


def slabs(shape: Sequence[int], most: int) -> Iterator[tuple[slice, ...]]:
    """Parts of a contiguous array, in order: each contiguous, and of at most so many elements."""
    if not math.prod(shape):
        return
    inner = math.prod(shape[1:])
    if inner > most:
        for i in range(shape[0]):
            for rest in slabs(shape[1:], most):
                yield (slice(i, i + 1), *rest)
        return
    step, rest = max(most // inner, 1), tuple(slice(0, n) for n in shape[1:])
    for i in range(0, shape[0], step):
        yield (slice(i, min(i + step, shape[0])), *rest)


def _ranges(total: int, step: int) -> list[range]:
    return [range(i, min(i + step, total)) for i in range(0, total, max(step, 1))] or [range(0)]


def _needed(whole: Plan, part: Plan) -> int:
    """Bytes on the device that a part takes."""
    operation = OPERATIONS[whole.kernel.operation]
    p = part.problem
    arrays = [
        math.prod(_memory_shape(part, name, x.shape(p))) * x.dtype(p).itemsize
        for name, x in operation.inputs_of(p).items()
    ]
    arrays += [
        math.prod(part.stored_shape(name)) * dtype.itemsize
        for name, (_, dtype) in part.outputs.items()
    ]
    return sum(cdiv(x, _ALIGNMENT) * _ALIGNMENT for x in arrays) + part.scratch_bytes


def _memory_shape(plan: Plan, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """That of the memory for an array, whose rows may have columns to spare."""
    if name not in plan.boxed:
        return shape
    return (*shape[:-1], aligned_width(shape[-1], plan.problem.itemsize))


# One call


class _Lying(NamedTuple):
    """How an array of a piece lies in the device's memory."""

    shape: tuple[int, ...]
    dtype: np.dtype
    strides: tuple[int, ...]
    order: tuple[int, ...]  # of its axes in memory, outer ones first
    memory: tuple[int, ...]  # the sizes of those, with columns to spare

    @property
    def bytes(self) -> int:
        return math.prod(self.memory) * self.dtype.itemsize


class _Layout:
    """How the arrays of a piece lie on the device, and the short way to launch its kernels."""

    def __init__(self, plan: Plan, orders: Orders) -> None:
        self.plan = plan
        operation, p = OPERATIONS[plan.kernel.operation], plan.problem
        arrays = {name: (x.shape(p), x.dtype(p)) for name, x in operation.inputs_of(p).items()}
        self.arrays = {
            name: _lying(plan, name, shape, dtype, orders[name])
            for name, (shape, dtype) in {**arrays, **plan.outputs}.items()
        }
        self._launcher: Launcher | None = None
        self._asked = False

    def views(self, engine: Backend, slot: Slot) -> dict[str, Any]:
        """The arrays as a kernel sees them."""
        return {
            name: engine.view(slot[name][0], x.shape, x.dtype, 0, x.strides)
            for name, x in self.arrays.items()
        }

    def launch(self, engine: Backend, prepared: Sequence[Any], slot: Slot) -> None:
        """Launches the kernels on a slot's memory, in the current stream."""
        scratch = {name: allocated(engine, self.plan, name) for name in self.plan.scratch}
        if not self._asked:
            self._launcher = engine.launcher(self.plan, {**self.views(engine, slot), **scratch})
            self._asked = True
        if self._launcher is None:
            execute(engine, self.plan, prepared, {**self.views(engine, slot), **scratch})
            return
        addresses = [slot[name][1] for name in self.arrays]
        addresses += [engine.address(x) for x in scratch.values()]
        self._launcher(addresses, engine.stream)


def _lying(
    plan: Plan, name: str, shape: tuple[int, ...], dtype: np.dtype, order: tuple[int, ...]
) -> _Lying:
    whole = _memory_shape(plan, name, shape)
    memory = tuple(whole[axis] for axis in order)
    strides = [0] * len(shape)
    for at, axis in enumerate(order):
        strides[axis] = dtype.itemsize * math.prod(memory[at + 1 :])
    return _Lying(shape, dtype, tuple(strides), order, memory)


class _Place(NamedTuple):
    """The host's part of an array of a piece, and where it lies on the device."""

    address: int
    host: np.ndarray | None  # with the axes of the memory
    shape: tuple[int, ...]  # of the memory
    pinned: bool

    def slabs(self, most: int) -> Iterator[tuple[np.ndarray, int, tuple[int, ...]]]:
        """Parts of the host's array, and where each lies on the device: address and shape."""
        assert self.host is not None
        size = self.host.itemsize
        steps = [size * math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        for index in slabs(self.shape, max(most // size, 1)):
            offset = sum(part.start * step for part, step in zip(index, steps))
            shape = tuple(part.stop - part.start for part in index)
            yield self.host[index], self.address + offset, shape


class _Call:
    """A problem on its way through the device.

    This thread has the pieces sent, computed and brought back, and sleeps while others copy: so it
    seldom keeps them from Python's one lock.
    """

    def __init__(
        self,
        engine: Backend,
        host: _Host,
        lanes: tuple[Lane, Lane, Lane],
        parts: Parts,
        pieces: Sequence[Piece],
        inputs: Mapping[str, np.ndarray],
        outputs: Mapping[str, np.ndarray],
        most: int,
    ) -> None:
        plan = parts.plan
        self.engine, self.host, self.plan, self.pieces = engine, host, plan, pieces
        self.up, self.work, self.down = lanes
        self.given, self.results = tuple(inputs), dict(outputs)
        self.parts = parts
        operation = OPERATIONS[plan.kernel.operation]
        self.axes = operation.axes_of(plan.problem)
        self.by_keys = len({piece.keys for piece in pieces}) > 1
        self.sums: _Sums | None = None
        there = {name: x for name, x in {**inputs, **outputs}.items() if x.size}
        self.bits = {name: x.view(f"u{x.itemsize}") for name, x in there.items()}
        self.pinned = {name for name, x in there.items() if engine.is_pinned(x)}
        self.orders = {name: self.order(name) for name in self.axes}
        cost = _needed(plan, parts.of(pieces[0]))
        self.count = max(1, min(host.chosen.pieces, len(pieces), most // max(cost, 1)))
        moved = sum(x.nbytes for x in there.values())
        self.threaded = moved > _INLINE
        # The bus waits for the first chunk, and Python's one lock for all: the least of the sum
        # grain + moved / grain * _CHUNK_COST.
        self.grain = min(host.chosen.chunk_bytes, math.isqrt(moved * _CHUNK_COST))
        self.started: list[_Copies] = []

    def order(self, name: str) -> tuple[int, ...]:
        """The axes of an array, outer ones first: on the device as on the host, if they may."""
        axes = tuple(range(len(self.axes[name].split())))
        if name not in self.bits or "strides" not in self.plan.kernel.features or len(axes) != 4:
            return axes
        strides = self.bits[name].strides
        return (*sorted(axes[:-1], key=lambda axis: -abs(strides[axis])), axes[-1])

    def run(self, progress: Callable[[int, int, str], None] | None) -> None:
        pieces, count = self.pieces, self.count
        later = int(count > 1)  # so that what waits for a kernel seldom keeps the bus waiting
        what = f"{self.plan.kernel.name} on {self.plan.problem}"
        slots = [self.memory() for _ in range(count)]
        places: list[dict[str, _Place]] = []
        sent: list[_Copies] = []
        brought: list[_Copies] = []
        computed: list[Mark] = []
        try:
            for i, piece in enumerate(pieces[:count]):
                places.append(self.placed(piece, slots[i]))
                sent.append(self.send(places[i]))
            for piece in pieces:  # while the first ones are on their way
                self.parts.prepared(self.engine, self.parts.of(piece))
            for i, piece in enumerate(pieces):
                sent[i].wait()
                self.work.wait(sent[i].end or self.up.record())
                if i >= count:
                    self.finish(i - count, places, brought)
                    if (end := brought[i - count].end) is not None:
                        self.work.wait(end)
                self.execute(piece, slots[i % count])
                computed.append(self.work.record())
                self.down.wait(computed[i])
                brought.append(self.bring(places[i]))
                next_one = i - later + count
                if count <= next_one < len(pieces):
                    self.up.wait(computed[i - later])
                    places.append(self.placed(pieces[next_one], slots[next_one % count]))
                    sent.append(self.send(places[next_one]))
                if progress is not None:
                    progress(i, len(pieces), what)
            for i in range(max(len(pieces) - count, 0), len(pieces)):
                self.finish(i, places, brought)
            self.down.synchronize()
            if progress is not None:
                progress(len(pieces), len(pieces), what)
        finally:  # nothing may be on its way to memory that is given back
            self.settle()

    def settle(self) -> None:
        """Returns when nothing is on its way any more, which another Ctrl-C has to wait for."""
        try:
            for copies in self.started:
                copies.sleep()
            for lane in (self.up, self.work, self.down):
                lane.synchronize()
        except KeyboardInterrupt:
            self.settle()
            raise

    def memory(self) -> Slot:
        """Memory on the device for the arrays of a piece; the first one is the largest."""
        slot = {}
        with self.work.context:
            for name, lying in self.parts.layout(self.pieces[0], self.orders).arrays.items():
                memory = self.engine.empty((lying.bytes,), np.dtype(np.uint8))
                slot[name] = memory, self.engine.address(memory)
        return slot

    def placed(self, piece: Piece, slot: Slot) -> dict[str, _Place]:
        """The arrays of a piece: what belongs together on the host and on the device."""
        places = {}
        for name, lying in self.parts.layout(piece, self.orders).arrays.items():
            part, pinned = None, name in self.pinned
            if self.by_keys and name in self.plan.outputs:
                part, pinned = np.empty(lying.shape, f"u{lying.dtype.itemsize}"), False
            elif name in self.bits:
                part = piece.of(self.bits[name], self.axes[name], self.plan.problem.group)
            host = None if part is None else part.transpose(lying.order)
            places[name] = _Place(slot[name][1], host, lying.memory, pinned)
        return places

    def send(self, places: Mapping[str, _Place]) -> _Copies:
        return self.moved(self.up, [places[x] for x in self.given], _send)

    def bring(self, places: Mapping[str, _Place]) -> _Copies:
        return self.moved(self.down, [places[x] for x in self.plan.outputs], _bring)

    def moved(self, lane: Lane, places: Sequence[_Place], move: Move) -> _Copies:
        """Starts all copies of a piece in one direction: by themselves, or through buffers."""
        chunks: list[tuple[np.ndarray, int, tuple[int, ...]]] = []
        for place in places:
            host = place.host
            if host is None or not host.size:
                continue
            if place.pinned and host.flags.c_contiguous and host.shape == place.shape:
                there, here = place.address, host.ctypes.data
                to, source = (there, here) if move is _send else (here, there)
                lane.copy(to, source, host.nbytes)
            else:
                chunks.extend(place.slabs(self.grain))
        buffers = self.host.buffers[move]
        if not self.threaded:
            for chunk in chunks:
                move(lane, buffers, *chunk)
            chunks = []
        copies = _Copies(lane, buffers, chunks)
        self.started.append(copies)
        self.host.submit(move, copies)
        return copies

    def execute(self, piece: Piece, slot: Slot) -> None:
        layout = self.parts.layout(piece, self.orders)
        with self.work.context:
            layout.launch(self.engine, self.parts.prepared(self.engine, layout.plan), slot)

    def finish(self, i: int, places: list[dict[str, _Place]], brought: list[_Copies]) -> None:
        """Waits until the results of a piece are there, and adds them up if keys were cut."""
        brought[i].wait()
        if self.by_keys:
            self.down.synchronize()
            arrays = self.parts.layout(self.pieces[i], self.orders).arrays
            parts = {}
            for name in self.plan.outputs:
                host = places[i][name].host
                assert host is not None
                parts[name] = host.transpose(np.argsort(arrays[name].order))
            self.merge(self.pieces[i], parts)
        places[i] = {}

    def merge(self, piece: Piece, parts: Mapping[str, Any]) -> None:
        shape = self.parts.of(piece).outputs
        o, lse = (parts[name].view(shape[name][1]) for name in ("O", "lse"))
        if piece.keys.start == 0:
            self.sums = _Sums(lse.dtype)
        assert self.sums is not None
        self.sums.add(o, lse)
        if piece.keys.stop == self.plan.problem.N:
            for name, total in (("O", self.sums.o), ("lse", self.sums.lse)):
                if name in self.results and self.results[name].size:
                    part = piece.of(self.results[name], self.axes[name], self.plan.problem.group)
                    part[...] = total


class _Sums:
    """Outputs of parts of the keys, merged: each counts by exp of its lse."""

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.o: Any = None
        self.lse: Any = None

    def add(self, o: np.ndarray, lse: np.ndarray) -> None:
        o = o.astype(self.dtype)
        if self.o is None:
            self.o, self.lse = o, lse
            return
        with np.errstate(all="ignore"):  # rows that see no key are -inf, and NaN is data
            total = np.logaddexp(self.lse, lse)
            mine, its = (
                np.where(np.isneginf(total), 0, np.exp(x - total))[..., None]
                for x in (self.lse, lse)
            )
            self.o, self.lse = self.o * mine + o * its, total


class _Copies:
    """The copies of a piece in one direction: so many that threads start.

    What threads copy from a buffer in the end they have done when they count it. ``end`` is where
    copies end in their lane that no thread has a part in. ``tasks`` are those that no thread was
    given yet: all of them, or none.
    """

    def __init__(self, lane: Lane, buffers: _Buffers, chunks: Sequence[tuple[Any, ...]]) -> None:
        self.end = None if chunks else lane.record()
        self.tasks = iter([(self, lane, buffers, *chunk) for chunk in chunks])
        self._left, self._error = len(chunks), cast(BaseException | None, None)
        self._lock, self._all = threading.Lock(), threading.Lock()
        if chunks:
            self._all.acquire()

    def count(self, error: BaseException | None) -> None:
        """One more is started, or went wrong."""
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if not self._left:
                self._all.release()

    def sleep(self) -> None:
        """Returns when all are started that threads were given."""
        if not length_hint(self.tasks):
            with self._all:
                return

    def wait(self) -> None:
        """Returns when all are started; raises what went wrong."""
        self.sleep()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # which holds this frame, and with it the call, its threads and arrays


# Buffers


class _Buffer:
    def __init__(self, memory: np.ndarray) -> None:
        self.memory, self.address = memory, memory.ctypes.data
        self.mark: Mark | None = None  # of the last copy to it or out of it
        self.sent = False  # whether that may go on

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return np.ndarray(shape, dtype, self.memory)

    @property
    def is_free(self) -> bool:
        return not self.sent or self.mark is None or self.mark.done

    def copied(self, lane: Lane) -> None:
        """A copy to it or out of it was started."""
        self.mark, self.sent = lane.mark(self.mark), True

    def wait(self) -> None:
        if self.sent and self.mark is not None:
            self.mark.wait()
        self.sent = False


class _Buffers:
    """The pinned buffers of one direction: the one that was free last is taken first, for its
    memory may still be in the processor's caches."""

    def __init__(self, engine: Backend, chosen: Transfer) -> None:
        self._engine, self._size, self._most = (
            weakref.ref(engine),
            chosen.chunk_bytes,
            chosen.buffers,
        )
        self._busy: deque[_Buffer] = deque()  # with a copy that was still on its way out of each
        self._free: list[_Buffer] = []
        self._lock = threading.Lock()  # which Ctrl-C finds held by nobody, unlike a Condition
        self._given, self.made = threading.Condition(self._lock), 0

    def take(self) -> _Buffer:
        """A buffer that nothing is on its way out of."""
        with self._lock:
            while not self._busy and not self._free and self.made == self._most:
                self._given.wait()
            while self._busy and self._busy[0].is_free:
                self._free.append(self._busy.popleft())
            if self._free:
                return self._free.pop()
            if make := self.made < self._most:
                self.made += 1
            else:
                buffer = self._busy.popleft()
        if make:
            return self._new()
        try:
            buffer.wait()
        except BaseException:
            self.give(buffer)
            raise
        return buffer

    def give(self, buffer: _Buffer) -> None:
        with self._lock:
            self._busy.append(buffer)
            self._given.notify()

    def _new(self) -> _Buffer:
        engine = self._engine()
        assert engine is not None
        try:
            return _Buffer(engine.pinned(self._size))
        except BaseException:
            with self._lock:
                self.made -= 1
                self._given.notify()  # who waits may make one, or fail as well
            raise


def _send(
    lane: Lane, buffers: _Buffers, source: np.ndarray, address: int, shape: tuple[int, ...]
) -> None:
    """Copies a part of an array to a buffer, and starts the copy from there to the device."""
    lane.enter()
    buffer = buffers.take()
    try:
        there = buffer.array(shape, source.dtype)
        np.copyto(there[..., : source.shape[-1]], source)
        lane.copy(address, buffer.address, there.nbytes)
        buffer.copied(lane)
    finally:
        buffers.give(buffer)


def _bring(
    lane: Lane, buffers: _Buffers, target: np.ndarray, address: int, shape: tuple[int, ...]
) -> None:
    """Copies a part of a result to a buffer, and from there to where the caller has it."""
    lane.enter()
    buffer = buffers.take()
    try:
        here = buffer.array(shape, target.dtype)
        lane.copy(buffer.address, address, here.nbytes)
        buffer.copied(lane)
        buffer.wait()
        np.copyto(target, here[..., : target.shape[-1]])
    finally:
        buffers.give(buffer)


class _Host:
    """The buffers and threads of a backend."""

    def __init__(self, engine: Backend, chosen: Transfer) -> None:
        self.chosen = chosen
        self.buffers = {move: _Buffers(engine, chosen) for move in (_send, _bring)}
        self._tasks: dict[Move, queue.SimpleQueue] = {}
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        return sum(x.made for x in self.buffers.values()) * self.chosen.chunk_bytes

    def submit(self, move: Move, copies: _Copies) -> None:
        """Has threads make copies."""
        if not length_hint(copies.tasks):
            return
        if move not in self._tasks:
            with self._lock:
                if move not in self._tasks:
                    self._tasks[move] = self._crew(move)
        # Not in Python's steps, between which Ctrl-C comes: it finds all tasks given, or none.
        deque(map(self._tasks[move].put, copies.tasks), maxlen=0)

    def _crew(self, move: Move) -> queue.SimpleQueue:
        """The tasks of new threads, which know nothing but these."""
        tasks: queue.SimpleQueue = queue.SimpleQueue()
        for i in range(self.chosen.threads):
            name = f"cupyfa{move.__name__}_{i}"
            threading.Thread(target=_serve, args=(move, tasks), name=name, daemon=True).start()
        return tasks

    def __del__(self) -> None:
        for tasks in self._tasks.values():
            for _ in range(self.chosen.threads):
                tasks.put(None)  # after what is still to be done


def _serve(move: Move, tasks: queue.SimpleQueue) -> None:
    """Makes copies, until there are to be no more."""
    while (task := tasks.get()) is not None:
        copies, *arguments = task
        error = None
        try:
            move(*arguments)
        except BaseException as caught:
            error = caught
        copies.count(error)
        del task, copies, arguments, error  # which hold the caller's arrays


def _host_of(engine: Backend) -> _Host:
    with _lock:
        if engine not in _hosts:
            _hosts[engine] = _Host(engine, _chosen)
        return _hosts[engine]


class _Results:
    """How many bytes of results lie in pinned memory, and which sizes were asked for."""

    def __init__(self) -> None:
        # One that the same thread may take again, for a result may be dropped at any time.
        self.bytes, self.asked, self._lock = 0, set[int](), threading.RLock()

    def admits(self, size: int) -> bool:
        """Whether a result of this size may be pinned, and counts it; remembers that there was one.

        CuPy's pool takes a power of two for it.
        """
        taken = _pooled(size)
        with self._lock:
            before = size in self.asked
            self.asked.add(size)
            admitted = before and self.bytes + taken <= _chosen.pinned_results
            self.bytes += taken if admitted else 0
            return admitted

    def drop(self, size: int) -> None:
        """One is no more."""
        with self._lock:
            self.bytes -= _pooled(size)


_results = _Results()


class _Result:
    """Pinned memory that an array lies in; what NumPy keeps as the array's base."""

    def __init__(self, engine: Backend, size: int) -> None:
        self._size = size  # first of all: what was admitted is dropped, come what may
        self._memory = engine.pinned(size)
        self.__array_interface__ = self._memory.__array_interface__

    def __del__(self) -> None:
        _results.drop(self._size)


def _pooled(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 0
