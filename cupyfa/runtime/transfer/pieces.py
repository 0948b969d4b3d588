"""Cuts problems into pieces, lays out their arrays in device memory, and launches their kernels."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np

from cupyfa.errors import OutOfMemory
from cupyfa.ladder.kernel import cdiv
from cupyfa.planner.plan import Plan
from cupyfa.problem.optional_inputs import STARTS
from cupyfa.problem.problem import Problem, can_give, round_up
from cupyfa.runtime.arrays import contiguous_strides
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.launcher import Launcher, compile_kernels
from cupyfa.runtime.workspace import allocate

_ALIGNMENT = 512  # bytes; alignment of memory from CuPy's pool
_MOST_LAYOUTS = 64  # maximum number of layouts kept for a cut
_MOST_PARTS = 64  # maximum number of plans for parts that are kept for a plan
TFLOPS = 100  # assumed speed of a kernel that was not measured
BUS = 50e9  # assumed bandwidth to a device, in bytes per second
_SHOWS = 0.25  # kernels that take a smaller fraction of the copies' time do not affect the cut
_LARGER = 4  # a piece may exceed the wanted bytes by this factor to keep a device busy
_LEAST_TILES = 512  # row tiles that keep a device busy, in a piece that is cut along rows
_LEAST_RUN = 1 << 18  # bytes; shorter runs are copied through a buffer
_FEWER = "call it for fewer batch elements or heads"
Orders = Mapping[str, tuple[int, ...]]  # each array's axes in memory order, outermost first
Slot = Mapping[str, Any]  # device memory for the arrays of a piece
Planner = Callable[[Problem], Plan]  # plans a part of a problem, with the same constants
Starts = Sequence[np.ndarray]  # offsets of packed queries and keys


@dataclass(frozen=True)
class Piece:
    """A part of a problem: a range of batch elements, key heads, rows and keys."""

    batch: range
    kv_heads: range
    rows: range
    keys: range

    def problem(self, whole: Problem) -> Problem:
        return whole.part(len(self.batch), len(self.kv_heads), self.rows, self.keys)

    def of(self, array: np.ndarray, axes: Sequence[str], group: int) -> np.ndarray:
        """Returns this piece's part of an array with these axes."""
        return array[self.index(axes, group)]

    def index(self, axes: Sequence[str], group: int) -> tuple[slice, ...]:
        """Returns the slices of an array with these axes that select this piece's part."""
        ranges = self.ranges(group)
        index = [ranges.get(axis) for axis in axes]
        return tuple(slice(None) if r is None else slice(r.start, r.stop) for r in index)

    def ranges(self, group: int) -> dict[str, range]:
        """Returns this piece's range along each axis that can be cut."""
        heads = range(self.kv_heads.start * group, self.kv_heads.stop * group)
        of_batch = {"batch": self.batch, "kv_heads": self.kv_heads, "heads": heads}
        return {**of_batch, "M": self.rows, "N": self.keys}


@dataclass(frozen=True)
class PieceOfSequences(Piece):
    """Consecutive sequences of a packed batch, with their rows and keys.

    most: the largest numbers of sequences, rows and keys of any piece. All pieces are planned for
    these sizes, so that they share a plan; a piece with fewer sequences is filled with empty ones.
    """

    sequences: range
    most: tuple[int, int, int]

    def problem(self, whole: Problem) -> Problem:
        of_all = whole.of_sequences(*self.most)
        return of_all.part(1, len(self.kv_heads), range(of_all.M), range(of_all.N))

    def of(self, array: np.ndarray, axes: Sequence[str], group: int) -> np.ndarray:
        part = super().of(array, axes, group)
        if axes[0] in STARTS:
            first = self.rows if axes[0] == STARTS[0] else self.keys
            return np.pad(part - part.dtype.type(first.start), self._others(), mode="edge")
        return np.pad(part, self._others()) if list(axes) == ["sequences"] else part

    def _others(self) -> tuple[int, int]:
        return 0, self.most[0] - len(self.sequences)

    def ranges(self, group: int) -> dict[str, range]:
        starts = range(self.sequences.start, self.sequences.stop + 1)
        own = {"sequences": self.sequences, **dict.fromkeys(STARTS, starts)}
        return super().ranges(group) | own


