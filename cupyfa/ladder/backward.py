"""The backward ladder: the gradients of Q, K and V, by what the forward pass left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from cupyfa.ladder import rounds
from cupyfa.ladder.common import WARP
from cupyfa.ladder.kernel import Formula, Kernel, Launch, Matmul, cdiv
from cupyfa.ladder.tiles import TileChoice, named
from cupyfa.problem import Problem

FEATURES = ("causal", "window", "score", "gqa", "strides", "dv")
THREADS = 256
TILES = named(
    "Br Bc",
    *((32, 32), (32, 16), (16, 16), (16, 8), (8, 8), (8, 4), (4, 4)),
    *((4, 2), (2, 2), (2, 1), (1, 1)),
)
CANDIDATES = {"Br": (16, 32, 64, 96, 128), "Bc": (16, 32, 64, 96, 128)}
INPUTS = "Q K V dO lse delta"
DELTA_SCRATCH = {"delta": ("batch heads M", "real")}

DELTA = Launch(
    "delta",
    args="O dO delta M heads",
    grid=lambda p, c: cdiv(p.M, THREADS // WARP) * p.heads * p.batch,
    threads=lambda p, c: THREADS,
)

WARPS = "Br Bc warps stages"
MMA_TILES = TileChoice(
    named(WARPS, (64, 64, 8, 1), (32, 64, 8, 1), (32, 32, 4, 1), (32, 16, 2, 1), (16, 16, 1, 1)),
    up_to={
        64: named(WARPS, (128, 128, 8, 2), (64, 64, 4, 2)),
        128: named(WARPS, (64, 128, 8, 2), (64, 64, 8, 1)),
        256: named(WARPS, (64, 64, 8, 2), (64, 64, 8, 1)),
    },
)
MMA_CANDIDATES = {
    "Br": (32, 64, 128),
    "Bc": (32, 64, 128),
    "warps": (4, 8),
    "stages": (1, 2),
}
# With the tiles of the launch on rows, Qr by Qc.
TWO_PASS = f"{WARPS} Qr Qc Qw Qs"
MMA_TWO_PASS_TILES = TileChoice(
    named(
        TWO_PASS,
        (64, 64, 8, 1, 64, 32, 16, 1),
        (32, 64, 8, 1, 64, 16, 16, 1),
        (32, 32, 4, 1, 32, 32, 16, 1),
        (32, 16, 2, 1, 32, 16, 16, 1),
        (16, 16, 1, 1, 16, 16, 16, 1),
    ),
    up_to={
        64: named(TWO_PASS, (128, 128, 8, 2, 128, 64, 32, 2), (64, 64, 4, 2, 64, 64, 16, 2)),
        128: named(TWO_PASS, (64, 128, 8, 2, 128, 32, 32, 2), (64, 64, 8, 1, 64, 32, 16, 2)),
        256: named(TWO_PASS, (64, 64, 8, 2, 64, 32, 16, 2), (64, 64, 8, 1, 64, 32, 16, 1)),
    },
)
MMA_ROW_CANDIDATES = {"Qr": (64, 128), "Qc": (32, 64), "Qw": (16, 32), "Qs": (1, 2)}
MMA_RULES = {
    "Br and Bc are multiples of 16": lambda c: c.Br % 16 == c.Bc % 16 == 0,
    "warps are a power of two, and share out S evenly": lambda c: (
        c.warps & (c.warps - 1) == 0 and _are_even(c)
    ),
    "stages is 1 or 2": lambda c: c.stages in (1, 2),
}


def odd_width(width: int, itemsize: int) -> int:
    """The row length of gradients.cuh: an odd number of 4 bytes."""
    return (cdiv(width, 2) | 1) * 2 if itemsize < 4 else width | 1


def columns_shared(p: Problem, c: SimpleNamespace) -> int:
    """Sums of dK and dV, and what both passes need."""
    return _shared(p, c, c.Bc * (p.d + p.dv))


def rows_shared(p: Problem, c: SimpleNamespace) -> int:
    """Sums of dQ, and what both passes need."""
    return _shared(p, c, c.Br * p.d)


def _shared(p: Problem, c: SimpleNamespace, sums: int) -> int:
    """The sums, P and dS, lse and delta, and the tiles of Q, dO, K and V."""
    widths = odd_width(p.d, p.itemsize) + odd_width(p.dv, p.itemsize)
    weights = odd_width(c.Bc, p.dtype.sums.itemsize)
    return p.bytes(reals=sums + 2 * c.Br * weights + 2 * c.Br, scalars=(c.Br + c.Bc) * widths)


def columns_launch(name: str, outputs: str) -> Launch:
    """A block for each tile of K and V; N may be 0."""
    return Launch(
        name,
        args=f"{INPUTS} {outputs} sizes kv_heads group scale mods",
        grid=lambda p, c: max(cdiv(p.N, c.Bc), 1) * p.kv_heads * p.batch,
        threads=lambda p, c: THREADS,
        shared=columns_shared,
    )


def rows_launch(name: str, outputs: str) -> Launch:
    """A block for each tile of Q."""
    return Launch(
        name,
        args=f"{INPUTS} {outputs} sizes heads group scale mods",
        grid=lambda p, c: cdiv(p.M, c.Br) * p.heads * p.batch,
        threads=lambda p, c: THREADS,
        shared=rows_shared,
    )


def clear(name: str) -> Launch:
    """Clears the sums of dQ, dK or dV."""
    rows, heads = _axes(name)[:2]
    return _on_elements("clear_sums", name, f"{name}_sum {rows} {heads}")


def round_off(name: str) -> Launch:
    """Converts sums of dQ, dK or dV to the dtype of the inputs."""
    rows, heads = _axes(name)[:2]
    return _on_elements("round_sums", name, f"{name}_sum {name} {rows} {heads} scale")


def _axes(name: str) -> tuple[str, str, str]:
    """The names of the sizes that count rows, heads and columns of a gradient."""
    rows, heads = ("M", "heads") if name == "dQ" else ("N", "kv_heads")
    return rows, heads, "dv" if name == "dV" else "d"


def _on_elements(entry: str, name: str, args: str) -> Launch:
    """A thread for each element of a gradient."""
    rows, heads, width = _axes(name)

    def blocks(p: Problem, c: SimpleNamespace) -> int:
        elements = getattr(p, rows) * getattr(p, width)
        return max(cdiv(elements, THREADS), 1) * getattr(p, heads) * p.batch

    return Launch(
        entry,
        args=args,
        grid=blocks,
        threads=lambda p, c: THREADS,
        constants={"width": lambda p, c: getattr(p, width), "scaled": lambda p, c: name != "dV"},
    )


def finish(name: str) -> Launch:
    """Converts sums of dQ, dK or dV to the dtype of the inputs; recomputes those that are NaN."""
    entry, products = {
        "dQ": ("finish_rows", "dS K"),
        "dK": ("finish_keys", "dS Q"),
        "dV": ("finish_keys", "P dO"),
    }[name]
    heads = "heads" if name == "dQ" else "kv_heads"
    return _on_elements(entry, name, f"{name}_sum {name} {products} lse sizes {heads} group scale")


def parts_of_rows(height: int, columns: int, warps: int) -> int:
    """How many groups of warps share the rows of a product, as in mma_gradients.cuh."""
    fits = [1 << i for i in range(warps.bit_length()) if height % (16 << i) == 0]
    fits = [x for x in fits if warps % x == 0] or [1]
    return min(fits, key=lambda x: (height // x + cdiv(columns, warps // x * 16) * 16, -x))


def _are_even(c: SimpleNamespace) -> bool:
    """Whether every warp has equally many columns of S."""
    return c.Bc % (16 * (c.warps // parts_of_rows(c.Br, c.Bc, c.warps))) == 0


def sums_of_tile(p: Problem, c: SimpleNamespace) -> int:
    """The floats of a row tile in dQ_sum."""
    slices = 2 if p.d > 128 else 1
    width = cdiv(p.d, slices * 16) * 16
    across = c.warps // parts_of_rows(c.Br, width, c.warps)
    return slices * c.Br * across * cdiv(width, across * 16) * 16


def row_tiles(p: Problem, c: SimpleNamespace) -> int:
    """The number of row tiles of all heads."""
    return cdiv(p.M, c.Br) * p.heads * p.batch


def mma_columns_shared(p: Problem, c: SimpleNamespace) -> int:
    """K, V, `stages` of Q and dO, P and dS in 16 bits; lse and delta of two tiles."""
    widths = cdiv(p.d, 16) * 16 + cdiv(p.dv, 16) * 16
    return 2 * ((c.Bc + c.stages * c.Br) * widths + 2 * c.Br * c.Bc) + 16 * c.Br


def mma_rows_shared(p: Problem, c: SimpleNamespace) -> int:
    """Q, dO and `Qs` of K and V in 16 bits, lse and delta."""
    widths = cdiv(p.d, 16) * 16 + cdiv(p.dv, 16) * 16
    return 2 * (c.Qr + c.Qs * c.Qc) * widths + 8 * c.Qr


def scalar_kernel(name: str, adds: str, launches: Sequence[Launch], **fields: Any) -> Kernel:
    """A kernel without tensor cores, of any dtype."""
    return Kernel(
        name,
        adds,
        launches,
        operation="backward",
        tiles=TILES,
        candidates=CANDIDATES,
        features=FEATURES,
        **fields,
    )


def mma_delta(floats: Formula) -> Launch:
    """Computes delta, and clears `floats` sums for each row tile."""
    return Launch(
        "mma_delta",
        args="O dO delta dQ_sum.data M heads",
        grid=row_tiles,
        threads=lambda p, c: THREADS,
        constants={"floats": floats},
    )


def mma_columns_launch(name: str, outputs: str) -> Launch:
    """A block for each tile of K and V; N may be 0."""
    return replace(
        columns_launch(name, outputs),
        threads=lambda p, c: WARP * c.warps,
        shared=mma_columns_shared,
    )


def mma_kernel(name: str, adds: str, launches: Sequence[Launch], **fields: Any) -> Kernel:
    """A kernel on mma.sync, of 16-bit numbers."""
    return Kernel(
        name=name,
        adds=adds,
        operation="backward",
        launches=launches,
        dtypes=("float16", "bfloat16"),
        dtype_arch={"bfloat16": "80"},
        features=FEATURES,
        **{"largest_d": 256, **fields},
    )


SHARED_OF_SM_90 = 232448  # bytes a block may have
WGMMA_SCRATCH = {
    "row_sums": (lambda p, c: 2 * wgmma_rows(p, c), "real"),
    "dQ_sum": (lambda p, c: wgmma_rows(p, c) * wgmma_sums_width(p, c), "real"),
    "counts": (lambda p, c: 4 * p.batch * p.kv_heads, "byte"),
}
STAGES = "Br Bc stages dS_stages"
WGMMA_TILES = TileChoice(
    named(STAGES, (64, 128, 2, 2), (64, 128, 2, 1), (64, 128, 1, 1)),
    up_to={
        64: named(STAGES, (128, 128, 2, 2)),
        128: named(STAGES, (64, 128, 2, 1)),
        256: named(STAGES, (64, 64, 2, 1)),
    },
)
WGMMA_TWO_PASS_TILES = TileChoice(
    named("Br Bc Bk stages", (64, 128, 128, 2)),
    up_to={
        64: named("Br Bc Bk stages", (128, 128, 128, 2)),
        128: named("Br Bc Bk stages", (64, 128, 128, 2)),
        192: named("Br Bc Bk stages", (64, 64, 80, 2)),
        256: named("Br Bc Bk stages", (64, 64, 48, 2)),
    },
)
WGMMA_RULES = {
    "Br is 64, or 128 up to d = 128": lambda c: c.Br == 64 or (c.Br == 128 and not is_wide(c)),
    "Bc is 128, or 64 above d = 128": lambda c: c.Bc == (64 if is_wide(c) else 128),
}


def is_wide(sizes: Problem | SimpleNamespace) -> bool:
    """Whether dK and dV of 64 keys need the registers of two warpgroups, as row_sums.cuh says."""
    return max(sizes.d, sizes.dv) > 128


def wgmma_rows(p: Problem, c: SimpleNamespace) -> int:
    """The rows of all heads, padded to whole tiles in each head."""
    return p.batch * p.heads * cdiv(p.M, c.Br) * c.Br


def finishes(p: Problem) -> bool:
    """Whether the last block of a key head computes dQ, as last_block.cuh says."""
    return p.M * p.group <= 4096


def wgmma_parts(p: Problem, c: SimpleNamespace) -> int:
    """How many blocks share dQ of a tile, as in row_sums.cuh."""
    if is_wide(p):
        return cdiv(p.d, 64)
    return 2 if c.Br == 128 or p.d > 64 else 1


def wgmma_sums_width(p: Problem, c: SimpleNamespace) -> int:
    """The columns of the sums of dQ."""
    if is_wide(p):
        return cdiv(p.d, 64) * 64
    return cdiv(p.d, 16) * 16 if c.Br == 128 or p.d <= 64 else 128


def wgmma_shared(p: Problem, c: SimpleNamespace) -> int:
    """Tiles in boxes of 64 columns, dS, what the warpgroups have of dQ, row sums and barriers."""
    tiles = 2 * ((c.Bc + c.stages * c.Br) * _boxed_width(p) + c.dS_stages * c.Br * c.Bc)
    part = 4 * 64 * wgmma_sums_width(p, c) // (2 if c.Br == 64 and p.d > 64 else 1)
    rest = 2 * part + 8 * c.stages * c.Br + 8 * (3 + 3 * c.stages)
    return cdiv(tiles + rest, 1024) * 1024


def wgmma_wide_shared(p: Problem, c: SimpleNamespace, dO_stages: int | None = None) -> int:
    """The same with P, a part of dQ for each warpgroup, and fewer stages of dO."""
    dO_stages = dO_stages or wgmma_dO_stages(p, c)
    tiles = 2 * ((c.Bc + c.stages * c.Br) * _boxed(p.d) + (c.Bc + dO_stages * c.Br) * _boxed(p.dv))
    between = (2 + 4) * c.Br * c.Bc + 2 * 4 * 64 * 64
    rest = 8 * c.stages * c.Br + 8 * (3 + 2 * c.stages + 2 * dO_stages)
    return cdiv(tiles + between + rest, 1024) * 1024


def wgmma_dO_stages(p: Problem, c: SimpleNamespace) -> int:
    """As many stages of dO as of Q, or one if shared memory holds no more."""
    return c.stages if wgmma_wide_shared(p, c, c.stages) <= SHARED_OF_SM_90 else 1


def wgmma_two_pass_columns_shared(p: Problem, c: SimpleNamespace) -> int:
    """Tiles in boxes of 64 columns, row sums and barriers."""
    tiles = 2 * (c.Bc + c.stages * c.Br) * _boxed_width(p)
    return cdiv(tiles + 8 * c.stages * c.Br + 8 * (2 + 3 * c.stages), 1024) * 1024


def wgmma_two_pass_wide_shared(p: Problem, c: SimpleNamespace) -> int:
    """The same with P, and barriers for each of four warps."""
    tiles = 2 * (c.Bc + c.stages * c.Br) * _boxed_width(p) + 4 * c.stages * c.Br * c.Bc
    return cdiv(tiles + 8 * c.stages * c.Br + 8 * (2 + 8 * c.stages), 1024) * 1024


def wgmma_two_pass_rows_shared(p: Problem, c: SimpleNamespace) -> int:
    """The same of 128 rows, and stages of keys."""
    tiles = 2 * (128 + c.stages * c.Bk) * _boxed_width(p)
    return cdiv(tiles + 8 * (2 + 3 * c.stages), 1024) * 1024


def _boxed_width(p: Problem) -> int:
    """The columns of Q and dO, or of K and V, padded to whole boxes."""
    return _boxed(p.d) + _boxed(p.dv)


def _boxed(columns: int) -> int:
    """A number of columns, padded to whole boxes."""
    return cdiv(columns, 64) * 64


def wgmma_tile_launch(entry: str, args: str, parts: Formula, threads: int, **fields: Any) -> Launch:
    """`parts` blocks for each tile of rows."""
    return Launch(
        entry,
        args=args,
        grid=lambda p, c: (cdiv(p.M, c.Br) * p.heads * p.batch, parts(p, c)),
        threads=lambda p, c: threads,
        **fields,
    )


WGMMA_COLUMNS = Launch(
    "wgmma_columns",
    args="Q.map K.map V.map dO.map Q K V dO row_sums.data dQ_sum.data counts.data dQ dK dV "
    "sizes heads kv_heads group scale mods",
    boxes={
        "Q": lambda p, c: c.Br,
        "K": lambda p, c: c.Bc,
        "V": lambda p, c: c.Bc,
        "dO": lambda p, c: c.Br,
    },
    grid=lambda p, c: max(cdiv(p.N, c.Bc), 1) * p.kv_heads * p.batch,
    threads=lambda p, c: 384,
    shared=wgmma_shared,
    constants={"finishes": lambda p, c: finishes(p)},
    when=lambda p: not is_wide(p),
)

WGMMA_TWO_PASS_COLUMNS = replace(
    WGMMA_COLUMNS,
    entry="wgmma_two_pass_columns",
    args=WGMMA_COLUMNS.args.replace("dQ_sum.data counts.data dQ ", ""),
    constants={},
    shared=wgmma_two_pass_columns_shared,
)

KERNELS = (
    Kernel(
        name="baseline_backward",
        adds="five products by cuBLAS: S, P, dP and dS go through global memory",
        operation="backward",
        launches=(
            DELTA,
            Matmul("S", "Q", "K.T", scaled=True),
            Matmul("dP", "dO", "V.T"),
            Launch(
                "score_gradients",
                args="S dP lse delta P dS sizes heads mods",
                grid=lambda p, c: p.M * p.heads * p.batch,
                threads=lambda p, c: THREADS,
            ),
            Matmul("dV_sum", "P.T", "dO"),
            Matmul("dQ_sum", "dS", "K"),
            Matmul("dK_sum", "dS.T", "Q"),
            finish("dQ"),
            finish("dK"),
            finish("dV"),
        ),
        tflops={"float16": {64: 56.9}},
        features=FEATURES,
        scratch={
            **DELTA_SCRATCH,
            "S": ("batch heads M N", "real"),
            "dP": ("batch heads M N", "real"),
            "P": ("batch heads M N", "scalar"),
            "dS": ("batch heads M N", "scalar"),
            "dQ_sum": ("batch heads M d", "real"),
            "dK_sum": ("batch kv_heads N d", "real"),
            "dV_sum": ("batch kv_heads N dv", "real"),
        },
    ),
    scalar_kernel(
        "columns",
        "P recomputed from lse; a block owns a tile of K and V and adds to dQ with atomics",
        (
            DELTA,
            clear("dQ"),
            columns_launch("columns", "dQ_sum dK dV"),
            round_off("dQ"),
        ),
        scratch={**DELTA_SCRATCH, "dQ_sum": ("batch heads M d", "real")},
        tflops={
            "float16": {64: 12.3},
            "float32": {64: 11.6, 128: 10.6, 256: 7.08},
            "float64": {64: 5.58, 128: 5.56, 256: 3.18},
        },
        unordered=("dQ",),
    ),
    scalar_kernel(
        "rows",
        "a block owns a tile of Q and adds to dK and dV with atomics",
        (
            DELTA,
            clear("dK"),
            clear("dV"),
            rows_launch("rows", "dQ dK_sum dV_sum"),
            round_off("dK"),
            round_off("dV"),
        ),
        after=("columns",),
        scratch={
            **DELTA_SCRATCH,
            "dK_sum": ("batch kv_heads N d", "real"),
            "dV_sum": ("batch kv_heads N dv", "real"),
        },
        tflops={
            "float16": {64: 14.3},
            "float32": {64: 14.5, 128: 14.8, 256: 8.61},
            "float64": {64: 8.81, 128: 7.09, 256: 4.01},
        },
        unordered=("dK", "dV"),
    ),
    scalar_kernel(
        "two_pass",
        "a pass for dK and dV, then one for dQ: no atomics, 7 products instead of 5",
        (
            DELTA,
            columns_launch("two_pass_columns", "dK dV"),
            rows_launch("two_pass_rows", "dQ"),
        ),
        after=("columns", "rows"),
        scratch=DELTA_SCRATCH,
        tflops={
            "float16": {64: 9.01},
            "float32": {64: 8.95, 128: 7.54, 256: 5.4},
            "float64": {64: 4.5, 128: 4.26, 256: 2.28},
        },
    ),
    mma_kernel(
        "mma_slices_backward",
        "tensor cores for any head dimension; P and dS of some heads at a time in memory",
        (mma_delta(lambda p, c: 0), rounds.SCORES, rounds.COLUMNS, rounds.ROWS),
        tiles=rounds.TILES,
        candidates=rounds.CANDIDATES,
        rules=rounds.RULES,
        scratch={
            **DELTA_SCRATCH,
            "P": (rounds.scores, "scalar"),
            "dS": (rounds.scores, "scalar"),
            "dQ_sum": (rounds.sums, "real"),
        },
        rounds=rounds.count,
        tflops={"float16": {64: 115}, "bfloat16": {512: 229, 1024: 249}},
        largest_d=None,
    ),
    mma_kernel(
        "mma_columns",
        "tensor cores (mma.sync), asynchronous copies; P and dS in 16 bits in shared memory",
        (
            mma_delta(sums_of_tile),
            mma_columns_launch("mma_columns", "dQ_sum.data dK dV"),
            Launch(
                "mma_round",
                args=f"{INPUTS} dQ_sum.data dQ sizes heads group scale mods",
                grid=row_tiles,
                threads=lambda p, c: WARP * c.warps,
            ),
        ),
        tiles=MMA_TILES,
        candidates=MMA_CANDIDATES,
        rules=MMA_RULES,
        scratch={
            **DELTA_SCRATCH,
            "dQ_sum": (lambda p, c: row_tiles(p, c) * sums_of_tile(p, c), "real"),
        },
        tflops={
            "float16": {64: 261, 128: 276, 256: 230},
            "bfloat16": {64: 261, 128: 276, 256: 230},
        },
        unordered=("dQ",),
        after=("columns",),
    ),
    mma_kernel(
        "mma_two_pass",
        "two passes on tensor cores, without atomics; dS of the second in registers",
        (
            mma_delta(lambda p, c: 0),
            mma_columns_launch("mma_two_pass_columns", "dK dV"),
            Launch(
                "mma_two_pass_rows",
                args=f"{INPUTS} dQ sizes heads group scale mods",
                grid=lambda p, c: cdiv(p.M, c.Qr) * p.heads * p.batch,
                threads=lambda p, c: WARP * c.Qr // c.Qw,
                shared=mma_rows_shared,
                constants={
                    "Br": lambda p, c: c.Qr,
                    "Bc": lambda p, c: c.Qc,
                    "Wr": lambda p, c: c.Qw,
                    "stages": lambda p, c: c.Qs,
                },
            ),
        ),
        tiles=MMA_TWO_PASS_TILES,
        candidates=MMA_CANDIDATES | MMA_ROW_CANDIDATES,
        rules=MMA_RULES
        | {
            "Qw and Qc are multiples of 16": lambda c: c.Qw % 16 == c.Qc % 16 == 0,
            "Qr is a multiple of Qw": lambda c: c.Qr % c.Qw == 0,
            "Qs is 1 or 2": lambda c: c.Qs in (1, 2),
        },
        tflops={"float16": {64: 196, 128: 205}, "bfloat16": {192: 148, 256: 169}},
        scratch={**DELTA_SCRATCH, "dQ_sum": (lambda p, c: 0, "real")},
        after=("mma_columns",),
    ),
    Kernel(
        name="wgmma_columns",
        adds="Hopper: warpgroups own 64 keys; transposed scores keep P and dS in registers",
        after=("mma_columns",),
        operation="backward",
        launches=(
            wgmma_tile_launch(
                "begin_rows",
                "O dO lse row_sums.data dQ_sum.data counts.data M heads group",
                lambda p, c: 1,
                THREADS,
            ),
            WGMMA_COLUMNS,
            replace(
                WGMMA_COLUMNS,
                entry="wgmma_columns_wide",
                shared=wgmma_wide_shared,
                constants={**WGMMA_COLUMNS.constants, "dO_stages": wgmma_dO_stages},
                when=is_wide,
            ),
            wgmma_tile_launch(
                "finish_dQ",
                "Q K V dO dQ row_sums.data dQ_sum.data sizes heads group scale mods",
                wgmma_parts,
                128,
                when=lambda p: not finishes(p),
            ),
        ),
        tiles=WGMMA_TILES,
        candidates={"Br": (64, 128), "Bc": (64, 128), "stages": (1, 2, 3), "dS_stages": (1, 2)},
        rules=WGMMA_RULES
        | {
            "dS_stages is 1, or 2 up to d = 128": lambda c: (
                c.dS_stages == 1 or (c.dS_stages == 2 and not is_wide(c))
            ),
        },
        dtypes=("float16", "bfloat16"),
        features=FEATURES,
        scratch=WGMMA_SCRATCH,
        tflops={
            "float16": {64: 456, 128: 507, 256: 383},
            "bfloat16": {64: 457, 128: 515, 192: 360, 256: 383},
        },
        arch="90a",
        largest_d=256,
        unordered=("dQ",),
    ),
    Kernel(
        name="wgmma_two_pass",
        adds="Hopper, two passes: dQ in registers too, no atomics, 7 products instead of 5",
        after=("wgmma_columns",),
        operation="backward",
        launches=(
            wgmma_tile_launch(
                "sum_rows", "O dO lse row_sums.data M heads", lambda p, c: 1, THREADS
            ),
            WGMMA_TWO_PASS_COLUMNS,
            replace(
                WGMMA_TWO_PASS_COLUMNS,
                entry="wgmma_two_pass_columns_wide",
                shared=wgmma_two_pass_wide_shared,
                when=is_wide,
            ),
            Launch(
                "wgmma_two_pass_rows",
                args="Q.map K.map V.map dO.map Q K V dO row_sums.data dQ "
                "sizes heads group scale mods",
                boxes={
                    "Q": lambda p, c: 128,
                    "K": lambda p, c: c.Bk,
                    "V": lambda p, c: c.Bk,
                    "dO": lambda p, c: 128,
                },
                grid=lambda p, c: cdiv(p.M, 128) * p.heads * p.batch,
                threads=lambda p, c: 384,
                shared=wgmma_two_pass_rows_shared,
            ),
        ),
        tiles=WGMMA_TWO_PASS_TILES,
        candidates={
            "Br": (64, 128),
            "Bc": (64, 128),
            "Bk": (48, 64, 80, 96, 128),
            "stages": (1, 2, 3, 4),
        },
        rules=WGMMA_RULES
        | {
            "Bk is a multiple of 16": lambda c: c.Bk % 16 == 0,
        },
        dtypes=("float16", "bfloat16"),
        features=FEATURES,
        scratch={"row_sums": WGMMA_SCRATCH["row_sums"]},
        tflops={
            "float16": {64: 361, 128: 374, 256: 395},
            "bfloat16": {192: 437, 256: 451},
        },
        arch="90a",
        largest_d=256,
    ),
)
