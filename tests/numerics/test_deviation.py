"""Bounds from a kernel's own reference: correct kernels pass with a margin, faulty ones fail."""

import numpy as np
import pytest

from cupyfa.numerics import deviation, reference
from cupyfa.numerics.tolerance import Expected, compare
from cupyfa.problem.problem import Problem

SIZES = ((1, 1, 1), (7, 45, 16), (33, 203, 64), (3, 799, 128))  # M, N, d
SCALE = {1: 1.0, 16: 0.25, 64: 0.125, 128: 0.088}


def attention(arrays, floats):
    """Computes attention with a score bias per head."""
    q, k, v = (arrays[name] for name in "QKV")
    scores = q @ k.mT * floats["scale"] + arrays["bias"][:, None, None]
    p, lse = reference.softmax(scores)
    return {"O": p @ v, "lse": lse}


def inputs(M, N, d, dtype, values="normal", seed=0):
    rng = np.random.default_rng(seed)
    of = Problem.of_sizes(M=1, d=1, dtype=dtype).dtype
    draw = {"normal": rng.standard_normal, "uniform": rng.random}[values]
    arrays = {name: draw((1, 2, n, d)).astype(of.numpy) for name, n in zip("QKV", (M, N, N))}
    return {**arrays, "bias": np.array([0.5, -0.5], of.sums)}, of


def expected(arrays, of, floats, function=attention, precision=None):
    outputs = {"O": of.numpy, "lse": of.sums}
    terms = max(*arrays["Q"].shape[-2:], arrays["K"].shape[-2])
    rounding = deviation.Rounding(of.name, precision, ("Q", "K", "V"), terms)
    return deviation.expected(function, arrays, floats, outputs, rounding)


def kernel(arrays, of, scale, *, drop=0, bias=1.0):
    """Computes attention with sequential sums, and rounds P and O as kernels on tensor cores do."""
    q, k, v = (arrays[name][:, :, : arrays[name].shape[2] - drop * (name != "Q")] for name in "QKV")
    real = of.sums.type
    q, k, v = (x.astype(of.sums) for x in (q, k, v))
    score = np.cumsum(q[:, :, :, None] * k[:, :, None], -1, dtype=of.sums)[..., -1] * real(scale)
    score = score + arrays["bias"][:, None, None] * real(bias)
    top = score.max(-1, keepdims=True)
    p = np.exp(score - top)
    total = np.cumsum(p, -1, dtype=of.sums)[..., -1:]
    p = p.astype(of.numpy).astype(of.sums)
    out = np.cumsum(p[..., None] * v[:, :, None], 3, dtype=of.sums)[:, :, :, -1] / total
    return {"O": out.astype(of.numpy), "lse": (top + np.log(total))[..., 0]}


def worst(results, wanted):
    return max(x.ratio for x in compare(results, wanted))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("values", ["normal", "uniform"])
def test_correct_kernels_pass_with_a_margin(dtype, values):
    for M, N, d in SIZES:
        for seed in range(3):
            arrays, of = inputs(M, N, d, dtype, values, seed)
            wanted = expected(arrays, of, {"scale": SCALE[d]})
            assert worst(kernel(arrays, of, SCALE[d]), wanted) < 0.4, (M, N, d, seed)


FAULTS = {"last key": {"drop": 1}, "scale by 1 %": {"scale": 1.01}, "bias": {"bias": 0.99}}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_exceed_the_bounds(dtype, fault):
    for M, N, d in SIZES[1:]:
        arrays, of = inputs(M, N, d, dtype)
        wanted = expected(arrays, of, {"scale": SCALE[d]})
        how = {"scale": 1.0, **FAULTS[fault]}
        wrong = kernel(arrays, of, **{**how, "scale": SCALE[d] * how["scale"]})
        assert worst(wrong, wanted) > 5, (M, N, d)


def test_a_lost_key_exceeds_the_bounds_of_narrow_formats():
    for dtype, N in (("float16", 45), ("bfloat16", 7)):
        arrays, of = inputs(7, N, 16, dtype)
        wanted = expected(arrays, of, {"scale": 0.25})
        assert worst(kernel(arrays, of, 0.25, drop=1), wanted) > 2


def test_no_bound_is_small_by_chance():
    # The result is the difference of two equal terms. In half of all evaluations their random
    # perturbations cancel; over many rows, some bound would be 0 by chance.
    arrays = {"Q": np.ones((1, 1, 4000, 2), np.float32)}
    rounding = deviation.Rounding("float32", None, ("Q",), 2)
    found = deviation.expected(
        lambda arrays, floats: {"O": arrays["Q"][..., :1] - arrays["Q"][..., 1:]},
        *(arrays, {}, {"O": np.dtype("f4")}, rounding),
    )
    assert (found["O"].value == 0).all()
    assert found["O"].bound.min() > np.finfo("f4").eps


def in_place(x):
    x = np.tanh(x)
    x *= x
    return np.subtract(1, x, out=x)


