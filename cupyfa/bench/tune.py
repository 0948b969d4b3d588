"""Tuning: a kernel's constants are tried out on a device, and the fastest right ones remembered."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from cupyfa import store
from cupyfa.bench import sweeps, timing
from cupyfa.bench.results import Measurement
from cupyfa.errors import (
    DeviceError,
    DeviceLost,
    OutOfMemory,
    SimulatorFault,
    Unsupported,
    WrongResult,
)
from cupyfa.ladder import lookup as records
from cupyfa.ladder.kernel import Kernel
from cupyfa.operations import OPERATIONS
from cupyfa.options import OPTIONS
from cupyfa.planner import select as planning
from cupyfa.planner import source as sources
from cupyfa.planner import tuned
from cupyfa.planner.plan import Plan, Tuned
from cupyfa.problem import SIZES
from cupyfa.runtime import environment, guard
from cupyfa.runtime.arrays import readable_inputs
from cupyfa.runtime.backend import Backend, execute, gist
from cupyfa.runtime.environment import Progress, no_progress
from cupyfa.runtime.select import AT_THE_CALLER, backend_named
from cupyfa.verify.case import Case

RIGHT, WRONG, REFUSED, UNTRIED = "right", "wrong", "refused", "untried"
_LOOK = {"budget": 0.1, "most": 10}  # seconds and rounds, of a first look
_ROUNDS = {"budget": 1.0, "most": 20}  # of one bout of those that were best then
_FINALISTS = 8
_LOOKING = 2 / 3  # of the budget, at the most
_FEWEST = 10  # rounds before two can be told apart
_SURE = 3.0  # standard errors
_ALIKE = 0.002  # a ratio known this well, and not told from 1, is 1


@dataclass(frozen=True)
class Candidate:
    """Constants of a kernel on a problem: their state, and what was measured.

    ``state`` is "right", "wrong", "refused" by the compiler or the device, or "untried" for want of
    time. ``factor`` says how many times faster than the record's own choice it is. ``shared_bytes``
    are a block's, and ``blocks_per_sm`` run on a multiprocessor at a time.
    """

    measurement: Measurement
    state: str
    factor: float | None = None
    shared_bytes: int = 0
    blocks_per_sm: int | None = None

    def row(self) -> dict[str, Any]:
        """The candidate as one row of a table."""
        row = self.measurement.row()
        sizes = ("kernel", *SIZES, "dtype")
        options = [name for name in OPTIONS if name != "scale"]  # which is the same for all tiles
        return {
            **{name: row[name] for name in (*sizes, *options)},
            **{"constants": row["constants"], "state": self.state},
            **{name: row[name] for name in ("ms", "spread_%", "TFLOP/s")},
            "x_own": self.factor,
            **{name: row[name] for name in ("registers", "spilled_bytes")},
            "shared_bytes": self.shared_bytes,
            "blocks_per_sm": self.blocks_per_sm,
            "note": row["note"],
        }


def tune(
    kernel: str | Kernel,
    *,
    backend: str | Backend = "auto",
    budget: float = 120.0,
    fresh: bool = False,
    progress: Progress = no_progress,
    **sizes: Any,
) -> list[Candidate]:
    """Tries the candidates of a kernel, and remembers the fastest for the plans to come.

    ``kernel`` is a name, ``script.py:name``, or a record. Its ``candidates`` are combined as its
    rules and the device allow, with its own choice first. ``sizes`` are those of
    ``sweeps.problems``: each may be a list, and every combination is tuned, for ``budget`` seconds.
    What is left out is batch 4, heads 16, M = N = 2048 and d = 64, for a softmax 16384 rows of
    4096; in the simulator less.

    Each candidate is compared with the float64 reference, on a smaller problem and among canaries,
    before it is timed. After a short look at all, those that were best are timed in turn until they
    are told apart. Everything measured is remembered under the text that was compiled, the problem
    and the versions, so that a later call goes on where this one ended; ``fresh`` forgets it.

    Returns the candidates of each problem, the fastest first. Raises ValueError for sizes that the
    kernel's operation does not have, and Unsupported if the kernel cannot do a problem.
    """
    timing.checked_budget(budget)
    engine = backend_named(backend)
    record = records.record_named(kernel) if isinstance(kernel, str) else kernel
    if foreign := ", ".join(sweeps.foreign(record.operation, sizes)):
        raise ValueError(f"{record.name} computes {record.operation}, which has no {foreign}")
    usual = sweeps.usual_dtype(record, precision=sizes.get("precision"))
    small = engine.name == "simulator"
    problems = sweeps.problems(record.operation, {"dtype": usual, **sizes}, small=small)
    for problem in problems:
        if not OPERATIONS[record.operation].flops(problem):
            raise ValueError(f"there is nothing to do in {problem}; give sizes from 1")
    if not is_kept():
        warnings.warn(
            f"{store.chosen_folder() or 'the folder of caches'} cannot be written, so nothing is "
            "remembered; set CUPYFA_CACHE_DIR to a folder that can be",
            **AT_THE_CALLER,
        )
    tried = [planning.candidates(record, problem, engine.limits) for problem in problems]
    return [x for plans in tried for x in _Tuning(engine, plans, fresh).run(budget, progress)]


def is_kept() -> bool:
    """Whether what is measured here is there for the processes to come."""
    return store.folder() == store.chosen_folder()


@dataclass
class _Tuning:
    """One problem: its plans, what is known of each by its key, and the file that keeps that."""

    engine: Backend
    plans: Sequence[Plan]
    fresh: bool
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    memory: dict[Any, Any] = field(default_factory=dict)

    def run(self, budget: float, progress: Progress) -> list[Candidate]:
        start = perf_counter()
        self.file = _file(self.engine, self.plans[0])
        self.keyed = {_key(plan): plan for plan in self.plans}
        self.own = next(iter(self.keyed))
        recalled = {} if self.fresh else store.recall(self.file)
        self.facts = {x: recalled[x] for x in self.keyed if _is_sound(recalled.get(x))}
        self.engine.trim()
        for done, (key, plan) in enumerate(self.keyed.items()):
            progress(done, len(self.keyed), _listed(plan))
            late = perf_counter() - start > _LOOKING * budget
            if key not in self.facts and not (late and self.right):
                self.look_at(key)
        if self.right:
            while perf_counter() - start < budget and len(bout := self.undecided()) > 1:
                best = _listed(self.keyed[bout[0]])
                progress(len(self.keyed), len(self.keyed), f"{len(bout)} are close, {best} leads")
                self.fight(bout)
                store.remember(self.file, self.facts)
            self.remember_best()
        return [self.candidate(key) for key in self.ranked]

    @cached_property
    def inputs(self) -> dict[str, np.ndarray]:
        plan = self.plans[0]
        return readable_inputs(plan, Case(plan.kernel.operation, plan.problem).inputs(self.engine))

    @property
    def right(self) -> list[str]:
        return [key for key, fact in self.facts.items() if fact["state"] == RIGHT]

    @property
    def ranked(self) -> list[str]:
        """All keys: the right ones by their pace, finalists first, then untried and other ones."""

        def rank(key: str) -> tuple[int, float]:
            if key in self.right:
                return (0 if self.facts[key]["rounds"] else 1), -self.pace(key)
            return (3 if key in self.facts else 2), 0.0

        return sorted(self.keyed, key=rank)

    def look_at(self, key: str) -> None:
        """Checks a candidate, takes a short look at its speed, and keeps what was found."""
        plan = self.keyed[key]
        fact: dict[str, Any] = {"state": RIGHT, "note": "", "look": [], "rounds": []}
        fact |= {"constants": dict(plan.constants)}
        lost: DeviceLost | None = None
        refusals: tuple[type[Exception], ...] = (DeviceError, Unsupported)
        refusals += self.engine.compile_errors
        try:
            with self.engine.working_on(None):
                _check(self.engine, plan)
                fact |= _resources(self.engine, plan)
                fact["look"] = self.timed([plan], **_LOOK)[0]
        except OutOfMemory:
            raise
        except (WrongResult, SimulatorFault) as error:
            fact |= {"state": WRONG, "note": gist(str(error))}
        except refusals as error:
            fact |= {"state": REFUSED, "note": gist(str(error))}
            lost = error if isinstance(error, DeviceLost) else None
        self.facts[key] = fact
        store.remember(self.file, self.facts)
        if lost:
            raise lost  # the next call passes this candidate over

    def timed(self, plans: Sequence[Plan], **how: Any) -> list[list[float]]:
        """Milliseconds of each plan in each round."""
        timed = []
        for plan in plans:
            prepared = [self.engine.prepare(launch) for launch in plan.launches]
            arrays = timing.arrays_of(self.engine, plan, self.inputs, self.memory)
            timed.append(partial(execute, self.engine, plan, prepared, arrays))
        return timing.measure(self.engine, timed, cold=True, **how)

    def undecided(self) -> list[str]:
        """The best of the finalists, and those that may be as fast for all that is known."""
        by_look = sorted(self.right, key=lambda key: median(self.facts[key]["look"]))
        finalists = by_look[:_FINALISTS]
        best = max(finalists, key=self.pace)
        return [best, *(x for x in finalists if x != best and not self.told_apart(x, best))]

    @property
    def pacer(self) -> str:
        """Who takes part in every round: the record's own choice, if that is right."""
        return next(key for key in self.keyed if key in self.right)

    def pace(self, key: str) -> float:
        """How many times faster than the pacer; the device's speed drifts, this does not."""
        if pairs := self.pairs(self.pacer, key):
            return timing.ratio(*zip(*pairs))
        return median(self.facts[self.pacer]["look"]) / median(self.facts[key]["look"])

    def told_apart(self, key: str, best: str) -> bool:
        """Whether it is known which of two is faster, or that neither is."""
        ratios = [a / b for a, b in self.pairs(key, best)]
        if len(ratios) < _FEWEST:
            return False
        error = timing.standard_error(ratios) * median(ratios)
        return abs(median(ratios) - 1) > _SURE * error or error < _ALIKE

    def pairs(self, a: str, b: str) -> list[tuple[float, float]]:
        """Milliseconds of two in the rounds that both took part in."""
        rounds = zip(self.facts[a]["rounds"], self.facts[b]["rounds"])
        return [(x, y) for x, y in rounds if x and y]

    def fight(self, rivals: Sequence[str]) -> None:
        """A bout of some rounds, in which all rivals and the pacer take part."""
        keys = list(dict.fromkeys([*rivals, self.pacer]))
        with self.engine.working_on(None):
            times = self.timed([self.keyed[key] for key in keys], **_ROUNDS)
        before = max(len(fact["rounds"]) for fact in self.facts.values())
        for key, its in zip(keys, times):
            rounds = self.facts[key]["rounds"]
            rounds += [None] * (before - len(rounds)) + its

    def remember_best(self) -> None:
        best = self.candidate(self.ranked[0]).measurement
        record, problem = self.plans[0].kernel, best.problem
        assert best.tflops is not None
        found = Tuned(
            kernel=record.name,
            folder=planning.folder_of(record),
            dtype=problem.arithmetic,
            d=problem.d,
            dv=problem.dv,
            constants=tuple(best.constants.items()),
            tflops=best.tflops,
        )
        about = {"milliseconds": best.time, "problem": str(problem), "source": self.ranked[0]}
        tuned.remember(
            self.engine.limits.device, found, {**about, **environment.describe(self.engine)}
        )
        self.engine.refresh()

    def candidate(self, key: str) -> Candidate:
        plan, fact = self.keyed[key], self.facts.get(key)
        measured = Measurement(
            plan.kernel.name, plan.kernel.operation, plan.problem, dict(plan.constants)
        )
        factor = self.pace(key) if {key, self.own} <= set(self.right) else None
        shared = max((launch.shared_bytes for launch in plan.launches), default=0)
        if fact is None:
            return Candidate(measured, UNTRIED, shared_bytes=shared)
        measured = replace(
            measured,
            milliseconds=[x for x in fact["rounds"] if x] or fact["look"],
            passed=fact["state"] == RIGHT,
            registers=fact.get("registers"),
            spilled_bytes=fact.get("spilled_bytes"),
            note=fact["note"],
        )
        return Candidate(measured, fact["state"], factor, shared, fact.get("blocks_per_sm"))


