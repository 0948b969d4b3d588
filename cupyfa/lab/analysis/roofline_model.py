"""The roofline model of attention: which resource bounds a computation, and its minimum time.

A computation performs floating-point operations and exponentials, and moves bytes between device
memory and the chip. Each of these three costs takes at least its count divided by the device's
rate. The costs may overlap, so the largest of the three times is the minimum time.

Naive attention stores the scores S and the probabilities P in memory, and dP and dS for gradients.
Tiled attention (FlashAttention; Dao et al., 2022, arXiv:2205.14135) keeps them on the chip: at best
every input is read once and every output is written once. Scale and mask are applied where scores
are computed and cause no traffic. The log-sum-exp that forward kernels return is not counted.

Roofline: Williams, Waterman and Patterson, 2009, doi:10.1145/1498765.1498785.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from cupyfa.errors import Unsupported
from cupyfa.lab.analysis.resources import gpu, limits_of
from cupyfa.lab.bench import peaks, sweeps
from cupyfa.lab.bench.peaks import Device
from cupyfa.lab.bench.results import Measurement, Results
from cupyfa.lab.report.tables import drop, drop_followers, short_row, table_or_fields, three_digits
from cupyfa.ladder import LADDER
from cupyfa.ladder.kernel import Kernel, Matmul
from cupyfa.ladder.lookup import record_named
from cupyfa.ladder.operations import OPERATIONS, visible_scores
from cupyfa.numerics.shown import Rows, ShownRow
from cupyfa.planner.choose_kernel import plan, select
from cupyfa.planner.plan import Limits, Plan
from cupyfa.planner.source import headers
from cupyfa.problem import shape_language
from cupyfa.problem.dtypes import DTYPES
from cupyfa.problem.lengths import lengths_of
from cupyfa.problem.problem import Problem
from cupyfa.problem.wrt import WRT, names_of
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.environment import Progress, no_progress

NAIVE, TILED = "naive", "tiled"
# Number of times that an M x N array of scores is read or written per query head. Forward: S and P
# are each written and read once. Backward: dP and dS as well, and P and dS are read twice. Tangent:
# S_dot and P * S_dot as well, and P is read three times.
_PASSES = {"forward": 4, "backward": 10, "tangent": 10}
THIS = "this"
_COSTS = COMPUTE, MEMORY, EXPONENTIALS = "compute", "memory", "exponentials"
_DETAILS = tuple(f"{cost}_ms" for cost in _COSTS)
_SPARE = ("GFLOP", "measured_TFLOP/s", "balance", "MB")  # columns dropped in narrow terminals
_OF_PARTS = 3  # float16 products per product of split float32 operands
_TENSOR_HEADERS = {"mma.cuh", "mma_f64.cuh", "wmma.cuh", "wgmma.cuh"}


@dataclass(frozen=True, repr=False)
class Roof(ShownRow):
    """The costs of a computation on a device, and its attainable performance.

    computation: "naive", "tiled" or a kernel's name.
    bytes: traffic between memory and chip; each launch of a kernel moves each of its arrays once.
    precision: the dtype of the matrix products' operands.
    parts: the dtype of the hi and lo halves of split operands; None if operands are not split.
    measured: a benchmark's measurement of the computation, if any.
    note: the reason if a kernel does not support the problem; tables then print no figures.
    """

    computation: str
    operation: str
    problem: Problem
    device: Device
    bytes: int = 0
    precision: str = ""
    on_tensor_cores: bool = False
    measured: Measurement | None = None
    note: str = ""
    parts: str | None = None

    @property
    def flops(self) -> int:
        """Floating-point operations for the visible scores; a multiply-add counts as 2."""
        return OPERATIONS[self.operation].flops(self.problem)

    @property
    def exponentials(self) -> int:
        """Number of exponentials: one per visible score."""
        return self.problem.batch * self.problem.heads * visible_scores(self.problem)

    @property
    def peak(self) -> float:
        """Peak TFLOP/s of the units that compute the matrix products."""
        if self.parts:
            return self.device.peak(self.parts, tensor=self.on_tensor_cores) / _OF_PARTS
        precision = self.precision or self.problem.dtype.name
        return self.device.peak(precision, tensor=self.on_tensor_cores)

    @property
    def balance(self) -> float:
        """FLOP per byte below which the computation is memory-bound."""
        return 1e3 * self.peak / self.device.bandwidth

    @property
    def intensity(self) -> float | None:
        return self.flops / self.bytes if self.bytes else None

    @property
    def times(self) -> dict[str, float]:
        """Minimum milliseconds for each of the three costs.

        Exponentials are omitted for float64, for which GPUs have no instruction.
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
        return max(self.times, key=lambda x: self.times[x]) if self.bytes else None

    @property
    def time(self) -> float | None:
        """Minimum milliseconds: the maximum of ``times``."""
        return max(self.times.values()) if self.bytes else None

    @property
    def tflops(self) -> float | None:
        return self.flops / self.time / 1e9 if self.time else None

    @property
    def percent(self) -> float | None:
        reached = self.measured and self.measured.time
        return 100 * self.time / reached if self.time and reached else None

    def row(self) -> dict[str, Any]:
        times = self.times if self.bytes else {}
        return {
            "computation": self.computation,
            "device": self.device.name,
            **{name: x for name, x in self.problem.row().items() if name != "scale"},
            "balance": self.balance if self.bytes else None,
            "GFLOP": self.flops / 1e9,
            "MB": self.bytes / 1e6 if self.bytes else None,
            "FLOP/B": self.intensity,
            **{f"{cost}_ms": times.get(cost) for cost in _COSTS},
            "bound_by": self.bound,
            "ms": self.time,
            "TFLOP/s": self.tflops,
            "measured_ms": self.measured.time if self.measured else None,
            "measured_TFLOP/s": self.measured.tflops if self.measured else None,
            "%_of_roof": self.percent,
            "note": self.note or (self.measured.note if self.measured else ""),
        }


