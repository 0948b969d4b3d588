"""Benchmarks kernels: checks them, then times them in alternation on the same problems."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import product
from typing import Any

import numpy as np

from cupyfa.arrays import block_mask
from cupyfa.errors import (
    DeviceError,
    DeviceLost,
    SimulatorFault,
    Unsupported,
    WrongResult,
    described,
    nearest,
    warn,
)
from cupyfa.lab.bench import peaks, peers, sweeps, timing
from cupyfa.lab.bench.results import BASELINE, BEFORE, Measurement
from cupyfa.lab.bench.watch import Watch
from cupyfa.lab.verify import sampling, transforms
from cupyfa.lab.verify.case import FINITE, Case
from cupyfa.lab.verify.sampling import Judge
from cupyfa.ladder import LADDER
from cupyfa.ladder.kernel import Kernel
from cupyfa.ladder.lookup import record_named
from cupyfa.numerics import tolerance
from cupyfa.numerics.shown import Rows
from cupyfa.numerics.tolerance import Expected, Verdict
from cupyfa.planner.choose_kernel import plan as plan_of, select
from cupyfa.planner.plan import Plan
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.choose_backend import backend_to_measure
from cupyfa.runtime.environment import Progress, no_progress
from cupyfa.runtime.guard import run_guarded
from cupyfa.runtime.launcher import replay

_NOT_HERE = (Unsupported, DeviceError, MemoryError)
_WRONG = (WrongResult, SimulatorFault)
# Rungs are compared on problems with one of these features only if they support that feature.
_OF_SEQUENCES = {"ragged", "lengths", "paged"}


@dataclass(frozen=True)
class Method:
    """How kernels are measured: the arguments of ``bench`` that all of its problems share.

    labels: the names that rows have for kernels. tiles: values of constants by name.
    """

    backend: Backend
    cold: bool = True
    graph: bool = False
    budget: float = 1.0
    alone: bool = False
    patience: float | None = None
    labels: Sequence[tuple[Kernel, str]] = ()
    tiles: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        timing.checked_budget(self.budget)


@dataclass(frozen=True)
class Task:
    """A case to measure, with the kernels and peers to measure on it.

    kernels: records, or "auto". against: names in ``peers.NAMES``.
    is_latent: V is the first dv columns of K, as in multi-head latent attention.
    notes_peers: if no peer can be measured, the kernel's row has the reasons in its note. Otherwise
        each peer that cannot be measured causes a warning.
    """

    case: Case
    kernels: Sequence[str | Kernel]
    against: Sequence[str] = ()
    is_latent: bool = False
    notes_peers: bool = False


def bench(
    kernels: str | Kernel | Sequence[str | Kernel],
    *,
    backend: str | Backend = "auto",
    against: str | Sequence[str] = (),
    tiles: Mapping[str, int | Sequence[int]] | None = None,
    values: str = "normal",
    layout: str = "bhsd",
    seed: int = 0,
    cold: bool = True,
    graph: bool = False,
    budget: float = 1.0,
    alone: bool = False,
    patience: float | None = None,
    progress: Progress = no_progress,
    so_far: Callable[[list[Measurement]], None] | None = None,
    watch: Watch | None = None,
    **sizes: Any,
) -> list[Measurement]:
    """Checks kernels and times them in alternation, on one problem or on many.

    ``kernels`` are names, ``script.py:name``, "auto" or records. A single kernel is compared with
    the operation's baseline and with the previous rung, unless ``alone``. ``sizes`` are passed to
    ``sweeps.problems``. Each size, and each of the kernels' ``tiles``, may be a list; every
    combination is measured. ``against`` names peers in ``peers.NAMES``.

    Every kernel is first compared with the float64 reference on the same inputs (``values``,
    ``layout`` and ``seed`` as in ``Case``), or on a sample of rows if the reference is too slow.
    Kernels with wrong results are not timed. Kernels and peers then alternate in rounds, each for
    ``budget`` seconds or until its median is accurate to half a percent. ``cold`` overwrites the
    caches before each launch; ``graph`` replays the launches of a call as a CUDA graph. A kernel
    that, judging by an earlier problem, would take longer than ``patience`` seconds is skipped.
    ``so_far`` is called with all rows after each problem. ``watch`` tracks the running call;
    problems that ``watch`` lists as done are skipped.

    Returns a row for each kernel, peer and problem; a note explains why a row was not measured.
    Warns about peers that cannot be measured. Raises ValueError or TypeError for invalid arguments,
    and the first kernel's error if none of the named kernels can run.
    """
    backend = backend_to_measure(backend)
    names = [kernels] if isinstance(kernels, str | Kernel) else list(kernels)
    against = (against,) if isinstance(against, str) else tuple(against)
    named = cache(record_named)  # loading a script again would create another record
    chosen = [x if isinstance(x, Kernel) or x == "auto" else named(x) for x in names]
    if not isinstance(tiles or {}, Mapping):
        raise TypeError(
            f'tiles is {described(tiles)}; pass a dict of tile sizes, for example {{"Br": 64}}'
        )
    given = {x: y if isinstance(y, Sequence) else [y] for x, y in (tiles or {}).items()}
    by_operation: dict[str, list[str | Kernel]] = defaultdict(list)
    for x in chosen:
        by_operation[x.operation if isinstance(x, Kernel) else "forward"].append(x)
    _check(chosen, list(by_operation), given, sizes, against)
    labels = _labels(names, chosen, alone)
    tasks: list[Task] = []
    for operation, mine in by_operation.items():
        able = [x for x in mine if isinstance(x, Kernel)]
        problems = sweeps.problems(operation, sizes, *able, small=backend.name == "simulator")
        cases = [Case(operation, problem, seed, values, layout) for problem in problems]
        tasks += [Task(case, mine, against) for case in cases]
    how = Method(backend, cold, graph, budget, alone, patience, labels, given)
    rows, refusals = measure_tasks(tasks, how, watch or Watch(), progress, so_far)
    if refusals and all(refusals):
        raise next(error for error in refusals if error)
    return Rows(rows)


def measure_tasks(
    tasks: Sequence[Task],
    how: Method,
    watch: Watch,
    progress: Progress = no_progress,
    so_far: Callable[[list[Measurement]], None] | None = None,
) -> tuple[list[Measurement], list[Exception | None]]:
    """Measures tasks one after the other; see ``bench`` for the last three arguments.

    Returns a row for each kernel and peer of each task, and for each kernel of each task the error
    due to which it was not measured, or None.
    """
    rows = list(watch.rows)
    refusals: list[Exception | None] = [None] if any(row.time for row in rows) else []
    noted: set[str] = set()
    for done, task in enumerate(tasks):
        if done < watch.done:
            continue
        case = task.case
        watch.done, watch.rows = done, list(rows)
        progress(done, len(tasks), str(case.problem))
        measuring = _Measuring(how, watch, task, noted)
        try:
            contenders = measuring.contenders()
        except Unsupported as error:  # "auto" finds no kernel
            refusals.append(error)
            rows.append(Measurement("auto", case.operation, case.problem, note=str(error)))
            continue
        entries = measuring.measured(contenders, rows)
        rows += [entry.row for entry in entries]
        asked = [x for x in entries if x.kernel in task.kernels or "auto" in task.kernels]
        refusals += [entry.refusal for entry in asked]
        if so_far and not all(refusals):  # a named kernel was measured
            so_far(_with_all_factors(rows))
    return _with_all_factors(rows), refusals


def _with_all_factors(rows: Sequence[Measurement]) -> list[Measurement]:
    """Adds missing keys to each row's ``factors``, so that all rows have the same table columns."""
    rivals = (BASELINE, BEFORE, *(name for row in rows for name in row.factors))
    known = [x for x in dict.fromkeys(rivals) if any(x in row.factors for row in rows)]
    return [replace(row, factors={x: row.factors.get(x) for x in known}) for row in rows]


