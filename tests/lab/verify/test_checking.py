"""`cupyfa.check`: failures of broken kernels, their messages, and the tallies."""

import csv
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import broken_kernels, own_kernel
from helpers.cli import CLI, cli, says
from helpers.processes import left_running, running_with

import cupyfa
from cupyfa import Problem, Simulator
from cupyfa.lab.verify import checker as checking, failures, grids, sampling, tasks, workers
from cupyfa.lab.verify.case import Case
from cupyfa.lab.verify.failures import Outcome
from cupyfa.lab.verify.fuzz import Fuzz
from cupyfa.lab.verify.tasks import Task, perform
from cupyfa.ladder import LADDER
from cupyfa.ladder.lookup import record_named
from cupyfa.ladder.operations import OPERATIONS
from cupyfa.planner import choose_kernel as planning
from cupyfa.problem.dtypes import INPUTS


@pytest.fixture(autouse=True)
def as_long_as_it_takes(monkeypatch):
    """Raises the time limit of shrinking so that slow machines reach the same case as fast ones."""
    monkeypatch.setattr(checking, "_SHRINKING", 600.0)


def drawn(seed):
    """Draws the fuzz grid's cases for softmax_safe, the kernel that broken_kernels changes."""
    record = cupyfa.kernel("softmax_safe")
    drawing = Fuzz(record, Simulator(), seed, dtypes=["float32"])
    return [drawing.sample(i).case for i in range(12)]


def shows_all_faults(seed):
    """Returns whether the first samples are small and show all faults of broken_kernels."""
    problems = [case.problem for case in drawn(seed)]
    return (
        sum(p.M * p.N for p in problems) < 100_000
        and any(p.M % 8 == 5 and p.N for p in problems)
        and any(p.N % 16 == 3 and p.M for p in problems)
        and sum(p.N % 4 == 3 and p.M > 0 for p in problems) >= 3
    )


SEED = next(filter(shows_all_faults, itertools.count()))
FUZZ = {"grid": "fuzz", "samples": 12, "seed": SEED, "dtypes": ["float32"]}
HERE = ("--backend", "simulator", "--jobs", 0)
FUZZ_OPTIONS = ("--grid", "fuzz", "--samples", "12", "--seed", str(SEED), "--dtype", "float32")
OPTIONS = (*FUZZ_OPTIONS, *HERE)


def check(kernel, **options):
    return cupyfa.check(kernel, backend="simulator", **{**FUZZ, **options})


def the_failure(checked):
    """Returns the only failure, since failures that shrink to the same case are merged."""
    (failure,) = checked.failures
    return failure


def repeat(failure):
    program, *arguments = shlex.split(failure.command)
    assert program == "cupyfa"
    return subprocess.run([*CLI, *arguments], capture_output=True, text=True, check=False)


def test_a_correct_users_kernel(tmp_path):
    done = check(broken_kernels.write(tmp_path), samples=10, failures=tmp_path / "files", reruns=1)
    assert done.failures == ()
    assert not (tmp_path / "files").exists()


def test_a_dropped_column_is_found_shrunk_and_reproduced(tmp_path):
    failure = the_failure(check(broken_kernels.write(tmp_path, broken_kernels.LAST_COLUMN_DROPPED)))
    assert failure.outcome.kind == failures.WRONG_RESULT
    assert (failure.case.problem.M, failure.case.problem.N) == (1, 3)
    assert (failure.case.seed, failure.case.values, failure.case.layout) == (0, "normal", "bhsd")
    assert failure.found_on in drawn(SEED)
    assert failure.found_on.problem.N % 16 == 3
    worst = failure.outcome.worst
    assert worst.ratio > 1
    again = repeat(failure)
    assert again.returncode == 1
    assert "FAIL" in again.stdout
    assert f"{worst.name} error {worst.error:.3g}" in " ".join(again.stdout.split())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "fault, kind, words",
    [
        ("RACE", failures.FAULT, "race"),
        ("WRITES_OUTSIDE", failures.FAULT, "past the end of P"),
        ("DOES_NOT_COMPILE", failures.COMPILE_ERROR, "OfflineSoftmax"),
    ],
)
def test_faults(tmp_path, fault, kind, words):
    done = check(broken_kernels.write(tmp_path, getattr(broken_kernels, fault)))
    assert {failure.outcome.kind for failure in done.failures} == {kind}
    failure = done.failures[0]
    assert words in failure.outcome.message
    again = repeat(failure)
    assert again.returncode != 0
    assert words in again.stderr


