"""Extra inputs and outputs of custom kernels: the arrays and floats passed to ``bind``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cupyfa.call.call import Call
from cupyfa.ladder.kernel import BoundKernel, Kernel
from cupyfa.problem.problem import Problem
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.choose_backend import adopt, as_array
from cupyfa.runtime.prepared import Result


def add_kernel_arrays(
    call: Call, backend: Backend, arrays: Sequence[Any], *, of_shapes: bool = False
) -> tuple[Call, Sequence[Any]]:
    """Adds to a call the arrays, floats and outputs that its kernel is bound to.

    Returns the call and all of its arrays. Bound arrays may be in host or GPU memory; with
    ``of_shapes`` the kernel must not be bound to any arrays.
    """
    bound = call.kernel
    if not isinstance(bound, BoundKernel):
        return call, arrays
    names = tuple(name for name in bound.kernel.inputs if name in bound.own)
    if of_shapes and names:
        raise TypeError(
            f"{bound.kernel.name} is bound to {', '.join(names)}, but q is a shape; do not bind "
            "arrays when compiling from shapes"
        )
    inputs, outputs = (*call.inputs, *names), (*call.outputs, *bound.returns)
    call = call._replace(kernel=bound.with_floats(), inputs=inputs, outputs=outputs)
    if not names:
        return call, arrays
    theirs = [as_array(backend, name, bound.own[name]) for name in names]
    if others := {x: y for x, y in zip(names, theirs) if not hasattr(y, "dtype")}:
        adopt(backend, **others)  # raises TypeError with the array's name
    return call, (*arrays, *(backend.move_beside(arrays[0], x) for x in theirs))


def check_kernel_arrays(
    record: Kernel,
    p: Problem,
    given: Mapping[str, Any],
    backend: Backend | None,
    lead: tuple[int, ...],
) -> dict[str, Any]:
    """Checks the arrays that a custom kernel is bound to, or allocates them on ``backend``."""
    found = {}
    for name, wanted in record.inputs.items():
        shape, dtype = wanted.shape(p), wanted.dtype(p)
        takes = f"it must be {dtype} {shape}"
        if isinstance(wanted.axes, str):
            takes += f", [{', '.join(wanted.axes.split())}]"
        if not wanted.when(p):
            if name in given:
                raise ValueError(f"{record.name} does not read {name} for {p}; do not bind {name}")
        elif backend is not None:
            found[name] = backend.empty(shape, dtype)
        elif name not in given:
            raise TypeError(
                f"{record.name} requires the array {name}; {takes}: pass "
                f"kernel={record.name}.bind({name}=…)"
            )
        elif tuple(given[name].shape) not in (shape, _with_leading_axes(wanted.axes, shape, lead)):
            raise ValueError(
                f"{name} has shape {tuple(given[name].shape)}; {takes} for {record.name} on {p}"
            )
        elif given[name].dtype != dtype:
            raise TypeError(f"{name} is {given[name].dtype}; {takes}: convert it")
        else:
            found[name] = given[name]
    return found


def list_outputs(
    record: Kernel, p: Problem, names: Sequence[str], lead: tuple[int, ...]
) -> list[Result]:
    axes = {name: record.outputs[name][0] for name in names}
    return [Result(name, _with_leading_axes(x, p.shape(x), lead), None) for name, x in axes.items()]


def _with_leading_axes(axes: Any, shape: tuple[int, ...], lead: tuple[int, ...]) -> tuple[int, ...]:
    if not isinstance(axes, str) or axes.split()[0] != "batch":
        return shape
    return (*lead, *shape[1:])
