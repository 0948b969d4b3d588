"""Calls described by the shapes and dtypes of their arrays, before there are any elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax
import numpy as np
from numpy.lib.stride_tricks import as_strided

from cupyfa.call.call import Call
from cupyfa.call.prepare import list_results, make_problem
from cupyfa.ladder.operations import OPERATIONS, Operation
from cupyfa.problem.problem import Problem
from cupyfa.runtime.prepared import NAMES, Result, viewed

Form = tuple[tuple[int, ...], np.dtype]  # shape and dtype


def as_key(call: Call) -> Call:
    """Returns a call that can be hashed, if all its options are in ``options``."""
    tiles: Any = tuple(sorted((call.tiles or {}).items()))
    return call._replace(asked=(), tiles=tiles)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ShapedCall:
    """A call with the shapes and dtypes of its arrays, in the order of ``key.array_names``.

    key: the call in a form that can be hashed, see ``as_key``.
    """

    key: Call
    forms: tuple[Form, ...]

    @cached_property
    def call(self) -> Call:
        return self.key._replace(asked={}, tiles=dict(self.key.tiles or ()))

    @cached_property
    def problem(self) -> Problem:
        return make_problem(self.call, self._empty)

    @cached_property
    def results(self) -> list[Result]:
        return list_results(self.call, self.problem, self._empty)

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.call.operation]

    @property
    def result_dtypes(self) -> list[np.dtype]:
        known = self.operation.outputs_of(self.problem)
        return [known[x.name].dtype(self.problem) for x in self.results]

    @property
    def input_names(self) -> list[str]:
        """The operation's names of the arrays."""
        return [NAMES.get(name, name) for name in self.call.array_names]

    @property
    def is_empty(self) -> bool:
        """Whether an array has no elements, so that there may be no launch."""
        return any(prod(shape) == 0 for shape, _ in self.forms)

    def view(self, name: str, array: Any) -> Any:
        """Views an array in the shape and with the axes that kernels expect."""
        p, operation = self.problem, self.operation
        known = operation.inputs_of(p) | operation.outputs_of(p)
        if name not in operation.inputs and name not in operation.outputs:
            return array.reshape(known[name].shape(p))
        return viewed(p, self.call.layout, operation.axes_of(p)[name], array)

    @cached_property
    def _empty(self) -> dict[str, Any]:
        """Arrays of these shapes that take no memory; nothing may read their elements."""
        arrays: Sequence[Any] = [
            as_strided(np.empty(1, of), x, (0,) * len(x)) for x, of in self.forms
        ]
        return dict(zip(self.call.array_names, arrays))


def vary_alike(arrays: Sequence[Any], like: Sequence[Any]) -> tuple[Any, ...]:
    """Marks arrays as varying over the axes of ``shard_map`` over which any array of ``like`` does.

    Custom calls and callbacks do not say over which axes their results vary.
    """
    axes = frozenset[Any]().union(*map(_varying_axes, like))
    missing = [tuple(axes - _varying_axes(x)) for x in arrays]
    pairs = zip(arrays, missing)
    return tuple(jax.lax.pcast(x, more, to="varying") if more else x for x, more in pairs)


def _varying_axes(array: Any) -> frozenset[Any]:
    form = jax.typeof(array)
    if hasattr(form, "mat"):  # from JAX 0.10 on
        return frozenset(form.mat.varying)
    return frozenset(getattr(form, "vma", ()))
