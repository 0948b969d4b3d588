"""Trials of mutants: whether a check finds them, and if not, why."""

from __future__ import annotations

import csv
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cupyfa.errors import Unsupported
from cupyfa.lab.mutation import machine_code
from cupyfa.lab.mutation.mutants import Mutant
from cupyfa.lab.verify import checker, failures
from cupyfa.lab.verify.failures import Outcome
from cupyfa.lab.verify.tasks import KernelOrName, Task, backend_of, name_of
from cupyfa.lab.verify.workers import Process, in_parallel
from cupyfa.ladder.lookup import record_named
from cupyfa.numerics.shown import ShownRow
from cupyfa.planner import choose_kernel, source
from cupyfa.planner.plan import PlannedLaunch
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.environment import Progress, no_progress

FOUND = "found"
MISSED = "missed"
EQUIVALENT = "equivalent"
NOT_COMPILED = "not compiled"  # no program of the kernel contains the changed code
INVALID = "does not compile"
OUT_OF_TIME = "out of time"
VERDICTS = (FOUND, MISSED, EQUIVALENT, NOT_COMPILED, INVALID, OUT_OF_TIME)
_OTHER_SEEDS = (1, 2)  # of cases whose programs are compared
_LONGEST_CASE = 20.0  # seconds that a case of a mutant may run
# Names of positions that are always 0 in kernels of an operation.
_ZERO = {"softmax": re.compile(rb"\b(?:batch|head)\b")}
_EQUIVALENTS = Path(__file__).with_name("equivalents.csv")


@dataclass(frozen=True, repr=False)
class Trial(ShownRow):
    """A mutant, one of VERDICTS, and why: the failure, or what is known about a missed mutant.

    case: the number, from 1, of the case that found the mutant, in the order of ``check``.
    """

    mutant: Mutant
    verdict: str
    why: str
    case: int | None
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
    if not judged:
        return ", ".join(["no mutant was judged", *others])
    rate = f"{count[FOUND] / judged:.0%}"
    return ", ".join([f"{count[FOUND]:,} of {judged:,} mutants found ({rate})", *others])


def compiled_mutants(
    kernel: KernelOrName, mutants: Sequence[Mutant], *, backend: Backend, jobs: int = 1
) -> list[Mutant]:
    """Returns the mutants with a change in a function that any program of the kernel contains.

    The programs are those of cases with several seeds. Headers have functions for other kernels.
    """
    drawn = [x for seed in (0, *_OTHER_SEEDS) for x in _cases(kernel, None, backend, seed)]
    programs = _different(program for case in drawn for program in case.programs)
    lines = machine_code.compiled_lines([x.launch for x in programs], _arch(backend), jobs)
    return [x for x in mutants if _is_compiled(x, lines.get(x.path, set()))]


def _is_compiled(mutant: Mutant, lines: Set[int]) -> bool:
    first, last = mutant.change.function
    return any(first <= line <= last for line in lines)


def _arch(backend: Backend) -> str:
    return backend.limits.arch or machine_code.USUAL_ARCH


def each_trial(
    kernel: KernelOrName,
    mutants: Sequence[Mutant],
    *,
    backend: Backend,
    cases: int | None = None,
    jobs: int = 1,
    budget: float = 300.0,
    progress: Progress = no_progress,
) -> Iterator[Trial]:
    """Checks each mutant of a kernel with the cases of a default check, until one of them fails.

    Yields the trials in the order in which they end.

    cases: the number of cases, as ``samples`` of ``check``.
    jobs: number of worker processes.
    budget: seconds to spend on the cases of a mutant.

    Raises ValueError if the kernel itself fails.
    """
    trier = _Trier(kernel, cases, backend, budget)
    workers = [Process(backend, i) for i in range(jobs)]
    count = Counter[str]()
    try:
        trier.require_right(workers)
        for _, trial in in_parallel(workers, trier.trial, mutants):
            count[trial.verdict] += 1
            done = f"{count[FOUND]} found, {count[MISSED]} missed"
            progress(count.total(), len(mutants), done)
            yield trial
    finally:
        for worker in workers:
            worker.stop()


