"""`cupyfa.memory` and `cupyfa memory`: the bytes that are held and moved, by formula and plan."""

import csv
import shutil

import pytest
from helpers import own_kernel
from helpers.cli import cli, strict

import cupyfa
from cupyfa import Problem, Simulator
from cupyfa.lab.analysis import footprint, nsight as profiling
from cupyfa.lab.analysis.formulas import naive_bytes, naive_scratch, tiled_bytes
from cupyfa.ladder import LADDER
from cupyfa.ladder.operations import OPERATIONS
from cupyfa.planner.choose_kernel import plan

SIZES = {"batch": 2, "heads": 4, "M": 300, "d": 64}
ARGS = ("memory", "-B", 2, "-H", 4, "-M", 300, "-d", 64)


@pytest.fixture(autouse=True)
def without_a_gpu(request):
    """Plans are for an H100, wherever the tests run."""
    if "cuda" not in request.fixturenames:
        request.getfixturevalue("no_device")


def test_naive_and_tiled_attention_by_formula():
    """The same figures as in a roofline: S and P written and read, each other array once."""
    p = Problem.of_sizes(batch=2, heads=4, kv_heads=2, M=50, N=70, d=16, dtype="float16")
    q, kv, scores = 2 * 4 * 50 * 16 * 2, 2 * 2 * 70 * 16 * 2, 2 * 4 * 50 * 70 * 2
    for masked in (p, p.with_options(causal="bottom-right")):
        assert tiled_bytes("forward", masked) == 2 * q + 2 * kv
        assert naive_bytes("forward", masked) == 2 * q + 2 * kv + 4 * scores
        assert naive_scratch("forward", masked) == 2 * scores
    rows, lse = cupyfa.lab.roofline(["naive", "tiled"], device="h100", backward=True, **SIZES), 4
    p = rows[0].problem
    size = 2 * 4 * 300 * 64 * p.itemsize
    assert rows[1].bytes == tiled_bytes("backward", p) == 8 * size + 2 * 4 * 300 * lse
    assert rows[0].bytes == naive_bytes("backward", p)


@pytest.mark.parametrize("backward", [False, True])
def test_naive_and_tiled_attention_move_the_same_in_the_roofline(backward):
    how = {"backward": backward, "d": 128, "dtype": "float16"}
    counted = {x.computation: x.moved for x in cupyfa.lab.memory(backend="simulator", **how)}
    drawn = cupyfa.lab.roofline(["naive", "tiled"], device="h100", measure=False, **how)
    assert {x.computation: x.bytes for x in drawn} == {x: counted[x] for x in ("naive", "tiled")}


def test_gradients_of_arrays_are_counted_in_every_row():
    how = {"backward": True, "bias": "1hmn", "wrt": "bias", "heads": 2, "M": 64, "d": 16}
    rows = cupyfa.lab.memory("two_pass", backend="simulator", ncu=False, **how)
    assert len({x.outputs for x in rows}) == 1
    plain = cupyfa.lab.memory("two_pass", backend="simulator", **{**how, "wrt": None})
    assert [x.outputs - y.outputs for x, y in zip(rows, plain)] == 3 * [2 * 64 * 64 * 4]
    naive, tiled, two_pass = cupyfa.lab.roofline(
        ["naive", "tiled", "two_pass"], device="h100", **how
    )
    assert two_pass.bytes >= tiled.bytes == rows[1].moved and naive.bytes == rows[0].moved


def test_arrays_and_scratch_of_a_plan():
    p = Problem.of_sizes(heads=2, M=30, N=20, d=8)
    (*_, row) = cupyfa.lab.memory("baseline", heads=2, M=30, N=20, d=8, batch=1)
    q, kv, s = 4 * 2 * 30 * 8, 4 * 2 * 20 * 8, 4 * 2 * 30 * 20
    assert (row.inputs, row.outputs, row.scratch) == (q + 2 * kv, q + 4 * 2 * 30, 2 * s)
    limits = footprint.limits_of("90")
    assert row.scratch == plan(LADDER["forward"]["baseline"], p, limits).scratch_bytes


def test_the_whole_ladder_and_the_formulas():
    for backward in (False, True):
        rows = cupyfa.lab.memory(backward=backward, **SIZES)
        operation = "backward" if backward else "forward"
        names = [row.computation for row in rows]
        assert names[:2] == ["naive", "tiled"]
        ladder = [x.name for x in LADDER[operation].values() if x.takes("float32")]
        assert set(names[2:]) <= set(ladder) and len(names) > 4
        for row in rows:
            assert row.device == "sm_90" and not row.note
        for kernel in rows[2:]:
            held = kernel.inputs + kernel.outputs
            assert held == OPERATIONS[operation].bytes(kernel.problem) and kernel.moved is None
        naive, tiled = rows[:2]
        scores = 2 * 4 * 300 * 300 * 4
        assert (naive.scratch, tiled.scratch) == ((4 if backward else 2) * scores, 0)
        assert tiled.moved == tiled.inputs + tiled.outputs
        assert naive.moved == tiled.moved + (10 if backward else 4) * scores


