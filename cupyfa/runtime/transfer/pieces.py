"""The pieces that a problem is cut into, the device memory of their arrays, and their launches."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from cupyfa.errors import OutOfMemory
from cupyfa.ladder.kernel import cdiv
from cupyfa.planner.plan import Plan
from cupyfa.problem import Problem
from cupyfa.runtime.arrays import contiguous_strides
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.launcher import Launcher, compiled
from cupyfa.runtime.workspace import allocated

_ALIGNMENT = 512  # bytes, of memory from CuPy's pool
_MOST_LAYOUTS = 64  # that are kept for a plan
Orders = Mapping[str, tuple[int, ...]]  # of the axes of arrays in memory, outer ones first
Slot = Mapping[str, Any]  # device memory for the arrays of a piece
Planner = Callable[[Problem], Plan]  # plans a part of a problem, with the same constants


@dataclass(frozen=True)
class Piece:
    """A part of a problem: ranges of its batch, its key heads, its rows and its keys."""

    batch: range
    kv_heads: range
    rows: range
    keys: range

    def problem(self, whole: Problem) -> Problem:
        return whole.part(len(self.batch), len(self.kv_heads), self.rows, self.keys)

    def of(self, array: np.ndarray, axes: Sequence[str], group: int) -> np.ndarray:
        """This part of an array with these axes."""
        heads = range(self.kv_heads.start * group, self.kv_heads.stop * group)
        ranges = {"batch": self.batch, "kv_heads": self.kv_heads, "heads": heads}
        ranges |= {"M": self.rows, "N": self.keys}
        index = [ranges.get(axis) for axis in axes]
        return array[tuple([slice(None) if r is None else slice(r.start, r.stop) for r in index])]


def cut(plan: Plan, plan_of: Planner, wanted: int, most: int) -> list[Piece]:
    """Pieces of a plan's problem that each need at most ``wanted`` bytes on the device.

    Only batch and heads are cut for that, and rows where every array has them. A piece that still
    needs more than ``most`` bytes is cut along rows and keys, if the outputs allow it. A kernel
    with arrays or a reference of its own gets the whole problem, and so do texts that name places:
    what they compute from the number of a row or head is not known.
    """
    p, operation = plan.problem, plan.operation
    axes = [x.split() for x in operation.axes_of(p).values()]
    by_rows = all("M" in x.split() for x, _ in operation.outputs.values())
    by_keys = (
        "O" in operation.outputs
        and "lse" in plan.outputs
        and "causal" in (plan.kernel.features if p.is_masked else ("causal",))
    )

    @cache
    def size(b: int, h: int, m: int, n: int) -> int:
        return needed(plan_of(p.part(b, h, range(m), range(n))))

    def too_large(what: str, size: int, remedy: str = "name another kernel") -> OutOfMemory:
        return OutOfMemory(
            f"{plan.kernel.name} on {p}: {what} needs {size:,} bytes on the device, and {most:,} "
            f"may be taken; free memory there, or {remedy}"
        )

    def largest(total: int, fits: Callable[[int], bool]) -> int:
        """The largest even share that fits, at least one."""
        found = max(bisect_left(range(1, total + 1), True, key=lambda x: not fits(x)), 1)
        return cdiv(total, cdiv(total, found)) if total else 1

    b, h, m, n = p.batch, p.kv_heads, p.M, p.N
    if not plan.kernel.is_plain or p.modifiers.names_place:
        if needed(plan) > most:
            fewer = "call it for fewer batch elements or heads: it is not divided into pieces"
            raise too_large("all of it", needed(plan), fewer)
        return [Piece(*map(range, (b, h, m, n)))]
    if needed(plan) > wanted:
        b = largest(b, lambda x: size(x, h, m, n) <= wanted)
        if size(b, h, m, n) > wanted:
            h = largest(h, lambda x: size(b, x, m, n) <= wanted)
        if size(b, h, m, n) > wanted and all("M" in x for x in axes):
            m = largest(m, lambda x: size(b, h, x, n) <= wanted)
    while size(b, h, m, n) > most:
        rows, keys = by_rows and m > 1, by_keys and n > 1
        if not (rows or keys):
            what = "its smallest piece" if by_rows or by_keys else "one head of it"
            raise too_large(what, size(b, h, m, n))
        if rows and (m * p.group >= n or not keys):
            m = cdiv(m, 2)
        else:
            n = cdiv(n, 2)
    steps = ((p.batch, b), (p.kv_heads, h), (p.M, m), (p.N, n))
    return [Piece(*ranges) for ranges in product(*(_ranges(*x) for x in steps))]


class Cut:
    """The pieces of one way to cut a problem, with their plans."""

    def __init__(self, whole: Plan, pieces: Sequence[Piece], plan_of: Planner) -> None:
        self.whole, self.pieces = whole, pieces
        self.plans = [plan_of(piece.problem(whole.problem)) for piece in pieces]
        self._distinct = {id(plan): plan for plan in self.plans}
        self.bytes = needed(self.plans[0])  # of the first piece, which is the largest
        self.by_keys = len({piece.keys for piece in pieces}) > 1
        axes = whole.operation.axes_of(whole.problem)
        self.axes = {name: axes[name].split() for name in whole.arrays if name in axes}
        self._layouts: dict[tuple[Any, ...], list[Layout]] = {}
        self._compiled = False

    def compile(self, backend: Backend) -> None:
        if not self._compiled:
            for plan in self._distinct.values():
                compiled(backend, plan)
            self._compiled = True

    def layouts(self, orders: Orders) -> list[Layout]:
        """How the arrays of each piece lie on the device, by the order of each one's axes."""
        key = tuple(orders.items())
        if (found := self._layouts.get(key)) is None:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            made = {number: Layout(plan, orders) for number, plan in self._distinct.items()}
            found = self._layouts[key] = [made[id(plan)] for plan in self.plans]
        return found


