"""A thousand launches of a kernel produce the same bits on a GPU.

Results are compared on the device, since `check --reruns` copies each result to the host.
"""

import numpy as np
import pytest
from helpers.problems import RAGGED, in_turn, inputs_of, name, planned

from cupyfa import Unsupported
from cupyfa.ladder import LADDER
from cupyfa.runtime.arrays import readable_inputs
from cupyfa.runtime.launcher import replay
from cupyfa.runtime.workspace import allocate

LAUNCHES = 1000
# More blocks than a GPU runs at a time, which start and end in varying order, and more tiles of
# keys than stages; then few rows and many keys, which mma_split_kv splits.
CROWDED = (
    {"batch": 8, "heads": 8, "kv_heads": 2, "M": 700, "N": 700, "d": 64, "causal": True},
    {"batch": 8, "heads": 8, "kv_heads": 4, "M": 600, "N": 700, "d": 128, "window": (400, 10)},
    {"batch": 9, "heads": 6, "kv_heads": 3, "M": 500, "N": 400, "d": 250, "dv": 128},
    {"batch": 1, "heads": 4, "kv_heads": 1, "M": 3, "N": 20000, "d": 120},
)
WIDE = {"batch": 8, "heads": 4, "kv_heads": 2, "M": 300, "N": 400, "d": 600, "causal": True}
KERNELS = {**LADDER["forward"], **LADDER["backward"]}
FAST = {name: kernel for name, kernel in KERNELS.items() if "mma" in name}
REST = {name: kernel for name, kernel in KERNELS.items() if name not in FAST}
# Tiles so short that the next copy comes soon after the reads of a stage.
SHORT = {"Br": 128, "Bc": 32, "Wr": 16, "stages": 2}
SLICES = [(kernel, "float16", WIDE) for name, kernel in FAST.items() if "slices" in name]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "dtype", "sizes"),
    [*in_turn(FAST, CROWDED), *SLICES, *in_turn(REST, RAGGED)],
    ids=name,
)
def test_a_thousand_launches_give_the_same_bits(cuda, kernel, dtype, sizes):
    try:
        plan = planned(kernel, cuda, sizes, dtype)
    except Unsupported as reason:
        pytest.skip(str(reason))
    require_same_bits_of_launches(cuda, plan)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", CROWDED[:2], ids=name)
def test_copies_of_short_tiles_stay_behind_reads(cuda, sizes):
    plan = planned(LADDER["forward"]["mma_tma"], cuda, sizes, **SHORT)
    require_same_bits_of_launches(cuda, plan)


def require_same_bits_of_launches(cuda, plan):
    """Compares the outputs of a thousand launches, except those that are summed in any order."""
    cupy = pytest.importorskip("cupy")
    inputs = {x: cuda.upload(array) for x, array in inputs_of(plan).items()}
    inputs = readable_inputs(plan, inputs)

    def new():
        """Allocates outputs; returns a function that launches the kernel, and the outputs' bits."""
        made = {x: allocate(cuda, plan, x) for x in (*plan.outputs, *plan.scratch)}
        bits = {x: made[x].view(f"u{made[x].itemsize}") for x in plan.outputs}
        return replay(cuda, plan, {**inputs, **made}), bits

    launch, first = new()
    launch()
    again, made = new()
    compare = cupy.ElementwiseKernel(
        "T one, T other", "raw bool differs", "if (one != other) differs[0] = true", "compare"
    )
    differs = {x: cupy.zeros(1, bool) for x in first if x not in plan.unordered}
    for _ in range(LAUNCHES - 1):
        for array in made.values():
            array.fill(np.iinfo(array.dtype).max)
        again()
        for x, found in differs.items():
            compare(made[x], first[x], found)
    assert differs and not [x for x, found in differs.items() if found.any()]
