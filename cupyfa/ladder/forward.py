"""The forward ladder: each rung adds one idea to the rung before it."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from math import gcd
from types import SimpleNamespace
from typing import Any

from cupyfa.errors import Unsupported, described
from cupyfa.ladder.common import (
    ALONG_KEYS,
    CLEARING,
    HALF,
    ROOM,
    ROOM_CANDIDATES,
    SHARED_OF_SM_90,
    WARP,
    baseline_shares,
    batch_first,
    bias_bytes,
    clear_rest,
    clear_row_max,
    even_width,
    heads_in_room,
    key_tiles,
    padded_columns,
    row_tiles,
    rows_in_room,
    rung,
    tiles_of,
    warps_of_scores,
    whole_groups,
    with_cleared_rest,
)
from cupyfa.ladder.kernel import MOST_BOX_ROWS, Constant, Formula, Kernel, Launch, Matmul, padded
from cupyfa.ladder.softmax import softmax_launch
from cupyfa.ladder.split_float32 import (
    OPERANDS,
    PARTS,
    REPAIR_SPLIT_OUTPUT,
    SCRATCH,
    SPLIT,
    pays_for_few_rows,
)
from cupyfa.ladder.tiles import TileChoice, Tiles, cdiv, named
from cupyfa.problem.dtypes import E4M3_INPUTS
from cupyfa.problem.optional_inputs import KEY_TILES
from cupyfa.problem.options import FLOAT8
from cupyfa.problem.problem import MOST, Problem, round_up, whole

ALL_BUT_WINDOWS = ("causal", "score", "gqa", "strides", "lse", "dv", "out_dtype")
ALL_BUT_PLACES = (*ALL_BUT_WINDOWS, "window")
EVERYTHING = (*ALL_BUT_PLACES, "places", "sink", "dropout", "row_max")
OF_SEQUENCES = (*EVERYTHING, "lengths", "ragged")
IN_SPLITS = (*EVERYTHING, "lengths", "paged")

# Kernels without tensor cores, and "v3", which uses WMMA


def seed_kernel(
    name: str, adds: str, *, threads: Formula, shared: Formula, **fields: Any
) -> Kernel:
    """Makes a kernel with one block per head, which keeps sums, maxima and O in global memory."""
    launch = Launch(
        name,
        args="Q K V O lse O_sum row_max row_sum sizes heads group scale mods",
        grid=lambda p, c: p.heads * p.batch,
        threads=threads,
        shared=shared,
    )
    sums = {
        "O_sum": ("batch heads M dv", "real"),
        "row_max": ("batch heads M", "real"),
        "row_sum": ("batch heads M", "real"),
    }
    return Kernel(name, adds, (launch,), features=ALL_BUT_WINDOWS, scratch=sums, **fields)


def scores_bytes(p: Problem) -> int:
    """Returns the bytes of a row of S and of P."""
    return 2 * p.itemsize * p.N


def baseline_launches(softmax: str) -> tuple[Launch | Matmul, ...]:
    """Makes the steps of a baseline with one of the softmax kernels."""
    return (
        Matmul("S", "Q", "K.T", scaled=True, in_rounds=True),
        replace(softmax_launch(softmax), in_rounds=True),
        Matmul("O", "P", "V", in_rounds=True),
        Launch(
            "repair_rows",
            args="P V O sizes heads group",
            grid=lambda p, c: p.M * p.heads * p.batch,
            threads=lambda p, c: 128,
            when=lambda p: p.is_masked,
            in_rounds=True,
        ),
    )


BASELINE = Kernel(
    "baseline",
    "cuBLAS, softmax, cuBLAS: S and P go through global memory",
    baseline_launches("softmax_safe"),
    tiles=ROOM,
    candidates=ROOM_CANDIDATES,
    features=ALL_BUT_PLACES,
    scratch={"S": ("batch heads M N", "scalar"), "P": ("batch heads M N", "scalar")},
    round_heads=lambda p, c: whole_groups(p, heads_in_room(p, c, scores_bytes(p))),
    round_group=lambda p, c: heads_in_room(p, c, scores_bytes(p)),
    round_rows=lambda p, c: rows_in_room(p, c, scores_bytes(p)),
    tflops={
        "float32": {64: 21.7, 128: 31.2, 256: 38.4, 512: 43.0, 1024: 46.1},
        "float64": {64: 15.4, 128: 25.9, 256: 36.1, 512: 45.0, 1024: 51.3},
    },
    shares=baseline_shares(scores_bytes, lambda p: 250_000),
)
BASELINE_ONLINE = rung(
    BASELINE,
    "baseline_online",
    "the online softmax between the two products",
    launches=baseline_launches("softmax_online"),
)
SEEDS = (
    seed_kernel(
        "minimal",
        "S and P stay on chip; a thread owns a row; O, max and sum in global memory",
        threads=lambda p, c: c.Bc,
        shared=lambda p, c: p.bytes(reals=c.Br * c.Bc, scalars=(c.Br + c.Bc) * p.d + c.Bc * p.dv),
        tiles=named("Br Bc", *((size, size) for size in (32, 16, 8, 4, 2, 1))),
        candidates={"Br": (8, 16, 32, 64), "Bc": (8, 16, 32, 64, 128, 256)},
        rules={"Br <= Bc, because there are Bc threads": lambda c: c.Br <= c.Bc},
    ),
    seed_kernel(
        "v1",
        "a block works on one row at a time: coalesced loads, dot products summed by all threads",
        threads=lambda p, c: 128,
        shared=lambda p, c: p.bytes(reals=128 // WARP * c.Bc, scalars=p.d + c.Bc * (p.d + p.dv)),
        tiles=named("Bc", (4,), (2,), (1,)),
        candidates={"Bc": (1, 2, 4, 8, 16, 32)},
        after=("minimal",),
    ),
    seed_kernel(
        "v2",
        "one warp per row: shuffles instead of barriers",
        threads=lambda p, c: WARP * c.Br,
        shared=lambda p, c: p.bytes(scalars=(c.Br + c.Bc) * p.d + c.Bc * p.dv),
        tiles=named("Br Bc", (4, 2), (2, 2), (2, 1), (1, 1)),
        candidates={"Br": (1, 2, 4, 8, 16, 32), "Bc": (1, 2, 4, 8, 16, 32)},
        after=("v1",),
    ),
    seed_kernel(
        "v3",
        "tensor cores (WMMA); tiles along d too, so shared memory does not depend on d",
        threads=warps_of_scores,
        shared=lambda p, c: 8 * c.Br * (c.Bc + 2) + 4 * c.Bc * (c.Br + c.Bc),
        tiles=named(
            "Br Bc Wr Wc",
            *((64, 32, 32, 16), (32, 32, 16, 16), (64, 16, 16, 16)),
            *((16, 32, 16, 16), (32, 16, 16, 16)),
        ),
        candidates={"Br": (32, 64, 128), "Bc": (32, 64), "Wr": (16, 32, 64), "Wc": (16, 32)},
        rules={
            "Wr and Wc are multiples of 16": lambda c: c.Wr % 16 == c.Wc % 16 == 0,
            "Br is a multiple of Wr and Bc of Wc": lambda c: c.Br % c.Wr == c.Bc % c.Wc == 0,
        },
        dtypes=("float16", "bfloat16", "float32"),
        rounding="float16",
        tflops={"float16": {64: 1.77, 128: 2.27, 256: 2.52, 1024: 2.63}},
    ),
)

FA2 = Kernel(
    "fa2",
    "loops swapped, a block owns rows of Q: their O, max and sum stay on chip",
    (
        Launch(
            "fa2",
            args="Q K V O lse sizes heads batch group scale mods",
            grid=row_tiles,
            threads=lambda p, c: c.Br,
            shared=lambda p, c: p.bytes(
                reals=c.Br * (p.dv + c.Bc), scalars=(c.Br + c.Bc) * p.d + c.Bc * p.dv
            ),
            walks=ALONG_KEYS,
        ),
    ),
    tiles=tuple(
        {"Br": Br, "Bc": Bc}
        for Br in (128, 64, 32, 16, 8, 4, 2, 1)
        for Bc in (32, 16, 8, 4, 2, 1)
        if Bc <= Br <= 16 * Bc
    ),
    candidates={"Br": (8, 16, 32, 64, 96, 128, 192, 256), "Bc": (4, 8, 16, 32, 64)},
    rules={"Bc is less than 16 or a multiple of 16": lambda c: c.Bc < 16 or c.Bc % 16 == 0},
    features=(*OF_SEQUENCES, "paged"),
    tflops={
        "float16": {64: 6.0, 128: 4.99, 256: 4.19, 1024: 1.12},
        "bfloat16": {64: 5.28, 128: 3.35, 256: 3.09, 1024: 0.851},
        "float32": {64: 8.93, 128: 6.41, 256: 3.83, 1024: 0.627},
        "float64": {64: 4.82, 128: 2.33, 256: 1.07, 1024: 0.166},
    },
    after=("minimal",),
)
FA2_COALESCED = rung(
    FA2,
    "fa2_coalesced",
    "coalesced loads and stores; padded rows; K and V share a buffer",
    launch={
        "shared": lambda p, c: p.bytes(
            reals=c.Br * (padded(p.dv, p.dtype.sums.itemsize) + c.Bc + 1),
            scalars=c.Br * padded(p.d, p.itemsize) + c.Bc * padded(max(p.d, p.dv), p.itemsize),
            align=16,
        )
    },
    # With few rows, most threads of a large block would own none.
    tiles=TileChoice(FA2.choice.usual, few_rows={64: {128: named("Br Bc", (32, 16))}}),
    tflops={
        "float16": {64: 15.4, 128: 10.4, 256: 10.3, 1024: 1.64},
        "bfloat16": {64: 12.8, 128: 6.85, 256: 6.82, 1024: 0.803},
        "float32": {64: 19.8, 128: 14.3, 256: 6.61, 1024: 0.862},
        "float64": {64: 9.06, 128: 4.98, 256: 2.12, 1024: 0.216},
    },
)

# mma.sync kernels: each block computes Br rows, and each warp owns Wr of them

HALVES = [(Br, Bc, 16) for Br in (64, 32, 16) for Bc in (32, 16)]  # Br, Bc, Wr
MMA_PIPELINED_TILES = TileChoice.of(
    "Br Bc Wr stages",
    [(*tile, 1) for tile in HALVES],
    up_to={
        64: [(128, 80, 32, 2), (128, 64, 32, 1)],
        128: [(128, 32, 32, 1)],
        256: [(64, 64, 16, 1)],
    },
    # Tile sizes depend on the architecture, because ptxas allocates different numbers of registers.
    on={
        **{arch: {64: [(128, 64, 32, 2)]} for arch in ("80", "86", "89")},
        "90": {64: [(128, 96, 32, 2), (128, 64, 32, 2)], 128: [(128, 64, 32, 2)]},
        **{arch: {64: [(128, 64, 32, 2)], 256: [(64, 48, 16, 1)]} for arch in ("100", "120")},
    },
    # Smaller tiles make more blocks if there are fewer blocks than SMs. Measured on an H100.
    short={64: [(64, 128, 16, 2), (64, 64, 16, 2)], 128: [(64, 64, 16, 2), (64, 32, 16, 2)]},
    blocks_per_sm=2,
)
LARGE_FEW = {Br: (Br, 64, 16, 3, 1) for Br in (16, 32)} | {64: (64, 32, 16, 2, 1)}
SPLIT_KV_TILES = TileChoice.of(
    "Br Bc Wr stages blocks_per_sm",
    [(*tile, 2, 2) for tile in HALVES],
    up_to={64: [(128, 64, 32, 2, 2)], 128: [(64, 64, 16, 2, 2)]},
    # On these architectures, ptxas runs out of registers for larger tiles.
    on={arch: {256: [(64, 16, 16, 2, 2)]} for arch in ("100", "120")},
    # In each list, the second tile fits devices with less than 200 KB of shared memory, and the
    # last tile fits devices with 64 KB.
    few_rows={
        Br: {
            64: [(Br, 128, 16, 3, 1), (Br, 64, 16, 3, 3)],
            128: [(Br, 64, 16, 3, 1), (Br, 64, 16, 2, 2), (Br, 32, 16, 2, 2)],
            256: [LARGE_FEW[Br], (Br, 16, 16, 4, 2), (Br, 16, 16, 2, 2)],
        }
        for Br in (16, 32, 64)
    },
)
# Tiles for e4m3 keys and values. Warps convert operands between products; more warps per SM hide
# this latency.
SPLIT_E4M3_TILES = TileChoice.of(
    "Br Bc Wr stages blocks_per_sm",
    [(*tile, 2, 2) for tile in HALVES],
    up_to={128: [(64, 64, 16, 2, 2)], 256: [(64, 32, 16, 2, 2)]},
    few_rows={
        Br: {
            64: [(Br, 64, 16, 4, 4)],
            128: [(Br, 32, 16, 4, 4), (Br, 32, 16, 3, 4)],
            256: [(Br, 32, 16, 3, 3), (Br, 16, 16, 3, 3)],
        }
        for Br in (16, 32, 64)
    },
)
FA2_SPLIT_KV_TILES = TileChoice.of(
    "Br Bc blocks_per_sm",
    [(8, 32, 4), (8, 16, 2), (4, 8, 2), (2, 4, 1), (1, 1, 1)],
    few_rows={Br: {256: [(Br, 32, 4)]} for Br in (1, 2, 4)},
)
MERGE_WARPS = 4
MOST_SPLITS = 4096
MOST_PARTS = 4  # num_splits tries up to this many times the waves of a single split
LONG_WAVES = 20  # with more waves, the tail is at most 5 %, and more splits gain nothing
FEW_ROWS = 64  # up to this many rows per key head, the kernel is limited by reading keys
LONG_STEPS = 32  # from this many K/V tiles per SM on, more blocks hide the latency of small pages
MERGED_BYTE = 5  # bytes of K and V that can be read while one byte of partial results is merged


def mma_shared(p: Problem, c: SimpleNamespace, buffers: int = 1) -> int:
    """Returns the bytes of shared memory for 16-bit Q, K and V tiles.

    Columns are padded to multiples of 16.
    """
    return 2 * (c.Br * round_up(p.d, 16) + buffers * c.Bc * padded_columns(p, 16))


def mma_pipelined_shared(p: Problem, c: SimpleNamespace) -> int:
    """Returns the bytes of shared memory for `stages` K/V tiles and one Q tile, reused for O."""
    depth, width = round_up(p.d, 16), round_up(p.dv, 16)
    return 2 * (c.Br * max(depth, width) + c.stages * c.Bc * (depth + width))


def tma_shared(p: Problem, c: SimpleNamespace, more: int = 0) -> int:
    """Returns the bytes of shared memory for 16-bit tiles in TMA boxes of 64 columns, at most two
    mbarriers per stage of K, of V and of 64 rows of Q, and ``more`` bytes, rounded up to 1024.
    """
    Q_stages = getattr(c, "Q_stages", 1)
    tiles = 2 * (Q_stages * c.Br * round_up(p.d, 64) + c.stages * c.Bc * padded_columns(p, 64))
    return round_up(tiles + 16 * (Q_stages * c.Br // 64 + 2 * c.stages) + more, 1024)


def pack_gqa(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of query heads whose rows are packed into the same tiles.

    This is the group size if the rows of one head fill at most half a tile and the row count of the
    group fits in an int; else 1.
    """
    if p.sequences is not None:
        return 1
    return p.group if c.Br >= 2 * p.M and p.M * p.group <= MOST else 1