def roofline(
    kernels: str | Kernel | Sequence[str | Kernel] = (),
    *,
    device: str | Device = "auto",
    backward: bool = False,
    progress: Progress = no_progress,
    **sizes: Any,
) -> list[Roof]:
    """Computes the roofline of attention on a device: one Roof per problem and computation.

    ``kernels`` are "naive" (S and P are stored in memory), "tiled" (every input is read once, the
    output is written once), names of kernels, "auto", ``script.py:name`` or records. The default
    is "naive", "tiled" and every rung that supports the problem.
    ``device`` is a name from ``peaks.DEVICES``, a Device, or "this": this machine's GPU with the
    measured rates of large products and copies. "auto" is "this" if there is a GPU, else "h100".
    ``sizes`` are the sizes that ``sweeps.problems`` accepts, each a single value or a list.

    Raises ValueError for invalid arguments, and Unsupported if ``device`` is "this" but there is no
    GPU, or if none of the named kernels supports any of the problems.
    """
    chosen = _named([kernels] if isinstance(kernels, str | Kernel) else kernels)
    records = [x for x in chosen if isinstance(x, Kernel)]
    operation = _common_operation(records, backward)
    if operation == "softmax":
        names = ", ".join(x.name for x in records)
        raise ValueError(
            f"{names} computes softmax; a roofline requires kernels for attention or its gradients"
        )
    sweeps.refuse_foreign([operation], sizes)
    problems = sweeps.problems(operation, sizes, *records)
    given = next((p.wrt for p in problems if p.wrt), ())
    if given and operation != "backward" and all(x in (NAIVE, TILED) for x in chosen):
        raise ValueError(
            f"wrt is {','.join(given)}, but the forward pass computes no gradients; pass "
            "backward=True or omit wrt"
        )
    backend = gpu()
    target, is_here = _device(device, backend)
    limits = backend.limits if backend and is_here else _limits(target)
    rows: list[Roof] = []
    for done, problem in enumerate(problems):
        progress(done, len(problems), str(problem))
        rungs = [x for x in LADDER[operation].values() if x.takes(problem.dtype.name)]
        wanted = [select(x, operation, problem, limits) if x == "auto" else x for x in chosen]
        computations = wanted or [NAIVE, TILED, *rungs]
        found = [_roof(x, operation, problem, target, limits) for x in computations]
        rows += [row for row in found if chosen or not row.note]
    if rows and all(row.note for row in rows):
        raise Unsupported(rows[0].note)
    return Rows(rows)


