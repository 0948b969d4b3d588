"""What NVIDIA's profilers see of one kernel: its counters, against what its record predicts.

Nsight Compute (``ncu``) reads the counters of each launch, Nsight Systems (``nsys``) tells how long
everything took. Both watch a program: here ``cupyfa profile`` itself, which then only runs the
kernel twice, once to warm up and once to be looked at.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cupyfa.bench import sweeps, timing
from cupyfa.errors import DeviceError, Unsupported
from cupyfa.ladder import lookup as records
from cupyfa.ladder.kernel import Kernel, Launch
from cupyfa.planner import select as planning
from cupyfa.planner import source as sources
from cupyfa.runtime import backend as backends
from cupyfa.runtime.arrays import readable_inputs
from cupyfa.runtime.environment import Progress, no_progress
from cupyfa.runtime.select import backend_named
from cupyfa.verify.case import Case

TOOLS = {
    "ncu": "Nsight Compute, which comes with the CUDA toolkit and from "
    "https://developer.nvidia.com/nsight-compute",
    "nsys": "Nsight Systems, which comes with the CUDA toolkit and from "
    "https://developer.nvidia.com/nsight-systems",
}


@dataclass(frozen=True)
class Counter:
    """One figure of one launch, and what the record predicts; None where it is not known."""

    launch: str
    counter: str
    value: float | str | None
    unit: str
    predicted: str | None

    def row(self) -> dict[str, Any]:
        """As a row of a table; a figure that is not known has the unit n/a."""
        return asdict(self) | ({"unit": "n/a"} if self.value is None else {})


@dataclass(frozen=True)
class KernelTime:
    """How often a kernel ran, and the milliseconds of one run and of all."""

    kernel: str
    launches: int
    median_ms: float
    total_ms: float

    def row(self) -> dict[str, Any]:
        """As a row of a table."""
        return asdict(self)


def profile(
    kernel: str,
    case: Case | None = None,
    *,
    progress: Progress = no_progress,
    **constants: int,
) -> list[Counter]:
    """What Nsight Compute counts in each launch of a kernel, beside what its record predicts.

    ``kernel`` is a name of the ladder or ``script.py:name``, ``case`` the problem and its inputs:
    unless given, batch 4, heads 16, M = N = 2048, d = 64 in float32 (a softmax: 16384 rows of
    4096), for which the records predict. ``constants`` fix the kernel's tile sizes. Percentages of
    units in a multiprocessor are of its active time, those of L2 and DRAM of the launch. cuBLAS's
    launches are left out.

    Raises ValueError for the arguments, Unsupported if the kernel cannot do the problem, if ncu is
    missing or may not read the counters, DeviceError if there is no GPU.
    """
    record, case = _checked("ncu", kernel, case, constants)
    progress(0, 1, f"ncu {record.name}")
    metrics = METRICS
    while True:
        said = _run(ncu_command(kernel, case, constants, metrics))
        unknown = re.search(r"Failed to find metric (?:regex:\^?)?(\w+)", said)
        known = tuple(x for x in metrics if not (unknown and x.startswith(unknown[1])))
        if known == metrics or not known:
            break
        metrics = known  # ncu ends at the first name that it never heard of
    launches = read_ncu(said)
    if not launches:
        raise Unsupported(_refusal(said, record))
    progress(1, 1, f"ncu {record.name}")
    return counters(launches, record.predicts)


def timeline(
    kernel: str,
    case: Case | None = None,
    *,
    progress: Progress = no_progress,
    **constants: int,
) -> list[KernelTime]:
    """What Nsight Systems says of every kernel that ran, cuBLAS's too: a warm-up and one call.

    Before gradients of large problems that is also the forward kernel that left O and lse.
    Arguments and errors are those of ``profile``.
    """
    record, case = _checked("nsys", kernel, case, constants)
    progress(0, 1, f"nsys {record.name}")
    with tempfile.TemporaryDirectory() as folder:
        said = _run(nsys_command(kernel, case, constants, Path(folder) / "report"))
    kernels = read_nsys(said)
    if not kernels:
        raise Unsupported(_refusal(said, record))
    progress(1, 1, f"nsys {record.name}")
    return kernels


def standard(record: Kernel) -> Case:
    """The case that a record predicts for."""
    (usual,) = sweeps.problems(record.operation, {"dtype": sweeps.usual_dtype(record)})
    return Case(record.operation, usual)


def ncu_command(
    kernel: str, case: Case, constants: Mapping[str, int], metrics: Sequence[str] = ()
) -> list[str]:
    """The command line that has Nsight Compute count the kernel's own launches, after a warm-up."""
    steps = records.record_named(kernel).steps(case.problem)
    entries = [step.entry for step in steps if isinstance(step, Launch)]
    each = str(len(entries))
    return [
        *("ncu", "--kernel-name", f"regex:^({'|'.join(dict.fromkeys(entries))})$"),
        *("--launch-skip", each, "--launch-count", each),
        *("--clock-control", "none"),  # the clocks that a benchmark would have
        *("--csv", "--page", "raw", "--print-units", "base"),
        *("--metrics", ",".join(metrics or METRICS)),
        *_program(kernel, case, constants),
    ]


