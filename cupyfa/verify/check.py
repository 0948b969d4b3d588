"""Kernels checked on the cases of a grid, and a failure run again from its file."""

from __future__ import annotations

import random
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupyfa.errors import OutOfMemory, Unsupported
from cupyfa.ladder.kernel import Kernel
from cupyfa.ladder.lookup import record_named
from cupyfa.options import OptionKeywords
from cupyfa.planner import select
from cupyfa.problem import whole
from cupyfa.runtime import environment
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.environment import Progress, no_progress
from cupyfa.runtime.select import backend_named
from cupyfa.runtime.simulator import Simulator
from cupyfa.verify import grids
from cupyfa.verify.case import Case, arranged
from cupyfa.verify.failures import (
    DEVICE_LOST,
    DIED,
    DIFFERS,
    NO_ANSWER,
    NO_MEMORY,
    RIGHT,
    UNSUPPORTED,
    Failure,
    Outcome,
    Stored,
    command,
    read,
    write,
)
from cupyfa.verify.shrink import shrunk
from cupyfa.verify.tasks import Task, has_name, name_of, perform
from cupyfa.verify.workers import Here, Process, Worker, in_parallel

if TYPE_CHECKING:
    from typing_extensions import Unpack

EXAMINED = 5  # failures of a kernel, the first ones: they are shrunk and written
MOST_SAMPLES = 100_000  # all are drawn before the first one runs
_LONGEST = 1_000_000  # seconds, for a timeout
_TO_BEGIN = 60.0  # seconds until a kernel that is repeated is compiled and runs
_PATIENCE = 3  # times that a kernel may hang or end its process
_WHILE_SHRINKING = 10.0  # seconds that a kernel may take

KernelOrName = str | Kernel


@dataclass(frozen=True)
class Tally:
    """How one kernel did.

    worst: the largest error / bound of its right results, None without one. not_run: on how many
    cases it did not run, by the reason.
    """

    kernel: str
    runs: int
    right: int
    worst: float | None
    not_run: Mapping[str, int]

    def row(self) -> dict[str, Any]:
        """The tally as a row of a table."""
        return {
            "kernel": self.kernel,
            "runs": self.runs,
            "right": self.right,
            "worst_error/bound": self.worst,
            "not_supported": sum(self.not_run.values()),
        }


@dataclass(frozen=True)
class Checked:
    """What came of a check; as a string, in one line."""

    grid: str
    device: str
    cases: int
    tallies: tuple[Tally, ...]
    failures: tuple[Failure, ...]
    seconds: float

    @property
    def runs(self) -> int:
        """How often a kernel ran on a case."""
        return sum(tally.runs for tally in self.tallies)

    @property
    def right(self) -> int:
        """How many of the runs were right."""
        return sum(tally.right for tally in self.tallies)

    def __str__(self) -> str:
        worst = max(
            (tally for tally in self.tallies if tally.worst is not None),
            key=lambda tally: tally.worst or 0.0,
            default=None,
        )
        not_run: Counter[str] = sum((Counter(t.not_run) for t in self.tallies), Counter())
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in not_run.most_common())
        parts = (
            f"{self.right:,} of {self.runs:,} runs right: {self.cases:,} "
            f"case{'s' * (self.cases != 1)} of {self.grid}, "
            f"{', '.join(tally.kernel for tally in self.tallies)} on {self.device}",
            f"at worst {worst.worst:.2g} x the bound ({worst.kernel})" if worst else "",
            f"{not_run.total():,} not supported ({reasons})" if not_run else "",
            f"{self.seconds:.3g} s",
        )
        return "; ".join(filter(None, parts))


class Interrupted(KeyboardInterrupt):
    """A check was interrupted; ``checked`` is what it found until then.

    Its cause is KeyboardInterrupt, or SystemExit if a signal handler raised that.
    """

    def __init__(self, checked: Checked) -> None:
        super().__init__(str(checked))
        self.checked = checked


