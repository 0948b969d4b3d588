"""Reference and error bounds of attention's directional derivative.

A direction moves Q, K and V by their tangents Q', K' and V', elements a of arrays that expressions
read by a', and sinks by z'. With x' the derivative of the modified score x(s, a, …) with respect to
s = scale * q k.T, x_a that with respect to a, and p the weight of a row's sink,

    S'   = x' * scale * (Q' @ K.T + Q @ K'.T) + sum(x_a * a')
    lse' = rowsum(P * S') + p * z'
    O'   = (P * S') @ V + P @ V' - lse' * O

Dropout multiplies the weights of O and O' alike, after lse and lse'. A masked key has no effect. A
row that sees no key has O' = 0, and without a sink lse' = 0. Where P is 0, S' is 0, and so is its
first term where x' is 0, because the other factor may be infinite. O' is NaN where O or lse' is
infinite or NaN: the derivative does not exist there. Where x_a is 0, as for elements that `where`
does not select, and a' is infinite or NaN, the element's term is 0 or NaN.

**Bounds.** eps, sqrt, n and the constants are those of tolerance.py. Let y be the error of P before
the division by the row's sum, and Y the relative error of that sum: y over all keys, h, and the
error of the sink's weight. Then

    D = (y + P * Y) / (1 - Y)                       error of P; at most 1
    T = eps * |x'| * sqrt(2 * d + 3) * |scale| * (|Q'| @ |K|.T + |Q| @ |K'|.T)
        + (eps * |x'| + e') * |s'|                  error of S'; e' is the error of x'
        + sum((4 * eps * |x_a| + e_a) * |a'|)       e_a is the error of x_a
    A = |S'| + T,    W = P + D                      sizes of the numbers that a kernel computes
    h = 1.2 * eps * (sqrt(n) + 4)                   error of a sum over keys

    m = rowsum(D * A + P * T) + h * rowsum(W * A)                                error of lse'
    o = (D + (h + u) * W) @ |V|                                                  error of O
    |O' - reference|  <=  (D * A + P * T + (h + u) * W * A) @ |V| + (D + (h + u) * W) @ |V'|
                          + m * (W @ |V|) + rowsum(W * A) * o + 4 * eps * (all sizes)

A sink's z' adds p * z' and its errors like a key: P is p, and S' is z' with the error eps * |z'|.
u is the unit of operands that a kernel rounds before products. Where a column of V or V' is
constant over all keys, n replaces sqrt(n), because errors of equal numbers add up. Results are
rounded like gradients. An element has no bound where a sum may overflow, where rounding decides
whether a score is visible or infinite, or where an infinite number has a weight that may vanish.

Forward-mode differentiation: Griewank and Walther, Evaluating Derivatives, 2008, chapter 3.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from cupyfa.numerics import reference, tolerance
from cupyfa.numerics.tolerance import Arithmetic, Array, Expected, ExpectedOfEach, Roundings, finite


@dataclass(frozen=True)
class Tangents:
    """The derivative on one tile, in float64.

    out [n, rows, dv], lse [n, rows], P [n, rows, keys]: as `reference.attend` returns them.
    S_dot, raw [n, rows, keys]: S' before it is set to 0 where P is 0, and without the slope and the
        terms of arrays.
    of_sink [n, rows]: the sink's term of lse_dot.
    out_dot [n, rows, dv], lse_dot [n, rows].
    """

    out: Array
    lse: Array
    P: Array
    S_dot: Array
    raw: Array
    out_dot: Array
    lse_dot: Array
    of_sink: Array


@np.errstate(all="ignore")
def push_forward(
    tile: reference.Tile,
    q_dot: Array | None,
    k_dot: Array | None,
    v_dot: Array | None,
    arrays_dot: Mapping[str, Array] = MappingProxyType({}),
    sink_dot: Array | None = None,
) -> Tangents:
    """Computes one tile's derivative along q_dot [n, rows, d], k_dot [n, keys, d] and v_dot.

    arrays_dot: the tangents of arrays that expressions read, by name. sink_dot: [n, 1] or None. A
    tangent of None is 0, and its products are left out, even if they are 0 times infinity.
    """
    out, lse, P = reference.attend(tile)
    raw = np.zeros(P.shape)
    for q, k in ((q_dot, tile.k), (tile.q, k_dot)):
        if q is not None and k is not None:
            raw += (q @ k.mT) * tile.scale
    S_dot, slope = raw, None
    if tile.mods.score_steps:
        scores = (tile.q @ tile.k.mT) * tile.scale
        slope = tile.mods.differentiated(scores, tile.place, tile.masked)[1]
        S_dot = raw * slope
    counted = S_dot if slope is None else np.where(slope == 0, 0.0, S_dot)
    for term in _terms_of_arrays(tile, arrays_dot) if arrays_dot else ():
        S_dot, counted = S_dot + term.value, counted + term.value
    counted = np.where(P == 0, 0.0, counted)
    if tile.masked is not None:
        counted = np.where(tile.masked, 0.0, counted)
    weighted = P * counted
    of_sink = np.zeros_like(lse)
    if sink_dot is not None and tile.sink is not None:
        weight = reference.weight_of_sink(tile.sink, lse)
        of_sink = np.where(weight == 0, 0.0, weight * sink_dot)
    lse_dot = weighted.sum(-1) + of_sink
    lse_dot[np.isnan(lse)] = np.nan  # with a sink of infinity too, where a row sees no key
    out_dot = reference.sum_unmasked(tile.dropped(weighted), tile.v, tile.masked)
    if v_dot is not None:
        out_dot += reference.sum_unmasked(tile.dropped(P), v_dot, tile.masked)
    out_dot -= lse_dot[..., None] * out
    out_dot[~(np.isfinite(out) & np.isfinite(lse_dot)[..., None])] = np.nan
    return Tangents(out, lse, P, S_dot, raw, out_dot, lse_dot, of_sink)


@dataclass(frozen=True)
class _Term:
    """A term x_a * a' of S' [n, rows, keys], for one access of an expression to an array.

    slope_error: the error of the slope x_a, in eps, if errors were requested.
    """

    slope: Array
    slope_error: Array
    moved: Array  # a'

    @property
    def value(self) -> Array:
        return self.slope * self.moved

    def error(self, accumulator: np.finfo) -> Array:
        """Bounds the error of ``value``, which is infinite if a' overflows in the accumulator."""
        size = np.abs(finite(self.moved))
        relative = 4 * np.abs(finite(self.slope)) + self.slope_error
        error = np.where(size == 0, 0.0, float(accumulator.eps) * relative * size)
        return np.where(size > float(accumulator.max), np.inf, error)


