"""What a kernel of the user's takes and gives besides: arrays, floats and outputs of its record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from numbers import Real
from typing import Any

from cupyfa.call.call import Call, Own
from cupyfa.call.inputs import adopt_leading_array
from cupyfa.errors import described, nearest
from cupyfa.ladder import lookup
from cupyfa.ladder.kernel import Kernel
from cupyfa.problem.problem import Problem
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.choose_backend import as_array, where_q_is
from cupyfa.runtime.prepared import Result


def add_kernel_arrays(
    call: Call,
    arrays: Sequence[Any],
    own: Own | None,
    return_own: Sequence[str],
    *,
    of_shapes: bool = False,
) -> tuple[Call, Sequence[Any]]:
    """A call with the arrays, floats and outputs of its kernel's own, and all of its arrays.

    The arrays may lie in host or in GPU memory. With ``of_shapes`` they are not given.
    """
    if own is None and not return_own:
        return call, arrays
    given = {} if own is None else own
    are_names = isinstance(return_own, Iterable) and not isinstance(return_own, str)
    if not are_names or not all(isinstance(x, str) for x in return_own):
        raise TypeError(f"return_own is {described(return_own)}; give names, as ('rowmax',)")
    record = find_record(call.kernel, given)
    names = tuple(name for name in record.inputs if name in given)
    if of_shapes and names:
        raise TypeError(
            f"own has {', '.join(names)}, and q is a shape; leave it out: its shape follows"
        )
    inputs, outputs = (*call.inputs, *names), tuple(return_own)
    call = call._replace(kernel=set_floats(record, given), inputs=inputs, outputs=outputs)
    if not names:
        return call, arrays
    theirs = [as_array(call.backend, name, given[name]) for name in names]
    if not all(hasattr(x, "dtype") for x in theirs):
        return call, (*arrays, *theirs)  # refused later, by name
    _, q = adopt_leading_array(call, arrays)
    return call, (*arrays, *(where_q_is(call.backend, q, x) for x in theirs))


def find_record(kernel: str | Kernel, own: Own) -> Kernel:
    """The record of a kernel. Raises TypeError for names that it does not have."""
    if not isinstance(own, Mapping) or not all(isinstance(name, str) for name in own):
        raise TypeError(f'own is {described(own)}; give arrays and floats by name, as {{"x": x}}')
    if isinstance(kernel, str) and kernel == "auto":
        raise TypeError("own and return_own are for a kernel of your own; give it as kernel=")
    record = kernel if isinstance(kernel, Kernel) else lookup.kernel(kernel)
    known = (*record.inputs, *record.floats)
    for name in own:
        if name not in known:
            raise TypeError(
                f"{record.name} takes no {name!r} of its own{nearest(name, known)}; it "
                f"takes {', '.join(known) or 'nothing'}"
            )
    return record


def set_floats(record: Kernel, own: Own) -> Kernel:
    """The record with these numbers in place of its own."""
    given = {name: own[name] for name in record.floats if name in own}
    for name, value in given.items():
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not (is_number and isfinite(value)):
            raise ValueError(f"{name} is {described(value)}; give a finite number")
    if not given:
        return record
    fixed = {name: lambda p, c, value=float(x): value for name, x in given.items()}
    return replace(record, floats={**record.floats, **fixed})


def divide_arrays(own: Own | None, *kernels: str | Kernel) -> tuple[dict[str, Any] | None, ...]:
    """What each of several kernels takes of ``own``. Raises TypeError for what none takes."""
    if own is None:
        return (None,) * len(kernels)
    records = [
        x if isinstance(x, Kernel) else None if x == "auto" else lookup.kernel(x) for x in kernels
    ]
    known = [{*x.inputs, *x.floats} if x else set() for x in records]
    if unknown := [name for name in own if not any(name in names for names in known)]:
        takes = ", ".join(sorted(set().union(*known))) or "nothing"
        raise TypeError(f"no kernel takes {', '.join(unknown)} of its own; these take {takes}")
    return tuple({x: own[x] for x in own if x in names} or None for names in known)


def check_kernel_arrays(
    record: Kernel,
    p: Problem,
    given: Mapping[str, Any],
    backend: Backend | None,
    lead: tuple[int, ...],
) -> dict[str, Any]:
    """The arrays of a kernel's own, checked; with a backend they are made."""
    found = {}
    for name, wanted in record.inputs.items():
        shape, dtype = wanted.shape(p), wanted.dtype(p)
        takes = f"{name} must be {dtype} {shape}"
        if isinstance(wanted.axes, str):
            takes += f", [{', '.join(wanted.axes.split())}]"
        if not wanted.when(p):
            if name in given:
                raise ValueError(f"{record.name} takes no {name} for {p}; leave it out of own")
        elif backend is not None:
            found[name] = backend.empty(shape, dtype)
        elif name not in given:
            raise TypeError(
                f"{record.name} needs {name}, an array of its own; {takes}: give it as "
                f'own={{"{name}": …}}'
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
    for name in names:
        if name not in record.outputs:
            raise ValueError(
                f"{record.name} has no output {name!r} of its own; it has "
                f"{', '.join(record.outputs) or 'none'}"
            )
    axes = {name: record.outputs[name][0] for name in names}
    return [Result(name, _with_leading_axes(x, p.shape(x), lead), None) for name, x in axes.items()]


def _with_leading_axes(axes: Any, shape: tuple[int, ...], lead: tuple[int, ...]) -> tuple[int, ...]:
    """A shape with the caller's leading axes in place of the batch, where that is the first."""
    if not isinstance(axes, str) or axes.split()[0] != "batch":
        return shape
    return (*lead, *shape[1:])
