"""Rounds over heads of the baselines, which bound their scratch memory."""

from dataclasses import replace

import pytest
from helpers.problems import check_case, inputs_of, name, planned, require_same_bits

from cupyfa import Problem
from cupyfa.lab.analysis.roofline_model import planned_bytes
from cupyfa.ladder import LADDER
from cupyfa.planner import choose_kernel as planning
from cupyfa.planner.head_rounds import RoundSizes, head_rounds
from cupyfa.problem.optional_inputs import DLSE, SINK
from cupyfa.runtime import guard
from cupyfa.runtime.simulator import Simulator

BASELINE = LADDER["backward"]["baseline_backward"]
KERNELS = (BASELINE, LADDER["forward"]["baseline"], LADDER["forward"]["baseline_online"])
SIZES = {"batch": 3, "heads": 4, "kv_heads": 2, "M": 21, "N": 18, "d": 8}
# Sizes that differ from SIZES, options, and the number of key heads in a round.
CASES = (
    ({}, 1),
    ({"heads": 10, "kv_heads": 5}, 3),  # rounds of 3 and 2 heads of a batch element
    ({"batch": 5}, 4),  # rounds of 2 batch elements and 1
    ({"heads": 2}, 1),
    ({"kv_heads": 1, "dtype": "float64"}, 1),
    ({"dtype": "float16", "out_dtype": "float32", "dv": 5}, 1),
    ({"causal": True, "layout": "bshd"}, 1),
    ({"window": (9, 2), "layout": "reversed", "values": "nan"}, 1),
    ({"softcap": 2.0, "scale": -0.4, "layout": "gaps"}, 1),
    ({SINK: "h", DLSE: True, "wrt": ("q", "k", "v", SINK)}, 1),
    ({"M": 0}, 1),
    ({"N": 0}, 1),
    ({"batch": 0}, 1),
)


def of_rounds(heads, members=2**31, rows=2**31, kernel=BASELINE):
    """Returns the kernel with rounds of at most so many key heads, query heads or rows."""
    return replace(
        kernel,
        round_heads=lambda p, c: heads,
        round_group=lambda p, c: members,
        round_rows=lambda p, c: rows,
    )


@pytest.mark.parametrize("changed, heads", CASES, ids=name)
def test_rounds_do_not_change_a_bit(changed, heads):
    sizes, backend = {**SIZES, **changed}, Simulator()
    how = {x: sizes.pop(x) for x in ("layout", "values") if x in sizes}
    dtype = sizes.pop("dtype", "float32")
    plans = [planned(of_rounds(x), backend, sizes, dtype) for x in (2**31, heads)]
    whole, rounds = (len(x.steps) for x in plans)
    assert rounds > whole or not sizes["batch"]
    results = [guard.checked(backend, x, inputs_of(x, **how), {}) for x in plans]
    require_same_bits(*results)


# Sizes that differ from SIZES, options, and the largest numbers of query heads and rows in a round.
SHARES = (
    ({"heads": 6}, 2, 21),  # rounds of 2 and 1 heads of a group
    ({"kv_heads": 1, "dtype": "float64"}, 3, 21),
    ({"dtype": "float16", "out_dtype": "float32", "dv": 5}, 1, 21),
    ({"dtype": "float64"}, 1, 8),  # rounds of 7 rows
    ({"causal": True, "layout": "bshd", "values": "nan"}, 1, 20),  # of 11 and 10
    ({"window": (9, 2), "kv_heads": 1, "values": "nan"}, 2, 10),  # of all rows of two heads
    ({"window": (9, 2), "causal": "top-left", "values": "nan"}, 1, 10),
    ({"M": 0}, 1, 5),
)


@pytest.mark.parametrize("kernel", KERNELS, ids=name)
@pytest.mark.parametrize("changed, members, rows", SHARES, ids=name)
def test_rounds_may_have_shares_of_a_group_or_of_rows(changed, members, rows, kernel):
    sizes = {**SIZES, **changed}
    how = {x: sizes.pop(x) for x in ("layout", "values") if x in sizes}
    dtype = sizes.pop("dtype", "float32")
    shared = of_rounds(1, members, rows, kernel)
    plans = [planned(x, Simulator(), sizes, dtype) for x in (of_rounds(1, kernel=kernel), shared)]
    whole, shares = (len(x.steps) for x in plans)
    assert shares > whole
    check_case(shared, Simulator(), sizes, dtype, **how)


