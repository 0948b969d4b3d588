"""Trials of mutants: whether a check finds them, and if not, why."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from cupyfa.errors import Unsupported
from cupyfa.lab.mutation import machine_code
from cupyfa.lab.mutation.mutants import Mutant
from cupyfa.lab.verify import checker, failures
from cupyfa.lab.verify.failures import Outcome
from cupyfa.lab.verify.tasks import KernelOrName, Task, backend_of
from cupyfa.lab.verify.workers import Process, in_parallel
from cupyfa.ladder.kernel import Kernel
from cupyfa.ladder.lookup import record_named
from cupyfa.numerics.shown import ShownRow
from cupyfa.planner import choose_kernel, source
from cupyfa.planner.plan import PlannedLaunch
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.environment import Progress, no_progress

FOUND = "found"
MISSED = "missed"
EQUIVALENT = "equivalent"
NOT_COMPILED = "not compiled"  # no case compiles the changed code
INVALID = "does not compile"
OUT_OF_TIME = "out of time"
VERDICTS = (FOUND, MISSED, EQUIVALENT, NOT_COMPILED, INVALID, OUT_OF_TIME)
_LONGEST_CASE = 20.0  # seconds that a case of a mutant may run
_KNOWN = Path(__file__).with_name("known.txt")


@dataclass(frozen=True, repr=False)
class Trial(ShownRow):
    """A mutant, one of VERDICTS, and why: the failure, or what is known about a missed mutant.

    case: the case that found the mutant.
    """

    mutant: Mutant
    verdict: str
    why: str
    case: str | None
    seconds: float

    def row(self) -> dict[str, Any]:
        """Returns the trial as a table row."""
        return {**mutant_row(self.mutant), "verdict": self.verdict, "why": self.why} | {
            "case": self.case,
            "seconds": self.seconds,
        }


def mutant_row(mutant: Mutant) -> dict[str, Any]:
    """Returns a mutant as a table row."""
    names = "number", "place", "kind", "before", "after"
    return {name: getattr(mutant, name) for name in names}


def summary(trials: Sequence[Trial]) -> str:
    """Summarizes trials in a line, with the rate of found mutants among found and missed ones."""
    count = Counter(x.verdict for x in trials)
    judged = count[FOUND] + count[MISSED]
    others = [f"{count[x]:,} {x}" for x in VERDICTS[2:] if count[x]]
    rate = f" ({count[FOUND] / judged:.0%})" if judged else ""
    return ", ".join([f"{count[FOUND]:,} of {judged:,} mutants found{rate}", *others])


def run_trials(
    kernel: KernelOrName,
    mutants: Sequence[Mutant],
    *,
    backend: Backend,
    cases: int | None = None,
    jobs: int = 1,
    timeout: float = 300.0,
    progress: Progress = no_progress,
) -> list[Trial]:
    """Checks each mutant of a kernel with the cases of a default check, until one of them fails.

    cases: the number of cases, as ``samples`` of ``check``.
    jobs: number of worker processes.
    timeout: seconds for the cases of a mutant.

    Raises ValueError if the kernel itself fails.
    """
    tasks = checker.tasks_of(kernel, samples=cases, backend=backend)
    trier = _Trier([_Case.of(task, backend) for task in tasks], backend, timeout)
    workers = [Process(backend, i) for i in range(jobs)]
    found: list[Trial] = []
    try:
        trier.require_right(workers)
        count = Counter[str]()
        for _, trial in in_parallel(workers, trier.trial, mutants):
            found.append(trial)
            count[trial.verdict] += 1
            progress(len(found), len(mutants), f"{count[FOUND]} found, {count[MISSED]} missed")
    finally:
        for worker in workers:
            worker.stop()
    return sorted(found, key=lambda x: x.mutant.number)


@dataclass(frozen=True)
class _Case:
    """A task with its programs, and the files that these include."""

    task: Task
    programs: tuple[PlannedLaunch, ...] = ()
    files: frozenset[Path] = frozenset()

    @classmethod
    def of(cls, task: Task, backend: Backend) -> _Case:
        (kernel,) = task.kernels
        limits = backend_of(task, backend).limits
        try:
            plan = choose_kernel.plan(
                _record(kernel), task.case.problem, limits, **task.constants
            )
        except Unsupported:
            return cls(task)
        files = {path for launch in plan.programs for path in source.files_reached(launch)}
        return cls(task, plan.programs, frozenset(files))


@cache
def _record(kernel: KernelOrName) -> Kernel:
    return record_named(kernel) if isinstance(kernel, str) else kernel


class _Trier:
    def __init__(self, cases: Sequence[_Case], backend: Backend, timeout: float) -> None:
        self._cases, self._timeout = cases, timeout
        self._trap = "__builtin_trap" if backend.name == "simulator" else "__trap"
        self._arch = backend.limits.arch or machine_code.USUAL_ARCH
        self._known = known_equivalents()

    def require_right(self, workers: Sequence[Process]) -> None:
        """Raises ValueError if the kernel itself fails a case."""
        tasks = [x.task for x in self._cases]
        for task, outcomes in in_parallel(workers, lambda worker, x: worker.run(x), tasks):
            if failed := [x for x in outcomes if x.failed]:
                raise ValueError(
                    f"{failed[0].kernel} itself fails on {task.case}: {_reason(failed[0])}; "
                    "correct the kernel first: cupyfa check shows what is wrong"
                )

    def trial(self, worker: Process, mutant: Mutant) -> Trial:
        begun = time.monotonic()
        cases = [x for x in self._cases if mutant.path in x.files]
        verdict, why, case = self._judged(worker, mutant, cases)
        return Trial(mutant, verdict, why, case, time.monotonic() - begun)

    def _judged(
        self, worker: Process, mutant: Mutant, cases: Sequence[_Case]
    ) -> tuple[str, str, str | None]:
        """Returns the verdict on a mutant, the reason, and the case that found it."""
        if reason := self._known.get(_key(mutant)):
            return EQUIVALENT, reason, None
        if not cases:
            return NOT_COMPILED, "no case includes this file", None
        try:
            failed = self._first_failure(worker, mutant, mutant.changed(), cases)
        except TimeoutError:
            return OUT_OF_TIME, f"no case failed within {self._timeout:g} s", None
        if failed is None:
            return *self._missed(worker, mutant, cases), None
        task, outcome = failed
        if outcome.kind == failures.COMPILE_ERROR:
            return INVALID, _reason(outcome), None
        return FOUND, _reason(outcome), str(task.case)

    def _missed(
        self, worker: Process, mutant: Mutant, cases: Sequence[_Case]
    ) -> tuple[str, str]:
        """Returns the verdict on a mutant that no case finds, and what is known about it."""
        probe = mutant.change.probe
        programs = _different(x for case in cases for x in case.programs if _uses(mutant, x))
        if not self._changes(mutant, mutant.changed(), programs):
            if self._changes(mutant, mutant.changed(probe.format(trap="__trap")), programs):
                return EQUIVALENT, "the machine code is the same"
            return NOT_COMPILED, "no case compiles this code"
        try:
            trapped = self._first_failure(
                worker, mutant, mutant.changed(probe.format(trap=self._trap)), cases
            )
        except TimeoutError:
            return MISSED, ""
        if trapped is None:
            return MISSED, "no case executes this code"
        if trapped[1].kind == failures.COMPILE_ERROR:
            return MISSED, ""
        return MISSED, "executed, but all results are right"

    def _changes(self, mutant: Mutant, code: bytes, programs: Sequence[PlannedLaunch]) -> bool:
        """Returns whether a file's other code changes the machine code of any program."""
        with _copied(mutant, code) as copies:
            return machine_code.differ(programs, copies, self._arch)

    def _first_failure(
        self, worker: Process, mutant: Mutant, code: bytes, cases: Sequence[_Case]
    ) -> tuple[Task, Outcome] | None:
        """Runs cases with other code in the mutant's file, until one of them fails.

        Raises TimeoutError if no case has failed in time.
        """
        ends = time.monotonic() + self._timeout
        with _copied(mutant, code) as copies:
            worker.read(copies)
            for case in cases:
                left = ends - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                task = replace(case.task, timeout=min(left, _LONGEST_CASE))
                if failed := [x for x in worker.run(task) if x.failed]:
                    return task, failed[0]
        return None


