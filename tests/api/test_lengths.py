"""Padded arrays: attention, its gradients, prepared calls and plans."""

import numpy as np
import pytest

import cupyfa
from cupyfa import Padded
from cupyfa.lab.verify import transforms

F = np.float32
ROWS, KEYS = (9, 0, 4), (5, 11, 0)
HOW = {"kernel": "fa2", "backend": "simulator"}


def drawn(*, heads=2, kv_heads=1, d=16, dtype=F):
    rng = np.random.default_rng(0)
    shapes = (3, heads, 9, d), (3, kv_heads, 11, d), (3, kv_heads, 11, d)
    return [rng.standard_normal(x).astype(dtype) for x in shapes]


def padded(q, k, v, rows=ROWS, keys=KEYS):
    return Padded(q, rows), Padded(k, keys), Padded(v, keys)


def each(q, k, v, backend):
    how = {"kernel": "fa2", "backend": backend, "causal": True, "return_lse": True}
    parts = ((x[:, :m], y[:, :n], z[:, :n]) for x, y, z, m, n in zip(q, k, v, ROWS, KEYS))
    return [cupyfa.attention(*x, **how) for x in parts]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_first_rows_are_the_call_of_their_own(backend, layout):
    q, k, v = drawn()
    wanted = each(q, k, v, backend)
    if layout == "bshd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    how = {"kernel": "fa2", "backend": backend, "causal": True, "layout": layout}
    out, lse = cupyfa.attention(*padded(q, k, v), return_lse=True, **how)
    out = out if layout == "bhsd" else out.swapaxes(1, 2)
    for i, (m, (one, of_rows)) in enumerate(zip(ROWS, wanted, strict=True)):
        np.testing.assert_array_equal(out[i, :, :m], one)
        np.testing.assert_array_equal(lse[i, :, :m], of_rows)
        assert not np.any(out[i, :, m:]) and (lse[i, :, m:] == -np.inf).all()


@pytest.mark.parametrize("of", [list, tuple, *("i1", "u2", "i4", "u4", "i8", "u8")], ids=str)
def test_lengths_are_whole_numbers_of_any_dtype(of):
    q, k, v = drawn()
    make = of if callable(of) else lambda x: np.array(x, of)
    out = cupyfa.attention(*padded(q, k, v, make(ROWS), make(KEYS)), **HOW)
    assert out.tobytes() == cupyfa.attention(*padded(q, k, v), **HOW).tobytes()


def test_batch_axes_are_one(backend):
    q, k, v = drawn()
    how = {"kernel": "fa2", "backend": backend}
    out = cupyfa.attention(*padded(*(x[:, None] for x in (q, k, v))), **how)
    assert out[:, 0].tobytes() == cupyfa.attention(*padded(q, k, v), **how).tobytes()
    one = cupyfa.attention(q[0], Padded(k[0], [5]), Padded(v[0], [5]), **how)
    assert one.tobytes() == cupyfa.attention(q[0], k[0, :, :5], v[0, :, :5], **how).tobytes()
    none = cupyfa.attention(q[:0], Padded(k[:0], []), Padded(v[:0], []), **how)
    assert none.shape == (0, 2, 9, 16)


def test_auto_takes_a_kernel_that_can():
    sizes = {"d": 64, "batch": 3, "heads": 2, "dtype": "float16", "backend": "simulator"}
    few, many = (cupyfa.plan(M=M, N=4096, **sizes, lengths_k=True).kernel for M in (1, 4096))
    assert few.name == "mma_split_kv"
    assert "lengths" in many.features


@pytest.mark.parametrize("form", [True, (3,), "i32[batch]", "i32[3]", np.array(KEYS)], ids=str)
def test_plans_have_forms_of_lengths(form):
    p = cupyfa.plan(M=9, N=11, d=16, batch=3, lengths_k=form, **HOW).problem
    assert [(x.name, x.dtype, x.shape) for x in p.operands] == [("lengths_k", "int32", (3,))]
    assert "lengths_k=i32[3]" in str(p)
    assert transforms.resize(p, batch=5).operands[0].shape == (5,)


