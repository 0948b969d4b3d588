"""merge and merge_vjp: attention over parts of the keys becomes attention over all keys."""

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from helpers.foreign import Foreign
from helpers.merged import merged

import cupyfa
from cupyfa.numerics import merge_bounds, reference, tolerance
from cupyfa.runtime.merging import MOST_PARTS

DTYPES = {"float16": "f2", "bfloat16": ml_dtypes.bfloat16, "float32": "f4", "float64": "f8"}
F = np.float32
INF, NAN = np.inf, np.nan


def drawn(count, *shape, dtype="float32", spread=5.0, seed=0):
    """Returns random parts (out [batch, heads, M, dv], lse); ``spread`` scales lse."""
    rng, of_lse = np.random.default_rng(seed), np.float64 if dtype == "float64" else F
    shape = shape or (2, 3, 5, 24)
    return [
        (
            rng.standard_normal(shape).astype(DTYPES[dtype]),
            (spread * rng.standard_normal(shape[:-1])).astype(of_lse),
        )
        for _ in range(count)
    ]


def slopes_of(out, lse, seed=1):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(x.shape).astype(x.dtype) for x in (out, lse))


def checked(parts, backend="simulator", **how):
    """Returns merged results and gradients, after comparing the results with the reference."""
    (out, lse), pullback = cupyfa.merge_vjp(parts, backend=backend, check=True, **how)
    return (out, lse), pullback(*slopes_of(out, lse))


def same_bits(one, other):
    return all(x.tobytes() == y.tobytes() for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 17])
def test_results_are_within_their_bounds(backend, dtype, count):
    parts = drawn(count, dtype=dtype)
    (out, lse), gradients = checked(parts, backend)
    assert isinstance(out, np.ndarray) and isinstance(lse, np.ndarray) and len(gradients) == count
    for part, gradient in zip(parts, gradients, strict=True):
        assert [(x.shape, x.dtype) for x in part] == [(x.shape, x.dtype) for x in gradient]


@pytest.mark.parametrize("count", [MOST_PARTS, MOST_PARTS + 1, 2 * MOST_PARTS + 5])
@pytest.mark.parametrize("spread", [1.0, 40.0])
def test_more_parts_than_a_launch_has_room_for(backend, count, spread):
    parts = drawn(count, 1, 2, 3, 7, spread=spread)
    for _, lse in parts[: MOST_PARTS + 1]:
        lse[0, 0, 0] = -INF  # no part of the first launch has keys for this row
    checked(parts, backend)


def test_one_part_is_returned_as_it_is(backend):
    ((out, lse),) = parts = drawn(1, dtype="float16", spread=1e30)
    result = cupyfa.merge(parts, backend=backend)
    np.testing.assert_array_equal(result[0], out)
    np.testing.assert_array_equal(result[1], lse)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_attention_of_all_keys_is_that_of_their_parts(backend, dtype):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, n, 24)).astype(dtype) for n in (9, 40, 40))
    cuts = [0, 13, 13, 39, 40]
    slices = [slice(*x) for x in pairwise(cuts)]
    how = {"kernel": "fa2", "backend": backend, "return_lse": True}
    parts = [cupyfa.attention(q, k[..., x, :], v[..., x, :], **how) for x in slices]
    out, lse = cupyfa.merge(parts, backend=backend)

    of = {"dtype": dtype, "scale": 24**-0.5}
    exact = [tolerance.expected_attention(q, k[..., x, :], v[..., x, :], **of) for x in slices]
    right = tolerance.expected_attention(q, k, v, **of)[None]
    expected = merged([x[None] for x in exact], right, dtype)
    tolerance.require(tolerance.compare({"O": out, "lse": lse}, expected), "merge")


