"""Tuning: measures a kernel's tile sizes on a device and stores the fastest."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import numpy as np

from cupyfa import cache_folder, errors
from cupyfa.arrays import block_mask
from cupyfa.cache_folder import records
from cupyfa.lab.bench import sweeps, timing
from cupyfa.lab.bench.results import Measurement
from cupyfa.lab.bench.watch import Watch
from cupyfa.lab.verify import sampling
from cupyfa.lab.verify.case import Case
from cupyfa.ladder.kernel import Kernel
from cupyfa.ladder.lookup import record_named
from cupyfa.ladder.operations import OPERATIONS
from cupyfa.numerics.shown import Rows, ShownRow
from cupyfa.planner import tuned
from cupyfa.planner.choose_kernel import candidates, folder_of, plan as plan_of, select
from cupyfa.planner.plan import Plan, Tuned
from cupyfa.problem.options import OPTIONS
from cupyfa.problem.problem import SIZES
from cupyfa.runtime import environment, guard
from cupyfa.runtime.backend import Backend, gist
from cupyfa.runtime.choose_backend import backend_to_measure
from cupyfa.runtime.environment import Progress, no_progress
from cupyfa.runtime.launcher import replay

RIGHT, WRONG, REFUSED, UNTRIED = "right", "wrong", "refused", "untried"
TIMED_OUT = "timed out"
_FIRST = {"budget": 0.1, "most": 10}  # seconds and rounds of a candidate's first timing
_ROUNDS = {"budget": 1.0, "most": 20}  # seconds and rounds of each timing of the finalists
_FINALISTS = 8
_FIRST_SHARE = 2 / 3  # fraction of the budget after which no first timing is started
_FEWEST = 10  # minimum number of rounds to compare two candidates
_SURE = 3.0  # number of standard errors beyond which a candidate counts as faster
_COLUMNS = (
    *("state", "first_ms", "ms", "x_own", "spread_%", "TFLOP/s", "rounds", "registers"),
    *("spilled_bytes", "shared_bytes", "blocks_per_sm", "note"),
)
_ALIKE = 0.002  # two candidates count as equal below this standard error of their ratio


@dataclass(frozen=True, repr=False)
class Candidate(ShownRow):
    """One choice of a kernel's constants for a problem, and its measurement.

    state: "right", "wrong", "refused" by the compiler or the device, "timed out", or "untried"
        because the budget was spent.
    factor: speedup over the record's default constants, in the same rounds. After the
        finalists have been timed, all other candidates have None.
    rounds: number of rounds in which a finalist was timed. Its milliseconds come from these rounds
        and are scaled by the default constants' times, which cancels the device's drift.
    shared_bytes: shared memory per block.
    first_ms: median of the short first timing, which selects the finalists.
    """

    measurement: Measurement
    state: str
    factor: float | None = None
    rounds: int = 0
    shared_bytes: int = 0
    blocks_per_sm: int | None = None
    first_ms: float | None = None

    def row(self) -> dict[str, Any]:
        """Returns the candidate as a table row."""
        row = {**self.measurement.row(), **vars(self), "x_own": self.factor}
        if not self.rounds:
            row["ms"] = None
        options = [name for name in OPTIONS if name != "scale"]
        columns = ("kernel", *SIZES, "lengths", "dtype", *options, "arrays", "constants", *_COLUMNS)
        return {name: row[name] for name in columns}


def tune(
    kernel: str | Kernel,
    *,
    backend: str | Backend = "auto",
    budget: float = 120.0,
    fresh: bool = False,
    progress: Progress = no_progress,
    watch: Watch | None = None,
    **sizes: Any,
) -> list[Candidate]:
    """Measures the candidates of a kernel and stores the fastest for later plans.

    ``kernel`` is a name, ``script.py:name``, a record, or "auto" for the kernel that "auto" chooses
    for each problem. All combinations of its ``candidates`` that its rules and the device allow are
    tried, its default constants first. ``sizes`` are passed to ``sweeps.problems``. Each size may
    be a list; every combination is tuned for ``budget`` seconds.

    Each candidate is compared with the float64 reference on a smaller problem with guard zones,
    then timed briefly. The fastest are timed in alternation until their order is known. Results are
    stored by compiled source, problem and versions; a later call continues from them, unless
    ``fresh``. Plans ignore simulator times. ``watch`` tracks the running call and holds the state
    of an earlier process, if any; a candidate that hangs uses up the budget.

    Returns the candidates of each problem: finalists, fastest first, then all others. Raises
    ValueError for sizes that the operation does not have, and Unsupported if the kernel does not
    support a problem.
    """
    timing.checked_budget(budget)
    backend = backend_to_measure(backend)
    record = record_named(kernel) if isinstance(kernel, str) and kernel != "auto" else kernel
    records = [record] if isinstance(record, Kernel) else []
    operation = records[0].operation if records else "forward"
    sweeps.refuse_foreign([operation], sizes)
    small = backend.name == "simulator"
    problems = sweeps.problems(operation, sizes, *records, small=small)
    for problem in problems:
        if not OPERATIONS[operation].flops(problem):
            raise ValueError(f"{problem} requires no computation; all sizes must be at least 1")
    cache_folder.warn_unless_kept()
    tried = [
        candidates(select(record, operation, problem, backend.limits), problem, backend.limits)
        for problem in problems
    ]
    watch = watch or Watch()
    begun, found = watch.done if watch.hung else -1, []
    for done, plans in enumerate(tried):
        watch.done = done
        if done > begun:
            watch.began = monotonic()
        tuning = _Tuning(backend, plans, fresh and done > begun, watch)
        found += tuning.run(budget if done >= begun else 0.0, progress)
    return Rows(found)


@dataclass
class _Tuning:
    """Tunes one problem; ``facts`` maps plans to results, and is also stored in a file."""

    backend: Backend
    plans: Sequence[Plan]
    fresh: bool
    watch: Watch
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    memory: dict[Any, Any] = field(default_factory=dict)

    def run(self, budget: float, progress: Progress) -> list[Candidate]:
        start = self.watch.began
        self.file = _file(self.backend, self.plans[0])
        self.keyed = {timing.code_of(plan): plan for plan in self.plans}
        self.own = next(iter(self.keyed))
        recalled = {} if self.fresh else cache_folder.recall(self.file)
        self.facts = _sound(recalled, self.keyed)
        self.backend.trim()
        for done, (key, plan) in enumerate(self.keyed.items()):
            progress(done, len(self.keyed), _listed(plan))
            late = monotonic() - start > _FIRST_SHARE * budget
            over = late and (self.right or self.has_hung)
            if self.is_hung(plan) or not (over or key in self.facts):
                self.try_out(key)
        if self.right:
            while monotonic() - start < budget and len(rivals := self.undecided()) > 1:
                best = _listed(self.keyed[rivals[0]])
                progress(len(self.keyed), len(self.keyed), f"{len(rivals)} are close, {best} leads")
                self.time_rounds(rivals)
                cache_folder.remember(self.file, self.facts)
            if self.backend.name != "simulator":
                self.remember_best()
        return [self.candidate(key) for key in self.ranked]

    @cached_property
    def inputs(self) -> dict[str, np.ndarray]:
        plan = self.plans[0]
        case = Case(plan.kernel.operation, plan.problem)
        return case.inputs(self.backend, plan.kernel)

    def is_hung(self, plan: Plan) -> bool:
        """Returns whether the plan hung in an earlier process."""
        return _call(plan) in self.watch.hung

    @property
    def has_hung(self) -> bool:
        return any(map(self.is_hung, self.plans))

    @property
    def right(self) -> list[str]:
        return [key for key, fact in self.facts.items() if fact["state"] == RIGHT]

    @property
    def ranked(self) -> list[str]:
        """The keys of all candidates: finalists, other correct, untried and failed candidates.

        The finalists, and the other correct candidates, are sorted by speed.
        """

        def rank(key: str) -> tuple[int, float]:
            if key in self.right:
                return (0 if self.facts[key]["rounds"] else 1), -self.pace(key)
            return (3 if key in self.facts else 2), 0.0

        return sorted(self.keyed, key=rank)

    def try_out(self, key: str) -> None:
        """Checks a candidate, times it briefly, and stores the result."""
        plan = self.keyed[key]
        fact: dict[str, Any] = {"state": RIGHT, "note": "", "look": [], "rounds": []}
        fact["constants"] = dict(plan.constants)
        refusals: tuple[type[Exception], ...] = (errors.DeviceError, errors.Unsupported)
        refusals += self.backend.compile_errors
        lost: Exception | None = None
        try:
            if self.is_hung(plan):
                raise _TimedOut(f"no answer within {self.watch.timeout:g} s")
            with self.backend.working_on(None):
                with self.watch.calls():
                    _check(self.backend, plan, self.watch)
                fact |= timing.resources(self.backend, plan)
                (fact["look"],) = self.timed([plan], **_FIRST)
        except _TimedOut as error:
            fact |= {"state": TIMED_OUT, "note": str(error)}
        except errors.OutOfMemory:
            raise
        except (errors.WrongResult, errors.SimulatorFault) as error:
            fact |= {"state": WRONG, "note": gist(str(error))}
        except refusals as error:
            fact |= {"state": REFUSED, "note": gist(str(error))}
            lost = error if isinstance(error, errors.DeviceLost) else None
        self.facts[key] = fact
        cache_folder.remember(self.file, self.facts)
        if lost:
            raise lost  # the next call skips this candidate

    def timed(self, plans: Sequence[Plan], **how: Any) -> list[list[float]]:
        calls = []
        for plan in plans:
            readable = block_mask.readable(self.backend, plan, self.inputs)
            arrays = timing.arrays_of(self.backend, plan, readable, self.memory)
            calls.append(replay(self.backend, plan, arrays))
        names = list(map(_call, plans))
        how["begins"] = lambda number: self.watch.begins(names[number])
        with self.watch.calls():
            return timing.measure(self.backend, calls, cold=True, **how)

    def undecided(self) -> list[str]:
        """Returns the best finalist and the finalists whose comparison with it is undecided."""
        by_look = sorted(self.right, key=lambda key: median(self.facts[key]["look"]))
        finalists = by_look[:_FINALISTS]
        best = max(finalists, key=self.pace)
        return [best, *(x for x in finalists if x != best and not self.is_decided(x, best))]

    @property
    def pacer(self) -> str:
        """The candidate timed in every round: the first correct candidate, usually the default."""
        return next(key for key in self.keyed if key in self.right)

    def pace(self, key: str) -> float:
        """Returns a candidate's speedup over the pacer, which cancels the device's drift."""
        pacer, its = (median(self.facts[x]["look"]) for x in (self.pacer, key))
        return median(self.ratios(self.pacer, key) or [pacer / its])

    def is_decided(self, key: str, best: str) -> bool:
        """Returns whether timings show which candidate is faster, or that both are equally fast."""
        ratios = self.ratios(key, best)
        if len(ratios) < _FEWEST:
            return False
        error = timing.standard_error(ratios) * median(ratios)
        return abs(median(ratios) - 1) > _SURE * error or error < _ALIKE

    def ratios(self, a: str, b: str) -> list[float]:
        """Returns the ratios of a's times to b's in their common rounds."""
        rounds = zip(self.facts[a]["rounds"], self.facts[b]["rounds"])
        return [x / y for x, y in rounds if x and y]

    def steady_rounds(self, key: str) -> list[float]:
        """Returns a candidate's milliseconds by round, scaled so that the pacer's are constant.

        Candidates drop out of the rounds at different times, while the device's speed drifts.
        """
        its, pace = (self.facts[x]["rounds"] for x in (key, self.pacer if self.right else key))
        if its is pace or not any(pace):
            return [x for x in its if x]
        usual = median(x for x in pace if x)
        return [x / y * usual for x, y in zip(its, pace) if x and y]

    def time_rounds(self, rivals: Sequence[str]) -> None:
        keys = list(dict.fromkeys([*rivals, self.pacer]))
        with self.backend.working_on(None):
            times = self.timed([self.keyed[key] for key in keys], **_ROUNDS)
        before = max(len(fact["rounds"]) for fact in self.facts.values())
        for key, its in zip(keys, times):
            rounds = self.facts[key]["rounds"]
            rounds += [None] * (before - len(rounds)) + its

    def remember_best(self) -> None:
        best = self.candidate(self.ranked[0]).measurement
        record, p = self.plans[0].kernel, best.problem
        assert best.tflops is not None
        about_tiles = (p.arithmetic, p.d, p.dv, tuple(best.constants.items()), best.tflops)
        found = Tuned(record.name, folder_of(record), *about_tiles)
        about = {"milliseconds": best.time, "problem": str(p), "source": self.ranked[0]}
        about |= environment.describe(self.backend)
        tuned.remember(self.backend.limits.device, found, about)
        self.backend.refresh()

    def candidate(self, key: str) -> Candidate:
        plan, fact = self.keyed[key], self.facts.get(key)
        shared = max((launch.shared_bytes for launch in plan.launches), default=0)
        kernel, constants = plan.kernel, dict(plan.constants)
        measured = Measurement(kernel.name, kernel.operation, plan.problem, constants)
        if fact is None:
            return Candidate(measured, UNTRIED, shared_bytes=shared)
        rounds = self.steady_rounds(key)
        known: Any = {name: fact.get(name) for name in ("registers", "spilled_bytes", "note")}
        times, passed = rounds or fact["look"], fact["state"] == RIGHT
        measured = replace(measured, milliseconds=times, passed=passed, **known)
        is_comparable = bool(rounds) or not any(x["rounds"] for x in self.facts.values())
        comparable = is_comparable and {key, self.own} <= set(self.right)
        return Candidate(
            measured,
            fact["state"],
            self.pace(key) if comparable else None,
            len(rounds),
            shared,
            fact.get("blocks_per_sm"),
            median(fact["look"]) if fact["look"] else None,
        )


class _TimedOut(Exception):
    """Raised for a candidate that hung in an earlier process."""


def _call(plan: Plan) -> str:
    """Returns a name for a plan's call that is the same in every process."""
    return f"{plan.kernel.name} {_listed(plan)} on {plan.problem}"


