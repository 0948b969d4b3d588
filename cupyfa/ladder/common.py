"""What records of several families share: formulas, and the step from one rung to the next."""

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
    """The tiles of a number of rows of a head; of a ragged batch the numbers that they have."""
    return cdiv(rows, size) if p.sequences is None else rows // size + p.sequences


def row_tiles(p: Problem, c: SimpleNamespace) -> int:
    """The tiles of Br rows of all heads."""
    return tiles_of(p, p.M, c.Br) * p.heads * p.batch


# Launches that go along the tiles of keys of a tile of rows, and skip those of a block mask.
ALONG_KEYS: dict[str, Walk] = {KEY_TILES: lambda p, c: (c.Br, c.Bc)}
# Launches that go down the tiles of rows of a tile of keys, likewise.
DOWN_ROWS: dict[str, Walk] = {ROW_TILES: lambda p, c: (c.Br, c.Bc)}


def key_tiles(p: Problem, c: SimpleNamespace) -> int:
    """The tiles of Bc keys of all heads; at least one for each head, even if N is 0."""
    return max(tiles_of(p, p.N, c.Bc), 1) * p.kv_heads * p.batch


def warps_of_scores(p: Problem, c: SimpleNamespace) -> int:
    """The threads of warps that have Wr x Wc scores of a tile each."""
    return WARP * c.Br * c.Bc // (c.Wr * c.Wc)


def padded_columns(sizes: Problem | SimpleNamespace, multiple: int) -> int:
    """The columns of Q and dO, or of K and V, each rounded up to a multiple."""
    return round_up(sizes.d, multiple) + round_up(sizes.dv, multiple)


def even_width(columns: int, most: int, step: int) -> int:
    """The width of equally wide tiles of some columns: about `most`, and a multiple of `step`."""
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
    """The same record with other files and fields, of its launch too, and more launches around it.

    Of ``dtype_arch`` it keeps what concerns its dtypes.
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
    """Whether batch elements share an array with an element for every pair: they come together."""
    held = p.modifiers.held
    return held is not None and p.batch > 1 and held.shape[0] == 1 and held.shape[2] > 1


def clear_rest(array: str, rows: str, heads: str, width: str = "") -> Launch:
    """Fills the rows of a ragged output that do not count, or belong to no sequence.

    Of an operand, its width ends with 16, to which its columns are padded.
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
    """The same for the largest scores, where they are asked for."""
    rest = clear_rest(ROW_MAX, "M", "heads")
    return replace(rest, when=lambda p: p.modifiers.has_row_max and rest.when(p))


def with_cleared_rest(kernel: Kernel, *rest: Launch) -> Kernel:
    """The record with what fills the rows that do not count, if the kernel takes lengths."""
    if "lengths" not in kernel.features:
        return kernel
    return replace(kernel, launches=(*kernel.launches, *rest))


def bias_bytes(p: Problem) -> int:
    """The bytes of an element of the array whose pairs are copied to shared memory; 0: of none."""
    held = p.modifiers.held
    return held.numpy.itemsize if held else 0
