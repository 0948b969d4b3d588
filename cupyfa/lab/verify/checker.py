"""Checks kernels on the cases of a grid, and replays stored failures."""

from __future__ import annotations

import os
import pickle
import random
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, Unpack

from cupyfa import cache_folder
from cupyfa.cache_folder.records import refusing
from cupyfa.errors import OutOfMemory, Unsupported, nearest, warn
from cupyfa.lab.verify import failures as kinds, fuzz, grids
from cupyfa.lab.verify.case import EXTREME, Case
from cupyfa.lab.verify.failures import Failure, Outcome, Stored, command, read, write
from cupyfa.lab.verify.shrink import shrunk
from cupyfa.lab.verify.tasks import KernelOrName, Task, backend_of, has_name, name_of, refuse_long
from cupyfa.lab.verify.workers import Here, Process, Worker, in_parallel
from cupyfa.ladder import LADDER
from cupyfa.ladder.common import HALF
from cupyfa.ladder.kernel import Kernel
from cupyfa.ladder.lookup import record_named, tile_remedy
from cupyfa.numerics.shown import Shown, ShownRow, html_table
from cupyfa.planner import choose_kernel
from cupyfa.problem.dtypes import DTYPES
from cupyfa.problem.optional_inputs import ROW_MAX
from cupyfa.problem.options import DROPOUT, OPTIONS, AttentionOptions
from cupyfa.problem.problem import TEXTS, Problem, whole
from cupyfa.problem.shape_language import (
    DLSE,
    LENGTHS_OF,
    NAMES,
    PAGE_SIZE,
    RETURN_MAX,
    Keywords,
    seeds_in_memory,
)
from cupyfa.problem.wrt import WRT
from cupyfa.runtime import environment
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.choose_backend import backend_named
from cupyfa.runtime.environment import Progress, no_progress
from cupyfa.runtime.simulator import Simulator

EXAMINED = 5  # number of failures per kernel that are shrunk and written to files
MOST_SAMPLES = 100_000  # limited because all cases are drawn before the first one runs
_LONGEST = 1_000_000  # maximum timeout in seconds
_PATIENCE = 3  # a kernel that hangs or crashes this many times is not run again
_WHILE_SHRINKING = 10.0  # timeout in seconds while a failure is shrunk
_SHRINKING = 8.0  # seconds per worker for shrinking all failures
AUTO = "auto"  # stands for the kernel that attention() chooses


@dataclass(frozen=True, repr=False)
class Tally(ShownRow):
    """One kernel's results, and its cases that were not run, counted by reason.

    worst: the largest error / bound of all compared results.
    covered: number of cases that cover each item of ``fuzz.covers``.
    """

    kernel: str
    runs: int
    right: int
    worst: float | None
    not_run: Mapping[str, int]
    covered: Mapping[str, int]

    def row(self) -> dict[str, Any]:
        """Returns the tally as a table row."""
        return {
            "kernel": self.kernel,
            "runs": self.runs,
            "right": self.right,
            "worst_error/bound": self.worst,
            "not_supported": sum(self.not_run.values()),
        }


@dataclass(frozen=True, repr=False)
class Checked:
    """The results of a check; ``str`` summarizes them in one line."""

    grid: str
    device: str
    cases: int
    tallies: tuple[Tally, ...]
    failures: tuple[Failure, ...]
    seconds: float

    @property
    def runs(self) -> int:
        """Number of (kernel, case) pairs that ran."""
        return sum(tally.runs for tally in self.tallies)

    @property
    def right(self) -> int:
        """Number of (kernel, case) pairs that ran with right results."""
        return sum(tally.right for tally in self.tallies)

    def __repr__(self) -> str:
        return f"<{self}>"

    def _repr_html_(self) -> str:
        rows = [*(x.row() for x in self.tallies)]
        return html_table(rows) + html_table([x.row() for x in self.failures])

    def __str__(self) -> str:
        ran = [(tally.worst, tally.kernel) for tally in self.tallies if tally.worst is not None]
        not_run: Counter[str] = sum((Counter(t.not_run) for t in self.tallies), Counter())
        counted = [f"{count:,}: {reason}" for reason, count in not_run.most_common()]
        reasons = ", ".join(counted if len(counted) > 1 else not_run)
        parts = (
            f"{self.right:,} of {self.runs:,} runs right: {self.cases:,} "
            f"case{'s' * (self.cases != 1)} of {', '.join(grids.parts_of(self.grid))}, "
            f"{', '.join(tally.kernel for tally in self.tallies)} on {self.device}",
            "at worst {:.2g} x the bound ({})".format(*max(ran)) if ran else "",
            f"{not_run.total():,} not supported ({reasons})" if not_run else "",
            f"{self.seconds:.3g} s",
        )
        return "; ".join(filter(None, parts))


