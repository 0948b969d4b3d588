"""Evaluation of score expressions in NumPy, with derivatives and bounds of rounding errors.

An expression is in a subset of Python (cupyfa/score/expressions.py). It is evaluated in float64 on
all (query, key) pairs of a tile at once; integers stay integers.

**Derivatives** with respect to the score follow the chain rule. Functions are differentiated by a
complex step, f'(x) = Im f(x + ih) / h, which avoids cancellation and needs only f. min, max, abs,
floor and where have the derivative of the argument that they select.

**Errors** are absolute, in units of eps, the spacing at 1 of the format that a kernel computes in.
The error of a node is the sum of its arguments' errors, multiplied by the node's derivatives, plus
the node's own rounding error:

- 0.5 eps of the result for sums, differences, products, and numbers that are rounded when a kernel
  reads them; 2.5 eps for quotients, which kernels compute as products with reciprocals;
- the errors in cupyfa/score/functions.py for functions.

Where an error may change the result of a comparison or floor, or the choice of min or max, the
error includes the difference between both results. Errors of derivatives follow the same rules and
depend on second derivatives. Results of -inf, +inf and NaN count as exact.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import numpy as np

from cupyfa.score.dropout import KeptWeights
from cupyfa.score.expressions import Expression, indices_at
from cupyfa.score.functions import DIFFERENTIABLE, RECIPROCAL, Function

Array = np.ndarray[Any, Any]

_STEP = 1e-30  # h of the complex step
_EXACT_WHOLE = 2.0**24  # float32 represents all integers up to this magnitude
_LARGE = 1e-3  # larger errors are propagated by evaluating f, not only by its derivative
_EPS = float(np.finfo(np.float32).eps)

Place = Mapping[str, Array]  # batch, head, query and key indices of pairs, broadcastable


@dataclass
class Number:
    """A node's values (bool, integers or float64) with derivatives and errors.

    Integers are int64, or Python ints in an object array where 64 bits may not suffice.

    slope: the derivative with respect to the score. error, slope_error: bounds of the absolute
    errors of value and slope, in eps. None stands for 0. The error of a bool is True where rounding
    may change the bool.
    """

    value: Array
    slope: Any = None
    error: Any = None
    slope_error: Any = None

    @property
    def is_real(self) -> bool:
        return self.value.dtype.kind == "f"


@dataclass(frozen=True, eq=False)
class Modifications:
    """Expressions that change scores or hide pairs, with the values of the names that they use.

    score_steps: expressions that are applied to the scaled score in this order. mask_steps:
    conditions; a pair is visible if all of them are True and causal and window do not hide it.
    names: the captured arrays and numbers. position: the position of query 0 among the keys.
    queries, keys: the sizes that expressions read. first: batch, head, query and key index of the
    first element, for evaluating an excerpt of a problem. dropout: the dropout mask, if any.
    """

    score_steps: Sequence[Expression] = ()
    mask_steps: Sequence[Expression] = ()
    names: Mapping[str, Any] = field(default_factory=dict)
    position: int = 0
    queries: int = 0
    keys: int = 0
    first: tuple[int, int, int, int] = (0, 0, 0, 0)
    dropout: KeptWeights | None = None

    def place(self, batch: Array, head: Array, query: Array, key: Array) -> Place:
        """Adds the offsets in `first` to indices into an excerpt."""
        given = (batch, head, query, key)
        names = ("batch", "head", "query", "key")
        return {name: x + start for name, x, start in zip(names, given, self.first)}

    def kept(self, place: Place) -> Array | None:
        """Returns a bool array, True where dropout keeps the weight; None without dropout."""
        return None if self.dropout is None else self.dropout.kept(**place)

    @np.errstate(all="ignore")
    def hidden(
        self, place: Place, masked: Array | None, shape: tuple[int, ...]
    ) -> tuple[Array | None, Array | None]:
        """Returns two masks: the hidden pairs, and the pairs whose visibility rounding may flip.

        masked: the pairs that causal and window hide, or None. Both results are bool arrays of
        shape `shape`; None stands for False everywhere.
        """
        if not self.mask_steps:
            return masked, None
        seen = may = must = np.broadcast_to(True if masked is None else ~masked, shape)
        for expression in self.mask_steps:  # ignores pairs that earlier expressions hide
            step = _Walk(self, expression, place, ~seen, None, _EPS).visit(expression.tree)
            unsure = np.asarray(False if step.error is None else step.error)
            seen = seen & step.value
            may, must = may & (step.value | unsure), must & step.value & ~unsure
        unsure = may & ~must
        return ~seen, unsure if unsure.any() else None

    def modified(self, scores: Array, place: Place, masked: Array | None) -> Array:
        """Returns modified scores in float64; scores of ``masked`` pairs are arbitrary."""
        return self.number(scores, place, masked).value

    def differentiated(
        self, scores: Array, place: Place, masked: Array | None
    ) -> tuple[Array, Array]:
        """Returns modified scores and their derivatives with respect to ``scores``."""
        result = self.number(scores, place, masked, slope=1.0)
        slope = 0.0 if result.slope is None else result.slope
        return result.value, np.broadcast_to(slope, scores.shape)

    @np.errstate(all="ignore")
    def number(
        self,
        scores: Array,
        place: Place,
        masked: Array | None,
        *,
        slope: float | None = None,
        error: Array | None = None,
        eps: float | None = None,
    ) -> Number:
        """Computes modified scores, with derivatives and errors if requested.

        slope: 1.0 to compute derivatives. eps: the kernel's eps, to compute errors; `error` then
        holds the errors of ``scores``. Raises ValueError if a pair that is not masked reads a
        captured array out of bounds.
        """
        number = Number(scores.astype(np.float64, copy=False), slope, error)
        for expression in self.score_steps:
            number = _Walk(self, expression, place, masked, number, eps).real(expression.tree)
        if number.value.shape != scores.shape:  # the expression does not use the score
            return replace(number, value=np.broadcast_to(number.value, scores.shape).copy())
        return number

    @np.errstate(all="ignore")
    def accesses(
        self,
        scores: Array,
        place: Place,
        masked: Array | None,
        names: Collection[str],
        *,
        error: Array | None = None,
        eps: float | None = None,
    ) -> Iterator[tuple[str, tuple[Array, ...], Number]]:
        """Yields (array name, indices, modified scores) for each access to one of these arrays.

        The slope of the modified scores is the derivative with respect to the accessed element.
        error, eps: see `number`.
        """
        for expression in self.score_steps:
            for node in ast.walk(expression.tree):
                if not (isinstance(node, ast.Subscript) and _name_of(node) in names):
                    continue
                number = Number(scores.astype(np.float64, copy=False), error=error)
                at: tuple[Array, ...] = ()
                for step in self.score_steps:
                    walk = _Walk(self, step, place, masked, number, eps, seed=node)
                    number, at = walk.real(step.tree), walk.at or at
                yield _name_of(node), at, number

    def applied_to(self, scores: Array, visible: Array | None = None) -> Array:
        """Returns modified scores [batch, heads, M, N], -inf where a pair is hidden.

        visible: a bool array, broadcastable, True for pairs that causal and window leave visible;
        None if all are visible.
        """
        place = self.place(*np.ogrid[tuple(slice(size) for size in scores.shape)])
        masked, _ = self.hidden(place, None if visible is None else ~visible, scores.shape)
        modified = self.modified(scores, place, masked) if self.score_steps else scores
        return modified if masked is None else np.where(masked, -np.inf, modified)


NONE = Modifications()


@dataclass
class _Walk:
    """Evaluates one expression on pairs; like kernels, it evaluates all operands.

    masked: pairs to ignore, in which indices may be out of range; or None. seed: the array access
    with respect to which derivatives are computed, instead of the score; its indices are stored in
    ``at``.
    """

    mods: Modifications
    expression: Expression
    place: Place
    masked: Array | None
    score: Number | None
    eps: float | None
    seed: ast.expr | None = None
    at: tuple[Array, ...] = ()

    def visit(self, node: ast.expr) -> Number:
        match node:
            case ast.Constant(value):
                return self._given(value)
            case ast.Name(name):
                return self._named(name)
            case ast.Subscript():
                return self._element(node)
            case ast.UnaryOp(op, operand):
                return self._unary(op, self.visit(operand))
            case ast.BinOp(left, op, right):
                return self._binary(op, self.visit(left), self.visit(right))
            case ast.BoolOp(op, values):
                return self._either([self.visit(x) for x in values], isinstance(op, ast.And))
            case ast.Compare(left, ops, rights):
                sides = [self.visit(x) for x in (left, *rights)]
                pairs = zip(ops, sides, sides[1:])
                return self._either([self._ordered(type(op), a, b) for op, a, b in pairs], True)
            case ast.IfExp(test, body, other):
                return self._chosen(*(self.visit(x) for x in (test, body, other)))
            case ast.Call(ast.Name(name), arguments):
                return self._call(name, [self.visit(x) for x in arguments])
        raise self._error(f"{ast.unparse(node)!r} is not available")

    def _error(self, what: str) -> ValueError:
        return ValueError(f"{self.expression.option}: {what}")

    def real(self, node: ast.expr) -> Number:
        return self._real(self.visit(node))

    def _given(self, value: Any) -> Number:
        """Converts a constant or captured value to a Number with its float32 rounding error."""
        value = np.asarray(value)
        if value.dtype.kind in "biu":
            return Number(value if value.dtype.kind == "b" else value.astype(np.int64))
        wide = value.astype(np.float64)
        if self.eps is None or value.dtype.itemsize <= 4:
            return Number(wide)
        rounds = wide.astype(np.float32) != wide
        return Number(
            wide, error=np.where(rounds, 0.5 * _size(wide), 0.0) if rounds.any() else None
        )

    def _named(self, name: str) -> Number:
        if name == "score" and self.score is not None:
            return self.score
        if name in self.place:
            return Number(self.place[name])
        if name == "position":
            return Number(self.place["query"] + self.mods.position)
        if name in ("queries", "keys"):
            return Number(np.asarray(getattr(self.mods, name)))
        if name not in self.mods.names:
            raise self._error(f"no value was given for {name!r}")
        return self._given(self.mods.names[name])

    def _element(self, node: ast.Subscript) -> Number:
        name = _name_of(node)
        array = np.asarray(self.mods.names[name])
        numbers = [self.visit(x) for x in indices_at(node)]
        at = tuple(
            self._inside(name, axis, size, np.asarray(x.value))
            for axis, (size, x) in enumerate(zip(array.shape, numbers, strict=True))
        )
        found = self._given(array[at] if array.size else np.zeros_like(array, shape=()))
        if array.dtype == np.uint64 and _are_large(array):  # int64 cannot hold all elements
            found.value = array[at].astype(object)
        if node is self.seed:
            self.at, found.slope = at, 1.0
        if any(x.error is not None for x in numbers):  # rounding may select another element
            other = np.asarray(_sum(*(x.error for x in numbers)) > 0)
            found.error = other if found.value.dtype.kind == "b" else np.where(other, np.inf, 0.0)
        return found

    def _inside(self, name: str, axis: int, size: int, index: Array) -> Array:
        """Raises ValueError for an index out of range; clips indices of ignored pairs."""
        outside = np.asarray((index < 0) | (index >= size), bool)
        if not outside.any():
            return index.astype(np.int64, copy=False)
        if (found := self._first(outside, index)) is not None:
            read, place = found
            allowed = f"indices must be from 0 to {size - 1}" if size else "the array is empty"
            raise self._error(
                f"index {read} into axis {axis} of {name} is out of range at {place}; the axis has "
                f"size {size}: {allowed}"
            )
        return np.clip(index, 0, max(size - 1, 0)).astype(np.int64, copy=False)

    def _refuse_zeros(self, divisor: Array) -> None:
        if (found := self._first(divisor == 0, divisor)) is not None:
            raise self._error(
                f"// or % divides by 0 at {found[1]}; make the divisor nonzero, for example with "
                "max(…, 1)"
            )

    def _first(self, where: Array, values: Array) -> tuple[int, str] | None:
        """Returns value and indices of the first pair in ``where`` that is not ignored, or None."""
        here = where if self.masked is None else where & ~self.masked
        if not here.any():
            return None
        shape = np.broadcast_shapes(here.shape, *(x.shape for x in self.place.values()))
        first = np.unravel_index(np.broadcast_to(here, shape).argmax(), shape)
        value, *pair = (
            int(np.broadcast_to(x, shape)[first]) for x in (values, *self.place.values())
        )
        return value, ", ".join(f"{x} {i}" for x, i in zip(self.place, pair))

    def _unary(self, op: ast.unaryop, x: Number) -> Number:
        if isinstance(op, ast.Not | ast.Invert):
            return Number(~x.value, error=x.error)
        if isinstance(op, ast.UAdd):
            return x
        return replace(x, value=-_negatable(x.value), slope=None if x.slope is None else -x.slope)

    def _binary(self, op: ast.operator, a: Number, b: Number) -> Number:
        if isinstance(op, ast.BitAnd | ast.BitOr):
            return self._either([a, b], isinstance(op, ast.BitAnd))
        if isinstance(op, ast.Pow):
            return self._product(a, a) if a.is_real else self._whole(np.multiply, a, a)
        if isinstance(op, ast.Div):
            return self._quotient(self._real(a), self._real(b))
        if isinstance(op, ast.FloorDiv | ast.Mod):
            self._refuse_zeros(np.asarray(b.value))
        if isinstance(op, ast.FloorDiv | ast.Mod) or not (a.is_real or b.is_real):
            return self._whole(_WHOLE[type(op)], a, b)
        a, b = self._real(a), self._real(b)
        if isinstance(op, ast.Mult):
            return self._product(a, b)
        value = a.value + b.value if isinstance(op, ast.Add) else a.value - b.value
        slope = _sum(a.slope, b.slope if isinstance(op, ast.Add) else _times(-1.0, b.slope))
        if self.eps is None:
            return Number(value, slope)
        both = slope if a.slope is not None and b.slope is not None else None
        return self._checked(
            Number(
                *(value, slope, _sum(a.error, b.error, 0.5 * _size(value))),
                _sum(a.slope_error, b.slope_error, _times(0.5, _size(both))),
            ),
            *(a, b),
        )

    def _whole(self, function: Callable[..., Any], a: Number, b: Number) -> Number:
        """Applies an integer operation; its result is exact if both operands are exact."""
        error = _sum(a.error, b.error)
        if error is not None:
            error = np.where(error > 0, np.inf, 0.0)
        value = np.asarray(function(a.value, b.value))
        if value.dtype == np.int64 and _are_large(a.value, b.value):
            exact = np.asarray(function(a.value.astype(object), b.value.astype(object)))
            self._refuse_long(np.asarray(value != exact, bool))
        return Number(value, error=error)

    def _refuse_long(self, wrong: Array) -> None:
        if (found := self._first(wrong, np.zeros((), np.int64))) is not None:
            raise self._error(
                f"a sum, difference or product of whole numbers needs more than 64 bits at "
                f"{found[1]}; multiply one operand by 1.0 to compute in floating point"
            )

    def _product(self, a: Number, b: Number) -> Number:
        value = a.value * b.value
        parts = _times(a.slope, b.value), _times(a.value, b.slope)
        slope = _sum(*parts)
        if self.eps is None:
            return Number(value, slope)
        size_a, size_b, slope_a, slope_b = map(_size, (a.value, b.value, a.slope, b.slope))
        most_a = _sum(size_a, _times(self.eps, a.error))  # accounts for the product of both errors
        error = _sum(_times(most_a, b.error), _times(size_b, a.error), 0.5 * _size(value))
        slope_error = _sum(
            _times(_sum(slope_a, _times(self.eps, a.slope_error)), b.error),
            _times(_sum(slope_b, _times(self.eps, b.slope_error)), a.error),
            *(_times(size_b, a.slope_error), _times(size_a, b.slope_error)),
            *map(_size, parts),
        )
        return self._checked(Number(value, slope, error, slope_error), a, b)

    def _quotient(self, a: Number, b: Number) -> Number:
        found = self._product(a, self._function(RECIPROCAL, b))
        return replace(found, value=np.asarray(a.value / b.value))

    def _function(self, function: Function, x: Number) -> Number:
        f, df = function.value, function.derivative
        assert df and function.error and function.slope_error
        y = np.asarray(f(x.value))
        if self.eps is None and x.slope is None:
            return Number(y)
        d = np.asarray(df(x.value)) if x.slope is None else complex_step(f, df, x.value, y)
        slope = _times(d, x.slope)
        if self.eps is None:
            return Number(y, slope)
        size_d, size_slope, slope_error = np.abs(d), _size(x.slope), None
        if x.slope is not None:
            curve = np.abs(complex_step(df, None, x.value, d))
            slope_error = _sum(
                _times(_times(curve, x.error), size_slope),
                _times(size_d, x.slope_error),
                _times(function.slope_error(x.value, y, d) + 0.5 * size_d, size_slope),
            )
        error = _sum(self._reach(f, x, y, size_d), function.error(x.value, y))
        return self._checked(Number(y, slope, error, slope_error), x)

    def _reach(self, f: Callable[..., Any], x: Number, y: Array, size_d: Array) -> Any:
        """Returns the error of f(x) due to x's error.

        Multiplies small errors by the derivative, and evaluates f at x ± error for large errors.
        """
        if x.error is None or self.eps is None:
            return None
        error, move = size_d * x.error, self.eps * x.error
        if not np.any(move > _LARGE):
            return error
        ends = [np.abs(f(x.value + step) - y) for step in (-move, move)]
        return np.where(move > _LARGE, np.fmax(error, np.fmax(*ends) / self.eps), error)

    def _call(self, name: str, arguments: list[Number]) -> Number:
        if name in DIFFERENTIABLE:
            return self._function(DIFFERENTIABLE[name], self._real(arguments[0]))
        if name == "where":
            return self._chosen(*arguments)
        if name in ("min", "max"):
            a, b = self._alike(*arguments)
            other = self._ordered(ast.Lt if name == "min" else ast.Gt, b, a)
            other.value = other.value | (b.value != b.value)  # a NaN operand is always selected
            return self._chosen(other, b, a)
        (x,) = arguments
        if name == "abs":
            if not x.is_real:
                return replace(x, value=np.abs(_negatable(x.value)))
            negative = self._ordered(ast.Lt, x, Number(np.asarray(0.0)))
            found = self._chosen(negative, self._unary(ast.USub(), x), x)
            if found.slope is not None:
                found.slope = np.where(x.value == 0, 0.0, found.slope)
            return found
        assert name == "floor"
        x = self._real(x)
        value = np.floor(x.value)
        if self.eps is None or x.error is None:
            return Number(value)
        reach = self.eps * x.error  # how far rounding may move x
        steps = np.maximum(np.floor(x.value + reach) - value, value - np.floor(x.value - reach))
        return self._checked(Number(value, error=steps / self.eps), x)

    def _ordered(self, op: type[ast.cmpop], a: Number, b: Number) -> Number:
        value = np.asarray(_COMPARISONS[op](a.value, b.value))
        error = None if self.eps is None else _sum(a.error, b.error)
        if error is None:
            return Number(value)
        if a.value.dtype.kind == "b":
            return Number(value, error=np.asarray(error))
        unsure = (np.abs(a.value - b.value) <= self.eps * error) & (error > 0)
        return Number(value, error=unsure if unsure.any() else None)

    def _either(self, parts: Sequence[Number], is_and: bool) -> Number:
        """Combines conditions with `and` or `or`; marks results that rounding may change."""
        join = np.logical_and if is_and else np.logical_or
        value = reduce(join, [x.value for x in parts])
        if all(x.error is None for x in parts):
            return Number(np.asarray(value))
        unsure = [np.asarray(False if x.error is None else x.error) for x in parts]
        may = reduce(join, [x.value | u for x, u in zip(parts, unsure)])
        must = reduce(join, [x.value & ~u for x, u in zip(parts, unsure)])
        return Number(np.asarray(value), error=may & ~must)

    def _chosen(self, test: Number, a: Number, b: Number) -> Number:
        """Selects a where the test holds, else b.

        Where rounding may change the test, the error also includes |a - b|.
        """
        if a.value.dtype.kind == b.value.dtype.kind == "b":
            return self._chosen_bool(test, a, b)
        a, b = self._alike(a, b)

        def pick(x: Any, y: Any) -> Any:
            return None if x is y is None else np.where(test.value, or_0(x), or_0(y))

        result = Number(
            np.where(test.value, a.value, b.value),
            pick(a.slope, b.slope),
            pick(a.error, b.error),
            pick(a.slope_error, b.slope_error),
        )
        if self.eps is None or test.error is None:
            return result
        for name, of_error in (("value", "error"), ("slope", "slope_error")):
            x, y = (or_0(getattr(part, name)) for part in (a, b))
            apart = np.where(np.equal(x, y), 0.0, np.abs(np.subtract(x, y, dtype=float)))
            errors = np.maximum(or_0(getattr(a, of_error)), or_0(getattr(b, of_error)))
            jump = np.where(test.error, apart / self.eps + errors, 0.0)
            setattr(result, of_error, np.maximum(or_0(getattr(result, of_error)), jump))
        return result

    def _chosen_bool(self, test: Number, a: Number, b: Number) -> Number:
        value = np.where(test.value, a.value, b.value)
        errors = [np.asarray(False if x.error is None else x.error) for x in (test, a, b)]
        either = (a.value != b.value) | errors[1] | errors[2]
        unsure = np.where(test.value, errors[1], errors[2]) | errors[0] & either
        return Number(value, error=unsure if unsure.any() else None)

    def _alike(self, a: Number, b: Number) -> tuple[Number, Number]:
        """Converts both operands to floats unless both are integers."""
        if a.is_real or b.is_real:
            return self._real(a), self._real(b)
        return a, b

    def _real(self, x: Number) -> Number:
        if x.is_real:
            return x
        value = x.value.astype(np.float64)
        if self.eps is None or _size(value).max(initial=0) <= _EXACT_WHOLE:
            return Number(value, error=x.error)
        rounds = np.where(_size(value) > _EXACT_WHOLE, 0.5 * _size(value), 0.0)
        return Number(value, error=_sum(x.error, rounds))

    def _checked(self, x: Number, *parts: Number) -> Number:
        """Removes errors of infinite and NaN results.

        Where an operand's error is infinite, so is the error of the result, because rounding
        decides whether the operand is finite.
        """
        known = np.isfinite(x.value)
        for name in ("error", "slope_error"):
            error = getattr(x, name)
            if error is None or (known.all() and not np.isnan(error).any()):
                continue
            lost = [np.isposinf(e) for y in parts if (e := getattr(y, name)) is not None]
            counts = known & ~np.isnan(error)
            kept = np.where(counts, error, 0.0)
            setattr(x, name, np.where(_sum(*lost), np.inf, kept) if lost else kept)
        return x


def _name_of(node: ast.Subscript) -> str:
    return node.value.id  # type: ignore[attr-defined]  # _Rules allows only names here


def complex_step(f: Callable[..., Any], df: Callable[..., Any] | None, x: Array, y: Array) -> Array:
    """Differentiates f at x by a complex step, where y = f(x).

    Uses the formula df, if given, where x or y is not finite or the derivative is huge.
    """
    found = np.asarray(f(x + 1j * _STEP).imag / _STEP)
    known = np.isfinite(x) & np.isfinite(y) & (np.abs(found) < 1e10)
    if known.all():
        return found
    formula = found if df is None else df(x)
    return np.where(np.isnan(y), np.nan, np.where(known, found, formula))


def _are_large(*values: Array) -> bool:
    """Returns whether a product of these values may need more than 64 bits."""
    return any(x.size and (int(x.max()) >= 2**31 or int(x.min()) <= -(2**31)) for x in values)


def _negatable(value: Array) -> Array:
    """Converts an array to Python ints if it contains -2**63, whose negation overflows int64."""
    is_lowest = value.dtype == np.int64 and bool((value == np.iinfo(np.int64).min).any())
    return value.astype(object) if is_lowest else value


def _sum(*terms: Any) -> Any:
    total = None
    for x in terms:
        if x is not None:
            total = x if total is None else total + x
    return total


def _times(a: Any, b: Any) -> Any:
    return None if a is None or b is None else a * b


def _size(x: Any) -> Any:
    return None if x is None else np.abs(x)


def or_0(x: Any) -> Any:
    return 0.0 if x is None else x


_WHOLE: dict[type[ast.operator], Callable[..., Any]] = {
    **{ast.Add: np.add, ast.Sub: np.subtract, ast.Mult: np.multiply},
    **{ast.FloorDiv: np.floor_divide, ast.Mod: np.remainder},
}
_COMPARISONS: dict[type[ast.cmpop], Callable[..., Any]] = {
    **{ast.Lt: np.less, ast.LtE: np.less_equal, ast.Gt: np.greater},
    **{ast.GtE: np.greater_equal, ast.Eq: np.equal, ast.NotEq: np.not_equal},
}
