"""FLOPs, pairs and visible scores of operations."""

import pytest

from cupyfa import Problem
from cupyfa.ladder.operations import OPERATIONS, visible_scores


@pytest.mark.parametrize("causal", [False, "bottom-right", "top-left"])
@pytest.mark.parametrize("M, N", [(1, 1), (5, 5), (5, 9), (9, 5), (7, 0), (0, 7), (20, 3)])
def test_visible_scores_are_counted_by_the_mask(M, N, causal):
    p = Problem.of_sizes(M=M, N=N, d=4, causal=causal)
    seen = [p.causal is None or j <= i + p.causal_offset for i in range(M) for j in range(N)]
    assert visible_scores(p) == sum(seen)


def test_flops_count_both_products():
    p = Problem.of_sizes(M=10, N=20, d=8, dv=4, batch=2, heads=3)
    assert OPERATIONS["forward"].flops(p) == 2 * 3 * 10 * 20 * (2 * 8 + 2 * 4)


@pytest.mark.parametrize("causal", [False, "bottom-right", "top-left"])
def test_pairs_of_a_ragged_batch_are_those_of_each_sequence(causal):
    p = Problem.of_sizes(lengths="_2,5,0,9,3/7:9,4,5,20,_1", d=8, heads=3, causal=causal)
    each = [(5, 9), (0, 4), (9, 5), (3, 20)]
    parts = [Problem.of_sizes(M=M, N=N, d=8, heads=3, causal=causal) for M, N in each]
    assert p.pairs == sum(M * N for M, N in each)
    for name in ("forward", "backward", "tangent"):
        flops = OPERATIONS[name].flops
        assert flops(p) == sum(map(flops, parts))
