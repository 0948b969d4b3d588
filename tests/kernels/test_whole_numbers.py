"""Integer captured arrays: exact arithmetic as in Python, up to the limits of every dtype."""

import re

import numpy as np
import pytest

import cupyfa

DTYPES = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
CONDITIONS = [
    *("A < B", "A <= B", "A == B", "A != B", "A > B", "A >= B"),
    *("-A < B", "-A == A", "-A != n", "abs(A) > B", "abs(A) < 0", "abs(A) == abs(B)"),
    *("min(A, B) < 0", "max(A, B) > 127", "A < n", "A == n", "A // 2 + B // 2 > 0"),
    *("where(A < 4, A, B) > 5", "A % 7 == 3", "A // 16 % 5 < 2", "A % -5 < -2", "A // -16 > 3"),
    *("A % C == 2", "A // C > 3", "abs(A) % C < 2", "A // C * 0 == 0", "A % -1 == 0"),
]
# Expressions for narrow dtypes, whose results always fit into 64 bits.
OF_NARROW = ["A + 1 > B", "A - B > 0", "A // -1 == B", "-A - B < 5"]
PRODUCTS = ["A * B > 77", "A ** 2 > B", "A * C % 7 == 1"]
PAIRS = [(x, x) for x in DTYPES] + [
    *(("int64", "uint64"), ("uint64", "int64"), ("int32", "uint64"), ("uint64", "int8")),
    *(("int32", "int64"), ("uint32", "int32"), ("int64", "uint32"), ("uint8", "int16")),
]
FEW = (("uint64", "uint64"), ("int64", "uint64"), ("int32", "int32"))
MARKED = [pytest.param(*x, marks=[pytest.mark.slow] * (x not in FEW)) for x in PAIRS]


def ends(dtype):
    """Returns integers at and near the limits of a dtype and of narrower dtypes, and near 0."""
    of = np.iinfo(dtype)
    near = {0, 1, 2, 5, 127, of.min, of.min + 1, of.max - 1, of.max, of.max // 2, of.max // 2 + 1}
    return np.array(sorted(near), dtype)


def pairs_of(dtype, other):
    """Returns all pairs of integers from ends(), and divisors, some of them -1."""
    a, b = (x.ravel() for x in np.meshgrid(ends(dtype), ends(other)))
    divisors = np.resize(np.array([3, 1, 7, 100], dtype), a.size)
    if dtype in ("int8", "int16", "int32"):
        divisors[::3] = -1
    return {"a": a, "b": b, "c": divisors}


def in_python(texts, arrays, n):
    """Yields a bit mask of the conditions that hold for each element, using Python integers."""
    names = {"where": lambda test, x, y: x if test else y, "min": min, "max": max, "abs": abs}
    for row in zip(*(x.tolist() for x in arrays.values())):
        given = {**names, **dict(zip("ABC", row)), "n": n}
        yield sum(2.0**i for i, x in enumerate(texts) if eval(x, {"__builtins__": {}}, given))


def scores(text, captured, rows, backend, **how):
    """Returns the scores of rows with a single key, where lse equals the score."""
    q, k = np.zeros((1, 1, rows, 8)), np.zeros((1, 1, 1, 8))
    given = {"score_mod": text, "captured": captured, "kernel": "fa2", "backend": backend}
    return cupyfa.attention(q, k, k, **given, return_lse=True, **how)[1][0, 0]


def written(texts):
    sums = " + ".join(f"where({x}, {2**i}, 0)" for i, x in enumerate(texts))
    for name in "ABC":
        sums = re.sub(rf"\b{name}\b", f"{name.lower()}[query]", sums)
    return f"score + ({sums})"


@pytest.mark.parametrize("dtype, other", MARKED)
def test_whole_numbers_are_those_of_python(backend, dtype, other):
    arrays = pairs_of(dtype, other)
    narrow = not {"int64", "uint64"} & {dtype, other}
    n = -(2**63) if dtype[0] == "i" else 2**63 - 1
    texts = CONDITIONS + OF_NARROW * narrow
    texts += PRODUCTS * (narrow and "uint32" not in (dtype, other))
    found = scores(written(texts), {**arrays, "n": n}, arrays["a"].size, backend.name, check=True)
    for i, text in enumerate(texts):
        wrong = found.astype(int) >> i & 1 != np.array([*in_python([text], arrays, n)])
        assert not wrong.any(), (text, {x: y[wrong][0] for x, y in arrays.items()})


@pytest.mark.parametrize("text", ["A < B", "abs(A) < 0", "A % 7 == 3"])
def test_block_masks_look_at_the_same_numbers(text):
    arrays = pairs_of("int64", "uint64")
    seen = np.array([*in_python([text], arrays, 0)]) == 1
    named = re.sub(r"\b([AB])\b", lambda x: f"{x[0].lower()}[query]", text)
    captured = {x: y for x, y in arrays.items() if f"{x}[" in named}
    how = {"mask_mod": named, "captured": captured, "M": seen.size, "N": 1}
    blocks = cupyfa.block_mask(**how, backend="simulator")
    np.testing.assert_array_equal(blocks.states(1, 1)[0, 0, :, 0] != 0, seen)


@pytest.mark.parametrize("text", ["a[query] + 1", "a[query] - b[query]", "a[query] * 3"])
def test_a_check_refuses_a_result_of_more_than_64_bits(text):
    arrays = pairs_of("int64", "int64")
    captured = {x: arrays[x] for x in "ab" if f"{x}[" in text}
    with pytest.raises(ValueError, match="needs more than 64 bits at batch 0, head 0, query"):
        scores(f"score + ({text})", captured, 99, "simulator", check=True)


def test_the_lowest_number_by_minus_1_does_not_stop_the_program():
    """The quotient overflows, and CPUs trap on this division."""
    captured = {"a": np.array([-(2**63)]), "b": np.array([-1])}
    scores("score + a[0] // b[0] + a[0] % b[0]", captured, 1, "simulator", check=False)
    with pytest.raises(ValueError, match="needs more than 64 bits"):
        scores("score + a[0] // b[0]", captured, 1, "simulator", check=True)


@pytest.mark.parametrize("text", ["a[query] * b[query]", "a[query] ** 2", "a[0] * n * a[1]"])
def test_a_product_that_128_bits_may_not_hold_is_refused(text):
    captured = {"a": np.ones(3, np.uint64), "b": np.ones(3, np.uint64), "n": 2}
    captured = {x: y for x, y in captured.items() if f"{x}[" in text or x == "n" in text}
    with pytest.raises(ValueError, match="^score_mod: the result may need more than 127 bits"):
        scores(f"score + {text}", captured, 3, "simulator")
