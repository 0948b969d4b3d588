"""The division of a sequence's rows among ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np

from cupyfa.distributed.communicator import Group
from cupyfa.errors import described
from cupyfa.problem.problem import whole
from cupyfa.problem.structured_arrays import KINDS, Structured

Order = Literal["zigzag", "contiguous"]
Schedule = Literal["gather", "ring"]


def rows(n: int, group: Group, *, order: Order = "zigzag") -> list[range]:
    """The rows of a sequence of n that this rank holds, one range after the other.

    order: "zigzag" cuts the sequence into 2 · ranks ranges and gives rank r the ranges r and
        2 · ranks - 1 - r: under a causal mask all ranks have equal work. "contiguous" gives each
        rank one range. Ranges differ by at most one row, and are empty if there are too few.

    Raises ValueError for another order, and for n below 0.
    """
    return Shards.of(whole("n", n, 0), group.ranks, order).ranges[group.rank]


def shard(array: Any, group: Group, *, axis: int = 2, order: Order = "zigzag") -> Any:
    """The part of a whole array that this rank holds: its ``rows`` along an axis, in a new array.

    By default the axis is that of rows in [batch, heads, rows, d].
    """
    own = rows(array.shape[axis], group, order=order)
    before = (slice(None),) * (axis % array.ndim)
    return np.concatenate([array[(*before, slice(x.start, x.stop))] for x in own], axis=axis)


@dataclass(frozen=True, eq=False)
class Sharded(Structured):
    """The rows of a sequence that this rank has, of an array that is divided among ranks.

    ``cupyfa.attention``, ``vjp`` and ``backward`` take q, k and v as Sharded arrays of one group,
    order and schedule; all ranks call with the same other arguments.

    array: q [batch, heads, rows, d], k [batch, kv_heads, rows, d] or v [batch, kv_heads, rows, dv],
        of float16, bfloat16, float32 or float64: the rows ``rows(n, group, order=order)`` of all
        batch elements and heads. A rank may have none.
    group: of the ranks that compute together.
    rows: n, the number of rows in the whole sequence; by default ranks times those that this rank
        has, so it is needed if ranks do not divide them.
    order: how the sequence is divided, as for ``rows``.
    schedule: what ranks send each other, see docs/many-gpus.md. "gather": each rank collects the
        keys of some heads at a time. "ring": keys travel from rank to rank.

    Results are plain arrays of this rank's rows. Kernel and tiles are chosen for the whole problem.
    Expressions may name the score and position - key, and what docs/many-gpus.md lists for the
    schedule. With "gather", and rows divided at multiples of the kernel's tiles, out has the bits
    of one call on the whole with the same kernel and tiles, except with kernels that the page
    names. Gradients of keys are summed over the ranks in float32 (float64 for float64), in the
    order of ranks; with ``deterministic`` every run with as many ranks gives the same bits.

    Calls raise, on all ranks the same: TypeError, ValueError and Unsupported for wrong arguments of
    any rank, ValueError if shapes, dtypes, options, versions or devices differ. DeviceError if
    another rank fails, ends or does not answer within the time-out of the group, which then has
    ended.
    """

    array: Any
    group: Group
    rows: int | None = None
    order: Order = "zigzag"
    schedule: Schedule = "gather"


KINDS[Sharded] = "cupyfa.distributed.rank_functions"


@dataclass(frozen=True)
class Part:
    """Consecutive rows of the sequence, and their position in a rank's array."""

    rows: range
    start: int

    @property
    def at(self) -> slice:
        return slice(self.start, self.start + len(self.rows))


@dataclass(frozen=True)
class Shards:
    """The ranges of rows of every rank."""

    n: int
    ranks: int
    order: str

    @classmethod
    def of(cls, n: int, ranks: int, order: str) -> Shards:
        if not isinstance(order, str) or order not in ("zigzag", "contiguous"):
            raise ValueError(f"order is {described(order)}; use 'zigzag' or 'contiguous'")
        return _kept(n, ranks, order)

    @cached_property
    def ranges(self) -> list[list[range]]:
        """The ranges of each rank, in the order in which it holds them."""
        count = 2 * self.ranks if self.order == "zigzag" else self.ranks
        cuts = [self.n * i // count for i in range(count + 1)]
        found = [range(*x) for x in pairwise(cuts)]
        if self.order == "contiguous":
            return [[x] for x in found]
        return [[found[r], found[-1 - r]] for r in range(self.ranks)]

    @cached_property
    def sizes(self) -> list[int]:
        """The number of rows of each rank."""
        return [sum(map(len, x)) for x in self.ranges]

    @cached_property
    def most(self) -> int:
        return max(self.sizes)

    def parts(self, rank: int) -> list[Part]:
        """The non-empty ranges of a rank, with adjacent ones joined."""
        found: list[range] = []
        for x in self.ranges[rank]:
            if found and x.start == found[-1].stop:
                found[-1] = range(found[-1].start, x.stop)
            elif len(x):
                found.append(x)
        starts = accumulate(map(len, found), initial=0)
        return [Part(x, start) for x, start in zip(found, starts)]

    @cached_property
    def padded_places(self) -> np.ndarray:
        """The index of each row in the concatenated arrays of all ranks, each padded to the
        largest number of rows.
        """
        found = np.empty(self.n, np.intp)
        for rank in range(self.ranks):
            for x in self.parts(rank):
                first = rank * self.most + x.start
                found[x.rows.start : x.rows.stop] = np.arange(first, first + len(x.rows))
        return found


_kept = lru_cache(Shards)  # with their places, which every call of the same sizes needs