def cut(
    plan: Plan, plan_of: Planner, wanted: int, most: int, starts: Starts = ()
) -> Sequence[Piece]:
    """Cuts a plan's problem into pieces that each need at most ``wanted`` bytes on the device.

    The problem is cut along batch and heads first, then along rows in whole tiles. A packed batch,
    with offsets ``starts``, is cut into groups of sequences, or into heads of a sequence that is
    too large. Arrays that several pieces share are not counted. A piece that needs more than
    ``most`` bytes including such arrays is cut further along rows and keys, if the outputs allow
    it. Pieces are ordered so that adjacent pieces share as many bytes as possible.

    The problem is not cut for kernels with their own arrays or reference, nor for dropout and
    expressions that use the batch or head index, since these indices would start from 0 in every
    piece, nor for gradients of captured arrays, whose sums are scaled by the largest term of the
    whole problem.
    """
    p, cutting = plan.problem, _Cutting(plan, plan_of, wanted, most)
    if not is_divisible(plan):
        if (size := needed(plan)) > most:
            remedy = f"{_FEWER}: the problem cannot be divided into pieces"
            raise cutting.too_large("the whole problem", size, remedy)
        return [Piece(*map(range, (p.batch, p.kv_heads, p.M, p.N)))]
    can_be_cut = "strides" in plan.kernel.features and len(starts) and len(starts[0]) > 2
    if can_be_cut and needed(plan) > wanted:
        return _of_sequences(plan, plan_of, wanted, most, starts)
    sizes = zip((p.batch, p.kv_heads, p.M, p.N), cutting.sizes())
    batches, heads, *inner = (_ranges(*x) for x in sizes)
    if cutting.shared_by("batch") > cutting.shared_by("heads"):
        return [Piece(b, h, *rest) for h, b, *rest in product(heads, batches, *inner)]
    return [Piece(*ranges) for ranges in product(batches, heads, *inner)]


def is_divisible(plan: Plan) -> bool:
    p, modifiers = plan.problem, plan.problem.modifiers
    is_differentiated = modifiers.differentiated or (p.wrt and p.is_ragged)
    return plan.kernel.is_plain and not (modifiers.counts_heads or is_differentiated)


def divisible_axes(plan: Plan) -> set[str]:
    """Returns the axes, out of batch, heads and M, along which a divisible problem can be cut.

    All outputs have these axes; an output without an axis would be a sum over the parts.
    """
    counted = {"M"} if plan.problem.modifiers.counts_rows else set()
    axes, outputs = _axes(plan), plan.operation.outputs_of(plan.problem)
    return set.intersection({"batch", "heads", "M"}, *(axes[x] for x in outputs)) - counted


def _axes(plan: Plan) -> dict[str, set[str]]:
    """Returns the axes of an operation's arrays; key heads count as "heads"."""
    return {
        name: set(axes.replace("kv_heads", "heads").split())
        for name, axes in plan.operation.axes_of(plan.problem).items()
    }


def _of_sequences(
    plan: Plan, plan_of: Planner, wanted: int, most: int, starts: Starts
) -> list[PieceOfSequences]:
    """Cuts a packed batch into groups of sequences, and into heads if a sequence is too large.

    Padding rows are assigned to the neighbouring group. Numbers of rows are rounded up, so that
    calls with other lengths can reuse the plans.
    """
    p, (of_row, of_key) = plan.problem, _costs(plan)
    rows, keys = ([0, *x[1:-1].tolist(), total] for x, total in zip(starts, (p.M, p.N)))
    bytes_to = [of_row * m + of_key * n for m, n in zip(rows, keys)]
    groups = list(pairwise(_groups(bytes_to, wanted)))
    are_small = max(bytes_to[b] - bytes_to[a] for a, b in groups) <= wanted
    M, N = (_rounded(max(x[b] - x[a] for a, b in groups)) for x in (rows, keys))
    most_of_each = max(b - a for a, b in groups), min(M, p.M), min(N, p.N)
    part = plan_of(p.of_sequences(*most_of_each))
    heads = [x.kv_heads for x in cut(part, plan_of, most if are_small else wanted, most)]
    return [
        PieceOfSequences(
            batch=range(1),
            kv_heads=h,
            rows=range(rows[a], rows[b]),
            keys=range(keys[a], keys[b]),
            sequences=range(a, b),
            most=most_of_each,
        )
        for a, b in groups
        for h in heads
    ]