class Pieces:
    """The pieces of a plan's problem; remembered for the next call of any thread."""

    def __init__(self, plan: Plan, plan_of: Planner) -> None:
        self.plan, self._plan_of = plan, cache(lambda p: plan if p == plan.problem else plan_of(p))
        self.bytes = needed(plan)  # on the device, of the problem in one piece
        self._cut: tuple[int, Cut] | None = None  # with the bytes that were wanted

    def cut(self, wanted: int, most: int) -> Cut:
        """``cut``, done again only for other numbers, or for a head that does not fit."""
        found = self._cut
        if found is None or found[0] != wanted:
            found = self._cut = wanted, self._new(wanted, sys.maxsize)
        return found[1] if found[1].bytes <= most else self._new(wanted, most)

    def _new(self, wanted: int, most: int) -> Cut:
        return Cut(self.plan, cut(self.plan, self._plan_of, wanted, most), self._plan_of)


def _ranges(total: int, step: int) -> list[range]:
    return [range(i, min(i + step, total)) for i in range(0, total, max(step, 1))] or [range(0)]


def needed(plan: Plan) -> int:
    """Bytes of device memory that a plan takes."""
    arrays = (plan.stored_bytes(name) for name in plan.arrays if name not in plan.scratch)
    return sum(cdiv(x, _ALIGNMENT) * _ALIGNMENT for x in arrays) + plan.scratch_bytes


class _Array(NamedTuple):
    """The layout of an array of a piece in device memory."""

    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    order: tuple[int, ...]  # of its axes in memory, outermost first
    memory: tuple[int, ...]  # their sizes, with padded columns

    @staticmethod
    def of(plan: Plan, name: str, order: tuple[int, ...]) -> _Array:
        shape, dtype = plan.arrays[name]
        stored = plan.stored_shape(name)
        memory = tuple(stored[axis] for axis in order)
        steps = contiguous_strides(memory, dtype)
        strides = tuple(steps[order.index(axis)] for axis in range(len(order)))
        return _Array(dtype, shape, strides, order, memory)


class Layout:
    """The device memory of the arrays of a piece, and the launcher of its kernels."""

    def __init__(self, plan: Plan, orders: Orders) -> None:
        self.plan = plan
        self.arrays = {name: _Array.of(plan, name, order) for name, order in orders.items()}
        self._launcher: Launcher | None = None

    def launch(self, backend: Backend, slot: Slot) -> None:
        """Launches the kernels on a slot's memory, in the current stream."""
        scratch = {name: allocated(backend, self.plan, name) for name in self.plan.scratch}
        if self._launcher is None:
            views = {
                name: backend.view(slot[name], x.shape, x.dtype, 0, x.strides)
                for name, x in self.arrays.items()
            }
            self._launcher = Launcher(backend, self.plan, {**views, **scratch})
        memory = (*(slot[name] for name in self.arrays), *scratch.values())
        self._launcher(list(map(backend.address, memory)), backend.stream)


class Place(NamedTuple):
    """The host's part of an array of a piece, and where it lies on the device."""

    address: int
    host: np.ndarray | None  # with the axes of the memory
    shape: tuple[int, ...]  # of the memory
    pinned: bool

    def slabs(self, most: int) -> Iterator[tuple[np.ndarray, int, tuple[int, ...]]]:
        """Parts of the host's array, and where each lies on the device: address and shape."""
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


def slabs(shape: Sequence[int], most: int) -> Iterator[tuple[slice, ...]]:
    """Contiguous parts of a contiguous array, in order, of at most ``most`` elements."""
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