def check(
    kernels: KernelOrName | Sequence[KernelOrName],
    *,
    grid: str = "smoke",
    samples: int | None = None,
    seed: int = 0,
    dtypes: str | Sequence[str] | None = None,
    backend: str | Backend = "auto",
    reruns: int = 0,
    jobs: int = 0,
    timeout: float = 60.0,
    failures: str | Path | None = None,
    progress: Progress = no_progress,
    **options: Unpack[OptionKeywords],
) -> Checked:
    """Runs kernels on all cases of a grid and compares every result with the reference.

    kernels: names, ``script.py:name`` included, or records. grid, samples, seed and dtypes: which
    cases, as for ``grids.cases``. options: of attention, in place of the grid's own; with a
    precision, inputs are float32 unless dtypes are given. reruns: how often each kernel runs again
    and must give the same bits. jobs: how many processes work at a time, on the visible GPUs in
    turn if they are alike; 0 works in this one, the only one that can run records. timeout:
    seconds after which a process is ended whose kernel gives no answer. failures: a folder for the
    files of the first EXAMINED failures of each kernel, which ``replay`` reads; made when there is
    one. Those on ``fuzz`` are made small first. The command that repeats a failure of a record of
    one's own has SCRIPT.py in place of the script that it stands in.

    Raises ValueError for arguments that are wrong, DeviceError if there is no such backend, and
    Interrupted, with what was found so far, on Ctrl-C or where a signal's handler exits.
    """
    start = time.monotonic()
    if not 0 < timeout <= _LONGEST:
        raise ValueError(
            f"timeout is {timeout}; give seconds, more than 0 and at most {_LONGEST:,}"
        )
    if samples is not None:
        samples = whole("samples", samples, 1, MOST_SAMPLES)
    seed, jobs, reruns = whole("seed", seed, 0), whole("jobs", jobs, 0), whole("reruns", reruns, 0)
    dtypes = (dtypes,) if isinstance(dtypes, str) else dtypes
    engine = backend_named(backend)
    given = {name: value for name, value in options.items() if value is not None}
    if "precision" in given and not dtypes:
        dtypes = ("float32",)
    tasks = [
        Task(case, named, reruns=reruns, timeout=timeout)
        for operation, named in _by_operation(kernels, jobs).items()
        for case in _with_options(
            grids.cases(grid, operation, dtypes=dtypes, samples=samples, seed=seed), given
        )
    ]
    sheet = _Sheet(tasks, progress)
    workers: list[Worker] = [Process(engine, i) for i in range(jobs)] or [Here(engine)]

    def so_far(found: Sequence[Failure]) -> Checked:
        seconds = time.monotonic() - start
        device = engine.limits.device
        return Checked(grid, device, len(tasks), sheet.tallies(), tuple(found), seconds)

    found: list[Failure] = []
    try:
        _run(workers, list(enumerate(tasks)), sheet)
        folder = Path(failures) if failures is not None else None
        found = _examined(workers, sheet, engine, folder, shrink=grid == "fuzz")
    except (KeyboardInterrupt, SystemExit) as ended:
        found = [_failure(engine, task, outcome) for task, outcome in sheet.in_order()]
        raise Interrupted(so_far(found)) from ended
    finally:
        for worker in workers:
            worker.stop()
    return so_far(found)


@dataclass(frozen=True)
class Replayed:
    """A failure that was stored, and what the same inputs give now."""

    stored: Stored
    now: Outcome
    device: str


def replay(
    file: str | Path, kernel: KernelOrName | None = None, backend: str | Backend = "auto"
) -> Replayed:
    """Runs the kernel of a file that ``check`` wrote, or another one, on the inputs in it.

    With the constants it had then, if they can be had here, and in the simulator with the threads
    in the order they had, unless ``backend`` has another. Raises OSError if the file cannot be
    read, ValueError if it is damaged or of a record of one's own and no kernel is given, and
    Unsupported if the kernel cannot do the case.
    """
    engine, stored = backend_named(backend), read(file)
    if isinstance(engine, Simulator) and engine.schedule is None:
        engine = Simulator(schedule=stored.schedule, workers=engine.workers)
    case, name = stored.case, stored.outcome.kernel
    if kernel is None and not stored.has_name:
        raise ValueError(
            f"{file} is of {name}, a record of your own; give it as kernel= or, on the command "
            f"line, as --kernel script.py:{name}"
        )
    chosen = kernel or name
    record = record_named(chosen) if isinstance(chosen, str) else chosen
    if record.operation != case.operation:
        raise ValueError(
            f"{record.name} computes {record.operation}; the inputs in {file} are of "
            f"{case.operation}"
        )
    constants = stored.outcome.constants if kernel is None else {}
    try:
        select.plan(record, case.problem, engine.limits, **constants)
    except (Unsupported, ValueError):
        constants = {}
    task = Task(case, (chosen,), constants, stored.reruns)
    inputs = arranged(stored.inputs, case.layout)
    (now,) = (x for x in perform(engine, task, inputs) if isinstance(x, Outcome))
    if now.kind == UNSUPPORTED:
        raise Unsupported(f"{now.kernel} cannot do {case}: {now.message}", now.message)
    if now.kind == NO_MEMORY:
        raise OutOfMemory(now.message)
    return Replayed(stored, now, engine.limits.device)


