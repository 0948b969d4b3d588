"""How products of many heads are divided into calls of cuBLAS."""

import numpy as np
import pytest
from helpers.problems import name

from cupyfa.runtime.cuda.product_batches import batches

M, N, K = 3, 5, 4
BHSD, BSHD, REVERSED = (0, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0)  # order of axes in memory
# Batch, heads, key heads, order of a and b and of out, and the number of calls.
CASES = (
    (2, 6, 6, BHSD, 1),
    (2, 6, 1, BHSD, 2),  # each call has the query heads of a batch element
    (2, 6, 2, BHSD, 3),  # key heads of all batch elements are evenly spaced
    (2, 8, 2, BHSD, 4),
    (1, 6, 3, BHSD, 2),
    (1, 6, 1, BSHD, 1),
    (2, 6, 6, BSHD, 2),
    (9, 6, 6, BSHD, 6),
    (2, 6, 1, BSHD, 2),
    (2, 6, 2, REVERSED, 4),
    (1, 1, 1, BHSD, 1),
)


def array(shape, order, first=0):
    """Returns an array of different numbers whose axes lie in memory in this order."""
    inner = [shape[x] for x in order]
    numbers = np.arange(first, first + np.prod(inner), dtype=float)
    return numbers.reshape(inner).transpose(np.argsort(order))


def element(x, start, *shape):
    """Returns the matrix of an array that begins `start` bytes after the array's first element."""
    return np.ndarray(shape, x.dtype, x.base if x.base is not None else x, start, x.strides[2:])


def multiplied(a, b, out):
    """Computes the products of all calls; returns their number."""
    found = batches(a, b, out)
    for starts, steps, count, adds in found:
        for i in range(count):
            matrices = [
                element(x, start + i * step, *x.shape[2:])
                for x, start, step in zip((a, b, out), starts, steps)
            ]
            product = matrices[0] @ matrices[1]
            matrices[2][...] = product + (matrices[2] if adds else 0)
    return len(found)


@pytest.mark.parametrize("batch, heads, kv_heads, order, calls", CASES, ids=name)
def test_a_group_shares_an_operand(batch, heads, kv_heads, order, calls):
    a, b = array((batch, heads, M, K), order), array((batch, kv_heads, K, N), order, 7)
    out = np.full((batch, heads, M, N), np.nan)
    assert multiplied(a, b, out) == calls
    np.testing.assert_array_equal(out, a @ b.repeat(heads // kv_heads, axis=1))


@pytest.mark.parametrize("batch, heads, kv_heads, order", [x[:4] for x in CASES], ids=name)
def test_a_group_shares_the_result(batch, heads, kv_heads, order):
    a, b = array((batch, heads, M, K), order), array((batch, heads, K, N), order, 7)
    out = np.full((batch, kv_heads, M, N), np.nan)
    calls = multiplied(a, b, out)
    assert calls >= heads // kv_heads  # of a group, each call adds to the results of another
    expected = (a @ b).reshape(batch, kv_heads, -1, M, N).sum(axis=2)
    np.testing.assert_array_equal(out, expected)


def test_broadcast_operands_and_gaps_between_heads():
    a, b = (
        array((2, 8, M, K), BHSD)[:, ::2],
        np.broadcast_to(array((1, 1, K, N), BHSD, 3), (2, 4, K, N)),
    )
    out = np.full((2, 4, M, N), np.nan)
    assert multiplied(a, b, out) == 1
    np.testing.assert_array_equal(out, a @ b)
