"""Random expressions of the whole grammar, with the captured arrays and numbers that they read.

Scores stay moderate, indices inside their arrays and divisors away from 0, whatever the sizes of a
problem are, so every drawn expression has results that can be compared.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Literal

from cupyfa.score.expressions import Expression
from cupyfa.score.functions import FUNCTIONS

Form = str | bool | int | float  # of an array, as "f32[heads]", or a number
# Of every dtype and kind; the axes of several arrays are places, those of others are numbers.
CAPTURED: Mapping[str, Form] = {
    **{"slope": "f32[heads]", "half": "f16[N]", "brain": "bf16[M]", "wide": "f64[heads,4]"},
    **{"table": "f32[4,4]", "doc": "i32[M|N]", "tiny": "i8[heads]", "byte": "u8[N]"},
    **{"short": "i16[M]", "ushort": "u16[N]", "uint": "u32[batch]", "long": "i64[batch]"},
    **{"ulong": "u64[N]", "seen": "bool[batch,N]", "open": "bool[M]"},
    **{"gain": 0.75, "shift": -0.3, "count": 5, "distant": 2**40, "flag": True},
}
_KINDS = {"b": "bool", "i": "whole", "u": "whole", "f": "number"}
_DEEPEST = 3  # functions and operators inside each other
_OF_ONE = [x for x in FUNCTIONS.values() if len(x.arguments) == 1]
_ARGUMENTS = dict.fromkeys(("sin", "cos"), "{frequency} * {number}")  # others have {number}
# What each symbol may become, one as often as another. A symbol in braces is drawn once for a
# template; what follows a slash tells several draws of a symbol apart.
_GRAMMAR: Mapping[str, tuple[str, ...]] = {
    # A number that names the score, and stays moderate.
    "score": (
        *("score + {number}",) * 2,
        "score * sigmoid({number}) - {bounded}",
        "where({condition}, score, {bounded})",
        "score if {condition} else {bounded}",
        "0.5 * score + {bounded}",
        "where({maybe NaN} == {maybe NaN}, {number}, score - 1)",  # NaN is not equal to itself
    ),
    "bounded": ("max(min({number}, 20), -20)",),
    "maybe NaN": ("{extreme}({NaN}, {beside NaN})", "{extreme}({beside NaN}, {NaN})"),
    "NaN": ("log(-1 - abs(score))", "sqrt(-1 - abs(score))", "rsqrt(-1 - key)"),
    "beside NaN": ("score", "0.5", "key"),
    "extreme": ("min", "max"),
    # A number of moderate size: below about 100.
    "number": (
        *("{function}",) * 4,
        *("{function of a small number}",) * 2,
        *("{arithmetic}",) * 3,
        "{extreme}({number}, {simple number})",
        "where({condition}, {number}, {simple number})",
        "({simple number/1} if {condition} else {simple number/2})",
        "({whole}) % {modulus} * 0.25",
        "{simple number}",
    ),
    "function": tuple(
        f"{x.name}({x.drawn.format(_ARGUMENTS.get(x.name, '{number}'))})" for x in _OF_ONE
    ),
    "frequency": ("1", "20"),
    "function of a small number": tuple(
        f"{{large}} * {x.name}(min(max({{number}}, -9), 9) / {{large}})"
        for x in _OF_ONE
        if x.small_near_0
    ),
    "large": ("1e3", "3e4", "1e6", "1e8"),
    "arithmetic": (
        "({number} {sign} {simple number})",
        "0.5 * ({number} - {simple number}) * {simple number}",
        "({number} / (2 + abs({simple number})))",
        "tanh({number}) ** 2",
        "-({number})",
    ),
    "simple number": (
        *("score",) * 4,
        *("{captured number}",) * 3,
        "{constant}",
        "min({simple whole}, 8)",
    ),
    "constant": ("0.1", "2.5", "1", "0.0", "-1.5", "1e-6", "3"),
    "sign": ("+", "-"),
    "modulus": ("3", "5", "8"),
    # A whole number of any size that has fewer than 64 bits.
    "whole": (
        "({whole} {sign} {simple whole})",
        "({whole} * {factor})",
        "({whole}) {quotient} {divisor}",
        "{extreme}({whole}, {simple whole})",
        "abs({whole})",
        "-({whole})",
        "(({whole}) % 1000) ** 2",
        "where({condition}, {whole}, {simple whole})",
    ),
    "factor": ("3", "-7", "(head - 1)"),
    "quotient": ("//", "%"),
    "divisor": ("(1 + abs({captured divisor}))", "2", "3", "-3", "8", "-5", "keys", "(key + 1)"),
    "simple whole": ("{few wholes}", "{captured whole}"),
    "few wholes": ("{place}", "(position - key)", "{digit}"),
    "place": ("batch", "head", "query", "key", "position", "queries", "keys"),
    "digit": tuple("12345678"),
    # True of some pairs.
    "condition": (
        *("{comparison}",) * 3,
        "({condition} {junction} {comparison})",
        "{negation}({condition})",
        "(({condition}) {equality} {flag})",
        "({flag} {bits} {comparison})",
        "where({comparison}, {flag}, {condition})",
    ),
    "comparison": (
        "({whole/1} {relation} {whole/2})",
        "({whole/1} {relation} {whole/2} < {whole/3} + 40)",
        "(({whole}) % 5 {relation} {remainder})",
        "({number} {relation} {simple number})",
        "{flag}",
    ),
    "relation": ("<", "<=", ">", ">=", "==", "!="),
    "remainder": tuple("01234"),
    "junction": ("and", "or", "&", "|"),
    "negation": ("not ", "~"),
    "equality": ("==", "!="),
    "bits": ("&", "|"),
    "flag": (*("{captured bool}",) * 2, "True", "(key < query)"),
    # An index of an axis.
    **{"[batch]": ("batch",), "[heads]": ("head",), "[M]": ("query",), "[N]": ("key",)},
    "[M|N]": ("query", "key"),
}
# What is drawn in their place inside _DEEPEST others.
_SIMPLE = {"number": "simple number", "whole": "simple whole", "condition": "comparison"}
_SYMBOL = re.compile("{([^}]*)}")


def draw_expression(
    rng: random.Random,
    kind: Literal["score", "mask"],
    names: Mapping[str, Form] = CAPTURED,
) -> tuple[str, dict[str, Form]]:
    """A random text, and the forms of those of ``names`` that it reads.

    rng: decides everything: the same state gives the same expression.
    kind: "score" gives a text for ``score_mod``, which names the score; "mask" one for
         ``mask_mod``, which hides a part of the pairs, never all keys of a query.
    names: the captured arrays and numbers that the text may read, by name. A form is one that
        ``shape_language`` takes under "captured": a number, or a text such as "f32[heads]",
        "bool[batch,N]" or "i32[M|N]". An axis of a size by name is indexed with its place alone, so
        arrays fit problems of any size; one of a size by number may have any index.

    The text and the forms are what a problem takes:
    ``Problem.of_sizes(..., score_mod=text, captured=captured)``. Elements of whole numbers have to
    be from 0 to 3, and those of floats moderate, as ``Case`` draws them.
    """
    rules = _rules(names, has_score=kind == "score")
    if kind == "score":
        text = _drawn(rng, rules, "score", _DEEPEST)
    else:
        text = f"key == 0 or {_drawn(rng, rules, 'condition', _DEEPEST)}"
    read = Expression.of(f"{kind}_mod", text).captured
    return text, {name: form for name, form in names.items() if name in read}


def _rules(names: Mapping[str, Form], *, has_score: bool) -> dict[str, list[str]]:
    """The grammar with these names, and without the score where there is none."""
    rules = {symbol: list(templates) for symbol, templates in _GRAMMAR.items()}
    captured: dict[str, list[str]] = {f"captured {x}": [] for x in (*_KINDS.values(), "divisor")}
    for name, form in names.items():
        if not isinstance(form, str):
            kind = {bool: "bool", int: "whole", float: "number"}[type(form)]
            captured[f"captured {kind}"].append(name)
            continue
        dtype, _, axes = form.rstrip("]").partition("[")
        sizes = axes.split(",")
        reading = f"{name}[{', '.join(f'{{[{size}]}}' for size in sizes)}]"
        kind = "number" if dtype == "bf16" else _KINDS[dtype[0]]
        captured[f"captured {kind}"].append(reading)
        if kind == "whole":
            captured["captured divisor"].append(reading)
        for size in filter(str.isdecimal, sizes):
            rules[f"[{size}]"] = [f"min({{place}}, {int(size) - 1})", f"abs(position) % {size}"]
    missing = [f"{{{symbol}" for symbol, readings in captured.items() if not readings]
    missing += [] if has_score else ["score"]
    for symbol, templates in rules.items():
        rules[symbol] = [x for x in templates if not any(word in x for word in missing)]
    return rules | captured


def _drawn(rng: random.Random, rules: Mapping[str, list[str]], symbol: str, depth: int) -> str:
    """A text for a symbol; ``depth`` is how many more may be inside each other."""
    if symbol in _SIMPLE and depth == 0:
        symbol = _SIMPLE[symbol]
    elif symbol in _SIMPLE:
        depth -= 1
    if symbol == "comparison":
        depth = 1
    template = rng.choice(rules[symbol])
    found = dict.fromkeys(_SYMBOL.findall(template))
    texts = {x: _drawn(rng, rules, x.partition("/")[0], depth) for x in found}
    return _SYMBOL.sub(lambda match: texts[match[1]], template)
