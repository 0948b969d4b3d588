"""A task, the unit of work of a check: one case and the kernels to run on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from cupyfa.errors import (
    CompilerNotFound,
    DeviceError,
    DeviceLost,
    OutOfMemory,
    SimulatorFault,
    Unsupported,
    WrongResult,
)
from cupyfa.ladder import LADDER
from cupyfa.ladder.kernel import Kernel
from cupyfa.ladder.lookup import record_named
from cupyfa.planner import select
from cupyfa.planner.plan import Plan
from cupyfa.runtime.arrays import readable_inputs
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.guard import run_guarded
from cupyfa.verify import sampling
from cupyfa.verify.case import FINITE, Case
from cupyfa.verify.failures import (
    COMPILE_ERROR,
    DEVICE_ERROR,
    DEVICE_LOST,
    DIFFERS,
    ERROR,
    FAULT,
    LARGEST_FILE,
    NO_MEMORY,
    RIGHT,
    UNSUPPORTED,
    WRONG_RESULT,
    WROTE_OUTSIDE,
    Arrays,
    Outcome,
)
from cupyfa.verify.sampling import Sample

# Multiply-adds, scores and rows of a case that any kernel finishes in the simulator in a minute.
_SIMULATED = (2**29, 2**20, 2**16)


@dataclass(frozen=True)
class Task:
    """Kernels to run on one case, by name or record, with some constants fixed.

    reruns: how often each kernel runs again and must give the same bits.
    timeout: seconds that a kernel may take; only worker processes hold to it.
    keep: whether outcomes hold the arrays, unless these are too large for a file.
    """

    case: Case
    kernels: tuple[str | Kernel, ...]
    constants: Mapping[str, int] = field(default_factory=dict)
    reruns: int = 0
    timeout: float = 60.0
    keep: bool = False


@dataclass(frozen=True)
class Doing:
    """The next step, preparing or running a kernel, and what its outcome is so far."""

    outcome: Outcome
    runs: bool


def name_of(kernel: str | Kernel) -> str:
    """A kernel's name, as it was given."""
    return kernel if isinstance(kernel, str) else kernel.name


def has_name(kernel: str | Kernel) -> bool:
    """Whether the kernel can be found by its name; a record from a script cannot."""
    return isinstance(kernel, str) or LADDER[kernel.operation].get(kernel.name) is kernel


def perform(
    engine: Backend, task: Task, inputs: dict[str, np.ndarray] | None = None
) -> Iterator[Doing | Outcome]:
    """Runs a task and yields each next step and the outcome of each kernel.

    inputs: in place of the case's own. The outcome DEVICE_LOST is the last one. Raises
    CompilerNotFound if there is no compiler for the simulator.
    """
    plans: dict[str, Plan] = {}
    for name, kernel in {name_of(x): x for x in task.kernels}.items():
        try:
            plans[name] = _planned(engine, kernel, task)
        except Unsupported as refused:
            yield Outcome(name, UNSUPPORTED, refused.reason)
        except ValueError as error:  # a mistake in the record
            yield Outcome(name, ERROR, str(error))
    try:
        inputs = task.case.inputs(engine) if plans and inputs is None else inputs or {}
        expected = _expected(plans, inputs, task.case)
    except MemoryError as error:
        yield from (Outcome(name, NO_MEMORY, str(error)) for name in plans)
        return
    for name, plan in plans.items():
        right = expected[plan.rounding]
        begun = Outcome(name, RIGHT, constants=plan.constants)
        yield Doing(begun, runs=False)
        try:
            with engine.working_on(None):
                for launch in plan.programs:
                    engine.prepare(launch)
                if task.keep:
                    begun = replace(begun, arrays=_kept(inputs, right))
                yield Doing(begun, runs=True)
                yield _outcome(engine, plan, inputs, right, begun, task)
        except CompilerNotFound:
            raise
        except Exception as error:
            kind = _kind(engine, error)
            yield replace(begun, kind=kind, message=str(error))
            if kind == DEVICE_LOST:
                return
    engine.trim()


