"""`cupyfa.memory` and `cupyfa memory`: what is held and moved, by computation and by step."""

import csv
import json
import shutil

import pytest
from helpers import own_kernel
from helpers.cli import cli, refused, strict

import cupyfa
from cupyfa import Simulator
from cupyfa.analysis import memory as footprint
from cupyfa.analysis import profile as profiling
from cupyfa.analysis import traffic
from cupyfa.ladder import LADDER
from cupyfa.operations import OPERATIONS

SIZES = {"batch": 2, "heads": 4, "M": 300, "d": 64}
ARGS = ("memory", "-B", 2, "-H", 4, "-M", 300, "-d", 64)


@pytest.fixture(autouse=True)
def without_a_gpu(request):
    """Plans are for an H100, wherever the tests run."""
    if "cuda" not in request.fixturenames:
        request.getfixturevalue("no_device")


def test_the_whole_ladder_beside_what_is_no_kernel():
    for backward in (False, True):
        rows = cupyfa.memory(backward=backward, **SIZES)
        operation = "backward" if backward else "forward"
        names = [row.computation for row in rows]
        assert names[:2] == ["naive", "tiled"]
        ladder = [x.name for x in LADDER[operation].values() if x.takes("float32")]
        assert set(names[2:]) <= set(ladder) and len(names) > 4
        for row in rows:
            assert row.device == "sm_90" and row.steps and not row.note
            assert traffic.moved(row.steps) >= row.least == OPERATIONS[operation].bytes(row.problem)
            assert row.inputs + row.outputs == row.least
        scores = 2 * 4 * 300 * 300 * 4
        small = 2 * 4 * 300 * 4 if backward else 0  # D
        assert rows[0].scratch == (5 if backward else 3) * scores + small


def test_kernels_that_are_named():
    rows = cupyfa.memory(["columns", "two_pass"], dtype="float16", causal=True, **SIZES)
    assert [row.computation for row in rows] == ["naive", "tiled", "columns", "two_pass"]
    assert rows[2].constants == {"Br": 32, "Bc": 32}
    large = {**SIZES, "d": 512, "dtype": "float16"}
    (_, _, refused, _) = cupyfa.memory(["mma_async", "fa2"], **large)
    assert refused.note == "its head dimensions end at 256" and refused.scratch is None
    with pytest.raises(cupyfa.Unsupported, match="end at 256; kernels that can: .*fa2"):
        cupyfa.memory(["mma_async", "wgmma"], **large)
    (naive, kernel) = cupyfa.memory("softmax_safe", M=20, N=30)
    assert (naive.scratch, kernel.scratch) == (0, 0)
    assert sum(x.read for x in kernel.steps) == 3 * sum(x.read for x in naive.steps)


def test_no_columns_are_none_of_the_problem():
    (naive, tiled, kernel) = cupyfa.memory("fa2", **{**SIZES, "d": 0})
    assert naive.least == tiled.least == kernel.least and kernel.problem.d == 0
    assert str(kernel.problem).startswith("batch=2 heads=4 M=300 N=300 d=0 float32")
    assert "no columns count as one" in kernel.note and kernel.inputs > naive.inputs


def test_a_kernel_of_ones_own(tmp_path):
    (*_, row) = cupyfa.memory(f"{own_kernel.write(tmp_path)}:mine", **SIZES)
    assert row.scratch == 0
    assert (row.steps is None) == ("its record names no" in row.note)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"kernels": ["fa2", "columns"]}, r"fa2 \(forward\), columns \(backward\)"),
        ({"kernels": "fa2", "backward": True}, r"fa2 \(forward\) is not"),
        ({"M": [16, 32]}, "these sizes make 2"),
        ({"kernels": "fa9"}, "'fa9' is unknown"),
        ({"kernels": "fa2", "Q": 3}, "forward has no Q"),
        ({"kernels": "softmax_safe"}, "softmax has no .*d"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        cupyfa.memory(**{**SIZES, **arguments})


class Measuring(Simulator):
    """Says that it has a stream, as a GPU does, and how much a call held."""

    stream = 0

    def peak(self, call):
        call()
        return 12_345_678


def test_what_is_measured_stands_beside(monkeypatch):
    counters = [
        profiling.Counter(launch, name, value, unit, None)
        for launch in ("mma_split_k", "merge_parts")
        for name, value, unit in (("duration", 2.0, "ms"), ("DRAM traffic", 1500.0, "GB/s"))
    ]
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(profiling, "profile", lambda kernel, case: counters)
    sizes = {"batch": 1, "heads": 1, "M": 9, "d": 8, "dtype": "float16"}
    rows = cupyfa.memory(["mma_split_k", "baseline"], backend=Measuring(), **sizes)
    assert [row.peak for row in rows] == [None, None, 12_345_678, 12_345_678]
    assert [row.dram for row in rows] == [None, None, 2 * 3e9, None]  # of cuBLAS nothing is seen
    row = rows[2].row()
    assert (row["peak_MB"], row["DRAM_MB"]) == (12.3, 6000)


def test_without_nsight_compute_that_is_said(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    sizes = {"batch": 1, "heads": 1, "M": 9, "d": 8}
    with pytest.warns(UserWarning, match="ncu is not on the PATH"):
        cupyfa.memory("fa2", backend=Measuring(), **sizes)


@pytest.mark.gpu
def test_what_the_gpu_holds(cuda):
    for row in footprint.memory(["fa2", "baseline"], backend=cuda, ncu=False, **SIZES)[2:]:
        held = row.inputs + row.outputs + row.scratch
        assert held <= row.peak <= held + 2**23


# The command


def test_the_table_as_data():
    rows = strict(cli(*ARGS, "--format", "json").stdout)
    assert rows[0]["computation"] == "naive" and rows[0]["x_least"] > rows[1]["x_least"]
    fa2 = next(row for row in rows if row["computation"] == "fa2")
    assert fa2["scratch_MB"] == 0 and fa2["tile"] == "Br=128 Bc=32" and fa2["peak_MB"] is None
    table = list(csv.DictReader(cli(*ARGS, "--format", "csv").stdout.splitlines()))
    assert [row["computation"] for row in table] == [row["computation"] for row in rows]
    assert cli(*ARGS, "--format", "md").stdout.startswith("| computation | tile | inputs MB |")


def test_steps():
    rows = json.loads(cli(*ARGS, "columns", "--steps", "--format", "json").stdout)
    mine = [row["step"] for row in rows if row["computation"] == "columns"]
    assert mine == ["delta", "clear_sums", "columns", "round_sums"]
    assert rows[0]["reads"].startswith("Q ") and rows[0]["writes"].startswith("S ")


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("more", [(), ("--backward", "--causal"), ("--backward", "--steps")])
def test_the_table_fits_the_terminal(monkeypatch, columns, more):
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = cli(*ARGS, *more).stdout
    assert shown.startswith("sm_90: batch=2 heads=4 M=300 N=300 d=64 float32")
    assert max(map(len, shown.splitlines())) <= max(columns, 81)
    assert "…" not in shown


def test_bad_arguments_of_the_command():
    assert "'fa9' is unknown" in refused("memory", "fa9", code=2)
