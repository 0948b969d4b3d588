"""The functions of Dask arrays: arguments are checked and plans made before a graph is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import isnan
from typing import Any, Literal

import dask.array as da

from cupyfa.call.call import BackendName, Tiles
from cupyfa.dask import graphs
from cupyfa.errors import Unsupported, described
from cupyfa.ladder.kernel import Kernel
from cupyfa.partition import refused_arguments
from cupyfa.partition.part_call import planned
from cupyfa.partition.position_names import places
from cupyfa.planner.plan import Limits
from cupyfa.problem.options import NOT_GIVEN, OPTIONS, AttentionOptions, Causal, read_flag
from cupyfa.problem.problem import Problem, whole
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.choose_backend import adopt

Keys = Literal["gather", "merge"]
Pullback = Callable[..., tuple[da.Array, ...]]

# The axis that each name in an expression counts.
_AXES = {
    **{"batch": "batch", "head": "heads"},
    **dict.fromkeys(("query", "queries"), "queries"),
    **dict.fromkeys(("position", "key", "keys"), "keys"),
}


def attention(
    q: da.Array,
    k: da.Array,
    v: da.Array,
    *,
    causal: Causal | bool | None = NOT_GIVEN,
    keys: Keys = "gather",
    fan_in: int = 4,
    return_lse: bool = False,
    kernel: str | Kernel = "auto",
    tiles: Tiles | None = None,
    backend: BackendName | Backend = "auto",
    limits: Limits | None = None,
    check: bool = False,
    options: AttentionOptions | None = None,
    captured: Mapping[str, Any] | None = None,
    **others: Any,
) -> Any:
    """``cupyfa.attention`` of Dask arrays: softmax(q kᵀ · scale) v, computed by tasks.

    q [batch, heads, M, d], k [batch, kv_heads, N, d], v [batch, kv_heads, N, dv] of one dtype:
    float16, bfloat16, float32 or float64. Their chunks are NumPy or CuPy arrays. Chunks of k
    divide batch and heads; q and v are rechunked like them where they differ, and d and dv are not
    divided. Rows of q and of k may have any chunks.

    keys: "gather": a task for each chunk of q takes all keys that its rows see, in one call.
        "merge": a task for each chunk of q and each chunk of keys that it sees, and tasks that
        merge ``fan_in`` results at a time with ``cupyfa.merge``, in the order of the keys. These
        results of 16-bit inputs are in float32, so that out is rounded once.
    kernel, tiles: as for ``cupyfa.attention``. They are chosen once, for the whole problem, by the
        process that calls; all tasks use them.
    backend: where tasks run: "cuda", "simulator", "auto", or a Simulator.
    limits: of the device to plan for, by default that of the calling process.
    check: also compare the result of each task with the reference.
    captured: the numbers that score_mod and mask_mod name.
    options, others: causal, window, offset, scale, softcap, score_mod, mask_mod, out_dtype and
        precision, as for ``cupyfa.attention``. Expressions may name the score and position - key;
        with "gather" also position and key alone; other places where their axis has one chunk.

    Returns the lazy array out [batch, heads, M, dv], with the chunks of q; with ``return_lse`` also
    lse [batch, heads, M] in float32 (float64 for float64). With "gather" out has the bits of one
    call with the same kernel and tiles if rows are cut at multiples of its tiles, except with
    kernels that docs/many-gpus.md names.

    Raises TypeError and ValueError for wrong arguments, Unsupported for arrays besides q, k and v,
    for dropout and for expressions that name more, all of them before anything is computed. Tasks
    raise what ``cupyfa.attention`` raises.
    """
    call = _Call.of(
        attention, q, k, v, {"causal": causal, **others},
        keys=keys, fan_in=fan_in, backend=backend, limits=limits, check=check,
        options=options, captured=captured,
    )  # fmt: skip
    return_lse = read_flag("return_lse", return_lse)
    call.refuse_places(keys_are_whole=call.fan_in is None)
    out, lse = graphs.forward(call.parts, call.planned("forward", kernel, tiles), call.fan_in)
    return (out, lse) if return_lse else out


def attention_vjp(
    q: da.Array,
    k: da.Array,
    v: da.Array,
    *,
    causal: Causal | bool | None = NOT_GIVEN,
    keys: Keys = "gather",
    fan_in: int = 4,
    return_lse: bool = False,
    deterministic: bool = False,
    kernel: str | Kernel = "auto",
    backward_kernel: str | Kernel = "auto",
    tiles: Tiles | None = None,
    backward_tiles: Tiles | None = None,
    backend: BackendName | Backend = "auto",
    limits: Limits | None = None,
    check: bool = False,
    options: AttentionOptions | None = None,
    captured: Mapping[str, Any] | None = None,
    **others: Any,
) -> tuple[Any, Pullback]:
    """``attention`` of Dask arrays, and the function that gives its gradients.

    Returns out and ``pullback``; ``pullback(dout)`` takes a Dask array like out, of the dtype of q,
    and gives the lazy arrays dq, dk and dv, with the shapes, dtypes and chunks of q, k and v after
    rechunking; with ``out_dtype="float32"`` they are in float32. With ``return_lse`` it returns
    (out, lse) and ``pullback``; ``pullback(dout, dlse)`` takes the gradient of lse too. Compute out
    and the gradients together, ``dask.compute(out, *gradients)``: else the attention is computed
    twice.

    A task for each chunk of q takes the keys that it sees and gives dq. A task for each chunk of k
    takes all rows that see it and gives dk and dv. So nothing is added up, at the price that the
    products are computed twice; if rows and keys have one chunk each, one task gives all three.
    With ``deterministic`` every run gives the same bits, also where a task is repeated.
    ``backward_kernel`` and ``backward_tiles`` are for the gradients. The other arguments, and what
    is raised, are those of ``attention``; expressions may name position or key alone only where
    keys have one chunk.
    """
    call = _Call.of(
        attention_vjp, q, k, v, {"causal": causal, **others},
        keys=keys, fan_in=fan_in, backend=backend, limits=limits, check=check,
        options=options, captured=captured,
    )  # fmt: skip
    return_lse = read_flag("return_lse", return_lse)
    deterministic = read_flag("deterministic", deterministic)
    call.refuse_places(keys_are_whole=False)
    how = call.planned("backward", backward_kernel, backward_tiles, deterministic=deterministic)
    out, lse = graphs.forward(call.parts, call.planned("forward", kernel, tiles), call.fan_in)
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
        others: Mapping[str, Any],
        *,
        keys: str,
        fan_in: int,
        backend: BackendName | Backend,
        limits: Limits | None,
        check: bool,
        options: AttentionOptions | None,
        captured: Mapping[str, Any] | None,
    ) -> _Call:
        """others: options by name, and arguments that the function may not have."""
        if not isinstance(keys, str) or keys not in ("gather", "merge"):
            raise ValueError(f"keys is {described(keys)}; use 'gather' or 'merge'")
        fan_in, check = whole("fan_in", fan_in, 2), read_flag("check", check)
        refused_arguments.refuse_others(function, others)
        for name, x in zip("qkv", (q, k, v)):
            _check_array(name, x)
        asked = {name: x for name, x in others.items() if name in OPTIONS}
        chosen = refused_arguments.without_dropout(AttentionOptions.of(options, asked))
        problem = Problem.of(q, k, v, options=chosen, operands=refused_arguments.numbers(captured))
        problem = refused_arguments.without_e4m3(problem)
        if limits is None:
            limits = adopt(backend, q=q._meta, k=k._meta, v=v._meta)[0].limits
        parts = graphs.Parts.of(q, k, v, problem, captured)
        how = {"backend": backend, "check": check}
        return cls(parts, None if keys == "gather" else fan_in, limits, how)

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
