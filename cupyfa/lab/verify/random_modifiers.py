"""Draws score-modifying expressions and arrays for random cases."""

import random
from collections.abc import Callable, Mapping
from typing import Any

from cupyfa.lab.verify.random_expressions import draw_expression, draw_integers
from cupyfa.problem.optional_inputs import MASK, OF_PAIRS, OPTIONAL_INPUTS, OWN_ARRAYS
from cupyfa.score.functions import DIFFERENTIABLE

_CHOSEN: tuple[Mapping[str, Any], ...] = (
    {"alibi_slopes": "h"},
    {"alibi_slopes": "bh", "mask": "b11n"},
    {"bias": "1hmn", "sink": "f16[h]"},
    {"bias": "f16[11mn]", "mask": "1h1n"},
    {"bias": "f32[bhm1]", "alibi_slopes": "bf16[h]"},
    {"bias": "b1mn", "mask_mod": "key <= position + 3"},
    {"mask": "bhmn", "sink": "bh"},
    {"score_mod": "score + slope[head] * (key - query)", "captured": {"slope": "f32[heads]"}},
    {"score_mod": "score + table[head, min(abs(position - key) // 4, 15)]"}  # like T5's bias
    | {"captured": {"table": "f32[heads,16]"}},
    {"score_mod": "cap * tanh(score / cap) + 0.1 * sin(key)", "captured": {"cap": 4.0}},
    {"score_mod": "max(score, -1.5) * x[head]", "captured": {"x": "f16[heads]"}},
    {"score_mod": "score if seen[batch, key] else score - 2"}
    | {"captured": {"seen": "bool[batch,N]"}},
    {"mask_mod": "doc[query] == doc[key]", "captured": {"doc": "i32[M|N]"}},
    {"mask_mod": "key <= position or key < prefix[batch]", "captured": {"prefix": "i64[batch]"}},
    {"mask_mod": "(position - key) % 2 == 0 or abs(position - key) < 8"},
    {"bias": "bf16[1hmn]", "mask": "b1mn", "alibi_slopes": "h"}
    | {"score_mod": "score + table[doc[key], head]", "mask_mod": "doc[query] <= doc[key]"}
    | {"captured": {"table": "f64[3,heads]", "doc": "u8[M|N]"}},
)
# Each optional array that no choice above contains is tried alone, in its usual form.
MODIFIED = (
    *_CHOSEN,
    *({x: OPTIONAL_INPUTS[x].usual_axes} for x in OWN_ARRAYS if not any(x in y for y in _CHOSEN)),
)
OF_SEQUENCES: tuple[Mapping[str, Any], ...] = (
    {},
    *(x for x in MODIFIED if not x.keys() & {*OF_PAIRS}),
)
# All differentiable functions, and selections that depend on NaN.
_FUNCTIONS = [f"{name}({x.drawn})" for name, x in DIFFERENTIABLE.items()]
_COMPARED = ("<", "<=", "==")
_LOST = "log(-1 - abs(score))"  # always NaN
_NAN_WINS = (
    f"min({{}}, {_LOST})",
    f"min({_LOST}, {{}})",
    f"max({{}}, {_LOST})",
    f"max({_LOST}, {{}})",
)
# Close to the lowest float32: a row's lse, which gradients read in float32, may be this low.
_LOWEST = "-3.299999965482712e+38"
_ARGUMENTS = ("score", "score - 0.5", "0.3 * score + 0.7", "score + 0.01 * (key - query)")
_FEW_ARGUMENTS = 0.2  # weight of each function in the sum of all functions
_HEADS = ("h", "bh")
_BIASES = ("bhmn", "1hmn", "b1mn", "11mn", "bhm1", "1h1n", "b11n")
_MASKS = ("bhmn", "1hmn", "11mn", "b11n", "1h1n")
_FLOATS = ("", "f16", "bf16", "f32", "f64")
_SHARES = {False: 0.5, True: 0.6}  # of draws that have an array of heads, and an array of pairs


def some_expressions(pick: random.Random) -> dict[str, Any]:
    """Draws a score_mod and possibly a mask_mod, with the arrays and numbers that they capture.

    The score_mod ends with weighted sums of all differentiable functions, of all operators of
    integers, and of all comparisons.
    """
    score, read = draw_expression(pick, "score")
    whole, of_integers = draw_integers(pick)
    read |= of_integers
    score = f"{score} + ({_of_functions(pick)}) + ({whole}) + {_of_comparisons()}"
    if pick.random() < 0.3:  # in one head, because rows of such scores alone have wide bounds
        some = "head == 0 and batch == 0 and (query % 4 == 1 or key % 5 == 0)"
        score = f"where({some}, {_LOWEST}, {score})"
    if pick.random() < 0.5:
        return {"score_mod": score, "captured": read}
    mask, more = draw_expression(pick, "mask")
    return {"score_mod": score, "mask_mod": mask, "captured": {**read, **more}}


def sum_of_functions(pick: random.Random) -> str:
    """Draws a weighted sum of all differentiable functions of the score."""
    return " + ".join(_functions(pick))


def _of_functions(pick: random.Random) -> str:
    every = _functions(pick)
    for x in _NAN_WINS:
        either = x.format(pick.choice(_ARGUMENTS))
        every.append(f"where({either} == {either}, 1, 0.1 * score)")
    return " + ".join(every)


def _of_comparisons() -> str:
    """Returns a sum of comparisons of integers that may be equal, and of numbers.

    Kernels compute the other comparisons by these, with exchanged sides or the opposite result.
    """
    integers = [f"where(key {sign} position, 0.2, 0)" for sign in _COMPARED]
    numbers = [f"where(score {sign} 0.3, 0.2, 0)" for sign in _COMPARED[:2]]
    return f"({' + '.join((*integers, *numbers))})"


def _functions(pick: random.Random) -> list[str]:
    return [f"{_FEW_ARGUMENTS} * {x.format(pick.choice(_ARGUMENTS))}" for x in _FUNCTIONS]


def some_arrays(
    pick: random.Random, has: Callable[[str], bool], *, in_blocks: bool
) -> dict[str, Any]:
    """Draws forms for a random subset of the optional arrays.

    has: returns whether the kernel has a feature; arrays that need a feature are always drawn if it
        has. in_blocks: always draws a mask, with separate elements for each head, for a block mask.
    """
    found: dict[str, Any] = {}
    # Arrays that need a feature are drawn first.
    for name in sorted(OWN_ARRAYS, key=lambda x: not OPTIONAL_INPUTS[x].feature):
        if feature := OPTIONAL_INPUTS[name].feature:
            is_drawn = has(feature)
        else:
            is_drawn = (name == MASK and in_blocks) or pick.random() < _SHARES[name in OF_PAIRS]
        if is_drawn:
            found[name] = draw_form(pick, name, in_blocks=in_blocks)
    return found or {OWN_ARRAYS[0]: OPTIONAL_INPUTS[OWN_ARRAYS[0]].usual_axes}


def draw_form(pick: random.Random, name: str, *, in_blocks: bool) -> str:
    """Draws a form of an array: its axes, with a random dtype or the default one."""
    if name == MASK:
        return pick.choice(_MASKS[:2] if in_blocks else _MASKS)
    axes = _BIASES if name in OF_PAIRS else _HEADS
    if OPTIONAL_INPUTS[name].dtype != "float":  # the array has one dtype
        return pick.choice(axes)
    short, letters = pick.choice(_FLOATS), pick.choice(axes)
    return f"{short}[{letters}]" if short else letters
