"""The roofline model of attention: what bounds a computation on a device, and its least time.

A computation does so many floating-point operations and exponentials, and moves so many bytes
between the device's memory and its chip. Each of the three takes at least its number over the
device's rate, and all may overlap: the longest is the least time.

Roofline: Williams, Waterman and Patterson, 2009, doi:10.1145/1498765.1498785.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from cupyfa.analysis import traffic
from cupyfa.analysis.resources import limits_of
from cupyfa.analysis.traffic import NAIVE, TILED
from cupyfa.bench import bench as benchmark
from cupyfa.bench import devices, peaks, sweeps
from cupyfa.bench.devices import Device
from cupyfa.bench.results import Measurement
from cupyfa.dtypes import DTYPES
from cupyfa.errors import DeviceError, Unsupported
from cupyfa.ladder import LADDER
from cupyfa.ladder import lookup as records
from cupyfa.ladder.kernel import Kernel, Matmul
from cupyfa.operations import OPERATIONS, visible_scores
from cupyfa.planner import select as planning
from cupyfa.planner import source as sources
from cupyfa.planner.plan import Limits, Plan
from cupyfa.problem import Problem
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.environment import Progress, no_progress
from cupyfa.runtime.select import backend_named

THIS = "this"
_COSTS = COMPUTE, MEMORY, EXPONENTIALS = "compute", "memory", "exponentials"
_SIZES = (
    *("batch", "heads", "kv_heads", "M", "N", "d", "dv"),
    *("causal", "window", "scale", "precision"),
)
_TENSOR_HEADERS = {"mma.cuh", "wmma.cuh", "wgmma.cuh"}


@dataclass(frozen=True)
class Roof:
    """A computation on a device: what it costs, and what it could reach.

    ``computation`` is "naive", "tiled" or a kernel's name, ``precision`` what it multiplies.
    ``bytes`` are those that its loops ask for, which all come from the memory if no cache catches
    any; ``least_bytes`` are left if caches catch every repetition within a launch. ``measured`` is
    what a benchmark found. ``note`` says why a kernel has no numbers, or what they leave out.
    """

    computation: str
    operation: str
    problem: Problem
    device: Device
    bytes: int = 0
    least_bytes: int = 0
    precision: str = ""
    on_tensor_cores: bool = False
    measured: Measurement | None = None
    note: str = ""

    @property
    def is_refused(self) -> bool:
        """Whether it is of a kernel that cannot do the problem."""
        return bool(self.note) and not self.bytes

    @property
    def flops(self) -> int:
        """Floating-point operations of the visible scores, 2 for a multiply-add."""
        return OPERATIONS[self.operation].flops(self.problem)

    @property
    def exponentials(self) -> int:
        """One for each visible score."""
        return self.problem.batch * self.problem.heads * visible_scores(self.problem)

    @property
    def peak(self) -> float:
        """TFLOP/s of the units that it computes with."""
        precision = self.precision or self.problem.dtype.name
        return self.device.peak(precision, tensor=self.on_tensor_cores)

    @property
    def balance(self) -> float:
        """FLOP per byte from which on not the memory is the bound."""
        return 1e3 * self.peak / self.device.bandwidth

    @property
    def intensity(self) -> float | None:
        """FLOP per byte."""
        return self.flops / self.bytes if self.bytes else None

    @property
    def times(self) -> dict[str, float]:
        """The least milliseconds of each of what it needs.

        Double precision has no instruction for exponentials: they are left out there.
        """
        times = {
            COMPUTE: self.flops / self.peak / 1e9,
            MEMORY: self.bytes / self.device.bandwidth / 1e6,
        }
        rate = self.device.exponentials
        if rate and self.problem.dtype.name != "float64":
            times[EXPONENTIALS] = self.exponentials / rate / 1e9
        return times

    @property
    def bound(self) -> str | None:
        """What takes longest: "compute", "memory" or "exponentials"."""
        return max(self.times, key=lambda x: self.times[x]) if self.bytes else None

    @property
    def time(self) -> float | None:
        """The least milliseconds of all."""
        return max(self.times.values()) if self.bytes else None

    @property
    def tflops(self) -> float | None:
        """TFLOP/s in that time."""
        return self.flops / self.time / 1e9 if self.time else None

    @property
    def cached(self) -> Roof:
        """The same where caches catch every repetition: nothing can be faster."""
        return replace(self, bytes=self.least_bytes)

    @property
    def percent(self) -> float | None:
        """How much was measured of what is attainable where caches catch every repetition."""
        least, reached = self.cached.time, self.measured and self.measured.time
        return 100 * least / reached if least and reached else None

    def row(self) -> dict[str, Any]:
        """As a row of a table."""
        p = self.problem
        row: dict[str, Any] = {
            "computation": self.computation,
            "device": self.device.name,
            **{x: getattr(p, x) for x in ("batch", "heads", "kv_heads", "M", "N", "d", "dv")},
            "dtype": p.dtype.name,
            "precision": p.precision,
            "causal": p.causal,
            "window": p.window_text,
            "balance": self.balance if self.bytes else None,
            "GFLOP": self.flops / 1e9,
            **_bounds(self),
            **{f"cached_{name}": value for name, value in _bounds(self.cached).items()},
        }
        return {
            **row,
            "measured_ms": self.measured.time if self.measured else None,
            "measured_TFLOP/s": self.measured.tflops if self.measured else None,
            "%_of_roof": self.percent,
            "note": self.note or (self.measured.note if self.measured else ""),
        }


def _bounds(roof: Roof) -> dict[str, Any]:
    times = roof.times if roof.bytes else {}
    return {
        "MB": roof.bytes / 1e6 if roof.bytes else None,
        "FLOP/B": roof.intensity,
        **{f"{what}_ms": times.get(what) for what in _COSTS},
        "bound_by": roof.bound,
        "ms": roof.time,
        "TFLOP/s": roof.tflops,
    }


def roofline(
    kernels: str | Kernel | Sequence[str | Kernel] = (),
    *,
    device: str | Device = "auto",
    backward: bool = False,
    measure: bool = True,
    budget: float = 0.2,
    progress: Progress = no_progress,
    **sizes: Any,
) -> list[Roof]:
    """What bounds attention, computed in several ways, on a device, and the least time of each.

    ``kernels`` are "naive" (scores and weights in memory), "tiled" (every input read once, the
    output written once), names of kernels, ``script.py:name`` or records; without any, the two and
    every rung that can do the problem. ``backward`` means the gradients, as their kernels do.
    ``device`` is a name of ``devices.DEVICES``, a Device, or "this", the GPU here with the rates
    that it reaches in large products and copies; "auto" is this one, or "h100" if there is none.
    ``sizes`` are those of ``sweeps.problems``, each one value or several.

    Where the device is here, kernels are also measured, each for ``budget`` seconds, unless
    ``measure`` is False. Returns a Roof for each computation and problem. Raises ValueError for the
    arguments, and Unsupported if there is no GPU for "this", or no kernel that was named can do any
    of the problems.
    """
    names = [kernels] if isinstance(kernels, str | Kernel) else list(kernels)
    chosen = [x if x in (NAIVE, TILED) else _record(x) for x in names]
    operation = _operation([x for x in chosen if isinstance(x, Kernel)], backward)
    if foreign := ", ".join(sweeps.foreign(operation, sizes)):
        raise ValueError(f"{operation} has no {foreign}; leave it out")
    if not sizes.get("dtype"):
        sizes["dtype"] = "float32" if sizes.get("precision") else _usual_dtype(chosen)
    problems = sweeps.problems(operation, sizes)
    engine = _gpu()
    target, is_here = _device(device, engine)
    limits = engine.limits if engine and is_here else limits_on(target)
    rows: list[Roof] = []
    for done, problem in enumerate(problems):
        progress(done, len(problems), str(problem))
        rungs = [x for x in LADDER[operation].values() if x.takes(problem.dtype.name)]
        found = [
            _roof(x, operation, problem, target, limits) for x in chosen or [NAIVE, TILED, *rungs]
        ]
        if not chosen:
            found = [row for row in found if not row.is_refused]
        if engine and is_here and measure:
            found = _with_measurements(found, problem, chosen or rungs, engine, budget)
        rows += found
    if rows and all(row.is_refused for row in rows):
        raise Unsupported(rows[0].note)
    return rows


def limits_on(device: Device) -> Limits:
    """What a device grants a block, whether or not it is here."""
    limits = limits_of(device.arch)
    return replace(limits, device=device.name, multiprocessors=device.multiprocessors)


def tiled_bytes(operation: str, p: Problem) -> int:
    """The least that must move: every input is read once, every output is written once.

    Forward that is Q, K, V and O; nobody needs lse there but the gradients.
    """
    return OPERATIONS[operation].bytes(p) - _unneeded(operation, p)


def naive_bytes(operation: str, p: Problem) -> int:
    """Attention with scores in memory, by steps that read and write all of their arrays.

    Those are ``traffic.naive``, but that scale and mask cost nothing of their own, as in the
    baselines: forward 4 M N elements of each query head beside the least, of gradients 10 M N.
    """
    steps = [x for x in traffic.naive(operation, p) if not x.writes.keys() <= {"scaled", "masked"}]
    return traffic.moved(steps) - _unneeded(operation, p)


def _unneeded(operation: str, p: Problem) -> int:
    """The bytes of lse, if that is an output."""
    return traffic.outputs(operation, p).get("lse", 0)


def _moved(plan: Plan) -> tuple[int, int, str]:
    """The bytes that a kernel's loops ask for, those left if caches catch repetitions, and a note.

    The latter are each array that a launch reads or writes once, and of a mask's only what it does.
    """
    arrays = traffic.inputs(plan.kernel.operation, plan.problem)
    for name, (_, dtype) in {**plan.outputs, **plan.scratch}.items():
        arrays[name] = prod(plan.stored_shape(name)) * dtype.itemsize
    steps = traffic.of(plan)
    if steps is None:
        least = sum(arrays.get(x, 0) for launch in plan.launches for x in traffic.arrays_of(launch))
        return least, least, f"{plan.kernel.name} has tiles without Bc: each array counts once"
    moves = [move for step in steps for x in (step.reads, step.writes) for move in x.items()]
    return traffic.moved(steps), sum(min(size, arrays[name]) for name, size in moves), ""


def uses_tensor_cores(plan: Plan) -> bool:
    """Whether the products are done there: by a header with such instructions, or by cuBLAS."""
    if any(isinstance(step, Matmul) for step in plan.steps):
        return _precision(plan) != "float32"
    return any(_TENSOR_HEADERS & sources.headers(launch) for launch in plan.launches)


def _precision(plan: Plan) -> str:
    return plan.rounding or plan.problem.dtype.name


def _record(kernel: str | Kernel) -> Kernel:
    return kernel if isinstance(kernel, Kernel) else records.record_named(kernel)


def _operation(kernels: Sequence[Kernel], backward: bool) -> str:
    found = {kernel.operation for kernel in kernels} | ({"backward"} if backward else set())
    if "softmax" in found or len(found) > 1:
        names = ", ".join(f"{kernel.name} computes {kernel.operation}" for kernel in kernels)
        raise ValueError(f"a roofline is of attention or of its gradients, and {names}")
    return found.pop() if found else "forward"


def _usual_dtype(chosen: Sequence[str | Kernel]) -> str:
    """float16, or the first that all of the kernels take."""
    kernels = [x for x in chosen if isinstance(x, Kernel)]
    return next((x for x in DTYPES if all(k.takes(x) for k in kernels)), "float16")


def _gpu() -> Backend | None:
    try:
        return backend_named("cuda")
    except DeviceError:
        return None


def _device(device: str | Device, engine: Backend | None) -> tuple[Device, bool]:
    """The device of a name, and whether it is the one here."""
    if device == "auto":
        device = THIS if engine else "h100"
    if device == THIS:
        if engine is None:
            known = ", ".join(devices.DEVICES)
            raise Unsupported(f"there is no GPU here to measure; name a device: {known}")
        return measured_device(engine), True
    chosen = device if isinstance(device, Device) else devices.named(device)
    here = devices.known_as(engine.limits.device) if engine else None
    return chosen, chosen is here


def measured_device(engine: Backend) -> Device:
    """The device here, with the rates that large products and copies reach; remembered."""
    with_library = {x: peaks.product_rate(engine, x) for x in (*DTYPES, "tf32")}
    rates = {name: rate for name, rate in with_library.items() if rate}
    bandwidth = peaks.copy_rate(engine)
    if not bandwidth or "float32" not in rates:
        raise Unsupported(
            "the rates of this device are those of cuBLAS, which is not here: pip install "
            "'cupyfa[cublas]', or name a device of the table"
        )
    limits = engine.limits
    return Device(
        limits.device,
        limits.arch or "",
        limits.multiprocessors,
        limits.clock,
        tensor={x: rates[x] for x in rates if x not in ("float32", "float64")},
        plain={"float32": rates["float32"], "float64": rates.get("float64", math.nan)},
        bandwidth=bandwidth,
        source="measured: large products by cuBLAS, large copies",
    )


def _roof(
    computation: str | Kernel, operation: str, problem: Problem, device: Device, limits: Limits
) -> Roof:
    if isinstance(computation, str):
        precision = problem.precision or problem.dtype.name
        count = naive_bytes if computation == NAIVE else tiled_bytes
        on_tensor_cores = precision != "float32"
        total = count(operation, problem)
        return Roof(
            *(computation, operation, problem, device),
            *(total, total, precision, on_tensor_cores),
        )
    try:
        plan = planning.plan(computation, problem, limits)
    except Unsupported as error:
        return Roof(computation.name, operation, problem, device, note=str(error))
    moved, least, note = _moved(plan)
    return Roof(
        *(computation.name, operation, replace(plan.problem, d=problem.d, dv=problem.dv), device),
        *(moved, least, _precision(plan), uses_tensor_cores(plan)),
        note=note,
    )


def _with_measurements(
    rows: Sequence[Roof],
    p: Problem,
    kernels: Sequence[str | Kernel],
    engine: Backend,
    budget: float,
) -> list[Roof]:
    """The rows, those of kernels with what a benchmark of all of them finds."""
    able = {row.computation for row in rows if row.bytes}
    timed = {x.name: x for x in kernels if isinstance(x, Kernel) and x.name in able}
    if not timed:
        return list(rows)
    sizes = {x: getattr(p, x) for x in _SIZES}
    found = benchmark.bench(
        list(timed.values()), backend=engine, budget=budget, alone=True, dtype=p.dtype.name, **sizes
    )
    by_name = {row.kernel: row for row in found}
    return [replace(row, measured=by_name.get(row.computation)) for row in rows]
