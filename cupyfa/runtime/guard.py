"""Runs a plan between guard zones; detects out-of-bounds and missing writes.

Every array gets its own memory, with the strides and alignment of the caller's array and a margin
on both sides. The memory is first filled with 0xFF bytes, which are NaN in every float format, so
elements that the kernel does not write stay NaN, out-of-bounds reads produce NaN in a result, and
out-of-bounds writes change a margin. Inputs are compared before and after the run. The checks run
in the backend's memory; only outputs are copied to the host.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cupyfa.errors import WrongResult
from cupyfa.numerics import tolerance
from cupyfa.planner.plan import Plan
from cupyfa.problem.dtypes import DTYPES
from cupyfa.runtime.arrays import address_of, contiguous_strides, extent
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.launcher import replay

MARGIN = 4096  # bytes on each side: at least 512 elements of any dtype
_ONES = 0xFF
FINITE = 0x41  # a byte that fills memory with finite numbers: 12.08 in float32


@dataclass(frozen=True)
class _Guarded:
    memory: Any  # an array's bytes, margins included
    offset: int  # bytes from the start of the memory to element 0
    array: Any
    bits: Any  # the array's elements as unsigned integers


def run_guarded(
    backend: Backend,
    plan: Plan,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    *,
    left: int = _ONES,
) -> dict[str, np.ndarray]:
    """Runs a plan on guarded copies of its inputs, with guarded outputs laid out like ``outputs``.

    left: the initial byte of scratch memory: 0xFF (NaN) by default, or FINITE. NaN reveals reads of
    elements that were never written, unless the kernel recomputes rows that come out as NaN.

    Returns the outputs as NumPy arrays. Raises WrongResult if a margin or an input was written.
    """
    guarded, original = {}, {}
    for name, array in inputs.items():
        guarded[name] = _guarded(backend, array)
        original[name] = backend.upload(array.view(guarded[name].bits.dtype))
        guarded[name].bits[...] = original[name]
    for name, (shape, dtype) in {**plan.outputs, **plan.scratch}.items():
        strides = contiguous_strides(plan.stored_shape(name), dtype)
        new = as_strided(np.empty(0, dtype), shape, strides)  # shape and strides, without memory
        guarded[name] = _guarded(backend, outputs.get(name, new))
        if name in plan.scratch:
            guarded[name].bits[...] = int.from_bytes(bytes([left]) * dtype.itemsize)
    replay(backend, plan, {name: g.array for name, g in guarded.items()})()
    results = {
        name: backend.download(guarded[name].bits.copy()).view(dtype)
        for name, (_, dtype) in plan.outputs.items()
    }
    for name, g in guarded.items():
        if name not in original:  # kernels may write the padding of output rows
            whole = plan.stored_shape(name), g.bits.dtype, g.offset, g.array.strides
            g = replace(g, bits=backend.view(g.memory, *whole))
        _check_memory(plan, name, g, original.get(name))
    return results


def checked(
    backend: Backend, plan: Plan, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Runs a plan with guard zones, compares its results with the reference and returns them.

    Raises WrongResult if a result is wrong.
    """
    results = run_guarded(backend, plan, inputs, outputs)
    on_host = {name: backend.download(x) if backend.owns(x) else x for name, x in inputs.items()}
    expected = plan.operation.reference(on_host, plan.problem, [plan.rounding])[plan.rounding]
    p, context = plan.problem, f"{plan.kernel.name} on {plan.problem}"
    tolerance.require(tolerance.compare(results, expected), context)
    usual = DTYPES[p.dtype.usual_result]
    if p.out_dtype.itemsize > usual.itemsize:
        kinds = {name: x.kind for name, x in plan.operation.outputs_of(p).items()}
        wide = {name: x for name, x in results.items() if kinds.get(name) == "result"}
        tolerance.require_unrounded(wide, expected, usual.name, context)
    return results


def _guarded(backend: Backend, like: Any) -> _Guarded:
    """Allocates guarded memory for an array with the layout and alignment of ``like``."""
    low, high = extent(like)
    memory = backend.empty((MARGIN - low + 15 + high + MARGIN,), np.dtype(np.uint8))
    memory.fill(_ONES)
    offset = MARGIN - low
    offset += (address_of(like) - backend.address(memory) - offset) % 16
    array, bits = (
        backend.view(memory, like.shape, dtype, offset, like.strides)
        for dtype in (like.dtype, np.dtype(f"u{like.dtype.itemsize}"))
    )
    return _Guarded(memory, offset, array, bits)


def _check_memory(plan: Plan, name: str, g: _Guarded, original: Any | None) -> None:
    """Raises WrongResult if the kernel wrote anything but elements of outputs and scratch."""
    # Set all bits of elements that may be written or are unchanged. In a correct run, all bytes
    # then equal the bytes of the margins.
    g.bits[...] = ~(g.bits ^ (g.bits if original is None else original))
    if int(g.memory.min()) == _ONES:
        return
    changed = g.memory != _ONES
    where = int(changed.argmax()) - g.offset
    what = f"{int(changed.sum())} bytes outside {name}" if original is None else f"its input {name}"
    raise WrongResult(
        f"{plan.kernel.name} on {plan.problem}: the kernel wrote {what}; the first byte written "
        f"is at offset {where:+d} from element 0 of {name}"
    )
