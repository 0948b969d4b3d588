"""Problems shared by tests, with sizes that no tile size divides, and inputs for them."""

import numpy as np
import pytest

from cupyfa import Problem
from cupyfa.lab.bench.sweeps import usual_dtype
from cupyfa.lab.verify.case import Case
from cupyfa.ladder import LADDER
from cupyfa.planner import choose_kernel as planning
from cupyfa.problem.dtypes import dtype_named
from cupyfa.runtime import guard
from cupyfa.runtime.arrays import readable_inputs

DTYPES = ("float16", "bfloat16", "float32", "float64")
FORWARD = LADDER["forward"]
EVERY = [kernel for kernels in LADDER.values() for kernel in kernels.values()]

# Small sizes that no tile size divides. Every rung runs them in every dtype that it claims.
RAGGED = (
    {"batch": 2, "heads": 4, "kv_heads": 2, "M": 70, "N": 45, "d": 20, "causal": True},
    {"heads": 2, "kv_heads": 1, "M": 45, "N": 70, "d": 33, "dv": 9, "causal": "top-left"},
    {"heads": 1, "M": 67, "N": 131, "d": 64, "scale": -0.3},
    {"heads": 3, "kv_heads": 1, "M": 5, "N": 1, "d": 7, "dv": 40},
)
# Sizes for rungs that support windows.
WINDOWED = ({"heads": 2, "kv_heads": 1, "M": 45, "N": 70, "d": 33, "dv": 9, "window": (20, 3)},)


def claimed(kernels=FORWARD, dtypes=DTYPES):
    """Returns (kernel, dtype) for every dtype that a kernel accepts, even if it rounds float32."""
    return [(k, dtype) for k in kernels.values() for dtype in dtypes if k.takes(dtype)]


def in_turn(kernels, sizes):
    """Returns (kernel, dtype, sizes) for all sizes of every kernel, cycling through its dtypes."""
    found = []
    for first, kernel in enumerate(kernels.values()):
        dtypes = [dtype for _, dtype in claimed({kernel.name: kernel})]
        for i in range(max(len(sizes), len(dtypes))):
            found.append((kernel, dtypes[i % len(dtypes)], sizes[(first + i) % len(sizes)]))
    return found


def able(feature, *operations):
    """Returns the kernels that support a feature, of all or only some operations."""
    every = [k for k in EVERY if k.operation in operations] if operations else EVERY
    return [kernel for kernel in every if feature in kernel.features]


def arch_of(kernel):
    """Returns the lowest architecture from sm_80 on that runs a kernel."""
    return kernel.target or max(kernel.arch, "80", key=int)


# One kernel of each family: CUDA cores, mma.sync and wgmma, forward and backward.
# kernels/test_pairs.py tests every pair of options with them.
PAIRED = ("fa2", "mma_split_q", "wgmma", "two_pass", "mma_columns", "wgmma_columns")
# Kernels that modify scores with the same headers as another kernel of their family.
LIKE_OTHERS = {
    *("fa2_coalesced", "mma_split_q", "mma_swizzled", "mma_async", "mma_tma"),
    *("wgmma", "wgmma_overlap", "wgmma_fp16x2", "fa2_split_kv", "mma_f64"),
    *("rows", "mma_two_pass", "mma_f64_columns"),
}


# Kernels with which single options are tested by default: mma.sync, wgmma and a backward kernel.
USUAL = ("mma_pipelined", "wgmma_persistent", "columns")


def usual_first(kernels, usual=USUAL):
    """Returns kernels as test parameters; marks kernels that are not in ``usual`` as slow."""
    return [
        pytest.param(k, id=k.name, marks=[pytest.mark.slow] * (k.name not in usual))
        for k in kernels
    ]


def name(value):
    """Returns a short test id for a kernel, sizes or any other value."""
    if isinstance(value, dict):
        return "-".join(f"{key}{size}" for key, size in value.items())
    return getattr(value, "name", str(value))


def drawn(*shapes, dtype="float32", seed=0):
    rng, of = np.random.default_rng(seed), dtype_named(dtype).numpy
    return [rng.standard_normal(shape).astype(of) for shape in shapes]


def qkv(M, N, dtype="float32", *, batch=2, heads=4, kv_heads=2, d=24, dv=None, seed=0):
    shapes = (batch, heads, M, d), (batch, kv_heads, N, d), (batch, kv_heads, N, dv or d)
    return drawn(*shapes, dtype=dtype, seed=seed)


def planned(kernel, backend, sizes, dtype=None, **tiles):
    problem = Problem.of_sizes(**sizes, dtype=dtype or usual_dtype(kernel))
    return planning.plan(kernel, problem, backend.limits, **tiles)


def inputs_of(plan, seed=0, layout="bhsd", values="normal"):
    """Draws random inputs for a plan; aligns their rows if the kernel requires that."""
    case = Case(plan.kernel.operation, plan.problem, seed, values, layout)
    return readable_inputs(plan, case.inputs())


def require_same_bits(first, *others):
    for other in others:
        for output, array in first.items():
            np.testing.assert_array_equal(other[output], array, err_msg=output)


def check_case(kernel, backend, sizes, dtype=None, values="normal", layout="bhsd", **tiles):
    """Runs a kernel on random inputs between guard zones; raises if a result is wrong."""
    plan = planned(kernel, backend, sizes, dtype, **tiles)
    return guard.checked(backend, plan, inputs_of(plan, layout=layout, values=values), {})