def _check(
    kernels: Sequence[str | Kernel],
    operations: Sequence[str],
    tiles: Mapping[str, Sequence[int]],
    sizes: Mapping[str, Any],
    against: Sequence[str],
) -> None:
    """Raises ValueError for unknown names of sizes, tiles and peers."""
    if not kernels:
        raise ValueError("kernels is empty; pass at least one kernel")
    peers.check_names(against)
    sweeps.refuse_foreign(operations, sizes, tiles="tiles")
    known = {name for x in kernels if isinstance(x, Kernel) for name in x.choice.names}
    for name in tiles:
        if "auto" not in kernels and name not in known:
            raise ValueError(
                f"{name!r} is neither a size nor a tile size of these kernels"
                f"{nearest(name, [*sweeps.AXES, *known])}; sizes are "
                f"{', '.join(sweeps.AXES)}, tile sizes {', '.join(sorted(known)) or 'none'}"
            )


def _labels(
    names: Sequence[str | Kernel], chosen: Sequence[str | Kernel], alone: bool
) -> list[tuple[Kernel, str]]:
    """Labels each kernel by its own name, or by the caller's name for it if two names clash."""
    known: list[tuple[Kernel, str]] = []
    for name, kernel in zip(names, chosen):
        if isinstance(kernel, Kernel):
            known.append((kernel, name if isinstance(name, str) else kernel.name))
    for operation in LADDER:
        mine = [kernel for kernel, _ in known if kernel.operation == operation]
        if len(mine) == 1 and not alone:
            known += [(kernel, kernel.name) for kernel in _compared_with(mine[0])]
    labels: list[tuple[Kernel, str]] = []
    for kernel, given in known:
        alike = [x for x, _ in known if x.name == kernel.name]
        alike.append(LADDER[kernel.operation].get(kernel.name, kernel))
        label = kernel.name if all(x == kernel for x in alike) else given
        if any((y, x.operation) == (label, kernel.operation) and x != kernel for x, y in labels):
            raise ValueError(f"two kernels have the name {label!r}; rename one of them")
        labels.append((kernel, label))
    return labels