def measured_roofs(
    results: Results,
    kernels: Sequence[str | Kernel] = (),
    *,
    device: str | Device = "auto",
    **sizes: Any,
) -> list[Roof]:
    """Returns a Roof for each row of a benchmark, after "naive" and "tiled" for each problem.

    ``kernels`` and ``sizes`` select rows, as in ``roofline``. ``device`` defaults to
    the device named in the results. Kernels of other libraries are assumed to move as many bytes
    as tiled attention.

    Raises ValueError if no row is selected, if the simulator measured the times, or if no data
    sheet of the device is known.
    """
    if results.environment.get("backend") == "simulator":
        raise ValueError(
            "a roofline needs times of a GPU, but the results are simulator times; measure on a GPU"
        )
    target = _device_of(results) if device == "auto" else _device(device, gpu())[0]
    limits, chosen = _limits(target), _named(kernels)
    asked = [x for x in chosen if x not in (NAIVE, TILED)]
    given = {x.name: x for x in asked if isinstance(x, Kernel)}

    def is_asked_for(row: Measurement) -> bool:
        about = row.operation, row.problem
        names = [x.name if isinstance(x, Kernel) else select(x, *about, limits).name for x in asked]
        return row.kernel in names or not asked

    rows = [row for row in results.rows if row.operation != "softmax" and _has(row, sizes)]
    rows = [row for row in rows if is_asked_for(row)]
    if not rows:
        found = ", ".join(dict.fromkeys(str(row.problem) for row in results.rows))
        raise ValueError(
            f"no measurement matches these kernels and sizes; measured problems: {found}"
        )
    problems = dict.fromkeys((row.operation, row.problem) for row in rows)
    bounds = [x for x in (NAIVE, TILED) if x in chosen or not chosen]
    roofs = [_roof(x, *about, target, limits) for about in problems for x in bounds]
    for row in rows if asked or not chosen else []:
        kernel = given.get(row.kernel) or LADDER[row.operation].get(row.kernel) or TILED
        roof = _roof(kernel, row.operation, row.problem, target, limits, **row.constants)
        roofs.append(replace(roof, computation=row.kernel, measured=row))
    return roofs


def _named(kernels: Sequence[str | Kernel]) -> list[str | Kernel]:
    """Replaces kernel names with records, except "naive", "tiled" and "auto"."""
    words = (NAIVE, TILED, "auto")
    return [x if isinstance(x, Kernel) or x in words else record_named(x) for x in kernels]


def _has(row: Measurement, sizes: Mapping[str, Any]) -> bool:
    """Returns whether the problem of a row has these sizes and options.

    A list matches if it contains the problem's value; None matches any value.
    """
    p = row.problem
    return all(
        value is None
        or any(_has_one(p, name, x) for x in (value if isinstance(value, list) else [value]))
        for name, value in sizes.items()
    )


def _has_one(p: Problem, name: str, value: Any) -> bool:
    """Returns whether the problem's size, option or array form called ``name`` is ``value``."""
    if name == WRT:
        return set(names_of(value)) - set("qkv") == set(p.wrt)
    if name == shape_language.LENGTHS_OF:
        return p.lengths == lengths_of(value)
    if name in shape_language.NAMES and name != shape_language.BLOCK_MASK:
        asked = shape_language.operands({name: value}, p.of_scores, p.dtype.name)
        return set(asked) <= {replace(x, gradient=False) for x in p.operands}
    return bool({**vars(p), "dtype": p.dtype.name, **vars(p.options)}[name] == value)


def _device_of(results: Results) -> Device:
    """Returns the device named in results, with data-sheet rates or rates measured here."""
    name, backend = results.environment.get("device", ""), gpu()
    found = peaks.known_as(name)
    if found is None and backend and backend.limits.device == name:
        found = measured_device(backend)
    if found is None:
        known = ", ".join(peaks.DEVICES)
        raise ValueError(f"the peak rates of device {name!r} are unknown; choose a device: {known}")
    return found


def _limits(device: Device) -> Limits:
    limits = limits_of(device.arch)
    return replace(limits, device=device.name, multiprocessors=device.multiprocessors)


def _common_operation(kernels: Iterable[Kernel], backward: bool) -> str:
    """Returns the operation that all kernels share, or "forward" if there are no kernels.

    With ``backward`` it must be "backward". Raises ValueError if the operations differ."""
    found = {kernel.operation for kernel in kernels} | ({"backward"} if backward else set())
    if len(found) > 1:
        names = ", ".join(f"{kernel.name} computes {kernel.operation}" for kernel in kernels)
        wanted = "gradients" if backward else "the same operation"
        raise ValueError(f"all kernels must compute {wanted}, but {names}")
    return found.pop() if found else "forward"


def _input_sizes(operation: str, p: Problem) -> dict[str, int]:
    return {name: x.bytes(p) for name, x in OPERATIONS[operation].inputs_of(p).items()}


def tiled_bytes(operation: str, p: Problem) -> int:
    """Counts the bytes moved if each input is read once and each output but lse is written once."""
    outputs = OPERATIONS[operation].outputs_of(p).items()
    written = sum(x.bytes(p) for name, x in outputs if name != "lse")
    return sum(_input_sizes(operation, p).values()) + written


def naive_bytes(operation: str, p: Problem) -> int:
    """Counts the bytes moved if the score arrays are stored in memory as well."""
    scores = p.heads * p.pairs * p.itemsize
    return tiled_bytes(operation, p) + _PASSES[operation] * scores


