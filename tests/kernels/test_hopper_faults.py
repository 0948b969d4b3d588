"""Removing any wait, arrival, fence or barrier of the rungs with TMA causes a fault."""

import os
import re
from dataclasses import replace
from unittest.mock import patch

import pytest
from helpers.broken_kernels import changed
from helpers.left_out import VARIABLE, optional
from helpers.problems import inputs_of, planned

from cupyfa import Problem, WrongResult
from cupyfa.errors import SimulatorFault
from cupyfa.lab.bench.sweeps import usual_dtype
from cupyfa.ladder import LADDER, backward
from cupyfa.planner import choose_kernel as planning, source as sources
from cupyfa.problem.dtypes import E4M3_INPUTS
from cupyfa.problem.options import OPTIONS
from cupyfa.runtime import guard
from cupyfa.runtime.simulator import Simulator

OF_EARLY_LAUNCH = "wait_for_launch_before"
ORDERS = re.compile(
    r"(?:if \([^;(]*(?:\(\))?\) )?(?:\b[\w.\[\]]+(?:\.|::)|::|\b)"
    r"(?:wait|arrive|arrive_expect_tx|release|barrier_sync|barrier_arrive"
    r"|fence_proxy_async|fence_barrier_init|wgmma_fence|wgmma_commit_group"
    r"|wgmma_wait_group<\w+>"
    rf"|{OF_EARLY_LAUNCH}"
    r"|bulk_commit_group|bulk_wait_group_read|bulk_wait_group|__syncthreads)\([^;{]*\);"
)
WITH_TMA = ("wgmma", "mma_tma")
RUNGS = {name: kernel for kernels in LADDER.values() for name, kernel in kernels.items()}
# Tile sizes with few enough stages that each is reused; dS has a single stage.
TILES = {
    "mma_tma": {"Br": 64, "Bc": 64, "Wr": 16, "stages": 2},
    "wgmma_persistent": {"Br": 128, "Bc": 64, "stages": 2, "Q_stages": 1},
    "wgmma_latent": {"Br": 64, "Bc": 32, "stages": 2},
    "wgmma_columns": {"Br": 64, "Bc": 128, "stages": 2, "dS_stages": 1},
    "wgmma_two_pass": {"Br": 64, "Bc": 128, "Bk": 64, "stages": 2},
    "wgmma_fp16x2_two_pass": {},
}
# Only with e4m3 inputs does wgmma_fp8 have persistent blocks, which begin before V is transposed.
OTHER_DTYPES = {"wgmma_fp8": (E4M3_INPUTS.name,)}
# Maps each header with synchronizing statements to a rung that needs all of these statements.
HEADERS = {
    "warpgroup.cuh": "wgmma",
    "tma_tile.cuh": "wgmma",
    "pipeline.cuh": "wgmma",
    "ping_pong.cuh": "wgmma_overlap",
    "add_dQ.cuh": "wgmma_columns",
    "register_operands.cuh": "wgmma_columns",
    "load_rows.cuh": "wgmma_two_pass",
    "tile_queue.cuh": "wgmma_columns",
    "column_partition.cuh": "wgmma_columns",
    "split_wgmma.cuh": "wgmma_fp16x2",
    "split_key_pass.cuh": "wgmma_fp16x2_two_pass",
}
SIZES = {"heads": 3, "M": 200, "N": 300, "d": 72, "dv": 64, "causal": "top-left"}
# Sizes for code that runs only with d <= 64: files for narrow heads, the persistent blocks of
# wgmma_columns, and tiles that skip a quarter.
OF_NARROW = ("wgmma_fp16x2_two_pass_columns.cu", "register_operands.cuh")
OF_STAYING = ("shared.K_pipeline.release(keys);", "shared.V_pipeline.release(keys);")
OF_QUEUE = "tile_queue.cuh"
OF_QUARTERS = "dS_of"
NARROW = {**SIZES, "d": 40}
# Sizes with which the pass that reads kept dS reuses its stages; another pass needs dS not kept.
OF_KEPT_DS, OF_RECOMPUTED_DS = "wgmma_two_pass_kept_rows.cu", "wgmma_two_pass_rows.cu"
KEPT = {**SIZES, "M": 70, "N": 600, "causal": None}
# Sizes for the accumulation of dQ: without a mask, the blocks of a head run in sequence, and one
# block ends while other blocks still add to dQ.
OF_SUMS = "add_dQ.cuh"
SUMS = {**SIZES, "causal": None}
# Sizes for the launch that computes a bias gradient.
OF_BIAS = "wgmma_bias_gradient.cu"
BIAS = {**SIZES, "batch": 2, "bias": "f16[1hmn]", "wrt": "bias"}
# Sizes for kernels with separate files for d > 128.
WIDE = {"heads": 4, "kv_heads": 2, "M": 140, "N": 100, "d": 136, "dv": 24, "causal": True}
# Ping-pong turns only affect speed, so no kernel has to wait for them.
AWAITS_TURN = "barrier_sync(1 + warpgroup, 2 * warpgroup_size);"
AWAIT_TURNS = (AWAITS_TURN, "Turns::wait(warpgroup);")
# Only hardware requires a fence after registers were written; the simulator does not.
ANNOUNCES_REGISTERS = "int first_row, int first_key, int first_box) {\n  wgmma_fence();"
ANNOUNCES_V = '"B has one box");\n  wgmma_fence();'
# The wait for a skipped tile of V matters only if a copy is two tiles late: a later wait could then
# confuse two phases of the stage. No schedule in this test delays a copy that much.
AWAITS_SKIPPED = "for (; tiles > 0; --tiles) {\n      shared.V_pipeline.wait(values);"
# The simulator reads register operand A at issue, so registers may be overwritten at once.
KEEPS_REGISTERS = (
    "if (k + 1 < Bv / step) {\n        wgmma_commit_group();\n        wgmma_wait_group<1>();"
)
# In no schedule of this test does the V of a skipped tile arrive before its K.
AWAITS_SKIPPED_KEYS = "void skip() {\n    shared.K_pipeline.wait(keys);"
# This wait returns at once, since its barrier has already completed; the kernel has the wait only
# for the branch, which limits how the compiler moves code.
BRANCHES = "if constexpr (overlaps) shared.dO_pipeline.wait(rows);"
# Needed only by blocks without keys, which occur only in ragged batches.
WAITS_WITHOUT_KEYS = f"first_key)) {{\n    {OF_EARLY_LAUNCH}();"
WAITS_AFTER_NO_KEYS = f"(task));\n  if constexpr (persistent) {OF_EARLY_LAUNCH}();"
# Not reached in this test, because REPAIRED disables the repair of rows.
WAITS_FOR_REPAIR = f"}} else {{\n      {OF_EARLY_LAUNCH}();"
NOT_NEEDED_HERE = (
    *(BRANCHES, WAITS_WITHOUT_KEYS, WAITS_AFTER_NO_KEYS, WAITS_FOR_REPAIR),
    *(ANNOUNCES_REGISTERS, ANNOUNCES_V, AWAITS_SKIPPED, AWAITS_SKIPPED_KEYS),
    KEEPS_REGISTERS,
)
# Changes that disable the repair of nonfinite sums, which would hide a missing statement.
REPAIRED = {
    "all_finite.cuh": ("return __all_sync(full_warp, finite);", "return true;"),
    "nonfinite.cuh": ("return __any_sync(full_warp, overflows", "return false && (overflows"),
}


