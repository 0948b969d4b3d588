"""Every rung on ragged shapes, layouts, both backends and every dtype."""

import numpy as np
import pytest
from helpers.gradients import BACKWARD, tiles_of
from helpers.problems import (
    FORWARD,
    RAGGED,
    WINDOWED,
    check_case,
    in_turn,
    inputs_of,
    name,
    planned,
    require_same_bits,
)

import cupyfa
from cupyfa.numerics import tolerance
from cupyfa.runtime import guard
from cupyfa.runtime.arrays import readable_inputs
from cupyfa.runtime.simulator import Simulator

EVERY = (*FORWARD.values(), *BACKWARD.values())
SMALL = {"batch": 2, "heads": 2, "kv_heads": 1, "M": 19, "N": 23, "d": 8, "causal": True}


@pytest.mark.usefixtures("every_check")
@pytest.mark.each_choice
@pytest.mark.parametrize(
    "kernel, dtype, sizes",
    [*in_turn(FORWARD, RAGGED), *in_turn(BACKWARD, (*RAGGED, *WINDOWED))],
    ids=name,
)
def test_ragged_shapes(backend, kernel, dtype, sizes):
    check_case(kernel, backend, sizes, dtype, **tiles_of(kernel))


@pytest.mark.usefixtures("every_check")
@pytest.mark.each_choice
@pytest.mark.parametrize("kernel", EVERY, ids=name)
@pytest.mark.parametrize("layout", ["bshd", "packed", "reversed", "gaps", "unaligned", "columns"])
def test_layouts(backend, kernel, layout):
    check_case(kernel, backend, SMALL, layout=layout, **tiles_of(kernel))


@pytest.mark.each_choice
@pytest.mark.parametrize("kernel", FORWARD.values(), ids=name)
def test_strides_of_zero_are_read_in_place(backend, kernel):
    plan = planned(kernel, backend, {"batch": 2, "heads": 2, "M": 19, "N": 23, "d": 8})
    inputs = inputs_of(plan)
    inputs["K"] = np.broadcast_to(inputs["K"][:1], inputs["K"].shape)
    if plan.boxed:
        inputs = readable_inputs(plan, inputs)  # a copy that TMA can read
    guard.checked(backend, plan, inputs, {})


@pytest.mark.each_choice("kernel")
@pytest.mark.parametrize(
    "kernel, d", [(k, d) for k in EVERY for d in (256, 1024) if d <= (k.largest_d or d)], ids=name
)
def test_large_head_dimensions(backend, kernel, d):
    M, N = (33, 35) if kernel.operation == "forward" else (9, 11)
    check_case(kernel, backend, {"heads": 1, "M": M, "N": N, "d": d})


@pytest.mark.parametrize("kernel", ["mma_async", "mma_pipelined", "mma_split_kv"])
def test_rows_of_one_column_that_are_copied_by_chunks(backend, kernel):
    """Rows are 16-byte aligned, but most of a row's chunks lie beyond its only column."""
    check_case(FORWARD[kernel], backend, {"M": 2, "N": 3, "d": 1}, "float16", layout="gaps")


@pytest.mark.parametrize(
    "kernel, heads, M",
    [("minimal", 1, 8), ("fa2", 1, 8), ("fa2_coalesced", 1, 8), ("fa2_split_kv", 16, 1)],
)
def test_each_tile_is_a_sum_of_its_own(backend, kernel, heads, M):
    """A single running sum over all keys would have an error of at least 0.29 of the bound."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.random((1, heads, rows, 16), np.float32) for rows in (M, 4096, 4096))
    out = cupyfa.attention(q, k, v, kernel=kernel, backend=backend)
    want = tolerance.expected_attention(q, k, v, dtype="float32", scale=0.25, roundings=(None,))
    share = (abs(out - want[None]["O"].value) / want[None]["O"].bound).max()
    assert share <= 0.15, f"{kernel}: {share:.3f} of the bound"


@pytest.mark.sampled(4, "kernel")
@pytest.mark.each_choice("kernel")
@pytest.mark.parametrize(
    "kernel, tiles",
    [
        (kernel, tile)
        for kernel in FORWARD.values()
        for tile in (*kernel.choice.usual[1:], *sum(kernel.choice.short.values(), ()))
        if kernel.name != "fa2"  # fa2 has the same tiles as fa2_coalesced
    ]
    + [
        (FORWARD["minimal"], {"Br": 5, "Bc": 11}),
        (FORWARD["v2"], {"Br": 3, "Bc": 5}),
        (FORWARD["v3"], {"Br": 32, "Bc": 32, "Wr": 16, "Wc": 32}),
        (FORWARD["v3"], {"Br": 16, "Bc": 48, "Wr": 16, "Wc": 16}),
        (FORWARD["fa2"], {"Br": 40, "Bc": 16}),
        (FORWARD["fa2_coalesced"], {"Br": 7, "Bc": 3}),
    ],
    ids=name,
)
def test_tiles_of_other_sizes(backend, kernel, tiles):
    sizes = {"heads": 2, "M": 50, "N": 45, "d": 24, "dv": 17, "causal": True}
    check_case(kernel, backend, sizes, **tiles)


@pytest.mark.parametrize("Bc", [64, 128])
def test_masked_nonfinite_values_do_not_matter_in_tiles_of_few_blocks(backend, Bc):
    """Values that only some rows of a tile see are NaN or infinite."""
    sizes = {"heads": 1, "M": 150, "N": 170, "d": 24, "causal": True}
    plan = planned(FORWARD["mma_pipelined"], backend, sizes, Br=64, Bc=Bc, Wr=16, stages=2)
    inputs = inputs_of(plan)
    inputs["V"][..., 7, 1], inputs["V"][..., 60, :4] = np.nan, -np.inf
    inputs["V"][..., 165, 3] = np.inf
    guard.checked(backend, plan, inputs, {})


@pytest.mark.each_choice
@pytest.mark.parametrize("kernel", FORWARD.values(), ids=name)
def test_another_order_of_threads_gives_the_same_bits(kernel):
    plan = planned(kernel, Simulator(), RAGGED[0])
    inputs = inputs_of(plan)
    results = [
        guard.checked(Simulator(schedule=schedule, workers=workers), plan, inputs, {})
        for schedule, workers in ((None, 1), (1, 2), (2, 1))
    ]
    require_same_bits(*results)
