"""Expressions in NumPy, compared with plain loops, finite differences and float32 arithmetic."""

import math

import numpy as np
import pytest
from helpers import float32

from cupyfa.numerics import reference, tolerance
from cupyfa.score.expressions import TRACEABLE, Expression
from cupyfa.score.functions import DIFFERENTIABLE, FUNCTIONS, RECIPROCAL
from cupyfa.score.numpy_evaluation import Modifications, complex_step

NAN, INF = np.nan, np.inf
B, H, HK, M, N, D, DV = 2, 4, 2, 7, 9, 5, 3
RNG = np.random.default_rng(3)
NAMES = {
    "cap": 2.5,
    "slopes": RNG.random(H),
    "table": RNG.normal(size=(H, N + M)).astype(np.float32),
    "bias": RNG.normal(size=(1, H, M, N)),
    "doc": np.array([0, 0, 0, 1, 1, 2, 2, 2, 2]),
    "seen": RNG.random((B, 1, 1, N)) < 0.8,
    "hole": np.where(RNG.random(N) < 0.2, -INF, 0.0),
}
SCORE_TEXTS = {
    "softcap": "cap * tanh(score / cap)",
    "alibi": "score - slopes[head] * abs(position - key)",
    "table": "score + table[head, abs(position - key)]",
    "bias": "score + bias[0, head, query, key]",
    "curved": "where(key % 2 == batch, softplus(score), min(score ** 2, 3) - 0.1 * queries / keys)",
    "hole": "max(score, -0.5) + hole[key] if query // 2 != 1 else erf(score)",
}
MASK_TEXTS = {
    "documents": "doc[min(position, keys - 1)] == doc[key]",
    "causal": "key <= position and not (query == 3)",
    "array": "seen[batch, 0, 0, key] or key < 2",
}


def modifications(scores=(), masks=(), **more):
    """Returns Modifications of named expressions at the sizes above; `more` overrides defaults."""
    how = {"position": N - M, "queries": M, "keys": N, **more}
    of_scores = tuple(Expression.of("score_mod", SCORE_TEXTS[x]) for x in scores)
    return Modifications(
        of_scores, tuple(Expression.of("mask_mod", MASK_TEXTS[x]) for x in masks), NAMES, **how
    )


def of_texts(score=None, mask=None, keys=N, **names):
    """Returns Modifications of the given expressions and of the arrays that they capture."""
    scores = (Expression.of("score_mod", score),) if score else ()
    masks = (Expression.of("mask_mod", mask),) if mask else ()
    return Modifications(scores, masks, names, N - M, M, keys)


def bounds(q, k, v, **how):
    return tolerance.expected_attention(q, k, v, dtype="float32", **how)[None]


def gradients(q, k, v, out, lse, dout, **how):
    return tolerance.expected_gradients(q, k, v, out, lse, dout, dtype="float32", **how)[None]


def in_python(text, b, h, i, j, **names):
    """Evaluates an expression for one pair with Python numbers."""
    place = {"batch": b, "head": h, "query": i, "key": j, "position": i + N - M}
    functions = {**TRACEABLE, "min": min, "max": max, "abs": abs}
    others = {"queries": M, "keys": N, "table": NAMES["table"].astype(float)}
    return eval(text, {"__builtins__": {}, **functions, **NAMES, **others, **place, **names})


