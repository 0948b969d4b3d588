"""Rounds over heads of `baseline_backward`, which bound its scratch memory."""

from dataclasses import replace

import pytest
from helpers.problems import inputs_of, name, planned, require_same_bits

from cupyfa import Problem
from cupyfa.lab.analysis.roofline_model import planned_bytes
from cupyfa.ladder import LADDER
from cupyfa.planner import choose_kernel as planning
from cupyfa.planner.head_rounds import head_rounds
from cupyfa.problem.optional_inputs import DLSE, SINK
from cupyfa.runtime import guard
from cupyfa.runtime.simulator import Simulator

BASELINE = LADDER["backward"]["baseline_backward"]
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


def of_rounds(heads):
    return replace(BASELINE, round_heads=lambda p, c: heads)


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


def test_rounds_have_almost_equally_many_heads_of_whole_groups():
    def sizes(most, **changed):
        found = head_rounds(Problem.of_sizes(**{**SIZES, **changed}), most)
        return [x.sizes for x in found]

    assert sizes(1) == [(1, 1)] * 6
    assert sizes(2) == sizes(3) == [(1, 2)] * 3
    assert sizes(4) == [(2, 2), (1, 2)]
    assert sizes(6) == sizes(10**9) == [(3, 2)]
    assert sizes(7, batch=2, heads=8, kv_heads=8) == [(1, 4)] * 4
    assert sizes(3, batch=0) == [(0, 2)]
    assert sizes(3, heads=0, kv_heads=0) == [(3, 0)]
    last = head_rounds(Problem.of_sizes(**SIZES), 1)[-1]
    assert last.slices("batch heads M") == (slice(2, 3), slice(2, 4), slice(None))
    assert last.slices("batch kv_heads N d")[:2] == (slice(2, 3), slice(1, 2))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("M, d", [(512, 1024), (1024, 256), (2048, 64), (4096, 256)])
def test_scratch_is_bounded_and_rounds_move_the_same_bytes(dtype, M, d):
    usual = Simulator().limits
    problem = Problem.of_sizes(batch=8, heads=16, M=M, d=d, dtype=dtype)
    plan = planning.plan(BASELINE, problem, usual)
    whole = planning.plan(of_rounds(2**31), problem, usual)
    assert plan.scratch_bytes < 2**30 < whole.scratch_bytes
    assert planned_bytes(plan) == planned_bytes(whole)
