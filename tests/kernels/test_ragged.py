"""Ragged batches in every rung that takes them: sequences of packed arrays."""

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from helpers.problems import FORWARD, name, usual_first

import cupyfa
from cupyfa import Dropout, Packed
from cupyfa.errors import Unsupported
from cupyfa.lab.bench.sweeps import usual_dtype
from cupyfa.ladder import LADDER

F = np.float32
BACKWARD = LADDER["backward"]
ABLE = [x for x in FORWARD.values() if "ragged" in x.features]
ABLE_BACKWARD = [x for x in BACKWARD.values() if "ragged" in x.features]
UNABLE = [x for x in (*FORWARD.values(), *BACKWARD.values()) if "ragged" not in x.features]
# Sequences of one row, without rows, without keys, longer than a tile; ends that no tile has.
ROWS, KEYS = (5, 0, 17, 1, 73, 0), (9, 4, 17, 0, 150, 0)
CASES = (
    {"causal": True, "softcap": 3.0},
    {"causal": "top-left", "score_mod": "score + 0.1 * (position - key) + 0.01 * batch"},
    {"window": (9, 3), "sink": np.array([0.5, -1.0], F)},
    {"mask": "key <= query + keys - queries", "scale": -0.3},
    {"dropout": Dropout(0.3, 5), "alibi_slopes": np.arange(12, dtype=F).reshape(6, 2) / 40},
)
QUICK = ("fa2", "wgmma_persistent", "two_pass")
IN_TURN = [(x, CASES[i % len(CASES)]) for i, x in enumerate((*ABLE, *ABLE[:3]))]
IN_TURN_BACKWARD = [(x, CASES[(i + 2) % len(CASES)]) for i, x in enumerate(ABLE_BACKWARD)]


def starts(lengths, first=0):
    return np.cumsum([first, *lengths]).astype(np.int32)


def drawn(dtype, rows, keys, *, heads=2, kv_heads=1, d=24, dv=24, seed=0):
    rng = np.random.default_rng(seed)
    of = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    shapes = (rows, heads, d), (keys, kv_heads, d), (keys, kv_heads, dv)
    return [rng.standard_normal(x).astype(of) for x in shapes]


def lengths_of(*, rows=ROWS, keys=KEYS, first=0):
    return starts(rows, first), starts(keys, first)


def pack(arrays, offsets, used=(None, None)):
    q, k, v = arrays
    (rows, keys), (used_rows, used_keys) = offsets, used
    return Packed(q, rows, used_rows), Packed(k, keys, used_keys), Packed(v, keys, used_keys)


def forward(kernel, backend, arrays, offsets, used=(None, None), **options):
    how = {"kernel": kernel, "backend": backend, "return_lse": True, **options}
    return cupyfa.attention(*pack(arrays, offsets, used), **how)


def checked(kernel, backend, **options):
    offsets = lengths_of()
    arrays = drawn(usual_dtype(kernel), offsets[0][-1], offsets[1][-1])
    return forward(kernel, backend, arrays, offsets, check=True, **options)


@pytest.mark.parametrize("kernel", usual_first(ABLE, QUICK))
def test_every_sequence_has_its_own_result(backend, kernel):
    out, lse = checked(kernel, backend, causal=True)
    assert not np.any(out[22])  # a query without keys
    assert (lse[:, 22] == -np.inf).all()


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel, how", IN_TURN, ids=lambda x: getattr(x, "name", None) or ",".join(x)
)
def test_options_are_those_of_each_sequence(backend, kernel, how):
    checked(kernel, backend, **how)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ABLE, ids=name)
def test_a_sequence_has_the_bits_of_the_dense_call(backend, kernel):
    rows, keys = lengths_of()
    q, k, v = drawn(usual_dtype(kernel), rows[-1], keys[-1])
    how = {"kernel": kernel, "backend": backend, "causal": True}
    plan = cupyfa.plan(
        **{x: how[x] for x in ("kernel", "backend")}, M=200, d=24, dtype=str(q.dtype)
    )
    how["tiles"] = plan.constants
    out, lse = forward(arrays=(q, k, v), offsets=(rows, keys), **how)
    for (a, b), (c, d) in zip(pairwise(rows), pairwise(keys)):
        dense = cupyfa.attention(*(q[a:b], k[c:d], v[c:d]), layout="bshd", return_lse=True, **how)
        assert out[a:b].tobytes() == dense[0].tobytes()
        assert lse[:, a:b].tobytes() == dense[1].tobytes()


def neighbours(kernel, backend, value):
    """O of the middle sequence, whose neighbours have this number."""
    offsets = lengths_of(rows=(20, 30, 40), keys=(20, 35, 40))
    arrays = drawn(usual_dtype(kernel), 90, 95)
    for array, (start, end) in zip(arrays, ((20, 50), (20, 55), (20, 55))):
        array[:start] = array[end:] = value
    out, lse = forward(kernel, backend, arrays, offsets)
    return np.array(out[20:50], F), lse[:, 20:50]


@pytest.mark.parametrize("kernel", usual_first(ABLE, QUICK[:1]))
def test_neighbours_do_not_matter(backend, kernel):
    once, of_another = neighbours(kernel, backend, 1), neighbours(kernel, backend, -2)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(once, of_another))
    for a, b in zip(once, neighbours(kernel, backend, np.nan)):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("kernel", usual_first(ABLE, QUICK[:1]))
