"""Error bounds for each element of a result, computed from the inputs.

docs/checking.md explains the bounds, and compares correct and faulty kernels with these bounds.

**Accumulation.** Let eps be the spacing at 1 of the accumulation format, n the number of keys that
a query sees, and size the largest |scale| * sum(|q| * |k|) over these keys. Rounding errors of a
sum of n terms grow like a random walk, hence the square roots. The constants allow for six standard
deviations of a sum in the worst order, term after term, and for two units in the last place of each
exponential:

    |O - reference|   <=  (w + 1.2 * eps * total * (1 + w)) * (P @ |V|)  +  floor
    |lse - reference| <=  x + eps * 2 * (|lse| + x),    x = eps * (score + 1.2 * total)
    score = sqrt(d + 3) * size,    total = sqrt(n) + 4,    floor = tiny * (n + 2 + sum(|V|))
    w = 0.6 * eps * score + exp(2 * eps * score) - 1 - 2 * eps * score

Where scores are so large that their rounding may decide any weight, the bound of O is twice the
largest |V| of its column and the error of a sum of such values, so that results must still be
finite. From |lse| = 2**25 on, the term p of gradients (below) is at most 1, because kernels clamp P
there.

A kernel rounds the numbers that it computes, not those of the reference. Such a number may be as
large as the reference's plus its bound, so a term for rounding is proportional to this sum. That
matters where a bound exceeds the reference by far.

`score` bounds the error of a score; the 3 stands for the scale and the argument of the exponential.
The relative error w of a weight contains 0.6 of it, because the common part of the keys' errors
cancels, plus the higher-order terms of the worst case, where two scores err in opposite directions.
`total` bounds the error of sums over keys. `floor` allows flushing subnormal numbers to zero: each
weight and product, the input and the output may lose up to `tiny`, the smallest normal number.

Errors of equal numbers add up instead of cancelling: where a column of V is constant over all keys,
n replaces sqrt(n) in the bound of O. Scores that are equal for hundreds of keys, but not for all,
are not covered: a correct kernel that sums term after term may then exceed the bound of lse.

**Modified scores.** Kernels evaluate expressions in float32 (in float64 for float64), whatever the
operands are. `numpy_evaluation` computes an error e of each modified score x, from the error of the
scaled score, sqrt(d + 3) * size of the pair, and from the nodes of the expression; the exponential
adds |x|. Because e differs from key to key, it replaces `score` weighted by P: the bound of O has

    eps * 0.6 * min(max(e) * (P @ |V|), (P * e) @ |V| + (P @ e) * (P @ |V|))

and the bound of lse has eps * min(max(e), P @ e). Where eps * e exceeds 0.0001, for example because
rounding may flip a comparison in the expression, the keys' errors have no common part that cancels:
exp(eps * e) - 1 replaces 0.6 * eps * e. Where it exceeds 600, so that even a weight that is 0 in
float64 may decide lse, exp(x + eps * e - lse) replaces P * (exp(eps * e) - 1). A key whose weight
is 0 whatever the errors are, such as one masked by the lowest number, adds nothing: if its x + eps
* e - lse, plus the largest eps * e of the keys with a weight, is below -1200. A row in which
rounding may flip a mask has no bounds. The effect of rounding operands by design is found by
evaluating the expressions on scaled scores that are shifted by their rounding error.

**Sinks** add a term to the sums: n + 1 replaces n, and the error of the sink's weight is
exp(sink - lse) * eps * (1.5 * |sink| + 3).

**Dropout** sets weights to 0 and multiplies the other weights by r, after lse has been computed.
Therefore r * Z * P replaces P in the errors of O and dV, and |dO| @ |V|.T in g is multiplied by
r * Z; lse, and errors that all weights of a row share, still use P.

**Row maxima** have the error of a score, which is eps * score or the largest change that e causes,
plus eps * (2 * (|maximum| + that error) + 1). They are not rounded to narrow formats.

**Narrow formats.** A kernel on float16 or bfloat16 rounds P and O by half of their eps each. With
out_dtype="float32", neither the kernel nor the plain computation rounds O. As in the tests of
FlashAttention, each head may also have an error of 2 * e + a. e is the head's largest error in a
plain computation in that format (`reference.attend`, with scaled K and with scaled S). Rows with
|lse| from 2**25 on have a largest error of their own. With scaled S, scores are rounded before
expressions modify them, because kernels that store S do so: where an expression saturates, such as
softcap, or subtracts, the rounding of its result may be far smaller. a = 2 * max|((reference + s) -
s) - reference|, evaluated in the format, allows two roundings of numbers of the head's size, s =
0.3 * max(P @ |V|), so that 2 * e + a is not 0 by chance. lse stays in float32 and may have an error
of 2 * e. For a kernel that rounds its operands by design, such as to float16 for tensor cores, the
bounds are those of that format, and for O those of the coarser format. Rounding q and k also adds r
to the error of lse, and exp(r) - 1 to the relative error of each weight, where r = eps / 2 * size *
min(2, 4 / sqrt(d)).

For float8_e4m3, eps / 2 is 2**-4. The plain computation rounds Q, K, V and P, each matrix scaled so
that its largest number is in the last binade; scores and O stay float32, and O is only rounded to
the dtype of results. Tensor cores keep about 14 bits of a sum of such products, so eps of sums is
2**-13. Elements that are NaN in the plain computation have no bounds, because the format has no
infinity. Inputs in float8_e4m3 times their descales are exact: r is 0, and the plain computation
only rounds P. `score` is then the truncation error of tensor cores. They truncate 32 products and
the previous sum, step by step, and the new sum, each time towards 0 by half a unit on average; six
standard deviations are added. A unit is eps of the largest product or sum, and s is the sum of the
signs of products:

    score = |scale| * (sum of (|s| / 2 + 1) * top + 10 * sqrt(sum of top**2)) over the steps,
    top = max(max|q| * max|k|, |sum before|, |sum after|)

Sums of O are truncated in the same way: n values of one sign lose a fraction n * 2**-15, which adds
n / 4 to `total` in the bound of O.

With a sink all weights of a row may be small. Those that underflow in float16 or float8_e4m3 are
rounded by up to half the smallest number u of the format: min(P, u / 2) @ |V| is added to the bound
of O.

Infinity and NaN must match the reference; fully masked rows are exactly 0 and -inf, or 0 and about
the sink. If a partial sum of q * k may overflow the accumulation format, with the scale or without,
the order of summation decides whether the score is finite, infinite or NaN. Where q and k are
finite, rows that see such a score have no bounds, and neither do the gradients of its key.

**Gradients.** The same eps, roots and constants apply to each (query, key) pair; O and lse are
inputs and count as exact. P has the relative error p, and dS the error F, caused by the errors of
P and of dP - delta:

    p  = exp(eps * (sqrt(d + 3) * size + |S| + |lse| + 2)) - 1         size = |scale| * |q| @ |k|.T
    g  = eps * sqrt(dv + 3) * (|dO| @ |V|.T + rowsum(|dO| * |O|))
    F  = P * (p * (|dP - delta| + g) + g + eps * (1 + p) * (|dP - delta| + g))

    |dV - reference|  <=  (P * (p + 1.2 * eps * (sqrt(m) + 4) * (1 + p))).T @ |dO|
    |dQ - reference|  <=  |scale| * (F + 1.2 * eps * (sqrt(n) + 4) * (|dS| + F)) @ |K|  dK likewise

With dlse, rowsum(|dO| * |O|) grows by |dlse|. An expression replaces sqrt(d + 3) * size by e, and
its derivative x' has an error e':

    F  = |x'| * F + eps * (|x'| + e') * (P + P * p) * (|dP - delta| + g)

|dsink - reference| <= sum(exp(sink - lse) * (H + 1.2 * eps * (sqrt(m) + 4) * (|D| + H))), where
H = w * (|D| + h) + h, h is g of D, and w = exp(eps * (1.5 * |sink| + |lse| + 3)) - 1.

The gradient of an array element a is a sum over the pairs that read a, where x'_a is the derivative
with respect to a, e_a the error of x'_a, and F as for unmodified scores:

    |da - reference|  <=  sum(|x'_a| * F + ((2 * eps + t) * |x'_a| + eps * e_a) * size)
    size = (P + P * p) * (|dP - delta| + g),    t = 1.2 * 2**-52 * (sqrt(n) + 4)

where t is the error of the sum along a row, in float64. m is the number of rows in a sum over rows
(of all heads that share the key), and every bound includes 2 eps of the result. A kernel on float16
or bfloat16 may round P and dS before matrix products, by half of their eps and half of their
smallest number, and rounds its results unless they are float32. Where a result is infinite or
exceeds its dtype's largest number, any value passes; NaN must match. Keys that no query sees, and
queries that see no key, have gradients of exactly 0.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cupyfa.errors import WrongResult
from cupyfa.numerics import reference
from cupyfa.problem.dtypes import INPUTS
from cupyfa.problem.optional_inputs import ROW_MAX, SOFTCAP
from cupyfa.problem.options import MOST_USUAL_SOFTCAP
from cupyfa.score.numpy_evaluation import Modifications, or_0

Array = np.ndarray[Any, Any]

_NARROW = ("float16", "bfloat16", "tf32", "float8_e4m3")
_FLOAT8 = "float8_e4m3"
_FLOAT8_SUMS = 2.0**-13
_DEPTH = 32  # number of e4m3 products that tensor cores add at a time
_SPREAD = 10.0  # six standard deviations of the error of truncating 32 products and a sum
_LARGEST_E4M3 = 448.0
# Half the smallest subnormal number of a format; P in e4m3 is multiplied by 2**6.
_UNDERFLOWS = {_FLOAT8: 2.0**-16, "float16": 2.0**-25}
_FEWEST_BETWEEN = 16  # minimum number of elements for require_unrounded
_SMALL = 1e-4  # larger errors of a score are not those of rounding alone
_ANY_WEIGHT = 600.0  # a score error that may turn even a vanishing weight into the largest
_DOUBLE_EPS = float(np.finfo(np.float64).eps)
_BLOCK = 1 << 18  # elements per step, which fit in a core's cache


@dataclass(frozen=True)
class Verdict:
    """Result of comparing an array with the reference.

    error: the largest absolute error; infinite for a wrong NaN or infinity.
    ratio: the largest error / bound of any element; at most 1 in a correct result. index, bound,
        actual and expected describe the element with this ratio.
    unwritten: number of wrong NaNs, often elements that the kernel never wrote.
    """

    name: str
    error: float
    bound: float
    ratio: float
    index: tuple[int, ...]
    actual: float
    expected: float
    unwritten: int

    @property
    def passed(self) -> bool:
        return self.ratio <= 1.0

    def __str__(self) -> str:
        place = ", ".join(map(str, self.index))
        unwritten = f"; {self.unwritten} elements are NaN, unwritten?" if self.unwritten else ""
        return (
            f"{self.name}: error {self.error:.3g}, worst at [{place}]: {self.actual:.9g} instead "
            f"of {self.expected:.9g}, {self.ratio:.3g} x the bound {self.bound:.3g}{unwritten}"
        )


class Expected(NamedTuple):
    """Correct values of an array with error bounds, both float64.

    Elements with an infinite bound may have any value.
    """

    value: Array
    bound: Array

    def __repr__(self) -> str:
        return f"<expected {np.shape(self.value)}, with bounds>"


Roundings = Sequence[str | None]
ExpectedOfEach = dict[str | None, dict[str, Expected]]  # indexed by rounding and array name


def require(verdicts: Iterable[Verdict], context: str) -> None:
    """Raises WrongResult if any verdict failed; `context` names kernel, shape, dtype and seed."""
    failed = [str(verdict) for verdict in verdicts if not verdict.passed]
    if failed:
        raise WrongResult("\n  ".join([f"wrong result of {context}", *failed]))


@np.errstate(all="ignore")
def require_unrounded(
    results: Mapping[str, Array], expected: Mapping[str, Expected], dtype: str, context: str
) -> None:
    """Raises WrongResult for float32 results that were rounded to a 16-bit dtype before the store.

    Error bounds cannot detect this, because they allow for operands of that dtype. The test counts
    16-bit numbers among elements whose correct value is at least a quarter of a step away from any
    16-bit number. A correct kernel stores a 16-bit number there by chance only, for one element in
    thousands.
    """
    info = _finfo(dtype)
    for name, actual in results.items():
        value = expected[name].value
        nearest = value.astype(info.dtype).astype(np.float64)
        step = float(info.eps) * np.exp2(np.frexp(value)[1] - 1.0)
        is_between = np.isfinite(nearest) & (np.abs(value - nearest) > step / 4)
        is_rounded = actual.astype(info.dtype).astype(actual.dtype) == actual
        count, rounded = is_between.sum(), (is_between & is_rounded).sum()
        if count >= _FEWEST_BETWEEN and 2 * rounded > count:
            raise WrongResult(
                f"wrong result of {context}\n  {name}: {rounded} of {count} float32 elements were "
                f"rounded to {dtype}; store them without rounding to {dtype} first"
            )


def compare(results: Mapping[str, Array], expected: Mapping[str, Expected]) -> list[Verdict]:
    """Compares each array with the `Expected` of the same name.

    Raises ValueError for unknown names and wrong shapes.
    """
    for name, actual in results.items():
        if name not in expected:
            raise ValueError(f"result {name!r} is unknown; use one of {', '.join(expected)}")
        shape = expected[name].value.shape
        if actual.shape != shape:
            raise ValueError(f"{name} has shape {actual.shape}; it must be {shape}")
    return [_verdict(name, actual, expected[name]) for name, actual in results.items()]


@np.errstate(all="ignore")
def expected_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    dtype: str,
    out_dtype: str | None = None,
    roundings: Roundings = (None,),
    row_max: bool = False,
    **score: Any,
) -> ExpectedOfEach:
    """Computes "O" and "lse" of attention, with the bounds described in the module's docstring.

    q, k, v and `score` (scale, masks, mods, sink): see `reference.attention`.
    dtype: the dtype of the inputs. out_dtype: the dtype of O; None for the default of `dtype`.
    roundings: for each kernel, the precision from `reference.PRECISIONS` to which it rounds
        operands by design, or None. Elements have no bounds where this rounding overflows in the
        plain computation.
    row_max: whether to include the row maxima, "row_max".
    """
    kernels = {rounding: Arithmetic(dtype, rounding, out_dtype) for rounding in roundings}
    value = {"O": np.zeros((*q.shape[:3], v.shape[-1])), "lse": np.zeros(q.shape[:3])}
    if row_max:
        value[ROW_MAX] = np.zeros(q.shape[:3])
    bounds = {r: {name: np.zeros_like(x) for name, x in value.items()} for r in kernels}
    heads = q.shape[0] * q.shape[1]
    # Rows of huge scores have far larger errors than others of their head, and are kept apart.
    plain = {r: {name: np.zeros((2, heads)) for name in value} for r in kernels}
    size = np.zeros(heads)
    empty = {name: np.zeros(q.shape[:3], bool) for name in value}
    is_huge = np.zeros(q.shape[:3], bool)
    for tile in reference.tiles(q, k, v, **score):
        work = _Work(tile)
        for name in value:
            reference.flat(value[name])[tile.where] = work.result(name)
            reference.flat(empty[name])[tile.where] = work.empty(name)
        reference.flat(is_huge)[tile.where] = huge = np.abs(work.result("lse")) >= reference.HUGE
        for r, kernel in kernels.items():
            for name, (bound, error) in _bounds_on_tile(work, kernel, row_max).items():
                reference.flat(bounds[r][name])[tile.where] = bound
                for of_heads, rows in zip(plain[r][name], (~huge, huge)):
                    _keep_larger(of_heads, tile, np.where(_like(rows, error), error, 0.0))
        if any(kernel.is_narrow for kernel in kernels.values()):
            _keep_larger(size, tile, work.magnitude(np.float32))
    for r, kernel in kernels.items():
        for name, bound in bounds[r].items():
            if kernel.is_narrow:
                of_heads = 2 * plain[r][name]
                if name == "O":
                    of_heads += _two_roundings(reference.flat(value[name]), size, kernel.coarsest)
                of_usual, of_huge = of_heads.reshape(2, *q.shape[:2], *[1] * (bound.ndim - 2))
                bound += np.where(_like(is_huge, bound), of_huge, of_usual)
            bound[empty[name]] = np.where(np.isinf(bound[empty[name]]), np.inf, 0.0)
    return {r: {x: Expected(value[x], bounds[r][x]) for x in value} for r in kernels}


@np.errstate(all="ignore")
def expected_gradients(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    *,
    dtype: str,
    out_dtype: str | None = None,
    roundings: Roundings = (None,),
    dlse: Array | None = None,
    sink: Array | None = None,
    wrt: Mapping[str, Array] | None = None,
    **score: Any,
) -> ExpectedOfEach:
    """Computes the gradients "dQ", "dK" and "dV" with bounds, "dsink" with a sink, and the
    gradients of the captured arrays in ``wrt``, by name.

    out [batch, heads, M, dv] and lse [batch, heads, M] are the results of a forward pass, dout and
    dlse their gradients. out_dtype is the dtype of out, dQ, dK and dV; for the other arguments see
    `expected_attention`. dK and dV are sums over the query heads that share a key head; dsink has
    the shape and dtype of sink.
    """
    kernels = {rounding: Arithmetic(dtype, rounding, out_dtype) for rounding in roundings}
    value = {"dQ": np.zeros(q.shape), "dK": np.zeros(k.shape), "dV": np.zeros(v.shape)}
    if sink is not None:
        value["dsink"] = np.zeros(q.shape[:2])
    bounds = {r: {name: np.zeros_like(x) for name, x in value.items()} for r in kernels}
    rows = q.shape[2] * (q.shape[1] // k.shape[1] if k.shape[1] else 1)
    equal = reference.flat((dout == dout[..., :1, :]).all(-2, keepdims=True))
    arrays = _ArrayGradients(wrt or {}, kernels)
    for tile in reference.tiles(q, k, v, sink=sink, **score):
        grad, its_out, its_lse, its_dlse = (
            reference.flat(x)[tile.where].astype(np.float64)
            for x in (dout, out, lse, np.zeros(lse.shape) if dlse is None else dlse)
        )
        its_equal = equal[tile.where[0]]
        work = _BackwardWork(tile, grad, its_out, its_lse, its_dlse, rows, its_equal)
        for into, (dq, dk, dv, dsink) in (
            (value, (work.step.dq, work.step.dk, work.step.dv, work.step.dsink)),
            *((bounds[r], _gradient_bounds(work, kernel)) for r, kernel in kernels.items()),
        ):
            reference.flat(into["dQ"])[tile.where] = dq
            reference.add_to_heads(reference.flat(into["dK"]), tile, dk)
            reference.add_to_heads(reference.flat(into["dV"]), tile, dv)
            if dsink is not None:
                into["dsink"].reshape(-1)[tile.where[0]] += dsink.sum(-1)
        arrays.add(work)
    dtypes = {name: str(x.dtype) for name, x in arrays.given.items()}
    if sink is not None:
        over = tuple(range(2 - sink.ndim))  # a sink [heads] applies to all batch elements
        dtypes["dsink"] = str(sink.dtype)
        for found in (value, *bounds.values()):
            found["dsink"] = found["dsink"].sum(over)
    value |= arrays.value
    for r, kernel in kernels.items():
        bounds[r] |= arrays.bounds[r]
        for name, bound in bounds[r].items():
            add_rounding_of_results(value[name], bound, kernel, dtypes.get(name, kernel.result))
    return {r: {x: Expected(value[x], bounds[r][x]) for x in value} for r in kernels}


@np.errstate(all="ignore")
def expected_softmax(x: Array, *, dtype: str) -> dict[str, Expected]:
    """Computes the softmax "P" of x [..., N] and its "lse", with a bound for each element.

    In 2**(x * log2(e) - max * log2(e)), each number in the exponent is rounded by half an eps, and
    the power has an error of 2 eps. The sum has an error of 1.2 eps * (sqrt(N) + 4), as in
    attention. A narrow dtype rounds P once or twice; `tiny` and the smallest number of the dtype
    allow flushing to zero and underflow.
    """
    kernel = Arithmetic(dtype)
    count, N = math.prod(x.shape[:-1]), x.shape[-1]
    rows, some = x.reshape(count, N), max(1, _BLOCK // max(N, 1))
    parts = [
        _expected_rows(rows[first : first + some], kernel)
        for first in range(0, max(count, 1), some)
    ]
    return {
        name: Expected(*(np.concatenate(x).reshape(shape) for x in zip(*of_rows)))
        for name, shape, of_rows in zip(("P", "lse"), (x.shape, x.shape[:-1]), zip(*parts))
    }


def expected_rotation(
    x: Array, cos: Array, sin: Array, *, interleaved: bool, dtype: str
) -> Expected:
    """Rotates pairs of columns of x [..., rows, d] (RoPE), with a bound for each element.

    cos, sin [..., rows, angles]. Pairs of columns are (i, i + angles), or (2 i, 2 i + 1) if
    interleaved; columns after the pairs are copied exactly. Two products and their sum round by at
    most half an eps of the products' sizes, and numbers below `tiny` may be flushed to zero. A
    narrow dtype rounds the result.
    """
    kernel, angles = Arithmetic(dtype), cos.shape[-1]
    cos, sin, value = (np.asarray(a, np.float64) for a in (cos, sin, x))
    every = np.arange(2 * angles)
    first, second = (every[::2], every[1::2]) if interleaved else (every[:angles], every[angles:])
    a, b = value[..., first], value[..., second]
    turned, bound = value.copy(), np.zeros_like(value)
    for at, one, other in ((first, a * cos, -b * sin), (second, b * cos, a * sin)):
        size = np.abs(one) + np.abs(other)
        turned[..., at] = one + other
        bound[..., at] = 1.01 * kernel.eps * size + 3 * kernel.tiny
    add_rounding_of_results(turned, bound, kernel, dtype)
    return Expected(turned, bound)


def expected_e4m3(rows: Expected, scale: Array) -> Expected:
    """Divides rows by a scale and rounds them to float8_e4m3, clipped to ±448.

    The bound includes the error of the rows, the rounding of the quotient, and the rounding to
    three mantissa bits, or to a multiple of 2**-9.
    """
    kernel = Arithmetic("float32")
    factor = np.asarray(scale, np.float64)
    value = rows.value / factor
    error = rows.bound / np.abs(factor) + kernel.eps * np.abs(value) + kernel.tiny
    size = np.clip(np.abs(value) + error, 2.0**-6, _LARGEST_E4M3)
    half = 2.0 ** (np.floor(np.log2(size)) - 4)
    return Expected(np.clip(value, -_LARGEST_E4M3, _LARGEST_E4M3), half + error)


class Arithmetic:
    """The formats that a kernel computes in.

    dtype: the dtype of its arrays. operands: the precision of the operands of matrix products.
    rounds_by_design: whether the kernel rounds its inputs to `operands`.
    result: the dtype of O and of gradients.
    e4m3_inputs: whether Q, K and V are float8_e4m3fn and need no rounding.
    coarsest: the precision of O: `result` where it differs from `dtype`, else the coarser of
        `dtype` and `operands`.
    accumulator: np.finfo of the accumulation type. eps: the spacing at 1 of sums of products.
    operand_unit, output_unit: the relative errors of rounding operands and results.
    """

    def __init__(self, dtype: str, rounding: str | None = None, result: str | None = None) -> None:
        if dtype not in INPUTS:
            raise ValueError(f"dtype {dtype!r} is unknown; use one of {', '.join(INPUTS)}")
        if rounding not in (None, *reference.PRECISIONS):
            known = ", ".join(reference.PRECISIONS)
            raise ValueError(f"rounding {rounding!r} is unknown; use None or one of {known}")
        self.dtype, self.operands = dtype, rounding or dtype
        self.result = result or INPUTS[dtype].usual_result
        self.e4m3_inputs = INPUTS[dtype].result is not None
        self.rounds_by_design = rounding is not None and not self.e4m3_inputs
        is_float8 = self.operands == _FLOAT8  # results are never stored as float8
        given = {name: float(_finfo(name).eps) for name in (dtype, self.operands)}
        self.coarsest = dtype if is_float8 else max(given, key=lambda name: given[name])
        if self.result != dtype:
            self.coarsest = self.result
        self.accumulator = np.finfo(np.float64 if self.operands == "float64" else np.float32)
        self.tiny = float(self.accumulator.smallest_normal)
        self.eps = _FLOAT8_SUMS if is_float8 else float(self.accumulator.eps)
        self.is_narrow = dtype in _NARROW or self.operands in _NARROW
        self.operand_unit = given[self.operands] / 2 if self.operands in _NARROW else 0.0
        self.output_unit = float(_finfo(self.coarsest).eps) / 2 if self.is_narrow else 0.0

    def rounded_product(self, size: Any, count: int) -> Any:
        """Bounds the error of a dot product of `count` terms due to rounding operands by design."""
        if not self.rounds_by_design:
            return 0.0
        return self.operand_unit * size * min(2.0, 4.0 / np.sqrt(max(count, 1)))


def score_errors(size: Array, tile: reference.Tile, kernel: Arithmetic) -> tuple[Array, Array]:
    """Returns two error bounds of scores: from accumulation, in eps, and from rounding by design.

    size: the sum of |scale * q * k| of each score.
    """
    d = tile.q.shape[-1]
    by_design = kernel.rounded_product(size, d)
    if kernel.e4m3_inputs:
        cut = _cut_off(tile)
        if size.shape != cut.shape:  # `size` has one column per row, `cut` one per key
            cut = np.where(False if tile.masked is None else tile.masked, 0.0, cut)
            cut = cut.max(-1, keepdims=True, initial=0.0)
        return np.where(np.isinf(size), np.inf, cut), by_design
    return np.sqrt(d + 3) * size, by_design


def _cut_off(tile: reference.Tile) -> Array:
    """Bounds the truncation errors of e4m3 scores [n, rows, keys] in tensor cores, in eps."""
    q, k = finite(tile.q), finite(tile.k)
    total, mean, spread = np.zeros((3, *q.shape[:-1], k.shape[-2]))
    for first in range(0, q.shape[-1], _DEPTH):
        some = slice(first, first + _DEPTH)
        a, b = q[..., some], k[..., some]
        product = np.abs(a).max(-1)[..., :, None] * np.abs(b).max(-1)[..., None, :]
        top = np.maximum(product, np.abs(total))
        total += a @ b.mT
        np.maximum(top, np.abs(total), out=top)
        mean += (np.abs(np.sign(a) @ np.sign(b).mT) / 2 + 1) * top
        spread += top**2
    return np.abs(tile.scale) * (mean + _SPREAD * np.sqrt(spread))


class _Work:
    """Cached reference results of one tile, shared by kernels with different roundings."""

    def __init__(self, tile: reference.Tile) -> None:
        self.tile = tile
        self.attend = cache(partial(reference.attend, tile))
        self.row_max = cache(partial(reference.largest_scores, tile))
        self.score_size = cache(partial(_score_size, tile))
        self.pair_sizes = cache(partial(pair_sizes_of, tile))
        self.values = np.abs(finite(tile.v))
        self.magnitude = cache(
            lambda dtype: tile.dropped(self.attend()[2].astype(dtype)) @ self.values.astype(dtype)
        )

    def largest_difference(self) -> Array:
        """Bounds the difference of any two weighted means of a value column, [n, 1, dv]."""
        dropout = self.tile.mods.dropout
        kept = 1.0 if dropout is None else dropout.factor
        return 2 * kept * self.values.max(-2, keepdims=True, initial=0.0)

    def result(self, name: str) -> Array:
        """Returns "O", "lse" or "row_max" of the tile."""
        return self.row_max() if name == ROW_MAX else self.attend()[name == "lse"]

    def empty(self, name: str) -> Array:
        """Returns the rows [n, rows] whose O is exactly 0, or whose lse or row maximum is -inf."""
        if name == "O" and self.tile.sink is not None:
            return np.asarray(~self.attend()[2].any(-1))
        return np.isneginf(self.result("lse" if name == "O" else name))


class ModifiedScores:
    """Error bounds of modified scores on one tile for one kernel.

    size [n, rows, keys]: the sum of |scale * q * k| of each pair; infinite for scores that may have
        any value. Their shift is infinite, too, unless the expression ignores the score.
    shift: absolute error of a modified score. by_design: its change if operands are rounded by
        design.
    exponent: error of the exponential. overflows: where the modified score overflows the
        accumulation format.
    slope, slope_error: magnitude and absolute error of the derivative, if `differentiated`.
    """

    def __init__(
        self, tile: reference.Tile, kernel: Arithmetic, size: Array, *, differentiated: bool = False
    ) -> None:
        eps = float(kernel.accumulator.eps)
        given, moved = score_errors(finite(size), tile, kernel)
        scores = (tile.q @ tile.k.mT) * tile.scale
        slope = 1.0 if differentiated else None
        evaluate = partial(tile.mods.number, place=tile.place, masked=tile.masked, slope=slope)
        here = evaluate(scores, error=given * (kernel.eps / eps), eps=eps)
        there = [evaluate(scores + x) for x in (moved, -moved)] if kernel.rounds_by_design else []
        rough = _error_of_softcap(tile.mods, kernel)
        self.shift = eps * np.broadcast_to(or_0(here.error), scores.shape) + rough
        if (unknown := np.isinf(size)).any():
            tried = (np.where(unknown, x, scores) for x in (np.nan, np.inf, -np.inf))
            first, *others = (evaluate(x).value for x in tried)
            same = np.all([first == x for x in others], axis=0)
            self.shift = np.where(unknown & ~same, np.inf, self.shift)
        self.exponent = eps * np.abs(finite(here.value))
        self.overflows = np.abs(finite(here.value)) > float(kernel.accumulator.max)
        self.by_design = self._distance(here.value, [x.value for x in there])
        self.slope = np.abs(finite(np.broadcast_to(or_0(here.slope), scores.shape)))
        self.slope_error = eps * or_0(here.slope_error)
        if rough:
            self.slope_error = self.slope_error + 2.0**-20
        if differentiated:
            slopes = [or_0(x.slope) for x in there]
            self.slope_error = self.slope_error + self._distance(or_0(here.slope), slopes)
        hidden = np.isneginf(here.value) & ~np.isinf(self.shift)
        if tile.masked is not None:
            hidden |= tile.masked
        for name in ("shift", "by_design", "slope_error"):
            setattr(self, name, np.where(hidden, 0.0, getattr(self, name)))

    @staticmethod
    def _distance(here: Any, there: list[Any]) -> Any:
        apart = [np.where(here == x, 0.0, np.abs(x - here)) for x in there]
        return np.maximum(*apart) if apart else 0.0


def _error_of_softcap(mods: Modifications, kernel: Arithmetic) -> float:
    """Bounds the absolute error of the softcap approximation that kernels on 16-bit inputs use."""
    for step in mods.score_steps:
        if step.option == SOFTCAP and kernel.is_narrow:
            cap = float(mods.names[SOFTCAP])
            return cap * 2.0**-21 if cap <= MOST_USUAL_SOFTCAP else 0.0
    return 0.0


def _errors_of_modified(work: _Work, kernel: Arithmetic) -> tuple[Array, Array]:
    """Returns the errors of out [n, rows, dv] and lse [n, rows, 1] due to modified scores."""
    errors = ModifiedScores(work.tile, kernel, work.pair_sizes(kernel.accumulator.dtype))
    _, lse, P = work.attend()
    magnitude = work.magnitude(np.float64)
    lost = (errors.overflows & (P > 0)).any(-1, keepdims=True)
    of_out, of_lse = np.zeros_like(magnitude), np.zeros((*P.shape[:-1], 1))
    below = finite(reference.masked_scores(work.tile) - lse[..., None])
    # A weight stays 0 if the errors of its score and of the row's largest score cannot raise it.
    moved = errors.shift + errors.exponent + errors.by_design
    moved = np.where(np.isinf(moved), 0.0, moved)
    of_largest = np.where(P > 0, moved, 0.0).max(-1, keepdims=True, initial=0.0)
    stays_0 = below + moved + of_largest < -2 * _ANY_WEIGHT
    for shift, common in ((errors.shift + errors.exponent, 0.6), (errors.by_design, 1.0)):
        lost |= np.isinf(shift).any(-1, keepdims=True)
        shift = np.where(np.isinf(shift) | stays_0, 0.0, shift)
        largest = shift.max(-1, keepdims=True, initial=0.0)
        of_out = np.where(largest < _ANY_WEIGHT, of_out, np.inf)
        weights = np.expm1(np.minimum(shift, _ANY_WEIGHT))
        added = P * weights
        if (largest >= _ANY_WEIGHT).any():  # even weights that are 0 in float64 may become large
            raised = np.exp(np.minimum(below + shift, _ANY_WEIGHT))
            added = np.where(shift < _ANY_WEIGHT, added, raised)
        of_lse += np.minimum(largest, added.sum(-1, keepdims=True))
        if common < 1:
            weights = np.where(shift < _SMALL, common * shift, weights)
            largest = np.where(largest < _SMALL, common * largest, np.inf)
        else:
            largest = np.expm1(np.minimum(largest, _ANY_WEIGHT))
        weights *= P
        each = work.tile.dropped(weights) @ work.values + weights.sum(-1, keepdims=True) * magnitude
        of_out += np.fmin(largest * magnitude, each)  # inf * 0 is NaN
    return np.where(lost, np.inf, of_out), np.where(lost, np.inf, of_lse)


def _bounds_on_tile(
    work: _Work, kernel: Arithmetic, row_max: bool
) -> dict[str, tuple[Array, Array]]:
    """Returns two arrays per result: accumulation bounds, and errors of the plain computation.

    The plain computation runs `reference.attend` in the kernel's precision. The keys are "O",
    "lse" and, if requested, "row_max".
    """
    exact, bounds = work.attend()[:2], _bounds(work, kernel)
    found = {}
    if row_max:
        bound = _bound_of_row_max(work, kernel, np.isinf(bounds[1]))
        found[ROW_MAX] = bound, _plain_errors_of_row_max(work, kernel, bound)
    errors = [np.zeros_like(x) for x in exact]
    # Errors of scaling K and of scaling S may differ by more than a factor of two, unless the scale
    # is a power of two and no expression stands between the rounding of S and that of its result.
    is_power = bool(np.all(np.abs(np.frexp(work.tile.scale)[0]) == 0.5))
    orders = "K" if is_power and not work.tile.mods.score_steps else "KS"
    if kernel.operands == _FLOAT8:
        orders = "S"
    for scaled in orders if kernel.is_narrow else "":
        out, lse, _ = work.attend(kernel.operands, scaled=scaled, e4m3_inputs=kernel.e4m3_inputs)
        for i, plain in enumerate((reference.rounded(out, kernel.result), lse)):
            judged = np.isfinite(bounds[i])
            errors[i] = np.maximum(errors[i], np.where(judged, np.abs(plain - exact[i]), 0.0))
            if kernel.rounds_by_design:
                overflown = ~np.isfinite(plain) & (plain != exact[i]) & ~np.isnan(exact[i])
                bounds[i][overflown] = np.inf
    return {**dict(zip(("O", "lse"), zip(bounds, errors))), **found}


def _bound_of_row_max(work: _Work, kernel: Arithmetic, lost: Array) -> Array:
    """Bounds accumulation errors of row maxima [n, rows]; rows in ``lost`` have no bounds."""
    tile, largest, own = work.tile, work.row_max(), float(kernel.accumulator.eps)
    if tile.mods.score_steps:
        errors = ModifiedScores(tile, kernel, work.pair_sizes(kernel.accumulator.dtype))
        error = finite(errors.shift + errors.by_design)
        scores = reference.masked_scores(tile)
        above, below = ((scores + x).max(-1, initial=-np.inf) for x in (error, -error))
        moved = np.maximum(above - largest, largest - below)
    else:
        score, by_design = score_errors(work.score_size(kernel.accumulator.dtype), tile, kernel)
        moved = (kernel.eps * score + by_design)[..., 0]
    bound = np.where(np.isfinite(largest), moved + own * (2 * (np.abs(largest) + moved) + 1), 0.0)
    return np.where(lost, np.inf, bound)


def _plain_errors_of_row_max(work: _Work, kernel: Arithmetic, bound: Array) -> Array:
    """Returns errors of the row maxima that the reference computes in the kernel's precision.

    Sets ``bound`` to infinity where this computation overflows.
    """
    largest = work.row_max()
    if not kernel.rounds_by_design:
        return np.zeros_like(largest)
    how = {"precision": kernel.operands, "scaled": "S", "e4m3_inputs": kernel.e4m3_inputs}
    plain = reference.largest_scores(work.tile, **how)
    bound[~np.isfinite(plain) & np.isfinite(largest)] = np.inf
    return np.where(np.isfinite(bound) & np.isfinite(largest), np.abs(plain - largest), 0.0)


def _bounds(work: _Work, kernel: Arithmetic) -> tuple[Array, Array]:
    """Bounds accumulation errors of out [n, rows, dv] and lse [n, rows]."""
    tile, (out, lse, P) = work.tile, work.attend()
    n, eps, tiny = tile.visible_keys, kernel.eps, kernel.tiny
    of_out: Any = 0.0
    of_lse: Any = 0.0
    score: Any = 0.0
    by_design: Any = 0.0
    if tile.mods.score_steps:
        of_out, of_lse = _errors_of_modified(work, kernel)
    else:
        score, by_design = score_errors(work.score_size(kernel.accumulator.dtype), tile, kernel)
    if tile.sink is not None:
        n = n + 1
        weight = reference.weight_of_sink(tile.sink, lse)[..., None]
        of_sink = eps * weight * (1.5 * np.abs(finite(tile.sink)) + 3)
        of_out, of_lse = of_out + of_sink * np.abs(finite(out)), of_lse + of_sink
    total = np.sqrt(n) + 4
    is_constant = (tile.v == tile.v[:, :1]).all(-2, keepdims=True)
    total_of_values = np.where(is_constant, n + 4, total) if is_constant.any() else total
    if kernel.operands == _FLOAT8:
        total_of_values = total_of_values + n / 4

    of_weights = _error_of_weights(eps * score) + np.expm1(np.minimum(by_design, _ANY_WEIGHT))
    of_sums = 1.2 * eps * total_of_values + kernel.operand_unit
    relative = of_weights + of_sums * (1 + of_weights)
    floor = tiny * (n + 2 + work.values.sum(-2, keepdims=True)) + of_out * (1 + of_sums)
    if kernel.operands in _UNDERFLOWS and tile.sink is not None:
        floor = floor + tile.dropped(np.minimum(P, _UNDERFLOWS[kernel.operands])) @ work.values
    magnitude = work.magnitude(kernel.accumulator.dtype)
    out_bound = np.where(np.isinf(relative), np.inf, relative * magnitude)
    largest = work.largest_difference() * (1 + of_sums / 2)
    out_bound = np.minimum(out_bound + floor, largest)
    out_bound = out_bound + kernel.output_unit * (np.abs(finite(out)) + out_bound)
    smallest = max(tiny, float(_finfo(kernel.operands).smallest_subnormal))
    out_bound[vanished_infinities(tile, P, smallest)] = np.inf
    own = float(kernel.accumulator.eps)  # eps of sums that are not matrix products
    lse_bound = (eps * score + own * 1.2 * total + by_design + of_lse)[..., 0]
    lse_bound += own * 2 * (np.abs(finite(lse)) + lse_bound)
    lost = np.isinf(score + of_lse)[..., 0]
    if tile.unsure is not None:
        lost |= tile.unsure.any(-1)
    out_bound[lost], lse_bound[lost] = np.inf, np.inf
    return out_bound, lse_bound


def _error_of_weights(score: Any) -> Any:
    worst = 2 * np.minimum(score, _ANY_WEIGHT / 2)
    return np.where(2 * score < _ANY_WEIGHT, 0.6 * score + np.expm1(worst) - worst, np.inf)


def error_of_probabilities(P: Array, scores: Array, lse: Array, error: Array) -> Array:
    """Bounds the error of P = exp(scores - lse) if scores have the absolute error ``error``.

    If the error of a score is large, P may be 1 where it is 0 in float64. For a huge lse, kernels
    clamp P to 1; otherwise P grows with the error and may overflow.
    """
    moved = P * np.expm1(np.minimum(error, _ANY_WEIGHT))
    largest = np.exp(np.minimum(or_0(scores - lse) + error, _ANY_WEIGHT))
    moved = np.where(error < _SMALL, moved, np.maximum(moved, largest - P))
    return np.where(np.abs(lse) < reference.HUGE, moved, np.minimum(moved, np.maximum(P, 1.0)))


class _BackwardWork:
    """One tile's gradients, and the magnitudes that their bounds need.

    rows: number of rows in a sum over rows. equal: whether a column of dO is constant, [n, 1, dv].
    """

    def __init__(
        self,
        tile: reference.Tile,
        grad: Array,
        out: Array,
        lse: Array,
        dlse: Array,
        rows: int,
        equal: Array,
    ) -> None:
        self.tile, self.lse, self.rows, self.equal = tile, lse, rows, equal
        self.step = reference.differentiate(tile, grad, out, lse, dlse)
        arrays = tile.q, tile.k, tile.v, grad, out
        self.q, self.k, v, self.grad, out = (np.abs(finite(x)) for x in arrays)
        self.pair_sizes = cache(partial(pair_sizes_of, tile))
        self.delta_size = (self.grad * out).sum(-1, keepdims=True)
        self.delta_size += np.abs(finite(dlse))[..., None]
        self.dP_size = tile.dropped(self.grad @ v.mT) + self.delta_size
        self.exponent_size = np.abs(finite(self.step.scores)) + np.abs(finite(lse))[..., None]


def _gradient_bounds(
    work: _BackwardWork, kernel: Arithmetic
) -> tuple[Array, Array, Array, Array | None]:
    """Returns a tile's terms in the bounds of dQ, dK, dV and dsink, before rounding of results."""
    scale, eps, tiny = abs(work.tile.scale), float(kernel.accumulator.eps), kernel.tiny
    unit = kernel.operand_unit
    if kernel.rounds_by_design:  # both factors are rounded
        unit *= 2 + unit
    least = tiny + (float(_finfo(kernel.operands).smallest_subnormal) / 2 if unit else 0.0)
    step = work.step
    P, dP, dS = (np.abs(finite(x)) for x in (step.P, step.dP_delta, step.dS))

    p, g, ds, modified = _errors_before_slopes(work, kernel)
    if modified is not None:
        ds = ds * modified.slope
        ds += (eps * modified.slope + modified.slope_error) * (P + p) * (dP + g)

    over_keys, over_rows = (
        1.2 * eps * (np.sqrt(n) + 4) + unit for n in (work.tile.visible_keys, work.rows)
    )
    sums = (ds + over_keys * (dS + ds), ds + over_rows * (dS + ds), p + over_rows * (P + p))
    of_dq, of_dk, of_dv = (np.where(step.left_out, 0.0, x + least) for x in sums)
    dv_bound = work.tile.dropped(of_dv).mT @ work.grad
    if work.equal.any():
        equal = np.where(work.equal, work.grad, 0.0)
        dv_bound += 1.2 * eps * work.rows * (work.tile.dropped(P + p).mT @ equal)
    floor_of_row, floor_of_key = (
        tiny * (1 + scale) * (~step.left_out).sum(axis)[..., None] for axis in (-1, -2)
    )
    bounds = (
        scale * (of_dq @ work.k) + floor_of_row,
        scale * (of_dk.mT @ work.q) + floor_of_key,
        dv_bound + floor_of_key,
    )
    lost = _lost_pairs(work, modified, kernel, p)
    if lost is not None:
        for bound, axis in zip(bounds, (-1, -2, -2)):
            bound[lost.any(axis)] = np.inf
    return *bounds, _sink_bounds(work, kernel)


