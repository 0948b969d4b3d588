"""Directional derivatives, compared with finite differences, dual numbers and their own laws."""

import itertools
import re

import ml_dtypes
import numpy as np
import pytest
from helpers.cli import cli
from helpers.problems import able, drawn

import cupyfa
from cupyfa import Dropout, Packed, Padded, Problem
from cupyfa.lab.analysis import roofline_model
from cupyfa.lab.analysis.resources import compile_launch, limits_of
from cupyfa.planner import choose_kernel as planning
from cupyfa.problem.structured_arrays import wrap

KERNELS = pytest.mark.parametrize("kernel", able("lse", "tangent"), ids=lambda x: x.name)
SHAPES = (2, 4, 21, 12), (2, 2, 35, 12), (2, 2, 35, 7)
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625])
BIAS, PAIRS = drawn((1, 4, 21, 35), (1, 4, 21, 35), dtype="float64", seed=5)
OPTIONS = (
    {},
    {"causal": True, "scale": -0.4},
    {"window": (3, 5), "offset": 4, "softcap": 1.5},
    {"causal": "top-left", "alibi_slopes": SLOPES, "sink": SLOPES},
    {"score_mod": "tanh(score) * score + query * 0.01", "mask": "(query + key) % 3 > 0"},
    {"bias": BIAS, "mask": PAIRS > -1, "dropout": Dropout(0.3, 7)},
    {"score_mod": "score if key < 9 else 2 * score", "causal": True},
)


def arrays(seed=0, dtype="float64", shapes=SHAPES):
    """Returns q, k and v, and a direction in which they move."""
    both = drawn(*shapes, *shapes, dtype=dtype, seed=seed)
    return both[:3], both[3:]


def able_dtype(kernel):
    return "float64" if "float64" in kernel.dtypes else kernel.dtypes[0]


def require_close(mine, other):
    """Requires results that differ by a few roundings, as a compiler may contract other sums."""
    unit = 8 * float(ml_dtypes.finfo(mine.dtype).eps)
    mine, other = (x.astype(np.float64) for x in (mine, other))
    np.testing.assert_allclose(mine, other, rtol=unit, atol=unit * np.abs(other).max())


def moved(qkv, tangents, step):
    return [x + step * y for x, y in zip(qkv, tangents)]


@pytest.mark.parametrize("how", OPTIONS, ids="-".join)
def test_tangents_are_finite_differences(how):
    qkv, tangents = arrays()
    step, how = 1e-5, {**how, "backend": "simulator"}
    plain, derivative = cupyfa.jvp(*qkv, tangents=tangents, **how, check=True)
    for x, y in zip(plain, cupyfa.attention(*qkv, return_lse=True, **how)):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)
    ends = [
        cupyfa.attention(*moved(qkv, tangents, x), return_lse=True, **how) for x in (step, -step)
    ]
    for mine, above, below in zip(derivative, *ends):
        assert np.abs(mine).max() > 0.1
        np.testing.assert_allclose(mine, (above - below) / (2 * step), rtol=1e-7, atol=1e-8)


@pytest.mark.slow
def test_tangents_are_those_of_jax():
    jax = pytest.importorskip("jax")
    qkv, tangents = arrays()

    def attention(q, k, v):
        k, v = (x.repeat(2, axis=1) for x in (k, v))
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        seen = np.tril(np.ones(scores.shape[2:], bool), 35 - 21)
        scores = jax.numpy.where(seen, 2 * jax.numpy.tanh(scores / 2), -np.inf)
        lse = jax.nn.logsumexp(scores, axis=-1)
        return jax.numpy.exp(scores - lse[..., None]) @ v, lse

    with jax.enable_x64(True):
        expected = jax.jvp(attention, tuple(qkv), tuple(tangents))
    found = cupyfa.jvp(*qkv, tangents=tangents, causal=True, softcap=2.0, backend="simulator")
    for mine, its in zip((*found[0], *found[1]), (*expected[0], *expected[1])):
        np.testing.assert_allclose(mine, its, rtol=1e-11, atol=1e-12)