def packed_tiles(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of tiles of Br rows over all heads, after packing by pack_gqa."""
    heads = pack_gqa(p, c)
    return tiles_of(p, p.M * heads, c.Br) * (p.heads // heads) * p.batch


def visible_keys(p: Problem, c: SimpleNamespace) -> int:
    """Returns the maximum number of keys that the rows of a tile see."""
    if p.left is None or p.right is None:
        return p.N
    return min(p.N, min(p.M, c.Br) + p.left + p.right)


def num_splits(p: Problem, c: SimpleNamespace) -> int:
    """Returns the smallest number of splits whose estimated time is within 5 % of the best.

    Each split has at least one K/V tile. The time of a wave (`blocks_per_sm` blocks on each SM) is
    estimated as the number of K/V tiles per split, plus 1. Partial results add `merge_time` for
    each split. The search covers up to four times the waves of a single split.
    """
    blocks_per_sm = 2 if hides_small_pages(p, c) else c.blocks_per_sm
    return fastest_splits(p, c, packed_tiles(p, c), blocks_per_sm, merge_time(p, c))


def hides_small_pages(p: Problem, c: SimpleNamespace) -> bool:
    """Returns whether two blocks per SM read pages of 16 keys, although one would do.

    Copies of such pages are short, and one block does not have enough of them in flight: 128,000
    keys took 142 µs with one block, 128 with two (H200, d = 128). Short sequences, which a block
    reads in few steps, are not worth a second one.
    """
    has_small = p.pages > 0 and p.page_size <= 16 and 64 < p.d <= 128
    steps = packed_tiles(p, c) * cdiv(visible_keys(p, c), c.Bc)
    return has_small and c.blocks_per_sm == 1 and steps >= LONG_STEPS * c.multiprocessors


def merge_time(p: Problem, c: SimpleNamespace) -> float:
    """Returns the time to store and merge one split of all rows, in K/V tiles.

    A byte of partial results takes as long as MERGED_BYTE bytes of K and V. With few rows per key
    head they are too few to matter, and 0 is returned.
    """
    if p.M * p.group <= FEW_ROWS:
        return 0
    partial = 4 * p.batch * p.heads * p.M * p.dv / c.multiprocessors
    return MERGED_BYTE * partial / (2 * c.Bc * (p.d + p.dv))


def fastest_splits(
    p: Problem, c: SimpleNamespace, tiles: int, blocks_per_sm: int, merging: float = 0
) -> int:
    """Returns `num_splits` for a number of row tiles; merging is `merge_time`."""
    tiles, at_a_time = max(tiles, 1), blocks_per_sm * c.multiprocessors
    most = max(cdiv(visible_keys(p, c), c.Bc), 1)
    least = cdiv(tiles, at_a_time)
    waves = range(least, least * (MOST_PARTS if least <= LONG_WAVES else 1) + 1)

    def time(n: int, length: int) -> float:
        return n * (length + 1) + merging * cdiv(most, length)

    def best_length(n: int) -> int:
        """Returns the number of tiles per split that takes least time in n waves."""
        shortest = cdiv(most, min(n * at_a_time // tiles, most))
        return max(shortest, min(round((merging * most / n) ** 0.5), most))

    lengths = {n: best_length(n) for n in waves}
    enough = 1.05 * min(time(*x) for x in lengths.items())
    for n, length in lengths.items():
        while time(n, length + 1) <= enough:
            lengths[n] = length = length + 1
    return min(cdiv(most, length) for n, length in lengths.items() if time(n, length) <= enough)


def filling_splits(p: Problem, c: SimpleNamespace) -> int:
    """Returns the smallest number of splits that leaves at most a tenth of the device idle."""
    tiles, at_a_time = max(packed_tiles(p, c), 1), c.blocks_per_sm * c.multiprocessors
    most = max(cdiv(visible_keys(p, c), c.Bc), 1)
    for splits in range(max(cdiv(9 * at_a_time, 10 * tiles), 1) if tiles < at_a_time else 1, most):
        waves = cdiv(tiles * splits, at_a_time)
        if 10 * tiles * splits >= 9 * waves * at_a_time:
            return splits
    return most


def few_rows_for_many_keys(p: Problem, c: SimpleNamespace) -> bool:
    """Returns whether to split the keys.

    Paged keys are always split. Other keys are split if a key head has at most 64 rows, or if row
    tiles occupy at most a quarter of the SMs; at least 1024 keys are required, or 512 for at most
    16 rows per key head.
    """
    if p.pages:  # the only other fast kernel for pages, wgmma_slices, is for wider heads
        return True
    rows = p.M * p.group
    few = rows <= FEW_ROWS or 4 * packed_tiles(p, c) <= c.multiprocessors
    return few and visible_keys(p, c) >= (512 if 4 * rows <= FEW_ROWS else 1024)


# `share` and `least` in pays_to_split by head dimension, measured on an H100.
PAYS_TO_SPLIT = {64: (0.85, 384), 128: (0.6, 352), 256: (0.35, 160)}
# From this many columns of K over all heads on, wgmma_persistent is limited by memory bandwidth.
MANY_COLUMNS = 64 * 256


def pays_to_split(p: Problem, c: SimpleNamespace) -> bool:
    """Returns whether splitting the keys is faster than wgmma_persistent.

    On devices other than sm_90, few_rows_for_many_keys decides. It also decides for problems that
    wgmma_persistent does not support (pages, rounded float32, packed batches), and if a key head
    has at most 64 rows although there are more tiles than SMs.

    The time of wgmma_persistent is proportional to N as long as all of its 64-row tiles run at
    once. The time of split blocks is proportional to T * (N + 131,072 / d). T is
    a number of 64-row tiles: (computed rows + merged rows) / 2 / 64, plus 10 % if a key head has at
    most 64 rows.
    """
    rows = p.M * p.group
    tiles = cdiv(p.M, 64) * p.heads * p.batch
    is_full = rows <= FEW_ROWS and tiles > c.multiprocessors
    if c.arch != "90" or p.pages or p.precision or p.sequences or is_full:
        return few_rows_for_many_keys(p, c)
    N, d = visible_keys(p, c), max(p.d, p.dv)
    if p.kv_heads * p.batch * d >= MANY_COLUMNS:
        return False
    most = next(most for most in PAYS_TO_SPLIT if d <= most)
    share, least = PAYS_TO_SPLIT[most]
    merged = p.M * p.heads * p.batch if num_splits(p, c) > 1 else 0
    tiles_64 = (packed_tiles(p, c) * c.Br + merged) / 128 * (1.1 if rows <= FEW_ROWS else 1)
    return (N + 131072 // most) * tiles_64 <= share * c.multiprocessors * (N - least)


def rounded_first(kernel: Kernel) -> Kernel:
    """Adds support for float32 inputs by a first launch that rounds the inputs to float16."""
    launches = [x for x in kernel.launches if isinstance(x, Launch)]
    rounding = Launch(
        "round_operands",
        args="Q K V Q16 K16 V16 M N heads kv_heads batch",
        grid=lambda p, c: (cdiv(p.M, c.Br) * p.heads + cdiv(p.N, c.Br) * p.kv_heads) * p.batch,
        threads=lambda p, c: 256,
    )
    rounded = (replace(x, args=x.args.replace("Q K V", "Q16 K16 V16")) for x in launches)
    return replace(
        kernel,
        launches=(
            *(replace(x, when=lambda p: p.precision is None) for x in launches),
            *(replace(x, when=lambda p: p.precision == "float16") for x in (rounding, *rounded)),
        ),
        scratch={
            **kernel.scratch,
            "Q16": ("batch heads M d8", "operand"),
            "K16": ("batch kv_heads N d8", "operand"),
            "V16": ("batch kv_heads N dv8", "operand"),
        },
        precisions=("float16",),
    )


MMA_SPLIT_Q = Kernel(
    "mma_split_q",
    "tensor cores (mma.sync): a warp owns its rows, with S, P and O in registers",
    (
        Launch(
            "mma_split_q",
            args="Q K V O lse sizes heads group scale mods",
            grid=row_tiles,
            threads=lambda p, c: WARP * c.Br // c.Wr,
            shared=mma_shared,
            constants={"pack_gqa": lambda p, c: 1},
            walks=ALONG_KEYS,
        ),
    ),
    tiles=TileChoice.of(
        "Br Bc Wr",
        HALVES,
        up_to={64: [(128, 64, 32)], 128: [(128, 64, 16), (128, 32, 16)], 256: [(64, 32, 16)]},
    ),
    candidates={
        "Br": (32, 64, 96, 128, 192, 256),
        "Bc": (32, 48, 64, 80, 96, 112, 128),
        "Wr": (16, 32),
    },
    rules={
        "Wr and Bc are multiples of 16": lambda c: c.Wr % 16 == c.Bc % 16 == 0,
        "Br is a multiple of Wr": lambda c: c.Br % c.Wr == 0,
    },
    dtypes=HALF,
    dtype_arch={"bfloat16": "80"},
    largest_d=256,
    features=OF_SEQUENCES,
    tflops={"float16": {64: 77.1}, "bfloat16": {64: 77.1}},
)
MMA_SWIZZLED = rung(
    MMA_SPLIT_Q,
    "mma_swizzled",
    "swizzled tiles in shared memory: no bank conflicts",
    tflops={"float16": {64: 184}, "bfloat16": {64: 184}},
)
MMA_ASYNC = rung(
    MMA_SWIZZLED,
    "mma_async",
    "asynchronous copies (cp.async) overlap with products; two buffers for K and V",
    launch={"shared": lambda p, c: mma_shared(p, c, buffers=2)},
)
TMA_TILES = {64: [(128, 64, 32, 2)], 128: [(128, 32, 32, 2)], 256: [(128, 64, 16, 2)]}
MMA_TMA = rung(
    MMA_ASYNC,
    "mma_tma",
    "TMA and mbarriers (sm_90 and later): one thread asks the copy engine for whole tiles",
    launch={
        "args": "Q.map K.map V.map Q K V O lse sizes heads group scale mods",
        "boxes": {"Q": lambda p, c: c.Br, "K": lambda p, c: c.Bc, "V": lambda p, c: c.Bc},
        "shared": tma_shared,
    },
    tiles=TileChoice.of(
        "Br Bc Wr stages",
        [(*tile, 2) for tile in HALVES],
        up_to=TMA_TILES,
        # sm_120 has less shared memory, and ptxas runs out of registers for 32 rows of 128 columns
        # and for 32 keys of 256.
        on={"120": {**TMA_TILES, 128: [(128, 64, 16, 2)], 256: [(128, 16, 16, 2)]}},
    ),
    candidates={**MMA_ASYNC.candidates, "stages": (2, 3, 4)},
    rules={**MMA_ASYNC.rules, "stages is 2 or more": lambda c: c.stages >= 2},
    arch="90",
    dtype_arch={},
)
MMA_PIPELINED = rung(
    MMA_ASYNC,
    "mma_pipelined",
    "one buffer or two, exponentials between products, packed GQA: the fastest mma.sync rung",
    launch={
        "grid": packed_tiles,
        "shared": mma_pipelined_shared,
        "constants": {"pack_gqa": pack_gqa},
        # A block mask has no tile map for packed heads.
        "walks": {KEY_TILES: lambda p, c: (c.Br, c.Bc) if pack_gqa(p, c) == 1 else None},
    },
    tiles=MMA_PIPELINED_TILES,
    candidates={**MMA_ASYNC.candidates, "stages": (1, 2)},
    tflops={"float16": {64: 301, 128: 355, 256: 315}, "bfloat16": {64: 304, 128: 352, 256: 316}},
)
SPLITS = "O_splits.data max_splits.data sum_splits.data"


def split_kv_shared(p: Problem, c: SimpleNamespace) -> int:
    """Returns the bytes of shared memory for Q, K and V tiles, as mma_pipelined_shared does.

    Columns of e4m3 keys and values are padded to multiples of 32.
    """
    if not p.modifiers.is_e4m3:
        return mma_pipelined_shared(p, c)
    depth, width = round_up(p.d, 32), round_up(p.dv, 32)
    return 2 * c.Br * max(depth, width) + c.stages * c.Bc * (depth + width)


def key_warps(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of warps that share the keys of a K/V tile.

    This is the largest number for which a block has at most four warps, each warp computes whole
    MMA tiles, and partial results fit into the shared memory of K and V. For e4m3 keys, one warp
    was as fast.
    """
    if p.modifiers.is_e4m3:
        return 1
    depth, width = round_up(p.d, 16), round_up(p.dv, 16)
    left = 4 * (1 + maxima_of_split(p))  # for each of the four lanes of a row: a sum and the maxima
    for warps in (4, 2):
        fits = 4 * warps * c.Br * (width + left) <= 2 * c.stages * c.Bc * (depth + width)
        if warps * c.Br <= 4 * c.Wr and c.Bc % (16 * warps) == 0 and fits:
            return warps
    return 1


def maxima_of_split(p: Problem) -> int:
    """Returns the number of maxima that a split stores per row: 2 if the call returns row_max."""
    return 2 if p.modifiers.has_row_max else 1


# In mma_split_kv, if longer batch elements have more splits: splits of each, and bytes for results.
MOST_BALANCED, MOST_SCRATCH = 32, 1 << 27


def pays_to_balance(p: Problem, c: SimpleNamespace, splits: int) -> bool:
    """Returns whether longer batch elements should have more than ``splits`` splits.

    If lengths are equal, balancing costs 0.4 µs on an H200; with one split 2 µs, because no merge
    would otherwise be launched. It is therefore used only if full arrays take more than a hundred
    times as long to read: 60 tiles per SM, 238 for one split, at about 1 µs each, on 132 SMs. The
    limit scales with the number of SMs, so that small problems in the simulator are balanced, too.
    With many row tiles the device itself balances the load. Keys in e4m3 were not measured.
    """
    has_lengths = p.batch > 1 and p.modifiers.used[1]
    may_differ = has_lengths and visible_keys(p, c) == p.N and not p.modifiers.is_e4m3
    on_each_sm = p.batch * p.kv_heads * cdiv(p.N, c.Bc) / c.multiprocessors
    is_worth_it = on_each_sm >= (0.45 if splits > 1 else 1.8) * c.multiprocessors
    has_few = p.M * p.group <= FEW_ROWS and packed_tiles(p, c) <= 4 * c.multiprocessors
    scratch = 4 * p.batch * p.heads * p.M * MOST_BALANCED * (p.dv + 2)
    is_possible = 2 * splits <= MOST_BALANCED and scratch <= MOST_SCRATCH
    return may_differ and is_worth_it and has_few and is_possible


def balancing(balances: Constant = lambda p, c: False) -> dict[str, Constant]:
    """Returns constants that say whether longer batch elements have more splits, and how many."""
    return {"balances": balances, "most_splits": lambda p, c: MOST_BALANCED}


def scratch_of_splits(splits: Formula, width: Callable[[Problem], int]) -> dict[str, Any]:
    """Returns the scratch for partial results of splits; its arrays are empty for one split."""

    def rows(p: Problem, c: SimpleNamespace) -> int:
        number = splits(p, c)
        return p.batch * p.heads * p.M * number if number > 1 else 0

    return {
        "O_splits": (lambda p, c: rows(p, c) * width(p), "real"),
        "max_splits": (lambda p, c: maxima_of_split(p) * rows(p, c), "real"),
        "sum_splits": (rows, "real"),
    }


def splits_at_once(splits: Formula) -> Formula:
    """Returns the formula for the number of splits that a warp of merge_splits reads at a time.

    It is the warp's share of splits, rounded up to a power of two and limited by registers.
    """

    def at_once(p: Problem, c: SimpleNamespace) -> int:
        own = cdiv(splits(p, c), MERGE_WARPS)
        return min(1 << (own - 1).bit_length(), max(8 // cdiv(p.dv, 4 * WARP), 1))

    return at_once


def merge_splits(splits: Formula) -> Launch:
    """Makes the launch that merges the results of splits; one split needs none."""
    return Launch(
        "merge_splits",
        args=f"{SPLITS} O lse num_splits Q K V sizes heads group scale mods",
        grid=lambda p, c: p.M * p.heads * p.batch,
        needed=lambda p, c: splits(p, c) > 1,
        threads=lambda p, c: MERGE_WARPS * WARP,
        shared=lambda p, c: 4 * MERGE_WARPS * (round_up(p.dv, 16) + 2),
        constants={"at_once": splits_at_once(splits), **balancing()},
        numbers={"num_splits": splits},
        begins_early=True,
        awaits_all=True,
    )


def split_kv(splits: Formula, may_differ: Callable[..., bool] = pays_to_balance) -> Kernel:
    """Makes the record of mma_split_kv.

    splits: the formula for the number of splits, of each batch element if lengths are equal.
    may_differ: whether longer elements may have more, a function of p, c and this number.
    """

    def balances(p: Problem, c: SimpleNamespace) -> bool:
        return may_differ(p, c, splits(p, c))

    def most(p: Problem, c: SimpleNamespace) -> int:
        return MOST_BALANCED if balances(p, c) else splits(p, c)

    def blocks(p: Problem, c: SimpleNamespace) -> int:
        number = splits(p, c)
        return packed_tiles(p, c) * (max(number, 2) if balances(p, c) else number)

    merge = merge_splits(splits)
    merge = replace(
        merge,
        needed=lambda p, c: most(p, c) > 1,
        constants={**merge.constants, **balancing(balances)},
        awaits_all=False,
        unawaited=lambda p, c: "mods.lengths_k" if balances(p, c) else "",
    )
    return rung(
        MMA_PIPELINED,
        "mma_split_kv",
        "split-KV: blocks share the keys of a row tile, a second launch merges their results",
        launch={
            "args": f"Q K V O lse {SPLITS} num_splits sizes heads group scale mods",
            "grid": blocks,
            "threads": lambda p, c: WARP * c.Br // c.Wr * key_warps(p, c),
            "shared": split_kv_shared,
            "constants": {"pack_gqa": pack_gqa, "key_warps": key_warps, **balancing(balances)},
            "numbers": {"num_splits": splits},
            "walks": {},
            "begins_early": True,
            "awaits_all": True,
        },
        then=(merge,),
        scratch=scratch_of_splits(most, width=lambda p: round_up(p.dv, 16)),
        tiles=SPLIT_KV_TILES,
        candidates={
            "Br": (16, 32, 64, 128),
            "Bc": (16, 32, 64, 128),
            "Wr": (16, 32),
            "stages": (2, 3, 4),
            "blocks_per_sm": (1, 2, 3, 4),
        },
        rules={**MMA_PIPELINED.rules, "stages is 2 or more": lambda c: c.stages >= 2},
        features=IN_SPLITS,
        tflops={"float16": {64: 123, 128: 154, 256: 167}, "bfloat16": {128: 11.2}},
        made_for=pays_to_split,
    )


MMA_SPLIT_KV = split_kv(num_splits)


def fa2_split_kv(splits: Formula) -> Kernel:
    """Makes the record of fa2_split_kv with a formula for the number of splits."""
    return rung(
        FA2_COALESCED,
        "fa2_split_kv",
        "split-KV for few queries: blocks share the keys, threads share a row",
        launch={
            "args": f"Q K V O lse {SPLITS} num_splits sizes heads group scale mods",
            "grid": lambda p, c: packed_tiles(p, c) * splits(p, c),
            "threads": lambda p, c: MERGE_WARPS * WARP,
            "shared": lambda p, c: p.bytes(
                reals=c.Br * (c.Bc + 2 + maxima_of_split(p)),
                scalars=c.Br * p.d + c.Bc * (max(p.d, p.dv) | 1),
                align=16,
            ),
            "constants": {"pack_gqa": pack_gqa},
            "numbers": {"num_splits": splits},
            "walks": {},
        },
        then=(
            Launch(
                "merge_rows",
                args=f"{SPLITS} O lse num_splits sizes heads mods",
                grid=lambda p, c: p.M * p.heads * p.batch,
                needed=lambda p, c: splits(p, c) > 1,
                threads=lambda p, c: MERGE_WARPS * WARP,
                numbers={"num_splits": splits},
            ),
        ),
        scratch=scratch_of_splits(splits, width=lambda p: p.dv),
        tiles=FA2_SPLIT_KV_TILES,
        candidates={"Br": (1, 2, 4, 8, 16), "Bc": (16, 32, 64), "blocks_per_sm": (2, 4, 6, 8)},
        rules={},
        features=IN_SPLITS,
        tflops={"float32": {128: 1.61}, "float64": {128: 1.32}},
        made_for=few_rows_for_many_keys,
        after=(),
    )


FA2_SPLIT_KV = fa2_split_kv(filling_splits)
MMA_TF32 = rung(
    MMA_PIPELINED,
    "mma_tf32",
    "float32 on tensor cores: operands rounded to tf32 as they are loaded",
    launch={"shared": lambda p, c: 2 * mma_pipelined_shared(p, c)},  # 4-byte elements
    tiles=TileChoice.of(
        "Br Bc Wr stages",
        [(*tile, 1) for tile in HALVES],
        up_to={128: [(128, 32, 32, 1)], 256: [(128, 32, 16, 1), (128, 16, 16, 1)]},
        on={arch: {128: [(128, 32, 16, 1)]} for arch in ("100", "120")},
    ),
    dtypes=("float32",),
    arch="80",
    rounding="tf32",
    tflops={"float32 as tf32": {64: 114, 128: 133, 256: 95}},
)


MMA_FP16X2 = rung(
    MMA_PIPELINED,
    "mma_fp16x2",
    "float32 accuracy on tensor cores: operands split into float16 hi and lo, three products",
    first=SPLIT,
    launch={
        "args": f"{PARTS} O lse sizes heads group scale mods",
        # Holds a Q tile and `stages` tiles of K and V, each as 16-bit hi and lo.
        "shared": lambda p, c: (
            4 * (c.Br * round_up(p.d, 16) + c.stages * c.Bc * padded_columns(p, 16))
        ),
    },
    then=(REPAIR_SPLIT_OUTPUT,),
    tiles=TileChoice.of(
        "Br Bc Wr stages",
        [(64, 32, 16, 1), (64, 16, 16, 1), (32, 32, 16, 1), (32, 16, 16, 1), (16, 16, 16, 1)],
        up_to={
            64: [(128, 32, 32, 1), (64, 32, 32, 1)],
            128: [(128, 64, 16, 1), (128, 32, 16, 1)],
            256: [(128, 32, 16, 1), (64, 32, 16, 1)],
        },
        short={64: [(64, 64, 16, 1)], 128: [(64, 32, 16, 1)], 256: [(64, 32, 16, 1)]},
    ),
    dtypes=("float32",),
    arch="80",
    parts="float16",
    scratch=SCRATCH,
    tflops={"float32": {64: 93.9, 128: 98.4, 256: 98.6}},
    made_for=pays_for_few_rows,
    after=(),
)


def has_wide_f64_sums(sizes: Problem | SimpleNamespace) -> bool:
    """Returns whether 16 rows of O in double exceed the registers of a warp."""
    return max(sizes.d, sizes.dv) > 128


def mma_f64_shared(p: Problem, c: SimpleNamespace) -> int:
    """Returns the bytes of shared memory for float64 tiles of Q, K and V, and, for wide heads, for
    the buffers in which four warps exchange results.
    """
    depth, width = round_up(p.d, 16), round_up(p.dv, 64 if has_wide_f64_sums(p) else 16)
    exchange = c.Br * (4 * c.Bc + 1) if has_wide_f64_sums(p) else 0
    return 8 * (c.Br * depth + c.stages * c.Bc * (depth + width) + exchange)


def mma_f64(before: Kernel) -> Kernel:
    """Makes the record of mma_f64, with a separate launch for wide heads."""
    made = rung(
        before,
        "mma_f64",
        "float64 on tensor cores (mma.sync): products and sums in double",
        launch={"threads": lambda p, c: 2 * c.Br, "shared": mma_f64_shared},
        tiles=TileChoice.of(
            "Br Bc stages",
            [(64, 32, 1), (64, 16, 1), (32, 16, 1)],
            up_to={
                64: [(64, 64, 1), (64, 32, 1)],
                128: [(128, 32, 1), (64, 32, 1)],
                256: [(64, 16, 1), (32, 16, 1)],
            },
        ),
        candidates={"Br": (16, 32, 64, 128), "Bc": (16, 32, 48, 64), "stages": (1, 2)},
        rules={
            "Br and Bc are multiples of 16": lambda c: c.Br % 16 == c.Bc % 16 == 0,
            "above d or dv = 128 Br is a multiple of 32, Bc 16, and stages 1": (
                lambda c: not has_wide_f64_sums(c) or (c.Br % 32, c.Bc, c.stages) == (0, 16, 1)
            ),
        },
        dtypes=("float64",),
        arch="80",
        tflops={"float64": {64: 34.0, 128: 37.7, 256: 33.9}},
        after=(),
    )
    (launch,) = (x for x in made.launches if isinstance(x, Launch))
    narrow = replace(launch, when=lambda p: not has_wide_f64_sums(p))
    wide = replace(
        launch,
        entry="mma_f64_wide",
        threads=lambda p, c: 4 * c.Br,
        when=has_wide_f64_sums,
    )
    return replace(made, launches=(narrow, wide))


MMA_F64 = mma_f64(MMA_PIPELINED)


def sliced_shared(p: Problem, c: SimpleNamespace) -> int:
    """Returns the bytes of shared memory for 16-bit P and slices, and for each row a factor per K/V
    tile and a sum per warp.
    """
    slices = c.stages * (c.Br + c.Bc) * c.Bd
    return 2 * (c.Br * c.span + slices) + 4 * c.Br * (c.span // c.Bc + c.Bc // c.Wc)


def sliced_sums(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of elements of O_sum, in whole tiles; 0 if one span covers all keys."""
    width = even_width(p.dv, c.Bc, c.Bc // c.Wc * 16)
    return row_tiles(p, c) * c.Br * round_up(p.dv, width) if c.span < p.N else 0


MMA_SLICES = rung(
    MMA_SPLIT_Q,
    "mma_slices",
    "any head dimension: Q and K in slices of d, V in slices of keys",
    launch={
        "args": "Q K V O lse O_sum.data sizes heads group scale mods",
        "threads": warps_of_scores,
        "shared": sliced_shared,
        "walks": {},
    },
    tiles=named(
        "Br Bc Wr Wc Bd span stages",
        (128, 256, 64, 64, 32, 512, 4),
        (128, 256, 64, 64, 32, 256, 4),
        (128, 128, 64, 32, 16, 256, 4),
        (64, 128, 32, 32, 32, 256, 2),
        (32, 64, 16, 32, 16, 64, 2),
    ),
    candidates={
        "Br": (64, 128, 256),
        "Bc": (128, 256),
        "Wr": (32, 64),
        "Wc": (32, 64),
        "Bd": (16, 32, 64),
        "span": (128, 256, 512),
        "stages": (2, 3, 4),
    },
    rules={
        "Wr, Wc and Bd are multiples of 16": lambda c: c.Wr % 16 == c.Wc % 16 == c.Bd % 16 == 0,
        "Br is a multiple of Wr, Bc of Wc and span of Bc": lambda c: (
            c.Br % c.Wr == c.Bc % c.Wc == c.span % c.Bc == 0
        ),
        "stages is 2 or more": lambda c: c.stages >= 2,
    },
    largest_d=None,
    features=EVERYTHING,
    scratch={"O_sum": (sliced_sums, "real")},
    tflops={"float16": {64: 151}, "bfloat16": {320: 211, 512: 252, 1024: 261}},
    after=(),
)

# Hopper kernels: consumer warpgroups own 64 rows each (wgmma), a producer warp loads (TMA)

BLOCKS = [(Br, Bc, 2) for Br in (128, 64) for Bc in (64, 32, 16)]  # Br, Bc, stages


def staged_pairs(p: Problem, c: SimpleNamespace, tiles: int = 1) -> int:
    """Returns the bytes of a bias for some key tiles, with padded rows; 0 without a bias."""
    return c.Br * (tiles * c.Bc * bias_bytes(p) + 16) if bias_bytes(p) else 0


WGMMA_LAUNCH = Launch(
    "wgmma",
    args="Q.map K.map V.map Q K V O lse sizes heads group scale mods",
    boxes={"Q": lambda p, c: 64, "K": lambda p, c: c.Bc, "V": lambda p, c: c.Bc},
    grid=row_tiles,
    threads=lambda p, c: 128 + 2 * c.Br,
    shared=tma_shared,
    constants={"Wr": lambda p, c: 16, "pack_gqa": lambda p, c: 1},
    walks=ALONG_KEYS,
)
WGMMA = Kernel(
    "wgmma",
    "Hopper (sm_90a), warp specialization: one warp loads with TMA, warpgroups multiply (wgmma)",
    (WGMMA_LAUNCH,),
    tiles=TileChoice.of(
        "Br Bc stages",
        BLOCKS,
        up_to={64: [(192, 128, 2)], 128: [(128, 128, 2)], 192: [(128, 96, 2)]},
    ),
    candidates={
        "Br": (64, 128, 192),
        "Bc": (48, 64, 80, 96, 112, 128, 160, 176),
        "stages": (2, 3, 4),
    },
    rules={
        "Br is a multiple of 64": lambda c: c.Br % 64 == 0,
        "Bc is a multiple of 16": lambda c: c.Bc % 16 == 0,
    },
    dtypes=HALF,
    features=OF_SEQUENCES,
    arch="90a",
    largest_d=256,
    tflops={"float16": {64: 365, 128: 500, 256: 593}, "bfloat16": {64: 367, 128: 510, 256: 594}},
)
STAGES_BIAS = {**WGMMA_LAUNCH.constants, "bias_bytes": lambda p, c: bias_bytes(p)}
WGMMA_OVERLAP = rung(
    WGMMA,
    "wgmma_overlap",
    "softmax of a tile overlaps with products; ping-pong of warpgroups",
    launch={
        "shared": lambda p, c: tma_shared(p, c, staged_pairs(p, c)),
        "constants": STAGES_BIAS,
    },
    tflops={"float16": {64: 397, 128: 616, 256: 723}, "bfloat16": {64: 400, 128: 631, 256: 737}},
)


def kept_tiles(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of key tiles for which wgmma_persistent keeps a bias; 0 if it does not.

    It keeps a bias that all batch elements share, if all its keys fit into shared memory. More than
    four row tiles rarely divide the number of blocks; blocks then read K and V at different times.
    """
    tiles = cdiv(p.N, c.Bc)
    fits = tma_shared(p, c, staged_pairs(p, c, tiles)) <= SHARED_OF_SM_90
    return tiles if may_keep_bias(p) and fits and cdiv(p.M, c.Br) <= 4 else 0


def may_keep_bias(p: Problem) -> bool:
    """Returns whether at least four batch elements share a bias, and all row tiles its keys."""
    is_even = not (p.is_masked or p.is_ragged or p.modifiers.constants["has_key_tiles"])
    return batch_first(p) and p.batch >= 4 and is_even


def tiles_of_short_heads(p: Problem) -> Tiles:
    """Returns tiles of 256 rows for heads of at most 32 columns and 256 keys, as in AlphaFold.

    On an H200 they take 40 µs instead of 49 for 256 rows, 65 instead of 81 with a bias of each
    batch element, and 58 instead of 67 with one that is kept.
    """
    if max(p.d, p.dv) > 32 or p.N > 256:
        return ()
    if may_keep_bias(p):
        return named("Br Bc stages Q_stages", (256, 64, 3, 1)) if p.M <= 1024 else ()
    is_plain = not p.is_masked and p.options.changed.keys() <= {"scale"}
    has_others = any(x.name != "bias" for x in p.operands)
    is_measured = is_plain and not has_others and 128 < p.M <= 256
    return named("Br Bc stages Q_stages", (256, 64, 3, 2)) if is_measured else ()


QUEUE_BYTES = 256  # of the tiles that a block of a ragged launch has taken


def queue_bytes(p: Problem) -> int:
    return QUEUE_BYTES if p.is_ragged else 0


# Fills the rows that no tile of Q has, and sets the number of tiles that blocks have taken to 0.
BEGIN_RAGGED = Launch(
    "begin_ragged",
    args="O lse taken.data M heads mods",
    grid=lambda p, c: max(cdiv(p.M, CLEARING), 1) * p.heads * p.batch,
    threads=lambda p, c: CLEARING,
    constants={"of_keys": lambda p, c: False, "width": lambda p, c: p.dv},
    when=lambda p: p.is_ragged,
)


def begins_early_if_ragged(kernel: Kernel) -> Kernel:
    """Lets the launch begin while begin_ragged ends, which it waits for to take its second tile."""
    (plain,) = (x for x in kernel.launches if isinstance(x, Launch))
    ragged = replace(plain, when=lambda p: p.is_ragged, begins_early=True)
    plain = replace(plain, when=lambda p: not p.is_ragged)
    return replace(kernel, launches=(BEGIN_RAGGED, ragged, plain))


_PERSISTENT = rung(
    WGMMA_OVERLAP,
    "wgmma_persistent",
    "persistent blocks: the next row tile starts before the current one is finished",
    persistent=True,
    launch={
        "args": "Q.map K.map V.map Q K V O lse sizes heads group scale batch taken.data mods",
        "grid": lambda p, c: min(c.multiprocessors, row_tiles(p, c)),
        "shared": lambda p, c: tma_shared(
            p, c, staged_pairs(p, c, max(kept_tiles(p, c), 1)) + queue_bytes(p)
        ),
        "constants": {
            **STAGES_BIAS,
            "batch_first": lambda p, c: batch_first(p),
            "kept_tiles": kept_tiles,
        },
    },
    tiles=TileChoice.of(
        "Br Bc stages Q_stages",
        [(*block, 1) for block in BLOCKS],
        up_to={
            64: [(192, 128, 3, 2), (128, 128, 3, 2)],
            128: [(128, 128, 2, 2)],
            192: [(128, 96, 2, 1)],
            256: [(128, 64, 2, 1)],
        },
        short={
            128: [(64, 128, 3, 2), (64, 64, 3, 2)],
            192: [(64, 64, 2, 2)],
            256: [(64, 64, 2, 1)],
        },
        of_problem=tiles_of_short_heads,
    ),
    candidates={**WGMMA.candidates, "Br": (64, 128, 192, 256), "Q_stages": (1, 2)},
    scratch={"taken": (lambda p, c: int(p.is_ragged), "int")},
    tflops={"float16": {64: 437, 128: 631, 256: 738}, "bfloat16": {64: 440, 128: 646, 256: 734}},
)
WGMMA_PERSISTENT = begins_early_if_ragged(_PERSISTENT)


def wgmma_fp16x2_shared(p: Problem, c: SimpleNamespace) -> int:
    """Returns the bytes of tma_shared, with the tiles doubled for hi and lo."""
    tiles = 2 * (c.Q_stages * c.Br * round_up(p.d, 64) + c.stages * c.Bc * padded_columns(p, 64))
    return tma_shared(p, c, tiles + staged_pairs(p, c) + queue_bytes(p))


OPERAND_MAPS = " ".join(f"{name}.map" for name in OPERANDS.split())
WGMMA_FP16X2 = rung(
    _PERSISTENT,
    "wgmma_fp16x2",
    "float32 accuracy with wgmma: hi and lo of operands, an accumulator of O for each tile",
    first=(
        *SPLIT,
        *(clear_rest(x, "N", "kv_heads", "dv16") for x in ("V_high", "V_low")),
        BEGIN_RAGGED,
    ),
    launch={
        "args": f"{PARTS.replace(OPERANDS, OPERAND_MAPS)} O lse sizes heads group scale batch "
        "taken.data mods",
        "boxes": {
            name: (lambda p, c: 64) if name.startswith("Q") else (lambda p, c: c.Bc)
            for name in OPERANDS.split()
        },
        "shared": wgmma_fp16x2_shared,
        "constants": {**STAGES_BIAS, "batch_first": lambda p, c: batch_first(p)},
    },
    then=(REPAIR_SPLIT_OUTPUT,),
    tiles=TileChoice.of(
        "Br Bc stages Q_stages turns",
        [(Br, Bc, 1, 1, 2) for Br in (128, 64) for Bc in (32, 16)],
        up_to={
            64: [(192, 64, 3, 2, 2), (128, 64, 3, 2, 2)],
            128: [(128, 64, 2, 1, 2)],
            192: [(128, 64, 1, 1, 2)],
            256: [(128, 48, 1, 1, 2), (128, 32, 1, 1, 2), (64, 32, 2, 1, 2)],
        },
        short={64: [(64, 64, 3, 2, 2)], 128: [(64, 64, 2, 2, 2)], 256: [(64, 32, 2, 1, 2)]},
    ),
    candidates={
        "Br": (64, 128, 192),
        "Bc": (32, 48, 64, 80, 96),
        "stages": (1, 2, 3, 4),
        "Q_stages": (1, 2),
        "turns": (1, 2, 3),
    },
    rules={**WGMMA.rules, "turns is 1, 2 or 3": lambda c: c.turns in (1, 2, 3)},
    dtypes=("float32",),
    parts="float16",
    scratch={**SCRATCH, **_PERSISTENT.scratch},
    tflops={"float32": {64: 126, 128: 158, 256: 147}},
    made_for=pays_for_few_rows,
    after=(),
)


def wgmma_sliced_shared(p: Problem, c: SimpleNamespace) -> int:
    """Returns the bytes of shared memory for the ring of slices, 16-bit P of all K/V tiles of a
    span except one, and two mbarriers per stage.
    """
    slices = 2 * c.stages * (c.Br + c.Bc) * 64
    saved = 2 * c.Br * (c.Bc if c.span > c.Bc else 16)
    return round_up(slices + saved + 16 * c.stages, 1024)


def wgmma_sliced_keys(p: Problem, c: SimpleNamespace) -> int:
    boxes = cdiv(even_width(p.dv, 256, 16), 64)
    return next(x for x in (128, 64, 32, 16) if c.Bc % x == 0 and x * boxes <= c.Br + c.Bc)


def box_heads(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of query heads whose rows a TMA box of Q holds, equally many of each."""
    return gcd(pack_gqa(p, c), c.Br)


def boxed_tiles(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of tiles of Br rows over all heads, after packing by box_heads."""
    heads = box_heads(p, c)
    return cdiv(p.M * heads, c.Br) * (p.heads // heads) * p.batch


# merge_splits keeps a row of O in the registers of a warp.
MOST_MERGED_COLUMNS = 1024


def splits_keys(p: Problem) -> bool:
    """Returns whether wgmma_slices and wgmma_latent may split keys: if few rows share many."""
    return p.M * p.group <= 512 and p.N >= 1024 and p.dv <= MOST_MERGED_COLUMNS


def sliced_splits(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of splits for these kernels; 1 if there is a row tile for every SM."""
    tiles = boxed_tiles(p, c)
    if not splits_keys(p) or tiles >= c.multiprocessors:
        return 1
    return fastest_splits(p, c, tiles, 1)


def wgmma_sliced_blocks(p: Problem, c: SimpleNamespace) -> int:
    return boxed_tiles(p, c) * sliced_splits(p, c)


def wgmma_sliced_sums(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of elements of O_sum, in whole tiles; 0 if one span covers all keys."""
    columns = cdiv(p.dv, 256) * even_width(p.dv, 256, 16)
    return wgmma_sliced_blocks(p, c) * c.Br * columns if c.span < p.N else 0


def rows_of_page(most: Formula) -> Formula:
    """Returns the formula for the rows of a box of keys: at most those of a page."""
    return lambda p, c: min(most(p, c), p.page_size or MOST_BOX_ROWS)


# Fields that the launches of wgmma_slices and wgmma_latent share: packed heads, splits of the keys.
PACKED_IN_SPLITS: dict[str, Any] = {
    "box_heads": {"Q": box_heads},
    "grid": wgmma_sliced_blocks,
    "constants": {
        **WGMMA_LAUNCH.constants,
        "pack_gqa": box_heads,
        "splits_keys": lambda p, c: splits_keys(p),
    },
    "numbers": {"num_splits": sliced_splits},
    "walks": {},
}
MERGE_IF_SPLIT = replace(merge_splits(sliced_splits), when=splits_keys)
SCRATCH_IF_SPLIT = scratch_of_splits(sliced_splits, width=lambda p: round_up(p.dv, 16))
WGMMA_SLICES = rung(
    WGMMA,
    "wgmma_slices",
    "any head dimension with wgmma and TMA; P in registers",
    launch={
        "args": f"Q.map K.map V.map Q K V O lse O_sum.data {SPLITS} num_splits sizes heads group "
        "scale batch mods",
        "boxes": {
            "Q": lambda p, c: c.Br,
            "K": rows_of_page(lambda p, c: c.Bc),
            "V": rows_of_page(wgmma_sliced_keys),
        },
        "shared": wgmma_sliced_shared,
        **PACKED_IN_SPLITS,
    },
    then=(MERGE_IF_SPLIT,),
    tiles=named(
        "Br Bc span stages",
        *((128, 256, 512, 3), (128, 256, 256, 4), (128, 128, 128, 4), (128, 64, 64, 2)),
    ),
    candidates={},
    rules={**WGMMA.rules, "span is Bc or twice that": lambda c: c.span in (c.Bc, 2 * c.Bc)},
    largest_d=None,
    features=IN_SPLITS,
    scratch={"O_sum": (wgmma_sliced_sums, "real"), **SCRATCH_IF_SPLIT},
    after=(),
    tflops={"float16": {1024: 405}, "bfloat16": {320: 445, 512: 410, 1024: 408}},
)


def wgmma_latent_shared(p: Problem, c: SimpleNamespace) -> int:
    """Returns the bytes of shared memory for Q, the ring of tiles of K or V, P, two maxima and two
    sums of each thread of a warpgroup, the barriers, and a flag for each warp.
    """
    d_boxes, half_boxes = cdiv(p.d, 64), cdiv(cdiv(p.dv, 2), 64)
    boxes = max(d_boxes, 2 * half_boxes)
    tiles = 128 * (c.Br * d_boxes + c.stages * c.Bc * boxes)
    barriers = 8 * (1 + c.stages * (d_boxes + 2))
    return round_up(tiles + 2 * c.Br * c.Bc + 16 * 128 + barriers + 8, 1024)


def is_latent(p: Problem, c: SimpleNamespace) -> bool:
    """Returns whether wgmma_latent is the fastest kernel: if few rows share many wide keys."""
    return splits_keys(p) and max(p.d, p.dv) > 256


WGMMA_LATENT = rung(
    WGMMA,
    "wgmma_latent",
    "latent attention: all of O in registers, V from the tile of K",
    launch={
        "args": f"Q.map K.map V.map Q K V O lse {SPLITS} num_splits sizes heads group scale mods",
        "boxes": {
            "Q": lambda p, c: c.Br,
            "K": rows_of_page(lambda p, c: c.Bc),
            "V": rows_of_page(lambda p, c: c.Bc),
        },
        "threads": lambda p, c: 384,
        "shared": wgmma_latent_shared,
        **PACKED_IN_SPLITS,
        "begins_early": True,
        "awaits_all": True,
    },
    then=(MERGE_IF_SPLIT,),
    tiles=named("Br Bc stages", (64, 64, 2), (64, 32, 2)),
    candidates={},
    rules={
        "Br is 64": lambda c: c.Br == 64,
        "Bc is a multiple of 16": lambda c: c.Bc % 16 == 0,
        "stages is 2": lambda c: c.stages == 2,
    },
    features=tuple(x for x in IN_SPLITS if x != "row_max"),
    largest_d=576,
    largest_dv=512,
    scratch=SCRATCH_IF_SPLIT,
    after=(),
    tflops={"float16": {576: 517}, "bfloat16": {576: 532}},
    made_for=is_latent,
)


def has_persistent_blocks(p: Problem) -> bool:
    """Returns whether blocks of wgmma_fp8 take several row tiles, with two stages of Q.

    With 16- and 32-bit inputs, at d = 256, and for more than 4,096 keys without a mask, this was
    slower.
    """
    sees_few_keys = p.is_masked or p.is_ragged or p.N <= 4096
    return p.dtype == E4M3_INPUTS and max(p.d, p.dv) <= 128 and sees_few_keys


def fp8_shared(p: Problem, c: SimpleNamespace) -> int:
    """Returns the bytes of shared memory for Q, K, transposed V (128-byte rows) and mbarriers."""
    Q_stages = 2 if has_persistent_blocks(p) else 1
    keys, depth = round_up(c.Bc, 128), round_up(p.d, 128)
    tiles = Q_stages * c.Br * depth + c.stages * (c.Bc * depth + round_up(p.dv, 16) * keys)
    barriers = 16 * (Q_stages * c.Br // 64 + 2 * c.stages)
    return round_up(tiles + barriers + staged_pairs(p, c), 1024)


def quantise_threads(p: Problem, c: SimpleNamespace) -> int:
    """Returns the threads per block of `quantise`, enough to keep all elements in registers."""
    most = max(p.d, p.dv)
    if most <= 64:
        return 256
    return 384 if most <= 128 and p.itemsize == 2 else 512


def tiles_of_keys(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of tiles of Bc keys over all heads."""
    return cdiv(p.N, c.Bc) * p.kv_heads * p.batch


def fp8_blocks(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of persistent blocks, or one block for each row tile."""
    tiles = row_tiles(p, c)
    return min(c.multiprocessors, tiles) if has_persistent_blocks(p) else tiles


def fp8_launch(q: str, k: str, when: Callable[[Problem], bool]) -> Launch:
    """Makes the launch of wgmma_fp8; ``q`` and ``k`` are the names of its e4m3 arrays."""
    return replace(
        WGMMA_LAUNCH,
        entry="wgmma_fp8",
        args=f"{q}.map {k}.map V8.map Q_scale.data K_scale.data V_scale.data Q K V O lse sizes "
        "heads group scale mods batch",
        grid=fp8_blocks,
        boxes={
            q: lambda p, c: 64,
            k: lambda p, c: c.Bc,
            "V8": lambda p, c: round_up(p.dv, 16),
        },
        shared=fp8_shared,
        constants={**STAGES_BIAS, "persistent": lambda p, c: has_persistent_blocks(p)},
        when=when,
        begins_early=True,
    )


def of_quantised(formula: Formula) -> Formula:
    """Returns a formula for the number of scales that `quantise` writes; 0 for e4m3 inputs."""
    return lambda p, c: 0 if p.dtype == E4M3_INPUTS else formula(p, c)


WGMMA_FP8 = Kernel(
    "wgmma_fp8",
    "e4m3 operands, which a separate launch quantises or transposes: products twice as fast",
    (
        Launch(
            "quantise",
            args="Q K V Q8 K8 V8 Q_scale.data K_scale.data V_scale.data M N heads kv_heads batch",
            grid=lambda p, c: row_tiles(p, c) + 2 * tiles_of_keys(p, c),
            threads=quantise_threads,
            shared=lambda p, c: 4 * quantise_threads(p, c) // WARP,
            when=lambda p: p.dtype != E4M3_INPUTS,
        ),
        fp8_launch("Q8", "K8", when=lambda p: p.dtype != E4M3_INPUTS),
        Launch(
            "transpose_e4m3",
            args="V V8 N kv_heads",
            grid=key_tiles,
            threads=lambda p, c: 256,
            when=lambda p: p.dtype == E4M3_INPUTS,
        ),
        fp8_launch("Q", "K", when=lambda p: p.dtype == E4M3_INPUTS),
    ),
    tiles=TileChoice.of(
        "Br Bc stages",
        [(Br, Bc, 2) for Br in (128, 64) for Bc in (128, 64, 32)],
        up_to={
            64: [(192, 128, 2)],
            128: [(192, 96, 2)],
            192: [(128, 128, 2)],
            256: [(128, 96, 2)],
        },
    ),
    candidates={"Br": (64, 128, 192), "Bc": (64, 96, 128, 160, 192, 224), "stages": (2, 3, 4)},
    rules={
        "Br is a multiple of 64": lambda c: c.Br % 64 == 0,
        "Bc is a multiple of 32": lambda c: c.Bc % 32 == 0,
    },
    dtypes=("float16", "bfloat16", "float32", E4M3_INPUTS.name),
    features=EVERYTHING,
    scratch={
        "Q8": ("batch heads M d16", "byte"),
        "K8": ("batch kv_heads N d16", "byte"),
        "V8": ("batch kv_heads dv N32", "byte"),
        "Q_scale": (of_quantised(row_tiles), "real"),
        "K_scale": (of_quantised(tiles_of_keys), "real"),
        "V_scale": (of_quantised(tiles_of_keys), "real"),
    },
    arch="90a",
    largest_d=256,
    rounding=FLOAT8,
    persistent=True,
)

REST = (
    clear_rest("O", "M", "heads", "dv"),
    clear_rest("lse", "M", "heads"),
    clear_row_max(),
)
_RUNGS = (
    *(BASELINE, BASELINE_ONLINE, *SEEDS, FA2, FA2_COALESCED, FA2_SPLIT_KV),
    *(MMA_SPLIT_Q, MMA_SWIZZLED, MMA_ASYNC, MMA_TMA),
    *map(rounded_first, (MMA_PIPELINED, MMA_SPLIT_KV, MMA_SLICES)),
    *(MMA_TF32, MMA_FP16X2, MMA_F64, WGMMA, WGMMA_OVERLAP, WGMMA_PERSISTENT, WGMMA_FP16X2),
    *(WGMMA_SLICES, WGMMA_LATENT, WGMMA_FP8),
)


def clearing_launches(kernel: Kernel) -> tuple[Launch, ...]:
    """Returns the launches that clear unused rows; begin_ragged already clears O and lse."""
    fills = any(BEGIN_RAGGED.entry == x.entry for x in kernel.launches if isinstance(x, Launch))
    return (clear_row_max(),) if fills else REST


KERNELS = tuple(with_cleared_rest(x, *clearing_launches(x)) for x in _RUNGS)
_IN_SPLITS = (FA2_SPLIT_KV.name, MMA_SPLIT_KV.name)


def for_decoding(
    kernel: Kernel | str, splits: int | str, dtype: str, rows: int, *, is_e4m3: bool = False
) -> Kernel | str:
    """Returns the kernel for decoding, where ``rows`` rows of Q share a key head.

    splits: the number of splits of the keys, or "auto". is_e4m3: whether keys and values are e4m3.
    Raises ValueError for kernels that do not split keys and for invalid numbers of splits, and
    Unsupported for kernels that do not support e4m3.
    """
    if is_e4m3 and kernel not in ("auto", "mma_split_kv"):
        raise Unsupported(
            f"kernel is {described(kernel)}, but only mma_split_kv supports an e4m3 cache; leave "
            "kernel out"
        )
    usual = "mma_split_kv" if dtype in HALF else "fa2_split_kv"
    if splits == "auto":
        if is_e4m3:
            return _in_splits("mma_split_kv", None, True)
        return usual if kernel == "auto" and dtype not in HALF and rows <= FEW_ROWS else kernel
    if kernel not in ("auto", *_IN_SPLITS):
        raise ValueError(
            f"only {' and '.join(_IN_SPLITS)} support splits, but kernel is {described(kernel)}; "
            "leave out kernel or splits"
        )
    chosen = usual if kernel == "auto" else str(kernel)
    return _in_splits(chosen, whole("splits", splits, 1, MOST_SPLITS), is_e4m3)


@lru_cache(maxsize=64)
def _in_splits(name: str, splits: int | None, is_e4m3: bool) -> Kernel:
    if name == "fa2_split_kv" and splits is not None:
        return with_cleared_rest(fa2_split_kv(lambda p, c: splits), *REST)
    formula = filling_splits if is_e4m3 else num_splits
    if splits is None:
        made = split_kv(formula)
    else:
        made = split_kv(lambda p, c: splits, may_differ=lambda *_: False)
    if not is_e4m3:
        return with_cleared_rest(rounded_first(made), *REST)
    return replace(
        with_cleared_rest(made, *REST),
        # A separate name, because constants that were tuned for 16-bit keys do not suit e4m3 keys.
        name="mma_split_kv_e4m3",
        tiles=SPLIT_E4M3_TILES,
        features=(*made.features, "e4m3"),
        arch="89",
        dtype_arch={},
    )
