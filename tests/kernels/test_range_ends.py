"""Finite scores near both ends of the float range: right results, and finite gradients.

A tensor-core kernel multiplies scores by log2(e) before it subtracts the maximum, and this product
overflows where the score does not. Expected values come from the scores themselves: small multiples
of a large power of two, which the accumulation type represents exactly.
"""

from pathlib import Path

import numpy as np
import pytest
from helpers.problems import (
    FORWARD,
    USUAL,
    able,
    check_case,
    drawn,
    inputs_of,
    planned,
    usual_first,
)

import cupyfa
from cupyfa.lab.bench.sweeps import usual_dtype
from cupyfa.ladder import LADDER
from cupyfa.problem.dtypes import INPUTS
from cupyfa.runtime import guard

M, N, D = 40, 140, 16
RNG = np.random.default_rng(5)
ROWS, KEYS = RNG.choice((-5, -3, -1, 1, 5), M), RNG.choice((1, 2, 3), N)
LEVELS = np.multiply.outer(ROWS, KEYS)  # scores in units, from -15 to 15
SCALE_OF_SLOPES = 2.0**-30  # slopes are divided by this scale, so it must not be tiny
DISTANCES = np.abs(np.subtract.outer(np.arange(M) + N - M, np.arange(N)))


def largest(real):
    return float(np.finfo(real).max)


def unit(real):
    """Returns a power of two such that 15 times it is finite, but 15 log2(e) times it overflows."""
    return 2.0 ** (np.finfo(real).maxexp - 4)


def of_scale(real):
    return {"scale": unit(real)}, LEVELS * unit(real)


def of_operands(real):
    return {"scale": 1.0}, LEVELS * unit(real)


def of_text(real):
    return {"score_mod": "score * unit", "captured": {"unit": unit(real)}}, LEVELS * unit(real)


def of_places(real):
    text = "score * unit if key < keys else 0.0"
    return {"score_mod": text, "captured": {"unit": unit(real)}}, LEVELS * unit(real)


def of_bias(real):
    return {"bias": (LEVELS * unit(real)).astype(real)}, LEVELS * unit(real)


def of_slopes(real):
    slope = np.array([unit(real) / 10], real)  # slope times the largest distance, 139, is finite
    products = LEVELS * SCALE_OF_SLOPES  # matters only where the distance is 0
    return {"alibi_slopes": slope}, (-slope * DISTANCES.astype(real)).astype(float) + products


def of_lowest(real):
    """Returns a bias, whose lowest floats mask some or all keys of a row, and the scores."""
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
    bias = bias.astype(real)
    return {"bias": bias}, bias.astype(float)


def of_hidden(real):
    """Adds a random mask to the bias of of_lowest.

    In some rows the mask hides every key except keys with the lowest bias, in other rows all keys.
    """
    how, bias = of_lowest(real)
    mask = RNG.random((M, N)) < 0.5
    mask[12:15] = False
    return how | {"mask": mask}, np.where(mask, bias, -np.inf)


FEATURE = {of_scale: None, of_operands: None, of_text: "score"}
SOURCES = (of_lowest, of_scale, of_operands, of_text, of_places, of_bias, of_slopes, of_hidden)


def operands(array, real, source):
    """Returns q, k, v and the scale.

    The raw scores are LEVELS if the source modifies them; otherwise they are negligible.
    """
    v = RNG.uniform(1, 2, (N, 8))
    q, k = np.zeros((M, D)), np.zeros((N, D))
    q[:, 0], k[:, 0] = ROWS, KEYS
    if source is of_operands:
        q, k = (x * unit(real) ** 0.5 for x in (q, k))
    usual = {of_text: 1.0, of_places: 1.0, of_slopes: SCALE_OF_SLOPES}
    scale = usual.get(source, 2.0**-100)
    return (*(x.astype(array) for x in (q, k, v)), {"scale": scale})


def attended(scores, v):
    """Computes out and lse from rows of scores; rows without scores yield 0 and -infinity."""
    top = scores.max(-1, keepdims=True)
    seen = np.isfinite(top)
    weights = np.exp(np.where(seen, scores - np.where(seen, top, 0), -np.inf))
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.where(seen, top + np.log(total), -np.inf)[:, 0]
    return weights / np.where(seen, total, 1) @ v, lse


def takes(kernel, source):
    if source is of_operands and kernel.name == "v3":
        return False  # v3 rounds operands to float16
    feature = FEATURE.get(source, "places")
    return feature is None or feature in kernel.features


def dtype_of(kernel):
    """Returns a dtype that can hold a unit, since rungs may store q, k, S or dS in it."""
    if kernel.name.startswith("baseline"):
        return "float32"
    return "bfloat16" if "bfloat16" in kernel.dtypes else usual_dtype(kernel)


def coarseness(kernel):
    """Returns the rounding error of a weight, with a margin for the sum."""
    if kernel.name == "wgmma_fp8":
        return 2.0**-3
    return 2.0**-6 if dtype_of(kernel) != "float64" else 1e-12


def inputs_for(kernel, source):
    """Returns (q, k, v), the scale, the source's options, scores, and the array and sum dtypes."""
    array, real = INPUTS[dtype_of(kernel)].numpy, INPUTS[dtype_of(kernel)].sums.type
    *arrays, usual = operands(array, real, source)
    how, scores = source(real)
    return arrays, usual, how, scores, array, real


