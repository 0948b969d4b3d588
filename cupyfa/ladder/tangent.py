"""The ladder of tangents: attention and its directional derivative in one launch."""

from cupyfa.ladder.common import ALONG_KEYS, clear_rest, row_tiles, with_cleared_rest
from cupyfa.ladder.kernel import Kernel, Launch

FEATURES = (
    *("causal", "window", "score", "places", "sink", "dropout"),
    *("gqa", "strides", "lse", "dv", "out_dtype", "lengths", "ragged"),
    *("zero_tangents", "directions"),
)
_ARRAYS = "Q K V Q_dot K_dot V_dot O lse O_dot lse_dot"

FA2_TANGENT = Kernel(
    "fa2_tangent",
    "fa2 with the derivative of each sum beside it: P is computed once for O and its tangent",
    (
        Launch(
            "fa2_tangent",
            args=f"{_ARRAYS} sizes heads batch group scale mods",
            grid=row_tiles,
            threads=lambda p, c: c.Br,
            shared=lambda p, c: p.bytes(
                reals=c.Br * ((1 + p.directions) * p.dv + 3 * c.Bc),
                scalars=c.Br * (1 + p.directions) * p.d + 2 * c.Bc * (p.d + p.dv),
            ),
            constants={"directions": lambda p, c: p.directions},
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
    features=FEATURES,
    # Of the first form, for one direction, on an H200.
    tflops={"float16": {64: 6.22, 128: 3.41}, "bfloat16": {64: 5.81, 128: 2.43}},
)

REST = (
    clear_rest("O", "M", "heads", "dv"),
    clear_rest("lse", "M", "heads"),
    clear_rest("O_dot", "M", "heads", "dv"),
    clear_rest("lse_dot", "M", "heads"),
)
KERNELS = tuple(with_cleared_rest(x, *REST) for x in (FA2_TANGENT,))
