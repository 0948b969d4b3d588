"""`cupyfa.replay`: stored failures, damaged files, and files that hold no failure."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from helpers import broken_kernels
from helpers.cli import SIMULATOR, cli
from helpers.problems import DTYPES

import cupyfa
from cupyfa import Problem, Simulator
from cupyfa.lab.verify import failures
from cupyfa.lab.verify.case import LAYOUTS, Case
from cupyfa.lab.verify.failures import DIFFERS, FAULT, RIGHT, WRONG_RESULT, Stored
from cupyfa.lab.verify.tasks import Task, perform
from cupyfa.ladder.lookup import record_named

CASE = Case("softmax", Problem.of_row_sizes(5, 19, "float32"), seed=4, layout="gaps")
MADE_WITH = {"device": "the simulator", "cupyfa": "0"}


def stored(tmp_path, fault, case=CASE, reruns=0):
    """Runs a broken kernel on a case and writes its failure to a file."""
    kernel = broken_kernels.write(tmp_path, fault)
    task = Task(case, (kernel,), reruns=reruns, keep=True)
    *_, outcome = perform(Simulator(), task)
    command = failures.command(case, outcome, {"backend": "simulator"})
    failure = Stored(case, outcome, reruns=reruns, made_with=MADE_WITH)
    return failures.write(tmp_path / "files", failure, command)


def kernel_of(file):
    """Returns the name of the kernel whose failure a file holds, as ``replay`` accepts it."""
    return failures.read(file).outcome.kernel


def replay(file, *args, code):
    return cli("replay", file, *SIMULATOR, *args, code=code)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_replayed_failure_fails_again_and_another_kernel_passes(tmp_path, dtype):
    case = replace(CASE, problem=Problem.of_row_sizes(5, 19, dtype))
    file = stored(tmp_path, broken_kernels.LAST_COLUMN_DROPPED, case)
    again = cupyfa.lab.replay(file, kernel_of(file), backend="simulator")
    assert again.stored.case == case
    assert again.now.kind == again.stored.outcome.kind == WRONG_RESULT
    assert again.now.verdicts == again.stored.outcome.verdicts
    for other in ("softmax_safe", record_named("softmax_online")):
        assert cupyfa.lab.replay(file, other, backend="simulator").now.kind == RIGHT


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "far"])
def test_the_file_has_inputs_results_and_bounds(tmp_path, layout):
    case = replace(CASE, problem=Problem.of_row_sizes(5, 19, "bfloat16"), layout=layout)
    file = stored(tmp_path, broken_kernels.LAST_COLUMN_DROPPED, case)
    with np.load(file, allow_pickle=False) as members:
        assert members["S"].dtype == np.uint16
        np.testing.assert_array_equal(members["S"], case.inputs()["S"].view(np.uint16))
        assert (members["expected_P"][0, 0, :, -1] > members["bound_P"][0, 0, :, -1]).all()
        assert (members["actual_P"][0, 0, :, -1] == 0).all()
        assert members["actual_lse"].shape == members["expected_lse"].shape == (1, 1, 5)
        about = json.loads(str(members["about"]))
    assert about["dtypes"]["S"] == "bfloat16"
    assert about["case"]["layout"] == layout
    assert about["command"].startswith("cupyfa run ")
    read = failures.read(file)
    np.testing.assert_array_equal(read.inputs["S"], case.inputs()["S"])
    assert read.case == case


def test_attention_is_replayed_from_the_stored_inputs(tmp_path):
    problem = Problem.of_sizes(heads=4, kv_heads=2, M=5, N=7, d=3, dtype="float16", causal=True)
    case = Case("forward", problem, values="inf", layout="packed")
    *_, outcome = perform(Simulator(), Task(case, ("fa2",), keep=True))
    arrays = {**outcome.arrays, "V": outcome.arrays["V"] + np.float16(1)}
    file = failures.write(tmp_path, Stored(case, replace(outcome, arrays=arrays)), "none")
    again = cupyfa.lab.replay(file, backend="simulator")
    assert again.now.kind == RIGHT
    assert again.now.verdicts != outcome.verdicts


def test_a_result_that_differs_between_runs_is_rerun_as_often(tmp_path):
    file = stored(tmp_path, broken_kernels.DEPENDS_ON_THE_ORDER, reruns=3)
    again = cupyfa.lab.replay(file, kernel_of(file), backend="simulator")
    assert again.stored.outcome.kind == again.now.kind == DIFFERS


def test_outdated_constants_are_left_to_the_plan(tmp_path):
    case = Case("forward", Problem.of_sizes(M=5, N=7, d=3))
    *_, outcome = perform(Simulator(), Task(case, ("fa2",), {"Br": 64, "Bc": 16}, keep=True))
    for constants in (outcome.constants, {"Br": 64, "Bc": 16, "gone": 3}):
        failure = Stored(case, replace(outcome, constants=constants))
        file = failures.write(tmp_path, failure, str(constants))
        again = cupyfa.lab.replay(file, backend="simulator")
        assert again.now.kind == RIGHT
        assert (again.now.constants == outcome.constants) == ("gone" not in constants)


@pytest.mark.slow
def test_the_command_line(tmp_path):
    file = stored(tmp_path, broken_kernels.WRITES_OUTSIDE)
    done = replay(file, "--kernel", kernel_of(file), code=1)
    said = " ".join(done.stdout.split())
    assert said.startswith(f"problem {CASE} then ") and said.endswith(" FAIL")
    for what in (
        f"{FAULT}, on the simulator with cupyfa 0 then why",
        f"{FAULT}, on the simulator now why",
    ):
        assert f"{what} " in said
    assert said.count("past the end of P") == 2
    done = replay(file, "--kernel", "softmax_online", code=0)
    assert done.stdout.splitlines()[-1] == "PASS"
    done = replay(file, file, "--kernel", "softmax_online", "--format", "json", code=0)
    assert [x["passed"] for x in json.loads(done.stdout)] == [False, True] * 2
    assert "unknown" in replay(file, "--kernel", "nope", code=2).stderr
    assert "computes forward" in replay(file, "--kernel", "fa2", code=2).stderr
    replay(tmp_path / "none.npz", code=2)


def test_results_are_printed_as_run_does(tmp_path):
    file = stored(tmp_path, broken_kernels.LAST_COLUMN_DROPPED)
    lines = replay(file, "--kernel", "softmax_online", code=0).stdout.splitlines()
    assert {x.partition("  ")[0] for x in lines} >= {"problem", "then P", "then lse", "now P"}
    (now,) = (x for x in lines if x.startswith("now P "))
    assert re.fullmatch(r"now P +error \S+, at worst \S+ x its bound", now)


def test_a_kernel_that_hangs_fails_in_time(tmp_path):
    *_, outcome = perform(Simulator(), Task(CASE, ("softmax_safe",), keep=True))
    file = failures.write(tmp_path, Stored(CASE, outcome, made_with=MADE_WITH), "none")
    kernel = broken_kernels.write(tmp_path, broken_kernels.HANGS)
    done = replay(file, file, "--kernel", kernel, "--timeout", 0.5, code=1)
    assert done.stdout.count("no answer within 0.5 s") == 2


def test_a_kernel_that_cannot_run_the_case_is_refused(tmp_path):
    case = Case("forward", Problem.of_sizes(M=5, N=7, d=3, dtype="float64"))
    *_, outcome = perform(Simulator(), Task(case, ("fa2",), keep=True))
    file = failures.write(tmp_path, Stored(case, outcome), "")
    with pytest.raises(cupyfa.Unsupported, match="v3 cannot compute .*: it supports only"):
        cupyfa.lab.replay(file, "v3", backend="simulator")
    replay(file, "--kernel", "v3", code=3)


def test_too_large_failures_are_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr("cupyfa.lab.verify.tasks.LARGEST_FILE", 1000)
    assert stored(tmp_path, broken_kernels.LAST_COLUMN_DROPPED) is None
    assert not (tmp_path / "files").exists()
