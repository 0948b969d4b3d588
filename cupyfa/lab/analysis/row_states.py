"""Computes, in NumPy, a row's intermediate results after each tile: m, l and O, or gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from cupyfa.lab.verify.case import Case
from cupyfa.ladder.operations import tiles_of_scores
from cupyfa.numerics import reference
from cupyfa.problem.problem import Problem

_SHOWN = 4  # number of elements shown of each array
_Arrays = Mapping[str, np.ndarray]
_State = dict[str, list[str]]


def states(
    case: Case, index: int, of_keys: bool, starts: Sequence[int], size: int
) -> Iterator[_State] | None:
    """Returns a row's intermediate results after each tile, in the first head.

    Each tile begins at one of ``starts`` and contains ``size`` keys. The results are the state of
    the online softmax or, for a backward pass, the row's dQ. With ``of_keys`` they are a key's dK
    and dV after each tile of rows. Returns None for ragged batches, pages, dropout and arrays that
    modify scores.
    """
    p = case.problem
    if p.is_ragged or p.pages or p.options.dropout:
        return None
    inputs = case.inputs()
    if any(x.startswith("mods.") for x in inputs):
        return None
    parts = [slice(start, start + size) for start in starts]
    if case.operation == "backward":
        return _gradients(inputs, p, index, of_keys, parts)
    if case.operation == "softmax":
        return _online_softmax(_first_head(inputs["S"])[index], None, parts)
    return _online_softmax(_scores(inputs, p, index), _first_head(inputs["V"]), parts)


def _first_head(array: np.ndarray) -> np.ndarray:
    """Returns the first head of the first batch element, in float64."""
    return array[0, 0].astype(np.float64)


def _rounded(**values: float | np.ndarray) -> _State:
    """Formats numbers, and the first elements of arrays, with four significant digits."""
    return {
        name: [f"{x:.4g}" for x in np.atleast_1d(value)[:_SHOWN].tolist()]
        for name, value in values.items()
    }


def _scores(inputs: _Arrays, p: Problem, row: int) -> np.ndarray:
    """Computes a row's scores; scores of masked keys are -inf."""
    scores = np.full(p.N, -np.inf)
    for tile in tiles_of_scores(inputs, p):
        heads, rows = tile.where
        if heads.start == 0 and rows.start <= row < rows.stop:
            scores[tile.keys] = reference.masked_scores(tile)[0, row - rows.start]
    return scores


def _online_softmax(
    scores: np.ndarray, V: np.ndarray | None, parts: Sequence[slice]
) -> Iterator[_State]:
    maximum, total, sums = -np.inf, 0.0, 0.0
    for part in parts:
        S = scores[part]
        before, maximum = maximum, max(maximum, S.max(initial=-np.inf))
        if maximum == -np.inf:
            factor, P = 1.0, np.zeros_like(S)  # the row sees no key yet
        else:
            factor, P = np.exp(before - maximum), np.exp(S - maximum)
        total = total * factor + P.sum()
        state = {"S": S, "m": maximum, "factor": factor, "P": P, "l": total}
        if V is not None:
            sums = sums * factor + P @ V[part]
            state |= {"O": sums, "O / l": sums / total if total else sums}
        yield _rounded(**state)


def _gradients(
    inputs: _Arrays, p: Problem, index: int, of_keys: bool, parts: Sequence[slice]
) -> Iterator[_State]:
    P, dS = np.zeros((2, p.M, p.N))
    grad, out, lse = (reference.flat(inputs[x]).astype(np.float64) for x in ("dO", "O", "lse"))
    for tile in tiles_of_scores(inputs, p):
        heads, rows = tile.where
        if heads.start == 0:
            given = grad[heads, rows], out[heads, rows], lse[heads, rows]
            found = reference.differentiate(tile, *given, np.zeros(1))
            P[rows, tile.keys], dS[rows, tile.keys] = found.P[0], found.dS[0]
    Q, K, dO = (_first_head(inputs[x]) for x in ("Q", "K", "dO"))
    dQ = dK = dV = 0.0
    for part in parts:
        if of_keys:
            dV = dV + P[part, index] @ dO[part]
            dK = dK + dS[part, index] @ Q[part] * p.scale
            yield _rounded(P=P[part, index], dS=dS[part, index], dV=dV, dK=dK)
        else:
            dQ = dQ + dS[index, part] @ K[part] * p.scale
            yield _rounded(P=P[index, part], dS=dS[index, part], dQ=dQ)
