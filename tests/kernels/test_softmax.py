"""The softmax kernels, as an operation and through the public function."""

import numpy as np
import pytest
from helpers.problems import claimed, name

import cupyfa
from cupyfa.ladder import LADDER

SOFTMAX = LADDER["softmax"]


@pytest.mark.each_choice
@pytest.mark.usefixtures("every_check")
@pytest.mark.parametrize("shape", [(1, 1), (3, 257), (2, 5, 100), (7,), (0, 4), (4, 0)], ids=str)
@pytest.mark.parametrize("kernel, dtype", claimed(SOFTMAX), ids=name)
def test_rows_of_any_length(backend, kernel, dtype, shape):
    dtype = cupyfa.Problem.of_row_sizes(1, 1, dtype).dtype.numpy
    x = np.random.default_rng(0).normal(0, 3, shape).astype(dtype)
    y, lse = cupyfa.softmax(x, kernel=kernel, backend=backend, return_lse=True, check=True)
    assert (y.shape, y.dtype, lse.shape) == (shape, dtype, shape[:-1])
    assert (cupyfa.softmax(x, kernel=kernel, backend=backend) == y).all()


@pytest.mark.parametrize("kernel", SOFTMAX)
def test_special_values(backend, kernel):
    x = np.full((4, 50), -1e30, np.float32)
    x[0, 7] = np.nan
    x[1] = -np.inf
    x[2] = 1e30
    y, lse = cupyfa.softmax(x, kernel=kernel, backend=backend, return_lse=True, check=True)
    assert np.isnan(y[0]).all() and np.isnan(lse[0])
    assert (y[1] == 0).all() and lse[1] == -np.inf
    np.testing.assert_allclose(y[2:], 1 / 50, rtol=1e-6)


def test_the_result_is_written_to_a_given_array():
    x = np.random.default_rng(0).normal(size=(3, 40))
    out = np.empty_like(x)
    assert cupyfa.softmax(x, backend="simulator", out=out) is out
    np.testing.assert_allclose(out.sum(-1), 1)
