"""Combines options so that the cases of a check meet every pair of options that a kernel supports.

A fault may need two options at once, a sink with packed sequences for example. The cases of a check
have few options each, and choosing these independently leaves half of the pairs unmet. Here each
combination begins with a pair that no case has met, and takes the options that meet most others.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

from cupyfa.errors import Unsupported
from cupyfa.lab.verify import transforms
from cupyfa.lab.verify.case import Case
from cupyfa.lab.verify.random_expressions import CAPTURED, draw_expression
from cupyfa.lab.verify.random_modifiers import MODIFIED, draw_form, sum_of_functions
from cupyfa.lab.verify.sizes import some_lengths
from cupyfa.problem import shape_language
from cupyfa.problem.optional_inputs import (
    ALIBI,
    BIAS,
    DESCALES,
    DLSE,
    MAPS,
    MASK,
    PADDED,
    ROW_MAX,
    SEEDS,
    SINK,
)
from cupyfa.problem.options import OPTIONS
from cupyfa.problem.problem import TEXTS, Problem

Pair = tuple[str, str]  # in alphabetical order
# Draws a score_mod or mask_mod, and the forms of what it captures.
DrawText = Callable[[random.Random, str], tuple[str, Mapping[str, Any]]]

_MOST = 16  # largest number of options in a combination
_OF_STORED = 3  # weight of a pair with a way of storing rows, as it excludes the other ways
_STARTS = 40  # number of combinations of which the one with most unmet pairs is taken
# Ways of storing rows, which exclude each other, and the kinds of groups of samples that have them.
_KINDS = {
    **{"pages": "pages", "new tokens": "new tokens"},
    **{"lengths": "padded", "sequences": "sequences of texts"},
}
_ARRAYS = {"ALiBi": ALIBI, "bias": BIAS, "mask array": MASK, "sink": SINK}
_GRADIENT = "gradient of "
_CAPTURED = "captured arrays"
_SLOPE = "slope"  # name of the captured array whose gradient is drawn
_GRADIENTS = {f"{_GRADIENT}{x}": x for x in (*_ARRAYS, _CAPTURED) if x != "mask array"}
# Options without which another one has no effect: at least one of them is added.
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "offset": ("mask", "window"),
    "block mask": ("mask array", "mask_mod"),
    "seed in memory": ("dropout",),
    **{name: ("score_mod" if x == _CAPTURED else x,) for name, x in _GRADIENTS.items()},
}
_SEEDS = ("i64[1]", "u64[1]", "i32[1]", "u32[1]")
_SIDES = ((1, 1), (1, None))
_TYPICAL = {"M": 64, "N": 64, "d": 16}  # sizes for which combinations are tried


def options_of(p: Problem) -> dict[str, bool]:
    """Returns which options and optional inputs a problem has."""
    arrays = {x.name for x in p.operands}
    return {
        "sequences": p.lengths is not None,
        "mask": p.right is not None,
        "window": p.left is not None,
        "offset": p.offset is not None,
        "float32 results": p.out_dtype != p.dtype,
        "GQA": p.group > 1,
        **{name: name in p.options.changed for name in (*other_options(), *TEXTS)},
        "ALiBi": ALIBI in arrays,
        "bias": BIAS in arrays,
        "descales": bool(arrays & {*DESCALES}),
        "pages": p.pages > 0,
        "lengths": not p.pages and bool(arrays & {*PADDED}),
        "mask array": MASK in arrays,
        "block mask": p.block_mask or bool(arrays & {*MAPS}),
        "sink": SINK in arrays,
        "dropout": p.options.dropout > 0,
        "seed in memory": bool(arrays & {*SEEDS}),
        "gradient of lse": DLSE in arrays,
        "largest scores": ROW_MAX in arrays,
    }


def other_options() -> list[str]:
    """Returns the names of options that define values to try, except options drawn separately."""
    own = ("causal", "window", "scale", "out_dtype")
    return [name for name, option in OPTIONS.items() if option.tried and name not in own]


def pairs_met(case: Case) -> set[Pair]:
    """Returns the pairs of options that a case meets; gradients of arrays are options, too."""
    found = _names_of(case.problem)
    if case.tokens != "cached":
        found.add("new tokens")
    return {*combinations(sorted(found), 2)}


def _names_of(p: Problem) -> set[str]:
    found = {name for name, has in options_of(p).items() if has}
    named = {array: name for name, array in _ARRAYS.items()}
    return found | {_GRADIENT + named.get(x, _CAPTURED) for x in p.wrt}


@dataclass(frozen=True)
class Combination:
    """Names of options, and the dtype of a problem that has all of them."""

    names: frozenset[str]
    dtype: str

    @classmethod
    def of(cls, names: Set[str], dtype: str) -> "Combination":
        """Returns the smallest combination with these options."""
        return cls(_completed(names), dtype)

    @property
    def pairs(self) -> set[Pair]:
        """All pairs of its options."""
        return {*combinations(sorted(self.names), 2)}

    @property
    def kind(self) -> str:
        """The kind of groups of samples that stores rows in this way."""
        return next((kind for name, kind in _KINDS.items() if name in self.names), "combination")

    def problem(self, pick: random.Random, texts: DrawText, **sizes: int) -> Problem:
        """Draws a problem that has the options, except an offset and how rows are stored.

        A ragged batch gets lengths that drawn ones have to replace. texts: draws expressions, one
        of TEXTS_IN_TURN. Raises ValueError or Unsupported for options that exclude each other.
        """
        given: dict[str, Any] = {"batch": 2, "heads": 16, **sizes, "dtype": self.dtype}
        for name, draw in _DRAWN.items():
            if name in self.names:
                given |= draw(pick)
        given |= self._texts(pick, texts)
        if "offset" in self.names and "causal" in given:
            given["causal"] = "bottom-right"  # the other mask has an offset of its own
        p = Problem.of_sizes(**given)
        if "sequences" in self.names:
            p = transforms.make_ragged(p, some_lengths(used=pick.random() < 0.5))
        p = p.in_blocks("block mask" in self.names)
        asked = [x for name, x in _GRADIENTS.items() if name in self.names]
        named = {**_ARRAYS, _CAPTURED: _SLOPE}
        return transforms.differentiate(p, [named[x] for x in asked]) if asked else p

    def typical(self) -> Problem:
        """Returns a problem of small sizes with all options, for which kernels can be asked."""
        p = self.problem(random.Random(0), _text_of_places, **_TYPICAL)
        if "offset" in self.names:
            p = p.with_options(offset=1)
        if self.names & {"pages", "new tokens"}:
            p = p.in_pages(16)
        return transforms.pad(p, "qk") if "lengths" in self.names else p

    def _texts(self, pick: random.Random, draw: DrawText) -> dict[str, Any]:
        """Draws the expressions and what they capture."""
        found, captured = dict[str, Any](), dict[str, Any]()
        for name in TEXTS:
            if name in self.names:
                found[name], read = draw(pick, name)
                captured |= read
        if f"{_GRADIENT}{_CAPTURED}" in self.names and "score_mod" in found:
            found["score_mod"] += f" + 0.1 * {_SLOPE}[head]"
            captured[_SLOPE] = CAPTURED[_SLOPE]
        return {**found, "captured": captured} if captured else found


def _text_of_places(pick: random.Random, name: str) -> tuple[str, Mapping[str, Any]]:
    return ("score + 0.1 * (key - query)" if name == "score_mod" else "key <= query"), {}


def _usual_text(pick: random.Random, name: str) -> tuple[str, Mapping[str, Any]]:
    chosen = pick.choice([x for x in MODIFIED if {name} <= x.keys() <= {name, "captured"}])
    return chosen[name], chosen.get("captured", {})


def _random_text(pick: random.Random, name: str) -> tuple[str, Mapping[str, Any]]:
    return draw_expression(pick, "score" if name == "score_mod" else "mask")


def _text_of_functions(pick: random.Random, name: str) -> tuple[str, Mapping[str, Any]]:
    """Draws a sum of all functions, moderate so that no weight is near 1 and no gradient near 0."""
    if name != "score_mod":
        return _usual_text(pick, name)
    return f"score + {sum_of_functions(pick)}", {}


# Successive combinations have expressions as in models, of the whole grammar, of all functions.
TEXTS_IN_TURN = (_usual_text, _random_text, _text_of_functions)


def _dropout(pick: random.Random) -> dict[str, Any]:
    numbers = pick.randrange(2**64), pick.randrange(2**32)
    return {"dropout": pick.choice((0.05, 0.5)), **dict(zip(SEEDS, numbers))}


def _form_of(array: str) -> Callable[[random.Random], dict[str, Any]]:
    return lambda pick: {array: draw_form(pick, array, in_blocks=False)}


def _tried(name: str) -> Callable[[random.Random], dict[str, Any]]:
    return lambda pick: {name: pick.choice(OPTIONS[name].tried)}


# Draws the keywords of Problem.of_sizes for each option, in this order.
_DRAWN: Mapping[str, Callable[[random.Random], dict[str, Any]]] = {
    "mask": _tried("causal"),
    "window": lambda pick: {"window": pick.choice(_SIDES)},
    "float32 results": lambda pick: {"out_dtype": "float32"},
    **{name: _tried(name) for name in other_options()},
    **{name: _form_of(array) for name, array in _ARRAYS.items()},
    "dropout": _dropout,
    "seed in memory": lambda pick: dict(zip(SEEDS, pick.sample(_SEEDS, len(SEEDS)))),
    "gradient of lse": lambda pick: {DLSE: True},
    "largest scores": lambda pick: {shape_language.RETURN_MAX: True},
}
_OF_BOTH = [*_DRAWN, *TEXTS, "offset", "block mask", *_KINDS, *_GRADIENTS]
_OF_ONE = {"forward": {"gradient of lse", *_GRADIENTS}, "backward": {"largest scores"}}


class Combiner:
    """Draws combinations of the options that a kernel supports, each with pairs yet unmet.

    supports: returns whether the kernel can compute a problem; it may raise Unsupported.
    dtypes: the dtypes of the combinations.
    """

    def __init__(
        self, operation: str, dtypes: Iterable[str], supports: Callable[[Problem], bool]
    ) -> None:
        self._names = sorted(x for x in _OF_BOTH if x not in _OF_ONE[_other(operation)])
        self._every_dtype, self._supports = list(dtypes), supports

    @cached_property
    def _dtypes(self) -> dict[str, set[str]]:
        """The dtypes with which each option is supported."""
        return {
            name: {x for x in self._every_dtype if self._is_supported(Combination.of({name}, x))}
            for name in self._names
        }

    @cached_property
    def pairs(self) -> set[Pair]:
        """All pairs of options that some problem of the kernel can have."""
        found = set()
        for a, b in combinations(self._names, 2):
            both = sorted(self._dtypes[a] & self._dtypes[b])
            if both and self._is_supported(Combination.of({a, b}, both[0])):
                found.add((a, b))
        return found

    def draw(self, met: Set[Pair], pick: random.Random) -> Combination | None:
        """Draws a combination with many pairs that are not in ``met``; None if all of them are."""
        unmet = self.pairs - met
        begun = pick.sample(sorted(unmet), min(len(unmet), _STARTS))
        grown = [self._grown(pair, unmet, pick) for pair in begun]
        grown.sort(key=lambda x: _worth(x.pairs & unmet), reverse=True)
        return next(filter(self._is_supported, grown), None)

    def _grown(self, pair: Pair, unmet: Set[Pair], pick: random.Random) -> Combination:
        """Adds to a pair the option that meets most unmet pairs, again and again."""
        names, left = _completed({*pair}), pick.sample(self._names, len(self._names))

        def gain(name: str) -> int:
            return _worth(unmet & {_pair(name, x) for x in names})

        while len(names) < _MOST:
            left = [x for x in left if self._fits(_completed(names | {x}))]
            best = max(left, key=gain, default=None)
            if best is None or not gain(best):
                break
            left.remove(best)
            names = _completed(names | {best})
        return Combination(names, pick.choice(sorted(self._dtypes_of(names))))

    def _fits(self, names: Set[str]) -> bool:
        """Returns whether a dtype supports all options, and every two of them can be combined."""
        return bool(self._dtypes_of(names)) and {*combinations(sorted(names), 2)} <= self.pairs

    def _dtypes_of(self, names: Iterable[str]) -> set[str]:
        return set.intersection(*(self._dtypes[x] for x in names))

    def _is_supported(self, combination: Combination) -> bool:
        if len(combination.names & {*_KINDS}) > 1:
            return False
        try:
            p = combination.typical()
            # Some options are dropped: float32 results of float32 inputs, for example.
            has_all = combination.names - {"new tokens"} <= _names_of(p)
            return has_all and self._supports(p)
        except (Unsupported, ValueError):
            return False


def _pair(a: str, b: str) -> Pair:
    return (a, b) if a < b else (b, a)


def _worth(pairs: Set[Pair]) -> int:
    """Weighs pairs: few combinations have a certain way of storing rows, as they exclude others."""
    return sum(_OF_STORED if {*pair} & {*_KINDS} else 1 for pair in pairs)


def _other(operation: str) -> str:
    return "backward" if operation == "backward" else "forward"


def _completed(names: Set[str]) -> frozenset[str]:
    """Adds the options that others need."""
    found = {*names}
    for name, needed in _NEEDED.items():
        if name in found and not found & {*needed}:
            found.add(needed[0])
    return frozenset(found)