@pytest.mark.gpu
def test_a_write_outside_on_the_gpu(cuda, tmp_path):
    kernel = broken_kernels.write(tmp_path, broken_kernels.WRITES_OUTSIDE)
    failure = the_failure(cupyfa.check(kernel, backend="cuda", **FUZZ))
    assert failure.outcome.kind == failures.WROTE_OUTSIDE
    assert "4 bytes outside P" in failure.outcome.message
    assert failure.case.problem.M == 5


@pytest.mark.gpu
def test_a_kernel_that_traps_does_not_affect_others(cuda, tmp_path):
    trap = tuple((right, wrong.replace("builtin_", "")) for right, wrong in broken_kernels.DIES)
    kernel = broken_kernels.write(tmp_path, trap)
    done = cupyfa.check([kernel, "softmax_online"], backend="cuda", jobs=2, **FUZZ)
    mine, other = done.tallies
    assert {failure.outcome.kind for failure in done.failures} == {failures.DEVICE_LOST}
    assert done.failures[0].case.problem.N == 3
    assert mine.runs > mine.right > 0
    assert other.right == other.runs == 12


@pytest.mark.slow
def test_a_result_that_depends_on_the_order_of_threads(tmp_path):
    kernel = broken_kernels.write(tmp_path, broken_kernels.DEPENDS_ON_THE_ORDER)
    assert check(kernel, samples=4).failures == ()
    failure = check(kernel, samples=4, reruns=3).failures[0]
    assert failure.outcome.kind == failures.DIFFERS
    assert "differs from the first run's in" in failure.outcome.message
    again = repeat(failure)
    assert again.returncode == 1
    assert "differs from the first run's in" in again.stderr


@pytest.mark.slow
def test_a_failure_is_reproduced_with_the_same_schedule(tmp_path, monkeypatch):
    kernel = broken_kernels.write(tmp_path, broken_kernels.LAST_COLUMN_DROPPED)
    options = {**FUZZ, "backend": Simulator(schedule=np.int64(0)), "failures": tmp_path}
    failure = the_failure(cupyfa.check(kernel, **options))
    assert "--schedule=0" in shlex.split(failure.command)
    assert repeat(failure).returncode == 1
    seen = []

    def seeing(engine, task):
        seen.append(engine.schedule)
        return perform(engine, task)

    monkeypatch.setattr(workers, "perform", seeing)
    for engine in ("simulator", Simulator(schedule=3)):
        again = cupyfa.lab.replay(failure.file, kernel, backend=engine)
        assert again.now.kind == failures.WRONG_RESULT
    assert seen == [0, 3]


@pytest.mark.parametrize("name", ["lanes", "softmax_safe"])
def test_a_users_record_is_not_confused_with_a_rung(tmp_path, name):
    script = broken_kernels.write(tmp_path, broken_kernels.LAST_COLUMN_DROPPED)
    kernel = replace(record_named(script), name=name)
    failure = the_failure(check(["softmax_online", kernel], failures=tmp_path))
    assert failure.command.startswith(f"cupyfa run SCRIPT.py:{name} ")
    with pytest.raises(
        ValueError, match=f"a failure of {name}, a kernel defined in a script; pass the kernel"
    ):
        cupyfa.lab.replay(failure.file, backend="simulator")
    again = cupyfa.lab.replay(failure.file, kernel, backend="simulator")
    assert again.now.kind == failures.WRONG_RESULT
    again = cupyfa.lab.replay(failure.file, script, backend="simulator")
    assert again.now.kind == failures.WRONG_RESULT


@pytest.mark.slow
def test_a_kernel_that_hangs_is_killed_and_others_continue(tmp_path):
    kernel = broken_kernels.write(tmp_path, broken_kernels.HANGS)
    done = check([kernel, "softmax_online"], jobs=2, timeout=1)
    mine, other = done.tallies
    assert {failure.outcome.kind for failure in done.failures} == {failures.NO_ANSWER}
    failure = done.failures[0]
    assert failure.outcome.message == "no answer within 1 s"
    assert (failure.case.problem.M, failure.case.problem.N) == (1, 3)
    assert mine.runs - mine.right == 3
    assert set(mine.not_run) <= {"given up after hanging or dying 3 times"}
    assert other.right == other.runs == 12
    again = repeat(failure)
    assert again.returncode == 3 and "no answer within 1 s" in again.stderr