def test_a_tangent_is_linear_in_the_direction():
    qkv, one = arrays()
    _, other = arrays(seed=1)
    how = {"causal": True, "softcap": 3.0, "backend": "simulator"}
    of = [cupyfa.jvp(*qkv, tangents=x, **how)[1] for x in (one, other, moved(one, other, -2.5))]
    for first, second, both in zip(*of):
        np.testing.assert_allclose(both, first - 2.5 * second, rtol=1e-10, atol=1e-11)


def test_a_tangent_is_the_transpose_of_the_gradient():
    qkv, tangents = arrays()
    how = {"window": (8, 2), "alibi_slopes": SLOPES, "sink": SLOPES, "backend": "simulator"}
    (out, lse), pullback = cupyfa.vjp(*qkv, return_lse=True, **how)
    dout, dlse = drawn(out.shape, lse.shape, dtype="float64", seed=3)
    _, (d_out, d_lse) = cupyfa.jvp(*qkv, tangents=tangents, **how)
    forward = (dout * d_out).sum() + (dlse * d_lse).sum()
    backward = sum((x * y).sum() for x, y in zip(pullback(dout, dlse), tangents))
    np.testing.assert_allclose(forward, backward, rtol=1e-11)


@KERNELS
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_layouts_and_leading_axes(backend, kernel, layout):
    qkv, tangents = arrays(dtype=able_dtype(kernel))
    expected = cupyfa.jvp(*qkv, tangents=tangents, kernel=kernel, backend=backend, check=True)
    how = {"kernel": kernel, "backend": backend, "layout": layout, "check": True}
    if layout == "bshd":
        qkv, tangents = ([x.swapaxes(1, 2) for x in of] for of in (qkv, tangents))
    else:  # one batch element, without its axis
        qkv, tangents = ([x[0] for x in of] for of in (qkv, tangents))
        expected = [[x[0] for x in of] for of in expected]
    (out, lse), (d_out, d_lse) = cupyfa.jvp(*qkv, tangents=tangents, **how)
    found = (out, d_out) if layout == "bhsd" else (out.swapaxes(1, 2), d_out.swapaxes(1, 2))
    for (x, of_lse), y, its_lse in zip(expected, found, (lse, d_lse)):
        np.testing.assert_array_equal(y, x)
        np.testing.assert_array_equal(its_lse, of_lse)


@KERNELS
def test_sequences_of_different_lengths(backend, kernel):
    dtype, (rows, keys) = able_dtype(kernel), ([0, 4, 4, 19, 21], [0, 9, 12, 33, 35])
    how = {"kernel": kernel, "backend": backend, "causal": True}
    shapes = [(21, 4, 12), (35, 2, 12), (35, 2, 7)]
    qkv, tangents = arrays(dtype=dtype, shapes=shapes)
    offsets = [np.array(x, np.int32) for x in (rows, keys, keys)]
    packed = cupyfa.jvp(*map(Packed, qkv, offsets), tangents=tangents, check=True, **how)
    for i in range(4):
        spans = [slice(x[i], x[i + 1]) for x in (rows, keys, keys)]
        one, its = ([x[y].swapaxes(0, 1) for x, y in zip(of, spans)] for of in (qkv, tangents))
        for found, alone in zip(packed, cupyfa.jvp(*one, tangents=its, **how)):
            np.testing.assert_allclose(
                found[0][spans[0]].swapaxes(0, 1).astype("f8"), alone[0].astype("f8"), atol=0.02
            )
            np.testing.assert_allclose(found[1][:, spans[0]], alone[1], rtol=1e-4, atol=1e-4)
    qkv, tangents = arrays(dtype=dtype)
    lengths = {"lengths_q": [21, 3], "lengths_k": [0, 17]}
    padded = cupyfa.jvp(*wrap(*qkv, lengths), tangents=tangents, check=True, **how)
    for x in padded[1]:
        assert not x[0].any() and not x[1, :, 3:].any() and x[1, :, :3].any()