SLOPES = {
    "operators": lambda x: 1 - np.tanh(x) ** 2,
    "in place": in_place,
    "functions": lambda x: np.where(x > 0, 1 - np.einsum("...,...->...", *[np.tanh(x)] * 2), 0),
    "a sum": lambda x: 1 - np.stack([np.tanh(x) ** 2, 0 * x]).sum(0),
}


@pytest.mark.parametrize("slope", SLOPES.values(), ids=SLOPES)
def test_what_cancels_between_operands_and_results_is_seen(slope):
    x = np.linspace(0.5, 8, 400, dtype=np.float32)[None, None, :, None]
    wanted = deviation.expected(
        lambda arrays, floats: {"O": slope(arrays["Q"])},
        *({"Q": x}, {}, {"O": x.dtype}, deviation.Rounding("float32", None, ("Q",), 1)),
    )
    right = 1 - np.tanh(x) ** 2
    assert 0 < worst({"O": right}, wanted) < 0.4
    assert worst({"O": right + np.float32(4e-6)}, wanted) > 1


def test_infinity_times_what_cancels_may_be_anything():
    x = np.array([[[[9.5], [0.5]]]], np.float32)
    wanted = deviation.expected(
        lambda arrays, floats: {"O": SLOPES["operators"](arrays["Q"]) * np.inf},
        *({"Q": x}, {}, {"O": x.dtype}, deviation.Rounding("float32", None, ("Q",), 1)),
    )
    passed = [
        worst({"O": np.array([[[[first], [last]]]])}, wanted) <= 1
        for first, last in ((np.nan, np.inf), (np.inf, np.nan))
    ]
    assert passed == [True, False]


def test_exact_functions_are_not_moved():
    def function(arrays, floats):
        x = arrays["Q"] * 3
        return {"O": 1.0 * (x == x.max(-1, keepdims=True)), "lse": (x // 1).astype(int)}

    x = np.array([[[[0.6, 0.2, 0.9]]]], np.float32)
    rounding = deviation.Rounding("float32", None, ("Q",), 1)
    wanted = deviation.expected(
        function, {"Q": x}, {}, dict.fromkeys(("O", "lse"), x.dtype), rounding
    )
    assert wanted["O"].value.tolist() == [[[[0, 0, 1]]]]
    assert max(x.bound.max() for x in wanted.values()) < 1e-4


def test_whole_numbers_are_exact_unless_rounding_changes_them():
    q = np.array([[[[1.0, 3.0, 2.0], [1.0, 2.0, 2.0]]]], np.float32)
    rounding = deviation.Rounding("float32", None, ("Q",), 3)
    found = deviation.expected(
        lambda arrays, floats: {"at": arrays["Q"].argmax(-1)[..., None]},
        *({"Q": q}, {}, {"at": np.dtype("i4")}, rounding),
    )["at"]
    assert found.bound[..., 0].tolist() == [[[0, 1]]]  # the second row attains its maximum twice


@np.errstate(all="ignore")
def test_infinity_and_nan():
    def function(arrays, floats):
        x = arrays["Q"]
        return {"O": np.where(x > 4, np.inf, 1e6 * x), "lse": np.log(x)}

    x = np.array([[[[5.0, 1.0, 0.001, -1.0]]]], np.float16)
    wanted = expected({**{name: x for name in "QK"}}, DTYPE16, {}, function)
    right = {"O": np.array([[[[np.inf, np.inf, 1e3, 0]]]]), "lse": np.log(x.astype("f8"))}
    assert np.isnan(right["lse"][..., 3]).all()
    verdicts = {
        x.name: x.passed for x in compare({**right, "O": right["O"] * [1, 1, 1, np.nan]}, wanted)
    }
    assert verdicts == {"O": True, "lse": True}  # 1e6 and -1e6 exceed float16's range
    assert not compare({"O": right["O"] * [np.nan, 1, 1, 1]}, wanted)[0].passed
    assert not compare({"lse": np.zeros_like(right["lse"])}, wanted)[0].passed
    x[..., 0] = np.nan  # results that depend on a NaN input may have any value
    assert np.isposinf(expected({"Q": x, "K": x}, DTYPE16, {}, function)["lse"].bound[..., 3]).all()


def test_a_reference_cannot_change_its_inputs():
    def function(arrays, floats):
        arrays["Q"] *= 2
        return attention(arrays, floats)

    with pytest.raises(ValueError, match="read-only"):
        expected(*inputs(7, 45, 16, "float32"), {"scale": 0.25}, function)


def test_a_reference_may_give_bounds_of_its_own():
    def function(arrays, floats):
        x = np.ones((1, 1, 1, 3))
        return {"O": Expected(x, 0.25 * x), "lse": x}

    found = expected(
        {"Q": np.ones((1, 1, 1, 3), "f4"), "K": np.ones((1, 1, 1, 3), "f4")}, SINGLE, {}, function
    )
    assert (found["O"].bound == 0.25).all() and 0 < found["lse"].bound.max() < 1e-4


DTYPE16, SINGLE = (Problem.of_sizes(M=1, d=1, dtype=x).dtype for x in ("float16", "float32"))
