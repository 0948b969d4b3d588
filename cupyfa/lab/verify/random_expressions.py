"""Draws random expressions of the whole grammar, with the arrays and numbers that they capture.

Whatever the problem's sizes, scores stay moderate, indices stay inside their arrays and divisors
stay away from 0. The results of every expression can therefore be compared with the reference.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from cupyfa.score.expressions import Expression
from cupyfa.score.functions import FUNCTIONS

Form = str | bool | int | float  # a number, or an array's dtype and axes, such as "f32[heads]"
# Arrays of every dtype, and numbers. Some axes have named sizes, others have fixed sizes.
CAPTURED: Mapping[str, Form] = {
    **{"slope": "f32[heads]", "half": "f16[N]", "brain": "bf16[M]", "wide": "f64[heads,4]"},
    **{"table": "f32[4,4]", "doc": "i32[M|N]", "tiny": "i8[heads]", "byte": "u8[N]"},
    **{"short": "i16[M]", "ushort": "u16[N]", "uint": "u32[batch]", "long": "i64[batch]"},
    **{"ulong": "u64[N]", "seen": "bool[batch,N]", "open": "bool[M]"},
    **{"gain": 0.75, "shift": -0.3, "count": 5, "distant": 2**40, "flag": True},
}
_PLACES: dict[str, tuple[str, ...]] = {
    **{"batch": ("batch",), "heads": ("head",), "M": ("query",), "N": ("key",)},
    "M|N": ("query", "key"),
}
_OF_PLACES = ("batch", "head", "query", "key", "position", "queries", "keys")
_OF_PAIRS = ("query", "key", "position")
_MULTIPLES = ("query * 2", "key * -3")  # linear in the places
_OPERANDS = (_OF_PAIRS, ("distant", "long[batch]", "ulong[key]"))  # integers of 32 and of 64 bits
_DIVISORS = ("-1", "-3", "5", "(key + 1)", "(1 + abs(long[batch]))")
_KINDS = {"b": "bool", "i": "whole", "u": "whole", "f": "number"}
_ALWAYS_SEEN = ("key % 3 != 1", "key % 3 != 1", "key == 0")  # what a mask does not hide, by weight
_DEEPEST = 3  # maximum nesting depth of functions and operators
_OF_ONE = [x for x in FUNCTIONS.values() if len(x.arguments) == 1]
_OF_SMALL = [x.name for x in _OF_ONE if x.small_near_0]


def draw_expression(
    rng: random.Random,
    kind: Literal["score", "mask"],
    names: Mapping[str, Form] = CAPTURED,
) -> tuple[str, dict[str, Form]]:
    """Draws an expression and returns it with the forms of the ``names`` that it reads.

    rng: the only source of randomness; equal states yield equal expressions.
    kind: "score" draws a ``score_mod``, which reads the score; "mask" draws a ``mask_mod``,
        which masks some pairs, but never all keys of a query.
    names: the arrays and numbers that the expression may capture, by name. A form is a number or
        a string that ``shape_language`` accepts under "captured", such as "f32[heads]",
        "bool[batch,N]" or "i32[M|N]". An axis with a named size is indexed only by the index of
        that size, so arrays fit problems of any size; an axis of fixed size accepts any index.

    Pass the results to ``Problem.of_sizes(..., score_mod=text, captured=captured)``. Integer arrays
    must hold numbers from 0 to 3, and float arrays moderate numbers, as ``Case`` draws them.
    """
    drawer = _Drawer(rng, names, has_score=kind == "score")
    text = drawer.score() if kind == "score" else drawer.mask()
    read = Expression.of(f"{kind}_mod", text).captured
    return text, {name: form for name, form in names.items() if name in read}


def draw_integers(rng: random.Random) -> tuple[str, dict[str, Form]]:
    """Draws a sum with all operators of integers, of 32 and of 64 bits.

    Returns the sum, whose magnitude stays below 5, and the forms of CAPTURED that it reads.
    """
    drawer = _Drawer(rng, CAPTURED, has_score=False)
    sums = (" + ".join(f"({x}) % 7" for x in drawer.operators_of_integers(of)) for of in _OPERANDS)
    text = " + ".join(f"0.05 * ({x})" for x in sums)
    read = Expression.of("score_mod", text).captured
    return text, {name: form for name, form in CAPTURED.items() if name in read}


class _Drawer:
    """Draws expressions of type number, integer or condition, up to a nesting depth."""

    def __init__(self, rng: random.Random, names: Mapping[str, Form], has_score: bool) -> None:
        self.rng = rng
        self.names = names
        self.has_score = has_score

    def score(self) -> str:
        """Draws an expression of the score whose values stay moderate."""
        a = self.number(_DEEPEST)
        whole = f"max(min({self.number(_DEEPEST)}, 20), -20)"
        return self._any(
            *[lambda: f"score + {a}"] * 2,
            lambda: f"score * sigmoid({a}) - {whole}",
            lambda: f"where({self.condition(2)}, score, {whole})",
            lambda: f"score if {self.condition(2)} else {whole}",
            lambda: f"0.5 * score + {whole}",
            self._not_a_number,
        )

    def mask(self) -> str:
        """Draws a condition that holds for at least two thirds of the keys, or at least for one."""
        return f"{self._pick(_ALWAYS_SEEN)} or {self.condition(_DEEPEST)}"

    def number(self, depth: int) -> str:
        """Draws a numeric expression whose magnitude stays below about 100."""
        if depth <= 0:
            return self._leaf()
        return self._any(
            *[lambda: self._function(depth)] * 4,
            *[lambda: self._of_small(depth)] * 2,
            *[lambda: self._arithmetic(depth)] * 3,
            lambda: f"{self._pick(('min', 'max'))}({self.number(depth - 1)}, {self._leaf()})",
            lambda: f"where({self.condition(depth - 1)}, {self.number(depth - 1)}, {self._leaf()})",
            lambda: f"({self._leaf()} if {self.condition(depth - 1)} else {self._leaf()})",
            lambda: f"({self.whole(depth - 1)}) % {self._pick((3, 5, 8))} * 0.25",
            self._leaf,
        )

    def whole(self, depth: int) -> str:
        """Draws an integer expression whose values fit in 64 bits."""
        if depth <= 0:
            return self._whole_leaf()
        a, b = self.whole(depth - 1), self._whole_leaf()
        return self._any(
            lambda: f"({a} {self._pick('+-')} {b})",
            lambda: f"({a} * {self._pick(('3', '-7', '(head - 1)'))})",
            lambda: f"({a}) {self._pick(('//', '%'))} {self._divisor()}",
            lambda: f"{self._pick(('min', 'max'))}({a}, {b})",
            lambda: f"abs({a})",
            lambda: f"-({a})",
            lambda: f"(({a}) % 1000) ** 2",
            lambda: f"where({self.condition(depth - 1)}, {a}, {b})",
        )

    def operators_of_integers(self, operands: Sequence[str]) -> list[str]:
        """Draws each binary operator with one of the operands on the left.

        Also draws a division by -1, and the difference of an operand and a multiple.
        """
        found = []
        for operator in ("+", "-", "*", "//", "%"):
            a = self._pick(operands)
            divides = operator in ("//", "%")
            b = self._pick(_DIVISORS if divides else [x for x in _OF_PAIRS if x != a])
            found.append(f"{a} {operator} {b}")
        sides = self.rng.sample((self._pick(_MULTIPLES), self._pick(operands)), 2)
        return [*found, f"{self._pick(operands)} // -1", " - ".join(sides)]

    def condition(self, depth: int) -> str:
        """Draws a condition that holds for some (query, key) pairs."""
        if depth <= 0:
            return self._compared()
        a, b = self.condition(depth - 1), self._compared()
        return self._any(
            *[self._compared] * 3,
            lambda: f"({a} {self._pick(('and', 'or', '&', '|'))} {b})",
            lambda: f"{self._pick(('not ', '~'))}({a})",
            lambda: f"(({a}) {self._pick(('==', '!='))} {self._flag()})",
            lambda: f"({self._flag()} {self._pick(('&', '|'))} {b})",
            lambda: f"where({b}, {self._flag()}, {a})",
        )

    def _function(self, depth: int) -> str:
        argument = self.number(depth - 1)
        function = self._pick(_OF_ONE)
        if function.name in ("sin", "cos"):
            argument = f"{self._pick((1, 20))} * {argument}"
        return f"{function.name}({function.drawn.format(argument)})"

    def _of_small(self, depth: int) -> str:
        """Draws a function of a tiny argument, multiplied so that the result is moderate again."""
        large = self._pick(("1e3", "3e4", "1e6", "1e8"))
        inner = f"min(max({self.number(depth - 1)}, -9), 9) / {large}"
        return f"{large} * {self._pick(_OF_SMALL)}({inner})"

    def _arithmetic(self, depth: int) -> str:
        a, b = self.number(depth - 1), self._leaf()
        return self._any(
            lambda: f"({a} {self._pick('+-')} {b})",
            lambda: f"0.5 * ({a} - {b}) * {b}",
            lambda: f"({a} / (2 + abs({b})))",
            lambda: f"tanh({a}) ** 2",
            lambda: f"-({a})",
        )

    def _not_a_number(self) -> str:
        """Draws a selection that depends on NaN: min and max propagate it, and NaN != NaN."""
        lost = self._pick(("log(-1 - abs(score))", "sqrt(-1 - abs(score))", "rsqrt(-1 - key)"))
        sides = self.rng.sample((lost, self._pick(("score", "0.5", "key"))), 2)
        either = f"{self._pick(('min', 'max'))}({', '.join(sides)})"
        return f"where({either} == {either}, {self.number(1)}, score - 1)"

    def _leaf(self) -> str:
        scores = ["score"] * 4 * self.has_score
        whole = f"min({self._whole_leaf()}, 8)"
        constant = self._pick(("0.1", "2.5", "1", "0.0", "-1.5", "1e-6", "3"))
        return self._pick((*scores, *self._of_kind("number", 3), constant, whole))

    def _whole_leaf(self) -> str:
        places = self._pick(_OF_PLACES)
        few = self._pick((places, "(position - key)", str(self.rng.randrange(1, 9))))
        return self._pick((few, *self._of_kind("whole", 1)))

    def _divisor(self) -> str:
        of_arrays = self._of_kind("whole", 1, arrays=True)
        positive = [f"(1 + abs({x}))" for x in of_arrays]
        return self._pick((*positive, "2", "3", "-3", "8", "-5", "keys", "(key + 1)"))

    def _flag(self) -> str:
        return self._pick((*self._of_kind("bool", 2), "True", "(key < query)"))

    def _compared(self) -> str:
        sign = self._pick(("<", "<=", ">", ">=", "==", "!="))
        a, b, c = (self.whole(1) for _ in range(3))
        return self._any(
            lambda: f"({a} {sign} {b})",
            lambda: f"({a} {sign} {c} < {b} + 40)",
            lambda: f"(({a}) % 5 {sign} {self.rng.randrange(5)})",
            lambda: f"({self.number(1)} {sign} {self._leaf()})",
            self._flag,
        )

    def _of_kind(self, kind: str, count: int, *, arrays: bool = False) -> list[str]:
        """Returns expressions that read up to ``count`` captured arrays or numbers of a kind."""
        able = [
            x
            for x, form in self.names.items()
            if _kind_of(form) == kind and (isinstance(form, str) or not arrays)
        ]
        return [self._reading(x) for x in self.rng.sample(able, min(count, len(able)))]

    def _reading(self, name: str) -> str:
        form = self.names[name]
        if not isinstance(form, str):
            return name
        axes = form[form.index("[") + 1 : -1].split(",")
        return f"{name}[{', '.join(map(self._index, axes))}]"

    def _index(self, axis: str) -> str:
        if axis in _PLACES:
            return self._pick(_PLACES[axis])
        size, place = int(axis), self._pick(_OF_PLACES)
        if place == "position":  # may be negative where there are fewer keys than queries
            place = "abs(position)"
        return self._pick((f"min({place}, {size - 1})", f"abs(position) % {size}"))

    def _any(self, *draw: Callable[[], str]) -> str:
        return self.rng.choice(draw)()

    def _pick(self, of: Any) -> Any:
        return self.rng.choice(of)


def _kind_of(form: Form) -> str:
    if isinstance(form, str):
        return "number" if form.startswith("bf") else _KINDS[form[0]]
    return {bool: "bool", int: "whole", float: "number"}[type(form)]