@KERNELS
def test_16_bit_inputs_have_float32_results_on_request(backend, kernel):
    if "bfloat16" not in kernel.dtypes:
        pytest.skip("takes no bfloat16")
    qkv, tangents = arrays(dtype="bfloat16")
    how = {"tangents": tangents, "kernel": kernel, "backend": backend, "check": True}
    narrow, wide = cupyfa.jvp(*qkv, **how), cupyfa.jvp(*qkv, out="float32", **how)
    for x, y in zip(narrow, wide):
        assert x[0].dtype == ml_dtypes.bfloat16 and y[0].dtype == np.float32
        np.testing.assert_array_equal(y[0].astype(ml_dtypes.bfloat16), x[0])


def test_rows_without_keys_do_not_move():
    qkv, tangents = arrays(shapes=[(1, 1, 9, 4), (1, 1, 4, 4), (1, 1, 4, 4)])
    (out, lse), (d_out, d_lse) = cupyfa.jvp(
        *qkv, tangents=tangents, causal=True, backend="simulator", check=True
    )
    assert np.isneginf(lse[0, 0, :5]).all() and not out[0, 0, :5].any()
    assert not d_lse[0, 0, :5].any() and not d_out[0, 0, :5].any()


@KERNELS
@pytest.mark.parametrize("modified", [True, False], ids=["bias", "product"])
def test_a_row_of_scores_of_minus_infinity_does_not_move(backend, kernel, modified):
    """No weight multiplies a derivative of the row's scores, even one of NaN."""
    qkv, tangents = arrays(dtype=kernel.dtypes[0])
    how = {"tangents": tangents, "kernel": kernel, "backend": backend, "check": True}
    tangents[0][0, 0, 3] = np.nan
    if modified:
        how["bias"] = np.where(np.arange(21)[:, None] == 3, -np.inf, BIAS)
    else:
        qkv[0][0, 0, 3, 0] = -np.inf
        qkv[1][0, 0, :, 0] = np.abs(qkv[1][0, 0, :, 0]) + 1
    (out, lse), (d_out, d_lse) = cupyfa.jvp(*qkv, **how)
    assert np.isneginf(lse[0, 0, 3]) and not out[0, 0, 3].any()
    assert d_lse[0, 0, 3] == 0 and not d_out[0, 0, 3].any()


def test_a_derivative_that_does_not_exist_is_nan():
    qkv, tangents = arrays(dtype="float32")
    tangents[1][0, 0, 3] = np.inf
    how = {"tangents": tangents, "backend": "simulator", "check": True}
    _, (d_out, d_lse) = cupyfa.jvp(*qkv, **how)
    assert np.isnan(d_out[0, :2]).all() and not np.isfinite(d_lse[0, :2]).any()
    assert np.isfinite(d_out[0, 2:]).all() and np.isfinite(d_out[1]).all()


@KERNELS
def test_nan_may_be_lost_where_a_derivative_rounds_to_0(kernel):
    """The softcap saturates: its derivative, 1e-16, is 0 in a kernel's arithmetic."""
    dtype = kernel.dtypes[0]
    (q, k, v), (dq, dk, dv) = arrays(dtype=dtype)
    q[:], k[:], dq[0, 0, 3] = 1, 1, np.nan
    how = {"kernel": kernel, "backend": "simulator", "check": True}
    cupyfa.jvp(q, k, v, tangents=(dq, dk, dv), softcap=0.5, scale=0.75, **how)


def test_padded_arrays_may_be_passed_as_such():
    qkv, tangents = arrays(dtype="float32")
    q, k, v = (Padded(x, np.array([x.shape[2]] * 2, np.int32)) for x in qkv)
    how = {"tangents": tangents, "backend": "simulator"}
    for x, y in zip(cupyfa.jvp(q, k, v, **how), cupyfa.jvp(*qkv, **how)):
        for mine, other in zip(x, y):
            np.testing.assert_array_equal(mine, other)


