"""Kernels that do not return end the command."""

import json
from types import SimpleNamespace

import pytest
from helpers import own_kernel
from helpers.cli import SIMULATOR, line_of, process, says
from helpers.private_cache import with_runtime

from cupyfa.lab.bench import watch as watching
from cupyfa.lab.bench.results import Measurement
from cupyfa.lab.bench.watch import Watch

# Waits for ever if laps is 1 and there are more than 8 rows.
WAITING = own_kernel.MINE.replace(
    "  real maximum",
    "  while (laps == 1 && M > 8) __threadfence();\n  real maximum",
)
RECORD = own_kernel.SCRIPT.replace(
    "    features=", '    tiles=({"laps": 200},),\n    candidates={"laps": (1, 2)},\n    features='
)
HOW = ("-B", 1, "-H", 1, "-d", 8, "--format", "json")


@pytest.fixture
def waiting(tmp_path):
    return f"{own_kernel.write(tmp_path, WAITING, RECORD)}:mine"


@pytest.mark.parametrize(
    "command", [("run", "-t"), ("bench", "-p"), pytest.param(("tune", ""), marks=pytest.mark.slow)]
)
def test_a_kernel_that_hangs_ends_the_command(backend, waiting, command):
    seconds = {"simulator": 0.5, "cuda": 8}[backend.name]
    name, option = command
    tiles = (option, "laps=1") if option else ("--fresh",)
    where = ("--backend", backend.name, "--timeout", seconds)
    done = process([name, waiting, *HOW, "-M", 16, *tiles, *where])
    assert done.returncode == 3 and not done.stdout
    said = f"no answer within {seconds} s; raise --timeout"
    says(line_of(done.stderr), "mine .*on .*M=16", said)


def test_what_was_measured_before_a_hang_is_saved(waiting, tmp_path):
    saved = tmp_path / "a.json"
    sweep = ("-p", "M=8,16", "-p", "laps=1", "--budget", 0, "--alone", "--save", saved)
    done = process(["bench", waiting, *HOW, *sweep, *SIMULATOR, "--timeout", 0.5])
    assert done.returncode == 3, done.stderr
    (row,) = json.loads(saved.read_text())["rows"]
    assert row["problem"]["M"] == 8 and row["milliseconds"]


def test_a_call_is_overdue_after_its_timeout(monkeypatch):
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(watching, "monotonic", lambda: now.seconds)
    watch = Watch(timeout=3)
    assert watch.overdue is None
    with watch.calls():
        watch.begins("one")
        now.seconds = 2.0
        watch.begins_one_of(["one", "two"], 1)
        now.seconds = 4.0
        assert watch.overdue is None
        now.seconds = 5.5
        assert watch.overdue == "two"
    assert watch.overdue is None
