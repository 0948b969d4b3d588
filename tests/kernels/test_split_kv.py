"""The rung mma_split_kv: keys split among blocks, and the launch that merges their results."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.problems import FORWARD, check_case, inputs_of, name, planned, require_same_bits

from cupyfa import Problem
from cupyfa.lab.analysis.resources import limits_of
from cupyfa.planner import choose_kernel as planning
from cupyfa.runtime import guard
from cupyfa.runtime.simulator import Simulator

SPLIT = FORWARD["mma_split_kv"]
H100 = limits_of("90")
SMALL = {"Br": 16, "Bc": 16, "Wr": 16, "stages": 3}
# With many blocks_per_sm, some of these problems have more splits than visible tiles of keys; with
# blocks_per_sm = 1, all problems have a single split.
SIZES = (
    {"heads": 16, "M": 1, "N": 70, "d": 24},
    {"heads": 32, "kv_heads": 8, "M": 1, "N": 130, "d": 64},
    {"heads": 3, "kv_heads": 1, "M": 40, "N": 90, "d": 40, "causal": True},
    {"heads": 2, "M": 1, "N": 70, "d": 33, "dv": 9},
    {"heads": 2, "kv_heads": 1, "M": 5, "N": 333, "d": 20, "window": (9, 3)},
    {"heads": 2, "kv_heads": 1, "M": 33, "N": 100, "d": 16, "window": (20, None)},
    {"heads": 1, "M": 64, "N": 300, "d": 40, "dv": 72, "causal": "top-left", "scale": -2.0},
    {"heads": 1, "M": 40, "N": 7, "d": 16, "causal": True},
    {"heads": 1, "M": 1, "N": 200, "d": 256, "scale": 0.0},
    {"heads": 2, "M": 3, "N": 0, "d": 16},
)


def splits(plan):
    """Returns the number of splits, which is the same in all launches of a plan."""
    (found,) = {launch.numbers["num_splits"] for launch in plan.launches if launch.numbers}
    return found


# A tile has 16 keys, which one warp computes, or 64 keys, which four warps share.
BLOCKS = [(sizes, (16, 64)[i % 2], (1, 3, 40)[i % 3]) for i, sizes in enumerate(SIZES)]


@pytest.mark.few(5)
@pytest.mark.parametrize("sizes, Bc, blocks", BLOCKS, ids=name)
def test_splits_are_merged(backend, sizes, Bc, blocks):
    tiles = {**SMALL, "Bc": Bc, "blocks_per_sm": blocks}
    check_case(SPLIT, backend, sizes, "float16", **tiles)


@pytest.mark.parametrize("M", [1, 16, 64])
def test_the_tiles_of_few_rows_are_right(backend, M):
    sizes = {"heads": 4, "kv_heads": 1, "M": M // 4 or 1, "N": 700, "d": 65, "causal": True}
    plan = planned(SPLIT, backend, sizes, "bfloat16")
    assert plan.constants["Br"] >= max(M, 4) and splits(plan) > 1
    guard.checked(backend, plan, inputs_of(plan), {})


def test_float32_inputs_are_rounded_first(backend):
    sizes = {"heads": 4, "kv_heads": 2, "M": 2, "N": 150, "d": 33}
    plan = planned(SPLIT, backend, sizes, "float32")
    assert [x.entry for x in plan.launches] == ["round_operands", "mma_split_kv", "merge_splits"]
    assert splits(plan) > 1
    guard.checked(backend, plan, inputs_of(plan), {})


def test_nonfinite_inputs_stay_in_their_rows(backend):
    """Nonfinite values are in early and late splits; some rows mask some of them."""
    sizes = {"heads": 2, "M": 20, "N": 300, "d": 24, "causal": True}
    plan = planned(SPLIT, backend, sizes, "float16", **SMALL, blocks_per_sm=5)
    assert splits(plan) > 3
    inputs = inputs_of(plan)
    inputs["Q"][:, 0, 3] = np.nan
    inputs["K"][:, 1, 290, 2] = np.nan
    inputs["V"][..., 5, 1] = np.inf
    inputs["V"][..., 150, 4] = np.nan
    inputs["V"][..., 285, 7:9] = -np.inf
    guard.checked(backend, plan, inputs, {})


def test_maxima_of_splits_may_lie_far_apart(backend):
    """A single split holds all the weight. There are more splits than a merge step reads."""
    sizes = {"heads": 1, "M": 2, "N": 600, "d": 16, "scale": 1.0}
    plan = planned(SPLIT, backend, sizes, "float16", **SMALL, blocks_per_sm=40)
    assert splits(plan) == 38
    for key in (0, 100, 599):
        inputs = inputs_of(plan)
        inputs["Q"][...] = 60
        inputs["K"][...] = np.abs(inputs["K"])
        inputs["K"][..., key, :] = 50
        guard.checked(backend, plan, inputs, {})


def test_results_are_the_same_bits_in_any_order_of_blocks():
    engine = Simulator()
    plan = planned(SPLIT, engine, {"heads": 2, "M": 5, "N": 300, "d": 24}, "float16")
    inputs = inputs_of(plan)
    assert splits(plan) > 1
    engines = engine, engine.reordered(1), engine.reordered(2)
    require_same_bits(*(guard.checked(x, plan, inputs, {}) for x in engines))


def h100(**sizes):
    problem = Problem.of_sizes(**{"d": 128, "dtype": "bfloat16", **sizes})
    return planning.plan(SPLIT, problem, H100)


DECODE = {"heads": 32, "kv_heads": 8, "M": 1}


@pytest.mark.parametrize("batch, N", [(1, 8192), (1, 131072), (4, 32768), (16, 8192), (128, 4096)])
def test_splits_are_the_fewest_of_those_that_take_hardly_longer(batch, N):
    plan = h100(batch=batch, N=N, **DECODE)
    tiles, at_a_time = -(-N // plan.constants["Bc"]), 132 * plan.constants["blocks_per_sm"]
    assert plan.launches[0].grid[0] == 8 * batch * splits(plan)

    def time(number):
        return -(-8 * batch * number // at_a_time) * (-(-tiles // number) + 1)

    times = {number: time(number) for number in range(1, 4 * at_a_time // (8 * batch) + 2)}
    enough = 1.05 * min(times.values())
    assert splits(plan) == min(number for number, took in times.items() if took <= enough)


@pytest.mark.parametrize("rows", [{"heads": 128, "M": 1}, {"heads": 8, "M": 64}])
@pytest.mark.parametrize("N", [2048, 8192, 131072])
def test_splits_of_many_rows_have_several_tiles(rows, N):
    plan = h100(kv_heads=1, N=N, **rows)
    assert 1 < splits(plan) <= N / plan.constants["Bc"] / 2


@pytest.mark.parametrize("batch, N", [(1, 131072), (16, 8192), (16, 4096)])
def test_two_blocks_per_sm_read_small_pages(batch, N):
    small, large = (h100(batch=batch, N=N, page_size=x, **DECODE) for x in (16, 64))
    assert small.constants == large.constants and large.constants["blocks_per_sm"] == 1
    assert large.launches[0].grid[0] <= 132 < small.launches[0].grid[0] <= 264


def test_few_small_pages_are_read_by_one_block_per_sm():
    small, large = (h100(N=8192, page_size=x, **DECODE) for x in (16, 64))
    assert splits(small) == splits(large)


def test_a_split_has_at_least_one_tile_of_visible_keys():
    Bc = h100(N=100, **DECODE).constants["Bc"]
    assert splits(h100(N=100, **DECODE)) == -(-100 // Bc)
    assert splits(h100(N=1, **DECODE)) == splits(h100(N=0, **DECODE)) == 1
    window = h100(N=131072, window=(256, 0), **DECODE)
    assert splits(window) == -(-(1 + 256) // Bc)
    assert splits(h100(N=131072, window=(256, None), **DECODE)) == 132 // 8


def test_a_single_split_needs_no_scratch_and_no_merge():
    plan = h100(batch=64, heads=64, M=300, N=300)
    assert splits(plan) == 1 and plan.scratch_bytes == 0
    assert [x.entry for x in plan.launches] == ["mma_split_kv"]
    several = h100(batch=1, N=8192, **DECODE)
    assert several.launches[1].grid == (32, 1, 1)
    assert several.scratch_bytes == 4 * 32 * splits(several) * (128 + 2)


@pytest.mark.parametrize(
    "sizes, is_taken",
    [
        ({"N": 8192, **DECODE}, True),
        ({"N": 4096, "batch": 128, **DECODE}, True),
        ({"N": 8192, **DECODE, "M": 16}, True),
        ({"N": 131072, "heads": 8, "M": 100}, True),
        ({"N": 8192, "d": 64, "dtype": "float32", "precision": "float16", **DECODE}, True),
        ({"N": 200, **DECODE}, False),
        ({"N": 131072, "window": (200, 0), **DECODE}, False),
        ({"N": 2048, "heads": 16, "M": 2048}, False),
        ({"N": 8192, "d": 264, **DECODE}, False),
        ({"N": 8192, "dtype": "float32", **DECODE}, False),
    ],
)
@pytest.mark.parametrize("arch", ["80", "90"])
def test_auto_takes_it_only_for_few_rows_and_many_keys(sizes, is_taken, arch):
    problem = Problem.of_sizes(**{"d": 128, "dtype": "float16", **sizes})
    chosen = planning.select("auto", "forward", problem, limits_of(arch))
    assert (chosen is SPLIT) == is_taken


# Microseconds on an H100 for this rung and wgmma_persistent, where one is slightly faster.
MEASURED = """
d     heads M    N     split persistent
64    16    1    512   5.2   5.9
64    128   1    1024  8.6   9.6
64    64    16   512   7.7   6.1
64    128   32   1024  10.5  9.8
64    1     128  512   5.8   5.9
64    4     128  512   6.9   5.8
64    8     128  1024  9.3   9.1
64    16    128  1024  14.7  9.1
64    4     1024 1024  17.0  9.3
64    6     256  2048  13.0  15.3
64    6     512  2048  20.4  15.3
64    4     1024 4096  27.5  28.6
64    4     1024 16384 67.3  103.2
128   16    16   512   6.7   7.1
128   64    1    1024  10.5  11.3
128   16    64   512   9.5   7.5
128   4     256  256   8.0   5.4
128   4     128  512   6.9   7.0
128   8     128  512   9.2   7.4
128   4     128  1024  8.2   10.9
128   4     512  1024  15.8  11.2
128   16    128  2048  19.3  19.1
128   8     128  4096  16.6  35.0
128   16    256  4096  46.1  35.7
256   16    16   1024  9.8   17.4
256   64    1    1024  28.9  26.1
256   1     128  512   7.2   10.4
256   8     128  1024  17.7  17.4
256   4     1024 1024  33.6  17.6
256   4     1024 4096  77.2  59.1
"""


@pytest.mark.parametrize("line", MEASURED.splitlines()[2:])
def test_auto_takes_the_faster_one_on_an_h100(line):
    d, heads, M, N, split, persistent = map(float, line.split())
    problem = Problem.of_sizes(heads=int(heads), M=int(M), N=int(N), d=int(d), dtype="bfloat16")
    times = {"mma_split_kv": split, "wgmma_persistent": persistent}
    chosen = planning.select("auto", "forward", problem, H100).name
    assert times[chosen] <= 1.05 * min(times.values())


def test_auto_does_not_take_it_without_measurements(monkeypatch):
    monkeypatch.setitem(FORWARD, SPLIT.name, replace(SPLIT, tflops={}))
    problem = Problem.of_sizes(N=8192, d=64, dtype="float16", **DECODE)
    assert planning.select("auto", "forward", problem, H100).name != SPLIT.name
