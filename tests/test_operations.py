"""What an operation counts."""

import pytest

from cupyfa import Problem
from cupyfa.operations import OPERATIONS, visible_scores


@pytest.mark.parametrize("causal", [False, "bottom-right", "top-left"])
@pytest.mark.parametrize("M, N", [(1, 1), (5, 5), (5, 9), (9, 5), (7, 0), (0, 7), (20, 3)])
def test_visible_scores_are_counted_by_the_mask(M, N, causal):
    p = Problem.of_sizes(M=M, N=N, d=4, causal=causal)
    seen = [p.causal is None or j <= i + p.causal_offset for i in range(M) for j in range(N)]
    assert visible_scores(p) == sum(seen)


def test_flops_count_both_products():
    p = Problem.of_sizes(M=10, N=20, d=8, dv=4, batch=2, heads=3)
    assert OPERATIONS["forward"].flops(p) == 2 * 3 * 10 * 20 * (2 * 8 + 2 * 4)
