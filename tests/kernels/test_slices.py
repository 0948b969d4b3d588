"""The rungs for any head dimension: spans of keys, slices of d, and tiles of every device."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.gradients import tiles_of
from helpers.problems import FORWARD, check_case, inputs_of, name, planned

import cupyfa
from cupyfa import Problem
from cupyfa.lab.analysis.resources import compile_launch, limits_of
from cupyfa.ladder import LADDER
from cupyfa.planner import choose_kernel as planning
from cupyfa.runtime import guard

MMA, WGMMA = FORWARD["mma_slices"], FORWARD["wgmma_slices"]
BACKWARD = LADDER["backward"]["mma_slices_backward"]
# wgmma_slices needs a multiple of 8 columns; other rows are first copied to padded rows.
SIZES = (
    {"heads": 1, "M": 20, "N": 30, "d": 304, "dv": 320},
    {"heads": 2, "kv_heads": 1, "M": 70, "N": 90, "d": 264, "dv": 520, "causal": True},
    {"batch": 2, "heads": 1, "M": 10, "N": 20, "d": 1024},
    {"heads": 1, "M": 140, "N": 1100, "d": 24, "dv": 72, "causal": True},
    {"heads": 1, "M": 600, "N": 530, "d": 16, "dv": 24, "causal": "top-left", "scale": -3.0},
    {"heads": 1, "M": 200, "N": 700, "d": 16, "dv": 24, "window": (90, 260)},
    {"heads": 1, "M": 30, "N": 600, "d": 16, "dv": 264, "scale": 0.0},
    {"heads": 1, "M": 300, "N": 70, "d": 264, "causal": True},
    {"heads": 1, "M": 7, "N": 0, "d": 304},
    {"heads": 1, "M": 20, "N": 300, "d": 576, "dv": 512},
)
ODD_SIZES = (
    {"heads": 1, "M": 20, "N": 30, "d": 300, "dv": 313},
    {"heads": 1, "M": 30, "N": 600, "d": 16, "dv": 261, "scale": 0.0},
    {"heads": 1, "M": 300, "N": 70, "d": 257, "causal": True},
)


@pytest.mark.each_choice
@pytest.mark.parametrize("row", [0, 31, 32, 63, 100])
def test_a_huge_lse_in_any_row_leaves_gradients_right(backend, row):
    """Rows with a huge lse are computed apart; a warp owns up to 64 rows."""
    plan = planned(BACKWARD, backend, {"heads": 1, "M": 128, "N": 64, "d": 16}, "float16")
    inputs = inputs_of(plan)
    inputs["Q"] = (inputs["Q"] * 0.001).astype("f2")
    inputs["K"] = (inputs["K"] * 2000).astype("f2")
    inputs["Q"][0, 0, row] = np.copysign(60000, inputs["Q"][0, 0, row])
    given = (inputs[x] for x in "QKV")
    inputs["O"], inputs["lse"] = cupyfa.attention(*given, return_lse=True, backend=backend)
    assert abs(inputs["lse"][0, 0, row]) > 2**25
    guard.checked(backend, plan, inputs, {})


def can_run(kernel, backend, sizes, dtype="float16"):
    return planning.can(kernel, Problem.of_sizes(**sizes, dtype=dtype), backend.limits)


def tiled(kernel, sizes):
    """Combines each problem size with two of the kernel's tile sizes."""
    tiles, step = kernel.tiles, max(1, len(kernel.tiles) // 2)
    return [
        (kernel, x, tiles[(i + j) % len(tiles)]) for i, x in enumerate(sizes) for j in (0, step)
    ]


@pytest.mark.each_choice("sizes")
@pytest.mark.parametrize(
    "kernel, sizes, tile",
    [*tiled(MMA, SIZES[1:5] + SIZES[8:9] + ODD_SIZES), *tiled(WGMMA, SIZES)],
    ids=name,
)
def test_every_tile_is_right(backend, kernel, sizes, tile):
    if can_run(kernel, backend, sizes):
        check_case(kernel, backend, sizes, "float16", **tile)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "kernel, sizes, dtype",
    [
        (MMA, SIZES[3], "bfloat16"),
        (MMA, SIZES[4], "bfloat16"),
        (WGMMA, SIZES[3], "float16"),
        (WGMMA, SIZES[5], "bfloat16"),
    ],
    ids=name,
)
def test_masked_values_do_not_matter(backend, kernel, sizes, dtype):
    """Keys and values that only some rows see are not finite, in the first and in later spans."""
    if can_run(kernel, backend, sizes, dtype):
        plan = planned(kernel, backend, sizes, dtype, **kernel.tiles[-1])
        inputs = inputs_of(plan)
        inputs["V"][..., 3, 1] = np.inf
        for key, columns in ((500, slice(5, 8)), (600, slice(1, 3))):
            inputs["V"][..., key % plan.problem.N, columns] = np.nan
            inputs["K"][..., (key + 1) % plan.problem.N, 2] = np.nan
        guard.checked(backend, plan, inputs, {})


