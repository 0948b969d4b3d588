"""Packed query heads: heads with few queries share the rows of a tile."""

from itertools import product

import numpy as np
import pytest
from helpers.problems import usual_dtype

from cupyfa.lab.analysis.resources import limits_of
from cupyfa.lab.verify.case import Case
from cupyfa.ladder import LADDER
from cupyfa.planner import choose_kernel as planning
from cupyfa.problem.problem import Problem
from cupyfa.runtime import guard
from cupyfa.runtime.simulator import Simulator

FORWARD = LADDER["forward"]
PACKING = ["mma_pipelined", "mma_tf32", "mma_fp16x2"]
MASKS = [
    {},
    {"causal": "bottom-right"},
    {"causal": "top-left"},
    {"window": (9, 3)},
    {"causal": "bottom-right", "window": (5, None)},
]


def planned(kernel, limits, **sizes):
    sizes = {"batch": 2, "heads": 6, "kv_heads": 2, "d": 24, "dtype": usual_dtype(kernel), **sizes}
    return planning.plan(kernel, Problem.of_sizes(**sizes), limits)


def packing(plan):
    """Returns the launch that can pack several heads into a tile."""
    return next(x for x in plan.launches if "pack_gqa" in x.constants)


@pytest.mark.each_choice
@pytest.mark.parametrize("kernel", PACKING)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("M, N", [(1, 70), (5, 150), (13, 7), (40, 40)])
def test_packed_rows_are_right(backend, kernel, mask, M, N):
    plan = planned(FORWARD[kernel], backend.limits, M=M, N=N, **mask)
    half_filled = plan.constants["Br"] >= 2 * M  # Br depends on the device
    assert packing(plan).constants["pack_gqa"] == (3 if half_filled else 1)
    assert half_filled or M == 40
    guard.checked(backend, plan, Case("forward", plan.problem).inputs(), {})


@pytest.mark.parametrize("kernel", PACKING)
def test_heads_are_packed_if_one_fills_less_than_half_a_tile(kernel):
    for limits, M in product((Simulator().limits, limits_of("90")), (1, 13, 40, 64, 65, 300)):
        plan = planned(FORWARD[kernel], limits, M=M, N=100, d=64)
        launch, Br = packing(plan), plan.constants["Br"]
        pack = 3 if Br >= 2 * M else 1
        assert launch.constants["pack_gqa"] == pack
        assert launch.grid[0] == -(-M * pack // Br) * 6 // pack * 2


def test_packing_changes_no_result():
    """Packing does not change how a row is computed, so results are bitwise equal."""
    engine = Simulator()
    kernel, sizes = FORWARD["mma_pipelined"], {"M": 5, "N": 90, "causal": "bottom-right"}
    plan = planned(kernel, engine.limits, **sizes)
    inputs = Case("forward", plan.problem).inputs()
    packed = guard.checked(engine, plan, inputs, {})
    for head in range(6):
        one = {"Q": inputs["Q"][:, [head]]} | {x: inputs[x][:, [head // 3]] for x in "KV"}
        alone = planned(kernel, engine.limits, **sizes, heads=1, kv_heads=1)
        assert alone.launches[-1].constants["pack_gqa"] == 1
        its = guard.checked(engine, alone, one, {})
        np.testing.assert_array_equal(its["O"][:, 0], packed["O"][:, head])
