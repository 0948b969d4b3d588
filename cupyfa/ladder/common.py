"""Formulas and functions that the records of several families share."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from cupyfa.ladder.kernel import Kernel, Launch, Walk
from cupyfa.ladder.tiles import cdiv
from cupyfa.problem.optional_inputs import KEY_TILES, ROW_MAX, ROW_TILES
from cupyfa.problem.problem import Problem, round_up

WARP = 32
HALF = ("float16", "bfloat16")
CLEARING = 256  # threads of a block that fills rows


def tiles_of(p: Problem, rows: int, size: int) -> int:
    """The number of tiles for the rows of a head; for a ragged batch an upper bound of it."""
    return cdiv(rows, size) if p.sequences is None else rows // size + p.sequences


def row_tiles(p: Problem, c: SimpleNamespace) -> int:
    """The number of tiles of Br rows, over all heads."""
    return tiles_of(p, p.M, c.Br) * p.heads * p.batch


# For launches that loop over the key tiles of a row tile and skip those that a block mask hides.
ALONG_KEYS: dict[str, Walk] = {KEY_TILES: lambda p, c: (c.Br, c.Bc)}
# For launches that loop over the row tiles of a key tile and skip those that a block mask hides.
DOWN_ROWS: dict[str, Walk] = {ROW_TILES: lambda p, c: (c.Br, c.Bc)}


def key_tiles(p: Problem, c: SimpleNamespace) -> int:
    """The number of tiles of Bc keys, over all heads: at least one per head, even if N is 0."""
    return max(tiles_of(p, p.N, c.Bc), 1) * p.kv_heads * p.batch


def warps_of_scores(p: Problem, c: SimpleNamespace) -> int:
    """The threads of a block whose warps compute Wr x Wc scores of a tile each."""
    return WARP * c.Br * c.Bc // (c.Wr * c.Wc)


def padded_columns(sizes: Problem | SimpleNamespace, multiple: int) -> int:
    """The columns of Q and dO, or of K and V, together: each rounded up to a multiple."""
    return round_up(sizes.d, multiple) + round_up(sizes.dv, multiple)


def even_width(columns: int, most: int, step: int) -> int:
    """The width of equal tiles that cover the columns: about `most`, and a multiple of `step`."""
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

    The new record has its own name and files, the given ``fields``, the fields ``launch`` in each
    launch, and more launches ``first`` and ``then``. ``dtype_arch`` keeps only its dtypes.
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
    """Whether a schedule takes the batch elements of a head one after the other, as they share an
    array with an element for every query and key.
    """
    held = p.modifiers.held
    return held is not None and p.batch > 1 and held.shape[0] == 1 and held.shape[2] > 1


def clear_rest(array: str, rows: str, heads: str, width: str = "") -> Launch:
    """Fills the rows of an output that are padding or belong to no sequence.

    For an operand, ``width`` ends with 16: its columns are padded to a multiple of 16.
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
        constants={
            "of_keys": lambda p, c: rows == "N",
            "of_sums": lambda p, c: not width,
            "of_operands": lambda p, c: of_operands,
            "width": width_of,
        },
        file="forward/steps/clear_rest.cu",
        when=lambda p: p.modifiers.is_packed or p.modifiers.used["MN".index(rows)],
    )


def clear_row_max() -> Launch:
    """Fills the unused rows of row_max, if the call returns it."""
    rest = clear_rest(ROW_MAX, "M", "heads")
    return replace(rest, when=lambda p: p.modifiers.has_row_max and rest.when(p))


def with_cleared_rest(kernel: Kernel, *rest: Launch) -> Kernel:
    """Appends the launches that fill unused rows, if the kernel supports lengths."""
    if "lengths" not in kernel.features:
        return kernel
    return replace(kernel, launches=(*kernel.launches, *rest))


def bias_bytes(p: Problem) -> int:
    """The bytes per element of the array whose tiles are copied to shared memory; 0 if none is."""
    held = p.modifiers.held
    return held.numpy.itemsize if held else 0
