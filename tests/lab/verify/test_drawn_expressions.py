"""Random expressions: coverage of the grammar, results of kernels, and derivatives."""

import random
import re

import numpy as np
import pytest

from cupyfa import Problem
from cupyfa.lab.verify.case import Case
from cupyfa.lab.verify.random_expressions import CAPTURED, draw_expression
from cupyfa.ladder.lookup import record_named
from cupyfa.ladder.operations import modifications
from cupyfa.planner import choose_kernel
from cupyfa.runtime import guard
from cupyfa.runtime.arrays import readable_inputs
from cupyfa.score.functions import FUNCTIONS

SIZES = {"batch": 2, "heads": 2, "kv_heads": 1, "M": 9, "N": 13, "d": 8}
OPERATORS = {"+", "-", "*", "/", "//", "%", "**", "<", "<=", ">", ">=", "==", "!=", "&", "|", "~"}
OPERATORS |= {"and", "or", "not", "if"}


def problem(seed, kind, dtype="float64"):
    text, captured = draw_expression(random.Random(seed), kind)
    how = {f"{kind}_mod": text, "captured": captured}
    return Problem.of_sizes(**SIZES, dtype=dtype, **how)


def test_the_expressions_have_the_whole_grammar():
    words, read = set(), set()
    for seed in range(400):
        for kind in ("score", "mask"):
            text, captured = draw_expression(random.Random(seed), kind)
            words |= set(re.findall(r"[a-z_0-9]+|[^\w\s()\[\],.]+", text))
            read |= set(captured)
            assert kind == "mask" or "score" in text
            assert captured == {name: CAPTURED[name] for name in captured}
    assert words >= {*FUNCTIONS, *OPERATORS} and read == {*CAPTURED}


def test_the_state_of_the_generator_decides():
    for kind in ("score", "mask"):
        assert draw_expression(random.Random(3), kind) == draw_expression(random.Random(3), kind)
    few = {"x": "f32[heads]", "n": 3}
    for seed in range(50):
        assert set(draw_expression(random.Random(seed), "score", few)[1]) <= {*few}


def checked(backend, kernel, case):
    """Runs a case; raises if results differ from the reference."""
    plan = choose_kernel.plan(kernel, case.problem, backend.limits)
    guard.checked(backend, plan, readable_inputs(plan, case.inputs()), {})


SEEDS = [1, *(pytest.param(x, marks=pytest.mark.slow) for x in range(2, 22))]


@pytest.mark.parametrize("kernel, dtype", [("fa2", "float32"), ("two_pass", "float64")])
@pytest.mark.parametrize("seed", SEEDS)
def test_results_of_kernels_are_those_of_the_reference(backend, kernel, dtype, seed):
    kernel = record_named(kernel)
    kind = "mask" if seed % 4 == 0 else "score"
    checked(backend, kernel, Case(kernel.operation, problem(seed, kind, dtype), seed))


def derivatives(text, captured, scores, step):
    """Returns derivatives by the chain rule, finite differences, and a mask of smooth points."""
    p = Problem.of_sizes(**SIZES, dtype="float64", score_mod=text, captured=captured)
    mods = modifications(Case("forward", p).inputs(), p)
    place = mods.place(*np.ogrid[tuple(slice(n) for n in scores.shape)])
    slope = mods.differentiated(scores, place, None)[1]
    at = [mods.modified(scores + h * step, place, None) for h in (-2, -1, 0, 1, 2)]
    near, far = (at[3] - at[1]) / (2 * step), (at[4] - at[0]) / (4 * step)
    with np.errstate(invalid="ignore"):
        smooth = np.abs(near - far) <= 1e-6 * (1 + np.abs(near))
        smooth &= np.abs(at[0] - 2 * at[2] + at[4]) <= 1e-4 * step * (1 + np.abs(near))
    return slope, near, smooth


def test_derivatives_are_finite_differences():
    shape = SIZES["batch"], SIZES["heads"], SIZES["M"], SIZES["N"]
    compared = 0
    for seed in range(150):
        scores = 2 * np.random.default_rng(seed).standard_normal(shape)
        text, captured = draw_expression(random.Random(seed), "score")
        slope, difference, smooth = derivatives(text, captured, scores, 1e-5)
        assert np.allclose(slope[smooth], difference[smooth], rtol=1e-4, atol=1e-4), text
        compared += smooth.any()
    assert compared > 140
