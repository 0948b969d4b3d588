"""The functions of Dask arrays: arguments are checked and plans made before a graph is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import isnan
from typing import Any

import dask.array as da

from cupyfa.call.call import Tiles
from cupyfa.call.keywords import given_arguments, read_devices
from cupyfa.dask import graphs
from cupyfa.errors import Unsupported, described
from cupyfa.ladder.kernel import Kernel
from cupyfa.partition import refused_arguments
from cupyfa.partition.part_call import planned
from cupyfa.partition.position_names import places
from cupyfa.planner.plan import Limits
from cupyfa.problem.options import AttentionOptions, read_flag
from cupyfa.problem.problem import Problem, whole
from cupyfa.problem.structured_arrays import KINDS, Structured
from cupyfa.runtime.choose_backend import adopt

Pullback = Callable[..., tuple[da.Array, ...]]

# The axis that each name in an expression counts.
_AXES = {
    **{"batch": "batch", "head": "heads"},
    **dict.fromkeys(("query", "queries"), "queries"),
    **dict.fromkeys(("position", "key", "keys"), "keys"),
}


@dataclass(frozen=True, eq=False)
class MergedKeys(Structured):
    """Keys, or values, of which tasks take one chunk at a time; their results are merged.

    A task for each chunk of q and each chunk of keys that it sees, and tasks that merge ``fan_in``
    results at a time with ``cupyfa.merge``, in the order of the keys. These results of 16-bit
    inputs are in float32, so that out is rounded once. Of keys alone, a task for each chunk of q
    takes all keys that its rows see, in one call.
    """

    array: da.Array
    fan_in: int = 4


KINDS |= dict.fromkeys((da.Array, MergedKeys), __name__)


def attention_of_others(attention: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """``attention`` of Dask arrays. arguments: those of the call by name."""
    given = given_arguments(attention, arguments)
    return_lse = read_flag("return_lse", given.pop("return_lse", False))
    chosen = {x: given.pop(x, y) for x, y in (("kernel", "auto"), ("tiles", None))}
    call = _Call.of(attention, arguments["q"], arguments["k"], arguments["v"], given)
    call.refuse_places(keys_are_whole=call.fan_in is None)
    how = call.planned("forward", chosen["kernel"], chosen["tiles"])
    out, lse = graphs.forward(call.parts, how, call.fan_in)
    return (out, lse) if return_lse else out


def vjp_of_others(vjp: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[Any, Pullback]:
    """``vjp`` of Dask arrays. arguments: those of the call by name."""
    given = given_arguments(vjp, arguments)
    flags = {x: read_flag(x, given.pop(x, False)) for x in ("return_lse", "deterministic")}
    kernel, backward_kernel = (given.pop(f"{x}kernel", "auto") for x in ("", "backward_"))
    tiles, backward_tiles = (given.pop(f"{x}tiles", None) for x in ("", "backward_"))
    call = _Call.of(vjp, arguments["q"], arguments["k"], arguments["v"], given)
    call.refuse_places(keys_are_whole=False)
    deterministic = flags["deterministic"]
    how = call.planned("backward", backward_kernel, backward_tiles, deterministic=deterministic)
    out, lse = graphs.forward(call.parts, call.planned("forward", kernel, tiles), call.fan_in)
    pull = partial(_pullback, call.parts, how, (out, lse))
    return ((out, lse) if flags["return_lse"] else out), pull


def _pullback(
    parts: graphs.Parts,
    how: Mapping[str, Any],
    results: tuple[da.Array, da.Array],
    dout: da.Array,
    dlse: da.Array | None = None,
) -> tuple[da.Array, ...]:
    out, lse = results
    of_rows = [_like("dout", dout, out, parts.q.dtype), out, lse]
    if dlse is not None:
        of_rows.append(_like("dlse", dlse, lse, lse.dtype))
    return graphs.backward(parts, how, of_rows)


@dataclass(frozen=True)
class _Call:
    """A call whose arguments were checked.

    fan_in: how many results are merged at a time; None if keys are gathered. how: what tasks hand
    on besides the kernel and its constants.
    """

    parts: graphs.Parts
    fan_in: int | None
    limits: Limits
    how: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        q: Any,
        k: Any,
        v: Any,
        given: Mapping[str, Any],
    ) -> _Call:
        """given: keyword arguments of the function, without kernels and tiles."""
        others = dict(given)
        backend, devices = read_devices(others.pop("backend", "auto"))
        if devices.numbers is not None or devices.progress is not None:
            raise Unsupported(
                "backend is Devices with numbers or progress, and workers have devices of their "
                "own; give it limits alone: dask.diagnostics.ProgressBar shows progress"
            )
        check = read_flag("check", others.pop("check", False))
        out, captured = others.pop("out", None), others.get("captured")
        fan_in = None
        if isinstance(k, MergedKeys) or isinstance(v, MergedKeys):
            fan_in = whole("fan_in", next(x.fan_in for x in (k, v) if hasattr(x, "fan_in")), 2)
            k, v = (x.array if isinstance(x, MergedKeys) else x for x in (k, v))
        asked = refused_arguments.options_of(function, others, out)
        for name, x in zip("qkv", (q, k, v)):
            _check_array(name, x)
        chosen = refused_arguments.without_dropout(AttentionOptions.of(None, asked))
        problem = Problem.of(q, k, v, options=chosen, operands=refused_arguments.numbers(captured))
        problem = refused_arguments.without_e4m3(problem)
        limits = devices.limits
        if limits is None:
            limits = adopt(backend, q=q._meta, k=k._meta, v=v._meta)[0].limits
        parts = graphs.Parts.of(q, k, v, problem, captured)
        return cls(parts, fan_in, limits, {"backend": backend, "check": check})

    def refuse_places(self, *, keys_are_whole: bool) -> None:
        """Raises Unsupported for expressions that name what a task does not know.

        keys_are_whole: whether tasks take all keys from the first on.
        """
        cut = self.parts.cut_axes
        for place, name in places(self.parts.problem.options).items():
            axis = _AXES[place]
            if axis in cut and not (keys_are_whole and place in ("position", "key")):
                instead = "write position - key, or " * (axis in ("queries", "keys"))
                raise Unsupported(
                    f"{name} names {place}, and tasks count from 0 in each of the {cut[axis]} "
                    f"chunks of {axis}; {instead}rechunk {axis} to one chunk"
                )

    def planned(
        self,
        operation: str,
        kernel: str | Kernel,
        tiles: Tiles | None,
        *,
        deterministic: bool = False,
    ) -> dict[str, Any]:
        """What tasks hand on, with the kernel and its constants for the whole problem."""
        problem = self.parts.problem
        return {
            **self.how,
            **planned(operation, problem, self.limits, kernel, tiles, deterministic=deterministic),
        }


def _check_array(name: str, array: Any) -> None:
    """Raises for what is no Dask array [batch, heads, rows, d] of known chunks."""
    if not isinstance(array, da.Array):
        raise TypeError(
            f"{name} is {described(array)}; give a Dask array, as "
            f"dask.array.from_array({name}, chunks=(1, -1, 4096, -1))"
        )
    if array.ndim != 4:
        raise ValueError(
            f"{name} has shape {array.shape}; give [batch, heads, rows, d]: {name}[None] has one "
            "more axis"
        )
    if any(isnan(size) for size in array.shape):
        raise ValueError(
            f"{name} has shape {array.shape}, and tasks are made by the sizes of chunks; call "
            f"{name}.compute_chunk_sizes() before"
        )


def _like(name: str, array: Any, result: da.Array, dtype: Any) -> da.Array:
    """A gradient with the chunks of its result. Raises for one of another shape or dtype."""
    of = name.removeprefix("d")
    if not isinstance(array, da.Array):
        raise TypeError(f"{name} is {described(array)}; give a Dask array like {of}")
    if array.shape != result.shape:
        raise ValueError(f"{name} has shape {array.shape}; it must be {result.shape}, that of {of}")
    if array.dtype != dtype:
        like = of if dtype == result.dtype else "q"
        raise TypeError(f"{name} is {array.dtype}; it must be {dtype}, as {like}: convert it")
    return array.rechunk(result.chunks)
