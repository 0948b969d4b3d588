"""Attention and softmax in NumPy: the definitions that every kernel is compared with.

With scores S = scale * Q @ K.T, of which the mask hides some,

    P = softmax(S)    O = P @ V    lse = log(sum(exp(S)))    (over the keys)

and, for the gradient dO that arrives at O (Dao et al., FlashAttention, 2022, appendix B.2),

    dV = P.T @ dO               dS = P * (dO @ V.T - rowsum(dO * O))
    dQ = scale * dS @ K         dK = scale * dS.T @ Q

What a call means where arithmetic alone does not say:

- A hidden key never matters, nor does its value, even if they are NaN or infinite.
- A query with no visible key, or only scores of -inf, has O = 0, lse = -inf and no gradient.
- A visible score of NaN or +inf makes O and lse of its query NaN, and those of no other query.

The scores are made a tile at a time, so that [batch, heads, M, N] numbers never exist at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

PRECISIONS = ("float64", "float32", "tf32", "bfloat16", "float16", "float8_e4m3")

_TILE_SCORES = 1 << 18  # scores of a tile: 2 MiB of float64, which a core's cache holds
_TILE_ROWS = 64  # the fewest rows of a tile of long sequences, so that the products stay efficient


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    diagonal: int | None = None,
    lower: int | None = None,
    precision: str = "float64",
) -> tuple[Array, Array]:
    """The attention of queries to keys, and the log-sum-exp of their scores.

    q [batch, heads, M, d], k [batch, kv_heads, N, d] and v [batch, kv_heads, N, dv], of any
    floating dtype; heads is a multiple of kv_heads, and query head h reads key head
    h // (heads // kv_heads). Query i sees the keys i + lower <= j <= i + diagonal; None is no
    limit. A causal mask has the diagonal N - M if it is aligned with the bottom right of the
    scores, 0 if with the top left; a window adds to that, and subtracts from it for lower.

    With precision "float64" every step is taken in float64. With another name of PRECISIONS the
    inputs and the result of every step are rounded to that precision, and sums are accumulated in
    float32: what a framework computes that has no fused kernel. Of "float8_e4m3" these are Q, K, V
    and P, the operands of products; what products give stays float32.

    Returns out [batch, heads, M, dv] and lse [batch, heads, M] (natural logarithm), both as
    float64 arrays. Of another precision, out holds values rounded to it, lse values of float32.

    Raises ValueError if `precision` is unknown.
    """
    batch, heads, M, _ = q.shape
    out, lse = np.zeros((batch, heads, M, v.shape[-1])), np.full((batch, heads, M), -np.inf)
    flat_out, flat_lse = flat(out), flat(lse)
    for tile in tiles(q, k, v, diagonal, lower):
        flat_out[tile.where], flat_lse[tile.where], _ = attend(tile, scale, precision)
    return out, lse


@np.errstate(all="ignore")
def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    diagonal: int | None = None,
    lower: int | None = None,
    out: Array | None = None,
    lse: Array | None = None,
) -> tuple[Array, Array, Array]:
    """The gradients of q, k and v, for the gradient `dout` [batch, heads, M, dv] of the output.

    out [batch, heads, M, dv] and lse [batch, heads, M] are what the forward pass left, rounded as
    it may be; without them they are computed. The other arguments are those of `attention`.
    Returns float64 arrays shaped like q, k and v; those of k and v are sums over the query heads
    that share a key head.
    """
    grads = tuple(np.zeros(x.shape) for x in (q, k, v))
    dq, dk, dv = (flat(x) for x in grads)
    for tile in tiles(q, k, v, diagonal, lower):
        grad = flat(dout)[tile.where].astype(np.float64)
        if out is None or lse is None:
            its_out, its_lse, _ = attend(tile, scale)
        else:
            its_out, its_lse = (flat(x)[tile.where].astype(np.float64) for x in (out, lse))
        step = differentiate(tile, grad, its_out, its_lse, scale)
        keys = tile.key_heads, tile.keys
        dq[tile.where] = step.dq
        add_to_heads(dk, keys, step.dk)
        add_to_heads(dv, keys, step.dv)
    return grads[0], grads[1], grads[2]


@np.errstate(all="ignore")
def softmax(x: Array, precision: str = "float64") -> tuple[Array, Array]:
    """The softmax y of x over its last axis, and the log-sum-exp of that axis.

    x [..., N] of any floating dtype; y [..., N] and lse [...] as float64 arrays. With a precision
    below float64, x and y are rounded to it, and what lies between is computed in float32.

    A row of -inf, or of no element, has y = 0 and lse = -inf. NaN or +inf makes its row NaN.
    """
    y, lse = _softmax(rounded(x, precision))
    return rounded(y, precision).astype(np.float64), lse.astype(np.float64)


@dataclass(frozen=True)
class Tile:
    """Some rows of q of some heads, and the keys from the first to the last that one may see.

    where: which heads (batch and heads counted as one axis) and which rows.
    key_heads [n]: the head of k and v for each head of the tile (batch and kv_heads as one axis).
    keys: which of the N keys.
    q [n, rows, d], k [n, keys, d], v [n, keys, dv]: float64.
    hidden [rows, keys]: True where the mask hides the key from the row; None without a mask.
    """

    where: tuple[slice, slice]
    key_heads: Array
    keys: slice
    q: Array
    k: Array
    v: Array
    hidden: Array | None

    @property
    def visible_keys(self) -> Array:
        """How many keys each row sees, [rows, 1]."""
        rows, keys = self.q.shape[1], self.k.shape[1]
        if self.hidden is None:
            return np.full((rows, 1), keys)
        return keys - self.hidden.sum(-1, keepdims=True)


def tiles(
    q: Array, k: Array, v: Array, diagonal: int | None = None, lower: int | None = None
) -> Iterator[Tile]:
    """Cuts an attention problem into tiles; together they hold every row of q once.

    The arguments are those of `attention`. A tile holds many heads of a small problem, or some
    rows of one head of a large one.
    """
    batch, heads, M, d = q.shape
    if batch * heads * M == 0:
        return
    N, group = k.shape[2], heads // k.shape[1]
    q, k, v = flat(q), flat(k), flat(v)
    some_rows = max(_TILE_ROWS, _TILE_SCORES // max(N, d, 1))
    some_heads = max(1, _TILE_SCORES // (M * max(N, d, 1)))
    for first_head in range(0, batch * heads, some_heads):
        some = slice(first_head, min(first_head + some_heads, batch * heads))
        key_heads = np.arange(some.start, some.stop) // group
        keys, values = k[key_heads].astype(np.float64), v[key_heads].astype(np.float64)
        for first in range(0, M, some_rows):
            rows = slice(first, min(first + some_rows, M))
            seen, hidden = _mask(rows, N, diagonal, lower)
            queries = q[some, rows].astype(np.float64)
            yield Tile(
                (some, rows), key_heads, seen, queries, keys[:, seen], values[:, seen], hidden
            )


@np.errstate(all="ignore")
def attend(
    tile: Tile, scale: float, precision: str = "float64", *, scaled: str = "K"
) -> tuple[Array, Array, Array]:
    """The attention of one tile, as `attention` describes it.

    scaled: "K" multiplies the keys by the scale, "S" the scores. This matters below float64 only:
    scaled keys are rounded, scores that are scaled are rounded only once.

    Returns out [n, rows, dv], lse [n, rows] and the weights P [n, rows, keys]: float64 arrays for
    the precision "float64", else float32.
    """
    q, k, v = (rounded(x, precision) for x in (tile.q, tile.k, tile.v))
    results = "float32" if precision == "float8_e4m3" else precision
    if scaled == "K":
        scores = rounded(q @ rounded(k * scale, precision).mT, results)
    else:
        scores = rounded((q @ k.mT) * scale, results)
    if tile.hidden is not None:
        np.copyto(scores, -np.inf, where=tile.hidden)
    weights, lse = _softmax(scores)
    if tile.hidden is not None:
        np.copyto(weights, 0.0, where=tile.hidden)  # in a row of NaN they are not yet zero
    weights = rounded(weights, precision)
    out = rounded(_sum_visible(weights, v, tile.hidden), results)
    out[np.isnan(lse)] = np.nan
    return out, lse, weights


@dataclass(frozen=True)
class Gradients:
    """What one tile gives, float64.

    scores, weights, slopes, dscores [n, rows, keys]: S, P, the gradient of P less its mean in the
    row, and dS = P * slopes; 0 where a pair does not count. unseen is True there.
    dq [n, rows, d], dk [n, keys, d], dv [n, keys, dv].
    """

    scores: Array
    weights: Array
    slopes: Array
    dscores: Array
    unseen: Array
    dq: Array
    dk: Array
    dv: Array


@np.errstate(all="ignore")
def differentiate(tile: Tile, grad: Array, out: Array, lse: Array, scale: float) -> Gradients:
    """The gradients that the rows of one tile give, by what the forward pass left of them.

    grad and out [n, rows, dv], lse [n, rows]: float64.
    """
    unseen = np.isneginf(lse)[..., None]
    unseen = np.broadcast_to(
        unseen if tile.hidden is None else tile.hidden | unseen,
        (*lse.shape, tile.k.shape[1]),
    )
    scores = (tile.q @ tile.k.mT) * scale
    weights = np.exp(scores - lse[..., None])
    slopes = grad @ tile.v.mT - (grad * out).sum(-1, keepdims=True)
    dscores = weights * slopes
    for x in (scores, weights, slopes, dscores):
        np.copyto(x, 0.0, where=unseen)
    return Gradients(
        scores,
        weights,
        slopes,
        dscores,
        unseen,
        dq=_sum_visible(dscores, tile.k, unseen) * scale,
        dk=_sum_visible(dscores.mT, tile.q, unseen.mT) * scale,
        dv=_sum_visible(weights.mT, grad, unseen.mT),
    )


def rounded(x: Array, precision: str) -> Array:
    """x with every element rounded to `precision`, to nearest: ties to even, of tf32 away from 0.

    float64 goes to precisions below float32 by way of float32, as it does on a GPU. float8_e4m3
    counts in a power of two for each matrix, the last two axes, with which its largest finite
    element lies between 224 and 448, where e4m3 ends; infinity becomes NaN, for it has none.
    Returns float64 for "float64" and float32 for the others, which float32 holds exactly.
    Raises ValueError if `precision` is not one of PRECISIONS.
    """
    match precision:
        case "float64":
            return x.astype(np.float64, copy=False)
        case "float32":
            return x.astype(np.float32, copy=False)
        case "tf32":
            return _rounded_to_tf32(x.astype(np.float32, copy=False))
        case "bfloat16":
            return x.astype(ml_dtypes.bfloat16).astype(np.float32)
        case "float16":
            return _rounded_to_float16(x.astype(np.float32, copy=False))
        case "float8_e4m3":
            return _rounded_to_e4m3(x.astype(np.float32, copy=False))
    known = ", ".join(PRECISIONS)
    raise ValueError(f"precision {precision!r} is unknown; use one of {known}")


def _softmax(scores: Array) -> tuple[Array, Array]:
    """softmax and log-sum-exp over the last axis, in the dtype of `scores`."""
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    top[np.isneginf(top)] = 0.0  # exp(-inf - 0) = 0, where exp(-inf - -inf) would be NaN
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    weights /= np.where(total == 0.0, 1.0, total).astype(total.dtype)
    return weights, (top + np.log(total))[..., 0]


def _sum_visible(weights: Array, values: Array, hidden: Array | None) -> Array:
    """weights @ values, without the products that `hidden` marks: 0 * NaN would not be 0.

    weights [n, rows, keys], values [n, keys, columns], hidden broadcastable to weights or None.
    """
    finite = np.isfinite(values)
    if finite.all():
        return weights @ values
    result = weights @ np.where(finite, values, 0)
    hidden = np.broadcast_to(False if hidden is None else hidden, weights.shape)
    for head, key in np.argwhere(~finite.all(-1)):
        rest = np.where(finite[head, key], 0, values[head, key])
        seen = ~hidden[head, :, key]
        result[head, seen] += weights[head, seen, key, None] * rest
    return result


def _mask(
    rows: slice, N: int, diagonal: int | None, lower: int | None
) -> tuple[slice, Array | None]:
    """The keys that some row of `rows` may see; which row does not see which of them."""
    if diagonal is None and lower is None:
        return slice(0, N), None
    stop = N if diagonal is None else min(max(rows.stop + diagonal, 0), N)
    start = 0 if lower is None else min(max(rows.start + lower, 0), stop)
    row, key = np.arange(rows.start, rows.stop)[:, None], np.arange(start, stop)
    hidden = np.zeros((row.size, key.size), bool)
    if diagonal is not None:
        hidden |= key > row + diagonal
    if lower is not None:
        hidden |= key < row + lower
    return slice(start, stop), hidden


def _rounded_to_tf32(x: Array) -> Array:
    """float32 with the last 13 of its 23 mantissa bits rounded away, as cvt.rna does it.

    Adding half of what is left as the last bit carries into the exponent where it should, so that
    what lies beyond the largest number becomes infinite. Infinity and NaN stay.
    """
    bits = x.view(np.uint32)
    kept = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    np.copyto(kept, x, where=np.isnan(x))
    return kept


def _rounded_to_float16(x: Array) -> Array:
    """float32 as float16 holds it, without NumPy's casts, which are slow.

    Among numbers from 2**(e + 13) to 2**(e + 14) float32 is spaced as float16 is among those with
    the exponent e, so that adding 1.5 * 2**(e + 13) rounds. Exponents of float16 begin at -14; its
    largest number is 65504, and what is nearer to 65536 is infinite.
    """
    exponent = (x.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)
    power = np.maximum(exponent, np.float32(2**-14), out=exponent)
    power *= np.float32(1.5 * 2**13)
    kept = x + power
    kept -= power
    if not (x.min(initial=0) >= -65504 and x.max(initial=0) <= 65504):
        np.copyto(kept, np.copysign(np.float32(np.inf), x), where=np.abs(x) >= 65520)
    return kept


def _rounded_to_e4m3(x: Array) -> Array:
    """float32 as matrices of e4m3 hold it, each with a power of two of its own.

    Among numbers from 2**e to 2**(e + 1) e4m3 is spaced by 2**(e - 3), and by 2**-9 below 2**-6.
    """
    finite = np.isfinite(x)
    size = np.abs(np.where(finite, x, 0)).max((-2, -1), keepdims=True, initial=0)
    mantissa, exponent = np.frexp(size)
    top = np.where(size > 0, exponent + (mantissa > 0.875), -126)  # 448 is 0.875 * 2**9
    _, of_x = np.frexp(np.where(finite, x, 0))
    spacing = np.maximum(of_x - 4, top - 18).astype(np.int32)
    kept = np.ldexp(np.rint(np.ldexp(np.where(finite, x, 0), -spacing)), spacing)
    return np.where(finite, kept, np.nan).astype(np.float32)


def flat(x: Array) -> Array:
    """x with its two first axes, batch and heads, made one; a view where possible."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def add_to_heads(total: Array, where: tuple[Array, slice], terms: Array) -> None:
    """Adds terms [n, keys, …] to the heads and keys `where` of total; a head may occur twice."""
    heads, keys = where
    for head, term in zip(heads, terms, strict=True):
        total[head, keys] += term
