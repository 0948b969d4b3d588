"""Judging results: all of them, or a sample of rows where the reference would take long."""

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

_WORK = 2e9  # products of scores that the reference makes in about a second
_LEAST_WIDTH = 32  # products that the rest of its work on a score is worth
_OF_GRADIENTS = 4  # times the forward pass's work on a score
_OF_ELEMENT = 40  # products that its work on an element of the arrays is worth
_ROWS = 64  # of an excerpt


@dataclass(frozen=True)
class Sample:
    """What some rows of every output should be: excerpts, or [None] for all rows."""

    operation: Operation
    problem: Problem
    excerpts: Sequence[Excerpt | None]
    expected: Sequence[Mapping[str, Expected]]

    @property
    def share(self) -> float:
        """The fraction of all rows that are in the sample."""
        if self.excerpts == [None]:
            return 1.0
        p = self.problem
        rows = {
            (w.batch, w.head, i)
            for w in self.excerpts
            if w is not None
            for i in range(w.rows.start, w.rows.stop)
        }
        return len(rows) / (p.batch * p.heads * p.M)

    def largest_bound(self, name: str) -> float:
        """The largest finite bound of an output's elements."""
        return max(
            float(x[name].bound.max(initial=0.0, where=np.isfinite(x[name].bound)))
            for x in self.expected
        )


def sample(
    plan: Plan, inputs: Arrays, rounding: str | None, excerpts: Sequence[Excerpt | None]
) -> Sample:
    """What the reference says of these excerpts, for kernels that round so."""
    operation, p = OPERATIONS[plan.kernel.operation], plan.problem
    expected = [operation.expected(inputs, p, rounding, excerpt) for excerpt in excerpts]
    return Sample(operation, p, excerpts, expected)


def excerpts(p: Problem, seed: int, operation: str = "forward") -> list[Excerpt | None]:
    """The excerpts to judge a problem by: [None], all of it, if that is quick.

    The first and the last rows of the first and the last head, and others by the seed, two or as
    many as are quick.
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
    if gradients:  # an excerpt has keys too, which all rows of a group read
        keys = min(_ROWS, p.N)
        each += work(keys * p.M * p.group, keys + p.M * p.group)
    pick = random.Random(seed)
    last = p.M - _ROWS
    corners = ((0, 0), (p.batch - 1, p.heads - 1))
    places = [(batch, head, row) for batch, head in corners for row in (0, last)]
    others = max(2, int(_WORK / each) - len(places))
    places += [
        (pick.randrange(p.batch), pick.randrange(p.heads), pick.randrange(last + 1))
        for _ in range(others)
    ]
    return [
        Excerpt(batch, head, slice(row, row + _ROWS)) for batch, head, row in sorted(set(places))
    ]


def judge(results: Arrays, expected: Sample, *, finite: bool = True) -> list[Verdict]:
    """The worst verdict on each output. Outside the sample, NaN is wrong if ``finite``."""
    return [_worst(name, array, expected, finite) for name, array in results.items()]


def _worst(name: str, array: np.ndarray, expected: Sample, finite: bool) -> Verdict:
    verdicts = []
    for chosen, values in zip(expected.excerpts, expected.expected):
        excerpt = chosen and expected.operation.place(name, chosen, expected.problem)
        (verdict,) = tolerance.compare({name: excerpt.of(array) if excerpt else array}, values)
        verdicts.append(_placed(verdict, excerpt))
    if finite and expected.excerpts != [None]:
        empty = np.isnan(array)
        if empty.any():
            index = np.unravel_index(int(empty.argmax()), array.shape)
            place = tuple(int(i) for i in index)
            count = int(empty.sum())
            verdicts.append(Verdict(name, inf, 0.0, inf, place, nan, nan, count))
    return max(verdicts, key=lambda verdict: verdict.ratio)


def _placed(verdict: Verdict, excerpt: Excerpt | None) -> Verdict:
    """The verdict with the index that its element has in the whole array."""
    if excerpt is None or not verdict.index:
        return verdict
    row = verdict.index[2] + excerpt.rows.start
    return replace(verdict, index=(excerpt.batch, excerpt.head, row, *verdict.index[3:]))