@pytest.mark.usefixtures("every_check")
def test_rows_need_no_alignment(backend):
    """Rows have odd strides, and the output is unaligned."""
    plan = planned(MMA, backend, {"M": 40, "N": 50, "d": 264, "dv": 280}, "float16")
    inputs = {x: np.pad(array, [(0, 0)] * 3 + [(1, 2)]) for x, array in inputs_of(plan).items()}
    inputs = {x: array[..., 1:-2] for x, array in inputs.items()}
    out = np.zeros((plan.problem.batch, plan.problem.heads, 40, 283), np.float16)
    guard.checked(backend, plan, inputs, {"O": out[..., 1:-2]})


def test_rows_of_any_length(backend):
    """Rows whose length is not a multiple of 16 bytes are first copied to padded rows."""
    rng, shapes = np.random.default_rng(0), ((1, 21, 301), (1, 35, 301), (1, 35, 263))
    q, k, v = (rng.standard_normal(shape).astype("float16") for shape in shapes)
    if planning.can(WGMMA, Problem.of(q, k, v), backend.limits):
        cupyfa.attention(q, k, v, kernel="wgmma_slices", backend=backend, check=True)


def test_probabilities_in_registers_follow_a_maximum_that_rises(backend):
    """Scores rise sharply in a span's second tile and in the first tile of the next span."""
    sizes = {"heads": 1, "M": 40, "N": 900, "d": 16, "dv": 24}
    if can_run(WGMMA, backend, sizes):
        plan = planned(WGMMA, backend, sizes, "float16")
        inputs = inputs_of(plan)
        for first, rise in ((256, 3), (300, 6), (512, 9), (850, 10)):
            inputs["K"][..., first:, 0] = rise
        inputs["Q"][..., 0] = 4
        inputs["V"][..., :256, :] *= 100  # significant even with a weight of 2^-16
        guard.checked(backend, plan, inputs, {})


@pytest.mark.parametrize("blocks", [1, 3])
def test_persistent_blocks_process_several_row_tiles(backend, blocks):
    staying = replace(WGMMA, launches=(replace(WGMMA.launches[0], grid=lambda p, c: blocks),))
    sizes = {"batch": 2, "heads": 2, "kv_heads": 1, "M": 300, "N": 40, "d": 80, "dv": 264}
    if can_run(WGMMA, backend, sizes):
        check_case(staying, backend, sizes, "float16", **WGMMA.tiles[-1])


# Tiles of each architecture: forward (with the span of keys) and backward.
TILES = {
    "75": ((64, 128, 256), (64, 128)),
    "80": ((128, 256, 256), (128, 128)),
    "86": ((128, 128, 256), (128, 128)),
    "90": ((128, 256, 512), (128, 256)),
}


@pytest.mark.parametrize("arch", TILES)
def test_tiles_fill_the_shared_memory_of_a_device(arch):
    for d in (264, 1024, 5000):
        problem = Problem.of_sizes(M=64, d=d, dtype="float16")
        for kernel, tile in zip((MMA, BACKWARD), TILES[arch]):
            constants = planning.plan(kernel, problem, limits_of(arch)).constants
            assert tuple(constants[x] for x in ("Br", "Bc", "span")[: len(tile)]) == tile
        fastest = "wgmma_slices" if arch == "90" else "mma_slices"
        assert planning.select("auto", "forward", problem, limits_of(arch)).name == fastest