def test_gradients_go_on_to_keys_and_queries():
    """The float64 gradients match those of attention within float32 bounds."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, n, 8)) for n in (6, 11, 11))
    how = {"kernel": "fa2", "backward_kernel": "two_pass", "backend": "simulator"}
    passes = [
        cupyfa.vjp(q, k[..., x, :], v[..., x, :], return_lse=True, **how)
        for x in (slice(4), slice(4, 11))
    ]
    (out, lse), pullback = cupyfa.merge_vjp([x for x, _ in passes], backend="simulator")
    dout, dlse = slopes_of(out, lse)
    found = [back(*x) for (_, back), x in zip(passes, pullback(dout, dlse), strict=True)]
    dq, *dkv = zip(*found)
    gradients = {"dQ": sum(dq)} | {
        name: np.concatenate(x, axis=2) for name, x in zip(("dK", "dV"), dkv)
    }
    exact, of_rows = reference.attention(q, k, v, scale=8**-0.5)
    right = tolerance.expected_gradients(
        q, k, v, exact, of_rows, dout, dlse=dlse, dtype="float32", scale=8**-0.5
    )[None]
    tolerance.require(tolerance.compare(gradients, right), "merge_vjp")


def plain(outs, lses):
    """Merges by the definition, also for complex numbers."""
    largest = lses.real.max(axis=0)
    lse = largest + np.log(np.exp(lses - largest).sum(axis=0))
    return (np.exp(lses - lse)[..., None] * outs).sum(axis=0), lse


@pytest.mark.parametrize("of_lse", [False, True])
def test_gradients_are_derivatives(backend, of_lse):
    """A difference along the imaginary axis has no cancellation error."""
    parts = drawn(3, 1, 1, 4, 6, dtype="float64", spread=1.0)
    (out, lse), pullback = cupyfa.merge_vjp(parts, backend=backend)
    dout, dlse = slopes_of(out, lse)
    found = pullback(dout, dlse if of_lse else None)
    outs, lses = (np.stack(x).astype(complex) for x in zip(*parts))
    right = merge_bounds.expected_gradients(
        *(outs.real, lses.real, out, lse, dout, dlse if of_lse else 0 * dlse), dtype="float64"
    )
    step = 1e-100
    for which, array in enumerate((outs, lses)):
        name = ("dout", "dlse")[which]
        for at in np.ndindex(array.shape):
            array[at] += 1j * step
            moved, of_rows = plain(outs, lses)
            array[at] = array[at].real
            slope = (moved.imag * dout).sum() + (of_rows.imag * dlse).sum() * of_lse
            bound = right[name].bound[at]
            assert abs(found[at[0]][which][at[1:]] - slope / step) <= 2 * bound, (name, at)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_huge_and_empty_rows(backend, dtype):
    parts = drawn(4, 1, 2, 6, 8, dtype=dtype)
    rows = [
        (1e30, 1e30, -1e30, 1e30),
        (1e38, -1e38, -INF, -3e38),
        (-INF, 0, -INF, -INF),
        (-INF, -INF, -INF, -INF),
        (-1e30, -1e30, -1e30, -INF),
        (0, -80, -90, -104),
    ]
    for i, (out, lse) in enumerate(parts):
        for row, values in enumerate(rows):
            lse[..., row] = values[i]
            if np.isneginf(values[i]):
                out[..., row, :] = 0
    (out, lse), gradients = checked(parts, backend)
    np.testing.assert_array_equal(out[0, 0, 2], parts[1][0][0, 0, 2])
    assert (out[..., 3, :] == 0).all() and (lse[..., 3] == -INF).all() and (lse[..., 2] == 0).all()
    for (_, part), (dout, dlse) in zip(parts, gradients, strict=True):
        empty = np.isneginf(part)
        assert (dout[empty] == 0).all() and (dlse[empty] == 0).all() and (dout[~empty] != 0).any()


def test_a_part_without_keys_adds_nothing_whatever_its_output_is(backend):
    (out, lse), parts = drawn(1)[0], drawn(2, seed=3)
    out[...], lse[...] = NAN, -INF
    wanted, right = checked(parts, backend)
    found, gradients = checked([parts[0], (out, lse), parts[1]], backend)
    assert same_bits(wanted, found)
    assert same_bits(sum(right, ()), gradients[0] + gradients[2])
    assert all((x == 0).all() for x in gradients[1])


def test_the_largest_outputs_do_not_overflow(backend):
    parts = drawn(3, 1, 1, 2, 4, spread=0.1)
    for out, _ in parts:
        out[...] = 3.2e38
    out, _ = cupyfa.merge(parts, backend=backend, check=True)
    assert np.isfinite(out).all()


@pytest.mark.parametrize(
    "lse, out, of_row, of_lse",
    [
        ((NAN, 0), (1, 1), NAN, NAN),
        ((NAN, -INF), (1, 0), NAN, NAN),
        ((INF, 0), (1, 1), NAN, NAN),
        ((INF, INF), (1, 1), NAN, NAN),
        ((0, 0), (INF, 1), INF, np.log(F(2))),
        ((0, 0), (INF, -INF), NAN, np.log(F(2))),
        ((0, 0), (NAN, 1), NAN, np.log(F(2))),
        ((0, -INF), (1, INF), 1, 0),
    ],
)
def test_infinity_and_nan(backend, lse, out, of_row, of_lse):
    parts = drawn(2, 1, 1, 3, 4)
    for (values, rows), x, y in zip(parts, out, lse, strict=True):
        values[0, 0, 1, 2], rows[0, 0, 1] = x, y
    result, of_rows = cupyfa.merge(parts, backend=backend, check=True)
    np.testing.assert_array_equal(result[0, 0, 1, 2], F(of_row))
    np.testing.assert_allclose(of_rows[0, 0, 1], of_lse, rtol=np.finfo(F).eps)
    assert np.isfinite(result[0, 0, ::2]).all() and np.isfinite(of_rows[0, 0, ::2]).all()
    assert np.isfinite(result[0, 0, 1, 0]) == np.isfinite(of_rows[0, 0, 1])


@pytest.mark.parametrize(
    "shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 3, 0, 4), (2, 3, 4, 0), (0, 0, 0, 0)]
)
def test_empty_arrays(backend, shape):
    (out, lse), gradients = checked(drawn(2, *shape), backend)
    assert out.shape == shape and lse.shape == shape[:-1]
    assert all(x.shape == shape and y.shape == shape[:-1] for x, y in gradients)


@pytest.mark.parametrize("shape", [(5, 24), (3, 5, 24), (2, 2, 3, 5, 24)])
def test_axes(backend, shape):
    checked(drawn(3, *shape), backend)


@pytest.mark.parametrize("shape", [(2, 3, 5, 24), (3, 5, 24), (5, 24)])
def test_the_other_layout(backend, shape):
    """With three axes, "bshd" is the layout of packed rows."""
    parts = drawn(3, *shape)
    turned = [(x.swapaxes(-2, -3).copy() if x.ndim > 2 else x, y) for x, y in parts]
    (wanted, rows), right = checked(parts, backend)
    (out, lse), gradients = checked(turned, backend, layout="bshd")
    assert same_bits([wanted, rows], [out.swapaxes(-2, -3) if out.ndim > 2 else out, lse])
    assert gradients[0][0].shape == turned[0][0].shape == out.shape and lse.shape == shape[:-1]
    assert same_bits([right[0][1]], [gradients[0][1]]) or len(shape) > 2  # dout differs in "bshd"


def test_packed_rows_of_a_ragged_batch(backend):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 2, 24), F) for n in (9, 14, 14))
    rows, keys = np.array([0, 4, 9], "i4"), np.array([0, 8, 14], "i4")
    how = {"kernel": "fa2", "backend": backend, "return_lse": True}

    def attend(k, v, keys, used=None):
        packed = cupyfa.Packed(k, keys, used), cupyfa.Packed(v, keys, used)
        return cupyfa.attention(cupyfa.Packed(q, rows), *packed, **how)

    rest = np.concatenate([np.arange(5, 8), np.arange(11, 14)])
    first = attend(k, v, keys, np.array([5, 3], "i4"))
    second = attend(k[rest], v[rest], np.array([0, 3, 6], "i4"))
    found, _ = checked([first, second], backend, layout="bshd")
    for one, other in zip(found, attend(k, v, keys), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


VIEWS = {
    "transposed": lambda x: x.swapaxes(0, 1).copy().swapaxes(0, 1),
    "reversed": lambda x: x[::-1].copy()[::-1],
    "every second row": lambda x: np.repeat(x, 2, axis=2)[:, :, ::2],
    "Fortran's order": np.asfortranarray,
    "at an odd place": lambda x: np.concatenate([x[..., :1], x], axis=-1)[..., 1:],
    "not aligned": lambda x: np.frombuffer(b"x" + x.tobytes(), x.dtype, offset=1).reshape(x.shape),
}


@pytest.mark.parametrize("view", VIEWS)
def test_strides_change_no_bit(backend, view):
    parts = drawn(3, dtype="float16")
    seen = [tuple(map(VIEWS[view], part)) for part in parts[:2]]
    assert all(same_bits(one, other) for one, other in zip(seen, parts))
    wanted, right = checked(parts, backend)
    found, gradients = checked([*seen, parts[2]], backend)
    assert same_bits(wanted, found) and all(map(same_bits, right, gradients))


def test_the_bits_of_a_row_depend_on_its_parts_and_their_order_alone(backend):
    parts = drawn(5, 2, 3, 7, 24, dtype="float16")
    whole = cupyfa.merge(parts, backend=backend)
    row = cupyfa.merge([(x[1:, 2:, 4:5], y[1:, 2:, 4:5]) for x, y in parts], backend=backend)
    assert same_bits(row, [x[1:, 2:, 4:5] for x in whole])
    columns = cupyfa.merge([(x[..., 3:6], y) for x, y in parts], backend=backend)
    assert same_bits(columns, [whole[0][..., 3:6], whole[1]])
    other = cupyfa.merge(drawn(5, 2, 3, 7, 24, seed=9)[::-1], backend=backend)
    assert not same_bits(other, cupyfa.merge(drawn(5, 2, 3, 7, 24, seed=9), backend=backend))


def test_out_is_written(backend):
    parts = drawn(2)
    wanted = cupyfa.merge(parts, backend=backend)
    for into in (np.zeros((2, 3, 5, 24), F), np.zeros((2, 3, 5, 48), F)[..., ::2]):
        out, lse = cupyfa.merge(parts, out=into, backend=backend)
        assert out is into and same_bits((out, lse), wanted)


def test_other_libraries_arrays(backend):
    parts = drawn(2)
    (wanted, lse), pullback = cupyfa.merge_vjp(parts, backend=backend)
    found, back = cupyfa.merge_vjp([tuple(map(Foreign, x)) for x in parts], backend=backend)
    assert same_bits(found, (wanted, lse))
    (dout, dlse), again = slopes_of(wanted, lse), slopes_of(wanted, lse)
    assert all(map(same_bits, pullback(dout, dlse), back(*map(Foreign, again))))


def test_the_bounds_find_small_faults():
    """One weight, one lse or one gradient is off by about a hundred rounding errors."""
    parts = drawn(3)
    outs, lses = map(np.stack, zip(*parts))
    right = merge_bounds.expected_merge(outs, lses, dtype="float32")
    lses[1] += F(2e-5)
    wrong = merge_bounds.expected_merge(outs, lses, dtype="float32")
    verdicts = tolerance.compare({x: wrong[x].value for x in wrong}, right)
    assert [x.name for x in verdicts if not x.passed] == ["out", "lse"]
    out, lse = cupyfa.merge(parts, backend="simulator")
    given = outs, np.stack([x for _, x in parts]), out, lse, *slopes_of(out, lse)
    right = merge_bounds.expected_gradients(*given, dtype="float32")
    for name in right:
        verdicts = tolerance.compare({name: right[name].value * (1 + 2e-5)}, right)
        assert not verdicts[0].passed
