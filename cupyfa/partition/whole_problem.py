"""Reads the whole problem of a partitioned call; rejects unsupported arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cupyfa.call.keywords import DTYPES, read_out, split_keywords
from cupyfa.errors import Unsupported, described
from cupyfa.problem import optional_inputs
from cupyfa.problem.options import AttentionOptions
from cupyfa.problem.problem import Problem

_REMEDIES = {
    "layout": "arrays must be [batch, heads, rows, d]: pass q.swapaxes(1, 2)",
    "return_max": "row maxima are not merged: leave return_max out",
    "append": "a KVCache cannot be partitioned: leave append out",
    "wrt": "gradients of q, k and v are always computed; omit wrt",
    "grads": "results are new arrays: leave grads out",
}


def read_problem(
    function: Callable[..., Any],
    arrays: Sequence[Any],
    keywords: Mapping[str, Any],
    out: Any = None,
) -> Problem:
    """Returns the problem of the whole arrays; raises if an argument is not supported.

    keywords: the function's arguments without its kernel choice. out: the output's dtype or None.
    """
    for name, remedy in _REMEDIES.items():
        if keywords.get(name) is not None:
            raise Unsupported(
                f"{name} is {described(keywords[name])}, but partitioned calls do not support "
                f"{name}; {remedy}"
            )
    if out is not None and not isinstance(out, DTYPES):
        raise Unsupported(
            f"out is {described(out)}, but partitioned calls return new arrays; pass a dtype as out"
        )
    given, asked = split_keywords(function, keywords)
    for name in optional_inputs.KEYWORDS:
        if name in given:
            raise Unsupported(
                f"{name} is {described(given[name])}, but partitioned calls support no arrays "
                f"except q, k and v; {optional_inputs.OPTIONAL_INPUTS[name].in_parts}"
            )
    options = AttentionOptions.of(None, read_out(out, None, asked)[1])
    if options.dropout:
        raise Unsupported(
            f"dropout is {options.dropout}, but partitioned calls do not support dropout, which "
            "depends on query and key indices in the whole problem; leave dropout out"
        )
    operands = _captured_numbers(keywords.get("captured"))
    problem = Problem.of(*arrays, options=options, operands=operands)
    if problem.dtype.result:
        raise Unsupported(
            f"q, k and v are {problem.dtype.name}, but partitioned calls do not support this "
            "dtype; convert them to float16 or bfloat16"
        )
    return problem


def _captured_numbers(captured: Any) -> tuple[optional_inputs.Operand, ...]:
    """Returns the numbers that expressions read. Raises Unsupported for arrays."""
    if captured is None:
        return ()
    if not isinstance(captured, Mapping):
        raise TypeError(f'captured is {described(captured)}; pass a dict {{"name": number}}')
    found = [optional_inputs.operand(name, x) for name, x in captured.items()]
    for x in found:
        if x.is_array:
            raise Unsupported(
                f"captured {x.name} is an array of shape {x.shape}, but partitioned calls support "
                "no arrays except q, k and v; pass numbers, or write a formula in the expression"
            )
    return tuple(sorted(found, key=lambda x: x.name))


def require_four_axes(name: str, array: Any) -> None:
    """Raises ValueError for an array that is not [batch, heads, rows, d]."""
    if len(array.shape) != 4:
        raise ValueError(
            f"{name} has shape {tuple(array.shape)}; it must be [batch, heads, rows, d]: "
            f"{name}[None] adds an axis"
        )
