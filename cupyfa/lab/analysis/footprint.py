"""The memory that attention needs: inputs, outputs, temporaries and peak, counted and measured."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from cupyfa.arrays.block_mask import readable
from cupyfa.errors import DeviceError, DeviceLost, Unsupported, warn
from cupyfa.lab.analysis.formulas import (
    NAIVE,
    TILED,
    common_operation,
    input_sizes,
    naive_bytes,
    naive_scratch,
    output_bytes,
    refuse_gradients,
    tiled_bytes,
)
from cupyfa.lab.analysis.nsight import TOOLS, profile
from cupyfa.lab.analysis.resources import gpu, limits_of
from cupyfa.lab.bench import sweeps
from cupyfa.lab.verify.case import Case
from cupyfa.ladder import LADDER
from cupyfa.ladder.kernel import Kernel, Matmul
from cupyfa.ladder.lookup import record_named
from cupyfa.numerics.shown import Rows, ShownRow
from cupyfa.planner.choose_kernel import can, plan, select
from cupyfa.planner.plan import Limits, Plan
from cupyfa.problem.problem import Problem
from cupyfa.runtime.arrays import readable_inputs
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.choose_backend import backend_named
from cupyfa.runtime.environment import Progress, no_progress
from cupyfa.runtime.launcher import run
from cupyfa.runtime.workspace import allocated

_MB = 1e6


@dataclass(frozen=True, repr=False)
class Footprint(ShownRow):
    """The bytes that one computation holds and moves; None where they are not known.

    computation: "naive", "tiled" (see formulas.py) or a kernel's name.
    inputs, outputs, scratch: held at the same time; scratch is temporary memory.
    moved: read from and written to memory, by formula; None for kernels.
    peak: the most memory that was allocated on the GPU, inputs and outputs included.
    dram: read from and written to DRAM, measured by Nsight Compute.
    note: why figures are missing, or what they leave out.
    """

    computation: str
    operation: str
    problem: Problem
    device: str
    constants: Mapping[str, int]
    inputs: int | None = None
    outputs: int | None = None
    scratch: int | None = None
    moved: int | None = None
    peak: int | None = None
    dram: float | None = None
    note: str = ""

    def row(self) -> dict[str, Any]:
        """One row of a table, in MB of 10^6 bytes."""
        sizes = ("inputs", "outputs", "scratch", "moved", "peak")
        return {
            "computation": self.computation,
            "device": self.device,
            **self.problem.row(),
            "tile": " ".join(f"{name}={value}" for name, value in self.constants.items()),
            **{f"{name}_MB": _mb(getattr(self, name)) for name in sizes},
            "DRAM_MB": _mb(self.dram),
            "note": self.note,
        }


def memory(
    kernels: str | Kernel | Sequence[str | Kernel] | None = None,
    *,
    backward: bool = False,
    backend: str | Backend = "auto",
    ncu: bool = True,
    progress: Progress = no_progress,
    **sizes: Any,
) -> list[Footprint]:
    """Counts the bytes that naive attention, tiled attention and kernels hold, in this order.

    ``kernels`` are names, ``script.py:name``, "auto" or records of one operation; by default those
    of the ladder that can do the problem, of the forward pass or with ``backward`` of the
    gradients. ``sizes`` are those of ``Problem.of_sizes``; the defaults are those of ``bench``.

    Counting needs no GPU: without one the plans are for an H100. On a GPU each kernel also runs
    once to measure the peak of allocated memory, and once under Nsight Compute to measure DRAM
    traffic, if ``ncu`` is on the PATH and true as argument; not kernels with products of cuBLAS,
    which Nsight Compute does not see here. Raises ValueError or TypeError for arguments, and
    Unsupported if no kernel that was named can do the problem.
    """
    listed = [kernels] if isinstance(kernels, str | Kernel) else kernels or ()
    named = {
        x.name if isinstance(x, Kernel) else x: x if isinstance(x, Kernel) else record_named(x)
        for x in listed
        if x != "auto"
    }
    operation = common_operation(named.values(), backward)
    sweeps.refuse_foreign([operation], sizes)
    several = sweeps.problems(operation, sizes, *named.values())
    if len(several) != 1:
        raise ValueError(f"memory takes one problem; these sizes give {len(several)}")
    (problem,) = several
    if not listed:
        refuse_gradients(operation, several)
    on = gpu() if backend == "auto" else backend_named(backend)
    limits = on.limits if on else limits_of("90")
    if on and on.stream is None:  # the simulator has no memory to measure
        on = None
    if "auto" in listed:
        fastest = select("auto", operation, problem, limits)
        named[fastest.name] = fastest
    if named and not any(can(x, problem, limits) for x in named.values()):
        plan(next(iter(named.values())), problem, limits)  # raises the reason
    chosen = named or {x: k for x, k in LADDER[operation].items() if can(k, problem, limits)}
    rows = _by_formula(operation, problem, limits)
    counting = ncu and _can_count(on)
    for done, (name, kernel) in enumerate(chosen.items()):
        progress(done, len(chosen), kernel.name)
        row = _planned(kernel, operation, problem, limits)
        if row.scratch is not None and on is not None:
            row = _measured(row, on, kernel)
            if counting and not any(isinstance(x, Matmul) for x in kernel.launches):
                row, counting = _with_dram(row, name)
        rows.append(row)
    return Rows(rows)


def _by_formula(operation: str, p: Problem, limits: Limits) -> list[Footprint]:
    inputs = sum(input_sizes(operation, p).values())
    held = (inputs, output_bytes(operation, p), naive_scratch(operation, p))
    naive = Footprint(NAIVE, operation, p, limits.device, {}, *held, naive_bytes(operation, p))
    tiled = replace(naive, computation=TILED, scratch=0, moved=tiled_bytes(operation, p))
    rows = [naive, tiled]
    return rows[:1] if operation == "softmax" else rows


def _planned(kernel: Kernel, operation: str, p: Problem, limits: Limits) -> Footprint:
    try:
        made = plan(kernel, p, limits)
    except Unsupported as error:
        reason = str(error).partition("; kernels that can")[0]
        note = reason.removeprefix(f"{kernel.name} cannot do {p}: ")
        return Footprint(kernel.name, operation, p, limits.device, {}, note=note)
    padded = (made.problem.d, made.problem.dv) != (p.d, p.dv)
    inputs = made.operation.inputs_of(made.problem).values()
    return Footprint(
        kernel.name,
        operation,
        replace(made.problem, d=p.d, dv=p.dv),
        limits.device,
        dict(made.constants),
        sum(x.bytes(made.problem) for x in inputs),
        sum(prod(shape) * dtype.itemsize for shape, dtype in made.outputs.values()),
        made.scratch_bytes,
        note="an empty head dimension is computed as one column of zeros" if padded else "",
    )


def _measured(row: Footprint, backend: Backend, kernel: Kernel) -> Footprint:
    made = plan(kernel, row.problem, backend.limits)
    try:
        with backend.working_on(None):
            return replace(row, peak=backend.peak(lambda: _run(backend, made)))
    except DeviceLost:
        raise
    except (Unsupported, DeviceError, MemoryError) as error:
        return replace(row, note=str(error))


def _run(backend: Backend, plan: Plan) -> None:
    p = plan.problem
    zeros = {
        name: np.zeros(x.shape(p), x.dtype(p)) for name, x in plan.operation.inputs_of(p).items()
    }
    inputs = {name: backend.upload(x) for name, x in readable(backend, plan, zeros).items()}
    outputs = {name: allocated(backend, plan, name) for name in plan.outputs}
    run(backend, plan, readable_inputs(plan, inputs), outputs)


def _can_count(backend: Backend | None) -> bool:
    if backend is None:
        return False
    if shutil.which("ncu"):
        return True
    warn(f"ncu is not on the PATH, so DRAM traffic is not measured; install {TOOLS['ncu']}")
    return False


def _with_dram(row: Footprint, name: str) -> tuple[Footprint, bool]:
    """The row with the DRAM traffic, and whether Nsight Compute can measure more rows."""
    try:
        counters = profile(name, Case(row.operation, row.problem))
    except (Unsupported, ValueError) as error:
        warn(f"DRAM traffic is not measured: {error}")
        return row, False
    milliseconds, rates = (
        [x.value for x in counters if x.counter == counter and isinstance(x.value, float)]
        for counter in ("duration", "DRAM traffic")
    )
    if not rates or len(rates) != len(milliseconds):
        return row, True
    return replace(row, dram=sum(ms * rate * 1e6 for ms, rate in zip(milliseconds, rates))), True


def _mb(size: float | None) -> float | None:
    return None if size is None else size / _MB
