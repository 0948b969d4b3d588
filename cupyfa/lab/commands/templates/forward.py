"""NAME: attention with damped scores.

Run it with `cupyfa run NAME.py:NAME`.
"""

from pathlib import Path

import numpy as np
from cupyfa import Kernel, Launch, cdiv
from cupyfa.numerics.reference import softmax


def modified(scores, c):
    """Modifies scaled scores. Change it here and in the .cu file."""
    return scores / (1 + np.abs(scores) / c.limit)


def reference(arrays, p, c):
    """Computes O and lse in float64. Checks compare the kernel with them."""
    K, V = (np.repeat(arrays[x], p.group, axis=1) for x in "KV")
    scores = modified(arrays["Q"] @ K.mT * p.scale, c)
    P, lse = softmax(np.where(p.visible(), scores, -np.inf))
    return {"O": P @ V, "lse": lse}


NAME = Kernel(
    name="NAME",
    adds="damped scores",  # the kernel's new idea, for tables
    launches=(
        Launch(
            "NAME_forward",
            # The arguments in the .cu file, in the same order. An array of your own also needs a
            # line in inputs= or outputs= below, a number one in floats=.
            args="Q K V O lse sizes heads group scale limit",
            grid=lambda p, c: cdiv(p.M, c.Br) * p.heads * p.batch,
            threads=lambda p, c: c.Br,
            file="NAME.cu",
            # Bytes of a `struct Shared`, once there is one: shared=lambda p, c: p.bytes(…)
        ),
    ),
    # Sizes that `cupyfa tune` tries; the first is the default. Each is a constant in the .cu file.
    tiles=({"Br": 64}, {"Br": 128}),
    floats={"limit": lambda p, c: 4.0},  # callers may give another: bind(limit=2.0)
    reference=reference,  # leave it out if the kernel computes plain attention
    # What the kernel can do. A call that needs more is refused: without "causal", a causal one.
    features=("causal", "window", "gqa", "strides", "lse", "dv"),
    folder=Path(__file__).parent,  # where the .cu file is
)
