"""Records of kernels of modified attention, as users write them in a script."""

from pathlib import Path

import numpy as np

import cupyfa
from cupyfa import Input, Kernel, Launch, cdiv
from cupyfa.numerics.reference import softmax


def attention(arrays, p, c):
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


def scores(arrays, p):
    """Computes uncapped scores; returns them with K and V per query head, and the distances."""
    K, V = (np.repeat(arrays[name], p.group, axis=1) for name in "KV")
    distance = abs(np.arange(p.M)[:, None] - np.arange(p.N))
    S = arrays["Q"] @ K.mT * p.scale - arrays["slopes"][:, None, None] * distance
    return np.where(p.visible(), S, -np.inf), K, V, distance


def forward(arrays, p, c):
    """Computes O and lse, which are inputs of the gradients."""
    S, _, V, _ = scores(arrays, p)
    P, lse = softmax(S)
    return {"O": P @ V, "lse": lse}


def gradients(arrays, p, c):
    S, K, V, distance = scores(arrays, p)
    out, dO, lse = (arrays[name] for name in ("O", "dO", "lse"))
    hidden = ~p.visible() | np.isneginf(lse)[..., None]
    P = np.where(hidden, 0.0, np.exp(S - lse[..., None]))
    dS = P * (dO @ V.mT - (dO * out).sum(-1, keepdims=True))

    def of_key_heads(x):
        return x.reshape(p.batch, p.kv_heads, p.group, *x.shape[2:]).sum(2)

    return {
        "dQ": dS @ K * p.scale,
        "dK": of_key_heads(dS.mT @ arrays["Q"] * p.scale),
        "dV": of_key_heads(P.mT @ dO),
        "dslope": -(dS * distance).sum(-1),
    }


def launch(entry, outputs, rows, heads):
    return Launch(
        entry,
        args=f"Q K V dO lse delta slopes {outputs} sizes group scale",
        grid=lambda p, c: (max(cdiv(getattr(p, rows), 64), 1), getattr(p, heads), p.batch),
        threads=lambda p, c: 64,
        file="sloped_backward.cu",
    )


sloped_backward = Kernel(
    name="sloped_backward",
    adds="scores that fall with the distance",
    operation="backward",
    launches=(
        cupyfa.kernel("rows").launches[0],  # computes delta
        launch("sloped_rows", "dQ dslope", "M", "heads"),
        launch("sloped_keys", "dK dV", "N", "kv_heads"),
    ),
    features=("causal", "window", "gqa", "strides", "dv"),
    scratch={"delta": ("batch heads M", "real")},
    inputs={"slopes": sloped.inputs["slopes"]},
    outputs={"dslope": ("batch heads M", "real")},
    reference=gradients,
    forward=forward,
    folder=Path(__file__).parent,
)
