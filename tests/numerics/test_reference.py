"""The reference, compared with three lines of NumPy and with finite differences."""

import ml_dtypes
import numpy as np
import pytest
from helpers.gradients import reference_gradients

from cupyfa.numerics import reference

NAN, INF = np.nan, np.inf


def inputs(shape_q, shape_k, dv, seed=0):
    rng = np.random.default_rng(seed)
    shape_v = (*shape_k[:-1], dv)
    return tuple(rng.normal(size=shape) for shape in (shape_q, shape_k, shape_v))


def naive(q, k, v, scale, causal_offset=None):
    """Computes attention by its definition; needs a visible key per row and finite exponentials."""
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    P = np.exp(scale * q @ k.mT)
    if causal_offset is not None:
        P = np.tril(P, causal_offset)
    total = P.sum(-1, keepdims=True)
    return P @ v / total, np.log(total)[..., 0]


@pytest.fixture(autouse=True)
def warnings_are_errors():
    with np.errstate(all="raise", under="ignore"):
        yield


@pytest.mark.parametrize("causal_offset", [None, 0, 3, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("scale", [0.25, 0.0, -1.0])
def test_attention_equals_its_definition(causal_offset, kv_heads, scale):
    q, k, v = inputs((2, 6, 7, 4), (2, kv_heads, 10, 4), dv=5)
    out, lse = reference.attention(q, k, v, scale=scale, causal_offset=causal_offset)
    expected_out, expected_lse = naive(q, k, v, scale, causal_offset)
    np.testing.assert_allclose(out, expected_out, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-13, atol=1e-14)
    assert out.dtype == lse.dtype == np.float64


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_narrow_inputs_are_converted_exactly(dtype):
    narrow = [x.astype(dtype) for x in inputs((1, 2, 5, 4), (1, 2, 6, 4), dv=3)]
    wide = [x.astype(np.float64) for x in narrow]
    for actual, expected in zip(
        reference.attention(*narrow, scale=0.5), reference.attention(*wide, scale=0.5)
    ):
        np.testing.assert_array_equal(actual, expected)


def test_rows_without_a_key_are_empty():
    q, k, v = inputs((1, 1, 6, 4), (1, 1, 4, 4), dv=3)
    out, lse = reference.attention(q, k, v, scale=0.5, causal_offset=-2)
    assert np.all(out[0, 0, :2] == 0) and np.all(lse[0, 0, :2] == -INF)
    assert np.all(out[0, 0, 2:] != 0) and np.all(np.isfinite(lse[0, 0, 2:]))
    np.testing.assert_allclose(out[0, 0, 2], v[0, 0, 0])  # row 2 sees only key 0


def test_scores_of_minus_infinity_only_make_a_row_empty():
    q, k, v = inputs((1, 1, 2, 1), (1, 1, 3, 1), dv=2)
    q[...], k[...] = 1.0, -INF
    out, lse = reference.attention(q, k, v, scale=0.5)
    assert np.all(out == 0) and np.all(lse == -INF)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_masked_keys_have_no_effect(poison):
    q, k, v = inputs((1, 2, 5, 4), (1, 1, 5, 4), dv=3)
    expected = reference.attention(q, k, v, scale=0.5, causal_offset=0)
    k[:, :, 3:], v[:, :, 2:] = poison, poison
    actual = reference.attention(q, k, v, scale=0.5, causal_offset=0)
    for one, other in zip(actual, expected):
        np.testing.assert_array_equal(one[:, :, :2], other[:, :, :2])
    np.testing.assert_array_equal(actual[1][:, :, 2], expected[1][:, :, 2])  # lse ignores V
    if np.isnan(poison):
        assert np.all(np.isnan(actual[0][:, :, 2:]))
    else:
        assert np.all(actual[0][:, :, 2] == poison)


@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("causal_offset", [None, 1])
def test_a_nonfinite_query_changes_only_its_row(poison, causal_offset):
    q, k, v = inputs((2, 2, 5, 4), (2, 2, 5, 4), dv=3)
    expected = reference.attention(q, k, v, scale=0.5, causal_offset=causal_offset)
    q[0, 1, 3] = poison
    # With positive keys, all scores of an infinite query are +inf.
    k[0, 1, :, 0], k[0, 1, :, 1:] = np.abs(k[0, 1, :, 0]), 1.0
    actual = reference.attention(q, k, v, scale=0.5, causal_offset=causal_offset)
    spoilt = np.zeros((2, 2, 5), bool)
    spoilt[0, 1, 3] = True
    elsewhere = np.ones((2, 2), bool)
    elsewhere[0, 1] = False
    for one, other in zip(actual, expected):
        np.testing.assert_array_equal(np.isnan(one).reshape(2, 2, 5, -1).all(-1), spoilt)
        np.testing.assert_array_equal(np.isnan(one).reshape(2, 2, 5, -1).any(-1), spoilt)
        np.testing.assert_array_equal(one[elsewhere], other[elsewhere])


def test_a_nonfinite_column_of_v_changes_only_its_column():
    q, k, v = inputs((1, 1, 3, 4), (1, 1, 4, 4), dv=3)
    expected, _ = reference.attention(q, k, v, scale=0.5)
    v[0, 0, 1, 2] = NAN
    out, lse = reference.attention(q, k, v, scale=0.5)
    np.testing.assert_allclose(out[..., :2], expected[..., :2], rtol=1e-14)
    assert np.all(np.isnan(out[..., 2])) and np.all(np.isfinite(lse))


def test_large_scores_do_not_overflow():
    q, k, v = inputs((1, 1, 3, 4), (1, 1, 4, 4), dv=3)
    out, lse = reference.attention(q * 1e4, k * 1e4, v, scale=1.0)
    assert np.all(np.isfinite(out)) and np.all(np.isfinite(lse))


@pytest.mark.parametrize("axis", ["batch", "heads", "M", "N", "d", "dv"])
@pytest.mark.parametrize("causal_offset", [None, 0])
def test_any_size_may_be_zero(axis, causal_offset):
    size = {"batch": 2, "heads": 2, "M": 3, "N": 4, "d": 5, "dv": 6, axis: 0}
    batch, heads, M, N, d, dv = size.values()
    q, k, v = inputs((batch, heads, M, d), (batch, heads, N, d), dv)
    for precision in reference.PRECISIONS:
        out, lse = reference.attention(
            q, k, v, scale=1.0, causal_offset=causal_offset, precision=precision
        )
        assert out.shape == (batch, heads, M, dv) and lse.shape == (batch, heads, M)
    if axis == "N":
        assert np.all(out == 0) and np.all(lse == -INF)
    grads = reference_gradients(
        np.ones((batch, heads, M, dv)), q, k, v, scale=1.0, causal_offset=causal_offset
    )
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "float32", "tf32"])
def test_same_precision_rounds_every_step(precision):
    """Compares with the formula for one head: out has equal bits, lse is float32."""
    q, k, v = inputs((1, 1, 9, 8), (1, 1, 11, 8), dv=8)
    out, lse = reference.attention(q, k, v, scale=0.3, precision=precision)
    r = lambda x: reference.rounded(x, precision)  # noqa: E731 - the formula reads best so
    s = r(r(q) @ r(r(k) * np.float32(0.3)).mT)
    p = np.exp(s - s.max(-1, keepdims=True))
    total = p.sum(-1, keepdims=True)
    o = r(r(p / total) @ r(v))
    np.testing.assert_array_equal(out, o)
    np.testing.assert_array_equal(out, r(out))
    np.testing.assert_allclose(lse, (s.max(-1, keepdims=True) + np.log(total))[..., 0], rtol=1e-6)
    exact, _ = reference.attention(q, k, v, scale=0.3)
    eps = ml_dtypes.finfo("float16" if precision == "tf32" else precision).eps
    assert 0 < np.abs(out - exact).max() < 20 * float(eps)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_rounding_is_that_of_the_dtype(precision):
    rng = np.random.default_rng(0)
    x = rng.normal(size=100_000) * 10.0 ** rng.integers(-12, 7, 100_000)
    edges = [0, 65504, 65519, 65520, 2**-14, 2**-24, 2**-25, 3 * 2**-25, 1e38, NAN, INF]
    x = np.concatenate([x, edges, np.negative(edges)]).astype(np.float32)
    with np.errstate(all="ignore"):
        expected = x.astype(np.dtype(precision)).astype(np.float32)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(reference.rounded(x, precision), expected)


