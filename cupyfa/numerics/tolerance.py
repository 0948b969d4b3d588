"""How far a result may lie from the reference, and the error that says where it does not.

A fixed tolerance is too wide for large problems, where outputs are small, and too narrow for large
scores. Here every element has a bound of its own, made of two parts.

**What the arithmetic does.** Let eps be the spacing of the numbers at 1 in the format that the
kernel accumulates in, n the number of keys that a query sees, and size the largest
|scale| * sum(|q| * |k|) over those keys. Rounding errors of a sum of n terms grow like a random
walk, hence the roots; the constants are six standard deviations of a sum taken one term after the
other, the worst order, and two units in the last place for each exponential:

    |O - reference|   <=  eps * (0.6 * score + 1.2 * total) * (P @ |V|)  +  floor
    |lse - reference| <=  eps * (score + 1.2 * total + 2 * |lse|)
    score = sqrt(d + 3) * size,    total = sqrt(n) + 4,    floor = tiny * (n + 2 + sum(|V|))

`score` is the error of a score (3 stands for the scale and for the exponential's argument; O has
0.6 of it, because keys share the error and its common part cancels), `total` that of the sums
over the keys. `floor` is for kernels that flush subnormal numbers to zero: each of n weights,
each of n products, the input and the output may lose up to `tiny`, the smallest normal number.

**What narrow formats do.** A kernel on float16 or bfloat16 rounds P and O to them, by one half of
their eps. In addition, by the rule of FlashAttention's own tests, it may have up to

    2 * e + a

everywhere: e is the largest error of the same attention computed plainly in that format (see
`reference.attention`; once with scaled K and once with scaled S), and
a = 2 * max|((reference + 0.3) - 0.3) - reference|, evaluated in the format, is what two roundings
do to numbers of order 1; it keeps the sum from being zero by luck. lse, which is kept in float32,
may have 2 * e. A kernel that rounds its operands by design, to float16 for the tensor cores say,
is held to that format in the same way, O to the coarser of the two; and it may have the error
that rounding q and k makes in a score, r = half an eps * size * min(2, 4 / sqrt(d)): in lse r, in a
weight its share exp(r) - 1.

Of float8_e4m3 half an eps is 2**-4. Plainly, Q, K, V and P are rounded to it, each matrix with a
power of two for which its largest number comes to lie in the last binade; scores and O stay
float32, and O is rounded to the arrays' dtype alone. Tensor cores keep about 14 bits of a sum of
such products, so eps, that of the sums, is 2**-13. It has no infinity: NaN stands for it, and what
that reaches in the plain computation may hold anything.

Infinity and NaN must be where the reference has them and nowhere else; rows without a visible key
must be exactly 0 and -inf.

Measured on simulated kernels (test_tolerance.py), as the largest error / bound: a correct
kernel that adds term after term, d from 1 to 1024, up to 1024 keys, three distributions, has at
most 0.39 in float32, 0.44 in float64, 0.26 in float16 and 0.25 in bfloat16; over 64,000 outputs
0.66 in float32. Faults have, in one problem of 1024 keys, inputs from 0 to 1 and d = 64:

                              float32    float16    bfloat16
    last key dropped              245         23         3.2
    mask off by one key           223         20         2.6
    lse off by 1e-3               107         14         1.9
    scale off by 1e-3             232         33         4.5
    tf32 for float32              1.4 (over all d and distributions)

What the inputs' own rounding hides cannot be seen: for bfloat16, d = 256, one key of 1024 is 0.8
to 1.0 of the bound, and the last key of large scores often has no weight at all.

**Gradients.** The same eps, roots and constants, pair by pair; what the forward pass left, O and
lse, is given and has no error. P errs by a share of itself, dS by what P and the slope dP - D err:

    p  = exp(eps * (sqrt(d + 3) * size + |S| + |lse| + 2)) - 1         size = |scale| * |q| @ |k|.T
    g  = eps * sqrt(dv + 3) * (|dO| @ |V|.T + rowsum(|dO| * |O|))
    F  = P * (p * (|dP - D| + g) + g + eps * |dP - D|)

    |dV - reference|  <=  (P * (p + 1.2 * eps * (sqrt(m) + 4))).T @ |dO|
    |dQ - reference|  <=  |scale| * (F + 1.2 * eps * (sqrt(n) + 4) * |dS|) @ |K|        dK likewise

with m rows in a sum over rows, those of all heads that share the key, and 2 eps of the result. A
kernel on float16 or bfloat16 may round P and dS before it multiplies with them, by half of their
eps and half of their smallest number, and rounds its results. Nothing is added to that: what the
plain computation errs by is no part of it. Where a result would be beyond its dtype's largest
number, and where it is infinite, anything may stand; NaN must be NaN. A key that no query sees and
a query that sees no key have gradients of exactly 0.

Measured likewise (test_gradients.py): a correct computation has at most 0.27 in float32, 0.23
in float64 and 0.5 in narrow formats, or 0.91 if it rounds P and dS. A fault has, in the worst of
the outputs that it is in, with 256 keys under a causal mask and d = 64:

                              float32    float16    bfloat16
    last key dropped            1,700         45         5.8
    mask off by one key        78,000      1,000         130
    lse off by 1e-2               740         10         1.6
    scale off by 1e-2           1,600         24         3.2
    D left out                 41,000      1,900         240

A sum of equal numbers errs by the same amount at each step, not at random: where a column of V is
the same for all keys, n replaces sqrt(n) for O (such a column tells nothing of the weights anyway).
Scores that are equal for hundreds of keys but not for all are not provided for: then a correct
kernel that adds one by one may exceed the bound of lse.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cupyfa.errors import WrongResult
from cupyfa.numerics import reference

Array = NDArray[Any]

DTYPES = ("float16", "bfloat16", "float32", "float64")

_NARROW = ("float16", "bfloat16", "tf32", "float8_e4m3")
_FLOAT8 = "float8_e4m3"
_FLOAT8_SUMS = 2.0**-13
_BLOCK = 1 << 18  # elements that are worked on at a time, which a core's cache holds


@dataclass(frozen=True)
class Verdict:
    """The comparison of one array with the reference.

    error: the largest absolute error; infinite if NaN or infinity stands where it should not.
    ratio: the largest quotient of an element's error and its bound; at most 1 if all is well.
    index: the element that has this quotient; bound, actual and expected are those of it.
    unwritten: how many elements are NaN but should not be; often, they were never written.
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
    """What an array should hold, and how far each of its elements may lie from that; float64.

    An infinite bound marks an element that may hold anything.
    """

    value: Array
    bound: Array


