"""The ladder of tangents: attention and its directional derivative in one launch."""

from types import SimpleNamespace

from cupyfa.ladder.common import (
    ALONG_KEYS,
    HALF,
    WARP,
    clear_rest,
    padded_columns,
    row_tiles,
    with_cleared_rest,
)
from cupyfa.ladder.forward import mma_shared, tma_shared
from cupyfa.ladder.kernel import Constant, Kernel, Launch
from cupyfa.ladder.tiles import TileChoice
from cupyfa.problem.problem import Problem, round_up

FEATURES = (
    *("causal", "window", "score", "places", "sink", "dropout"),
    *("gqa", "strides", "lse", "dv", "out_dtype", "lengths", "ragged"),
    *("zero_tangents", "directions"),
)
_INPUTS = "Q K V Q_dot K_dot V_dot"
_MAPS = f"{_INPUTS.replace(' ', '.map ')}.map"
_ARRAYS = f"{_INPUTS} O lse O_dot lse_dot"
_DIRECTIONS: dict[str, Constant] = {"directions": lambda p, c: p.directions}

FA2_TANGENT = Kernel(
    "fa2_tangent",
    "fa2 with the derivative of each sum beside it: P is computed once for O and its tangent",
    (
        Launch(
            "fa2_tangent",
            args=f"{_ARRAYS} sizes heads batch group scale mods tangents",
            grid=row_tiles,
            threads=lambda p, c: c.Br,
            shared=lambda p, c: p.bytes(
                reals=c.Br * ((1 + p.directions) * p.dv + (3 + bool(p.modifiers.moving)) * c.Bc),
                scalars=c.Br * (1 + p.directions) * p.d + 2 * c.Bc * (p.d + p.dv),
            ),
            constants=_DIRECTIONS,
            walks=ALONG_KEYS,
        ),
    ),
    operation="tangent",
    tiles=tuple(
        {"Br": Br, "Bc": Bc}
        for Br in (64, 32, 16, 8, 4, 2, 1)
        for Bc in (16, 8, 4, 2, 1)
        if Bc <= Br <= 16 * Bc
    ),
    candidates={"Br": (8, 16, 32, 64, 96, 128), "Bc": (4, 8, 16, 32)},
    rules={"Bc is less than 16 or a multiple of 16": lambda c: c.Bc < 16 or c.Bc % 16 == 0},
    features=(*FEATURES, "wrt"),
    # Of the first form, for one direction, on an H200.
    tflops={"float16": {64: 6.22, 128: 3.41}, "bfloat16": {64: 5.81, 128: 2.43}},
)


MMA_TANGENT = Kernel(
    "mma_tangent",
    "tensor cores (mma.sync): each fragment of K and V serves a product and its derivative",
    (
        Launch(
            "mma_tangent",
            args=f"{_ARRAYS} sizes heads batch group scale mods",
            grid=lambda p, c: row_tiles(p, c) * p.directions,
            threads=lambda p, c: WARP * c.Br // 16,
            shared=lambda p, c: 2 * mma_shared(p, c, c.stages),  # with the tangents of the tiles
            constants=_DIRECTIONS,
            walks=ALONG_KEYS,
        ),
    ),
    operation="tangent",
    tiles=TileChoice.of(
        "Br Bc stages",
        [(Br, Bc, 1) for Br in (64, 32, 16) for Bc in (32, 16)],
        up_to={64: [(64, 64, 2)], 128: [(128, 32, 2), (64, 32, 1)]},
        # On sm_100, ptxas runs out of registers for the larger tile, on others for 48 keys.
        on={
            "90": {64: [(64, 64, 2)], 128: [(128, 48, 2)]},
            "100": {64: [(64, 64, 2)], 128: [(64, 32, 1)]},
        },
    ),
    candidates={"Br": (32, 64, 128), "Bc": (16, 32, 48, 64), "stages": (1, 2)},
    rules={
        "Br and Bc are multiples of 16": lambda c: c.Br % 16 == c.Bc % 16 == 0,
        "stages is 1 or 2": lambda c: c.stages in (1, 2),
    },
    dtypes=HALF,
    dtype_arch={"bfloat16": "80"},
    largest_d=128,
    features=FEATURES,
    tflops={"float16": {64: 284, 128: 301}, "bfloat16": {64: 338, 128: 357}},
)