class Interrupted(KeyboardInterrupt):
    """Raised when a check is interrupted; ``checked`` holds the results so far."""

    def __init__(self, checked: Checked) -> None:
        super().__init__(str(checked))
        self.checked = checked


def check(
    kernels: KernelOrName | Sequence[KernelOrName],
    *,
    grid: str = "fuzz",
    samples: int | None = None,
    seed: int = 0,
    dtypes: str | Sequence[str] | None = None,
    backend: str | Backend = "auto",
    reruns: int = 0,
    schedules: int = 1,
    jobs: int = 0,
    timeout: float = 60.0,
    failures: str | Path | None = None,
    progress: Progress = no_progress,
    **options: Unpack[Keywords],
) -> Checked:
    """Runs kernels on all cases of a grid and compares every result with the reference.

    kernels: records, or names, including ``script.py:name`` and "auto".
    grid: one of ``grids.GRIDS``. Failures on ``fuzz`` are shrunk.
    samples: number of cases to draw; of "all", from each of its grids. The default is all cases;
        for ``fuzz``, 64 per kernel in the simulator and 160 on a GPU.
    seed: seed of the drawn cases and of their inputs.
    dtypes: dtypes to use instead of the grid's.
    options: options of attention to use instead of the grid's. If ``dtypes`` is None, a precision
        implies float32 inputs, and an out_dtype of float32 implies 16-bit inputs. Score-modifying
        arrays are described by forms of ``shape_language``. ``lengths`` makes every case a ragged
        batch of these sequences.
    schedules: number of thread orders in which the simulator runs each case; each run is compared
        with the reference. With 1, about half of the cases have an order of their own, unless the
        backend has one.
    reruns: number of further runs of each kernel, which must be bitwise identical.
    jobs: number of worker processes, spread over the visible GPUs if these are of the same model;
        0 runs kernels in this process, without a timeout.
    timeout: seconds that a kernel may run.
    failures: folder, created if necessary, for files of the first EXAMINED failures of each
        kernel, for ``replay``. If a record comes from a script, the command that reproduces its
        failure contains SCRIPT.py as a placeholder for the script.

    Raises ValueError for invalid arguments, Unsupported for an option that no kernel supports,
    DeviceError if the backend is not available, and Interrupted, with the results so far, on Ctrl-C
    or if a signal handler exits.
    """
    start = time.monotonic()
    timeout = _checked_timeout(timeout)
    jobs, reruns = whole("jobs", jobs, 0), whole("reruns", reruns, 0)
    backend = backend_named(backend)
    drawn = tasks_of(
        kernels,
        grid=grid,
        samples=samples,
        seed=seed,
        dtypes=dtypes,
        backend=backend,
        schedules=schedules,
        **options,
    )
    folder = Path(failures) if failures is not None else None
    if folder:
        _require_room(folder)
    if jobs:
        _require_pickling(drawn, f"jobs={jobs}", "pass jobs=0")
    tasks = [replace(task, reruns=reruns, timeout=timeout) for task in drawn]
    sheet = _Sheet(tasks, backend, progress)
    workers: list[Worker] = [Process(backend, i) for i in range(jobs)] or [Here(backend)]

    found: list[Failure] = []
    ended: BaseException | None = None
    try:
        _run(workers, dict(enumerate(tasks)), sheet)
        found = _examined(workers, sheet, backend, folder)
    except (KeyboardInterrupt, SystemExit) as error:
        found = [_failure(backend, task, outcome) for task, outcome in sheet.failed()]
        ended = error
    finally:
        for worker in workers:
            worker.stop()
    seconds, device = time.monotonic() - start, backend.limits.device
    checked = Checked(grid, device, len(tasks), sheet.tallies(), tuple(found), seconds)
    if ended:
        raise Interrupted(checked) from ended
    return checked


