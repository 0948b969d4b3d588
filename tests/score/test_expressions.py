"""Expressions: the meaning of texts and traced functions, and errors before compilation."""

import ast
import math
import pickle
import re

import numpy as np
import pytest
from helpers.cli import table

import cupyfa.score.expressions as ex
from cupyfa.problem.optional_inputs import Operand
from cupyfa.score.expressions import Captured, Expression

KINDS = {
    name: Captured(name, kind, rank)
    for name, kind, rank in (
        ("slope", "float", 1), ("doc", "int", 1), ("table", "float", 2), ("see", "bool", 1),
        ("cap", "float", 0), ("n", "int", 0),
    )
}  # fmt: skip
OF_WHOLE = {
    f"{kind[0]}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (16, 32, 64)
}
KINDS_OF_WHOLE = {name: Operand(name, dtype, (9,)).captured for name, dtype in OF_WHOLE.items()}


def cpp(text, option="score_mod", kinds=KINDS, bounded=lambda *place: False):
    return Expression.of(option, text).cpp(bounded, kinds)


@pytest.mark.parametrize("option, marked, words", table("score/wrong_texts.txt"))
def test_a_wrong_text_is_refused_with_a_caret_below_the_place(option, marked, words):
    text = marked.replace("»", "")
    with pytest.raises(ValueError) as caught:
        Expression.of(option, text).check(KINDS)
    message, shown, caret = str(caught.value).split("\n")
    assert message.startswith(f"{option}: ") and words[0] in message
    assert (shown, caret) == (f"    {text}", f"    {' ' * marked.index('»')}^")


@pytest.mark.parametrize(
    "text",
    [
        "score" + " + score" * 20_000, "(" * 1000 + "score" + ")" * 1000, "score" + "+score" * 600,
        "-" * 3999, "not " * 900 + "see[key]", "tanh(" * 150 + "score" + ")" * 150, "[" * 2000,
        "slope[" * 500 + "0" + "]" * 500, "9" * 3900, "0x" + "f" * 3900, "f'{" * 100, "",
    ],
    ids=lambda text: text[:6],
)  # fmt: skip
def test_no_text_is_too_long_or_too_deep_to_be_refused(text):
    with pytest.raises(ValueError, match="^score_mod: ") as caught:
        Expression.of("score_mod", text)
    assert max(map(len, str(caught.value).split("\n"))) < 250


@pytest.mark.parametrize("term", [" + score", " * 2", " - 0.5 * score"])
def test_a_flat_chain_is_not_deep(term):
    assert Expression.of("score_mod", "score" + term * 190).cpp(lambda *place: False)
    with pytest.raises(ValueError, match=r"chains 300 operations; the limit is 200; group"):
        Expression.of("score_mod", "score" + "+1" * 300)


def test_deep_texts_are_printed_in_no_time():
    for text in ("tanh(1 / " * 24 + "score" + ")" * 24, "(" * 40 + "key" + " ** 2)" * 40):
        made = Expression.of("score_mod", text)
        assert len(made.cpp(lambda *place: False)) < 1000


def test_of_a_long_text_the_part_around_the_place_is_shown():
    with pytest.raises(ValueError) as caught:
        Expression.of("score_mod", "score + 1.5 * key + " * 9 + "tan(score)" + " + key" * 30)
    _, shown, caret = str(caught.value).split("\n")
    assert shown.startswith("    ...") and shown.endswith("...") and len(shown) == 100
    assert shown[caret.index("^") :].startswith("tan(score)")