def wgmma_shared(p: Problem, c: SimpleNamespace) -> int:
    """Returns the bytes of tma_shared, with as many again for the tangents of the tiles."""
    tiles = 2 * (c.Br * round_up(p.d, 64) + c.stages * c.Bc * padded_columns(p, 64))
    return tma_shared(p, c, tiles)


WGMMA_TANGENT = Kernel(
    "wgmma_tangent",
    "Hopper (sm_90a): wgmma and TMA; a warpgroup's softmax is hidden behind another's products",
    (
        Launch(
            "wgmma_tangent",
            args=f"{_MAPS} {_ARRAYS} sizes heads batch group scale mods",
            boxes={
                x: (lambda p, c: 64) if x.startswith("Q") else (lambda p, c: c.Bc)
                for x in _INPUTS.split()
            },
            grid=lambda p, c: row_tiles(p, c) * p.directions,
            threads=lambda p, c: 128 + 2 * c.Br,
            shared=wgmma_shared,
            constants=_DIRECTIONS,
            walks=ALONG_KEYS,
        ),
    ),
    operation="tangent",
    tiles=TileChoice.of(
        "Br Bc stages",
        [(Br, Bc, 2) for Br in (128, 64) for Bc in (32, 16)],
        up_to={64: [(128, 128, 2), (128, 64, 2)], 128: [(128, 80, 2), (128, 64, 2)]},
    ),
    candidates={"Br": (64, 128, 192), "Bc": (32, 48, 64, 80, 96, 128), "stages": (2, 3)},
    rules={
        "Br is a multiple of 64": lambda c: c.Br % 64 == 0,
        "Bc is a multiple of 16": lambda c: c.Bc % 16 == 0,
    },
    dtypes=HALF,
    features=FEATURES,
    arch="90a",
    largest_d=128,
    tflops={"float16": {64: 416, 128: 548}, "bfloat16": {64: 654, 128: 737}},
)


def f64_team(sizes: Problem | SimpleNamespace) -> int:
    """Returns how many warps share 16 rows: each holds 64 columns of O and of its tangent."""
    return -(-sizes.dv // 64)


def mma_f64_shared(p: Problem, c: SimpleNamespace) -> int:
    """Returns the bytes of shared memory for float64 tiles of Q, K and V and of their tangents, and
    for the scores that the warps of a team exchange.
    """
    team = f64_team(p)
    depth, width = round_up(p.d, 16), round_up(p.dv, 16 * team)
    exchange = team * c.Br * c.Bc if team > 1 else 0
    return 16 * (c.Br * depth + c.Bc * (depth + width) + exchange)


MMA_F64_TANGENT = Kernel(
    "mma_f64_tangent",
    "float64 on tensor cores (mma.sync): above dv = 64 two warps share 16 rows",
    (
        Launch(
            "mma_f64_tangent",
            args=f"{_ARRAYS} sizes heads batch group scale mods",
            grid=lambda p, c: row_tiles(p, c) * p.directions,
            threads=lambda p, c: WARP * f64_team(p) * c.Br // 16,
            shared=mma_f64_shared,
            constants=_DIRECTIONS,
            walks=ALONG_KEYS,
        ),
    ),
    operation="tangent",
    # Up to 64 columns two blocks of the first tile fit on a multiprocessor.
    tiles=TileChoice.of("Br Bc", [(64, 16), (32, 16), (16, 16)]),
    candidates={"Br": (16, 32, 64, 128), "Bc": (16, 32)},
    rules={
        "Br and Bc are multiples of 16": lambda c: c.Br % 16 == c.Bc % 16 == 0,
        "Br is at least 32 if d > 64 and dv <= 64: a thread copies two columns": (
            lambda c: c.Br >= 32 or f64_team(c) > 1 or c.d <= 64
        ),
    },
    dtypes=("float64",),
    arch="80",
    largest_d=128,
    features=FEATURES,
)

REST = (
    clear_rest("O", "M", "heads", "dv"),
    clear_rest("lse", "M", "heads"),
    clear_rest("O_dot", "M", "heads", "dv"),
    clear_rest("lse_dot", "M", "heads"),
)
KERNELS = tuple(
    with_cleared_rest(x, *REST) for x in (FA2_TANGENT, MMA_TANGENT, WGMMA_TANGENT, MMA_F64_TANGENT)
)
