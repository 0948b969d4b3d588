"""Few queries of many heads, as in latent attention: packing, pages, splits, V in tiles of K."""

import numpy as np
import pytest
from helpers.problems import FORWARD, inputs_of, name, planned

import cupyfa
from cupyfa import Problem
from cupyfa.lab.analysis.resources import compile_launch, limits_of
from cupyfa.planner import choose_kernel as planning
from cupyfa.runtime import guard

SLICES, LATENT = FORWARD["wgmma_slices"], FORWARD["wgmma_latent"]
H100 = limits_of("90")
SMALL = SLICES.tiles[-1]  # 64 keys per tile and per span
BOTH = [(SLICES, SMALL), (LATENT, LATENT.tiles[-1])]
# Sizes, and the number of heads that a box of 128 rows of Q holds: the largest divisor of 128 in a
# group. If a head has more than 32 rows, a box of 64 holds one head.
SHARED = (
    ({"heads": 6, "kv_heads": 2, "M": 5, "N": 70, "d": 24}, 1),
    ({"heads": 12, "kv_heads": 2, "M": 40, "N": 70, "d": 24, "causal": True}, 2),
    ({"batch": 2, "heads": 16, "kv_heads": 2, "M": 9, "N": 150, "d": 72, "dv": 264}, 8),
    ({"heads": 128, "kv_heads": 1, "M": 3, "N": 130, "d": 40, "causal": "top-left"}, 128),
    ({"heads": 256, "kv_heads": 1, "M": 1, "N": 30, "d": 16, "scale": -2.0}, 128),
    ({"heads": 32, "kv_heads": 1, "M": 64, "N": 90, "d": 16, "window": (9, 3)}, 32),
    ({"heads": 32, "kv_heads": 1, "M": 65, "N": 30, "d": 16}, 1),
    ({"heads": 4, "kv_heads": 1, "M": 2, "N": 2000, "d": 16, "window": (9, 3)}, 4),
    ({"heads": 8, "kv_heads": 1, "M": 2, "N": 0, "d": 16}, 8),
)
# Sizes with at least 1,024 keys, which few tiles of Q split.
LONG = (
    {"heads": 128, "kv_heads": 1, "M": 1, "N": 1030, "d": 72, "dv": 64},
    {"heads": 8, "kv_heads": 2, "M": 3, "N": 1100, "d": 24, "dv": 264, "causal": True},
    {"heads": 2, "kv_heads": 2, "M": 5, "N": 1500, "d": 16, "window": (1300, 0)},
)
# NaN in a row of V leads to the repair of all rows.
REPAIRED = {"heads": 8, "kv_heads": 1, "M": 1, "N": 1030, "d": 16}
# DeepSeek's latent attention: the values are the first 512 columns of the keys.
DEEPSEEK = {"heads": 128, "kv_heads": 1, "d": 576, "dv": 512, "dtype": "bfloat16"}
DECODING = {**DEEPSEEK, "causal": True, "lengths_k": True}


def able_or_skip(backend, sizes, kernel=SLICES):
    if not planning.can(kernel, Problem.of_sizes(**sizes, dtype="float16"), backend.limits):
        pytest.skip(f"{kernel.name} requires sm_90a")


def splits(plan):
    return plan.launches[0].numbers["num_splits"]