@KERNELS
@pytest.mark.parametrize("which", ["q", "k", "v", "qk", "qv", "kv"])
def test_a_tangent_of_none_is_0(backend, kernel, which):
    if "zero_tangents" not in kernel.features:
        pytest.skip("takes no tangents of None")
    qkv, tangents = arrays(dtype=able_dtype(kernel))
    how = {"kernel": kernel, "backend": backend, "causal": True}
    some = [x if name in which else None for name, x in zip("qkv", tangents)]
    zeros = [x if name in which else np.zeros_like(x) for name, x in zip("qkv", tangents)]
    found = cupyfa.jvp(*qkv, tangents=some, check=True, **how)
    for mine, other in zip(found[1], cupyfa.jvp(*qkv, tangents=zeros, **how)[1]):
        require_close(mine, other)


def test_infinity_times_a_tangent_of_none_is_not_nan():
    qkv, tangents = arrays(dtype="float32")
    qkv[2][0, 0, 3] = np.inf  # O is infinite, but lse and its tangent are finite
    how = {"backend": "simulator", "check": True}
    _, (d_out, d_lse) = cupyfa.jvp(*qkv, tangents=(tangents[0], None, None), **how)
    assert np.isfinite(d_lse).all() and np.isnan(d_out[0, :2]).all()
    qkv[2][0, 0, 3], qkv[0][0, 0, 4] = 0, np.inf
    _, (d_out, d_lse) = cupyfa.jvp(*qkv, tangents=(None, None, tangents[2]), **how)
    assert np.isnan(d_out[0, 0, 4]).all() and np.isfinite(d_out[0, 0, 5:]).all()


@pytest.mark.each_choice
@KERNELS
@pytest.mark.parametrize("directions", [1, 2, 4, 8])
def test_several_directions_are_those_of_each(backend, kernel, directions):
    if "directions" not in kernel.features:
        pytest.skip("takes one direction")
    qkv, _ = arrays(dtype=able_dtype(kernel))
    of_each = [arrays(seed=i, dtype=able_dtype(kernel))[1] for i in range(1, directions + 1)]
    how = {"kernel": kernel, "backend": backend, "window": (9, 4)}
    together = [np.stack(x) for x in zip(*of_each)]
    plain, (d_out, d_lse) = cupyfa.jvp(*qkv, tangents=together, check=True, **how)
    assert d_out.shape == (directions, *plain[0].shape)
    for i, tangents in enumerate(of_each):
        (out, lse), alone = cupyfa.jvp(*qkv, tangents=tangents, **how)
        for mine, other in zip((*plain, d_out[i], d_lse[i]), (out, lse, *alone)):
            require_close(mine, other)


# Arrays that change scores, and for each of them a tangent.
SCORED = {"bias": (4, 21, 35), "alibi_slopes": (4,), "sink": (2, 4), "w": (35,)}
TEXT = "tanh(score * w[key]) + w[key] * w[0]"


def scored(dtype="float64", directions=()):
    """Returns arrays that change scores, and their tangents, by name."""
    shapes = SCORED.values()
    values = drawn(*shapes, dtype=dtype, seed=9)
    tangents = drawn(*((*directions, *x) for x in shapes), dtype=dtype, seed=10)
    return dict(zip(SCORED, values)), dict(zip(SCORED, tangents))


def keywords(values):
    own = {name: values[name] for name in ("bias", "alibi_slopes", "sink")}
    return {**own, "captured": {"w": values["w"]}, "score_mod": TEXT, "causal": True}


MOVING = ("bias", "alibi_slopes", "sink", "w", "q w", "k v bias sink", "q k v bias alibi_slopes w")


@pytest.mark.parametrize("names", MOVING)
def test_tangents_of_arrays_are_finite_differences(names):
    qkv, _ = arrays()
    values, tangents = scored()
    start = {**dict(zip("qkv", qkv)), **values}
    given = {**dict(zip("qkv", arrays(seed=4)[0])), **tangents}
    given = {name: given[name] for name in names.split()}

    def at(step):
        there = {x: y + step * given[x] if x in given else y for x, y in start.items()}
        how = {**keywords(there), "return_lse": True, "backend": "simulator"}
        return cupyfa.attention(*(there[x] for x in "qkv"), **how)

    how = {**keywords(values), "backend": "simulator", "check": True}
    _, found = cupyfa.jvp(*qkv, tangents=given, **how)
    for mine, above, below in zip(found, at(1e-5), at(-1e-5)):
        assert np.abs(mine).max() > 0.1
        np.testing.assert_allclose(mine, (above - below) / 2e-5, rtol=1e-7, atol=1e-8)


