"""Sinks, scores that rows have besides those of keys, and gradients of lse, in every rung."""

import ml_dtypes
import numpy as np
import pytest
from helpers.problems import FORWARD, name, usual_first

import cupyfa
from cupyfa.errors import Unsupported
from cupyfa.lab.bench.sweeps import usual_dtype
from cupyfa.ladder import LADDER

F = np.float32
ABLE = [kernel for kernel in FORWARD.values() if "sink" in kernel.features]
UNABLE = [kernel for kernel in FORWARD.values() if "sink" not in kernel.features]
SINKS = np.array([0.5, -np.inf, 3.0, -2.0], F)
# The first 25 rows see no key.
RAGGED = {"M": 70, "N": 45, "causal": True}
OTHERS = (
    {"M": 45, "N": 70, "scale": -0.3, "softcap": 2.0},
    {"M": 67, "N": 131, "window": (20, 3), "score_mod": "score - 0.1 * key"},
    {"M": 3, "N": 70, "mask": "key > 80 * (query % 2)"},
    {"M": 5, "N": 0},
)


def drawn(M, N, dtype, *, batch=2, heads=4, kv_heads=2, d=24, seed=0):
    rng = np.random.default_rng(seed)
    of = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    shapes = (batch, heads, M, d), (batch, kv_heads, N, d), (batch, kv_heads, N, d)
    return [rng.standard_normal(x).astype(of) for x in shapes]


def checked(kernel, backend, sinks, *, M, N, tiles=None, **options):
    q, k, v = drawn(M, N, usual_dtype(kernel))
    how = {"kernel": kernel, "backend": backend, "tiles": tiles, **options}
    return cupyfa.attention(q, k, v, sink=sinks, return_lse=True, check=True, **how)


@pytest.mark.parametrize("kernel", usual_first(ABLE))
def test_rows_begin_with_their_sink(backend, kernel):
    out, lse = checked(kernel, backend, SINKS, **RAGGED)
    assert not np.any(out[:, :, :25])
    np.testing.assert_allclose(lse[:, :, :25], np.broadcast_to(SINKS[:, None], (2, 4, 25)), 1e-6)


@pytest.mark.sampled(8)
@pytest.mark.slow
@pytest.mark.parametrize("how", OTHERS, ids=str)
@pytest.mark.parametrize("kernel", ABLE, ids=name)
def test_sinks_join_other_options(backend, kernel, how):
    checked(kernel, backend, np.stack([SINKS, SINKS[::-1] * 2]).astype(np.float64), **how)


@pytest.mark.parametrize("how", [RAGGED, {"M": 2, "N": 170}], ids=str)
def test_one_of_several_splits_takes_the_sink(backend, how):
    tiles = {"Br": 16, "Bc": 16, "Wr": 16, "stages": 3, "blocks_per_sm": 3}
    checked(FORWARD["mma_split_kv"], backend, SINKS, tiles=tiles, **how)


def of_any_size(kernel, backend, how):
    # Of two terms of 1e9 the larger one takes all. A number that is none, or infinite, makes NaN.
    out, lse = checked(kernel, backend, np.array([1e9, -3e38, np.nan, np.inf], F), **how)
    assert np.isnan(lse[:, 2:]).all() and np.isnan(out[:, 2:]).all()
    assert not np.any(out[:, 0]) and np.all(lse[:, 0] == F(1e9))
    np.testing.assert_array_equal(lse[:, 1, :25] == F(-3e38), how["M"] > how["N"])


@pytest.mark.parametrize("kernel", ["fa2", "mma_pipelined"])
def test_sinks_of_any_size(backend, kernel):
    of_any_size(FORWARD[kernel], backend, RAGGED)


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("how", [RAGGED, {"M": 40, "N": 60}], ids=str)
@pytest.mark.parametrize("kernel", ABLE, ids=name)
def test_sinks_of_any_size_in_every_rung(backend, kernel, how):
    of_any_size(kernel, backend, how)


@pytest.mark.parametrize("kernel", UNABLE, ids=name)
def test_rungs_below_fa2_refuse_sinks(backend, kernel):
    with pytest.raises(Unsupported, match=f"{kernel.name}.* does not support .*sink"):
        checked(kernel, backend, SINKS, M=4, N=4)


def test_wrong_sinks_are_refused(backend):
    q, k, v = drawn(4, 4, "float32")
    for wrong, error, message in (
        (SINKS[:3], ValueError, r"sink has shape \(3,\); its shape must be \[heads\]"),
        (np.ones(4, int), TypeError, "sink is int64; it must be of a floating-point dtype"),
        (1.0, TypeError, r"sink is 1\.0; give an array"),
    ):
        for call, arrays in (
            (cupyfa.attention, (q, k, v)),
            (cupyfa.backward, (q, q, k, v, q, q[..., 0])),
        ):
            with pytest.raises(error, match=message):
                call(*arrays, sink=wrong, backend=backend)


BACKWARD = LADDER["backward"]
OF_EACH_DELTA = ("columns", "mma_columns", "wgmma_columns", "wgmma_two_pass")


def checked_gradients(kernel, backend):
    q, k, v = drawn(70, 45, usual_dtype(BACKWARD[kernel]), batch=1, heads=2, kv_heads=1)
    rng = np.random.default_rng(1)
    how = {"backend": backend, "causal": True, "sink": np.array([1.0, -np.inf], F), "check": True}
    forward = {"kernel": "fa2", "return_lse": True}
    (out, lse), pullback = cupyfa.vjp(q, k, v, backward_kernel=kernel, **forward, **how)
    dlse = rng.standard_normal(lse.shape).astype(lse.dtype)
    pullback(rng.standard_normal(out.shape).astype(out.dtype), dlse)


@pytest.mark.parametrize("kernel", OF_EACH_DELTA)
def test_the_gradient_of_lse_counts(backend, kernel):
    checked_gradients(kernel, backend)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [x for x in BACKWARD if x not in OF_EACH_DELTA])
def test_the_gradient_of_lse_counts_in_every_rung(backend, kernel):
    checked_gradients(kernel, backend)


def test_gradients_of_out_and_lse_are_finite_differences(backend):
    arrays = drawn(9, 7, "float64", batch=1, d=5)
    rng = np.random.default_rng(1)
    how = {"sink": SINKS, "causal": True, "backend": backend, "return_lse": True}

    def loss(*arrays):
        out, lse = cupyfa.attention(*arrays, **how)
        return (out * dout).sum() + (np.where(np.isinf(lse), 0, lse) * dlse).sum()

    (out, lse), pullback = cupyfa.vjp(*arrays, **how)
    dout, dlse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    for i, gradient in enumerate(pullback(dout, dlse)):
        step = rng.standard_normal(arrays[i].shape)
        ends = ([*arrays[:i], arrays[i] + h * step, *arrays[i + 1 :]] for h in (1e-5, -1e-5))
        difference = np.subtract(*(loss(*x) for x in ends)) / 2e-5
        np.testing.assert_allclose((gradient * step).sum(), difference, rtol=1e-6)


def test_a_wrong_gradient_of_lse_is_refused(backend):
    q, k, v = drawn(4, 4, "float32")
    _, pullback = cupyfa.vjp(q, k, v, backend=backend)
    with pytest.raises(ValueError, match=r"dlse is float32 \(4,\); it must be float32 \(2, 4, 4\)"):
        pullback(q, np.ones(4, F))


def test_plans_take_forms_of_sinks():
    plan = cupyfa.plan(M=64, d=16, heads=4, sink="bh", kernel="fa2", backend="simulator")
    assert plan.launches[0].constants["has_sink"]