def tasks_of(
    kernels: KernelOrName | Sequence[KernelOrName],
    *,
    grid: str = "fuzz",
    samples: int | None = None,
    seed: int = 0,
    dtypes: str | Sequence[str] | None = None,
    backend: str | Backend = "auto",
    schedules: int = 1,
    **options: Unpack[Keywords],
) -> list[Task]:
    """Returns the tasks that ``check`` would run with these arguments."""
    if samples is not None:
        samples = whole("samples", samples, 1, MOST_SAMPLES)
    seed, schedules = whole("seed", seed, 0), whole("schedules", schedules, 1)
    dtypes = (dtypes,) if isinstance(dtypes, str) else dtypes
    backend = backend_named(backend)
    if schedules > 1 and not isinstance(backend, Simulator):
        raise ValueError(
            f"schedules is {schedules}, but only the simulator can vary the order of threads, not "
            f'{backend.limits.device}; use backend="simulator", or set reruns instead'
        )
    if grid not in grids.GRIDS:
        known = ", ".join(grids.GRIDS)
        raise ValueError(
            f"grid {grid!r} is unknown{nearest(grid, grids.GRIDS)}; use one of {known}"
        )
    given: dict[str, Any] = {name: x for name, x in options.items() if x is not None}
    if remedy := tile_remedy(given, None):
        raise TypeError(f"check() does not support tile sizes; {remedy}")
    arrays = {name: given.pop(name) for name in NAMES if name in given}
    AttentionOptions.of(
        None, given | dict.fromkeys(seeds_in_memory(given), 0)
    )  # raises for invalid names and values before anything runs
    rows: dict[str, Any] = {} if LENGTHS_OF in arrays else {"M": 1}
    of_rows = {name: arrays[name] for name in (LENGTHS_OF, PAGE_SIZE) if name in arrays}
    Problem.of_sizes(d=1, **rows, **of_rows)  # raises for invalid or conflicting lengths, page_size
    if "precision" in given and not dtypes:
        dtypes = ("float32",)
    if (out_dtype := given.get("out_dtype")) is not None and not dtypes:
        dtypes = HALF if out_dtype == "float32" else (out_dtype,)
    named = _named(kernels)
    records = [record for _, record in named.values()]
    _refuse_foreign(records, backend, dtypes or tuple(DTYPES), {**given, **arrays})
    how: Any = {"seed": seed, "dtypes": dtypes, "options": given, "arrays": arrays}
    draws_orders = isinstance(backend, Simulator) and backend.schedule is None and schedules == 1
    found = list[Task]()
    for part in grids.parts_of(grid):
        draw = _fuzzed if part == "fuzz" else partial(_of_grid, grid=part)
        drawn = draw(named, backend, samples=samples, **how)
        found += _with_other_orders(drawn, seed) if draws_orders else drawn
    first = getattr(backend, "schedule", None) or 0
    later = [replace(x, schedule=first + i) for x in found for i in range(1, schedules)]
    return found + later


def _with_other_orders(tasks: Iterable[Task], seed: int) -> list[Task]:
    """Gives about half of the tasks an order of threads of their own: some deadlocks occur only in
    some orders.
    """
    rng = random.Random(seed)
    return [
        replace(x, schedule=seed + i) if rng.random() < 0.5 else x for i, x in enumerate(tasks, 1)
    ]


def covered(task: Task, kernel: Kernel, backend: Backend) -> dict[str, bool]:
    """Returns what a case covers, as ``fuzz.covers`` does; {} if the kernel cannot run the case."""
    with suppress(Exception):  # running the case reports the error
        limits = backend_of(task, backend).limits
        plan = choose_kernel.plan(kernel, task.case.problem, limits, **task.constants)
        return fuzz.covers(plan, limits) | {"new tokens": task.case.tokens != "cached"}
    return {}


@dataclass(frozen=True, repr=False)
class Replayed(Shown):
    """A stored failure, and the outcome of running its inputs again."""

    stored: Stored
    now: Outcome
    device: str


