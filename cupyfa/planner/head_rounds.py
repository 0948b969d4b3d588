"""Rounds over heads: the heads that the launches of a round compute, in each array."""

from typing import NamedTuple, Self

from cupyfa.ladder.kernel import cdiv
from cupyfa.problem.problem import Problem


class HeadRound(NamedTuple):
    """Some batch elements and key heads, with the ``group`` query heads of each key head."""

    batch: range
    kv_heads: range
    group: int

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of batch elements and key heads."""
        return len(self.batch), len(self.kv_heads)

    @property
    def at_start(self) -> Self:
        """The same number of heads from the first on; scratch of a round holds them there."""
        batch, kv_heads = map(range, self.sizes)
        return type(self)(batch, kv_heads, self.group)

    def slices(self, axes: str) -> tuple[slice, ...]:
        """Returns the index of these heads in an array with axes such as "batch heads M d"."""
        first, last = (x * self.group for x in (self.kv_heads.start, self.kv_heads.stop))
        chosen = {
            "batch": slice(self.batch.start, self.batch.stop),
            "heads": slice(first, last),
            "kv_heads": slice(self.kv_heads.start, self.kv_heads.stop),
        }
        return tuple(chosen.get(axis, slice(None)) for axis in axes.split())


def head_rounds(p: Problem, most: int) -> list[HeadRound]:
    """Divides a problem into rounds of at most ``most`` key heads, in almost equal numbers.

    A round has heads of one batch element or all heads of several, so that slices of arrays
    contain exactly its heads.
    """
    elements = max(most // max(p.kv_heads, 1), 1)
    return [
        HeadRound(batch, kv_heads, p.group)
        for batch in _ranges(p.batch, elements)
        for kv_heads in _ranges(p.kv_heads, most)
    ]


def _ranges(count: int, most: int) -> list[range]:
    """Divides range(count) into as few ranges of at most ``most`` as possible, at least one."""
    size = max(cdiv(count, max(cdiv(count, most), 1)), 1)
    starts = range(0, max(count, 1), size)
    return [range(x, min(x + size, count)) for x in starts]