def test_a_tangent_of_arrays_is_the_transpose_of_their_gradient():
    qkv, moving = arrays()
    values, tangents = scored()
    how = {**keywords(values), "backend": "simulator"}
    names = (*"qkv", *SCORED)
    (out, lse), pullback = cupyfa.vjp(*qkv, return_lse=True, wrt=names, **how)
    dout, dlse = drawn(out.shape, lse.shape, dtype="float64", seed=3)
    given = {**dict(zip("qkv", moving)), **tangents}
    _, (d_out, d_lse) = cupyfa.jvp(*qkv, tangents=given, **how)
    forward = (dout * d_out).sum() + (dlse * d_lse).sum()
    backward = sum((x * given[name]).sum() for name, x in zip(names, pullback(dout, dlse)))
    np.testing.assert_allclose(forward, backward, rtol=1e-11)


def test_a_tangent_of_arrays_is_linear_in_the_direction():
    qkv, _ = arrays()
    values, one = scored()
    other = {name: x[..., ::-1] for name, x in one.items()}
    both = {name: x - 2.5 * other[name] for name, x in one.items()}
    how = {**keywords(values), "backend": "simulator"}
    of = [cupyfa.jvp(*qkv, tangents=x, **how)[1] for x in (one, other, both)]
    for first, second, found in zip(*of):
        np.testing.assert_allclose(found, first - 2.5 * second, rtol=1e-10, atol=1e-11)