def replay(
    file: str | Path,
    kernel: KernelOrName | None = None,
    backend: str | Backend = "auto",
    *,
    timeout: float | None = None,
) -> Replayed:
    """Runs the kernel named in a file of ``check``, or another kernel, on the file's inputs.

    With a timeout, the kernel runs in a separate process for at most that many seconds. Constants
    and the simulator's thread order are taken from the file where possible. Scripts named in a file
    are not run; pass their kernel instead. Raises OSError if the file cannot be read, ValueError if
    it is damaged or names a script and no kernel is passed, and Unsupported if the kernel cannot
    run the case.
    """
    backend, stored = backend_named(backend), read(file)
    if isinstance(backend, Simulator) and backend.schedule is None:
        backend = backend.like(schedule=stored.schedule)
    case, name = stored.case, stored.outcome.kernel
    if kernel is None and not stored.has_name:
        raise ValueError(
            f"{file} contains a failure of {name}, a kernel defined in a script; pass the kernel "
            f"as kernel= or, on the command line, as --kernel script.py:{name}"
        )
    if kernel is None and not any(name in records for records in LADDER.values()):
        raise ValueError(
            f"{file} contains a failure of {name!r}, but scripts named in such files are not "
            "executed; pass the kernel as kernel= or, on the command line, as --kernel "
            "script.py:name"
        )
    chosen = kernel or name
    record = record_named(chosen) if isinstance(chosen, str) else chosen
    if record.operation != case.operation:
        raise ValueError(
            f"{record.name} computes {record.operation}, but the inputs in {file} are for "
            f"{case.operation}"
        )
    task = Task(case, (chosen,), multiprocessors=stored.multiprocessors)
    constants = stored.outcome.constants if _is_same(chosen, name) else {}
    try:
        plan = choose_kernel.plan(
            record, case.problem, backend_of(task, backend).limits, **constants
        )
    except (Unsupported, ValueError):
        constants = {}
    else:
        wanted = plan.operation.inputs_of(case.problem)
        there = {name: x for name, x in wanted.items() if name in stored.inputs}
        with refusing(f"{file} does not fit {plan.kernel.name}"):
            kinds.require_inputs(stored.inputs, there, case.problem)
    task = replace(task, case=case, reruns=stored.reruns, inputs=stored.inputs, constants=constants)
    if timeout is not None:
        task = replace(task, timeout=_checked_timeout(timeout))
        _require_pickling([task], f"timeout={timeout}", "omit timeout")
    worker = Here(backend) if timeout is None else Process(backend)
    try:
        (now,) = worker.run(task)
    finally:
        worker.stop()
    if now.kind == kinds.UNSUPPORTED:
        raise Unsupported(f"{now.kernel} cannot compute {case}: {now.message}", now.message)
    if now.kind == kinds.NO_MEMORY:
        raise OutOfMemory(now.message)
    return Replayed(stored, now, backend.limits.device)


def _is_same(chosen: KernelOrName, name: str) -> bool:
    """Returns whether ``chosen`` is the kernel ``name``; compares scripts by absolute path."""
    if not isinstance(chosen, str):
        return chosen.name == name
    (script, _, variable), (other, _, of_other) = chosen.rpartition(":"), name.rpartition(":")
    return variable == of_other and os.path.abspath(script) == os.path.abspath(other)


def _named(
    kernels: KernelOrName | Sequence[KernelOrName],
) -> dict[str, tuple[KernelOrName, Kernel | None]]:
    """Maps names to pairs: the kernel as passed, and its record (None for "auto")."""
    chosen = [kernels] if isinstance(kernels, KernelOrName) else list(kernels)
    if not chosen:
        raise ValueError("kernels is empty; pass at least one kernel")
    named = cache(record_named)  # loading a script again would create another record
    found: dict[str, tuple[KernelOrName, Kernel | None]] = {}
    for kernel in chosen:
        if not isinstance(kernel, KernelOrName):
            raise TypeError(f"kernels contains {kernel!r}; pass names or Kernel records")
        name = name_of(kernel)
        record: Kernel | None = None  # stays None for AUTO
        if isinstance(kernel, Kernel):
            record = kernel
        elif kernel != AUTO:
            record = named(kernel)
        if found.setdefault(name, (kernel, record))[1] is not record:
            raise ValueError(f"two kernels have the name {name!r}; rename one of them")
    return found


def _checked_timeout(timeout: float) -> float:
    if not 0 < timeout <= _LONGEST:
        raise ValueError(
            f"timeout is {timeout}; it must be more than 0 and at most {_LONGEST:,} seconds"
        )
    return timeout


def _require_room(folder: Path) -> None:
    """Raises ValueError if a folder cannot be written to; does not create it."""
    there = next((x for x in (folder, *folder.parents) if os.path.exists(x)), folder)
    if not cache_folder.can_write(there):
        raise ValueError(
            f"failures is {folder}, but {there} is not writable; choose another folder"
        )


