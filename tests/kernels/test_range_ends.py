"""Finite scores near both ends of the float range: right results, and finite gradients.

A kernel on tensor cores multiplies scores by log2(e) before it subtracts the maximum, and this
product overflows where the score does not. Expected values come from the scores themselves, which
are few multiples of a large power of two, hence exact in the type of the sums.
"""

import numpy as np
import pytest
from helpers.problems import usual_first

import cupyfa
from cupyfa.bench.sweeps import usual_dtype
from cupyfa.dtypes import INPUTS
from cupyfa.ladder import LADDER

M, N, D = 40, 140, 16
RNG = np.random.default_rng(5)
ROWS, KEYS = RNG.choice((-5, -3, -1, 1, 5), M), RNG.choice((1, 2, 3), N)
LEVELS = np.multiply.outer(ROWS, KEYS)  # from -15 to 15
DISTANCES = np.abs(np.subtract.outer(np.arange(M) + N - M, np.arange(N)))


def largest(real):
    return float(np.finfo(real).max)


def unit(real):
    """15 units are finite, and 15 units times log2(e) are not."""
    return 2.0 ** (np.finfo(real).maxexp - 4)


def of_scale(real):
    return {"scale": unit(real)}, LEVELS * unit(real)


def of_text(real):
    return {"score_mod": "score * unit", "captured": {"unit": unit(real)}}, LEVELS * unit(real)


def of_places(real):
    text = "score * unit if key < keys else 0.0"
    return {"score_mod": text, "captured": {"unit": unit(real)}}, LEVELS * unit(real)


def of_bias(real):
    return {"bias": (LEVELS * unit(real)).astype(real)}, LEVELS * unit(real)


def of_slopes(real):
    slope = unit(real) / 10  # 139 of them are finite, too
    return {"alibi_slopes": np.array([slope], real)}, -float(real(slope)) * DISTANCES


def of_lowest(real):
    """What masks are made of: the lowest number, in all keys of a row, or in some."""
    low = -largest(real)
    bias = np.zeros((M, N))
    bias[1] = low
    bias[2, :100] = low
    bias[3, 100:] = low
    bias[4], bias[4, 60:] = low, 0.75 * low
    bias[5], bias[5, 0] = -np.inf, low
    bias[6] = -np.inf
    bias[7], bias[7, 70:90] = low, -np.inf
    bias[8], bias[8, 130:] = 0.9 * low, -low
    bias[9] = -low
    bias[10], bias[10, 3], bias[10, 120] = -0.75 * low, -low, low
    bias[11], bias[11, 64:] = low, 0.5 * low
    return {"bias": bias.astype(real)}, bias


def of_hidden(real):
    """The lowest number where a mask hides the other keys, or all."""
    how, bias = of_lowest(real)
    mask = RNG.random((M, N)) < 0.5
    mask[12:15] = False
    return how | {"mask": mask}, np.where(mask, bias, -np.inf)


FEATURE = {of_scale: None, of_text: "score"}
SOURCES = (of_lowest, of_scale, of_text, of_places, of_bias, of_slopes, of_hidden)


def operands(dtype, source):
    """q, k and v. Their products are LEVELS if the source reads scores, else far below a unit."""
    v = RNG.uniform(1, 2, (N, 8))
    q, k = np.zeros((M, D)), np.zeros((N, D))
    q[:, 0], k[:, 0] = ROWS, KEYS
    how = {} if source in (of_scale, of_text, of_places) else {"scale": 2.0**-30}
    if source in (of_text, of_places):
        how = {"scale": 1.0}
    return (*(x.astype(dtype) for x in (q, k, v)), how)


def attended(scores, v):
    """out and lse of rows of scores, by the definition; without a score 0 and -infinity."""
    top = scores.max(-1, keepdims=True)
    seen = np.isfinite(top)
    weights = np.exp(np.where(seen, scores - np.where(seen, top, 0), -np.inf))
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.where(seen, top + np.log(total), -np.inf)[:, 0]
    return weights / np.where(seen, total, 1) @ v, lse


def takes(kernel, source):
    feature = FEATURE.get(source, "places")
    return feature is None or feature in kernel.features


def dtype_of(kernel, source):
    """Rungs that keep scores in the dtype of the inputs get one that holds them."""
    baseline = kernel.name.startswith("baseline")
    return "float32" if baseline else usual_dtype(kernel)


def coarseness(kernel, dtype):
    """A weight's rounding, with room for the sum."""
    if kernel.name == "wgmma_fp8":
        return 2.0**-3
    return 2.0**-6 if dtype != "float64" else 1e-12


def named(kernels):
    return usual_first(k for k in kernels.values() if k.operation in ("forward", "backward"))


@np.errstate(over="ignore")
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kernel", named(LADDER["forward"]))
def test_results(backend, kernel, source):
    if not takes(kernel, source):
        pytest.skip("the kernel has no such option")
    dtype = dtype_of(kernel, source)
    real = INPUTS[dtype].sums.type
    q, k, v, usual = operands(INPUTS[dtype].numpy, source)
    how, scores = source(real)
    expected, expected_lse = attended(scores, v.astype(float))
    out, lse = cupyfa.attention(
        q, k, v, **usual | how, return_lse=True, check=True, kernel=kernel.name, backend=backend.name
    )
    np.testing.assert_allclose(
        out.astype(float), expected, rtol=coarseness(kernel, dtype), atol=0, equal_nan=False
    )
    np.testing.assert_allclose(lse.astype(float), expected_lse, rtol=1e-5, atol=2e-3)
