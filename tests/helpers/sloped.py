"""The record of a kernel that is no plain attention, as users write them in a script."""

from pathlib import Path

import numpy as np

from cupyfa import Input, Kernel, Launch, cdiv
from cupyfa.numerics.reference import softmax


def attention(arrays, p, c):
    """What the kernel computes."""
    Q, K, V = arrays["Q"], *(np.repeat(arrays[name], p.group, axis=1) for name in "KV")
    distance = abs(np.arange(p.M)[:, None] - np.arange(p.N))
    scores = Q @ K.mT * p.scale - arrays["slopes"][:, None, None] * distance
    scores = c.cap * np.tanh(scores / c.cap)
    scores = np.where(p.visible() & arrays["is_shown"][:, None, None, :], scores, -np.inf)
    P, lse = softmax(scores)
    return {"O": P @ V, "lse": lse, "top": scores.max(-1, initial=-np.inf)}


sloped = Kernel(
    name="sloped",
    adds="scores that fall with the distance",
    launches=(
        Launch(
            "sloped",
            args="Q K V slopes is_shown.data O lse top sizes heads group scale cap",
            grid=lambda p, c: (cdiv(p.M, c.Br), p.heads, p.batch),
            threads=lambda p, c: c.Br,
        ),
    ),
    tiles=({"Br": 64}, {"Br": 32}),
    features=("causal", "window", "gqa", "strides", "lse", "dv"),
    inputs={
        "slopes": Input("heads", "real", draw=lambda rng, p: rng.random(p.heads)),
        "is_shown": Input("batch N", "bool", draw=lambda rng, p: rng.random((p.batch, p.N)) < 0.9),
    },
    outputs={"top": ("batch heads M", "real")},
    floats={"cap": lambda p, c: 30.0},
    reference=attention,
    folder=Path(__file__).parent,
)
