"""Table of the functions that expressions may call: values, derivatives and error bounds.

kernels/include/attention/expression.cuh implements the same functions in CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Function(NamedTuple):
    """A function that expressions may call.

    error and slope_error bound the errors of the kernels' fast approximations for an exact
    argument, in units of eps, the spacing at 1 of the format that a kernel computes in. Where
    results are small near 0, these bounds are relative to the result, because an expression may
    multiply the result by any number.
    """

    name: str
    meaning: str  # description in the documentation
    value: Callable[..., Any]  # NumPy implementation; complex-valued if it has a derivative
    derivative: Callable[..., Any] | None = None  # None if numpy_evaluation implements it
    error: Callable[..., Any] | None = None  # error bound of f(x) = y, from x and y
    slope_error: Callable[..., Any] | None = None  # error bound of f'(x) = d, from x, y and d
    work: int = 1  # approximate number of instructions
    small_near_0: bool = False  # whether f(x) is roughly proportional to x near 0
    drawn: str = "{}"  # argument in random expressions; {} stands for any moderate number
    arguments: tuple[str, ...] = ("x",)
    other_names: tuple[str, ...] = ()  # names in other libraries
    torch: str = ""  # name in PyTorch if different
    cpp: str = ""  # name in C++ if different; std::min and std::max require equal types
    keeps_whole: bool = False  # whether f of integers is an integer


_LN2 = math.log(2)
_TANH_NEAR_0, _SINE_NEAR_0 = 0.54, 0.49  # for smaller |x|, kernels always use polynomials


def _exp2(x: Any) -> Any:
    return np.exp(_LN2 * x) if np.iscomplexobj(x) else np.exp2(x)


def _sigmoid(x: Any) -> Any:
    x = np.asarray(x) + 0.0  # unsigned numbers cannot be negated
    small = np.exp(np.where(x.real < 0, x, -x))  # never overflows
    return np.where(x.real < 0, small, 1.0) / (1.0 + small)


def _softplus(x: Any) -> Any:
    x = np.asarray(x) + 0.0  # unsigned numbers cannot be negated
    return np.where(x.real < 0, 0.0, x) + np.log1p(np.exp(np.where(x.real < 0, x, -x)))


def _gauss(x: Any) -> Any:
    return 2 / math.sqrt(math.pi) * np.exp(-x * x)


def _from_math(f: Callable[[float], float], derivative: Callable[..., Any]) -> Callable[..., Any]:
    """Vectorizes a function from ``math``; for complex arguments, f(x + ih) is f(x) + ih f'(x)."""

    def value(x: Any) -> Any:
        real = np.vectorize(f, otypes=[float])(np.real(x))[()]
        return real + 1j * np.imag(x) * derivative(np.real(x)) if np.iscomplexobj(x) else real

    return value


def _relative(count: float) -> Callable[..., Any]:
    """Returns an error function that multiplies |its last argument| by ``count``."""
    return lambda *known: count * np.abs(known[-1])


def _error_far_from_0(x: Any, y: Any) -> Any:
    """Returns the error bound of tanh(x), which kernels compute as 1 - r with a quotient r.

    The bound includes the errors of the exponential, the denominator, the reciprocal (shared by the
    softcaps of four scores) and the difference.
    """
    size = np.abs(y)
    r = 1 - size
    of_exponential = 0.5 * (1 + size) * (1.5 * np.abs(x) + 2)
    return 3 * r + r * (0.5 + of_exponential) + 0.5 * size


def _error_of_tanh(x: Any, y: Any) -> Any:
    return np.where(np.abs(x) < _TANH_NEAR_0, 2.5 * np.abs(y), _error_far_from_0(x, y))


def _error_of_sine(x: Any, y: Any) -> Any:
    return np.where(np.abs(x) < _SINE_NEAR_0, 2 * np.abs(y), 6.0)


# Kernels compute exp(x) as exp2 of the rounded product x * log2(e), and the derivatives of exp,
# sigmoid and roots from y.
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
RECIPROCAL = Function(  # for divisions; expressions cannot call it by name
    *("reciprocal", "1 / x", lambda x: 1 / x, lambda x: -1 / (x * x), _relative(2), _relative(5))
)