def _terms_of_arrays(
    tile: reference.Tile,
    arrays_dot: Mapping[str, Array],
    error: Array | None = None,
    eps: float | None = None,
) -> Iterator[_Term]:
    """Yields the terms of the arrays that move; for ``error`` and ``eps`` see `Modifications`."""
    scores = (tile.q @ tile.k.mT) * tile.scale
    pairs = scores, tile.place, tile.masked, arrays_dot
    for name, at, x in tile.mods.accesses(*pairs, error=error, eps=eps):
        moved = arrays_dot[name].astype(np.float64)[at]
        given = tolerance.or_0(x.slope), tolerance.or_0(x.slope_error), moved
        yield _Term(*(np.broadcast_to(y, scores.shape) for y in given))


@np.errstate(all="ignore")
def expected_tangents(
    q: Array,
    k: Array,
    v: Array,
    q_dot: Array | None = None,
    k_dot: Array | None = None,
    v_dot: Array | None = None,
    *,
    arrays_dot: Mapping[str, Array] = MappingProxyType({}),
    sink_dot: Array | None = None,
    dtype: str,
    out_dtype: str | None = None,
    roundings: Roundings = (None,),
    **score: Any,
) -> ExpectedOfEach:
    """Computes "O", "lse", "O_dot" and "lse_dot" with the bounds of the module's docstring.

    The tangents have the shapes of q, k, v and the sink, or are None, which stands for 0;
    arrays_dot has those of arrays that expressions read, by name. For other arguments see
    `tolerance.expected_attention`.
    """
    how: dict[str, Any] = {"dtype": dtype, "out_dtype": out_dtype, "roundings": roundings}
    found = tolerance.expected_attention(q, k, v, **how, **score)
    kernels = {rounding: Arithmetic(dtype, rounding, out_dtype) for rounding in roundings}
    shapes = {"O_dot": (*q.shape[:3], v.shape[-1]), "lse_dot": q.shape[:3]}
    value = {name: np.zeros(shape) for name, shape in shapes.items()}
    bounds = {r: {name: np.zeros(shape) for name, shape in shapes.items()} for r in kernels}
    for tile in reference.tiles(q, k, v, **score):
        of_keys = tile.key_heads, tile.keys
        places = (q_dot, tile.where), (k_dot, of_keys), (v_dot, of_keys)
        moved = tuple(_at(x, place) for x, place in places)
        work = _Work(tile, moved, arrays_dot, _of_sinks(sink_dot, tile, q.shape[:2]))
        for into, of in (
            (value, (work.made.out_dot, work.made.lse_dot)),
            *((bounds[r], _bounds_on_tile(work, kernel)) for r, kernel in kernels.items()),
        ):
            for name, x in zip(shapes, of):
                reference.flat(into[name])[tile.where] = x
    for r, kernel in kernels.items():
        dtypes = {"O_dot": kernel.result, "lse_dot": kernel.accumulator.dtype.name}
        for name, bound in bounds[r].items():
            bound[np.isinf(found[r][name.removesuffix("_dot")].bound)] = np.inf
            tolerance.add_rounding_of_results(value[name], bound, kernel, dtypes[name])
        found[r] |= {name: Expected(value[name], bounds[r][name]) for name in shapes}
    return found


