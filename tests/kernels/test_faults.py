"""Faults inserted into a correct kernel: each must be detected by the right check."""

import re
from dataclasses import replace

import numpy as np
import pytest
from helpers.broken_kernels import changed
from helpers.left_out import VARIABLE, optional
from helpers.problems import FORWARD, check_case, inputs_of, name, planned

from cupyfa import WrongResult
from cupyfa.errors import SimulatorFault
from cupyfa.planner import source as sources
from cupyfa.planner.evaluate import source_path
from cupyfa.runtime import guard
from cupyfa.runtime.simulator import Simulator

SIZES = {"batch": 2, "heads": 2, "M": 50, "N": 45, "d": 8, "causal": "top-left"}


def run(kernel, backend, sizes=SIZES, **tiles):
    return check_case(kernel, backend, sizes, **tiles)


BARRIER = re.compile(r"__sync(?:threads|warp)\(\);  // (.*)")
# Without any tile of keys, the copy of Q may still be in flight when O overwrites Q.
WHERE_NO_KEYS_ARE = "Q is no longer read, and its copy has completed"
# The products before this barrier already make the lanes of a simulated warp wait for each other.
AFTER_PRODUCTS = "all lanes have read this tile"
OF_SPLITS_WITHOUT_KEYS = "without keys, nothing else waits for the initial maxima and sums"
WAIT = re.compile(
    rf"cp_async_wait_group<(.*)>\(\);(?!\n  __syncthreads\(\);  // {WHERE_NO_KEYS_ARE})"
)


def statements(pattern):
    """Returns file and index of each statement in the forward kernels that matches the pattern."""
    files = sorted((sources.KERNELS / "forward").glob("*.cu"))
    return [
        pytest.param(file.stem, number, id=f"{file.stem}-{found[1]}")
        for file in files
        if file.stem in FORWARD
        for number, found in enumerate(pattern.finditer(file.read_text()), 1)
        if found[1] not in (WHERE_NO_KEYS_ARE, AFTER_PRODUCTS, OF_SPLITS_WITHOUT_KEYS)
    ]


def run_without(tmp_path, monkeypatch, kernel, pattern, number, **changes):
    """Runs a kernel without one matching statement, under several thread schedules."""
    text = (sources.KERNELS / f"forward/{kernel}.cu").read_text()
    without = changed(tmp_path, kernel, text, optional(text, pattern))
    monkeypatch.setenv(VARIABLE, str(number))
    # Two blocks process several tiles of Q each; d and dv have several slices. A NaN in a masked
    # value makes v3 reread V, and a negative scale makes kernels negate Q.
    launch = without.launches[0]
    if launch.entry == kernel:
        without = replace(without, launches=(replace(launch, grid=lambda p, c: min(2, p.heads)),))
    sizes = {"heads": 2, "M": 140, "N": 75, "d": 40, "dv": 70, "causal": "top-left", "scale": -0.2}
    sizes |= changes
    # With fewer stages, kernels rely on more barriers.
    stages = {name: min(x) for name, x in without.candidates.items() if name == "stages"}
    plan = planned(without, Simulator(), sizes, **stages)
    inputs = inputs_of(plan)
    inputs["V"][..., 70, :] = np.nan
    for schedule in (None, 1, 2):
        guard.checked(Simulator(schedule=schedule), plan, inputs, {})


@pytest.mark.few(6)
@pytest.mark.each_choice("kernel")
@pytest.mark.parametrize("kernel, number", statements(BARRIER))
def test_a_removed_barrier_is_found(tmp_path, monkeypatch, kernel, number):
    with pytest.raises(SimulatorFault, match=r"race|no thread of this block has written"):
        run_without(tmp_path, monkeypatch, kernel, BARRIER, number)


@pytest.mark.slow
@pytest.mark.parametrize("kernel, number", statements(WAIT))
def test_a_copy_that_is_not_waited_for_is_named(tmp_path, monkeypatch, kernel, number):
    with pytest.raises(SimulatorFault, match=r"a copy .* with no cp_async_wait_group of that"):
        run_without(tmp_path, monkeypatch, kernel, WAIT, number, N=170, dv=72)


@pytest.mark.parametrize(
    "kernel, statement, found",
    [
        ("mma_split_kv", f"__syncthreads();  // {WHERE_NO_KEYS_ARE}", "race"),
        (
            *("mma_split_kv", "cp_async_wait_group<0>();"),
            "a copy .* is under way and this thread writes",
        ),
        ("fa2_split_kv", f"__syncthreads();  // {OF_SPLITS_WITHOUT_KEYS}", "race|has written"),
    ],
)
def test_a_removed_statement_for_blocks_without_keys_is_found(tmp_path, kernel, statement, found):
    without = changed(tmp_path, kernel, statement, ";")
    plan = planned(without, Simulator(), {"M": 140, "N": 0, "d": 40, "causal": True})
    with pytest.raises(SimulatorFault, match=found):
        for schedule in (None, 1, 2):
            guard.checked(Simulator(schedule=schedule), plan, inputs_of(plan), {})


