"""A thousand launches of a kernel give the same bits, which takes a GPU.

Results are compared where they are: `check --reruns` copies each to the host.
"""

import pytest
from helpers.problems import RAGGED, in_turn, inputs_of, name, planned

from cupyfa import Unsupported
from cupyfa.ladder import LADDER
from cupyfa.runtime.arrays import readable_inputs
from cupyfa.runtime.launcher import replay
from cupyfa.runtime.workspace import allocated

LAUNCHES = 1000
# For most kernels more blocks than a GPU holds at a time, which therefore begin and end in ever
# other orders; and few rows and many keys, which blocks of mma_split_kv share out.
CROWDED = (
    {"batch": 8, "heads": 8, "kv_heads": 2, "M": 1500, "N": 1700, "d": 64, "causal": True},
    {"batch": 8, "heads": 8, "kv_heads": 4, "M": 700, "N": 900, "d": 128, "window": (400, 10)},
    {"batch": 9, "heads": 6, "kv_heads": 3, "M": 900, "N": 900, "d": 250, "causal": True},
    {"batch": 8, "heads": 6, "kv_heads": 6, "M": 1000, "N": 500, "d": 192, "dv": 128},
    {"batch": 1, "heads": 4, "kv_heads": 1, "M": 3, "N": 20000, "d": 120},
    {"batch": 8, "heads": 4, "kv_heads": 2, "M": 500, "N": 600, "d": 600, "causal": True},
)
KERNELS = {**LADDER["forward"], **LADDER["backward"]}
FAST = {name: kernel for name, kernel in KERNELS.items() if "mma" in name}
REST = {name: kernel for name, kernel in KERNELS.items() if name not in FAST}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "dtype", "sizes"), [*in_turn(FAST, CROWDED), *in_turn(REST, RAGGED)], ids=name
)
def test_a_thousand_launches_give_the_same_bits(cuda, kernel, dtype, sizes):
    cupy = pytest.importorskip("cupy")
    try:
        plan = planned(kernel, cuda, sizes, dtype)
    except Unsupported as reason:
        pytest.skip(str(reason))
    inputs = {x: cuda.upload(array) for x, array in inputs_of(plan).items()}
    inputs = readable_inputs(plan, inputs)

    def again():
        made = {x: allocated(cuda, plan, x) for x in (*plan.outputs, *plan.scratch)}
        replay(cuda, plan, {**inputs, **made})()
        return {x: made[x].view(f"u{made[x].itemsize}") for x in plan.outputs}

    first = again()
    differ = {x: cupy.zeros((), bool) for x in first if x not in kernel.unordered}
    for _ in range(LAUNCHES - 1):
        made = again()
        for x, found in differ.items():
            found |= (made[x] != first[x]).any()
    assert differ and not [x for x, found in differ.items() if found]