def _at(tangent: Array | None, place: Any) -> Array | None:
    """Returns a tile's part of a tangent, in float64."""
    return None if tangent is None else reference.flat(tangent)[place].astype(np.float64)


def _of_sinks(sink_dot: Array | None, tile: reference.Tile, heads: Any) -> Array | None:
    """Returns a tile's tangents of sinks [n, 1], in float64; heads: batch and heads."""
    if sink_dot is None:
        return None
    return np.broadcast_to(sink_dot, heads).astype(np.float64).ravel()[tile.where[0], None]


class _Work:
    """One tile's derivative, and the magnitudes that its bounds need."""

    def __init__(
        self,
        tile: reference.Tile,
        qkv_dot: tuple[Array | None, ...],
        arrays_dot: Mapping[str, Array],
        sink_dot: Array | None,
    ) -> None:
        self.tile, self.arrays_dot = tile, arrays_dot
        q_dot, k_dot, v_dot = qkv_dot
        self.made = push_forward(tile, q_dot, k_dot, v_dot, arrays_dot, sink_dot)
        self.sink_dot = np.zeros((len(tile.q), 1)) if sink_dot is None else sink_dot
        given = zip(qkv_dot, (tile.q, tile.k, tile.v))
        self.q_dot, self.k_dot, self.v_dot = (
            np.zeros_like(like) if x is None else x for x, like in given
        )
        left_out = np.isneginf(self.made.lse)[..., None]
        left_out = left_out if tile.masked is None else tile.masked | left_out
        self.left_out = np.broadcast_to(left_out, self.made.P.shape)

    def sizes(self, dtype: Any) -> tuple[Array, Array]:
        """Returns sizes of the terms of s and of s', infinite where a sum may overflow."""
        tile = self.tile
        of_score = tolerance.pair_sizes_of(tile, dtype)
        moved = (replace(tile, q=self.q_dot), replace(tile, k=self.k_dot))
        return of_score, sum(tolerance.pair_sizes_of(x, dtype) for x in moved)  # type: ignore[return-value]


