"""The rung mma_slices in its own sizes: large head dimensions, many spans, every device's tile."""

import numpy as np
import pytest
from helpers.problems import FORWARD, inputs_of, name, planned

from cupyfa import Kernel, Launch, Problem
from cupyfa.analysis.resources import limits_of
from cupyfa.planner import select as planning
from cupyfa.runtime import calls

SLICES = FORWARD["mma_slices"]
SIZES = (
    {"heads": 1, "M": 20, "N": 30, "d": 300, "dv": 313},
    {"heads": 2, "kv_heads": 1, "M": 70, "N": 90, "d": 264, "dv": 320, "causal": True},
    {"heads": 1, "M": 10, "N": 20, "d": 1024},
    {"heads": 1, "M": 140, "N": 1100, "d": 24, "dv": 70, "causal": True},
    {"heads": 1, "M": 600, "N": 530, "d": 16, "dv": 20, "causal": "top-left", "scale": -3.0},
    {"heads": 1, "M": 30, "N": 600, "d": 16, "dv": 261, "scale": 0.0},
    {"heads": 1, "M": 300, "N": 70, "d": 257, "causal": True},
    {"heads": 1, "M": 7, "N": 0, "d": 300},
)


# Each size with two of the tiles.
TILED = [
    (x, SLICES.tiles[(i + j) % len(SLICES.tiles)]) for i, x in enumerate(SIZES) for j in (0, 2)
]


@pytest.mark.parametrize("sizes, tile", TILED, ids=name)
def test_every_tile_is_right(backend, sizes, tile):
    if planning.can(SLICES, Problem.of_sizes(**sizes, dtype="float16"), backend.limits):
        plan = planned(SLICES, backend, sizes, "float16", **tile)
        calls.checked(backend, plan, inputs_of(plan), {})


@pytest.mark.parametrize("sizes", SIZES[3:5], ids=name)
def test_hidden_values_do_not_show(backend, sizes):
    """NaN in values and keys that only some rows see, in the first span and in a later one."""
    plan = planned(SLICES, backend, sizes, "bfloat16", **SLICES.tiles[-1])
    inputs = inputs_of(plan)
    inputs["V"][..., 3, 1] = np.inf
    inputs["V"][..., 500, 5:8] = np.nan
    inputs["K"][..., 501, 2] = np.nan
    calls.checked(backend, plan, inputs, {})


def test_rows_need_no_alignment(backend):
    """Odd strides, and an output that begins anywhere."""
    plan = planned(SLICES, backend, {"M": 40, "N": 50, "d": 264, "dv": 280}, "float16")
    inputs = {x: np.pad(array, [(0, 0)] * 3 + [(1, 2)]) for x, array in inputs_of(plan).items()}
    inputs = {x: array[..., 1:-2] for x, array in inputs.items()}
    out = np.zeros((plan.problem.batch, plan.problem.heads, 40, 283), np.float16)
    calls.checked(backend, plan, inputs, {"O": out[..., 1:-2]})


@pytest.mark.parametrize(
    "arch, tile",
    [
        ("75", (64, 128, 256)),
        ("80", (128, 256, 256)),
        ("86", (128, 128, 256)),
        ("90", (128, 256, 512)),
    ],
)
def test_tiles_fill_the_shared_memory_of_a_device(arch, tile):
    for d in (264, 1024, 5000):
        problem = Problem.of_sizes(M=64, d=d, dtype="float16")
        plan = planning.plan(SLICES, problem, limits_of(arch))
        assert tuple(plan.constants[x] for x in ("Br", "Bc", "span")) == tile
        fastest = "wgmma_slices" if arch == "90" else "mma_slices"
        assert planning.select("auto", "forward", problem, limits_of(arch)).name == fastest


def test_sums_take_memory_only_beyond_a_span():
    def scratch_bytes(N, dv):
        problem = Problem.of_sizes(batch=2, heads=3, M=100, N=N, d=64, dv=dv, dtype="float16")
        return planning.plan(SLICES, problem, limits_of("90")).scratch_bytes

    assert scratch_bytes(512, 1024) == 0
    assert scratch_bytes(513, 1024) == 4 * 2 * 3 * 128 * 1024
    assert scratch_bytes(513, 320) == 4 * 2 * 3 * 128 * 384


@pytest.mark.parametrize("size", [-1, 0.5])
def test_a_formula_of_scratch_must_give_a_size(size):
    launch = Launch("mine", args="Q.data T.data", grid=lambda p, c: 1, threads=lambda p, c: 32)
    kernel = Kernel("mine", "", (launch,), scratch={"T": (lambda p, c: size, "real")})
    with pytest.raises(ValueError, match=f"formula for scratch T gives {size}"):
        planning.plan(kernel, Problem.of_sizes(M=8, d=8), limits_of("90"))
