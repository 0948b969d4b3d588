"""Finds the keys that given rows see, the rows that see given keys, and the chunks of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import lcm

from cupyfa.ladder.tiles import TILE_KEYS, TILE_ROWS
from cupyfa.problem.problem import Problem


@dataclass(frozen=True)
class Strip:
    """A range of rows or keys that begins anywhere in a chunk and ends at the end of a chunk.

    chunks: the indices of its chunks. start: the index of its first row or key in the whole array.
    skipped: the number of rows or keys of the first chunk before ``start``.
    """

    chunks: Sequence[int]
    start: int
    skipped: int = 0

    def apart(self, others: Sequence[range]) -> list[Strip]:
        """Splits the strip into strips of one whole chunk each."""
        return [Strip([n], others[n].start) for n in self.chunks]


def ranges(chunks: Sequence[int]) -> list[range]:
    """Returns the rows or keys of each chunk."""
    return [range(*ends) for ends in pairwise(accumulate(chunks, initial=0))]


def tile_of(constants: Mapping[str, int]) -> int:
    """Returns the least common multiple of a kernel's tile sizes, in rows and in keys."""
    return lcm(*(n for name, n in constants.items() if name in TILE_ROWS + TILE_KEYS))


def visible_keys(p: Problem, rows: range, tile: int = 1) -> range:
    """Returns the range from the first to the last key that any of these rows attends to.

    The range begins at a tile boundary, which preserves the order of summation.
    """
    return visible(rows, p.N, p.first_position, p.left, p.right, tile)


def visible_rows(p: Problem, keys: range, tile: int = 1) -> range:
    """Returns the range from the first to the last row that attends to any of these keys."""
    return visible(keys, p.M, -p.first_position, p.right, p.left, tile)


def visible(
    own: range, total: int, shift: int, before: int | None, after: int | None, tile: int
) -> range:
    """Returns the range of indices below ``total`` that are visible to any index in ``own``.

    Index i sees i + shift - before to i + shift + after; None means no limit.
    """
    low = 0 if before is None else max(own.start + shift - before, 0) // tile * tile
    high = total if after is None else min(own.stop + shift + after, total)
    return range(low, max(low, high))


def overlap(a: range, b: range) -> bool:
    return max(a.start, b.start) < min(a.stop, b.stop)


def strip_of(visible: range, chunks: Sequence[range]) -> Strip:
    """Returns the strip of chunks that overlap the visible range.

    If no chunk overlaps, returns the first chunk, fully masked, because a task needs an array.
    """
    met = [n for n, x in enumerate(chunks) if overlap(x, visible)]
    if not met:
        return Strip([0], 0)
    first = chunks[met[0]].start
    return Strip(met, max(visible.start, first), max(visible.start - first, 0))
