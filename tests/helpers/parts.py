"""NumPy model of split-float32 kernels: scaling, flags, and the truncating sums of tensor cores."""

from dataclasses import dataclass

import numpy as np

LOW = 2.0**11  # low parts are stored multiplied by this
FRACTION, TOGETHER = 25, 16  # Hopper's tensor cores add 16 products with 25 fraction bits
SECTION = 8192  # number of keys that are summed before the sums start again from zero


@dataclass
class Parts:
    """Numbers scaled by powers of two and split into high + low / 2**11, both float16."""

    high: np.ndarray
    low: np.ndarray

    @classmethod
    def of(cls, x):
        """Splits floats that have already been scaled by a power of two."""
        high = x.astype(np.float16)
        rest = (x - high.astype(np.float32)) * np.float32(LOW)
        return cls(high, rest.astype(np.float16))


@dataclass
class Operands:
    """Scaled and split operands of one head, as split_operands computes them."""

    Q: Parts
    K: Parts
    V: Parts
    V_exponents: np.ndarray
    scale2: np.ndarray
    flags: np.ndarray


def exponents(x):
    """Returns the exponents of non-negative floats, -127 for zero and subnormal ones."""
    _, found = np.frexp(x)
    return np.where(x < 2.0**-126, -127, found - 1)


def times_two_to(x, power):
    return np.ldexp(x.astype(np.float64), power).astype(np.float32)


def mean_cut(columns):
    """Returns the mean relative loss when a product over this many columns is truncated."""
    return -(-columns // TOGETHER) * 0.25 * 0.72 * 2.0**-23


def split(q, k, v, scale):
    """Scales and splits the floats of one head: q [M, d], k [N, d], v [N, dv]."""

    def finite(x):
        return np.where(np.isfinite(x), x, np.float32(0))

    columns = [exponents(np.abs(finite(x)).max(0, initial=0)) for x in (k, v)]
    of_numbers = exponents(np.abs(finite(q))) + columns[0]
    rows = of_numbers.max(1)
    q_powers = 14 + columns[0] - rows[:, None]
    with np.errstate(under="ignore", over="ignore"):
        factor = float(np.float32(abs(scale)) * np.float32(np.log2(np.e)))
        scale2 = np.ldexp(np.float32(factor * (1 + mean_cut(q.shape[1]))), rows - 28)
        scale2 = np.clip(scale2, 2.0**-126, np.finfo(np.float32).max).astype(np.float32)
        flags = np.ldexp(float(np.float32(abs(scale))), rows) > 2.0**22
    flags |= ~np.isfinite(q).all(1) | ~np.isfinite(k).all() | ~np.isfinite(v).all()
    return Operands(
        Parts.of(np.float32(np.sign(scale)) * times_two_to(finite(q), q_powers)),
        Parts.of(times_two_to(finite(k), 14 - columns[0])),
        Parts.of(times_two_to(finite(v), 14 - columns[1])),
        *(columns[1], scale2, flags),
    )


def cut(x):
    """Truncates float64 numbers to the precision of float32."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.trunc(mantissa * 2.0**24), exponent - 24)


def add_products(sums, products):
    """Adds products [..., TOGETHER] to sums [...] as a tensor core does."""
    terms = np.concatenate([products, sums[..., None]], -1)
    _, exponent = np.frexp(np.abs(terms).max(-1, keepdims=True))
    unit = np.ldexp(1.0, exponent - 1 - FRACTION)
    return cut((np.trunc(terms / unit) * unit).sum(-1))


def probes():
    """Returns products [rows, TOGETHER] and sums [rows] that reveal how a tensor core adds."""
    rows = [
        ([1] + 15 * [2.0**-24], 0),  # are all products added before the truncation to float32?
        ([1, 2.0**-24, *7 * [0], 2.0**-24], 0),  # are both halves added at once?
        (16 * [2.0**-25], 1),  # are two bits beyond float32 kept?
        (16 * [2.0**-26], 1),  # is a third bit kept?
        ([1.9 * 2.0**-24], 1),  # is the sum truncated or rounded?
        ([-(2.0**-26)], 1),
        ([-1] + 15 * [-(2.0**-24)], 0),  # are negative sums truncated towards zero?
        ([1, -1] + 14 * [2.0**-26], 0),  # do terms that cancel determine the alignment?
        (16 * [3 * 2.0**-36], 0),  # are subnormal factors in float16 kept?
    ]
    products = np.zeros((len(rows), TOGETHER))
    for products_of_row, (given, _) in zip(products, rows):
        products_of_row[: len(given)] = given
    return products, np.array([x for _, x in rows], np.float32)


def multiply(a, b, sums=None):
    """Multiplies a [m, n] by b [n, k] as tensor cores do, and adds the products to sums."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    sums = np.zeros((len(a), b.shape[1])) if sums is None else sums
    for i in range(0, a.shape[1], TOGETHER):
        end = i + TOGETHER
        sums = add_products(sums, a[:, None, i:end] * b.T[None, :, i:end])
    return sums


def multiply_parts(a, b):
    """Multiplies two Parts; sums the products with low parts separately."""
    rest = multiply(a.low, b.high, multiply(a.high, b.low))
    return np.float32(multiply(a.high, b.high) + rest / LOW)


def attention(q, k, v, scale, tile=64, seed=0, visible=None):
    """Computes O, lse and flags of one head; visible [M, N] marks the unmasked pairs.

    Exponentials have relative errors of up to 2**-23. Each section of keys has its own sums.
    """
    rng, f = np.random.default_rng(seed), np.float32
    of = split(q, k, v, scale)
    unit = of.scale2[:, None]
    out = np.zeros((len(q), v.shape[1]), f)
    maximum, total = np.full((len(q), 1), -np.finfo(f).max), np.zeros((len(q), 1), f)
    earlier = 0, 0  # out and total of earlier sections

    def exp2(x):
        with np.errstate(under="ignore"):
            return f(np.exp2(x.astype(np.float64)) * (1 + rng.uniform(-1, 1, x.shape) * 2.0**-23))

    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, len(k), tile):
            keys = slice(first, first + tile)
            K, V = (Parts(x.high[keys], x.low[keys]) for x in (of.K, of.V))
            S = multiply_parts(of.Q, Parts(K.high.T, K.low.T)).astype(np.float64)
            if visible is not None:
                S = np.where(visible[:, keys], S, -np.inf)
            top = f(S.max(1, keepdims=True) * unit - 15)
            origin = np.maximum(top, -np.finfo(f).max)
            now = np.maximum(maximum, origin)
            P = exp2(f(S * unit - origin))
            factor, weight = exp2(maximum - now), exp2(origin - now) * f(2.0**-15)
            out, total = out * factor, total * factor + P.sum(1, keepdims=True, dtype=f) * weight
            earlier = earlier[0] * factor, earlier[1] * factor
            out = f(multiply_parts(Parts.of(P), V) * weight.astype(np.float64) + out)
            maximum = now
            if (first + tile) % SECTION == 0:
                earlier = earlier[0] + out, earlier[1] + total
                out, total = np.zeros_like(out), np.zeros_like(total)
        out, total = earlier[0] + out, earlier[1] + total
        out /= np.where(total > 0, total, 1)
        n = len(k) if visible is None else visible.sum(1, keepdims=True)
        least = f(2.0**-8) / np.sqrt(total * np.maximum(n, 1))
        used = of.V_exponents > -127
        small = ((np.abs(out) < least) & used).any(1) & (total[:, 0] > 0)
        counts = (np.abs(times_two_to(v, 14 - of.V_exponents)) < 2.0**-10 * len(k) ** 0.5).sum(0)
        half = 2.0 ** (np.floor(np.log2(np.maximum(total, 1))) - 1)
        few = (counts < np.maximum(half, 1)) & (total >= 1)
        small &= ~(few | (np.abs(out) >= 2.0**-8) | ~used).all(1)
        flags = of.flags | small | ~(np.abs(maximum[:, 0] + 15) < 2.0**24) & (total[:, 0] > 0)
        lse = (maximum[:, 0] + 15) * np.log(2) + np.log(total[:, 0].astype(np.float64))
    return times_two_to(out, of.V_exponents - 14), f(lse), flags


