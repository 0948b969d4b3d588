"""Checks a call's arrays, and makes views and copies that kernels can read and write."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cupyfa.errors import described
from cupyfa.planner.plan import Plan, aligned_width
from cupyfa.problem.dtypes import E4M3
from cupyfa.problem.optional_inputs import name_of
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.kernel_arguments import can_be_boxed

Arrays = Mapping[str, Any]


def extent(array: Any) -> tuple[int, int]:
    """Returns the begin and end of an array's memory, in bytes relative to element 0."""
    if array.size == 0:
        return 0, 0
    reach = [(size - 1) * stride for size, stride in zip(array.shape, array.strides)]
    low, high = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach)
    return low, high + array.dtype.itemsize


def contiguous_strides(shape: Sequence[int], dtype: np.dtype) -> tuple[int, ...]:
    """Returns the strides of a contiguous array, in bytes."""
    return tuple(dtype.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def address_of(array: Any) -> int:
    """Returns the address of element 0 of a NumPy or CuPy array."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def overlap(a: Any, b: Any) -> bool:
    """Returns whether the memory ranges of two arrays intersect."""
    if isinstance(a, np.ndarray):
        return np.may_share_memory(a, b)
    (low_a, high_a), (low_b, high_b) = extent(a), extent(b)
    start_a, start_b = address_of(a), address_of(b)
    return start_a + low_a < start_b + high_b and start_b + low_b < start_a + high_a


def share_memory(a: Any, b: Any) -> bool:
    """Returns whether two arrays may have elements in common.

    Unlike ``overlap``, it recognises that array[:, 0] and array[:, 1] have no common elements.
    """
    if not overlap(a, b):
        return False
    axes = [[(n, abs(s)) for n, s in zip(x.shape, x.strides) if n > 1] for x in (a, b)]
    strides = sorted({s for x in axes for _, s in x})
    start, other = (address_of(x) + extent(x)[0] for x in (a, b))
    for i, period in enumerate(strides):
        if not period or any(s % period for s in strides[i:]):
            continue
        size, its = (
            x.dtype.itemsize + sum((n - 1) * s for n, s in inner if s < period)
            for x, inner in zip((a, b), axes)
        )
        after = (other - start) % period
        if size <= after and after + its <= period:  # disjoint in one period, hence in all periods
            return False
    return True


def is_masked(array: Any) -> bool:
    """Returns whether an array is a MaskedArray. Does not import numpy.ma, which would be slow."""
    kind = getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())
    return isinstance(array, kind)


# Results


def target(
    backend: Backend,
    name: str,
    given: Any,
    shape: tuple[int, ...],
    dtype: np.dtype,
    inputs: Arrays,
    view: Callable[[Any], Any],
) -> Any | None:
    """Returns the caller's array for a result if the kernel can write it in place, else None.

    ``inputs`` are the call's arrays by name, ``view`` views an array in the kernel's layout. If
    this returns None, the result is copied into the caller's array at the end. Raises TypeError or
    ValueError if the array cannot hold the result or overlaps an input.
    """
    first = next(iter(inputs.values()))
    on_host = isinstance(first, np.ndarray)
    if not (isinstance(given, np.ndarray) if on_host else backend.owns(given)):
        kind = "NumPy" if on_host else "CuPy"
        raise TypeError(
            f"{name} is {described(given)}, but the inputs are {kind} arrays; pass a {kind} array"
        )
    if is_masked(given):
        raise TypeError(f"{name} is a MaskedArray, but kernels ignore masks; pass {name}.data")
    require_one_device(backend, {"the inputs": first, name: given})
    require_form(name, given, shape, dtype)
    if _overlaps_itself(given):
        raise ValueError(
            f"{name} has shape {given.shape} and strides {given.strides}, so its elements share "
            "memory; pass an array whose elements do not overlap"
        )
    if on_host and not given.flags.writeable:
        raise ValueError(f"{name} is read-only; pass a writable array")
    for other, array in inputs.items():
        if overlap(given, array):
            raise ValueError(
                f"{name} overlaps the input {name_of(other)}, which must not be written; "
                f"pass an array with separate memory, or leave {name} out"
            )
    in_place = not backend.owns(first) or (backend.writes_in_place and columns_contiguous(given))
    return given if in_place and address_of(view(given)) == address_of(given) else None


def require_form(name: str, given: Any, shape: Sequence[int], dtype: Any) -> None:
    """Raises ValueError unless a caller's array has the shape and dtype of the result."""
    if tuple(given.shape) != tuple(shape) or given.dtype != dtype:
        raise ValueError(
            f"{name} is {given.dtype} {tuple(given.shape)}, but the result is {dtype} "
            f"{tuple(shape)}; pass an array of that dtype and shape"
        )


def require_one_device(backend: Backend, arrays: Arrays) -> None:
    """Raises ValueError if arrays of the backend are on different devices."""
    devices = [backend.form(x)[3:] for x in arrays.values() if backend.owns(x)]
    if len(set(devices)) > 1:
        *names, last = arrays
        where = ", ".join(str(number) for (number,) in devices)
        raise ValueError(
            f"{', '.join(names)} and {last} are on devices {where}; copy all arrays to one device"
        )


def is_writable(plan: Plan, name: str, array: Any) -> bool:
    """Returns whether a kernel can write an output directly.

    The kernel writes the planned shape, which has one column if the caller's array has zero
    columns. It supports strides only with the feature "strides". TMA stores groups of 16 bytes, so
    an array written by TMA needs rows whose size is a multiple of 16 bytes.
    """
    shape, _ = plan.outputs[name]
    aligned = plan.stored_shape(name) == shape and (
        name not in plan.boxed or can_be_boxed(array, address_of(array))
    )
    return _takes_strides(plan, name, array) and aligned and tuple(array.shape) == shape


# Inputs


def readable_inputs(plan: Plan, inputs: Arrays) -> dict[str, Any]:
    """Returns inputs that a kernel can read; copies an input only if necessary.

    Kernels count strides in elements and need contiguous columns; TMA needs rows that begin at
    multiples of 16 bytes, and elements that are read in pairs need aligned pairs. An input with
    zero columns is replaced with the planned column of zeros, which does not change the scores.
    """
    seen = {
        name: _as_bytes(array) if _is_plain(plan, name, array) else _as_bytes(array).copy()
        for name, array in with_planned_shapes(plan, inputs).items()
    }
    aligned = {
        name: array
        if _has_aligned_rows(plan, name, array)
        else _with_aligned_rows(array, repeats=name not in plan.boxed)
        for name, array in seen.items()
    }
    return {name: _with_dtype(array, inputs[name].dtype) for name, array in aligned.items()}


def is_readable(plan: Plan, name: str, array: Any) -> bool:
    """Returns whether a kernel can read an input without a copy."""
    shape = plan.operation.inputs_of(plan.problem)[name].shape(plan.problem)
    aligned = _has_aligned_rows(plan, name, array)
    return tuple(array.shape) == shape and _is_plain(plan, name, array) and aligned


def with_planned_shapes(plan: Plan, inputs: Arrays) -> dict[str, Any]:
    """Returns the inputs in their planned shapes; inputs with zero columns become zeros."""
    known = plan.operation.inputs_of(plan.problem)
    shapes = {name: known[name].shape(plan.problem) for name in inputs}
    return {
        name: array if tuple(array.shape) == shapes[name] else _zeros_like(array, shapes[name])
        for name, array in inputs.items()
    }


def _takes_strides(plan: Plan, name: str, array: Any) -> bool:
    strided = "strides" in plan.kernel.features and name not in plan.pointed
    return strided or array.flags.c_contiguous


def _is_plain(plan: Plan, name: str, array: Any) -> bool:
    aligned = not isinstance(array, np.ndarray) or array.flags.aligned
    return _takes_strides(plan, name, array) and aligned and columns_contiguous(array)


def _zeros_like(array: Any, shape: tuple[int, ...]) -> Any:
    zeros = np.empty_like(_as_bytes(array), order="C", shape=shape)
    zeros[...] = 0
    return _with_dtype(zeros, array.dtype)


def _as_bytes(array: Any) -> Any:
    """Views an e4m3 array as bytes, since CuPy cannot copy e4m3; returns other arrays unchanged."""
    return array.view(np.uint8) if array.dtype == E4M3 else array


def _with_dtype(array: Any, dtype: np.dtype) -> Any:
    """Undoes ``_as_bytes``: views an array as ``dtype``."""
    return array if array.dtype == dtype else array.view(dtype)


def _has_aligned_rows(plan: Plan, name: str, array: Any) -> bool:
    if name in plan.boxed:
        return can_be_boxed(array, address_of(array))
    if name not in plan.paired or array.size == 0:
        return True
    pair = plan.paired[name]
    starts = [address_of(array), *(s for n, s in zip(array.shape[:-1], array.strides) if n > 1)]
    return all(x % pair == 0 for x in starts)


def _with_aligned_rows(array: Any, *, repeats: bool) -> Any:
    """Copies an array into aligned rows. With ``repeats``, axes of stride 0 are not expanded."""
    axes = zip(array.shape, array.strides)
    repeated = [repeats and n > 1 and stride == 0 for n, stride in axes]
    once = array[tuple(slice(1) if x else slice(None) for x in repeated)]
    width = aligned_width(array.shape[-1], array.dtype.itemsize)
    # np.empty_like uses the array's library, which aligns memory to at least 16 bytes.
    memory = np.empty_like(once, order="C", shape=(*once.shape[:-1], width))
    copy = memory[..., : array.shape[-1]]
    copy[...] = once
    if repeats and width > array.shape[-1]:  # 16-byte copies read past the ends of rows
        memory[..., array.shape[-1] :] = 0
    return np.broadcast_to(copy, array.shape) if any(repeated) else copy


def columns_contiguous(array: Any) -> bool:
    """Returns whether the last axis is contiguous and the element size divides all strides."""
    size = array.dtype.itemsize
    return (array.shape[-1] <= 1 or array.strides[-1] == size) and not any(
        stride % size for stride in array.strides
    )


def _overlaps_itself(array: Any) -> bool:
    """Returns whether elements may share memory.

    Also returns True if axes are interleaved but no elements overlap.
    """
    axes = sorted((abs(x), size) for x, size in zip(array.strides, array.shape) if size > 1)
    end = array.dtype.itemsize  # number of bytes that the axes so far span
    for stride, size in axes:
        if stride < end and array.size:
            return True
        end += (size - 1) * stride
    return False
