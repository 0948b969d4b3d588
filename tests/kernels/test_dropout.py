"""Dropout: the same weights in every kernel with any tiles, forward and backward, and in NumPy."""

import ctypes
import subprocess

import numpy as np
import pytest
from helpers.problems import FORWARD, name

import cupyfa
from cupyfa import Case, Problem
from cupyfa.bench.sweeps import usual_dtype
from cupyfa.errors import Unsupported
from cupyfa.ladder import LADDER
from cupyfa.planner import select as planning
from cupyfa.planner.source import INCLUDE
from cupyfa.runtime import guard
from cupyfa.runtime.arrays import readable_inputs

KERNELS = [k for group in LADDER.values() for k in group.values() if "dropout" in k.features]
SEED = 2**40 + 7
DROPOUT = {"dropout": 0.3, "dropout_seed": SEED, "dropout_offset": 3}
SIZES = {"batch": 2, "heads": 2, "kv_heads": 1, "M": 35, "N": 41, "d": 16}
OTHERS = (
    {"M": 70, "N": 90, "causal": True, "softcap": 2.0},
    {"M": 67, "N": 131, "window": (20, 3), "scale": -0.3, "d": 33},
    {"M": 3, "N": 150, "heads": 4, "kv_heads": 1, "bias": "1hmn", "mask": "b1mn"},
)


def check(backend, kernel, **given):
    """Runs a problem between guard zones; raises if a result is wrong."""
    p = Problem.of_sizes(**{**SIZES, "dtype": usual_dtype(kernel), **DROPOUT, **given})
    plan = planning.plan(kernel, p, backend.limits)
    case = Case(kernel.operation, p)
    guard.checked(backend, plan, readable_inputs(plan, case.inputs()), {})


@pytest.mark.parametrize("kernel", KERNELS, ids=name)
def test_every_kernel_drops_the_same_weights(backend, kernel):
    check(backend, kernel)


@pytest.mark.slow
@pytest.mark.parametrize("how", OTHERS, ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=name)
def test_dropout_joins_other_options(backend, kernel, how):
    check(backend, kernel, **how)