def test_a_kernel_that_hangs_takes_its_time_once(tmp_path, monkeypatch):
    ((begin, hangs),) = broken_kernels.HANGS
    kernel = broken_kernels.write(tmp_path, ((begin, hangs.replace("extent.N % 4 == 3", "true")),))
    runs, run = [], workers.Process.run
    monkeypatch.setattr(workers.Process, "run", lambda *given: runs.append(given) or run(*given))
    options = {"grid": "smoke", "samples": 1, "jobs": 1, "timeout": 1}
    done = check([kernel], **options, failures=tmp_path / "failures")
    assert [x.outcome.kind for x in done.failures] == [failures.NO_ANSWER] and len(runs) == 1


@pytest.mark.slow
def test_a_kernel_that_crashes_is_named_and_others_continue(tmp_path):
    kernel = broken_kernels.write(tmp_path, broken_kernels.DIES)
    done = check([kernel, "softmax_online"], jobs=2)
    mine, other = done.tallies
    failure = the_failure(done)
    assert failure.outcome.kind == failures.DIED
    assert failure.outcome.message == "the process died (signal 4)"
    assert failure.case.problem.N == 3
    assert 1 <= mine.runs - mine.right <= 3
    assert other.right == other.runs == 12
    assert repeat(failure).returncode == -signal.SIGILL


def test_an_error_in_a_record_is_one_failure(tmp_path):
    kernel = broken_kernels.write(tmp_path)
    script = Path(kernel.removesuffix(":mine"))
    wrong = 'replace(right.launches[0], grid=lambda p, c: p.M // (p.M % 2), file="mine.cu")'
    script.write_text(
        broken_kernels.SCRIPT.replace('replace(right.launches[0], file="mine.cu")', wrong)
    )
    done = check(kernel)
    assert 0 < done.right < done.runs
    assert {failure.outcome.kind for failure in done.failures} == {failures.ERROR}
    assert "ZeroDivisionError" in done.failures[0].outcome.message


@pytest.mark.slow
def test_unsupported_cases_are_counted_by_reason(tmp_path):
    script = own_kernel.write(tmp_path)
    how = {"samples": 5, "dtypes": ["float64"], "causal": True}
    for grid in ("edges", "fuzz"):
        done = check([f"{script}:mine", "v3"], grid=grid, **how)
        mine, v3 = done.tallies
        assert all(x.startswith("it does not support causal") for x in mine.not_run)
        assert sum(mine.not_run.values()) == 5 and not done.runs
        assert v3.not_run == {"it supports only float16, bfloat16, float32": 5}
        assert "5: it supports only float16, bfloat16, float32" in str(done)


def test_the_simulator_skips_cases_that_are_too_large():
    large = Case("softmax", Problem.of_row_sizes(70_000, 20, "float16"))
    (outcome,) = perform(Simulator(), Task(large, ("softmax_safe",)))
    assert outcome == Outcome("softmax_safe", failures.UNSUPPORTED, "too large for the simulator")
    far = Case("softmax", Problem.of_row_sizes(2, 9, "float16"), layout="far")
    (outcome,) = perform(Simulator(), Task(far, ("softmax_safe",)))
    assert outcome == Outcome(
        "softmax_safe", failures.UNSUPPORTED, "the layout 'far' requires a GPU"
    )


@pytest.mark.parametrize("grid", ["smoke", "edges", "fuzz"])
def test_a_sample_is_one_that_kernel_and_backend_run(grid):
    """The full grids contain cases that the kernel or the simulator rejects."""
    for seed in range(4):
        how = {"grid": grid, "samples": 1, "seed": seed, "backend": "simulator"}
        (task,) = checking.tasks_of("v3", **how)
        plan = planning.plan(cupyfa.kernel("v3"), task.case.problem, Simulator().limits)
        tasks.refuse_long(Simulator(), plan.problem)
        task.case.require_reach(Simulator())


@pytest.mark.parametrize("dtypes", [None, ["bfloat16", "float16"]])
def test_the_grid_all_has_the_cases_of_each_grid(dtypes):
    kernels, how = ["fa2", "auto"], {"samples": 2, "dtypes": dtypes, "backend": "simulator"}
    alone = [checking.tasks_of(kernels, grid=x, **how) for x in grids.GRIDS if x != grids.ALL]
    every = checking.tasks_of(kernels, grid="all", **how)
    assert every == [task for tasks in alone for task in tasks]
    assert [len(x) for x in alone] == [4, 2, 2]
    assert {x.case.problem.dtype.name for x in every} <= {*(dtypes or INPUTS)}


