"""The forward ladder: each rung adds one idea to the rung before it."""

from __future__ import annotations

from cupyfa.kernel import Kernel, Launch, Matmul, cdiv, padded
from cupyfa.ladder.softmax import WARP, softmax_launch

EVERYTHING = ("causal", "gqa", "strides", "lse", "dv")
SUMS_IN_MEMORY = {
    "O_sum": ("batch heads M dv", "real"),
    "row_max": ("batch heads M", "real"),
    "row_sum": ("batch heads M", "real"),
}
ARGS_WITH_SUMS = "Q K V O lse O_sum row_max row_sum M N heads group diagonal scale"
ROW_TILES = tuple(
    {"Br": Br, "Bc": Bc}
    for Br in (128, 64, 32, 16, 8, 4, 2, 1)
    for Bc in (32, 16, 8, 4, 2, 1)
    if Bc <= Br <= 16 * Bc
)
WHOLE_GROUPS = {"Bc is below 16 or a multiple of it": lambda c: c.Bc < 16 or c.Bc % 16 == 0}


def baseline(name: str, softmax: str, adds: str) -> Kernel:
    """S = Q K^T, P = softmax(S) and O = P V, one after the other through global memory."""
    return Kernel(
        name=name,
        adds=adds,
        launches=(
            Matmul("S", "Q", "K.T", scaled=True),
            softmax_launch(softmax),
            Matmul("O", "P", "V"),
            Launch(
                "mend_rows",
                args="P V O M N heads group diagonal",
                grid=lambda p, c: p.M * p.heads * p.batch,
                threads=lambda p, c: 128,
                when=lambda p: p.causal is not None,
            ),
        ),
        features=EVERYTHING,
        scratch={
            "S": ("batch heads M N", "scalar"),
            "P": ("batch heads M N", "scalar"),
        },
    )