def tiles_of(kernel):
    return TILES.get(kernel, {"Br": 128, "Bc": 64, "stages": 2})


def path_of(file):
    (path,) = sources.KERNELS.rglob(file)
    return path


def text_of(file):
    return path_of(file).read_text()


def written(folder, file, text):
    """Writes a changed file into the folder, under the path by which kernels find it."""
    path = path_of(file)
    within = sources.INCLUDE if path.is_relative_to(sources.INCLUDE) else sources.KERNELS
    to = folder / (path.name if path.suffix == ".cu" else path.relative_to(within))
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(text)


def files_of(kernel):
    return [f"{launch.entry}.cu" for launch in RUNGS[kernel].launches]


def before(file, number):
    """Returns the file's text before one of its synchronizing statements."""
    text = text_of(file)
    return text[: list(ORDERS.finditer(text))[number - 1].start()]


def statement(file, number):
    return list(ORDERS.finditer(text_of(file)))[number - 1][0]


def is_of_mods(before):
    """Returns whether the code after `before` is compiled only for modified scores."""
    return before.rfind("if constexpr (has_score_mod) {") > before.rfind("} else {")


def places():
    """Yields kernel, file and number of each synchronizing statement."""
    files = [(kernel, file) for file, kernel in HEADERS.items()]
    files += [
        (name, file)
        for name in RUNGS
        if name.startswith(WITH_TMA)
        for file in files_of(name)
        if file.startswith(WITH_TMA) and (file != OF_BIAS or name == "wgmma_columns")
    ]
    for kernel, file in files:
        text = text_of(file)
        for number, found in enumerate(ORDERS.finditer(text), 1):
            is_needed = not text[: found.end()].endswith(NOT_NEEDED_HERE)
            can_run = "softcap" in OPTIONS or not is_of_mods(text[: found.start()])
            if found[0] not in AWAIT_TURNS and is_needed and can_run:
                line = text[: found.start()].count("\n") + 1
                about_turns = file == "ping_pong.cuh" or "Turns" in found[0]
                place = (kernel, file, number, about_turns)
                marks = [pytest.mark.slow] * (file == OF_BIAS)
                yield pytest.param(*place, id=f"{file}:{line}-{found[0]}", marks=marks)


