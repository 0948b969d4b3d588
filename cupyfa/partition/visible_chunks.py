"""Which chunks of keys the rows of a chunk see, and which rows see the keys of a chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import lcm

from cupyfa.ladder.tiles import TILE_KEYS, TILE_ROWS


@dataclass(frozen=True)
class Strip:
    """Chunks that lie side by side, by their numbers, without the first rows of the first one.

    start: the index of the first row or key taken, in the whole array. skipped: how many rows or
    keys of the first chunk are not taken.
    """

    chunks: Sequence[int]
    start: int
    skipped: int = 0

    def apart(self, others: Sequence[range]) -> list[Strip]:
        """Each chunk alone, as a whole."""
        return [Strip([n], others[n].start) for n in self.chunks]


def ranges(chunks: Sequence[int]) -> list[range]:
    """The rows or keys of each chunk."""
    return [range(*ends) for ends in pairwise(accumulate(chunks, initial=0))]


def tile_of(constants: Mapping[str, int]) -> int:
    """A number of rows and of keys that is whole tiles of a kernel."""
    return lcm(*(n for name, n in constants.items() if name in TILE_ROWS + TILE_KEYS))


def met_by(
    own: range,
    others: Sequence[range],
    shift: int,
    before: int | None,
    after: int | None,
    tile: int,
) -> Strip:
    """The chunks of keys that a chunk of rows sees, from the first key of a tile on.

    Row i sees the keys i + shift - before to i + shift + after; None is no limit. For the rows that
    see a chunk of keys, exchange the limits and negate the shift. Beginning at a whole tile keeps
    the order of sums. A chunk that sees nothing gets the first of the others, where all pairs are
    masked: a task needs an array.
    """
    low = 0 if before is None else max(own.start + shift - before, 0) // tile * tile
    high = others[-1].stop if after is None else own.stop + shift + after
    met = [n for n, x in enumerate(others) if len(x) and x.start < high and low < x.stop]
    if not met:
        return Strip([0], 0)
    first = others[met[0]].start
    return Strip(met, max(low, first), max(low - first, 0))
