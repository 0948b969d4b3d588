"""Softmax over rows: operations of their own, and the middle of the baselines."""

from __future__ import annotations

from cupyfa.kernel import Kernel, Launch

WARP = 32


def softmax_launch(name: str) -> Launch:
    """One block of 256 threads per row; every warp leaves one sum in shared memory."""
    return Launch(
        name,
        args="S P lse M N heads diagonal",
        grid=lambda p, c: p.M * p.heads * p.batch,
        threads=lambda p, c: 256,
        shared=lambda p, c: p.bytes(reals=256 // WARP),
        file=f"softmax/{name}.cu",
    )


KERNELS = (
    Kernel(
        name="softmax_safe",
        adds="maximum, sum, divide: three passes over a row",
        operation="softmax",
        launches=(softmax_launch("softmax_safe"),),
        features=("strides", "lse"),
    ),
    Kernel(
        name="softmax_online",
        adds="a running maximum and sum: two passes over a row",
        operation="softmax",
        launches=(softmax_launch("softmax_online"),),
        features=("strides", "lse"),
        tflops={"float16": 1, "bfloat16": 1, "float32": 1, "float64": 1},
    ),
)
