"""Calls on the host, by callbacks: for tests of a program on machines without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np

from cupyfa.call.execution import run_call
from cupyfa.jax.array_forms import ShapedCall
from cupyfa.ladder.operations import exact_attention
from cupyfa.planner import choose_kernel as planning
from cupyfa.problem.optional_inputs import SEEDS
from cupyfa.runtime.choose_backend import backend_named

_SEEDS = tuple(f"mods.{x}" for x in SEEDS)


def call_on_host(shaped: ShapedCall, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Computes a call in the simulator, or by the reference if its backend is not "simulator".

    The reference computes in float64 and rounds the results. For the simulator, the call is
    planned outside of the callback, because JAX replaces errors that a callback raises.
    """
    in_simulator = shaped.call.backend == "simulator" and not shaped.is_empty
    if in_simulator:
        _plan(shaped)
    results = tuple(
        jax.ShapeDtypeStruct(x.shape, dtype)
        for x, dtype in zip(shaped.results, shaped.result_dtypes)
    )
    compute = _by_kernels if in_simulator else _by_reference
    return jax.pure_callback(partial(_on_arrays, compute, shaped), results, *arrays)


@lru_cache(maxsize=1024)
def _plan(shaped: ShapedCall) -> None:
    call, limits = shaped.call, backend_named(shaped.call.backend).limits
    how = {"deterministic": call.deterministic}
    record = planning.select(call.kernel, call.operation, shaped.problem, limits, **how)  # type: ignore[arg-type]
    planning.plan(record, shaped.problem, limits, **(call.tiles or {}))


def _on_arrays(compute: Any, shaped: ShapedCall, *arrays: Any) -> tuple[Any, ...]:
    given = [np.asarray(x) for x in arrays]
    names = shaped.call.array_names
    given = [x.view(np.uint64) if name in _SEEDS else x for name, x in zip(names, given)]
    return tuple(compute(shaped, given))


def _by_kernels(shaped: ShapedCall, arrays: list[Any]) -> tuple[Any, ...]:
    found = run_call(shaped.call, arrays)
    return found if isinstance(found, tuple) else (found,)


def _by_reference(shaped: ShapedCall, arrays: list[Any]) -> list[Any]:
    inputs = {name: shaped.view(name, x) for name, x in zip(shaped.input_names, arrays)}
    found = _exact_results(shaped, inputs)
    is_turned = shaped.call.layout == "bshd"
    made = []
    for result, dtype in zip(shaped.results, shaped.result_dtypes):
        array = found[result.name]
        if is_turned and result.name in shaped.operation.outputs and array.ndim == 4:
            array = array.swapaxes(1, 2)
        with np.errstate(over="ignore"):
            made.append(array.reshape(result.shape).astype(dtype))
    return made


def _exact_results(shaped: ShapedCall, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Computes results in float64, by the operation's names."""
    if shaped.operation.name == "forward":
        return dict(zip(("O", "lse"), exact_attention(inputs, shaped.problem)))
    (expected,) = shaped.operation.reference(inputs, shaped.problem, (None,)).values()
    return {name: x.value for name, x in expected.items()}
