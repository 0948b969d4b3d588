"""A bias that all batch elements share: wgmma_persistent copies it once for many tiles of Q."""

from dataclasses import replace

import pytest
from helpers.broken_kernels import changed
from helpers.problems import FORWARD, drawn, inputs_of, name, require_same_bits

import cupyfa
from cupyfa import Problem, WrongResult
from cupyfa.lab.analysis.resources import limits_of
from cupyfa.planner import choose_kernel as planning
from cupyfa.runtime import guard
from cupyfa.runtime.simulator import Simulator

PERSISTENT = FORWARD["wgmma_persistent"]
SMALL = {"Br": 64, "Bc": 32, "stages": 2, "Q_stages": 1}
SIZES = {"batch": 5, "heads": 4, "kv_heads": 2, "M": 150, "N": 90, "d": 16, "dtype": "float16"}
ALPHAFOLD = {"batch": 128, "heads": 8, "M": 256, "N": 256, "d": 32, "dtype": "bfloat16"}
ONCE = "next.head == task.head && next.row == task.row"  # whether the rows of the bias are kept


def planned(limits, multiprocessors=4, tiles=SMALL, kernel=PERSISTENT, **sizes):
    limits = replace(limits, multiprocessors=multiprocessors)
    return planning.plan(kernel, Problem.of_sizes(**sizes), limits, **tiles)


def kept(plan):
    (launch,) = plan.launches
    return launch.constants["kept_tiles"]


@pytest.mark.usefixtures("every_check")
@pytest.mark.few(2)
@pytest.mark.parametrize(
    "sizes",
    [
        {"bias": "f16[1hmn]"},
        {"bias": "f16[11mn]"},
        {"bias": "f16[1hmn]", "mask": "b11n"},
        {"mask": "11mn"},
        {"bias": "f16[1hmn]", "N": 32, "softcap": 3.0},
        {"bias": "f16[1hmn]", "M": 64, "N": 33, "kv_heads": 1},
        {"bias": "f16[1hmn]", "M": 2, "N": 2, "batch": 9},
        {"bias": "bf16[1hmn]", "dtype": "bfloat16", "scale": -0.2, "sink": "h"},
    ],
    ids=name,
)
def test_any_number_of_blocks_gives_the_same_bits(backend, sizes):
    """Blocks share the tiles of a head if their number is a multiple of these tiles."""
    results = []
    for count in (1, 2, 3, 4, 7, 9, 64):
        plan = planned(backend.limits, count, **{**SIZES, **sizes})
        assert kept(plan) == -(-plan.problem.N // 32)
        results.append(guard.checked(backend, plan, inputs_of(plan), {}))
    require_same_bits(*results)


@pytest.mark.parametrize(
    "wrong, blocks",
    [("next.head == task.head", 1), ("next.row == task.row", 3)],  # with 3, each has one row tile
)
def test_the_bias_of_other_rows_or_heads_is_copied(backend, tmp_path, wrong, blocks):
    kernel = changed(tmp_path, PERSISTENT.name, ONCE, wrong)
    plan = planned(backend.limits, blocks, kernel=kernel, **SIZES, bias="f16[1hmn]")
    with pytest.raises(WrongResult):
        guard.checked(backend, plan, inputs_of(plan), {})


def test_the_bias_is_copied_once_for_each_head_and_row_tile(tmp_path):
    """Copies for every tile of Q are right, too; here, each that is not needed stops the kernel."""
    wrong = f"({ONCE}) || (next.batch > 0 && (__builtin_trap(), true))"
    kernel = changed(tmp_path, PERSISTENT.name, ONCE, wrong)
    backend = Simulator()
    plan = planned(backend.limits, 1, kernel=kernel, **SIZES, bias="f16[1hmn]")
    guard.checked(backend, plan, inputs_of(plan), {})


def test_alphafolds_bias_is_kept():
    plan = planned(limits_of("90"), 132, {}, **ALPHAFOLD, bias="bf16[1hmn]")
    assert kept(plan) == 4 and plan.launches[0].grid == (132, 1, 1)
    assert plan.constants["Br"] == 256  # one tile of rows, for four warpgroups of consumers


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"bias": "bf16[bhmn]"},
        {"bias": "bf16[1h1n]"},
        {"bias": "f32[1hmn]"},  # is not copied to shared memory
        {"bias": "bf16[1hmn]", "batch": 3},
        {"bias": "bf16[1hmn]", "M": 2048},  # many tiles of rows
        {"bias": "bf16[1hmn]", "N": 2048},  # does not fit
        {"bias": "bf16[1hmn]", "causal": True},  # tiles of different lengths
        {"bias": "bf16[1hmn]", "window": (40, 10)},
    ],
    ids=name,
)
def test_other_biases_are_not_kept(sizes):
    assert kept(planned(limits_of("90"), 132, {}, **{**ALPHAFOLD, **sizes})) == 0


def test_the_bias_of_a_block_mask_is_not_kept(backend):
    shapes = [(5, 4, 150, 16), (5, 4, 90, 16), (5, 4, 90, 16), (1, 4, 150, 90)]
    q, k, v, bias = drawn(*shapes, dtype="float16")
    blocks = cupyfa.block_mask(mask_mod="key < 40", M=150, N=90, backend=backend.name)
    how = {"kernel": PERSISTENT, "tiles": SMALL, "backend": backend, "check": True}
    cupyfa.attention(q, k, v, bias=bias, mask=blocks, **how)
