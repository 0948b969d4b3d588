"""The tangents of q, k and v in calls of ``jvp`` and ``hvp``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cupyfa.errors import Unsupported, described
from cupyfa.ladder.kernel import BoundKernel
from cupyfa.problem.problem import four_axes

_OF_HVP = ("causal", "window", "offset", "scale", "precision", "sink")


def refuse_other_scores(scores: Mapping[str, Any]) -> None:
    """Raises Unsupported for keywords of scores that ``hvp`` cannot differentiate twice."""
    for name, value in scores.items():
        if name not in _OF_HVP and value is not None:
            raise Unsupported(f"hvp does not support {name}; it takes {', '.join(_OF_HVP)}")


def read_tangents(tangents: Sequence[Any], q: Any) -> tuple[list[Any], str, int]:
    """Returns the tangents that are not None, the letters of their arrays, and the directions.

    Raises TypeError or ValueError unless ``tangents`` has three elements, at least one an array.
    """
    if not isinstance(tangents, tuple | list):
        raise TypeError(f"tangents is {described(tangents)}; pass (dq, dk, dv)")
    if len(tangents) != 3:
        raise ValueError(f"tangents has {len(tangents)} elements; pass (dq, dk, dv)")
    given = {name: x for name, x in zip("qkv", tangents) if x is not None}
    if not given:
        raise ValueError("all tangents are None; pass an array for at least one of q, k and v")
    shape = tuple(getattr(next(iter(given.values())), "shape", ()))
    has_directions = len(shape) == len(getattr(q, "shape", ())) + 1
    return list(given.values()), "".join(given), shape[0] if has_directions else 1


def check_tangents(inputs: Mapping[str, Any], dtype: np.dtype) -> tuple[int, ...]:
    """Raises if the shape or dtype of a tangent differs from that of its array.

    Tangents of several directions have a leading axis; returns its size, or () without it.
    """
    given = [name for name in "qkv" if f"d{name}" in inputs]
    first = inputs[f"d{given[0]}"]
    has_directions = len(first.shape) == len(inputs[given[0]].shape) + 1
    lead = tuple(first.shape[:1]) if has_directions else ()
    for name in given:
        tangent, wanted = inputs[f"d{name}"], (*lead, *inputs[name].shape)
        if tuple(tangent.shape) != wanted:
            of = f"the {lead[0]} directions and the shape" if lead else "the shape"
            raise ValueError(
                f"d{name} has shape {tuple(tangent.shape)}; it must be {wanted}, {of} of {name}"
            )
        if len(wanted) < 4 and lead:
            raise ValueError(
                f"{name} has shape {wanted[1:]}, but several directions need a head axis; pass "
                f"{name}[None] and d{name}[:, None]"
            )
        if tangent.dtype != dtype:
            raise TypeError(
                f"d{name} is {tangent.dtype}; it must be {dtype}, the dtype of {name}: convert it"
            )
    return lead


def bound_hvp(
    qkv: Sequence[Any], tangents: Sequence[Any], d_out: Any, d_lse: Any, layout: str
) -> BoundKernel:
    """Binds the kernel of Hessian-vector products to a direction and the tangents of out and lse.

    Raises ValueError for several directions.
    """
    from cupyfa.ladder.hvp import HVP  # few processes need it

    if len(d_out.shape) > len(qkv[0].shape):
        raise ValueError(
            f"tangents have {len(d_out)} directions; hvp takes one: call it for each direction"
        )
    moving = (np.zeros_like(x) if y is None else y for x, y in zip(qkv, tangents))
    arrays = (four_axes(x, layout) for x in (*moving, d_out))
    named = dict(zip(("Q_dot", "K_dot", "V_dot", "O_dot"), arrays))
    return HVP.bind(**named, lse_dot=d_lse.reshape(named["O_dot"].shape[:3]))
