"""Expressions in every kernel with the feature "places": score_mod, ALiBi, biases and masks."""

import numpy as np
import pytest
from helpers.problems import able, check_case, drawn, inputs_of, name, planned, usual_first

import cupyfa
from cupyfa import Problem, SimulatorFault
from cupyfa.ladder import LADDER
from cupyfa.planner import choose_kernel as planning
from cupyfa.runtime import guard
from cupyfa.runtime.arrays import readable_inputs
from cupyfa.runtime.choose_backend import backend_named

KERNELS, WITH_SCORES = able("places"), able("score")
SLOW = [pytest.mark.slow]
EVERYTHING = {
    "softcap": 3.0,
    "score_mod": "score + slope[head] * (key - query)",
    "alibi_slopes": "h",
    "bias": "bf16[1hmn]",
    "mask": "b1mn",
    "mask_mod": "doc[query] == doc[key] or key < 2",
    "captured": {"slope": "f32[heads]", "doc": "i32[M|N]"},
}


@pytest.mark.parametrize("kernel", usual_first(KERNELS))
def test_all_at_once(backend, kernel):
    sizes = {"batch": 2, "heads": 2, "kv_heads": 1, "M": 35, "N": 41, "d": 16}
    check_case(kernel, backend, {**sizes, **EVERYTHING})


# From almost 0 to values that do not change any score; with 0.2 many scores far exceed the softcap.
CAPS = [1e-45, 0.2, 30.0, 1e8, 1e300]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("cap", [pytest.param(x, marks=SLOW * (x != 1e8)) for x in CAPS])
@pytest.mark.parametrize("kernel", usual_first(WITH_SCORES))
def test_a_softcap_of_any_size(backend, kernel, cap):
    """Error bounds do not grow with the softcap, so a large one must not cost precision."""
    check_case(kernel, backend, {"heads": 2, "M": 35, "N": 41, "d": 16, "softcap": cap})


@pytest.mark.each_choice
@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize("kernel", [k for k in WITH_SCORES if k not in KERNELS], ids=name)
def test_rungs_without_places_cap_scores(backend, kernel, scale):
    """test_pairs covers the other rungs."""
    sizes = {"heads": 2, "kv_heads": 1, "M": 70, "N": 90, "d": 32}
    check_case(kernel, backend, {**sizes, "causal": True, "scale": scale, "softcap": 2.0})


def test_the_cap_is_not_compiled_in(backend):
    (q,) = drawn((2, 40, 16))
    small, large, none = (
        cupyfa.attention(q, q, q, kernel="fa2", backend=backend, softcap=cap)
        for cap in (1.0, 100.0, None)
    )
    np.testing.assert_allclose(large, none, atol=0.01)
    assert np.abs(small - none).max() > 0.1


OF_TILES = [k for k in able("places", "forward") if "fa2" not in k.name]
FAST = ("mma_pipelined", "wgmma_persistent")


@pytest.mark.usefixtures("every_check")
@pytest.mark.parametrize("N", [150, 151])  # rows of an even N are read in place
@pytest.mark.parametrize("kernel", usual_first(OF_TILES, FAST))
def test_keys_in_pairs(backend, kernel, N):
    sizes = {"heads": 2, "kv_heads": 1, "M": 20, "N": N, "d": 16}
    arrays = {"bias": "bf16[1hmn]", "mask": "11mn"}
    check_case(kernel, backend, {**sizes, **arrays})


def test_a_repeated_bias_stays_repeated_in_its_copy():
    p = Problem.of_sizes(heads=2, M=5, N=7, d=8, dtype="float16", bias="f16[1hmn]")
    plan = planning.plan(LADDER["forward"]["wgmma"], p, backend_named("simulator").limits)
    given = np.arange(7, dtype=np.float16)
    bias = np.broadcast_to(given, (1, 2, 5, 7))  # rows of a full copy would be misaligned
    aligned = np.broadcast_to(np.zeros((5, 8), np.float16)[:, :7], bias.shape)
    for array, is_copied in ((bias, False), (aligned, False), (bias[..., ::-1], True)):
        read = readable_inputs(plan, {"mods.bias": array})["mods.bias"]
        assert np.array_equal(read, array) and np.shares_memory(read, array) != is_copied
    odd = np.broadcast_to(np.zeros((2, 1, 7), np.float16), (2, 5, 7))[None]
    copy = readable_inputs(plan, {"mods.bias": odd})["mods.bias"]
    assert copy.strides[1:] == (16, 0, 2) and not np.shares_memory(copy, odd)


