"""Repeated calls on ragged batches and caches, on the same arrays."""

import weakref

import numpy as np
import pytest
from helpers.device_arrays import ArrayDevice, DeviceArray
from helpers.inputs import optional_arrays

import cupyfa
from cupyfa.call import execution
from cupyfa.call.keywords import OF_SCORES
from cupyfa.problem.optional_inputs import OWN_ARRAYS
from cupyfa.runtime import choose_backend

F = np.float32


@pytest.fixture
def device(monkeypatch):
    made = ArrayDevice()
    monkeypatch.setitem(choose_backend._owners, DeviceArray, made)
    return made


@pytest.fixture
def slow_calls(monkeypatch):
    """Collects the calls that interpret their arguments; repeated calls skip this."""
    found, read = [], execution.read_call
    monkeypatch.setattr(execution, "read_call", lambda *call: found.append(1) or read(*call))
    return found


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


def there(*arrays):
    return [DeviceArray(x) for x in arrays]


def same(got, wanted):
    for mine, its in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(mine.host, its)


def packed(arrays, offsets):
    return [cupyfa.Packed(x, offsets) for x in arrays]


ON = {"backend": "simulator", "return_lse": True}
PACKED = drawn(17, 4, 16), drawn(17, 2, 16, seed=1), drawn(17, 2, 16, seed=2)
OFFSETS = np.array([[0, 5, 5, 17], [0, 9, 16, 17]], np.int32)


def test_packed_sequences_are_repeated(device, slow_calls):
    q, k, v, offsets, sink = there(*PACKED, OFFSETS[0].copy(), drawn(3, 4))
    how = {"kernel": "fa2", "causal": True, "return_lse": True, "sink": sink}
    for turn in range(8):
        offsets.host[:] = OFFSETS[turn % 2]
        found = cupyfa.attention(*packed((q, k, v), offsets), **how)
        wanted = cupyfa.attention(*packed(PACKED, offsets.host), **{**how, "sink": sink.host, **ON})
        same(found, wanted)
    assert len(slow_calls) - 8 <= 5  # the simulator's calls, and calls on new memory
    before = len(slow_calls)
    cupyfa.attention(*packed((q, k, v), offsets), **{**how, "causal": False})
    used = there(np.array([5, 0, 1], "i4"))[0]
    cupyfa.attention(cupyfa.Packed(q, offsets, used), *packed((k, v), offsets), **how)
    assert len(slow_calls) == before + 2


@pytest.mark.parametrize(
    "how",
    [{"out": "float32"}, {"dropout": cupyfa.Dropout(0.25, 7)}, {"mask": "key <= query"}],
    ids=str,
)
def test_options_that_are_values_are_repeated(device, slow_calls, how):
    q, k, v = (x[None] for x in PACKED)
    far = there(*(x.astype(np.float16).swapaxes(1, 2).copy() for x in (q, k, v)))
    wanted = cupyfa.attention(*(x.host for x in far), kernel="fa2", **how, backend="simulator")
    slow_calls.clear()
    for _ in range(8):
        found = cupyfa.attention(*far, kernel="fa2", **how)
        np.testing.assert_array_equal(found.host, wanted)
        assert found.dtype == wanted.dtype
    assert len(slow_calls) <= 5


def test_gradients_with_dropout_are_repeated(device, slow_calls):
    q, k, v = there(*(x[None].swapaxes(1, 2).copy() for x in PACKED))
    how = {"dropout": cupyfa.Dropout(0.25, 7)}
    out, lse = cupyfa.attention(q, k, v, kernel="fa2", return_lse=True, **how)
    host = [x.host for x in (out, q, k, v, out, lse)]
    wanted = cupyfa.backward(*host, kernel="two_pass", backend="simulator", **how)
    slow_calls.clear()
    for _ in range(8):
        same(cupyfa.backward(out, q, k, v, out, lse, kernel="two_pass", **how), wanted)
    assert len(slow_calls) <= 5


def test_gradients_of_packed_sequences_are_repeated(device, slow_calls):
    q, k, v, offsets = there(*PACKED, OFFSETS[0])
    out, lse = cupyfa.attention(*packed((q, k, v), offsets), kernel="fa2", return_lse=True)
    given = [out, *packed((q, k, v), offsets), out, lse]
    host = [out.host, *packed((q.host, k.host, v.host), offsets.host), out.host, lse.host]
    wanted = cupyfa.backward(*host, kernel="two_pass", backend="simulator")
    slow_calls.clear()
    for _ in range(8):
        same(cupyfa.backward(*given, kernel="two_pass"), wanted)
    assert len(slow_calls) <= 5


def test_lengths_and_arrays_of_scores_are_repeated(device, slow_calls):
    def attend(q, k, v, lengths, bias, **how):
        padded = cupyfa.Padded(k, lengths), cupyfa.Padded(v, lengths)
        return cupyfa.attention(q, *padded, kernel="fa2", bias=bias, **how)

    drawn_arrays = (drawn(3, 2, 9, 16, seed=x) for x in range(3))
    far = there(*drawn_arrays, np.array([9, 0, 4], "i4"), drawn(9, 9))
    for _ in range(8):
        found = attend(*far)
    same([found], [attend(*(x.host for x in far), backend="simulator")])
    assert len(slow_calls) <= 6
    q, k, v, lengths, bias = far
    cupyfa.attention(cupyfa.Padded(q, lengths), k, v, kernel="fa2", bias=bias)
    assert len(slow_calls) <= 7