def files():
    """Yields the kernels and files that contain synchronizing statements."""
    for kernel, file in sorted({place.values[:2] for place in places()}):
        yield pytest.param(kernel, file, marks=[pytest.mark.slow] * (file == OF_BIAS))


def run_without(folder, kernel, file, with_turns, schedules=(None, 1, 2, 7, 9)):
    """Runs a kernel without one statement of a file, with two warpgroups and reused stages.

    Unless with_turns is true, the waits for ping-pong turns are removed too, since they could hide
    the fault.
    """
    for repairs, change in REPAIRED.items():
        assert change[0] in text_of(repairs), "the change must change something"
        written(folder, repairs, text_of(repairs).replace(*change))
    for name in {*HEADERS, *files_of(kernel)}:
        text = optional(text_of(name), ORDERS) if name == file else text_of(name)
        written(folder, name, text if with_turns else text.replace(AWAITS_TURN, ";"))
    broken = replace(RUNGS[kernel], folder=folder)
    is_wide = file == "column_partition.cuh" or str(file).endswith("_wide.cu")
    sizes, tiles = (WIDE, {}) if is_wide else (SIZES, tiles_of(kernel))
    if file == OF_KEPT_DS:
        sizes = KEPT
    if file == OF_RECOMPUTED_DS:
        tiles = tiles | {"room": 1}
    if file == OF_SUMS:
        sizes = SUMS
    if file == OF_BIAS:
        sizes = BIAS
    number = int(os.environ.get(VARIABLE, 0))
    stays = file == OF_QUEUE or (
        number
        and file in files_of("wgmma_columns")
        and file != OF_BIAS
        and statement(file, number) in OF_STAYING
    )
    of_quarters = number and OF_QUARTERS in statement(file, number)
    if number and OF_EARLY_LAUNCH in statement(file, number):
        sizes = {**sizes, "causal": "top-left", "M": 128, "N": 200}  # no row sees the last keys
    if file in OF_NARROW or stays or of_quarters:
        sizes, tiles = NARROW, {}
    if number and is_of_mods(before(file, number)):
        sizes = {**sizes, "softcap": 5.0}
    limits = replace(Simulator().limits, multiprocessors=2)
    few = 1 if stays else backward.FEWEST_PERSISTENT
    for dtype in (usual_dtype(broken), *OTHER_DTYPES.get(kernel, ())):
        problem = Problem.of_sizes(**sizes, scale=-0.2, dtype=dtype)
        with patch.object(backward, "FEWEST_PERSISTENT", few):
            plan = planning.plan(broken, problem, limits, **tiles)
        for schedule in schedules:
            guard.checked(Simulator(schedule=schedule), plan, inputs_of(plan), {})