@contextmanager
def _copied(mutant: Mutant, code: bytes) -> Iterator[Mapping[Path, Path]]:
    """Copies a mutant's folder, with other code in its file; yields what ``source.reading`` takes.

    The copy is removed afterwards.
    """
    with tempfile.TemporaryDirectory(prefix="cupyfa-mutant-") as folder:
        copy = Path(folder).resolve() / mutant.root.name
        mutant.copy_to(copy, code)
        yield {mutant.root: copy}


def _uses(mutant: Mutant, program: PlannedLaunch) -> bool:
    return mutant.path in source.files_reached(program)


def _different(programs: Iterable[PlannedLaunch]) -> list[PlannedLaunch]:
    """Returns the first of the programs with each text."""
    found: dict[str, PlannedLaunch] = {}
    for program in programs:
        found.setdefault(source.text(program), program)
    return [*found.values()]


def _reason(outcome: Outcome) -> str:
    """Returns kind and message of a failure in one line."""
    errors = [x for x in outcome.message.splitlines() if "error:" in x]  # of a compiler
    (first, *_) = errors or outcome.message.splitlines() or [""]
    return f"{outcome.kind}: {first}" if first else outcome.kind


def known_equivalents() -> dict[tuple[str, str, str], str]:
    """Reads known.txt: maps file, code before and code after to the reason."""
    lines = _KNOWN.read_text(encoding="utf-8").splitlines()
    cells = [[x.strip() for x in line.split(" | ")] for line in lines if not line.startswith("#")]
    return {(file, before, after): reason for file, before, after, reason in cells}


def _key(mutant: Mutant) -> tuple[str, str, str]:
    return mutant.file.as_posix(), mutant.before, mutant.after
