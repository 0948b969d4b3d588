"""Products, fragments and the exponential of doubles, as mma_f64 and mma_f64_columns use them."""

import numpy as np
import pytest
from helpers.device_code import code, launch

# What the host writes above a kernel, as far as the headers read it.
HOST = "using operand = double;\nusing real = double;\nconstexpr bool packed = false;\n"
FRAGMENTS = HOST + "#include <tile/f64_fragments.cuh>"
LANE = np.arange(32)
ROW, PLACE = LANE // 4, LANE % 4


def random(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def multiply(run_code, A, B, D):
    """D + A B of one instruction, whose operands lie as the header says."""
    a = np.array([A[ROW + i % 2 * 8, PLACE + i // 2 * 4] for i in range(8)])
    b = np.array([B[PLACE + 4 * i, ROW] for i in range(4)])
    rows, columns = np.array([ROW, ROW, ROW + 8, ROW + 8]), 2 * PLACE + [[0], [1], [0], [1]]
    d = D[rows, columns]
    run_code(code("multiply_f64"), a, b, d, head="#include <ptx/mma_f64.cuh>")
    got = np.empty_like(D)
    got[rows, columns] = d
    return got


def test_products_are_those_of_numpy(run_code):
    A, B, D = random((16, 16)), random((16, 8), 1), random((16, 8), 2)
    np.testing.assert_allclose(multiply(run_code, A, B, D), D + A @ B, rtol=1e-14, atol=1e-14)


def test_infinities_and_nan_follow_ieee(run_code):
    A, B, D = np.ones((16, 16)), np.ones((16, 8)), np.zeros((16, 8))
    A[3, 4], A[9, 5], B[6, 2], B[4, 7], D[12, 0] = np.inf, np.nan, -np.inf, 0, np.inf
    with np.errstate(invalid="ignore"):
        want = D + A @ B
    np.testing.assert_array_equal(multiply(run_code, A, B, D), want)


@pytest.mark.parametrize("columns", [16, 48, 256])
def test_fragments_are_read_without_bank_conflicts(columns):
    """Of 16 columns, or rows, a lane has 2c, 2c + 1, 2c + 8 and 2c + 9."""
    tile, where = random((16, columns)), np.zeros((4, 32), np.int32)
    a, b = np.zeros((8, 32)), np.zeros((8, 32))
    stored = np.empty_like(tile)
    for row in range(16):
        line = row & 6 ^ row % 2 * 4
        for chunk in range(columns // 2):
            stored[row, 2 * (chunk ^ line) : 2 * (chunk ^ line) + 2] = tile[
                row, 2 * chunk : 2 * chunk + 2
            ]
    launch(code("places_of_doubles", columns=columns), stored, where, a, b, head=FRAGMENTS)
    low, high, even, odd = where * 8 // 4 % 32  # the first bank of each lane
    for banks in (low, high):  # 16 bytes: eight lanes at a time
        assert all(len(set(banks[i : i + 8])) == 8 for i in range(0, 32, 8))
    for banks in (even, odd):  # 8 bytes: sixteen
        assert all(len(set(banks[i : i + 16])) == 16 for i in range(0, 32, 16))
    terms = 2 * PLACE + np.array([0, 1, 8, 9])[:, None]
    for i in range(8):
        assert (a[i] == tile[ROW + i % 2 * 8, columns - 16 + terms[i // 2]]).all()
        assert (b[i] == tile[terms[i // 2], columns - 16 + ROW + i % 2 * 8]).all()


def test_the_exponential_of_doubles(run_code):
    """Its error is below an ulp from 2**-1021 on; what is less has no weight, and NaN stays."""
    x = np.concatenate([-np.geomspace(1e-18, 1020, 4000), np.arange(-1021.0, 4), [0.5, -0.5]])
    special = [-1021.6, -1100.0, -1.7e308, -np.inf, np.nan]
    x, got = np.append(x, special), np.zeros(len(x) + len(special))
    head = "#include <attention/exp2_f64.cuh>"
    run_code(code("exponentials_of_doubles"), x, got, scalars=(np.int32(len(x)),), head=head)
    assert (got[-5:-1] == 0).all() and np.isnan(got[-1])
    x, got = x[:-5], got[:-5]
    error = np.abs(got - np.exp2(x.astype(np.longdouble)))
    assert (error <= 0.75 * np.spacing(got)).all()
