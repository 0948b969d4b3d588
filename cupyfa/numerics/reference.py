"""Reference attention and softmax in NumPy, which define correct results for every kernel.

With scores S = scale * Q @ K.T, modified by expressions (numpy_evaluation.py) and partly masked,

    P = softmax(S)    O = P @ V    lse = log(sum(exp(S)))    (over the keys)

and, for the gradients dO of O and dlse of lse (Dao et al., FlashAttention, 2022, appendix B.2),

    D = rowsum(dO * O) - dlse   dS = P * (dO @ V.T - D) * (dS / d(scale * Q @ K.T))
    dV = P.T @ dO               dQ = scale * dS @ K         dK = scale * dS.T @ Q

A sink is an extra score for every row of a head, whose value vector is 0:

    lse = log(exp(sink) + sum(exp(S)))    P = exp(S - lse)    dsink = -sum(exp(sink - lse) * D)

With dropout, Z is 1 for kept pairs and 0 for dropped ones (dropout.py), r is 1 / (1 - probability):

    O = r * (P * Z) @ V    dV = r * (P * Z).T @ dO    dS = P * (r * Z * (dO @ V.T) - D) * ...

Special cases:

- A masked key and its value have no effect, even if they are NaN or infinite.
- A query whose keys are all masked, or whose scores are all -inf, has O = 0, lse = -inf and zero
  gradients; with a sink it has O = 0 and lse = sink.
- If an expression returns -inf, the weight is 0, but the key is not masked. Where P is 0, dS of a
  modified score is 0, because the derivative may be infinite.
- A dropped weight is 0, so O is NaN if the value is infinite or NaN; dP of the pair is 0, whatever
  dO @ V.T is.
- An unmasked score of NaN or +inf makes O and lse of its query NaN, but of no other query.
- The row maximum is -inf if all keys of the query are masked, with or without a sink. It is NaN
  where lse is NaN.

Scores are computed tile by tile, without ever storing an array [batch, heads, M, N].
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cupyfa.score.numpy_evaluation import NONE, Modifications, Place

Array = np.ndarray[Any, Any]

HUGE = 2.0**25  # from this magnitude on, rounding to float32 may change lse by 1 or more
PRECISIONS = ("float64", "float32", "tf32", "bfloat16", "float16", "float8_e4m3")

_TILE_SCORES = 1 << 18  # scores per tile: 2 MiB of float64, which fit in a core's cache
_TILE_ROWS = 64  # minimum number of rows per tile; fewer rows make matrix products slow


def attention(
    q: Array, k: Array, v: Array, *, precision: str = "float64", **score: Any
) -> tuple[Array, Array]:
    """Computes attention, and the log-sum-exp of each row of scores.

    q [batch, heads, M, d], k [batch, kv_heads, N, d] and v [batch, kv_heads, N, dv], of any
    floating-point dtype; heads is a multiple of kv_heads, and query head h reads key head
    h // (heads // kv_heads). score: scale, causal_offset, window_offset, mods and sink; see
    `tiles`.

    precision: one of PRECISIONS. Below "float64", inputs and the result of every step are rounded
    to it, and sums accumulate in float32, as in a framework without fused kernels. "float8_e4m3"
    only rounds the operands of matrix products (Q, K, V and P); their results stay float32.

    Returns out [batch, heads, M, dv] and lse [batch, heads, M] (natural logarithm) as float64
    arrays. Values of out are rounded to `precision`, and those of lse to float32 unless `precision`
    is "float64". Raises ValueError if `precision` is unknown.
    """
    batch, heads, M, _ = q.shape
    out, lse = np.zeros((batch, heads, M, v.shape[-1])), np.full((batch, heads, M), -np.inf)
    flat_out, flat_lse = flat(out), flat(lse)
    for tile in tiles(q, k, v, **score):
        flat_out[tile.where], flat_lse[tile.where], _ = attend(tile, precision)
    return out, lse


@np.errstate(all="ignore")
def softmax(x: Array, precision: str = "float64") -> tuple[Array, Array]:
    """Computes the softmax of x over the last axis, and the log-sum-exp of that axis.

    x [..., N] may have any floating-point dtype. Returns y [..., N] and lse [...] as float64. With
    a precision below float64, x and y are rounded to it, and intermediate steps use float32.

    Rows of -inf, and empty rows, have y = 0 and lse = -inf. NaN or +inf makes its row NaN.
    """
    y, lse = _softmax(rounded(x, precision))
    return rounded(y, precision).astype(np.float64), lse.astype(np.float64)


@dataclass(frozen=True)
class Tile:
    """A tile of the reference: rows from n heads of q, with all keys that these rows may see.

    where: slices of heads (batch and heads flattened into one axis) and of rows.
    key_heads [n]: the head of k and v for each head of the tile (batch and kv_heads flattened).
    keys: slice of the N keys.
    q [n, rows, d], k [n, keys, d], v [n, keys, dv]: float64.
    masked [rows, keys] or [n, rows, keys]: True where a key is masked; None without a mask.
    unsure [n, rows, keys]: True where rounding may flip the mask; None if nowhere.
    place: batch, head, query and key indices of the pairs, for mods.
    sink [n, 1, 1]: None without sinks.
    kept [n, rows, keys]: True where dropout keeps the weight; None without dropout.
    visible_keys [rows, 1] or [n, rows, 1]: number of keys that each row sees.
    """

    where: tuple[slice, slice]
    key_heads: Array
    keys: slice
    q: Array
    k: Array
    v: Array
    masked: Array | None
    unsure: Array | None
    scale: float
    mods: Modifications
    place: Place
    sink: Array | None
    kept: Array | None

    def dropped(self, x: Array) -> Array:
        """Applies dropout to weights, or its derivative to gradients; x is [n, rows, keys]."""
        if self.kept is None:
            return x
        assert self.mods.dropout is not None
        return np.where(self.kept, x * x.dtype.type(self.mods.dropout.factor), x.dtype.type(0))

    def modified(self, scores: Array) -> Array:
        """Applies the score expressions to scores [n, rows, keys]."""
        if not self.mods.score_steps:
            return scores
        return self.mods.modified(scores, self.place, self.masked)

    @property
    def visible_keys(self) -> Array:
        rows, keys = self.q.shape[1], self.k.shape[1]
        if self.masked is None:
            return np.full((rows, 1), keys)
        return keys - self.masked.sum(-1, keepdims=True)


def tiles(
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    causal_offset: int | None = None,
    window_offset: int | None = None,
    mods: Modifications = NONE,
    sink: Array | None = None,
) -> Iterator[Tile]:
    """Splits the problem of `attention` into tiles; every row of q belongs to exactly one tile.

    Query i sees keys i + window_offset <= j <= i + causal_offset; None means no limit. mods:
    expressions that change scores or mask pairs. sink: [heads] or [batch, heads], or None. For
    small problems a tile spans many heads, for large problems some rows of a single head.
    """
    batch, heads, M, d = q.shape
    if batch * heads * M == 0:
        return
    N, group = k.shape[2], heads // k.shape[1]
    q, k, v = flat(q), flat(k), flat(v)
    sinks = None if sink is None else np.broadcast_to(sink, (batch, heads)).astype(float).ravel()
    some_rows = max(_TILE_ROWS, _TILE_SCORES // max(N, d, 1))
    some_heads = max(1, _TILE_SCORES // (M * max(N, d, 1)))
    for first_head in range(0, batch * heads, some_heads):
        some = slice(first_head, min(first_head + some_heads, batch * heads))
        its_heads = np.arange(some.start, some.stop)
        key_heads = its_heads // group
        keys, values = k[key_heads].astype(np.float64), v[key_heads].astype(np.float64)
        for first in range(0, M, some_rows):
            rows = slice(first, min(first + some_rows, M))
            seen, masked = _mask(rows, N, causal_offset, window_offset)
            place = mods.place(
                its_heads[:, None, None] // heads,
                its_heads[:, None, None] % heads,
                np.arange(rows.start, rows.stop)[:, None],
                np.arange(seen.start, seen.stop),
            )
            shape = len(its_heads), rows.stop - rows.start, seen.stop - seen.start
            masked, unsure = mods.hidden(place, masked, shape)
            yield Tile(
                where=(some, rows),
                key_heads=key_heads,
                keys=seen,
                q=q[some, rows].astype(np.float64),
                k=keys[:, seen],
                v=values[:, seen],
                masked=masked,
                unsure=unsure,
                scale=scale,
                mods=mods,
                place=place,
                sink=None if sinks is None else sinks[some, None, None],
                kept=mods.kept(place),
            )


@np.errstate(all="ignore")
def attend(
    tile: Tile, precision: str = "float64", *, scaled: str = "K", e4m3_inputs: bool = False
) -> tuple[Array, Array, Array]:
    """Computes the attention of one tile; see `attention`.

    scaled: "K" multiplies keys by the scale and rounds modified scores; "S" multiplies scores, and
    rounds them before the expressions, like a kernel that stores S. Results differ only below
    float64. e4m3_inputs: whether Q, K and V are e4m3 numbers times descales, and are not rounded.
    Returns out [n, rows, dv], lse [n, rows] and P [n, rows, keys] before dropout, in float64 for
    the precision "float64", else in float32.
    """
    results = "float32" if precision == "float8_e4m3" else precision
    scores = masked_scores(tile, precision, scaled=scaled, e4m3_inputs=e4m3_inputs)
    v = rounded(tile.v, results if e4m3_inputs else precision)
    P, lse = _softmax(scores, tile.sink)
    if tile.masked is not None:
        np.copyto(P, 0.0, where=tile.masked)  # one NaN score makes the entire row NaN
    P = rounded(P, precision)
    out = rounded(sum_unmasked(tile.dropped(P), v, tile.masked), results)
    out[np.isnan(lse)] = np.nan
    return out, lse, P


def masked_scores(
    tile: Tile, precision: str = "float64", *, scaled: str = "K", e4m3_inputs: bool = False
) -> Array:
    """Computes a tile's modified scores, -inf where masked; the arguments are those of `attend`."""
    results = "float32" if precision == "float8_e4m3" else precision
    q, k = (rounded(x, results if e4m3_inputs else precision) for x in (tile.q, tile.k))
    k, scale = (rounded(k * tile.scale, precision), 1.0) if scaled == "K" else (k, tile.scale)
    exact = "float64" if precision == "float64" else "float32"
    before, after = (exact, results) if scaled == "K" else (results, exact)
    scores = rounded(tile.modified(rounded((q @ k.mT) * scale, before)), after)
    if tile.masked is not None:
        np.copyto(scores, -np.inf, where=tile.masked)
    return scores