@pytest.mark.parametrize(
    "text, printed",
    [
        (
            "score + slope[head] * (key - query)",
            "fused(slope_.read(head), number((key - query)), score)",
        ),
        ("score - key * slope[head]", "fused(-number(key), slope_.read(head), score)"),
        ("score + key * query", "(score + (wide(key) * query))"),
        ("cap * tanh(score / cap)", "capped(score, cap_)"),
        ("3 * tanh((score + key) / 3)", "capped((score + key), number(3))"),
        ("3 * tanh(score / cap)", "(3 * tanh((score / cap_)))"),
        ("key / 2 - 2.5", "((number(key) / number(2)) - Real(2.5))"),
        ("exp(key) + abs(key) + min(key, n)", "((exp(number(key)) + abs(key)) + smaller(key, n_))"),
        ("n", "number(n_)"),
        ("score if 0 <= key < 3 else 1", "where(((0 <= key) & (key < 3)), score, 1)"),
        ("where(not see[key] or True, 1, -key) + score",
         "(where(((!see_.read(key)) | true), 1, (-key)) + score)"),
        ("query // 64 % 7 // n + score",
         "(floor_divide(floor_mod<7>(floor_divide<64>(query)), n_) + score)"),
        ("score ** 2 + max(score, +3)", "(square(score) + larger(score, 3))"),
        ("(100 * key + 5) * score", "(((100 * key) + 5) * score)"),
        ("query * keys * score + 3000000000", "(((wide(query) * keys) * score) + 3000000000LL)"),
        ("doc[key] + doc[query] + doc[0] + score",
         "(((doc_.read(key) + doc_.read(query)) + doc_.read(0)) + score)"),
        ("i32[key] + i32[0] + score", "((wide(i32_.read(key)) + i32_.read(0)) + score)"),
        ("i16[key] * i16[0] * i16[1] + score",
         "((wide((i16_.read(key) * i16_.read(0))) * i16_.read(1)) + score)"),
        ("-i32[key] + abs(i32[0]) + abs(i16[0]) + score",
         "((((-wide(i32_.read(key))) + abs(wide(i32_.read(0)))) + abs(i16_.read(0))) + score)"),
        ("abs(doc[key] - doc[0]) - -doc[1] + score",
         "((abs(widest((doc_.read(key) - doc_.read(0)))) - (-widest(doc_.read(1)))) + score)"),
        ("i32[key] // i16[0] + i32[1] % -1 + score",
         "((floor_divide(wide(i32_.read(key)), i16_.read(0)) + "
         "floor_mod(wide(i32_.read(1)), (-1))) + score)"),
        ("i32[key] // 3 + score", "(floor_divide<3>(i32_.read(key)) + score)"),
        ("u64[key] * i32[0] + i32[key] + score",
         "(((u64_.read(key) * i32_.read(0)) + i32_.read(key)) + score)"),
        ("key ** 2 * score", "(square(wide(key)) * score)"),
    ],
)  # fmt: skip
def test_a_text_becomes_cpp(text, printed):
    kinds = KINDS | KINDS_OF_WHOLE
    Expression.of("score_mod", text).check(kinds)
    assert cpp(text, kinds=kinds) == printed


def test_positions_that_an_int_may_not_hold_when_added_take_more_bits():
    text = Expression.of("score_mod", "score + 100 * key")
    for farthest, printed in ((2**24, "(100 * key)"), (2**25, "(wide(100) * key)")):
        assert text.cpp(lambda *place: False, farthest=farthest) == f"(score + {printed})"


def test_conditions_of_masks_become_cpp_without_branches():
    text = "~(doc[query] == doc[key]) | see[key] and key <= position"
    want = "(((!(doc_.read(query) == doc_.read(key))) | see_.read(key)) & (key <= position))"
    assert cpp(text, "mask_mod") == want


def test_the_planner_says_which_indices_may_leave_their_axes():
    asked = []

    def bounded(index, array, axis):
        asked.append((ast.unparse(index), array, axis))
        return not isinstance(index, ast.Name)

    of_doc = 'doc_.read(bounded((key + 1), "doc in score_mod"))'
    want = f'(score + table_.read(head, bounded({of_doc}, "table in score_mod")))'
    assert cpp("score + table[head, doc[key + 1]]", bounded=bounded) == want
    assert asked == [("head", "table", 0), ("key + 1", "doc", 0), ("doc[key + 1]", "table", 1)]


def test_names_of_cpp_and_of_the_header_may_be_captured():
    text = "int[key] + number * real[head]"
    printed = Expression.of("score_mod", text).cpp(lambda *place: False)
    assert re.findall(r"\w+_\b", printed) == ["int_", "number_", "real_"]


def test_what_an_expression_knows():
    made = Expression.of("score_mod", "score + slope[ head ] * table[query,(key)] - cap")
    assert dict(made.captured) == {"slope": 1, "table": 2, "cap": 0}
    assert made.positions == {"head", "query", "key"}
    assert made.text == "score + slope[head] * table[query, key] - cap"
    assert made == pickle.loads(pickle.dumps(made))
    same = Expression.of("score_mod", "(score\n   + slope[head]\t* table[query, key]) - cap\n")
    assert same == made and hash(same) == hash(made) and same.source != made.source
    assert Expression.of("bias", made.source) != made
    assert Expression.of("score_mod", made) == made


@pytest.mark.parametrize(
    "text, additive",
    [
        ("score", True), ("score + 1", True), ("key - 3 + (score - slope[head] * key)", True),
        ("score - score", False), ("1 - score", False), ("-score", False), ("2 * score", False),
        ("score + tanh(score)", False), ("where(key < 3, score, 0)", False), ("cap", False),
    ],
)  # fmt: skip
def test_whether_a_text_only_adds_to_the_score(text, additive):
    assert Expression.of("score_mod", text).is_additive is additive


FACTOR, OWN = 0.5, np.int64(3)


