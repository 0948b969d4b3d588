"""Optional inputs of a call: bias, mask, lengths, scales, captured arrays and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from cupyfa.arrays.block_mask import BlockMask
from cupyfa.call.call import Call
from cupyfa.call.keywords import read_shape
from cupyfa.errors import described
from cupyfa.problem import optional_inputs, shape_language
from cupyfa.problem.optional_inputs import Operand
from cupyfa.problem.problem import sizes_of
from cupyfa.problem.wrt import QKV
from cupyfa.runtime import ragged
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.choose_backend import as_array

TANGENTS = "tangents"  # the key of the tangents of bias and other arrays of scores, by name
# Names of optional inputs, in argument order.
_NAMES = (
    *(
        *optional_inputs.OWN_ARRAYS,
        optional_inputs.DLSE,
        *optional_inputs.LENGTHS,
        optional_inputs.PAGE_TABLE,
    ),
    *optional_inputs.SCALES,
    *optional_inputs.DESCALES,
    *optional_inputs.SEEDS,
)


def add_inputs(
    call: Call,
    backend: Backend,
    arrays: Sequence[Any],
    given: Mapping[str, Any],
    look: bool = False,
) -> tuple[Call, Sequence[Any]]:
    """Adds optional inputs to a call; returns the call and all of its arrays.

    arrays: the operation's required arrays, NumPy or CuPy. given: the optional arrays and captured
    numbers by name, and under TANGENTS the tangents of such arrays. look: whether to check lengths
    in GPU memory, too. Raises TypeError or ValueError for wrong inputs.
    """
    blocks, given = split_block_mask(given)
    if not given:
        return call._replace(blocks=blocks), arrays
    by_name = dict(zip(call.array_names, arrays))
    captured = {} if (x := given.get("captured")) is None else x
    if not isinstance(captured, Mapping):
        raise TypeError(f'captured is {described(captured)}; pass a dict {{"name": array}}')
    names = _NAMES if _has_dropout(call) else _NAMES[: -len(optional_inputs.SEEDS)]
    found = {x: as_array(backend, x, given[x]) for x in names if given.get(x) is not None}
    q = by_name["q"]
    if optional_inputs.STARTS[0] in found:
        call = call._replace(layout="bshd")
        found |= _read_offsets(by_name, found, look, backend)
    elif lengths := {x: found[x] for x in optional_inputs.PADDED if x in found}:
        table = found.get(optional_inputs.PAGE_TABLE)
        batch, _, M, _ = sizes_of("q", q, call.layout)
        most = 1 if table is None else table.shape[1]  # pages per sequence
        rows = M, sizes_of("k", by_name["k"], call.layout)[2] * most
        download = backend.download if look else None
        found |= ragged.padded_lengths(lengths, batch, rows, download)
    by_key = sorted(captured.items(), key=lambda item: str(item[0]))
    captured = {name: as_array(backend, f"captured {name}", x) for name, x in by_key}
    has_no_sequence = False
    if optional_inputs.STARTS[0] in found:
        if has_no_sequence := ragged.has_no_sequence(found):
            captured = {name: ragged.with_elements(x) for name, x in captured.items()}
        found = ragged.with_a_sequence(found)
    operands = [optional_inputs.of_value(name, x) for name, x in found.items()]
    if numbers := [x.name for x in operands if not x.is_array]:
        raise TypeError(
            f"{numbers[0]} is {described(given[numbers[0]])}; pass an array with at least one axis"
        )
    operands += [optional_inputs.operand(name, x) for name, x in captured.items()]
    every = {**found, **captured}
    beside_q = [backend.move_beside(q, every[x.name]) for x in operands if x.is_array]
    call, moving = _name_inputs(call, operands, blocks), dict(given.get(TANGENTS) or {})
    if has_no_sequence:
        moving |= {x: ragged.with_elements(y) for x, y in moving.items() if x in captured}
    call = call._replace(inputs=(*call.inputs, *map(optional_inputs.gradient_of, moving)))
    tangents = (as_array(backend, f"the tangent of {name}", x) for name, x in moving.items())
    return call, (*arrays, *beside_q, *(backend.move_beside(q, x) for x in tangents))


def _read_offsets(
    by_name: Mapping[str, Any], found: Mapping[str, Any], look: bool, backend: Backend
) -> dict[str, Any]:
    """Checks packed arrays; returns their sequences' offsets and lengths."""
    check_packed(by_name)
    names = (*optional_inputs.STARTS, *optional_inputs.USED)
    offsets = {name: found[name] for name in names if name in found}
    if isinstance(by_name["q"], np.ndarray):  # the host splits the call, so it reads the offsets
        offsets = {name: backend.move_beside(by_name["q"], x) for name, x in offsets.items()}
    download = backend.download if look else None
    return ragged.lengths(by_name["q"], by_name["k"], offsets, download)


def check_packed(named: Mapping[str, Any]) -> None:
    """Raises ValueError unless the arrays, or shapes, in ``named`` have three axes."""
    for name, x in named.items():
        shape = getattr(x, "shape", x)
        if name != "lse" and isinstance(shape, tuple) and len(shape) != 3:
            raise ValueError(
                f"{name} has shape {shape}; a Packed array must be [rows, heads, columns]"
            )


