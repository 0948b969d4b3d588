"""The functions of the library: NumPy in, NumPy out; CuPy or DLPack in, CuPy out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any

import numpy as np

from cupyfa import calls, planning
from cupyfa.backends import Backend
from cupyfa.backends.select import adopt, backend_named
from cupyfa.kernel import Kernel
from cupyfa.ladder import LADDER
from cupyfa.planning import Limits, Plan
from cupyfa.problem import Problem, Window, four_axes


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str | None = False,
    window: Window | None = None,
    scale: float | None = None,
    precision: str | None = None,
    kernel: str | Kernel = "auto",
    backend: str | Backend = "auto",
    layout: str = "bhsd",
    return_lse: bool = False,
    out: Any = None,
    check: bool = False,
    **constants: int,
) -> Any:
    """softmax(q kᵀ · scale) v, row by row and without ever holding all the scores.

    q [..., heads, M, d], k [..., kv_heads, N, d], v [..., kv_heads, N, dv] of one dtype: float16,
    bfloat16 (ml_dtypes), float32 or float64. heads is a multiple of kv_heads, and query head h
    reads key head h // (heads // kv_heads). Two axes are one head, three are [heads, rows, d];
    ``layout="bshd"`` reads [batch, rows, heads, d]. Any size may be 0. Strides are honoured.

    ``causal`` True or "bottom-right" lets query i see keys j <= i + N - M, "top-left" j <= i.
    ``window`` (left, right) lets it see keys p - left <= j <= p + right, where p = i + N - M is its
    position, or i if ``causal`` is "top-left"; None is no limit, and causal is right = 0.
    ``scale`` is 1/sqrt(d) unless given. ``precision`` says what float32 inputs may be rounded to,
    "tf32" or "float16"; by default they keep float32 accuracy, unless a kernel is named that has
    only another. ``kernel`` is a name of ``kernels()``, a Kernel, or "auto";
    ``backend`` is "cuda", "simulator", "auto" or a Simulator with options of its own. ``constants``
    fix the kernel's tile sizes, for example ``Br=64, Bc=32``. ``check`` also compares with the
    float64 reference, among canaries.

    Returns out [..., heads, M, dv] of the inputs' dtype and kind, in ``out`` if that is given; with
    ``return_lse`` also the natural logarithm of each row's sum of exp(score), [..., heads, M] in
    float32 (float64 for float64). Rows that see no key are 0 and -infinity.

    Raises ValueError or TypeError for the arguments, Unsupported if the kernel or device cannot do
    the problem, DeviceError for the device's failures, SimulatorFault for what a kernel does wrong
    in the simulator, CompilerNotFound if there is none for it, WrongResult if a check fails.

    FlashAttention: Dao et al., 2022, arXiv:2205.14135; Dao, 2023, arXiv:2307.08691.
    """
    engine, (q, k, v) = adopt(backend, q=q, k=k, v=v)
    problem = Problem.of(
        q, k, v, causal=causal, window=window, scale=scale, precision=precision, layout=layout
    )
    with engine.working_on(q):
        plan = _plan(engine, attention, kernel, problem, constants)
        shape, view = (*q.shape[:-1], problem.dv), partial(four_axes, layout=layout)
        inputs = {"Q": view(q), "K": view(k), "V": view(v)}
        o = calls.target(engine, out, shape, problem.dtype.numpy, inputs, view)
        lse = engine.empty(_rows(q, layout), problem.dtype.sums)
        outputs = {"O": view(o), "lse": lse.reshape(problem.shape("batch heads M"))}
        return _answer(engine, plan, inputs, outputs, (o, lse), out, return_lse, check)


def softmax(
    x: Any,
    *,
    kernel: str | Kernel = "auto",
    backend: str | Backend = "auto",
    return_lse: bool = False,
    out: Any = None,
    check: bool = False,
    **constants: int,
) -> Any:
    """exp(x) over its sum along the last axis, computed without overflow.

    x [..., N] of float16, bfloat16, float32 or float64; options as for ``attention``. Returns an
    array like x; with ``return_lse`` also the natural logarithm of each row's sum of exp(x), [...]
    in float32 (float64 for float64).

    Online softmax: Milakov and Gimelshein, 2018, arXiv:1805.02867.
    """
    engine, (x,) = adopt(backend, x=x)
    problem = Problem.of_rows(x)
    with engine.working_on(x):
        plan = _plan(engine, softmax, kernel, problem, constants)
        view = partial(_rows_of_scores, problem=problem)
        inputs = {"S": view(x)}
        p = calls.target(engine, out, x.shape, problem.dtype.numpy, inputs, view)
        lse = engine.empty(x.shape[:-1], problem.dtype.sums)
        outputs = {"P": view(p), "lse": lse.reshape(problem.shape("batch heads M"))}
        return _answer(engine, plan, inputs, outputs, (p, lse), out, return_lse, check)


def kernels(operation: str | None = None) -> tuple[Kernel, ...]:
    """The records of every kernel, or of one operation's, in teaching order."""
    if operation not in (None, *LADDER):
        raise ValueError(f"operation {operation!r} is unknown; there are {', '.join(LADDER)}")
    return tuple(
        kernel for name in LADDER if operation in (None, name) for kernel in LADDER[name].values()
    )