def _require_pickling(tasks: Sequence[Task], given: str, remedy: str) -> None:
    """Raises ValueError if a kernel cannot be sent to a worker process."""
    try:
        pickle.dumps([task.kernels for task in tasks])
    except pickle.PicklingError as error:
        raise ValueError(
            f"{given} requires a worker process, but {error}; alternatively, {remedy}"
        ) from None


def _refuse_foreign(
    records: Sequence[Kernel | None],
    backend: Backend,
    dtypes: Sequence[str],
    given: Mapping[str, Any],
) -> None:
    """Raises an error for an option that no kernel supports; warns if a softmax ignores options.

    If only some attention kernels support an option, the others report cases as not supported.
    """
    softmaxes = [x.name for x in records if x and x.operation == "softmax"]
    others = [x for x in records if x is None or x.operation != "softmax"]
    if softmaxes and given and not others:
        raise ValueError(f"softmax kernels do not support {', '.join(given)}; omit these options")
    for name, value in given.items():
        lacking = [x for x in others if x and not _takes(x, dtypes, name, value)]
        if lacking and len(lacking) == len(others):
            dtype = next((x for x in dtypes if lacking[0].takes(x)), dtypes[0])
            together = _together(name, given)
            rows: dict[str, Any] = {} if LENGTHS_OF in together else {"M": 16}
            p = Problem.of_sizes(**rows, d=16, dtype=dtype, **together)
            choose_kernel.plan(lacking[0], p, backend.limits)  # raises Unsupported with the reason
    if softmaxes and given:
        are = "is" if len(softmaxes) == 1 else "are"
        names = ", ".join(given)
        warn(f"{', '.join(softmaxes)} {are} checked without {names}: softmax has no such option")


