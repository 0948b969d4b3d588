"""Divides a problem among devices: each share has consecutive pieces and about equal work."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby

import numpy as np

from cupyfa.planner.plan import Plan
from cupyfa.runtime.transfer.pieces import (
    BUS,
    TFLOPS,
    Cut,
    Piece,
    PieceOfSequences,
    Pieces,
    Starts,
    divisible_axes,
    is_divisible,
)

_LEAST_PIECES = 4  # minimum number of pieces of sequences per device
_ENDS = 4  # a share begins and ends with pieces of 1/_ENDS of the usual size
_FEWEST_TILES = 128  # minimum row tiles of such a small piece: one wave of a large GPU
_UNEVEN = 0.02  # imbalance, as a fraction of a share, that does not justify another cut
Unit = list[Piece]  # one piece, or several pieces whose results are merged
Axis = tuple[str, int]  # an axis of a piece, and the granularity of cuts along it


def shares(
    pieces: Pieces, devices: tuple[int, ...], wanted: int, most: int, starts: Starts = ()
) -> list[Cut]:
    """Returns the pieces of each device, for fewer devices if the problem has too few parts.

    ``wanted``, ``most`` and ``starts`` are passed to ``cut``, for the device with the least memory.
    The shares are cached together with their launchers.
    """
    if starts:  # sequences are not divided, so few large pieces would make uneven shares
        wanted = min(wanted, pieces.bytes // (_LEAST_PIECES * len(devices)))
    plan, whole = pieces.plan, pieces.cut(wanted, most, starts)
    if devices not in whole.shares:
        parts: Sequence[Sequence[Piece]] = [whole.pieces]
        if is_divisible(plan):
            parts = divided(plan, whole.pieces, len(devices), starts)
        whole.shares[devices] = [Cut(plan, part, pieces.plan_of) for part in parts]
    return whole.shares[devices]


def divided(
    plan: Plan, pieces: Sequence[Piece], count: int, starts: Starts = ()
) -> list[list[Piece]]:
    """Divides consecutive pieces into up to ``count`` nonempty shares of about equal work.

    Pieces on the boundary between two shares are cut along batch and key heads. They are also cut
    along rows, between tiles, if the results allow it and whole heads would be uneven. If kernels
    take longer than copies, a share begins and ends with a small piece, because no kernel hides the
    copies of the first and the last piece.
    """
    work, found = _Work(plan, pieces, starts), list[list[Piece]]()
    left = deque(list(x) for _, x in groupby(pieces, key=_rows_of))
    for devices in range(count, 0, -1):
        goal = -(-sum(map(work.of, left)) // devices)
        slack, share = _UNEVEN * goal, list[Piece]()
        while left and (size := work.of(left[0])) <= goal:
            share += left.popleft()
            goal -= size
        if left and min(goal, size - goal) > slack and work.is_divisible(left[0]):
            mine, others = work.split(left.popleft()[0], goal, slack)
            share += mine
            left.extendleft([x] for x in reversed(others))
        elif left and 2 * goal > size:
            share += left.popleft()
        found.append(share)
    return [work.with_small_ends(x) for x in found if x]


def _rows_of(piece: Piece) -> tuple[range, range, range]:
    """Returns a piece's batch, key heads and rows, which are equal for pieces to be merged."""
    return piece.batch, piece.kv_heads, piece.rows


