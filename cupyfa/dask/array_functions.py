"""Implements ``attention`` and ``vjp`` on Dask arrays: checks arguments, plans, builds graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import isnan
from typing import Any

import dask.array as da

from cupyfa.call.keywords import given_arguments, read_devices
from cupyfa.call.pullback import check_dlse, check_like_result
from cupyfa.dask import graphs
from cupyfa.errors import Unsupported, described
from cupyfa.partition.part_call import planned, split_passes
from cupyfa.partition.position_names import places
from cupyfa.partition.whole_problem import read_problem, require_four_axes
from cupyfa.planner.plan import Limits
from cupyfa.problem.options import read_flag
from cupyfa.problem.problem import whole
from cupyfa.problem.structured_arrays import KINDS, Structured
from cupyfa.runtime.choose_backend import adopt

Pullback = Callable[..., tuple[da.Array, ...]]

# Maps each index name in expressions to the axis that it indexes.
_AXES = {
    **{"batch": "batch", "head": "heads"},
    **dict.fromkeys(("query", "queries"), "queries"),
    **dict.fromkeys(("position", "key", "keys"), "keys"),
}


@dataclass(frozen=True, eq=False)
class MergedKeys(Structured):
    """Keys or values whose chunks are processed by separate tasks (split-KV).

    Each chunk of q gets one task per chunk of keys that it sees. Further tasks merge ``fan_in``
    results at a time with ``cupyfa.merge``, in the order of the keys. For 16-bit inputs the partial
    results are float32, so that out is rounded once. Without MergedKeys, one task per chunk of q
    attends to all keys that its rows see.
    """

    array: da.Array
    fan_in: int = 4


KINDS |= dict.fromkeys((da.Array, MergedKeys), __name__)


def attention_of_others(attention: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Implements ``attention`` on Dask arrays. arguments: the call's arguments by name."""
    return_lse, forward, _, given = split_passes(given_arguments(attention, arguments))
    call = _Call.of(attention, arguments, given)
    call.refuse_places(keys_are_whole=call.fan_in is None)
    out, lse = graphs.forward(call.parts, call.planned("forward", **forward), call.fan_in)
    return (out, lse) if return_lse else out


def vjp_of_others(vjp: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[Any, Pullback]:
    """Implements ``vjp`` on Dask arrays. arguments: the call's arguments by name."""
    return_lse, forward, backward, given = split_passes(given_arguments(vjp, arguments))
    call = _Call.of(vjp, arguments, given)
    call.refuse_places(keys_are_whole=False)
    how = call.planned("backward", **backward)
    out, lse = graphs.forward(call.parts, call.planned("forward", **forward), call.fan_in)
    pull = partial(_pullback, call.parts, how, (out, lse))
    return ((out, lse) if return_lse else out), pull


def _pullback(
    parts: graphs.Parts,
    how: Mapping[str, Any],
    results: tuple[da.Array, da.Array],
    dout: da.Array,
    dlse: da.Array | None = None,
) -> tuple[da.Array, ...]:
    out, lse = results
    _require_array("dout", dout, "a Dask array like out")
    check_like_result("dout", dout, out.shape, parts.q.dtype)
    of_rows = [dout.rechunk(out.chunks), out, lse]
    if dlse is not None:
        _require_array("dlse", dlse, "a Dask array like lse")
        of_rows.append(check_dlse(dlse, lse).rechunk(lse.chunks))
    return graphs.backward(parts, how, of_rows)


@dataclass(frozen=True)
class _Call:
    """A call with checked arguments.

    fan_in: the number of results merged at a time; None if a task attends to all keys. how: the
    arguments that tasks pass to ``attention`` in addition to kernel and tiles.
    """

    parts: graphs.Parts
    fan_in: int | None
    limits: Limits
    how: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        given: Mapping[str, Any],
    ) -> _Call:
        """Checks a call and returns it. given: the keyword arguments without kernels and tiles."""
        options = dict(given)
        backend, devices = read_devices(options.pop("backend", "auto"))
        if devices.numbers is not None or devices.progress is not None:
            raise Unsupported(
                "calls on Dask arrays do not support numbers and progress of Devices; pass only "
                "limits to Devices, and use dask.diagnostics.ProgressBar"
            )
        how = {"backend": backend, "check": read_flag("check", options.pop("check", False))}
        fan_in: int | None = None
        arrays: list[da.Array] = []
        for name in "qkv":
            x = arguments[name]
            if isinstance(x, MergedKeys) and name != "q":
                fan_in = whole("fan_in", x.fan_in, 2) if fan_in is None else fan_in
                x = x.array
            _check_array(name, x)
            arrays.append(x)
        out = options.pop("out", None)
        problem = read_problem(function, arrays, options, out)
        limits = devices.limits
        if limits is None:
            metas = {name: x._meta for name, x in zip("qkv", arrays)}
            limits = adopt(backend, **metas)[0].limits
        q, k, v = arrays
        parts = graphs.Parts.of(q, k, v, problem, options.get("captured"))
        return cls(parts, fan_in, limits, how)

    def refuse_places(self, *, keys_are_whole: bool) -> None:
        """Raises Unsupported for expressions that use an index along a chunked axis.

        keys_are_whole: whether each task reads all keys from key 0 on, so that key and position
        are the same in the task as in the whole problem.
        """
        cut = self.parts.cut_axes
        for place, name in places(self.parts.problem.options).items():
            axis = _AXES[place]
            if axis in cut and not (keys_are_whole and place in ("position", "key")):
                instead = "write position - key, or " * (axis in ("queries", "keys"))
                raise Unsupported(
                    f"{name} uses the index {place}, which starts at 0 in each of the {cut[axis]} "
                    f"chunks along {axis}; {instead}rechunk {axis} to one chunk"
                )

    def planned(self, operation: str, **asked: Any) -> dict[str, Any]:
        """Plans the whole problem; returns keyword arguments for the calls of all tasks."""
        return {**self.how, **planned(operation, self.parts.problem, self.limits, **asked)}


def _require_array(name: str, array: Any, wanted: str) -> None:
    if not isinstance(array, da.Array):
        raise TypeError(f"{name} is {described(array)}; pass {wanted}")


def _check_array(name: str, array: Any) -> None:
    """Raises unless ``array`` is a Dask array with four axes and known chunk sizes."""
    wanted = f"a Dask array such as dask.array.from_array({name}, chunks=(1, -1, 4096, -1))"
    _require_array(name, array, wanted)
    require_four_axes(name, array)
    if any(isnan(size) for size in array.shape):
        raise ValueError(
            f"{name} has shape {array.shape}, so some of its chunk sizes are unknown; call "
            f"{name}.compute_chunk_sizes() first"
        )
