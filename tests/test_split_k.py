"""The rung mma_split_k: keys shared out to blocks, and the launch that merges what they found."""

from dataclasses import replace

import numpy as np
import pytest
from problems import FORWARD, inputs_of, name, planned

from cupyfa import Kernel, Launch, Problem, backends, calls, planning
from cupyfa.backends.simulator import Simulator
from cupyfa.compiling import compile_launch, limits_of

SPLIT = FORWARD["mma_split_k"]
H100 = limits_of("90")
TILE = {"Br": 16, "Bc": 16, "stages": 3}
# By how many parts there are in the simulator, whose blocks have 4 multiprocessors.
SIZES = {
    1: {"heads": 16, "M": 1, "N": 70, "d": 24},
    2: {"heads": 3, "kv_heads": 1, "M": 40, "N": 90, "d": 40, "causal": True},
    7: {"heads": 32, "kv_heads": 8, "batch": 1, "M": 1, "N": 130, "d": 64},
    5: {"heads": 2, "M": 1, "N": 70, "d": 33, "dv": 9},
    6: {"heads": 2, "kv_heads": 1, "M": 5, "N": 333, "d": 20, "window": (9, 3)},
    11: {"heads": 1, "M": 64, "N": 300, "d": 40, "dv": 72, "causal": "top-left", "scale": -2.0},
    12: {"heads": 1, "M": 1, "N": 200, "d": 257 - 1, "scale": 0.0},
}


def parts(plan):
    """The number of parts that a plan's launches are told."""
    found = {launch.numbers["parts"] for launch in plan.launches if launch.numbers}
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=name)
@pytest.mark.parametrize("fill", [1, 3, 40])
def test_parts_are_merged(backend, sizes, fill):
    plan = planned(SPLIT, backend, sizes, "float16", **TILE, fill=fill)
    calls.checked(backend, plan, inputs_of(plan), {})