def require(verdicts: Iterable[Verdict], context: str) -> None:
    """Raises WrongResult if a verdict failed, with `context` and all that failed.

    context: whatever finds the case again: kernel, shape, dtype, mask, seed.
    """
    failed = [str(verdict) for verdict in verdicts if not verdict.passed]
    if failed:
        raise WrongResult("\n  ".join([f"wrong result of {context}", *failed]))


def compare(results: Mapping[str, Array], expected: Mapping[str, Expected]) -> list[Verdict]:
    """Compares arrays by name with what `expected_attention` or `expected_softmax` returned.

    Raises ValueError if a name or a shape is wrong.
    """
    for name, actual in results.items():
        if name not in expected:
            raise ValueError(f"result {name!r} is unknown; use one of {', '.join(expected)}")
        shape = expected[name].value.shape
        if actual.shape != shape:
            raise ValueError(f"{name} has shape {actual.shape}; the inputs make it {shape}")
    return [_verdict(name, actual, expected[name]) for name, actual in results.items()]


def expected_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    diagonal: int | None,
    lower: int | None = None,
    dtype: str,
    rounding: str | None = None,
) -> dict[str, Expected]:
    """The attention "O" and "lse" with the bounds that this module's head describes.

    q, k, v, scale, diagonal and lower are those of `reference.attention`. dtype: that of the inputs
    and of O. rounding: the precision to which the kernel by design rounds its operands, one of
    `reference.PRECISIONS`; None if it takes them as they are. A result may hold anything where
    such rounding overflows in the plain computation: float16 ends at 65504.
    """
    return expected_attention_of_each(
        q, k, v, scale=scale, diagonal=diagonal, lower=lower, dtype=dtype, roundings=(rounding,)
    )[rounding]