class _Work:
    """The work of pieces: FLOPs, or bytes to send if the bus takes longer than the kernels.

    Arrays without a row axis, such as K, count in proportion to a piece's rows, so that the work of
    all pieces adds up to the total work. The keys of packed sequences are counted in full.
    """

    def __init__(self, plan: Plan, pieces: Sequence[Piece], starts: Starts) -> None:
        self.problem, self.operation = plan.problem, plan.operation
        self.lengths = [np.diff(x).astype(np.int64) for x in starts]
        axes, arrays = plan.operation.axes_of(plan.problem), plan.arrays
        sent = [x for x in axes if x in arrays and x not in plan.outputs]
        self.sent = [(axes[x].split(), *arrays[x]) for x in sent]
        steps = {"batch": ("batch", 1), "heads": ("kv_heads", 1)}
        steps["M"] = "rows", plan.constants.get("Br", 1)
        self.axes = [steps[x] for x in steps if x in divisible_axes(plan)]
        _, tflops = plan.tflops or (0, TFLOPS)
        seconds = (
            sum(map(self._flops, pieces)) / (tflops * 1e12),
            sum(map(self._bytes, pieces)) / BUS,
        )
        self.by_flops = seconds[0] > seconds[1]
        self.of_piece = cache(self._flops if self.by_flops else self._bytes)

    def of(self, unit: Iterable[Piece]) -> int:
        return sum(map(self.of_piece, unit))

    def _flops(self, piece: Piece) -> int:
        if self.lengths:
            return self._flops_of_sequences(piece)
        return self.operation.flops(piece.problem(self.problem))

    def _flops_of_sequences(self, piece: Piece) -> int:
        """Counts FLOPs of sequences as if the mask hid the same fraction of every sequence."""
        p, every = self.problem, range(len(self.lengths[0]))
        some = piece.sequences if isinstance(piece, PieceOfSequences) else every
        rows, keys = (x[some.start : some.stop] for x in self.lengths)
        if p.left is not None and p.right is not None:
            keys = np.minimum(keys, p.left + p.right + 1)
        pair = self.operation.flops(p.sequence(1, 1))
        return int(rows @ keys) * pair * len(piece.kv_heads) // p.kv_heads

    def _bytes(self, piece: Piece) -> int:
        p, total = self.problem, 0
        for axes, shape, dtype in self.sent:
            index = piece.index(axes, p.group)
            part = [len(range(n)[x]) for x, n in zip(index, shape, strict=True)]
            size = dtype.itemsize * math.prod(part)
            is_whole = "M" in axes or isinstance(piece, PieceOfSequences)
            total += size if is_whole else size * len(piece.rows) // max(p.M, 1)
        return total

    def with_small_ends(self, share: list[Piece]) -> list[Piece]:
        """Cuts a share's first and last piece in two, if kernels take longer than copies."""
        if not self.by_flops or self.lengths or len(share) < 2:
            return share
        first, *others, last = share
        return [*self._cut_at(first, 1), *others, *self._cut_at(last, _ENDS - 1)]

    def _cut_at(self, piece: Piece, count: int) -> list[Piece]:
        """Cuts off a small first or last part of a piece, unless that part would be too small.

        Pieces stay whole if they cannot be cut along rows (gradients) or if they are merged.
        """
        p = self.problem
        if "rows" not in dict(self.axes) or len(piece.keys) < p.N:
            return [piece]
        for name, step in self.axes:
            whole = getattr(piece, name)
            at = len(whole) * count // _ENDS // step * step
            if 0 < at < len(whole):
                parts = [replace(piece, **{name: x}) for x in (whole[:at], whole[at:])]
                return parts if min(map(self._tiles, parts)) >= _FEWEST_TILES else [piece]
        return [piece]

    def _tiles(self, piece: Piece) -> int:
        heads = len(piece.batch) * len(piece.kv_heads) * self.problem.group
        return heads * -(-len(piece.rows) // dict(self.axes)["rows"])

    def is_divisible(self, unit: Unit) -> bool:
        """Returns whether a unit can be cut; pieces whose results are merged stay together."""
        return len(unit) == 1 and bool(self.axes)

    def split(self, piece: Piece, goal: int, slack: float) -> tuple[list[Piece], list[Piece]]:
        """Splits a piece so that the first part has ``goal`` work, within ``slack`` if possible."""
        return self._split(piece, goal, slack, self.axes)

    def _split(
        self, piece: Piece, goal: int, slack: float, axes: Sequence[Axis]
    ) -> tuple[list[Piece], list[Piece]]:
        (name, step), *inner = axes
        whole = getattr(piece, name)

        def part(of: range) -> list[Piece]:
            return [replace(piece, **{name: of})] if of else []

        ends = range(step, len(whole), step)
        at = step * bisect_right(ends, goal, key=lambda end: self.of(part(whole[:end])))
        first, middle, last = whole[:at], whole[at : at + step], whole[at + step :]
        goal -= self.of(part(first))
        size = self.of(part(middle))
        if inner and min(goal, size - goal) > slack:
            before, after = self._split(part(middle)[0], goal, slack, inner)
            if before and after:
                return [*part(first), *before], [*after, *part(last)]
            at += step if before else 0
        elif 2 * goal > size:
            at += step
        return part(whole[:at]), part(whole[at:])
