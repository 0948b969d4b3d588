"""Shrinking: failing cases become smaller and still fail."""

from dataclasses import replace

from cupyfa import Problem
from cupyfa.lab.verify.case import Case
from cupyfa.lab.verify.shrink import shrunk

LARGE = Case(
    "forward",
    Problem.of_sizes(
        batch=3, heads=6, kv_heads=2, M=517, N=1235, d=96, dv=40, causal=True, scale=0.3
    ),
    seed=77,
    values="uniform",
    layout="gaps",
)
SMALLEST = Case("forward", Problem.of_sizes(M=1, N=1, d=1))


def test_irrelevant_fields_are_reduced():
    assert shrunk(LARGE, lambda case: True) == SMALLEST


def test_relevant_fields_stay():
    def fails(case):
        p = case.problem
        return p.N % 16 == 3 and p.causal is not None and p.group > 1 and case.layout == "gaps"

    found = shrunk(LARGE, fails)
    assert fails(found)
    p = found.problem
    assert (p.batch, p.heads, p.kv_heads, p.M, p.N, p.d, p.dv) == (1, 2, 1, 1, 3, 1, 1)
    assert (found.values, found.seed, p.scale) == ("normal", 0, 1.0)


def test_thresholds_are_found():
    found = shrunk(LARGE, lambda case: case.problem.N > 200 and case.problem.d >= 17)
    assert 200 < found.problem.N < 280
    assert found.problem.d == 17
    assert found.problem.scale == 17**-0.5


def test_minimal_cases_stay_unchanged():
    assert shrunk(LARGE, lambda case: False) == LARGE
    assert shrunk(SMALLEST, lambda case: True) == SMALLEST


def test_a_softmax_has_rows_and_columns():
    case = Case("softmax", Problem.of_row_sizes(70, 1000, "float16"), values="huge")
    found = shrunk(case, lambda case: case.problem.N >= 30)
    assert found == replace(case, values="normal", problem=Problem.of_row_sizes(1, 30, "float16"))


def test_tries_and_time_are_limited():
    tried = []
    shrunk(LARGE, lambda case: bool(tried.append(case)), tries=5)
    assert len(tried) == 5
    shrunk(LARGE, lambda case: bool(tried.append(case)), seconds=0)
    assert len(tried) == 5