@pytest.mark.usefixtures("every_check")
def test_a_prepared_call_takes_a_bias_at_an_odd_element(backend):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, n, 16)).astype(np.float16) for n in (20, 150, 150))
    memory = np.zeros((1, 2, 20, 152), np.float16)
    even, odd = memory[..., :150], memory[..., 1:151]
    how = {"kernel": "mma_pipelined", "backend": backend}
    prepared = cupyfa.compile(q, k, v, bias=even, **how)
    memory[...] = rng.standard_normal(memory.shape)
    for bias in (even, odd):
        expected = cupyfa.attention(q, k, v, bias=bias.copy(), **how)
        np.testing.assert_array_equal(prepared(q, k, v, bias=bias), expected)


# Options and captured arrays

RNG = np.random.default_rng(0)
Q = RNG.standard_normal((2, 4, 20, 16)).astype(np.float32)
K = RNG.standard_normal((2, 2, 30, 16)).astype(np.float32)
BIAS = RNG.standard_normal((4, 20, 30)).astype(np.float32)
SLOPE = np.linspace(0.1, 1, 4)
KEYWORDS = {"score_mod": "score_mod", "mask_mod": "mask"}


def attend(backend, q=Q, k=K, **given):
    return cupyfa.attention(q, k, k, **{"kernel": "fa2", "check": True, **given}, backend=backend)


@pytest.mark.parametrize("kernel", ["fa2", "mma_split_kv", "two_pass"])
def test_a_first_tile_of_minus_infinity(backend, kernel):
    sizes = {"M": 40, "N": 70, "d": 16, "heads": 2, "kv_heads": 1}
    text = "hidden if query < 3 or key < 40 else score"
    given = {**sizes, "score_mod": text, "captured": {"hidden": -np.inf}}
    check_case(cupyfa.kernel(kernel), backend, given)


def test_nan_in_a_hidden_bias_has_no_effect(backend):
    bias, mask = BIAS.copy(), np.ones((20, 30), bool)
    bias[:, 3, 5], mask[3, 5] = np.nan, False
    out = attend(backend, bias=bias, mask=mask)
    np.testing.assert_array_equal(out, attend(backend, bias=BIAS, mask=mask))
    assert np.isnan(attend(backend, bias=bias)[:, :, 3]).all()


@pytest.mark.parametrize(
    "bias",
    [
        BIAS.astype(np.float16),
        BIAS.astype(np.float64),
        np.broadcast_to(BIAS, (2, 4, 20, 30)),
        np.ascontiguousarray(np.repeat(np.repeat(BIAS, 2, 1), 2, 2)[:, ::-1])[:, ::-2, ::2],
        np.broadcast_to(BIAS[:, :, :1], (4, 20, 30)),
    ],
    ids=["float16", "float64", "broadcast", "strided", "broadcast keys"],
)
def test_a_bias_of_another_dtype_or_with_strides(backend, bias):
    expected = attend(backend, bias=np.ascontiguousarray(bias, np.float32))
    np.testing.assert_allclose(attend(backend, bias=bias), expected, rtol=1e-5, atol=1e-6)


def test_a_bias_has_axes_of_its_own_in_every_layout(backend):
    expected = attend(backend, bias=BIAS)
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (Q, K)]
    out = attend(backend, *turned, bias=BIAS, layout="bshd")
    np.testing.assert_array_equal(out.swapaxes(1, 2), expected)
    unchecked = attend(backend, bias=BIAS, check=False)  # transfers NumPy arrays
    np.testing.assert_array_equal(unchecked, expected)


@pytest.mark.parametrize("M, N", [(0, 30), (20, 0)])
def test_problems_without_scores(backend, M, N):
    captured = {"s": SLOPE, "seen": np.ones(N, bool)}
    out = attend(
        backend,
        *(Q[:, :, :M], K[:, :, :N]),
        bias=BIAS[:, :M, :N],
        mask=(np.ones((M, N), bool), "seen[key]"),
        alibi_slopes=SLOPE,
        score_mod="score + s[head]",
        captured=captured,
    )
    assert out.shape == (2, 4, M, 16) and not out.any()


@pytest.mark.parametrize(
    "index, needed", [("batch", 2), ("head", 4), ("query", 20), ("key", 30), ("0, key", 30)]
)
@pytest.mark.parametrize("option", ["score_mod", "mask_mod"])
def test_an_array_that_is_too_short_is_refused_at_the_call(backend, option, index, needed):
    """Covers arrays that are indexed only by a position, whose range follows from the sizes."""
    text = {"score_mod": "score + where(s[{}] > 9, 1, 0)", "mask_mod": "s[{}] < 9"}[option]
    shape = (1,) * (", " in index)
    given = {KEYWORDS[option]: text.format(index)}
    attend(backend, **given, check=False, captured={"s": np.zeros((*shape, needed))})
    axis, place = len(shape), index.split(", ")[-1]
    message = rf"captured s has shape .*{option} indexes axis {axis} with {place}, from 0 to"
    short = {"s": np.zeros((*shape, needed - 1))}
    with pytest.raises(ValueError, match=message):
        attend(backend, **given, check=False, captured=short)
    with pytest.raises(ValueError, match=message):
        cupyfa.compile(Q, K, K, backend=backend, captured=short, **given)


