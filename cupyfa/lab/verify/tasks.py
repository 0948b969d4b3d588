"""A task, the unit of work of a check: one case and the kernels to run on it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cupyfa import errors
from cupyfa.arrays import block_mask
from cupyfa.errors import Unsupported
from cupyfa.lab.verify import failures, sampling, unchecked
from cupyfa.lab.verify.case import FINITE, Case, arranged
from cupyfa.lab.verify.failures import Arrays, Outcome
from cupyfa.lab.verify.memories import may_be_mixed, mixed_results
from cupyfa.lab.verify.sampling import Judge
from cupyfa.lab.verify.tokens import written
from cupyfa.ladder import LADDER
from cupyfa.ladder.kernel import Kernel
from cupyfa.ladder.lookup import record_named
from cupyfa.planner import choose_kernel
from cupyfa.planner.plan import Plan
from cupyfa.problem.problem import Problem
from cupyfa.runtime import guard
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.guard import run_guarded
from cupyfa.runtime.simulator import Simulator

KernelOrName = str | Kernel
LARGEST_FILE = 250 * 2**20  # maximum bytes of a failure's arrays, not counting results
# Maximum multiply-adds, scores and rows that every kernel can simulate within a minute.
_SIMULATED = (2**29, 2**20, 2**16)


@dataclass(frozen=True)
class Task:
    """One case and the kernels to run on it, by name or record, optionally with fixed constants.

    reruns: number of further runs of each kernel, which must be bitwise identical. timeout: seconds
    that a kernel may take in a worker process. keep: whether outcomes keep the arrays to store for
    a failure. shrinks: whether the case of a failure is reduced. schedule, multiprocessors: replace
    the simulator's thread order and number of multiprocessors. inputs: contiguous arrays to copy
    to the case's layout, in place of the case's inputs.
    """

    case: Case
    kernels: tuple[KernelOrName, ...]
    constants: Mapping[str, int] = field(default_factory=dict)
    reruns: int = 0
    timeout: float = 60.0
    keep: bool = False
    shrinks: bool = False
    schedule: int | None = None
    multiprocessors: int | None = None
    inputs: Arrays | None = field(default=None, repr=False, compare=False)


def name_of(kernel: KernelOrName) -> str:
    return kernel if isinstance(kernel, str) else kernel.name


def has_name(kernel: KernelOrName) -> bool:
    """Returns whether the kernel can be found by its name; a record from a script cannot."""
    return isinstance(kernel, str) or LADDER[kernel.operation].get(kernel.name) is kernel


def backend_of(task: Task, backend: Backend) -> Backend:
    """Returns ``backend``, or a simulator with the task's settings if the task has any."""
    asked = {x: getattr(task, x) for x in ("schedule", "multiprocessors")}
    changes = {name: value for name, value in asked.items() if value is not None}
    return backend.like(**changes) if changes and isinstance(backend, Simulator) else backend


def perform(backend: Backend, task: Task) -> Iterator[Outcome]:
    """Runs a task and yields each kernel's steps and outcome; stops after DEVICE_LOST.

    Raises CompilerNotFound if the simulator finds no compiler.
    """
    backend = backend_of(task, backend)
    plans: dict[str, Plan] = {}
    for kernel in task.kernels:
        name = name_of(kernel)
        try:
            plans[name] = _planned(backend, kernel, task)
        except Unsupported as refused:
            yield Outcome(name, failures.UNSUPPORTED, refused.reason)
        except ValueError as error:  # the record is invalid
            yield Outcome(name, failures.ERROR, str(error))
    if not plans:
        return
    is_given, judge = task.inputs is not None, None
    try:
        case = task.case
        inputs = arranged(task.inputs, case.layout) if task.inputs else case.inputs(backend)
        alike = [plan for plan in plans.values() if plan.kernel.is_plain]
        if alike and case.tokens == "cached":
            judge = _judge(alike, task.case.completed(inputs, alike[0].kernel), task.case)
    except MemoryError as error:
        yield from (Outcome(name, failures.NO_MEMORY, str(error)) for name in plans)
        return
    except Exception as error:
        if not is_given:
            raise
        what = f"the reference of the stored inputs fails ({type(error).__name__}: {error})"
        yield from (Outcome(name, failures.ERROR, what) for name in plans)
        return
    for name, plan in plans.items():
        begun = Outcome(name, failures.RIGHT, constants=plan.constants)
        yield replace(begun, kind=failures.PREPARING)
        try:
            with backend.working_on(None):
                for launch in plan.programs:
                    backend.compile_launch(launch)
                mine = task.case.completed(inputs, plan.kernel, keep=is_given)
                try:
                    ready = written(backend, task.case, mine)
                except errors.WrongResult as wrong:
                    yield replace(begun, kind=failures.WRONG_RESULT, message=str(wrong))
                    continue
                shared = judge if plan.kernel.is_plain else None
                its = shared or _judge([plan], ready, task.case)
                if task.keep:
                    begun = replace(begun, arrays=_kept(mine, its, plan))
                yield replace(begun, kind=failures.RUNNING)
                yield _outcome(backend, plan, ready, its, begun, task)
        except errors.CompilerNotFound:
            raise
        except Exception as error:
            kind = _kind(backend, error)
            yield replace(begun, kind=kind, message=str(error))
            if kind == failures.DEVICE_LOST:
                return
    backend.trim()