@pytest.mark.parametrize("name", OWN_ARRAYS)
def test_no_optional_array_is_dropped_after_plain_calls(device, slow_calls, name):
    """Neither in its first call, which repeats q, k and v of plain calls, nor when repeated."""
    far = there(*(drawn(2, 4, 16, 16, seed=x) for x in range(3)))
    one, other = optional_arrays(name, 2, 4, 16, 16)
    for _ in range(4):
        plain = cupyfa.attention(*far, kernel="fa2")
    for array in (one, other):
        wanted = cupyfa.attention(
            *(x.host for x in far), kernel="fa2", backend="simulator", **{name: array}
        )
        assert not np.array_equal(wanted, plain.host)
        slow_calls.clear()
        (there_too,) = there(array)
        for _ in range(8):
            same([cupyfa.attention(*far, kernel="fa2", **{name: there_too})], [wanted])
        assert len(slow_calls) <= 5


@pytest.mark.parametrize("name", OF_SCORES)
def test_no_argument_is_dropped_after_plain_calls(device, name):
    """No argument accepts ``object()``, so a call that returns has not read it."""
    far = there(*(drawn(2, 4, 16, 16, seed=x) for x in range(3)))
    for _ in range(4):
        cupyfa.attention(*far, kernel="fa2")
    with pytest.raises((TypeError, ValueError), match=name):
        cupyfa.attention(*far, kernel="fa2", **{name: object()})


@pytest.mark.slow
def test_block_masks_and_gradients_of_lse_are_repeated(device, slow_calls):
    q, k, v, dlse = there(*(drawn(2, 9, 16, seed=x) for x in range(3)), drawn(2, 9))
    seen = np.tri(9, dtype=bool)
    mask = cupyfa.block_mask(mask_mod="key <= query", heads=2, M=9, N=9, backend="simulator")
    how = {"kernel": "two_pass", "mask": mask, "dlse": dlse}
    for _ in range(8):
        out, lse = cupyfa.attention(q, k, v, kernel="fa2", mask=mask, return_lse=True)
        found = cupyfa.backward(out, q, k, v, out, lse, **how)
    host = [x.host for x in (out, q, k, v, out, lse)]
    how |= {"mask": seen, "dlse": dlse.host, "backend": "simulator"}
    wanted = cupyfa.backward(*host, **how)
    for mine, its in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine.host, its, atol=1e-6)
    assert len(slow_calls) <= 12
    slow_calls.clear()
    cupyfa.backward(out, q, k, v, out, lse, kernel="two_pass", mask=mask)
    assert len(slow_calls) == 1


CONTIGUOUS, PAGED = (3, 64, 2, 16), (12, 16, 2, 16)
TABLE = np.arange(12, dtype=np.int32)[::-1].reshape(3, 4).copy()


@pytest.mark.parametrize("is_paged", [False, True], ids=["contiguous", "pages"])
@pytest.mark.parametrize("writes", [False, True], ids=["read", "append"])
def test_decoding_is_repeated(device, slow_calls, is_paged, writes):
    """Lengths change between calls, and new keys and values are updated in place."""
    shape = PAGED if is_paged else CONTIGUOUS
    host = [drawn(*shape, seed=3), drawn(*shape, seed=4), np.array([5, 0, 20], np.int32)]
    host += [TABLE] * is_paged
    q, new_k, new_v = drawn(3, 4, 2, 16), drawn(3, 2, 2, 16, seed=5), drawn(3, 2, 2, 16, seed=6)
    angles = drawn(64, 8, seed=7), drawn(64, 8, seed=8)
    far = there(*(x.copy() for x in host))
    far_q, far_k, far_v, *far_angles = there(q, new_k, new_v, *angles)
    how = {"kernel": "fa2", "return_lse": True}
    ours, theirs = {}, {}
    if writes:
        ours, theirs = {"append": (new_k, new_v)}, {"append": (far_k, far_v)}
    rotary = (angles, far_angles) if writes else (None, None)
    here, cache = (
        cupyfa.KVCache(*arrays, layout="bshd", rotary=x) for arrays, x in zip((host, far), rotary)
    )
    for turn in range(8):
        wanted = cupyfa.attention(q, here, **ours, **how, backend="simulator")
        same(cupyfa.attention(far_q, cache, **theirs, **how), wanted)
        same(far[:2], host[:2])
        for lengths in (host[2], far[2].host):
            lengths += 2
        new_k += turn
        new_v -= turn
    assert len(slow_calls) <= 2 + 5  # the host's calls, and calls on new memory

    slow_calls.clear()
    device.stream = 9  # another stream, which has its own temporaries
    same(
        cupyfa.attention(far_q, cache, **theirs, **how),
        cupyfa.attention(q, here, **ours, **how, backend="simulator"),
    )
    assert len(slow_calls) == 1


def test_a_cache_and_what_it_kept_are_freed_at_once(device):
    q, k, v, *cached = there(
        drawn(3, 4, 1, 16),
        drawn(3, 2, 1, 16),
        drawn(3, 2, 1, 16),
        drawn(*CONTIGUOUS),
        drawn(*CONTIGUOUS),
    )
    cache = cupyfa.KVCache(*cached, *there(np.array([5, 0, 20], np.int32)), layout="bshd")
    for _ in range(4):
        cupyfa.attention(q, cache, append=(k, v), kernel="fa2")
    kept = weakref.ref(cache), weakref.ref(cached[0]), weakref.ref(q)
    del cache, cached, q, k, v
    assert [x() for x in kept] == [None] * 3
