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
    """Computes the expected O and lse in float64."""
    K, V = (np.repeat(arrays[x], p.group, axis=1) for x in "KV")
    scores = modified(arrays["Q"] @ K.mT * p.scale, c)
    P, lse = softmax(np.where(p.visible(), scores, -np.inf))
    return {"O": P @ V, "lse": lse}


NAME = Kernel(
    name="NAME",
    adds="damped scores",  # short description that tables print
    launches=(
        Launch(
            "NAME_forward",
            # The parameters in the .cu file, in the same order. A new array also needs a line in
            # inputs= or outputs= below, a new number a line in floats=.
            args="Q K V O lse sizes heads group scale limit",
            grid=lambda p, c: cdiv(p.M, c.Br) * p.heads * p.batch,
            threads=lambda p, c: c.Br,
            file="NAME.cu",
            # If you add a `struct Shared`, state its size: shared=lambda p, c: p.bytes(…)
        ),
    ),
    # Tile sizes that `cupyfa tune` tries; the first is the default. The .cu file uses them as
    # constants.
    tiles=({"Br": 64}, {"Br": 128}),
    floats={"limit": lambda p, c: 4.0},  # the default; callers may override it: bind(limit=2.0)
    reference=reference,  # omit this if the kernel computes plain attention
    # What the kernel supports. Without "causal", for example, causal calls would be rejected.
    features=("causal", "window", "gqa", "strides", "lse", "dv"),
    folder=Path(__file__).parent,  # the folder of the .cu file
)
