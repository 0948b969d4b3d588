"""Implements ``attention``, ``vjp`` and ``backward`` on Sharded arrays, called by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from cupyfa.api import attention, backward
from cupyfa.call.keywords import list_arguments
from cupyfa.distributed.agreed_arguments import agree_on_call
from cupyfa.partition.part_call import split_passes

Pullback = Callable[..., tuple[Any, ...]]
Function = Callable[..., Any]


def attention_of_others(function: Function, arguments: Mapping[str, Any]) -> Any:
    """Implements ``attention`` for this rank's rows. arguments: the call's arguments by name."""
    run, (q, k, v) = agree_on_call(function, "forward", arguments)
    with arguments["q"].group.calling():
        out, lse = run(q, k, v)
    return (out, lse) if arguments["return_lse"] else out


def backward_of_others(function: Function, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Implements ``backward`` for this rank's rows. arguments: the call's arguments by name."""
    of_rows = {name: arguments[name] for name in ("dout", "out", "lse")}
    if arguments["dlse"] is not None:
        of_rows["dlse"] = arguments["dlse"]
    run, (q, k, v, *rows) = agree_on_call(function, "backward", arguments, of_rows)
    with arguments["q"].group.calling():
        return run((q, *rows), k, v)


def vjp_of_others(function: Function, arguments: Mapping[str, Any]) -> tuple[Any, Pullback]:
    """Implements ``vjp`` for this rank's rows. arguments: the call's arguments by name."""
    return_lse, of_forward, of_backward, how = split_passes(list_arguments(function, arguments))
    q, k, v = (arguments[name] for name in "qkv")
    dtype = how.pop("out", None)
    out, lse = attention(q, k, v, return_lse=True, out=dtype, **of_forward, **how)
    pull = partial(_pullback, (q, k, v, out, lse), {**of_backward, **how})
    return ((out, lse) if return_lse else out), pull


def _pullback(
    arrays: tuple[Any, ...], how: Mapping[str, Any], dout: Any, dlse: Any = None
) -> tuple[Any, ...]:
    return backward(dout, *arrays, dlse=dlse, **how)