@dataclass(frozen=True)
class _PairErrors:
    """Errors of one kernel on each pair [n, rows, keys] of a tile, 0 for pairs that are left out.

    P, S_dot: the errors D and T of the module's docstring. weight, moved: the sizes W and A.
    lost: pairs without bounds. sink [n, rows]: the error of the sink's weight.
    """

    P: Array
    S_dot: Array
    weight: Array
    moved: Array
    lost: Array
    sink: Array


def _pair_errors(work: _Work, kernel: Arithmetic) -> _PairErrors:
    tile, made, eps = work.tile, work.made, float(kernel.accumulator.eps)
    size, moved_size = work.sizes(kernel.accumulator.dtype)
    lost = np.isinf(size) | np.isinf(moved_size)
    size, moved_size = (np.where(lost, 0.0, x) for x in (size, moved_size))
    d = 2 * tile.q.shape[-1]
    of_raw = eps * np.sqrt(d + 3) * moved_size + kernel.rounded_product(moved_size, d)
    raw, S_dot = np.abs(finite(made.raw)), np.abs(finite(made.S_dot))
    modified = None
    if tile.mods.score_steps:
        modified = tolerance.ModifiedScores(tile, kernel, size, differentiated=True)
        exponent = modified.shift + modified.exponent + modified.by_design + 2 * eps
        of_slope = np.broadcast_to(modified.slope_error, size.shape)
        lost = lost | np.isinf(modified.shift) | np.isinf(of_slope)
        lost |= modified.overflows & (made.P > 0)
        most = float(kernel.accumulator.max)
        lost |= S_dot > most
        # If x' may round to 0, a kernel may leave out s', which is infinite or NaN.
        lost |= (modified.slope <= of_slope) & ~np.isfinite(made.raw)
        of_S_dot = modified.slope * of_raw + (eps * modified.slope + of_slope) * (raw + of_raw)
        given, _ = tolerance.score_errors(size, tile, kernel)
        error = given * (kernel.eps / eps)
        for term in _terms_of_arrays(tile, work.arrays_dot, error, eps):
            of_term, term_size = term.error(kernel.accumulator), np.abs(finite(term.value))
            of_S_dot = of_S_dot + of_term + eps * (term_size + modified.slope * raw)
            lost |= np.isinf(of_term) | (term_size > most)
            lost |= (kernel.tiny > made.P) & ~np.isfinite(term.value)
            lost |= (np.abs(term.slope) <= eps * term.slope_error) & ~np.isfinite(term.moved)
    else:
        given, by_design = tolerance.score_errors(size, tile, kernel)
        exponent = eps * (given + 2) + by_design
        of_S_dot = of_raw + eps * raw
    vanishing = made.P if modified is None else made.P * modified.slope
    lost |= (kernel.tiny > vanishing) & ~np.isfinite(made.S_dot)
    if tile.unsure is not None:
        lost = lost | tile.unsure
    of_P, of_sink = _errors_of_weights(work, kernel, np.where(lost, 0.0, exponent))
    of_S_dot = of_S_dot + kernel.tiny * (d + 1)
    zero = work.left_out
    of_P, of_S_dot, S_dot = (np.where(zero | lost, 0.0, x) for x in (of_P, of_S_dot, S_dot))
    P = np.where(zero, 0.0, finite(made.P))
    return _PairErrors(of_P, of_S_dot, P + of_P, S_dot + of_S_dot, lost & ~zero, of_sink)