def test_a_removed_barrier_of_a_second_launch_is_found(tmp_path):
    file = sources.KERNELS / "forward/steps/merge_splits.cu"
    (barrier,) = BARRIER.finditer(file.read_text())
    split = FORWARD["mma_split_kv"]
    for launch in split.launches:
        path = sources.KERNELS / source_path(split, launch)
        (tmp_path / path.name).write_text(path.read_text().replace(barrier[0], ";"))
    sizes = {"heads": 1, "M": 3, "N": 300, "d": 40, "dv": 70}
    plan = planned(replace(split, folder=tmp_path), Simulator(), sizes)
    assert plan.launches[0].numbers["num_splits"] > 1
    with pytest.raises(SimulatorFault, match=r"race|no thread of this block has written"):
        for schedule in (None, 1, 2):
            guard.checked(Simulator(schedule=schedule), plan, inputs_of(plan), {})


@pytest.mark.usefixtures("every_check")
@pytest.mark.parametrize(
    "right, wrong, line",
    [
        ("real(shared.Q[threadIdx.x][k])", "real(shared.Q[threadIdx.x][k + 1])", "shared.Q["),
        ("real(shared.K[first + i][k])", "real(shared.K[first + i + 1][k])", "shared.K["),
    ],
    ids=["column", "row"],
)
def test_an_index_one_past_a_row_of_shared_memory(tmp_path, right, wrong, line):
    kernel = changed(tmp_path, "fa2", right, wrong)
    with pytest.raises(SimulatorFault) as fault:
        run(kernel, Simulator())
    file, _, number = fault.value.place.partition(" (called from")[0].rpartition(":")
    assert file.endswith("fa2.cu")
    assert line in (tmp_path / "fa2.cu").read_text().splitlines()[int(number) - 1]


PAST_THE_END = ("O.row(batch, head, row)[col] =", "O.row(batch, head, row)[col + 1] =")
OF_Q = "    load_row(shared.Q[threadIdx.x], Q,"


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        (*PAST_THE_END, r"writes 4 bytes.*past the end of O"),
        (
            "from.row(batch, head, row)[col]",
            "from.row(batch, head, row)[col + 1]",
            r"reads 4 bytes.*past the end of [QKV]",
        ),
        (": scalar(real(0));", ": tile[col];", "no thread of this block has written"),
        (OF_Q, f"    if (row >= M) return;\n{OF_Q}", "returned"),
    ],
    ids=["write past the end", "read past the end", "uninitialised", "missed barrier"],
)
def test_an_access_or_barrier_is_a_fault_in_the_simulator(tmp_path, right, wrong, said):
    kernel = changed(tmp_path, "fa2", right, wrong)
    with pytest.raises(SimulatorFault, match=said):
        run(kernel, Simulator())


@pytest.mark.gpu
def test_a_write_past_the_end_of_an_array_on_the_gpu(tmp_path, cuda):
    kernel = changed(tmp_path, "fa2", *PAST_THE_END)
    with pytest.raises(WrongResult, match="wrote 4 bytes outside O"):
        run(kernel, cuda)


RESULTS = {
    "unwritten output": (
        "col < dv; ++col) {\n        O.row",
        "col < dv - 1; ++col) {\n        O.row",
    ),
    "unwritten row": ("    if (row < M) {", "    if (row < M - 1) {"),
    "wrong lse": ("= softmax.lse();", "= softmax.lse() + 1e-2f;"),
    "lse in base 2": ("= softmax.lse();", "= softmax.lse() * 1.44269504f;"),
    "unwritten lse": ("*lse.row(batch, head, row) = softmax.lse();", ""),
    "last key dropped": (
        "const Seen seen = seen_in_tile(extent, row, first_key, Bc);",
        "Seen seen = seen_in_tile(extent, row, first_key, Bc);\nseen.end -= first_key + Bc >= N;",
    ),
    "mask off by one": (
        "seen_in_tile(extent, row, first_key, Bc)",
        "seen_in_tile(extent, row - 1, first_key, Bc)",
    ),
    "scale forgotten": ("= {scale, mods};", "= {real(1), mods};"),
    "old sums not rescaled": ("+ i] * factor + sums[i];", "+ i] + sums[i];"),
}


@pytest.mark.few(5)
@pytest.mark.each_choice
@pytest.mark.parametrize("fault", RESULTS, ids=name)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_wrong_result_is_found(tmp_path, backend, fault, dtype):
    kernel = changed(tmp_path, "fa2", *RESULTS[fault])
    with pytest.raises(WrongResult, match=r"fa2 on batch=2 heads=2.*\n  (O|lse): "):
        check_case(kernel, backend, SIZES, dtype)


def test_unwritten_elements_are_counted(tmp_path, backend):
    kernel = changed(tmp_path, "fa2", *RESULTS["unwritten output"])
    with pytest.raises(WrongResult, match=f"{2 * 2 * 50} elements are NaN"):
        run(kernel, backend)


def test_a_written_input_is_found(tmp_path, backend):
    right = "    *lse.row(batch, head, row) = softmax.lse();"
    wrong = right + "\n      if (row == 0) const_cast<scalar*>(K.row(batch, head, 0))[1] = 7;"
    kernel = changed(tmp_path, "fa2", right, wrong)
    with pytest.raises(WrongResult, match="wrote its input K; the first byte written is at offset"):
        run(kernel, backend)


def test_the_simulator_works_after_a_fault(tmp_path):
    kernel = changed(tmp_path, "fa2", *PAST_THE_END)
    for _ in range(2):
        with pytest.raises(SimulatorFault):
            run(kernel, Simulator())
        run(FORWARD["fa2"], Simulator())