def by_hand(q, k, v, scale, scores=(), masks=(), causal_offset=None, sink=None):
    out, lse = np.zeros((B, H, M, DV)), np.full((B, H, M), -INF)
    for b, h, i in np.ndindex(B, H, M):
        weights = {}
        for j in range(N):
            if causal_offset is not None and j > i + causal_offset:
                continue
            if not all(in_python(MASK_TEXTS[name], b, h, i, j) for name in masks):
                continue
            s = scale * float(q[b, h, i] @ k[b, h // (H // HK), j])
            for name in scores:
                s = in_python(SCORE_TEXTS[name], b, h, i, j, score=s)
            weights[j] = math.exp(s)
        total = sum(weights.values()) + (0 if sink is None else math.exp(sink[h]))
        if total:
            lse[b, h, i] = math.log(total)
            out[b, h, i] = sum(
                (w / total * v[b, h // (H // HK), j] for j, w in weights.items()), np.zeros(DV)
            )
    return out, lse


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    shapes = (B, H, M, D), (B, HK, N, D), (B, HK, N, DV), (B, H, M, DV), (B, H, M)
    return [rng.normal(size=shape) for shape in shapes]


CASES = [
    *(((name,), (), None, False) for name in SCORE_TEXTS),
    *(((), (name,), 1, True) for name in MASK_TEXTS),
    (("softcap", "alibi", "bias"), ("documents", "array"), None, True),
    (("curved", "hole"), ("causal",), 3, False),
]


@pytest.mark.parametrize("scores, masks, causal_offset, has_sink", CASES)
def test_attention_equals_plain_loops(scores, masks, causal_offset, has_sink):
    q, k, v, _, _ = inputs()
    sink = np.array([0.3, -1.0, 2.0, -INF]) if has_sink else None
    how = {"scale": 0.7, "causal_offset": causal_offset, "sink": sink}
    actual = reference.attention(q, k, v, mods=modifications(scores, masks), **how)
    for x, y in zip(actual, by_hand(q, k, v, scores=scores, masks=masks, **how)):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("scores, masks, causal_offset, has_sink", CASES)
def test_gradients_are_finite_differences(scores, masks, causal_offset, has_sink):
    q, k, v, dout, dlse = inputs(1)
    sink = np.random.default_rng(2).normal(size=(B, H)) if has_sink else None
    how = {"scale": -0.7, "causal_offset": causal_offset, "mods": modifications(scores, masks)}
    how["sink"] = sink
    out, lse = reference.attention(q, k, v, **how)
    dlse[np.isneginf(lse)] = 5.0  # no effect in empty rows
    found = tolerance.expected_gradients(
        q, k, v, out, lse, dout, dlse=dlse, dtype="float64", **how
    )[None]

    def loss():
        out, lse = reference.attention(q, k, v, **how)
        return np.sum(dout * out) + np.sum(np.where(np.isneginf(lse), 0, dlse * lse))

    step = 1e-5
    given = {"dQ": q, "dK": k, "dV": v} | ({"dsink": sink} if has_sink else {})
    for name, array in given.items():
        assert found[name].value.shape == array.shape
        for index in list(np.ndindex(array.shape))[::7]:
            kept, ends = array[index], []
            for x in (kept + step, kept - step):
                array[index] = x
                ends.append(loss())
            array[index] = kept
            difference = (ends[0] - ends[1]) / (2 * step)
            assert found[name].value[index] == pytest.approx(difference, abs=2e-8), (name, index)


def test_a_sink_of_each_head_is_that_of_all_batch_elements():
    q, k, v, dout, dlse = inputs()
    sink = np.random.default_rng(2).normal(size=H).astype(np.float32)
    each = np.broadcast_to(sink, (B, H))
    results = []
    for x in (sink, each):
        how = {"scale": 0.5, "sink": x}
        forward = reference.attention(q, k, v, **how)
        results.append(gradients(q, k, v, *forward, dout, dlse=dlse, **how)["dsink"])
    assert results[0].value.shape == (H,) and results[1].value.shape == (B, H)
    np.testing.assert_allclose(results[0].value, results[1].value.sum(0), rtol=1e-12)


def test_a_row_with_a_sink_alone():
    q, k, v, dout, dlse = inputs()
    sink = np.array([0.5, -INF, 3.0, 0.0], np.float32)
    how = {"scale": 0.5, "causal_offset": -2, "sink": sink}
    out, lse = reference.attention(q, k, v, **how)
    assert (out[:, :, :2] == 0).all()
    np.testing.assert_array_equal(lse[:, :, :2], np.broadcast_to(sink[:, None], (B, H, 2)))
    expected = bounds(q, k, v, **how)
    assert (expected["O"].bound[:, :, :2] == 0).all() and (expected["O"].bound[:, :, 2:] > 0).all()
    assert (expected["lse"].bound[:, 1, :2] == 0).all()
    assert (expected["lse"].bound[:, [0, 2, 3], :2] > 0).all()
    dout[:, 1, :2] = NAN  # no effect where the sink is -inf
    found = gradients(q, k, v, out, lse, dout, dlse=dlse, **how)
    assert np.isfinite(found["dsink"].value).all() and found["dsink"].value[1] == 0
    assert (found["dQ"].value[:, :, :2] == 0).all()


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float8_e4m3"])
def test_texts_apply_in_every_precision(precision):
    q, k, v, _, _ = (x.astype(np.float32) for x in inputs())
    how = {"scale": 0.5, "sink": np.ones(H), "mods": modifications(("softcap", "alibi"), ["array"])}
    exact = reference.attention(q, k, v, **how)
    rounded = reference.attention(q, k, v, precision=precision, **how)
    error = {"float32": 1e-6, "bfloat16": 0.05, "float8_e4m3": 0.4}[precision]
    for x, y in zip(rounded, exact):
        assert 0 < np.abs(x - y).max() < error


def test_a_hidden_pair_is_as_if_it_were_masked():
    """In a hidden pair, neither NaN nor an index out of bounds has an effect."""
    q, k, v, dout, _ = inputs()
    bias = np.full((1, H, M, N), NAN)
    bias[..., :6] = 0.5
    k[:, :, 6:], v[:, :, 6:] = NAN, INF
    arrays, hides = {"short": np.arange(6.0)}, "key < 6 and query != 2"
    text = "score + short[key] + bias[0, head, query, key]"
    how = {"scale": 0.5, "mods": of_texts(text, hides, **arrays, bias=bias)}
    out, lse = reference.attention(q, k, v, **how)
    few = of_texts("score + short[key] + 0.5", keys=6, **arrays)
    others = np.arange(M) != 2
    expected = reference.attention(q, k[:, :, :6], v[:, :, :6], scale=0.5, mods=few)
    for x, y in zip((out, lse), expected):
        np.testing.assert_allclose(x[:, :, others], y[:, :, others], rtol=1e-12)
    assert (out[:, :, 2] == 0).all() and (lse[:, :, 2] == -INF).all()
    dout[:, :, 2] = NAN
    found = gradients(q, k, v, out, lse, dout, **how)
    for name, hidden in (("dQ", np.s_[:, :, 2]), ("dK", np.s_[:, :, 6:]), ("dV", np.s_[:, :, 6:])):
        assert np.isfinite(found[name].value).all()
        assert (found[name].value[hidden] == 0).all() and (found[name].bound[hidden] == 0).all()
    expected = bounds(q, k, v, **how)
    assert all(np.isfinite(x.bound).all() for x in expected.values())
    assert (expected["O"].bound[:, :, 2] == 0).all()


def test_minus_infinity_from_a_text_is_weight_0_and_not_hidden():
    q, k, v, dout, _ = inputs()
    v[:, :, 4, 0] = NAN
    hole = np.where(np.arange(N) == 4, -INF, 0.0)
    how = {"scale": 0.5, "mods": of_texts("score + hole[key]", hole=hole)}
    out, lse = reference.attention(q, k, v, **how)
    assert np.isnan(out[..., 0]).all() and np.isfinite(out[..., 1:]).all()
    rest = np.arange(N) != 4
    fewer = reference.attention(q, k[:, :, rest], v[:, :, rest], scale=0.5)
    np.testing.assert_allclose(out[..., 1:], fewer[0][..., 1:], rtol=1e-12)
    np.testing.assert_allclose(lse, fewer[1], rtol=1e-12)
    v[:, :, 4, 0] = 0
    found = gradients(q, k, v, *reference.attention(q, k, v, **how), dout, **how)
    assert all(np.isfinite(x.value).all() and np.isfinite(x.bound).all() for x in found.values())
    assert (found["dK"].value[:, :, 4] == 0).all()


def test_an_index_out_of_range_and_a_divisor_of_0_name_the_pair():
    q = inputs()[0]
    k, v = (np.zeros((B, HK, 12, x)) for x in (D, DV))
    table = np.zeros((H, 16))
    for text, index, pair in (
        ("score + table[head, key + 5]", 16, "batch 0, head 0, query 0, key 11"),
        ("score + table[head - 1, key]", -1, "batch 0, head 0, query 0, key 0"),
    ):
        with pytest.raises(ValueError) as error:
            reference.attention(q, k, v, scale=1.0, mods=of_texts(text, table=table))
        axis, size = (0, H) if index < 0 else (1, 16)
        message = f"score_mod: index {index} into axis {axis} of table is out of range at {pair}; "
        assert (
            str(error.value)
            == message + f"the axis has size {size}: indices must be from 0 to {size - 1}"
        )
    with pytest.raises(ValueError, match="divides by 0 at batch 0, head 0, query 0, key 3; make"):
        reference.attention(q, k, v, scale=1.0, mods=of_texts("score + query % (key - 3)"))
    # The array is not read for pairs that the mask hides.
    mods = of_texts("score + table[head, key + 5]", "key < 11", table=table)
    reference.attention(q, k, v, scale=1.0, mods=mods)


@pytest.mark.parametrize("tile", [1, 40, 1 << 18])
def test_tiles_and_excerpts_have_true_indices(monkeypatch, tile):
    q, k, v, dout, dlse = inputs()
    monkeypatch.setattr(reference, "_TILE_SCORES", tile)
    monkeypatch.setattr(reference, "_TILE_ROWS", 2)
    how = {"scale": 0.5}
    scores, masks = ("curved", "bias"), ("documents", "array")
    whole = by_hand(q, k, v, 0.5, scores, masks)
    some = reference.attention(q, k, v, mods=modifications(scores, masks), **how)
    for x, y in zip(some, whole):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14)
    at = modifications(scores, masks, first=(1, 2, 3, 0))
    rows = np.s_[1:, 2:, 3:5]
    part = reference.attention(q[rows], k[1:, 1:], v[1:, 1:], mods=at, **how)
    for x, y in zip(part, whole):
        np.testing.assert_allclose(x, y[rows], rtol=1e-12, atol=1e-14)
    queries, keys = np.s_[1:, 2:], np.s_[1:, 1:]
    grads = []
    for first_key, of_keys in ((0, slice(None)), (4, slice(4, 7))):
        mods = modifications(scores, masks, first=(1, 2, 0, first_key))
        read = (x[keys][:, :, of_keys] for x in (k, v))
        of_rows = (x[queries] for x in (*whole, dout))
        grads.append(gradients(q[queries], *read, *of_rows, dlse=dlse[queries], mods=mods, **how))
    for name in ("dK", "dV"):
        for x, y in zip(grads[1][name], grads[0][name]):
            np.testing.assert_allclose(x, y[:, :, 4:7], rtol=1e-9, atol=1e-12)


def test_scores_of_a_whole_problem():
    q, k, _, _, _ = inputs()
    scores = 0.5 * q @ np.repeat(k, H // HK, 1).mT
    visible = np.tril(np.ones((M, N), bool), 1)
    found = modifications(("alibi",), ("documents",)).applied_to(scores, visible)
    for b, h, i, j in np.ndindex(found.shape):
        if j > i + 1 or not in_python(MASK_TEXTS["documents"], b, h, i, j):
            assert found[b, h, i, j] == -INF
        else:
            by_loop = in_python(SCORE_TEXTS["alibi"], b, h, i, j, score=scores[b, h, i, j])
            assert found[b, h, i, j] == pytest.approx(by_loop, rel=1e-13)
    assert Modifications().applied_to(scores) is scores


# Functions and rules of arithmetic


@pytest.mark.parametrize(
    "function", [*DIFFERENTIABLE.values(), RECIPROCAL], ids=lambda function: function.name
)
def test_derivatives_of_functions(function):
    f, df = function.value, function.derivative
    x = np.concatenate([np.linspace(0.1, 30, 40), np.linspace(-30, -0.1, 40)])
    with np.errstate(all="ignore"):
        y, formula = f(x), df(x)
        step = complex_step(f, None, x, y)
        difference = (f(x + 1e-6) - f(x - 1e-6)) / 2e-6
        np.testing.assert_array_equal(np.isnan(step), np.isnan(y))
        known = np.isfinite(y)
        np.testing.assert_allclose(step[known], formula[known], rtol=1e-9, atol=1e-15)
        np.testing.assert_allclose(
            step[known], difference[known], rtol=1e-6, atol=1e-8 * np.abs(y[known]).max()
        )


def value(text, scores, names=None, **more):
    shape = np.shape(scores) if np.ndim(scores) == 4 else (1, 1, 1, np.size(scores))
    mods = Modifications((Expression.of("score_mod", text),), (), names or {})
    place = mods.place(*np.ogrid[tuple(slice(x) for x in shape)])
    return mods.number(np.reshape(np.asarray(scores, float), shape), place, None, **more)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("(key - 3) // 2", [-2, -1, -1, 0, 0]),
        ("(key - 3) % -2", [-1, 0, -1, 0, -1]),
        ("(key - 3) % 2", [1, 0, 1, 0, 1]),
        ("(key - 3) / 2", [-1.5, -1, -0.5, 0, 0.5]),
        ("table[key ** 2 // 4]", [10, 10, 11, 12, 14]),
        ("where(flags[key] == (key > 2), key, -1)", [0, -1, 2, 3, -1]),
        ("1 if 0 < key < 4 else 0", [0, 1, 1, 1, 0]),
        ("where(~(key == 1) & (key < 3) | flags[4 - key], 1.5, 0)", [1.5, 1.5, 1.5, 1.5, 0]),
        ("min(key, 2) + max(key, 2.0) * 10", [20, 21, 22, 32, 42]),
        ("max(score, where(key == 1, log(0 * score - 1), 0.5))", [0.5, NAN, 2, 3, 4]),
        ("big[0] + key - big[0]", [0, 1, 2, 3, 4]),
    ],
)
def test_numbers_follow_python(text, expected):
    names = {
        "table": np.arange(10, 15, dtype=np.int8),
        "flags": np.array([False, True, False, True, False]),
        "big": np.array([2**62]),
    }
    np.testing.assert_array_equal(value(text, range(5), names).value[0, 0, 0], expected)


@pytest.mark.parametrize(
    "text, at, slope",
    [
        ("abs(score)", [-2, 0, 2], [-1, 0, 1]),
        ("max(score, 1)", [0, 1, 2], [0, 1, 1]),
        ("max(1, score)", [0, 1, 2], [0, 0, 1]),
        ("min(score, 1)", [0, 1, 2], [1, 1, 0]),
        ("floor(score) + 2 * score", [0.5, 1, 1.5], [2, 2, 2]),
        ("where(score > 1, score ** 2, key)", [1, 2, 3], [0, 4, 6]),
        ("sqrt(score)", [0, 1, 4], [INF, 0.5, 0.25]),
        ("key + 0.5", [1, 2, 3], [0, 0, 0]),
    ],
)
def test_slopes_of_choices(text, at, slope):
    found = value(text, at, slope=1.0).slope
    np.testing.assert_allclose(
        np.broadcast_to(0 if found is None else found, (1, 1, 1, 3)), [[[slope]]]
    )


# Error bounds

SHAPE = (2, 3, 8, 24)
ARRAYS = {
    "slope": RNG.normal(size=3).astype(np.float32),
    "table": RNG.normal(size=(3, 40)).astype(np.float32),
    "doc": RNG.integers(0, 3, 24),
    "cap": np.float32(3.7),
}


def random_text(rng, depth):
    if depth == 0:
        leaves = ["slope[head]", "table[head, abs(position - key)]", "0.1", "2.5", "cap", "key"]
        return str(rng.choice([*["score"] * 3, *leaves, "(position - key)"]))
    a, b, c, d = (random_text(rng, depth - 1) for _ in range(4))
    safe = {
        **{"exp": f"min({a}, 5)", "exp2": f"min({a}, 5)", "log": f"0.1 + abs({a})"},
        **{"rsqrt": f"0.1 + abs({a})", "log1p": f"abs({a})", "sqrt": f"abs({a})"},
    }
    function = str(rng.choice([*DIFFERENTIABLE, "abs", "floor"]))
    return str(
        rng.choice(
            [
                *(f"({a} {op} {b})" for op in "+-*"),
                *(f"({a} / (2 + abs({b})))", f"{rng.choice(['min', 'max'])}({a}, {b})"),
                *[f"{function}({safe.get(function, a)})"] * 3,
                *(f"where({a} < {b}, {c}, {d})", f"where(doc[key] == doc[query], {c}, {d})"),
            ]
        )
    )


@np.errstate(all="ignore")
def ratios(text, seed, moved=0.0):
    """Returns the largest ratio of float32 errors to their bounds, for values and for slopes.

    moved: error of the scores, in units of eps times their magnitude.
    """
    rng = np.random.default_rng(seed)
    score = (3 * rng.normal(size=SHAPE)).astype(np.float32)
    eps, error = float32.EPS, moved * np.abs(score)
    exact = score.astype(float) + eps * error * rng.uniform(-1, 1, SHAPE)
    mods = Modifications((Expression.of("score_mod", text),), (), ARRAYS, 16, 8, 24)
    place = mods.place(*np.ogrid[tuple(slice(x) for x in SHAPE)])
    wide = mods.number(exact, place, None, slope=1.0, error=error if moved else None, eps=eps)
    found = float32.evaluate(text, score, {**ARRAYS, **place, "position": place["query"] + 16})
    largest = []
    for actual, there, of in zip(
        found, (wide.value, wide.slope), (wide.error, wide.slope_error), strict=True
    ):
        there = np.broadcast_to(0.0 if there is None else there, SHAPE)
        apart = np.where(np.isfinite(there), np.abs(actual - there), 0.0)
        largest.append((apart / (1e-36 + eps * (0.0 if of is None else of))).max())
    return largest


def test_float32_arithmetic_stays_below_the_bounds_of_random_texts():
    rng, of_values, of_slopes = np.random.default_rng(5), [], []
    for seed in range(250):
        text = random_text(rng, 1 + seed % 3)
        a, b = ratios(text, seed, moved=5.0 * (seed % 2))
        assert a <= 1.001 and b <= 1.001, (text, a, b)
        of_values.append(a)
        of_slopes.append(b)
    assert np.mean(np.array(of_values) > 0.1) > 0.8  # other expressions are exact
    assert np.mean(np.array(of_slopes) > 0.1) > 0.25


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_the_bounds_of_functions_are_not_vacuous(name):
    argument = "abs(score)" if name in ("log", "log1p", "sqrt", "rsqrt") else "score"
    a, b = (
        max(x)
        for x in zip(*(ratios(f"{name}({argument})", seed) for seed in range(3)), strict=True)
    )
    assert 0.25 < a <= 1 and 0.1 < b <= 1, (a, b)


@pytest.mark.parametrize("large", [1.0, 30.0, 1e4, 1e8, 1e30])
@pytest.mark.parametrize("name", [x.name for x in FUNCTIONS.values() if x.small_near_0])
def test_bounds_near_0_are_relative(name, large):
    """Multiplied by a large factor, a function of a small argument keeps a small relative error."""
    scores = np.concatenate([np.logspace(-6, 0, 30), -np.logspace(-6, 0, 30)]) * min(large, 0.4)
    found = value(f"large * {name}(score / large)", scores, {"large": large}, eps=float32.EPS)
    assert (found.error < 10 * np.abs(scores)).all()


def test_the_bound_of_a_small_slope_is_relative():
    """The slope of cos is small near 0, that of sigmoid far from 0."""
    for text, scores in (("cos(score)", 1e-6), ("sigmoid(score)", 15.0), ("sigmoid(score)", -15.0)):
        found = value(text, [scores], slope=1.0, eps=float32.EPS)
        assert found.slope_error < 40 * np.abs(found.slope)


def test_a_wrong_text_is_beyond_the_bounds():
    """The wrong expression has a constant that is off by a relative error of about 1e-5."""
    right, wrong = "cap * tanh(score / cap)", "cap * tanh(score / 3.70004)"
    score = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    found = value(right, score, ARRAYS, slope=1.0, eps=float32.EPS)
    other = value(wrong, score, ARRAYS, slope=1.0)
    assert np.mean(np.abs(found.value - other.value) > float32.EPS * found.error) > 0.5


def test_a_comparison_that_rounding_may_turn_has_the_distance_as_its_error():
    found = value("where(score * 0.1 < 0.3, score, 10)", [1, 3, 3.0001], eps=float32.EPS)
    error = float32.EPS * found.error[0, 0, 0]
    assert error[1] == pytest.approx(7, rel=1e-5) and max(error[[0, 2]]) < 1e-5
    found = value("floor(score * 0.1)", [29, 30, 31], eps=float32.EPS)
    np.testing.assert_allclose(float32.EPS * found.error[0, 0, 0], [0, 1, 0], atol=1e-6)


def test_a_pair_that_rounding_may_hide_leaves_its_row_without_bounds():
    q, k, v, dout, _ = inputs()
    how = {"scale": 0.5, "mods": of_texts(mask="key * 0.1 < query * 0.1 + 0.3")}
    expected = bounds(q, k, v, **how)
    lost = np.isinf(expected["lse"].bound)
    assert lost.any() and not lost.all() and (np.isinf(expected["O"].bound).all(-1) == lost).all()
    found = gradients(q, k, v, *(x.value for x in expected.values()), dout, **how)
    assert (np.isinf(found["dQ"].bound).all(-1) == lost).all()
    whole = bounds(q, k, v, scale=0.5, mods=of_texts(mask="key < query + 3"))
    assert all(np.isfinite(x.bound).all() for x in whole.values())