def rivals(kernel: Kernel) -> dict[str, Kernel]:
    """Returns the rungs to compare with: the first, and the previous one with a common dtype."""
    rungs = list(LADDER[kernel.operation].values())
    earlier = rungs[: rungs.index(kernel)] if kernel in rungs else []
    alike = [x for x in earlier if set(x.dtypes) & set(kernel.dtypes)]
    return {BASELINE: rungs[0], **({BEFORE: alike[-1]} if alike else {})}


def _compared_with(kernel: Kernel) -> list[Kernel]:
    return list({x.name: x for x in rivals(kernel).values() if x is not kernel}.values())


@dataclass
class _Entry:
    """A row that is being measured: its kernel or peer, the call to time, and the results."""

    row: Measurement
    kernel: Kernel | None = None  # None for a peer
    call: timing.Call | None = None
    capture: Callable[[], timing.Call] | None = None
    plan: Plan | None = None
    results: Mapping[str, np.ndarray] = field(default_factory=dict)
    refusal: Exception | None = None

    def reject(self, why: str) -> None:
        """Marks the kernel as wrong, so that it is not timed."""
        self.row, self.call = replace(self.row, passed=False, note=f"WRONG: {why}"), None

    def fail(self, error: Exception) -> None:
        """Records why the kernel is wrong or not timed; raises the error if the device is lost."""
        if isinstance(error, DeviceLost):
            raise error
        if isinstance(error, _WRONG):
            return self.reject(str(error))
        name = self.kernel.name if self.kernel else self.row.kernel
        about = f"{name} cannot compute {self.row.problem}: "
        note = str(error).partition("; kernels that can")[0].removeprefix(about)
        self.row, self.call = replace(self.row, note=note), None
        self.refusal = error.with_traceback(None)
        error.__context__ = None  # the traceback's frames would keep arrays alive


