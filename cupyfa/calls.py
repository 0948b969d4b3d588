"""One call: the arrays on the way from the caller to a plan and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cupyfa import tolerance
from cupyfa.backends import Backend, allocated, can_be_boxed, overlap, run
from cupyfa.backends.guard import run_guarded
from cupyfa.operations import OPERATIONS
from cupyfa.planning import Plan, aligned_width

Arrays = Mapping[str, Any]


def target(
    engine: Backend,
    out: Any,
    shape: tuple[int, ...],
    dtype: np.dtype,
    inputs: Arrays,
    view: Callable[[Any], Any],
) -> Any:
    """The array a kernel writes its result to: the caller's, if it lies on the GPU, or a new one.

    ``view`` is how the kernel sees it; where that is a copy, the caller's array is filled at the
    end. So is host memory: only when nothing can fail any more. Raises if the caller's array
    cannot hold the result or overlaps an input.
    """
    if out is None:
        return engine.empty(shape, dtype)
    on_host = isinstance(next(iter(inputs.values())), np.ndarray)
    if not (isinstance(out, np.ndarray) if on_host else engine.owns(out)):
        kind = "NumPy" if on_host else "CuPy"
        raise TypeError(
            f"out is a {type(out).__name__}, the inputs are {kind} arrays; give a {kind} array"
        )
    if isinstance(out, np.ma.MaskedArray):
        raise TypeError("out is a MaskedArray, whose mask no kernel knows; give out.data")
    if tuple(out.shape) != tuple(shape) or out.dtype != dtype:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)}, the result is {dtype} {tuple(shape)}; "
            "give an array like that"
        )
    if _overlaps_itself(out):
        raise ValueError(
            f"out has strides {out.strides} for shape {out.shape}, so that elements share memory; "
            "give an array with a place for each"
        )
    if on_host and not out.flags.writeable:
        raise ValueError("out is read-only; give an array that can be written")
    for name, array in inputs.items():
        if np.may_share_memory(out, array) if on_host else overlap(engine, out, array):
            raise ValueError(
                f"out overlaps the input {name}, which must not be written; "
                "give it memory of its own, or drop out="
            )
    in_place = not on_host and _columns_contiguous(out)
    if in_place and engine.address(view(out)) == engine.address(out):
        return out
    return engine.empty(shape, dtype)


def fill(engine: Backend, plan: Plan, inputs: Arrays, outputs: Arrays, *, check: bool) -> None:
    """Computes the outputs; with ``check`` from a run among canaries that was found right.

    Arrays are [batch, heads, rows, columns]. Inputs may lie on the host or with the engine,
    outputs lie with the engine. Raises WrongResult if a check fails.
    """
    inputs = _seen(plan, inputs)
    outputs = {name: outputs[name] for name in plan.outputs}
    written = {name: _writable(engine, plan, name, outputs[name]) for name in outputs}
    if check:
        for name, array in checked(engine, plan, _aligned(plan, inputs), written).items():
            written[name][...] = engine.upload(array)
    else:
        uploaded = {name: engine.upload(x) for name, x in inputs.items()}
        run(engine, plan, _aligned(plan, uploaded), written)
    for name, array in outputs.items():
        if written[name] is not array and array.size:
            array[...] = written[name]


def checked(engine: Backend, plan: Plan, inputs: Arrays, outputs: Arrays) -> dict[str, np.ndarray]:
    """The results of a run among canaries, if they are right; else raises WrongResult."""
    results = run_guarded(engine, plan, inputs, outputs)
    tolerance.require(judge(engine, plan, inputs, results), f"{plan.kernel.name} on {plan.problem}")
    return results


def judge(
    engine: Backend, plan: Plan, inputs: Arrays, results: Mapping[str, np.ndarray]
) -> list[tolerance.Verdict]:
    """How far results lie from the reference."""
    operation = OPERATIONS[plan.kernel.operation]
    on_host = {name: engine.download(x) if engine.owns(x) else x for name, x in inputs.items()}
    expected = operation.expected(on_host, plan.problem, plan.rounding)
    return tolerance.compare(results, expected)


def deliver(engine: Backend, result: Any, out: Any, *, to_host: bool) -> Any:
    """A result as the caller gets it: in ``out`` if that was given, on the host if inputs were."""
    if to_host:
        result = engine.download(result)
    if out is None or result is out:
        return result
    out[...] = result
    return out


def readable(plan: Plan, inputs: Arrays) -> dict[str, Any]:
    """The inputs as a kernel can read them: those that it cannot are copied.

    Kernels count strides in elements and need columns side by side; boxes need rows that begin at
    multiples of 16 bytes. An input without columns becomes the one column of zeros that was planned
    for it, which adds nothing to any score.
    """
    return _aligned(plan, _seen(plan, inputs))


def _seen(plan: Plan, inputs: Arrays) -> dict[str, Any]:
    """The inputs with shapes and strides that a kernel can see."""
    axes = OPERATIONS[plan.kernel.operation].inputs
    arrays = {}
    for name, array in inputs.items():
        shape = plan.problem.shape(axes[name])
        if tuple(array.shape) != shape:
            array = np.zeros(shape, array.dtype)
        strided = "strides" in plan.kernel.features or array.flags.c_contiguous
        aligned = not isinstance(array, np.ndarray) or array.flags.aligned
        plain = strided and aligned and _columns_contiguous(array)
        arrays[name] = array if plain else array.copy()
    return arrays


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
    """The output if the kernel can write it as it is, else memory to copy it from.

    The kernel writes the planned shape, which has a column where the caller's may have none, and
    knows its strides only if it says so. Boxes are stored in whole pieces of 16 bytes, so what they
    write has rows of as many.
    """
    shape, _ = plan.outputs[name]
    strided = "strides" in plan.kernel.features or array.flags.c_contiguous
    aligned = plan.stored_shape(name) == shape and (
        name not in plan.boxed or can_be_boxed(array, engine.address(array))
    )
    as_it_is = strided and aligned and tuple(array.shape) == shape
    return array if as_it_is else allocated(engine, plan, name)