@np.errstate(all="ignore")
def expected_attention_of_each(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    diagonal: int | None,
    lower: int | None = None,
    dtype: str,
    roundings: Sequence[str | None],
) -> dict[str | None, dict[str, Expected]]:
    """`expected_attention` for several roundings, which share most of its work."""
    kernels = {rounding: _Arithmetic.of(dtype, rounding) for rounding in roundings}
    value = {"O": np.zeros((*q.shape[:3], v.shape[-1])), "lse": np.zeros(q.shape[:3])}
    bounds = {r: {name: np.zeros_like(x) for name, x in value.items()} for r in kernels}
    plain = {r: dict.fromkeys(value, 0.0) for r in kernels}
    for tile in reference.tiles(q, k, v, diagonal, lower):
        work = _Work.on(tile, scale)
        out, lse, _ = work.attend()
        reference.flat(value["O"])[tile.where] = out
        reference.flat(value["lse"])[tile.where] = lse
        for r, kernel in kernels.items():
            for name, (bound, error) in _bounds_on_tile(work, kernel).items():
                reference.flat(bounds[r][name])[tile.where] = bound
                plain[r][name] = max(plain[r][name], error)
    empty = np.isneginf(value["lse"])
    for r, kernel in kernels.items():
        if kernel.is_narrow:
            bounds[r]["O"] += 2 * plain[r]["O"] + _two_roundings(value["O"], kernel.coarsest)
            bounds[r]["lse"] += 2 * plain[r]["lse"]
        for bound in bounds[r].values():
            bound[empty] = np.where(np.isinf(bound[empty]), np.inf, 0.0)
    return {r: {x: Expected(value[x], bounds[r][x]) for x in value} for r in kernels}