def _planned(engine: Backend, kernel: str | Kernel, task: Task) -> Plan:
    """The plan. Raises Unsupported if kernel or backend cannot run the case."""
    record = record_named(kernel) if isinstance(kernel, str) else kernel
    p = task.case.problem
    plan = select.plan(record, p, engine.limits, **task.constants)
    task.case.require_reach(engine)
    if engine.name == "simulator":
        scores = p.batch * p.heads * p.M * p.N
        sizes = (scores * (p.d + p.dv), scores, p.batch * p.heads * p.M)
        if any(size > most for size, most in zip(sizes, _SIMULATED)):
            raise Unsupported(f"{p} takes too long in the simulator", "too large for the simulator")
    return plan


def _expected(plans: Mapping[str, Plan], inputs: Arrays, case: Case) -> dict[str | None, Sample]:
    """What is right for each rounding of the plans, computed once for all of them.

    Large gradients are sampled: their reference takes far longer than that of the forward pass.
    """
    if not plans:
        return {}
    plan = next(iter(plans.values()))
    gradients = plan.kernel.operation == "backward"
    chosen = sampling.excerpts(plan.problem, case.seed, "backward") if gradients else [None]
    roundings = tuple(dict.fromkeys(plan.rounding for plan in plans.values()))
    return sampling.samples(plan, readable_inputs(plan, inputs), roundings, chosen)


def _outcome(
    engine: Backend, plan: Plan, inputs: Arrays, expected: Sample, begun: Outcome, task: Task
) -> Outcome:
    """The outcome of running a plan once and then ``task.reruns`` times more."""
    readable = readable_inputs(plan, inputs)
    results = run_guarded(engine, plan, readable, {})
    kept = {**begun.arrays, **{f"actual_{x}": results[x] for x in results if begun.arrays}}
    finite = task.case.values in FINITE
    verdicts = tuple(sampling.judge(results, expected, finite=finite))
    done = replace(begun, verdicts=verdicts, arrays=kept)
    if wrong := [str(verdict) for verdict in verdicts if not verdict.passed]:
        return replace(done, kind=WRONG_RESULT, message="; ".join(wrong))
    if different := difference(engine, plan, readable, results, task.reruns):
        return replace(done, kind=DIFFERS, message=different)
    return done


def difference(
    engine: Backend,
    plan: Plan,
    inputs: Mapping[str, np.ndarray],
    results: Mapping[str, np.ndarray],
    reruns: int,
) -> str | None:
    """Runs a plan again and describes the first output whose bits differ; None if none does.

    inputs: as ``readable_inputs`` returns them. Outputs that the record calls unordered are left
    out: only the reference judges them. The simulator runs its threads in another order each time.
    """
    for again in range(1, reruns + 1):
        others = run_guarded(engine.reordered(again), plan, inputs, {})
        for name, result in results.items():
            if name in plan.kernel.unordered:
                continue
            bits = f"u{result.itemsize}"
            if (different := result.view(bits) != others[name].view(bits)).any():
                first = ", ".join(str(i) for i in np.argwhere(different)[0])
                return (
                    f"{name} of run {again + 1} differs from the first run's in "
                    f"{different.sum():,} of {different.size:,} elements, first at [{first}]"
                )
    return None


def _kind(engine: Backend, error: Exception) -> str:
    """The kind of outcome that an error is."""
    kinds = {
        WrongResult: WROTE_OUTSIDE,
        SimulatorFault: FAULT,
        OutOfMemory: NO_MEMORY,
        MemoryError: NO_MEMORY,
        DeviceLost: DEVICE_LOST,
        DeviceError: DEVICE_ERROR,
        **dict.fromkeys(engine.compile_errors, COMPILE_ERROR),
    }
    return next((kinds[x] for x in kinds if isinstance(error, x)), ERROR)


def _kept(inputs: Arrays, expected: Sample) -> Arrays:
    """The arrays of a failure's file besides the results, by name; none if they are too large.

    Expected values and bounds are among them unless only a sample is known.
    """
    whole = expected.expected[0] if expected.excerpts == [None] else {}
    values = {f"expected_{name}": pair.value for name, pair in whole.items()}
    bounds = {f"bound_{name}": pair.bound for name, pair in whole.items()}
    arrays = {**inputs, **values, **bounds}
    return arrays if sum(x.nbytes for x in arrays.values()) <= LARGEST_FILE else {}