def _check(engine: Backend, plan: Plan) -> None:
    """Compares a plan's constants with the reference on a problem that ends within their tiles."""
    p, largest = plan.problem, max(plan.constants.values(), default=32)
    if plan.kernel.operation == "softmax":
        small = replace(p, M=min(p.M, 37), N=min(p.N, 1051))
    else:
        kv_heads, group = min(p.kv_heads, 2), min(p.group, 2)
        heads, M, N = kv_heads * group, min(p.M, largest + 37), min(p.N, 2 * largest + 51)
        small = replace(p, batch=min(p.batch, 1), heads=heads, kv_heads=kv_heads, M=M, N=N)
    checked = planning.plan(plan.kernel, small, engine.limits, **plan.constants)
    inputs = Case(plan.kernel.operation, small).inputs()
    guard.checked(engine, checked, readable_inputs(checked, inputs), {})


def _resources(engine: Backend, plan: Plan) -> dict[str, int]:
    """Registers, spilled bytes and blocks on a multiprocessor, of the launch with the most."""
    found: dict[str, int] = {}
    for launch in plan.programs:
        prepared = engine.prepare(launch)
        used, blocks = engine.resources(prepared), engine.blocks_per_sm(prepared, launch)
        for name, value in used.items():
            column = name.replace(" ", "_")
            found[column] = max(found.get(column, 0), value)
        if blocks is not None:
            found["blocks_per_sm"] = min(found.get("blocks_per_sm", blocks), blocks)
    return found


def _is_sound(fact: Any) -> bool:
    """Whether what a file told of a candidate can be used."""
    try:
        times = [*fact["look"], *(x for x in fact["rounds"] if x is not None)]
        known = fact["state"] in (WRONG, REFUSED) or (fact["state"] == RIGHT and fact["look"])
        return bool(known) and isinstance(fact["note"], str) and all(x > 0 for x in times)
    except (TypeError, KeyError):
        return False


def _file(engine: Backend, plan: Plan) -> Path:
    """Where what is measured of a kernel on a problem is kept."""
    versions = environment.describe(engine)
    moment = ("time", "command", "system")
    about = [str(plan.problem), planning.folder_of(plan.kernel)]
    about += [f"{name} {versions[name]}" for name in versions if name not in moment]
    return store.facts_file("tuning", f"{plan.kernel.name}-{_digest(*map(str, about))}")


def _key(plan: Plan) -> str:
    """The same for what is compiled and launched in the same way."""
    parts = [str(dict(plan.constants))]
    for launch in plan.launches:
        parts += [sources.text(launch), str((launch.grid, launch.threads, launch.shared_bytes))]
    return _digest(*parts)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _listed(plan: Plan) -> str:
    return " ".join(f"{name}={value}" for name, value in plan.constants.items())