def nsys_command(
    kernel: str, case: Case, constants: Mapping[str, int], report: Path | None = None
) -> list[str]:
    """The command line that has Nsight Systems time everything, and write a ``report``."""
    name = str(report or f"cupyfa-{records.record_named(kernel).name}")
    return [
        *("nsys", "profile", "--stats=true", "--trace=cuda"),
        *("--force-overwrite=true", f"--output={name}"),
        *_program(kernel, case, constants),
    ]


def launch_twice(kernel: str, case: Case, constants: Mapping[str, int]) -> None:
    """What the profilers watch: a run to warm up and one more, with nothing else around them."""
    engine = backend_named("cuda")
    record = records.record_named(kernel)
    plan = planning.plan(record, case.problem, engine.limits, **constants)
    with engine.working_on(None):
        readable = readable_inputs(plan, case.inputs(engine))
        inputs = timing.placed(engine, readable, {})
        outputs = {name: backends.allocated(engine, plan, name) for name in plan.outputs}
        for _ in range(2):
            backends.run(engine, plan, inputs, outputs)
        engine.download(next(iter(outputs.values())))  # waits


def _program(kernel: str, case: Case, constants: Mapping[str, int]) -> list[str]:
    """The command line of ``launch_twice``."""
    installed = Path(__file__).resolve().parents[1] == sources.ROOT
    start = ["-m", "cupyfa"] if installed else [str(sources.ROOT / "cli.py")]
    fixed = [word for name, value in constants.items() for word in ("-c", f"{name}={value}")]
    return [sys.executable, *start, "profile", kernel, *case.options(), *fixed, "--once"]


def _checked(
    tool: str, kernel: str, case: Case | None, constants: Mapping[str, int]
) -> tuple[Kernel, Case]:
    """The record and the case; refuses here what would be hard to read from the profiler."""
    record = records.record_named(kernel)
    case = case or standard(record)
    if shutil.which(tool) is None:
        raise Unsupported(f"{tool} is not on the PATH; it is part of {TOOLS[tool]}")
    try:
        engine = backend_named("cuda")
    except DeviceError as error:
        reason = str(error).partition(";")[0]
        raise DeviceError(
            f"{reason}; profile where there is one: --print tells the commands"
        ) from None
    plan = planning.plan(record, case.problem, engine.limits, **constants)
    if not all(all(launch.grid) for launch in plan.launches):
        raise ValueError(f"{case.problem} has no rows, so nothing is launched; give sizes from 1")
    return record, case


def _run(command: Sequence[str]) -> str:
    """All that a profiler, and the program under it, say."""
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    ).stdout


# What a profiler says when it cannot, and what can be done.
_REMEDIES = {
    "ERR_NVGPUCTRPERM": "the driver keeps the counters for administrators (ERR_NVGPUCTRPERM); run "
    "it as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0: "
    "https://developer.nvidia.com/ERR_NVGPUCTRPERM",
    "Profiling is not supported on": "this ncu cannot profile this GPU; install the newest Nsight "
    "Compute from https://developer.nvidia.com/nsight-compute",
    "driver is not compatible": "this ncu is newer than the driver; install the Nsight Compute of "
    "the driver's CUDA version",
    "LibraryNotLoaded": "ncu cannot reach the counters (a container or virtual machine may hide "
    "them); cupyfa profile --tool nsys needs none",
}


