"""One case and the kernels that are to do it: the unit of work of a check."""

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
from cupyfa.operations import OPERATIONS
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

# Multiply-adds, scores and rows of a case that the simulator does in a minute with any kernel.
_SIMULATED = (2**29, 2**20, 2**16)


@dataclass(frozen=True)
class Task:
    """Kernels to run on one case, each by its name or its record, with constants fixed.

    reruns: how often each runs again, to see whether the result is the same to the bit.
    timeout: seconds that a kernel may take, where that can be watched.
    keep: whether the outcomes are to hold arrays, if these are not too large for a file.
    """

    case: Case
    kernels: tuple[str | Kernel, ...]
    constants: Mapping[str, int] = field(default_factory=dict)
    reruns: int = 0
    timeout: float = 60.0
    keep: bool = False


@dataclass(frozen=True)
class Doing:
    """What comes next, and the outcome as far as it is known: a kernel is prepared, or it runs."""

    outcome: Outcome
    runs: bool


def name_of(kernel: str | Kernel) -> str:
    """A kernel's name, as it was given."""
    return kernel if isinstance(kernel, str) else kernel.name


def has_name(kernel: str | Kernel) -> bool:
    """Whether its name finds it: nothing tells in which script a record of one's own stands."""
    return isinstance(kernel, str) or LADDER[kernel.operation].get(kernel.name) is kernel


def perform(
    engine: Backend, task: Task, inputs: dict[str, np.ndarray] | None = None
) -> Iterator[Doing | Outcome]:
    """Runs a task: tells what it does next, and an outcome for each of its kernels.

    inputs: in place of those that the case makes. Ends with the outcome DEVICE_LOST if there is
    one. Raises CompilerNotFound if nothing can run here.
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
    """The plan, if the kernel can do the case and this place can hold it."""
    record = record_named(kernel) if isinstance(kernel, str) else kernel
    p = task.case.problem
    plan = select.plan(record, p, engine.limits, **task.constants)
    task.case.require_reach(engine)
    if engine.name == "simulator":
        scores = p.batch * p.heads * p.M * p.N
        sizes = (scores * (p.d + p.dv), scores, p.batch * p.heads * p.M)
        if any(size > most for size, most in zip(sizes, _SIMULATED)):
            raise Unsupported(f"{p} would take too long", "too large for the simulator")
    return plan


def _expected(plans: Mapping[str, Plan], inputs: Arrays, case: Case) -> dict[str | None, Sample]:
    """What is right, by what the kernels round to: computed once for all of them.

    Gradients take far longer than the forward pass: of large problems there is a sample.
    """
    if not plans:
        return {}
    plan = next(iter(plans.values()))
    operation, p = OPERATIONS[plan.kernel.operation], plan.problem
    gradients = operation.name == "backward"
    chosen = sampling.excerpts(p, case.seed, "backward") if gradients else [None]
    roundings = tuple(dict.fromkeys(plan.rounding for plan in plans.values()))
    readable = readable_inputs(plan, inputs)
    found = [operation.reference(readable, p, roundings, excerpt) for excerpt in chosen]
    return {r: Sample(operation, p, chosen, [each[r] for each in found]) for r in roundings}


def _outcome(
    engine: Backend,
    plan: Plan,
    inputs: Arrays,
    expected: Sample,
    begun: Outcome,
    task: Task,
) -> Outcome:
    """What comes of running a plan, once and then again."""
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
    """What kind of failure an error is."""
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
    """What a file of a failure holds beside the results, by the names it has there.

    What is expected is in it if that is known of all rows.
    """
    whole = expected.expected[0] if expected.excerpts == [None] else {}
    values = {f"expected_{name}": pair.value for name, pair in whole.items()}
    bounds = {f"bound_{name}": pair.bound for name, pair in whole.items()}
    arrays = {**inputs, **values, **bounds}
    return arrays if sum(x.nbytes for x in arrays.values()) <= LARGEST_FILE else {}
