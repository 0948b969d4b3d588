"""Bounds for a kernel whose reference is its author's, from how far rounding moves that reference.

The reference is a function of float64 arrays of which nothing else is known. So it is evaluated
again with operands that are off by a rounding, and each result x gets the bound

    |kernel - x|  <=  (4 + growth * eps / unit) * D  +  equal * eps * X  +  ulp(x) / 2  +  floor
    growth = 2.4 * (sqrt(terms) + 4),    equal = terms / 2 + 8

D is the largest change in x's row, its neighbours along the last axis, over all evaluations; X is
the largest |x| in that row. ``unit`` is the relative error of a rounded operand: eps, the spacing
at 1 of the format that sums are kept in, or half of that of a narrow format, if the arrays have one
or the kernel rounds to one. A kernel that rounds intermediate results, the weights P for example,
has errors like D; 4 allows for four of them. ``growth`` is twice that of a sum of ``terms`` terms
in the worst order (see tolerance.py), for sums within sums. ``equal`` is that of equal terms,
whose errors add up. ``terms`` is the most that a sum of the problem has. The last two terms round x
to its dtype and allow flushing subnormal numbers to zero: floor = tiny * (terms + 2).

D must not be small by chance. Every number is changed by its unit, up or down: in eight evaluations
each element for itself, in two all of a row together, as the errors of terms of one sign add up, in
two all of a column; and D is taken over a row. For a kernel that rounds by design, the operands
rounded to its precision are one more evaluation.

Whole numbers, the index of a maximum for example, may be off by D alone.

Infinity and NaN must be where the reference has them, with three exceptions, where anything may
stand: where a changed operand makes an infinity or NaN, where x is beyond its dtype's largest
number, and NaN of inputs that hold NaN or infinity.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cupyfa.numerics import reference
from cupyfa.numerics.tolerance import Arithmetic, Array, Expected

Arrays = Mapping[str, Array]
Floats = Mapping[str, float]
Function = Callable[[Arrays, Floats], Mapping[str, Any]]

# Evaluations with changed operands, by the axis along which signs are the same.
_EVALUATIONS: tuple[int | None, ...] = (*[None] * 8, -1, -1, -2, -2)


@dataclass(frozen=True)
class Rounding:
    """How a kernel rounds: the dtype and, if any, the precision that it rounds to by design.

    operands: the arrays of that dtype. terms: the most terms of a sum.
    """

    dtype: str
    precision: str | None
    operands: Collection[str]
    terms: int


@np.errstate(all="ignore")
def expected(
    function: Function,
    arrays: Arrays,
    floats: Floats,
    outputs: Mapping[str, np.dtype],
    rounding: Rounding,
) -> dict[str, Expected]:
    """What ``function(arrays, floats)`` gives for each of ``outputs``, with bounds.

    The function gets float arrays as float64. A result that is an Expected has a bound already.
    """
    kernel = Arithmetic(rounding.dtype, rounding.precision)
    exact = {name: _read_only(as_float64(x)) for name, x in arrays.items()}
    value = function(exact, floats)
    given = {name: x for name, x in value.items() if isinstance(x, Expected)}
    values = {name: np.asarray(value[name], np.float64) for name in outputs if name not in given}
    if not values:
        return given
    change = {name: np.zeros_like(x) for name, x in values.items()}
    units = {name: _unit(x.dtype, name in rounding.operands, kernel) for name, x in arrays.items()}
    for operands, others in _changed(exact, floats, units, kernel):
        moved = function(operands, others)
        for name, x in values.items():
            there = np.asarray(moved[name], np.float64)
            off = np.where(there == x, 0.0, np.abs(there - x))
            off[np.isfinite(x) & ~np.isfinite(there)] = np.inf
            np.maximum(change[name], np.where(np.isfinite(x), off, 0.0), out=change[name])
    finite = all(np.isfinite(x).all() for x in exact.values() if x.dtype == np.float64)
    found = {
        name: Expected(x, _bound(x, change[name], outputs[name], kernel, rounding.terms, finite))
        for name, x in values.items()
    }
    return {name: (given | found)[name] for name in outputs}


def as_float64(x: Array) -> Array:
    """An array of floats in float64, any other as it is."""
    return x if x.dtype.kind in "iub" else x.astype(np.float64)


def _read_only(x: Array) -> Array:
    """A view that the reference cannot change before it is evaluated again."""
    seen = x.view()
    seen.flags.writeable = False
    return seen


def _unit(dtype: np.dtype, is_operand: bool, kernel: Arithmetic) -> float:
    """The relative error of a rounded number: of an operand of narrow formats half of their eps."""
    if dtype.kind in "iub":
        return 0.0
    return (is_operand and kernel.operand_unit) or float(kernel.accumulator.eps)


def _changed(
    arrays: Arrays, floats: Floats, units: Mapping[str, float], kernel: Arithmetic
) -> Iterator[tuple[Arrays, Floats]]:
    """The operands with each number changed by its unit, in several ways."""
    if kernel.rounds_by_design:
        is_operand = {name: unit == kernel.operand_unit for name, unit in units.items()}
        yield (
            {
                name: _rounded(x, kernel.operands) if is_operand[name] else x
                for name, x in arrays.items()
            },
            floats,
        )
    rng, eps = np.random.default_rng(0), float(kernel.accumulator.eps)
    for shared in _EVALUATIONS:
        yield (
            {
                name: x * (1.0 + units[name] * _signs(x.shape, shared, rng)) if units[name] else x
                for name, x in arrays.items()
            },
            {name: x * (1.0 + eps * rng.choice((-1, 1))) for name, x in floats.items()},
        )


def _rounded(x: Array, precision: str) -> Array:
    if x.ndim < 2:  # rounding to float8 scales matrices
        return reference.rounded(x[None], precision)[0].astype(np.float64)
    return reference.rounded(x, precision).astype(np.float64)


def _signs(shape: tuple[int, ...], shared: int | None, rng: np.random.Generator) -> Array:
    if shared is not None and len(shape) >= -shared:
        shape = tuple(1 if axis == len(shape) + shared else n for axis, n in enumerate(shape))
    return rng.choice((-1.0, 1.0), shape)


def _bound(
    value: Array, change: Array, dtype: np.dtype, kernel: Arithmetic, terms: int, finite: bool
) -> Array:
    """The bound of each element; ``finite``: whether all inputs are."""
    eps = float(kernel.accumulator.eps)
    unit = kernel.operand_unit or eps
    growth, equal = 2.4 * (np.sqrt(terms) + 4), terms / 2 + 8
    size = np.abs(np.where(np.isfinite(value), value, 0.0))
    row, largest = _along_rows(change), _along_rows(size)
    if dtype.kind in "iub":
        return row.copy()
    bound = (4 + growth * eps / unit) * row + equal * eps * largest + kernel.tiny * (terms + 2)
    limits = ml_dtypes.finfo(dtype)
    ulp = np.exp2(np.floor(np.log2(np.maximum(size, float(limits.smallest_normal)))))
    bound = bound + ulp * float(limits.eps) / 2
    bound[(size + bound > float(limits.max)) & np.isfinite(value)] = np.inf
    if not finite:
        bound[np.isnan(value)] = np.inf
    bound[np.isinf(change)] = np.inf
    return bound


def _along_rows(x: Array) -> Array:
    """The largest finite number of each row, for all of its elements."""
    if not x.ndim:
        return x
    largest = np.where(np.isfinite(x), x, 0.0).max(-1, keepdims=True, initial=0.0)
    return np.broadcast_to(largest, x.shape)
