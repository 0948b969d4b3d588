"""The operations: what goes in, what comes out, what is right, and how much work it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from cupyfa import tolerance
from cupyfa.problem import Problem
from cupyfa.tolerance import Expected

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Operation:
    """An operation on named arrays, each seen as [batch, heads, rows, columns].

    ``inputs`` and ``outputs`` say each array's axes; outputs also whether it holds "scalar"
    (the dtype of the inputs) or "real" (the dtype of sums). ``expected(inputs, problem, rounding)``
    is what the reference says, with bounds. ``flops`` counts 2 for a multiply-add, and a causal
    problem by the scores that are visible.
    """

    name: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, tuple[str, str]]
    expected: Callable[[Arrays, Problem, str | None], dict[str, Expected]]
    flops: Callable[[Problem], int]


def visible_scores(p: Problem) -> int:
    """How many (query, key) pairs the mask lets through, per head."""
    if p.causal is None:
        return p.M * p.N
    # Row i sees clamp(i + diagonal + 1, 0, N) keys: none before `first`, all N from `full` on.
    first = min(max(-p.diagonal, 0), p.M)
    full = min(max(p.N - p.diagonal - 1, first), p.M)
    ramp = (full - first) * (first + full - 1 + 2 * (p.diagonal + 1)) // 2
    return ramp + (p.M - full) * p.N


def _expected_attention(inputs: Arrays, p: Problem, rounding: str | None) -> dict[str, Expected]:
    return tolerance.expected_attention(
        inputs["Q"],
        inputs["K"],
        inputs["V"],
        scale=p.scale,
        diagonal=p.diagonal if p.causal else None,
        dtype=p.dtype.name,
        rounding=rounding,
    )


def _expected_softmax(inputs: Arrays, p: Problem, rounding: str | None) -> dict[str, Expected]:
    return tolerance.expected_softmax(inputs["S"], dtype=p.dtype.name)


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            name="softmax",
            inputs={"S": "batch heads M N"},
            outputs={"P": ("batch heads M N", "scalar"), "lse": ("batch heads M", "real")},
            expected=_expected_softmax,
            flops=lambda p: 5 * p.batch * p.heads * p.M * p.N,
        ),
        Operation(
            name="forward",
            inputs={
                "Q": "batch heads M d",
                "K": "batch kv_heads N d",
                "V": "batch kv_heads N dv",
            },
            outputs={"O": ("batch heads M dv", "scalar"), "lse": ("batch heads M", "real")},
            expected=_expected_attention,
            flops=lambda p: 2 * p.batch * p.heads * visible_scores(p) * (p.d + p.dv),
        ),
    )
}