@dataclass
class Gradient:
    """Scaled and split dO of one head, as split_gradient computes it."""

    dO: Parts
    exponents: np.ndarray
    delta: np.ndarray
    flags: np.ndarray


def split_gradient(do, out, of):
    """Splits dO of one head, scaled for products with V; ``of`` holds the head's Operands."""
    powers = exponents(np.abs(do)) + of.V_exponents
    rows = powers.max(1)
    dO = Parts.of(times_two_to(do, 14 + of.V_exponents - rows[:, None]))
    delta, size = ((do * out).sum(1), np.abs(do * out).sum(1))
    with np.errstate(under="ignore"):
        small = (rows < -60) | (rows > 55) | (size < np.ldexp(2.0**-22, rows))
    return Gradient(dO, rows, delta, of.flags | (small & (do != 0).any(1)))


def sum_tiles(weights, B, has_numbers, tile):
    """Multiplies weights [m, n] by B [n, k] tile by tile; flags rows that lost accuracy.

    has_numbers [k] marks the columns of B with nonzero numbers. A small sum in such a column is
    suspicious if it also has small numbers, or if all weights are tiny.
    """
    sums, top = np.zeros((len(weights), B.high.shape[1]), np.float32), np.zeros(len(weights))
    for first in range(0, weights.shape[1], tile):
        own = weights[:, first : first + tile]
        largest = np.abs(own).max(1)
        power = np.maximum(exponents(largest), -112)[:, None]
        rows = slice(first, first + tile)
        product = multiply_parts(
            Parts.of(times_two_to(own, 14 - power)), Parts(B.high[rows], B.low[rows])
        )
        sums = np.float32(np.ldexp(product.astype(np.float64), power - 14) + sums)
        top = np.maximum(top, largest)
    least = np.where(top == 0, 0, np.maximum(top, 2.0**-112) * 2.0**-10)[:, None]
    terms = (np.abs(B.high) < 2.0**-10).any(0) | (top < 2.0**-112)[:, None]
    return sums, ((np.abs(sums) < least) & has_numbers & terms).any(1)


