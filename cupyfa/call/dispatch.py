"""Dispatches calls on lists, caches, Dask arrays and distributed arrays."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from cupyfa.problem.structured_arrays import KINDS
from cupyfa.runtime import ragged


def find_function(name: str, q: Any, k: Any, v: Any) -> Callable[..., Any] | None:
    """Finds the implementation of ``attention``, ``vjp`` or ``backward`` for the type of q, k, v.

    The returned function takes the public function and its ``locals()``. Returns None for arrays
    that kernels read directly or that a later check rejects. Raises TypeError if no implementation
    exists.
    """
    kind = k if KINDS.get(type(k)) else q
    module = KINDS.get(type(kind))
    if module is None or (type(kind) in (list, tuple) and not ragged.are_lists(q, k, v)):
        return None
    function = getattr(import_module(module), f"{name}_of_others", None)
    if function is None:
        raise TypeError(
            f"{name} does not support {type(kind).__name__} arguments; vjp supports lists, and "
            "only attention supports a KVCache"
        )
    return function
