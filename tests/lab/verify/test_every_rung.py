"""`cupyfa.check` finds no failure in any rung."""

import pytest
from helpers.problems import name

import cupyfa
from cupyfa.lab.verify import checker, failures, fuzz
from cupyfa.lab.verify.workers import Here
from cupyfa.runtime.choose_backend import backend_named


@pytest.mark.slow
@pytest.mark.parametrize("at, kernel", list(enumerate(cupyfa.kernels())), ids=name)
def test_a_rung_passes_its_check(at, kernel, monkeypatch, request):
    """Runs a group of the samples of a default check, or all samples with --all."""
    # This test computes more than it compiles, so the compiler optimises.
    monkeypatch.setenv("CUPYFA_COMPILER_FLAGS", "")
    simulator = backend_named("simulator")
    tasks = checker.tasks_of(kernel, backend=simulator)
    if not request.config.getoption("all"):
        groups = len(tasks) // fuzz.TOGETHER
        tasks = [x for i, x in enumerate(tasks) if i // fuzz.TOGETHER == at % groups]
    outcomes = [x for task in tasks for x in Here(simulator).run(task)]
    assert [x for x in outcomes if x.kind != failures.RIGHT] == []
    assert len(outcomes) == len(tasks) >= fuzz.TOGETHER
