"""mma_fp16x2 in NumPy: parts, powers of two, flags, and the sums of tensor cores, which cut off."""

from dataclasses import dataclass

import numpy as np

LOW = 2.0**11  # times what a low part counts
FRACTION, TOGETHER = 25, 16  # bits and products of a sum of Hopper's tensor cores


@dataclass
class Parts:
    """x * 2**s as high + low / 2**11."""

    high: np.ndarray
    low: np.ndarray

    @classmethod
    def of(cls, x):
        """Of floats that were multiplied by their power of two."""
        high = x.astype(np.float16)
        rest = (x - high.astype(np.float32)) * np.float32(LOW)
        return cls(high, rest.astype(np.float16))


@dataclass
class Operands:
    """What split_operands makes of one head."""

    Q: Parts
    K: Parts
    V: Parts
    V_exponents: np.ndarray
    scale2: np.ndarray
    flags: np.ndarray


def exponents(x):
    """Those of magnitudes: -127 of 0 and of what is below the normal floats."""
    _, found = np.frexp(x)
    return np.where(x < 2.0**-126, -127, found - 1)


def times_two_to(x, power):
    return np.ldexp(x.astype(np.float64), power).astype(np.float32)


def split(q, k, v, scale):
    """Operands of one head: q [M, d], k [N, d], v [N, dv], floats."""

    def finite(x):
        return np.where(np.isfinite(x), x, np.float32(0))

    columns = [exponents(np.abs(finite(x)).max(0, initial=0)) for x in (k, v)]
    of_numbers = exponents(np.abs(finite(q))) + columns[0]
    rows = of_numbers.max(1)
    q_powers = 14 + columns[0] - rows[:, None]
    with np.errstate(under="ignore", over="ignore"):
        scale2 = np.ldexp(float(np.float32(abs(scale)) * np.float32(np.log2(np.e))), rows - 28)
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
    """float64 numbers with the bits of a float; the others are cut off."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.trunc(mantissa * 2.0**24), exponent - 24)


def add_products(sums, products):
    """What a tensor core makes of sums [...] and products [..., TOGETHER]."""
    terms = np.concatenate([products, sums[..., None]], -1)
    _, exponent = np.frexp(np.abs(terms).max(-1, keepdims=True))
    unit = np.ldexp(1.0, exponent - 1 - FRACTION)
    return cut((np.trunc(terms / unit) * unit).sum(-1))


def multiply(a, b, sums=None):
    """a [m, n] times b [n, k] on tensor cores, added to sums."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    sums = np.zeros((len(a), b.shape[1])) if sums is None else sums
    for i in range(0, a.shape[1], TOGETHER):
        end = i + TOGETHER
        sums = add_products(sums, a[:, None, i:end] * b.T[None, :, i:end])
    return sums


def multiply_parts(a, b):
    """The product of Parts: main sums, and those of low parts apart."""
    rest = multiply(a.low, b.high, multiply(a.high, b.low))
    return np.float32(multiply(a.high, b.high) + rest / LOW)


def attention(q, k, v, scale, tile=64, seed=0, visible=None):
    """O, lse and flags of one head; visible [M, N] are the pairs that a mask shows.

    An exponential is off by up to 2**-23.
    """
    rng, f = np.random.default_rng(seed), np.float32
    of = split(q, k, v, scale)
    unit = of.scale2[:, None]
    out = np.zeros((len(q), v.shape[1]), f)
    maximum, total = np.full((len(q), 1), -np.finfo(f).max), np.zeros((len(q), 1), f)

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
            out = f(multiply_parts(Parts.of(P), V) * weight.astype(np.float64) + out)
            maximum = now
        out /= np.where(total > 0, total, 1)
        n = len(k) if visible is None else visible.sum(1, keepdims=True)
        least = f(2.0**-8) / np.sqrt(total * np.maximum(n, 1))
        small = ((np.abs(out) < least) & (of.V_exponents > -127)).any(1) & (total[:, 0] > 0)
        flags = of.flags | small | ~(np.abs(maximum[:, 0] + 15) < 2.0**24) & (total[:, 0] > 0)
        lse = (maximum[:, 0] + 15) * np.log(2) + np.log(total[:, 0].astype(np.float64))
    return times_two_to(out, of.V_exponents - 14), f(lse), flags
