"""The functions of expressions: a row of the table has all that Python knows of one.

kernels/include/attention/expression.cuh has the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Function(NamedTuple):
    """A function of expressions.

    Errors are those of kernels for an exact argument, by formulas that are fast on a GPU, in eps,
    the spacing at 1 of the format that a kernel computes in. Near an argument of 0 where the result
    is small they are relative to it: an expression may multiply it by any number.
    """

    name: str
    meaning: str  # the value in words, for pages
    value: Callable[..., Any]  # of NumPy's arrays; also of complex ones, if it has a derivative
    derivative: Callable[..., Any] | None = None  # None: numpy_evaluation has a method
    error: Callable[..., Any] | None = None  # of f(x) = y, from x and y
    slope_error: Callable[..., Any] | None = None  # of f'(x) = d, from x, y and d
    work: int = 1  # about how many instructions it takes
    small_near_0: bool = False  # it is about a multiple of x there
    drawn: str = "{}"  # the argument in random expressions; {} is any moderate number
    arguments: tuple[str, ...] = ("x",)
    other_names: tuple[str, ...] = ()  # in other libraries
    torch: str = ""  # the name in torch, if it is another one
    cpp: str = ""  # the name in C++, likewise: its own min and max want equal types
    keeps_whole: bool = False  # of whole numbers it is a whole number


_LN2 = math.log(2)
_TANH_NEAR_0, _SINE_NEAR_0 = 0.54, 0.49  # both are polynomials at least up to these


def _exp2(x: Any) -> Any:
    return np.exp(_LN2 * x) if np.iscomplexobj(x) else np.exp2(x)


def _sigmoid(x: Any) -> Any:
    x = np.asarray(x) + 0.0  # no unsigned number
    small = np.exp(np.where(x.real < 0, x, -x))  # never overflows
    return np.where(x.real < 0, small, 1.0) / (1.0 + small)


def _softplus(x: Any) -> Any:
    x = np.asarray(x) + 0.0  # no unsigned number
    return np.where(x.real < 0, 0.0, x) + np.log1p(np.exp(np.where(x.real < 0, x, -x)))


def _gauss(x: Any) -> Any:
    return 2 / math.sqrt(math.pi) * np.exp(-x * x)


def _from_math(f: Callable[[float], float], derivative: Callable[..., Any]) -> Callable[..., Any]:
    """A function that NumPy lacks; of x + ih it is f(x) + ih f'(x)."""

    def value(x: Any) -> Any:
        real = np.vectorize(f, otypes=[float])(np.real(x))[()]
        return real + 1j * np.imag(x) * derivative(np.real(x)) if np.iscomplexobj(x) else real

    return value


def _relative(count: float) -> Callable[..., Any]:
    """An error of ``count`` eps of the value or derivative, which is the last argument."""
    return lambda *known: count * np.abs(known[-1])


def _error_far_from_0(x: Any, y: Any) -> Any:
    """Of tanh(x) = 1 - r: the quotient r, whose reciprocal the softcaps of four scores share, and
    its denominator, the exponential, the difference.
    """
    size = np.abs(y)
    r = 1 - size
    of_exponential = 0.5 * (1 + size) * (1.5 * np.abs(x) + 2)
    return 3 * r + r * (0.5 + of_exponential) + 0.5 * size


def _error_of_tanh(x: Any, y: Any) -> Any:
    return np.where(np.abs(x) < _TANH_NEAR_0, 2.5 * np.abs(y), _error_far_from_0(x, y))


def _error_of_sine(x: Any, y: Any) -> Any:
    return np.where(np.abs(x) < _SINE_NEAR_0, 2 * np.abs(y), 6.0)