def _refusal(said: str, record: Kernel) -> str:
    """Why there is no result, in one line."""
    for sign, remedy in _REMEDIES.items():
        if sign in said:
            return remedy
    lines = [x.strip() for x in said.splitlines() if re.match(r"cupyfa: |==ERROR==|\S*Error\b", x)]
    reason = re.sub(r"^(cupyfa:|==ERROR==)\s*", "", lines[0]) if lines else "it gave no reason"
    return f"the profiler saw no launch of {record.name}: {reason}"


def read_ncu(said: str) -> list[tuple[str, dict[str, float]]]:
    """(launch, metrics) of each row of ncu's ``--csv --page raw``: names, units, then launches.

    Whatever stands around the table is passed over, and so are metrics without a number.
    """
    rows = list(csv.reader(line for line in said.splitlines() if line.startswith('"')))
    heads = [i for i, row in enumerate(rows) if "Kernel Name" in row]
    if not heads:
        return []
    head, *launches = rows[heads[0] :]
    return [
        (row[head.index("Kernel Name")].partition("(")[0], _numbers(dict(zip(head, row))))
        for row in launches
        if len(row) == len(head) and row[0].isdigit()  # the row of units has no number
    ]


def _numbers(row: Mapping[str, str]) -> dict[str, float]:
    found = {}
    for name, value in row.items():
        try:
            found[name] = float(value.replace(",", ""))
        except ValueError:
            continue
    return found


def read_nsys(said: str) -> list[KernelTime]:
    """The table of kernels that ``nsys profile --stats=true`` prints among others."""
    lines = said.splitlines()
    heads = [i for i, line in enumerate(lines) if "Instances" in line and "Name" in line]
    if not heads:
        return []
    head = re.split(r"\s{2,}", lines[heads[0]].strip())
    kernels = []
    for line in lines[heads[0] + 1 :]:
        cells = dict(zip(head, re.split(r"\s{2,}", line.strip())))
        if not line.strip():
            break
        if len(cells) == len(head) and not line.strip().startswith("--"):
            numbers = _numbers(cells)
            middle = next(x for x in ("Med (ns)", "Avg (ns)", "Average") if x in numbers)
            kernels.append(
                KernelTime(
                    kernel=cells["Name"],
                    launches=int(numbers["Instances"]),
                    median_ms=numbers[middle] / 1e6,
                    total_ms=numbers["Total Time (ns)"] / 1e6,
                )
            )
    return kernels


# What is shown of a launch.

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class _Figure:
    """A figure made of metrics: their first that is known, times a scale, unless said otherwise."""

    unit: str
    metrics: tuple[str, ...]
    scale: float = 1.0
    of: Callable[[Metrics], float | str | None] | None = None

    def value(self, m: Metrics) -> float | str | None:
        if self.of is not None:
            return self.of(m)
        return next((m[name] * self.scale for name in self.metrics if name in m), None)


_ACTIVE, _ELAPSED = "avg.pct_of_peak_sustained_active", "avg.pct_of_peak_sustained_elapsed"
_REASONS = (
    *("barrier", "branch_resolving", "dispatch_stall", "drain", "imc_miss", "lg_throttle"),
    *("long_scoreboard", "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction"),
    *("not_selected", "short_scoreboard", "sleeping", "tex_throttle", "wait"),
)
_STALLS = {
    reason.replace("_", " "): f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"
    for reason in _REASONS
}
_LIMITS = {
    "warps": "launch__occupancy_limit_warps",
    "blocks": "launch__occupancy_limit_blocks",
    "registers": "launch__occupancy_limit_registers",
    "shared memory": "launch__occupancy_limit_shared_mem",
}
_WAVES = "launch__waves_per_multiprocessor"


def _per_request(conflicts: str, requests: str) -> _Figure:
    def ratio(m: Metrics) -> float | None:
        return m[conflicts] / m[requests] if conflicts in m and m.get(requests) else None

    return _Figure("per request", (conflicts, requests), of=ratio)


