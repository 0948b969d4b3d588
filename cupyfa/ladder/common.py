"""Formulas and functions shared by the records of several kernel families."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from cupyfa.ladder.kernel import Kernel, Launch, Walk
from cupyfa.ladder.operations import visible_scores
from cupyfa.ladder.tiles import cdiv, named
from cupyfa.problem.optional_inputs import KEY_TILES, ROW_MAX, ROW_TILES
from cupyfa.problem.problem import Problem, round_up

WARP = 32
HALF = ("float16", "bfloat16")
CLEARING = 256  # threads per block of clear_rest
SHARED_OF_SM_90 = 232448  # maximum bytes of shared memory per block on sm_90
Shares = Mapping[str, Callable[[Problem, SimpleNamespace], float]]


ROOM_UNIT = 1 << 14  # bytes
# Tiles of the baselines: scratch memory of a round over heads, in ROOM_UNIT; usually 768 MiB.
ROOM = named("room", (49152,))
ROOM_CANDIDATES = {"room": (16384, 32768, 49152)}
FEWEST_ROWS = 256  # fewer rows of a round would cost more in launches than in products

# What slows a baseline, fitted to times of an H200; see docs/records/baseline.md.
_LEAST_SCORES = 1 << 23  # scores up to which launches take most of the time
_USUAL_KEYS = 1024  # keys with which the speeds of baselines were measured
_TAIL = 1 / 18  # waves of tiles that a call of cuBLAS loses because its blocks do not end together


def heads_in_room(p: Problem, c: SimpleNamespace, row: int, head: int = 0) -> int:
    """Returns the number of query heads that fit into c.room, at least 1.

    row: the bytes of scratch memory for each row. head: those for each query head in addition.
    """
    return max((c.room * ROOM_UNIT) // max(row * p.M + head, 1), 1)


def rows_in_room(p: Problem, c: SimpleNamespace, row: int, head: int = 0) -> int:
    """Returns the number of rows of a query head that fit into c.room, at least FEWEST_ROWS."""
    return max(((c.room * ROOM_UNIT) - head) // max(row, 1), FEWEST_ROWS)


def baseline_shares(
    row: Callable[[Problem], int], row_operations: Callable[[Problem], int]
) -> Shares:
    """Returns the shares of its measured speed that a baseline reaches for a problem.

    row: the bytes of scratch memory for each row. row_operations: the operations of products in the
    time that a row takes in addition to them.
    """

    def of_rows(keys: int, p: Problem) -> float:
        products = 2 * (p.d + p.dv) * keys
        return products / max(products + row_operations(p), 1)

    def of_usual_rows(p: Problem, c: SimpleNamespace) -> float:
        return min(of_rows(p.N, p) / max(of_rows(_USUAL_KEYS, p), 1e-9), 1.0)

    return {
        "it computes masked scores too": _share_of_visible,
        "its launches take longer than so few scores": _share_of_scores,
        "its products have too few tiles": lambda p, c: _share_of_tiles(p, c, row(p)),
        "the softmax of a row takes longer than products with few keys": of_usual_rows,
    }


def _share_of_visible(p: Problem, c: SimpleNamespace) -> float:
    """Returns the share of scores that a causal mask or a window leaves: only they are work."""
    if p.is_ragged or not p.M * p.N:
        return 1.0
    return visible_scores(p) / (p.M * p.N)


def _share_of_scores(p: Problem, c: SimpleNamespace) -> float:
    return min(p.batch * p.heads * p.M * p.N / _LEAST_SCORES, 1.0)


def _share_of_tiles(p: Problem, c: SimpleNamespace, row: int) -> float:
    """Returns the share of time in which the tiles of a product [rows, dv] fill the device.

    A call computes evenly spaced heads: at least all batch elements of a head, all key heads of a
    batch element, or all query heads of a key head, as far as they fit into c.room.
    """
    heads = min(heads_in_room(p, c, row), max(p.batch, p.kv_heads, p.group))
    rows = min(rows_in_room(p, c, row), p.M)
    waves = heads * cdiv(rows, 128) * cdiv(p.dv, 64) / c.multiprocessors
    return waves / (waves + _TAIL)


def whole_groups(p: Problem, heads: int) -> int:
    """Returns how many groups of query heads fit into ``heads`` query heads, at least 1."""
    return max(heads // max(p.group, 1), 1)


def tiles_of(p: Problem, rows: int, size: int) -> int:
    """Returns the number of row tiles of a head; for a packed batch, an upper bound."""
    return cdiv(rows, size) if p.sequences is None else rows // size + p.sequences


def row_tiles(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of tiles of Br rows over all heads."""
    return tiles_of(p, p.M, c.Br) * p.heads * p.batch