def column_words(x, high):
    """Returns the 32 words of column_bits.cuh for an array [rows, columns] and its high parts."""
    words, columns = np.zeros(32, np.uint32), np.arange(x.shape[1])
    bits = np.uint32(1) << np.uint32(columns // 64 * 2 + columns % 2)
    for found, up in (((x != 0).any(0), 0), ((np.abs(high) < 2.0**-10).any(0), 16)):
        np.bitwise_or.at(words, columns[found] // 2 % 32, bits[found] << np.uint32(up))
    return words


@np.errstate(over="ignore", under="ignore", invalid="ignore")
def gradients(q, k, v, out, lse, do, scale, tile=32, seed=0):
    """Computes dQ, dK and dV of one head, each with flags for its rows."""
    rng, f = np.random.default_rng(seed), np.float32
    of = split(q, k, v, scale)
    grad = split_gradient(do, out, of)

    def transposed(parts):
        return Parts(parts.high.T, parts.low.T)

    S = multiply_parts(of.Q, transposed(of.K)).astype(np.float64)
    lse2 = f(lse * f(np.log2(np.e)))[:, None]
    P = np.exp2(f(S * of.scale2[:, None] - lse2).astype(np.float64))
    P = f(P * (1 + rng.uniform(-1, 1, P.shape) * 2.0**-23))
    dP = multiply_parts(grad.dO, transposed(of.V)).astype(np.float64)
    # dP and dS are scaled by 2**60.
    dP = np.ldexp(dP, grad.exponents[:, None] + 32)
    dS = f(P * f(dP - np.ldexp(grad.delta.astype(np.float64), 60)[:, None]))
    of_dV = f(P * np.ldexp(1.0, grad.exponents + 32)[:, None])
    of_dK = f(dS * of.scale2[:, None])
    k_powers = exponents(np.abs(k).max(0))
    dQ, dQ_flags = sum_tiles(dS, of.K, (k != 0).any(0), tile)
    dK, dK_flags = sum_tiles(of_dK.T, of.Q, (q != 0).any(0), tile)
    dV, dV_flags = sum_tiles(of_dV.T, grad.dO, (do != 0).any(0), tile)
    return (
        (times_two_to(dQ, k_powers - 74) * f(scale), dQ_flags | grad.flags),
        (times_two_to(dK, -46 - k_powers) * f(np.log(2)), dK_flags | grad.flags.any()),
        (times_two_to(dV, -46 - of.V_exponents), dV_flags | grad.flags.any()),
    )


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def power(rng, *shape, low=-20, high=20):
    return (10.0 ** rng.uniform(low, high, shape)).astype(np.float32)


def one_hot(rng, q, k, v, size):
    row = np.arange(v.shape[-2])
    return size * q, size * k, 0 * v + (row[:, None] % v.shape[-1] == np.arange(v.shape[-1]))


def cancelling(rng, q, k, v):
    """Makes pairs of equal keys with opposite values, so that O is 0."""
    signs = np.resize([1, -1], (v.shape[-2], 1))
    k, v = (np.repeat(x[..., ::2, :], 2, -2) for x in (k, v))
    return q, k, v * signs


def of_columns(rng, q, k, v):
    u = power(rng, q.shape[-1])
    return q * u, k / u, v


# Transformations of normal inputs into inputs that split operands represent accurately.
HELD = {
    "normal": lambda rng, q, k, v: (q, k, v),
    "large": lambda rng, q, k, v: (30 * q, 30 * k, v),
    "huge": lambda rng, q, k, v: (50 * q, 50 * k, v),
    "uniform": lambda rng, q, k, v: tuple(rng.random(x.shape) for x in (q, k, v)),
    "equal": lambda rng, q, k, v: (q, np.repeat(k[..., :1, :], k.shape[-2], -2), v),
    "outliers": lambda rng, q, k, v: tuple(
        x + 10 * normal(rng, *x.shape) * (rng.random(x.shape) < 0.001) for x in (q, k, v)
    ),
    "columns of V": lambda rng, q, k, v: (q, k, v * power(rng, v.shape[-1])),
    "columns of Q and K": of_columns,
    "small Q and K": lambda rng, q, k, v: (
        *(x * power(rng, *x.shape, high=0) for x in (q, k)),
        v,
    ),
    "rows of K": lambda rng, q, k, v: (q, k * power(rng, k.shape[-2], 1, low=-8, high=0), v),
    "one_hot": lambda rng, q, k, v: one_hot(rng, q, k, v, 1),
    "cancelling": cancelling,
}
# Transformations into inputs with rows that split operands cannot represent accurately.
NOT_HELD = {
    "one_hot, twice": lambda rng, q, k, v: one_hot(rng, q, k, v, 2),
    "elements of V": lambda rng, q, k, v: (q, k, v * power(rng, *v.shape)),
    "one_hot, 6 times": lambda rng, q, k, v: one_hot(rng, q, k, v, 6),
    "one_hot, 8 times": lambda rng, q, k, v: one_hot(rng, q, k, v, 8),
}
