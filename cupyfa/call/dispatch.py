"""The functions of calls on arrays of other kinds: lists, caches, Dask's, those of ranks."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from cupyfa.problem.structured_arrays import Structured
from cupyfa.runtime import ragged

# By the package that defines a type of arrays: the module with the functions of these.
_OF_PACKAGES = {"dask": "cupyfa.dask.array_functions"}


def find_function(name: str, q: Any, k: Any = None, v: Any = None) -> Callable[..., Any] | None:
    """The function that ``attention``, ``vjp`` or ``backward`` is for such q, k and v.

    It takes the public function and its ``locals()``. None for arrays that kernels take, and for
    those that are refused later. Raises TypeError if there is no such function for them.
    """
    module = None
    for x in (k, q):
        if isinstance(x, Structured):
            module = module or x.functions
        else:
            module = module or _OF_PACKAGES.get(type(x).__module__.partition(".")[0])
    if module is None and isinstance(q, list | tuple) and ragged.are_lists(q, k, v):
        module = "cupyfa.call.sequences"
    if module is None:
        return None
    function = getattr(import_module(module), f"{name}_of_others", None)
    if function is None:
        what = "a list of arrays" if isinstance(q, list | tuple) else "a KVCache"
        remedy = "vjp" if isinstance(q, list | tuple) else "attention on arrays"
        raise TypeError(f"{name} does not take {what}; its gradients come from {remedy}")
    return function
