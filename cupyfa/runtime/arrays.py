"""One call: the arrays on the way from the caller to a plan and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cupyfa.operations import OPERATIONS
from cupyfa.planner.plan import Plan, aligned_width
from cupyfa.runtime import transfer
from cupyfa.runtime.backend import Backend, allocated, can_be_boxed, is_masked, overlap, run
from cupyfa.runtime.guard import checked

Arrays = Mapping[str, Any]


def target(
    engine: Backend,
    out: Any,
    shape: tuple[int, ...],
    dtype: np.dtype,
    inputs: Arrays,
    view: Callable[[Any], Any],
    name: str = "out",
) -> Any:
    """The array that a result is written to: the caller's, or a new one where the inputs are.

    ``view`` is how the kernel sees it; where that is a copy, the caller's array is filled at the
    end. So it is in the simulator, where kernels may fail. Raises if the caller's array cannot hold
    the result or overlaps an input.
    """
    first = next(iter(inputs.values()))
    if out is None:
        return new(engine, first, shape, dtype)
    on_host, ours = isinstance(first, np.ndarray), engine.owns(first)
    if not (isinstance(out, np.ndarray) if on_host else engine.owns(out)):
        kind = "NumPy" if on_host else "CuPy"
        raise TypeError(
            f"{name} is a {type(out).__name__}, the inputs are {kind} arrays; give a {kind} array"
        )
    if is_masked(out):
        raise TypeError(f"{name} is a MaskedArray, whose mask no kernel knows; give its data")
    require_one_device(engine, {"the inputs": first, name: out})
    if tuple(out.shape) != tuple(shape) or out.dtype != dtype:
        raise ValueError(
            f"{name} is {out.dtype} {tuple(out.shape)}, the result is {dtype} {tuple(shape)}; "
            "give an array like that"
        )
    if _overlaps_itself(out):
        raise ValueError(
            f"{name} has strides {out.strides} for shape {out.shape}, so that elements share "
            "memory; give an array with a place for each"
        )
    if on_host and not out.flags.writeable:
        raise ValueError(f"{name} is read-only; give an array that can be written")
    for other, array in inputs.items():
        if np.may_share_memory(out, array) if on_host else overlap(engine, out, array):
            raise ValueError(
                f"{name} overlaps the input {other}, which must not be written; "
                "give it memory of its own, or leave it out"
            )
    in_place = _columns_contiguous(out) if not on_host else not ours
    if in_place and engine.address(view(out)) == engine.address(out):
        return out
    return new(engine, first, shape, dtype)


def require_one_device(engine: Backend, arrays: Arrays) -> None:
    """Raises if arrays that the engine can reach are on several devices."""
    devices = [engine.form(x)[3:] for x in arrays.values() if engine.owns(x)]
    if len(set(devices)) > 1:
        *names, last = arrays
        where = ", ".join(str(number) for (number,) in devices)
        raise ValueError(f"{', '.join(names)} and {last} are on devices {where}; copy them to one")


def new(engine: Backend, beside: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """An array for a result, where an input lies."""
    if engine.owns(beside):
        return engine.empty(shape, dtype)
    return transfer.fresh(engine, shape, dtype)


def fill(
    engine: Backend,
    plan: Plan,
    inputs: Arrays,
    outputs: Arrays,
    *,
    check: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
    parts: transfer.Parts | None = None,
) -> None:
    """Computes the outputs; with ``check`` from a run among canaries that was found right.

    Arrays are [batch, heads, rows, columns], all on the host or all with the engine, which must
    have every output of the plan. ``parts`` are of the same plan, from call to call. Raises
    WrongResult if a check fails.
    """
    outputs = {name: outputs[name] for name in plan.outputs if name in outputs}
    if not all(map(engine.owns, inputs.values())):
        _fill_on_host(engine, plan, inputs, outputs, check, progress, parts)
        return
    inputs = _seen(plan, inputs)
    written = {name: _writable(engine, plan, name, outputs[name]) for name in outputs}
    if check:
        for name, array in checked(engine, plan, _aligned(plan, inputs), written).items():
            written[name][...] = engine.upload(array)
    else:
        prepared = parts.prepared(engine, plan) if parts else None
        run(engine, plan, _aligned(plan, inputs), written, prepared)
    for name, array in outputs.items():
        if written[name] is not array and array.size:
            array[...] = written[name]


def _fill_on_host(
    engine: Backend,
    plan: Plan,
    inputs: Arrays,
    outputs: Arrays,
    check: bool,
    progress: Callable[[int, int, str], None] | None,
    parts: transfer.Parts | None,
) -> None:
    """``fill`` for arrays that the engine cannot reach."""
    if not check:
        transfer.compute(engine, plan, _shaped(plan, inputs), outputs, progress, parts)
        return
    results = checked(engine, plan, readable_inputs(plan, inputs), {})
    for name, array in outputs.items():
        if array.size:
            array[...] = results[name]


def deliver(result: Any, out: Any) -> Any:
    """A result as the caller gets it: in ``out`` if that was given."""
    if out is None or result is out:
        return result
    out[...] = result
    return out


def readable_inputs(plan: Plan, inputs: Arrays) -> dict[str, Any]:
    """The inputs as a kernel can read them: those that it cannot are copied.

    Kernels count strides in elements and need columns side by side; boxes need rows that begin at
    multiples of 16 bytes. An input without columns becomes the one column of zeros that was planned
    for it, which adds nothing to any score.
    """
    return _aligned(plan, _seen(plan, inputs))


def is_readable(plan: Plan, name: str, array: Any) -> bool:
    """Whether a kernel can read an input as it is."""
    shape = OPERATIONS[plan.kernel.operation].inputs[name].shape(plan.problem)
    boxed = name not in plan.boxed or _can_be_boxed(array)
    return tuple(array.shape) == shape and _is_plain(plan, array) and boxed


def _seen(plan: Plan, inputs: Arrays) -> dict[str, Any]:
    """The inputs with shapes and strides that a kernel can see."""
    return {
        name: array if _is_plain(plan, array) else array.copy()
        for name, array in _shaped(plan, inputs).items()
    }


def _is_plain(plan: Plan, array: Any) -> bool:
    strided = "strides" in plan.kernel.features or array.flags.c_contiguous
    aligned = not isinstance(array, np.ndarray) or array.flags.aligned
    return strided and aligned and _columns_contiguous(array)


def _shaped(plan: Plan, inputs: Arrays) -> dict[str, Any]:
    """The inputs with the shapes that were planned: zeros for one without columns."""
    known = OPERATIONS[plan.kernel.operation].inputs
    shapes = {name: known[name].shape(plan.problem) for name in inputs}
    return {
        name: array if tuple(array.shape) == shapes[name] else _like(array, shapes[name])
        for name, array in inputs.items()
    }


def _like(array: Any, shape: tuple[int, ...]) -> Any:
    """Zeros of an array's own kind."""
    zeros = np.empty_like(array, order="C", shape=shape)
    zeros[...] = 0
    return zeros


