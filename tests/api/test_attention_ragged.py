"""Packed arrays and lists of arrays: attention and its gradients."""

import numpy as np
import pytest

import cupyfa
from cupyfa import Packed, Padded
from cupyfa.problem.structured_arrays import wrap

F = np.float32
ROWS, KEYS = (5, 0, 12), (7, 3, 0)


def drawn(*, heads=2, kv_heads=1, d=24, dtype=F, seed=0):
    """Returns random q, k and v: lists of arrays [heads, rows, d]."""
    rng = np.random.default_rng(seed)
    of = (ROWS, heads), (KEYS, kv_heads), (KEYS, kv_heads)
    return [[rng.standard_normal((h, n, d)).astype(dtype) for n in sizes] for sizes, h in of]


def packed():
    q, k, v = (np.concatenate(x, axis=1).swapaxes(0, 1) for x in drawn())
    offsets = (np.cumsum([0, *x]).astype("i4") for x in (ROWS, KEYS))
    return (q, k, v, *offsets)


def pack(q, k, v, rows, keys, used_rows=None, used_keys=None):
    return Packed(q, rows, used_rows), Packed(k, keys, used_keys), Packed(v, keys, used_keys)


def each(q, k, v, backend, **options):
    how = {"kernel": "fa2", "backend": backend, **options}
    return [cupyfa.attention(*x, return_lse=True, **how) for x in zip(q, k, v)]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_lists_give_lists(backend, layout):
    lists = drawn()
    wanted = each(*lists, backend, causal=True)
    if layout == "bshd":
        lists = [[x.swapaxes(0, 1) for x in array] for array in lists]
    how = {"kernel": "fa2", "backend": backend, "causal": True, "layout": layout}
    outs, lses = cupyfa.attention(*lists, return_lse=True, **how)
    assert isinstance(outs, list) and isinstance(lses, list)
    for out, lse, (one, of_rows) in zip(outs, lses, wanted, strict=True):
        np.testing.assert_array_equal(out if layout == "bhsd" else out.swapaxes(0, 1), one)
        np.testing.assert_array_equal(lse, of_rows)
    into = [np.empty_like(x) for x in outs]
    given = cupyfa.attention(*lists, out=into, **how)
    assert all(x is y for x, y in zip(given, into, strict=True))
    assert all(x.tobytes() == y.tobytes() for x, y in zip(into, outs, strict=True))


def test_threads_copy_large_lists(monkeypatch):
    how = {"kernel": "fa2", "backend": "simulator"}
    wanted = cupyfa.attention(*drawn(), **how)
    monkeypatch.setattr("cupyfa.runtime.ragged._LARGE", 100)
    monkeypatch.setattr("cupyfa.runtime.ragged._AT_ONCE", 300)  # about 1.5 rows
    into = [np.full_like(x, 7) for x in wanted]
    cupyfa.attention(*drawn(), out=into, **how)
    for got, right in zip(into, wanted, strict=True):
        np.testing.assert_array_equal(got, right)


def test_gradients_of_lists_are_lists(backend):
    lists = drawn()
    how = {"backend": backend, "causal": True}
    outs, pullback = cupyfa.vjp(*lists, kernel="fa2", backward_kernel="two_pass", **how)
    found = pullback([np.ones_like(x) for x in outs])
    for i, (q, k, v) in enumerate(zip(*lists, strict=True)):
        out, back = cupyfa.vjp(q, k, v, kernel="fa2", backward_kernel="two_pass", **how)
        for whole, part in zip(found, back(np.ones_like(out)), strict=True):
            np.testing.assert_allclose(whole[i], part, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_gradients_of_lse_join(backend):
    q, k, v, *offsets = packed()
    how = {"kernel": "fa2", "backend": backend, "return_lse": True}
    (out, lse), pullback = cupyfa.vjp(
        *pack(q, k, v, *offsets), backward_kernel="two_pass", check=True, **how
    )
    dlse = np.where(np.isfinite(lse), 0.5, 0).astype(F)
    dq, dk, dv = pullback(np.zeros_like(out), dlse)
    (dense, _), back = cupyfa.vjp(
        *(x[:n] for x, n in ((q, 5), (k, 7), (v, 7))),
        layout="bshd",
        backward_kernel="two_pass",
        **how,
    )
    wanted = back(np.zeros_like(dense), dlse[:, :5])
    for whole, part in zip((dq, dk, dv), wanted, strict=True):
        np.testing.assert_allclose(whole[: len(part)], part, rtol=1e-5, atol=1e-6)
    assert not (np.any(dv) or np.any(dk[7:]))


def test_out_is_written(backend):
    q, k, v, *offsets = packed()
    out = np.full_like(q, 7)
    arrays, how = pack(q, k, v, *offsets), {"kernel": "fa2", "backend": backend}
    assert cupyfa.attention(*arrays, **how, out=out) is out
    again = cupyfa.attention(*arrays, **how)
    assert out.tobytes() == again.tobytes()


@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(x, marks=pytest.mark.slow) for x in ("float16", "float64"))]
)
def test_auto_takes_a_kernel_that_can(dtype):
    q, k, v, *offsets = packed()
    arrays = (x.astype(dtype) for x in (q, k, v))
    cupyfa.attention(*pack(*arrays, *offsets), backend="simulator", check=True)


