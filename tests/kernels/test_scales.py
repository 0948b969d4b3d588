"""Results of a row, head or batch element do not depend on the magnitudes of other ones."""

import numpy as np
import pytest
from helpers import broken_kernels
from helpers.gradients import gradients_of
from helpers.problems import able, check_case, drawn, usual_first

from cupyfa import Simulator
from cupyfa.errors import WrongResult
from cupyfa.lab.bench.sweeps import usual_dtype
from cupyfa.ladder import LADDER
from cupyfa.problem.dtypes import dtype_named

GIVES_ARRAYS = able("places", "backward")
ALL = [k for operation in ("forward", "backward") for k in LADDER[operation].values()]
BATCH, HEADS, M, N, D = 4, 4, 20, 30, 16
# Exponents of the powers of two that scale a part of dO.
LARGER = {"float16": 10, "bfloat16": 60, "float32": 60, "float64": 500}
TEXT = "score + table[batch, head, min(abs(query - key), 3)] + pair[batch, head, query, key]"
ARRAYS = ("bias", "alibi_slopes", "sink", "table", "pair")


def arrays_of(dtype):
    """Returns dout, q, k, v and captured arrays, whose values differ between heads."""
    sums = dtype_named(dtype).sums.name
    heads, pairs = (BATCH, HEADS), (BATCH, HEADS, M, N)
    arrays = drawn(*((*heads, n, D) for n in (M, M, N, N)), dtype=dtype)
    (bias,) = drawn(pairs, dtype=dtype, seed=1)
    slopes, sink, table, pair = drawn(heads, heads, (*heads, 4), pairs, dtype=sums, seed=2)
    captured = {"table": table, "pair": pair}
    return arrays, {
        "bias": bias,
        "alibi_slopes": np.abs(slopes),
        "sink": sink,
        "captured": captured,
    }


@pytest.mark.sampled(2)
@pytest.mark.few(1)
@pytest.mark.parametrize("kernel", usual_first(GIVES_ARRAYS))
@pytest.mark.parametrize(
    "part", [(0, slice(None)), (slice(None), 0)], ids=["batch element", "head"]
)
@pytest.mark.parametrize("wrt", [ARRAYS, ("bias",)], ids=["all", "bias"])
def test_gradients_of_arrays(backend, kernel, part, wrt):
    """On Hopper, a separate launch computes the gradient of a bias alone."""
    dtype = usual_dtype(kernel)
    arrays, read = arrays_of(dtype)
    how = read | {"score_mod": TEXT} if wrt is ARRAYS else {"bias": read["bias"]}
    expected = gradients_of(wrt, kernel, arrays, backend, **how)
    arrays[0][part] *= arrays[0].dtype.type(2.0 ** LARGER[dtype])
    found = gradients_of(wrt, kernel, arrays, backend, **how)
    others = np.ones((BATCH, HEADS), bool)
    others[part] = False
    for name, x, y in zip(wrt, found, expected, strict=True):
        assert (x[~others] != y[~others]).any(), name
        np.testing.assert_array_equal(x[others], y[others], err_msg=name)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("axes", [(0,), (0, 1), (0, 1, 2, 3)], ids=str)
def test_a_sum_is_as_good_as_its_own_terms(backend, dtype, axes):
    """Sums a bias gradient over broadcast axes; the terms are the gradient of the full bias."""
    (dout, q, k, v), read = arrays_of(dtype)
    heads = np.ldexp(1.0, np.random.default_rng(1).integers(-20, 21, (BATCH, HEADS, 1, 1)))
    arrays, bias = [(dout * heads).astype(dout.dtype), q, k, v], read["bias"]
    bias = bias[tuple(slice(1) if i in axes else slice(None) for i in range(4))]
    full = np.ascontiguousarray(np.broadcast_to(bias, read["bias"].shape))
    (found,), (terms,) = (
        gradients_of(("bias",), "two_pass", arrays, backend, bias=x) for x in (bias, full)
    )
    exact = terms.astype(np.longdouble).sum(axes, keepdims=True)
    size = np.abs(terms).astype(np.longdouble).sum(axes, keepdims=True)
    # Half an ulp for the terms and for the sum, and float64 rounding of the sums along a row.
    allowed = float(np.finfo(dtype).eps) + float(np.finfo(np.float64).eps) * (N if 3 in axes else 0)
    assert found.shape == bias.shape
    assert (np.abs(found - exact) <= allowed * size).all()


def sizes_of(kernel):
    """Returns problem sizes and options that request every array gradient of the kernel."""
    given = {"batch": 2, "heads": 2, "M": 70, "N": 45, "d": 32}
    if "wrt" in kernel.features:
        given |= {"sink": "bh", "wrt": "sink"}
    if {"wrt", "places"} <= {*kernel.features}:
        given |= {"bias": "bhmn", "alibi_slopes": "bh", "wrt": "bias,sink,alibi_slopes"}
    return given


@pytest.mark.parametrize("kernel", usual_first(ALL))
def test_every_kernel(backend, kernel):
    """Inputs have widely varying magnitudes."""
    check_case(kernel, backend, sizes_of(kernel), values="scales")


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_bounds_find_a_scale_that_elements_share(tmp_path, dtype):
    kernel = broken_kernels.broken(tmp_path, broken_kernels.SHARED_SCALE)
    with pytest.raises(WrongResult, match="d_bias"):
        check_case(kernel, Simulator(), sizes_of(kernel), dtype, values="scales")
