"""Calls on sequences of different lengths: packed one after the other, or lists of arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from itertools import chain, filterfalse
from typing import Any

import numpy as np

from cupyfa.call.call import Call
from cupyfa.call.inputs import add_inputs
from cupyfa.call.keywords import OF_BOTH_PASSES, read_tiles, split_keywords, unknown_argument
from cupyfa.call.pullback import check_dlse, read_pullback
from cupyfa.errors import Unsupported, described
from cupyfa.planner import choose_kernel as planning
from cupyfa.problem import optional_inputs
from cupyfa.problem.options import NOT_GIVEN, OPTIONS, AttentionOptions, read_flag
from cupyfa.runtime import ragged
from cupyfa.runtime.call_cache import is_none
from cupyfa.runtime.choose_backend import adopt, as_array, backend_named, where_q_is

_OFFSETS = (*optional_inputs.STARTS, *optional_inputs.USED)
# Arguments that are fields of a call, or say how it runs.
_OF_CALLS = ("options", "tiles", "backend", "check", "devices")


def split_fixed(
    fixed: Sequence[Any], keywords: Mapping[str, Any], others: Sequence[Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What ``repeat_call`` knows a call on packed sequences by, and the arrays that it reads.

    fixed: arguments that are no arrays. others: dlse, offsets and lengths. Each array may be None.
    """
    read = keywords.get(optional_inputs.ALIBI), keywords.get(optional_inputs.SINK), *others
    asked = [
        x for x in keywords.items() if x[0] not in (optional_inputs.ALIBI, optional_inputs.SINK)
    ]
    known = *fixed, *map(is_none, read), *chain.from_iterable(asked)
    return known, (*filterfalse(is_none, read),)


def add_sequences(
    function: Callable[..., Any],
    call: Call,
    packed: Mapping[str, Any],
    lengths: Sequence[Any],
    keywords: Mapping[str, Any],
    dlse: Any = None,
) -> tuple[Call, Sequence[Any]]:
    """A call of a function on packed arrays, with its keyword arguments, and all of its arrays.

    lengths: where sequences begin and how many rows of them count.
    """
    check_packed(packed)
    backend, arrays = adopt(keywords.get("backend", "auto"), **packed)
    q, k = (arrays[list(packed).index(name)] for name in "qk")
    offsets = {name: as_array(backend, name, x) for name, x in zip(_OFFSETS, lengths)}
    if isinstance(q, np.ndarray):  # sequences are copied piece by piece
        offsets = {name: where_q_is(backend, q, x) for name, x in offsets.items()}
    if missing := [name for name in optional_inputs.STARTS if offsets[name] is None]:
        raise TypeError(f"{missing[0]} is None; give where each sequence begins, and the end")
    look = bool(keywords.get("check"))
    offsets = ragged.lengths(q, k, offsets, look=look, download=backend.download)
    others = {name: x for name, x in keywords.items() if name not in _OF_CALLS}
    _refuse_padded(function, others)
    given, asked = split_keywords(function, others)
    options, tiles = keywords.get("options"), keywords.get("tiles")
    call = call._replace(backend=backend, options=options, asked=asked, layout="bshd", tiles=tiles)
    if dlse is not None:
        given["dlse"] = check_dlse(dlse, packed["lse"])
    return add_inputs(call, arrays, {**given, **offsets})


def check_packed(named: Mapping[str, Any]) -> None:
    """Raises ValueError for arrays, or their shapes, that are no packed ones."""
    for name, x in named.items():
        shape = getattr(x, "shape", x)
        if name != "lse" and isinstance(shape, tuple) and len(shape) != 3:
            raise ValueError(f"{name} has shape {shape}; packed arrays are [rows, heads, columns]")


