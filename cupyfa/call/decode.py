"""Calls of ``decode``: new tokens are written into a cache, and attend to its keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import filterfalse
from typing import Any, Literal, NamedTuple

import numpy as np

from cupyfa.arrays.kv_cache import KVCache, Step, last_step as last_step, step as make_step
from cupyfa.arrays.prefixes import Prefixes
from cupyfa.call.call import BackendName, Call, Tiles
from cupyfa.call.execution import run_call
from cupyfa.call.inputs import add_inputs
from cupyfa.ladder.forward import for_decoding
from cupyfa.ladder.kernel import Kernel
from cupyfa.problem import optional_inputs
from cupyfa.problem.dtypes import E4M3, dtype_named
from cupyfa.problem.options import AttentionOptions, OptionKeywords, read_flag
from cupyfa.runtime.arrays import target
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.call_cache import is_none, repeat_call
from cupyfa.runtime.choose_backend import as_array, writable_view
from cupyfa.runtime.merging import merge

_CAUSAL = AttentionOptions(causal="bottom-right")


class DecodeCall(NamedTuple):
    """The arguments of ``decode``; scores are alibi_slopes and sink."""

    q: Any
    cache: KVCache
    k: Any
    v: Any
    rotary: tuple[Any, Any] | None
    interleaved: bool
    prefix: Any
    options: AttentionOptions | None
    asked: OptionKeywords
    scores: tuple[Any, Any]
    captured: Mapping[str, Any] | None
    splits: int | Literal["auto"]
    kernel: str | Kernel
    backend: BackendName | Backend
    tiles: Tiles | None
    return_lse: bool
    return_max: bool
    out: Any
    check: bool

    def read(self) -> DecodeCall:
        """The same with flags that are bools. Raises TypeError for what does not fit together."""
        if (self.k is None) != (self.v is None):
            raise TypeError("k and v are the keys and values of the same tokens; give both or none")
        call = self._replace(
            interleaved=read_flag("interleaved", self.interleaved),
            return_lse=read_flag("return_lse", self.return_lse),
            return_max=read_flag("return_max", self.return_max),
            check=read_flag("check", self.check),
        )
        if call.interleaved and self.rotary is None:
            raise TypeError("interleaved says how rotary pairs columns; give rotary= too")
        if call.return_max and self.prefix is not None:
            raise ValueError(
                "return_max is True, and a prefix is merged by lse alone; leave one of them out"
            )
        return call

    def read_options(self) -> AttentionOptions:
        """The options. Raises ValueError for those that decoding cannot have."""
        if self.options is None and not self.asked:
            return _CAUSAL
        chosen = AttentionOptions.of(self.options, self.asked)
        for name, is_asked, why in (
            ("causal", chosen.causal == "top-left", "new tokens are the last ones"),
            ("offset", chosen.offset is not None, "new tokens are the last ones"),
            ("dropout", chosen.dropout, "there are no gradients"),
            ("precision", chosen.precision, "products are in the dtype of the cache"),
        ):
            if is_asked:
                what = f"{name}={getattr(chosen, name)!r}"
                raise ValueError(f"decode has no {what}: {why}; leave it out of options")
        return replace(chosen, causal="bottom-right")

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


def _split_fixed(
    step: Step, fixed: tuple[Any, ...], scores: tuple[Any, Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What ``repeat_call`` knows a step by, and the arrays that it reads besides q, k and v."""
    read = *scores, step.lengths, step.pages, *step.scales
    return (*fixed, *map(is_none, read)), (*filterfalse(is_none, read),)


def repeat_decode(last: Step, fixed: tuple[Any, ...], scores: tuple[Any, Any], out: Any) -> Any:
    """The results of a call with the very arrays of the last step; None if there was none.

    fixed: the arguments that are no arrays. scores: alibi_slopes and sink.
    """
    fixed, read = _split_fixed(last, fixed, scores)
    before = last.write if last.writes else None
    return repeat_call("decode", fixed, (last.q, last.k, last.v, *read), out, before=before)


def run_decode(call: DecodeCall, fixed: tuple[Any, ...], last: Step | None) -> Any:
    """The results of ``decode``.

    fixed: its arguments that are no arrays. last: the last step, if it was on the same arrays.
    """
    call = call.read()
    options = call.read_options()
    shared = None
    if call.prefix is not None:
        shared = Prefixes(call.backend, call.prefix, call.q, call.cache, look=call.check)
    step = last or make_step(
        *(call.backend, call.q, call.cache, None if call.k is None else (call.k, call.v)),
        call.rotary,
        interleaved=call.interleaved,
        look=call.check,
        prefix_keys=None if shared is None or call.rotary is None else shared.keys,
    )
    if call.out is not None and step.is_moved:  # before anything is written
        shape = *step.q.shape[:3], step.v.shape[3]
        _check_out(call.out, shape, _find_out_dtype(step, options))
    if str(step.q.dtype) == "float32":  # also by a kernel that would round it
        options = replace(options, precision="float32")
    kernel = _choose_kernel(step.q, step.k, call.kernel, call.splits)
    cached = Call("forward", kernel, step.backend, options, tiles=call.tiles)
    if shared is not None:
        return _run_with_prefixes(call, cached, step, shared)
    cached = cached._replace(return_lse=call.return_lse, return_max=call.return_max)
    cached, arrays = add_inputs(cached, (step.q, step.k, step.v), call.list_inputs(step))
    before = call.write(step)
    if not step.is_moved:
        repeat = "decode", _split_fixed(step, fixed, call.scores)[0]
        return run_call(cached, arrays, call.out, check=call.check, before=before, repeat=repeat)
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
    new, calls = 0 if call.k is None else step.q.shape[2], []
    for x in shared.parts(step, cached.options, captured, slopes, new):
        kernel = _choose_kernel(x.q, x.k)
        part = Call("forward", kernel, step.backend, x.options, return_lse=True)
        calls.append(add_inputs(part, (x.q, x.k, x.v), x.given))
    options, captured = shared.own(cached.options, captured)
    cached = cached._replace(options=options, return_lse=True)
    inputs = {**call.list_inputs(step), "captured": captured}
    return [*calls, add_inputs(cached, (step.q, step.k, step.v), inputs)]


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
