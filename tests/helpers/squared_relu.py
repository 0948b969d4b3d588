"""Records of attention without softmax, and hence without lse, and of its gradients."""

from pathlib import Path

import numpy as np

from cupyfa import Kernel, Launch, cdiv


def positive_scores(arrays, p):
    scores = arrays["Q"] @ np.repeat(arrays["K"], p.group, axis=1).mT * p.scale
    return np.where(p.visible(), np.maximum(scores, 0), 0)


def attention(arrays, p, c):
    return {"O": positive_scores(arrays, p) ** 2 @ np.repeat(arrays["V"], p.group, axis=1)}


def gradients(arrays, p, c):
    S, Q, dO = positive_scores(arrays, p), arrays["Q"], arrays["dO"]
    K, V = (np.repeat(arrays[x], p.group, axis=1) for x in "KV")
    dS = 2 * S * (dO @ V.mT) * p.scale

    def of_groups(x):
        return x.reshape(p.batch, p.kv_heads, p.group, *x.shape[2:]).sum(axis=2)

    return {"dQ": dS @ K, "dK": of_groups(dS.mT @ Q), "dV": of_groups((S**2).mT @ dO)}


def launch(entry, args, rows, heads):
    return Launch(
        entry,
        args=f"Q K V {args} sizes group scale",
        grid=lambda p, c: (max(cdiv(getattr(p, rows), 64), 1), getattr(p, heads), p.batch),
        threads=lambda p, c: 64,
        file="squared_relu.cu",
    )


squared_relu = Kernel(
    name="squared_relu",
    adds="weights are squares of positive scores",
    launches=(launch("squared_relu", "O", "M", "heads"),),
    features=("causal", "window", "gqa", "strides", "dv"),
    reference=attention,
    folder=Path(__file__).parent,
)

squared_relu_backward = Kernel(
    name="squared_relu_backward",
    adds="its gradients",
    operation="backward",
    launches=(
        launch("squared_relu_rows", "dO dQ", "M", "heads"),
        launch("squared_relu_keys", "dO dK dV", "N", "kv_heads"),
    ),
    features=squared_relu.features,
    reference=gradients,
    forward=attention,
    folder=Path(__file__).parent,
)
