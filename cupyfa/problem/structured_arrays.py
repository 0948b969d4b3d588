"""Arrays with structure: packed sequences, padded batches, and float8 numbers with scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from cupyfa.errors import described
from cupyfa.problem import optional_inputs

_QKV = ("q", "k", "v")


class Structured:
    """An argument with structure that calls take in place of an array."""

    __slots__ = ()


@dataclass(frozen=True, eq=False, slots=True)
class Packed(Structured):
    """Sequences of different lengths, which lie one after the other: a ragged batch.

    array: [rows, heads, columns].
    offsets: [sequences + 1] of int32; rows offsets[i] to offsets[i + 1] - 1 are sequence i, which
        may be empty.
    used: [sequences] of int32, how many of these rows count, from the first on; by default all.

    offsets and used are lists, NumPy arrays, which are checked, or arrays where ``array`` is, which
    kernels read when they run: a captured CUDA graph takes other lengths each time. From wrong ones
    nothing outside the arrays is read or written.
    """

    array: Any
    offsets: Any
    used: Any = None


@dataclass(frozen=True, eq=False, slots=True)
class Padded(Structured):
    """A batch whose elements have different numbers of rows, each padded to the same.

    array: [batch, heads, rows, columns], or [batch, rows, heads, columns] with ``layout="bshd"``.
    lengths: [batch], how many rows of each batch element count, from the first on. Whole numbers in
        a list or a NumPy array, which are checked; or an array of int32 where ``array`` is, which
        kernels read when they run: wrong ones count as the nearest right ones.
    """

    array: Any
    lengths: Any


@dataclass(frozen=True, eq=False, slots=True)
class Scaled(Structured):
    """Numbers of float8_e4m3fn and the scale that each of them is multiplied by.

    array: of float8_e4m3fn (ml_dtypes).
    scale: of float32. In ``attention`` [batch, kv_heads], where batch is the product of all batch
        axes, and all heads of q that share a key head have one scale. In a ``KVCache`` [kv_heads],
        [batch, kv_heads] or, with pages, [pages, kv_heads].
    """

    array: Any
    scale: Any


# The array types that calls recognize, each with the module that implements calls on it; None for
# arrays with structure. Modules add the types that they define.
KINDS: dict[type, str | None] = {
    **dict.fromkeys((Packed, Padded, Scaled)),
    **dict.fromkeys((list, tuple), "cupyfa.call.sequences"),
}


def unwrap(q: Any, k: Any, v: Any) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
    """Splits q, k and v into plain arrays and the optional inputs that their structure implies.

    Raises TypeError and ValueError for structures that do not fit together.
    """
    found: dict[str, dict[type, Structured]] = {}
    arrays = []
    for name, x in zip(_QKV, (q, k, v)):
        layers: dict[type, Structured] = {}
        while isinstance(x, Packed | Padded | Scaled):
            if type(x) in layers:
                raise TypeError(f"{name} is {type(x).__name__} twice; give it once")
            layers[type(x)], x = x, x.array
        if isinstance(x, Structured):
            raise TypeError(
                f"{name} is {described(x)} inside of another structure; give it by itself"
            )
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


# For each field of a structure, the optional inputs that it becomes for q, k and v.
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
    """Raises if some arrays are packed and others are not, or if k and v differ."""
    are_packed = {name: Packed in layers for name, layers in found.items()}
    if len({*are_packed.values()}) > 1:
        one = next(name for name, packed in are_packed.items() if packed)
        other = next(name for name, packed in are_packed.items() if not packed)
        raise TypeError(
            f"{one} is Packed and {other} is not; give q, k and v as Packed(array, offsets)"
        )
    for name, layers in found.items():
        if Packed in layers and Padded in layers:
            raise TypeError(
                f"{name} is Packed and Padded; give {name} as Packed(array, offsets, used), where "
                "used says how many rows of each sequence count"
            )
    for kind in (Packed, Padded):
        k, v = found["k"].get(kind), found["v"].get(kind)
        if v is None and k is None:
            continue
        if k is None or v is None:
            one, other = ("k", "v") if v is None else ("v", "k")
            raise TypeError(
                f"{one} is {kind.__name__} and {other} is not; every key has a value: give both "
                f"as {kind.__name__}"
            )
        for field in fields(kind)[1:]:
            if not _are_same(getattr(k, field.name), getattr(v, field.name)):
                raise ValueError(
                    f"k and v have different {field.name}; every key has a value: give both the "
                    "same array"
                )


def _are_same(a: Any, b: Any) -> bool:
    """Whether two arrays hold the same numbers; numbers on a device are not compared."""
    on_host = (list, tuple, np.ndarray)
    return a is b or (isinstance(a, on_host) and isinstance(b, on_host) and np.array_equal(a, b))