KERNELS = (
    baseline("baseline", "softmax_safe", "cuBLAS, softmax, cuBLAS: S and P go through memory"),
    baseline("baseline_online", "softmax_online", "the same with the online softmax"),
    Kernel(
        name="minimal",
        adds="S and P stay on chip; a thread owns a row; O, max and sum go through memory",
        launches=(
            Launch(
                "minimal",
                args=ARGS_WITH_SUMS,
                grid=lambda p, c: p.heads * p.batch,
                threads=lambda p, c: c.Bc,
                shared=lambda p, c: p.bytes(
                    reals=c.Br * c.Bc, scalars=(c.Br + c.Bc) * p.d + c.Bc * p.dv
                ),
            ),
        ),
        tiles=tuple({"Br": size, "Bc": size} for size in (32, 16, 8, 4, 2, 1)),
        rules={"Br <= Bc, for there are Bc threads": lambda c: c.Br <= c.Bc},
        features=EVERYTHING,
        scratch=SUMS_IN_MEMORY,
    ),
    Kernel(
        name="v1",
        adds="a block works on one row at a time: loads are coalesced, dot products summed by all",
        launches=(
            Launch(
                "v1",
                args=ARGS_WITH_SUMS,
                grid=lambda p, c: p.heads * p.batch,
                threads=lambda p, c: 128,
                shared=lambda p, c: p.bytes(
                    reals=128 // WARP * c.Bc, scalars=p.d + c.Bc * (p.d + p.dv)
                ),
            ),
        ),
        tiles=({"Bc": 4}, {"Bc": 2}, {"Bc": 1}),
        features=EVERYTHING,
        scratch=SUMS_IN_MEMORY,
    ),
    Kernel(
        name="v2",
        adds="one warp per row: shuffles instead of barriers",
        launches=(
            Launch(
                "v2",
                args=ARGS_WITH_SUMS,
                grid=lambda p, c: p.heads * p.batch,
                threads=lambda p, c: WARP * c.Br,
                shared=lambda p, c: p.bytes(scalars=(c.Br + c.Bc) * p.d + c.Bc * p.dv),
            ),
        ),
        tiles=({"Br": 4, "Bc": 2}, {"Br": 2, "Bc": 2}, {"Br": 2, "Bc": 1}, {"Br": 1, "Bc": 1}),
        features=EVERYTHING,
        scratch=SUMS_IN_MEMORY,
    ),
    Kernel(
        name="v3",
        adds="tensor cores (WMMA); also cut along d, so shared memory does not depend on it",
        launches=(
            Launch(
                "v3",
                args=ARGS_WITH_SUMS,
                grid=lambda p, c: p.heads * p.batch,
                threads=lambda p, c: WARP * c.Br * c.Bc // (c.Wr * c.Wc),
                shared=lambda p, c: 8 * c.Br * (c.Bc + 2) + 4 * c.Bc * (c.Br + c.Bc),
            ),
        ),
        tiles=tuple(
            {"Br": Br, "Bc": Bc, "Wr": Wr, "Wc": 16}
            for Br, Bc, Wr in ((64, 32, 32), (32, 32, 16), (64, 16, 16), (16, 32, 16), (32, 16, 16))
        ),
        rules={
            "Wr and Wc are multiples of 16": lambda c: c.Wr % 16 == c.Wc % 16 == 0,
            "Br is a multiple of Wr and Bc of Wc": lambda c: c.Br % c.Wr == c.Bc % c.Wc == 0,
        },
        dtypes=("float16", "bfloat16", "float32"),
        features=EVERYTHING,
        scratch=SUMS_IN_MEMORY,
        rounding="float16",
        tflops={"float16": {64: 1.77, 128: 2.27, 256: 2.52, 1024: 2.63}},
    ),
    Kernel(
        name="fa2",
        adds="Q outside, K and V inside: a row's output, max and sum never leave the block",
        launches=(
            Launch(
                "fa2",
                args="Q K V O lse M N heads batch group diagonal scale",
                grid=lambda p, c: cdiv(p.M, c.Br) * p.heads * p.batch,
                threads=lambda p, c: c.Br,
                shared=lambda p, c: p.bytes(
                    reals=c.Br * (p.dv + c.Bc), scalars=(c.Br + c.Bc) * p.d + c.Bc * p.dv
                ),
            ),
        ),
        tiles=ROW_TILES,
        rules=WHOLE_GROUPS,
        features=EVERYTHING,
        tflops={
            "float16": {64: 6.0, 128: 4.99, 256: 4.19, 1024: 1.12},
            "bfloat16": {64: 5.28, 128: 3.35, 256: 3.09, 1024: 0.851},
            "float32": {64: 8.93, 128: 6.41, 256: 3.83, 1024: 0.627},
            "float64": {64: 4.82, 128: 2.33, 256: 1.07, 1024: 0.166},
        },
    ),
    Kernel(
        name="fa2_coalesced",
        adds="loads and stores row by row; padded rows; V takes K's place in shared memory",
        launches=(
            Launch(
                "fa2_coalesced",
                args="Q K V O lse M N heads batch group diagonal scale",
                grid=lambda p, c: cdiv(p.M, c.Br) * p.heads * p.batch,
                threads=lambda p, c: c.Br,
                shared=lambda p, c: p.bytes(
                    reals=c.Br * (padded(p.dv, p.dtype.sums.itemsize) + c.Bc + 1),
                    scalars=c.Br * padded(p.d, p.itemsize)
                    + c.Bc * padded(max(p.d, p.dv), p.itemsize),
                    align=16,
                ),
            ),
        ),
        tiles=ROW_TILES,
        rules=WHOLE_GROUPS,
        features=EVERYTHING,
        tflops={
            "float16": {64: 15.4, 128: 10.4, 256: 10.3, 1024: 1.64},
            "bfloat16": {64: 12.8, 128: 6.85, 256: 6.82, 1024: 0.803},
            "float32": {64: 19.8, 128: 14.3, 256: 6.61, 1024: 0.862},
            "float64": {64: 9.06, 128: 4.98, 256: 2.12, 1024: 0.216},
        },
    ),
)
