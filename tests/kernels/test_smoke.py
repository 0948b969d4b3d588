"""The whole ladder on whole grids, which takes a GPU."""

import os

import pytest
from helpers.problems import DTYPES

import cupyfa
from cupyfa.ladder import LADDER
from cupyfa.ladder.lookup import record_named

JOBS = min(16, os.cpu_count() or 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grid", ["smoke", "edges"])
def test_every_kernel(cuda, grid, dtype):
    names = [name for kernels in LADDER.values() for name in kernels]
    done = cupyfa.check(names, grid=grid, dtypes=[dtype], backend="cuda", jobs=JOBS)
    told = [f"{failure.outcome.message}\n{failure.command}" for failure in done.failures]
    assert done.right == done.runs, "\n".join(told)
    for tally in done.tallies:
        assert tally.runs or dtype not in record_named(tally.kernel).dtypes
