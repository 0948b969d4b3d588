"""The bounds accept correct kernels and reject faulty ones; both are emulated in NumPy."""

from dataclasses import dataclass

import numpy as np
import pytest
from helpers import e4m3_sums
from hypothesis import given, settings, strategies as st

from cupyfa.errors import WrongResult
from cupyfa.numerics import reference, tolerance
from cupyfa.numerics.tolerance import require
from cupyfa.problem.dtypes import dtype_named


def attention_verdicts(results, q, k, v, rounding=None, **options):
    expected = tolerance.expected_attention(q, k, v, roundings=(rounding,), **options)
    return tolerance.compare(results, expected[rounding])


def softmax_verdicts(results, x, *, dtype):
    return tolerance.compare(results, tolerance.expected_softmax(x, dtype=dtype))


@pytest.mark.parametrize("scale", [0.5, 0.3])
def test_bounds_take_a_scale_for_each_head(scale):
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 5, 4), np.float32)
    one, each = (
        tolerance.expected_attention(q, k, v, scale=x, dtype="float16", roundings=(None,))[None]
        for x in (scale, np.full((2, 1, 1), scale))
    )
    for name in one:  # a float64 array is not rounded to float32, unlike a Python number
        np.testing.assert_allclose(each[name], one[name], rtol=0.01)


DTYPES = ("float32", "float64", "float16", "bfloat16")
HEAD_DIMS = (1, 16, 64, 256, 1024)
LENGTHS = ((1, 1), (7, 45), (33, 203), (3, 799))
DISTRIBUTIONS = ("normal", "uniform", "peaky")
INF, NAN = np.inf, np.nan


@dataclass
class Case:
    """An attention problem with its inputs, and its name in failure messages."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dtype: str
    scale: float
    causal_offset: int | None = None
    name: str = ""

    def verdicts(self, results, rounding=None):
        how = {"scale": self.scale, "causal_offset": self.causal_offset, "dtype": self.dtype}
        return attention_verdicts(results, self.q, self.k, self.v, rounding, **how)

    def worst(self, results, rounding=None):
        return max(verdict.ratio for verdict in self.verdicts(results, rounding))

    def accepted(self, **how):
        """Returns a correct kernel's results after checking them against the bounds."""
        results = kernel(self, **how)
        require(self.verdicts(results, how.get("rounding")), self.name)
        return results

    def worst_with(self, results, index, value, rounding=None):
        """Returns the largest ratio of error to bound when one element of O is replaced."""
        out = results["O"].astype(np.float64)
        out[index] = value
        return self.worst({"O": out}, rounding)


def case(dtype, distribution, M, N, d, dv=None, *, heads=2, kv_heads=1, causal_offset=None, seed=0):
    """Draws random inputs; "peaky" inputs have large scores, so few keys carry all the weight."""
    rng = np.random.default_rng([seed, M, N, d])
    draw = rng.random if distribution == "uniform" else rng.standard_normal
    q, k, v = (draw((1, *s)) for s in ((heads, M, d), (kv_heads, N, d), (kv_heads, N, dv or d)))
    if distribution == "peaky":
        q, k = q * 5, k * 3
    q, k, v = (reference.rounded(x, dtype) for x in (q, k, v))
    name = f"{dtype} {distribution} M={M} N={N} d={d} causal_offset={causal_offset} seed={seed}"
    return Case(q, k, v, dtype, d**-0.5, causal_offset, name)


