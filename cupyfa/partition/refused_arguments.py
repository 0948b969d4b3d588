"""Arguments of ``cupyfa.attention`` that calls on parts of a problem cannot have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cupyfa.call.keywords import unknown_argument
from cupyfa.errors import Unsupported, described
from cupyfa.problem import optional_inputs
from cupyfa.problem.options import OPTIONS, AttentionOptions
from cupyfa.problem.problem import Problem

# Arguments that are arrays, and what to give instead.
_ARRAYS = {x: optional_inputs.OPTIONAL_INPUTS[x].in_parts for x in optional_inputs.KEYWORDS}


def refuse_others(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raises for arguments that calls on parts cannot have, and for unknown ones."""
    found = {name: x for name, x in given.items() if x is not None}
    for name, remedy in _ARRAYS.items():
        if name in found:
            raise Unsupported(
                f"{name} is {described(found[name])}, and parts read no arrays besides q, k and v; "
                f"{remedy}"
            )
    if not given.keys() <= {*OPTIONS, *_ARRAYS}:
        raise unknown_argument(function, given, (*OPTIONS, *_ARRAYS))


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
