"""Encodes kernel arguments: arrays become a struct Tensor, a pointer or a TMA tensor map."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from cupyfa.planner.plan import BOX_ALIGNMENT, TENSOR, Argument, PlannedLaunch, aligned_width
from cupyfa.problem.dtypes import E4M3
from cupyfa.runtime.backend import Backend, Mapped

BOX_ROW_BYTES = 128  # bytes per row of a TMA box, as in tma.cuh
_BOXED = ("float16", "bfloat16", "uint8")  # supported dtypes of tensor maps
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_LARGEST_STRIDE = 2**40  # bytes; strides of a tensor map must be smaller


def arguments(backend: Backend, step: PlannedLaunch, arrays: Mapping[str, Any]) -> list[Any]:
    """Returns the values of a launch's arguments, laid out like the kernel's parameters."""
    return [
        _passed(backend, step, x, arrays[x.name])
        if x.value is None
        else _filled(backend, x, arrays)
        if x.arrays
        else x.value
        for x in step.arguments
    ]


def _filled(backend: Backend, argument: Argument, arrays: Mapping[str, Any]) -> Any:
    """Fills the arrays of a struct argument: Tensors, or the struct Array of expression.cuh.

    Strides are in elements.
    """
    made = argument.value.copy()
    for name, _ in argument.arrays:
        array, field = arrays[name], name.removeprefix("mods.")
        into = made[field]
        if into.dtype == TENSOR:
            made[field] = _tensor(backend, array, argument.strides)
            continue
        size = array.dtype.itemsize
        into["data"] = backend.address(array)
        into["stride"] = [x // size if n > 1 else 0 for n, x in zip(array.shape, array.strides)]
        into["size"] = array.shape
    return made


def _passed(backend: Backend, step: PlannedLaunch, argument: Argument, array: Any) -> Any:
    if argument.form == "map":
        return backend.tensor_map(describe_map(backend, step, argument.name, array))
    if argument.form:
        return np.uint64(backend.address(array))
    return _tensor(backend, array, argument.strides)


def _tensor(backend: Backend, array: Any, axes: tuple[int | None, ...]) -> np.ndarray:
    """Creates a struct Tensor, with the strides along ``axes`` in elements."""
    size = array.dtype.itemsize
    strides = (0 if axis is None else array.strides[axis] // size for axis in axes)
    return np.array((backend.address(array), *strides), TENSOR)


def describe_map(backend: Backend, step: PlannedLaunch, name: str, array: Any) -> Mapped:
    """Describes the tensor map of an array. Raises ValueError if no tensor map is possible.

    The stride of an axis of one element is never used, so it is replaced with a valid one. An empty
    axis is described as one element, which the kernel must not read.
    """
    dtype, address = array.dtype, backend.address(array) if array.size else 0
    what = f"{step.entry}: {name}.map is of {dtype.name} {array.shape}"
    boxed = "uint8" if dtype == E4M3 else dtype.name
    if boxed not in _BOXED or len(array.shape) != 4:
        raise ValueError(
            f"{what}; TMA requires [batch, heads, rows, columns] in {' or '.join(_BOXED)}"
        )
    if not can_be_boxed(array, address):
        raise ValueError(
            f"{what}, strides {array.strides}, at {address:#x}; TMA requires positive strides, and "
            f"strides and an address that are multiples of {BOX_ALIGNMENT} bytes: copy the array"
        )
    batch, heads, rows, columns = (max(size, 1) for size in array.shape)
    allowed = aligned_width(columns, dtype.itemsize) * dtype.itemsize
    of_batch, of_head, of_row = (
        stride if array.size and size > 1 else allowed
        for size, stride in zip(array.shape, array.strides[:3])
    )
    box_rows, box_heads = step.boxes[name], step.box_heads.get(name, 1)
    if box_heads > 1:  # the rows of a box are ordered by row, then by head
        sizes, strides = (columns, heads, rows, batch), (of_head, of_row, of_batch)
        return Mapped(address, boxed, sizes, strides, (box_heads, box_rows // box_heads))
    sizes, strides = (columns, rows, heads, batch), (of_row, of_head, of_batch)
    return Mapped(address, boxed, sizes, strides, (box_rows, 1))


def can_be_boxed(array: Any, address: int) -> bool:
    """Returns whether a tensor map can describe an array whose columns are contiguous.

    Its rows must begin at multiples of 16 bytes, and its strides must be positive.
    """
    strides = [s for n, s in zip(array.shape[:-1], array.strides) if n > 1] if array.size else []
    return (not array.size or address % BOX_ALIGNMENT == 0) and all(
        0 < s < _LARGEST_STRIDE and s % BOX_ALIGNMENT == 0 for s in strides
    )


def blank_map() -> np.ndarray:
    """Returns zeroed memory for a struct TensorMap, with the required alignment."""
    memory = np.zeros(_MAP_BYTES + _MAP_ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _MAP_ALIGNMENT
    return memory[start : start + _MAP_BYTES].view(f"V{_MAP_BYTES}").reshape(())