def _errors_before_slopes(
    work: _BackwardWork, kernel: Arithmetic
) -> tuple[Array, Array, Array, ModifiedScores | None]:
    """Bounds the errors of P, of dP - D, of their product, and of modified scores if any."""
    eps, tiny, dv = float(kernel.accumulator.eps), kernel.tiny, work.tile.v.shape[-1]
    P, dP = (np.abs(finite(x)) for x in (work.step.P, work.step.dP_delta))
    size, modified = work.pair_sizes(kernel.accumulator.dtype), None
    if work.tile.mods.score_steps:
        modified = ModifiedScores(work.tile, kernel, size, differentiated=True)
        exponent = modified.shift + eps * (work.exponent_size + 2) + modified.by_design
    else:
        exponent, by_design = score_errors(size, work.tile, kernel)
        exponent = eps * (exponent + work.exponent_size + 2)
        exponent += by_design
    p = error_of_probabilities(P, work.step.scores, work.lse[..., None], exponent) + tiny
    g = work.dP_size * (eps * np.sqrt(dv + 3) + kernel.rounded_product(1.0, dv))
    return p, g, p * (dP + g) + P * g + eps * (P + p) * (dP + g) + tiny * (dv + 1), modified


class _ArrayGradients:
    """Gradients of captured arrays, with bounds.

    given: the arrays by name. Each pair adds its error to the bound of the element that it reads.
    """

    def __init__(self, given: Mapping[str, Array], kernels: Mapping[Any, Arithmetic]) -> None:
        self.given, self.kernels = given, kernels
        self.value = {name: np.zeros(x.shape) for name, x in given.items()}
        self.bounds = {r: {name: np.zeros(x.shape) for name, x in given.items()} for r in kernels}

    def add(self, work: _BackwardWork) -> None:
        if not self.given:
            return
        tile, step = work.tile, work.step
        scores, shape = (tile.q @ tile.k.mT) * tile.scale, step.P.shape
        dx, counts = step.P * step.dP_delta, ~step.left_out & (step.P != 0)
        for name, at, number in tile.mods.accesses(scores, tile.place, tile.masked, self.given):
            term = np.where(counts, dx * or_0(number.slope), 0.0)
            index = tuple(np.broadcast_to(x, shape) for x in at)
            np.add.at(self.value[name], index, term)
        for r, kernel in self.kernels.items():
            self._add_bounds(work, kernel, self.bounds[r])

    def _add_bounds(
        self, work: _BackwardWork, kernel: Arithmetic, bounds: dict[str, Array]
    ) -> None:
        tile, step, eps = work.tile, work.step, float(kernel.accumulator.eps)
        scores = (tile.q @ tile.k.mT) * tile.scale
        p, g, ds, modified = _errors_before_slopes(work, kernel)
        size = (np.abs(finite(step.P)) + p) * (np.abs(finite(step.dP_delta)) + g)
        given, _ = score_errors(work.pair_sizes(kernel.accumulator.dtype), tile, kernel)
        lost = _lost_pairs(work, modified, kernel, p)
        error = given * (kernel.eps / eps)
        of_sum = 1.2 * _DOUBLE_EPS * (np.sqrt(tile.visible_keys) + 4)
        pairs = scores, tile.place, tile.masked
        for name, at, number in tile.mods.accesses(*pairs, self.given, error=error, eps=eps):
            slope = np.abs(finite(np.broadcast_to(or_0(number.slope), size.shape)))
            of_slope = eps * np.broadcast_to(or_0(number.slope_error), size.shape)
            bound = slope * ds + ((2 * eps + of_sum) * slope + of_slope) * size + kernel.tiny
            if lost is not None:
                bound = np.where(lost, np.inf, bound)
            bound = np.where(step.left_out, 0.0, bound)
            np.add.at(bounds[name], tuple(np.broadcast_to(x, size.shape) for x in at), bound)


