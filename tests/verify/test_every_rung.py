"""Check finds nothing in the rungs themselves, with default settings."""

import pytest
from helpers.problems import name

import cupyfa


@pytest.mark.slow
@pytest.mark.parametrize("at, kernel", list(enumerate(cupyfa.kernels())), ids=name)
def test_a_rung_passes_its_check(at, kernel, monkeypatch):
    # Unlike other tests it computes much, so the compiler optimises.
    monkeypatch.setenv("CUPYFA_COMPILER_FLAGS", "")
    checked = cupyfa.check(kernel, seed=at % 2, backend="simulator")
    assert checked.right == checked.runs > 0, [x.outcome for x in checked.failures]
