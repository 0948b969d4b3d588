"""Profiles of one kernel by NVIDIA's profilers.

Nsight Compute (``ncu``) reads the counters of each launch, Nsight Systems (``nsys``) measures the
time of every kernel. Both profile a program: ``cupyfa profile`` itself, which then only runs the
kernel twice, once to warm up and once to be measured.
"""

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

from cupyfa.arrays import block_mask as blocks
from cupyfa.call.keywords import unknown_argument
from cupyfa.errors import DeviceError, Unsupported
from cupyfa.lab.bench import sweeps, timing
from cupyfa.lab.verify.case import Case
from cupyfa.ladder.kernel import Kernel, Launch
from cupyfa.ladder.lookup import record_named
from cupyfa.numerics.shown import Rows, ShownRow
from cupyfa.planner.choose_kernel import plan as plan_of
from cupyfa.planner.source import ROOT
from cupyfa.runtime.choose_backend import backend_named
from cupyfa.runtime.environment import Progress, no_progress
from cupyfa.runtime.launcher import run
from cupyfa.runtime.workspace import allocated

TOOLS = {
    "ncu": "Nsight Compute, which comes with the CUDA toolkit and from "
    "https://developer.nvidia.com/nsight-compute",
    "nsys": "Nsight Systems, which comes with the CUDA toolkit and from "
    "https://developer.nvidia.com/nsight-systems",
}


@dataclass(frozen=True, repr=False)
class Counter(ShownRow):
    """One figure of one launch; its value is None where ncu gives none."""

    launch: str
    counter: str
    value: float | str | None
    unit: str

    def row(self) -> dict[str, Any]:
        """A row of a table; a figure without a value has the unit n/a."""
        return asdict(self) | ({"unit": "n/a"} if self.value is None else {})


@dataclass(frozen=True, repr=False)
class KernelTime(ShownRow):
    """How often a kernel ran, its median time and its total time."""

    kernel: str
    launches: int
    median_ms: float
    total_ms: float

    def row(self) -> dict[str, Any]:
        return asdict(self)


def profile(
    kernel: str,
    case: Case | None = None,
    *,
    tiles: Mapping[str, int] | None = None,
    progress: Progress = no_progress,
    **unknown: Any,
) -> list[Counter]:
    """Counts with Nsight Compute what each launch of a kernel does; cuBLAS is left out.

    ``kernel`` is a name of the ladder or ``script.py:name``, ``case`` the problem and its inputs,
    by default that of ``bench``. ``tiles`` fixes tile sizes of the kernel. Percentages of units in
    a multiprocessor refer to its active time, those of L2 and DRAM to the whole launch.

    Raises ValueError for the arguments, Unsupported if the kernel cannot do the problem, if ncu is
    missing or may not read the counters, DeviceError if there is no GPU.
    """
    if unknown:
        raise unknown_argument(profile, unknown)
    record, case, tiles = _checked("ncu", kernel, case, tiles)
    progress(0, 1, f"ncu {record.name}")
    metrics = METRICS
    while True:
        output = _run(ncu_command(kernel, case, tiles, metrics))
        refused = re.search(r"Failed to find metric (?:regex:\^?)?(\w+)", output)
        known = tuple(x for x in metrics if not (refused and x.startswith(refused[1])))
        if known == metrics or not known:
            break
        metrics = known  # ncu stops at the first name that it does not know
    progress(1, 1, f"ncu {record.name}")
    return Rows(counters(_unless_refused(read_ncu(output), output, record)))


def timeline(
    kernel: str,
    case: Case | None = None,
    *,
    tiles: Mapping[str, int] | None = None,
    progress: Progress = no_progress,
    **unknown: Any,
) -> list[KernelTime]:
    """Times with Nsight Systems every kernel of a warm-up and of one call, those of cuBLAS too.

    Large gradients include the forward kernel. Arguments and errors are those of ``profile``.
    """
    if unknown:
        raise unknown_argument(timeline, unknown)
    record, case, tiles = _checked("nsys", kernel, case, tiles)
    progress(0, 1, f"nsys {record.name}")
    with tempfile.TemporaryDirectory() as folder:
        output = _run(nsys_command(kernel, case, tiles, Path(folder) / "report"))
    progress(1, 1, f"nsys {record.name}")
    return Rows(_unless_refused(read_nsys(output), output, record))


