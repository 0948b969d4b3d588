"""Default checks find nearly all mutants of a sample."""

from collections import Counter

import pytest

from cupyfa import Simulator
from cupyfa.lab.mutation import trials
from cupyfa.lab.mutation.mutants import mutants_of, sample
from cupyfa.ladder.lookup import record_named

KERNELS = ("baseline", "minimal", "v1", "v2")  # with the quickest checks, as this takes minutes
EACH = 15  # number of mutants of each kernel
_FOUND = 0.97  # share of those of all kernels, see docs/checking.md


@pytest.mark.slow
def test_nearly_all_mutants_of_a_sample_are_found(monkeypatch):
    monkeypatch.setenv("CUPYFA_COMPILER_FLAGS", "")
    backend, found = Simulator(), list[trials.Trial]()
    for kernel in KERNELS:
        every = mutants_of(record_named(kernel))
        compiled = trials.compiled_mutants(kernel, every, backend=backend, jobs=2)
        drawn = sample(compiled, EACH, seed=1)
        found += trials.each_trial(kernel, drawn, backend=backend, jobs=2)
    count = Counter(x.verdict for x in found)
    assert count.keys() <= {trials.FOUND, trials.MISSED, trials.EQUIVALENT}
    missed = [f"{x.mutant.place}: {x.mutant.after}" for x in found if x.verdict == trials.MISSED]
    judged = count[trials.FOUND] + len(missed)
    assert judged > 0.8 * EACH * len(KERNELS)
    assert count[trials.FOUND] >= _FOUND * judged, "\n".join(missed)