def test_the_command_checks_all_grids(tmp_path):
    how = ("--grid", "all", "--samples", 2, "--dtype", "float32", *HERE)
    says(cli("check", "softmax_safe", *how).stdout, "6 cases of fuzz, smoke, edges, softmax_safe")
    (row,) = json.loads(cli("check", "softmax_safe", *how, "--format", "json").stdout)
    assert row["runs"] == row["right"] == 6
    (row,) = csv.DictReader(
        cli("check", "softmax_safe", *how, "--format", "csv").stdout.splitlines()
    )
    assert row["runs"] == row["right"] == "6"
    planned = json.loads(cli("check", "fa2", *how, "--dry-run", "--format", "json").stdout)
    assert len(planned) == 6


@pytest.mark.slow
def test_failures_of_all_grids_are_shrunk_on_fuzz_and_replayed(tmp_path):
    kernel = broken_kernels.write(tmp_path, broken_kernels.LAST_COLUMN_DROPPED)
    done = check(kernel, grid="all", samples=40, failures=tmp_path / "files")
    assert {bool(x.found_on) for x in done.failures} == {True, False}
    for failure in done.failures:
        assert failure.case.problem.N % 16 == 3
        if failure.file:
            assert checking.replay(failure.file, kernel, "simulator").now.failed
    assert any(x.file and not x.found_on for x in done.failures)


@pytest.mark.slow
def test_records_are_checked_in_processes_too(tmp_path):
    kernel = broken_kernels.write(tmp_path, broken_kernels.LAST_COLUMN_DROPPED)
    records = [record_named(kernel), record_named("softmax_online")]
    done = check(records, jobs=2)
    failure = the_failure(done)
    assert failure.outcome.kind == failures.WRONG_RESULT and failure.case.problem.N == 3
    assert [tally.runs for tally in done.tallies] == [12, 12]
    made_here = replace(records[0], name="other")
    with pytest.raises(ValueError, match="jobs=2 requires .* 'other' was made in this process"):
        check([made_here], jobs=2)


def test_options_that_some_kernels_lack():
    how = {"samples": 2, "backend": "simulator", "causal": True}
    with pytest.warns(UserWarning, match="softmax_safe is checked without causal: softmax has no"):
        found = checking.tasks_of(["fa2", "softmax_safe"], **how)
    masks = [(*task.kernels, task.case.problem.causal) for task in found]
    assert masks == [("fa2", "bottom-right")] * 2 + [("softmax_safe", None)] * 2
    # Tasks of minimal, which does not support windows, are included.
    assert len(checking.tasks_of(["minimal", "fa2"], **how, window=(3, None))) == 4


@pytest.mark.slow
def test_failures_are_shrunk_only_on_fuzz(tmp_path):
    kernel = broken_kernels.write(tmp_path, broken_kernels.LAST_COLUMN_DROPPED)
    done = check(record_named(kernel), grid="edges", samples=40)
    assert len(done.failures) > 1
    for failure in done.failures:
        assert (failure.found_on, failure.file) == (None, None)
        assert failure.case.problem.N % 16 == 3


def test_progress_is_reported():
    told = []
    check("softmax_safe", samples=5, progress=lambda *args: told.append(args))
    assert told == [(i, 5, "0 failed") for i in range(1, 6)]


def test_the_command_prints_failures_commands_files_and_counts(tmp_path):
    kernel = broken_kernels.write(tmp_path, broken_kernels.LAST_COLUMN_DROPPED)
    options = ("--backend", "simulator", "--jobs", 2, "--failures", tmp_path / "files")
    done = cli("check", kernel, *FUZZ_OPTIONS, *options, code=1)
    (file,) = (tmp_path / "files").iterdir()
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert str(file) in lines
    (command,) = (line for line in lines if line.startswith("cupyfa run "))
    assert shlex.split(command)[2] == kernel
    assert "wrong result" in done.stdout
    assert "12 cases of fuzz" in lines[-1]
    worst = re.search(r"on the simulator; at worst (\S+) x the bound", lines[-1])
    assert float(worst[1]) > 1
    assert done.stderr == ""