@np.errstate(all="ignore")
def largest_scores(tile: Tile, **how: Any) -> Array:
    """Computes a tile's row maxima [n, rows]; the arguments are those of `attend`.

    The maximum of a row whose keys are all masked is -inf. Where lse is NaN, so is the maximum.
    """
    largest = masked_scores(tile, **how).max(-1, initial=-np.inf)
    _, lse, _ = attend(tile, **how)
    return np.where(np.isnan(lse), np.nan, largest)


@dataclass(frozen=True)
class Gradients:
    """One tile's contributions to the gradients, with intermediate results, all in float64.

    scores, P, dP_delta, dS [n, rows, keys]: the modified scores, P before dropout, dP - D, and dS;
    all are 0 for pairs that `left_out` excludes.
    dq [n, rows, d], dk [n, keys, d], dv [n, keys, dv].
    dsink [n, rows]: the terms of dsink; None without sinks.
    """

    scores: Array
    P: Array
    dP_delta: Array
    dS: Array
    left_out: Array
    dq: Array
    dk: Array
    dv: Array
    dsink: Array | None


@np.errstate(all="ignore")
def differentiate(tile: Tile, grad: Array, out: Array, lse: Array, dlse: Array) -> Gradients:
    """Computes one tile's gradients from the results of a forward pass.

    grad (the gradient of out) and out [n, rows, dv], lse and dlse [n, rows]: float64.
    """
    left_out = np.isneginf(lse)[..., None]
    left_out = np.broadcast_to(
        left_out if tile.masked is None else tile.masked | left_out, (*lse.shape, tile.k.shape[1])
    )
    scores, derivative = (tile.q @ tile.k.mT) * tile.scale, None
    if tile.mods.score_steps:
        scores, derivative = tile.mods.differentiated(scores, tile.place, tile.masked)
    P = _weights(scores, lse[..., None])
    delta = (grad * out).sum(-1) - dlse
    dP_delta = tile.dropped(grad @ tile.v.mT) - delta[..., None]
    dS = P * dP_delta
    if derivative is not None:
        dS *= derivative
        np.copyto(dS, 0.0, where=P == 0)
    for x in (scores, P, dP_delta, dS):
        np.copyto(x, 0.0, where=left_out)
    dsink = None
    if tile.sink is not None:
        dsink = np.where(np.isneginf(lse), 0.0, -weight_of_sink(tile.sink, lse) * delta)
    return Gradients(
        *(scores, P, dP_delta, dS, left_out),
        dq=sum_unmasked(dS, tile.k, left_out) * tile.scale,
        dk=sum_unmasked(dS.mT, tile.q, left_out.mT) * tile.scale,
        dv=sum_unmasked(tile.dropped(P).mT, grad, left_out.mT),
        dsink=dsink,
    )