def _with_options(cases: Sequence[Case], given: Mapping[str, Any]) -> list[Case]:
    """The cases with the options that were asked for, each once; a softmax has none."""
    if not given:
        return list(cases)
    changed = (
        x if x.problem.is_softmax else replace(x, problem=x.problem.with_options(**given))
        for x in cases
    )
    return list(dict.fromkeys(changed))


def _by_operation(
    kernels: KernelOrName | Sequence[KernelOrName], jobs: int
) -> dict[str, tuple[KernelOrName, ...]]:
    """The kernels of each operation, in the order given, each once."""
    chosen = [kernels] if isinstance(kernels, KernelOrName) else list(kernels)
    if not chosen:
        raise ValueError("no kernel is named; give at least one")
    if jobs and not all(isinstance(kernel, str) for kernel in chosen):
        raise ValueError(f"jobs is {jobs}, but records run in this process: give names, or jobs=0")
    for kernel in chosen:
        if not isinstance(kernel, KernelOrName):
            raise TypeError(f"a kernel is {kernel!r}; give names, or records")
    by_operation: dict[str, dict[str, KernelOrName]] = {}
    named, records = {x: record_named(x) for x in chosen if isinstance(x, str)}, dict[str, Kernel]()
    for kernel in chosen:
        record, name = named[kernel] if isinstance(kernel, str) else kernel, name_of(kernel)
        if records.setdefault(name, record) is not record:
            raise ValueError(f"two kernels are named {name!r}; give one of them another name")
        by_operation.setdefault(record.operation, {})[name] = kernel
    return {operation: tuple(mine.values()) for operation, mine in by_operation.items()}


class _Sheet:
    """What is known so far."""

    def __init__(self, tasks: Sequence[Task], progress: Progress) -> None:
        names = [name_of(kernel) for task in tasks for kernel in task.kernels]
        self._total = len(names)
        self._progress = progress
        self._outcomes = {name: Counter[str]() for name in names}  # how many of each kind
        self._not_run = {name: Counter[str]() for name in names}
        self._worst: dict[str, float] = {}
        self._failed: list[tuple[int, Task, Outcome]] = []

    def add(self, index: int, task: Task, outcome: Outcome) -> None:
        """Takes down what came of one kernel on the task of an index."""
        name = outcome.kernel
        if outcome.failed:
            self._failed.append((index, task, outcome))
        elif outcome.kind != RIGHT:
            reason = outcome.message if outcome.kind == UNSUPPORTED else "not enough memory"
            self._not_run[name][reason] += 1
        elif outcome.worst:
            self._worst[name] = max(self._worst.get(name, 0.0), outcome.worst.ratio)
        self._outcomes[name][outcome.kind] += 1
        done = sum(counts.total() for counts in self._outcomes.values())
        self._progress(done, self._total, f"{len(self._failed)} failed")

    def in_order(self) -> list[tuple[Task, Outcome]]:
        """The failures, kernel by kernel in the order of the cases."""
        order = list(self._outcomes)
        by_kernel = sorted(self._failed, key=lambda x: (order.index(x[2].kernel), x[0]))
        return [(task, outcome) for _, task, outcome in by_kernel]

    def tallies(self) -> tuple[Tally, ...]:
        return tuple(
            Tally(
                kernel=name,
                runs=kinds.total() - kinds[UNSUPPORTED] - kinds[NO_MEMORY],
                right=kinds[RIGHT],
                worst=self._worst.get(name),
                not_run=dict(self._not_run[name]),
            )
            for name, kinds in self._outcomes.items()
        )


def _run(workers: Sequence[Worker], tasks: Sequence[tuple[int, Task]], sheet: _Sheet) -> None:
    """Runs numbered tasks. What may be the neighbours' fault is run once more, alone.

    A kernel that hung or died a few times is given no more cases.
    """
    alone = len(workers) == 1
    lost = Counter[str]()  # answers, by kernel
    later: list[tuple[int, Task]] = []
    tasks = list(tasks)
    if not alone:
        random.Random(0).shuffle(tasks)  # so that GPU and CPU have work all the time

    def job(worker: Worker, item: tuple[int, Task]) -> list[Outcome]:
        task = item[1]
        kernels = tuple(x for x in task.kernels if lost[name_of(x)] < _PATIENCE)
        return worker.run(replace(task, kernels=kernels)) if kernels else []

    for (index, task), outcomes in in_parallel(workers, job, tasks):
        left = {name_of(kernel): kernel for kernel in task.kernels}
        for outcome in outcomes:
            lost[outcome.kernel] += outcome.kind in (NO_ANSWER, DIED, DEVICE_LOST)
            if alone or outcome.kind not in (NO_ANSWER, DIED, NO_MEMORY):
                sheet.add(index, task, outcome)
                del left[outcome.kernel]
        if not alone and left:
            later.append((index, replace(task, kernels=tuple(left.values()))))
        for name in left if alone else ():
            given_up = f"given up when it had hung or died {_PATIENCE} times"
            sheet.add(index, task, Outcome(name, UNSUPPORTED, given_up))
    if later:
        for worker in workers:
            worker.rest()
        _run(workers[:1], later, sheet)