def test_tf32_is_the_nearest_number_with_so_many_bits():
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32)
    ties = bits & np.uint32(0xFFFFE000) | np.uint32(0x1000)
    edges = np.array([0, 1, 0x1000, 0x7F7FEFFF, 0x7F7FF000, 0x7F7FFFFF, 0x7F800000], np.uint32)
    x = np.concatenate([bits, ties, ties - 1, ties + 1, edges, edges | 2**31]).view(np.float32)
    x = x[~np.isnan(x)]
    mantissa, exponent = np.frexp(x.astype(np.float64))
    digits = np.where(np.abs(x) < 2.0**-126, exponent + 136, 11)  # fewer if subnormal
    whole = np.ldexp(np.abs(mantissa), digits)
    expected = np.copysign(np.ldexp(np.floor(whole + 0.5), exponent - digits), x)
    expected[np.abs(expected) >= 2.0**128] *= np.inf
    np.testing.assert_array_equal(reference.rounded(x, "tf32"), expected)
    assert np.isnan(reference.rounded(np.array([NAN, -NAN], np.float32), "tf32")).all()


def test_softmax_equals_its_definition():
    x = np.random.default_rng(0).normal(size=(2, 3, 7))
    y, lse = reference.softmax(x)
    np.testing.assert_allclose(y, np.exp(x) / np.exp(x).sum(-1, keepdims=True), rtol=1e-14)
    np.testing.assert_allclose(lse, np.log(np.exp(x).sum(-1)), rtol=1e-14)


