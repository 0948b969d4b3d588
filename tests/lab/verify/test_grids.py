"""Grids: their cases, and the pairs of values in samples."""

import random
from itertools import combinations, groupby
from operator import itemgetter

import numpy as np
import pytest
from helpers.cli import table
from helpers.problems import DTYPES

from cupyfa import Problem
from cupyfa.lab.verify import grids
from cupyfa.lab.verify.case import LAYOUTS, VALUES, Case

EVERY_GRID = pytest.mark.parametrize("grid", [x for x in grids.GRIDS if x != "fuzz"])
OPERATIONS = pytest.mark.parametrize("operation", ["forward", "softmax", "backward"])


def sizes_of(case):
    p = case.problem
    return p.batch, p.heads, p.kv_heads, p.M, p.N, p.d


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


@pytest.mark.slow
def test_sizes_of_flash_attentions_tests_are_there():
    for grid, rows in groupby(table("lab/verify/sizes.txt"), key=itemgetter(0)):
        cases = grids.cases(grid, "forward")
        assert {row[1] for row in rows} <= {", ".join(map(str, sizes_of(case))) for case in cases}
        assert set(grids.cases("edges", "forward")) <= set(cases)


def test_long_cases_are_not_fully_crossed():
    cases = grids.cases("fa2", "forward", dtypes=["float16", "bfloat16"])
    of_64 = [
        sizes_of(case)[1:5] for case in cases if case.problem.d == 64 and case.problem.left is None
    ]
    short = [sizes for sizes in of_64 if sizes[0] == 6 and sizes[2:] == (113, 203)]
    long = [sizes for sizes in of_64 if sizes[0] == 6 and sizes[2:] == (2048, 2048)]
    assert len(short) == 2 * 2 * 3 * 2  # masks, dtypes, shared keys, layouts
    assert len(long) == 2  # masks


@pytest.mark.parametrize("grid", ["edges", "fa2", "fa3"])
def test_windows_are_on_both_sides_on_one_and_under_every_mask(grid):
    problems = [case.problem for case in grids.cases(grid, "forward")]
    masks = {(p.causal, p.left is None, p.right is None) for p in problems}
    everywhere = {(causal, False, False) for causal in (None, "bottom-right", "top-left")}
    assert {*everywhere, (None, True, False), (None, False, True)} <= masks
    assert all(max(x or 0 for x in p.window) <= max(p.N, 1000) for p in problems)
    if grid in ("fa2", "fa3"):
        small = [p for p in problems if (p.M, p.N) == (113, 203) and p.left is not None]
        assert 20 < len(small) < 200 and len({p.window for p in small}) > 15


def test_head_dimensions_of_v_differ_in_fa3():
    pairs = {(x.problem.d, x.problem.dv) for x in grids.cases("fa3", "forward")}
    assert {(192, 128), (64, 256), (64, 512)} <= pairs


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
