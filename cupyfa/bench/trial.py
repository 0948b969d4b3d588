"""Checks and times one kernel on one problem."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cupyfa.bench import timing
from cupyfa.bench.results import Measurement
from cupyfa.errors import WrongResult
from cupyfa.numerics.tolerance import Verdict
from cupyfa.planner.plan import Plan
from cupyfa.runtime import guard
from cupyfa.runtime.arrays import readable_inputs
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.guard import run_guarded
from cupyfa.runtime.launcher import replay
from cupyfa.verify.tasks import difference

_LONGEST = 0.5  # seconds of timing
_MOST = 20


@dataclass(frozen=True)
class Trial:
    """The result of running a plan; resources are those of each launch, by its entry."""

    plan: Plan
    verdicts: list[Verdict]
    measurement: Measurement
    resources: dict[str, dict[str, int]]

    @property
    def passed(self) -> bool:
        """Whether every output is right."""
        return all(verdict.passed for verdict in self.verdicts)


def trial(
    engine: Backend, plan: Plan, inputs: Mapping[str, np.ndarray], *, reruns: int = 0
) -> Trial:
    """Checks a plan on these inputs between guard zones, then times it.

    Raises WrongResult for writes outside the outputs, and if one of ``reruns`` further runs differs
    in a bit; wrong values are in the verdicts.
    """
    readable = readable_inputs(plan, inputs)
    results = run_guarded(engine, plan, readable, {})
    if different := difference(engine, plan, readable, results, reruns):
        raise WrongResult(f"{plan.kernel.name} on {plan.problem}: {different}")
    verdicts = guard.judge(engine, plan, readable, results)
    call = replay(engine, plan, timing.arrays_of(engine, plan, readable, {}))
    (times,) = timing.measure(engine, [call], budget=_LONGEST, cold=False, most=_MOST)
    used = {launch.entry: engine.resources(engine.prepare(launch)) for launch in plan.programs}
    kernel, constants = plan.kernel, dict(plan.constants)
    row = Measurement(kernel.name, kernel.operation, plan.problem, constants, times)
    return Trial(plan, verdicts, row, used)


def random_sizes(seed: int) -> dict[str, int]:
    """Small odd sizes by a seed, for those that are not given."""
    pick = random.Random(seed)
    kv_heads = pick.randint(1, 2)
    return {
        "batch": pick.randint(1, 2),
        "heads": kv_heads * pick.randint(1, 2),
        "kv_heads": kv_heads,
        "M": pick.randint(1, 200),
        "N": pick.randint(1, 200),
        "d": pick.randint(1, 128),
    }
