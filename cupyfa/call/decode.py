"""Attention to a ``KVCache``: new tokens are written into it, and attend to its keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import filterfalse
from operator import is_
from typing import Any, NamedTuple

import numpy as np

from cupyfa.arrays.kv_cache import KVCache, Step, keep_call, last_step, step as make_step
from cupyfa.arrays.prefixes import Prefixes
from cupyfa.call.call import BackendName, Call
from cupyfa.call.execution import Repeatable, run_call
from cupyfa.call.inputs import add_inputs
from cupyfa.call.keywords import DTYPES, read_out, read_tiles, split_keywords, unknown_argument
from cupyfa.errors import described
from cupyfa.ladder.forward import for_decoding
from cupyfa.ladder.kernel import Kernel
from cupyfa.problem import optional_inputs
from cupyfa.problem.dtypes import E4M3, dtype_named
from cupyfa.problem.options import AttentionOptions, read_flag
from cupyfa.runtime.arrays import target
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.call_cache import is_none, repeat_call
from cupyfa.runtime.choose_backend import as_array, writable_view
from cupyfa.runtime.merging import merge

_CAUSAL = AttentionOptions(causal="bottom-right")
# Arguments of ``attention`` that a call on a cache cannot have, and why.
_REFUSED = {
    **dict.fromkeys(
        (optional_inputs.BIAS, optional_inputs.MASK),
        "write score_mod= or an expression as mask=, which may read a captured array",
    ),
    "layout": "q is [batch, heads, new tokens, d], and the cache has its own layout",
    "offset": "new tokens are the last ones",
    "dropout": "there are no gradients",
    "precision": "products are in the dtype of the cache",
}


class DecodeCall(NamedTuple):
    """The arguments of ``attention`` on a cache.

    options: with a mask that ends at the bottom right, and the dtype of out. scores: alibi_slopes
    and sink. out: the caller's array.
    """

    q: Any
    cache: KVCache
    new: tuple[Any, Any] | None
    options: AttentionOptions
    scores: tuple[Any, Any]
    captured: Mapping[str, Any] | None
    kernel: str | Kernel
    backend: BackendName | Backend
    tiles: Mapping[str, int]
    return_lse: bool
    return_max: bool
    out: Any
    check: bool

    def write(self, step: Step) -> Callable[[], None] | None:
        """Writes the new tokens and rotates them; None if there is nothing to do."""
        if not step.writes:
            return None
        return step.write_and_check if self.check else step.write

    def list_inputs(self, step: Step) -> dict[str, Any]:
        """What is read besides q, k and v: arrays, and captured numbers."""
        inputs = {"alibi_slopes": self.scores[0], "sink": self.scores[1], "captured": self.captured}
        inputs |= {optional_inputs.PADDED[1]: step.lengths, optional_inputs.PAGE_TABLE: step.pages}
        return inputs | dict(zip(optional_inputs.SCALES, step.scales))


def attention_of_others(attention: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """``attention`` of new tokens to a cache. given: its arguments by name."""
    if given["unknown"]:
        raise unknown_argument(attention, given["unknown"])
    q, cache = given["q"], given["k"]
    if given["v"] is not None:
        raise TypeError(
            f"v is {described(given['v'])}, and k is a KVCache, which has the values; leave v out"
        )
    if not isinstance(cache, KVCache):
        raise TypeError(f"q is a KVCache, and k is {described(cache)}; write attention(q, cache)")
    new, out, check = given["append"], given["out"], given["check"]
    scores = given["alibi_slopes"], given["sink"]
    fixed = (*(given[name] for name in _FIXED), out if isinstance(out, DTYPES) else None)
    last = None
    if cache.prefix is None and not check and (new is None or type(new) is tuple):
        last = last_step(q, cache, new, given["backend"])
    if last is not None:
        repeated = _repeat(last, fixed, scores, None if isinstance(out, DTYPES) else out)
        if repeated is not None:
            return repeated
        kept = cache._prepared
        if kept is not None and _is_usual(out, q) and kept.is_alike(last, fixed, scores):
            return _run_prepared(kept, out)
    return _run(_read(attention, q, cache, given), fixed, last)


def _is_usual(out: Any, q: Any) -> bool:
    """Whether no array decides that the output has another dtype than the queries."""
    return out is None or isinstance(out, DTYPES) or out.dtype == q.dtype


class _Prepared(NamedTuple):
    """The call of a step, for another one with the very same arguments."""

    step: Step
    fixed: tuple[Any, ...]
    scores: tuple[Any, Any]
    call: Call
    arrays: Sequence[Any]
    repeat: Repeatable

    def is_alike(self, step: Step, fixed: tuple[Any, ...], scores: tuple[Any, Any]) -> bool:
        known = (self.step, *self.fixed, *self.scores)
        return all(map(is_, known, (step, *fixed, *scores)))


def _run_prepared(kept: _Prepared, out: Any) -> Any:
    step = kept.step
    before = step.write if step.writes else None
    out = None if isinstance(out, DTYPES) else out
    return run_call(kept.call, kept.arrays, out=out, before=before, repeat=kept.repeat)


# Types of arguments that cannot change between two calls, and of scores that are not copied.
_UNCHANGED = {type(None), bool, int, float, str, tuple, np.ndarray}
_FIXED = (
    *("causal", "window", "scale", "softcap", "score_mod", "mask", "captured", "kernel"),
    *("backend", "tiles", "return_lse", "return_max", "offset", "dropout", "precision"),
    *("bias", "layout"),
)


def append_tokens(
    cache: KVCache, k: Any, v: Any, *, backend: BackendName | Backend, check: bool
) -> None:
    """Writes the keys and values of new tokens, as ``KVCache.append`` says."""
    prefix_keys = None
    if cache.prefix is not None and cache.rotary is not None:
        prefix_keys = Prefixes(backend, cache.prefix, k, cache, look=check).keys
    step = make_step(backend, k, cache, (k, v), look=check, prefix_keys=prefix_keys)
    (step.write_and_check if check else step.write)()


def _read(
    attention: Callable[..., Any], q: Any, cache: KVCache, given: Mapping[str, Any]
) -> DecodeCall:
    """The arguments, checked. Raises ValueError and TypeError for what does not fit together."""
    scores = {x: given[x] for x in _SCORES if given[x] is not None}
    arrays, asked = split_keywords(attention, scores)
    out, asked = read_out(given["out"], q, asked)
    refused = {x: arrays.get(x, asked.get(x)) for x in _REFUSED}
    refused["layout"] = None if given["layout"] == "bhsd" else given["layout"]
    for name, value in refused.items():
        if value is not None:
            raise ValueError(
                f"{name} is {described(value)}, and k is a KVCache: {_REFUSED[name]}; leave it out"
            )
    if asked.get("causal") == "top-left":
        raise ValueError(
            "causal is 'top-left', and k is a KVCache, whose new tokens are the last ones; leave "
            "it out"
        )
    new = given["append"]
    if new is not None and (not isinstance(new, tuple | list) or len(new) != 2):
        raise TypeError(
            f"append is {described(new)}; give the keys and values of the new tokens, (k, v)"
        )
    if (return_max := read_flag("return_max", given["return_max"])) and cache.prefix is not None:
        raise ValueError(
            "return_max is True, and the prefix of the cache is merged by lse alone; leave one of "
            "them out"
        )
    options = replace(AttentionOptions.of(None, asked), causal="bottom-right") if asked else _CAUSAL
    return DecodeCall(
        q=q,
        cache=cache,
        new=None if new is None else tuple(new),
        options=options,
        scores=(given["alibi_slopes"], given["sink"]),
        captured=given["captured"],
        kernel=given["kernel"],
        backend=given["backend"],
        tiles=read_tiles(given["tiles"]),
        return_lse=read_flag("return_lse", given["return_lse"]),
        return_max=return_max,
        out=out,
        check=read_flag("check", given["check"]),
    )


_SCORES = (
    *("causal", "window", "offset", "scale", "softcap", "score_mod", "bias", "mask", "dropout"),
    *("precision", "alibi_slopes", "sink", "captured"),
)


def _split_fixed(
    step: Step, fixed: tuple[Any, ...], scores: tuple[Any, Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What ``repeat_call`` knows a step by, and the arrays that it reads besides q, k and v."""
    read = *scores, step.lengths, step.pages, *step.scales
    return (*fixed, *map(is_none, read)), (*filterfalse(is_none, read),)


