"""Prepares a call: its problem, the choice of a kernel, the plan, the Prepared that runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cupyfa.call.call import ARRAYS, Call, Own
from cupyfa.call.inputs import add_input_forms, add_inputs, describe_inputs
from cupyfa.call.kernel_arrays import add_kernel_arrays, check_kernel_arrays, list_outputs
from cupyfa.call.keywords import read_call, read_shape, read_tiles
from cupyfa.call.pullback import check_like_result, check_wrt, describe_gradient, refuse_gradients
from cupyfa.call.sequences import check_packed
from cupyfa.planner import choose_kernel as planning
from cupyfa.problem.dtypes import DTYPES, E4M3, DType, DTypeLike, dtype_named, name_of
from cupyfa.problem.optional_inputs import ROW_MAX, STARTS, name_of as input_name
from cupyfa.problem.options import AttentionOptions
from cupyfa.problem.problem import Problem, rows_of
from cupyfa.runtime.arrays import require_one_device
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.choose_backend import adopt, backend_named
from cupyfa.runtime.prepared import Prepared, Result


def compile_call(
    call: Call,
    given: Sequence[Any],
    dtype: DTypeLike | None,
    inputs: Mapping[str, Any],
    own: Own | None,
    return_own: Sequence[str],
) -> Prepared:
    """The prepared form of calls on arrays like these, or of these shapes if there is a dtype.

    inputs: what is read besides: arrays or their forms, and captured numbers.
    """
    names, of_shapes = ARRAYS[call.operation], dtype is not None
    if {isinstance(x, tuple | list) for x in given} != {of_shapes}:
        raise TypeError(
            f"give {', '.join(names[:-1])} and {names[-1]} as arrays, or all as shapes and with "
            "them a dtype"
        )
    call, _ = read_call(call, False, None)
    if STARTS[0] in inputs:
        check_packed(dict(zip(names, given)))
    if inputs and not of_shapes:
        call, given = add_inputs(call, given, inputs)
    call, given = add_kernel_arrays(call, given, own, return_own, of_shapes=of_shapes)
    named = dict(zip(call.array_names, given))
    if dtype is None:
        return prepare_call(call, *adopt(call.backend, **named), keep=True)
    backend, of = backend_named(call.backend), dtype_named(dtype)
    sizes = {name: read_shape(f"the shape of {name}", x) for name, x in named.items()}
    with backend.working_on(None):
        dtypes = {"lse": of.sums, "out": _find_out_dtype(call, of)}
        arrays = [_make_empty(backend, x, dtypes.get(name, of.numpy)) for name, x in sizes.items()]
        if inputs:
            call, more = add_input_forms(call, dict(zip(sizes, arrays)), inputs, of.name)
            arrays += [backend.empty(*x) for x in more]
    return prepare_call(call, backend, arrays, keep=True, of_shapes=True)


def _find_out_dtype(call: Call, dtype: DType) -> np.dtype:
    """The dtype of the output of a call on inputs of a dtype."""
    name = name_of(getattr(call.options, "out_dtype", None) or call.asked.get("out_dtype"))
    known = DTYPES.get(name) if isinstance(name, str) else None  # others are refused later
    return (known or DTYPES[dtype.usual_result]).numpy


def _make_empty(backend: Backend, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """An array of any numbers; CuPy allocates e4m3 as bytes alone."""
    if dtype == E4M3:
        return backend.empty(shape, np.dtype(np.uint8)).view(E4M3)
    return backend.empty(shape, dtype)


def prepare_call(
    call: Call, backend: Backend, arrays: Sequence[Any], *, keep: bool, of_shapes: bool = False
) -> Prepared:
    """The prepared form of a call on arrays like these.

    ``of_shapes``: arrays of the kernel's own are not given, but made.
    """
    inputs, blocks = dict(zip(call.array_names, arrays)), call.blocks
    problem = _make_problem(call, inputs)
    results = _list_results(call, problem, inputs)
    require_one_device(backend, {input_name(name): x for name, x in inputs.items()})
    with backend.working_on(arrays[0]):
        limits = backend.limits
        record = planning.select(
            call.kernel, call.operation, problem, limits, deterministic=call.deterministic
        )
        plan = planning.plan(record, problem, limits, **read_tiles(call.tiles))
        bound: dict[str, Any] = {}
        if blocks is not None:
            on_host = not backend.owns(arrays[0])
            asked = AttentionOptions.of(call.options, call.asked)
            maps = blocks.maps(plan, backend, on_host, alone=asked.mask_mod is None)
            plan = blocks.planned(plan, limits)
            bound = {**blocks.arrays(backend, on_host), **maps}
        layout, lead = None, tuple[int, ...]()
        if call.operation != "softmax":
            layout, lead = call.layout, inputs["q"].shape[:-3]
        if not record.is_plain:
            empty = backend if of_shapes else None
            inputs |= check_kernel_arrays(record, problem, inputs, empty, lead)
            results += list_outputs(record, problem, call.outputs, lead)
        return Prepared(backend, plan, inputs, results, layout=layout, keep=keep, bound=bound)


def _make_problem(call: Call, inputs: Mapping[str, Any]) -> Problem:
    if call.operation == "softmax":
        return Problem.of_rows(inputs["x"])
    qkv, options = (inputs[x] for x in "qkv"), AttentionOptions.of(call.options, call.asked)
    operands = describe_inputs(call, inputs)
    problem = Problem.of(*qkv, options=options, layout=call.layout, operands=operands)
    problem = problem.with_row_max() if call.return_max else problem
    return problem if call.blocks is None else call.blocks.masked(problem)


def _list_results(call: Call, problem: Problem, inputs: Mapping[str, Any]) -> list[Result]:
    """What a call returns. Raises for arrays that cannot be those of a forward pass."""
    if call.operation == "softmax":
        x = inputs["x"]
        results = [Result("P", tuple(x.shape), "out"), Result("lse", tuple(x.shape[:-1]), None)]
        return results[: 1 + call.return_lse]
    q, v = inputs["q"], inputs["v"]
    out, lse = (*q.shape[:-1], v.shape[-1]), rows_of(q, call.layout)
    if call.operation == "forward":
        results = [Result("O", out, "out"), Result("lse", lse, None), Result(ROW_MAX, lse, None)]
        return [*results[: 1 + call.return_lse], *results[2:] * call.return_max]
    refuse_gradients(problem.dtype)
    check_like_result("dout", inputs["dout"], out, problem.dtype.numpy)
    check_like_result("out", inputs["out"], out, problem.out_dtype.numpy)
    check_like_result("lse", inputs["lse"], lse, problem.dtype.sums)
    check_wrt(call.wrt, inputs)
    return [describe_gradient(name, inputs) for name in call.wrt]