def split_offsets(
    function: Callable[..., Any], keywords: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The offsets and lengths of packed sequences among the arguments of a call, and the others."""
    given = {name: x for name, x in keywords.items() if name in _OFFSETS and x is not None}
    if given and (missing := [name for name in optional_inputs.STARTS if name not in given]):
        raise TypeError(
            f"{function.__name__}() has {next(iter(given))} and no {missing[0]}; give both offsets"
        )
    others = {name: x for name, x in keywords.items() if name not in _OFFSETS}
    if given:
        _refuse_padded(function, others)
    return given, others


def _refuse_padded(function: Callable[..., Any], keywords: Mapping[str, Any]) -> None:
    for name, used in zip(optional_inputs.PADDED, optional_inputs.USED):
        if keywords.get(name) is not None:
            raise TypeError(
                f"{function.__name__}() of packed sequences has no argument {name!r}; write {used}="
            )


def _pack_lists(q: Any, k: Any, v: Any, layout: str) -> tuple[list[Any], list[np.ndarray]]:
    """Lists of arrays as packed arrays, and the offsets of q and of k."""
    counts = {name: len(x) for name, x in zip("qkv", (q, k, v))}
    if len({*counts.values()}) > 1:
        sizes = ", ".join(f"{name} has {n} arrays" for name, n in counts.items())
        raise ValueError(f"{sizes}; give as many of each")
    arrays, offsets = zip(*(ragged.packed(*x, layout) for x in (("q", q), ("k", k), ("v", v))))
    if wrong := np.flatnonzero(np.diff(offsets[1]) != np.diff(offsets[2])).tolist():
        rows = [int(np.diff(x)[wrong[0]]) for x in offsets[1:]]
        raise ValueError(
            f"k[{wrong[0]}] has {rows[0]} rows and v[{wrong[0]}] {rows[1]}; a value for each key"
        )
    return list(arrays), [offsets[0], offsets[1]]


def _check_empty_call(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raises for arguments that no call on lists can have, where there is no array to look at."""
    known = dict.fromkeys(("q", "k", "v", *signature(function).parameters, *OF_BOTH_PASSES))
    others = {name: x for name, x in given.items() if name not in known}
    if others:
        raise unknown_argument(function, others, tuple(OF_BOTH_PASSES))
    _, asked = split_keywords(function, {x: y for x, y in given.items() if x in OPTIONS})
    AttentionOptions.of(given.get("options"), asked)
    planning.check_named(given.get("kernel", "auto"), "forward", read_tiles(given.get("tiles")))
    read_pullback(
        given.get("return_lse", False),
        given.get("deterministic", False),
        given.get("backward_kernel", "auto"),
        given.get("backward_tiles"),
    )
    read_flag("check", given.get("check", False))
    backend_named(given.get("backend", "auto"))


def attention_of_lists(
    attention: Callable[..., Any], attention_ragged: Callable[..., Any], given: Mapping[str, Any]
) -> Any:
    """``attention`` of lists of arrays, with its arguments by name."""
    given = _read_list_arguments(attention, given)
    if not any(map(len, (given["q"], given["k"], given["v"]))):
        _check_empty_call(attention, given)
        made = ragged.parts(None, [0], "bshd", given.get("out"))
        others: list[Any] = [[] for name in ("return_lse", "return_max") if given.get(name)]
        return (made, *others) if others else made
    layout, out = given.pop("layout", "bhsd"), given.pop("out", None)
    arrays, offsets = _pack_lists(given.pop("q"), given.pop("k"), given.pop("v"), layout)
    found = attention_ragged(*arrays, *offsets, **given)
    if not isinstance(found, tuple):
        return ragged.parts(found, offsets[0], layout, out)
    made, *others = found
    return ragged.parts(made, offsets[0], layout, out), *(
        ragged.row_parts(x, offsets[0]) for x in others
    )


def vjp_of_lists(
    attention_vjp: Callable[..., Any],
    attention_ragged_vjp: Callable[..., Any],
    given: Mapping[str, Any],
) -> tuple[Any, Callable[..., tuple[Any, ...]]]:
    """``attention_vjp`` of lists of arrays, with its arguments by name."""
    given = _read_list_arguments(attention_vjp, {**given, "options": None, **given["options"]})
    if not any(map(len, (given["q"], given["k"], given["v"]))):
        _check_empty_call(attention_vjp, given)
        return (([], []) if given.get("return_lse") else []), _pull_no_list
    layout = given.pop("layout", "bhsd")
    arrays, (rows, keys) = _pack_lists(given.pop("q"), given.pop("k"), given.pop("v"), layout)
    return_lse = read_flag("return_lse", given.pop("return_lse", False))
    (out, lse), back = attention_ragged_vjp(*arrays, rows, keys, return_lse=True, **given)
    outs = ragged.parts(out, rows, layout)
    pull = partial(_pull_lists, back, (rows, keys, keys), layout)
    return ((outs, ragged.row_parts(lse, rows)) if return_lse else outs), pull


def _pull_lists(
    back: Callable[..., Any], offsets: tuple[Any, ...], layout: str, dout: Any, dlse: Any = None
) -> tuple[Any, ...]:
    if not ragged.are_lists(dout):
        raise TypeError(f"dout is {described(dout)}; give a list of arrays like out")
    packed, _ = ragged.packed("dout", dout, layout)
    if dlse is not None:
        dlse = np.concatenate(dlse, axis=1)
    found = back(packed, dlse)
    return tuple(ragged.parts(x, of, layout) for x, of in zip(found, offsets, strict=True))


def _pull_no_list(dout: Any, dlse: Any = None) -> tuple[Any, ...]:
    for name, x in (("dout", dout), ("dlse", dlse or [])):
        if not isinstance(x, list | tuple) or len(x):
            raise TypeError(f"{name} is {described(x)}; give an empty list, like out")
    return [], [], []


def _read_list_arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that differ from a function's defaults. Raises for those lists cannot have."""
    known = signature(function).parameters
    asked = {**given, **given.get("unknown", {})}
    usual = {name: x.default for name, x in known.items() if x.kind is not x.VAR_KEYWORD}
    found = {
        name: x
        for name, x in asked.items()
        if name not in ("unknown", "options")
        and (name in OPTIONS or x is not None)
        and x is not usual.get(name, NOT_GIVEN)
    }
    if isinstance(given.get("options"), AttentionOptions):
        found["options"] = given["options"]
    for name in (
        "own",
        "return_own",
        "progress",
        "wrt",
        *optional_inputs.PADDED,
        *optional_inputs.DESCALES,
    ):
        if name in found:
            raise Unsupported(
                f"{name} cannot be used with lists of arrays; pack them and leave it out, or call "
                f"{function.__name__} for each"
            )
    return found