def _lost_pairs(
    work: _BackwardWork, modified: ModifiedScores | None, kernel: Arithmetic, of_P: Array
) -> Any:
    """Returns the pairs [n, rows, keys] whose terms have no bounds; None if there are none.

    A pair has no bounds if its score may overflow, if P, which has the error of_P, may be infinite
    in float16, if rounding decides whether the pair is visible or infinite, or if dP is infinite
    or NaN while P may be 0 in the kernel, which sets dS of a modified score to 0.
    """
    lost = np.isinf(work.pair_sizes(kernel.accumulator.dtype))
    if kernel.operands == "float16":
        lost |= finite(work.step.P) + of_P > float(np.finfo(np.float16).max)
    if modified is not None:
        lost |= np.isinf(modified.shift) | np.isinf(modified.slope_error)
        lost |= modified.overflows & (work.step.P > 0)
        lost |= (kernel.tiny > work.step.P) & ~np.isfinite(work.step.dP_delta)
    lost &= ~work.step.left_out
    if work.tile.unsure is not None:
        lost = lost | work.tile.unsure & ~np.isneginf(work.lse)[..., None]
    return lost if lost.any() else None


def _sink_bounds(work: _BackwardWork, kernel: Arithmetic) -> Array | None:
    eps, dv = float(kernel.accumulator.eps), work.tile.v.shape[-1]
    sink, size = work.tile.sink, work.delta_size[..., 0]
    if sink is None or work.step.dsink is None:
        return None
    weight = finite(reference.weight_of_sink(sink, work.lse))
    exponent = eps * (1.5 * np.abs(finite(sink[..., 0])) + np.abs(finite(work.lse)) + 3)
    of_delta = size * (eps * np.sqrt(dv + 3) + kernel.rounded_product(1.0, dv))
    term = np.abs(finite(work.step.dsink))
    of_weight = np.expm1(np.minimum(exponent, 600.0)) * (term + weight * of_delta)
    of_term = of_weight + weight * of_delta
    over_rows = 1.2 * eps * (np.sqrt(work.rows) + 4)
    return of_term + over_rows * (term + of_term) + kernel.tiny


