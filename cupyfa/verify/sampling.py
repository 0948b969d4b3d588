"""Judges results: all rows, or a sample of them where the reference would take long."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, nan

import numpy as np

from cupyfa.numerics import tolerance
from cupyfa.numerics.tolerance import Expected, Verdict
from cupyfa.operations import OPERATIONS, Arrays, Excerpt, Operation
from cupyfa.planner.plan import Plan
from cupyfa.problem import Problem

_WORK = 2e9  # multiply-adds of the reference in about a second
# The rest of the reference's work, in multiply-adds:
_LEAST_WIDTH = 32  # for a score
_OF_GRADIENTS = 4  # times the forward pass's work on a score
_OF_ELEMENT = 40  # for an element of the arrays
_ROWS = 64  # of an excerpt


@dataclass(frozen=True)
class Sample:
    """The expected elements of excerpts of every output, or of all rows for [None]."""

    operation: Operation
    problem: Problem
    excerpts: Sequence[Excerpt | None]
    expected: Sequence[Mapping[str, Expected]]

    @property
    def share(self) -> float:
        """The fraction of all rows that are in the sample."""
        rows = {
            (x.batch, x.head, i)
            for x in self.excerpts
            if x is not None
            for i in range(x.rows.start, x.rows.stop)
        }
        p = self.problem
        return len(rows) / (p.batch * p.heads * p.M) if rows else 1.0

    def largest_bound(self, name: str) -> float:
        """The largest finite bound of an output's elements."""
        bounds = (x[name].bound for x in self.expected)
        return max(float(x.max(initial=0.0, where=np.isfinite(x))) for x in bounds)


def samples(
    plan: Plan,
    inputs: Arrays,
    roundings: Sequence[str | None],
    excerpts: Sequence[Excerpt | None],
) -> dict[str | None, Sample]:
    """The sample for kernels of each rounding; the reference shares its work among them."""
    operation, p = OPERATIONS[plan.kernel.operation], plan.problem
    found = [operation.reference(inputs, p, roundings, excerpt) for excerpt in excerpts]
    return {r: Sample(operation, p, excerpts, [each[r] for each in found]) for r in roundings}


def excerpts(p: Problem, seed: int, operation: str = "forward") -> list[Excerpt | None]:
    """The excerpts to judge a problem by: [None], all of it, if that is quick.

    Otherwise the first and last rows of the first and last head, and random ones by the seed: at
    least two, and as many as are quick.
    """
    gradients = operation == "backward"
    width = max(p.d + p.dv, _LEAST_WIDTH) * (_OF_GRADIENTS if gradients else 1)
    columns = _OF_ELEMENT * (p.d + p.dv)

    def work(scores: int, rows: int) -> int:
        return scores * width + rows * columns

    in_all = p.batch * p.heads
    whole = work(in_all * p.M * p.N, in_all * p.M + p.batch * p.kv_heads * p.N)
    if whole <= _WORK or p.M <= _ROWS:
        return [None]
    each = work(_ROWS * p.N, _ROWS + p.N)
    if gradients:  # the excerpt of dK and dV needs all rows of a group
        keys = min(_ROWS, p.N)
        each += work(keys * p.M * p.group, keys + p.M * p.group)
    pick, last = random.Random(seed), p.M - _ROWS
    corners = ((0, 0), (p.batch - 1, p.heads - 1))
    places = [(batch, head, row) for batch, head in corners for row in (0, last)]
    places += [
        (pick.randrange(p.batch), pick.randrange(p.heads), pick.randrange(last + 1))
        for _ in range(max(2, int(_WORK / each) - len(places)))
    ]
    return [
        Excerpt(batch, head, slice(row, row + _ROWS)) for batch, head, row in sorted(set(places))
    ]


def judge(results: Arrays, expected: Sample, *, finite: bool = True) -> list[Verdict]:
    """The worst verdict on each output. If ``finite``, NaN outside the sample is wrong, too."""
    return [_worst(name, array, expected, finite) for name, array in results.items()]


def _worst(name: str, array: np.ndarray, expected: Sample, finite: bool) -> Verdict:
    verdicts = []
    for chosen, values in zip(expected.excerpts, expected.expected):
        excerpt = chosen and expected.operation.place(name, chosen, expected.problem)
        (verdict,) = tolerance.compare({name: excerpt.of(array) if excerpt else array}, values)
        if excerpt and verdict.index:  # the index in the whole array
            row = verdict.index[2] + excerpt.rows.start
            index = excerpt.batch, excerpt.head, row, *verdict.index[3:]
            verdict = replace(verdict, index=index)
        verdicts.append(verdict)
    if finite and expected.excerpts != [None] and (empty := np.isnan(array)).any():
        first = tuple(int(i) for i in np.argwhere(empty)[0])
        verdicts.append(Verdict(name, inf, 0.0, inf, first, nan, nan, int(empty.sum())))
    return max(verdicts, key=lambda verdict: verdict.ratio)
