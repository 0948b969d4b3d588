"""Launches of `mma_slices_backward`, which run in rounds over heads or keys, with P and dS in
global memory.
"""

from types import SimpleNamespace

from cupyfa.ladder.common import even_width, warps_of_scores
from cupyfa.ladder.kernel import Formula, Launch
from cupyfa.ladder.tiles import TileChoice, cdiv, named
from cupyfa.problem.problem import Problem, round_up

ANY_D = 2**31 - 1
_TILES = named(
    "Br Bc Wr Wc Bd stages room",
    (128, 256, 64, 64, 32, 4, 2048),
    (128, 128, 64, 32, 32, 4, 4096),
    (128, 128, 64, 32, 32, 2, 4096),
    (64, 128, 32, 32, 32, 2, 8192),
    (32, 64, 16, 32, 16, 2, 16384),
)
# On sm_100, ptxas runs out of registers for the first tile. Few rows fill only small tiles.
TILES = TileChoice(_TILES, on={"100": {ANY_D: _TILES[1:2]}}, few_rows={32: {ANY_D: _TILES[-1:]}})
CANDIDATES = {
    "Br": (64, 128),
    "Bc": (128, 256),
    "Wr": (32, 64),
    "Wc": (32, 64),
    "Bd": (16, 32, 64),
    "stages": (2, 3, 4),
    "room": (512, 1024, 2048, 4096),
}
RULES = {
    "Wr and Bd are multiples of 16, Wc of 32": lambda c: c.Wr % 16 == c.Bd % 16 == c.Wc % 32 == 0,
    "Br is a multiple of Wr, Bc of Wc": lambda c: c.Br % c.Wr == c.Bc % c.Wc == 0,
    "Br is a multiple of Bd, Bc of Br": lambda c: c.Br % c.Bd == c.Bc % c.Br == 0,
    "stages is 2 or more": lambda c: c.stages >= 2,
}


def slices_shared(p: Problem, c: SimpleNamespace) -> int:
    return 2 * c.stages * (c.Br + c.Bc) * c.Bd


def round_keys(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of keys per round: all keys, rounded up to a multiple of 8, or as many
    whole K/V tiles as fit into `room` score tiles.
    """
    column = p.group * cdiv(p.M, c.Br)
    if column * cdiv(p.N, c.Bc) <= c.room:
        return round_up(p.N, 8)
    return max(c.room // column, 1) * c.Bc


def round_heads(p: Problem, c: SimpleNamespace) -> int:
    """Returns the maximum number of key heads per round; their scores fill at most `room` tiles."""
    tiles = p.group * cdiv(p.M, c.Br) * cdiv(p.N, c.Bc)
    return min(max(c.room // max(tiles, 1), 1), max(p.batch * p.kv_heads, 1))


def rounds_of_keys(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of rounds over the keys of one head."""
    return max(cdiv(p.N, max(round_keys(p, c), 1)), 1)


def count(p: Problem, c: SimpleNamespace) -> int:
    """Returns the total number of rounds."""
    heads = max(p.batch * p.kv_heads, 1)
    return cdiv(heads, round_heads(p, c)) * rounds_of_keys(p, c)


def covered(columns: int, c: SimpleNamespace) -> tuple[int, int]:
    """Returns the number of tiles that cover a gradient's columns, and their total width."""
    width = even_width(columns, c.Bc, c.Bc // c.Wc * 16)
    return cdiv(columns, width), round_up(columns, width)


def scores(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of elements of P (or dS) per round."""
    return round_heads(p, c) * p.group * p.M * round_keys(p, c)


def sums(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of elements of dQ_sum, in whole tiles; 0 if one round covers all keys."""
    if rounds_of_keys(p, c) == 1:
        return 0
    rows = round_heads(p, c) * p.group * cdiv(p.M, c.Br) * c.Br
    return rows * covered(p.d, c)[1]


def _heads_now(p: Problem, c: SimpleNamespace) -> range:
    first = c.round // rounds_of_keys(p, c) * round_heads(p, c)
    return range(first, min(first + round_heads(p, c), p.batch * p.kv_heads))


def _keys_now(p: Problem, c: SimpleNamespace) -> range:
    first = c.round % rounds_of_keys(p, c) * round_keys(p, c)
    return range(first, min(first + round_keys(p, c), p.N))


def launch(entry: str, args: str, tiles: Formula, shared: Formula) -> Launch:
    """Makes a launch of `tiles` blocks for each key head of a round."""
    return Launch(
        f"mma_slices_backward_{entry}",
        args=f"{args} sizes heads group first_head first_key stride scale mods",
        grid=lambda p, c: tiles(p, c) * len(_heads_now(p, c)),
        threads=warps_of_scores,
        shared=shared,
        numbers={
            "first_head": lambda p, c: _heads_now(p, c).start * p.group,
            "first_key": lambda p, c: _keys_now(p, c).start,
            "stride": round_keys,
        },
        in_rounds=True,
    )


def _score_tiles(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of score tiles per key head in a round: one or more, even without keys."""
    return p.group * max(cdiv(p.M, c.Br) * cdiv(len(_keys_now(p, c)), c.Bc), min(p.M, 1))


def _key_tiles(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of dV and dK tiles per key head in a round: at least one of each."""
    tiles = covered(p.dv, c)[0] + covered(p.d, c)[0]
    return max(cdiv(len(_keys_now(p, c)), c.Br), 1) * tiles


SCORES = launch(
    *("scores", "Q K V dO lse delta P.data dS.data", _score_tiles),
    # Holds the ring buffer of slices, a P tile in float32, and lse and delta of each row.
    shared=lambda p, c: slices_shared(p, c) + 4 * c.Br * c.Bc + 8 * c.Br,
)
COLUMNS = launch("columns", "Q dO lse P.data dS.data dK dV", _key_tiles, slices_shared)
ROWS = launch(
    *("rows", "K lse dS.data dQ_sum.data dQ"),
    tiles=lambda p, c: p.group * cdiv(p.M, c.Br) * covered(p.d, c)[0],
    shared=slices_shared,
)
