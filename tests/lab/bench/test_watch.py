"""Kernels that hang: commands skip them and continue."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers import own_kernel
from helpers.cli import SIMULATOR, line_of, process, says
from helpers.private_cache import with_runtime

from cupyfa import Problem
from cupyfa.lab.bench import watch as watching
from cupyfa.lab.bench.results import Measurement
from cupyfa.lab.bench.watch import Watch
from cupyfa.lab.report.tables import measurements

# A kernel that hangs if laps is 1 and there are more than 8 rows.
WAITING = own_kernel.MINE.replace(
    "  real maximum", "  while (laps == 1 && M > 8) __threadfence();\n  real maximum"
)
RECORD = own_kernel.SCRIPT.replace(
    "    features=", '    tiles=({"laps": 200},),\n    candidates={"laps": (1, 2)},\n    features='
)
HOW = ("-B", 1, "-H", 1, "-d", 8, "--format", "json")
SOON = (*SIMULATOR, "--timeout", 0.5)


@pytest.fixture
def waiting(tmp_path):
    return f"{own_kernel.write(tmp_path, WAITING, RECORD)}:mine"


def test_bench_goes_on_without_a_kernel_that_hangs(backend, waiting, tmp_path):
    seconds = {"simulator": 0.5, "cuda": 8}[backend.name]
    saved = tmp_path / "a.json"
    sweep = ("-p", "M=8,16", "-p", "laps=1,2", "--budget", 0, "--alone", "--save", saved)
    where = ("--backend", backend.name, "--timeout", seconds)
    done = process(["bench", waiting, *HOW, *sweep, *where])
    assert done.returncode == 1, done.stderr
    rows = json.loads(done.stdout)
    found = {(row["M"], row["constants"]["laps"]): (row["ms"], row["note"]) for row in rows}
    assert len(rows) == 4 and found.pop((16, 1)) == (None, f"timed out after {seconds} s")
    assert all(ms > 0 and not note for ms, note in found.values())
    assert len(json.loads(saved.read_text())["rows"]) == 4
    assert done.stderr.count(f"timed out after {seconds} s; continuing without this call") == 1


def test_run_ends_a_kernel_that_hangs(backend, waiting):
    seconds = {"simulator": 0.5, "cuda": 8}[backend.name]
    where = ("--backend", backend.name, "--timeout", seconds)
    done = process(["run", waiting, *HOW, "-M", 16, "-t", "laps=1", *where])
    assert done.returncode == 3 and not done.stdout
    says(line_of(done.stderr), "mine on .*M=16", f"no answer within {seconds} s; raise --timeout")


@pytest.mark.slow
def test_tune_goes_on_without_a_candidate_that_hangs(tmp_path):
    kernel = WAITING.replace("key < N;", "key < N - (laps == 2);")  # only laps=200 is right
    env = {"CUPYFA_CACHE_DIR": with_runtime(tmp_path / "cache")}
    args = ["tune", f"{own_kernel.write(tmp_path, kernel, RECORD)}:mine", *HOW, *SOON, "-M", 16]
    for fresh in (["--fresh"], []):  # the second run reads the timeout from the cache
        done = process([*args, *fresh], env=env)
        assert done.returncode == 0, done.stderr
        states = {row["constants"]["laps"]: row["state"] for row in json.loads(done.stdout)}
        assert states == {200: "right", 2: "wrong", 1: "timed out"}
        assert ("continuing without this call" in done.stderr) == bool(fresh)


def test_the_table_says_which_tiles_timed_out():
    problem = Problem.of_sizes(M=16, d=8)
    hung, right = (Measurement("mine", "forward", problem, {"laps": x}) for x in (1, 2))
    rows = [
        replace(hung, passed=False, note="timed out after 60 s"),
        replace(right, passed=True, milliseconds=[1.0]),
    ]
    shown = " ".join(measurements(rows, {}).split())
    assert "laps=1 timed out" in shown and "laps=2 1" in shown


def test_a_call_is_overdue_after_its_timeout(monkeypatch, tmp_path):
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(watching, "monotonic", lambda: now.seconds)
    watch = Watch(timeout=3)
    assert watch.overdue is None
    with watch.calls():
        watch.begins("one")
        now.seconds = 2.0
        watch.begins("two")
        now.seconds = 4.0
        assert watch.overdue is None
        now.seconds = 5.5
        assert watch.overdue == "two"
    assert watch.overdue is None
    watch.save(tmp_path / "state", "two")
    later = Watch()
    later.load(tmp_path / "state")
    assert (later.hung, later.done, later.rows) == (["two"], 0, [])