def test_softmax_of_infinite_and_empty_rows():
    x = np.array([[0.0, -INF], [-INF, -INF], [NAN, 0.0], [INF, 0.0], [1e4, -1e4]])
    y, lse = reference.softmax(x)
    np.testing.assert_array_equal(y, [[1, 0], [0, 0], [NAN, NAN], [NAN, NAN], [1, 0]])
    np.testing.assert_array_equal(lse, [0, -INF, NAN, NAN, 1e4])
    y, lse = reference.softmax(np.zeros((3, 0)))
    assert y.shape == (3, 0) and np.all(lse == -INF)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize(
    "M, N, causal_offset, window_offset, scale",
    [
        *((3, 5, None, None, 0.7), (3, 5, 2, None, 0.7), (5, 3, -2, None, -0.7)),
        *((5, 3, 0, None, 0.0), (1, 1, 0, None, 0.7), (5, 4, 1, -1, 0.7), (4, 5, None, 2, -1.3)),
    ],
)
def test_gradients_are_finite_differences(M, N, causal_offset, window_offset, scale, kv_heads):
    arrays = inputs((2, 2, M, 3), (2, kv_heads, N, 3), dv=2, seed=M + N)
    dout = np.random.default_rng(9).normal(size=(2, 2, M, 2))
    options = {"scale": scale, "causal_offset": causal_offset, "window_offset": window_offset}
    grads = reference_gradients(dout, *arrays, **options)
    out, lse = reference.attention(*arrays, **options)
    given = reference_gradients(dout, *arrays, **options, out=out, lse=lse)
    for one, other in zip(grads, given):
        np.testing.assert_array_equal(one, other)

    def loss():
        return np.sum(dout * reference.attention(*arrays, **options)[0])

    step = 1e-5
    for array, grad in zip(arrays, grads):
        assert grad.shape == array.shape
        for index in np.ndindex(array.shape):
            kept = array[index]
            array[index] = kept + step
            above = loss()
            array[index] = kept - step
            difference = (above - loss()) / (2 * step)
            array[index] = kept
            assert grad[index] == pytest.approx(difference, abs=1e-8), index


def test_gradients_of_empty_rows_and_masked_keys_are_zero():
    q, k, v = inputs((1, 2, 6, 4), (1, 1, 5, 4), dv=3)
    dout = np.ones((1, 2, 6, 3))
    clean = reference_gradients(dout, q, k, v, scale=0.5, causal_offset=-3)
    q[:, :, :3], k[:, :, 3:], v[:, :, 3:], dout[:, :, :3] = NAN, NAN, INF, NAN
    dq, dk, dv = reference_gradients(dout, q, k, v, scale=0.5, causal_offset=-3)
    assert np.all(dq[:, :, :3] == 0) and np.all(dk[:, :, 3:] == 0) and np.all(dv[:, :, 3:] == 0)
    for actual, expected in zip((dq, dk, dv), clean):
        np.testing.assert_allclose(actual, expected, rtol=1e-14)


def test_a_nan_gradient_reaches_only_keys_of_its_row():
    q, k, v = inputs((1, 1, 4, 4), (1, 1, 4, 4), dv=3)
    dout = np.ones((1, 1, 4, 3))
    dout[0, 0, 1] = NAN
    dq, dk, dv = reference_gradients(dout, q, k, v, scale=0.5, causal_offset=0)
    np.testing.assert_array_equal(np.isnan(dq[0, 0]).any(-1), [False, True, False, False])
    np.testing.assert_array_equal(np.isnan(dk[0, 0]).any(-1), [True, True, False, False])
    np.testing.assert_array_equal(np.isnan(dv[0, 0]).any(-1), [True, True, False, False])


def test_gradients_use_the_given_output_and_lse():
    """Compares with the formulas for one head."""
    q, k, v = inputs((1, 1, 4, 3), (1, 1, 5, 3), dv=2)
    dout, out, lse = (np.random.default_rng(7).normal(size=(1, 1, 4, n)) for n in (2, 2, 1))
    dq, dk, dv = reference_gradients(dout, q, k, v, scale=0.6, out=out, lse=lse[..., 0])
    p = np.exp(0.6 * q @ k.mT - lse)
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdims=True))
    np.testing.assert_allclose(dq, 0.6 * ds @ k, rtol=1e-13)
    np.testing.assert_allclose(dk, 0.6 * ds.mT @ q, rtol=1e-13)
    np.testing.assert_allclose(dv, p.mT @ dout, rtol=1e-13)


def test_the_largest_scores_are_those_of_visible_keys():
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((2, 3, rows, 8)) for rows in (9, 7, 7))
    scores = 0.5 * q @ k.mT
    k[0, 0, 6, 0] = np.nan  # only row 8 sees this key
    scores[~np.broadcast_to(np.arange(7) <= np.arange(9)[:, None] - 2, scores.shape)] = -np.inf
    wanted = scores.max(-1)
    wanted[0, 0, 8] = np.nan
    found = np.empty(wanted.shape)
    for tile in reference.tiles(q, k, v, scale=0.5, causal_offset=-2, sink=np.full(3, 9.0)):
        reference.flat(found)[tile.where] = reference.largest_scores(tile)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
