"""Arguments and results of the backward pass: lse, dlse, and the arrays listed in ``wrt``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cupyfa.call.call import BackendName, Tiles
from cupyfa.call.keywords import read_tiles
from cupyfa.errors import Unsupported, described
from cupyfa.ladder import lookup
from cupyfa.ladder.kernel import BoundKernel, Kernel
from cupyfa.planner import choose_kernel as planning
from cupyfa.problem import optional_inputs
from cupyfa.problem.dtypes import DTYPES, DType
from cupyfa.problem.options import read_flag
from cupyfa.problem.problem import rows_of
from cupyfa.problem.wrt import QKV, names_of, refuse_without_gradients
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.choose_backend import adopt
from cupyfa.runtime.prepared import Result


def read_pullback(
    return_lse: Any, deterministic: Any, kernel: str | Kernel | BoundKernel, tiles: Tiles | None
) -> tuple[bool, dict[str, Any]]:
    """Checks ``return_lse`` and the arguments that a pullback will pass to ``backward``.

    Wrong arguments thus raise in ``vjp``, before the pullback is called.
    """
    record = kernel.kernel if isinstance(kernel, BoundKernel) else kernel
    planning.check_named(record, "backward", read_tiles(tiles))
    of_backward = {
        "deterministic": read_flag("deterministic", deterministic),
        "kernel": kernel,
        "tiles": tiles,
    }
    return read_flag("return_lse", return_lse), of_backward


def ignores_lse(kernel: str | Kernel | BoundKernel) -> bool:
    """Returns whether a kernel computes gradients without reading lse."""
    record = _find_record(kernel)
    return record is not None and record.operation == "backward" and not record.reads_lse


def computes_lse(kernel: str | Kernel | BoundKernel) -> bool:
    """Returns whether a kernel computes lse; True if no kernel has been chosen yet."""
    record = _find_record(kernel)
    return record is None or "lse" in record.features


def _find_record(kernel: str | Kernel | BoundKernel) -> Kernel | None:
    """Returns a kernel's record, or None for "auto" and for invalid values, which raise later."""
    kernel = kernel.kernel if isinstance(kernel, BoundKernel) else kernel
    record = lookup.kernel(kernel) if isinstance(kernel, str) and kernel != "auto" else kernel
    return record if isinstance(record, Kernel) else None


def make_unread_lse(
    kernel: str | Kernel | BoundKernel, q: Any, backend: BackendName | Backend, layout: str
) -> Any:
    """Allocates a placeholder lse for a kernel that does not read lse; returns None otherwise."""
    if not ignores_lse(kernel):
        return None
    where, (q,) = adopt(backend, q=q)
    if str(q.dtype) not in DTYPES:  # a later check rejects the dtype
        return None
    shape, dtype = rows_of(q, layout), DTYPES[str(q.dtype)].sums
    return np.zeros(shape, dtype) if isinstance(q, np.ndarray) else where.empty(shape, dtype)


def check_dlse(dlse: Any, lse: Any) -> Any:
    """Returns ``dlse``; raises TypeError or ValueError unless it has lse's shape and dtype."""
    if not hasattr(dlse, "shape"):
        raise TypeError(f"dlse is {described(dlse)}; pass an array with the shape and dtype of lse")
    if tuple(dlse.shape) != tuple(lse.shape) or str(dlse.dtype) != str(lse.dtype):
        raise ValueError(
            f"dlse is {dlse.dtype} {tuple(dlse.shape)}; it must be {lse.dtype} "
            f"{tuple(lse.shape)}, like lse"
        )
    return dlse


def check_like_result(name: str, array: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Raises if the shape or dtype of dout, out or lse does not match q, k and v."""
    if tuple(array.shape) != tuple(shape):
        remedy = (
            "pass the gradient with respect to out"
            if name == "dout"
            else "pass the out and lse that attention returned"
        )
        raise ValueError(
            f"{name} has shape {tuple(array.shape)}; it must be {tuple(shape)} for these q, k and "
            f"v: {remedy}"
        )
    if str(array.dtype) != str(dtype):
        other = "convert it, or pass the out of that call" if name == "out" else "convert it"
        raise TypeError(
            f"{name} is {array.dtype}; it must be {dtype} for these q, k and v: {other}"
        )


def describe_gradient(name: str, inputs: Mapping[str, Any]) -> Result:
    if name in QKV:
        return Result(f"d{name.upper()}", tuple(inputs[name].shape), f"d{name} of grads")
    shape = tuple(inputs[f"mods.{name}"].shape)
    return Result(optional_inputs.gradient_of(name), shape, f"d{name} of grads")


def read_wrt(wrt: str | Sequence[str]) -> tuple[str, ...]:
    """Checks ``wrt``; returns the names of the arrays to differentiate."""
    if wrt is QKV:
        return QKV
    if not isinstance(wrt, str | Iterable) or not all(isinstance(x, str) for x in wrt):
        raise TypeError(f"wrt is {described(wrt)}; pass names such as ('q', 'k', 'v', 'sink')")
    names = names_of(wrt)
    if len(set(names)) < len(names) or not names:
        raise ValueError(f"wrt is {names}; pass at least one name, without duplicates")
    return names


def refuse_gradients(dtype: DType | None) -> None:
    """Raises Unsupported for dtypes of q, k and v that have no backward kernel."""
    if dtype is not None and dtype.result:
        raise Unsupported(
            f"q, k and v are {dtype.name}, and no kernel computes their gradients; convert them to "
            "float16 or bfloat16"
        )


def check_wrt(wrt: Sequence[str], inputs: Mapping[str, Any]) -> None:
    read = [x for x in inputs if x.startswith("mods.")]
    dtypes = {x.removeprefix("mods."): str(inputs[x].dtype) for x in read}
    refuse_without_gradients(wrt, dtypes)


def find_dtypes(keywords: Mapping[str, Any]) -> dict[str, str]:
    """Returns the dtypes of bias and other optional or captured arrays by name."""
    captured = keywords.get("captured")
    arguments = {name: keywords[name] for name in optional_inputs.OWN_ARRAYS if name in keywords}
    found = {**arguments, **(captured if isinstance(captured, Mapping) else {})}
    arrays = {name: x for name, x in found.items() if getattr(x, "shape", ())}
    dtypes = {name: str(getattr(x, "dtype", "")) for name, x in arrays.items()}
    return {name: x.removeprefix("torch.") for name, x in dtypes.items() if x}