def runs(operation):
    """Parametrizes a test with each kernel and each source that it supports."""
    return pytest.mark.parametrize(
        "kernel, source",
        [
            pytest.param(kernel, source, marks=[pytest.mark.slow] * (kernel.name not in USUAL))
            for kernel in LADDER[operation].values()
            for source in SOURCES
            if takes(kernel, source)
        ],
        ids=lambda x: getattr(x, "name", None) or x.__name__,
    )


@np.errstate(over="ignore")
@pytest.mark.sampled(8)
@pytest.mark.each_choice
@runs("forward")
def test_results(backend, kernel, source):
    (q, k, v), usual, how, scores, _, _ = inputs_for(kernel, source)
    expected, expected_lse = attended(scores, v.astype(float))
    out, lse = cupyfa.attention(
        q,
        k,
        v,
        **usual | how,
        return_lse=True,
        check=True,
        kernel=kernel.name,
        backend=backend.name,
    )  # fmt: skip
    rtol = coarseness(kernel)
    np.testing.assert_allclose(out.astype(float), expected, rtol=rtol, atol=0, equal_nan=False)
    np.testing.assert_allclose(lse.astype(float), expected_lse, rtol=1e-5, atol=2e-3)


def differentiated(scores, v, out, lse, grad):
    """Computes the gradients of v and of the scores from out and lse."""
    with np.errstate(invalid="ignore"):
        below = np.where(np.isfinite(scores), scores - lse[:, None], -np.inf)
    P = np.where(np.isneginf(lse)[:, None], 0.0, np.exp(np.minimum(below, 0)))
    dS = P * (grad @ v.T - (grad * out).sum(-1, keepdims=True))
    return P.T @ grad, dS


@np.errstate(over="ignore")
@pytest.mark.sampled(8)
@pytest.mark.each_choice
@runs("backward")
def test_gradients(backend, kernel, source):
    """Checks dv and dS; dq and dk may overflow, since they contain the scale or the unit."""
    (q, k, v), usual, how, scores, array, real = inputs_for(kernel, source)
    wide = v.astype(float)
    out, lse = attended(scores, wide)
    out, lse = out.astype(array), lse.astype(real)
    grad = RNG.uniform(-1, 1, out.shape).astype(array)
    dv, dS = differentiated(scores, wide, out.astype(float), lse.astype(float), grad.astype(float))
    wrt, expected = ["q", "k", "v"], [None, None, dv]
    if "bias" in how:
        wrt, expected = [*wrt, "bias"], [*expected, dS]
    on = {"check": True, "kernel": kernel.name, "backend": backend.name}
    found = cupyfa.backward(grad, q, k, v, out, lse, **usual | how, wrt=wrt, **on)
    for name, x, exact in zip(wrt, found, expected):
        x = x.astype(float)
        if exact is None:
            assert "scale" in how or "captured" in how or np.isfinite(x).all(), name
            continue
        error, size = np.abs(x - exact), np.abs(exact).max()
        assert error.max() <= coarseness(kernel) * size, name


# ``S * scale - maximum`` is one FMA on a GPU: for a row's largest score the difference is the
# product's rounding error, not 0. Above 2^26 this error exceeds 2, and above 2^30 its exponential
# overflows. These flags make the simulator's compiler contract as well.
CONTRACTED = "-O2 -mfma -ffp-contract=fast"


@pytest.fixture
def contracting(backend, monkeypatch):
    """Returns the backend; makes the simulator contract multiplications and additions into FMAs."""
    if backend.name == "simulator":
        cpu = Path("/proc/cpuinfo")
        if not cpu.exists() or " fma " not in cpu.read_text():
            pytest.skip("this CPU has no fused multiply-add")
        monkeypatch.setenv("CUPYFA_COMPILER_FLAGS", CONTRACTED)
    return backend


@pytest.mark.sampled(8)
@pytest.mark.each_choice
@pytest.mark.parametrize("scale", [3e9, 1e36, -1e36])
@pytest.mark.parametrize("kernel", usual_first(FORWARD.values()))
def test_finite_scores_of_any_size(contracting, kernel, scale):
    sizes = {"heads": 1, "M": 20, "N": 40, "d": 16, "causal": "top-left", "scale": scale}
    # The baselines store S in the dtype of the inputs, whose range must suffice.
    dtype = "float32" if kernel.name.startswith("baseline") else None
    check_case(kernel, contracting, sizes, dtype)


@pytest.mark.parametrize("kernel", ["mma_pipelined", "wgmma_persistent"])
def test_scores_of_two_to_the_26(contracting, kernel):
    q, k, v = drawn((2, 70, 64), (2, 140, 64), (2, 140, 64), dtype="float16")
    scale = 2.0**26 / np.abs(q.astype(np.float64) @ k.astype(np.float64).swapaxes(1, 2)).max()
    given = {"scale": scale, "return_lse": True, "kernel": kernel, "backend": contracting}
    out, lse = cupyfa.attention(q, k, v, **given)
    assert np.isfinite(lse).all()
    assert (np.abs(out) <= 1.01 * np.abs(v).max()).all()


@pytest.mark.few(8)
@pytest.mark.each_choice
@pytest.mark.parametrize("kernel", able("score", "forward", "backward"), ids=lambda x: x.name)
def test_infinite_keys_under_a_softcap_leave_other_keys_finite(backend, kernel):
    """Scores of rows past M with an infinite key are NaN, and none of them may spread."""
    plan = planned(kernel, backend, {"M": 21, "N": 90, "d": 48, "softcap": 0.5, "heads": 2})
    for seed in range(3):
        guard.checked(backend, plan, inputs_of(plan, seed, values="inf"), {})