@pytest.mark.parametrize("kernel, tile", BOTH, ids=name)
@pytest.mark.parametrize("sizes, heads", SHARED, ids=name)
def test_packed_heads_are_right(backend, kernel, tile, sizes, heads):
    able_or_skip(backend, sizes, kernel)
    plan = planned(kernel, backend, sizes, "float16", **tile)
    launch, p, rows = plan.launches[0], plan.problem, tile["Br"]
    heads = min(heads, rows) if rows >= 2 * p.M else 1
    assert launch.constants["pack_gqa"] == heads
    assert launch.grid[0] == -(-p.M * heads // rows) * p.heads // heads * p.batch
    guard.checked(backend, plan, inputs_of(plan, layout="bshd"), {})


@pytest.mark.parametrize("kernel, tile", [*BOTH, (SLICES, SLICES.tiles[0])], ids=name)
@pytest.mark.parametrize("sizes", LONG, ids=name)
def test_splits_are_merged(backend, kernel, tile, sizes):
    able_or_skip(backend, sizes, kernel)
    plan = planned(kernel, backend, sizes, "float16", **tile)
    assert splits(plan) > 1 and plan.launches[1].grid[0] == plan.problem.M * plan.problem.heads
    guard.checked(backend, plan, inputs_of(plan), {})


@pytest.mark.parametrize("kernel, tile", BOTH, ids=name)
@pytest.mark.parametrize("key", [40, 1029])
def test_values_of_one_split_that_are_not_finite_reach_only_their_columns(
    backend, kernel, tile, key
):
    able_or_skip(backend, REPAIRED, kernel)
    plan = planned(kernel, backend, REPAIRED, "float16", **tile)
    assert splits(plan) > 1
    inputs = inputs_of(plan)
    inputs["V"][..., key, 5], inputs["K"][..., 3] = np.nan, 8
    guard.checked(backend, plan, inputs, {})


@pytest.mark.parametrize(
    "kernel, options",
    [
        ("wgmma_slices", {"return_max": True}),
        ("wgmma_slices", {"sink": np.linspace(-1, 9, 16)}),
        ("wgmma_latent", {"sink": np.linspace(-1, 9, 16)}),
    ],
)
def test_splits_count_a_sink_once_and_find_the_largest_score(backend, kernel, options):
    able_or_skip(backend, LONG[0], FORWARD[kernel])
    rng = np.random.default_rng(1)
    shapes = ((16, 2, 40), (1, 1100, 40), (1, 1100, 24))
    q, k, v = (rng.standard_normal(shape).astype("f2") for shape in shapes)
    options = {x: y if y is True else y.astype("f4") for x, y in options.items()}
    cupyfa.attention(q, k, v, kernel=kernel, backend=backend, check=True, **options)


PAGES = [
    pytest.param(x, marks=[pytest.mark.slow] * (x not in (16, 128))) for x in (16, 32, 64, 128, 256)
]


def paged_cache(size, lengths, in_keys=True):
    """Returns q and a cache of pages; values are columns of the keys, or a copy of them.

    Unused rows are NaN, unused page numbers invalid.
    """
    rng = np.random.default_rng(size)
    most = max(lengths) // size + 2
    table = rng.permutation(4 * most).reshape(4, most).astype(np.int32)
    keys = np.full((4 * most, 1, size, 72), np.nan, "f2")
    for numbers, length in zip(table, lengths):
        used = -(-length // size)
        rows = rng.standard_normal((used * size, 72)).astype("f2")
        rows[length:] = np.nan
        keys[numbers[:used], 0] = rows.reshape(used, size, 72)
        numbers[used:] = 2**30
    q = rng.standard_normal((4, 16, 2, 72)).astype("f2")
    values = keys[..., :64] if in_keys else keys[..., :64].copy()
    return q, cupyfa.KVCache(keys, values, np.array(lengths, np.int32), table)


@pytest.mark.parametrize("kernel, tile", [*BOTH, (SLICES, {})], ids=name)
@pytest.mark.parametrize("size", PAGES)
def test_pages_hold_the_keys_and_their_values(backend, kernel, tile, size):
    able_or_skip(backend, LONG[0], kernel)
    q, cache = paged_cache(size, (2 * size + 1, 0, size, 1100))
    how = {"kernel": kernel, "tiles": tile, "backend": backend, "check": True}
    assert (cupyfa.attention(q, cache, **how)[1] == 0).all()


@pytest.mark.parametrize("lengths", [(300, 1, 64, 0), (33, 65, 1100, 128)], ids=str)
def test_values_in_tiles_of_keys_give_the_bits_of_values_apart(backend, lengths):
    """A check copies arrays, so values in tiles of keys are compared with checked ones."""
    able_or_skip(backend, LONG[0], LATENT)
    how = {"kernel": LATENT, "backend": backend, "return_lse": True}
    in_keys = cupyfa.attention(*paged_cache(64, lengths), **how)
    apart = cupyfa.attention(*paged_cache(64, lengths, in_keys=False), check=True, **how)
    for x, y in zip(in_keys, apart):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("d, dv", [(576, 512), (72, 72), (128, 40)])
@pytest.mark.parametrize("N", [50, 200])
def test_values_in_tiles_of_keys_of_any_width(backend, d, dv, N):
    sizes = {"heads": 4, "kv_heads": 2, "M": 3, "N": N, "d": d, "dv": dv}
    able_or_skip(backend, sizes, LATENT)
    rng = np.random.default_rng(d)
    q, k = (rng.standard_normal((heads, rows, d)).astype("f2") for heads, rows in ((4, 3), (2, N)))
    how = {"kernel": LATENT, "causal": True, "backend": backend}
    in_keys = cupyfa.attention(q, k, k[..., :dv], **how)
    apart = cupyfa.attention(q, k, k[..., :dv].copy(), check=True, **how)
    np.testing.assert_array_equal(in_keys, apart)


def test_maxima_that_rise_rescale_the_output_of_both_warpgroups(backend):
    """Scores rise sharply in tiles of either warpgroup, and in the last one of an odd number."""
    sizes = {"heads": 1, "M": 40, "N": 300, "d": 16, "dv": 136}
    able_or_skip(backend, sizes, LATENT)
    plan = planned(LATENT, backend, sizes, "float16")
    inputs = inputs_of(plan)
    for first, rise in ((64, 3), (128, 6), (192, 9), (256, 12)):
        inputs["K"][..., first:, 0] = rise
    inputs["Q"][..., 0] = 4
    inputs["V"][..., :256, :] *= 100  # significant even with a weight of 2^-16
    guard.checked(backend, plan, inputs, {})


@pytest.mark.parametrize("columns", [slice(3, 4), slice(100, 101), slice(0, 136)], ids=str)
def test_masked_values_do_not_matter_in_either_half_of_the_columns(backend, columns):
    sizes = {"heads": 2, "M": 70, "N": 90, "d": 16, "dv": 136, "causal": True}
    able_or_skip(backend, sizes, LATENT)
    plan = planned(LATENT, backend, sizes, "float16")
    inputs = inputs_of(plan)
    inputs["V"][..., 60, columns] = np.nan
    guard.checked(backend, plan, inputs, {})


@pytest.mark.parametrize("pages", [{}, *({"page_size": size} for size in (16, 64, 128))], ids=name)
@pytest.mark.parametrize("batch, N", [(32, 8192), (64, 2048), (128, 1024)])
@pytest.mark.parametrize("M", [1, 2, 4])
def test_a_step_of_latent_attention_fills_a_device(M, batch, N, pages):
    problem = Problem.of_sizes(**DECODING, **pages, M=M, N=N, batch=batch)
    kernel = planning.select("auto", "forward", problem, H100)
    launch = planning.plan(kernel, problem, H100).launches[0]
    assert (launch.entry, launch.constants["pack_gqa"]) == ("wgmma_latent", 64)
    waves = launch.grid[0] / H100.multiprocessors
    assert launch.grid[0] % (M * batch) == 0 and waves / -(-waves // 1) > 0.9


@pytest.mark.parametrize("kernel", [SLICES, LATENT], ids=name)
@pytest.mark.parametrize(
    "page_size", [64, *(pytest.param(x, marks=pytest.mark.slow) for x in (None, 16))]
)
def test_packed_and_paged_kernels_do_not_spill(kernel, page_size):
    problem = Problem.of_sizes(**DECODING, page_size=page_size, M=1, N=8192, batch=32)
    for launch in planning.plan(kernel, problem, H100).launches[:2]:
        made = compile_launch(launch, "90a")
        assert made.warnings == () and made.spilled_bytes == 0


def test_long_rows_of_outputs_and_many_rows_are_not_split():
    for sizes in ({"M": 5}, {"M": 1, "dv": 1032}, {"M": 1, "N": 1000}):
        p = Problem.of_sizes(**{**DEEPSEEK, "N": 8192, **sizes})
        plan = planning.plan(SLICES, p, H100)
        assert splits(plan) == 1 and len(plan.launches) == 1
