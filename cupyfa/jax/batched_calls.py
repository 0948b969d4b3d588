"""Calls under ``jax.vmap``: the mapped axis joins the batch axis, where that computes the same."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
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
from cupyfa.problem.optional_inputs import DLSE, OF_HEADS, OF_PAIRS, PADDED, SEEDS, STARTS
from cupyfa.problem.wrt import QKV
from cupyfa.score.expressions import Expression

# Names of arrays whose first axis is the batch; of bias and mask, whose first axis is the batch or
# 1; and of arrays that may leave out the axis of the batch.
_BY_BATCH = {*ARRAYS["forward"], *ARRAYS["backward"], *(f"mods.{x}" for x in (DLSE, *PADDED))}
_BY_PAIR, _BY_HEAD = ({f"mods.{x}" for x in names} for names in (OF_PAIRS, OF_HEADS))
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
        if _joins(call):
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


def _joins(call: Call) -> bool:
    """Returns whether a mapped axis may become a part of the batch axis.

    Dropout depends on the index of the batch, and packed sequences have no batch axis.
    """
    assert call.options is not None
    return not call.options.dropout and f"mods.{STARTS[0]}" not in call.inputs


def _one_by_one(call: Call, is_batched: Sequence[bool], arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    def compute(some: list[Any]) -> tuple[Any, ...]:
        mapped = iter(some)
        every = [next(mapped) if x else y for x, y in zip(is_batched, arrays)]
        return function_of(call)(tuple(every))

    return jax.lax.map(compute, [x for x, batched in zip(arrays, is_batched) if batched])


def _with_joined_batch(
    call: Call, size: int, is_batched: Sequence[bool], arrays: tuple[Any, ...]
) -> tuple[Any, ...]:
    names = call.array_names
    own = {x: y.shape[int(z) :] for x, y, z in zip(names, arrays, is_batched)}  # unmapped shapes
    batch, differentiated = own["q"][0], {f"mods.{x}" for x in call.wrt if x not in QKV}
    joined, captured = [], []
    for name, array, batched in zip(names, arrays, is_batched):
        array, shape = array if batched else array[None], own[name]
        has_axis = name in _BY_BATCH or name in _BY_PAIR or (name in _BY_HEAD and len(shape) == 2)
        varies = name in _BY_BATCH or (has_axis and shape[0] == batch)
        if not (batched or varies or name in differentiated):
            joined.append(array[0])  # serves all batch elements
        elif has_axis or name in _BY_HEAD:
            array = array if has_axis else array[:, None]
            array = jnp.broadcast_to(array, (size, batch, *array.shape[2:]))
            joined.append(array.reshape(size * batch, *array.shape[2:]))
        else:
            captured.append(name)
            joined.append(jnp.broadcast_to(array, (size, *shape)))
    arrays_read = [x.removeprefix("mods.") for x in captured]
    found = function_of(_rewritten(call, batch, arrays_read))(tuple(joined))
    if call.operation == "forward":
        return tuple(_split(x, size, batch) for x in found)
    of = (x if x in QKV else f"mods.{x}" for x in call.wrt)
    return tuple(
        x if name in captured else _split(x, size, batch, own[name]) for name, x in zip(of, found)
    )


def _rewritten(call: Call, batch: int, captured: Sequence[str]) -> Call:
    """Rewrites a call's expressions for the joined batch of calls of ``batch`` elements each.

    captured: the arrays to which a first axis was added, of these calls.
    """
    assert call.options is not None
    places = _Places(batch, captured)
    changed: dict[str, Any] = {
        x.option: Expression.of(x.option, ast.unparse(places.visit(ast.parse(x.text, mode="eval"))))
        for x in (call.options.score_mod, call.options.mask_mod)
        if x is not None
    }
    return call._replace(options=replace(call.options, **changed)) if changed else call


class _Places(ast.NodeTransformer):
    """Replaces the index of the batch in an expression, and adds a first index to some arrays."""

    def __init__(self, batch: int, arrays: Sequence[str]) -> None:
        self._within, self._call = f"batch % {batch}", f"batch // {batch}"
        self._arrays = arrays

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return _parse(self._within) if node.id == "batch" else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        if getattr(node.value, "id", None) in self._arrays:
            index = node.slice
            others = index.elts if isinstance(index, ast.Tuple) else [index]
            node.slice = ast.Tuple([_parse(self._call), *others], ast.Load())
        return node


def _parse(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _split(array: Any, size: int, batch: int, shape: tuple[int, ...] | None = None) -> Any:
    """Undoes the join of a result. shape: that of the array whose gradient this is.

    Where all batch elements read the same array, its gradient is summed over them.
    """
    split = array.reshape(size, batch, *array.shape[1:])
    if shape is None or prod(split.shape[1:]) == prod(shape):
        return split if shape is None else split.reshape(size, *shape)
    sums = split.astype(jnp.promote_types(array.dtype, jnp.float32)).sum(1)
    return sums.astype(array.dtype).reshape(size, *shape)
