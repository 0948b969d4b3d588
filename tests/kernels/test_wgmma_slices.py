"""The rung wgmma_slices in its own sizes: large head dimensions, one tile or two in a span."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.problems import FORWARD, inputs_of, name, planned

import cupyfa
from cupyfa import Problem
from cupyfa.analysis import resources as compiling
from cupyfa.analysis.resources import limits_of
from cupyfa.planner import select as planning
from cupyfa.runtime import calls

SLICES = FORWARD["wgmma_slices"]
SIZES = (
    {"heads": 1, "M": 20, "N": 30, "d": 304, "dv": 320},
    {"heads": 2, "kv_heads": 1, "M": 70, "N": 90, "d": 264, "dv": 520, "causal": True},
    {"batch": 2, "heads": 1, "M": 10, "N": 20, "d": 1024},
    {"heads": 1, "M": 20, "N": 300, "d": 576, "dv": 512},
    {"heads": 1, "M": 140, "N": 1100, "d": 24, "dv": 72, "causal": True},
    {"heads": 1, "M": 600, "N": 530, "d": 16, "dv": 24, "causal": "top-left", "scale": -3.0},
    {"heads": 1, "M": 200, "N": 700, "d": 16, "dv": 24, "window": (90, 260)},
    {"heads": 1, "M": 30, "N": 600, "d": 16, "dv": 264, "scale": 0.0},
    {"heads": 1, "M": 300, "N": 70, "d": 264, "causal": True},
    {"heads": 1, "M": 7, "N": 0, "d": 304},
)
SIZES_ODD = ((21, 301), (35, 301), (35, 263))  # rows and columns of q, k, v


# Each size with two of the tiles.
TILED = [
    (x, SLICES.tiles[(i + j) % len(SLICES.tiles)]) for i, x in enumerate(SIZES) for j in (0, 1)
]


@pytest.mark.parametrize("sizes, tile", TILED, ids=name)
def test_every_tile_is_right(backend, sizes, tile):
    if planning.can(SLICES, Problem.of_sizes(**sizes, dtype="float16"), backend.limits):
        plan = planned(SLICES, backend, sizes, "float16", **tile)
        calls.checked(backend, plan, inputs_of(plan), {})


@pytest.mark.parametrize("sizes", (SIZES[4], SIZES[6]), ids=name)
@pytest.mark.parametrize("dtype", SLICES.dtypes)
def test_hidden_values_do_not_show(backend, dtype, sizes):
    """NaN in values and keys that only some rows see, in the first span and in a later one."""
    if planning.can(SLICES, Problem.of_sizes(**sizes, dtype=dtype), backend.limits):
        plan = planned(SLICES, backend, sizes, dtype)
        inputs = inputs_of(plan)
        inputs["V"][..., 3, 1] = np.inf
        inputs["V"][..., 600, 5:8] = np.nan
        inputs["K"][..., 601, 2] = np.nan
        calls.checked(backend, plan, inputs, {})


def test_parked_weights_follow_a_maximum_that_rises(backend):
    """The second tile of a span, and the first of the next, have far higher scores."""
    sizes = {"heads": 1, "M": 40, "N": 900, "d": 16, "dv": 24}
    if planning.can(SLICES, Problem.of_sizes(**sizes, dtype="float16"), backend.limits):
        plan = planned(SLICES, backend, sizes, "float16")
        inputs = inputs_of(plan)
        for first, rise in ((256, 3), (300, 6), (512, 9), (850, 10)):
            inputs["K"][..., first:, 0] = rise
        inputs["Q"][..., 0] = 4
        inputs["V"][..., :256, :] *= 100  # they still count when they weigh 2^-16
        calls.checked(backend, plan, inputs, {})


@pytest.mark.parametrize("blocks", [1, 3])
def test_blocks_that_stay_take_one_row_tile_after_another(backend, blocks):
    launch = replace(SLICES.launches[0], grid=lambda p, c: blocks)
    staying = replace(SLICES, launches=(launch,))
    sizes = {"batch": 2, "heads": 2, "kv_heads": 1, "M": 300, "N": 40, "d": 80, "dv": 264}
    if planning.can(SLICES, Problem.of_sizes(**sizes, dtype="float16"), backend.limits):
        plan = planned(staying, backend, sizes, "float16", **SLICES.tiles[-1])
        calls.checked(backend, plan, inputs_of(plan), {})


def test_rows_of_any_length(backend):
    """Rows that are no multiples of 16 bytes are copied to longer ones first."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, x)).astype("float16") for n, x in SIZES_ODD)
    if planning.can(SLICES, Problem.of(q, k, v), backend.limits):
        cupyfa.attention(q, k, v, kernel="wgmma_slices", backend=backend, check=True)


def test_sums_take_memory_only_beyond_a_span():
    def scratch_bytes(N, dv):
        problem = Problem.of_sizes(batch=2, heads=3, M=100, N=N, d=64, dv=dv, dtype="float16")
        return planning.plan(SLICES, problem, limits_of("90")).scratch_bytes

    assert scratch_bytes(512, 1024) == 0
    assert scratch_bytes(513, 1024) == 4 * 2 * 3 * 128 * 1024
    assert scratch_bytes(513, 320) == 4 * 2 * 3 * 128 * 320


@pytest.mark.parametrize("tile", SLICES.tiles[:2], ids=lambda tile: f"{tile['span']}")
@pytest.mark.parametrize(
    "d, dtype, mask",
    [
        (320, "float16", {}),
        (512, "bfloat16", {"causal": True}),
        (1024, "bfloat16", {}),
        (1024, "float16", {"window": (100, 0)}),
    ],
)
def test_products_are_not_serialized_and_nothing_spills(d, dtype, mask, tile):
    problem = Problem.of_sizes(M=64, d=d, dtype=dtype, **mask)
    plan = planning.plan(SLICES, problem, limits_of("90"), **tile)
    made = compiling.compile_launch(plan.launches[0], "90a")
    assert made.warnings == ()
    assert made.spilled_bytes == 0