def _repeat(last: Step, fixed: tuple[Any, ...], scores: tuple[Any, Any], out: Any) -> Any:
    """The results of a call with the very arrays of the last step; None if there was none.

    fixed: the arguments that are no arrays. scores: alibi_slopes and sink.
    """
    fixed, read = _split_fixed(last, fixed, scores)
    before = last.write if last.writes else None
    return repeat_call("decode", fixed, (last.q, last.k, last.v, *read), out, before=before)


def _run(call: DecodeCall, fixed: tuple[Any, ...], last: Step | None) -> Any:
    """The results of a call.

    fixed: its arguments that are no arrays. last: the last step, if it was on the same arrays.
    """
    shared, options, cache = None, call.options, call.cache
    if cache.prefix is not None:
        shared = Prefixes(call.backend, cache.prefix, call.q, cache, look=call.check)
    step = last or make_step(
        *(call.backend, call.q, cache, call.new),
        look=call.check,
        prefix_keys=None if shared is None or cache.rotary is None else shared.keys,
    )
    if call.out is not None and step.is_moved:  # before anything is written
        shape = *step.q.shape[:3], step.v.shape[3]
        _check_out(call.out, shape, _find_out_dtype(step, options))
    if str(step.q.dtype) == "float32":  # also by a kernel that would round it
        options = replace(options, precision="float32")
    tiles = {name: x for name, x in call.tiles.items() if name != "splits"}
    kernel = _choose_kernel(step.q, step.k, call.kernel, call.tiles.get("splits", "auto"))
    cached = Call("forward", kernel, step.backend, options, tiles=tiles or None)
    if shared is not None:
        return _run_with_prefixes(call, cached, step, shared)
    cached = cached._replace(return_lse=call.return_lse, return_max=call.return_max)
    qkv = step.q, step.k, step.v
    cached, arrays = add_inputs(cached, step.backend, qkv, call.list_inputs(step))
    before = call.write(step)
    if not step.is_moved:
        repeat = "decode", _split_fixed(step, fixed, call.scores)[0]
        is_unchanged = {*map(type, (*fixed, *call.scores))} <= _UNCHANGED
        if is_unchanged and _is_usual(call.out, step.q):
            prepared = _Prepared(step, fixed, call.scores, cached, arrays, repeat)
            keep_call(cache, step, prepared)
        how: Any = {"check": call.check, "before": before, "repeat": repeat}
        return run_call(cached, arrays, out=call.out, **how)
    found = run_call(cached, arrays, check=call.check, before=before)
    found = found if isinstance(found, tuple) else (found,)
    found = _copy_to_out(call.out, tuple(map(step.backend.download, found)))
    return found if len(found) > 1 else found[0]


