"""Calls with arrays in both host and device memory, as checks on a GPU make them."""

import numpy as np
import pytest

from cupyfa import Problem, Simulator
from cupyfa.lab.verify import tasks, transforms
from cupyfa.lab.verify.case import Case
from cupyfa.lab.verify.memories import may_be_mixed, mixed_results
from cupyfa.lab.verify.random_modifiers import MODIFIED
from cupyfa.ladder.lookup import record_named
from cupyfa.planner import choose_kernel
from cupyfa.runtime.guard import run_guarded

SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "M": 9, "N": 21, "d": 8}
SIMULATOR = Simulator()


@pytest.mark.few(4)
@pytest.mark.parametrize("given", [*MODIFIED, {"softcap": 3.0, "alibi_slopes": "h"}], ids=str)
def test_a_call_by_name_has_the_results_of_the_plan(given):
    p = Problem.of_sizes(**SIZES, **given, causal="bottom-right")
    plan = choose_kernel.plan(record_named("fa2"), p, SIMULATOR.limits)
    inputs = Case("forward", p, 3).inputs()
    if may_be_mixed(plan):
        found = mixed_results(SIMULATOR, plan, inputs)
        right = run_guarded(SIMULATOR, plan, inputs, {})
        for name in ("O", "lse"):
            np.testing.assert_array_equal(found[name], right[name])
    else:
        assert not p.modifiers.arrays


def test_lengths_and_descales_are_given_by_name():
    p = transforms.pad(Problem.of_sizes(**SIZES, causal="bottom-right"), ["q", "k"])
    plan = choose_kernel.plan(record_named("fa2"), p, SIMULATOR.limits)
    inputs = Case("forward", p, 3).inputs()
    assert may_be_mixed(plan)
    found, right = mixed_results(SIMULATOR, plan, inputs), run_guarded(SIMULATOR, plan, inputs, {})
    np.testing.assert_array_equal(found["O"], right["O"])


@pytest.mark.gpu
def test_a_check_on_a_gpu_makes_calls_on_two_memories(cuda, monkeypatch):
    made = []
    real = tasks.mixed_results
    monkeypatch.setattr(tasks, "mixed_results", lambda *a: made.append(1) or real(*a))
    p = Problem.of_sizes(**SIZES, bias="1hmn")
    case = Case("forward", p, 3)
    *_, last = tasks.perform(cuda, tasks.Task(case, ("fa2",)))
    assert made and last.kind == "right"
