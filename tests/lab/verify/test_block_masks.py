"""Block masks in checks, benchmarks and plans, where a problem's masks form one block mask."""

import shlex

import numpy as np
import pytest
from helpers.cli import SIMULATOR, cli

import cupyfa
from cupyfa import Problem, Simulator
from cupyfa.arrays import block_mask
from cupyfa.lab.bench import timing
from cupyfa.lab.verify import failures
from cupyfa.lab.verify.case import Case
from cupyfa.lab.verify.failures import RIGHT, Stored
from cupyfa.lab.verify.fuzz import Fuzz
from cupyfa.lab.verify.shrink import shrunk
from cupyfa.lab.verify.tasks import Task, perform
from cupyfa.ladder.lookup import record_named
from cupyfa.planner import choose_kernel
from cupyfa.problem.optional_inputs import KEY_TILES, MAPS, ROW_TILES

BACKEND = Simulator()
DOCUMENTS = {"mask_mod": "doc[query] == doc[key]", "captured": {"doc": "i32[M|N]"}}
SIZES = {"batch": 2, "heads": 2, "M": 200, "N": 180, "d": 8}
TOGETHER = {**SIZES, **DOCUMENTS, "mask": "1h1n", "causal": True, "block_mask": True}


def planned(kernel, **given):
    return choose_kernel.plan(record_named(kernel), Problem.of_sizes(**given), BACKEND.limits)


def maps(plan):
    return {x.name: x.shape for x in plan.problem.operands if x.name in MAPS}


def test_maps_are_those_of_the_block_mask_of_all_masks():
    plan = planned("fa2", **TOGETHER)
    rows, keys = plan.constants["Br"], plan.constants["Bc"]
    assert maps(plan) == {KEY_TILES: (1, 2, -(-200 // rows), -(-180 // keys) + 2)}
    assert plan.launches[0].constants["has_key_tiles"]
    inputs = Case("forward", plan.problem, seed=3).inputs()
    assert not any(name.removeprefix("mods.") in MAPS for name in inputs)
    text, doc = DOCUMENTS["mask_mod"], inputs["mods.doc"]
    array = np.broadcast_to(inputs["mods.mask"], (1, 2, 200, 180))
    sizes = {"M": 200, "N": 180, "backend": BACKEND}
    expected = cupyfa.block_mask(mask_mod=text, captured={"doc": doc}, **sizes)
    expected = (expected & cupyfa.block_mask(array, backend=BACKEND)).states(rows, keys)
    found = block_mask.readable(BACKEND, plan, inputs)["mods.key_tiles"]
    np.testing.assert_array_equal(found, block_mask.map_of(expected))
    assert (expected == block_mask.EMPTY).any() and (expected == block_mask.PARTIAL).any()


def test_other_tiles_have_other_maps():
    plans = choose_kernel.candidates(
        record_named("fa2"), Problem.of_sizes(**TOGETHER), BACKEND.limits
    )
    for plan in plans:
        tiles = -(-200 // plan.constants["Br"]), -(-180 // plan.constants["Bc"]) + 2
        assert maps(plan) == {KEY_TILES: (1, 2, *tiles)}
    assert len({str(maps(plan)) for plan in plans}) > 1
    a, b = ({"mods.key_tiles": np.full((1, 1, 2, 4), x, np.int32)} for x in (4, 5))
    memory = {}
    for x in (a, b, a):  # maps of equal shapes, for different tile sizes
        found = timing.placed(BACKEND, x, memory)
        np.testing.assert_array_equal(found["mods.key_tiles"], x["mods.key_tiles"])


def test_a_failure_with_a_block_mask_is_run_again_with_it(tmp_path):
    case = Case("forward", Problem.of_sizes(**TOGETHER), seed=2, layout="gaps")
    *_, outcome = perform(BACKEND, Task(case, ("fa2",), keep=True))
    assert outcome.kind == RIGHT
    command = failures.command(case, outcome, {"backend": "simulator"})
    file = failures.write(tmp_path, Stored(case, outcome, made_with={}), command)
    again = cupyfa.lab.replay(file, backend="simulator")
    assert again.stored.case == case and again.now == outcome
    assert "block_mask layout=gaps" in cli(*shlex.split(command)[1:]).stdout
    plain = shrunk(case, lambda x: x.problem.has_mask).problem
    assert not plain.block_mask and plain.M == 1
    kept = shrunk(case, lambda x: x.problem.block_mask).problem
    assert len(kept.modifiers.mask) == 1 and kept.causal is None


def test_kernels_that_visit_all_tiles_and_empty_problems_have_no_maps():
    assert maps(planned("mma_slices", **{**TOGETHER, "dtype": "float16"})) == {}
    assert maps(planned("fa2", **{**TOGETHER, "M": 0})) == {}
    assert set(maps(planned("two_pass", **TOGETHER))) == {KEY_TILES, ROW_TILES}


@pytest.mark.parametrize("kernel", ["fa2", "two_pass"])
def test_random_cases_have_block_masks(kernel):
    record = record_named(kernel)
    drawn = [
        Fuzz(record, BACKEND, seed).sample(i).case.problem for seed in range(8) for i in (24, 28)
    ]
    masked = [p for p in drawn if p.has_mask]
    assert 0 < sum(p.block_mask for p in masked) < len(masked)


def test_plans_of_a_block_mask_are_those_of_its_calls():
    doc = np.arange(70) // 9
    mask = cupyfa.block_mask(
        mask_mod="doc[query] == doc[key]", captured={"doc": doc}, M=70, N=70, backend=BACKEND
    )
    q = np.zeros((1, 2, 70, 8), np.float32)
    how = {"mask": (mask, "head + key > 0"), "kernel": "fa2", "backend": BACKEND}
    made = cupyfa.plan(M=70, d=8, heads=2, **how)
    assert made.problem == cupyfa.compile(q, q, q, **how).plan.problem and maps(made)
    with pytest.raises(ValueError, match="a block mask for .*M=70.* but the call has .*M=71"):
        cupyfa.plan(M=71, d=8, heads=2, **how)


def test_benchmarks_show_both():
    given = ("--mask-mod", DOCUMENTS["mask_mod"], "--captured", "doc=i32[M]", "-M", 40, "-d", 8)
    swept = ("-p", "block_mask=false,true", "--budget", 0.01, "--format", "csv")
    shown = cli("bench", "fa2", "--alone", *SIMULATOR, *given, *swept)
    assert ["block_mask" in row for row in shown.stdout.splitlines()] == [False, False, True]
    assert "also count the pairs that mask and mask_mod hide" in shown.stderr
