"""NumPy model of how Hopper's tensor cores sum products of e4m3."""

import ml_dtypes
import numpy as np

TOGETHER = 32  # number of products added at a time
BITS = 13  # number of fraction bits kept in a sum
KINDS = ("normal", "positive", "large", "outliers", "spread")


def drawn(kind, shape, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    if kind == "positive":
        x = rng.uniform(0.5, 1, shape)
    elif kind == "large":
        x *= 60
    elif kind == "outliers":
        x += (rng.random(shape) < 0.01) * rng.standard_normal(shape) * 20
    elif kind == "spread":
        x = np.sign(x) * 2 ** rng.uniform(-8, 8, shape)
    return x.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)


def _exponent(x, least):
    """Returns the exponents of x, raised to at least ``least``; for zero, -200."""
    return np.where(x == 0, -200, np.maximum(np.frexp(x)[1] - 1, least))


def _cut(x, exponent):
    return np.ldexp(np.trunc(np.ldexp(x, BITS - exponent)), exponent - BITS)


def multiplied(a, b):
    """Multiplies a [rows, depth] by the transpose of b [columns, depth]."""
    a, b = a.astype(float), b.astype(float)
    sums = np.zeros((len(a), len(b)))
    for first in range(0, a.shape[1], TOGETHER):
        x, y = (z[:, first : first + TOGETHER] for z in (a, b))
        terms = np.concatenate([x[:, None] * y, sums[..., None]], -1)
        powers = _exponent(x, -6)[:, None] + _exponent(y, -6)
        every = np.concatenate([powers, _exponent(sums, -150)[..., None]], -1)
        sums = _cut(terms, every.max(-1, keepdims=True)).sum(-1)
        sums = _cut(sums, _exponent(sums, -150))
    return sums
