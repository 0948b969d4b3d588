"""Bounds of the gradients: correct computations satisfy them, faulty ones do not."""

import ml_dtypes
import numpy as np
import pytest

from cupyfa import Problem, Simulator
from cupyfa.lab.verify import case as cases, sampling
from cupyfa.lab.verify.case import Case
from cupyfa.ladder.operations import OPERATIONS, Excerpt, exact_attention
from cupyfa.numerics import reference, tolerance

BACKWARD = OPERATIONS["backward"]
DTYPES = ("float16", "bfloat16", "float32", "float64")
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "top-left": {"causal": "top-left"},
    "window": {"window": (20, 3)},
}


def summed(a, b):
    """Returns a @ b, summed term by term, which is the worst order."""
    total = np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)
    for i in range(a.shape[-1]):
        total += a[..., i : i + 1] * b[..., i : i + 1, :]
    return total


@np.errstate(all="ignore")
def kernel(p, inputs, *, scale=None, shift=0, delta=True, keys=None, rounds=None, lse_error=0.0):
    """Computes gradients with float32 sums as a kernel does; other arguments inject a fault.

    rounds: precision to which P and dS are rounded before products.
    """
    real, group = p.dtype.sums.type, p.group
    q, k, v, o, lse, do = (inputs[x].astype(real) for x in ("Q", "K", "V", "O", "lse", "dO"))
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    row, key = np.arange(p.M)[:, None], np.arange(p.N)
    seen = np.ones((p.M, p.N), bool)
    if p.right is not None:
        seen &= key <= row + p.causal_offset + shift
    if p.left is not None:
        seen &= key >= row + p.window_offset
    if keys is not None:
        seen &= key < keys
    seen = seen & ~np.isneginf(lse)[..., None]
    scale = real(p.scale if scale is None else scale)
    lse = lse + real(lse_error)
    P = np.where(seen, np.exp(summed(q, k.mT) * scale - lse[..., None]), real(0))
    D = summed(do[..., None, :], o[..., None])[..., 0] if delta else real(0)
    dS = np.where(seen, P * (summed(do, v.mT) - D), real(0))
    if rounds:
        P, dS = (reference.rounded(x, rounds).astype(real) for x in (P, dS))
    shared = (p.batch, p.kv_heads, group * p.M)

    def over_rows(weights, values):
        """Sums over the rows of all heads that share a key head."""
        return summed(weights.reshape(*shared, p.N).mT, values.reshape(*shared, values.shape[-1]))

    found = {"dQ": summed(dS, k) * scale, "dK": over_rows(dS, q) * scale, "dV": over_rows(P, do)}
    return {name: x.astype(p.out_dtype.numpy) for name, x in found.items()}


def worst(p, inputs, results, rounding=None):
    verdicts = tolerance.compare(results, BACKWARD.reference(inputs, p, [rounding])[rounding])
    return {verdict.name: verdict.ratio for verdict in verdicts}


def case(dtype, values="normal", seed=0, **sizes):
    p = Problem.of_sizes(**{"heads": 2, "kv_heads": 1, "M": 33, "d": 16, **sizes}, dtype=dtype)
    return p, Case("backward", p, seed, values).inputs()


SIZES = (
    *({"M": 1, "N": 1, "d": 1}, {"M": 45, "N": 131, "d": 7, "dv": 40}, {"M": 200, "N": 60}),
    *({"M": 70, "N": 45, "d": 64}, {"M": 33, "N": 17, "d": 512, "dv": 3}, {"scale": -0.3, "M": 9}),
)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_correct_kernel_is_accepted(dtype, rounds, mask):
    for sizes in SIZES:
        for values in ("normal", "uniform", "integers", "equal", "one_hot", "huge", "tiny"):
            p, inputs = case(dtype, values, **sizes, **MASKS[mask])
            ratios = worst(p, inputs, kernel(p, inputs, rounds=dtype if rounds else None))
            assert max(ratios.values()) < (1 if rounds else 0.8), (p, values, ratios)


@pytest.mark.parametrize("rounding", ["tf32", "float16", "bfloat16"])
@pytest.mark.parametrize("mask", MASKS)
def test_a_kernel_that_rounds_by_design_is_accepted(mask, rounding):
    for sizes in SIZES:
        for values in ("normal", "uniform", "integers", "equal", "one_hot"):
            p, inputs = case("float32", values, **sizes, **MASKS[mask])
            operands = {x: inputs[x] for x in ("O", "lse")}
            for x in ("Q", "K", "V", "dO"):
                operands[x] = reference.rounded(inputs[x], rounding)
            ratios = worst(p, inputs, kernel(p, operands, rounds=rounding), rounding)
            assert max(ratios.values()) < 1, (p, values, ratios)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_equal_numbers_are_accepted(dtype):
    p, inputs = case(dtype, M=1024, N=9, d=3, scale=0.0)
    inputs["dO"][...] = 1
    assert max(worst(p, inputs, kernel(p, inputs)).values()) < 1


