"""Prepares a call: describes its problem, chooses a kernel, plans, and makes a Prepared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cupyfa.call.call import ARRAYS, Call, Devices, Operation
from cupyfa.call.inputs import TANGENTS, add_input_forms, add_inputs, check_packed, describe_inputs
from cupyfa.call.kernel_arrays import add_kernel_arrays, check_kernel_arrays, list_outputs
from cupyfa.call.keywords import read_call, read_out, read_shape, read_tiles, split_keywords
from cupyfa.call.pullback import (
    check_dlse,
    check_like_result,
    check_wrt,
    describe_gradient,
    ignores_lse,
    make_unread_lse,
    read_wrt,
    refuse_gradients,
)
from cupyfa.call.tangents import check_tangents, read_tangent_shapes, read_tangents
from cupyfa.errors import Unsupported
from cupyfa.ladder.kernel import BoundKernel
from cupyfa.planner import choose_kernel as planning
from cupyfa.problem.dtypes import DTYPES, E4M3, DType, DTypeLike, dtype_named, name_of
from cupyfa.problem.optional_inputs import ROW_MAX, STARTS, name_of as input_name
from cupyfa.problem.options import AttentionOptions
from cupyfa.problem.problem import Problem, rows_of
from cupyfa.problem.structured_arrays import unwrap
from cupyfa.problem.wrt import QKV
from cupyfa.runtime.arrays import require_one_device
from cupyfa.runtime.backend import Backend, Form
from cupyfa.runtime.choose_backend import adopt, backend_named
from cupyfa.runtime.prepared import Prepared, Result

# Keywords of ``compile`` that are fields of a Call, plus ``out`` and ``dlse``.
_OF_CALLS = {
    "forward": ("kernel", "backend", "layout", "tiles", "return_lse", "return_max", "out"),
    "backward": ("kernel", "backend", "layout", "tiles", "deterministic", "wrt", "dlse", "out"),
    "tangent": ("kernel", "backend", "layout", "tiles", "tangents", "out"),
}


def compile_call(
    function: Callable[..., Any],
    required: Sequence[Any],
    dtype: DTypeLike | None,
    keywords: Mapping[str, Any],
) -> Prepared:
    """Prepares a call from arrays, or from shapes if ``dtype`` is given.

    required: q, k and v, or the six arrays of ``backward``. keywords: further arguments of
    ``function``; with ``tangents`` among them, the call is one of ``jvp``.
    """
    operation: Operation = "forward" if len(required) == len(ARRAYS["forward"]) else "backward"
    if operation == "forward" and "tangents" in keywords:
        operation = "tangent"
    names, of_shapes = ARRAYS[operation][: len(required)], dtype is not None
    how = {x: y for x, y in keywords.items() if x in _OF_CALLS[operation]}
    inputs, asked = split_keywords(
        function, {x: y for x, y in keywords.items() if x not in how}, _OF_CALLS[operation]
    )
    by_name = dict(zip(names, required))
    qkv, structure = unwrap(*(by_name[x] for x in "qkv"))
    by_name |= zip("qkv", qkv)
    if isinstance(how.get("backend"), Devices):
        raise TypeError(
            "backend is Devices, but compile supports only one device; pass a single backend"
        )
    call = Call(operation, how.pop("kernel", "auto"), how.pop("backend", "auto"), asked=asked)
    if operation == "backward":
        _complete_lse(call, by_name, how.get("layout", "bhsd"), of_shapes=of_shapes)
        if (dlse := how.pop("dlse", None)) is not None:
            inputs["dlse"] = dlse if of_shapes else check_dlse(dlse, by_name["lse"])
        how["wrt"] = read_wrt(how.get("wrt", QKV))
    if operation == "tangent":
        read = read_tangent_shapes if of_shapes else read_tangents
        along = read(how.pop("tangents"), by_name["q"], keywords)
        by_name |= {f"d{x}": y for x, y in zip(along.letters, along.moving)}
        asked = {**asked, "tangents": along.letters, "directions": along.directions}
        how["wrt"] = (*QKV, *along.others)
        inputs |= {TANGENTS: along.others} if along.others else {}
    out = how.pop("out", None)
    if operation == "backward" and not of_shapes:
        out = by_name["out"]
    _, asked = read_out(out, by_name["q"], asked)
    call = call._replace(asked=asked, **how)
    required = tuple(by_name.values())
    if {isinstance(x, tuple | list) for x in required} != {of_shapes}:
        raise TypeError(
            f"{', '.join([*by_name][:-1])} and {[*by_name][-1]} must be all arrays or all shapes; "
            "with shapes, pass dtype="
        )
    call, _ = read_call(call, False)
    if STARTS[0] in structure:
        check_packed(by_name)
    if not of_shapes:
        backend, adopted = adopt(call.backend, **by_name)
        every: Sequence[Any] = adopted
        if inputs or structure:
            call, every = add_inputs(call, backend, every, {**inputs, **structure})
        call, every = add_kernel_arrays(call, backend, every)
        return prepare_call(call, backend, every, keep=True)
    if STARTS[0] in structure:
        call = call._replace(layout="bshd")
    assert dtype is not None
    backend, of = backend_named(call.backend), dtype_named(dtype)
    call, _ = add_kernel_arrays(call, backend, required, of_shapes=True)
    sizes = {name: read_shape(f"the shape of {name}", x) for name, x in by_name.items()}
    with backend.working_on(None):
        dtypes = {"lse": of.sums, "out": _find_out_dtype(call, of)}
        arrays = [_make_empty(backend, x, dtypes.get(name, of.numpy)) for name, x in sizes.items()]
        if inputs or structure:
            forms = {**inputs, **structure}
            call, more = add_input_forms(call, dict(zip(sizes, arrays)), forms, of.name)
            arrays += [backend.empty(*x) for x in more]
    return prepare_call(call, backend, arrays, keep=True, of_shapes=True)


def _complete_lse(call: Call, by_name: dict[str, Any], layout: str, *, of_shapes: bool) -> None:
    """Replaces an lse of None by a placeholder, or its shape, if the kernel does not read lse."""
    if by_name["lse"] is not None:
        return
    if not of_shapes:
        by_name["lse"] = make_unread_lse(call.kernel, by_name["q"], call.backend, layout)
    elif ignores_lse(call.kernel):
        out = by_name["out"]
        by_name["lse"] = out[:-1] if layout == "bhsd" else (*out[:-3], out[-2], out[-3])


def _find_out_dtype(call: Call, dtype: DType) -> np.dtype:
    name = name_of(getattr(call.options, "out_dtype", None) or call.asked.get("out_dtype"))
    known = DTYPES.get(name) if isinstance(name, str) else None  # later checks reject other names
    return (known or DTYPES[dtype.usual_result]).numpy


def _make_empty(backend: Backend, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """Allocates an uninitialized array; CuPy can allocate e4m3 only as bytes."""
    if dtype == E4M3:
        return backend.empty(shape, np.dtype(np.uint8)).view(E4M3)
    return backend.empty(shape, dtype)


def find_prepared(
    call: Call, backend: Backend, arrays: Sequence[Any], forms: tuple[Form, ...]
) -> tuple[Prepared, bool]:
    """Returns a call's Prepared, and whether it was cached.

    forms: the arrays' shapes, strides and dtypes.

    If a cached call differs only in numbers (captured numbers, softcap, dropout), its Prepared is
    copied with the new numbers instead of being planned again.
    """
    key, key_of_alike = _make_key(call, forms), None
    if (prepared := backend.calls.find(key)) is not None:
        return prepared, True
    # Exclude Kernel objects: their formulas may depend on the numbers.
    if call.operation != "softmax" and isinstance(call.kernel, str):
        options = AttentionOptions.of(call.options, call.asked)
        if call.numbers or options.softcap is not None or options.dropout:
            names: Any = tuple((x.name, x.dtype) for x in call.numbers)
            alike = call._replace(options=None, asked={}, numbers=names)
            key_of_alike = *_make_key(alike, forms), options.form
            if (like := backend.calls.find(key_of_alike)) is not None:
                prepared = like.with_numbers(options, call.numbers)
                backend.calls.add(key, prepared)
                return prepared, False
    prepared = prepare_call(call, backend, arrays, keep=False)
    backend.calls.add(key, prepared)
    if key_of_alike is not None:
        backend.calls.add(key_of_alike, prepared)
    return prepared, False


def _make_key(call: Call, forms: tuple[Form, ...]) -> tuple[Any, ...]:
    """Returns a call's cache key, which contains the repr of options, because True equals 1."""
    # The cached plan keeps the Kernel alive, so that its id stays unique.
    kernel = call.kernel if isinstance(call.kernel, str) else id(call.kernel)
    asked = repr(call.asked) if call.asked else None
    tiles: Any = call.tiles
    if tiles is not None:  # mappings need not be hashable
        tiles = repr(dict(tiles) if isinstance(tiles, Mapping) else tiles)
    return (
        *(call.operation, forms, str(kernel), asked, call.options, call.layout),
        *(tiles, call.return_lse, call.return_max, call.deterministic),
        *(call.inputs, call.outputs, call.numbers, call.blocks, call.wrt),
    )


