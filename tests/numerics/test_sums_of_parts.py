"""Products of float16 parts keep float32 accuracy, or a flag reports that they do not.

The kernels are emulated in NumPy with tensor cores that truncate sums, unlike the simulator's.
"""

import numpy as np
import pytest
from helpers import parts
from helpers.parts import HELD, NOT_HELD, normal

from cupyfa.numerics import tolerance

F = np.float32


def drawn(make, M=32, N=320, d=64, seed=0):
    rng = np.random.default_rng(seed)
    return [F(x) for x in make(rng, normal(rng, M, d), normal(rng, N, d), normal(rng, N, d))]


def errors(q, k, v, found, scale, **options):
    """Returns each row's largest error of O and of lse, relative to its bound."""
    inputs = (x[None, None] for x in (q, k, v))
    expected = tolerance.expected_attention(
        *inputs, dtype="float32", scale=scale, roundings=(None,), **options
    )
    shares = []
    for got, (want, bound) in zip(found, (expected[None][name] for name in ("O", "lse"))):
        with np.errstate(invalid="ignore"):
            error = np.where(got == want[0, 0], 0, np.abs(got - want[0, 0]) / bound[0, 0])
        shares.append(error.reshape(len(q), -1).max(1))
    return shares


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("kind", HELD)
def test_parts_hold_ordinary_rows(kind, d):
    q, k, v = drawn(HELD[kind], d=d)
    *found, flags = parts.attention(q, k, v, d**-0.5)
    of_O, of_lse = errors(q, k, v, found, d**-0.5)
    assert not flags.any()
    assert max(of_O.max(), of_lse.max()) <= 0.5


@pytest.mark.parametrize("kind", NOT_HELD)
def test_rows_that_parts_do_not_hold_have_flags(kind):
    q, k, v = drawn(NOT_HELD[kind])
    *found, flags = parts.attention(q, k, v, 0.125)
    of_O, of_lse = errors(q, k, v, found, 0.125)
    assert (of_O.max() > 1) == (kind in ("one_hot, 6 times", "one_hot, 8 times"))
    assert max(of_O[~flags].max(initial=0), of_lse[~flags].max(initial=0)) <= 0.5


@pytest.mark.parametrize("size", [1e6, 1e12, 1e30])
def test_hidden_keys_that_are_larger_cost_flags_at_most(size):
    """The second half of the keys is hidden from all queries."""
    q, k, v = drawn(HELD["normal"], M=64, N=128)
    k[64:] *= size
    v[64:] *= size
    visible = np.tril(np.ones((64, 128), bool), 0)
    *found, flags = parts.attention(q, k, v, 0.125, visible=visible)
    of_O, of_lse = errors(q, k, v, found, 0.125, causal_offset=0)
    assert max(of_O[~flags].max(initial=0), of_lse[~flags].max(initial=0)) <= 0.5


def test_long_sums_are_added_in_registers():
    """Sums positive numbers over all keys, which tensor cores would truncate far too much."""
    rng = np.random.default_rng(0)
    N, d = 16384, 16
    q, k, v = (rng.random((rows, d), F) for rows in (4, N, N))
    *found, flags = parts.attention(q, k, v, d**-0.5)
    of_O, _ = errors(q, k, v, found, d**-0.5)
    assert not flags.any() and of_O.max() <= 0.2


def test_the_model_of_tensor_cores():
    """Matches products measured on an H100: sums are aligned to the largest term and truncated."""
    one, ulp = np.ones(1), 2.0**-23

    def added(product, count, first=1.0):
        terms = np.zeros((1, 16))
        terms[0, :count] = product
        return (parts.add_products(one * first, terms)[0] - 1) / ulp

    assert [added(2.0**-24, 15), added(2.0**-25, 15), added(2.0**-26, 15)] == [7, 3, 0]
    assert [added(2.0**-25, 16), added(1.9 * 2.0**-26, 16), added(-(2.0**-26), 1)] == [4, 0, 0]


def drawn_gradients(make, M=64, N=96, d=64):
    """Returns one head's inputs of gradients, including O and lse."""
    q, k, v = drawn(make, M=M, N=N, d=d)
    do = normal(np.random.default_rng(1), M, d)
    inputs = (x[None, None] for x in (q, k, v))
    found = tolerance.expected_attention(*inputs, dtype="float32", scale=d**-0.5)[None]
    return q, k, v, F(found["O"].value[0, 0]), F(found["lse"].value[0, 0]), do


def shares_of_gradients(inputs, found, scale=0.125):
    """Yields each row's largest error relative to its bound, and its flag, for dQ, dK and dV."""
    given = (x[None, None] for x in inputs)
    expected = tolerance.expected_gradients(*given, dtype="float32", scale=scale)[None]
    for name, (got, flags) in zip(("dQ", "dK", "dV"), found):
        want, bound = expected[name].value[0, 0], expected[name].bound[0, 0]
        with np.errstate(invalid="ignore"):
            share = np.where(got == want, 0, np.abs(got - want) / bound).max(1)
        yield np.where(np.isnan(share), np.inf, share), flags


# Whether dQ, dK and dV have flags. Values that cancel give D = 0; if V's columns vary widely in
# magnitude, the parts of a dO row cannot represent the products.
FLAGGED = {
    "cancelling": [True, True, True],
    "columns of V": [True, True, True],
    "elements of V": [True, True, True],
}


@pytest.mark.parametrize("kind", [*HELD, *NOT_HELD])
def test_gradients_are_right_or_have_flags(kind):
    inputs = drawn_gradients({**HELD, **NOT_HELD}[kind])
    flagged = [
        (share[~flags].max(initial=0), flags.any())
        for share, flags in shares_of_gradients(inputs, parts.gradients(*inputs, 0.125))
    ]
    assert max(share for share, _ in flagged) <= 0.5
    assert [found for _, found in flagged] == FLAGGED.get(kind, [False, False, False])
