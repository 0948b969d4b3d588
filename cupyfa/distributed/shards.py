"""Divides the rows of a sequence among ranks."""

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
    """Returns the ranges of rows that this rank holds in a sequence of n rows.

    order: "zigzag" cuts the sequence into 2 · ranks ranges and assigns the ranges r and
        2 · ranks - 1 - r to rank r, which balances the work under a causal mask. "contiguous"
        assigns one range per rank. Range lengths differ by at most one row, and may be 0.

    Raises ValueError for an unknown order or a negative n.
    """
    return Shards.of(whole("n", n, 0), group.ranks, order).ranges[group.rank]


def shard(array: Any, group: Group, *, axis: int = 2, order: Order = "zigzag") -> Any:
    """Copies this rank's ``rows`` out of a whole array.

    axis: the row axis; by default that of [batch, heads, rows, d].
    """
    own = rows(array.shape[axis], group, order=order)
    before = (slice(None),) * (axis % array.ndim)
    return np.concatenate([array[(*before, slice(x.start, x.stop))] for x in own], axis=axis)


@dataclass(frozen=True, eq=False)
class Sharded(Structured):
    """An array that is divided among ranks along the sequence; holds this rank's rows.

    ``cupyfa.attention``, ``vjp`` and ``backward`` take q, k and v as Sharded arrays with the same
    group, order and schedule. All ranks must pass the same further arguments.

    array: q [batch, heads, rows, d], k [batch, kv_heads, rows, d] or v [batch, kv_heads, rows, dv],
        of float16, bfloat16, float32 or float64. It holds the rows ``rows(n, group, order=order)``
        of all batch elements and heads; there may be no such rows.
    group: the group of ranks, from ``group()`` or ``threads()``.
    rows: n, the number of rows in the whole sequence; required unless n is divisible by the number
        of ranks.
    order: how the sequence is divided, as for ``rows``.
    schedule: what ranks send to each other, see docs/many-gpus.md. "gather": each rank collects all
        keys, a few heads at a time. "ring": keys are passed from rank to rank.

    Results are plain arrays of this rank's rows. Kernel and tiles are chosen for the whole problem.
    Expressions may use the score, position - key, and the indices that docs/many-gpus.md lists for
    the schedule. With "gather", if rows are divided at multiples of the kernel's tiles, out has the
    same bits as in a single call on the whole arrays with the same kernel and tiles, except for the
    kernels listed there. dk and dv are summed over the ranks in float32 (float64 for float64), in
    the order of ranks. With ``deterministic`` all runs with the same number of ranks return the
    same bits.

    All ranks raise the same error: TypeError, ValueError or Unsupported if any rank's arguments are
    wrong, and ValueError if shapes, dtypes, options, versions or devices differ. They raise
    DeviceError, and the group ends, if a rank fails, exits or does not answer within the time-out.
    """

    array: Any
    group: Group
    rows: int | None = None
    order: Order = "zigzag"
    schedule: Schedule = "gather"


KINDS[Sharded] = "cupyfa.distributed.rank_functions"


@dataclass(frozen=True)
class Part:
    """A range of rows of the sequence, and the index of its first row in the rank's array."""

    rows: range
    start: int

    @cached_property
    def at(self) -> slice:
        return slice(self.start, self.start + len(self.rows))


@dataclass(frozen=True)
class Shards:
    """How n rows are divided among ranks."""

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
        """Each rank's ranges, in the order in which its array holds them."""
        count = 2 * self.ranks if self.order == "zigzag" else self.ranks
        cuts = [self.n * i // count for i in range(count + 1)]
        found = [range(*x) for x in pairwise(cuts)]
        if self.order == "contiguous":
            return [[x] for x in found]
        return [[found[r], found[-1 - r]] for r in range(self.ranks)]

    @cached_property
    def sizes(self) -> list[int]:
        return [sum(map(len, x)) for x in self.ranges]

    @cached_property
    def most(self) -> int:
        return max(self.sizes)

    def parts(self, rank: int) -> list[Part]:
        """Returns a rank's non-empty ranges, with adjacent ranges joined."""
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
        """Each row's index after concatenating all ranks' arrays, padded to ``most`` rows each."""
        found = np.empty(self.n, np.intp)
        for rank in range(self.ranks):
            for x in self.parts(rank):
                first = rank * self.most + x.start
                found[x.rows.start : x.rows.stop] = np.arange(first, first + len(x.rows))
        return found


_kept = lru_cache(Shards)  # reuses objects, because padded_places is slow to compute
