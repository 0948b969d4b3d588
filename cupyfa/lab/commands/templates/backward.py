"""NAME: gradients of attention with damped scores.

Run it with `cupyfa run NAME.py:NAME`.
"""

from pathlib import Path

import numpy as np
from cupyfa import Kernel, Launch, cdiv
from cupyfa.numerics.reference import softmax


def modified(scores, c):
    """Modifies scaled scores. Change it here and in the .cu file."""
    return scores / (1 + np.abs(scores) / c.limit)


def derivative(scores, c):
    """Computes the derivative of `modified`. Change it here and in the .cu file."""
    return (1 + np.abs(scores) / c.limit) ** -2


def scaled_scores(arrays, p):
    """Computes the scaled scores, with K repeated for the query heads that share a key head."""
    return arrays["Q"] @ np.repeat(arrays["K"], p.group, axis=1).mT * p.scale


def forward(arrays, p, c):
    """Computes the O and lse of the forward pass; checks pass these arrays to the kernel."""
    scores = modified(scaled_scores(arrays, p), c)
    P, lse = softmax(np.where(p.visible(), scores, -np.inf))
    return {"O": P @ np.repeat(arrays["V"], p.group, axis=1), "lse": lse}


def reference(arrays, p, c):
    """Computes the expected gradients in float64."""
    Q, dO = arrays["Q"], arrays["dO"]
    K, V = (np.repeat(arrays[x], p.group, axis=1) for x in "KV")
    scores = scaled_scores(arrays, p)
    P = np.where(p.visible(), np.exp(modified(scores, c) - arrays["lse"][..., None]), 0)
    dP = dO @ V.mT - (dO * arrays["O"]).sum(-1, keepdims=True)
    dS = np.where(p.visible(), P * dP * derivative(scores, c), 0)
    return {
        "dQ": dS @ K * p.scale,
        "dK": sum_of_groups(dS.mT @ Q * p.scale, p),
        "dV": sum_of_groups(P.mT @ dO, p),
    }


def sum_of_groups(x, p):
    """Sums over the query heads that share a key head."""
    return x.reshape(p.batch, p.kv_heads, p.group, *x.shape[2:]).sum(2)


NAME = Kernel(
    name="NAME",
    adds="gradients of damped scores",  # short description that tables print
    operation="backward",
    launches=(
        # args= lists the parameters of the entry point in the .cu file, in the same order. A new
        # array also needs a line in inputs= or scratch= below, a new number a line in floats=.
        Launch(
            "NAME_rows",
            args="Q K V O lse dO delta dQ sizes heads group scale limit",
            grid=lambda p, c: cdiv(p.M, c.Br) * p.heads * p.batch,
            threads=lambda p, c: c.Br,
            # If you add a `struct Shared`, state its size: shared=lambda p, c: p.bytes(…)
            file="NAME.cu",
        ),
        Launch(
            "NAME_columns",
            args="Q K V lse dO delta dK dV sizes kv_heads group scale limit",
            # A launch needs at least one block, even without keys.
            grid=lambda p, c: max(cdiv(p.N, c.Bc), 1) * p.kv_heads * p.batch,
            threads=lambda p, c: c.Bc,
            file="NAME.cu",
        ),
    ),
    scratch={"delta": ("batch heads M", "real")},  # the first launch writes it, the second reads it
    # Tile sizes that `cupyfa tune` tries; the first is the default. The .cu file uses them as
    # constants.
    tiles=({"Br": 64, "Bc": 64}, {"Br": 128, "Bc": 128}),
    floats={"limit": lambda p, c: 4.0},  # the default; callers may override it: bind(limit=2.0)
    # Omit `reference` and `forward` if the kernel computes gradients of plain attention.
    reference=reference,
    forward=forward,
    # What the kernel supports. Without "causal", for example, causal calls would be rejected.
    features=("causal", "window", "gqa", "strides", "dv"),
    folder=Path(__file__).parent,  # the folder of the .cu file
)