# Field `walks` of launches whose blocks loop over K/V tiles and skip tiles that are masked.
ALONG_KEYS: dict[str, Walk] = {KEY_TILES: lambda p, c: (c.Br, c.Bc)}
# Field `walks` of launches whose blocks loop over Q tiles and skip tiles that are masked.
DOWN_ROWS: dict[str, Walk] = {ROW_TILES: lambda p, c: (c.Br, c.Bc)}


def share_stride(p: Problem, c: SimpleNamespace) -> int:
    """Returns the distance between the indices of a key tile in two shares of its group."""
    return max(tiles_of(p, p.N, c.Bc), 1)


def key_tiles(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of tiles of Bc keys over all heads: one per head if N is 0."""
    return share_stride(p, c) * p.kv_heads * p.batch


def warps_of_scores(p: Problem, c: SimpleNamespace) -> int:
    """Returns the threads per block if each warp computes Wr x Wc scores of a tile."""
    return WARP * c.Br * c.Bc // (c.Wr * c.Wc)


def padded_columns(sizes: Problem | SimpleNamespace, multiple: int) -> int:
    """Returns d + dv, each rounded up to a multiple: the columns of Q and dO, or of K and V."""
    return round_up(sizes.d, multiple) + round_up(sizes.dv, multiple)


def even_width(columns: int, most: int, step: int) -> int:
    """Returns the width, a multiple of `step` near `most`, of equal tiles that cover `columns`."""
    return cdiv(columns, cdiv(columns, most) * step) * step


def rung(
    before: Kernel,
    name: str,
    adds: str,
    *,
    launch: Mapping[str, Any] | None = None,
    first: Sequence[Launch] = (),
    then: Sequence[Launch] = (),
    **fields: Any,
) -> Kernel:
    """Derives a rung from the one before it.

    The new record has its own name and files. ``fields`` replaces fields of the record, ``launch``
    replaces fields of each launch, and the launches ``first`` and ``then`` are added before and
    after. ``dtype_arch`` is restricted to the new dtypes.
    """
    launches = (
        replace(x, entry=x.entry.replace(before.name, name), **(launch or {}))
        for x in before.launches
        if isinstance(x, Launch)
    )
    dtypes = fields.get("dtypes", before.dtypes)
    usual = {
        "after": (before.name,),
        "tflops": {},
        "launches": (*first, *launches, *then),
        "dtype_arch": {x: arch for x, arch in before.dtype_arch.items() if x in dtypes},
    }
    return replace(before, name=name, adds=adds, **(usual | fields))


def batch_first(p: Problem) -> bool:
    """Returns whether to schedule a head's batch elements one after the other.

    In this order, blocks that run at the same time read the same tiles of a shared bias.
    """
    held = p.modifiers.held
    return held is not None and p.batch > 1 and held.shape[0] == 1 and held.shape[2] > 1


def clear_rest(array: str, rows: str, heads: str, width: str = "") -> Launch:
    """Makes the launch that fills an array's padding rows and its rows outside of sequences.

    width: the name of the columns, d or dv; d16 or dv16 for scratch that is padded to a multiple of
    16 columns.
    """
    columns = width.removesuffix("16")
    of_operands = columns != width

    def width_of(p: Problem, c: SimpleNamespace) -> int:
        found = getattr(p, columns) if columns else 1
        return round_up(found, 16) if of_operands else found

    return Launch(
        "clear_rest",
        args=f"{array} {rows} {heads} mods",
        grid=lambda p, c: max(cdiv(getattr(p, rows), CLEARING), 1) * getattr(p, heads) * p.batch,
        threads=lambda p, c: CLEARING,
        begins_early=True,
        constants={
            "of_keys": lambda p, c: rows == "N",
            "of_sums": lambda p, c: not width,
            "of_lse": lambda p, c: array in ("lse", ROW_MAX),
            "of_operands": lambda p, c: of_operands,
            "width": width_of,
        },
        file="forward/steps/clear_rest.cu",
        when=lambda p: p.modifiers.is_packed or p.modifiers.used["MN".index(rows)],
    )


def clear_row_max() -> Launch:
    """Makes the launch that fills unused rows of row_max, if the call returns row maxima."""
    rest = clear_rest(ROW_MAX, "M", "heads")
    return replace(rest, when=lambda p: p.modifiers.has_row_max and rest.when(p))


def with_cleared_rest(kernel: Kernel, *rest: Launch) -> Kernel:
    """Appends the launches that fill unused rows, if the kernel supports lengths."""
    if "lengths" not in kernel.features:
        return kernel
    return replace(kernel, launches=(*kernel.launches, *rest))


def bias_bytes(p: Problem) -> int:
    """Returns the element size of the bias or mask that is copied to shared memory, or 0."""
    held = p.modifiers.held
    return held.numpy.itemsize if held else 0