def _stalls(m: Metrics) -> str | None:
    """The three reasons that a warp waits for longest, in cycles for each instruction it issues."""
    waits = sorted(((m[x], reason) for reason, x in _STALLS.items() if x in m), reverse=True)
    return ", ".join(f"{reason} {cycles:.1f}" for cycles, reason in waits[:3]) or None


def _limited_by(m: Metrics) -> str | None:
    """What there is too little of for more blocks on a multiprocessor."""
    if m.get(_WAVES, 1.0) < 1:
        return f"grid, {m[_WAVES]:.2f} waves"
    limits = [(m[x], what) for what, x in _LIMITS.items() if x in m]
    if not limits:
        return None
    blocks, what = min(limits, key=lambda limit: limit[0])
    return f"{what}, {blocks:.0f} block{'s' * (blocks != 1)}"


def _bound_by(m: Metrics) -> str | None:
    """The unit that is in use for more than 60 % of the time, else what warps wait for."""
    busy = {name: _FIGURES[name].value(m) for name in _UNITS}
    shares = [(share, name) for name, share in busy.items() if isinstance(share, float)]
    if shares and max(shares)[0] >= 60:
        return max(shares)[1]
    waits = _stalls(m)
    return f"latency: {re.split(r' [0-9]', waits)[0]}" if waits else None


_UNITS = ("tensor cores", "FMA pipe", "issue slots", "shared memory", "L2", "DRAM")
_FIGURES = {
    "bound by": _Figure("", (), of=_bound_by),
    "duration": _Figure("ms", ("gpu__time_duration.sum",), scale=1e-6),
    "tensor cores": _Figure(
        "%",
        (
            f"sm__pipe_tensor_cycles_active.{_ACTIVE}",
            f"sm__pipe_tensor_op_hmma_cycles_active.{_ACTIVE}",
            f"sm__inst_executed_pipe_tensor.{_ACTIVE}",
        ),
    ),
    "FMA pipe": _Figure(
        "%", (f"sm__pipe_fma_cycles_active.{_ACTIVE}", f"sm__inst_executed_pipe_fma.{_ACTIVE}")
    ),
    "issue slots": _Figure("%", (f"sm__inst_issued.{_ACTIVE}",)),
    "stalls": _Figure("cycles", tuple(_STALLS.values()), of=_stalls),
    "SMs busy": _Figure("%", (f"sm__cycles_active.{_ELAPSED}",)),
    "occupancy": _Figure("%", (f"sm__warps_active.{_ACTIVE}",)),
    "limited by": _Figure("", (*_LIMITS.values(), _WAVES), of=_limited_by),
    "shared memory": _Figure("%", (f"l1tex__data_pipe_lsu_wavefronts_mem_shared.{_ACTIVE}",)),
    "load conflicts": _per_request(
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
        "smsp__inst_executed_op_shared_ld.sum",
    ),
    "store conflicts": _per_request(
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
        "smsp__inst_executed_op_shared_st.sum",
    ),
    "load sectors": _Figure(
        "per request", ("l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",)
    ),
    "store sectors": _Figure(
        "per request", ("l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio",)
    ),
    "L2": _Figure("%", (f"lts__t_sectors.{_ELAPSED}",)),
    "L2 traffic": _Figure("GB/s", ("lts__t_bytes.sum.per_second",), scale=1e-9),
    "DRAM": _Figure("%", (f"dram__throughput.{_ELAPSED}", f"gpu__dram_throughput.{_ELAPSED}")),
    "DRAM traffic": _Figure("GB/s", ("dram__bytes.sum.per_second",), scale=1e-9),
}
COUNTERS = {name: figure.unit for name, figure in _FIGURES.items()}  # with their units
METRICS = tuple(dict.fromkeys(name for figure in _FIGURES.values() for name in figure.metrics))


def counters(launches: Sequence[tuple[str, Metrics]], predicts: Mapping[str, str]) -> list[Counter]:
    """Every figure of every launch; the first launch is the one that is predicted."""
    return [
        Counter(launch, name, figure.value(m), figure.unit, predicts.get(name) if i == 0 else None)
        for i, (launch, m) in enumerate(launches)
        for name, figure in _FIGURES.items()
    ]
