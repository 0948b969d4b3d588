"""Repeated calls enter few Python functions of the library and plan nothing."""

import sys
import threading
import weakref
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
from helpers.far_device import FarDevice
from helpers.inputs import optional_arrays

import cupyfa
from cupyfa import KVCache, distributed
from cupyfa.problem.optional_inputs import OWN_ARRAYS

RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((2, 4, 64, 32)).astype(np.float32) for _ in range(3))
TOKENS = [np.ascontiguousarray(x[:, :, :2]) for x in (Q, K, V)]


@contextmanager
def counted():
    """Yields a list that collects the names of library functions as threads enter them."""
    entered = []

    def profile(frame, event, argument):
        if event == "call" and "cupyfa" in frame.f_globals.get("__name__", ""):
            entered.append(frame.f_code.co_name)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield entered
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def repeated(call):
    """Returns how many library functions the fourth call enters, over all threads."""
    for _ in range(3):
        call()
    with counted() as entered:
        call()
    return len(entered)


def attend():
    cupyfa.attention(Q, K, V, kernel="fa2", backend="simulator")


def decode():
    q, k, v = TOKENS
    cupyfa.attention(q, CACHE, append=(k, v), backend="simulator")


CACHE = KVCache(K.copy(), V.copy(), np.array([10, 60], np.int32))


FAR = FarDevice()


def transfer():
    cupyfa.attention(Q, K, V, kernel="fa2", backend=FAR)


@pytest.mark.parametrize(("call", "most"), [(attend, 50), (decode, 120), (transfer, 240)])
def test_a_repeated_call_enters_few_functions(call, most):
    assert 5 < repeated(call) <= most


@pytest.mark.parametrize("schedule", ["gather", "ring"])
@pytest.mark.parametrize("function", ["attention", "backward"])
def test_a_repeated_call_of_ranks_enters_few_functions(function, schedule):
    def run(group):
        own = (np.ascontiguousarray(x[:, :, :32]) for x in (Q, K, V))
        arrays = [distributed.Sharded(x, group, 64, schedule=schedule) for x in own]
        how = {"kernel": "fa2", "backend": "simulator"}
        if function == "attention":
            return repeated(lambda: cupyfa.attention(*arrays, **how))
        out, lse = cupyfa.attention(*arrays, return_lse=True, **how)
        how["kernel"] = "two_pass"
        return repeated(lambda: cupyfa.backward(out, *arrays, out, lse, **how))

    assert 50 < sum(distributed.threads(2, run)) <= 600


def test_lengths_are_read_again_in_each_call():
    q, k, v = TOKENS
    lengths = np.array([10, 60], np.int32)
    cache = KVCache(K.copy(), V.copy(), lengths)
    for _ in range(3):
        cupyfa.attention(q, cache, append=(k, v), backend="simulator")
    lengths[:] = 3, 20
    found = cupyfa.attention(q, cache, append=(k, v), backend="simulator")
    other = KVCache(K.copy(), V.copy(), lengths.copy())
    expected = cupyfa.attention(q, other, append=(k, v), backend="simulator")
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(cache.k[0, :, 3:5], k[0])
    lengths[1] = 63
    with pytest.raises(ValueError, match=r"lengths\[1\] is 63"):
        cupyfa.attention(q, cache, append=(k, v), backend="simulator")


def test_new_tokens_that_have_to_be_copied_are_read_again_in_each_call():
    every = RNG.standard_normal((3, 2, 4, 2, 64)).astype(np.float32)
    angles = RNG.standard_normal((2, 64, 8)).astype(np.float32)
    found = []
    for arrays in (every[..., ::2], None):
        cache = KVCache(K.copy(), V.copy(), np.array([10, 60], np.int32), rotary=tuple(angles))
        for _ in range(4):
            every += 1
            q, k, v = np.ascontiguousarray(every[..., ::2]) if arrays is None else arrays
            out = cupyfa.attention(q, cache, append=(k, v), backend="simulator")
        found.append(out)
        every -= 4
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("name", OWN_ARRAYS)
def test_another_optional_array_is_read_in_a_repeated_call(name):
    one, other = optional_arrays(name, 2, 4, 64, 64)
    attend = partial(cupyfa.attention, Q, K, V, kernel="fa2", backend=FAR)
    before = [attend(**{name: one}) for _ in range(4)][-1]
    found = attend(**{name: other})
    assert not np.array_equal(found, before)
    np.testing.assert_array_equal(found, attend(**{name: other.copy()}))


@pytest.mark.parametrize("name", OWN_ARRAYS)
def test_a_call_on_a_cache_reads_or_refuses_each_optional_array(name):
    one, _ = optional_arrays(name, 2, 4, 64, 64)
    plain = cupyfa.attention(TOKENS[0], CACHE, backend="simulator")
    try:
        found = cupyfa.attention(TOKENS[0], CACHE, backend="simulator", **{name: one})
    except ValueError as error:
        assert f"{name} is " in str(error) and f"leave {name} out" in str(error)
    else:
        assert not np.array_equal(found, plain)


def test_a_cache_keeps_the_arrays_of_its_last_call_alone():
    cache = KVCache(K.copy(), V.copy(), np.array([10, 60], np.int32))
    queries = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        q, k, v = rng.standard_normal((3, 2, 4, 2, 32)).astype(np.float32)
        queries.append(weakref.ref(q))
        for _ in range(2):
            cupyfa.attention(q, cache, append=(k, v), backend="simulator")
        del q, k, v
    assert [x() is not None for x in queries] == [False, False, False, True]


def test_an_array_for_the_output_decides_the_dtype_of_its_own_call_alone():
    q, k, v = (x.astype(np.float16) for x in (TOKENS[0], K, V))
    cache = KVCache(k, v, np.array([10, 60], np.int32))
    wide, narrow = (np.empty(q.shape, dtype) for dtype in (np.float32, np.float16))
    for calls in ((wide, None, narrow), (None, wide, None), ("float32", narrow, wide)):
        for out in calls:
            for _ in range(2):
                found = cupyfa.attention(q, cache, out=out, backend="simulator")
                wanted = out if isinstance(out, str) else getattr(out, "dtype", "float16")
                assert found.dtype == wanted
