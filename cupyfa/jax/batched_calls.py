"""Calls under ``jax.vmap``: the mapped axis joins the batch axis, where that computes the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cupyfa.call.call import ARRAYS, Call
from cupyfa.jax.array_forms import Form, ShapedCall, vary_alike
from cupyfa.jax.custom_calls import call_on_gpu
from cupyfa.jax.host_calls import call_on_host
from cupyfa.problem.optional_inputs import DLSE, OF_HEADS, OF_PAIRS, PADDED, SEEDS
from cupyfa.problem.wrt import QKV

_BY_BATCH = {*ARRAYS["forward"], *ARRAYS["backward"], DLSE, *PADDED}  # their first axis is batch
_SEED_DTYPE = np.dtype(np.uint64)


@cache
def function_of(call: Call) -> Any:
    """Returns the function that computes a call on JAX arrays, in the order of its names."""

    @jax.custom_batching.custom_vmap
    def compute(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        return _compute(call, arrays)

    @compute.def_vmap
    def rule(size: int, is_batched: Sequence[Any], arrays: tuple[Any, ...]) -> Any:
        (of_arrays,) = is_batched
        if _joins(call, of_arrays):
            found = _with_joined_batch(call, size, of_arrays, arrays)
        else:
            found = _one_by_one(call, of_arrays, arrays)
        return found, (True,) * len(found)

    return compute


def _compute(call: Call, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    shaped = ShapedCall(call, tuple(map(_form, call.array_names, arrays)))
    arrays = vary_alike(arrays, arrays)
    launches = call.backend == "cuda" and not shaped.is_empty
    found = (call_on_gpu if launches else call_on_host)(shaped, arrays)
    return vary_alike(found, arrays)


def _form(name: str, array: Any) -> Form:
    if name.removeprefix("mods.") in SEEDS:  # two uint32, since JAX has no uint64 by default
        return (1,), _SEED_DTYPE
    return tuple(array.shape), np.dtype(array.dtype)


def _joins(call: Call, is_batched: Sequence[bool]) -> bool:
    """Returns whether a mapped axis may become a part of the batch axis.

    It may not if something reads the index of the batch: dropout, packed sequences, expressions
    with ``batch``, and captured arrays that differ along the mapped axis.
    """
    options = call.options
    assert options is not None
    expressions = [x for x in (options.score_mod, options.mask_mod) if x is not None]
    if options.dropout or any("batch" in x.positions for x in expressions):
        return False
    known = {*_BY_BATCH, *OF_HEADS, *OF_PAIRS}
    names = [x.removeprefix("mods.") for x in call.array_names]
    others = [x for x in names if x not in known]
    changing = {name for name, batched in zip(names, is_batched) if batched} | {*call.wrt}
    return not any(x in changing or x.startswith(("cu_seqlens", "seqused")) for x in others)


def _one_by_one(call: Call, is_batched: Sequence[bool], arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    def compute(some: list[Any]) -> tuple[Any, ...]:
        mapped = iter(some)
        every = [next(mapped) if x else y for x, y in zip(is_batched, arrays)]
        return function_of(call)(tuple(every))

    return jax.lax.map(compute, [x for x, batched in zip(arrays, is_batched) if batched])


def _with_joined_batch(
    call: Call, size: int, is_batched: Sequence[bool], arrays: tuple[Any, ...]
) -> tuple[Any, ...]:
    names = [x.removeprefix("mods.") for x in call.array_names]
    own = {x: y.shape[int(z) :] for x, y, z in zip(names, arrays, is_batched)}  # unmapped shapes
    batch = own["q"][0]
    joined = []
    for name, array, batched in zip(names, arrays, is_batched):
        is_lead = name in _BY_BATCH or (name in OF_HEADS and len(own[name]) == 2)
        is_wide = is_lead or name in OF_PAIRS  # has an axis of the batch, of size 1 or batch
        is_common = not is_wide or (name in OF_PAIRS and own[name][0] == 1)
        if is_common and not batched and name not in call.wrt:
            joined.append(array)
            continue
        rest = own[name][1:] if is_wide else own[name]
        array = array if batched else array[None]
        array = array if is_wide else array[:, None]
        array = jnp.broadcast_to(array, (size, batch, *rest))
        joined.append(array.reshape(size * batch, *rest))
    found = function_of(call)(tuple(joined))
    results = call.wrt if call.operation == "backward" else ("out",) * len(found)
    return tuple(
        _parted(x, size, batch, own[name] if name in call.wrt and name not in QKV else None)
        for name, x in zip(results, found)
    )


def _parted(array: Any, size: int, batch: int, shape: tuple[int, ...] | None) -> Any:
    """Undoes the join of a result. shape: that of an optional array whose gradient this is.

    Where all batch elements read the same array, its gradient is summed over them.
    """
    parted = array.reshape(size, batch, *array.shape[1:])
    if shape is None or prod(parted.shape[1:]) == prod(shape):
        return parted if shape is None else parted.reshape(size, *shape)
    return (
        parted.astype(jnp.promote_types(array.dtype, jnp.float32))
        .sum(1)
        .astype(array.dtype)
        .reshape(size, *shape)
    )