@pytest.mark.parametrize("kernel, columns", [(MMA, 384), (WGMMA, 320)], ids=name)
def test_scratch_for_sums_is_needed_only_beyond_a_span(kernel, columns):
    def scratch_bytes(N, dv):
        problem = Problem.of_sizes(batch=2, heads=3, M=100, N=N, d=64, dv=dv, dtype="float16")
        return planning.plan(kernel, problem, limits_of("90")).scratch_bytes

    assert scratch_bytes(512, 1024) == 0
    assert scratch_bytes(513, 1024) == 4 * 2 * 3 * 128 * 1024
    assert scratch_bytes(513, 320) == 4 * 2 * 3 * 128 * columns


@pytest.mark.each_choice
@pytest.mark.parametrize("tile", WGMMA.tiles[:2], ids=lambda tile: f"{tile['span']}")
@pytest.mark.parametrize(
    "d, dtype, mask",
    [
        (320, "float16", {}),
        (512, "bfloat16", {"causal": True}),
        pytest.param(1024, "bfloat16", {}, marks=pytest.mark.slow),
        pytest.param(1024, "float16", {"window": (100, 0)}, marks=pytest.mark.slow),
    ],
)
def test_products_are_not_serialized_and_nothing_spills(d, dtype, mask, tile):
    problem = Problem.of_sizes(M=64, d=d, dtype=dtype, **mask)
    made = compile_launch(planning.plan(WGMMA, problem, limits_of("90"), **tile).launches[0], "90a")
    assert made.warnings == () and made.spilled_bytes == 0


# Gradients

TILE = tiles_of(BACKWARD)
CAUSAL = {"d": 40, "causal": True}
# The kernel launches once per round; each round computes some of the heads and some of the keys.
ROUNDS = (
    {"batch": 2, "heads": 4, "kv_heads": 2, "M": 70, "N": 45},  # the heads need several rounds
    {"heads": 2, "kv_heads": 1, "M": 37, "N": 140, "scale": -0.3},  # the keys need several rounds
    {"heads": 2, "M": 37, "N": 140, "causal": "top-left"},  # no key is visible in some rounds
    {"heads": 1, "M": 90, "N": 20, "scale": 0.0},
    {"batch": 2, "heads": 2, "M": 5, "N": 0},
    {"heads": 2, "kv_heads": 1, "M": 0, "N": 7},
    {"heads": 3, "M": 1, "N": 1},
)


@pytest.mark.each_choice
@pytest.mark.parametrize("sizes", ROUNDS, ids=name)
def test_rounds_of_heads_and_keys(backend, sizes):
    check_case(BACKWARD, backend, {**CAUSAL, **sizes}, "float16", **TILE)


def test_masked_values_do_not_matter_to_gradients(backend):
    """Inputs contain NaN and infinity; some rows see no key, because of the mask or of lse."""
    plan = planned(BACKWARD, backend, {**CAUSAL, "heads": 1, "M": 60, "N": 50}, "float16", **TILE)
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
    check_case(BACKWARD, backend, sizes, "float16", **TILE)


def test_no_launch_spills():
    problem = Problem.of_sizes(M=1024, d=512, dtype="float16", causal=True)
    plan = planning.plan(BACKWARD, problem, limits_of("90"))
    assert (plan.constants["Br"], plan.constants["Bc"]) == (128, 256)
    for launch in plan.programs[1:3]:  # the third launch does less work than the second
        made = compile_launch(launch, "90")
        assert made.spilled_bytes == 0 and not made.warnings


def test_scratch_is_bounded_by_rounds():
    def plan_of_sizes(**sizes):
        problem = Problem.of_sizes(**{"M": 1024, "d": 512, "dtype": "float16", **sizes})
        return planning.plan(BACKWARD, problem, limits_of("90"))

    few, many = (plan_of_sizes(heads=heads) for heads in (64, 6400))
    assert len(few.programs) == len(many.programs) == 4
    assert (len(few.launches), len(many.launches)) == (1 + 3, 1 + 3 * 100)
    scores = 2 * 2 * 64 * 1024 * 1024
    assert [x.scratch_bytes - 4 * x.problem.heads * 1024 for x in (few, many)] == [scores] * 2
    long = plan_of_sizes(M=65536)  # 64 rounds of 1024 keys; dQ stays in scratch between rounds
    assert len(long.launches) == 1 + 3 * 64
    assert long.scratch_bytes == 4 * 65536 * 1024 + 4 * 65536 * 512 + 4 * 65536
