"""The record of Hessian-vector products: derivatives of gradients along a direction.

It is not part of the ladder: its inputs include the results of a kernel of tangents, and no other
kernel computes its results.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from cupyfa.ladder.backward import DELTA, THREADS, TWO_PASS, odd_width
from cupyfa.ladder.common import key_tiles, row_tiles
from cupyfa.ladder.kernel import Kernel, Launch
from cupyfa.ladder.operations import Input, modifications
from cupyfa.problem.problem import Problem

_INPUTS = "Q K V dO Q_dot K_dot V_dot lse lse_dot delta delta_dot"


def _shared(p: Problem, c: SimpleNamespace, sums: int) -> int:
    """Returns the bytes for `sums` accumulators, three tiles of pairs, row sums and operands."""
    d, dv = odd_width(p.d, p.itemsize), odd_width(p.dv, p.itemsize)
    pairs = c.Br * (3 * odd_width(c.Bc, p.dtype.sums.itemsize) + 4)
    operands = 2 * (c.Br + c.Bc) * d + (c.Br + 2 * c.Bc) * dv
    return p.bytes(reals=sums + pairs, scalars=operands)


def _gradient_tangents(
    arrays: Mapping[str, np.ndarray], p: Problem, c: SimpleNamespace
) -> dict[str, np.ndarray]:
    """Computes the derivatives of dQ, dK and dV, from O, lse and their tangents."""
    K, V, K_dot, V_dot = (arrays[x].repeat(p.group, axis=1) for x in ("K", "V", "K_dot", "V_dot"))
    Q, Q_dot, dO, lse = (arrays[x] for x in ("Q", "Q_dot", "dO", "lse"))
    mods = modifications(arrays, p)
    S = mods.applied_to(Q @ K.mT * p.scale, p.visible())
    kept = mods.kept(mods.place(*np.ogrid[tuple(slice(n) for n in S.shape)]))

    def dropped(x: np.ndarray) -> np.ndarray:
        if kept is None or mods.dropout is None:
            return x
        return np.where(kept, x * mods.dropout.factor, 0.0)

    seen = ~np.isneginf(S) & ~np.isneginf(lse)[..., None]
    D, D_dot = ((dO * arrays[x]).sum(-1, keepdims=True) for x in ("O", "O_dot"))
    P = np.where(seen, np.exp(S - lse[..., None]), 0.0)
    S_dot = (Q_dot @ K.mT + Q @ K_dot.mT) * p.scale
    P_dot = np.where(seen, P * (S_dot - arrays["lse_dot"][..., None]), 0.0)
    apart, apart_dot = dropped(dO @ V.mT) - D, dropped(dO @ V_dot.mT) - D_dot
    dS, dS_dot = (np.where(seen, x, 0.0) for x in (P * apart, P_dot * apart + P * apart_dot))

    def of_key_heads(x: np.ndarray) -> np.ndarray:
        return x.reshape(p.batch, p.kv_heads, p.group, *x.shape[2:]).sum(2)

    return {
        "dQ": (dS_dot @ K + dS @ K_dot) * p.scale,
        "dK": of_key_heads(dS_dot.mT @ Q + dS.mT @ Q_dot) * p.scale,
        "dV": of_key_heads(dropped(P_dot).mT @ dO),
    }


HVP = Kernel(
    "hvp",
    "derivatives of dQ, dK and dV along a direction, in two passes",
    (
        DELTA,
        replace(DELTA, args="O_dot dO delta_dot M heads mods"),
        Launch(
            "hvp_columns",
            args=f"{_INPUTS} dK dV sizes kv_heads group scale mods",
            grid=key_tiles,
            threads=lambda p, c: THREADS,
            shared=lambda p, c: _shared(p, c, c.Bc * (p.d + p.dv)),
        ),
        Launch(
            "hvp_rows",
            args=f"{_INPUTS} dQ sizes heads group scale mods",
            grid=row_tiles,
            threads=lambda p, c: THREADS,
            shared=lambda p, c: _shared(p, c, c.Br * p.d),
        ),
    ),
    operation="backward",
    tiles=TWO_PASS.tiles,
    candidates=TWO_PASS.candidates,
    features=(
        *("causal", "window", "additive", "places", "dropout", "sink", "gqa", "strides", "dv"),
    ),
    scratch={name: ("batch heads M", "real") for name in ("delta", "delta_dot")},
    inputs={
        "Q_dot": Input("batch heads M d"),
        "K_dot": Input("batch kv_heads N d"),
        "V_dot": Input("batch kv_heads N dv"),
        "O_dot": Input("batch heads M dv", "result"),
        "lse_dot": Input("batch heads M", "real"),
    },
    reference=_gradient_tangents,
)