def add_rounding_of_results(value: Array, bound: Array, kernel: Arithmetic, name: str) -> None:
    """Adds to ``bound`` the error of rounding to the dtype ``name``; bounds of 0 stay 0."""
    dtype = _finfo(name)
    narrow = float(dtype.eps) > float(kernel.accumulator.eps)
    unit = 2 * float(kernel.accumulator.eps) + (float(dtype.eps) / 2 if narrow else 0.0)
    least = float(dtype.smallest_subnormal) if narrow else 0.0
    size = np.abs(finite(value))
    bound += np.where(bound > 0, unit * (size + bound) + least, 0.0)
    bound[np.isinf(value) | (size + bound > float(dtype.max))] = np.inf


def vanished_infinities(tile: reference.Tile, P: Array, smallest: float) -> Array:
    """Returns where the weight of an infinite value may be 0, so that 0 * infinity is NaN."""
    infinite = np.isinf(tile.v)
    if not infinite.any():
        return np.zeros((*P.shape[:-1], tile.v.shape[-1]), bool)
    vanished = smallest > P
    if tile.masked is not None:
        vanished &= ~tile.masked
    return vanished.astype(np.float32) @ infinite.astype(np.float32) > 0


def pair_sizes_of(tile: reference.Tile, dtype: Any) -> Array:
    """Computes |scale| * sum(|q| * |k|) of each pair [n, rows, keys] over finite terms.

    The result is infinite where q and k are finite but a partial sum in ``dtype`` may overflow,
    scaled or not. The largest partial sum consists of all terms of one sign.
    """
    scale, q, k = np.abs(tile.scale), finite(tile.q), finite(tile.k)
    size = np.abs(q) @ np.abs(k).mT
    most = float(np.finfo(dtype).max) / np.maximum(scale, 1.0)
    if (size <= most).all():
        return scale * size
    overflows = (size + np.abs(q @ k.mT)) / 2 > most
    overflows &= np.isfinite(tile.q).all(-1, keepdims=True)
    overflows &= np.isfinite(tile.k).all(-1, keepdims=True).mT
    return np.where(overflows, np.inf, scale * size)