def _costs(plan: Plan) -> list[float]:
    """Returns the bytes of an operation's arrays per packed row, and per packed key."""
    p, axes = plan.problem, plan.operation.axes_of(plan.problem)
    return [
        sum(
            plan.stored_bytes(x)
            for x, of in axes.items()
            if x in plan.arrays and axis in of.split()
        )
        / max(total, 1)
        for axis, total in (("M", p.M), ("N", p.N))
    ]


def _groups(bytes_to: Sequence[float], wanted: int) -> list[int]:
    """Returns the boundaries between groups of consecutive sequences, including both ends.

    bytes_to: cumulative bytes; element i is the total of the first i sequences. A group has as many
    sequences as fit into ``wanted`` bytes, at least one.
    """
    found = [0]
    for i, end in enumerate(bytes_to[2:], 1):
        if end - bytes_to[found[-1]] > wanted:
            found.append(i)
    return [*found, len(bytes_to) - 1]


def _rounded(n: int) -> int:
    """Rounds n up to four significant bits, by at most an eighth."""
    return round_up(n, 1 << max(n.bit_length() - 4, 0))


class _Cutting:
    """Chooses the numbers of batch elements, key heads, rows and keys per piece."""

    def __init__(self, plan: Plan, plan_of: Planner, wanted: int, most: int) -> None:
        self.plan, self.plan_of, self.wanted, self.most = plan, plan_of, wanted, most
        self.axes, self.divisible = _axes(plan), divisible_axes(plan)
        self.bytes = cache(self._bytes)

    def sizes(self) -> tuple[int, int, int, int]:
        """Returns the sizes of the first, largest piece. Raises OutOfMemory if no piece fits."""
        p = self.plan.problem
        b, h, m, n = p.batch, p.kv_heads, p.M, p.N
        if needed(self.plan) > self.wanted:
            if "batch" in self.divisible:
                b = _largest(b, lambda x: self._fits(x, h, m, n))
            if "heads" in self.divisible and not self._fits(b, h, m, n):
                h = _largest(h, lambda x: self._fits(b, x, m, n))
            if "M" in self.divisible and not self._fits(b, h, m, n):
                m = self._rows(b, h, n)
            elif "heads" in self.divisible:
                h = self._busy_heads(b, h)
        m, n = self._within_heads(b, h, m, n)
        return b, h, m, n

    def _rows(self, b: int, h: int, n: int) -> int:
        """Returns the rows per piece when the problem is cut along rows, in whole tiles.

        A piece has as many rows as fit. If a piece also reads keys, it has at least enough rows to
        keep the device busy.
        """
        p, size = self.plan.problem, self.plan.constants.get("Br", 1)
        has_keys = any("M" not in x for x in self.axes.values())
        least = cdiv(_LEAST_TILES, b * h * p.group) * size if has_keys else 1

        def rows(count: int) -> int:
            return min(round_up(cdiv(p.M, count), size), p.M)

        counts = range(1, max(p.M // least, 1))  # all candidates except the largest
        return rows(1 + bisect_left(counts, True, key=lambda x: self._fits(b, h, rows(x), n)))

    def _busy_heads(self, b: int, h: int) -> int:
        """Returns the number of key heads per piece, at least ``h``.

        The number is larger than ``h`` if ``h`` heads would leave the device idle.

        Under a causal mask the last tiles take longest, and with one tile per multiprocessor the
        device waits for them. That matters if kernels are not much faster than the copies.
        """
        p, tile = self.plan.problem, self.plan.constants.get
        sent = sum(x in self.plan.arrays and self.plan.stored_bytes(x) for x in self.axes)
        _, tflops = self.plan.tflops or (0, TFLOPS)
        if self.plan.operation.flops(p) / (tflops * 1e12) < _SHOWS * sent / BUS:
            return h
        of_head = p.group * cdiv(p.M, tile("Br", 1))
        if "O" not in self.plan.outputs:  # gradients include a launch with one block per key tile
            of_head = max(of_head, cdiv(p.N, tile("Bc", 1)))
        enough = max(p.kv_heads // cdiv(_LEAST_TILES // 2, b * of_head), 1)  # number of pieces

        def is_moderate(heads: int) -> bool:  # small enough for copies to overlap with kernels
            every, own = self.bytes(b, heads, p.M, p.N)
            return own <= _LARGER * self.wanted and every <= self.most // 2

        return max(h, min(cdiv(p.kv_heads, enough), _largest(p.kv_heads, is_moderate)))

    def shared_by(self, axis: str) -> int:
        """Returns the bytes of arrays that lack ``axis``, "batch" or "heads", but not the other."""
        (other,) = {"batch", "heads"} - {axis}
        found = (x for x, axes in self.axes.items() if other in axes and axis not in axes)
        return sum(map(self.plan.stored_bytes, found))

    def _within_heads(self, b: int, h: int, m: int, n: int) -> tuple[int, int]:
        """Reduces rows m and keys n until a piece fits on the device."""
        group, tile = self.plan.problem.group, self.plan.constants.get("Br", 1)
        by_rows, by_keys = "M" in self.divisible, self._by_keys()
        while (size := self.bytes(b, h, m, n)[0]) > self.most:
            rows, keys = by_rows and m > 1, by_keys and n > 1
            if not (rows or keys):
                raise self._smallest_too_large(size)
            if rows and (m * group >= n or not keys):
                half = cdiv(m, 2)
                m = round_up(half, tile) if m > tile else half
            else:
                n = cdiv(n, 2)
        return m, n

    def _by_keys(self) -> bool:
        """Returns whether the keys can be cut; each partial result would include a sink."""
        p, plan = self.plan.problem, self.plan
        gives_lse = plan.operation.name == "forward" and "lse" in plan.outputs
        is_able = "causal" in plan.kernel.features or not p.is_masked
        return gives_lse and is_able and not (p.modifiers.counts_rows or p.modifiers.has_sink)

    def _fits(self, *sizes: int) -> bool:
        every, own = self.bytes(*sizes)
        return own <= self.wanted and every <= self.most

    def _bytes(self, b: int, h: int, m: int, n: int) -> tuple[int, int]:
        """Returns the bytes of a piece's arrays, and of the arrays that no other piece uses."""
        whole = self.plan.problem
        part = self.plan_of(_unrounded(self.plan, whole.part(b, h, range(m), range(n))))
        numbers = {"batch": (b, whole.batch), "heads": (h, whole.kv_heads), "M": (m, whole.M)}
        cut_axes = {axis for axis, (mine, of_all) in numbers.items() if mine < of_all}
        shared = (x for x, axes in self.axes.items() if x in part.arrays and cut_axes - axes)
        every = needed(part)
        return every, every - sum(_aligned(part.stored_bytes(x)) for x in shared)

    def _smallest_too_large(self, size: int) -> OutOfMemory:
        if not {"batch", "heads"} <= self.divisible:
            return self.too_large("its smallest piece", size, _FEWER)
        is_cut = "M" in self.divisible or self._by_keys()
        what = "its smallest piece" if is_cut else "one head of it"
        return self.too_large(what, size, "choose another kernel")

    def too_large(self, what: str, size: int, remedy: str) -> OutOfMemory:
        return OutOfMemory(
            f"{self.plan.kernel.name} on {self.plan.problem}: {what} needs {size:,} bytes on the "
            f"device, but only {self.most:,} may be used; free device memory, or {remedy}"
        )


def _unrounded(whole: Plan, part: Problem) -> Problem:
    """Requests float32 results for a part with some of the keys, if the kernel supports them.

    Results are then rounded only once, when they are merged.
    """
    is_able = can_give("float32", part.dtype) and "out_dtype" in whole.kernel.features
    if part.N == whole.problem.N or not is_able:
        return part
    return part.with_options(out_dtype="float32")


def _largest(total: int, fits: Callable[[int], bool]) -> int:
    """Returns the size of equal shares of ``total``: the largest size that fits, at least 1."""
    found = max(bisect_left(range(1, total + 1), True, key=lambda x: not fits(x)), 1)
    return cdiv(total, cdiv(total, found)) if total else 1


class Cut:
    """One way to cut a problem: the pieces and their plans."""

    def __init__(self, whole: Plan, pieces: Sequence[Piece], plan_of: Planner) -> None:
        self.whole, self.pieces = whole, pieces
        self.of_sequences = isinstance(pieces[0], PieceOfSequences)
        self.by_keys = not self.of_sequences and len({piece.keys for piece in pieces}) > 1
        parts = [piece.problem(whole.problem) for piece in pieces]
        if self.by_keys:
            parts = [_unrounded(whole, part) for part in parts]
        self.plans = list(map(plan_of, parts))
        self._distinct = {id(plan): plan for plan in self.plans}
        self.bytes = max(map(needed, self._distinct.values()))  # bytes that the largest piece needs
        axes = _axes_of(whole)
        self.axes = {name: axes[name].split() for name in whole.arrays if name in axes}
        self.sizes = {  # bytes of the largest part of each array
            name: max(plan.stored_bytes(name) for plan in self._distinct.values())
            for name in self.axes
        }
        self.numbers = self._numbered()
        self.shares: dict[tuple[int, ...], list[Cut]] = {}  # a Cut per device, by device numbers
        self._layouts: dict[tuple[Any, ...], list[Layout]] = {}
        self._compiled = False

    def copies(self, name: str, most: int) -> int:
        """Returns how many parts of an array the device holds if it holds ``most`` pieces."""
        return min(most, self.numbers[-1][name] + 1)

    def count(self, most: int, free: int) -> int:
        """Returns how many pieces (1 to ``most``) the device holds at a time in ``free`` bytes."""
        fitting = (x for x in range(min(most, len(self.pieces)), 1, -1) if self._held(x) <= free)
        return next(fitting, 1)

    def _held(self, count: int) -> int:
        """Returns the bytes of device memory that ``count`` pieces need together."""
        arrays = (self.copies(x, count) * _aligned(size) for x, size in self.sizes.items())
        return sum(arrays) + count * max(x.scratch_bytes for x in self._distinct.values())

    def _numbered(self) -> list[dict[str, int]]:
        """Numbers the parts of each array: returns the part numbers that each piece uses.

        Consecutive pieces with the same part of an input use the same number. Outputs have one part
        per piece, because results over some keys are merged on the host.
        """
        group, found = self.whole.problem.group, list[dict[str, int]]()
        numbers, before = dict.fromkeys(self.axes, -1), dict[str, Any]()
        for piece, plan in zip(self.pieces, self.plans):
            for name, axes in self.axes.items():
                part = piece.index(axes, group), plan.stored_shape(name)
                if part != before.get(name) or name in plan.outputs:
                    numbers[name] += 1
                before[name] = part
            found.append(dict(numbers))
        return found

    def compile(self, backend: Backend) -> None:
        if not self._compiled:
            for plan in self._distinct.values():
                compile_kernels(backend, plan)
            self._compiled = True

    def layouts(self, orders: Orders) -> list[Layout]:
        """Returns the layout of each piece on the device, for these orders of the arrays' axes."""
        key = tuple(orders.items())
        if (found := self._layouts.get(key)) is None:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            made = {number: Layout(plan, orders) for number, plan in self._distinct.items()}
            found = self._layouts[key] = [made[id(plan)] for plan in self.plans]
        return found


class Pieces:
    """The pieces of a plan's problem, cached for the next call of any thread."""

    def __init__(self, plan: Plan, plan_of: Planner) -> None:
        self.plan = plan
        self.plan_of = lru_cache(_MOST_PARTS)(lambda p: plan if p == plan.problem else plan_of(p))
        self.bytes = needed(plan)  # device memory for the problem in one piece
        self._cut: tuple[Any, Cut] | None = None  # the last cut and its arguments

    def cut(self, wanted: int, most: int, starts: Starts = ()) -> Cut:
        """Cuts the problem with ``cut``, or reuses the last cut if it still applies."""
        found, key = self._cut, (wanted, *(x.tobytes() for x in starts))
        if found is None or found[0] != key:
            found = self._cut = key, self._new(wanted, sys.maxsize, starts)
        return found[1] if found[1].bytes <= most else self._new(wanted, most, starts)

    def _new(self, wanted: int, most: int, starts: Starts) -> Cut:
        return Cut(self.plan, cut(self.plan, self.plan_of, wanted, most, starts), self.plan_of)


def _axes_of(plan: Plan) -> dict[str, str]:
    """Returns the axes of inputs and outputs.

    In a packed batch, the axis "batch" of captured arrays is replaced with "sequences".
    """
    p, found = plan.problem, plan.operation.axes_of(plan.problem)
    if p.modifiers.is_packed:
        arrays = (x.input for x in p.operands if x.is_array)
        found |= {name: found[name].replace("batch", "sequences") for name in arrays}
    return found


def _ranges(total: int, step: int) -> list[range]:
    return [range(i, min(i + step, total)) for i in range(0, total, max(step, 1))] or [range(0)]


def needed(plan: Plan) -> int:
    """Returns the bytes of device memory that a plan needs."""
    arrays = (plan.stored_bytes(name) for name in plan.arrays if name not in plan.scratch)
    return sum(map(_aligned, arrays)) + plan.scratch_bytes


def _aligned(size: int) -> int:
    return cdiv(size, _ALIGNMENT) * _ALIGNMENT


class _Array(NamedTuple):
    """The layout of an array of a piece in device memory."""

    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    order: tuple[int, ...]  # axes in memory order, outermost first
    memory: tuple[int, ...]  # axis lengths in memory order, with padded columns

    @staticmethod
    def of(plan: Plan, name: str, order: tuple[int, ...]) -> _Array:
        shape, dtype = plan.arrays[name]
        stored = plan.stored_shape(name)
        memory = tuple(stored[axis] for axis in order)
        steps = contiguous_strides(memory, dtype)
        strides = tuple(steps[order.index(axis)] for axis in range(len(order)))
        return _Array(dtype, shape, strides, order, memory)


class Layout:
    """The layout of a piece's arrays in device memory, and the launcher of its kernels."""

    def __init__(self, plan: Plan, orders: Orders) -> None:
        self.plan = plan
        self.arrays = {name: _Array.of(plan, name, order) for name, order in orders.items()}
        self._launcher: Launcher | None = None

    def launch(self, backend: Backend, slot: Slot) -> None:
        """Launches the kernels on a slot's memory, in the current stream."""
        scratch = {name: allocate(backend, self.plan, name) for name in self.plan.scratch}
        if self._launcher is None:
            views = {
                name: backend.view(slot[name], x.shape, x.dtype, 0, x.strides)
                for name, x in self.arrays.items()
            }
            self._launcher = Launcher(backend, self.plan, {**views, **scratch})
        memory = (*(slot[name] for name in self.arrays), *scratch.values())
        self._launcher(list(map(backend.address, memory)), backend.stream)


class Place(NamedTuple):
    """A piece's part of an array on the host, and its memory on the device."""

    address: int
    host: np.ndarray | None  # a view with the axes in the order of device memory
    shape: tuple[int, ...]  # shape of the device memory
    pinned: bool

    def runs(self) -> list[tuple[np.ndarray, int]]:
        """Lists the contiguous runs of the host array, with their device addresses.

        The list is empty if columns are padded on the device, or if runs are so short that starting
        their copies takes longer than copying them to a buffer.
        """
        assert self.host is not None
        outer = self.shape[: _strided_axes(self.host)]
        size = self.host.nbytes // max(math.prod(outer), 1)
        if self.host.shape != self.shape or (outer and size < _LEAST_RUN):
            return []
        return [
            (self.host[index], self.address + i * size) for i, index in enumerate(np.ndindex(outer))
        ]

    def slabs(self, most: int) -> Iterator[tuple[np.ndarray, int, tuple[int, ...]]]:
        """Yields parts of the host array, each with its device address and shape."""
        assert self.host is not None
        size = self.host.itemsize
        if self.host.size and size * math.prod(self.shape) <= most:
            yield self.host, self.address, self.shape
            return
        steps = contiguous_strides(self.shape, self.host.dtype)
        for index in slabs(self.shape, max(most // size, 1)):
            offset = sum(part.start * step for part, step in zip(index, steps))
            shape = tuple(part.stop - part.start for part in index)
            yield self.host[index], self.address + offset, shape


def _strided_axes(array: np.ndarray) -> int:
    """Counts the outer axes to iterate over; the remaining inner axes are contiguous in memory."""
    step = array.itemsize
    for axis in reversed(range(array.ndim)):
        if array.shape[axis] > 1 and array.strides[axis] != step:
            return axis + 1
        step *= array.shape[axis]
    return 0


def slabs(shape: Sequence[int], most: int) -> Iterator[tuple[slice, ...]]:
    """Yields indices of contiguous parts of an array, in order, of at most ``most`` elements."""
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
