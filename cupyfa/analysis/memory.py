"""What computations of attention hold in memory and move through it, counted and measured."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyfa.analysis import profile as profiling
from cupyfa.analysis import resources as compiling
from cupyfa.analysis import traffic
from cupyfa.analysis.traffic import NAIVE, TILED, Step
from cupyfa.bench import sweeps
from cupyfa.errors import DeviceError, DeviceLost, Unsupported
from cupyfa.ladder import LADDER
from cupyfa.ladder import lookup as records
from cupyfa.ladder.kernel import Kernel, Matmul
from cupyfa.operations import OPERATIONS
from cupyfa.planner import select as planning
from cupyfa.planner.plan import Limits, Plan
from cupyfa.problem import Problem
from cupyfa.runtime import backend as backends
from cupyfa.runtime.arrays import readable_inputs
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.environment import Progress, no_progress
from cupyfa.runtime.select import AT_THE_CALLER, backend_named
from cupyfa.verify.case import Case

_MB = 1e6


@dataclass(frozen=True)
class Footprint:
    """The bytes that one computation holds and moves; None for what is not known.

    computation: "naive" (as it is written down), "tiled" (the algorithm of FlashAttention in the
    device's shared memory), or a kernel. inputs, outputs and scratch are held at the same time.
    steps: what is moved, None if the record does not tell. least: what must move in any case.
    peak: the most that was allocated on the GPU, with inputs and outputs. dram: what Nsight Compute
    saw the memory move. note: why there is no more to say.
    """

    computation: str
    operation: str
    problem: Problem
    device: str
    constants: Mapping[str, int]
    inputs: int | None = None
    outputs: int | None = None
    scratch: int | None = None
    steps: tuple[Step, ...] | None = None
    peak: int | None = None
    dram: float | None = None
    note: str = ""

    @property
    def least(self) -> int:
        """Bytes of every input, read once, and of every output, written once."""
        return OPERATIONS[self.operation].bytes(self.problem)

    def row(self) -> dict[str, Any]:
        """As a row of a table, in MB of 10^6 bytes."""
        steps = self.steps
        return {
            "computation": self.computation,
            "tile": " ".join(f"{name}={value}" for name, value in self.constants.items()),
            "inputs_MB": _mb(self.inputs),
            "outputs_MB": _mb(self.outputs),
            "scratch_MB": _mb(self.scratch),
            "read_MB": _mb(sum(x.read for x in steps)) if steps is not None else None,
            "written_MB": _mb(sum(x.written for x in steps)) if steps is not None else None,
            "x_least": _of(traffic.moved(steps), self.least) if steps is not None else None,
            "peak_MB": _mb(self.peak),
            "DRAM_MB": _mb(self.dram),
            "note": self.note,
        }

    def step_rows(self) -> list[dict[str, Any]]:
        """A row for each step, and what it moves of which array."""
        return [
            {
                "computation": self.computation,
                "step": step.name,
                "read_MB": _mb(step.read),
                "written_MB": _mb(step.written),
                "reads": _listed(step.reads),
                "writes": _listed(step.writes),
            }
            for step in self.steps or ()
        ]


def memory(
    kernels: str | Kernel | Sequence[str | Kernel] | None = None,
    *,
    backward: bool = False,
    backend: str | Backend = "auto",
    ncu: bool = True,
    progress: Progress = no_progress,
    **sizes: Any,
) -> list[Footprint]:
    """Counts the bytes that attention holds and moves: as it is written down, in tiles, by kernel.

    ``kernels`` are names, ``script.py:name`` or records of one operation; by default those of
    the ladder that can do the problem, of the forward pass or with ``backward`` of the gradients.
    ``sizes`` are those of ``Problem.of_sizes``, a softmax's M and N; what is left out is as for
    ``bench``.

    What is counted follows from plans alone (see traffic.py) and needs no GPU: without one they are
    for an H100. On a GPU each kernel also runs once, to see how much memory is allocated, and again
    under Nsight Compute, if ``ncu`` is on the PATH and not declined, to see what the memory moves;
    cuBLAS's launches are not seen there, so kernels with products of cuBLAS have no such figure.

    Returns the naive and the tiled computation, then the kernels. Raises ValueError or TypeError
    for arguments, and Unsupported if no kernel that was named can do the problem.
    """
    chosen = _chosen(kernels, backward)
    operation = next(iter(chosen.values())).operation
    if foreign := ", ".join(sweeps.foreign(operation, sizes)):
        raise ValueError(f"{operation} has no {foreign}; leave it out")
    named = chosen.values() if kernels else ()
    usual = sweeps.usual_dtype(*named, precision=sizes.get("precision"))
    several = sweeps.problems(operation, {"dtype": usual, **_given(sizes)})
    if len(several) != 1:
        raise ValueError(f"memory is of one problem, and these sizes make {len(several)}")
    (problem,) = several
    engine, limits = _place(backend)
    if not kernels:
        chosen = {name: x for name, x in chosen.items() if planning.can(x, problem, limits)}
    elif not any(planning.can(x, problem, limits) for x in chosen.values()):
        planning.plan(next(iter(chosen.values())), problem, limits)  # which says why
    rows = _written_down(operation, problem, limits)
    seen = ncu and _can_count(engine)
    for done, (name, kernel) in enumerate(chosen.items()):
        progress(done, len(chosen), kernel.name)
        row = _counted(kernel, operation, problem, limits)
        if row.scratch is not None and engine is not None:
            row = _measured(row, engine, kernel)
            if seen and not any(isinstance(x, Matmul) for x in kernel.launches):
                row, seen = _seen(row, name)
        rows.append(row)
    return rows


def _given(sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sizes.items() if value is not None}


def _chosen(
    kernels: str | Kernel | Sequence[str | Kernel] | None, backward: bool
) -> dict[str, Kernel]:
    """The records by the names that they were given by, or those of the ladder."""
    if not kernels:
        return dict(LADDER["backward" if backward else "forward"])
    listed = [kernels] if isinstance(kernels, str | Kernel) else list(kernels)
    found = {
        x.name if isinstance(x, Kernel) else x: (
            x if isinstance(x, Kernel) else records.record_named(x)
        )
        for x in listed
    }
    told = ", ".join(f"{name} ({x.operation})" for name, x in found.items())
    operations = {x.operation for x in found.values()}
    if len(operations) > 1:
        raise ValueError(f"memory is of one operation, and there are {told}; name them apart")
    if backward and operations != {"backward"}:
        raise ValueError(
            f"with backward, memory is of gradients, and {told} is not; name some of "
            f"{', '.join(LADDER['backward'])}, or leave backward out"
        )
    return found


def _place(backend: str | Backend) -> tuple[Backend | None, Limits]:
    """The GPU, if one is there or named, and the limits to plan for."""
    if backend == "auto":
        try:
            backend = backend_named("cuda")
        except DeviceError:
            return None, compiling.limits_of("90")
    engine = backend_named(backend)
    return (engine if engine.stream is not None else None), engine.limits


def _written_down(operation: str, p: Problem, limits: Limits) -> list[Footprint]:
    """The computations that are no kernel's."""
    inputs, outputs = traffic.inputs(operation, p), traffic.outputs(operation, p)
    steps = traffic.naive(operation, p)
    made = {name: size for step in steps for name, size in step.writes.items()}
    scratch = sum(size for name, size in made.items() if name not in inputs | outputs)
    held = sum(inputs.values()), sum(outputs.values()), scratch
    naive = Footprint(NAIVE, operation, p, limits.device, {}, *held, steps)
    if operation == "softmax":
        return [naive]
    tiles = traffic.tiled(operation, p, limits.shared_bytes)
    tiled = replace(naive, computation=TILED, scratch=_rows_of(operation, p), steps=tiles)
    return [naive, tiled]


def _rows_of(operation: str, p: Problem) -> int:
    """What the tiled computation keeps of rows: maxima and sums, or for gradients nothing."""
    rows = p.batch * p.heads * p.M * p.dtype.sums.itemsize
    return 2 * rows if operation == "forward" else 0


def _counted(kernel: Kernel, operation: str, p: Problem, limits: Limits) -> Footprint:
    """What follows from the plan of a kernel."""
    try:
        plan = planning.plan(kernel, p, limits)
    except Unsupported as error:
        reason = str(error).partition("; kernels that can")[0]
        note = reason.removeprefix(f"{kernel.name} cannot do {p}: ")
        return Footprint(kernel.name, operation, p, limits.device, {}, note=note)
    inputs, outputs, scratch = traffic.held(plan)
    steps = traffic.of(plan)
    padded = (plan.problem.d, plan.problem.dv) != (p.d, p.dv)
    notes = [
        "no columns count as one, of zeros" if padded else "",
        "its record names no Br and Bc: what it moves is unknown" if steps is None else "",
    ]
    return Footprint(
        kernel.name,
        operation,
        replace(plan.problem, d=p.d, dv=p.dv),
        limits.device,
        dict(plan.constants),
        inputs,
        outputs,
        scratch,
        steps,
        note="; ".join(filter(None, notes)),
    )


def _measured(row: Footprint, engine: Backend, kernel: Kernel) -> Footprint:
    """The row with the most memory that is allocated while the kernel runs."""
    plan = planning.plan(kernel, row.problem, engine.limits)
    try:
        with engine.working_on(None):
            return replace(row, peak=engine.peak(lambda: _run(engine, plan)))
    except DeviceLost:
        raise
    except (Unsupported, DeviceError, MemoryError) as error:
        return replace(row, note=str(error))


def _run(engine: Backend, plan: Plan) -> None:
    """Runs a plan on zeros."""
    p, operation = plan.problem, OPERATIONS[plan.kernel.operation]
    kinds = {"scalar": p.dtype.numpy, "real": p.dtype.sums}
    zeros = {
        name: np.zeros(p.shape(axes), kinds[operation.input_kind(name)])
        for name, axes in operation.inputs.items()
    }
    inputs = {name: engine.upload(x) for name, x in readable_inputs(plan, zeros).items()}
    outputs = {name: backends.allocated(engine, plan, name) for name in plan.outputs}
    backends.run(engine, plan, readable_inputs(plan, inputs), outputs)


def _can_count(engine: Backend | None) -> bool:
    """Whether Nsight Compute is at hand; if there is a GPU without it, says so."""
    if engine is None:
        return False
    if shutil.which("ncu"):
        return True
    warnings.warn(
        "ncu is not on the PATH, so what the memory itself moves is not seen; it is part of "
        f"{profiling.TOOLS['ncu']}",
        **AT_THE_CALLER,
    )
    return False


def _seen(row: Footprint, name: str) -> tuple[Footprint, bool]:
    """The row with what Nsight Compute saw, and whether it can see more."""
    try:
        counters = profiling.profile(name, Case(row.operation, row.problem))
    except (Unsupported, ValueError) as error:
        warnings.warn(f"Nsight Compute saw nothing: {error}", **AT_THE_CALLER)
        return row, False
    figures = {"duration": [], "DRAM traffic": []}  # type: dict[str, list[float]]
    for counter in counters:
        if counter.counter in figures and isinstance(counter.value, float):
            figures[counter.counter].append(counter.value)
    milliseconds, rates = figures.values()
    if not rates or len(rates) != len(milliseconds):
        return row, True
    return replace(row, dram=sum(ms * rate * 1e6 for ms, rate in zip(milliseconds, rates))), True


def _mb(size: float | None) -> float | None:
    return None if size is None else _short(size / _MB)


def _of(moved: int, least: int) -> float | None:
    return _short(moved / least) if least else None


def _short(value: float) -> float:
    """Three digits, or all before the point."""
    return round(value) if value >= 100 else float(f"{value:.3g}")


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_short(size / _MB):g}" for name, size in sizes.items() if size)
