"""Checks and times a kernel on one problem, and measures the accuracy of kernels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cupyfa.arrays import block_mask
from cupyfa.errors import WrongResult
from cupyfa.lab.bench import sweeps, timing
from cupyfa.lab.bench.results import Measurement
from cupyfa.lab.bench.watch import Watch
from cupyfa.lab.verify.case import Case
from cupyfa.lab.verify.sampling import Judge
from cupyfa.lab.verify.tasks import difference, run_with_undefined_results, unchecked_inputs
from cupyfa.ladder.kernel import Kernel
from cupyfa.ladder.lookup import record_named
from cupyfa.ladder.operations import Excerpt, exact_attention
from cupyfa.numerics.shown import Rows, Shown, ShownRow
from cupyfa.numerics.tolerance import Verdict
from cupyfa.planner.choose_kernel import plan as plan_of
from cupyfa.planner.plan import Plan
from cupyfa.problem.problem import Problem
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.choose_backend import backend_named
from cupyfa.runtime.environment import Progress, no_progress
from cupyfa.runtime.guard import run_guarded
from cupyfa.runtime.launcher import replay

STEPS = 4  # number of steps that a trial reports to ``progress``
_LONGEST = 0.5  # budget for timing in seconds
_MOST = 20  # maximum number of timed calls


@dataclass(frozen=True, repr=False)
class Trial(Shown):
    """The result of running a plan.

    resources: registers and other resources of each launch, by entry point. checked: fraction of
    rows compared with the reference. is_empty: whether every row is fully masked, so that nothing
    was computed.
    """

    plan: Plan
    verdicts: Sequence[Verdict]
    measurement: Measurement
    resources: dict[str, dict[str, int]]
    checked: float = 1.0
    is_empty: bool = False

    @property
    def passed(self) -> bool:
        """Whether every output is right."""
        return all(verdict.passed for verdict in self.verdicts)


def trial(
    backend: Backend,
    plan: Plan,
    inputs: Mapping[str, np.ndarray],
    *,
    reruns: int = 0,
    watch: Watch | None = None,
    excerpts: Sequence[Excerpt | None] = (None,),
    progress: Progress = no_progress,
) -> Trial:
    """Runs a plan with guard zones around outputs, checks its results, and times it.

    Large results are checked on excerpts.

    Raises WrongResult for writes outside the outputs, and if one of ``reruns`` further runs is not
    bitwise identical. Wrong values are reported in the verdicts. ``watch`` tracks the running call.
    """
    progress(0, STEPS, "compiling")
    watch, readable = watch or Watch(), unchecked_inputs(backend, plan, inputs)
    begins = partial(watch.begins, f"{plan.kernel.name} on {plan.problem}")
    used = {
        launch.entry: backend.resources(backend.compile_launch(launch)) for launch in plan.programs
    }
    progress(1, STEPS, "running")
    with watch.calls():
        begins()
        results = run_guarded(backend, plan, readable, {})
        different = difference(backend, plan, readable, results, reruns, begins)
        run_with_undefined_results(backend, plan, readable)
    if different:
        raise WrongResult(f"{plan.kernel.name} on {plan.problem}: {different}")
    progress(2, STEPS, "checking")
    judge = Judge.of(plan, inputs, excerpts)
    verdicts = judge.verdicts(results, plan.rounding)
    progress(3, STEPS, "timing")
    call = replay(backend, plan, timing.arrays_of(backend, plan, readable, {}))
    with watch.calls():
        how: Any = {"budget": _LONGEST, "cold": False, "most": _MOST}
        (times,) = timing.measure(backend, [call], **how, begins=lambda _: begins())
    kernel, constants = plan.kernel, dict(plan.constants)
    row = Measurement(kernel.name, kernel.operation, plan.problem, constants, times)
    lse = results.get("lse", inputs.get("lse"))  # an input when computing gradients
    is_empty = lse is not None and bool(np.isneginf(lse).all())
    return Trial(plan, verdicts, row, used, judge.share, is_empty)


@dataclass(frozen=True, repr=False)
class Accuracy(ShownRow):
    """The root mean square of a kernel's error in O on one case (rmse), and of O itself (rms)."""

    kernel: str
    case: Case
    rmse: float
    rms: float

    def row(self) -> dict[str, Any]:
        """Returns the accuracy as a table row."""
        return {"kernel": self.kernel, "values": self.case.values, "rmse": self.rmse}


def accuracy(
    kernels: str | Kernel | Sequence[str | Kernel],
    *,
    values: Sequence[str] = ("normal", "outliers"),
    seed: int = 0,
    backend: str | Backend = "auto",
    **sizes: Any,
) -> list[Accuracy]:
    """Measures the accuracy of forward kernels on random inputs of several kinds.

    values: kinds of input values in ``case.VALUES``.
    sizes: sizes of the problem, for example ``M=256, d=128, dtype="float16"``.

    All kernels read the same inputs. Raises ValueError for invalid arguments, and Unsupported if a
    kernel does not support the problem.
    """
    backend = backend_named(backend)
    named = [kernels] if isinstance(kernels, str | Kernel) else kernels
    chosen = [x if isinstance(x, Kernel) else record_named(x) for x in named]
    for record in chosen:
        if record.operation != "forward":
            raise ValueError(
                f"accuracy supports only forward kernels; {record.name} computes {record.operation}"
            )
    sweeps.refuse_foreign(["forward"], sizes)
    problem, found = Problem.of_sizes(**sizes), []
    for kind in values:
        case = Case("forward", problem, seed, kind)
        inputs = case.inputs()
        plain, _ = exact_attention(inputs, problem)
        for record in chosen:
            plan = plan_of(record, problem, backend.limits)
            mine = block_mask.readable(backend, plan, case.completed(inputs, record))
            exact = plain
            if record.reference:
                exact = plan.operation.reference(mine, plan.problem, [None])[None]["O"].value
            out = run_guarded(backend, plan, mine, {})["O"]
            rmse = float(np.sqrt(np.mean((out.astype(np.float64) - exact) ** 2)))
            found.append(Accuracy(record.name, case, rmse, float(np.sqrt(np.mean(exact**2)))))
    return Rows(found)