def _together(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an option together with related options, such as the seed of a dropout."""
    groups = (*TEXTS, *NAMES), DROPOUT, (name,)
    together = next(group for group in groups if name in group)
    return {x: given[x] for x in together if x in given}


def _takes(kernel: Kernel, dtypes: Sequence[str], name: str, value: Any) -> bool:
    """Returns whether an attention kernel supports an option's value with one of the dtypes."""
    if name == "precision":
        return any(value in kernel.precisions_of(dtype) for dtype in dtypes)
    if name in NAMES:
        own = {LENGTHS_OF: "ragged", PAGE_SIZE: "paged", WRT: WRT, DLSE: DLSE, RETURN_MAX: ROW_MAX}
        return own.get(name, "places") in kernel.features
    needed = [what for what, needs in OPTIONS[name].features.items() if needs(value)]
    return all(what in kernel.features for what in needed)


_Named = Mapping[str, tuple[KernelOrName, Kernel | None]]


def _fuzzed(named: _Named, backend: Backend, *, samples: int | None, **how: Any) -> Iterator[Task]:
    """Yields random cases of each kernel, with sizes relative to the kernel's constants."""
    for kernel, record in named.values():
        drawing = fuzz.Fuzz(record, backend, **how)
        for i in range(samples or fuzz.SAMPLES[backend.name]):
            drawn = drawing.sample(i)
            which = kernel if record else drawn.kernel.name
            few = drawn.multiprocessors
            yield Task(drawn.case, (which,), drawn.constants, shrinks=True, multiprocessors=few)


def _of_grid(named: _Named, backend: Backend, *, grid: str, **how: Any) -> Iterator[Task]:
    """Yields a grid's cases, each with all kernels of its operation."""
    by_operation: dict[str, list[tuple[KernelOrName, Kernel | None]]] = defaultdict(list)
    for kernel, record in named.values():
        by_operation[record.operation if record else "forward"].append((kernel, record))
    for operation, chosen in by_operation.items():
        can = [partial(_runs, record=record, backend=backend) for _, record in chosen]
        for case in grids.cases(grid, operation, can=can, **how):
            usual = partial(choose_kernel.select, AUTO, case.operation, case.problem)
            which = [
                kernel if record else usual(backend.limits).name
                for kernel, record in chosen
                if record is None or _takes_values(record, case)
            ]
            if which:
                yield Task(case, tuple({name_of(kernel): kernel for kernel in which}.values()))


def _runs(case: Case, record: Kernel | None, backend: Backend) -> bool:
    """Returns whether kernel and backend support a case, as far as this is known in advance."""
    try:
        case.require_reach(backend)
        refuse_long(backend, case.problem)
    except Unsupported:
        return False
    if record is None:
        return True
    return _takes_values(record, case) and choose_kernel.can(record, case.problem, backend.limits)


def _takes_values(record: Kernel, case: Case) -> bool:
    return case.values not in EXTREME or fuzz.takes_extreme_scores(record, case.problem)


class _Sheet:
    """The outcomes received so far, by kernel and task number."""

    def __init__(self, tasks: Sequence[Task], backend: Backend, progress: Progress) -> None:
        self._backend = backend
        names = [name_of(kernel) for task in tasks for kernel in task.kernels]
        self._tasks, self._progress = tasks, progress
        self._total, self._count = len(names), Counter[bool]()
        self._done: dict[str, dict[int, Outcome]] = {name: {} for name in names}

    def add(self, i: int, outcome: Outcome) -> None:
        self._done[outcome.kernel][i] = outcome
        self._count[outcome.failed] += 1
        self._progress(self._count.total(), self._total, f"{self._count[True]} failed")

    def failed(self) -> list[tuple[Task, Outcome]]:
        """Returns the failures, kernel by kernel, each with its task limited to that kernel."""
        return [
            (_only(self._tasks[i], name), outcomes[i])
            for name, outcomes in self._done.items()
            for i in sorted(outcomes)
            if outcomes[i].failed
        ]

    def tallies(self) -> tuple[Tally, ...]:
        return tuple(self._tally(name, outcomes) for name, outcomes in self._done.items())

    def _tally(self, name: str, done: Mapping[int, Outcome]) -> Tally:
        outcomes, reasons = done.values(), {kinds.NO_MEMORY: "not enough memory"}
        not_run = Counter(
            reasons.get(x.kind, x.message) for x in outcomes if x.kind in kinds.NOT_RUN
        )
        right = sum(x.kind == kinds.RIGHT for x in outcomes)
        worst = max((x.worst.ratio for x in outcomes if x.worst), default=None)
        runs = len(outcomes) - not_run.total()
        return Tally(name, runs, right, worst, not_run, self._covered(name, done))

    def _covered(self, name: str, outcomes: Mapping[int, Outcome]) -> dict[str, int]:
        """Counts the cases that ran, by what they cover; thread orders of a case count once."""
        found: Counter[str] = Counter()
        named = cache(record_named)
        counted = set[int]()  # cases; all orders of a case have the same object
        for i, outcome in outcomes.items():
            task = self._tasks[i]
            if outcome.kind not in kinds.NOT_RUN and id(task.case) not in counted:
                counted.add(id(task.case))
                (kernel,) = _only(task, name).kernels
                record = named(kernel) if isinstance(kernel, str) else kernel
                found.update(covered(task, record, self._backend))
        return {what: count for what, count in found.items() if count}


def _run(workers: Sequence[Worker], tasks: Mapping[int, Task], sheet: _Sheet) -> None:
    """Runs numbered tasks; a single worker reruns failures that other workers may have caused."""
    alone = len(workers) == 1
    lost = Counter[str]()  # number of outcomes without a result, by kernel
    later: dict[int, Task] = {}
    order = list(tasks)
    if not alone:
        random.Random(0).shuffle(order)  # keeps GPU and CPU busy at the same time

    def job(worker: Worker, i: int) -> list[Outcome]:
        kernels = tuple(x for x in tasks[i].kernels if lost[name_of(x)] < _PATIENCE)
        return worker.run(replace(tasks[i], kernels=kernels)) if kernels else []

    for i, outcomes in in_parallel(workers, job, order):
        left = {name_of(kernel) for kernel in tasks[i].kernels}
        for outcome in outcomes:
            lost[outcome.kernel] += outcome.kind in kinds.LOST
            if alone or outcome.kind not in (kinds.NO_ANSWER, kinds.DIED, kinds.NO_MEMORY):
                sheet.add(i, outcome)
                left.remove(outcome.kernel)
        if left and not alone:
            later[i] = _only(tasks[i], *left)
        for name in left if alone else ():
            given_up = f"given up after hanging or dying {_PATIENCE} times"
            sheet.add(i, Outcome(name, kinds.UNSUPPORTED, given_up))
    if later:
        for worker in workers:
            worker.rest()
        _run(workers[:1], later, sheet)


def _only(task: Task, *names: str) -> Task:
    return replace(task, kernels=tuple(x for x in task.kernels if name_of(x) in names))


def _examined(
    workers: Sequence[Worker], sheet: _Sheet, backend: Backend, folder: Path | None
) -> list[Failure]:
    """Returns the failures; shrinks and stores the first failures of each kernel if requested."""
    failed = sheet.failed()
    found = {i: _failure(backend, *one) for i, one in enumerate(failed)}

    first = [i for i in _first(failed) if folder or failed[i][0].shrinks]
    shrinking = sum(failed[i][0].shrinks for i in first)

    def job(worker: Worker, i: int) -> Failure:
        seconds = _SHRINKING * len(workers) / shrinking if failed[i][0].shrinks else 0.0
        return _closer(worker, backend, *failed[i], seconds)

    for i, closer in in_parallel(workers, job, first):
        found[i] = closer
        if folder:
            try:
                found[i] = replace(closer, file=_written(folder, backend, failed[i][0], closer))
            except OSError as error:  # a missing file must not end the check
                why = f"{folder} cannot be written to ({error.strerror})"
                warnings.warn(f"{why}; repeat failures by command instead", stacklevel=2)
                folder = None
    alike = Counter(failure.command for failure in found.values())
    different = {failure.command: failure for failure in found.values()}
    return [replace(x, cases=alike[command]) for command, x in different.items()]


def _written(folder: Path, backend: Backend, task: Task, failure: Failure) -> Path | None:
    named, about = has_name(task.kernels[0]), environment.describe(backend)
    how = task.reruns, _schedule(backend, task), named, about, task.multiprocessors
    return write(folder, Stored(failure.case, failure.outcome, *how), failure.command)


def _first(failed: Sequence[tuple[Task, Outcome]]) -> list[int]:
    """Returns the indices of up to EXAMINED failures per kernel, alternating between failure kinds.

    Includes only one failure that loses the device, because each repetition starts a process.
    """
    by_kind: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for i, (_, outcome) in enumerate(failed):
        of_kind = by_kind[outcome.kernel][outcome.kind]
        if not (of_kind and outcome.kind == kinds.DEVICE_LOST):
            of_kind.append(i)
    turns = (chain(*zip_longest(*of_kernel.values())) for of_kernel in by_kind.values())
    return [i for turn in turns for i in islice((i for i in turn if i is not None), EXAMINED)]


def _closer(
    worker: Worker, backend: Backend, task: Task, outcome: Outcome, seconds: float
) -> Failure:
    """Shrinks a failure for at most ``seconds``, then repeats it to keep its arrays."""
    found = [(task, outcome)]

    def fails(case: Case, schedule: int | None) -> bool:
        timeout = min(task.timeout, _WHILE_SHRINKING)
        tried = replace(task, case=case, schedule=schedule, timeout=timeout)
        found.append((tried, worker.run(tried)[0]))
        return found[-1][1].kind == outcome.kind

    smaller = task
    if seconds:
        schedule = task.schedule
        if schedule is not None and fails(task.case, None):
            schedule = None
        case = shrunk(task.case, lambda x: fails(x, schedule), seconds=seconds)
        smaller = replace(task, case=case, schedule=schedule)
    # A hung kernel has no arrays to keep; running it again would only take the full timeout.
    known = [x for tried, x in found if x.kind == kinds.NO_ANSWER and tried == smaller]
    again = known[-1] if known else worker.run(replace(smaller, keep=True))[0]
    if again.kind != outcome.kind:
        flaky = f"{outcome.message}; a repetition did not fail, so the command may not fail either"
        return _failure(backend, task, replace(outcome, message=flaky))
    failure = _failure(backend, smaller, again)
    return failure if smaller == task else replace(failure, found_on=task.case)


def _schedule(backend: Backend, task: Task) -> int | None:
    """Returns the seed of a task's thread order; None stands for the order by index."""
    return getattr(backend, "schedule", None) if task.schedule is None else task.schedule


def _failure(backend: Backend, task: Task, outcome: Outcome) -> Failure:
    reruns = task.reruns if outcome.kind == kinds.DIFFERS else None
    schedule = _schedule(backend, task)
    hung = outcome.kind == kinds.NO_ANSWER
    options = {"backend": backend.name, "schedule": schedule, "reruns": reruns}
    options |= {"multiprocessors": task.multiprocessors}
    options |= {"timeout": f"{task.timeout:g}" if hung else None}
    script = "" if has_name(task.kernels[0]) else "SCRIPT.py:"
    again = command(task.case, replace(outcome, kernel=script + outcome.kernel), options)
    return Failure(task.case, outcome, again)