@np.errstate(all="ignore")
def expected_gradients_of_each(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    *,
    scale: float,
    diagonal: int | None,
    lower: int | None = None,
    dtype: str,
    roundings: Sequence[str | None],
) -> dict[str | None, dict[str, Expected]]:
    """The gradients "dQ", "dK" and "dV" with their bounds, for kernels of several roundings.

    The arguments are those of `reference.attention_backward` and `expected_attention`.
    """
    kernels = {rounding: _Arithmetic.of(dtype, rounding) for rounding in roundings}
    value = {name: np.zeros(x.shape) for name, x in (("dQ", q), ("dK", k), ("dV", v))}
    bounds = {r: {name: np.zeros_like(x) for name, x in value.items()} for r in kernels}
    rows = q.shape[2] * (q.shape[1] // k.shape[1] if k.shape[1] else 1)
    equal = reference.flat((dout == dout[..., :1, :]).all(-2, keepdims=True))
    for tile in reference.tiles(q, k, v, diagonal, lower):
        keys = tile.key_heads, tile.keys
        grad, o, its_lse = (
            reference.flat(x)[tile.where].astype(np.float64) for x in (dout, out, lse)
        )
        work = _BackwardWork.on(tile, grad, o, its_lse, scale, rows, equal[tile.where[0]])
        for into, (dq, dk, dv) in (
            (value, (work.step.dq, work.step.dk, work.step.dv)),
            *((bounds[r], _gradient_bounds(work, kernel)) for r, kernel in kernels.items()),
        ):
            reference.flat(into["dQ"])[tile.where] = dq
            reference.add_to_heads(reference.flat(into["dK"]), keys, dk)
            reference.add_to_heads(reference.flat(into["dV"]), keys, dv)
    for r, kernel in kernels.items():
        for name, bound in bounds[r].items():
            _bound_results(value[name], bound, kernel)
    return {r: {x: Expected(value[x], bounds[r][x]) for x in value} for r in kernels}


@np.errstate(all="ignore")
def expected_softmax(x: Array, *, dtype: str) -> dict[str, Expected]:
    """The softmax "P" of x [..., N] and its "lse", with a bound for each element.

    A kernel may compute exp(x - max) as 2**(x * log2(e) - max * log2(e)), whose exponent errs by
    half an eps of each number in it; it errs by 2 eps in the power and, as in attention, by
    1.2 eps * (sqrt(N) + 4) with the sum. A narrow dtype rounds P, once or twice; `tiny` and
    the smallest number of the dtype are what flushing to zero and underflow may lose.
    """
    kernel = _Arithmetic.of(dtype)
    count, N = math.prod(x.shape[:-1]), x.shape[-1]
    rows, some = x.reshape(count, N), max(1, _BLOCK // max(N, 1))
    parts = [
        _expected_rows(rows[first : first + some], kernel)
        for first in range(0, max(count, 1), some)
    ]
    P, lse = zip(*parts, strict=True)
    return {"P": _joined(P, x.shape), "lse": _joined(lse, x.shape[:-1])}


@dataclass(frozen=True)
class _Arithmetic:
    """How a kernel computes: the dtype of its arrays, the precision of what it multiplies.

    rounds_by_design: whether it is free to round more than its arrays and P to that precision.
    """

    dtype: str
    operands: str
    rounds_by_design: bool

    @staticmethod
    def of(dtype: str, rounding: str | None = None) -> "_Arithmetic":
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is unknown; use one of {', '.join(DTYPES)}")
        if rounding is not None and rounding not in reference.PRECISIONS:
            known = ", ".join(reference.PRECISIONS)
            raise ValueError(f"rounding {rounding!r} is unknown; use None or one of {known}")
        return _Arithmetic(dtype, rounding or dtype, rounding is not None)

    @property
    def is_narrow(self) -> bool:
        return self.dtype in _NARROW or self.operands in _NARROW

    @property
    def coarsest(self) -> str:
        if self.operands == _FLOAT8:  # of which no result is made
            return self.dtype
        return max(self.dtype, self.operands, key=lambda name: float(_finfo(name).eps))

    @property
    def accumulator(self) -> Any:
        """np.finfo of the sums: float32, or float64 if the operands are."""
        return np.finfo(np.float64 if self.operands == "float64" else np.float32)

    @property
    def eps(self) -> float:
        """The spacing at 1 of what sums of products are kept in."""
        return _FLOAT8_SUMS if self.operands == _FLOAT8 else float(self.accumulator.eps)

    @property
    def operand_unit(self) -> float:
        """The relative error of rounding to the precision of the operands."""
        return float(_finfo(self.operands).eps) / 2 if self.operands in _NARROW else 0.0

    @property
    def output_unit(self) -> float:
        return float(_finfo(self.coarsest).eps) / 2 if self.is_narrow else 0.0


@dataclass(frozen=True)
class _Work:
    """What kernels of several roundings need of a tile; each result is computed once."""

    tile: reference.Tile
    scale: float
    values: Array  # |V|
    attend: Callable[..., tuple[Array, Array, Array]]  # of a precision, and what it scales
    score_size: Callable[[Any], Array]  # of a dtype, as is
    magnitude: Callable[[Any], Array]

    @staticmethod
    def on(tile: reference.Tile, scale: float) -> "_Work":
        values = np.abs(_finite(tile.v))
        attend = cache(partial(reference.attend, tile, scale))
        score_size = cache(partial(_score_size, tile, scale))

        @cache
        def magnitude(dtype: Any) -> Array:
            return attend()[2].astype(dtype) @ values.astype(dtype)

        return _Work(tile, scale, values, attend, score_size, magnitude)


@np.errstate(all="ignore")
def _bounds_on_tile(work: _Work, kernel: _Arithmetic) -> dict[str, tuple[Array, float]]:
    """For "O" and "lse" of a tile: its own bound, the error of a plain computation."""
    out, lse, _ = work.attend()
    out_bound, lse_bound = _bounds(work, kernel)
    out_error = lse_error = 0.0
    orders = ("S",) if kernel.operands == _FLOAT8 else _plain_orders(work.scale)
    for scaled in orders if kernel.is_narrow else ():
        plain_out, plain_lse, _ = work.attend(kernel.operands, scaled=scaled)
        plain_out = reference.rounded(plain_out, kernel.dtype)
        out_error = max(out_error, _largest(plain_out - out))
        lse_error = max(lse_error, _largest(plain_lse - lse))
        if kernel.rounds_by_design:
            out_bound[~np.isfinite(plain_out) & (plain_out != out) & ~np.isnan(out)] = np.inf
            lse_bound[~np.isfinite(plain_lse) & (plain_lse != lse) & ~np.isnan(lse)] = np.inf
    return {"O": (out_bound, out_error), "lse": (lse_bound, lse_error)}


def _plain_orders(scale: float) -> tuple[str, ...]:
    """What a plain computation may scale, keys or scores; no matter which if that rounds nothing.

    A float16 pipeline of matrix products scales S. In a problem with few outputs its error would
    now and then be more than twice that of the computation that scales K.
    """
    is_power_of_two = abs(math.frexp(scale)[0]) == 0.5
    return ("K",) if is_power_of_two else ("K", "S")


def _bounds(work: _Work, kernel: _Arithmetic) -> tuple[Array, Array]:
    """The bounds of out [n, rows, dv] and lse [n, rows] that hold for each element by itself."""
    tile, (out, lse, weights) = work.tile, work.attend()
    d, n = tile.q.shape[-1], tile.visible_keys
    eps, tiny = kernel.eps, float(kernel.accumulator.smallest_normal)
    size = work.score_size(kernel.accumulator.dtype)
    magnitude = work.magnitude(kernel.accumulator.dtype)
    score, total = np.sqrt(d + 3) * size, np.sqrt(n) + 4
    is_constant = (tile.v == tile.v[:, :1]).all(-2, keepdims=True)
    total_of_values = np.where(is_constant, n + 4, total) if is_constant.any() else total
    free_unit = kernel.operand_unit if kernel.rounds_by_design else 0.0
    rounded_score = free_unit * size * min(2.0, 4.0 / np.sqrt(max(d, 1)))

    relative = eps * (0.6 * score + 1.2 * total_of_values)
    relative = relative + np.expm1(np.minimum(rounded_score, 600.0)) + kernel.operand_unit
    floor = tiny * (n + 2 + work.values.sum(-2, keepdims=True))
    out_bound = relative * magnitude + kernel.output_unit * np.abs(_finite(out)) + floor
    smallest = max(tiny, float(_finfo(kernel.operands).smallest_subnormal))
    out_bound[_vanished_infinities(tile, weights, smallest)] = np.inf
    lse_bound = eps * (score + 1.2 * total) + rounded_score
    return out_bound, lse_bound[..., 0] + eps * 2 * np.abs(_finite(lse))


@dataclass(frozen=True)
class _BackwardWork:
    """What the bounds of the gradients need of a tile: sizes of finite numbers."""

    step: reference.Gradients
    scale: float
    depths: tuple[int, int]  # d and dv
    q: Array
    k: Array
    grad: Array
    score: Array  # |S| + |lse|
    score_size: Array
    slope_size: Array
    keys: Array  # that each row sees
    rows: int  # in a sum over rows
    equal: Array  # whether a column of dO is the same in all rows, [n, 1, dv]

    @staticmethod
    def on(
        tile: reference.Tile,
        grad: Array,
        out: Array,
        lse: Array,
        scale: float,
        rows: int,
        equal: Array,
    ) -> "_BackwardWork":
        step = reference.differentiate(tile, grad, out, lse, scale)
        q, k, v, grad, out = (np.abs(_finite(x)) for x in (tile.q, tile.k, tile.v, grad, out))
        return _BackwardWork(
            step=step,
            scale=abs(scale),
            depths=(q.shape[-1], v.shape[-1]),
            q=q,
            k=k,
            grad=grad,
            score=np.abs(_finite(step.scores)) + np.abs(_finite(lse))[..., None],
            score_size=abs(scale) * (q @ k.mT),
            slope_size=grad @ v.mT + (grad * out).sum(-1, keepdims=True),
            keys=tile.visible_keys,
            rows=rows,
            equal=equal,
        )


def _gradient_bounds(work: _BackwardWork, kernel: _Arithmetic) -> tuple[Array, Array, Array]:
    """What a tile adds to the bounds of dQ, dK and dV, but for the rounding of results."""
    d, dv = work.depths
    eps, tiny = float(kernel.accumulator.eps), float(kernel.accumulator.smallest_normal)
    free = kernel.operand_unit if kernel.rounds_by_design else 0.0
    unit = kernel.operand_unit + free
    least = tiny + (float(_finfo(kernel.operands).smallest_subnormal) / 2 if unit else 0.0)
    weights, slopes, dscores = (
        np.abs(_finite(x)) for x in (work.step.weights, work.step.slopes, work.step.dscores)
    )

    exponent = eps * (np.sqrt(d + 3) * work.score_size + work.score + 2)
    exponent += free * work.score_size * min(2.0, 4.0 / np.sqrt(max(d, 1)))
    p = weights * np.expm1(np.minimum(exponent, 600.0)) + tiny
    g = work.slope_size * (eps * np.sqrt(dv + 3) + free * min(2.0, 4.0 / np.sqrt(max(dv, 1))))
    ds = p * (slopes + g) + weights * (g + eps * slopes) + tiny * (dv + 1)

    over_keys, over_rows = (1.2 * eps * (np.sqrt(n) + 4) + unit for n in (work.keys, work.rows))
    along_row, along_column, of_values = (
        np.where(work.step.unseen, 0.0, x)
        for x in (
            ds + over_keys * dscores + least,
            ds + over_rows * dscores + least,
            p + over_rows * weights + least,
        )
    )
    dv_bound = of_values.mT @ work.grad
    if work.equal.any():
        dv_bound += 1.2 * eps * work.rows * (weights.mT @ np.where(work.equal, work.grad, 0.0))
    seen = ~work.step.unseen
    floor = tiny * (1 + work.scale)
    return (
        work.scale * (along_row @ work.k) + floor * seen.sum(-1)[..., None],
        work.scale * (along_column.mT @ work.q) + floor * seen.sum(-2)[..., None],
        dv_bound + floor * seen.sum(-2)[..., None],
    )


def _bound_results(value: Array, bound: Array, kernel: _Arithmetic) -> None:
    """Adds to a bound what the rounding of results does, where it is not exactly 0."""
    dtype = _finfo(kernel.dtype)
    narrow = kernel.dtype in _NARROW
    unit = 2 * float(kernel.accumulator.eps) + (float(dtype.eps) / 2 if narrow else 0.0)
    least = float(dtype.smallest_subnormal) if narrow else 0.0
    size = np.abs(_finite(value))
    bound += np.where(bound > 0, unit * (size + bound) + least, 0.0)
    beyond = np.isinf(value) | (size + bound > float(dtype.max))
    bound[beyond] = np.inf


def _vanished_infinities(tile: reference.Tile, weights: Array, smallest: float) -> Array:
    """Where an infinite value has a weight that the kernel's format has no number for.

    The product is infinite in the reference and 0 * infinity, which is NaN, in the kernel.
    """
    infinite = np.isinf(tile.v)
    if not infinite.any():
        return np.zeros((*weights.shape[:-1], tile.v.shape[-1]), bool)
    vanished = weights < smallest
    if tile.hidden is not None:
        vanished &= ~tile.hidden
    return vanished.astype(np.float32) @ infinite.astype(np.float32) > 0


def _score_size(tile: reference.Tile, scale: float, dtype: Any) -> Array:
    """The largest |scale| * sum(|q| * |k|) over the keys that a row sees, [n, rows, 1] of `dtype`.

    Infinite scores do not count: their key has no weight, or their row is NaN.
    """
    size = np.abs(tile.q).astype(dtype) @ np.abs(tile.k).astype(dtype).mT
    if tile.hidden is not None:
        np.copyto(size, 0.0, where=tile.hidden)
    largest = size.max(-1, keepdims=True, initial=0.0)
    if not np.isfinite(largest).all():
        largest = _finite(size).max(-1, keepdims=True, initial=0.0)
    return largest * abs(scale)


def _two_roundings(value: Array, precision: str) -> float:
    """2 * max|((x + 0.3) - 0.3) - x| in `precision`, for the finite x of `value`."""
    largest, all_x = 0.0, value.ravel()
    for first in range(0, value.size, _BLOCK):
        x = reference.rounded(all_x[first : first + _BLOCK], precision)
        there = reference.rounded(x + np.float32(0.3), precision)
        back = reference.rounded(there - np.float32(0.3), precision)
        largest = max(largest, _largest(back - x))
    return 2 * largest


def _expected_rows(x: Array, kernel: _Arithmetic) -> tuple[Expected, Expected]:
    """The softmax of the rows of x [rows, N], and its lse."""
    eps, tiny = float(kernel.accumulator.eps), float(kernel.accumulator.smallest_normal)
    P, lse = reference.softmax(x)
    x = _finite(x.astype(np.float64))
    top = _finite(np.where(P > 0, x, -np.inf).max(-1, keepdims=True, initial=-np.inf))
    total = np.abs(top) + 1.2 * (np.sqrt(x.shape[-1]) + 4)

    relative = eps * (total + 1.5 * np.abs(x - top)) + 2 * kernel.output_unit
    floor = 2 * tiny + (float(_finfo(kernel.dtype).smallest_subnormal) if kernel.is_narrow else 0)
    P_bound = np.where(np.isneginf(lse)[:, None], 0.0, P * relative + floor)
    lse_bound = eps * (total[:, 0] + np.abs(top[:, 0]) + 2 * np.abs(_finite(lse)))
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
    """The error of each element, and its quotient by the bound; how many are NaN and should not."""
    error = np.abs(actual - value)
    if np.isfinite(error.max()) and bound.min() > 0 and bound.max() < np.inf:
        return error, error / bound, 0  # as the rest would say, in less time
    error[(actual == value) | (np.isnan(actual) & np.isnan(value)) | np.isposinf(bound)] = 0.0
    error[np.isnan(error)] = np.inf
    ratio = np.where(error == 0.0, 0.0, np.where(np.isfinite(error), error / bound, np.inf))
    return error, ratio, int(np.count_nonzero(np.isnan(actual) & np.isinf(error)))


def _finfo(precision: str) -> Any:
    """The limits of a precision; tf32 has as many mantissa bits as float16."""
    names = {"tf32": "float16", "float8_e4m3": "float8_e4m3fn"}
    return ml_dtypes.finfo(names.get(precision, precision))


def _joined(parts: Sequence[Expected], shape: tuple[int, ...]) -> Expected:
    value, bound = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Expected(value.reshape(shape), bound.reshape(shape))


def _finite(x: Array) -> Array:
    return np.where(np.isfinite(x), x, 0.0)


def _largest(x: Array) -> float:
    """The largest finite |x|."""
    size = np.abs(x)
    return float(size.max(initial=0.0, where=np.isfinite(size)))
