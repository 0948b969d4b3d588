"""Check finds nothing in the rungs themselves."""

import pytest
from helpers.problems import name

import cupyfa
from cupyfa.runtime.select import backend_named
from cupyfa.verify import check, failures, fuzz
from cupyfa.verify.workers import Here


@pytest.mark.slow
@pytest.mark.parametrize("at, kernel", list(enumerate(cupyfa.kernels())), ids=name)
def test_a_rung_passes_its_check(at, kernel, monkeypatch, request):
    """All groups of samples that check runs by default; without --all a third, rungs in turn."""
    # Unlike other tests it computes much, so the compiler optimises.
    monkeypatch.setenv("CUPYFA_COMPILER_FLAGS", "")
    simulator, step = backend_named("simulator"), 1 if request.config.getoption("all") else 3
    tasks = check.tasks_of(kernel, backend=simulator)
    chosen = [x for i, x in enumerate(tasks) if (i // fuzz.TOGETHER + at) % step == 0]
    outcomes = [x for task in chosen for x in Here(simulator).run(task)]
    assert [x for x in outcomes if x.kind != failures.RIGHT] == []
    assert len(outcomes) == len(chosen) >= fuzz.SAMPLES["simulator"] // step - 1
