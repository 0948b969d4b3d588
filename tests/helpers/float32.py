"""Evaluates expressions in float32 as kernels do: with derivatives and approximate functions."""

import math

import numpy as np

EPS = np.finfo(np.float32).eps
F = np.float32
LOG2E, LN2 = F(np.log2(np.e)), F(np.log(2))


class Dual:
    """A float32 value and its derivative with respect to the score, with kernels' operators."""

    def __init__(self, value, slope=0):
        self.value, self.slope = np.asarray(value, F), np.asarray(slope, F)

    @staticmethod
    def of(x):
        return x if isinstance(x, Dual) else Dual(x)

    def chain(self, value, by):
        return Dual(value, np.where(self.slope == 0, F(0), by * self.slope))

    def __add__(self, other):
        other = Dual.of(other)
        return Dual(self.value + other.value, self.slope + other.slope)

    def __mul__(self, other):
        other = Dual.of(other)
        slope = self.slope * other.value + self.value * other.slope
        return Dual(self.value * other.value, slope)

    def __truediv__(self, other):
        r = reciprocal(Dual.of(other).value)
        slope = self.slope * r - self.value * r * r * Dual.of(other).slope
        return Dual(self.value * r, slope)

    def __neg__(self):
        return Dual(-self.value, -self.slope)

    def __sub__(self, other):
        return self + -Dual.of(other)

    def __rsub__(self, other):
        return Dual(other) - self

    def __rtruediv__(self, other):
        return Dual(other) / self

    def __pow__(self, two):
        assert two == 2
        return self * self

    def __abs__(self):
        return self.chain(np.abs(self.value), np.sign(self.value))

    def __lt__(self, other):
        return self.value < Dual.of(other).value

    def __gt__(self, other):
        return self.value > Dual.of(other).value

    __radd__, __rmul__ = __add__, __mul__
    __array_ufunc__ = None


class Array(np.ndarray):
    """A captured array, whose floats are read as Dual."""

    def __getitem__(self, at):
        found = np.asarray(self)[at]
        return Dual(found) if found.dtype.kind == "f" else found


RNG = np.random.default_rng(0)


def off(x, units):
    """Adds a random error of up to ``units`` units in the last place, and rounds to float32."""
    x = np.asarray(x, float)
    unit = np.where((x == 0) | np.isinf(x.astype(F)), 0, np.spacing(np.abs(x).astype(F)))
    return (x + unit * RNG.uniform(-units, units, x.shape)).astype(F)


def reciprocal(x):
    return off(1 / x.astype(float), 1.5)


def power_of_two(x):
    return off(np.exp2(x.astype(float)), 1.5)


def fast_exp(x):
    return power_of_two(x * LOG2E)


def rsqrt(x):
    return off(1 / np.sqrt(x.astype(float)), 1.5)


def of_a_turn(f, x):
    """Computes sin or cos of x modulo 2 pi with the absolute error of a special function unit."""
    turns = np.rint(x * F(1 / (2 * np.pi))).astype(float)
    x = (x - turns * F(6.28318548)).astype(F)  # the high part of 2 pi; the low part follows
    x = (x + turns * 1.74845553e-7).astype(F)
    return (f(x.astype(float)) + RNG.uniform(-3, 3, x.shape) * EPS).astype(F)


def rest_of_tanh(x):
    return F(2) * reciprocal(F(1) + power_of_two(np.abs(x) * (2 * LOG2E)))


def fast_tanh(x):
    near = off(np.tanh(x.astype(float)), 1)
    return np.where(np.abs(x) < F(0.55), near, np.copysign(F(1) - rest_of_tanh(x), x))


def slope_of_tanh(x, y):
    rest = rest_of_tanh(x)
    return rest * (F(2) - rest)


def fast_sine(x):
    return np.where(np.abs(x) < F(0.5), off(np.sin(x.astype(float)), 1), of_a_turn(np.sin, x))


def fast_sigmoid(x):
    return reciprocal(F(1) + fast_exp(-x))


def fast_softplus(x):
    return np.maximum(x, F(0)) + off(np.log1p(fast_exp(-np.abs(x))), 1)


def function(f, df):
    """Extends f to Dual; df(x, y) is the derivative at x, where y = f(x)."""

    def call(x):
        x = Dual.of(x)
        y = f(x.value)
        return x.chain(y, df(x.value, y))

    return call


def of_math(f, x):
    return np.vectorize(f, otypes=[float])(x).astype(F)


def gauss(x):
    return F(2 / np.sqrt(np.pi)) * fast_exp(-x * x)


FUNCTIONS = {
    "exp": function(fast_exp, lambda x, y: y),
    "exp2": function(power_of_two, lambda x, y: y * LN2),
    "log": function(lambda x: off(np.log(x), 1), lambda x, y: reciprocal(x)),
    "log1p": function(lambda x: off(np.log1p(x), 1), lambda x, y: reciprocal(F(1) + x)),
    "sqrt": function(lambda x: reciprocal(rsqrt(x)), lambda x, y: F(0.5) * rsqrt(x)),
    "rsqrt": function(rsqrt, lambda x, y: F(-0.5) * y * y * y),
    "expm1": function(lambda x: off(np.expm1(x), 1), lambda x, y: fast_exp(x)),
    "tanh": function(fast_tanh, slope_of_tanh),
    "sigmoid": function(
        fast_sigmoid, lambda x, y: y * (np.minimum(fast_exp(-x), F(3.4028234e38)) * y)
    ),
    "softplus": function(fast_softplus, lambda x, y: fast_sigmoid(x)),
    "sin": function(fast_sine, lambda x, y: of_a_turn(np.cos, x)),
    "cos": function(lambda x: of_a_turn(np.cos, x), lambda x, y: -fast_sine(x)),
    "erf": function(lambda x: off(of_math(math.erf, x), 2), lambda x, y: gauss(x)),
    "erfc": function(lambda x: off(of_math(math.erfc, x), 4), lambda x, y: -gauss(x)),
    "floor": function(np.floor, lambda x, y: F(0)),
    "abs": abs,
}


def where(test, a, b):
    if not isinstance(a, Dual) and not isinstance(b, Dual):
        return np.where(test, a, b)
    a, b = Dual.of(a), Dual.of(b)
    return Dual(np.where(test, a.value, b.value), np.where(test, a.slope, b.slope))


def smaller(a, b):
    return where(Dual.of(b) < a, b, a)


def larger(a, b):
    return where(Dual.of(b) > a, b, a)


@np.errstate(all="ignore")
def evaluate(text, score, names):
    """Evaluates an expression, with & | ~ for `and or not`; returns values and derivatives."""
    own = {"where": where, "min": smaller, "max": larger, "score": Dual(score, 1)}
    given = {
        name: x.view(Array) if isinstance(x, np.ndarray) and name not in INDICES else x
        for name, x in names.items()
    }
    result = Dual.of(eval(text, {**FUNCTIONS, **own, **given}))
    return np.broadcast_to(result.value, score.shape), np.broadcast_to(result.slope, score.shape)


INDICES = ("batch", "head", "query", "key", "position")
