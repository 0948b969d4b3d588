"""Attention over a ``KVCache``: appends new tokens and computes their attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import is_, itemgetter
from typing import Any, NamedTuple

import numpy as np

from cupyfa.arrays.kv_cache import KVCache, Step, list_arrays, step as make_step
from cupyfa.arrays.prefixes import Prefixes
from cupyfa.call.call import BackendName, Call
from cupyfa.call.execution import run_call
from cupyfa.call.inputs import add_inputs
from cupyfa.call.keywords import (
    DTYPES,
    OF_SCORES,
    read_out,
    read_tiles,
    split_keywords,
    unknown_argument,
)
from cupyfa.errors import described
from cupyfa.ladder.forward import for_decoding
from cupyfa.ladder.kernel import Kernel
from cupyfa.problem import optional_inputs
from cupyfa.problem.dtypes import E4M3, dtype_named
from cupyfa.problem.options import AttentionOptions, read_flag
from cupyfa.runtime.arrays import require_form, target
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.call_cache import LastCall
from cupyfa.runtime.choose_backend import as_array, writable_view
from cupyfa.runtime.merging import merge

_CAUSAL = AttentionOptions(causal="bottom-right")
# Optional arrays that decoding supports; it refuses all others. Calls for a cache's prefix read
# slopes in ``Prefixes.parts``, and no sink, which counts once.
_READ = (optional_inputs.ALIBI, optional_inputs.SINK)
# Arguments of ``attention`` that decoding rejects, with the reasons.
_REFUSED = {
    **{
        name: "write score_mod= or an expression as mask=, which may read a captured array"
        for name in optional_inputs.OWN_ARRAYS
        if name not in _READ
    },
    "layout": "q is [batch, heads, new tokens, d], and the cache has its own layout",
    "offset": "new tokens are the last tokens of each sequence",
    "dropout": "decoding has no gradients",
    "precision": "products are computed in the dtype of the cache",
}


class DecodeCall(NamedTuple):
    """The arguments of ``attention`` over a KV cache.

    new: the keys and values to append. options: include causal="bottom-right" and the dtype of out.
    scores: the optional arrays by name, or None. out: the caller's array, or None.
    """

    q: Any
    cache: KVCache
    new: tuple[Any, Any] | None
    options: AttentionOptions
    scores: Mapping[str, Any]
    captured: Mapping[str, Any] | None
    kernel: str | Kernel
    backend: BackendName | Backend
    tiles: Mapping[str, int]
    return_lse: bool
    return_max: bool
    out: Any
    check: bool

    def write(self, step: Step) -> Callable[[], None] | None:
        """Returns the function that rotates and appends new tokens, or None if there is none."""
        if not step.writes:
            return None
        return step.write_and_check if self.check else step.write

    def list_inputs(self, step: Step) -> dict[str, Any]:
        """Returns the call's optional inputs by name."""
        inputs = {**self.scores, "captured": self.captured}
        inputs |= {optional_inputs.PADDED[1]: step.lengths, optional_inputs.PAGE_TABLE: step.pages}
        return inputs | dict(zip(optional_inputs.SCALES, step.scales))


