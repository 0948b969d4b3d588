"""Default checks find nearly all of a seeded sample of mutants."""

import pytest

from cupyfa import Simulator
from cupyfa.lab.mutation import trials
from cupyfa.lab.mutation.mutants import mutants_of, sample
from cupyfa.ladder.lookup import record_named

_KERNELS, _OF_EACH = ("v2", "fa2", "two_pass"), 20
_FEWEST = 0.97  # of the mutants that are not equivalent


def trials_of(kernel, backend):
    every = mutants_of(record_named(kernel))
    compiled = trials.compiled_mutants(kernel, every, backend=backend, jobs=2)
    assert len(compiled) > len(every) / 8
    drawn = sample(compiled, _OF_EACH, seed=1)
    return list(trials.each_trial(kernel, drawn, backend=backend, jobs=2))


@pytest.mark.slow
def test_nearly_all_mutants_of_a_sample_are_found(monkeypatch):
    """Takes about five minutes on two cores."""
    monkeypatch.setenv("CUPYFA_COMPILER_FLAGS", "")
    backend = Simulator()
    tried = [x for kernel in _KERNELS for x in trials_of(kernel, backend)]
    judged = [x for x in tried if x.verdict in (trials.FOUND, trials.MISSED)]
    missed = [f"{x.mutant.place}: {x.mutant.after}" for x in judged if x.verdict == trials.MISSED]
    assert len(tried) == len(_KERNELS) * _OF_EACH and len(judged) > 0.8 * len(tried)
    assert len(missed) <= (1 - _FEWEST) * len(judged), "\n".join(missed)
