"""Compares results with the reference: on all rows or, if that is too slow, on a sample."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, nan

import numpy as np

from cupyfa.lab.verify import transforms
from cupyfa.ladder.operations import Arrays, Excerpt, Operation, without_pages
from cupyfa.numerics import tolerance
from cupyfa.numerics.tolerance import Expected, Verdict
from cupyfa.planner.plan import Plan
from cupyfa.problem.lengths import pairs_of
from cupyfa.problem.problem import Problem
from cupyfa.runtime.arrays import readable_inputs

_WORK = 2e9  # multiply-adds that the reference computes in about a second
# Cost model of the reference, in multiply-adds:
_LEAST_WIDTH = 32  # minimum cost of a score
_OF_GRADIENTS = 4  # cost of a score in the gradients, relative to the forward pass
_OF_ELEMENT = 40  # cost of an array element
_OF_EXCERPT = 1e7  # cost of an excerpt, of any size
_ROWS = 64  # rows per excerpt
_SEQUENCES = 4  # number of sequences of a ragged batch that `smaller` keeps


@dataclass
class Judge:
    """Compares results with the reference, which is computed once per rounding.

    excerpts: the excerpts to compare; None stands for all rows.
    """

    operation: Operation
    problem: Problem
    inputs: Arrays
    excerpts: Sequence[Excerpt | None] = (None,)
    _known: dict[str | None, list[Mapping[str, Expected]]] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, plan: Plan, inputs: Arrays, excerpts: Sequence[Excerpt | None] = (None,)) -> Judge:
        """Returns a judge for this plan and for plans of the same problem that share its reference.

        If the kernel has its own reference, all rows are judged.
        """
        readable = readable_inputs(plan, inputs)
        chosen = (None,) if plan.kernel.reference else excerpts
        return cls(plan.operation, plan.problem, readable, chosen)

    def expected(self, *roundings: str | None) -> list[list[Mapping[str, Expected]]]:
        """Returns, per rounding, the expected values of all excerpts.

        One call for several roundings is faster, because most of the work is done only once.
        """
        if new := [x for x in dict.fromkeys(roundings) if x not in self._known]:
            (inputs, p), reference = self._dense, self.operation.reference
            found = [reference(inputs, p, new, excerpt) for excerpt in self.excerpts]
            self._known |= {rounding: [each[rounding] for each in found] for rounding in new}
        return [self._known[rounding] for rounding in roundings]

    @cached_property
    def _dense(self) -> tuple[Arrays, Problem]:
        """The inputs and the problem with pages gathered once for all excerpts."""
        p = self.problem
        gathers = p.pages and not p.modifiers.is_e4m3  # scales may be of pages
        return without_pages(self.inputs, p) if gathers else (self.inputs, p)

    def at(self, name: str, index: Sequence[int]) -> Judge:
        """Returns a judge for a single element of an output."""
        return replace(self, excerpts=[self.operation.excerpt_at(name, index, self.problem)])

    @property
    def share(self) -> float:
        """The fraction of rows that are judged."""
        p, chosen = self.problem, [x for x in self.excerpts if x]
        rows = {(x.batch, x.head, i) for x in chosen for i in range(x.rows.start, x.rows.stop)}
        return len(rows) / (p.batch * p.heads * p.M) if rows else 1.0

    def largest_bound(self, name: str, rounding: str | None) -> float:
        """Returns the largest finite error bound among an output's elements."""
        bounds = (x[name].bound for x in self.expected(rounding)[0])
        return max(float(x.max(initial=0.0, where=np.isfinite(x))) for x in bounds)

    def verdicts(
        self, results: Arrays, rounding: str | None = None, *, finite: bool = True
    ) -> tuple[Verdict, ...]:
        """Returns the worst verdict on each output.

        If ``finite``, elements outside the excerpts must not be NaN.
        """
        return tuple(self._worst(name, x, rounding, finite) for name, x in results.items())

    def _worst(self, name: str, array: np.ndarray, rounding: str | None, finite: bool) -> Verdict:
        verdicts = []
        for chosen, values in zip(self.excerpts, self.expected(rounding)[0]):
            excerpt = chosen and self.operation.place(name, chosen, self.problem)
            (verdict,) = tolerance.compare({name: excerpt.of(array) if excerpt else array}, values)
            if excerpt and verdict.index:  # make the index relative to the whole array
                row = verdict.index[2] + excerpt.rows.start
                index = excerpt.batch, excerpt.head, row, *verdict.index[3:]
                verdict = replace(verdict, index=index)
            verdicts.append(verdict)
        if finite and None not in self.excerpts and (empty := np.isnan(array)).any():
            first = tuple(map(int, np.argwhere(empty)[0]))
            verdicts.append(Verdict(name, inf, 0.0, inf, first, nan, nan, int(empty.sum())))
        return max(verdicts, key=lambda verdict: verdict.ratio)


def excerpts(p: Problem, seed: int, operation: str = "forward") -> list[Excerpt | None]:
    """Returns the excerpts to judge: [None], which stands for all rows, if the reference is quick.

    Otherwise they are the first and last rows of the first and last head, plus at least two random
    excerpts. Gradients of score-modifying arrays sum over all rows, so all rows are judged, as are
    all rows of padded batches without a cache.
    """
    gradients = operation == "backward"
    width = max(p.d + p.dv, _LEAST_WIDTH) * (_OF_GRADIENTS if gradients else 1)
    columns = _OF_ELEMENT * (p.d + p.dv)

    def work(scores: int, rows: int) -> int:
        return scores * width + rows * columns

    whole = work(p.heads * p.pairs, p.batch * (p.heads * p.M + p.kv_heads * p.N))
    is_padded = p.is_ragged and p.sequences is None and p.cached is None
    if whole <= _WORK or not p.M or (gradients and p.wrt) or is_padded:
        return [None]
    M, N = map(max, zip((0, 0), *pairs_of(*p.lengths))) if p.lengths else (p.M, p.N)
    height = min(_ROWS, p.M)
    each = _OF_EXCERPT + work(height * N, height + N)
    if gradients:  # an excerpt of dK and dV depends on all query rows of its key head
        keys = min(_ROWS, N)
        each += work(keys * M * p.group, keys + M * p.group)
    pick, last = random.Random(seed), p.M - height
    corners = ((0, 0), (p.batch - 1, p.heads - 1))
    places = [(batch, head, row) for batch, head in corners for row in (0, last)]
    for _ in range(max(2, int(_WORK / each) - len(places))):
        place = pick.randrange(p.batch), pick.randrange(p.heads), pick.randrange(last + 1)
        places.append(place)
    return [Excerpt(b, head, slice(row, row + height)) for b, head, row in sorted(set(places))]


def smaller(plan: Plan) -> Problem:
    """Returns a smaller problem that is quick to check; its sizes are not multiples of a tile."""
    p, largest = plan.problem, max(plan.constants.values(), default=32)
    if p.is_softmax:
        return replace(p, M=min(p.M, 37), N=min(p.N, 1051))
    kv_heads, group = min(p.kv_heads, 2), min(p.group, 2)
    heads, M, N = kv_heads * group, min(p.M, largest + 37), min(p.N, 2 * largest + 51)
    if p.lengths:
        q, k = (x.first(_SEQUENCES).limited(n) for x, n in zip(p.lengths, (M, N)))
        return transforms.make_ragged(p, (q, k), heads=heads, kv_heads=kv_heads)
    return transforms.resize(p, batch=min(p.batch, 1), heads=heads, kv_heads=kv_heads, M=M, N=N)
