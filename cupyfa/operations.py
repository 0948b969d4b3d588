"""The operations: what goes in, what comes out, what is right, and how much work it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from cupyfa import tolerance
from cupyfa.problem import Problem
from cupyfa.tolerance import Expected

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Window:
    """Some rows of the outputs of one head: an index of [batch, heads, rows, …]."""

    batch: int
    head: int
    rows: slice

    def of(self, array: np.ndarray) -> np.ndarray:
        """These rows of an array, [1, 1, rows, …]."""
        here = slice(self.batch, self.batch + 1), slice(self.head, self.head + 1), self.rows
        return array[here]


@dataclass(frozen=True)
class Operation:
    """An operation on named arrays, each seen as [batch, heads, rows, columns].

    ``inputs`` and ``outputs`` say each array's axes; outputs also whether it holds "scalar"
    (the dtype of the inputs) or "real" (the dtype of sums). ``reference(inputs, problem, roundings,
    window)`` is what is right, with bounds for each of these roundings: of all rows, or of a window
    of them. ``flops`` counts 2 for a multiply-add, and a causal problem by the scores that are
    visible.
    """

    name: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, tuple[str, str]]
    reference: Callable[..., dict[str | None, dict[str, Expected]]]
    flops: Callable[[Problem], int]

    def expected(
        self,
        inputs: Arrays,
        p: Problem,
        rounding: str | None = None,
        window: Window | None = None,
    ) -> dict[str, Expected]:
        """What is right for a kernel that rounds its operands so, with bounds."""
        return self.reference(inputs, p, (rounding,), window)[rounding]

    def bytes(self, p: Problem) -> int:
        """The least that must move: every input is read once, every output is written once."""
        read = sum(prod(p.shape(axes)) for axes in self.inputs.values()) * p.itemsize
        sizes = {"scalar": p.itemsize, "real": p.dtype.sums.itemsize}
        written = (prod(p.shape(axes)) * sizes[kind] for axes, kind in self.outputs.values())
        return read + sum(written)


def visible_scores(p: Problem) -> int:
    """How many (query, key) pairs the mask lets through, per head."""
    if p.causal is None:
        return p.M * p.N
    # Row i sees clamp(i + diagonal + 1, 0, N) keys: none before `first`, all N from `full` on.
    first = min(max(-p.diagonal, 0), p.M)
    full = min(max(p.N - p.diagonal - 1, first), p.M)
    ramp = (full - first) * (first + full - 1 + 2 * (p.diagonal + 1)) // 2
    return ramp + (p.M - full) * p.N


def _expected_attention(
    inputs: Arrays, p: Problem, roundings: Sequence[str | None], window: Window | None = None
) -> dict[str | None, dict[str, Expected]]:
    q, k, v = inputs["Q"], inputs["K"], inputs["V"]
    first = 0
    if window:
        keys = Window(window.batch, window.head // p.group, slice(None))
        q, k, v = window.of(q), keys.of(k), keys.of(v)
        first = window.rows.start
    return tolerance.expected_attention_of_each(
        q,
        k,
        v,
        scale=p.scale,
        diagonal=p.diagonal + first if p.causal else None,
        dtype=p.dtype.name,
        roundings=roundings,
    )


def _expected_softmax(
    inputs: Arrays, p: Problem, roundings: Sequence[str | None], window: Window | None = None
) -> dict[str | None, dict[str, Expected]]:
    scores = window.of(inputs["S"]) if window else inputs["S"]
    return dict.fromkeys(roundings, tolerance.expected_softmax(scores, dtype=p.dtype.name))


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            name="softmax",
            inputs={"S": "batch heads M N"},
            outputs={"P": ("batch heads M N", "scalar"), "lse": ("batch heads M", "real")},
            reference=_expected_softmax,
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
            reference=_expected_attention,
            flops=lambda p: 2 * p.batch * p.heads * visible_scores(p) * (p.d + p.dv),
        ),
    )
}