def test_prepared_calls_take_lengths_in_order_or_by_name(backend):
    q, k, v = drawn()
    how = {"kernel": "fa2", "backend": backend, "causal": True}
    rows, keys = (np.array(x, "i4") for x in (ROWS, KEYS))
    slopes = np.array([0.1, 0.2], F)
    prepared = cupyfa.compile(*padded(q, k, v), **how, alibi_slopes=slopes)
    wanted = cupyfa.attention(*padded(q, k, v), **how, alibi_slopes=slopes).tobytes()
    assert prepared(q, k, v, slopes, rows, keys).tobytes() == wanted
    assert prepared(*padded(q, k, v, rows, keys), alibi_slopes=slopes).tobytes() == wanted
    named = {"lengths_k": keys, "lengths_q": rows, "alibi_slopes": slopes}
    assert prepared(q, k, v, **named).tobytes() == wanted


def test_prepared_gradients_take_lengths(backend):
    q, k, v = drawn()
    how, of_gradients = {"backend": backend, "causal": True}, {"kernel": "two_pass"}
    rows, keys = (np.array(x, "i4") for x in (ROWS, KEYS))
    out, lse = cupyfa.attention(*padded(q, k, v), kernel="fa2", return_lse=True, **how)
    given = out, *padded(q, k, v), out, lse
    right = cupyfa.backward(*given, **of_gradients, **how)
    prepared = cupyfa.compile(*given, **of_gradients, **how)
    for found in (prepared(out, q, k, v, out, lse, rows, keys), prepared(*given)):
        for a, b in zip(found, right, strict=True):
            assert a.tobytes() == b.tobytes()


def test_prepared_calls_of_shapes_take_lengths():
    shapes = padded(*(x.shape for x in drawn()), (3,), "i32[batch]")
    prepared = cupyfa.compile(*shapes, dtype="float32", **HOW)
    rows, keys = (np.array(x, "i4") for x in (ROWS, KEYS))
    wanted = cupyfa.attention(*padded(*drawn()), **HOW)
    assert prepared(*drawn(), rows, keys).tobytes() == wanted.tobytes()


def test_pullbacks_have_the_lengths_of_the_call(backend):
    q, k, v = drawn()
    how = {"kernel": "fa2", "backward_kernel": "two_pass", "backend": backend}
    out, pullback = cupyfa.vjp(*padded(q, k, v), check=True, **how)
    dq, dk, dv = pullback(np.ones_like(out))
    assert not (np.any(dq[1]) or np.any(dq[2]) or np.any(dk[1:]) or np.any(dv[0, :, 5:]))
    assert np.any(dq[0]) and np.any(dk[0, :, :5])


@pytest.mark.gpu
def test_lengths_in_gpu_memory_are_looked_at_by_checks(cuda):
    import cupy

    q, k, v = map(cupy.asarray, drawn())
    wrong = cupy.asarray(np.array([11, 12, -3], "i4"))
    with pytest.raises(ValueError, match=r"k.lengths\[1\] is 12"):
        cupyfa.attention(q, Padded(k, wrong), Padded(v, wrong), check=True)
    out = cupyfa.attention(q, Padded(k, wrong), Padded(v, wrong), kernel="fa2")
    lengths = [11, 11, 0]
    right = cupyfa.attention(q, Padded(k, lengths), Padded(v, lengths), kernel="fa2")
    assert out.get().tobytes() == right.get().tobytes()
    with pytest.raises(TypeError, match="k.lengths is int64; it must be int32: convert it"):
        of_64_bits = wrong.astype("i8")
        cupyfa.attention(q, Padded(k, of_64_bits), Padded(v, of_64_bits))
    strided = cupy.asarray(np.array([11, 99, 11, 99, 0], "i4"))[::2]
    found = cupyfa.attention(q, Padded(k, strided), Padded(v, strided), kernel="fa2")
    assert found.get().tobytes() == right.get().tobytes()