def weight_of_sink(sink: Array, lse: Array) -> Array:
    """Returns the softmax weight of each row's sink [n, rows]; 0 where lse is -inf."""
    return np.where(np.isneginf(lse), 0.0, _weights(sink[..., 0], lse))


def _weights(scores: Array, lse: Array) -> Array:
    """Returns exp(scores - lse), but 1 where a score exceeds a huge lse because of rounding."""
    below = scores - lse
    return np.exp(np.where((np.abs(lse) >= HUGE) & (below > 0), 0.0, below))


def rounded(x: Array, precision: str) -> Array:
    """Rounds x to the nearest numbers of `precision`; ties go to even, in tf32 away from 0.

    float64 is rounded to float32 first, as on a GPU. For float8_e4m3 each matrix (the last two
    axes) is scaled by a power of two, so that its largest finite element lies between 224 and 448,
    the largest number of e4m3. Infinity becomes NaN, because e4m3 has no infinity.
    Returns float64 for "float64", and float32, which represents the result exactly, otherwise.
    """
    if precision not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise ValueError(f"precision {precision!r} is unknown; use one of {known}")
    if precision == "float64":
        return x.astype(np.float64, copy=False)
    if precision == "bfloat16":
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)
    x = x.astype(np.float32, copy=False)
    return _ROUNDED[precision](x) if precision in _ROUNDED else x