def test_results_that_were_not_written_are_named_once_for_all_cases(tmp_path):
    kernel = broken_kernels.write(tmp_path, ((broken_kernels.END, ""),))
    done = cli("check", kernel, *OPTIONS, "--failures", tmp_path / "files", code=1)
    said = r"found on .*, and \d+ more", "lse: error inf.* nan instead of", "unwritten"
    says(done.stdout.replace("\n", " "), *said)


def test_the_command_prints_json_and_csv(tmp_path):
    kernel = broken_kernels.write(tmp_path, broken_kernels.LAST_COLUMN_DROPPED)
    asked = ("--failures", tmp_path / "files", "--format", "json")
    shown = cli("check", kernel, "softmax_online", *OPTIONS, *asked, code=1)
    mine, other = json.loads(shown.stdout)
    assert (mine["kernel"], other["kernel"]) == (kernel, "softmax_online")
    assert (other["runs"], other["right"], other["failures"]) == (12, 12, [])
    (failure,) = mine["failures"]
    assert failure["ratio"] > 1 and mine["worst_error/bound"] > 1 and failure["cases"] == 1
    assert failure["command"].startswith("cupyfa run ")
    assert Path(failure["file"]).is_file()
    shown = cli("check", "softmax_online", *OPTIONS, "--format", "csv")
    (row,) = csv.DictReader(shown.stdout.splitlines())
    assert (
        row["right"] == "12" and row.keys() == checking.Tally("", 0, 0, None, {}, {}).row().keys()
    )
    assert shown.stderr.startswith("note: 12 of 12 runs right")