def test_kernels_that_are_named():
    rows = cupyfa.lab.memory(["columns", "two_pass"], dtype="float16", causal=True, **SIZES)
    assert [row.computation for row in rows] == ["naive", "tiled", "columns", "two_pass"]
    assert rows[2].constants == {"Br": 32, "Bc": 32}
    large = {**SIZES, "d": 512, "dtype": "float16"}
    (_, _, refused, _) = cupyfa.lab.memory(["mma_pipelined", "fa2"], **large)
    assert refused.note == "its head dimensions end at 256" and refused.scratch is None
    with pytest.raises(cupyfa.Unsupported, match="end at 256; kernels that can: .*fa2"):
        cupyfa.lab.memory(["mma_pipelined", "wgmma"], **large)
    (naive, kernel) = cupyfa.lab.memory("softmax_safe", M=20, N=30)
    assert (naive.scratch, kernel.scratch) == (0, 0)
    assert naive.moved == 2 * 4 * 20 * 30


def test_d_of_0_is_shown_as_0():
    (naive, tiled, kernel) = cupyfa.lab.memory("fa2", **{**SIZES, "d": 0})
    assert naive.inputs == tiled.inputs and kernel.problem.d == 0
    assert str(kernel.problem).startswith("batch=2 heads=4 M=300 N=300 d=0 float32")
    assert "computed as one column" in kernel.note and kernel.inputs > naive.inputs


def test_a_users_kernel(tmp_path):
    (*_, row) = cupyfa.lab.memory(f"{own_kernel.write(tmp_path)}:mine", **SIZES)
    assert row.scratch == 0


class Measuring(Simulator):
    """Pretends to have a stream and to measure peak memory, like a GPU."""

    stream = 0

    def peak(self, call):
        call()
        return 12_345_678


@pytest.mark.slow
def test_measured_figures_are_shown_with_the_formulas(monkeypatch):
    counters = [
        profiling.Counter(launch, name, value, unit)
        for launch in ("mma_split_kv", "merge_splits")
        for name, value, unit in (("duration", 2.0, "ms"), ("DRAM traffic", 1500.0, "GB/s"))
    ]
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(footprint, "profile", lambda kernel, case: counters)
    sizes = {"batch": 1, "heads": 1, "M": 9, "d": 8, "dtype": "float16"}
    rows = cupyfa.lab.memory(["mma_split_kv", "baseline"], backend=Measuring(), **sizes)
    assert [row.peak for row in rows] == [None, None, 12_345_678, 12_345_678]
    assert [row.dram for row in rows] == [None, None, 2 * 3e9, None]  # of cuBLAS nothing is seen
    row = rows[2].row()
    assert (row["peak_MB"], row["DRAM_MB"]) == (12.345678, 6000)
    assert (row["M"], row["d"], row["dtype"], row["device"]) == (9, 8, "float16", rows[2].device)


@pytest.mark.slow
def test_a_missing_nsight_compute_is_reported(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    sizes = {"batch": 1, "heads": 1, "M": 9, "d": 8}
    with pytest.warns(UserWarning, match="ncu is not on the PATH"):
        cupyfa.lab.memory("fa2", backend=Measuring(), **sizes)


@pytest.mark.gpu
def test_peak_memory_on_the_gpu(cuda):
    for row in footprint.memory(["fa2", "baseline"], backend=cuda, ncu=False, **SIZES)[2:]:
        held = row.inputs + row.outputs + row.scratch
        assert held <= row.peak <= held + 2**23


def test_the_table_as_data():
    rows = strict(cli(*ARGS, "--format", "json").stdout)
    assert rows[0]["computation"] == "naive" and rows[0]["moved_MB"] > rows[1]["moved_MB"]
    fa2 = next(row for row in rows if row["computation"] == "fa2")
    assert fa2["scratch_MB"] == 0 and fa2["tile"] == "Br=128 Bc=32" and fa2["peak_MB"] is None
    table = list(csv.DictReader(cli(*ARGS, "--format", "csv").stdout.splitlines()))
    assert [row["computation"] for row in table] == [row["computation"] for row in rows]
    assert cli(*ARGS, "--format", "md").stdout.startswith("| computation | device | batch |")


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("more", [(), ("--backward", "--causal")])
def test_the_table_fits_the_terminal(monkeypatch, columns, more):
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = cli(*ARGS, *more).stdout
    assert shown.startswith("sm_90: batch=2 heads=4 M=300 N=300 d=64 float32")
    assert max(map(len, shown.splitlines())) <= max(columns, 81)
    assert "…" not in shown
