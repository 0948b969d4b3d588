"""Resizing of operands, the arrays that expressions read, to other problem sizes."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from cupyfa.problem.optional_inputs import DLSE, OWN_ARRAYS, PADDED, ROW_MAX, STARTS, Operand
from cupyfa.problem.shape_language import AXES, Sizes
from cupyfa.score.expressions import Expression

_OF_ROWS = (DLSE, ROW_MAX)
SIZE_OF_PLACE = dict(zip(("batch", "head", "query", "key"), AXES))


def resized(
    found: Iterable[Operand], expressions: Iterable[Expression], before: Sizes, after: Sizes
) -> tuple[Operand, ...]:
    """Returns the operands resized for other problem sizes.

    A captured array's axis is resized only if expressions index it with bare names such as `query`,
    as in doc[query]; if several names index the same axis, the largest of their sizes is used.
    """
    old, new = dict(zip(AXES, before)), dict(zip(AXES, after))
    read, found = tuple(expressions), tuple(found)
    is_packed = any(x.name == STARTS[0] for x in found)
    of_rows = {**new, "batch": 1} if is_packed else new
    return tuple(
        replace(x, shape=_by_axes(x, old, of_rows if x.name in _OF_ROWS else new))
        if x.name in (*OWN_ARRAYS, *_OF_ROWS, *PADDED)
        else replace(x, shape=tuple(_fitting(x, axis, read, new) for axis in range(len(x.shape))))
        for x in found
    )


def _by_axes(x: Operand, old: Mapping[str, int], new: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the array's new shape; a broadcast axis of a bias or mask keeps size 1."""
    assert x.record
    axes = zip(x.record.axes[-len(x.shape) :], x.shape)
    serves_all = x.record.broadcast == "axes"
    return tuple(1 if serves_all and n == 1 != old[axis] else new[axis] for axis, n in axes)


def _fitting(x: Operand, axis: int, steps: Iterable[Expression], new: Mapping[str, int]) -> int:
    indices = [index for step in steps for index in indices_of(step, x.name, axis)]
    places = [i.id for i in indices if isinstance(i, ast.Name) and i.id in SIZE_OF_PLACE]
    if not places or len(places) < len(indices):
        return x.shape[axis]
    return max(new[SIZE_OF_PLACE[name]] for name in places)


def indices_of(expression: Expression, name: str, axis: int) -> Iterator[ast.expr]:
    """Yields the index expressions that are used for one axis of an array."""
    return (index for array, place, index in expression.indices if (array, place) == (name, axis))