def _examined(
    workers: Sequence[Worker], sheet: _Sheet, engine: Backend, folder: Path | None, *, shrink: bool
) -> list[Failure]:
    """The failures; the first ones of each kernel smaller if they are to be, and in files."""
    failed = sheet.in_order()
    first = _first_of_each_kind(failed) if shrink or folder else []

    def job(worker: Worker, item: tuple[int, tuple[Task, Outcome]]) -> Failure:
        return _closer(worker, engine, *item[1], shrink=shrink)

    closer = {item[0]: failure for item, failure in in_parallel(workers, job, first)}
    if folder and closer:
        made_with = environment.describe(engine)
        for i, failure in closer.items():
            try:
                task, outcome = failed[i]
                file = write(
                    folder,
                    failure,
                    reruns=task.reruns,
                    made_with=made_with,
                    schedule=getattr(engine, "schedule", None),
                    has_name=has_name(_kernel_of(task, outcome)),
                )
            except OSError as error:  # the check is not to be lost for that
                warnings.warn(f"{folder} cannot be written to ({error.strerror})", stacklevel=2)
                break
            closer[i] = replace(failure, file=file)
    found = [closer.get(i) or _failure(engine, *one) for i, one in enumerate(failed)]
    return list({failure.command: failure for failure in found}.values())


def _first_of_each_kind(
    failed: Sequence[tuple[Task, Outcome]],
) -> list[tuple[int, tuple[Task, Outcome]]]:
    """The numbers of the failures to look at: of each kernel a few, of all kinds it has."""
    of_kind, of_kernel = Counter[tuple[str, str]](), Counter[str]()
    ranks = []
    for _, outcome in failed:
        ranks.append(of_kind[outcome.kernel, outcome.kind])
        of_kind[outcome.kernel, outcome.kind] += 1
    first = []
    for i in sorted(range(len(failed)), key=lambda i: ranks[i]):
        kernel = failed[i][1].kernel
        of_kernel[kernel] += 1
        if of_kernel[kernel] <= EXAMINED:
            first.append((i, failed[i]))
    return first


def _closer(
    worker: Worker, engine: Backend, task: Task, outcome: Outcome, *, shrink: bool
) -> Failure:
    """A failure seen once more, with arrays, and on a smaller case if it is to be."""
    task = replace(task, kernels=(_kernel_of(task, outcome),), keep=True)
    quick = replace(task, keep=False, timeout=min(task.timeout, _WHILE_SHRINKING))

    def fails(case: Case) -> bool:
        return worker.run(replace(quick, case=case))[0].kind == outcome.kind

    smaller = replace(task, case=shrunk(task.case, fails)) if shrink else task
    again = worker.run(smaller)[0]
    if again.kind != outcome.kind:
        flaky = f"{outcome.message}; it did not fail again, so the command may not repeat it"
        return _failure(engine, task, replace(outcome, message=flaky))
    failure = _failure(engine, smaller, again)
    return failure if smaller == task else replace(failure, found_on=task.case)


def _kernel_of(task: Task, outcome: Outcome) -> KernelOrName:
    return next(x for x in task.kernels if name_of(x) == outcome.kernel)


def _failure(engine: Backend, task: Task, outcome: Outcome) -> Failure:
    script = "" if has_name(_kernel_of(task, outcome)) else "SCRIPT.py:"
    options = {
        "backend": engine.name,
        "schedule": getattr(engine, "schedule", None),
        "reruns": task.reruns if outcome.kind == DIFFERS else None,
    }
    named = replace(outcome, kernel=script + outcome.kernel)
    again = command(task.case, named, options)
    if outcome.kind == NO_ANSWER:  # it would not end by itself
        again = f"timeout -k 5 {task.timeout + _TO_BEGIN:g} {again}"
    return Failure(task.case, outcome, again)
