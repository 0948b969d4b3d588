"""Draws problem sizes near the limits of a kernel's tiles, pipeline stages and schedules."""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

from cupyfa.ladder.common import WARP
from cupyfa.ladder.split_float32 import repairs_rows
from cupyfa.ladder.tiles import TILE_KEYS, TILE_ROWS, round_up
from cupyfa.planner.plan import Limits, Plan
from cupyfa.problem.lengths import Lengths, Packed, pairs_of
from cupyfa.problem.options import Window
from cupyfa.problem.problem import Problem

STAGES = ("stages", "Qs")  # names of constants that hold a number of stages
_MANY_BLOCKS, _ODD_BLOCKS = 44, 33  # numbers of multiprocessors to simulate
_SHARED = 64  # most rows whose query heads, 8 of a key head, belong to one block
_COUNTED = 64  # largest d for which many short heads are processed by persistent blocks
_NARROW = 64  # largest dv of cases whose warpgroups see different numbers of key tiles, and of
# cases whose blocks share groups
_SECTION = 8192  # keys whose sums kernels with split operands keep in registers
_BOX = 64  # columns per slice of d that TMA copies
_REST = 257, 600  # range of the number of rows to add that belong to no sequence
_LEFT = 2  # fewest rows of an array without rows that belong to a sequence
_EMPTY = 0.03  # probability of a length of 0
_ROWS_OF_SEQUENCES = (  # kinds of (query, key) lengths; the first pair is always drawn
    *(("edge", "beyond"), ("beyond", "edge"), ("below", "edge"), ("none", "below")),
    *(("edge", "none"), ("one", "one"), ("below", "below")),
)


