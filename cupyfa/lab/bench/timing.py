"""Times calls in alternating rounds until each call's median is accurate enough.

A device's speed drifts by several percent within seconds. Calls therefore alternate (A B C, A B C,
…), and ratios compare times of the same round.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf, sqrt
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from cupyfa.planner import source
from cupyfa.planner.plan import Plan
from cupyfa.problem.optional_inputs import MAPS
from cupyfa.runtime.arrays import extent
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.workspace import allocate

Call = Callable[[], Any]

_ACCURACY = 0.005  # relative standard error below which a median is accurate enough
_FEWEST = 20  # minimum number of rounds for a meaningful standard error
_WARM_UP = 0.05  # fraction of the budget spent on warming up
_SEVERAL = 3  # a call that takes longer than this multiple of its budget is timed once
_NORMAL_WIDTH = 1.683  # 20th to 80th percentile of a normal distribution, in standard deviations


def checked_budget(budget: float) -> float:
    """Returns the budget. Raises ValueError unless it is a number of at least 0."""
    if not budget >= 0:  # also true for NaN
        raise ValueError(f"budget is {budget}; it must be a number of seconds, at least 0")
    return budget


def measure(
    backend: Backend,
    calls: Sequence[Call],
    *,
    budget: float,
    cold: bool,
    most: float = inf,
    begins: Callable[[int], None] = lambda number: None,
) -> list[list[float]]:
    """Times calls in rounds, and returns the milliseconds of each call by round.

    A call drops out when its ``budget`` of seconds is spent or after ``most`` rounds; timing stops
    when every median is accurate to half a percent. A call is timed at least twice, or once if it
    takes longer than three times its budget. ``cold`` overwrites the device's caches before each
    call. ``begins`` receives the index of each call before the call is made.
    """
    lanes = [
        _Lane(backend, call, budget, cold, most, partial(begins, number))
        for number, call in enumerate(calls)
    ]
    while not all(lane.ended or lane.known for lane in lanes):
        for lane in lanes:
            if not lane.ended:
                lane.milliseconds.append(lane.timed())
    return [lane.milliseconds for lane in lanes]


class _Lane:
    """One call, its times so far, and the seconds spent on it."""

    def __init__(
        self,
        backend: Backend,
        call: Call,
        budget: float,
        cold: bool,
        most: float,
        begins: Callable[[], None],
    ) -> None:
        self.backend, self.call, self.cold, self.begins = backend, call, cold, begins
        self.budget, self.most, self.fewest = budget, most, 2
        self.milliseconds: list[float] = []
        self.spent = 0.0
        first = self.timed()
        if self.spent > _SEVERAL * budget:
            self.milliseconds, self.fewest = [first], 1
            return
        while self.spent < _WARM_UP * budget:
            self.timed()
        self.spent = 0.0

    @property
    def ended(self) -> bool:
        rounds = len(self.milliseconds)
        return rounds >= self.most or (self.spent >= self.budget and rounds >= self.fewest)

    @property
    def known(self) -> bool:
        times = self.milliseconds
        return len(times) >= _FEWEST and standard_error(times) < _ACCURACY

    def timed(self) -> float:
        self.begins()
        start = perf_counter()
        milliseconds = self.backend.time(self.call, cold=self.cold)
        self.spent += perf_counter() - start
        return milliseconds


def spread(milliseconds: Sequence[float]) -> float:
    """Returns the distance from the 20th to the 80th percentile, as a fraction of the median."""
    low, high = np.quantile(milliseconds, (0.2, 0.8))
    return float(high - low) / median(milliseconds) if median(milliseconds) else 0.0


def standard_error(milliseconds: Sequence[float]) -> float:
    """Estimates the median's relative standard error from the spread, which ignores outliers."""
    return 1.253 * spread(milliseconds) / _NORMAL_WIDTH / sqrt(len(milliseconds))


def ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Returns the median ratio of a's times to b's over their common rounds."""
    return median(x / y if y else inf for x, y in zip(a, b))


def code_of(plan: Plan) -> str:
    """Returns a digest of a plan's constants, compiled sources and launches."""
    parts = [str(dict(plan.constants))]
    for launch in plan.launches:
        parts += [source.text(launch), str((launch.grid, launch.threads, launch.shared_bytes))]
    return digest(*parts)


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def resources(backend: Backend, plan: Plan) -> dict[str, int]:
    """Returns maximum resources (registers, spilled bytes) and minimum blocks per multiprocessor
    over all launches of a plan.
    """
    found: dict[str, int] = {}
    for launch in plan.programs:
        prepared = backend.compile_launch(launch)
        for name, value in backend.resources(prepared).items():
            column = name.replace(" ", "_")
            found[column] = max(found.get(column, 0), value)
        if (blocks := backend.blocks_per_sm(prepared, launch)) is not None:
            found["blocks_per_sm"] = min(found.get("blocks_per_sm", blocks), blocks)
    return found


def arrays_of(
    backend: Backend, plan: Plan, inputs: Mapping[str, np.ndarray], memory: dict[Any, Any]
) -> dict[str, Any]:
    """Returns a plan's arrays by name: inputs copied to the backend, outputs and scratch memory.

    ``memory`` caches the arrays, so that plans with equal inputs share them.
    """
    arrays = placed(backend, inputs, memory)
    for name, allocation in {**plan.outputs, **plan.scratch}.items():
        key = (name, *allocation, plan.stored_shape(name))
        if key not in memory:
            memory[key] = allocate(backend, plan, name)
        arrays[name] = memory[key]
    return arrays


def placed(
    backend: Backend, inputs: Mapping[str, np.ndarray], memory: dict[Any, Any]
) -> dict[str, Any]:
    """Copies inputs to the backend; reuses arrays that ``memory`` already contains."""
    arrays = {}
    for name, array in inputs.items():
        # Plans with different tile sizes need different tile maps; all other inputs are the same.
        content = array.tobytes() if name.removeprefix("mods.") in MAPS else None
        key = (name, array.shape, array.strides, array.dtype, content)
        if key not in memory:
            memory[key] = _placed(backend, array)
        arrays[name] = memory[key]
    return arrays


def _placed(backend: Backend, array: np.ndarray) -> Any:
    """Copies an array to the backend's memory, with the same strides and alignment."""
    if backend.owns(array):
        return array
    low, high = extent(array)
    memory = backend.empty((15 + high - low,), np.dtype(np.uint8))
    offset = -low + (array.ctypes.data + low - backend.address(memory)) % 16
    bits = np.dtype(f"u{array.dtype.itemsize}")
    elements = backend.view(memory, array.shape, bits, offset, array.strides)
    elements[...] = backend.upload(array.view(bits))
    return backend.view(memory, array.shape, array.dtype, offset, array.strides)
