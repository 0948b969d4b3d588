"""The whole ladder on samples of the grids, on a GPU."""

import pytest
from helpers.problems import DTYPES

import cupyfa
from cupyfa.ladder import LADDER
from cupyfa.ladder.lookup import record_named

SAMPLES = {"smoke": 2, "edges": 3, "fuzz": 2}  # number of samples per dtype (fuzz: per kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("operation", LADDER)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grid", SAMPLES)
def test_every_kernel(cuda, grid, dtype, operation):
    sample = {"grid": grid, "dtypes": [dtype], "samples": SAMPLES[grid]}
    done = cupyfa.check(list(LADDER[operation]), backend="cuda", **sample)
    told = [f"{failure.outcome.message}\n{failure.command}" for failure in done.failures]
    assert done.right == done.runs, "\n".join(told)
    for tally in done.tallies:
        if not tally.runs and dtype in record_named(tally.kernel).dtypes:
            alone = cupyfa.check(tally.kernel, backend="cuda", **sample)
            assert alone.right == alone.runs > 0, tally.kernel
