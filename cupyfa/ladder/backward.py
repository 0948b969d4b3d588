"""The backward ladder: gradients of Q, K and V, from O and lse of the forward pass."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

from cupyfa.ladder import mma_slices_backward
from cupyfa.ladder.common import (
    ALONG_KEYS,
    DOWN_ROWS,
    HALF,
    ROOM,
    ROOM_CANDIDATES,
    SHARED_OF_SM_90,
    WARP,
    baseline_shares,
    batch_first,
    bias_bytes,
    clear_rest,
    heads_in_room,
    key_tiles,
    padded_columns,
    row_tiles,
    rows_in_room,
    rung,
    share_stride,
    tiles_of,
    whole_groups,
    with_cleared_rest,
)
from cupyfa.ladder.gradients import with_gradients
from cupyfa.ladder.kept_score_gradients import USUAL_ROOM, KeptDS, may_keep_dS
from cupyfa.ladder.kernel import Constant, Formula, Kernel, Launch, Matmul
from cupyfa.ladder.split_float32 import (
    GRADIENT,
    GRADIENT_SCRATCH,
    OPERANDS,
    REPAIR_SPLIT_GRADIENTS,
    SPLIT_FOR_GRADIENTS,
    UNITS,
    pays_for_gradients,
    pays_for_short_gradients,
)
from cupyfa.ladder.tiles import TileChoice, Tiles, cdiv, named, tiles_of_d
from cupyfa.problem.optional_inputs import KEY_TILES, MAPS
from cupyfa.problem.problem import Problem, round_up

ALL_BUT_PLACES = ("causal", "window", "score", "sink", "dlse", "gqa", "strides", "dv", "out_dtype")
FEATURES = (*ALL_BUT_PLACES, "places", "dropout")
OF_SEQUENCES = (*FEATURES, "lengths", "ragged")
THREADS = 256
INPUTS = "Q K V dO lse delta"
DELTA_SCRATCH = {"delta": ("batch heads M", "real")}

DELTA = Launch(
    "delta",
    args="O dO delta M heads mods",
    grid=lambda p, c: cdiv(p.M, THREADS // WARP) * p.heads * p.batch,
    threads=lambda p, c: THREADS,
)

# Row, head and column axes of each gradient.
AXES = {"dQ": ("M", "heads", "d"), "dK": ("N", "kv_heads", "d"), "dV": ("N", "kv_heads", "dv")}

# Kernels without tensor cores, for any dtype


def odd_width(width: int, itemsize: int) -> int:
    """Returns the row length of tiles in gradients.cuh, in elements: an odd number of words."""
    return (cdiv(width, 2) | 1) * 2 if itemsize < 4 else width | 1


def shared_bytes(p: Problem, c: SimpleNamespace, sums: int) -> int:
    """Returns the bytes for `sums` accumulators, P, dS, lse, delta and operand tiles."""
    widths = odd_width(p.d, p.itemsize) + odd_width(p.dv, p.itemsize)
    rows = 2 * c.Br * (odd_width(c.Bc, p.dtype.sums.itemsize) + 1)
    return p.bytes(reals=sums + rows, scalars=(c.Br + c.Bc) * widths)


def columns_launch(
    name: str,
    outputs: str,
    threads: Formula = lambda p, c: THREADS,
    shared: Formula = lambda p, c: shared_bytes(p, c, c.Bc * (p.d + p.dv)),
) -> Launch:
    args = f"{INPUTS} {outputs} sizes kv_heads group scale mods"
    return Launch(name, args, key_tiles, threads, shared, walks=DOWN_ROWS)


def rows_launch(name: str, outputs: str) -> Launch:
    args = f"{INPUTS} {outputs} sizes heads group scale mods"
    return Launch(
        name,
        args,
        row_tiles,
        lambda p, c: THREADS,
        lambda p, c: shared_bytes(p, c, c.Br * p.d),
        walks=ALONG_KEYS,
    )


def sums_launch(entry: str, name: str, args: str, *, in_rounds: bool = False) -> Launch:
    rows, heads, width = AXES[name]

    def blocks(p: Problem, c: SimpleNamespace) -> int:
        elements = getattr(p, rows) * getattr(p, width)
        return max(cdiv(elements, THREADS), 1) * getattr(p, heads) * p.batch

    return Launch(
        entry,
        args=f"{name}_sum {args.format(rows=rows, heads=heads)}",
        grid=blocks,
        threads=lambda p, c: THREADS,
        constants={"width": lambda p, c: getattr(p, width), "scaled": lambda p, c: name != "dV"},
        in_rounds=in_rounds,
    )


def clear(name: str) -> Launch:
    return sums_launch("clear_sums", name, "{rows} {heads}")


def round_off(name: str) -> Launch:
    """Makes the launch that rounds sums of dQ, dK or dV to the dtype of results."""
    return sums_launch("round_sums", name, f"{name} {{rows}} {{heads}} scale")


def finish_rows(name: str, products: str) -> Launch:
    """Makes the launch that rounds a gradient's sums of a round and recomputes NaN sums.

    products: the two arrays whose matrix product is the gradient.
    """
    args = f"{name} {products} lse sizes {{heads}} group scale"
    return sums_launch("finish_rows", name, args, in_rounds=True)


def finish_keys(name: str, products: str) -> Launch:
    """Makes the launch that adds up a gradient's sums of the query heads of a round.

    It continues the sums of earlier rounds with other query heads of the same key head.
    """
    args = f"{name} {products} lse sizes {{heads}} group continues scale"
    launch = sums_launch("finish_keys", name, args, in_rounds=True)
    return replace(launch, numbers={"continues": lambda p, c: c.round})


def scratch_of_head(p: Problem) -> tuple[int, int]:
    """Returns the bytes of scratch memory for each row, and in addition for each query head."""
    real = p.dtype.sums.itemsize
    return 2 * (real + p.itemsize) * p.N + real * p.d, real * p.N * (p.d + p.dv)


def is_divisible(p: Problem) -> bool:
    """Returns whether rounds may have a share of a group, or of the rows of a query head.

    They add to dK and dV, which must not be rounded to a narrower dtype in between.
    """
    return p.out_dtype.itemsize == p.dtype.sums.itemsize


def group_in_room(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of query heads of a key head in a round."""
    return heads_in_room(p, c, *scratch_of_head(p)) if is_divisible(p) else max(p.group, 1)