def _softmax(scores: Array, sink: Array | None = None) -> tuple[Array, Array]:
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    if sink is not None:
        sink = sink.astype(scores.dtype)
        top = np.maximum(top, sink)
    top[np.isneginf(top)] = 0.0  # exp(-inf - 0) = 0, but exp(-inf - -inf) is NaN
    P = np.exp(scores - top)
    total = P.sum(-1, keepdims=True)
    if sink is not None:
        total += np.exp(sink - top)
    P /= np.where(total == 0.0, 1.0, total).astype(total.dtype)
    return P, (top + np.log(total))[..., 0]


def sum_unmasked(P: Array, values: Array, masked: Array | None) -> Array:
    """Computes P @ values and skips masked products, because 0 * NaN is not 0.

    P [n, rows, keys], values [n, keys, columns], masked broadcastable to P or None.
    """
    finite = np.isfinite(values)
    if finite.all():
        return P @ values
    result = P @ np.where(finite, values, 0)
    masked = np.broadcast_to(False if masked is None else masked, P.shape)
    for head, key in np.argwhere(~finite.all(-1)):
        rest = np.where(finite[head, key], 0, values[head, key])
        seen = ~masked[head, :, key]
        result[head, seen] += P[head, seen, key, None] * rest
    return result


def _mask(
    rows: slice, N: int, causal_offset: int | None, window_offset: int | None
) -> tuple[slice, Array | None]:
    """Returns the slice of keys that `rows` may see, and the mask [rows, keys] of this slice."""
    if causal_offset is None and window_offset is None:
        return slice(0, N), None
    stop = N if causal_offset is None else min(max(rows.stop + causal_offset, 0), N)
    start = 0 if window_offset is None else min(max(rows.start + window_offset, 0), stop)
    row, key = np.arange(rows.start, rows.stop)[:, None], np.arange(start, stop)
    masked = np.zeros((row.size, key.size), bool)
    if causal_offset is not None:
        masked |= key > row + causal_offset
    if window_offset is not None:
        masked |= key < row + window_offset
    return slice(start, stop), masked


def _rounded_to_tf32(x: Array) -> Array:
    """Rounds float32 to 10 of its 23 mantissa bits, like cvt.rna.

    A carry increments the exponent, so numbers above the largest finite number become infinite.
    """
    bits = x.view(np.uint32)
    kept = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    np.copyto(kept, x, where=np.isnan(x))
    return kept


def _rounded_to_float16(x: Array) -> Array:
    """Rounds float32 to float16 precision; NumPy casts are several times slower.

    float32 numbers from 2**(e + 13) to 2**(e + 14) have the spacing of float16 numbers with
    exponent e, so adding and subtracting 1.5 * 2**(e + 13) rounds x. The smallest e is -14.
    """
    exponent = (x.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)
    power = np.maximum(exponent, np.float32(2**-14), out=exponent)
    power *= np.float32(1.5 * 2**13)
    kept = x + power
    kept -= power
    if not (x.min(initial=0) >= -65504 and x.max(initial=0) <= 65504):  # the largest float16
        np.copyto(kept, np.copysign(np.float32(np.inf), x), where=np.abs(x) >= 65520)
    return kept


def _rounded_to_e4m3(x: Array) -> Array:
    size = np.abs(np.where(np.isfinite(x), x, 0)).max((-2, -1), keepdims=True, initial=0)
    mantissa, exponent = np.frexp(size)
    shift = np.where(size > 0, exponent + (mantissa > 0.875), -126) - 9  # 448 is 0.875 * 2**9
    with np.errstate(all="ignore"):
        kept = np.ldexp(x, -shift).astype(ml_dtypes.float8_e4m3fn)
    return np.ldexp(kept.astype(np.float32), shift)


_ROUNDED = {
    "tf32": _rounded_to_tf32,
    "float16": _rounded_to_float16,
    "float8_e4m3": _rounded_to_e4m3,
}


def flat(x: Array) -> Array:
    """Flattens the batch and head axes into one; returns a view where possible."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def add_to_heads(total: Array, tile: Tile, terms: Array) -> None:
    """Adds terms [n, keys, ...] to `total` at the key head of each of the tile's n heads."""
    for head, term in zip(tile.key_heads, terms, strict=True):
        total[head, tile.keys] += term
