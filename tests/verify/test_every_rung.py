"""Check finds nothing in the rungs themselves, with default settings."""

import pytest

import cupyfa


@pytest.mark.slow
@pytest.mark.parametrize("kernel", cupyfa.kernels(), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_rung_passes_its_check(kernel, seed):
    checked = cupyfa.check(kernel, seed=seed, backend="simulator")
    assert checked.right == checked.runs > 0, [x.outcome for x in checked.failures]