def standard(record: Kernel) -> Case:
    (usual,) = sweeps.problems(record.operation, {}, record)
    return Case(record.operation, usual)


def ncu_command(
    kernel: str, case: Case, constants: Mapping[str, int], metrics: Sequence[str] = ()
) -> list[str]:
    """The command line of Nsight Compute for the kernel's own launches after a warm-up."""
    steps = record_named(kernel).steps(case.problem)
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
    """The command line of Nsight Systems, which writes a ``report``."""
    name = str(report or f"cupyfa-{record_named(kernel).name}")
    return [
        *("nsys", "profile", "--stats=true", "--trace=cuda"),
        *("--force-overwrite=true", f"--output={name}"),
        *_program(kernel, case, constants),
    ]


def launch_twice(kernel: str, case: Case, constants: Mapping[str, int]) -> None:
    """Runs a kernel twice: the program that is profiled."""
    backend = backend_named("cuda")
    record = record_named(kernel)
    plan = plan_of(record, case.problem, backend.limits, **constants)
    with backend.working_on(None):
        readable = blocks.readable(backend, plan, case.inputs(backend, plan.kernel))
        inputs = timing.placed(backend, readable, {})
        outputs = {name: allocated(backend, plan, name) for name in plan.outputs}
        for _ in range(2):
            run(backend, plan, inputs, outputs)
        backend.synchronize()


def _program(kernel: str, case: Case, constants: Mapping[str, int]) -> list[str]:
    installed = Path(__file__).resolve().parents[2] == ROOT
    start = ["-m", "cupyfa"] if installed else [str(ROOT / "cli.py")]
    fixed = [word for name, value in constants.items() for word in ("-t", f"{name}={value}")]
    return [sys.executable, *start, "profile", kernel, *case.options(), *fixed, "--once"]


def _checked(
    tool: str, kernel: str, case: Case | None, tiles: Mapping[str, int] | None
) -> tuple[Kernel, Case, Mapping[str, int]]:
    """The record, the case and the tiles; raises here what the profiler would report unclearly."""
    record = record_named(kernel)
    case = case or standard(record)
    if shutil.which(tool) is None:
        raise Unsupported(f"{tool} is not on the PATH; it is part of {TOOLS[tool]}")
    try:
        backend = backend_named("cuda")
    except DeviceError as error:
        remedy = "profile on another machine: --print prints the commands"
        raise DeviceError(f"{str(error).partition(';')[0]}; {remedy}") from None
    plan = plan_of(record, case.problem, backend.limits, **(tiles or {}))
    if not all(all(launch.grid) for launch in plan.launches):
        raise ValueError(f"{case.problem} has no rows and launches nothing; give sizes from 1")
    return record, case, tiles or {}


def _run(command: Sequence[str]) -> str:
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    ).stdout


# Messages of profilers that cannot profile, and the remedy.
_REMEDIES = {
    "ERR_NVGPUCTRPERM": "only administrators may read the counters (ERR_NVGPUCTRPERM); run "
    "as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0: "
    "https://developer.nvidia.com/ERR_NVGPUCTRPERM",
    "Profiling is not supported on": "this ncu cannot profile this GPU; install the newest Nsight "
    "Compute from https://developer.nvidia.com/nsight-compute",
    "driver is not compatible": "this ncu is newer than the driver; install the Nsight Compute of "
    "the driver's CUDA version",
    "LibraryNotLoaded": "ncu cannot read the counters (a container or virtual machine may hide "
    "them); cupyfa profile --tool nsys works without counters",
}


def _unless_refused(found: list[Any], output: str, record: Kernel) -> list[Any]:
    """What was found. Raises Unsupported, with the reason in one line, if that is nothing."""
    if found:
        return found
    for sign, remedy in _REMEDIES.items():
        if sign in output:
            raise Unsupported(remedy)
    said = re.search(r"^\s*(?:cupyfa: *|==ERROR== *|(?=\S*Error\b))(.*)", output, re.MULTILINE)
    reason = said[1].strip() if said else "it gave no reason"
    raise Unsupported(f"the profiler saw no launch of {record.name}: {reason}")