def _name_inputs(call: Call, operands: Sequence[Operand], blocks: BlockMask | None) -> Call:
    """Returns the call with the operands' names, captured numbers and block mask."""
    return call._replace(
        inputs=(*call.inputs, *(x.input for x in operands if x.is_array)),
        numbers=tuple(x for x in operands if not x.is_array),
        blocks=blocks,
    )


def split_block_mask(given: Mapping[str, Any]) -> tuple[BlockMask | None, dict[str, Any]]:
    """Splits optional inputs into the block mask, or None, and all remaining inputs."""
    mask = given.get(optional_inputs.MASK)
    if not isinstance(mask, BlockMask):
        return None, dict(given)
    return mask, {name: x for name, x in given.items() if name != optional_inputs.MASK}


def _has_dropout(call: Call) -> bool:
    """Returns whether a call uses dropout; its options may not have been checked yet."""
    return bool(getattr(call.options, "dropout", None) or call.asked.get("dropout"))


def add_input_forms(
    call: Call, inputs: Mapping[str, Any], given: Mapping[str, Any], dtype: str
) -> tuple[Call, list[tuple[tuple[int, ...], np.dtype]]]:
    """Like ``add_inputs``, for a call that is prepared from shapes.

    Returns the call, and the shapes and dtypes of its optional arrays.
    """
    batch, heads, M, _ = sizes_of("q", inputs["q"], call.layout)
    _, kv_heads, N, _ = sizes_of("k", inputs["k"], call.layout)
    blocks, given = split_block_mask(shape_language.of_heads(given, batch, kv_heads))
    packed, is_empty = _read_sequence_shapes(given)
    elements = packed[optional_inputs.STARTS[0]][0] - 1 if packed else batch
    sizes = elements, heads, M, N
    unread = () if _has_dropout(call) else optional_inputs.SEEDS
    others = {name: x for name, x in given.items() if name not in (optional_inputs.DLSE, *unread)}
    others |= packed
    found = list(shape_language.operands(others, sizes, dtype))
    if is_empty:  # grow axes of size 0 to size 1, like ``ragged.with_elements``
        captured = given.get("captured") or ()
        grown = [tuple(max(size, 1) for size in x.shape) for x in found]
        found = [replace(x, shape=y) if x.name in captured else x for x, y in zip(found, grown)]
    shapes = {}
    if (dlse := given.get(optional_inputs.DLSE)) is not None:
        lse = inputs["lse"]
        shapes[optional_inputs.DLSE] = lse.shape
        if read_shape("the shape of dlse", dlse) != lse.shape:
            raise ValueError(f"dlse has shape {dlse}; it must be {lse.shape}, the shape of lse")
        before_dlse = sum(x.name in optional_inputs.OWN_ARRAYS for x in found)
        found.insert(before_dlse, Operand(optional_inputs.DLSE, str(lse.dtype), (batch, heads, M)))
    arrays = [(shapes.get(x.name, x.shape), x.numpy) for x in found if x.is_array]
    return _name_inputs(call, found, blocks), arrays


def _read_sequence_shapes(given: Mapping[str, Any]) -> tuple[dict[str, tuple[int, ...]], bool]:
    """Reads the shapes of packed sequences' offsets and lengths, given as shapes or arrays.

    An empty batch gets the shapes of one sequence, as in ``ragged.with_a_sequence``. Also returns
    whether the batch was empty.
    """
    least = dict.fromkeys(optional_inputs.STARTS, (2,)) | dict.fromkeys(optional_inputs.USED, (1,))
    shapes = {
        name: read_shape(f"the shape of {name}", getattr(given[name], "shape", given[name]))
        for name in least
        if name in given
    }
    is_empty = shapes.get(optional_inputs.STARTS[0]) == (1,)
    return {x: max(y, least[x]) if is_empty else y for x, y in shapes.items()}, is_empty


def describe_inputs(call: Call, inputs: Mapping[str, Any]) -> tuple[Operand, ...]:
    """Returns the problem's operands: the call's optional arrays and captured numbers."""
    lead, found = tuple(inputs["q"].shape[:-3]), []
    for name in call.inputs:
        if not name.startswith("mods."):  # skip arrays that a custom kernel is bound to
            continue
        array, caller_name = inputs[name], name.removeprefix("mods.")
        shape = tuple(map(int, array.shape))
        if caller_name in (optional_inputs.BIAS, optional_inputs.MASK):
            array = optional_inputs.with_four_axes(caller_name, array, lead)
        if caller_name == optional_inputs.DLSE:
            array = array.reshape(prod(lead), *(1, *array.shape)[-2:])
        # In wrt, "q", "k" and "v" are the inputs and not captured arrays of these names.
        asked = caller_name in call.wrt and caller_name not in QKV
        found.append(
            replace(optional_inputs.of_value(caller_name, array), gradient=asked, given=shape)
        )
    return (*found, *call.numbers)