@dataclass(frozen=True)
class _Program:
    """A launch, its source text and the files that this includes, read before they are mutated."""

    launch: PlannedLaunch
    text: str
    files: frozenset[Path]


@dataclass(frozen=True)
class _Case:
    """A task with its number and its programs."""

    number: int
    task: Task
    programs: tuple[_Program, ...]

    def includes(self, path: Path) -> bool:
        return any(path in program.files for program in self.programs)


def _cases(
    kernel: KernelOrName, samples: int | None, backend: Backend, seed: int = 0
) -> list[_Case]:
    """Returns the cases of a check that the kernel can run."""
    record = record_named(kernel) if isinstance(kernel, str) else kernel
    tasks = checker.tasks_of(kernel, samples=samples, backend=backend, seed=seed)
    found = []
    for number, task in enumerate(tasks, 1):
        limits = backend_of(task, backend).limits
        with suppress(Unsupported):
            plan = choose_kernel.plan(record, task.case.problem, limits, **task.constants)
            found.append(_Case(number, task, tuple(map(_read, plan.programs))))
    return found


def _read(launch: PlannedLaunch) -> _Program:
    with machine_code.ONE_READER:  # other threads read mutants
        return _Program(launch, source.text(launch), frozenset(source.files_reached(launch)))


class _Trier:
    def __init__(
        self, kernel: KernelOrName, samples: int | None, backend: Backend, budget: float
    ) -> None:
        self._kernel, self._backend, self._budget = kernel, backend, budget
        self._cases = _cases(kernel, samples, backend)
        self._trap = "__builtin_trap" if backend.name == "simulator" else "__trap"
        self._arch = _arch(backend)
        self._known = known_equivalents(name_of(kernel))
        record = record_named(kernel) if isinstance(kernel, str) else kernel
        self._operation = record.operation

    def require_right(self, workers: Sequence[Process]) -> None:
        """Raises ValueError if the kernel itself fails a case."""
        tasks = [replace(x.task, timeout=_LONGEST_CASE) for x in self._cases]
        for task, outcomes in in_parallel(workers, lambda worker, x: worker.run(x), tasks):
            if failed := [x for x in outcomes if x.failed]:
                raise ValueError(
                    f"{failed[0].kernel} itself fails on {task.case}: {_reason(failed[0])}; "
                    "correct the kernel first: cupyfa check shows what is wrong"
                )

    def trial(self, worker: Process, mutant: Mutant) -> Trial:
        begun = time.monotonic()
        verdict, why, case = self._judged(worker, mutant)
        return Trial(mutant, verdict, why, case, time.monotonic() - begun)

    def _judged(self, worker: Process, mutant: Mutant) -> tuple[str, str, int | None]:
        """Returns the verdict on a mutant, the reason, and the number of the case that found it."""
        if reason := self._known.get(_key(mutant)) or equal_positions(mutant, self._operation):
            return EQUIVALENT, reason, None
        programs = [x for of in self._programs(mutant) for x in of]
        if not self._changes(mutant, mutant.change.probe.format(trap="__trap"), programs):
            return NOT_COMPILED, "no program of this kernel contains this code", None
        try:
            failed = self._first_failure(worker, mutant, mutant.changed())
        except TimeoutError:
            return OUT_OF_TIME, f"no case failed within {self._budget:g} s", None
        if failed is None:
            return *self._missed(worker, mutant), None
        case, outcome = failed
        if outcome.kind == failures.COMPILE_ERROR:
            return INVALID, _reason(outcome), None
        return FOUND, _reason(outcome), case.number

    def _missed(self, worker: Process, mutant: Mutant) -> tuple[str, str]:
        """Returns the verdict on a mutant that no case finds, and what is known about it."""
        of_cases, others = self._programs(mutant)
        if not self._changes(mutant, mutant.change.new, of_cases):
            if not self._changes(mutant, mutant.change.new, others):
                return EQUIVALENT, "the machine code is the same"
            return MISSED, "no case compiles a program that it changes"
        try:
            probed = mutant.changed(mutant.change.probe.format(trap=self._trap))
            trapped = self._first_failure(worker, mutant, probed)
        except TimeoutError:
            return MISSED, ""
        if trapped is None:
            return MISSED, "no case executes this code"
        is_probe = trapped[1].kind != failures.COMPILE_ERROR
        return MISSED, "executed, but all results are right" if is_probe else ""

    def _programs(self, mutant: Mutant) -> tuple[list[_Program], list[_Program]]:
        """Returns the programs of the cases, and others, that include the mutant's file."""
        of_cases, others = (
            _different(x for case in cases for x in case.programs if mutant.path in x.files)
            for cases in (self._cases, self._other_cases)
        )
        known = {x.text for x in of_cases}
        return of_cases, [x for x in others if x.text not in known]

    @cached_property
    def _other_cases(self) -> list[_Case]:
        """Cases of which only the programs are used: code may be equal in those of the check."""
        return [x for seed in _OTHER_SEEDS for x in _cases(self._kernel, None, self._backend, seed)]

    def _changes(self, mutant: Mutant, new: str, programs: Sequence[_Program]) -> bool:
        """Returns whether ``new`` in the place of the change changes a program's machine code."""
        launches = [x.launch for x in programs]
        with _copied(mutant, mutant.changed(new)) as copies:
            return machine_code.differ(launches, copies, self._arch)

    def _first_failure(
        self, worker: Process, mutant: Mutant, code: bytes
    ) -> tuple[_Case, Outcome] | None:
        """Runs cases with other code in the mutant's file, until one of them fails.

        Skips cases that do not include the file. Raises TimeoutError if none has failed in time.
        """
        ends = time.monotonic() + self._budget
        with _copied(mutant, code) as copies:
            worker.read(copies)
            for case in self._cases:
                if not case.includes(mutant.path):
                    continue
                if (left := ends - time.monotonic()) <= 0:
                    raise TimeoutError
                task = replace(case.task, timeout=min(left, _LONGEST_CASE))
                if failed := [x for x in worker.run(task) if x.failed]:
                    if failed[0].kind == failures.NO_ANSWER and left < _LONGEST_CASE:
                        raise TimeoutError
                    short = failed[0].message.replace(str(copies[mutant.root]), mutant.root.name)
                    return case, replace(failed[0], message=short)
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


