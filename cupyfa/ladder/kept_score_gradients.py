"""Kernels of two passes that keep dS in memory between them, in rounds over query heads."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import NamedTuple

from cupyfa.ladder.common import ROOM_UNIT, share_stride
from cupyfa.ladder.kernel import Formula
from cupyfa.ladder.tiles import cdiv
from cupyfa.problem.optional_inputs import MAPS
from cupyfa.problem.problem import Problem

USUAL_ROOM = 69632  # the usual room for dS, in units of ROOM_UNIT: 1,088 MiB
_BUSY = 0.85  # rounds keep multiprocessors busy for at least this part of the time


class KeptShares(NamedTuple):
    """A block computes dK and dV of a share: some query heads of a group.

    heads: query heads of a share.
    at_a_time: shares whose dS is kept at a time, in all rounds but the last.
    rounds: the number of rounds.
    """

    heads: int
    at_a_time: int
    rounds: int


def may_keep_dS(p: Problem) -> bool:
    """Returns whether dS could be kept: rows see many keys, and all sequences are equally long."""
    hides = p.is_ragged or p.left is not None or any(x.name in MAPS for x in p.operands)
    return not hides and min(p.batch, p.heads, p.M, p.N) > 0


def line_tiles(p: Problem, rows: int, keys: int) -> int:
    """Returns the number of rows x keys tiles in a line of kept_tiles.cuh.

    Under a right limit, a line has the row tiles r and R - 1 - r. They see at most (r + 1) rows + o
    and (R - r) rows + o keys, with offset o, and a partial tile each.
    """
    tiles = cdiv(p.N, keys)
    if p.right is None:
        return tiles
    both = ((cdiv(p.M, rows) + 1) * rows + 2 * p.causal_offset - 2) // keys + 2
    return max(tiles, min(2 * tiles, both))


@dataclass(frozen=True)
class KeptDS:
    """Formulas of a kernel that keeps dS where `room`, one of its tile sizes, holds enough of it.

    block_heads: the most query heads of a group that a block processes.
    tile: the rows and keys of a tile of dS in memory.
    may_share: whether several blocks may process a group.
    else_overlaps: whether the two passes run at the same time if dS is not kept. With few blocks
        this is faster than fewer products.
    pays_off: whether storing and loading dS takes less time than computing S and dP again.
    """

    block_heads: Formula
    tile: Callable[[SimpleNamespace], tuple[int, int]]
    may_share: Callable[[Problem], bool] = lambda p: True
    else_overlaps: bool = False
    pays_off: Callable[[Problem], bool] = lambda p: True

    def keeps(self, p: Problem, c: SimpleNamespace) -> bool:
        """Returns whether dS is kept; otherwise both passes compute S and dP."""
        return self.shares(p, c) is not None

    def shares(self, p: Problem, c: SimpleNamespace) -> KeptShares | None:
        """Returns the shares with which dS is kept; None if it is not."""
        room = self.heads_in_room(p, c)
        most = min(self.block_heads(p, c), room) if room else 0
        least = 0 if self.may_share(p) else p.group - 1
        for heads in range(most, least, -1):
            if p.group % heads == 0:
                shares, tiles = p.batch * p.heads // heads, share_stride(p, c)
                limits = tiles, c.multiprocessors, p.right is not None, self.else_overlaps
                if now := _shares_at_a_time(shares, room // heads, *limits):
                    return KeptShares(heads, now, cdiv(shares, now))
        return None

    def splits(self, p: Problem, c: SimpleNamespace) -> int:
        """Returns the number of blocks that share the query heads of a group."""
        kept = self.shares(p, c)
        return p.group // (kept.heads if kept else self.block_heads(p, c))

    def heads_in_room(self, p: Problem, c: SimpleNamespace) -> int:
        """Returns the number of query heads whose dS fits into the room; 0 if none is kept."""
        if getattr(c, "room", 1) == 1 or not (may_keep_dS(p) and self.pays_off(p)):
            return 0
        return (c.room * ROOM_UNIT) // (p.itemsize * self.head_elements(p, c))

    def head_elements(self, p: Problem, c: SimpleNamespace) -> int:
        """Returns the number of elements of dS that are kept of a query head."""
        rows, keys = self.tile(c)
        row_tiles = cdiv(p.M, rows)
        # Under a causal mask a line holds two row tiles.
        lines = row_tiles if p.right is None else cdiv(row_tiles, 2)
        return lines * line_tiles(p, rows, keys) * rows * keys

    def elements(self, p: Problem, c: SimpleNamespace) -> int:
        """Returns the number of elements of dS in a round; 0 if dS is not kept."""
        kept = self.shares(p, c)
        return kept.at_a_time * kept.heads * self.head_elements(p, c) if kept else 0

    def rounds(self, p: Problem, c: SimpleNamespace) -> int:
        """Returns the number of rounds."""
        return kept.rounds if (kept := self.shares(p, c)) else 1

    def shares_now(self, p: Problem, c: SimpleNamespace) -> range:
        """Returns the shares of a round; all if dS is not kept."""
        shares = range(p.batch * p.kv_heads * self.splits(p, c))
        kept = self.shares(p, c)
        return shares[c.round * kept.at_a_time :][: kept.at_a_time] if kept else shares

    def blocks_now(self, p: Problem, c: SimpleNamespace) -> int:
        """Returns the number of blocks of the first pass in a round: one for each tile of keys."""
        return share_stride(p, c) * len(self.shares_now(p, c))

    def first_block(self, p: Problem, c: SimpleNamespace) -> int:
        """Returns the number of blocks of the first pass in earlier rounds."""
        return share_stride(p, c) * self.shares_now(p, c).start

    def heads_now(self, p: Problem, c: SimpleNamespace) -> range:
        """Returns the query heads of a round, counted over all batch elements."""
        heads, shares = p.group // self.splits(p, c), self.shares_now(p, c)
        return range(shares.start * heads, shares.stop * heads)

    def first_head(self, p: Problem, c: SimpleNamespace) -> int:
        """Returns the first query head of a round, counted over all batch elements."""
        return self.heads_now(p, c).start


@lru_cache(maxsize=256)
def _shares_at_a_time(
    shares: int, most: int, tiles: int, multiprocessors: int, differ: bool, else_overlaps: bool
) -> int | None:
    """Returns the number of shares per round, at most `most`, with which rounds take least time.

    Returns None if multiprocessors, which run a block each, would often have no work, unless one
    round is enough and passes do not overlap otherwise.

    tiles: blocks of a share. differ: the longest block takes twice as long as the mean one, and
        blocks that start later are short.
    """

    def time_of_round(now: int) -> float:  # in times of a mean block
        blocks = now * tiles
        return max(blocks / multiprocessors, 2) if differ else cdiv(blocks, multiprocessors)

    def time(now: int) -> float:
        rounds, last = divmod(shares, now)
        whole = rounds * time_of_round(now) + (time_of_round(last) if last else 0)
        return round(whole, 3)  # so that equal times are equal, and the fewest rounds are taken

    most = min(most, shares)
    now = min(range(most, max(most // 2, most - 16), -1), key=time)
    busy = shares * tiles / multiprocessors / time(now)
    is_fast = busy >= _BUSY or (now == shares and not else_overlaps)
    return now if is_fast else None
