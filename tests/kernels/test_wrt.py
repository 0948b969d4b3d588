"""Gradients of arrays that change scores: biases, slopes, sinks and captured arrays."""

import numpy as np
import pytest
from helpers.gradients import gradients_of
from helpers.problems import able, drawn, inputs_of, planned, usual_first

import cupyfa
from cupyfa.lab.bench.sweeps import usual_dtype
from cupyfa.lab.verify.case import Case
from cupyfa.ladder import LADDER
from cupyfa.ladder.operations import OPERATIONS
from cupyfa.problem.dtypes import dtype_named
from cupyfa.runtime import guard

KERNELS = able("places", "backward")
TEXT = "cap[head] * tanh(score / cap[head]) + slope[head] * score * key + table[head, bucket[key]]"
ARRAYS = ("bias", "alibi_slopes", "sink", "slope", "table", "cap")
M, N, HEADS, D = 20, 30, 4, 8


def arrays_of(dtype="float64", seed=0):
    """Returns dout, q, k and v, and the arrays that expressions read."""
    rng, of = np.random.default_rng(seed), dtype_named(dtype)
    shapes = (2, HEADS, M, D), (2, HEADS, M, D), (2, 2, N, D), (2, 2, N, D)
    arrays = [rng.standard_normal(x).astype(of.numpy) for x in shapes]
    read = {
        "bias": rng.standard_normal((1, HEADS, M, N)).astype(of.numpy),
        "alibi_slopes": rng.random(HEADS).astype(of.sums),
        "sink": rng.standard_normal((2, HEADS)).astype(of.sums),
        "slope": rng.standard_normal(HEADS).astype(of.sums) / 10,
        "table": rng.standard_normal((HEADS, 5)).astype(of.numpy),
        "cap": (2 + rng.random(HEADS)).astype(of.sums),
    }
    return arrays, read


def options(read, **more):
    own = {x: read[x] for x in ("bias", "alibi_slopes", "sink")}
    captured = {x: read[x] for x in ("slope", "table", "cap")}
    captured["bucket"] = np.arange(N) // 6
    return {**own, "score_mod": TEXT, "captured": captured, "causal": True, **more}


def gradients(kernel, dtype, wrt=ARRAYS, backend="simulator", more=None, **how):
    arrays, read = arrays_of(dtype)
    return gradients_of(wrt, kernel, arrays, backend, more, **options(read, **how))


@pytest.mark.parametrize("kernel", usual_first(KERNELS))
def test_every_kernel(backend, kernel):
    dtype = usual_dtype(kernel)
    dropout = cupyfa.Dropout(0.2, 1)
    found = gradients(kernel, dtype, (*ARRAYS, "v"), backend, {"check": True}, dropout=dropout)
    _, read = arrays_of(dtype)
    for name, x in zip(ARRAYS, found):
        assert (x.shape, x.dtype) == (read[name].shape, read[name].dtype)


@pytest.mark.few(1)
def test_gradients_without_keys_are_zero(backend):
    q, k = np.ones((2, 1, 5, 8), np.float32), np.ones((2, 1, 0, 8), np.float32)
    read = {"score_mod": "score + slope[head]", "captured": {"slope": np.ones(1, np.float32)}}
    out, pullback = cupyfa.vjp(q, k, k, wrt=("slope", "q"), backend=backend, **read)
    slope, dq = pullback(out)
    assert slope.shape == (1,) and dq.shape == q.shape and not np.any(slope) and not np.any(dq)


@pytest.mark.parametrize("name", ARRAYS)
def test_gradients_are_those_of_finite_differences(name):
    (dout, q, k, v), read = arrays_of()
    dlse = np.random.default_rng(1).standard_normal((2, HEADS, M))
    on = {"backend": "simulator", "kernel": "fa2"}

    def loss(step):
        moved = {**read, name: read[name] + step}
        out, lse = cupyfa.attention(q, k, v, return_lse=True, **options(moved), **on)
        return (out * dout).sum() + (lse * dlse).sum()

    (found,) = gradients("two_pass", "float64", (name,), more={"dlse": dlse})
    rng = np.random.default_rng(2)
    for _ in range(2):
        step = 1e-5 * rng.standard_normal(read[name].shape)
        change = (loss(step) - loss(-step)) / 2
        np.testing.assert_allclose((found * step).sum(), change, rtol=1e-6, atol=1e-12)


# For the launch on Hopper's tensor cores: more rows and keys than a tile, several tiles per block,
# reused stages, and biases broadcast along several axes or none.
ON_HOPPER = {
    "broadcast over batch": ("1hmn", {"heads": 2, "kv_heads": 1, "M": 150, "N": 290}),
    "causal": ("1hmn", {"heads": 2, "M": 290, "N": 270, "causal": True}),
    "over heads": ("b1mn", {"heads": 4, "kv_heads": 2, "M": 70, "N": 45, "d": 24, "dv": 40}),
    "over both, window": ("11mn", {"heads": 2, "M": 300, "N": 300, "d": 128, "window": (70, 9)}),
    "over nothing": ("bhmn", {"heads": 2, "M": 130, "N": 8, "d": 192, "softcap": 5.0}),
    "dropout": ("1hmn", {"heads": 2, "M": 33, "N": 130, "dropout": 0.2, "dropout_seed": 1}),
    "a text that hides": ("11mn", {"M": 200, "N": 100, "mask_mod": "key % 3 != query // 100"}),
    "one query": ("11mn", {"heads": 3, "M": 1, "N": 300, "d": 256}),
}