HIDDEN = 2.0**30  # float32 rounds HIDDEN - 27 to HIDDEN
WITH_32_BITS = [("float32", name) for name in ("dQ", "dK", "dV")]
WITH_16_BITS = [(dtype, name) for dtype in ("float16", "bfloat16") for name in ("dQ", "dK")]


def hidden_keys(dtype, rows, keys, seed):
    """Returns inputs for which the reference has P = exp(-27), but rounding of scores makes P 1.

    float32 terms of gradients are random. With 16 bits, each dS rounds up by half a unit in the
    last place.
    """
    out = None if dtype == "float32" else "float32"
    p = Problem.of_sizes(M=rows, N=keys, d=2, dtype=dtype, out_dtype=out, scale=1.0)
    rng, half = np.random.default_rng(seed), float(ml_dtypes.finfo(dtype).eps) / 2
    inputs = {
        "Q": np.full((rows, 2), [2.0**15, 1.0]),
        "K": np.full((keys, 2), [HIDDEN / 2.0**15, -27.0]),
        "V": np.full((keys, 2), [1.0, 33 * half]) if out else rng.random((keys, 2)),
        "O": np.zeros((rows, 2)),
        "dO": np.full((rows, 2), [1.0, 1 / 32]) if out else rng.random((rows, 2)),
    }
    inputs = {x: y[None, None].astype(p.dtype.numpy) for x, y in inputs.items()}
    return p, inputs | {"lse": np.full((1, 1, rows), HIDDEN, np.float32)}


@pytest.mark.parametrize("dtype, name", WITH_32_BITS + WITH_16_BITS)
def test_rounding_is_relative_to_results_far_above_the_reference(dtype, name):
    rounds = None if dtype == "float32" else dtype
    for seed in range(6):
        p, inputs = hidden_keys(dtype, *((1, 5000) if name == "dQ" else (5000, 1)), seed)
        exact = BACKWARD.reference(inputs, p, [None])[None][name]
        assert abs(exact.value).max() < 1e-3 * exact.bound.max()
        results = {name: kernel(p, inputs, rounds=rounds)[name]}
        assert 0.99 < worst(p, inputs, results)[name] <= 1
        assert worst(p, inputs, {name: 1.01 * results[name]})[name] > 1