@pytest.mark.few(6)
@pytest.mark.sampled(8, "file")
@pytest.mark.each_choice("file")
@pytest.mark.parametrize("kernel, file, number, about_turns", list(places()))
def test_removed_synchronization_is_found(tmp_path, monkeypatch, kernel, file, number, about_turns):
    monkeypatch.setenv(VARIABLE, str(number))
    # Zeros where a product has not arrived: a pattern of NaN would only be repaired.
    monkeypatch.setenv("CUPYFA_COMPILER_FLAGS", "-ftrivial-auto-var-init=zero")
    statement = text_of(file)[len(before(file, number)) :]
    of_product = statement.startswith("wgmma_wait_group")
    found = SimulatorFault if of_product else (SimulatorFault, WrongResult)
    named = r"a product .* with no wgmma_wait_group between" if of_product else None
    with pytest.raises(found, match=named):
        run_without(tmp_path, kernel, file, about_turns)


@pytest.mark.sampled(4, "kernel")
@pytest.mark.slow
@pytest.mark.parametrize("kernel, file", list(files()))
def test_unchanged_kernels_pass(tmp_path, monkeypatch, kernel, file):
    monkeypatch.setenv(VARIABLE, "0")
    run_without(tmp_path, kernel, file, with_turns=False, schedules=(None, 1))


def test_a_kernel_that_asks_for_more_registers_than_its_block_has_is_found(tmp_path):
    file, few = "backward/parts/gradient_warpgroups.cuh", "producer_registers = 24"
    broken = changed(tmp_path, "wgmma_columns", few, "producer_registers = 32", file)
    plan = planned(broken, Simulator(), {"M": 100, "N": 140, "d": 64}, Br=64, Bc=128)
    message = (
        "waits forever for registers that the block does not have: threads of its warpgroups ask "
        "for 32, 240, 240, in all 65536, .* at .*/wgmma_columns.cu:"
    )
    with pytest.raises(SimulatorFault, match=message):
        guard.checked(Simulator(), plan, inputs_of(plan), {})


WRITES_SUMS = "const_cast<RowSums<Br>*>(row_sums)[0] = {};"
ADDS_TO_SUMS = "atomicAdd(reinterpret_cast<float*>(const_cast<RowSums<Br>*>(row_sums)), 1.0f);"


@pytest.mark.parametrize(
    "broken, message",
    [
        (
            f"launch_dependents();\n    {OF_EARLY_LAUNCH}();",
            f"calls launch_dependents.. before {OF_EARLY_LAUNCH}",
        ),
        *(
            (
                f"{OF_EARLY_LAUNCH}();\n    {change}\n    launch_dependents();",
                f"{verb} .* of row_sums, which the next launch reads without waiting for this one",
            )
            for change, verb in ((WRITES_SUMS, "writes"), (ADDS_TO_SUMS, "updates"))
        ),
    ],
)
def test_a_pass_that_the_next_one_cannot_overlap_is_found(tmp_path, broken, message):
    right = f"{OF_EARLY_LAUNCH}();\n    launch_dependents();"
    file = "backward/wgmma_two_pass_columns.cu"
    kernel = changed(tmp_path, "wgmma_two_pass", right, broken, file)
    plan = planned(kernel, Simulator(), {"M": 100, "N": 140, "d": 64})
    with pytest.raises(SimulatorFault, match=message):
        guard.checked(Simulator(), plan, inputs_of(plan), {})


@pytest.mark.parametrize("kernel", ["wgmma_overlap", "wgmma_persistent"])
def test_results_do_not_depend_on_the_ping_pong_order(tmp_path, kernel):
    run_without(tmp_path, kernel, None, with_turns=False)