@pytest.mark.parametrize("outside", [4, -1, 99])
def test_an_index_outside_of_its_array_is_an_error(outside):
    doc = np.arange(30) // 10
    doc[5] = outside
    captured = {"doc": doc, "table": np.ones(4, np.float32)}
    message = f"reads index {outside} of an axis of size 4 of table in score_mod"
    with pytest.raises(SimulatorFault, match=message):
        attend("simulator", score_mod="score + table[doc[key]]", captured=captured, check=False)


@pytest.mark.parametrize("option", ["score_mod", "mask_mod"])
def test_a_divisor_of_0_is_an_error_that_names_the_text(option):
    other = "mask_mod" if option == "score_mod" else "score_mod"
    texts = {"score_mod": "score + key // {}", "mask_mod": "key % {} >= 0"}
    texts = {
        KEYWORDS[option]: texts[option].format("n[head]"),
        KEYWORDS[other]: texts[other].format("3"),
    }
    captured = {"n": np.array([3, 0, 3, 3], np.int32)}
    message = rf"divides an integer by zero in {option}, at .*expression.cuh:\d+"
    with pytest.raises(SimulatorFault, match=message):
        attend("simulator", **texts, captured=captured, check=False)


COPYING = {
    "wgmma_overlap": {"Br": 64, "Bc": 32, "stages": 2},
    "wgmma_persistent": {"Br": 64, "Bc": 32, "stages": 2, "Q_stages": 1},
    "wgmma_fp8": {"Br": 64, "Bc": 32, "stages": 2},
    "wgmma_columns": {"Br": 64, "Bc": 128, "stages": 2, "dS_stages": 1},
}
PAIRS = (
    ({"bias": "bf16[1hmn]"}, 2),
    ({"mask": "b1mn", "causal": True}, 1),
    pytest.param({"bias": "f16[bhmn]", "mask": "11mn", "window": (40, 10)}, 2, marks=SLOW),
    pytest.param({"bias": "bf16[11m1]", "mask": "b11n"}, 1, marks=SLOW),
    pytest.param({"bias": "f32[1hmn]"}, 0, marks=SLOW),
)


@pytest.mark.usefixtures("every_check")
@pytest.mark.sampled(4)
@pytest.mark.parametrize("arrays, size", PAIRS)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(k, marks=[pytest.mark.slow] * (k not in (*FAST, "wgmma_columns")))
        for k in COPYING
    ],
)
def test_pairs_of_the_next_tile_are_copied(backend, name, arrays, size):
    kernel = cupyfa.kernel(name)
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "M": 150, "N": 171, "d": 16}
    plan = planned(kernel, backend, {**sizes, **arrays}, **COPYING[name])
    found = {x.constants["bias_bytes"] for x in plan.launches if "bias_bytes" in x.constants}
    assert found == {size}
    guard.checked(backend, plan, inputs_of(plan), {})


@pytest.mark.slow
def test_pairs_of_tiles_that_a_block_mask_skips(backend):
    shapes = (1, 2, 300, 16), (1, 1, 301, 16), (1, 1, 301, 16), (1, 2, 300, 16), (1, 2, 300, 301)
    q, k, v, dout, bias = drawn(*shapes, dtype="float16")
    text = "key % 130 < 40 or query % 140 < 10"
    blocks = cupyfa.block_mask(mask_mod=text, M=300, N=301, backend=backend.name)
    given = {"bias": bias, "mask": blocks, "backend": backend.name, "check": True}
    forward, backward = (
        {**given, "kernel": x, "tiles": COPYING[x]} for x in ("wgmma_persistent", "wgmma_columns")
    )
    out, lse = cupyfa.attention(q, k, v, return_lse=True, **forward)
    dq, *_ = cupyfa.backward(dout, q, k, v, out, lse, **backward)
    # Arrays on the host: rows are padded during the transfer to the device.
    forward["check"] = backward["check"] = False
    assert np.array_equal(cupyfa.attention(q, k, v, **forward), out)
    again, *_ = cupyfa.backward(dout, q, k, v, out, lse, **backward)
    np.testing.assert_allclose(again.astype(float), dq.astype(float), rtol=0.01, atol=0.01)
