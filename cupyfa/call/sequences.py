"""Calls on lists of arrays, which are packed into ragged batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from cupyfa.call.keywords import OF_SCORES, given_arguments, read_tiles, split_keywords
from cupyfa.call.pullback import read_pullback
from cupyfa.errors import Unsupported, described
from cupyfa.planner import choose_kernel as planning
from cupyfa.problem.options import AttentionOptions, read_flag
from cupyfa.problem.structured_arrays import Packed
from cupyfa.runtime import ragged
from cupyfa.runtime.choose_backend import backend_named


def _pack_lists(q: Any, k: Any, v: Any, layout: str) -> tuple[list[Packed], list[np.ndarray]]:
    """Packs lists of arrays; returns the Packed arrays and the offsets of q and k."""
    counts = {name: len(x) for name, x in zip("qkv", (q, k, v))}
    if len({*counts.values()}) > 1:
        sizes = ", ".join(f"{name} has {n} arrays" for name, n in counts.items())
        raise ValueError(f"{sizes}; pass lists of equal length")
    arrays, offsets = zip(*(ragged.packed(*x, layout) for x in (("q", q), ("k", k), ("v", v))))
    if wrong := np.flatnonzero(np.diff(offsets[1]) != np.diff(offsets[2])).tolist():
        rows = [int(np.diff(x)[wrong[0]]) for x in offsets[1:]]
        raise ValueError(
            f"k[{wrong[0]}] has {rows[0]} rows, but v[{wrong[0]}] has {rows[1]}; both must have "
            "the same number of rows"
        )
    rows, keys = offsets[:2]
    return [Packed(x, of) for x, of in zip(arrays, (rows, keys, keys))], [rows, keys]


def _check_empty_call(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Checks the non-array arguments of a call on empty lists."""
    _, asked = split_keywords(function, {x: y for x, y in given.items() if x in OF_SCORES})
    AttentionOptions.of(None, asked)
    planning.check_named(given.get("kernel", "auto"), "forward", read_tiles(given.get("tiles")))
    read_pullback(
        given.get("return_lse", False),
        given.get("deterministic", False),
        given.get("backward_kernel", "auto"),
        given.get("backward_tiles"),
    )
    read_flag("check", given.get("check", False))
    backend_named(given.get("backend", "auto"))


def attention_of_others(attention: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Implements ``attention`` on lists of arrays. arguments: the call's arguments by name."""
    given = given_arguments(attention, arguments)
    q, k, v = (arguments[name] for name in "qkv")
    _refuse_on_lists(attention, given)
    layout, out = given.pop("layout", "bhsd"), given.pop("out", None)
    if not any(map(len, (q, k, v))):
        _check_empty_call(attention, given)
        made = ragged.parts(None, [0], "bshd", out)
        others: list[Any] = [[] for name in ("return_lse", "return_max") if given.get(name)]
        return (made, *others) if others else made
    arrays, (rows, _) = _pack_lists(q, k, v, layout)
    if not isinstance(out, list | tuple):  # out is a dtype or None
        given, out = {**given, "out": out}, None
    found = attention(*arrays, **given)
    if not isinstance(found, tuple):
        return ragged.parts(found, rows, layout, out)
    made, *others = found
    return ragged.parts(made, rows, layout, out), *(ragged.row_parts(x, rows) for x in others)


def vjp_of_others(
    vjp: Callable[..., Any], arguments: Mapping[str, Any]
) -> tuple[Any, Callable[..., tuple[Any, ...]]]:
    """Implements ``vjp`` on lists of arrays. arguments: the call's arguments by name."""
    given = given_arguments(vjp, arguments)
    q, k, v = (arguments[name] for name in "qkv")
    _refuse_on_lists(vjp, given)
    layout = given.pop("layout", "bhsd")
    return_lse = read_flag("return_lse", given.pop("return_lse", False))
    if not any(map(len, (q, k, v))):
        _check_empty_call(vjp, given)
        return (([], []) if return_lse else []), _pull_no_list
    arrays, (rows, keys) = _pack_lists(q, k, v, layout)
    (out, lse), back = vjp(*arrays, return_lse=True, **given)
    outs = ragged.parts(out, rows, layout)
    pull = partial(_pull_lists, back, (rows, keys, keys), layout)
    return ((outs, ragged.row_parts(lse, rows)) if return_lse else outs), pull


def _pull_lists(
    back: Callable[..., Any], offsets: tuple[Any, ...], layout: str, dout: Any, dlse: Any = None
) -> tuple[Any, ...]:
    if not ragged.are_lists(dout):
        raise TypeError(
            f"dout is {described(dout)}; pass a list of arrays, one for each array of out"
        )
    packed, _ = ragged.packed("dout", dout, layout)
    if dlse is not None:
        dlse = np.concatenate(dlse, axis=1)
    found = back(packed, dlse)
    return tuple(ragged.parts(x, of, layout) for x, of in zip(found, offsets, strict=True))


def _pull_no_list(dout: Any, dlse: Any = None) -> tuple[Any, ...]:
    for name, x in (("dout", dout), ("dlse", dlse or [])):
        if not isinstance(x, list | tuple) or len(x):
            raise TypeError(f"{name} is {described(x)}; pass an empty list, because out is empty")
    return [], [], []


def _refuse_on_lists(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    for name in ("wrt", "append"):
        if name in given:
            raise Unsupported(
                f"{name} cannot be used with lists of arrays; leave {name} out, or call "
                f"{function.__name__} on Packed arrays or on each list element"
            )