def _check(backend: Backend, plan: Plan, watch: Watch) -> None:
    """Checks a plan's constants on a small problem whose sizes are not multiples of its tiles."""
    small = sampling.smaller(plan)
    checked = plan_of(plan.kernel, small, backend.limits, **plan.constants)
    inputs = Case(plan.kernel.operation, small).inputs(kernel=plan.kernel)
    for launch in checked.programs:  # compiles outside the timed call
        backend.compile_launch(launch)
    watch.begins(_call(plan))
    guard.checked(backend, checked, block_mask.readable(backend, checked, inputs), {})


_MILLISECONDS = records.number(1e-9)
_FACT = records.record(
    {
        "state": records.one_of((RIGHT, WRONG, REFUSED, TIMED_OUT)),
        "note": records.text(),
        "look": records.list_of(_MILLISECONDS),
        "rounds": records.list_of(records.optional(_MILLISECONDS)),
    },
    {
        "constants": records.mapping_of(records.whole(1, records.INT32)),
        **dict.fromkeys(
            ("registers", "spilled_bytes", "blocks_per_sm"), records.optional(records.whole())
        ),
    },
)


def _sound(recalled: Mapping[str, Any], keys: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns the facts about the candidates ``keys`` that a file holds, without invalid facts."""
    found = {}
    for key in keys:
        with suppress(ValueError):
            fact = _FACT(recalled.get(key))
            if fact["look"] or fact["state"] != RIGHT:
                found[key] = fact
    return found


def _file(backend: Backend, plan: Plan) -> Path:
    versions = environment.describe(backend)
    moment = ("time", "command", "system")
    about = [str(plan.problem), folder_of(plan.kernel)]
    about += [f"{name} {versions[name]}" for name in versions if name not in moment]
    return cache_folder.facts_file(
        "tuning", f"{plan.kernel.name}-{timing.digest(*map(str, about))}"
    )


def _listed(plan: Plan) -> str:
    return " ".join(f"{name}={value}" for name, value in plan.constants.items())
