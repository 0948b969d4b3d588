"""Error bounds for kernels with a custom reference, derived from perturbed evaluations.

The reference is an arbitrary function of float64 arrays. It is evaluated several times on operands
that are perturbed by rounding errors, and each element x of a result gets the bound

    |kernel - x|  <=  (4 + growth * eps / unit) * D  +  4 * R
                      +  equal * eps * X  +  ulp(|x| + the terms so far) / 2  +  floor
    growth = 2.4 * (sqrt(terms) + 4),    equal = terms / 2 + 8

D is the largest change in the row of x (along the last axis) over all evaluations; X is the largest
|x| in that row. ``unit`` is the relative rounding error of an operand: eps, the spacing at 1 of the
accumulation format, or half the eps of a narrow format, if the arrays are stored in such a format
or the kernel rounds them to it. A kernel that rounds an intermediate result, such as the weights P,
has an error comparable to D; the factor 4 allows for four such roundings. ``growth`` is twice the
growth of a sum of ``terms`` terms in the worst order (see tolerance.py), for nested sums. ``equal``
is the growth for equal terms, whose errors add up. ``terms`` is the number of terms in the
problem's longest sum. The last two terms of the bound account for rounding x to its dtype and for
flushing subnormal numbers to zero: floor = tiny * (terms + 2).

R is the largest change in the row over four evaluations that keep the operands and perturb the
result of every operation by eps, up or down (Monte Carlo arithmetic: Parker 1997). It detects
cancellation of intermediate results, as in 1 - t * t for t = tanh(x) near 1, to which D is almost
insensitive. The factor 4 allows for functions that are less accurate than NumPy's.

D and R must not be small by chance. Every number is perturbed by its unit, up or down. For D, eight
evaluations draw a sign for each element, two evaluations draw one sign per row, and two evaluations
draw one sign per column, because errors of equal sign add up. The largest change is taken over a
row. For a kernel that rounds by design, one more evaluation rounds the operands to the kernel's
precision.

Integers, such as the index of a maximum, may differ by D only.

Infinity and NaN must match the reference, with four exceptions, where any result passes: where a
perturbed operand produces infinity or NaN, where an infinity changes in any evaluation, where x
exceeds its dtype's largest number, and where x is NaN and an input contains NaN or infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cupyfa.numerics import reference
from cupyfa.numerics.tolerance import Arithmetic, Array, Expected

Arrays = Mapping[str, Array]
Floats = Mapping[str, float]
Function = Callable[[Arrays, Floats], Mapping[str, Any]]

# One entry per evaluation: the axis along which all perturbations have the same sign, or None.
_EVALUATIONS: tuple[int | None, ...] = (*[None] * 8, -1, -1, -2, -2)
_EVALUATIONS_OF_STEPS: tuple[int | None, ...] = (None, None, -1, -2)
# Ufuncs without rounding errors.
_EXACT = {
    *(np.maximum, np.minimum, np.fmax, np.fmin, np.negative, np.positive, np.absolute, np.fabs),
    *(np.sign, np.copysign, np.floor, np.ceil, np.trunc, np.rint, np.floor_divide, np.divmod),
}
_PRODUCTS = {np.dot, np.einsum, np.inner, np.vdot}  # not ufuncs, but their results are rounded


@dataclass(frozen=True)
class Rounding:
    """A kernel's dtype, and the precision to which it rounds by design, if any.

    operands: names of the arrays with this dtype. terms: number of terms in the longest sum.
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
    """Evaluates ``function(arrays, floats)`` and bounds the error of each output.

    Floating-point arrays are passed as float64. Results that are already Expected keep their bound.
    """
    kernel = Arithmetic(rounding.dtype, rounding.precision)
    exact = {name: _read_only(as_float64(x)) for name, x in arrays.items()}
    value = function(exact, floats)
    given = {name: x for name, x in value.items() if isinstance(x, Expected)}
    values = {name: np.asarray(value[name], np.float64) for name in outputs if name not in given}
    if not values:
        return given
    units = {name: _unit(x.dtype, name in rounding.operands, kernel) for name, x in arrays.items()}
    change = _largest_changes(function, values, _changed(exact, floats, units, kernel))
    of_steps = _largest_changes(function, values, _noisy(exact, floats, kernel))
    finite = all(np.isfinite(x).all() for x in exact.values() if x.dtype == np.float64)
    found = {
        name: Expected(
            x,
            _bound(x, change[name], of_steps[name], outputs[name], kernel, rounding.terms, finite),
        )
        for name, x in values.items()
    }
    return {name: (given | found)[name] for name in outputs}


def _largest_changes(
    function: Function, values: Arrays, evaluations: Iterable[tuple[Arrays, Floats]]
) -> dict[str, Array]:
    """Returns each element's largest change over the evaluations.

    The change is infinite where a finite number becomes infinite or NaN, and where an infinite
    number changes at all.
    """
    change = {name: np.zeros_like(x) for name, x in values.items()}
    for operands, floats in evaluations:
        moved = function(operands, floats)
        for name, x in values.items():
            there = np.asarray(moved[name], np.float64)
            off = np.where(there == x, 0.0, np.abs(there - x))
            off[np.isnan(off)] = np.inf
            np.maximum(change[name], np.where(np.isnan(x), 0.0, off), out=change[name])
    return change