def _copy_to_out(out: Any, results: tuple[Any, ...]) -> tuple[Any, ...]:
    """Results of which the first one is copied into an array of the caller's, if there is one."""
    if out is None:
        return results
    _check_out(out, results[0].shape, results[0].dtype)
    out[...] = results[0]
    return (out, *results[1:])


def _check_out(out: Any, shape: Sequence[int], dtype: Any) -> None:
    if tuple(out.shape) != tuple(shape) or str(out.dtype) != str(dtype):
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)}, the result is {dtype} {tuple(shape)}; "
            "give an array like that"
        )


def _find_out_dtype(step: Step, options: AttentionOptions) -> np.dtype:
    return dtype_named(options.out_dtype or str(step.q.dtype)).numpy


def _choose_kernel(
    q: Any, k: Any, kernel: str | Kernel = "auto", splits: int | str = "auto"
) -> str | Kernel:
    rows = q.shape[1] // max(k.shape[1], 1) * q.shape[2]
    return for_decoding(kernel, splits, str(q.dtype), rows, is_e4m3=k.dtype == E4M3)


def _run_with_prefixes(call: DecodeCall, cached: Call, step: Step, shared: Prefixes) -> Any:
    """The attention to prefixes and to the sequences' own keys, merged in this order."""
    assert cached.options is not None
    out = None if step.is_moved else call.out
    if out is not None:  # before anything is written
        _check_target(out, step, cached.options)
    calls, write = _make_prefix_calls(call, cached, step, shared), call.write(step)

    def begin() -> None:
        if write is not None:
            write()
            shared.take_queries()

    parts = shared.of_sequences(_run_together(calls, begin, call.check), step.q.shape[2])
    made = merge(parts, out=out, backend=step.backend, check=call.check)
    if step.is_moved:
        made = _copy_to_out(call.out, tuple(map(step.backend.download, made)))
    return made if call.return_lse else made[0]


def _check_target(out: Any, step: Step, options: AttentionOptions) -> None:
    """Raises for a caller's array that cannot take the result."""
    shape = *step.q.shape[:3], step.v.shape[3]
    inputs = {"q": step.q, "cache.k": step.k, "cache.v": step.v}
    mine = writable_view(step.backend, "out", out)
    dtype = _find_out_dtype(step, options)
    target(step.backend, "out", mine, shape, dtype, inputs, lambda x: x)


def _make_prefix_calls(
    call: DecodeCall, cached: Call, step: Step, shared: Prefixes
) -> list[tuple[Call, Sequence[Any]]]:
    """A call for each prefix, and the one for the sequences' own keys, with their arrays."""
    assert cached.options is not None
    captured, slopes = call.captured, call.scores[0]
    if slopes is not None:
        slopes = as_array(step.backend, "alibi_slopes", slopes)
    new, calls = 0 if call.new is None else step.q.shape[2], []
    for x in shared.parts(step, cached.options, captured, slopes, new):
        kernel = _choose_kernel(x.q, x.k)
        part = Call("forward", kernel, step.backend, x.options, return_lse=True)
        calls.append(add_inputs(part, step.backend, (x.q, x.k, x.v), x.given))
    options, captured = shared.own(cached.options, captured)
    cached = cached._replace(options=options, return_lse=True)
    inputs = {**call.list_inputs(step), "captured": captured}
    return [*calls, add_inputs(cached, step.backend, (step.q, step.k, step.v), inputs)]


def _run_together(
    calls: Sequence[tuple[Call, Sequence[Any]]], begin: Callable[[], None], check: bool
) -> list[Any]:
    """The results of calls, all planned before ``begin`` is done: what is refused is not begun."""
    (call, arrays), *others = calls
    found: list[Any] = []

    def before() -> None:
        if others:
            found.extend(_run_together(others, begin, check))
        else:
            begin()

    return [run_call(call, arrays, check=check, before=before), *found]
