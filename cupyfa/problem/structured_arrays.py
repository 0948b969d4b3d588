"""Structured arrays: packed sequences, padded batches, and float8 arrays with scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from cupyfa.problem import optional_inputs

_QKV = ("q", "k", "v")


class Structured:
    """Base class of structured arrays, which calls accept in place of plain arrays."""

    __slots__ = ()


@dataclass(frozen=True, eq=False, slots=True)
class Packed(Structured):
    """A ragged batch: sequences of different lengths, packed one after the other.

    array: [rows, heads, columns].
    offsets: [sequences + 1], int32; rows offsets[i] to offsets[i + 1] - 1 are sequence i, which may
        be empty.
    used: [sequences], int32, the number of valid rows at the start of each sequence; by default all
        rows are valid.

    offsets and used may be lists or NumPy arrays, whose values are checked, or arrays on the same
    device as ``array``. Kernels read device arrays at run time, so that every replay of a CUDA
    graph may use different lengths. Invalid values never cause accesses outside the arrays.
    """

    array: Any
    offsets: Any
    used: Any = None


@dataclass(frozen=True, eq=False, slots=True)
class Padded(Structured):
    """A padded batch: elements of different lengths, all padded to the same number of rows.

    array: [batch, heads, rows, columns], or [batch, rows, heads, columns] with ``layout="bshd"``.
    lengths: [batch], the number of valid rows at the start of each batch element. Integers in a
        list or a NumPy array, whose values are checked, or an int32 array on the same device as
        ``array``. Kernels read device arrays at run time and clip invalid lengths.
    """

    array: Any
    lengths: Any


@dataclass(frozen=True, eq=False, slots=True)
class Scaled(Structured):
    """A float8_e4m3fn array and the scales by which its elements are multiplied.

    array: float8_e4m3fn (ml_dtypes).
    scale: float32. For ``attention`` its shape is [batch, kv_heads], where batch is the product of
        all batch axes; query heads that share a key head share a scale. For a ``KVCache`` its shape
        is [kv_heads], [batch, kv_heads] or, if paged, [pages, kv_heads].
    """

    array: Any
    scale: Any


# Maps array types that calls recognize to the module that implements calls on them, or None for
# structured arrays. Other modules add the types that they define.
KINDS: dict[type, str | None] = {
    **dict.fromkeys((Packed, Padded, Scaled)),
    **dict.fromkeys((list, tuple), "cupyfa.call.sequences"),
}


def unwrap(q: Any, k: Any, v: Any) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
    """Splits q, k and v into plain arrays and the optional inputs that their structure implies.

    Raises TypeError or ValueError if q, k and v have incompatible structures.
    """
    found: dict[str, dict[type, Structured]] = {}
    arrays = []
    for name, x in zip(_QKV, (q, k, v)):
        layers: dict[type, Structured] = {}
        while isinstance(x, Packed | Padded | Scaled):
            if type(x) in layers:
                kind = type(x).__name__
                raise TypeError(f"{name} is a {kind} inside another {kind}; wrap {name} only once")
            layers[type(x)], x = x, x.array
        if isinstance(x, Structured):
            raise TypeError(f"{name} wraps a {type(x).__name__}; {name} must wrap a plain array")
        found[name] = layers
        arrays.append(x)
    _require_one_form(found)
    inputs = {
        optional_input: getattr(found[name][kind], field)
        for kind, field, inputs in _INPUTS
        for name, optional_input in zip(_QKV, inputs)
        if kind in found[name]
    }
    return (arrays[0], arrays[1], arrays[2]), {x: y for x, y in inputs.items() if y is not None}


# For each field of a structured array, the optional inputs that it supplies for q, k and v.
_INPUTS = (
    (Packed, "offsets", optional_inputs.STARTS),
    (Packed, "used", optional_inputs.USED),
    (Padded, "lengths", optional_inputs.PADDED),
    (Scaled, "scale", optional_inputs.DESCALES),
)


def wrap(q: Any, k: Any, v: Any, inputs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Rebuilds structured arrays from plain ones and optional inputs; inverts ``unwrap``."""
    made = dict(zip("qkv", (q, k, v)))
    for name in _QKV:
        side = 0 if name == "q" else 1
        if (scale := inputs.get(optional_inputs.DESCALES[_QKV.index(name)])) is not None:
            made[name] = Scaled(made[name], scale)
        if (lengths := inputs.get(optional_inputs.PADDED[side])) is not None:
            made[name] = Padded(made[name], lengths)
        if (offsets := inputs.get(optional_inputs.STARTS[side])) is not None:
            made[name] = Packed(made[name], offsets, inputs.get(optional_inputs.USED[side]))
    return made["q"], made["k"], made["v"]


def _require_one_form(found: Mapping[str, Mapping[type, Structured]]) -> None:
    """Raises if some arrays are packed and others are not, or if k and v differ in structure."""
    are_packed = {name: Packed in layers for name, layers in found.items()}
    if len({*are_packed.values()}) > 1:
        one = next(name for name, packed in are_packed.items() if packed)
        other = next(name for name, packed in are_packed.items() if not packed)
        raise TypeError(
            f"{one} is Packed, but {other} is not; pass q, k and v as Packed(array, offsets)"
        )
    for name, layers in found.items():
        if Packed in layers and Padded in layers:
            raise TypeError(
                f"{name} is Packed and Padded; pass {name} as Packed(array, offsets, used), where "
                "used holds the number of valid rows of each sequence"
            )
    for kind in (Packed, Padded):
        k, v = found["k"].get(kind), found["v"].get(kind)
        if v is None and k is None:
            continue
        if k is None or v is None:
            one, other = ("k", "v") if v is None else ("v", "k")
            raise TypeError(
                f"{one} is {kind.__name__}, but {other} is not; k and v must have the same "
                f"structure: pass both as {kind.__name__}"
            )
        for field in fields(kind)[1:]:
            if not _are_same(getattr(k, field.name), getattr(v, field.name)):
                raise ValueError(
                    f"k and v have different {field.name}; keys and values must have the same "
                    f"{field.name}"
                )


def _are_same(a: Any, b: Any) -> bool:
    """Returns whether two arrays are equal; distinct device arrays are assumed to differ."""
    on_host = (list, tuple, np.ndarray)
    return a is b or (isinstance(a, on_host) and isinstance(b, on_host) and np.array_equal(a, b))