def plan(
    *,
    kernel: str | Kernel = "auto",
    backend: str | Backend = "auto",
    limits: Limits | None = None,
    M: int,
    N: int | None = None,
    d: int,
    dv: int | None = None,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int | None = None,
    dtype: str = "float32",
    causal: bool | str | None = False,
    window: Window | None = None,
    scale: float | None = None,
    precision: str | None = None,
    **constants: int,
) -> Plan:
    """Every number of an attention call of these sizes, without arrays and without launching.

    N defaults to M, dv to d, kv_heads to heads. ``limits`` plans for a device that need not be
    here; else it is the backend's. Raises what ``attention`` would.
    """
    problem = Problem.of_sizes(
        M=M,
        N=N,
        d=d,
        dv=dv,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        dtype=dtype,
        causal=causal,
        window=window,
        scale=scale,
        precision=precision,
    )
    limits = limits or backend_named(backend).limits
    record = planning.select(kernel, "forward", problem, limits)
    return planning.plan(record, problem, limits, **constants)


def _plan(
    engine: Backend,
    function: Callable[..., Any],
    kernel: str | Kernel,
    problem: Problem,
    constants: Mapping[str, int],
) -> Plan:
    operation = "softmax" if function is softmax else "forward"
    record = planning.select(kernel, operation, problem, engine.limits)
    for name in constants.keys() - record.tiles[0].keys():
        options = [x for x in signature(function).parameters.values() if x.kind is x.KEYWORD_ONLY]
        raise ValueError(
            f"{record.name} has no constant {name!r}; it has "
            f"{', '.join(record.tiles[0]) or 'none'}, and the options of {function.__name__} are "
            f"{', '.join(x.name for x in options)}"
        )
    return planning.plan(record, problem, engine.limits, **constants)


def _rows_of_scores(x: Any, problem: Problem) -> Any:
    """The rows of x as the scores of one head."""
    return x.reshape(problem.shape("batch heads M N"))


def _rows(q: Any, layout: str) -> tuple[int, ...]:
    """The shape of lse, [..., heads, M]: that of q without columns, heads before rows."""
    if layout == "bshd" and q.ndim > 2:
        return (*q.shape[:-3], q.shape[-2], q.shape[-3])
    return tuple(q.shape[:-1])


def _answer(
    engine: Backend,
    plan: Plan,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    results: tuple[Any, Any],
    out: Any,
    return_lse: bool,
    check: bool,
) -> Any:
    """Fills the outputs, of which ``results`` are the caller's views, and hands them over."""
    if return_lse and "lse" not in plan.outputs:
        raise planning.Unsupported(f"{plan.kernel.name} does not compute lse; use another kernel")
    calls.fill(engine, plan, inputs, outputs, check=check)
    to_host = all(isinstance(array, np.ndarray) for array in inputs.values())
    result = calls.deliver(engine, results[0], out, to_host=to_host)
    if not return_lse:
        return result
    return result, calls.deliver(engine, results[1], None, to_host=to_host)