def prepare_call(
    call: Call, backend: Backend, arrays: Sequence[Any], *, keep: bool, of_shapes: bool = False
) -> Prepared:
    """Prepares a call on arrays like ``arrays``.

    of_shapes: whether to allocate the arrays that a custom kernel reads instead of taking them from
    the call.
    """
    inputs, blocks = dict(zip(call.array_names, arrays)), call.blocks
    problem = make_problem(call, inputs)
    results = list_results(call, problem, inputs)
    require_one_device(backend, {input_name(name): x for name, x in inputs.items()})
    with backend.working_on(arrays[0]):
        limits = backend.limits
        assert not isinstance(call.kernel, BoundKernel)
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


def make_problem(call: Call, inputs: Mapping[str, Any]) -> Problem:
    """Describes what a call computes. inputs: its arrays, or their forms, by name."""
    if call.operation == "softmax":
        return Problem.of_rows(inputs["x"])
    qkv, options = (inputs[x] for x in "qkv"), AttentionOptions.of(call.options, call.asked)
    operands = describe_inputs(call, inputs)
    problem = Problem.of(*qkv, options=options, layout=call.layout, operands=operands)
    problem = problem.with_row_max() if call.return_max else problem
    return problem if call.blocks is None else call.blocks.masked(problem)


def list_results(call: Call, problem: Problem, inputs: Mapping[str, Any]) -> list[Result]:
    """Lists a call's results; raises if dout, out or lse does not match the forward pass."""
    if call.operation == "softmax":
        x = inputs["x"]
        results = [Result("P", tuple(x.shape), "out"), Result("lse", tuple(x.shape[:-1]), None)]
        return results[: 1 + call.return_lse]
    q, v = inputs["q"], inputs["v"]
    out, lse = (*q.shape[:-1], v.shape[-1]), rows_of(q, call.layout)
    if call.operation == "forward":
        results = [Result("O", out, "out"), Result("lse", lse, None), Result(ROW_MAX, lse, None)]
        return [*results[: 1 + call.return_lse], *results[2:] * call.return_max]
    if call.operation == "tangent":
        lead = check_tangents(inputs, call.wrt)
        shapes = {"O": out, "lse": lse, "O_dot": (*lead, *out), "lse_dot": (*lead, *lse)}
        labels = {"O": "out"}  # which callers of a Prepared may pass
        return [Result(name, shape, labels.get(name)) for name, shape in shapes.items()]
    refuse_gradients(problem.dtype)
    check_like_result("dout", inputs["dout"], out, problem.dtype.numpy)
    check_like_result("out", inputs["out"], out, problem.out_dtype.numpy)
    check_like_result("lse", inputs["lse"], lse, problem.dtype.sums)
    check_wrt(call.wrt, inputs)
    if problem.wrt and problem.is_ragged:
        raise Unsupported(
            f"wrt={', '.join(problem.wrt)} cannot be used with {problem.ragged_by}; request only "
            "the gradients of q, k and v"
        )
    return [describe_gradient(name, inputs) for name in call.wrt]