def kernel(
    c, *, rounding=None, scale=None, causal_offset=None, keys=None, base2=False, tile=32, seed=0
):
    """Emulates online softmax with one GPU thread per row, which sums term by term.

    It computes in float32 (float64 for float64) without fused multiply-adds, and its exponentials
    are off by up to 2 units in the last place. P is rounded to a narrow dtype before it multiplies
    V. `scale`, `causal_offset` and the number of `keys` may differ from the case's.
    """
    real = np.float64 if c.dtype == "float64" and rounding is None else np.float32
    narrow = rounding or (c.dtype if c.dtype in ("float16", "bfloat16") else None)
    rng, eps = np.random.default_rng(seed), np.finfo(real).eps
    power, unit = (np.exp2, np.log2(np.e)) if base2 else (np.exp, 1.0)

    def exp(x):
        y = power(x)
        return y * (1 + 2 * eps * rng.uniform(-1, 1, y.shape)).astype(real)

    def rounded(x, precision):
        return x if precision is None else reference.rounded(x, precision).astype(real)

    with np.errstate(all="ignore"):
        group = c.q.shape[1] // c.k.shape[1]
        q, k, v = (rounded(x.astype(real), rounding) for x in (c.q, c.k, c.v))
        k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
        M, N, d = q.shape[2], k.shape[2], q.shape[3]
        S = np.zeros((*q.shape[:2], M, N), real)
        for i in range(d):
            S += q[..., i, None] * k[..., None, :, i]
        S *= real(real(c.scale if scale is None else scale) * real(unit))
        causal_offset = c.causal_offset if causal_offset is None else causal_offset
        masked = np.zeros((M, N), bool)
        if causal_offset is not None:
            masked = np.arange(N) > np.arange(M)[:, None] + causal_offset
            S[..., masked] = -np.inf

        top = np.full(q.shape[:3], -np.inf, real)
        total, out = np.zeros_like(top), np.zeros((*q.shape[:3], v.shape[-1]), real)
        for start in range(0, N if keys is None else keys, tile):
            here = slice(start, min(start + tile, N if keys is None else keys))
            new = np.maximum(top, S[..., here].max(-1))
            safe = np.where(np.isneginf(new), real(0), new)
            shrink, P = exp(top - safe), exp(S[..., here] - safe[..., None])
            top, total, out = new, total * shrink, out * shrink[..., None]
            for j in range(P.shape[-1]):
                total = total + P[..., j]
                seen = ~masked[:, start + j, None]
                out = out + np.where(
                    seen, rounded(P, narrow)[..., j, None] * v[..., None, start + j, :], real(0)
                )
        out = out / np.where(total == 0, real(1), total)[..., None]
        lse = (top * real(np.log(2)) if base2 else top) + np.log(total)
        return {"O": reference.rounded(out, c.dtype), "lse": lse}


def baseline(c):
    """Emulates two matrix products with a softmax between; S and P have the inputs' dtype."""
    real = np.float64 if c.dtype == "float64" else np.float32
    q, k, v = (x.astype(real) for x in (c.q, c.k, c.v))
    S = reference.rounded((q @ k.mT) * real(c.scale), c.dtype).astype(real)
    exp = np.exp(S - S.max(-1, keepdims=True))
    total = exp.sum(-1, keepdims=True)
    P = reference.rounded(exp / total, c.dtype)
    lse = (S.max(-1, keepdims=True) + np.log(total))[..., 0]
    return {"O": reference.rounded(P @ v, c.dtype), "lse": lse}


@pytest.mark.each_choice
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_correct_kernel_is_accepted(dtype, d):
    for number, (M, N) in enumerate(LENGTHS):
        for distribution in DISTRIBUTIONS:
            causal_offset = N - M if number % 2 else None
            c = case(dtype, distribution, M, N, d, min(d, 64), causal_offset=causal_offset)
            c.accepted(base2=bool(number % 3))