def test_lengths_are_whole_numbers():
    q, k, v, rows, keys = packed()
    with pytest.raises(TypeError, match="q.offsets is float64; it must have an integer"):
        cupyfa.attention(*pack(q, k, v, rows.astype(float), keys), backend="simulator")
    cupyfa.attention(*pack(q, k, v, rows.astype("i8"), list(keys)), backend="simulator")


USED = np.array([5, 0, 9], "i4"), np.array([7, 2, 0], "i4")


@pytest.mark.parametrize("of_shapes", [False, True], ids=["arrays", "shapes"])
def test_prepared_calls_of_packed_arrays(backend, of_shapes):
    """Prepared calls and their gradients use other offsets than the offsets passed to compile."""
    q, k, v, *offsets = (x.copy() for x in packed())
    how = {"kernel": "fa2", "backend": backend, "causal": True}
    sink = np.array([[0.5, 1], [2, 3], [-1, 0]], F)
    other = [np.array(x, "i4") for x in ([0, 6, 8, 17], [0, 7, 9, 10])]
    arrays = pack(q, k, v, *offsets, *USED)
    out, lse = cupyfa.attention(*arrays, return_lse=True, sink=sink, **how)
    like, of_sequences, dtype = (q, k, v, lse, sink), [*other, *USED], {}
    if of_shapes:
        like, of_sequences = ([x.shape for x in y] for y in (like, of_sequences))
        dtype = {"dtype": "float32"}
    *like, of_lse, of_sink = like
    structured = pack(*like, *of_sequences)
    # Calls prepared from shapes require arrays in the backend's memory.
    put = backend.upload if of_shapes else np.asarray
    forward = cupyfa.compile(*structured, return_lse=True, sink=of_sink, **how, **dtype)
    made = forward(*map(put, (q, k, v, sink, *offsets, *USED)))
    assert [backend.download(x).tobytes() for x in made] == [out.tobytes(), lse.tobytes()]
    in_place = pack(*map(put, (q, k, v, *offsets, *USED)))
    made = forward(*in_place, sink=put(sink))
    assert [backend.download(x).tobytes() for x in made] == [out.tobytes(), lse.tobytes()]

    how |= {"kernel": "two_pass", "deterministic": True}
    # Since dv = d, q has the shape of out and dO.
    results = (like[0], *structured, like[0], of_lse)
    backward = cupyfa.compile(*results, dlse=of_lse, sink=of_sink, **how, **dtype)
    given = out, q, k, v, out, lse
    dlse = np.where(np.isfinite(lse), 0.5, 0).astype(F)
    found = backward(*map(put, (*given, sink, dlse, *offsets, *USED)))
    wanted = cupyfa.backward(out, *arrays, out, lse, sink=sink, dlse=dlse, **how)
    assert [backend.download(x).tobytes() for x in found] == [x.tobytes() for x in wanted]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"cu_seqlens_q": [0, 5, 9, 100]}, "q.offsets range from 0 to 100, but q has 17 rows"),
        ({"cu_seqlens_k": [0, 9, 5, 6]}, r"k.offsets\[2\] is 5, less than the preceding 9"),
        ({"seqused_q": [5, 1, 1]}, r"q.used\[0\] is 5, but sequence 0 has 3 rows"),
    ],
)
def test_prepared_calls_look_at_numpy_offsets(change, message):
    q, k, v, *_ = packed()
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q")
    right = dict(zip(names, ([0, 3, 9, 17], [0, 1, 4, 10], [3, 1, 1])))
    right = {name: np.array(x, "i4") for name, x in right.items()}
    prepared = cupyfa.compile(*wrap(q, k, v, right), backend="simulator", kernel="fa2")
    prepared(q, k, v, **right)
    wrong = {name: np.array(x, "i4") for name, x in change.items()}
    with pytest.raises(ValueError, match=message):
        prepared(q, k, v, **{**right, **wrong})
    with pytest.raises(ValueError, match=message):
        prepared(*wrap(q, k, v, {**right, **wrong}))


def test_prepared_calls_look_at_numpy_lengths():
    q, n = np.zeros((2, 1, 5, 8), F), np.array([5, 2], "i4")
    how = {"backend": "simulator", "kernel": "fa2"}
    prepared = cupyfa.compile(q, Padded(q, n), Padded(q, n), **how)
    prepared(q, q, q, lengths_k=n)
    with pytest.raises(ValueError, match=r"k.lengths\[1\] is 6, but batch element 1 has 5 rows"):
        prepared(q, q, q, lengths_k=np.array([5, 6], "i4"))