@pytest.mark.slow
def test_tangents_of_arrays_are_those_of_jax():
    jax = pytest.importorskip("jax")
    jnp, qkv, (values, tangents) = jax.numpy, arrays()[0], scored()
    away = np.abs(np.arange(21)[:, None] + 35 - 21 - np.arange(35))

    def attention(q, k, v, bias, alibi_slopes, sink, w):
        k, v = (x.repeat(2, axis=1) for x in (k, v))
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        scores = jnp.tanh(scores * w) + w * w[0] - alibi_slopes[:, None, None] * away + bias
        scores = jnp.where(np.tril(np.ones(scores.shape[2:], bool), 35 - 21), scores, -np.inf)
        sinks = jnp.broadcast_to(sink[..., None, None], (*scores.shape[:3], 1))
        lse = jax.nn.logsumexp(jnp.concatenate([scores, sinks], -1), axis=-1)
        return jnp.exp(scores - lse[..., None]) @ v, lse

    moving = (*arrays(seed=4)[0], *tangents.values())
    with jax.enable_x64(True):
        expected = jax.jvp(attention, (*qkv, *values.values()), moving)
    given = dict(zip((*"qkv", *SCORED), moving))
    found = cupyfa.jvp(*qkv, tangents=given, **keywords(values), backend="simulator")
    for mine, its in zip((*found[0], *found[1]), (*expected[0], *expected[1])):
        np.testing.assert_allclose(mine, its, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_several_directions_of_arrays_are_those_of_each(backend, dtype):
    qkv, _ = arrays(dtype=dtype)
    values, tangents = scored(dtype, directions=(3,))
    how = {**keywords(values), "backend": backend, "check": True}
    _, together = cupyfa.jvp(*qkv, tangents=tangents, **how)
    for i in range(3):
        one = {name: x[i] for name, x in tangents.items()}
        for mine, other in zip(together, cupyfa.jvp(*qkv, tangents=one, **how)[1]):
            require_close(mine[i], other)


def test_an_element_that_is_not_selected_may_have_any_tangent():
    qkv, tangents = arrays(dtype="float32")
    text = "where(key < 9, score, score + width[key])"
    width = np.linspace(0, 1, 35, dtype=np.float32)
    tangents = dict(zip("qkv", tangents)) | {"width": np.ones_like(width)}
    how = {"score_mod": text, "captured": {"width": width}, "backend": "simulator", "check": True}
    right = cupyfa.jvp(*qkv, tangents=tangents, **how)
    tangents["width"][:9] = np.nan
    for x, y in zip(cupyfa.jvp(*qkv, tangents=tangents, **how), right):
        for mine, other in zip(x, y):
            np.testing.assert_array_equal(mine, other)


def test_a_sink_without_visible_keys_moves_lse_alone():
    x, sink = drawn((1, 1, 5, 4), (1,), dtype="float32")
    how = {"sink": sink, "mask": "key > 9", "backend": "simulator", "check": True}
    _, (d_out, d_lse) = cupyfa.jvp(x, x, x, tangents={"sink": sink + 1}, **how)
    assert not d_out.any() and (d_lse == sink + 1).all()
    _, (_, d_lse) = cupyfa.jvp(x, x, x, tangents={"sink": sink}, **{**how, "sink": sink - np.inf})
    assert not d_lse.any()


def test_only_the_scalar_kernel_moves_arrays():
    qkv, (values, tangents) = arrays(dtype="float16")[0], scored("float16")
    how = {**keywords(values), "tangents": tangents, "backend": "simulator"}
    for kernel in ("mma_tangent", "wgmma_tangent", "mma_f64_tangent"):
        with pytest.raises(cupyfa.Unsupported, match="kernels that can: fa2_tangent"):
            cupyfa.jvp(*qkv, kernel=kernel, **how)
    for arch, dtype in itertools.product(("80", "90"), ("float16", "float64")):
        form = {"dtype": dtype, "bias": "1hmn", "wrt": "bias", "tangents": "none"}
        p = Problem.of_sizes(M=512, d=64, heads=4, **form)
        assert planning.select("auto", "tangent", p, limits_of(arch)).name == "fa2_tangent"


def test_arrays_of_packed_sequences_move(backend):
    offsets = [np.array(x, np.int32) for x in ([0, 4, 4, 21], [0, 9, 12, 35], [0, 9, 12, 35])]
    qkv = drawn((21, 4, 12), (35, 2, 12), (35, 2, 7), dtype="float64")
    sink, d_sink, w, d_w = drawn((3, 4), (3, 4), (3,), (3,), dtype="float64", seed=1)
    how = {"score_mod": "score * w[batch] - key * w[0]", "causal": True, "backend": backend}

    def at(step):
        captured = {"w": w + step * d_w}
        return {"sink": sink + step * d_sink, "captured": captured, **how}

    packed = [Packed(x, y) for x, y in zip(qkv, offsets)]
    given = {"sink": d_sink, "w": d_w}
    _, found = cupyfa.jvp(*packed, tangents=given, check=True, **at(0))
    ends = [cupyfa.attention(*packed, return_lse=True, **at(x)) for x in (1e-5, -1e-5)]
    for mine, above, below in zip(found, *ends):
        assert np.abs(mine).max() > 0.1
        np.testing.assert_allclose(mine, (above - below) / 2e-5, rtol=1e-7, atol=1e-8)


def test_a_bias_of_padded_arrays_moves(backend):
    qkv, (values, tangents) = arrays(dtype="float32")[0], scored("float32")
    how = {"bias": values["bias"], "tangents": {"bias": tangents["bias"]}, "backend": backend}
    padded = wrap(*qkv, {"lengths_q": [21, 7], "lengths_k": [20, 0]})
    _, (d_out, d_lse) = cupyfa.jvp(*padded, check=True, **how)
    assert d_out[0].any() and d_lse[0].any() and not d_out[1].any() and not d_lse[1].any()


SIZES = (0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)  # batch, heads, M and N


@pytest.mark.parametrize("batch, heads, M, N", SIZES)
@pytest.mark.parametrize("names", [["bias"], ["sink"], ["q", "bias", "sink"]], ids=" ".join)
def test_arrays_of_empty_problems_move(batch, heads, M, N, names):
    q, k = np.ones((batch, heads, M, 4)), np.ones((batch, heads, N, 4))
    values = {"q": q, "bias": np.ones((heads, M, N)), "sink": np.ones(heads)}
    how = {name: values[name] for name in ("bias", "sink") if name in names}
    given = {name: values[name] for name in names}
    _, (d_out, d_lse) = cupyfa.jvp(q, k, k, tangents=given, backend="simulator", check=True, **how)
    assert not d_out.any() and (d_lse == ("sink" in names)).all()


def require_equal(results, expected):
    for mine, other in zip(results, (*expected[0], *expected[1]), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_prepared_calls_are_those_of_jvp(backend):
    (q, k, v), (dq, _, dv) = arrays(dtype="float32")
    values, tangents = scored("float32")
    how = {"causal": True, "backend": backend}
    prepared = cupyfa.compile(q, k, v, tangents=(dq, None, dv), **how)
    expected = cupyfa.jvp(q, k, v, tangents=(dq, None, dv), **how)
    out = np.empty((*q.shape[:-1], v.shape[-1]), np.float32)
    require_equal(prepared(q, k, v, dq, dv, out=out), expected)
    np.testing.assert_array_equal(out, expected[0][0])
    how["sink"] = values["sink"]
    given = {"k": k, "sink": tangents["sink"]}
    prepared = cupyfa.compile(q, k, v, tangents=given, **how)
    found = prepared(q, k, v, k, sink=values["sink"], d_sink=tangents["sink"])
    require_equal(found, cupyfa.jvp(q, k, v, tangents=given, **how))


def test_prepared_calls_of_jvp_take_shapes():
    (q, k, v), _ = arrays(dtype="float32")
    (dq,) = drawn((3, *q.shape), dtype="float32")
    shapes = [x.shape for x in (q, k, v)]
    how = {"dtype": "float32", "backend": "simulator"}
    prepared = cupyfa.compile(*shapes, tangents={"q": dq.shape}, **how)
    expected = cupyfa.jvp(q, k, v, tangents=(dq, None, None), backend="simulator")
    require_equal(prepared(q, k, v, dq), expected)


@pytest.mark.parametrize("arch", ["80", "90"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("how", [{"directions": 2}, {"tangents": "v"}, {}], ids=str)
def test_auto_finds_a_kernel_for_every_call(arch, dtype, how):
    p = Problem.of_sizes(M=512, d=64, heads=4, dtype=dtype, **how)
    limits = limits_of(arch)
    assert planning.can(planning.select("auto", "tangent", p, limits), p, limits)


@pytest.mark.parametrize(
    "options",
    ["--directions 2", "--tangents qv --causal", "--tangents none --bias --sink --wrt bias,sink"],
)
def test_a_run_passes(options):
    sizes = ["-B", "1", "-H", "2", "-M", "40", "-d", "8", "--backend", "simulator"]
    done = cli("run", "fa2_tangent", *sizes, *options.split(), code=0)
    assert re.search(r"lse_dot +error(?s:.*)PASS", done.stdout)


def test_a_timeline_has_a_page(tmp_path):
    sizes = ["-B", "1", "-H", "1", "-M", "40", "-d", "8", "--backend", "simulator"]
    cli("timeline", "fa2_tangent", *sizes, "--html", tmp_path / "page.html", code=0)
    assert "fa2_tangent" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_stored_scores_cost_memory():
    p = Problem.of_sizes(M=64, d=16)
    stored = roofline_model.naive_bytes("tangent", p) - roofline_model.tiled_bytes("tangent", p)
    assert stored == 10 * 64 * 64 * 4


@pytest.mark.parametrize("d, dv", [(64, 64), (100, 64), (128, 64), (128, 128)])
def test_the_smallest_tile_of_float64_compiles_or_is_refused(d, dv):
    kernel = cupyfa.kernel("mma_f64_tangent")
    problem = Problem.of_sizes(heads=1, M=40, N=50, d=d, dv=dv, dtype="float64")
    if d > 64 >= dv:
        with pytest.raises(ValueError, match="Br is at least 32"):
            planning.plan(kernel, problem, limits_of("90"), Br=16, Bc=16)
        return
    plan = planning.plan(kernel, problem, limits_of("90"), Br=16, Bc=16)
    assert all(compile_launch(x, "90").warnings == () for x in plan.launches)