def _planned(backend: Backend, kernel: KernelOrName, task: Task) -> Plan:
    """Returns the plan. Raises Unsupported if kernel or backend cannot run the case."""
    record = record_named(kernel) if isinstance(kernel, str) else kernel
    p = task.case.problem
    plan = choose_kernel.plan(record, p, backend.limits, **task.constants)
    task.case.require_reach(backend)
    refuse_long(backend, p)
    return plan


def refuse_long(backend: Backend, p: Problem) -> None:
    """Raises Unsupported for a problem that is too large for the simulator."""
    if backend.name == "simulator":
        scores = p.heads * p.pairs
        sizes = (scores * (p.d + p.dv), scores, p.batch * p.heads * p.M)
        if any(size > most for size, most in zip(sizes, _SIMULATED)):
            raise Unsupported(f"{p} takes too long in the simulator", "too large for the simulator")


def _judge(plans: Sequence[Plan], inputs: Arrays, case: Case) -> Judge:
    """Returns a judge of the plans' results; samples gradients, whose reference is slow."""
    is_sampled = case.operation == "backward"
    chosen = sampling.excerpts(case.problem, case.seed, "backward") if is_sampled else [None]
    judge = Judge.of(plans[0], inputs, chosen)
    judge.expected(*(plan.rounding for plan in plans))
    return judge


def _outcome(
    backend: Backend, plan: Plan, inputs: Arrays, judge: Judge, begun: Outcome, task: Task
) -> Outcome:
    """Runs a plan once and then ``task.reruns`` more times, and returns the outcome."""
    readable = unchecked_inputs(backend, plan, inputs)
    left = {"left": guard.FINITE} if task.case.seed % 2 else {}
    results = run_guarded(backend, plan, readable, {}, **left)
    run_with_undefined_results(backend, plan, readable)
    actual = {f"actual_{name}": x for name, x in results.items() if begun.arrays}
    verdicts = judge.verdicts(results, plan.rounding, finite=task.case.values in FINITE)
    done = replace(begun, verdicts=verdicts, arrays={**begun.arrays, **actual})
    if wrong := [str(verdict) for verdict in verdicts if not verdict.passed]:
        return replace(done, kind=failures.WRONG_RESULT, message="; ".join(wrong))
    if backend.name == "cuda" and may_be_mixed(plan):
        mixed = judge.verdicts(mixed_results(backend, plan, inputs), plan.rounding, finite=False)
        if wrong := [str(verdict) for verdict in mixed if not verdict.passed]:
            what = "with arrays in two memories "
            return replace(done, kind=failures.WRONG_RESULT, message=what + "; ".join(wrong))
    if different := difference(backend, plan, readable, results, task.reruns):
        return replace(done, kind=failures.DIFFERS, message=different)
    return done


def unchecked_inputs(backend: Backend, plan: Plan, inputs: Arrays) -> Arrays:
    """Returns inputs that a plan's kernel can read, in which some lengths are out of range."""
    return block_mask.readable(backend, plan, unchecked.with_wrong_lengths(plan.problem, inputs))


def run_with_undefined_results(backend: Backend, plan: Plan, readable: Arrays) -> None:
    """Runs a plan of a ragged batch or of pages once more, with inputs that lead out of the arrays.

    Raises WrongResult or SimulatorFault for an access outside the arrays; results are ignored.
    """
    wrong = unchecked.with_undefined_results(plan.problem, readable)
    if wrong is not None:
        run_guarded(backend, plan, wrong, {})


def difference(
    backend: Backend,
    plan: Plan,
    inputs: Arrays,
    results: Arrays,
    reruns: int,
    begins: Callable[[], None] = lambda: None,
) -> str | None:
    """Reruns a plan and describes the first output whose bits differ; returns None if all agree.

    inputs: as returned by ``block_mask.readable``. Unordered outputs are not compared; only the
    reference judges them. The simulator changes its thread order in every run. ``begins`` is called
    before each run.
    """
    for again in range(1, reruns + 1):
        begins()
        others = run_guarded(backend.reordered(again), plan, inputs, {})
        for name in results.keys() - plan.unordered:
            first, other = (x[name].view(f"u{x[name].itemsize}") for x in (results, others))
            if len(different := np.argwhere(first != other)):
                return (
                    f"{name} of run {again + 1} differs from the first run's in "
                    f"{len(different):,} of {first.size:,} elements, first at "
                    f"[{', '.join(map(str, different[0]))}]"
                )
    return None


def _kind(backend: Backend, error: Exception) -> str:
    kinds = {
        errors.WrongResult: failures.WROTE_OUTSIDE,
        errors.SimulatorFault: failures.FAULT,
        errors.OutOfMemory: failures.NO_MEMORY,
        MemoryError: failures.NO_MEMORY,
        errors.DeviceLost: failures.DEVICE_LOST,
        errors.DeviceError: failures.DEVICE_ERROR,
        **dict.fromkeys(backend.compile_errors, failures.COMPILE_ERROR),
    }
    return next((kinds[x] for x in kinds if isinstance(error, x)), failures.ERROR)


def _kept(inputs: Arrays, judge: Judge, plan: Plan) -> Arrays:
    """Returns inputs and, if all rows are judged, expected values and bounds; {} if too large."""
    arrays = dict(inputs)
    if None in judge.excerpts:
        for name, pair in judge.expected(plan.rounding)[0][0].items():
            arrays |= {f"expected_{name}": pair.value, f"bound_{name}": pair.bound}
    return arrays if sum(x.nbytes for x in arrays.values()) <= LARGEST_FILE else {}
