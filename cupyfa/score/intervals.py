"""Evaluation of mask expressions on entire tiles by integer interval arithmetic.

A result "all pairs visible" or "no pair visible" is exact. Any other result, and expressions that
compute with non-integers, require evaluating each pair.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyfa.score.expressions import Expression, indices_at

Array = np.ndarray[Any, Any]
_LARGEST = 2**62  # exclusive limit for magnitudes


@dataclass(frozen=True)
class Range:
    """The integers from low to high. A condition has low = 1 if always true, high = 0 if never."""

    low: Array
    high: Array


class _Unknown(Exception):
    """Raised for an operation that ranges do not support."""


def read(
    expression: Expression, places: Mapping[str, Range], names: Mapping[str, Any]
) -> Range | None:
    """Evaluates a condition on ranges; returns None if ranges do not support its operations.

    places: maps "batch", "head", "query", "key", "position", "queries" and "keys" to ranges, whose
    arrays broadcast to one element per tile. names: captured arrays and numbers.
    """
    try:
        return _Reader(places, names).visit(expression.tree)
    except _Unknown:
        return None


@dataclass(frozen=True)
class _Reader:
    places: Mapping[str, Range]
    names: Mapping[str, Any]

    def visit(self, node: ast.expr) -> Range:
        match node:
            case ast.Constant(int(value)):
                return exactly(value)
            case ast.Name(name):
                return self.places[name] if name in self.places else _given(self.names[name])
            case ast.Subscript(ast.Name(name)):
                return _element(self.names[name], [self.visit(x) for x in indices_at(node)])
            case ast.UnaryOp(op, operand):
                return _unary(op, self.visit(operand))
            case ast.BinOp(left, op, right):
                return _binary(op, self.visit(left), self.visit(right))
            case ast.BoolOp(op, values):
                return _all_or_any([self.visit(x) for x in values], isinstance(op, ast.And))
            case ast.Compare(left, ops, rights):
                sides = [self.visit(x) for x in (left, *rights)]
                pairs = zip(ops, sides, sides[1:])
                return _all_or_any([_compared(op, a, b) for op, a, b in pairs], True)
            case ast.IfExp(test, body, other):
                return _chosen(*(self.visit(x) for x in (test, body, other)))
            case ast.Call(ast.Name(name), arguments) if name in _CALLS:
                return _CALLS[name](*(self.visit(x) for x in arguments))
        raise _Unknown


def exactly(value: Any) -> Range:
    number = _moderate(np.asarray(value))
    return Range(number, number)


def _moderate(array: Array) -> Array:
    """Converts an array to int64; raises _Unknown if a sum of two elements might overflow."""
    if ((array >= _LARGEST) | (array <= -_LARGEST)).any():
        raise _Unknown
    return array.astype(np.int64)


def _given(value: Any) -> Range:
    if np.asarray(value).dtype.kind not in "biu":
        raise _Unknown
    return exactly(value)


def _element(array: Any, indices: list[Range]) -> Range:
    """Returns the range of the indexed elements; at most one index may span several values."""
    array = np.asarray(array)
    inside = all((x.low >= 0).all() and (x.high < n).all() for x, n in zip(indices, array.shape))
    wide = [axis for axis, x in enumerate(indices) if (x.low != x.high).any()]
    if array.dtype.kind not in "biu" or not inside or len(wide) > 1:
        raise _Unknown
    if not wide:
        return exactly(array[tuple(x.low for x in indices)])
    (axis,) = wide
    others = tuple(x.low for place, x in enumerate(indices) if place != axis)
    array, index = _moderate(np.moveaxis(array, axis, 0)), indices[axis]
    return Range(
        _extreme(np.minimum, array, index, others), _extreme(np.maximum, array, index, others)
    )


def _extreme(of: np.ufunc, array: Array, index: Range, others: tuple[Array, ...]) -> Array:
    """Returns the minima or maxima (``of``) of array[low … high, others].

    Combines the extremes of two overlapping spans whose length is a power of two.
    """
    length = index.high - index.low + 1
    level = np.frexp(length)[1] - 1  # 2^level is at most the length
    found = np.zeros(np.broadcast_shapes(length.shape, *(x.shape for x in others)), np.int64)
    for power in range(int(level.max()) + 1):
        if power:
            half = 1 << (power - 1)
            array = of(array[:-half], array[half:])
        here = level == power
        first = np.where(here, index.low, 0)
        last = np.where(here, index.high + 1 - (1 << power), 0)
        found = np.where(here, of(array[(first, *others)], array[(last, *others)]), found)
    return found


def _unary(op: ast.unaryop, x: Range) -> Range:
    if isinstance(op, ast.Not | ast.Invert):
        return Range(1 - x.high, 1 - x.low)
    return Range(-x.high, -x.low) if isinstance(op, ast.USub) else x


def _binary(op: ast.operator, a: Range, b: Range) -> Range:
    match op:
        case ast.Add():
            return Range(_moderate(a.low + b.low), _moderate(a.high + b.high))
        case ast.Sub():
            return Range(_moderate(a.low - b.high), _moderate(a.high - b.low))
        case ast.BitAnd() | ast.BitOr():
            return _all_or_any([a, b], isinstance(op, ast.BitAnd))
        case ast.Mult():
            ends = [_product(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
            return Range(np.minimum.reduce(ends), np.maximum.reduce(ends))
        case ast.Pow():
            least, most = np.abs(a.low), np.abs(a.high)
            both = np.where((a.low <= 0) & (a.high >= 0), 0, np.minimum(least, most))
            return Range(_product(both, both), _product(*[np.maximum(least, most)] * 2))
        case ast.FloorDiv() | ast.Mod() if (b.low == b.high).all() and (b.low > 0).all():
            low, high = a.low // b.low, a.high // b.low
            if isinstance(op, ast.FloorDiv):
                return Range(low, high)
            same = low == high
            return Range(
                np.where(same, a.low % b.low, 0), np.where(same, a.high % b.low, b.low - 1)
            )
    raise _Unknown


def _product(a: Array, b: Array) -> Array:
    if (np.abs(a.astype(float) * b) >= _LARGEST).any():
        raise _Unknown
    return a * b


def _all_or_any(parts: list[Range], every: bool) -> Range:
    of = np.minimum if every else np.maximum
    lows, highs = [x.low for x in parts], [x.high for x in parts]
    low, high = lows[0], highs[0]
    for x, y in zip(lows[1:], highs[1:]):
        low, high = of(low, x), of(high, y)
    return Range(low, high)


def _compared(op: ast.cmpop, a: Range, b: Range) -> Range:
    match op:
        case ast.Lt():
            must, may = a.high < b.low, a.low < b.high
        case ast.LtE():
            must, may = a.high <= b.low, a.low <= b.high
        case ast.Gt() | ast.GtE():
            return _compared(ast.Lt() if isinstance(op, ast.Gt) else ast.LtE(), b, a)
        case ast.Eq():
            may = (a.low <= b.high) & (b.low <= a.high)
            must = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
        case ast.NotEq():
            return _unary(ast.Not(), _compared(ast.Eq(), a, b))
        case _:
            raise _Unknown
    return Range(np.asarray(must, np.int64), np.asarray(may, np.int64))


def _chosen(test: Range, a: Range, b: Range) -> Range:
    both = Range(np.minimum(a.low, b.low), np.maximum(a.high, b.high))
    low = np.where(test.low == 1, a.low, np.where(test.high == 0, b.low, both.low))
    return Range(low, np.where(test.low == 1, a.high, np.where(test.high == 0, b.high, both.high)))


def _abs(x: Range) -> Range:
    least, most = np.abs(x.low), np.abs(x.high)
    low = np.where((x.low <= 0) & (x.high >= 0), 0, np.minimum(least, most))
    return Range(low, np.maximum(least, most))


_CALLS: dict[str, Callable[..., Range]] = {
    "abs": _abs,
    "where": _chosen,
    "min": lambda a, b: Range(np.minimum(a.low, b.low), np.minimum(a.high, b.high)),
    "max": lambda a, b: Range(np.maximum(a.low, b.low), np.maximum(a.high, b.high)),
}
