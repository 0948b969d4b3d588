"""Rounds over heads: the heads that the launches of a round compute, in each array."""

from itertools import product
from typing import NamedTuple, Self

from cupyfa.ladder.kernel import cdiv
from cupyfa.problem.problem import Problem


class HeadRound(NamedTuple):
    """Some batch elements and key heads, with query heads of each key head, and their rows.

    members: the query heads in each group, all of them or, for a single key head, a share.
    rows: the rows of each query head, all of them or, for a single query head, a share.
    group: the number of query heads in a whole group.
    continues: whether an earlier round has other query heads, or rows, of the same key heads.
    """

    batch: range
    kv_heads: range
    members: range
    rows: range
    group: int
    continues: bool = False

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The numbers of batch elements, key heads, query heads of each key head, and rows."""
        return len(self.batch), len(self.kv_heads), len(self.members), len(self.rows)

    @property
    def at_start(self) -> Self:
        """As many heads and rows from the first on; scratch of a round holds them there."""
        batch, kv_heads, members, rows = map(range, self.sizes)
        return type(self)(batch, kv_heads, members, rows, len(members))

    def slices(self, axes: str) -> tuple[slice, ...]:
        """Returns the index of these heads and rows in an array with axes like "batch heads M"."""
        first = self.kv_heads.start * self.group + self.members.start
        chosen = {
            "batch": slice(self.batch.start, self.batch.stop),
            "heads": slice(first, first + len(self.kv_heads) * len(self.members)),
            "kv_heads": slice(self.kv_heads.start, self.kv_heads.stop),
            "M": slice(self.rows.start, self.rows.stop),
        }
        return tuple(chosen.get(axis, slice(None)) for axis in axes.split())


class RoundSizes(NamedTuple):
    """The largest numbers of key heads, of query heads of one key head, and of rows of one head."""

    kv_heads: int
    members: int
    rows: int


def head_rounds(p: Problem, most: RoundSizes) -> list[HeadRound]:
    """Divides a problem into rounds of at most so many key heads, in almost equal numbers.

    A round has heads of one batch element or all heads of several, so that slices of arrays
    contain exactly its heads. Only groups of a single key head are divided, and rows of a single
    query head. Shares of a key head follow one another.
    """
    elements = max(most.kv_heads // max(p.kv_heads, 1), 1)
    members = p.group if most.kv_heads > 1 else most.members
    rows = p.M if max(most.kv_heads, most.members) > 1 else most.rows
    shares = list(product(_ranges(p.group, members), _ranges(p.M, rows)))
    return [
        HeadRound(batch, kv_heads, *share, p.group, continues=index > 0)
        for batch in _ranges(p.batch, elements)
        for kv_heads in _ranges(p.kv_heads, most.kv_heads)
        for index, share in enumerate(shares)
    ]


def _ranges(count: int, most: int) -> list[range]:
    """Divides range(count) into as few ranges of at most ``most`` as possible, at least one."""
    size = max(cdiv(count, max(cdiv(count, max(most, 1)), 1)), 1)
    starts = range(0, max(count, 1), size)
    return [range(x, min(x + size, count)) for x in starts]