def test_the_table_fits_the_terminal(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    broken_kernels.write(tmp_path, broken_kernels.LAST_COLUMN_DROPPED)
    shown = cli("check", "script.py:mine", "softmax_online", *OPTIONS, code=1)
    table = shown.stdout.split("\n\n")[0]
    assert max(map(len, table.splitlines())) <= 80


def started(tmp_path, kernel):
    """Starts a check that hangs in several processes, identifiable by CUPYFA_TEST_MARK."""
    running = subprocess.Popen(
        [*CLI, "check", kernel, *FUZZ_OPTIONS, "--backend", "simulator", "--jobs", "3"],
        env={**os.environ, "CUPYFA_TEST_MARK": str(tmp_path)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    ended = time.monotonic() + 20
    while len(running_with(str(tmp_path))) < 4:
        assert time.monotonic() < ended, "the processes do not start"
        time.sleep(0.05)
    time.sleep(3)  # by then some of the processes hang
    return running


@pytest.mark.slow
def test_processes_end_with_the_one_that_started_them(tmp_path):
    running = started(tmp_path, broken_kernels.write(tmp_path, broken_kernels.HANGS))
    running.kill()
    running.communicate()
    assert not left_running(str(tmp_path), seconds=20)


def test_an_interrupted_check_has_its_results():
    def interrupt(done, total, what):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(checking.Interrupted) as stopped:
        check("softmax_safe", samples=10, progress=interrupt)
    assert isinstance(stopped.value, KeyboardInterrupt)
    assert stopped.value.checked.runs == 3
    assert str(stopped.value).startswith("3 of 3 runs right")


def test_large_gradients_are_judged_by_a_sample(monkeypatch):
    """The sample includes the last key; the reference computes only the sample."""
    problem = Problem.of_sizes(heads=2, M=300, N=40, d=8)
    task = Task(Case("backward", problem), ("two_pass",))
    monkeypatch.setattr(sampling, "_WORK", 1e4)
    asked, honest = [], OPERATIONS["backward"]

    def reference(inputs, p, roundings, excerpt):
        asked.append(excerpt)
        return honest.reference(inputs, p, roundings, excerpt)

    monkeypatch.setitem(OPERATIONS, "backward", replace(honest, reference=reference))
    assert list(perform(Simulator(), task))[-1].kind == failures.RIGHT
    assert asked and None not in asked

    run = tasks.run_guarded

    def spoilt(engine, plan, *arrays):
        results = run(engine, plan, *arrays)
        results["dK"][0, 1, 39, 5] += 1
        return results

    monkeypatch.setattr(tasks, "run_guarded", spoilt)
    outcome = list(perform(Simulator(), replace(task, keep=True)))[-1]
    assert outcome.kind == failures.WRONG_RESULT and "dK: error" in outcome.message
    assert {"Q", "actual_dK"} <= outcome.arrays.keys() and "expected_dK" not in outcome.arrays


@pytest.mark.slow
def test_each_case_runs_in_several_orders_of_threads(tmp_path):
    """The result is wrong unless the last thread to reach a barrier is the first to leave it."""
    wrong = ("order = 1 + real(1e-7) * (first % 4)", "order = 1 + (first != blockDim.x - 1)")
    first = tuple((x, y.replace(*wrong)) for x, y in broken_kernels.DEPENDS_ON_THE_ORDER)
    kernel = broken_kernels.write(tmp_path, first)

    def orders(done):
        return {word for x in done.failures for word in x.command.split() if "schedule" in word}

    drawn = checking.tasks_of(kernel, **FUZZ | {"samples": 4}, backend="simulator")
    own = {f"--schedule={x.schedule}" for x in drawn if x.schedule is not None}
    assert orders(check(kernel, samples=4)) == own and own
    done = check(kernel, samples=4, schedules=3)
    assert done.cases == done.runs == 12
    assert max(done.tallies[0].covered.values()) <= 4
    assert orders(done) <= {"--schedule=1", "--schedule=2"} and orders(done)
    assert repeat(done.failures[0]).returncode == 1


def test_half_of_the_cases_have_an_order_of_threads_of_their_own():
    def orders(backend="simulator", **how):
        return [x.schedule for x in checking.tasks_of("fa2", samples=64, backend=backend, **how)]

    own = [x for x in orders() if x is not None]
    assert 24 <= len(own) <= 40 and len(set(own)) == len(own)
    assert orders() == orders() != orders(seed=1)
    assert orders(Simulator(schedule=2)) == [None] * 64
    assert orders(schedules=2) == [None] * 64 + [1] * 64
    of_dtypes = {}
    for x in checking.tasks_of("fa2", grid="smoke", backend="simulator"):
        of_dtypes.setdefault(x.case.problem.dtype.name, set()).add(x.schedule is None)
    assert set(map(len, of_dtypes.values())) == {2}


def test_orders_of_threads_are_the_simulators(monkeypatch):
    device = SimpleNamespace(limits=Simulator().limits)
    monkeypatch.setattr(checking, "backend_named", lambda backend: device)
    with pytest.raises(ValueError, match="schedules is 2, but only the simulator can vary"):
        cupyfa.check("fa2", schedules=2)


@pytest.mark.slow
def test_auto_is_what_attention_takes():
    for grid in ("fuzz", "edges"):
        done = check("auto", grid=grid, samples=3, dtypes=["float16"])
        assert done.failures == () and done.right == done.runs == 3
        assert {tally.kernel for tally in done.tallies} <= set(LADDER["forward"])


def test_a_dry_run_lists_the_cases_and_runs_nothing(monkeypatch):
    monkeypatch.setattr(tasks, "run_guarded", None)
    options = ("--dry-run", "--backend", "simulator", "--samples", 6, "--seed", 1)
    rows = json.loads(cli("check", "wgmma", "auto", *options, "--format", "json").stdout)
    assert len(rows) == 12
    cases = checking.tasks_of("wgmma", samples=6, seed=1, backend="simulator")
    assert [row["case"] for row in rows[:6]] == [str(task.case) for task in cases]
    assert any("beyond the ring" in row["covers"] for row in rows[:6])
    assert all(row["constants"]["stages"] >= 2 for row in rows[:6])
    for form in ("csv", "md", "table"):
        shown = cli("check", "wgmma", *options, "--schedules", 2, "--format", form).stdout
        assert shown.count("seed=") == 12, form


def test_what_was_covered_is_shown():
    few = ("check", "softmax_safe", *OPTIONS)
    (row,) = json.loads(cli(*few, "--format", "json").stdout)
    assert row["covered"]["below a tile"] > 2
    shown = cli(*few).stdout
    assert f"softmax_safe covered  below a tile {row['covered']['below a tile']}, " in shown
    facts = shown.partition("covered")[2].splitlines()[:-1]
    assert max(map(len, facts)) <= 80


def test_a_check_without_a_run_ends_with_3():
    cli("check", "v3", *HERE, "--samples", 1, "--dtype", "float64", code=3)


def test_failures_without_results_have_no_empty_columns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    broken_kernels.write(tmp_path, broken_kernels.RACE)
    shown = cli("check", "script.py:mine", *OPTIONS, code=1).stdout
    heading, first, *_ = shown.splitlines()
    assert heading.split() == ["kernel", "failure"]
    assert first.split() == ["1", "script.py:mine", "simulator", "fault"]
    assert "race: thread" in shown