def as_float64(x: Array) -> Array:
    """Converts floating-point arrays to float64; returns other arrays unchanged."""
    return x if x.dtype.kind in "iub" else x.astype(np.float64)


def _read_only(x: Array) -> Array:
    """Returns a read-only view, because the reference is evaluated several times."""
    seen = x.view()
    seen.flags.writeable = False
    return seen


def _unit(dtype: np.dtype, is_operand: bool, kernel: Arithmetic) -> float:
    if dtype.kind in "iub":
        return 0.0
    return (is_operand and kernel.operand_unit) or float(kernel.accumulator.eps)


def _changed(
    arrays: Arrays, floats: Floats, units: Mapping[str, float], kernel: Arithmetic
) -> Iterator[tuple[Arrays, Floats]]:
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
    if x.ndim < 2:  # rounding to float8 requires two axes
        return reference.rounded(x[None], precision)[0].astype(np.float64)
    return reference.rounded(x, precision).astype(np.float64)


def _signs(shape: tuple[int, ...], shared: int | None, rng: np.random.Generator) -> Array:
    if shared is not None and len(shape) >= -shared:
        shape = tuple(1 if axis == len(shape) + shared else n for axis, n in enumerate(shape))
    return rng.choice((-1.0, 1.0), shape)


class _Noisy(np.ndarray):
    """An array that multiplies every arithmetic result by ``factors(shape)``.

    Results are noisy arrays, too. Indexing, comparing, copying and functions without rounding
    errors stay exact.
    """

    factors: Callable[[tuple[int, ...]], Array]

    @classmethod
    def of(cls, x: Array, factors: Callable[[tuple[int, ...]], Array]) -> _Noisy:
        seen = x.view(cls)
        seen.factors = factors
        return seen

    def __array_finalize__(self, of: Any) -> None:
        if isinstance(of, _Noisy):
            self.factors = of.factors

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **how: Any) -> Any:
        out = how.pop("out", None)
        if out:
            how["out"] = tuple(_plain(x) for x in out)
        how = {name: _plain(x) for name, x in how.items()}
        found = getattr(ufunc, method)(*map(_plain, inputs), **how)
        is_exact = method == "at" or ufunc in _EXACT
        results = found if isinstance(found, tuple) else (found,)
        moved = tuple(self._result(x, is_exact) for x in results)
        given = out or (None,) * len(moved)
        moved = tuple(x if into is None else into for x, into in zip(moved, given))
        return moved if isinstance(found, tuple) else moved[0]

    def __array_function__(self, function: Any, types: Any, inputs: Any, how: Any) -> Any:
        found = super().__array_function__(function, types, inputs, how)
        return self._result(_plain(found), function not in _PRODUCTS)

    def _result(self, x: Any, is_exact: bool) -> Any:
        if not isinstance(x, np.ndarray | np.inexact) or x.dtype.kind not in "fc":
            return x
        if isinstance(x, np.inexact):
            return x if is_exact else x.dtype.type(x * self.factors(()))
        if not is_exact:
            np.multiply(x, self.factors(x.shape), out=x, casting="same_kind")
        return _Noisy.of(x, self.factors)


def _plain(x: Any) -> Any:
    return x.view(np.ndarray) if isinstance(x, _Noisy) else x


def _noisy(arrays: Arrays, floats: Floats, kernel: Arithmetic) -> Iterator[tuple[Arrays, Floats]]:
    """Yields the unchanged operands as _Noisy arrays, which perturb every result by eps."""
    rng, eps = np.random.default_rng(0), float(kernel.accumulator.eps)
    for shared in _EVALUATIONS_OF_STEPS:

        def factors(shape: tuple[int, ...], shared: int | None = shared) -> Array:
            return 1.0 + eps * _signs(shape, shared, rng)

        yield {name: _Noisy.of(x, factors) for name, x in arrays.items()}, floats


def _bound(
    value: Array,
    change: Array,
    of_steps: Array,
    dtype: np.dtype,
    kernel: Arithmetic,
    terms: int,
    finite: bool,
) -> Array:
    """Computes the bound of each element. finite: whether all inputs are finite."""
    eps = float(kernel.accumulator.eps)
    unit = kernel.operand_unit or eps
    growth, equal = 2.4 * (np.sqrt(terms) + 4), terms / 2 + 8
    size = np.abs(np.where(np.isfinite(value), value, 0.0))
    row, largest = _along_rows(change), _along_rows(size)
    if dtype.kind in "iub":
        return row.copy()
    bound = (4 + growth * eps / unit) * row + 4 * _along_rows(of_steps)
    bound = bound + equal * eps * largest + kernel.tiny * (terms + 2)
    limits = ml_dtypes.finfo(dtype)
    ulp = np.exp2(np.floor(np.log2(np.maximum(size + bound, float(limits.smallest_normal)))))
    bound = bound + ulp * float(limits.eps) / 2
    bound[(size + bound > float(limits.max)) & np.isfinite(value)] = np.inf
    if not finite:
        bound[np.isnan(value)] = np.inf
    bound[np.isinf(change) | (np.isinf(of_steps) & np.isinf(value))] = np.inf
    return bound


def _along_rows(x: Array) -> Array:
    """Replaces every element by the largest finite number of its row."""
    if not x.ndim:
        return x
    largest = np.where(np.isfinite(x), x, 0.0).max(-1, keepdims=True, initial=0.0)
    return np.broadcast_to(largest, x.shape)
