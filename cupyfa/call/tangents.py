"""The tangents of q, k and v in calls of ``jvp``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cupyfa.errors import described


def read_tangents(tangents: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Returns dq, dk and dv; raises TypeError or ValueError unless these are three arrays."""
    if not isinstance(tangents, tuple | list):
        raise TypeError(f"tangents is {described(tangents)}; pass (dq, dk, dv)")
    if len(tangents) != 3:
        raise ValueError(f"tangents has {len(tangents)} elements; pass (dq, dk, dv)")
    dq, dk, dv = tangents
    return dq, dk, dv


def check_tangents(inputs: Mapping[str, Any], dtype: np.dtype) -> None:
    """Raises if the shape or dtype of dq, dk or dv differs from that of its array."""
    for name in "qkv":
        array, tangent = inputs[name], inputs[f"d{name}"]
        if tuple(tangent.shape) != tuple(array.shape):
            raise ValueError(
                f"d{name} has shape {tuple(tangent.shape)}; it must be {tuple(array.shape)}, the "
                f"shape of {name}"
            )
        if tangent.dtype != dtype:
            raise TypeError(
                f"d{name} is {tangent.dtype}; it must be {dtype}, the dtype of {name}: convert it"
            )
