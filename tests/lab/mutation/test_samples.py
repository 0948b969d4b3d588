"""Default checks find most mutants of a sample of .cu files, whose headers need more options."""

import pytest

from cupyfa import Simulator
from cupyfa.lab.mutation import trials
from cupyfa.lab.mutation.mutants import mutants_of, sample
from cupyfa.ladder.lookup import record_named

_FEWEST = 0.75  # of a sample; of 51 mutants of three kernels, 94 % were found


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["fa2", "two_pass"])
def test_most_mutants_of_a_sample_are_found(monkeypatch, kernel):
    monkeypatch.setenv("CUPYFA_COMPILER_FLAGS", "")
    backend = Simulator()
    every = [x for x in mutants_of(record_named(kernel)) if x.file.suffix == ".cu"]
    compiled = trials.compiled_mutants(kernel, every, backend=backend, jobs=2)
    assert len(compiled) > len(every) / 3
    drawn = sample(compiled, 6, seed=1)
    found = [*trials.each_trial(kernel, drawn, backend=backend, jobs=2)]
    judged = [x for x in found if x.verdict in (trials.FOUND, trials.MISSED)]
    missed = [f"{x.mutant.place}: {x.mutant.after}" for x in judged if x.verdict == trials.MISSED]
    assert len(judged) >= 3 and len(missed) <= (1 - _FEWEST) * len(judged), "\n".join(missed)
