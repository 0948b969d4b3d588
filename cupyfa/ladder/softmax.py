"""Row-wise softmax kernels, which the baselines also launch between their matrix products."""

from cupyfa.ladder.common import WARP, rung
from cupyfa.ladder.kernel import Kernel, Launch


def softmax_launch(name: str) -> Launch:
    """Makes a launch of one 256-thread block per row; each warp stores a partial sum."""
    return Launch(
        name,
        args="S P lse sizes heads mods",
        grid=lambda p, c: p.M * p.heads * p.batch,
        threads=lambda p, c: 256,
        shared=lambda p, c: p.bytes(reals=256 // WARP),
        file=f"softmax/{name}.cu",
    )


SAFE = Kernel(
    "softmax_safe",
    "maximum, sum, quotient: three passes over a row",
    (softmax_launch("softmax_safe"),),
    operation="softmax",
    features=("strides", "lse"),
    tflops={
        "float16": {0: 2.41},
        "bfloat16": {0: 2.41},
        "float32": {0: 1.34},
        "float64": {0: 0.779},
    },
)
ONLINE = rung(
    SAFE,
    "softmax_online",
    "online softmax, a running maximum and sum: two passes over a row",
    launches=(softmax_launch("softmax_online"),),
    tflops={
        "float16": {0: 2.23},
        "bfloat16": {0: 2.23},
        "float32": {0: 1.6},
        "float64": {0: 0.577},
    },
)
KERNELS = (SAFE, ONLINE)