def planned_bytes(plan: Plan) -> int:
    """Counts the bytes moved if each launch and each product moves each of its arrays once.

    In rounds over heads, it moves the heads of its round.
    """
    sizes = _input_sizes(plan.kernel.operation, plan.problem)
    sizes |= {name: plan.stored_bytes(name) for name in (*plan.outputs, *plan.scratch)}
    moved = 0
    for step in plan.steps:
        if isinstance(step, Matmul):
            names = set(step.names)
        else:
            names = {name for name, _ in step.launch.arrays}
            names |= {name for x in step.arguments for name, _ in x.arrays}  # captured arrays
        parts = {name: _part(plan.arrays[name][0], x) for name, x in step.slices.items()}
        moved += sum(round(sizes.get(name, 0) * parts.get(name, 1)) for name in names)
    return moved


def _part(shape: tuple[int, ...], index: tuple[slice, ...]) -> Fraction:
    """Returns the fraction of an array's elements that an index selects."""
    array = np.broadcast_to(False, shape)
    return Fraction(array[index].size, max(array.size, 1))


def uses_tensor_cores(plan: Plan) -> bool:
    """Returns whether tensor cores compute the products, in the kernel or in cuBLAS."""
    if any(isinstance(step, Matmul) for step in plan.steps):
        return (plan.rounding or plan.problem.dtype.name) != "float32"
    return any(_TENSOR_HEADERS & headers(launch) for launch in plan.launches)


def _device(device: str | Device, backend: Backend | None) -> tuple[Device, bool]:
    """Returns the named device, and whether it is this machine's GPU."""
    if device == "auto":
        device = THIS if backend else "h100"
    if device == THIS:
        if backend is None:
            known = ", ".join(peaks.DEVICES)
            raise Unsupported(f"this machine has no GPU to measure; choose a device: {known}")
        return measured_device(backend), True
    chosen = device if isinstance(device, Device) else peaks.named(device)
    here = peaks.known_as(backend.limits.device) if backend else None
    return chosen, chosen is here


def measured_device(backend: Backend) -> Device:
    """Returns this machine's GPU with the measured rates of large products and copies.

    The rates are cached on disk, so they are measured only once.
    """
    measured = {x: peaks.product_rate(backend, x) for x in (*DTYPES, "tf32")}
    rates = {name: rate for name, rate in measured.items() if rate}
    bandwidth = peaks.copy_rate(backend)
    if not bandwidth or "float32" not in rates:
        why = backend.limits.no_matmul or "its products or copies cannot be timed"
        raise Unsupported(
            f"the peak rates of this GPU are unknown ({why}); choose a device: "
            f"{', '.join(peaks.DEVICES)}"
        )
    limits = backend.limits
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
    computation: str | Kernel,
    operation: str,
    p: Problem,
    device: Device,
    limits: Limits,
    **constants: int,
) -> Roof:
    if isinstance(computation, str):
        count = naive_bytes if computation == NAIVE else tiled_bytes
        precision = p.precision or p.dtype.name
        plain = precision == "float32"
        # Products of split float32 on tensor cores may be faster than FFMA on CUDA cores.
        of_parts = device.peak("float16", tensor=True) / _OF_PARTS
        parts_pay = of_parts > device.peak("float32", tensor=False)
        parts = "float16" if plain and parts_pay else None
        about = count(operation, p), precision, not plain or parts is not None
        return Roof(computation, operation, p, device, *about, parts=parts)
    try:
        made = plan(computation, p, limits, **constants)
    except Unsupported as error:
        return Roof(computation.name, operation, p, device, note=str(error))
    problem = replace(made.problem, d=p.d, dv=p.dv)
    about = planned_bytes(made), made.rounding or p.dtype.name, uses_tensor_cores(made)
    return Roof(computation.name, operation, problem, device, *about, parts=made.kernel.parts)


def roofs(rows: Sequence[Roof]) -> str:
    """Renders a table with estimates rounded to three digits, followed by notes.

    Values that are equal in all rows are printed once, above the table.
    """
    table = [{c: _shown(x) for c, x in short_row(row.row()).items()} for row in rows]
    one_M = len({row["M"] for row in table}) == 1  # if so, M and N are printed above the table
    drop_followers(table, *(["N"] if one_M else []))
    notes = [f"note: {x['note']}" for x in table if x["note"]]
    drop(table, "note", *_DETAILS)
    shown = table_or_fields(table, spare=_SPARE)
    return "\n".join([shown, f"rates: {rows[0].device.source}", *notes])


def _shown(value: Any) -> Any:
    rounded = three_digits(value)
    return int(rounded) if isinstance(value, float) and rounded >= 1000 else rounded
