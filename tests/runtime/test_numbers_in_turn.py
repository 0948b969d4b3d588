"""Alternating calls on the same arrays with different numbers: each uses its own number."""

import numpy as np
import pytest

import cupyfa

F = np.float32
RNG = np.random.default_rng(0)
Q, DOUT = RNG.standard_normal((2, 1, 2, 35, 16)).astype(F)
K, V = RNG.standard_normal((2, 1, 1, 35, 16)).astype(F)
OFFSETS = np.array([0, 9, 35], np.int32)
PACKED = [cupyfa.Packed(np.ascontiguousarray(x[0].swapaxes(0, 1)), OFFSETS) for x in (Q, K, V)]
NUMBERS = {
    "dropout": [{"dropout": cupyfa.Dropout(x, 1)} for x in (0.2, 0.6)],
    "dropout_seed": [{"dropout": cupyfa.Dropout(0.3, x)} for x in (2**63 + 9, 7)],
    "dropout_offset": [{"dropout": cupyfa.Dropout(0.3, 7, x)} for x in (0, 2**32 - 1)],
    "softcap": [{"softcap": x} for x in (1.0, 2.5)],
    "captured": [
        {"score_mod": "score * rate", "captured": {"rate": x}} for x in (0.5, np.float32(-2))
    ],
}


def vjp(**how):
    out, pullback = cupyfa.vjp(Q, K, V, deterministic=True, **how)
    return out, *pullback(DOUT)


def decoded(**how):
    cache = cupyfa.KVCache(K, V, np.array([30], np.int32))
    return (cupyfa.attention(Q[:, :, :1], cache, **how),)


FUNCTIONS = {
    "attention": lambda **how: (cupyfa.attention(Q, K, V, **how),),
    "vjp": vjp,
    "ragged": lambda **how: (cupyfa.attention(*PACKED, **how),),
    "decode": decoded,
    "prepared": lambda **how: (cupyfa.compile(Q, K, V, **how)(Q, K, V),),
}


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_call_has_its_own_number(function, numbers, backend):
    if function == "decode" and numbers.startswith("dropout"):
        pytest.skip("decoding drops nothing")

    def call(i):
        return FUNCTIONS[function](backend=backend, **NUMBERS[numbers][i])

    results = call(0), call(1)
    assert not any(map(np.array_equal, *results))
    for i in (0, 1, 0, 0, 1):
        for got, wanted in zip(call(i), results[i], strict=True):
            np.testing.assert_array_equal(got, wanted)
