"""A run among canaries: what a kernel does outside its outputs is seen.

Every array gets memory of its own with margins on both sides, laid out as the caller's array is,
strides and all. Outputs begin as NaN, and margins as bytes of all ones, which is NaN in every
float format: an element nobody wrote shows, a read outside shows in the result, and a write
outside changes the margin. Inputs are compared before and after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyfa.backends import Backend, execute, extent
from cupyfa.planning import Plan
from cupyfa.tolerance import WrongResult

MARGIN = 4096  # bytes on each side: at least 512 elements of any dtype


@dataclass(frozen=True)
class _Guarded:
    """An array inside guarded memory, and that memory as it was before the run."""

    before: np.ndarray
    memory: Any
    array: Any
    offset: int  # of element 0, in bytes

    def elements(self, image: np.ndarray) -> np.ndarray:
        """This array's elements in a host image of its memory."""
        return np.ndarray(
            self.array.shape, self.array.dtype, image, self.offset, self.array.strides
        )


def run_guarded(
    backend: Backend, plan: Plan, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Runs a plan like ``run``, but on copies among canaries; ``outputs`` only lend their strides.

    Returns the outputs as NumPy arrays. Raises WrongResult if a margin or an input was written.
    """
    prepared = [backend.prepare(launch) for launch in plan.launches]
    guarded = {name: _guard(backend, _host(backend, x), x.strides) for name, x in inputs.items()}
    for name, (shape, dtype) in {**plan.outputs, **plan.scratch}.items():
        poison = np.full(shape, np.nan, dtype)
        strides = outputs[name].strides if name in outputs else poison.strides
        guarded[name] = _guard(backend, poison, strides)
    execute(backend, plan, prepared, {name: g.array for name, g in guarded.items()})

    results = {}
    for name, g in guarded.items():
        after = backend.download(g.memory)
        if name in plan.outputs:
            results[name] = g.elements(after).copy()
        _check_memory(plan, name, g, after, written=name not in inputs)
    return results


def _host(backend: Backend, array: Any) -> np.ndarray:
    return backend.download(array) if backend.owns(array) else array


def _guard(backend: Backend, array: np.ndarray, strides: Sequence[int]) -> _Guarded:
    """Guarded memory that holds the elements of an array with the given strides."""
    low, high = extent(np.lib.stride_tricks.as_strided(array, strides=strides))
    offset = MARGIN - low // 16 * 16  # element 0 stays aligned to 16 bytes
    image = np.full(offset + high + MARGIN, 0xFF, np.uint8)
    np.ndarray(array.shape, array.dtype, image, offset, strides)[...] = array
    memory = backend.upload(image.copy())
    view = backend.view(memory, array.shape, array.dtype, offset, strides)
    return _Guarded(before=image, memory=memory, array=view, offset=offset)


def _check_memory(plan: Plan, name: str, g: _Guarded, after: np.ndarray, *, written: bool) -> None:
    """Whether only what may be written was written: the elements of outputs and scratch."""
    after = after.copy()
    if written:
        g.elements(after)[...] = g.elements(g.before)
    changed = np.flatnonzero(after != g.before)
    if changed.size:
        where = int(changed[0]) - g.offset
        what = f"{changed.size} bytes outside {name}" if written else f"its input {name}"
        raise WrongResult(
            f"{plan.kernel.name} on {plan.problem}: the kernel wrote {what}, first at byte "
            f"{where:+d} from its element 0"
        )