def _different(programs: Iterable[_Program]) -> list[_Program]:
    """Returns the first of the programs with each text."""
    found: dict[str, _Program] = {}
    for program in programs:
        found.setdefault(program.text, program)
    return [*found.values()]


def _reason(outcome: Outcome) -> str:
    """Returns kind and message of a failure in one line."""
    errors = [x for x in outcome.message.splitlines() if "error:" in x]  # of a compiler
    (first, *_) = errors or outcome.message.splitlines() or [""]
    return f"{outcome.kind}: {first}" if first else outcome.kind


def equal_positions(mutant: Mutant, operation: str) -> str | None:
    """Returns a reason if a mutant of a file of the ladder exchanges positions that are always 0.

    operation: that of the mutant's kernel.
    """
    zero = _ZERO.get(operation) if mutant.root == source.KERNELS else None
    if zero is None:
        return None
    before, after = mutant.code[mutant.change.start : mutant.change.end], mutant.change.new.encode()
    if zero.sub(b"0", before) != zero.sub(b"0", after):
        return None
    return f"a {operation} has one batch element and one head"


def known_equivalents(kernel: str | None = None) -> dict[tuple[str, str, str], str]:
    """Reads equivalents.csv: maps file, code before and code after to the reason.

    kernel: leaves out mutants that are equivalent in other kernels only.
    """
    with _EQUIVALENTS.open(encoding="utf-8", newline="") as file:
        rows = [x for x in csv.DictReader(file) if kernel is None or x["kernel"] in ("", kernel)]
    return {(x["file"], x["before"], x["after"]): x["reason"] for x in rows}


def _key(mutant: Mutant) -> tuple[str, str, str]:
    return mutant.file.as_posix(), mutant.before, mutant.after