@pytest.mark.parametrize("rounding", ["float16", "tf32", "bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_that_rounds_by_design_is_accepted(dtype, rounding):
    for d in (1, 16, 59, 256):
        for distribution in DISTRIBUTIONS:
            case(dtype, distribution, 17, 203, d, 16).accepted(rounding=rounding)


@settings(max_examples=300, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    distribution=st.sampled_from(DISTRIBUTIONS),
    M=st.integers(1, 6),
    N=st.integers(1, 9),
    d=st.sampled_from([1, 2, 3, 7, 16, 59]),
    dv=st.integers(1, 4),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2)]),
    scale=st.floats(-2, 2, allow_subnormal=False),
    causal_offset=st.none() | st.integers(-7, 9),
    rounding=st.sampled_from([None, "float16", "tf32"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_correct_kernels_are_accepted_on_small_problems(
    dtype, distribution, M, N, d, dv, heads, scale, causal_offset, rounding, seed
):
    """With few outputs, the computation from which bounds are derived may be exact by chance."""
    c = case(dtype, distribution, M, N, d, dv, heads=heads[0], kv_heads=heads[1], seed=seed)
    c.scale, c.causal_offset = scale, causal_offset
    c.accepted(rounding=rounding, base2=seed % 2)
    c.causal_offset = None
    require(c.verdicts(baseline(c)), f"baseline, {c.name}")


FAULTS = {
    "last key dropped": lambda c: kernel(c, keys=c.k.shape[2] - 1),
    "scale off by 1e-3": lambda c: kernel(c, scale=c.scale * 1.001),
}
FAULTS_OF_MASKS = {
    "mask one key short": lambda c: kernel(c, causal_offset=c.causal_offset - 1),
    "mask one key long": lambda c: kernel(c, causal_offset=c.causal_offset + 1),
}


@pytest.mark.parametrize("causal_offset, faults", [(None, FAULTS), (1024 - 16, FAULTS_OF_MASKS)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_faults_among_1024_keys_are_rejected(dtype, causal_offset, faults):
    c = case(dtype, "uniform", 16, 1024, 64, causal_offset=causal_offset)
    good = kernel(c)
    assert c.worst(good) < 0.7
    assert c.worst({"lse": good["lse"] / np.log(2)}) > 1
    assert c.worst({"lse": good["lse"] + 1e-3}) > 1
    for fault, wrong in faults.items():
        assert c.worst(wrong(c)) > 1, fault


@pytest.mark.parametrize("fault", ["last key dropped", *FAULTS_OF_MASKS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_missing_key_of_45_is_rejected_by_the_output(dtype, fault):
    c = case(dtype, "normal", 7, 45, 16, causal_offset=38 if fault in FAULTS_OF_MASKS else None)
    assert c.worst({"O": (FAULTS | FAULTS_OF_MASKS)[fault](c)["O"]}) > 1


@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_tf32_is_no_float32(distribution, d):
    c = case("float32", distribution, 7, 1024, d, min(d, 64))
    assert c.worst(kernel(c, rounding="tf32")) > 1


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_rounding_errors_are_accepted(dtype, value):
    c = case(dtype, "normal", 2, 4096, 3)
    c.q[...], c.v[...] = 0, value
    c.v = reference.rounded(c.v, dtype)
    good = c.accepted()
    assert c.worst({"O": good["O"] * 1.02}) > 1


def test_sums_are_rounded_also_where_scores_may_select_any_value():
    """Rounding of scores selects 100 keys in place of the first one, whose value is opposite.

    In the order of their terms, float32 sums are 2**30 - 64 instead of 2**30 for the first key, and
    2**30 instead of 2**30 - 54 for the others, whose values add up with rounding errors.
    """
    c = case("float32", "normal", 1, 101, 4, 1, heads=1)
    c.scale, c.q[...] = 1.0, [2.0**15, 1, 1, 1]
    c.k[..., 0, :] = [2.0**15, -37, -37, 74]
    c.k[..., 1:, :] = [2.0**15, -27, -27, 0]
    for value in (0.1, 0.3, 0.6, 0.7):
        c.v[...] = value
        c.v[..., 0, :] *= -1
        assert np.all(np.sign(c.accepted()["O"]) == 1)
        assert c.worst_with(kernel(c), (0, 0, 0, 0), 1.0001 * value) > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_wrong_or_unwritten_element_is_found(dtype):
    c = case(dtype, "normal", 33, 203, 64)
    results = kernel(c)
    results["O"][0, 1, 20, 7] = results["O"][0, 1, 21, 7]
    results["lse"][0, 1, 30] = NAN
    out, lse = c.verdicts(results)
    assert not out.passed and out.index == (0, 1, 20, 7) and out.unwritten == 0
    assert out.actual == results["O"][0, 1, 20, 7] and out.error > out.bound > 0
    assert not lse.passed and lse.index == (0, 1, 30) and lse.unwritten == 1
    assert lse.error == lse.ratio == INF and np.isnan(lse.actual)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_a_key_are_exact(dtype):
    c = case(dtype, "normal", 9, 5, 16, causal_offset=-4)
    good = c.accepted()
    for name, value in (("O", 1e-30), ("O", NAN), ("lse", -1e30), ("lse", INF)):
        bad = {key: array.astype(np.float64) for key, array in good.items()}
        bad[name][0, 0, 1, ...] = value
        assert [verdict.name for verdict in c.verdicts(bad) if not verdict.passed] == [name]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", [None, "float16"])
def test_nan_and_infinity_stand_where_the_reference_has_them(dtype, rounding):
    c = case(dtype, "normal", 6, 6, 16, causal_offset=0)
    c.q[0, 0, 2], c.k[0, 0, 4, 0], c.v[0, 0, 5, 3] = NAN, NAN, INF
    good = c.accepted(rounding=rounding)
    assert np.isnan(good["lse"][0]).sum() == 5  # row 2 of one head, rows 4 and 5 of both
    for row, value in ((2, 0.0), (2, INF), (1, NAN), (1, INF)):
        assert c.worst_with(good, (0, 0, row, 0), value, rounding) == INF


def test_infinite_values_must_have_their_sign():
    c = case("float32", "normal", 2, 3, 4)
    c.v[0, 0, 1, 2] = INF
    good = c.accepted()
    assert np.all(good["O"][..., 2] == INF)
    assert c.worst_with(good, (0, 0, 0, 2), -INF) == INF


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_of_minus_infinity_do_not_widen_the_bound(dtype):
    c = case(dtype, "uniform", 4, 5, 16)
    c.k[0, 0, 2] = -INF
    good = c.accepted()
    assert c.worst_with(good, (0, 0, 0, 0), good["O"][0, 0, 0, 0] + 0.1) > 1


def test_subnormal_numbers_may_be_flushed_to_zero():
    c = case("float32", "normal", 5, 45, 16)
    c.v *= np.float32(2.0**-125)
    flushed = kernel(c)
    flushed["O"] = np.where(np.abs(flushed["O"]) < 2.0**-126, 0, flushed["O"])
    require(c.verdicts(flushed), c.name)
    flushed["O"][0, 0, 0, 0] += 2.0**-115
    assert c.worst(flushed) > 1


def test_scores_beyond_float16_must_be_right():
    """Scores that are accumulated in float32 do not overflow, so NaN is an error."""
    c = case("float16", "normal", 5, 45, 64)
    c.q, c.k = (reference.rounded(300 * x, "float16") for x in (c.q, c.k))
    good = c.accepted()
    assert c.worst_with(good, (0, 0, 0, 0), NAN) == INF


@pytest.mark.parametrize("signs", [(1, 1), (-1, -1), (1, -1)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_sums_of_scores_that_overflow_leave_their_row_without_bounds(dtype, signs):
    """Depending on the order, a sum of terms of both signs is infinite or NaN."""
    c = case(dtype, "normal", 3, 4, 2)
    large = 1e160 if dtype == "float64" else 1e20
    c.q /= large
    c.q[:, :, 1], c.k[:, :, 2:] = large, large * np.array(signs, c.k.dtype)
    c.v[..., 0] = 0
    good = c.accepted()
    good["O"][:, :, 1], good["lse"][:, :, 1] = NAN, -INF
    require(c.verdicts(good), c.name)
    good["O"][0, 0, 2, 1] += 0.5
    assert c.worst(good) > 1
    c.causal_offset = 0
    assert c.worst_with(c.accepted(), (0, 0, 1, 0), NAN) == INF


@pytest.mark.parametrize("q", [(1e19, 1e19), (NAN, 1e20)], ids=str)
def test_scores_that_are_the_same_in_every_order_keep_their_bounds(q):
    """Rows keep their bounds if no partial sum overflows, or if a NaN is added in every order."""
    c = case("float32", "normal", 3, 4, 2)
    c.q[:, :, 1], c.k[:, :, 2] = q, (2e19, -1.9e19)
    good = c.accepted()
    assert c.worst_with(good, (0, 0, 1, 0), NAN if np.isfinite(q).all() else 7) == INF


def test_a_row_without_bounds_does_not_widen_those_of_others():
    """All scores of one row overflow to -inf, so the kernel returns O = 0 for it."""
    c = case("bfloat16", "normal", 2, 4, 2)
    c.q[:, :, 1], c.k[:, :, :] = 1e20, -1e20
    c.q[:, :, 0] = 0
    good = kernel(c)
    assert (good["O"][:, :, 1] == 0).all()
    require(c.verdicts(good), c.name)
    good["O"][0, 0, 0, 1] += 0.1
    assert c.worst(good) > 1


def test_inputs_beyond_float16_are_excused_only_with_rounding():
    c = case("bfloat16", "normal", 5, 45, 16)
    c.q[0, 0, 1, 3] = 70_000.0
    results = kernel(c, rounding="float16")
    assert np.isnan(results["O"][0, 0, 1]).any() or np.isinf(results["lse"][0, 0, 1])
    require(c.verdicts(results, "float16"), c.name)
    assert c.worst(results) == INF  # an error if the kernel does not round to float16
    results["O"][0, 0, 2, 3] += 0.1
    assert c.worst(results, "float16") > 1


def test_require_names_the_case_and_every_failure():
    c = case("float32", "normal", 3, 4, 16)
    results = kernel(c)
    require(c.verdicts(results), "nothing to say")
    results["O"][0, 1, 2, 3], results["lse"][0, 0, 0] = NAN, 7.0
    with pytest.raises(WrongResult) as failure:
        require(c.verdicts(results), "fa2 on float32 M=3, seed 0")
    message = str(failure.value)
    assert message.startswith("wrong result of fa2 on float32 M=3, seed 0\n  O: ")
    assert "worst at [0, 1, 2, 3]: nan instead of" in message and "1 elements are NaN" in message
    assert "\n  lse: error " in message and "worst at [0, 0, 0]: 7 instead of" in message


@pytest.mark.parametrize(
    "results, options, message",
    [
        ({"o": np.zeros((1, 2, 3, 16))}, {}, "result 'o' is unknown; use one of O, lse"),
        ({"O": np.zeros((1, 2, 4, 16))}, {}, r"O has shape \(1, 2, 4, 16\); it must be"),
        ({}, {"dtype": "half"}, "dtype 'half' is unknown; use one of float16, "),
        ({}, {"rounding": "fp8"}, "rounding 'fp8' is unknown; use None or one of float64, "),
    ],
)
def test_results_that_cannot_be_compared_are_refused(results, options, message):
    c = case("float32", "normal", 3, 4, 16)
    options = {"scale": 1.0, "causal_offset": None, "dtype": "float32", **options}
    with pytest.raises(ValueError, match=message):
        attention_verdicts(results, c.q, c.k, c.v, **options)


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_size_may_be_zero(dtype, axis):
    M, N, d, dv = (0 if number == axis else 3 for number in range(4))
    q, k, v = (np.zeros((1, 2, *shape)) for shape in ((M, d), (N, d), (N, dv)))
    results = {
        "O": np.zeros((1, 2, M, dv)),
        "lse": np.full((1, 2, M), -INF if N == 0 else np.log(3)),
    }
    require(attention_verdicts(results, q, k, v, scale=1.0, dtype=dtype), "zeros")
    empty = {"P": np.zeros((M, 0)), "lse": np.full(M, -INF)}
    require(softmax_verdicts(empty, q[0, 0, :, :0], dtype=dtype), "an empty softmax")


def softmax_kernel(x, dtype, base2=False, seed=0):
    """Emulates the softmax of one thread: float32, sequential sums, exponentials off by 2 ulp."""
    real = np.float64 if dtype == "float64" else np.float32
    rng, eps = np.random.default_rng(seed), np.finfo(real).eps
    with np.errstate(all="ignore"):
        x = x.astype(real)
        x, power = (x * real(np.log2(np.e)), np.exp2) if base2 else (x, np.exp)
        top = x.max(-1, keepdims=True, initial=-np.inf)
        top[np.isneginf(top)] = 0
        y = power(x - top)
        y *= (1 + 2 * eps * rng.uniform(-1, 1, y.shape)).astype(real)
        total = np.cumsum(y, -1, dtype=real)[..., -1:]
        lse = top * real(np.log(2) if base2 else 1) + np.log(total)
        P = y * (1 / np.where(total == 0, real(1), total))
    return {"P": reference.rounded(P, dtype), "lse": lse[..., 0]}


@pytest.mark.parametrize("base2", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_correct_softmax_is_accepted_and_faults_are_not(dtype, base2):
    for N in (1, 2, 45, 1024):
        for spread in (0.01, 1, 30, 1000):
            x = spread * np.random.default_rng(N).normal(size=(2, 40, N))
            x = reference.rounded(x, dtype)
            x[0, 0], x[0, 1, : N - 1], x[0, 2, N // 2] = -INF, -INF, NAN
            good = softmax_kernel(x, dtype, base2)
            require(softmax_verdicts(good, x, dtype=dtype), f"{dtype} N={N} spread={spread}")
            assert rejects_softmax(x, dtype, lse=good["lse"] / np.log(2))
            if spread <= 30:
                assert rejects_softmax(x, dtype, lse=good["lse"] + 1e-3)
            for element in (NAN, 0.8):
                P = good["P"].copy()
                P[1, 7, N - 1] = element
                assert rejects_softmax(x, dtype, P=P)
            if spread <= 1 < N:
                short = np.zeros_like(good["P"])
                short[..., :-1] = softmax_kernel(x[..., :-1], dtype, base2)["P"]
                assert rejects_softmax(x, dtype, P=short)


def rejects_softmax(x, dtype, **results):
    return not all(verdict.passed for verdict in softmax_verdicts(results, x, dtype=dtype))


def test_softmax_of_one_row_and_in_blocks(monkeypatch):
    x = np.random.default_rng(0).normal(size=37)
    y, lse = reference.softmax(x)
    (verdict,) = softmax_verdicts({"P": y}, x, dtype="float64")
    assert verdict.error == 0
    require(softmax_verdicts({"lse": np.asarray(lse)}, x, dtype="float64"), "one row")
    monkeypatch.setattr(tolerance, "_BLOCK", 100)
    x = np.random.default_rng(0).normal(size=(3, 5, 37))
    y, lse = reference.softmax(x)
    require(softmax_verdicts({"P": y, "lse": lse}, x, dtype="float64"), "blocks")
    y[2, 4, 36] += 1e-9
    assert rejects_softmax(x, "float64", P=y)


def test_scores_beyond_float32_may_give_anything_in_their_row_only():
    c = case("float32", "normal", 3, 5, 8)
    c.q[:, :, 1] *= 1e3
    c.scale = 1e36
    out = reference.attention(c.q, c.k, c.v, scale=c.scale)[0].astype(np.float32)
    out[:, :, 1] = NAN
    require(c.verdicts({"O": out}), c.name)
    out[0, 0, 2, 0] = NAN
    assert c.worst({"O": out}) == INF


def test_an_infinite_value_of_a_vanishing_weight_may_be_nan():
    """exp(-200) is nonzero in float64 but 0 in float32, where 0 * infinity is NaN."""
    q, k = np.ones((1, 1, 1, 1), "f4"), np.array([0, -200], "f4").reshape(1, 1, 2, 1)
    v = np.array([[1, 1], [np.inf, 1]], "f4").reshape(1, 1, 2, 2)
    kwargs = {"scale": 1.0, "causal_offset": None, "dtype": "float32"}
    for value in (np.nan, np.inf):
        out = np.array([value, 1], "f4").reshape(1, 1, 1, 2)
        assert attention_verdicts({"O": out}, q, k, v, **kwargs)[0].passed
    wrong = np.array([np.nan, np.nan], "f4").reshape(1, 1, 1, 2)
    assert not attention_verdicts({"O": wrong}, q, k, v, **kwargs)[0].passed


@pytest.mark.parametrize("kind", e4m3_sums.KINDS)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_scores_of_e4m3_have_the_error_of_their_sums(kind, d):
    """With one key, lse is the score. Errors come close to the bound and never exceed it."""
    q, k = (e4m3_sums.drawn(kind, (1, 1, n, d), n) for n in (2000, 1))
    scale = 3 * d**-0.5
    want = tolerance.expected_attention(
        *(q, k, k), dtype="float8_e4m3fn", roundings=["float8_e4m3"], scale=scale
    )["float8_e4m3"]["lse"]
    off = np.abs(scale * e4m3_sums.multiplied(q[0, 0], k[0, 0])[:, 0] - want.value[0, 0])
    largest = (off / want.bound[0, 0]).max()
    assert largest < 1
    assert largest > 0.1 or kind == "positive", f"{largest}"


@pytest.mark.parametrize(
    "dtype, rounding, least", [("float8_e4m3fn", "float8_e4m3", -16), ("float16", None, -25)]
)
def test_weights_may_underflow_beside_a_large_sink(dtype, rounding, least):
    one = np.ones((1, 1, 1, 1), dtype_named(dtype).numpy)
    for power, may in ((least - 1, True), (least + 3, False)):
        sink = np.array([1 - power * np.log(2)], "f4")  # the weight of the key is about 2^power
        how = {"dtype": dtype, "roundings": [rounding], "out_dtype": "float32"}
        want = tolerance.expected_attention(*(one, one, one), **how, scale=1.0, sink=sink)
        of_O = want[rounding]["O"]
        assert of_O.value.item() == pytest.approx(2.0**power, rel=1e-3)
        assert (of_O.bound.item() >= of_O.value.item()) == may


ROUNDINGS = {"float16": None, "bfloat16": None, "float32": "tf32", "float64": None}


@pytest.mark.parametrize("part", [(0,), (slice(None), 0)], ids=["batch element", "head"])
@pytest.mark.parametrize("dtype, rounding", [*ROUNDINGS.items(), ("float32", "float8_e4m3")])
def test_bounds_of_a_head_do_not_depend_on_others(dtype, rounding, part):
    of = dtype_named(dtype).numpy.type
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 2, 2, 9, 16)).astype(of)
    sizes = {"scale": 0.25, "dtype": dtype, "roundings": (rounding,)}

    def expected():
        forward = tolerance.expected_attention(q, k, v, **sizes)[rounding]
        out, lse = (forward[x].value for x in ("O", "lse"))
        return forward | tolerance.expected_gradients(q, k, v, out, lse, dout, **sizes)[rounding]

    before = expected()
    for x in (v, dout):
        x[part] *= of(2.0**6)
    others = np.ones((2, 2), bool)
    others[part] = False
    for name, (_, bound) in expected().items():
        np.testing.assert_array_equal(bound[others], before[name].bound[others], err_msg=name)
    assert (bound[~others] > before[name].bound[~others]).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_bounds_of_small_values_are_small(dtype):
    of = dtype_named(dtype).numpy.type
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 9, 16)).astype(of)
    usual, small = (
        tolerance.expected_attention(q, k, x, scale=0.25, dtype=dtype)[None]["O"]
        for x in (v, v * of(2.0**-8))
    )
    np.testing.assert_allclose(small.bound, usual.bound * 2.0**-8, rtol=0.05)
