"""Tile sizes of kernels, and the order in which the planner tries them."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cupyfa.numerics.shown import Shown
from cupyfa.problem.options import PLAIN
from cupyfa.problem.problem import Problem, round_up

Tile = Mapping[str, int]
Tiles = Sequence[Tile]
TilesByD = Mapping[int, Tiles]  # maps the largest head dimension to its tiles
Rules = Mapping[str, Callable[[Any], bool]]  # maps a rule's text to its predicate on a record

# Names declared above every kernel's file or available to formulas as attributes of `c`.
RESERVED = (
    *PLAIN.constants,
    "Mods",
    *("d", "dv", "threads", "shared_bytes"),
    *("scalar", "operand", "real"),
    *("multiprocessors", "arch", "round"),
)
# Names of the constants that hold the number of rows, or of keys, per tile.
TILE_ROWS, TILE_KEYS = ("Br", "Qr"), ("Bc", "Qc", "Bk")
_MOSTLY_EMPTY = 0.05  # tiles with a larger fraction of empty key slots are tried last
_MORE, _FAR_MORE = 1.15, 1.5  # tiles that compute this many times as many scores are avoided
_FEW = 4  # if tiles hold at most N / _FEW keys, a mask wastes little work


def cdiv(count: int, size: int) -> int:
    """Divides and rounds up: the number of tiles of ``size`` that cover ``count``."""
    return -(-count // size)


def is_size(value: Any) -> bool:
    """Returns whether a value is an integer from 1 to 2**31 - 1."""
    if type(value) is int:  # fast path; the general test would take a tenth of import time
        return 1 <= value < 2**31
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return whole and 1 <= value < 2**31


def named(names: str, *sizes: Sequence[int]) -> tuple[dict[str, int], ...]:
    """Makes tiles from sizes, as in ``named("Br Bc", (64, 32), (32, 32))``."""
    return tuple(dict(zip(names.split(), each, strict=True)) for each in sizes)


def _no_tiles(p: Problem) -> Tiles:
    return ()


@dataclass(frozen=True, repr=False)
class TileChoice(Shown):
    """A kernel's tile sizes by head dimension, architecture and number of rows.

    A tile holds every tunable constant of the kernel, such as ``{"Br": 64, "Bc": 32}``. The planner
    selects the first tile that fits the device and the caller's sizes, in this order:

    short: smaller tiles for problems with too few blocks to fill the device, that is, if the
        busiest multiprocessor would compute more than 1.5 times as many scores with larger tiles.
    few_rows: tiles for groups of query heads that have at most this many rows in total, as in
        ``{16: {64: tiles}}``.
    of_problem: a formula for the tiles of special problems; an empty sequence for others.
    on: tiles measured on an architecture, as in ``{"90": {64: tiles}}``.
    up_to: tiles by largest head dimension, as in ``{64: tiles}``.
    usual: all other tiles, in order of preference.

    The inner keys of ``short``, ``few_rows`` and ``on`` are largest head dimensions, too. Within
    ``of_problem``, ``on`` and ``up_to``, tiles that leave many key slots empty, or compute far more
    scores, come last. ``blocks_per_sm`` is the number of blocks of usual tiles that run on one
    multiprocessor at a time.
    """

    usual: Tiles = ({},)
    up_to: TilesByD = field(default_factory=dict)
    on: Mapping[str, TilesByD] = field(default_factory=dict)
    few_rows: Mapping[int, TilesByD] = field(default_factory=dict)
    short: TilesByD = field(default_factory=dict)
    of_problem: Callable[[Problem], Tiles] = _no_tiles
    blocks_per_sm: int = 1

    @classmethod
    def of(cls, names: str, usual: Any, *, blocks_per_sm: int = 1, **others: Any) -> TileChoice:
        """Makes tiles from sizes: ``of("Br Bc", [(64, 32)], up_to={64: [(128, 64)]})``."""

        def tiles(sizes: Any) -> Any:
            if isinstance(sizes, Mapping):
                return {key: tiles(each) for key, each in sizes.items()}
            return named(names, *sizes)

        choices = {name: x if callable(x) else tiles(x) for name, x in others.items()}
        return cls(tiles(usual), blocks_per_sm=blocks_per_sm, **choices)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.usual[0])

    @property
    def first(self) -> Tile:
        """The tile for small head dimensions, on any architecture."""
        return next(iter(self.up_to.values()), self.usual)[0]

    def ordered(
        self, p: Problem, arch: str | None, multiprocessors: int, pack_gqa: Callable[[Tile], int]
    ) -> tuple[Tile, ...]:
        """Returns the tiles to try, best first; ``pack_gqa`` maps a tile to its query heads."""

        def scores(tile: Tile) -> float:
            return _scores(p, tile, pack_gqa(tile), multiprocessors * self.blocks_per_sm)

        def is_mostly_empty(tile: Tile) -> bool:
            return p.N > 0 and 1 - p.N / round_up(p.N, tile.get("Bc", 1)) > _MOSTLY_EMPTY

        def masked_keys(tile: Tile) -> int:
            return max(tile.get("Bc", 1), p.N // _FEW) if p.is_masked else 0

        measured = [
            *self.of_problem(p),
            *tiles_of_d(p, self.on.get(arch or "", {})),
            *tiles_of_d(p, self.up_to),
        ]
        least = min(map(scores, measured), default=0)
        measured.sort(key=lambda x: (is_mostly_empty(x), scores(x) > _MORE * least))
        rows = min((x for x in self.few_rows if p.M * p.group <= x), default=0)
        tiles = (*tiles_of_d(p, self.few_rows.get(rows, {})), *measured, *self.usual)
        short = tiles_of_d(p, self.short)
        if not short or scores(tiles[0]) <= _FAR_MORE * min(map(scores, short)):
            return tiles
        return (*sorted(short, key=lambda x: (is_mostly_empty(x), masked_keys(x))), *tiles)


# Validation rules for the field `tiles` of a Kernel.
RULES: Rules = {
    "tiles must hold at least one mapping, which may be empty": lambda x: bool(x.usual),
    "tiles must all map the same names to whole numbers from 1 to 2**31 - 1": lambda x: all(
        set(tile) == set(x.names) and all(map(is_size, tile.values())) for tile in x.usual
    ),
    f"tiles must not use the names {', '.join(RESERVED)}": lambda x: all(
        name.isidentifier() and name not in RESERVED for name in x.names
    ),
    "tiles for up_to, short, on and few_rows must be {head dimension: tiles}, with the names that "
    "the usual tiles have": lambda x: (
        all(map(is_size, x.few_rows))
        and all(
            is_size(d) and set(tile) == set(x.names) and all(map(is_size, tile.values()))
            for sizes in (x.up_to, x.short, *x.on.values(), *x.few_rows.values())
            for d, tiles in sizes.items()
            for tile in tiles
        )
    ),
    "tiles need blocks_per_sm of at least 1": lambda x: is_size(x.blocks_per_sm),
}


def tiles_of_d(p: Problem, sizes: TilesByD) -> Tiles:
    """Returns the tiles of the smallest head dimension that is large enough."""
    d = max(p.d, p.dv)
    return sizes.get(min((most for most in sizes if d <= most), default=0), ())


def _scores(p: Problem, tile: Tile, pack_gqa: int, at_a_time: int) -> float:
    """Estimates the number of scores per block slot, if `at_a_time` blocks run in parallel.

    A mask leaves about half of all scores plus the diagonal tiles, but at least one full row tile.
    """
    Br, Bc = tile.get("Br", 1), tile.get("Bc", 1)
    blocks = cdiv(p.M * pack_gqa, Br) * p.heads // pack_gqa * p.batch
    if p.is_masked:
        return max(blocks / at_a_time * Br * (p.N + Br + Bc) / 2, Br * p.N)
    return cdiv(blocks, at_a_time) * Br * cdiv(p.N, Bc) * Bc
