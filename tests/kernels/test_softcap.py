"""Softcap: scores become softcap * tanh(score / softcap), forward and backward."""

import numpy as np
import pytest
from helpers.problems import FORWARD, name

import cupyfa
from cupyfa import Problem
from cupyfa.lab import Case
from cupyfa.lab.bench.sweeps import usual_dtype
from cupyfa.ladder import LADDER
from cupyfa.planner import choose_kernel as planning
from cupyfa.runtime import guard

# Kernels that take all texts have it in test_pairs.
OTHERS = [
    kernel
    for kernel in (*FORWARD.values(), *LADDER["backward"].values())
    if "places" not in kernel.features
]
SIZES = {"heads": 2, "kv_heads": 1, "M": 70, "N": 90, "d": 32}


@pytest.mark.each_choice
@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize("kernel", OTHERS, ids=name)
def test_every_rung_caps_scores(backend, kernel, scale):
    p = Problem.of_sizes(**SIZES, dtype=usual_dtype(kernel), causal=True, scale=scale, softcap=2.0)
    plan = planning.plan(kernel, p, backend.limits)
    guard.checked(backend, plan, Case(kernel.operation, p).inputs(), {})


def test_the_cap_is_not_compiled_in(backend):
    q = np.random.default_rng(0).standard_normal((2, 40, 16)).astype(np.float32)
    small, large, none = (
        cupyfa.attention(q, q, q, kernel="fa2", backend=backend, softcap=cap)
        for cap in (1.0, 100.0, None)
    )
    np.testing.assert_allclose(large, none, atol=0.01)
    assert np.abs(small - none).max() > 0.1


@pytest.mark.parametrize("cap", [0, -1.0, np.inf, np.nan])
def test_a_cap_is_a_finite_number_above_0(cap):
    with pytest.raises(ValueError, match="softcap is .*; give a finite number above 0"):
        cupyfa.attention(*[np.ones((2, 2), np.float32)] * 3, softcap=cap, backend="simulator")