def _errors_of_weights(work: _Work, kernel: Arithmetic, exponent: Array) -> tuple[Array, Array]:
    """Returns the errors D of P and of the sink's weight; scores have the errors ``exponent``."""
    tile, made, eps = work.tile, work.made, float(kernel.accumulator.eps)
    P, lse = finite(made.P), made.lse[..., None]
    scores = reference.masked_scores(tile)
    y = tolerance.error_of_probabilities(P, scores, lse, exponent) + kernel.tiny
    y = np.where(work.left_out, 0.0, y)
    total = y.sum(-1, keepdims=True) + 1.2 * eps * (np.sqrt(tile.visible_keys) + 4)
    weight = y_of_sink = np.zeros_like(lse)
    if tile.sink is not None:
        weight = reference.weight_of_sink(tile.sink, made.lse)[..., None]
        y_of_sink = weight * eps * (1.5 * np.abs(finite(tile.sink)) + 3)
        total += y_of_sink

    def divided(P: Array, y: Array) -> Array:
        error = (y + P * total) / (1 - np.minimum(total, 0.5))
        return np.minimum(np.where(total < 0.5, error, 1.0), 1)

    return divided(P, y), divided(finite(weight), finite(y_of_sink))[..., 0]


def _bounds_on_tile(work: _Work, kernel: Arithmetic) -> tuple[Array, Array]:
    """Bounds the errors of out_dot [n, rows, dv] and lse_dot [n, rows] on one tile."""
    tile, made, eps, tiny = work.tile, work.made, float(kernel.accumulator.eps), kernel.tiny
    unit, pairs = kernel.operand_unit, _pair_errors(work, kernel)
    if kernel.rounds_by_design:  # both factors are rounded
        unit *= 2 + unit
    least = tiny + (tolerance.smallest_operand(kernel) / 2 if unit else 0.0)
    n = tile.visible_keys + (tile.sink is not None)
    of_sum = 1.2 * eps * (np.sqrt(n) + 4)
    v, v_dot = np.abs(finite(tile.v)), np.abs(finite(work.v_dot))

    def of_sums(values: Array) -> Array:
        equal = (values == values[:, :1]).all(-2, keepdims=True)
        return np.where(equal, 1.2 * eps * (n + 4), of_sum) + unit

    weighted, dropped = pairs.weight * pairs.moved, tile.dropped
    of_weighted = pairs.P * pairs.moved + finite(made.P) * pairs.S_dot
    size_of_sink, may_vanish = np.abs(finite(work.sink_dot)), ~np.isfinite(work.sink_dot)
    of_sink = pairs.sink * size_of_sink + eps * np.abs(finite(made.of_sink))
    moved = weighted.sum(-1, keepdims=True)
    moved += (np.abs(finite(made.of_sink)) + of_sink)[..., None]
    of_lse = of_weighted.sum(-1, keepdims=True) + of_sum * moved + tiny * (n + 2)
    of_lse += of_sink[..., None]
    seen = np.where(work.left_out, 0.0, least)
    sizes = [dropped(x) @ y for x, y in ((weighted, v), (pairs.weight, v), (pairs.weight, v_dot))]
    of_out = dropped(pairs.P + seen) @ v + of_sums(tile.v) * sizes[1]
    bound = dropped(of_weighted + seen) @ v + of_sums(tile.v) * sizes[0]
    bound += dropped(pairs.P + seen) @ v_dot + of_sums(work.v_dot) * sizes[2]
    bound += of_lse * sizes[1] + moved * of_out
    total = sizes[0] + sizes[2] + moved * sizes[1]
    bound += 4 * eps * total + tiny * (n + 2)
    most = float(kernel.accumulator.max) / np.maximum(n, 1)
    lost = pairs.lost.any(-1, keepdims=True) | (moved > most)
    if tile.sink is not None:
        may_vanish = may_vanish & (tiny > reference.weight_of_sink(tile.sink, made.lse))
        lost |= (may_vanish | (size_of_sink > float(kernel.accumulator.max)))[..., None]
    vanished = [
        tolerance.vanished_infinities(x, made.P, max(tiny, tolerance.smallest_operand(kernel)))
        for x in (tile, replace(tile, v=work.v_dot))
    ]
    bound = np.where(lost | (total > most) | vanished[0] | vanished[1], np.inf, bound)
    of_lse = np.where(lost, np.inf, of_lse)
    empty = work.left_out.all(-1, keepdims=True) & ~lost
    at_rest = empty & (made.of_sink == 0)[..., None]
    return np.where(empty, 0.0, bound), np.where(at_rest, 0.0, of_lse)[..., 0]
