"""Arguments of ``cupyfa.attention`` that calls on parts of a problem cannot have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cupyfa.call.keywords import DTYPES, read_out, split_keywords
from cupyfa.errors import Unsupported, described
from cupyfa.problem import optional_inputs
from cupyfa.problem.options import AttentionOptions, OptionKeywords
from cupyfa.problem.problem import Problem

# Arguments that are arrays, and what to give instead.
_ARRAYS = {x: optional_inputs.OPTIONAL_INPUTS[x].in_parts for x in optional_inputs.KEYWORDS}


def options_of(
    function: Callable[..., Any], keywords: Mapping[str, Any], out: Any = None
) -> OptionKeywords:
    """The options among the keyword arguments of a call on parts.

    out: the dtype of the output, if it is given. Raises for arguments that such calls cannot have.
    """
    for name, remedy in _REMEDIES.items():
        if keywords.get(name) is not None:
            raise Unsupported(
                f"{name} is {described(keywords[name])}, which calls on parts do not take; {remedy}"
            )
    if out is not None and not isinstance(out, DTYPES):
        raise Unsupported(f"out is {described(out)}, and results are new arrays; give its dtype")
    given, asked = split_keywords(function, keywords)
    for name, remedy in _ARRAYS.items():
        if name in given:
            raise Unsupported(
                f"{name} is {described(given[name])}, and parts read no arrays besides q, k and v; "
                f"{remedy}"
            )
    return read_out(out, None, asked)[1]


_REMEDIES = {
    "layout": "arrays are [batch, heads, rows, d]: give q.swapaxes(1, 2)",
    "return_max": "they are merged by lse alone: leave it out",
    "append": "a KVCache is not divided: leave it out",
    "wrt": "they give the gradients of q, k and v: leave it out",
    "grads": "results are new arrays: leave it out",
}


def without_dropout(options: AttentionOptions) -> AttentionOptions:
    """The options. Raises Unsupported if they drop weights."""
    if options.dropout:
        raise Unsupported(
            f"dropout is {options.dropout}, and the numbers of queries and keys in the whole "
            "problem decide which weights it drops, but parts count from 0; leave it out"
        )
    return options


def without_e4m3(p: Problem) -> Problem:
    """The problem. Raises Unsupported if its inputs are e4m3."""
    if p.dtype.result:
        raise Unsupported(
            f"q, k and v are {p.dtype.name}, which calls on parts do not take; convert them to "
            "float16 or bfloat16"
        )
    return p


def numbers(captured: Mapping[str, Any] | None) -> tuple[optional_inputs.Operand, ...]:
    """The numbers that expressions read. Raises Unsupported for arrays."""
    if captured is None:
        return ()
    if not isinstance(captured, Mapping):
        raise TypeError(f'captured is {described(captured)}; give {{"name": number}}')
    found = [optional_inputs.operand(name, x) for name, x in captured.items()]
    for x in found:
        if x.is_array:
            raise Unsupported(
                f"captured {x.name} is an array of shape {x.shape}, and parts read no arrays "
                "besides q, k and v; give numbers, or a formula in the text"
            )
    return tuple(sorted(found, key=lambda x: x.name))
