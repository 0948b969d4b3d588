"""Judging results: all of them, or a sample of rows where the reference would take long."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, nan

import numpy as np

from cupyfa import tolerance
from cupyfa.operations import OPERATIONS, Arrays, Window
from cupyfa.planning import Plan
from cupyfa.problem import Problem
from cupyfa.tolerance import Expected, Verdict

_WORK = 2e9  # products of scores that the reference makes in about a second
_LEAST_WIDTH = 32  # products that the rest of its work on a score is worth
_ROWS = 64  # of a window


@dataclass(frozen=True)
class Sample:
    """What some rows of every output should be: windows, or [None] for all rows."""

    problem: Problem
    windows: Sequence[Window | None]
    expected: Sequence[Mapping[str, Expected]]

    @property
    def share(self) -> float:
        """The fraction of all rows that are in the sample."""
        if self.windows == [None]:
            return 1.0
        p = self.problem
        rows = {
            (w.batch, w.head, i)
            for w in self.windows
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
    plan: Plan, inputs: Arrays, rounding: str | None, windows: Sequence[Window | None]
) -> Sample:
    """What the reference says of these windows, for kernels that round so."""
    expected = OPERATIONS[plan.kernel.operation].expected
    p = plan.problem
    return Sample(p, windows, [expected(inputs, p, rounding, window) for window in windows])


def windows(p: Problem, seed: int) -> list[Window | None]:
    """The windows to judge a problem by: [None], all of it, if that is quick.

    The first and the last rows of the first and the last head, and others by the seed, two or as
    many as are quick.
    """
    width = max(p.d + p.dv, _LEAST_WIDTH)
    if p.batch * p.heads * p.M * p.N * width <= _WORK or p.M <= _ROWS:
        return [None]
    pick = random.Random(seed)
    last = p.M - _ROWS
    corners = ((0, 0), (p.batch - 1, p.heads - 1))
    places = [(batch, head, row) for batch, head in corners for row in (0, last)]
    others = max(2, int(_WORK / (_ROWS * p.N * width)) - len(places))
    places += [
        (pick.randrange(p.batch), pick.randrange(p.heads), pick.randrange(last + 1))
        for _ in range(others)
    ]
    return [
        Window(batch, head, slice(row, row + _ROWS)) for batch, head, row in sorted(set(places))
    ]


def judge(results: Arrays, expected: Sample, *, finite: bool = True) -> list[Verdict]:
    """The worst verdict on each output. Outside the sample, NaN is wrong if ``finite``."""
    return [_worst(name, array, expected, finite) for name, array in results.items()]


def _worst(name: str, array: np.ndarray, expected: Sample, finite: bool) -> Verdict:
    verdicts = []
    for window, values in zip(expected.windows, expected.expected):
        (verdict,) = tolerance.compare({name: window.of(array) if window else array}, values)
        verdicts.append(_placed(verdict, window))
    if finite and expected.windows != [None]:
        empty = np.isnan(array)
        if empty.any():
            index = np.unravel_index(int(empty.argmax()), array.shape)
            place = tuple(int(i) for i in index)
            count = int(empty.sum())
            verdicts.append(Verdict(name, inf, 0.0, inf, place, nan, nan, count))
    return max(verdicts, key=lambda verdict: verdict.ratio)


def _placed(verdict: Verdict, window: Window | None) -> Verdict:
    """The verdict with the index that its element has in the whole array."""
    if window is None or not verdict.index:
        return verdict
    row = verdict.index[2] + window.rows.start
    return replace(verdict, index=(window.batch, window.head, row, *verdict.index[3:]))