@pytest.mark.parametrize(
    "dtype, sizes, rounds",
    [
        ("float16", {"kv_heads": 2, "M": 4096}, 2),
        ("float16", {"kv_heads": 2, "M": 4096, "out_dtype": "float32"}, 6),
        ("float16", {"heads": 1, "M": 16384}, 1),
        ("float16", {"heads": 1, "M": 16384, "out_dtype": "float32"}, 5),
    ],
    ids=name,
)
def test_nothing_is_divided_if_gradients_would_be_rounded_several_times(dtype, sizes, rounds):
    problem = Problem.of_sizes(**{"heads": 16, "d": 128, "dtype": dtype, **sizes})
    plan = planning.plan(BASELINE, problem, Simulator().limits)
    assert sum(x.entry == "score_gradients" for x in plan.launches) == rounds


def of_problem(most, **changed):
    return head_rounds(Problem.of_sizes(**{**SIZES, **changed}), RoundSizes(*most))


def test_rounds_have_almost_equally_many_heads_of_whole_groups():
    def sizes(most, **changed):
        found = of_problem((most, 2**31, 1), **changed)
        assert all(not x.continues and x.members == range(x.group) for x in found)
        assert all(x.rows == range(SIZES["M"]) for x in found)
        return [x.sizes[:2] for x in found]

    assert sizes(1) == [(1, 1)] * 6
    assert sizes(2) == sizes(3) == [(1, 2)] * 3
    assert sizes(4) == [(2, 2), (1, 2)]
    assert sizes(6) == sizes(10**9) == [(3, 2)]
    assert sizes(7, batch=2, heads=8, kv_heads=8) == [(1, 4)] * 4
    assert sizes(3, batch=0) == [(0, 2)]
    assert sizes(3, heads=0, kv_heads=0) == [(3, 0)]
    last = of_problem((1, 2, 1))[-1]
    assert last.slices("batch heads d") == (slice(2, 3), slice(2, 4), slice(None))
    assert last.slices("batch kv_heads N d")[:2] == (slice(2, 3), slice(1, 2))


def test_shares_of_a_key_head_follow_one_another():
    found = of_problem((1, 5, 1), batch=1, heads=14)
    assert [x.sizes for x in found] == [(1, 1, 4, 21), (1, 1, 3, 21)] * 2
    assert [x.continues for x in found] == [False, True, False, True]
    heads = [x.slices("heads kv_heads") for x in found]
    starts, key_heads = [0, 4, 7, 11, 14], [0, 0, 1, 1]
    expected = zip(starts, starts[1:], key_heads)
    assert heads == [(slice(x, y), slice(z, z + 1)) for x, y, z in expected]
    assert found[-1].at_start.slices("heads kv_heads") == (slice(0, 3), slice(0, 1))
    assert [x.sizes for x in of_problem((2, 5, 1), batch=1, heads=14)] == [(1, 2, 7, 21)]


def test_rows_of_a_single_head_are_divided():
    found = of_problem((1, 1, 10), batch=1)
    assert [x.continues for x in found] == [i % 6 > 0 for i in range(12)]
    rows = [x.slices("heads M N") for x in found[:4]]
    parts = [slice(0, 7), slice(7, 14), slice(14, 21)]
    assert rows == [(slice(i // 3, i // 3 + 1), parts[i % 3], slice(None)) for i in range(4)]
    assert found[1].at_start.slices("M") == (slice(0, 7),)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("M, d", [(512, 1024), (1024, 256), (2048, 64), (4096, 256)])
def test_scratch_is_bounded_and_rounds_move_the_same_bytes(dtype, M, d):
    usual = Simulator().limits
    problem = Problem.of_sizes(batch=8, heads=16, M=M, d=d, dtype=dtype)
    plan = planning.plan(BASELINE, problem, usual)
    whole = planning.plan(of_rounds(2**31), problem, usual)
    assert plan.scratch_bytes < 2**30 < whole.scratch_bytes
    assert planned_bytes(plan) == planned_bytes(whole)


@pytest.mark.parametrize("kernel", KERNELS, ids=name)
@pytest.mark.parametrize("M, N", [(16384, 16384), (100_000, 3000), (2000, 60_000)])
def test_scratch_of_a_long_head_is_bounded(kernel, M, N):
    problem = Problem.of_sizes(M=M, N=N, d=64, dtype="float64", causal=True)
    plan = planning.plan(kernel, problem, Simulator().limits)
    of_scores = {name: shape for name, (shape, _) in plan.scratch.items() if name in "S dP"}
    assert all(256 <= rows < M and keys == N for *_, rows, keys in of_scores.values())
    assert plan.scratch_bytes < 2**30