# exp(x) is the power of two of a rounded x * log2(e); the derivatives of exp, sigmoid and roots are
# computed from y.
# fmt: off
_ROWS = (
    Function("exp", "e to the power of x", np.exp, np.exp, lambda x, y: y * (np.abs(x) + 3),
             lambda x, y, d: y * (np.abs(x) + 3), work=4, drawn="min({}, 1.5)"),
    Function("exp2", "2 to the power of x", _exp2, lambda x: _LN2 * _exp2(x),
             _relative(3), _relative(4), work=3, drawn="min({}, 2)"),
    Function("log", "the natural logarithm", np.log, lambda x: 1 / x,
             _relative(3), _relative(2), work=15, drawn="0.1 + abs({})"),
    Function("log1p", "log(1 + x)", np.log1p, lambda x: 1 / (1 + x),
             _relative(3), _relative(3), work=30, small_near_0=True, drawn="abs({})"),
    Function("expm1", "exp(x) - 1", np.expm1, np.exp, _relative(3),
             lambda x, y, d: d * (np.abs(x) + 3), work=25, small_near_0=True, drawn="min({}, 1.5)"),
    Function("sqrt", "the square root", np.sqrt, lambda x: 0.5 / np.sqrt(x),
             _relative(5), _relative(4), work=4, drawn="0.01 + abs({})"),
    Function("rsqrt", "1 / sqrt(x)", lambda x: 1 / np.sqrt(x), lambda x: -0.5 / (x * np.sqrt(x)),
             _relative(3), _relative(8), work=3, drawn="0.25 + abs({})"),
    Function("tanh", "the hyperbolic tangent", np.tanh, lambda x: 1 - np.tanh(x) ** 2,
             _error_of_tanh, lambda x, y, d: 2 * np.abs(y) * _error_far_from_0(x, y) + 1,
             work=16, small_near_0=True),
    Function("sigmoid", "1 / (1 + exp(-x))", _sigmoid, lambda x: _sigmoid(x) * _sigmoid(-x),
             lambda x, y: y * (3 + (1 - y) * (np.abs(x) + 3)),
             lambda x, y, d: d * (6 + np.abs(1 - 2 * y) * (np.abs(x) + 3)),
             work=6, other_names=("expit", "logistic")),
    Function("softplus", "log(1 + exp(x))", _softplus, _sigmoid,
             lambda x, y: 3 * y + np.exp(-np.abs(x)) * (np.abs(x) + 3),
             lambda x, y, d: d * (3 + (1 - d) * (np.abs(x) + 3)),
             work=40, torch="nn.functional.softplus"),
    Function("sin", "the sine, of radians", np.sin, np.cos,
             _error_of_sine, lambda x, y, d: 6 + 0 * y, work=15, small_near_0=True),
    Function("cos", "the cosine, of radians", np.cos, lambda x: -np.sin(x),
             lambda x, y: 6 + 0 * y, lambda x, y, d: _error_of_sine(x, d), work=10),
    Function("erf", "the error function", _from_math(math.erf, _gauss), _gauss,
             _relative(3), lambda x, y, d: d * (1.5 * x * x + 4), work=30, small_near_0=True),
    Function("erfc", "1 - erf(x), also where it is small",
             _from_math(math.erfc, lambda x: -_gauss(x)), lambda x: -_gauss(x),
             _relative(6), lambda x, y, d: -d * (1.5 * x * x + 4), work=40),
    Function("floor", "x rounded down; still a number", np.floor),
    Function("abs", "the absolute value", np.abs, keeps_whole=True,
             other_names=("absolute", "fabs")),
    Function("min", "the smaller one; NaN if one is NaN", np.minimum, keeps_whole=True,
             arguments=("a", "b"), other_names=("minimum", "fmin"), cpp="smaller"),
    Function("max", "the larger one; NaN if one is NaN", np.maximum, keeps_whole=True,
             arguments=("a", "b"), other_names=("maximum", "fmax"), cpp="larger"),
    Function("where", "a where the condition holds, else b", np.where,
             arguments=("condition", "a", "b")),
)
# fmt: on
FUNCTIONS = {x.name: x for x in _ROWS}
DIFFERENTIABLE = {name: x for name, x in FUNCTIONS.items() if x.derivative}
RECIPROCAL = Function(  # a part of each division; expressions cannot name it
    *("reciprocal", "1 / x", lambda x: 1 / x, lambda x: -1 / (x * x), _relative(2), _relative(5))
)