def attention_of_others(attention: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Implements ``attention`` over a KVCache. given: the call's arguments by name."""
    if given["unknown"]:
        raise unknown_argument(attention, given["unknown"])
    q, cache = given["q"], given["k"]
    if given["v"] is not None:
        raise TypeError(
            f"v is {described(given['v'])}, but k is a KVCache, which also holds the values; leave "
            "v out"
        )
    if not isinstance(cache, KVCache):
        raise TypeError(
            f"q is a KVCache and k is {described(cache)}; the cache must be second: attention(q, "
            "cache)"
        )
    new, out, check = given["append"], given["out"], given["check"]
    fixed = *_FIXED(given), out if isinstance(out, DTYPES) else None
    arrays = None
    if cache.prefix is None and not check and (new is None or type(new) is tuple):
        arrays = [*_ARRAYS(given), *list_arrays(q, cache, new)]
        last = cache.last_call
        if last is not None and last.is_repeated(fixed, arrays, cache):
            repeated = last.repeat(None if isinstance(out, DTYPES) else out)
            if repeated is not None:
                return repeated
    return _run(_read(attention, q, cache, given), fixed, arrays)


_ARRAYS = itemgetter(*_READ)
# Reads the non-array arguments, which must be identical in a repeated call.
_FIXED = itemgetter(
    *(name for name in OF_SCORES if name not in _READ),
    *("kernel", "backend", "layout", "tiles", "return_lse", "return_max"),
)


class LastStep(NamedTuple):
    """The last call on a cache, which is repeated if the next call has identical arguments.

    given: the caller's arrays, with None for missing ones. shapes: their shapes. where: the device
    and stream. arrays: the arrays that the kernel reads.
    """

    call: LastCall
    given: list[Any]
    shapes: list[Any]
    where: tuple[int, int | None]
    step: Step
    arrays: Sequence[Any]

    def is_repeated(self, fixed: tuple[Any, ...], given: list[Any], cache: KVCache) -> bool:
        """Returns whether the call has the same arguments and stream as the last call.

        Reads lengths and pages in host memory again, because the caller may have changed them.
        """
        if not all(map(is_, self.call.fixed, fixed)) or not all(map(is_, self.given, given)):
            return False
        if _shapes_of(given) != self.shapes:
            return False
        if isinstance(cache.lengths, np.ndarray):
            self.step.read_lengths(cache)
            return True
        backend = self.step.backend  # during a capture each call allocates its own arrays
        return backend.current() == self.where and not backend.is_capturing

    def repeat(self, out: Any) -> Any:
        """Repeats the call; returns None if the dtype of ``out`` requires a new plan."""
        step, prepared = self.step, self.call.prepared
        before, targets = step.write if step.writes else None, prepared.targets(out, None)
        found = prepared.again(self.arrays, targets, shapes=True, before=before)
        if found is not None or not _is_usual(out, step.q):
            return found
        if before is not None:
            before()
        return prepared.run(self.arrays, targets)


def _is_usual(out: Any, q: Any) -> bool:
    """Returns whether ``out`` is None, a dtype, or an array with the dtype of q."""
    return out is None or isinstance(out, DTYPES) or getattr(out, "dtype", None) == q.dtype


def _shapes_of(arrays: Sequence[Any]) -> list[Any]:
    return [getattr(x, "shape", None) for x in arrays]


def append_tokens(
    cache: KVCache, k: Any, v: Any, *, backend: BackendName | Backend, check: bool
) -> None:
    """Implements ``KVCache.append``."""
    prefix_keys = None
    if cache.prefix is not None and cache.rotary is not None:
        prefix_keys = Prefixes(backend, cache.prefix, k, cache, look=check).keys
    step = make_step(backend, k, cache, (k, v), look=check, prefix_keys=prefix_keys)
    (step.write_and_check if check else step.write)()


def _read(
    attention: Callable[..., Any], q: Any, cache: KVCache, given: Mapping[str, Any]
) -> DecodeCall:
    """Checks a call's arguments; raises ValueError or TypeError for unsupported arguments."""
    scores = {x: given[x] for x in OF_SCORES if given[x] is not None}
    arrays, asked = split_keywords(attention, scores)
    out, asked = read_out(given["out"], q, asked)
    refused = {x: arrays.get(x, asked.get(x)) for x in _REFUSED}
    refused["layout"] = None if given["layout"] == "bhsd" else given["layout"]
    for name, value in refused.items():
        if value is not None:
            raise ValueError(
                f"{name} is {described(value)}, but attention on a KVCache does not support "
                f"{name}: {_REFUSED[name]}; leave {name} out"
            )
    if asked.get("causal") == "top-left":
        raise ValueError(
            "causal is 'top-left', but with a KVCache the new tokens are the last tokens of each "
            "sequence; leave causal out"
        )
    new = given["append"]
    if new is not None and (not isinstance(new, tuple | list) or len(new) != 2):
        raise TypeError(
            f"append is {described(new)}; pass (k, v), the keys and values of the new tokens"
        )
    if (return_max := read_flag("return_max", given["return_max"])) and cache.prefix is not None:
        raise ValueError(
            "return_max is True, but row maxima are not computed for a cache with a prefix; leave "
            "return_max or the prefix out"
        )
    options = replace(AttentionOptions.of(None, asked), causal="bottom-right") if asked else _CAUSAL
    return DecodeCall(
        q=q,
        cache=cache,
        new=None if new is None else tuple(new),
        options=options,
        scores={name: given[name] for name in _READ},
        captured=given["captured"],
        kernel=given["kernel"],
        backend=given["backend"],
        tiles=read_tiles(given["tiles"]),
        return_lse=read_flag("return_lse", given["return_lse"]),
        return_max=return_max,
        out=out,
        check=read_flag("check", given["check"]),
    )


def _run(call: DecodeCall, fixed: tuple[Any, ...], given: list[Any] | None) -> Any:
    """Runs a call and returns its results.

    fixed: the non-array arguments. given: the caller's arrays, or None if the call cannot be
    repeated.
    """
    shared, options, cache = None, call.options, call.cache
    if cache.prefix is not None:
        shared = Prefixes(call.backend, cache.prefix, call.q, cache, look=call.check)
    step = make_step(
        *(call.backend, call.q, cache, call.new),
        look=call.check,
        prefix_keys=None if shared is None or cache.rotary is None else shared.keys,
    )
    if call.out is not None and step.is_moved:  # validate `out` before writing to the cache
        shape = *step.q.shape[:3], step.v.shape[3]
        require_form("out", call.out, shape, _find_out_dtype(step, options))
    if str(step.q.dtype) == "float32":  # select no kernel that rounds float32 inputs
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
        keep = _make_keeper(call, step, given, arrays)
        how: Any = {"before": before, "repeat": None if keep is None else (keep, fixed)}
        return run_call(cached, arrays, out=call.out, check=call.check, **how)
    found = run_call(cached, arrays, check=call.check, before=before)
    found = found if isinstance(found, tuple) else (found,)
    found = _copy_to_out(call.out, tuple(map(step.backend.download, found)))
    return found if len(found) > 1 else found[0]


def _make_keeper(
    call: DecodeCall, step: Step, given: list[Any] | None, arrays: Sequence[Any]
) -> Callable[[LastCall], None] | None:
    """Returns a function that stores the call in its cache, or None if it cannot be repeated.

    A call whose optional arrays were copied cannot be repeated. given: the caller's arrays.
    arrays: the arrays that the kernel reads.
    """
    scores_are_read = all(x is None or any(x is y for y in arrays) for x in call.scores.values())
    if given is None or not (step.may_repeat and scores_are_read and _is_usual(call.out, step.q)):
        return None
    shapes, where = _shapes_of(given), step.backend.current()

    def keep(last: LastCall) -> None:
        call.cache.last_call = LastStep(last, given, shapes, where, step, arrays)

    return keep


def _copy_to_out(out: Any, results: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies the first result into ``out`` unless it is None; returns all results."""
    if out is None:
        return results
    require_form("out", out, results[0].shape, results[0].dtype)
    out[...] = results[0]
    return (out, *results[1:])


def _find_out_dtype(step: Step, options: AttentionOptions) -> np.dtype:
    return dtype_named(options.out_dtype or str(step.q.dtype)).numpy


def _choose_kernel(
    q: Any, k: Any, kernel: str | Kernel = "auto", splits: int | str = "auto"
) -> str | Kernel:
    rows = q.shape[1] // max(k.shape[1], 1) * q.shape[2]
    return for_decoding(kernel, splits, str(q.dtype), rows, is_e4m3=k.dtype == E4M3)


def _run_with_prefixes(call: DecodeCall, cached: Call, step: Step, shared: Prefixes) -> Any:
    """Computes attention over the prefixes and over the keys in the cache; merges the results."""
    assert cached.options is not None
    out = None if step.is_moved else call.out
    if out is not None:  # validate `out` before writing to the cache
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
    """Raises if ``out`` overlaps inputs or does not match the result's shape, dtype and device."""
    shape = *step.q.shape[:3], step.v.shape[3]
    inputs = {"q": step.q, "cache.k": step.k, "cache.v": step.v}
    mine = writable_view(step.backend, "out", out)
    dtype = _find_out_dtype(step, options)
    target(step.backend, "out", mine, shape, dtype, inputs, lambda x: x)


def _make_prefix_calls(
    call: DecodeCall, cached: Call, step: Step, shared: Prefixes
) -> list[tuple[Call, Sequence[Any]]]:
    """Makes one call per prefix and one call for the keys in the cache, each with its arrays."""
    assert cached.options is not None
    captured, slopes = call.captured, call.scores[optional_inputs.ALIBI]
    if slopes is not None:
        slopes = as_array(step.backend, optional_inputs.ALIBI, slopes)
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
    """Plans all calls, then runs ``begin`` and the calls, so that no write precedes an error."""
    (call, arrays), *others = calls
    found: list[Any] = []

    def before() -> None:
        if others:
            found.extend(_run_together(others, begin, check))
        else:
            begin()

    return [run_call(call, arrays, check=check, before=before), *found]