# Maps each fault to the outputs that reveal it and a kernel call with the fault.
FAULTS = {
    "last key dropped": ("dQ", lambda p, x: kernel(p, x, keys=p.N - 1)),
    "mask one key short": ("dQ", lambda p, x: kernel(p, x, shift=-1)),
    "mask one key long": ("dQ dK dV", lambda p, x: kernel(p, x, shift=1)),
    "without D": ("dQ dK", lambda p, x: kernel(p, x, delta=False)),
    "scale off by 1e-2": ("dQ dK dV", lambda p, x: kernel(p, x, scale=p.scale * 1.01)),
    "lse off by 1e-2": ("dQ dK dV", lambda p, x: kernel(p, x, lse_error=0.01)),
    "dK without scale": ("dK", lambda p, x: {"dK": kernel(p, x)["dK"] / np.float32(p.scale)}),
    "another head's dQ": ("dQ", lambda p, x: {"dQ": kernel(p, x)["dQ"][:, ::-1]}),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_faults_are_rejected(dtype, fault):
    p, inputs = case(dtype, M=256, d=64, causal=True)
    names, wrong = FAULTS[fault]
    ratios = worst(p, inputs, wrong(p, inputs))
    for name in names.split():
        assert ratios[name] > 1, ratios


@pytest.mark.parametrize("values", ["normal", "uniform"])
def test_tf32_is_no_float32(values):
    p, inputs = case("float32", values, M=128, d=64)
    rounded = {x: reference.rounded(y, "tf32") if x != "lse" else y for x, y in inputs.items()}
    ratios = worst(p, inputs, kernel(p, rounded))
    assert min(ratios.values()) > 1, ratios


@pytest.mark.parametrize("dtype", DTYPES)
def test_fully_masked_rows_and_keys_have_zero_gradients(dtype):
    p, inputs = case(dtype, M=9, N=5, causal=True)
    good = kernel(p, inputs)
    assert max(worst(p, inputs, good).values()) < 1
    assert (good["dQ"][:, :, :4] == 0).all()
    good["dQ"][0, 1, 2, 3] = 1e-7
    assert worst(p, inputs, good)["dQ"] == np.inf
    p, inputs = case(dtype, M=5, N=9, causal="top-left")
    good = kernel(p, inputs)
    assert (good["dK"][:, :, 5:] == 0).all() and max(worst(p, inputs, good).values()) < 1
    good["dV"][0, 0, 7, 3] = np.nan
    assert worst(p, inputs, good)["dV"] == np.inf


def test_nan_is_expected_where_it_belongs():
    p, inputs = case("float32", M=9, causal=True)
    inputs["dO"][0, 0, 3, 1] = np.nan
    good = kernel(p, inputs)
    expected = BACKWARD.reference(inputs, p, [None])[None]
    assert np.isnan(expected["dV"].value[0, 0, :4, 1]).all()
    assert np.isfinite(expected["dV"].value[0, 0, 4:]).all()
    assert not np.isfinite(good["dV"]).all(), "this kernel multiplies hidden values with 0"
    hidden = {name: np.where(np.isfinite(x.value), x.value, np.nan) for name, x in expected.items()}
    assert max(worst(p, inputs, hidden).values()) == 0
    hidden["dV"][0, 0, 3, 1] = 1.0
    assert worst(p, inputs, hidden)["dV"] == np.inf


def test_elements_beyond_float16_may_be_anything():
    p, inputs = case("float16", M=40)
    for name in ("dO", "V"):
        inputs[name][...] = 600
    inputs["O"][...] = 0
    results = kernel(p, inputs)
    assert np.isinf(results["dK"]).any()
    assert max(worst(p, inputs, results).values()) < 1


def test_weights_that_may_exceed_float16_leave_row_and_key_without_bounds():
    """The products of a score cancel: its error is about 15, and the error of P above 1e6."""
    q, k, v, dout = (np.ones((1, 1, n, 2), np.float16) for n in (3, 4, 4, 3))
    q[0, 0, 1] = 8000
    k[0, 0, 2] = 8000, -8000
    k[0, 0, (0, 1, 3), 1] = -1  # so that scores of query 1 are 0
    how = {"scale": 1.0, "dtype": "float16", "out_dtype": "float32"}
    out, lse = reference.attention(q, k, v, scale=1.0)
    found = tolerance.expected_gradients(q, k, v, out, lse, dout, **how)[None]
    for name, lost in {"dQ": 1, "dK": 2, "dV": 2}.items():
        rows = np.isinf(found[name].bound[0, 0]).any(-1)
        assert np.flatnonzero(rows).tolist() == [lost]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("signs", [(1, 1), (-1, -1), (1, -1)], ids=str)
def test_sums_of_scores_that_overflow_leave_row_and_key_without_bounds(signs, softcap):
    p, inputs = case("float32", M=4, N=5, d=2, heads=1, softcap=softcap)
    inputs["Q"][:] *= 1e-20
    inputs["Q"][0, 0, 1], inputs["K"][0, 0, 3] = 1e20, 1e20 * np.array(signs)
    with np.errstate(over="ignore"):
        out, lse = exact_attention(inputs, p)
        inputs["O"], inputs["lse"] = out.astype("f4"), lse.astype("f4")
    expected = BACKWARD.reference(inputs, p, [None])[None]
    unbounded = {name: np.isinf(x.bound).all((0, 1, 3)) for name, x in expected.items()}
    assert unbounded["dQ"].tolist() == [False, True, False, False]
    for name in ("dK", "dV"):
        assert unbounded[name].tolist() == [False, False, False, True, False]
        assert np.isfinite(expected[name].bound[:, :, [0, 1, 2, 4]]).all()


@pytest.mark.parametrize("mask", MASKS)
def test_excerpts_equal_the_whole(mask):
    p, inputs = case("float32", M=90, N=131, heads=4, kv_heads=2, batch=2, **MASKS[mask])
    whole = BACKWARD.reference(inputs, p, [None])[None]
    for excerpt in (Excerpt(0, 0, slice(0, 20)), Excerpt(1, 3, slice(70, 90))):
        part = BACKWARD.reference(inputs, p, [None], excerpt)[None]
        for name, (value, bound) in part.items():
            rows = BACKWARD.place(name, excerpt, p)
            np.testing.assert_allclose(value, rows.of(whole[name].value), rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(bound, rows.of(whole[name].bound), rtol=1e-9)
    assert excerpt.of_keys(p).rows == slice(111, 131)
    assert excerpt.of_keys(p).head == 1


def test_sampled_gradients_are_judged_by_rows_and_keys(monkeypatch):
    p, inputs = case("float32", M=300, N=200, causal=True)
    monkeypatch.setattr(sampling, "_WORK", 1e5)
    judge = sampling.Judge(BACKWARD, p, inputs, sampling.excerpts(p, 0))
    good = kernel(p, inputs)
    assert all(verdict.passed for verdict in judge.verdicts(good))
    good["dK"][0, 0, 199, 3] += 1
    bad = {x.name: x for x in judge.verdicts(good)}
    assert bad["dK"].index == (0, 0, 199, 3) and not bad["dK"].passed and bad["dQ"].passed


def test_the_work_and_the_bytes():
    p = Problem.of_sizes(M=8, N=16, d=4, dv=2, heads=4, kv_heads=2, dtype="float16")
    assert BACKWARD.flops(p) == 2 * 4 * 8 * 16 * (3 * 4 + 2 * 2)
    q, kv, o = 4 * 8 * 4, 2 * 16 * (4 + 2), 4 * 8 * 2
    assert BACKWARD.bytes(p) == 2 * (q + kv + 2 * o) + 4 * 4 * 8 + 2 * (q + kv)
    same = Problem.of_sizes(M=8, d=4)
    assert BACKWARD.flops(same) == 2.5 * OPERATIONS["forward"].flops(same)


def test_samples_of_gradients_are_smaller():
    p = Problem.of_sizes(batch=4, heads=16, M=2048, d=64)
    forward, backward = (sampling.excerpts(p, 0, x) for x in ("forward", "backward"))
    assert 4 < len(backward) < len(forward) / 4
    small = Problem.of_sizes(batch=2, heads=4, M=300, d=16)
    assert sampling.excerpts(small, 0, "backward") == [None]
    # With many rows and few keys, the reference spends most of its time on key gradients.
    assert len(sampling.excerpts(Problem.of_sizes(M=100_000, N=16, d=160), 0, "backward")) <= 6


def test_an_element_has_the_smallest_excerpt():
    p, inputs = case("float32", M=40, N=70, heads=4, kv_heads=2, batch=2, causal=True)
    whole = BACKWARD.reference(inputs, p, [None])[None]
    for name, index in (("dQ", (1, 3, 17, 2)), ("dK", (1, 1, 66, 0)), ("dV", (0, 0, 3, 5))):
        excerpt = BACKWARD.excerpt_at(name, index, p)
        value = BACKWARD.reference(inputs, p, [None], excerpt)[None][name].value
        assert value[0, 0, 0, index[3]] == pytest.approx(whole[name].value[index], rel=1e-9)


def test_a_large_forward_pass_is_left_to_a_kernel(monkeypatch):
    p = Problem.of_sizes(M=70, N=90, d=8, heads=2, kv_heads=1, dtype="float16", causal=True)
    plain = Case("backward", p, 3).inputs(Simulator())
    monkeypatch.setattr(cases, "_WORK", 0)
    kernels = Case("backward", p, 3).inputs(Simulator())
    assert (kernels["O"] != plain["O"]).any()
    for name, array in plain.items():
        np.testing.assert_allclose(
            kernels[name].astype(float), array.astype(float), atol=2e-3, rtol=2e-3
        )
        assert kernels[name].dtype == array.dtype
    monkeypatch.setattr(cases, "choose_kernel", None)  # must not be called without an engine
    np.testing.assert_array_equal(Case("backward", p, 3).inputs()["O"], plain["O"])


@pytest.mark.parametrize("scale", [1e9, 1e36, -1e36])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_of_huge_scores_is_rejected(dtype, scale):
    """With huge scores, rounding may change every weight, but no weight becomes NaN or infinite."""
    p, inputs = case(dtype, scale=scale)
    exact = BACKWARD.reference(inputs, p, [None])[None]
    right = {"dV": exact["dV"].value.astype(p.dtype.numpy)}
    assert worst(p, inputs, right)["dV"] <= 1
    for wrong in (np.nan, np.inf, -np.inf):
        results = {"dV": right["dV"].copy()}
        results["dV"][0, 0, 2, 3] = wrong
        assert worst(p, inputs, results)["dV"] == np.inf
