"""The rung mma_slices_backward: many cases with few compiled texts."""

import numpy as np
import pytest
from helpers.problems import check_case, inputs_of, name, planned

from cupyfa import Problem
from cupyfa.lab.analysis.resources import compile_launch, limits_of
from cupyfa.ladder import LADDER
from cupyfa.planner import choose_kernel as planning
from cupyfa.runtime import guard

SLICES = LADDER["backward"]["mma_slices_backward"]
TILE = {"Br": 32, "Bc": 64, "Wr": 16, "Wc": 32, "Bd": 16, "stages": 2, "room": 3}
CAUSAL = {"d": 40, "causal": True}
SIZES = (
    {"batch": 2, "heads": 4, "kv_heads": 2, "M": 70, "N": 45},  # heads in rounds
    {"heads": 2, "kv_heads": 1, "M": 37, "N": 140, "scale": -0.3},  # keys in rounds
    {"heads": 2, "M": 37, "N": 140, "causal": "top-left"},  # rounds without a visible key
    {"heads": 1, "M": 90, "N": 20, "scale": 0.0},
    {"batch": 2, "heads": 2, "M": 5, "N": 0},
    {"heads": 2, "kv_heads": 1, "M": 0, "N": 7},
    {"heads": 3, "M": 1, "N": 1},
)


def plan_of(backend, sizes, dtype="float16"):
    return planned(SLICES, backend, sizes, dtype, **TILE)


@pytest.mark.each_choice
@pytest.mark.parametrize("sizes", SIZES, ids=name)
def test_rounds_of_heads_and_keys(backend, sizes):
    check_case(SLICES, backend, {**CAUSAL, **sizes}, "float16", **TILE)


def test_masked_values_do_not_matter(backend):
    """NaN and infinity of keys, values and gradients; rows that see no key, by mask or by lse."""
    plan = plan_of(backend, {**CAUSAL, "heads": 1, "M": 60, "N": 50})
    inputs = inputs_of(plan)
    for array in ("Q", "dO"):
        inputs[array][0, 0, :10] = np.nan
    guard.checked(backend, plan, inputs, {})
    inputs["K"][0, 0, 40], inputs["V"][0, 0, 45, 1] = np.nan, np.inf
    inputs["lse"][0, 0, 50:] = np.nan
    inputs["dO"][0, 0, 12] = np.inf
    guard.checked(backend, plan, inputs, {})


def test_columns_of_several_tiles_and_widths(backend):
    sizes = {"heads": 2, "M": 37, "N": 50, "d": 130, "dv": 263, "window": (20, 3)}
    check_case(SLICES, backend, sizes, "float16", **TILE)


def test_no_launch_spills():
    problem = Problem.of_sizes(M=1024, d=512, dtype="float16", causal=True)
    plan = planning.plan(SLICES, problem, limits_of("90"))
    assert (plan.constants["Br"], plan.constants["Bc"]) == (128, 256)
    for launch in plan.programs[1:3]:  # the third has less to do than the second
        made = compile_launch(launch, "90")
        assert made.spilled_bytes == 0 and not made.warnings


def test_tiles_fit_the_shared_memory_of_a_device():
    for arch, tile in {
        "75": (64, 128),
        "80": (128, 128),
        "86": (128, 128),
        "90": (128, 256),
    }.items():
        for d in (264, 5000):
            problem = Problem.of_sizes(M=64, d=d, dtype="float16")
            constants = planning.plan(SLICES, problem, limits_of(arch)).constants
            assert (constants["Br"], constants["Bc"]) == tile


def test_scratch_is_bounded_by_rounds():
    def plan_of_sizes(**sizes):
        problem = Problem.of_sizes(**{"M": 1024, "d": 512, "dtype": "float16", **sizes})
        return planning.plan(SLICES, problem, limits_of("90"))

    few, many = (plan_of_sizes(heads=heads) for heads in (64, 6400))
    assert len(few.programs) == len(many.programs) == 4
    assert (len(few.launches), len(many.launches)) == (1 + 3, 1 + 3 * 100)
    scores = 2 * 2 * 64 * 1024 * 1024
    assert [x.scratch_bytes - 4 * x.problem.heads * 1024 for x in (few, many)] == [scores] * 2
    long = plan_of_sizes(M=65536)  # 64 rounds of 1024 keys, between which dQ waits
    assert len(long.launches) == 1 + 3 * 64
    assert long.scratch_bytes == 4 * 65536 * 1024 + 4 * 65536 * 512 + 4 * 65536