def share_of_rows(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of rows of a query head in a round."""
    return rows_in_room(p, c, *scratch_of_head(p)) if is_divisible(p) else max(p.M, 1)


BASELINE = Kernel(
    "baseline_backward",
    "five products by cuBLAS: S, P, dP and dS go through global memory",
    (
        DELTA,
        Matmul("S", "Q", "K.T", scaled=True, in_rounds=True),
        Matmul("dP", "dO", "V.T", in_rounds=True),
        Launch(
            "score_gradients",
            args="S dP lse delta P dS sizes heads mods",
            grid=lambda p, c: p.M * p.heads * p.batch,
            threads=lambda p, c: THREADS,
            in_rounds=True,
        ),
        Matmul("dV_sum", "P.T", "dO", in_rounds=True),
        Matmul("dQ_sum", "dS", "K", in_rounds=True),
        Matmul("dK_sum", "dS.T", "Q", in_rounds=True),
        finish_rows("dQ", "dS K"),
        finish_keys("dK", "dS Q"),
        finish_keys("dV", "P dO"),
    ),
    operation="backward",
    tiles=ROOM,
    candidates=ROOM_CANDIDATES,
    features=ALL_BUT_PLACES,
    scratch={
        **DELTA_SCRATCH,
        "S": ("batch heads M N", "real"),
        "dP": ("batch heads M N", "real"),
        "P": ("batch heads M N", "scalar"),
        "dS": ("batch heads M N", "scalar"),
        "dQ_sum": ("batch heads M d", "real"),
        "dK_sum": ("batch heads N d", "real"),
        "dV_sum": ("batch heads N dv", "real"),
    },
    round_heads=lambda p, c: whole_groups(p, heads_in_room(p, c, *scratch_of_head(p))),
    round_group=group_in_room,
    round_rows=share_of_rows,
    tflops={
        "float16": {64: 56.9},
        "float32": {64: 21.6, 256: 36.4, 512: 40.8, 1024: 42.8},
        "float64": {64: 16.4, 128: 29.4, 256: 37.3, 512: 42.2, 1024: 45.5},
    },
    # In float32 the kernels that compete take as long for a row of few keys.
    shares=baseline_shares(
        lambda p: scratch_of_head(p)[0], lambda p: 250_000 if p.dtype.name == "float64" else 0
    ),
)
COLUMNS = Kernel(
    "columns",
    "P recomputed from lse; a block owns a tile of K and V and adds to dQ with atomics",
    (DELTA, clear("dQ"), columns_launch("columns", "dQ_sum dK dV"), round_off("dQ")),
    operation="backward",
    tiles=named(
        "Br Bc",
        *((32, 32), (32, 16), (16, 16), (16, 8), (8, 8), (8, 4), (4, 4)),
        *((4, 2), (2, 2), (2, 1), (1, 1)),
    ),
    candidates={"Br": (16, 32, 64, 96, 128), "Bc": (16, 32, 64, 96, 128)},
    features=OF_SEQUENCES,
    scratch={**DELTA_SCRATCH, "dQ_sum": BASELINE.scratch["dQ_sum"]},
    tflops={
        "float16": {64: 12.3},
        "float32": {64: 11.6, 128: 10.6, 256: 7.08},
        "float64": {64: 5.58, 128: 5.56, 256: 3.18},
    },
    unordered=("dQ",),
)
ROWS = rung(
    COLUMNS,
    "rows",
    "a block owns a tile of Q and adds to dK and dV with atomics",
    launches=(
        *(DELTA, clear("dK"), clear("dV")),
        rows_launch("rows", "dQ dK_sum dV_sum"),
        *(round_off("dK"), round_off("dV")),
    ),
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
)
TWO_PASS = rung(
    COLUMNS,
    "two_pass",
    "a pass for dK and dV, then one for dQ: no atomics, 7 products instead of 5",
    launches=(
        DELTA,
        columns_launch("two_pass_columns", "dK dV"),
        rows_launch("two_pass_rows", "dQ"),
    ),
    scratch=DELTA_SCRATCH,
    tflops={
        "float16": {64: 9.01},
        "float32": {64: 8.95, 128: 7.54, 256: 5.4},
        "float64": {64: 4.5, 128: 4.26, 256: 2.28},
    },
    unordered=(),
    after=("columns", "rows"),
)

# mma.sync kernels


def block_heads(p: Problem, c: SimpleNamespace, most: int) -> int:
    """Returns the number of query heads that a block which computes dK and dV processes.

    A block processes the group of its key head where all blocks are equally long and there are
    enough of them: they read the same rows at the same time. Otherwise blocks share a group. Under
    a causal mask, blocks differ in length. With many heads each, the longest ones would run alone
    at the end, and blocks would read different heads at the same time, so that L2 holds fewer of
    their rows. With few heads each, or few rows, the sums of dK and dV cost more than that.

    most: the largest number of heads with which the kernel is fast under a causal mask.
    """
    if cdiv(p.M, 64) * p.group <= 8:
        return p.group
    differ = (p.causal or p.right is not None) and p.left is None and 4 * p.M >= p.N
    if not differ:
        most = p.group
    is_narrow = max(p.d, p.dv) <= 64
    takes_all = p.group <= 4 or (is_narrow and p.M * p.group <= 8192 and not p.is_ragged)
    wanted = c.multiprocessors * (1.5 if differ else 0.75)
    for heads in range(p.group, 1, -1):
        is_allowed = p.group % heads == 0 and (heads <= most or (heads == p.group and takes_all))
        if is_allowed and key_tiles(p, c) * p.group // heads >= wanted:
            return heads
    return 1


def mma_block_heads(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of query heads that a block of mma.sync processes, unless dS is kept."""
    return block_heads(p, c, most=2)


MMA_DS = KeptDS(mma_block_heads, tile=lambda c: (c.Br, c.Bc))


def parts_of_rows(height: int, columns: int, warps: int) -> int:
    """Returns the number of warp groups that split a product's rows; see warp_partition.cuh."""
    fits = [1 << i for i in range(warps.bit_length()) if height % (16 << i) == 0]
    fits = [x for x in fits if warps % x == 0] or [1]
    return min(fits, key=lambda x: (height // x + cdiv(columns, warps // x * 16) * 16, -x))


def sums_of_tile(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of floats that a row tile occupies in dQ_sum."""
    slices = 2 if p.d > 128 else 1
    width = cdiv(p.d, slices * 16) * 16
    across = c.warps // parts_of_rows(c.Br, width, c.warps)
    return slices * c.Br * round_up(width, across * 16)


def fragments_of_keys(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of accumulators of dK and dV in a block; see warp_partition.cuh."""
    count = 0
    for columns in (round_up(p.d, 16), round_up(p.dv, 16)):
        across = c.warps // parts_of_rows(c.Bc, columns, c.warps)
        count += c.Bc * round_up(columns, across * 16)
    return count


def sharing_blocks(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of blocks that store dK and dV for others of their group."""
    splits = MMA_DS.splits(p, c)
    return key_tiles(p, c) * splits if splits > 1 else 0


def sharing_warps(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of counters in group_shares.cuh: one for each warp of sharing blocks."""
    return sharing_blocks(p, c) * c.warps


SHARING = {"shares_groups": lambda p, c: MMA_DS.splits(p, c) > 1}
SHARING_SCRATCH = {
    "shared_sums": (lambda p, c: sharing_blocks(p, c) * fragments_of_keys(p, c), "real"),
    "counts": (sharing_warps, "int"),
}


def mma_delta(
    sums: Formula,
    entry: str = "mma_delta",
    constant: str = "floats",
    counts: Formula = sharing_warps,
) -> Launch:
    """Makes the launch that computes delta and clears dQ_sum and counts.

    constant: name of the C++ constant with the number of sums per row tile.
    """
    return Launch(
        entry,
        args="O dO delta dQ_sum.data counts.data counts_size M heads mods",
        numbers={"counts_size": counts},
        grid=lambda p, c: row_tiles(p, c) if p.M else 0,  # a packed batch may have no rows
        threads=lambda p, c: THREADS,
        constants={constant: sums, "is_packed": lambda p, c: p.sequences is not None},
    )


def mma_columns_launch(name: str, outputs: str) -> Launch:
    """Makes a launch of one block of `warps` warps for each K/V tile and share of a group."""
    launch = columns_launch(
        *(name, f"{outputs} shared_sums.data counts.data", lambda p, c: WARP * c.warps),
        # Holds 16-bit tiles of K, V, P and dS, `stages` tiles of Q and dO, and lse and delta of
        # two tiles.
        shared=lambda p, c: (
            2 * ((c.Bc + c.stages * c.Br) * padded_columns(p, 16) + 2 * c.Br * c.Bc) + 16 * c.Br
        ),
    )
    return replace(
        launch,
        args=launch.args.replace("group", "group splits stride"),
        grid=lambda p, c: key_tiles(p, c) * MMA_DS.splits(p, c),
        numbers={"splits": MMA_DS.splits, "stride": share_stride},
        constants=SHARING,
    )


MMA_ROUND = Launch(
    "mma_round",
    args=f"{INPUTS} dQ_sum.data dQ sizes heads group scale mods",
    grid=row_tiles,
    threads=lambda p, c: WARP * c.warps,
)
MMA_COLUMNS = Kernel(
    "mma_columns",
    "tensor cores (mma.sync), asynchronous copies; P and dS in 16 bits in shared memory",
    (
        mma_delta(sums_of_tile),
        mma_columns_launch("mma_columns", "dQ_sum.data dK dV"),
        MMA_ROUND,
    ),
    operation="backward",
    tiles=TileChoice.of(
        "Br Bc warps stages",
        [(64, 64, 8, 1), (32, 64, 8, 1), (32, 32, 4, 1), (32, 16, 2, 1), (16, 16, 1, 1)],
        up_to={
            64: [(128, 128, 8, 2), (64, 64, 4, 2)],
            128: [(64, 128, 8, 2), (64, 64, 8, 1)],
            256: [(64, 64, 8, 2), (64, 64, 8, 1)],
        },
    ),
    candidates={"Br": (32, 64, 128), "Bc": (32, 64, 128), "warps": (4, 8), "stages": (1, 2)},
    rules={
        "Br and Bc are multiples of 16": lambda c: c.Br % 16 == c.Bc % 16 == 0,
        "warps is a power of two that divides S evenly": lambda c: (
            c.warps & (c.warps - 1) == 0
            and c.Bc % (16 * (c.warps // parts_of_rows(c.Br, c.Bc, c.warps))) == 0
        ),
        "stages is 1 or 2": lambda c: c.stages in (1, 2),
    },
    dtypes=HALF,
    dtype_arch={"bfloat16": "80"},
    features=OF_SEQUENCES,
    scratch={
        **DELTA_SCRATCH,
        **SHARING_SCRATCH,
        "dQ_sum": (lambda p, c: row_tiles(p, c) * sums_of_tile(p, c), "real"),
    },
    largest_d=256,
    tflops={"float16": {64: 261, 128: 276, 256: 230}, "bfloat16": {64: 261, 128: 276, 256: 230}},
    unordered=("dQ",),
    after=(),
)


def mma_f64_sharing(c: SimpleNamespace) -> int:
    """Returns the number of warps that share a 16 x 16 square of scores."""
    return max(1, 256 * c.warps // (c.Br * c.Bc))


def shares_out_scores(c: SimpleNamespace) -> bool:
    """Returns whether scores divide evenly among the warps, or among groups of warps."""
    groups = c.warps // mma_f64_sharing(c)
    return c.Bc % (16 * (groups // parts_of_rows(c.Br, c.Bc, groups))) == 0


def mma_f64_columns_shared(p: Problem, c: SimpleNamespace) -> int:
    """Returns the bytes of shared memory for the tiles of mma_columns in float64, exchange buffers
    of warps that share scores, and lse and delta of two tiles.
    """
    scores = (2 + mma_f64_sharing(c) - 1) * c.Br * c.Bc
    return 8 * ((c.Bc + c.stages * c.Br) * padded_columns(p, 16) + scores + 4 * c.Br)


MMA_F64_COLUMNS = rung(
    MMA_COLUMNS,
    "mma_f64_columns",
    "float64 on tensor cores (mma.sync): warps share S and dP, sums in double",
    launches=(
        mma_delta(sums_of_tile, "mma_f64_delta", "doubles"),
        replace(
            mma_columns_launch("mma_f64_columns", "dQ_sum.data dK dV"),
            shared=mma_f64_columns_shared,
            constants={**SHARING, "sharing": lambda p, c: mma_f64_sharing(c)},
        ),
        MMA_ROUND,
    ),
    tiles=TileChoice.of(
        "Br Bc warps stages",
        [(16, 32, 8, 1), (16, 32, 4, 1), (16, 16, 4, 1)],
        up_to={
            64: [(64, 64, 8, 1), (32, 64, 8, 1), (32, 32, 4, 1)],
            128: [(32, 64, 8, 1), (16, 64, 8, 1), (16, 32, 4, 1)],
            256: [(16, 32, 8, 1)],
        },
        # Two blocks run on an SM at a time: one loads while the other computes.
        few_rows={
            16: {64: [(16, 64, 4, 2)]},
            32: {64: [(32, 32, 4, 1)]},
            64: {64: [(16, 64, 4, 2)]},
        },
    ),
    candidates={"Br": (16, 32, 64), "Bc": (16, 32, 64, 128), "warps": (4, 8), "stages": (1, 2)},
    rules={
        "Br and Bc are multiples of 16": lambda c: c.Br % 16 == c.Bc % 16 == 0,
        "warps is a power of two, at most Br * Bc / 64, that divides S evenly": (
            lambda c: (
                c.warps & (c.warps - 1) == 0
                and 64 * c.warps <= c.Br * c.Bc
                and shares_out_scores(c)
            )
        ),
        "stages is 1 or 2": lambda c: c.stages in (1, 2),
    },
    dtypes=("float64",),
    arch="80",
    tflops={"float64": {64: 38.2, 128: 38.8, 256: 33.0}},
    after=(),
)


def two_pass_rows_launch(name: str, arrays: str, shared: Formula) -> Launch:
    """Makes a launch of one block per tile of Qr rows, which loops over tiles of Qc keys."""
    return Launch(
        name,
        args=f"{arrays} sizes heads group scale mods",
        grid=lambda p, c: tiles_of(p, p.M, c.Qr) * p.heads * p.batch,
        threads=lambda p, c: WARP * c.Qr // c.Qw,
        shared=shared,
        constants={
            "Br": lambda p, c: c.Qr,
            "Bc": lambda p, c: c.Qc,
            "Wr": lambda p, c: c.Qw,
            "stages": lambda p, c: c.Qs,
        },
        walks={KEY_TILES: lambda p, c: (c.Qr, c.Qc)},
    )


def kept_keys(p: Problem, c: SimpleNamespace) -> int:
    """Returns the keys of a tile of mma_two_pass_kept_rows, which has no sums of S and dP."""
    return 2 * c.Qc


def kept_stage_bytes(p: Problem, c: SimpleNamespace) -> int:
    """Returns the bytes of a tile of K and of dS in mma_two_pass_kept_rows."""
    return p.itemsize * kept_keys(p, c) * (round_up(p.d, 16) + c.Qr)


def kept_stages(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of stages of mma_two_pass_kept_rows.

    Eight warps run on a multiprocessor, in one block or more; all stages have 192 KiB if possible.
    """
    return min(max((24 << 10) * (c.Qr // c.Qw) // kept_stage_bytes(p, c), 2), 8)


_TWO_PASS_TILES = TileChoice.of(
    "Br Bc warps stages Qr Qc Qw Qs room",  # Qr x Qc are tiles of the second pass
    [
        (64, 64, 8, 1, 64, 32, 16, 1, 1),
        (32, 64, 8, 1, 64, 16, 16, 1, 1),
        (32, 32, 4, 1, 32, 32, 16, 1, 1),
        (32, 16, 2, 1, 32, 16, 16, 1, 1),
        (16, 16, 1, 1, 16, 16, 16, 1, 1),
    ],
    up_to={
        64: [(128, 128, 8, 2, 128, 64, 32, 2, 1), (64, 64, 4, 2, 64, 64, 16, 2, 1)],
        128: [(64, 128, 8, 2, 128, 32, 32, 2, 1), (64, 64, 8, 1, 64, 32, 16, 2, 1)],
        256: [(64, 64, 8, 2, 64, 32, 16, 2, 1), (64, 64, 8, 1, 64, 32, 16, 1, 1)],
    },
    on={
        "90": {
            32: [(128, 128, 8, 2, 128, 64, 32, 2, 1)],
            64: [(128, 128, 8, 2, 128, 64, 32, 2, USUAL_ROOM)],
            128: [(64, 128, 8, 2, 128, 32, 32, 2, USUAL_ROOM)],
            256: [(128, 64, 8, 1, 128, 32, 16, 1, USUAL_ROOM)],
        }
    },
)


def tiles_without_dS(p: Problem) -> Tiles:
    """Returns the tiles of mma_two_pass for problems whose dS it keeps on no device."""
    return () if may_keep_dS(p) else tiles_of_d(p, _TWO_PASS_TILES.up_to)


KEEPING_COLUMNS = mma_columns_launch("mma_two_pass_columns", "dK dV")
MMA_TWO_PASS = rung(
    MMA_COLUMNS,
    "mma_two_pass",
    "two passes on tensor cores, without atomics; dS of the second in registers",
    launches=(
        mma_delta(lambda p, c: 0),
        replace(
            KEEPING_COLUMNS,
            args=KEEPING_COLUMNS.args.replace("counts.data", "counts.data dS.data").replace(
                "stride", "stride first_block"
            ),
            grid=MMA_DS.blocks_now,
            numbers={**KEEPING_COLUMNS.numbers, "first_block": MMA_DS.first_block},
            constants={**SHARING, "keeps_dS": MMA_DS.keeps},
            in_rounds=True,
        ),
        Launch(
            "mma_two_pass_kept_rows",
            args=f"{INPUTS} dS.data dQ sizes heads group first_head scale mods",
            grid=lambda p, c: cdiv(p.M, c.Qr) * len(MMA_DS.heads_now(p, c)),
            threads=lambda p, c: WARP * c.Qr // c.Qw,
            # Holds stages of K and dS.
            shared=lambda p, c: kept_stages(p, c) * kept_stage_bytes(p, c),
            constants={
                "rows": lambda p, c: c.Qr,
                "keys": kept_keys,
                "warps": lambda p, c: c.Qr // c.Qw,
                "stages": kept_stages,
            },
            numbers={"first_head": MMA_DS.first_head},
            needed=MMA_DS.keeps,
            in_rounds=True,
        ),
        replace(
            two_pass_rows_launch(
                *("mma_two_pass_rows", f"{INPUTS} dQ"),
                # Holds 16-bit tiles of Q and dO, `Qs` tiles of K and V, and lse and delta.
                shared=lambda p, c: 2 * (c.Qr + c.Qs * c.Qc) * padded_columns(p, 16) + 8 * c.Qr,
            ),
            needed=lambda p, c: not MMA_DS.keeps(p, c),
        ),
    ),
    rounds=MMA_DS.rounds,
    tiles=replace(_TWO_PASS_TILES, of_problem=tiles_without_dS),
    candidates={
        **MMA_COLUMNS.candidates,
        **{"Qr": (64, 128), "Qc": (32, 64), "Qw": (16, 32), "Qs": (1, 2), "room": (1, USUAL_ROOM)},
    },
    rules={
        **MMA_COLUMNS.rules,
        "Qw and Qc are multiples of 16": lambda c: c.Qw % 16 == c.Qc % 16 == 0,
        "Qr is a multiple of Qw": lambda c: c.Qr % c.Qw == 0,
        "Qs is 1 or 2": lambda c: c.Qs in (1, 2),
    },
    scratch={
        **DELTA_SCRATCH,
        **SHARING_SCRATCH,
        "dQ_sum": (lambda p, c: 0, "real"),
        "dS": (MMA_DS.elements, "operand"),
    },
    tflops={"float16": {64: 196, 128: 205}, "bfloat16": {192: 148, 256: 169}},
    unordered=(),
)


def has_wide_sums(sizes: Problem | SimpleNamespace) -> bool:
    """Returns whether dK and dV of 16 keys exceed the registers of a warp."""
    return padded_columns(sizes, 16) > 256


def fp16x2_columns(name: str, shared: Formula, when: Callable[[Problem], bool]) -> Launch:
    """Makes a launch that computes dK and dV from operands split into hi and lo."""
    return replace(
        columns_launch(name, "", lambda p, c: WARP * c.warps, shared),
        args=f"{OPERANDS} {GRADIENT} K_exponents.data V_exponents.data column_bits.data lse "
        f"delta {UNITS} dK dV dK_flags dV_flags sizes kv_heads group scale mods",
        when=when,
    )


MMA_FP16X2_TWO_PASS = rung(
    MMA_TWO_PASS,
    "mma_fp16x2_two_pass",
    "float32 accuracy on tensor cores: two passes, operands split into float16 hi and lo",
    launches=(
        *SPLIT_FOR_GRADIENTS,
        fp16x2_columns(
            "mma_fp16x2_two_pass_columns",
            # Holds K, V and `stages` tiles of Q and dO, each as hi and lo, row statistics of two
            # tiles, and the largest weights of each warp.
            shared=lambda p, c: (
                4 * (c.Bc + c.stages * c.Br) * padded_columns(p, 16) + 32 * c.Br + 8 * 16 * c.warps
            ),
            when=lambda p: not has_wide_sums(p),
        ),
        fp16x2_columns(
            "mma_fp16x2_two_pass_columns_wide",
            # Holds K, V, Q and dO as hi and lo, row statistics of two tiles, and buffers of P and
            # dS, which share one buffer if Br = 16. For each key, a buffer holds hi and lo, one
            # factor per 16 elements, and four flags.
            shared=lambda p, c: (
                4 * (c.Bc + c.Br) * padded_columns(p, 16)
                + 32 * c.Br
                + (1 if c.Br == 16 else 2) * c.Bc * (4 * c.Br + c.Br // 4 + 4)
            ),
            when=has_wide_sums,
        ),
        two_pass_rows_launch(
            "mma_fp16x2_two_pass_rows",
            f"{OPERANDS} {GRADIENT} K_exponents.data column_bits.data lse delta {UNITS} dQ",
            # Holds Q, dO and `Qs` tiles of K and V, each as hi and lo, and row statistics.
            shared=lambda p, c: 4 * (c.Qr + c.Qs * c.Qc) * padded_columns(p, 16) + 16 * c.Qr,
        ),
        REPAIR_SPLIT_GRADIENTS,
    ),
    tiles=TileChoice.of(
        "Br Bc warps stages Qr Qc Qw Qs",
        [
            (32, 64, 8, 1, 64, 32, 16, 1),
            (16, 64, 4, 1, 64, 16, 16, 1),
            (16, 32, 2, 1, 32, 16, 16, 1),
            (16, 16, 1, 1, 16, 16, 16, 1),
        ],
        up_to={
            64: [(32, 128, 8, 2, 128, 64, 16, 1)],
            128: [(32, 128, 8, 1, 128, 64, 16, 1), (32, 128, 8, 1, 128, 32, 16, 1)],
            256: [
                (32, 64, 8, 1, 64, 32, 16, 1),
                (32, 32, 4, 1, 32, 32, 16, 1),
                (16, 32, 4, 1, 32, 16, 16, 1),
            ],
        },
        on={"90": {64: [(32, 128, 8, 2, 128, 32, 32, 2)]}},  # two blocks of the dQ pass share an SM
        few_rows={64: {64: [(16, 64, 4, 1, 64, 16, 16, 1)]}},
    ),
    candidates={
        "Br": (16, 32),
        "Bc": (32, 64, 128, 192),
        "warps": (4, 8, 12),
        "stages": (1, 2),
        **{"Qr": (32, 64, 128, 192), "Qc": (16, 32, 64), "Qw": (16, 32), "Qs": (1, 2)},
    },
    rules={
        "Br and Bc are multiples of 16": lambda c: c.Br % 16 == c.Bc % 16 == 0,
        "warps is a multiple of Bc / 16 and a divisor of Br * Bc / 256": lambda c: (
            has_wide_sums(c) or (16 * c.warps % c.Bc == 0 and c.Br * c.Bc % (256 * c.warps) == 0)
        ),
        "stages is 1 or 2": lambda c: c.stages in (1, 2),
        "Qw and Qc are multiples of 16": lambda c: c.Qw % 16 == c.Qc % 16 == 0,
        "Qr is a multiple of Qw": lambda c: c.Qr % c.Qw == 0,
        "above d + dv = 256 Bc is a multiple of 32, Br 16 or 32, warps Bc / 8, and stages 1": (
            lambda c: (
                not has_wide_sums(c)
                or (c.Bc % 32 == 0 and c.Br in (16, 32) and (8 * c.warps, c.stages) == (c.Bc, 1))
            )
        ),
        "Qs is 1 or 2": lambda c: c.Qs in (1, 2),
    },
    dtypes=("float32",),
    arch="80",
    parts="float16",
    scratch=GRADIENT_SCRATCH,
    tflops={"float32": {64: 64.9, 128: 71.1, 256: 59.2}},
    made_for=pays_for_short_gradients,
    after=(),
)
MMA_SLICES_BACKWARD = rung(
    MMA_COLUMNS,
    "mma_slices_backward",
    "tensor cores for any head dimension; P and dS of some heads at a time in memory",
    launches=(
        mma_delta(lambda p, c: 0, counts=lambda p, c: 0),
        mma_slices_backward.SCORES,
        mma_slices_backward.COLUMNS,
        mma_slices_backward.ROWS,
    ),
    tiles=mma_slices_backward.TILES,
    candidates=mma_slices_backward.CANDIDATES,
    rules=mma_slices_backward.RULES,
    features=FEATURES,
    scratch={
        **DELTA_SCRATCH,
        "counts": (lambda p, c: 0, "int"),
        "P": (mma_slices_backward.scores, "scalar"),
        "dS": (mma_slices_backward.scores, "scalar"),
        "dQ_sum": (mma_slices_backward.sums, "real"),
    },
    rounds=mma_slices_backward.count,
    largest_d=None,
    tflops={"float16": {64: 115}, "bfloat16": {512: 229, 1024: 249}},
    unordered=(),
    after=(),
)

# Hopper kernels (wgmma and TMA)

LANES_OF_ROW = 8  # threads per row in begin_rows and sum_rows
# Constants of launches that read sequence lengths but have no argument `sizes`.
BY_LENGTHS: dict[str, Constant] = {"ragged": lambda p, c: p.is_ragged}
WGMMA_RULES = {
    "Br is 64, or 128 up to d = 128": lambda c: c.Br == 64 or (c.Br == 128 and not is_wide(c)),
    "Bc is 128, or 64 above d = 128": lambda c: c.Bc == (64 if is_wide(c) else 128),
}


def is_wide(sizes: Problem | SimpleNamespace) -> bool:
    """Returns whether dK and dV of 64 keys need two warpgroups' registers; see query_layout.cuh."""
    return max(sizes.d, sizes.dv) > 128


FEWEST_FINISHING = 128  # minimum number of key heads: about as many as an H100 has SMs


def finishes(p: Problem) -> bool:
    """Returns whether the last block of each key head converts dQ; see kernels/finishing.

    This pays off for many key heads with few rows each. Otherwise a separate launch is faster.
    """
    are_many = p.batch * p.kv_heads >= FEWEST_FINISHING
    are_short = p.M * p.group <= 4096 and not p.is_ragged
    return are_many and are_short and not is_persistent(p, p.group)


FEWEST_PERSISTENT = 2 * 132  # minimum number of tiles: two per SM of an H100


def is_persistent(p: Problem, heads: int) -> bool:
    """Returns whether wgmma_columns uses persistent blocks, which pay off for many short tiles.

    heads: the number of query heads that a block processes.
    """
    hides = p.modifiers.mask or any(x.name in MAPS for x in p.operands)
    if p.is_ragged or p.window != (None, None) or hides:
        return False
    if cdiv(p.N, 128) * (p.heads // heads) * p.batch < FEWEST_PERSISTENT or not p.M:
        return False  # without rows, no block of begin_rows clears the tile counter
    length, d = max(p.M * heads, p.N), max(p.d, p.dv)
    if d <= 64:
        return length <= (4096 if p.causal else 1024)
    return d <= 128 and bool(p.causal) and 1024 <= length <= 2048


def wgmma_splits(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of blocks of wgmma_columns that share the query heads of a group."""
    if is_wide(p) or finishes(p):
        return 1
    is_narrow = max(p.d, p.dv) <= 64
    most = 4 if is_narrow and (p.M < 16384 or p.is_ragged) else 2
    return p.group // block_heads(p, c, most)


def shares_groups(p: Problem, c: SimpleNamespace) -> bool:
    """Returns whether several blocks of wgmma_columns add dK and dV of a key tile."""
    return wgmma_splits(p, c) > 1


def counts_size(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of counters: tiles taken, and additions to each sum."""
    return 1 + 2 * key_tiles(p, c) if shares_groups(p, c) else p.batch * p.kv_heads


def key_sums_size(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of float4 in the sums of dK and dV; see key_sums.cuh."""
    width = wgmma_part_width(p, c)
    columns = sum(round_up(x, width) for x in (p.d, p.dv))
    return key_tiles(p, c) * c.Bc * columns // 4 if shares_groups(p, c) else 0


def wgmma_columns_blocks(p: Problem, c: SimpleNamespace) -> int:
    splits = wgmma_splits(p, c)
    blocks = key_tiles(p, c) * splits
    return min(c.multiprocessors, blocks) if is_persistent(p, p.group // splits) else blocks


def wgmma_parts(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of shares into which dQ of a row tile is divided; see query_layout.cuh."""
    if is_wide(p):
        return cdiv(p.d, 64)
    return 2 if c.Br == 128 or p.d > 64 else 1


def wgmma_part_width(p: Problem, c: SimpleNamespace) -> int:
    """Returns the columns of a RegisterTile in the sums; see query_layout.cuh."""
    return 64 if is_wide(p) or (c.Br == 64 and p.d > 64) else round_up(p.d, 16)


def wgmma_shared(p: Problem, c: SimpleNamespace) -> int:
    """Returns the bytes of shared memory for tiles in TMA boxes of 64 columns, dS, each
    warpgroup's share of dQ, row sums and mbarriers.
    """
    tiles = 2 * ((c.Bc + c.stages * c.Br) * padded_columns(p, 64) + c.dS_stages * c.Br * c.Bc)
    part = 4 * 64 * wgmma_part_width(p, c)
    rest = 2 * part + 8 * c.stages * c.Br + 8 * (10 + 4 * c.stages)
    pairs = bias_bytes(p) * c.Br * c.Bc
    return round_up(tiles + round_up(rest, 16) + pairs, 1024)


def wgmma_wide_shared(p: Problem, c: SimpleNamespace, dO_stages: int | None = None) -> int:
    """Returns the bytes of shared memory for wide heads.

    Unlike in wgmma_shared, P is also stored, and dO may have fewer stages than Q.
    """
    dO_stages = dO_stages or wgmma_dO_stages(p, c)
    tiles = 2 * (
        (c.Bc + c.stages * c.Br) * round_up(p.d, 64)
        + (c.Bc + dO_stages * c.Br) * round_up(p.dv, 64)
    )
    between = (2 + 4) * c.Br * c.Bc + 2 * 4 * 64 * 64
    rest = 8 * c.stages * c.Br + 8 * (5 + 2 * c.stages + 2 * dO_stages)
    return round_up(tiles + between + rest, 1024)


def wgmma_dO_stages(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of dO stages: as many as for Q if they fit into shared memory, else 1."""
    return c.stages if wgmma_wide_shared(p, c, c.stages) <= SHARED_OF_SM_90 else 1


def wgmma_two_pass_shared(p: Problem, kept: int, stages: int, loaded: int, rest: int) -> int:
    """Returns the bytes of shared memory for tiles of `kept` rows, four mbarriers, and in each
    stage tiles of `loaded` rows and `rest` additional bytes.
    """
    return round_up(2 * (kept + stages * loaded) * padded_columns(p, 64) + stages * rest + 32, 1024)


def boxes(rows: Formula, keys: Formula) -> dict[str, Formula]:
    """Returns the rows per TMA box: `rows` for Q and dO, `keys` for K and V."""
    return {"Q": rows, "K": keys, "V": keys, "dO": rows}


WGMMA_COLUMNS_LAUNCH = Launch(
    "wgmma_columns",
    args="Q.map K.map V.map dO.map Q K V dO lse row_sums.data dQ_sum.data counts.data dQ dK dV "
    "sizes heads kv_heads group scale mods",
    boxes=boxes(lambda p, c: c.Br, lambda p, c: c.Bc),
    grid=key_tiles,
    threads=lambda p, c: 384,
    shared=wgmma_shared,
    when=lambda p: not is_wide(p),
    walks=DOWN_ROWS,
    begins_early=True,
)
WGMMA_TWO_PASS_COLUMNS = replace(
    WGMMA_COLUMNS_LAUNCH,
    entry="wgmma_two_pass_columns",
    args=WGMMA_COLUMNS_LAUNCH.args.replace("dQ_sum.data counts.data dQ ", ""),
    # In addition to Q and dO, each stage holds row sums and 4 mbarriers.
    shared=lambda p, c: wgmma_two_pass_shared(p, c.Bc, c.stages, c.Br, 8 * c.Br + 32),
)


def tiles_of_few_rows(p: Problem) -> Tiles:
    """Returns tiles of 128 rows for up to 256 rows of 65 to 80 columns, as in DiT.

    On an H200 they take 1.15 ms instead of 1.20 at d = 72, 1.12 instead of 1.23 at d = 80. With
    more rows or columns, their single stage is slower.
    """
    is_plain = not (p.is_masked or p.operands) and p.options.changed.keys() <= {"scale"}
    is_measured = is_plain and 64 < max(p.d, p.dv) <= 80 and 128 < p.M <= 256
    return named("Br Bc stages dS_stages", (128, 128, 1, 1)) if is_measured else ()


def two_pass_block_heads(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of query heads that a block of wgmma_two_pass processes."""
    return p.group if is_wide(p) else block_heads(p, c, most=8)


WGMMA_DS = KeptDS(
    two_pass_block_heads,
    tile=lambda c: (64, 64),
    may_share=lambda p: not is_wide(p),
    else_overlaps=True,
    # With 64 columns, products are short; with more keys, dS of a round does not stay in L2.
    pays_off=lambda p: max(p.d, p.dv) > 64 or p.N <= 2048,
)


LARGE_GROUP = 4  # query heads of a key head from which on two passes are faster for longer heads


def why_two_passes(p: Problem, c: SimpleNamespace) -> str | None:
    """Returns why wgmma_two_pass is faster than wgmma_columns, although it computes more products.

    With few blocks, its two passes run at the same time. Under a causal mask, half of their work is
    masked. For each element of dQ, wgmma_columns clears a sum in memory, adds to it and reads it
    again. At d = 73 to 128 this takes longer than two more products with few keys, or than storing
    and loading dS. Under a causal mask, its blocks of short heads also differ more in length, the
    more query heads they process.
    """
    if is_wide(p) or p.is_ragged or p.window != (None, None):
        return None
    blocks = tiles_of(p, p.N, c.Bc) * p.heads * p.batch
    if blocks * (1 if p.causal else 2) <= c.multiprocessors:
        return "its blocks are too few for the device"
    usual = SimpleNamespace(**WGMMA_TWO_PASS.choice.first, multiprocessors=c.multiprocessors)
    longest = longest_of_two_passes(p, keeps_dS=WGMMA_DS.keeps(p, usual))
    if max(p.d, p.dv) > 72 and max(p.M, p.N) <= longest:
        return "sums of dQ in memory take longer than two passes with few keys"
    return None


def longest_of_two_passes(p: Problem, keeps_dS: bool) -> int:
    """Returns the length of the longest heads for which two passes are faster at d = 73 to 128."""
    in_large_group = p.group >= LARGE_GROUP
    if not keeps_dS:
        return 768 if p.causal and in_large_group else 256
    if p.causal:
        return 2048 if in_large_group else 1024
    return 768 if in_large_group else 256


WGMMA_COLUMNS = Kernel(
    "wgmma_columns",
    "Hopper: warpgroups own 64 keys; transposed scores keep P and dS in registers",
    (
        Launch(
            "begin_rows",
            args="O dO lse row_sums.data dQ_sum.data counts.data counts_size key_sums.data "
            "key_sums_size M heads mods",
            grid=lambda p, c: (row_tiles(p, c), 1),
            threads=lambda p, c: LANES_OF_ROW * c.Br,
            constants=BY_LENGTHS,
            numbers={"counts_size": counts_size, "key_sums_size": key_sums_size},
        ),
        replace(
            WGMMA_COLUMNS_LAUNCH,
            args=WGMMA_COLUMNS_LAUNCH.args.replace("mods", "batch mods")
            .replace("counts.data", "counts.data key_sums.data")
            .replace("group", "group splits"),
            grid=wgmma_columns_blocks,
            numbers={"splits": wgmma_splits},
            constants={
                "shares_groups": shares_groups,
                "finishes": lambda p, c: finishes(p),
                "persistent": lambda p, c: is_persistent(p, p.group // wgmma_splits(p, c)),
                "bias_bytes": lambda p, c: bias_bytes(p),
                "batch_first": lambda p, c: batch_first(p),
            },
        ),
        replace(
            WGMMA_COLUMNS_LAUNCH,
            entry="wgmma_columns_wide",
            shared=wgmma_wide_shared,
            constants={"finishes": lambda p, c: finishes(p), "dO_stages": wgmma_dO_stages},
            when=is_wide,
        ),
        Launch(
            "finish_dQ",
            args="Q K V dO dQ lse row_sums.data dQ_sum.data sizes heads group scale mods",
            grid=lambda p, c: (row_tiles(p, c), wgmma_parts(p, c)),
            threads=lambda p, c: 128,
            when=lambda p: not finishes(p),
            begins_early=True,
        ),
    ),
    operation="backward",
    tiles=TileChoice.of(
        "Br Bc stages dS_stages",
        [(64, 128, 2, 2), (64, 128, 2, 1), (64, 128, 1, 1)],
        up_to={64: [(128, 128, 2, 2)], 128: [(64, 128, 2, 2)], 256: [(64, 64, 2, 1)]},
        of_problem=tiles_of_few_rows,
    ),
    candidates={"Br": (64, 128), "Bc": (64, 128), "stages": (1, 2, 3), "dS_stages": (1, 2)},
    rules={
        **WGMMA_RULES,
        "dS_stages is 1, or 2 up to d = 128": lambda c: (
            c.dS_stages == 1 or (c.dS_stages == 2 and not is_wide(c))
        ),
        "stages is at most 6, for named barriers": lambda c: c.stages <= 6,
    },
    dtypes=HALF,
    features=OF_SEQUENCES,
    scratch={
        "row_sums": (lambda p, c: 2 * row_tiles(p, c) * c.Br, "real"),
        "dQ_sum": (
            lambda p, c: row_tiles(p, c) * c.Br * round_up(p.d, wgmma_part_width(p, c)),
            "real",
        ),
        "counts": (lambda p, c: 4 * counts_size(p, c), "byte"),
        "key_sums": (lambda p, c: 4 * key_sums_size(p, c), "real"),
    },
    arch="90a",
    largest_d=256,
    tflops={
        "float16": {64: 456, 128: 507, 256: 383},
        "bfloat16": {64: 457, 128: 515, 192: 360, 256: 383},
    },
    yields_to={"wgmma_two_pass": why_two_passes},
    unordered=("dQ",),
    unordered_with={"shares_groups": ("dK", "dV")},
    after=(),
)
CONSUMING_WARPS = 8  # warps of wgmma_two_pass_columns that hold dK and dV


def kept_box_stages(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of stages of wgmma_two_pass_kept_rows, at most 8."""
    return min(SHARED_OF_SM_90 // (kept_boxes_bytes(p) + 1024), 8)


def kept_boxes_bytes(p: Problem) -> int:
    """Returns the bytes of 64 keys and two boxes of dS in wgmma_two_pass_kept_rows."""
    return 2 * 64 * (round_up(p.d, 64) + 2 * 64)


def two_pass_sharing_blocks(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of blocks that store dK and dV for others of their group."""
    splits = WGMMA_DS.splits(p, c)
    return key_tiles(p, c) * splits if splits > 1 else 0


def two_pass_counts_size(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of counters in group_shares.cuh."""
    return two_pass_sharing_blocks(p, c) * CONSUMING_WARPS


OF_ROUND = {"first_block": WGMMA_DS.first_block, "first_head": WGMMA_DS.first_head}
WGMMA_TWO_PASS = rung(
    WGMMA_COLUMNS,
    "wgmma_two_pass",
    "Hopper, two passes: dQ in registers too, no atomics; dS is kept or computed twice",
    launches=(
        Launch(
            "sum_rows",
            args="O dO lse row_sums.data counts.data counts_size M heads mods",
            grid=lambda p, c: (row_tiles(p, c), 1),
            threads=lambda p, c: LANES_OF_ROW * c.Br,
            constants=BY_LENGTHS,
            numbers={"counts_size": two_pass_counts_size},
        ),
        replace(
            WGMMA_TWO_PASS_COLUMNS,
            args=WGMMA_TWO_PASS_COLUMNS.args.replace(
                "dK dV", "dK dV shared_sums.data counts.data dS.data"
            ).replace("group", "group splits stride first_block first_head"),
            grid=WGMMA_DS.blocks_now,
            numbers={"splits": WGMMA_DS.splits, "stride": share_stride, **OF_ROUND},
            constants={
                "shares_groups": lambda p, c: WGMMA_DS.splits(p, c) > 1,
                "keeps_dS": WGMMA_DS.keeps,
            },
            in_rounds=True,
        ),
        replace(
            WGMMA_TWO_PASS_COLUMNS,
            entry="wgmma_two_pass_columns_wide",
            # In addition to Q and dO, each stage holds P, row sums and 8 mbarriers.
            shared=lambda p, c: wgmma_two_pass_shared(
                p, c.Bc, c.stages, c.Br, (4 * c.Bc + 8) * c.Br + 64
            ),
            args=WGMMA_TWO_PASS_COLUMNS.args.replace("dK dV", "dK dV dS.data").replace(
                "group", "group first_block first_head"
            ),
            grid=WGMMA_DS.blocks_now,
            numbers=OF_ROUND,
            constants={"keeps_dS": WGMMA_DS.keeps},
            when=is_wide,
            in_rounds=True,
        ),
        Launch(
            "wgmma_two_pass_kept_rows",
            args="K.map Q K V dO lse row_sums.data dS.data dQ sizes heads group first_head scale "
            "mods",
            boxes={"K": lambda p, c: 64},
            grid=lambda p, c: cdiv(p.M, 128) * len(WGMMA_DS.heads_now(p, c)),
            threads=lambda p, c: 384,
            shared=lambda p, c: round_up(kept_box_stages(p, c) * (kept_boxes_bytes(p) + 8), 1024),
            constants={"kept_stages": kept_box_stages},
            numbers={"first_head": WGMMA_DS.first_head},
            needed=WGMMA_DS.keeps,
            in_rounds=True,
            begins_early=True,
        ),
        Launch(
            "wgmma_two_pass_rows",
            args="Q.map K.map V.map dO.map Q K V dO lse row_sums.data dQ sizes heads group scale "
            "mods",
            boxes=boxes(lambda p, c: 128, lambda p, c: c.Bk),
            grid=lambda p, c: tiles_of(p, p.M, 128) * p.heads * p.batch,
            threads=lambda p, c: 384,
            shared=lambda p, c: wgmma_two_pass_shared(p, 128, c.stages, c.Bk, 24),
            walks={KEY_TILES: lambda p, c: (128, c.Bk)},
            begins_early=True,
            unawaited="row_sums",
            needed=lambda p, c: not WGMMA_DS.keeps(p, c),
        ),
    ),
    rounds=WGMMA_DS.rounds,
    tiles=TileChoice.of(
        "Br Bc Bk stages room",
        [(64, 128, 128, 2, USUAL_ROOM)],
        up_to={
            64: [(128, 128, 128, 2, USUAL_ROOM)],
            128: [(64, 128, 128, 2, USUAL_ROOM)],
            192: [(64, 64, 64, 2, USUAL_ROOM)],
            256: [(64, 64, 48, 2, USUAL_ROOM)],
        },
    ),
    candidates={
        "Br": (64, 128),
        "Bc": (64, 128),
        "Bk": (48, 64, 80, 96, 128),
        "stages": (1, 2, 3, 4),
        "room": (1, USUAL_ROOM),
    },
    rules={**WGMMA_RULES, "Bk is a multiple of 16": lambda c: c.Bk % 16 == 0},
    scratch={
        "row_sums": WGMMA_COLUMNS.scratch["row_sums"],
        "shared_sums": (
            lambda p, c: two_pass_sharing_blocks(p, c) * c.Bc * padded_columns(p, 16),
            "real",
        ),
        "counts": (two_pass_counts_size, "int"),
        "dS": (WGMMA_DS.elements, "scalar"),
    },
    tflops={"float16": {64: 361, 128: 374, 256: 395}, "bfloat16": {192: 437, 256: 451}},
    yields_to={},
    unordered=(),
    unordered_with={},
)


PART_MAPS = " ".join(f"{name}.map" for name in f"{OPERANDS} {GRADIENT}".split())


def part_boxes(rows: Formula, keys: Formula) -> dict[str, Formula]:
    """Returns `boxes` for the hi and lo halves of each operand."""
    return {f"{x}_{part}": y for x, y in boxes(rows, keys).items() for part in ("high", "low")}


def shares_keys(sizes: Problem | SimpleNamespace) -> bool:
    """Returns whether two warpgroups share 64 keys, so that 64-row tiles fit into registers."""
    return max(sizes.d, sizes.dv) > 64


def fp16x2_wgmma_shared(p: Problem, c: SimpleNamespace) -> int:
    """Returns the bytes of shared memory for hi and lo of K, V and `stages` tiles of Q and dO.

    Each stage also holds row statistics and two mbarriers for them and for each box of Q and dO. If
    warpgroups share keys, it also holds P and four more mbarriers.
    """
    columns = padded_columns(p, 64)
    tiles = 4 * (c.Bc + c.stages * c.Br) * columns
    of_P = 256 * c.Br + 32 if shares_keys(p) else 0
    barriers = 16 * (c.stages * (columns // 64 + 1) + columns // 64)
    return round_up(tiles + c.stages * (16 * c.Br + of_P) + barriers, 1024)


def fp16x2_wgmma_rows_shared(p: Problem, c: SimpleNamespace, V_stages: int | None = None) -> int:
    """Returns the bytes of shared memory for hi and lo of Q, dO, `Ks` stages of K and `V_stages` of
    V, row statistics and mbarriers.
    """
    V_stages = V_stages or fp16x2_V_stages(p, c)
    d, dv = round_up(p.d, 64), round_up(p.dv, 64)
    tiles = 4 * (128 * (d + dv) + c.Bk * (c.Ks * d + V_stages * dv))
    boxes = ((c.Ks + 1) * d + (V_stages + 1) * dv) // 64
    return round_up(tiles + 16 * (128 + boxes), 1024)


def fp16x2_V_stages(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of V stages: as many as for K if they fit into shared memory, else 1."""
    return c.Ks if fp16x2_wgmma_rows_shared(p, c, c.Ks) <= SHARED_OF_SM_90 else 1


def fp16x2_wgmma_rows_wide_shared(p: Problem, c: SimpleNamespace) -> int:
    """Returns the bytes of shared memory for hi and lo of 64 rows of Q and dO, two K tiles and one
    V tile, row statistics, the largest weights of rows and mbarriers.
    """
    d, dv = round_up(p.d, 64), round_up(p.dv, 64)
    tiles = 4 * (64 * (d + dv) + c.Bk * (2 * d + dv))
    barriers = (6 * d + 4 * dv) // 64 + 1
    return round_up(tiles + 64 * (16 + 4) + 8 * barriers, 1024)


WGMMA_FP16X2_COLUMNS = Launch(
    "wgmma_fp16x2_two_pass_columns",
    args=f"{PART_MAPS} K_exponents.data V_exponents.data column_bits.data stats.data "
    "dK dV dK_flags dV_flags sizes heads kv_heads group scale mods",
    boxes=part_boxes(lambda p, c: c.Br, lambda p, c: 64),
    grid=key_tiles,
    threads=lambda p, c: 384,
    shared=fp16x2_wgmma_shared,
    when=lambda p: not shares_keys(p),
    walks=DOWN_ROWS,
)
WGMMA_FP16X2_ROWS = Launch(
    "wgmma_fp16x2_two_pass_rows",
    args=f"{PART_MAPS} K_exponents.data column_bits.data lse delta {UNITS} dQ sizes heads group "
    "scale mods",
    boxes=part_boxes(lambda p, c: 64, lambda p, c: c.Bk),
    grid=lambda p, c: tiles_of(p, p.M, 128) * p.heads * p.batch,
    threads=lambda p, c: 384,
    shared=fp16x2_wgmma_rows_shared,
    constants={"stages": lambda p, c: c.Ks, "V_stages": fp16x2_V_stages},
    when=lambda p: not is_wide(p),
    walks={KEY_TILES: lambda p, c: (128, c.Bk)},
)
WGMMA_FP16X2_TWO_PASS = rung(
    MMA_FP16X2_TWO_PASS,
    "wgmma_fp16x2_two_pass",
    "float32 accuracy with wgmma: operands split into hi and lo, accumulators for each tile",
    launches=(
        *SPLIT_FOR_GRADIENTS,
        Launch(
            "split_stats",
            args="lse delta scale2 dO_units flags stats.data M heads mods",
            grid=row_tiles,
            threads=lambda p, c: c.Br,
            constants=BY_LENGTHS,
        ),
        *(
            clear_rest(f"{name}_{part}", rows, heads, width)
            for name, rows, heads, width in (
                ("Q", "M", "heads", "d16"),
                ("dO", "M", "heads", "dv16"),
                ("K", "N", "kv_heads", "d16"),
                ("V", "N", "kv_heads", "dv16"),
            )
            for part in ("high", "low")
        ),
        WGMMA_FP16X2_COLUMNS,
        replace(
            WGMMA_FP16X2_COLUMNS,
            entry="wgmma_fp16x2_two_pass_columns_wide",
            when=shares_keys,
        ),
        WGMMA_FP16X2_ROWS,
        replace(
            WGMMA_FP16X2_ROWS,
            entry="wgmma_fp16x2_two_pass_rows_wide",
            grid=lambda p, c: tiles_of(p, p.M, 64) * p.heads * p.batch,
            shared=fp16x2_wgmma_rows_wide_shared,
            constants={},
            when=is_wide,
            walks={KEY_TILES: lambda p, c: (64, c.Bk)},
        ),
        REPAIR_SPLIT_GRADIENTS,
    ),
    tiles=TileChoice.of(
        "Br Bc stages Bk Ks",
        [(32, 64, 1, 32, 2), (32, 64, 1, 16, 2)],
        up_to={
            64: [(64, 128, 2, 64, 3)],
            128: [(64, 64, 2, 64, 2), (64, 64, 1, 32, 2)],
            192: [(32, 64, 2, 48, 2)],
            256: [(32, 64, 1, 32, 2)],
        },
    ),
    candidates={
        "Br": (16, 32, 64),
        "Bc": (64, 128),
        "stages": (1, 2, 3, 4),
        "Bk": (16, 32, 48, 64, 80),
        "Ks": (1, 2, 3, 4),
    },
    rules={
        "Br is a multiple of 16, up to 64": lambda c: c.Br in (16, 32, 48, 64),
        "Bc is 128, or 64 above d = 64": lambda c: c.Bc == (64 if shares_keys(c) else 128),
        "Bk is a multiple of 16, up to 80": lambda c: c.Bk % 16 == 0 and c.Bk <= 80,
        "Ks is 2 above d = 128": lambda c: c.Ks == 2 or not is_wide(c),
    },
    arch="90a",
    scratch={
        **GRADIENT_SCRATCH,
        "stats": (lambda p, c: 4 * row_tiles(p, c) * c.Br, "real"),
    },
    tflops={"float32": {64: 100, 128: 111, 256: 102}},
    made_for=pays_for_gradients,
    after=(),
)

_RUNGS = (
    *(BASELINE, COLUMNS, ROWS, TWO_PASS, MMA_SLICES_BACKWARD, MMA_COLUMNS, MMA_TWO_PASS),
    *(MMA_FP16X2_TWO_PASS, MMA_F64_COLUMNS, WGMMA_COLUMNS, WGMMA_TWO_PASS),
    WGMMA_FP16X2_TWO_PASS,
)
_REST = (
    clear_rest("dQ", "M", "heads", "d"),
    clear_rest("dK", "N", "kv_heads", "d"),
    clear_rest("dV", "N", "kv_heads", "dv"),
)
KERNELS = tuple(with_cleared_rest(with_gradients(x), *_REST) for x in _RUNGS)