def _aligned(plan: Plan, inputs: Arrays) -> dict[str, Any]:
    """The inputs, of which those that are to be boxed and cannot are copied to wider rows."""
    return {
        name: _with_aligned_rows(array)
        if name in plan.boxed and not _can_be_boxed(array)
        else array
        for name, array in inputs.items()
    }


def _can_be_boxed(array: Any) -> bool:
    return can_be_boxed(
        array, array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    )


def _with_aligned_rows(array: Any) -> Any:
    width = aligned_width(array.shape[-1], array.dtype.itemsize)
    # Of the array's own library, whose memory begins at a multiple of 16 bytes.
    memory = np.empty_like(array, order="C", shape=(*array.shape[:-1], width))
    copy = memory[..., : array.shape[-1]]
    copy[...] = array
    return copy


def _columns_contiguous(array: Any) -> bool:
    size = array.dtype.itemsize
    return (array.shape[-1] <= 1 or array.strides[-1] == size) and not any(
        stride % size for stride in array.strides
    )


def _overlaps_itself(array: Any) -> bool:
    """Whether elements share memory; also said of axes that interleave without sharing any."""
    axes = sorted((abs(x), size) for x, size in zip(array.strides, array.shape) if size > 1)
    end = array.dtype.itemsize  # of what lies within the axes so far
    for stride, size in axes:
        if stride < end and array.size:
            return True
        end += (size - 1) * stride
    return False


def _writable(engine: Backend, plan: Plan, name: str, array: Any) -> Any:
    """The output if the kernel can write it as it is, else memory to copy it from."""
    return array if is_writable(engine, plan, name, array) else allocated(engine, plan, name)


def is_writable(engine: Backend, plan: Plan, name: str, array: Any) -> bool:
    """Whether a kernel can write an output as it is.

    The kernel writes the planned shape, which has a column where the caller's may have none, and
    knows its strides only if it says so. Boxes are stored in whole pieces of 16 bytes, so what they
    write has rows of as many.
    """
    shape, _ = plan.outputs[name]
    strided = "strides" in plan.kernel.features or array.flags.c_contiguous
    aligned = plan.stored_shape(name) == shape and (
        name not in plan.boxed or can_be_boxed(array, engine.address(array))
    )
    return strided and aligned and tuple(array.shape) == shape