class Tile:
    """The tile sizes and stages of a plan, relative to which lengths are drawn."""

    def __init__(self, plan: Plan) -> None:
        constants = plan.constants
        self.is_persistent = plan.kernel.persistent
        self.counts_heads = any("finishes" in x.constants for x in plan.launches)
        self.shares_groups = any("splits" in x.numbers for x in plan.launches)
        # A kernel without key tiles processes one key per lane of a warp or per thread of a block.
        threads = max((x.threads for x in plan.launches), default=1)
        at_a_time = WARP if any(name in constants for name in TILE_ROWS) else threads
        self.rows = max((constants[x] for x in TILE_ROWS if x in constants), default=1)
        self.keys = max((constants[x] for x in TILE_KEYS if x in constants), default=at_a_time)
        self.has_ring = any(x in constants for x in STAGES)
        self.stages = max((constants[x] for x in STAGES if x in constants), default=2)
        self.row_stages = self.stages if plan.kernel.operation == "backward" else 1
        self.span = constants.get("span", 0)
        boxed = any(x.boxes for x in plan.launches)
        is_sliced = plan.kernel.largest_d is None and (boxed or "Bd" in constants)
        self.slice = constants.get("Bd", _BOX) if is_sliced else math.inf
        self.has_splits = any("num_splits" in x.numbers for x in plan.launches)
        self.has_sections = plan.kernel.operation == "forward" and repairs_rows(plan.kernel)
        self.packs_heads = any("pack_gqa" in x.constants for x in plan.launches)

    def is_left(self, p: Problem) -> bool:
        """Returns whether the stages are too few for all keys or, for gradients, for all rows."""
        rows = self.row_stages * self.rows
        return self.stages * self.keys < p.N or (self.row_stages > 1 and rows < p.M)

    def work_of(self, p: Problem, operation: str) -> int:
        """Returns the number of multiply-adds if every row and key tile counts as full."""
        group = p.group if self.packs_heads else 1
        sizes = pairs_of(*p.lengths) if p.lengths else [(p.M, p.N)] * p.batch
        scores = sum(round_up(M * group, self.rows) * round_up(N, self.keys) for M, N in sizes)
        return _multiply_adds(scores * p.heads // group, p, operation)

    def length(self, kind: str, size: int, stages: int, pick: random.Random) -> int:
        """Draws a number of rows or keys of this kind, relative to tiles of ``size``."""
        if pick.random() < _EMPTY:
            return 0
        if kind == "below":  # log-uniform
            return min(int(math.exp(pick.uniform(0, math.log(max(size, 2))))), max(size - 1, 1))
        if kind == "few":  # so few rows that several heads may share a row tile
            return pick.randrange(1, max(size // 4, 1) + 1)
        if kind == "edge":
            return max(
                size * pick.randrange(1, max(96 // size, 2) + 1) + pick.choice((-1, 0, 1)), 1
            )
        least = max(size * stages, self.span if kind == "many" and size == self.keys else 0)
        return least + pick.randrange(1, 2 * size + 32)


def splits_of(plan: Plan) -> int:
    return max((x.numbers.get("num_splits", 1) for x in plan.launches), default=1)


def is_on_few_blocks(plan: Plan, limits: Limits) -> bool:
    """Returns whether a launch would have more blocks on a device with more multiprocessors."""
    many = replace(limits, multiprocessors=2**20)
    fixed = SimpleNamespace(**plan.constants, multiprocessors=many.multiprocessors, round=0)
    for x in plan.launches:
        if x.launch.in_rounds or "num_splits" in x.numbers:
            continue
        blocks = x.launch.grid(plan.problem, fixed)
        if math.prod(blocks if isinstance(blocks, Sequence) else (blocks,)) > math.prod(x.grid):
            return True
    return False


@dataclass(frozen=True)
class Crowd:
    """Sizes and a number of multiprocessors that trigger a schedule for many tiles or heads."""

    heads: tuple[int, int, int]  # batch, kv_heads, query heads per key head
    M: int
    N: int
    multiprocessors: int | None = None


def crowds_of(p: Problem, tile: Tile, pick: random.Random) -> list[Crowd | None]:
    """Returns sizes that trigger a kernel's special schedules; None stands for usual sizes."""
    few, found = partial(pick.randrange, 1, 20), list[Crowd | None]()
    if p.is_ragged:
        return found
    may_share = tile.shares_groups
    if tile.has_splits:  # enough splits that merging them takes several rounds
        keys = tile.keys * pick.randrange(34, 41) - pick.randrange(2)
        few_heads = 1, 1, pick.choice((1, 2))
        found += [Crowd(few_heads, pick.randrange(1, 6), keys, _MANY_BLOCKS), None]
    if tile.is_persistent and p.right is not None:  # two tiles per head
        rows = tile.rows + pick.randrange(1, tile.rows)
        if p.dv > _NARROW:  # some blocks are idle
            heads = pick.choice(((2, 4, 4), (8, 4, 1)))
            found += [Crowd(heads, rows, pick.randrange(1, 12), _ODD_BLOCKS), None]
        else:  # the halves of the first tile see different numbers of key tiles
            offset = 2 * tile.keys - tile.rows // 2 - pick.randrange(tile.rows // 2)
            found.append(Crowd((1, 4, 1), rows, rows + max(offset, 0)))
    if tile.counts_heads:  # persistent blocks, or each head's last block computes dQ
        is_plain = max(p.d, p.dv) <= _COUNTED and p.window == (None, None) and not p.has_mask
        keys = few() + (tile.keys if is_plain else 0)  # two tiles of each head, or one
        found += [Crowd((2, 66, 1), few(), keys)]
        may_share = may_share and not is_plain
    if tile.has_sections and max(p.d, p.dv) <= _NARROW:
        found += [Crowd((1, 1, 2), pick.randrange(1, 9), _SECTION + few())]
    if may_share:
        found += [_sharing(p, tile, pick) if max(p.d, p.dv) <= _NARROW else None, None]
    return found


def _sharing(p: Problem, tile: Tile, pick: random.Random) -> Crowd:
    """Returns sizes for which several blocks share a group, with several of its heads each."""
    kv_heads, keys = pick.choice(((2, 0), (1, tile.keys)))
    rows, keys = _SHARED + pick.randrange(1, _SHARED), keys + pick.randrange(2, tile.keys)
    differ = p.causal or p.right is not None  # blocks differ in length, so more share a group
    return Crowd((1, kv_heads, 8), rows, keys, pick.choice((4, 8)) // (2 if differ else 1))


def with_long_rows(p: Problem) -> Problem:
    """Replaces the mask with one that lets the last row see all keys and compiles to equal code."""
    left, right = p.window
    causal = "bottom-right" if p.causal else None
    return p.with_options(causal=causal, window=(None if left is None else p.N, right))


def work_of(p: Problem, operation: str = "forward") -> int:
    """Returns the number of multiply-adds of an operation."""
    return _multiply_adds(p.heads * p.pairs, p, operation)


def _multiply_adds(scores: int, p: Problem, operation: str) -> int:
    return scores * (p.d + p.dv) * {"backward": 5, "tangent": 6}.get(operation, 2) // 2


def repaired_of(p: Problem, operation: str = "forward") -> int:
    """Returns the number of rows that may need repair: of O, or of dQ, dK and dV."""
    rows, keys = p.batch * p.heads * p.M, p.batch * p.kv_heads * p.N
    return rows + 2 * keys if operation == "backward" else rows


def longest(p: Problem) -> int:
    """Returns the largest number of keys that a query can attend to."""
    return max(p.lengths[1].counts) if p.lengths else p.N


def some_lengths(used: bool) -> Packed:
    """Returns placeholder lengths, with or without seqused; drawn lengths replace them later."""
    one = Lengths((64, 64), (64, 64) if used else None)
    return one, one


def lengths_near(tile: "Tile", like: Packed, pick: random.Random, *, is_full: bool) -> Packed:
    """Draws sequence lengths (0, 1, near a tile boundary, several tiles) and padding rows.

    Padding rows precede the first sequence or follow the last one. is_full: whether to draw two
    sequences such that the second one starts on a tile boundary and extends to the end of the
    array, so that every tile index is used.
    """
    kinds = [_ROWS_OF_SEQUENCES[0], *pick.sample(_ROWS_OF_SEQUENCES[1:], pick.randrange(1, 6))]
    pick.shuffle(kinds)
    if is_full:
        kinds = [kinds[0], ("edge", "edge")]

    def drawn(of: Sequence[str], size: int, is_used: bool) -> Lengths:
        fixed = {"none": 0, "one": 1}
        rows = [fixed[x] if x in fixed else tile.length(x, size, 1, pick) for x in of]
        # Half of the rows are unused in the longest sequence and in some random sequences.
        halved = [n == max(rows) or pick.random() < 0.3 for n in rows]
        used = tuple(n // 2 if x else n for n, x in zip(rows, halved)) if is_used else None
        before, after = (pick.choice((0, 0, 1, size + 1)) for _ in range(2))
        if is_full:
            before, after = -sum(rows[:-1]) % size, 0
        return Lengths(tuple(rows), used, before, after)

    sizes, used = (tile.rows, tile.keys), (x.used is not None for x in like)
    q, k = (drawn(*x) for x in zip(zip(*kinds), sizes, used))
    return q, k


def without_rows(packed: Packed, pick: random.Random) -> Packed:
    """Returns the lengths with sequences of no rows, on one side or both.

    Some rows belong to no sequence, as an array without any compiles to other programs.
    """
    empty = pick.choice(((True, False), (False, True), (True, True)))
    q, k = (_emptied(x) if is_empty else x for x, is_empty in zip(packed, empty))
    return q, k


def _emptied(x: Lengths) -> Lengths:
    zeros = (0,) * len(x.rows)
    return Lengths(zeros, x.used and zeros, x.before, max(x.after, _LEFT))


def with_long_rest(packed: Packed, pick: random.Random) -> Packed:
    """Adds, on both sides, more rows that belong to no sequence than a block of threads has."""
    q, k = (replace(x, after=x.after + pick.randrange(*_REST)) for x in packed)
    return q, k


def window_near(
    limited: Iterable[bool],
    N: int,
    keys: int,
    pick: random.Random,
    *,
    edge: int | None = None,
    shift: int = 0,
) -> Window:
    """Draws window limits from 0 to N keys: log-uniform, or at a tile's edge.

    edge: if given, the limits lie this many keys from a tile's edge.
    shift: the position of query 0 among the keys.
    """

    def side(sign: int) -> int:
        if edge is not None and keys < N:
            nearest = (sign * shift + edge) % keys
            return nearest + keys * pick.randrange((N - nearest) // keys + 1)
        if keys <= N and pick.random() < 0.3:
            return keys * pick.randrange(1, N // keys + 1) - pick.choice((0, 1))
        return round(math.exp(pick.uniform(0, math.log(N + 1)))) - 1

    left, right = (side(sign) if has else None for sign, has in zip((1, -1), limited))
    return left, right