@dataclass
class _Measuring:
    """A task, how to measure it, and the inputs and judge that its kernels share.

    noted: warnings already shown for earlier tasks. refused: reasons why peers were not timed.
    """

    how: Method
    watch: Watch
    task: Task
    noted: set[str]
    refused: list[str] = field(default_factory=list, init=False)
    memory: dict[Any, Any] = field(default_factory=dict, init=False)
    first_judge: Judge | None = field(default=None, init=False)

    @property
    def backend(self) -> Backend:
        return self.how.backend

    @property
    def case(self) -> Case:
        return self.task.case

    @cached_property
    def inputs(self) -> dict[str, np.ndarray]:
        return self.with_latent_values(self.case.inputs(self.backend))

    def with_latent_values(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Makes V the first columns of K if the task says so, on the host and on the device."""
        if self.task.is_latent:
            arrays["V"] = arrays["K"][..., : self.case.problem.dv]
        return arrays

    def judge(self, plan: Plan) -> Judge:
        """Returns the shared judge, or a separate judge if the kernel has its own reference.

        Gradients of score-modifying arrays are judged only if all rows are judged.
        """
        if not self.is_judged_whole:
            plan = replace(plan, problem=transforms.differentiate(plan.problem, ()))
        excerpts = sampling.excerpts(plan.problem, self.case.seed, self.case.operation)
        if not plan.kernel.is_plain:
            return Judge.of(plan, self.inputs_of(plan.kernel), excerpts)
        if self.first_judge is None:
            self.first_judge = Judge.of(plan, self.inputs, excerpts)
        return self.first_judge

    def inputs_of(self, kernel: Kernel) -> dict[str, np.ndarray]:
        return self.case.completed(self.inputs, kernel)

    @cached_property
    def is_judged_whole(self) -> bool:
        """Whether the reference is quick enough to judge all rows."""
        case = self.case
        return sampling.excerpts(
            transforms.differentiate(case.problem, ()), case.seed, case.operation
        ) == [None]

    def note(self, text: str) -> None:
        """Issues a warning, but only once if several problems cause the same warning."""
        what = text.replace(str(self.case.problem), "")
        if what not in self.noted:
            self.noted.add(what)
            warn(text)

    def contenders(self) -> list[_Entry]:
        """Returns an entry for each kernel to measure and each combination of its constants."""
        operation, problem, constants_of = self.case.operation, self.case.problem, self.how.tiles
        chosen = [select(x, operation, problem, self.backend.limits) for x in self.task.kernels]
        joining = _compared_with(chosen[0]) if len(chosen) == 1 and not self.how.alone else []
        asked = _OF_SEQUENCES & {*problem.modifiers.features}
        joining = [x for x in joining if asked <= {*x.features}]
        combined: list[tuple[Kernel, dict[str, int]]] = [(kernel, {}) for kernel in joining]
        for kernel in chosen:
            own = [name for name in constants_of if name in kernel.choice.names]
            values = product(*(constants_of[name] for name in own))
            combined += [(kernel, dict(zip(own, some))) for some in values]
        entries = []
        for kernel, constants in combined:
            label = next((label for x, label in self.how.labels if x == kernel), kernel.name)
            entries.append(_Entry(Measurement(label, operation, problem, constants), kernel))
        return entries

    def measured(self, entries: Sequence[_Entry], earlier: Sequence[Measurement]) -> list[_Entry]:
        """Measures entries, and returns them together with the entries of peers."""
        self.backend.trim()
        peers.trim()
        for entry in entries:
            self.check(entry, earlier)
        entries = [*entries, *self.peers([entry for entry in entries if entry.call])]
        for entry in entries:
            self.leave_out(entry)
        for entry in entries if self.how.graph else ():
            self.capture(entry)
        self.time([entry for entry in entries if entry.call])
        _compare(entries)
        self.note_refused(entries)
        return entries

    def check(self, entry: _Entry, earlier: Sequence[Measurement]) -> None:
        """Checks an entry's kernel and, if its results are right, prepares the call to time."""
        backend, case, kernel = self.backend, self.case, entry.kernel
        assert kernel is not None
        try:
            plan = plan_of(kernel, case.problem, backend.limits, **entry.row.constants)
            problem = case.problem.with_options(precision=plan.problem.precision)
            entry.row = replace(entry.row, problem=problem, constants=dict(plan.constants))
            self.check_patience(entry.row, earlier)
        except (Unsupported, ValueError) as error:
            return entry.fail(error)
        if self.leave_out(entry):
            return
        try:
            with backend.working_on(None):
                used: Any = timing.resources(backend, plan)
                readable = block_mask.readable(backend, plan, self.inputs_of(kernel))
                with self.watch.calls():
                    self.watch.begins(_call(entry.row))
                    results = run_guarded(backend, plan, readable, {})
                arrays = timing.arrays_of(backend, plan, readable, self.memory)
                arrays = self.with_latent_values(arrays)
        except (*_NOT_HERE, *_WRONG) as error:
            return entry.fail(error)
        used = {name: used.get(name) for name in ("registers", "spilled_bytes")}
        peak = _peak(backend, plan)
        try:
            share, verdicts = self.judged(plan, results)
        except (*_NOT_HERE, *_WRONG) as error:
            return entry.fail(error)
        about: Any = {"checked": share, "code": timing.code_of(plan), "peak": peak, **used}
        entry.row = replace(entry.row, passed=True, **about)
        if wrong := [str(verdict) for verdict in verdicts if not verdict.passed]:
            return entry.reject("; ".join(wrong))
        entry.plan, entry.results = plan, results
        entry.call = replay(backend, plan, arrays)
        entry.capture = partial(_captured, backend, plan, entry.call, arrays, results)

    def judged(
        self, plan: Plan, results: Mapping[str, np.ndarray]
    ) -> tuple[float, Sequence[Verdict]]:
        """Returns the fraction of rows that were judged, and the verdicts.

        Where judging all rows is too slow, kernels with their own reference and gradients that sum
        over all rows are judged on a smaller problem.
        """
        case, p = self.case, plan.problem
        if (plan.kernel.reference or p.wrt) and not self.is_judged_whole:
            case = replace(case, problem=sampling.smaller(plan))
            plan = plan_of(plan.kernel, case.problem, self.backend.limits, **plan.constants)
            inputs = case.inputs(self.backend, plan.kernel)
            with self.backend.working_on(None):
                mine = block_mask.readable(self.backend, plan, inputs)
                results = run_guarded(self.backend, plan, mine, {})
            judge = Judge.of(plan, inputs)
        else:
            judge = self.judge(plan)
        verdicts = judge.verdicts(results, plan.rounding, finite=case.values in FINITE)
        small = case.problem
        part = small.batch * small.heads * small.M / max(p.batch * p.heads * p.M, 1)
        return judge.share * (part if case is not self.case else 1.0), verdicts

    def leave_out(self, entry: _Entry) -> bool:
        """Skips an entry whose call hung in an earlier process; returns whether it was skipped."""
        is_hung = _call(entry.row) in self.watch.hung
        if is_hung:
            entry.row, entry.call = replace(entry.row, passed=False, note=self.watch.verdict), None
        return is_hung

    def check_patience(self, row: Measurement, earlier: Sequence[Measurement]) -> None:
        """Raises Unsupported if a launch would take too long, judging by the previous problem."""

        def kind(x: Measurement) -> tuple[Any, ...]:
            return x.kernel, x.constants, x.problem.arithmetic

        alike = [x for x in earlier if kind(x) == kind(row) and x.time]
        if self.how.patience is None or not alike:
            return
        seconds = (alike[-1].time or 0.0) / 1e3 * row.flops / max(alike[-1].flops, 1)
        if seconds > self.how.patience:
            raise Unsupported(f"skipped: one launch would take about {seconds:.2g} s")

    def peers(self, entries: Sequence[_Entry]) -> list[_Entry]:
        """Returns the peers that support the problem; compares the kernels' results with theirs."""
        case, found = self.case, []
        if case.operation == "softmax" or not entries:
            return []
        for name in self.task.against:
            try:
                with self.backend.working_on(None):
                    problem, inputs, memory = case.problem, self.inputs, self.memory
                    if problem.cached:
                        (problem, inputs), memory = peers.without_cache(problem, inputs), {}
                    arrays = timing.placed(self.backend, inputs, memory)
                    arrays = self.with_latent_values(arrays)
                    other = peers.peer(name, self.backend, problem, arrays, case.operation)
            except _NOT_HERE as error:
                self.refuse(error)
                continue
            row = Measurement(other.label, case.operation, case.problem, peak=entries[0].row.peak)
            found.append(_Entry(row, call=other.call, capture=other.capture, results=other.outputs))
            for entry in entries:
                self.compare_results(entry, found[-1])
        return found

    def refuse(self, error: Exception) -> None:
        """Records why a peer cannot be measured, or warns if the task's rows have no such notes."""
        if not self.task.notes_peers:
            return self.note(str(error))
        peer, _, about = str(error).partition(" cannot compute ")
        self.refused.append(": ".join(filter(None, [peer, about.partition(": ")[2]])))

    def note_refused(self, entries: Sequence[_Entry]) -> None:
        """Writes into the kernels' rows why no peer was timed."""
        if not self.task.notes_peers or any(x.row.time and not x.kernel for x in entries):
            return
        notes = [f"{x.row.kernel}: {x.row.note}" for x in entries if x.row.note and not x.kernel]
        for entry in entries:
            if entry.kernel and entry.row.time:
                entry.row = replace(entry.row, note="; ".join([*self.refused, *notes]))

    def compare_results(self, entry: _Entry, other: _Entry) -> None:
        """Compares a kernel's results with a peer's; the reference decides if they differ too much.

        The allowed difference is the sum of the kernel's and the peer's largest error bounds in the
        sample; a peer may round float32 to tf32.
        """
        plan, p = entry.plan, self.case.problem
        assert plan is not None
        if plan.kernel.reference:  # the kernel computes a different function than the peer
            return
        judge = self.judge(plan)
        roundings = (plan.rounding, "tf32" if p.dtype.name == "float32" else None)
        for name, theirs in other.results.items():
            if not entry.call:
                return
            mine = entry.results[name]
            allowed = sum(judge.largest_bound(name, x) for x in roundings)
            expected = Expected(theirs.astype(np.float64), np.full(theirs.shape, allowed))
            (apart,) = tolerance.compare({name: mine}, {name: expected})
            if apart.passed:
                continue
            here = judge.at(name, apart.index)
            (ours,), (its,) = (
                here.verdicts({name: output}, rounding)
                for output, rounding in zip((mine, theirs), roundings)
            )
            farther = other if its.error > ours.error else entry
            self.note(
                f"{other.row.kernel} and {entry.row.kernel} differ by {apart.error:.3g} at "
                f"{list(apart.index)} of {f'{name} of ' if name != 'O' else ''}{p}: "
                f"{farther.row.kernel} is farther from the reference "
                f"(errors {its.error:.3g}, {ours.error:.3g})"
            )
            if not ours.passed:
                entry.reject(str(ours))

    def capture(self, entry: _Entry) -> None:
        """Replaces an entry's call with a CUDA graph; if capturing fails, the call is not timed."""
        if not entry.call:
            return
        try:
            if entry.capture is None:
                raise Unsupported("this call cannot be captured as a CUDA graph")
            with self.backend.working_on(None), self.watch.calls():
                self.watch.begins(_call(entry.row))
                entry.call = entry.capture()
        except (*_NOT_HERE, *_WRONG) as error:
            entry.fail(error)

    def time(self, entries: Sequence[_Entry]) -> None:
        calls = [entry.call for entry in entries if entry.call]
        how: Any = {"budget": self.how.budget, "cold": self.how.cold}
        names = [_call(entry.row) for entry in entries]
        how["begins"] = lambda number: self.watch.begins(names[number])
        try:
            with self.backend.working_on(None), self.watch.calls():
                times = timing.measure(self.backend, calls, **how)
        except DeviceError as error:
            for entry in entries:
                entry.fail(error)
            return
        for entry, milliseconds in zip(entries, times):
            entry.row = replace(entry.row, milliseconds=milliseconds)


def _call(row: Measurement) -> str:
    """Returns a name for a row's call that is the same in every process."""
    constants = "".join(f" {name}={value}" for name, value in row.constants.items())
    return f"{row.kernel}{constants} on {row.problem}"


def _peak(backend: Backend, plan: Plan) -> float | None:
    """Returns the peak rate that bounds the operation: the rate of copies for a softmax, of reads
    for decoding, and of matrix products otherwise.

    Returns None in the simulator, whose times are unrelated to these rates.
    """
    if backend.name == "simulator":
        return None
    if plan.kernel.operation == "softmax":
        return peaks.copy_rate(backend)
    if plan.problem.cached:
        return peaks.read_rate(backend)
    return peaks.product_rate(backend, plan.rounding or plan.problem.dtype.name)


def _captured(
    backend: Backend,
    plan: Plan,
    call: timing.Call,
    arrays: Mapping[str, Any],
    results: Mapping[str, np.ndarray],
) -> timing.Call:
    """Captures a call as a CUDA graph and replays it once to check that it writes all outputs."""
    replay = backend.capture(call)
    floats = [name for name, (_, dtype) in plan.outputs.items() if dtype.kind not in "iub"]
    for name in floats:
        arrays[name][...] = backend.upload(np.full_like(results[name], np.nan))
    replay()
    for name in floats:
        if (np.isnan(backend.download(arrays[name])) != np.isnan(results[name])).any():
            raise WrongResult(f"the CUDA graph of {plan.kernel.name} does not write all of {name}")
    return replay


def _compare(entries: Sequence[_Entry]) -> None:
    """Adds the speedups over the baseline, the previous rung and the peers to each row."""
    times = {entry.row.kernel: entry.row.milliseconds for entry in reversed(entries)}
    others = {entry.row.kernel: entry.row.kernel for entry in entries if entry.kernel is None}
    for entry in entries:
        row = entry.row
        mine = rivals(entry.kernel or next(iter(LADDER[row.operation].values())))
        named = {rival: kernel.name for rival, kernel in mine.items()} | others
        factors = {
            rival: timing.ratio(times[name], row.milliseconds)
            for rival, name in named.items()
            if times.get(name) and row.milliseconds and name != row.kernel
        }
        entry.row = replace(row, factors=factors)
