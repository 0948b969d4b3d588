"""The Hopper rungs: scales, nonfinite inputs, short lengths, alignment, persistent blocks."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.problems import FORWARD, inputs_of, name, require_same_bits

import cupyfa
from cupyfa import Problem
from cupyfa.lab.analysis.resources import limits_of
from cupyfa.ladder import LADDER
from cupyfa.planner import choose_kernel as planning
from cupyfa.runtime import guard
from cupyfa.runtime.simulator import Simulator

ALL = FORWARD | LADDER["backward"]
RUNGS = [kernel for kernel in FORWARD.values() if kernel.name.startswith("wgmma")]
EACH = pytest.mark.parametrize("kernel", RUNGS, ids=name)
PERSISTENT = [FORWARD[x] for x in ("wgmma_persistent", "wgmma_fp16x2")]
EACH_PERSISTENT = pytest.mark.parametrize("kernel", PERSISTENT, ids=name)
OF_TWO = ("wgmma_slices", "wgmma_latent")  # at most two warpgroups of consumers fit, or exactly two
SMALL = {"Br": 64, "Bc": 32}
MASKS = (
    {},
    {"causal": "bottom-right"},
    {"causal": "top-left"},
    {"window": (9, 3)},
    {"causal": "bottom-right", "window": (40, None)},
)


def planned(kernel, backend, dtype="float16", multiprocessors=None, tiles=SMALL, **sizes):
    """Plans a kernel with many small tiles."""
    dtype = dtype if dtype in kernel.dtypes else kernel.dtypes[0]
    problem = Problem.of_sizes(**{"heads": 1, "d": 16, **sizes}, dtype=dtype)
    limits = backend.limits
    if not planning.can(kernel, problem, limits):
        pytest.skip(f"{limits.device} is not of sm_90")
    if multiprocessors is not None:
        limits = replace(limits, multiprocessors=multiprocessors)
    return planning.plan(kernel, problem, limits, **tiles)


def blocks_of(kernel, plan):
    return next(x.grid[0] for x in plan.launches if x.entry == kernel.name)


def checked(backend, plan, inputs=None):
    return guard.checked(backend, plan, inputs_of(plan) if inputs is None else inputs, {})


@pytest.mark.each_choice
@EACH
@pytest.mark.parametrize("scale", [0.0, -0.0, 1e-30, -1e-30, 30.0, -30.0, 1e36, -1e36])
def test_any_scale(backend, kernel, scale):
    plan = planned(kernel, backend, M=70, N=100, causal="top-left", scale=scale)
    checked(backend, plan)


@pytest.mark.each_choice
@EACH
@pytest.mark.parametrize("step", [0.5, 7.9, 8.1, 40.0, -20.0])
def test_scores_that_rise_from_tile_to_tile(backend, kernel, step):
    """Steps lie below and above 8, the slack of the row maximum in log2 units."""
    plan = planned(kernel, backend, M=70, N=200, scale=np.log(2))
    inputs = inputs_of(plan)
    inputs["Q"][...] = 0
    inputs["K"][...] = 0
    inputs["Q"][..., 0] = np.linspace(-1, 1, 70)
    inputs["K"][..., 0] = np.arange(200) // 32 * step
    checked(backend, plan, inputs)


@pytest.mark.sampled(8)
@pytest.mark.each_choice
@EACH
@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("mask", MASKS[1:], ids=str)
def test_nonfinite_inputs_do_not_change_rows_that_do_not_see_them(
    backend, kernel, mask, poison, scale
):
    """A nonfinite key affects all columns of a row, a nonfinite value only one."""
    sizes = {"heads": 4, "kv_heads": 2, "M": 70, "N": 110, "d": 40, "dv": 24}
    plan = planned(kernel, backend, **sizes, **mask, scale=scale, multiprocessors=3)
    inputs = inputs_of(plan)
    clean = checked(backend, plan, inputs)
    inputs["V"][:, 1, 33, 5] = inputs["K"][:, 1, 50, 7] = poison
    spoilt = checked(backend, plan, inputs)
    assert all((spoilt[x][0, :2] == clean[x][0, :2]).all() for x in ("O", "lse"))


@pytest.mark.few(4)
@pytest.mark.each_choice
@EACH
@pytest.mark.parametrize("N", [0, 1, 31, 32, 33, 64, 65])
def test_short_lengths(backend, kernel, N):
    for M in (1, 64, 65):
        for mask in MASKS:
            plan = planned(kernel, backend, heads=2, M=M, N=N, **mask, multiprocessors=3)
            checked(backend, plan)


@pytest.mark.usefixtures("every_check")
@pytest.mark.each_choice
@EACH
@pytest.mark.parametrize(
    "d, dv, dtype",
    [(33, 9, "float16"), (40, 24, "bfloat16"), (7, 72, "bfloat16"), (130, 65, "float16")],
)
def test_unaligned_outputs(backend, kernel, d, dv, dtype):
    plan = planned(kernel, backend, dtype, heads=2, kv_heads=1, M=70, N=45, d=d, dv=dv)
    q, k, v = inputs_of(plan).values()
    room = np.full((1, 2, 70, dv + 3), 7, q.dtype)
    backwards = room[:, :, ::-1, 1:-2]
    options = {"kernel": kernel, "backend": backend, "check": True}
    done = cupyfa.attention(q, k, v, out=backwards, **options)
    expected = cupyfa.attention(q, k, v, **options)
    assert done is backwards
    assert (done.view(np.uint16) == expected.view(np.uint16)).all()
    assert (room[..., 0] == 7).all() and (room[..., -2:] == 7).all()


@pytest.mark.few(1)
@pytest.mark.each_choice
@EACH
def test_results_of_a_head_do_not_depend_on_other_heads(backend, kernel):
    sizes = {"M": 200, "N": 150, "d": 24, "causal": "bottom-right"}
    many = planned(kernel, backend, batch=2, heads=4, kv_heads=2, **sizes, multiprocessors=5)
    inputs = inputs_of(many)
    together = checked(backend, many, inputs)
    alone = planned(kernel, backend, **sizes, multiprocessors=5)
    for batch, head in ((0, 1), (1, 3)):
        kv_head = head // 2
        one = {"Q": inputs["Q"][batch : batch + 1, head : head + 1]}
        one |= {x: inputs[x][batch : batch + 1, kv_head : kv_head + 1] for x in "KV"}
        of_head = {key: array[batch, head][None, None] for key, array in together.items()}
        require_same_bits(checked(backend, alone, one), of_head)


@pytest.mark.few(1)
@pytest.mark.each_choice("Q_stages")
@EACH_PERSISTENT
@pytest.mark.parametrize("Q_stages", [1, 2])
@pytest.mark.parametrize("mask", MASKS[:4], ids=str)
def test_any_number_of_blocks_gives_the_same_bits(backend, kernel, mask, Q_stages):
    """Results have the same bits whether one block computes all tiles or each tile has a block."""
    results = []
    for count in (1, 2, 3, 5, 7, 13, 64):
        tiles = {**SMALL, "Q_stages": Q_stages}
        sizes = {"batch": 2, "heads": 3, "M": 290, "N": 75, **mask}
        plan = planned(kernel, backend, **sizes, multiprocessors=count, tiles=tiles)
        assert blocks_of(kernel, plan) == min(count, 5 * 6)
        results.append(checked(backend, plan))
    require_same_bits(*results)


@pytest.mark.parametrize(
    "M, heads, blocks, d",
    [(70, 35, 12, 16), (130, 7, 3, 16), (250, 9, 4, 16), (70, 34, 33, 72), (70, 31, 33, 72)],
)
def test_tiles_in_turn_give_the_same_bits(backend, M, heads, blocks, d):
    """Each tile is computed once, even if the last group of heads is incomplete.

    With two tiles per head, one of 33 blocks is idle in each round.
    """
    sizes = {"heads": heads, "M": M, "N": 40, "d": d, "causal": "top-left"}
    alone, together = (
        checked(backend, planned(PERSISTENT[0], backend, **sizes, multiprocessors=count))
        for count in (1, blocks)
    )
    require_same_bits(alone, together)


@pytest.mark.sampled(4)
@pytest.mark.each_choice
@EACH_PERSISTENT
@pytest.mark.parametrize("Q_stages", [1, 2])
@pytest.mark.parametrize(
    "sizes",
    [
        {"Br": 128, "Bc": 32, "stages": 2},
        {"Br": 128, "Bc": 16, "stages": 3},
        {"Br": 192, "Bc": 64, "stages": 2},
        {"Br": 192, "Bc": 32, "stages": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("mask", [{"causal": "top-left"}, {"window": (70, 3)}], ids=str)
def test_warpgroups_skip_masked_tiles_without_deadlock(backend, kernel, mask, sizes, Q_stages):
    """The next Q tile is loaded only after all V tiles for the current Q tile."""
    how = {"multiprocessors": 1, "tiles": {**sizes, "Q_stages": Q_stages}}
    checked(backend, planned(kernel, backend, heads=2, M=390, N=400, **mask, **how))


def test_turns_do_not_change_bits(backend):
    results = []
    for turns in (1, 2, 3):
        tiles = {"Br": 128, "Bc": 32, "stages": 1, "Q_stages": 1, "turns": turns}
        sizes = {"M": 150, "N": 200, "dv": 136, "causal": "top-left"}
        plan = planned(FORWARD["wgmma_fp16x2"], backend, **sizes, multiprocessors=1, tiles=tiles)
        results.append(checked(backend, plan))
    require_same_bits(*results)


@EACH_PERSISTENT
def test_there_are_no_more_blocks_than_multiprocessors(kernel):
    for M, heads, blocks in ((64, 2, 2), (192, 132, 132), (193, 100, 132), (100_000, 16, 132)):
        problem = Problem.of_sizes(M=M, heads=heads, d=64, dtype=kernel.dtypes[0])
        plan = planning.plan(kernel, problem, limits_of("90"))
        assert blocks_of(kernel, plan) == blocks


@pytest.mark.each_choice
@pytest.mark.parametrize("consumers, threads", [(1, 256), (2, 384), (3, 512)])
@pytest.mark.parametrize("kernel", [x for x in RUNGS if x.name not in OF_TWO], ids=name)
def test_up_to_three_warpgroups_of_consumers(kernel, consumers, threads):
    engine = Simulator()
    tiles = {"Br": 64 * consumers, "Bc": 96 if kernel.rounding else 48, "stages": 3}
    sizes = {"M": 210, "N": 200, "causal": "top-left", "scale": -0.4}
    plan = planned(kernel, engine, **sizes, tiles=tiles)
    assert threads in [x.threads for x in plan.launches if x.entry == kernel.name]
    results = [checked(Simulator(schedule=schedule), plan) for schedule in (None, 1, 2)]
    require_same_bits(*results)


SHORT = (
    ("wgmma_persistent", {"M": 256, "N": 256, "d": 32}, 256),
    ("wgmma_persistent", {"M": 200, "N": 130, "d": 24, "dv": 32}, 256),
    ("wgmma_columns", {"M": 256, "N": 200, "d": 72}, 128),
    ("wgmma_columns", {"M": 240, "N": 250, "d": 80, "dv": 65}, 128),
)


@pytest.mark.few(2)
@pytest.mark.parametrize("name, sizes, Br", [SHORT[i] for i in (0, 2, 1, 3)])
def test_many_short_heads_have_large_tiles(backend, name, sizes, Br):
    """Large tiles need many heads, a device's worth of them, which a device with one SM has."""
    plan = planned(ALL[name], backend, multiprocessors=1, tiles={}, heads=2, **sizes)
    assert plan.constants["Br"] == Br
    checked(backend, plan)


@pytest.mark.parametrize("name, sizes, Br", SHORT)
def test_other_problems_have_smaller_tiles(name, sizes, Br):
    def rows(**others):
        problem = Problem.of_sizes(
            **{**sizes, "batch": 100, "heads": 16, **others}, dtype="float16"
        )
        return planning.plan(ALL[name], problem, limits_of("90")).constants["Br"]

    assert rows() == Br
    assert all(rows(**x) < Br for x in ({"causal": True}, {"softcap": 5.0}, {"d": 96}, {"M": 300}))