@pytest.mark.parametrize(
    "function, text",
    [
        (lambda score, slope, head, key: score - slope[head] * abs(key - 3) * -FACTOR,
         "score - slope[head] * abs(key - 3) * -0.5"),
        (lambda score: 2 + 3 * (1 - 8 / score) // 2 % 3, None),
        (lambda score, cap: cap * np.tanh(score / cap), "cap * tanh(score / cap)"),
        (lambda score: ex.where((score > 0) & ~(score >= 3), ex.erf(score), ex.minimum(score, 1)),
         "where((score > 0) & ~(score >= 3), erf(score), min(score, 1))"),
        (lambda score, see, key: np.where(see[key] | (key == 3), np.maximum(score, 1.5), -score),
         "where(see[key] | (key == 3), max(score, 1.5), -score)"),
        (lambda score, table, head, key: np.float32(0.5) * table[head, key // 2] + score ** 2,
         "0.5 * table[head, key // 2] + score ** 2"),
        (lambda score, key, *, slope, own=OWN: score + slope[own] - np.sqrt(key),
         "score + slope[3] - sqrt(key)"),
        (lambda score, key: score * math.floor(key / 4), "score * floor(key / 4)"),
        (lambda score: np.square(np.array(3.0) - np.negative(score)), "(3.0 - -score) ** 2"),
        (lambda query, key: key % 64 + query * (-2) ** 2, "key % 64 + query * 4"),
        (lambda score: 1, "1"),
    ],
)  # fmt: skip
def test_a_function_is_traced_once(function, text):
    if text is None:
        with pytest.raises(ValueError, match="// requires whole numbers; write floor"):
            Expression.of("score_mod", function)
    else:
        made = Expression.of("score_mod", function)
        assert made.text == text and made == Expression.of("score_mod", text)
        made.check(KINDS)


@pytest.mark.parametrize(
    "function, words",
    [
        (lambda score: score if score > 0 else 0, "write where"),
        (lambda score: 0 < score < 1, "chained comparisons"),
        (lambda score: score > 0 and score < 1, "& | ~"),
        (lambda score: not score > 0, "& | ~"),
        (lambda score: max(score, 0), "maximum"),
        (lambda score: math.exp(score), "instead of math"),
        (lambda score: float(score), "instead of math"),
        (lambda score: sum(score), "cannot be iterated"),
        (lambda score, slope, key: score + slope[key:], "not a slice"),
        (lambda score: score + np.ones(3), "captured="),
        (lambda score: score + "1", "cannot compute with '1'"),
        (lambda score: np.arctan(score), "np.arctan cannot be traced"),
        (lambda score: np.clip(score, 0, 1), "np.clip cannot be traced"),
        (lambda score: np.add.reduce(score), "np.add cannot be traced"),
        (lambda score: None, "returns None"),
        (lambda *scores: scores[0], "named parameters"),
        (np.tanh, "np.tanh|parameters|'x'"),
        (3, "is 3; pass an expression as a string, or a Python function"),
    ],
)
def test_what_cannot_be_traced_is_refused(function, words):
    with pytest.raises((TypeError, ValueError), match=rf"(?s)^score_mod.*({words})"):
        Expression.of("score_mod", function).check({})


def test_a_traced_function_may_not_grow_without_end():
    def doubled(score):
        for _ in range(60):
            score = score + score
        return score

    def long(score):
        for _ in range(500):
            score = score + 1
        return score

    for function, words in ((doubled, "operations"), (long, "nested too deeply")):
        with pytest.raises(ValueError, match=f"^score_mod: the function.*{words}"):
            Expression.of("score_mod", function)


def test_an_error_of_the_users_function_is_not_changed():
    with pytest.raises(ZeroDivisionError, match="^division by zero$"):
        Expression.of("score_mod", lambda score: score / (1 / 0))
    with pytest.raises(ValueError, match="^own$"):
        Expression.of("score_mod", lambda score: fails(score))


def fails(score):
    raise ValueError("own")


def test_the_functions_compute_with_arrays_too():
    x = np.linspace(0.1, 2, 7)
    np.testing.assert_allclose(ex.sigmoid(x), 1 / (1 + np.exp(-x)), 1e-14)
    np.testing.assert_allclose(ex.softplus(x), np.log1p(np.exp(x)), 1e-14)
    np.testing.assert_allclose(ex.rsqrt(x) * ex.sqrt(x), 1, 1e-14)
    np.testing.assert_allclose(ex.erf(x), [math.erf(y) for y in x], 1e-14)
    whole = np.arange(9, dtype=np.uint8)
    np.testing.assert_allclose(ex.sigmoid(whole), ex.sigmoid([*map(float, whole)]), 1e-14)
    np.testing.assert_allclose(ex.softplus(whole), ex.softplus([*map(float, whole)]), 1e-14)
    assert ex.erf(0.5) == math.erf(0.5) and (ex.where(x > 1, x, 1) == ex.maximum(x, 1)).all()
