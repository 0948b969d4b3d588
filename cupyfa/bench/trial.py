"""Checks and times one kernel on one problem."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np

from cupyfa.bench import timing
from cupyfa.errors import WrongResult
from cupyfa.numerics.tolerance import Verdict
from cupyfa.operations import OPERATIONS
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
    """The result of running a plan: verdicts on its outputs, milliseconds of each timed run."""

    plan: Plan
    verdicts: list[Verdict]
    milliseconds: list[float]
    resources: dict[str, dict[str, int]]  # of each launch, by its entry

    @property
    def passed(self) -> bool:
        """Whether every output is right."""
        return all(verdict.passed for verdict in self.verdicts)

    @property
    def time(self) -> float:
        """The median of the timed runs, in milliseconds."""
        return median(self.milliseconds)

    @property
    def tflops(self) -> float:
        """10¹² floating-point operations a second."""
        flops = OPERATIONS[self.plan.kernel.operation].flops(self.plan.problem)
        return flops / self.time / 1e9 if self.time else 0.0


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
    return Trial(plan, verdicts, times, used)


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