@pytest.mark.parametrize(
    "what", [pytest.param(x, marks=[pytest.mark.slow] * (i > 0)) for i, x in enumerate(ON_HOPPER)]
)
def test_a_bias_on_hopper(backend, what):
    axes, sizes = ON_HOPPER[what]
    given = {"batch": 2, "d": 64, "bias": f"bf16[{axes}]", "wrt": "bias", **sizes}
    kernel = LADDER["backward"]["wgmma_two_pass" if what == "causal" else "wgmma_columns"]
    plan = planned(kernel, backend, given, "bfloat16")
    assert plan.launches[-1].entry == "wgmma_bias_gradient"
    guard.checked(backend, plan, inputs_of(plan), {})


@pytest.mark.parametrize(
    "bias, more",
    [
        ("bf16[1h1n]", {}),
        ("f32[1hmn]", {}),
        ("bf16[1hmn]", {"wrt": "bias,alibi_slopes", "alibi_slopes": "h"}),
    ],
)
def test_other_gradients_on_hopper_are_added_pair_by_pair(bias, more):
    p = cupyfa.Problem.of_sizes(
        M=9, N=9, d=64, dtype="bfloat16", bias=bias, **{"wrt": "bias", **more}
    )
    entries = [x.entry for x in LADDER["backward"]["wgmma_columns"].steps(p)]
    assert "expression_gradients" in entries and "wgmma_bias_gradient" not in entries


@pytest.mark.slow
def test_pairs_without_weight_add_nothing_on_hopper(backend):
    q, dout, k, v, bias = drawn(
        *((2, 2, 40, 16), (2, 2, 40, 16), (2, 2, 70, 16), (2, 2, 70, 16), (1, 2, 40, 70)),
        dtype="bfloat16",
    )
    bias[0, 0, 3] = bias[0, 1, 9, :10] = -np.inf
    bias[0, 0, 4, 5] = dout[0, 1, 5] = np.nan
    v[1, 1, 33] = np.inf
    found, expected = (
        gradients_of(("bias",), x, (dout, q, k, v), backend, bias=bias, causal="top-left")[0]
        for x in ("wgmma_columns", "mma_columns")
    )
    found, expected = found.astype(np.float32), expected.astype(np.float32)
    assert np.isnan(expected).any() and (expected[0, 0, 3] == 0).all()
    np.testing.assert_allclose(found, expected, rtol=2**-7, atol=1e-6)


def test_vjp_prepared_calls_and_grads():
    (dout, q, k, v), read = arrays_of("float32")
    on = {"backend": "simulator", **options(read)}
    expected = gradients("two_pass", "float32", ("table", "q"))
    out, lse = cupyfa.attention(q, k, v, return_lse=True, kernel="fa2", **on)
    wrt = {"wrt": ("table", "q"), "kernel": "two_pass"}
    _, pullback = cupyfa.vjp(
        *(q, k, v), wrt="table,q", kernel="fa2", backward_kernel="two_pass", **on
    )
    prepared = cupyfa.compile(dout, q, k, v, out, lse, **wrt, **on)
    captured = {x: y for x, y in on["captured"].items() if np.ndim(y)}
    arrays = {x: on[x] for x in ("bias", "alibi_slopes", "sink")}
    wide = np.empty((HEADS, 10), np.float32)[:, ::2]  # non-contiguous strides
    given = cupyfa.backward(*(dout, q, k, v, out, lse), grads=(wide, None), **wrt, **on)
    assert given[0] is wide
    for found in (
        pullback(dout),
        prepared(dout, q, k, v, out, lse, captured=captured, **arrays),
        given,
    ):
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_array_equal(x, y)


def test_infinite_and_nan_terms_stay_where_they_are(backend):
    arrays, read = arrays_of("float32")
    arrays[0][0, 1, 5] = np.nan
    (found,) = gradients_of(("bias",), "two_pass", arrays, backend, bias=read["bias"])
    assert np.isnan(found[0, 1, 5]).all()
    found[0, 1, 5] = 0
    assert np.isfinite(found).all()


def test_bounds_allow_for_arrays_of_a_narrower_dtype():
    p = cupyfa.Problem.of_sizes(M=5, N=6, d=4, dtype="float64", bias="f32[1hmn]", wrt="bias")
    inputs = Case("backward", p).inputs()
    expected = OPERATIONS["backward"].reference(inputs, p, [None])[None]["d_bias"]
    rounded = expected.value.astype(np.float32)
    assert (abs(rounded - expected.value) <= expected.bound).all() and rounded.any()


@pytest.mark.gpu
def test_every_run_gives_the_same_bits(cuda):
    first = gradients("two_pass", "float32", ARRAYS, cuda, {"deterministic": True})
    for _ in range(20):
        for x, y in zip(gradients("two_pass", "float32", ARRAYS, cuda), first):
            np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_captured_arrays_may_be_called_like_inputs():
    (dout, q, k, v), read = arrays_of("float64")
    how = {"causal": True, "backend": "simulator", "kernel": "fa2", "backward_kernel": "two_pass"}

    def gradients_with(name):
        text = {"score_mod": f"score + {name}[head] * key", "captured": {name: read["slope"]}}
        return cupyfa.vjp(q, k, v, **text, **how)[1](dout)

    for one, other in zip(gradients_with("k"), gradients_with("slope"), strict=True):
        np.testing.assert_array_equal(one, other)