def read_ncu(output: str) -> list[tuple[str, dict[str, float]]]:
    """(launch, metrics with a number) of each row of ncu's ``--csv --page raw``."""
    rows = list(csv.reader(line for line in output.splitlines() if line.startswith('"')))
    heads = [i for i, row in enumerate(rows) if "Kernel Name" in row]
    if not heads:
        return []
    head, *launches = rows[heads[0] :]
    return [
        (row[head.index("Kernel Name")].partition("(")[0], _numbers(dict(zip(head, row))))
        for row in launches
        if len(row) == len(head) and row[0].isdigit()  # not the row of units
    ]


def _numbers(row: Mapping[str, str]) -> dict[str, float]:
    found = {}
    for name, value in row.items():
        try:
            found[name] = float(value.replace(",", ""))
        except ValueError:
            continue
    return found


def read_nsys(output: str) -> list[KernelTime]:
    """The table of kernels that ``nsys profile --stats=true`` prints among others."""
    lines = output.splitlines()
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
            milliseconds = (numbers[name] / 1e6 for name in (middle, "Total Time (ns)"))
            kernels.append(KernelTime(cells["Name"], int(numbers["Instances"]), *milliseconds))
    return kernels


Metrics = Mapping[str, float]


@dataclass(frozen=True)
class _Figure:
    """A figure of a launch: the first known of its metrics times a scale, or ``of`` all metrics."""

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
_SECTORS = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_{}.ratio"


def _conflicts(access: str) -> _Figure:
    conflicts = f"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{access}.sum"
    requests = f"smsp__inst_executed_op_shared_{access}.sum"

    def ratio(m: Metrics) -> float | None:
        return m[conflicts] / m[requests] if conflicts in m and m.get(requests) else None

    return _Figure("per request", (conflicts, requests), of=ratio)


def _stalls(m: Metrics) -> str | None:
    """The three longest stall reasons, in cycles for each issued instruction."""
    waits = sorted(((m[x], reason) for reason, x in _STALLS.items() if x in m), reverse=True)
    return ", ".join(f"{reason} {cycles:.1f}" for cycles, reason in waits[:3]) or None


def _limited_by(m: Metrics) -> str | None:
    if m.get(_WAVES, 1.0) < 1:
        return f"grid, {m[_WAVES]:.2f} waves"
    limits = [(m[x], what) for what, x in _LIMITS.items() if x in m]
    if not limits:
        return None
    blocks, what = min(limits, key=lambda limit: limit[0])
    return f"{what}, {blocks:.0f} block{'s' * (blocks != 1)}"


def _bound_by(m: Metrics) -> str | None:
    """The busiest unit if it is busy 60 % of the time, else the longest stall reason."""
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
    "load conflicts": _conflicts("ld"),
    "store conflicts": _conflicts("st"),
    "load sectors": _Figure("per request", (_SECTORS.format("ld"),)),
    "store sectors": _Figure("per request", (_SECTORS.format("st"),)),
    "L2": _Figure("%", (f"lts__t_sectors.{_ELAPSED}",)),
    "L2 traffic": _Figure("GB/s", ("lts__t_bytes.sum.per_second",), scale=1e-9),
    "DRAM": _Figure("%", (f"dram__throughput.{_ELAPSED}", f"gpu__dram_throughput.{_ELAPSED}")),
    "DRAM traffic": _Figure("GB/s", ("dram__bytes.sum.per_second",), scale=1e-9),
}
COUNTERS = {name: figure.unit for name, figure in _FIGURES.items()}  # with their units
METRICS = tuple(dict.fromkeys(name for figure in _FIGURES.values() for name in figure.metrics))


def counters(launches: Sequence[tuple[str, Metrics]]) -> list[Counter]:
    return [
        Counter(launch, name, figure.value(m), figure.unit)
        for launch, m in launches
        for name, figure in _FIGURES.items()
    ]