def _score_size(tile: reference.Tile, dtype: Any) -> Array:
    """Computes the maximum of pair_sizes_of over the keys that a row sees, [n, rows, 1]."""
    size = np.abs(tile.q).astype(dtype) @ np.abs(tile.k).astype(dtype).mT
    if tile.masked is not None:
        np.copyto(size, 0.0, where=tile.masked)
    largest = size.max(-1, keepdims=True, initial=0.0).astype(np.float64) * np.abs(tile.scale)
    if (largest <= float(np.finfo(dtype).max)).all():
        return largest
    size = pair_sizes_of(tile, dtype)
    if tile.masked is not None:
        np.copyto(size, 0.0, where=tile.masked)
    return size.max(-1, keepdims=True, initial=0.0)


def _two_roundings(value: Array, size: Array, precision: str) -> Array:
    """Computes 2 * max|((x + s) - s) - x| for each head in `precision`, over finite x.

    value: x [heads, rows, dv]. size [heads]: s is 0.3 * size.
    """
    found = np.zeros(len(value))
    some_rows = max(1, _BLOCK // max(value.shape[-1], 1))
    for head, first in product(range(len(value)), range(0, value.shape[1], some_rows)):
        x = reference.rounded(value[head, first : first + some_rows], precision)
        shift = np.float32(0.3 * size[head])
        there = reference.rounded(x + shift, precision)
        back = reference.rounded(there - shift, precision)
        found[head] = max(found[head], _largest(back - x))
    return 2 * found


def _like(rows: Array, x: Array) -> Array:
    """Returns ``rows`` with a last axis of length 1 if ``x`` has columns, too."""
    return rows[..., None] if x.ndim > rows.ndim else rows


def _keep_larger(of_heads: Array, tile: reference.Tile, found: Array) -> None:
    """Updates the maximum of each head with a tile's finite numbers, [n, rows] or [n, rows, dv]."""
    some = of_heads[tile.where[0]]
    largest = found.max(tuple(range(1, found.ndim)), initial=0.0, where=np.isfinite(found))
    np.maximum(some, largest, out=some)


def _expected_rows(x: Array, kernel: Arithmetic) -> tuple[Expected, Expected]:
    eps, tiny = float(kernel.accumulator.eps), kernel.tiny
    P, lse = reference.softmax(x)
    x = finite(x.astype(np.float64))
    top = finite(np.where(P > 0, x, -np.inf).max(-1, keepdims=True, initial=-np.inf))
    total = np.abs(top) + 1.2 * (np.sqrt(x.shape[-1]) + 4)

    relative = eps * (total + 1.5 * np.abs(x - top)) + 2 * kernel.output_unit
    floor = 2 * tiny + (float(_finfo(kernel.dtype).smallest_subnormal) if kernel.is_narrow else 0)
    P_bound = np.where(np.isneginf(lse)[:, None], 0.0, P * relative + floor)
    lse_bound = eps * (total[:, 0] + np.abs(top[:, 0]) + 2 * np.abs(finite(lse)))
    return Expected(P, P_bound), Expected(lse, lse_bound)


@np.errstate(all="ignore")
def _verdict(name: str, actual: Array, expected: Expected) -> Verdict:
    if not actual.size:
        return Verdict(name, 0.0, 0.0, 0.0, (), 0.0, 0.0, 0)
    shape, (actual, value, bound) = actual.shape, (x.ravel() for x in (actual, *expected))
    largest, worst, at, unwritten = 0.0, -1.0, 0, 0
    for first in range(0, actual.size, _BLOCK):
        some = slice(first, first + _BLOCK)
        error, ratio, nans = _errors(actual[some].astype(np.float64), value[some], bound[some])
        here = int(ratio.argmax())
        if ratio[here] > worst:
            worst, at = float(ratio[here]), first + here
        largest = max(largest, float(error.max()))
        unwritten += nans
    return Verdict(
        name=name,
        error=largest,
        bound=float(bound[at]),
        ratio=worst,
        index=tuple(int(i) for i in np.unravel_index(at, shape)),
        actual=float(actual[at]),
        expected=float(value[at]),
        unwritten=unwritten,
    )


def _errors(actual: Array, value: Array, bound: Array) -> tuple[Array, Array, int]:
    """Returns each element's error and error / bound, and the number of wrong NaNs."""
    error = np.abs(actual - value)
    if np.isfinite(error.max()) and bound.min() > 0 and bound.max() < np.inf:
        return error, error / bound, 0  # fast path; the code below returns the same result
    error[(actual == value) | (np.isnan(actual) & np.isnan(value)) | np.isposinf(bound)] = 0.0
    error[np.isnan(error)] = np.inf
    ratio = np.where(error == 0.0, 0.0, np.where(np.isfinite(error), error / bound, np.inf))
    return error, ratio, int(np.count_nonzero(np.isnan(actual) & np.isinf(error)))


def _finfo(precision: str) -> Any:
    """Returns the finfo of a precision. For tf32 it is float16's, with as many mantissa bits."""
    names = {"tf32": "float16", "float8_e4m3": "float8_e4m3fn"}
    return ml_dtypes.finfo(names.get(precision, precision))


def smallest_operand(kernel: Arithmetic) -> float:
    """Returns the smallest positive number of the operands of matrix products."""
    return float(_finfo(kernel.operands).smallest_subnormal)


def finite(x: Array) -> Array:
    return np.where(np.isfinite(x), x, 0.0)


def _largest(x: Array) -> float:
    size = np.abs(x)
    return float(size.max(initial=0.0, where=np.isfinite(size)))
