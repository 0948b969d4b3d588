"""Grids of check: the cases they generate, and the pairs of values that samples cover."""

import random
from itertools import combinations

import numpy as np
import pytest
from helpers.problems import DTYPES

from cupyfa import Problem
from cupyfa.lab.verify import checker, grids
from cupyfa.lab.verify.case import EXTREME, LAYOUTS, VALUES, Case

EVERY_GRID = pytest.mark.parametrize("grid", ["smoke", "edges"])
OPERATIONS = pytest.mark.parametrize("operation", ["forward", "softmax", "backward", "tangent"])


@EVERY_GRID
@OPERATIONS
def test_cases_are_of_the_operation_and_each_is_there_once(grid, operation):
    cases = grids.cases(grid, operation)
    assert {case.operation for case in cases} == {operation}
    assert len(set(cases)) == len(cases) >= 80


@EVERY_GRID
@OPERATIONS
def test_dtypes_replace_those_of_the_grid(grid, operation):
    cases = grids.cases(grid, operation, dtypes=["float32"])
    assert {case.problem.dtype.name for case in cases} == {"float32"}


@pytest.mark.few(4)
@EVERY_GRID
@OPERATIONS
def test_inputs_depend_on_the_seed(grid, operation):
    seeds = [{x.seed for x in grids.cases(grid, operation, seed=seed)} for seed in (0, 1)]
    assert not seeds[0] & seeds[1]


def test_the_smoke_grid_has_180_cases_for_each_dtype():
    cases = grids.cases("smoke", "forward")
    counts = {dtype: sum(x.problem.dtype.name == dtype for x in cases) for dtype in DTYPES}
    assert counts == dict.fromkeys(DTYPES, 180)


def test_windows_are_on_both_sides_on_one_and_under_every_mask():
    problems = [case.problem for case in grids.cases("edges", "forward")]
    masks = {(p.causal, p.left is None, p.right is None) for p in problems}
    everywhere = {(causal, False, False) for causal in (None, "bottom-right", "top-left")}
    assert {*everywhere, (None, True, False), (None, False, True)} <= masks
    assert all(max(x or 0 for x in p.window) <= max(p.N, 1000) for p in problems)


def test_edge_cases():
    cases = grids.cases("edges", "forward")
    for axis in ("batch", "heads", "M", "N", "d", "dv"):
        assert any(getattr(case.problem, axis) == 0 for case in cases), axis
    assert any(case.problem.batch * case.problem.heads > 65_535 for case in cases)
    assert {case.layout for case in cases} == set(LAYOUTS)
    assert {case.values for case in cases} == set(VALUES)
    assert {case.problem.causal for case in cases} == {None, "bottom-right", "top-left"}
    assert {1, 3, 257, 577, 1000, 1024} <= {case.problem.d for case in cases}
    assert any(case.problem.scale < 0 for case in cases)
    assert len(cases) < 420


def test_edges_of_ragged_batches():
    problems = [x.problem for x in grids.cases("edges", "forward") if x.problem.lengths]
    sides = [side for p in problems for side in p.lengths]
    assert any(0 in x.counts for x in sides) and any(x.used and x.used != x.rows for x in sides)
    assert any(x.before and x.after for x in sides)
    assert {x.options.causal for x in problems} == {None, "bottom-right", "top-left"}
    assert any(p.options.score_mod for p in problems)
    with_bias = grids.cases("edges", "forward", arrays={"bias": "1hmn"})
    assert with_bias and not any(x.problem.lengths for x in with_bias)
    given = grids.cases("edges", "forward", arrays={"lengths": "3,0:5,1"})
    assert {str(x.problem.lengths[1]) for x in given} == {"5,1"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_have_the_same_elements(layout):
    problem = Problem.of_sizes(batch=2, heads=4, kv_heads=2, M=5, N=7, d=3, dtype="float16")
    plain = Case("forward", problem).inputs()
    try:
        arranged = Case("forward", problem, layout=layout).inputs()
    except MemoryError:
        pytest.skip("the system gives out no addresses without memory behind them")
    for name, x in arranged.items():
        np.testing.assert_array_equal(x, plain[name])
        assert (layout == "bhsd") == (x.flags.c_contiguous and x.ctypes.data % 16 == 0)
        if layout == "far":
            assert x.strides[0] > 2**31 * x.itemsize


def pairs(cases):
    fields = [{**vars(x.problem), "values": x.values, "layout": x.layout} for x in cases]
    return {pair for one in fields for pair in combinations(one.items(), 2)}


def test_samples_cover_more_pairs_than_random_ones():
    everything = grids.cases("edges", "forward")
    chosen = grids.cases("edges", "forward", samples=40, seed=5)
    assert len(set(chosen)) == 40
    assert chosen == grids.cases("edges", "forward", samples=40, seed=5)
    by_chance = random.Random(5).sample(everything, 40)
    assert len(pairs(chosen)) > 1.1 * len(pairs(by_chance))


def test_more_samples_than_there_are():
    everything = grids.cases("smoke", "softmax")
    drawn = grids.cases("smoke", "softmax", samples=10_000)
    assert sorted(map(str, drawn)) == sorted(map(str, everything))


def test_softmax_rows_reach_20000_columns():
    columns = {case.problem.N for case in grids.cases("edges", "softmax")}
    assert {0, 1, 20_000} <= columns


def test_scores_beyond_float16_are_not_drawn_for_kernels_that_store_them():
    tasks = checker.tasks_of(["baseline", "fa2"], grid="edges", backend="simulator")
    extreme = [x for x in tasks if x.case.values in EXTREME]
    of_float16 = [x for x in extreme if x.case.problem.dtype.name == "float16"]
    assert of_float16 and all({*map(str, x.kernels)} == {"fa2"} for x in of_float16)
    assert any("baseline" in {*map(str, x.kernels)} for x in extreme)