def test_rows_of_no_sequence_see_no_key(backend, kernel):
    offsets = lengths_of(rows=(20, 30), keys=(25, 35), first=3)
    arrays = drawn(usual_dtype(kernel), 60, 70)
    used = np.array([20, 7], "i4"), np.array([11, 0], "i4")
    out, lse = forward(kernel, backend, arrays, offsets, used, check=True)
    unused = np.r_[0:3, 23:60]
    assert not np.any(np.array(out, F)[unused])
    assert (lse[:, unused] == -np.inf).all() and np.isfinite(lse[:, 3:23]).all()


def gradients(kernel, backend, used=(None, None), d=24, has_dlse=False, **options):
    rows, keys = offsets = lengths_of(first=2)
    arrays = drawn(usual_dtype(kernel), rows[-1] + 3, keys[-1] + 5, d=d, dv=d)
    own = {name: x for name, x in options.items() if name != "tiles"}
    out, lse = forward("fa2", backend, arrays, offsets, used, **own)
    dout = drawn(str(out.dtype), out.shape[0], 0, seed=1, d=d)[0]
    dlse = np.where(np.isfinite(lse), lse / 4, 0).astype(lse.dtype) if has_dlse else None
    how = {"kernel": kernel, "backend": backend, "check": True, "dlse": dlse, **options}
    return cupyfa.backward(dout, *pack(arrays, offsets, used), out, lse, **how)


@pytest.mark.parametrize("kernel", usual_first(ABLE_BACKWARD, QUICK))
def test_gradients_are_those_of_each_sequence(backend, kernel):
    dq, dk, dv = (np.array(x, F) for x in gradients(kernel, backend, causal=True))
    assert not (np.any(dq[:2]) or np.any(dk[-5:]) or np.any(dv[-5:]))
    assert np.any(dq[2:7]) and np.any(dk[2:11])


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel, how", IN_TURN_BACKWARD, ids=lambda x: getattr(x, "name", None) or ",".join(x)
)
def test_gradients_with_options(backend, kernel, how):
    gradients(kernel, backend, has_dlse=True, **how)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["wgmma_columns", "wgmma_two_pass", "wgmma_fp16x2_two_pass"])
def test_gradients_of_wide_heads(backend, kernel):
    gradients(BACKWARD[kernel], backend, d=160, causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ABLE_BACKWARD, ids=name)
def test_gradients_of_unused_rows_are_0(backend, kernel):
    used = np.array([5, 0, 9, 1, 70, 0]), np.array([0, 4, 17, 0, 99, 0])
    dq, dk, _ = (np.array(x, F) for x in gradients(kernel, backend, used=used))
    assert not (np.any(dq[2:7]) or np.any(dq[16:24]) or np.any(dk[2:11]))


@pytest.mark.parametrize("kernel", UNABLE, ids=name)
def test_kernels_that_cannot_say_which_can(kernel):
    q, k, v = drawn(usual_dtype(kernel), 4, 4)
    offsets, lse = (np.array([0, 4], "i4"),) * 2, np.zeros((2, 4), F)
    how = {"kernel": kernel, "backend": "simulator"}
    with pytest.raises(Unsupported, match=r"does not support .*ragged.*; kernels that can: "):
        if kernel.operation == "forward":
            cupyfa.attention(*pack((q, k, v), offsets), **how)
        else:
            cupyfa.backward(q, *pack((q, k, v), offsets), q, lse, **how)


@pytest.mark.parametrize(
    "kernels",
    [
        ("fa2", "two_pass"),
        pytest.param(("mma_pipelined", "mma_columns"), marks=pytest.mark.slow),
        pytest.param(("wgmma_persistent", "wgmma_columns"), marks=pytest.mark.slow),
        pytest.param(("wgmma", "wgmma_two_pass"), marks=pytest.mark.slow),
    ],
    ids=lambda x: x[0],
)
@pytest.mark.parametrize("offsets", [(0, 9, 4, 4), (-7, 5, 90, 7), (30, 20, 10, 0)], ids=str)
def test_wrong_offsets_of_a_kernel_stay_inside_the_arrays(backend, kernels, offsets, monkeypatch):
    # As offsets in GPU memory, which nobody sees before the kernel does.
    monkeypatch.setattr(cupyfa.runtime.ragged, "_check_offsets", lambda *_: None)
    arrays = drawn("float32" if kernels[0] == "fa2" else "float16", 20, 20)
    wrong = np.array(offsets, "i4"), np.array(offsets, "i4")
    out, lse = forward(kernels[0], backend, arrays, wrong)
    given = np.ones_like(out), *pack(arrays, wrong), out, lse
    cupyfa.backward(*given, kernel=kernels[1], backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["fa2", "mma_pipelined", "wgmma_persistent"])
def test_a_graph_takes_other_lengths(cuda, kernel):
    import cupy

    dtype = usual_dtype(FORWARD[kernel])
    q, k, v = map(cupy.asarray, drawn(dtype.replace("bfloat16", "float16"), 90, 90))
    before, after = starts((10, 50, 30)), starts((45, 1, 44))
    offsets = cupy.asarray(before)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        call = lambda: forward(kernel, "cuda", (q, k, v), (offsets, offsets), causal=True)  # noqa: E731
        call()
        stream.begin_capture()
        out, lse = call()
        graph = stream.end_capture()
        offsets.set(after)
        graph.launch(stream)
        stream.synchronize()
        wanted = forward(kernel, "cuda", (q, k, v), (after, after), causal=True)
        stream.synchronize()
    assert out.get().tobytes() == wanted[0].get().tobytes()
    assert lse.get().tobytes() == wanted[1].get().tobytes()
