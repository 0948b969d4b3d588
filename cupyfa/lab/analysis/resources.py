"""Compiles kernels with NVRTC for any architecture, without a GPU, and reports resources and code.

The code is shown as PTX or as machine code (SASS).
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from cupyfa.errors import DeviceError, Unsupported
from cupyfa.lab.report.tables import Row, render, table_or_fields
from cupyfa.ladder.kernel import ARCH_SPECIFIC, Kernel, cdiv
from cupyfa.ladder.lookup import operation_of
from cupyfa.numerics.shown import Shown
from cupyfa.planner import source
from cupyfa.planner.choose_kernel import plan, select
from cupyfa.planner.plan import Limits, Plan, PlannedLaunch
from cupyfa.problem import shape_language
from cupyfa.problem.options import OPTIONS, AttentionOptions
from cupyfa.problem.problem import Problem
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.choose_backend import backend_named


@dataclass(frozen=True)
class Multiprocessor:
    """Limits of a multiprocessor. Shared memory, per block and in total, is in KiB."""

    shared_of_block: int
    shared: int
    warps: int
    blocks: int
    reserved: int = 1024  # bytes of shared memory per block that the CUDA runtime reserves


REGISTERS = 16384  # number per SM sub-partition; a warp allocates multiples of 256
# Limits by compute capability, from "Technical Specifications" in the CUDA C++ programming guide.
MULTIPROCESSORS = {
    "75": Multiprocessor(64, 64, warps=32, blocks=16, reserved=0),
    "80": Multiprocessor(163, 164, warps=64, blocks=32),
    "86": Multiprocessor(99, 100, warps=48, blocks=16),
    "89": Multiprocessor(99, 100, warps=48, blocks=24),
    "90": Multiprocessor(227, 228, warps=64, blocks=32),
    "100": Multiprocessor(227, 228, warps=64, blocks=32),
    "120": Multiprocessor(99, 100, warps=48, blocks=24),
}

# Log lines that report slow code: warnings, and lines with codes such as (C7510).
_SLOW = re.compile(r"^(?:ptxas info *: *)?(\(C\d+\).*|.*\bwarning\b.*)$", re.MULTILINE)


@dataclass(frozen=True, repr=False)
class Compiled(Shown):
    """A launch compiled for an architecture: its cubin and the compiler's log."""

    launch: PlannedLaunch
    arch: str
    cubin: bytes = field(repr=False)
    log: str = field(repr=False)

    @property
    def registers(self) -> int:
        return self._number(r"Used (\d+) registers")

    @property
    def spilled_bytes(self) -> int:
        """Bytes that each thread spills to local memory for lack of registers."""
        return self._number(r"(\d+) bytes spill stores")

    @property
    def warnings(self) -> tuple[str, ...]:
        found = (re.sub(r" in around line \d+", "", x.strip()) for x in _SLOW.findall(self.log))
        return tuple(dict.fromkeys(found))

    @property
    def occupancy(self) -> tuple[int, str]:
        """Resident blocks per multiprocessor, and the resource that limits their number."""
        sm, warps = MULTIPROCESSORS[self.arch.removesuffix("a")], cdiv(self.launch.threads, 32)
        shared = self.launch.shared_bytes + sm.reserved
        fit = {
            "warps": sm.warps // warps,
            "blocks": sm.blocks,
            "registers": 4 * (REGISTERS // (256 * cdiv(32 * self.registers, 256))) // warps,
            "shared": 1024 * sm.shared // shared if shared else sm.blocks,
        }
        limit = min(fit, key=lambda what: fit[what])
        return fit[limit], limit

    def _number(self, pattern: str) -> int:
        found = re.search(pattern, self.log)
        assert found, f"the compiler's log has no {pattern!r}: {self.log}"
        return int(found[1])


def limits_of(arch: str) -> Limits:
    """Returns the limits of devices of an architecture, such as "90", or "90a" for sm_90a."""
    family = arch.removesuffix("a") if arch in ARCH_SPECIFIC else arch
    if family not in MULTIPROCESSORS:
        known = ", ".join([*MULTIPROCESSORS, *ARCH_SPECIFIC])
        raise ValueError(f"architecture {arch!r} is unknown; choose from {known}")
    return Limits(f"sm_{arch}", 1024 * MULTIPROCESSORS[family].shared_of_block, arch=family)


def gpu() -> Backend | None:
    """Returns the CUDA backend, or None if this machine has no GPU."""
    try:
        return backend_named("cuda")
    except DeviceError:
        return None


def plans(
    kernels: Sequence[Kernel | str],
    arches: Sequence[str],
    dtypes: Sequence[str],
    d: int,
    dv: int | None = None,
    options: AttentionOptions | None = None,
    tiles: Mapping[str, int] | None = None,
    arrays: Mapping[str, Any] | None = None,
) -> list[tuple[Plan, str]]:
    """Returns (plan, architecture) for every supported combination.

    A kernel is a record, or "auto" to select a kernel for each architecture. A kernel that requires
    sm_90a is planned only once for 90 and 90a. ``arrays`` holds the forms of optional arrays, in
    the notation of ``shape_language``. Raises Unsupported with the reason if no combination is
    supported.
    """
    found: dict[tuple[int, str, str], tuple[Plan, str]] = {}
    refused: Exception = ValueError("there is nothing to compile")
    for kernel, dtype, arch in product(kernels, dtypes, arches):
        operation = operation_of(kernel) if isinstance(kernel, str) else kernel.operation
        problem = problem_to_compile(operation, dtype, d, dv, options, arrays)
        limits = limits_of(arch)
        try:
            record = select(kernel, operation, problem, limits)
            able = plan(record, problem, limits, **(tiles or {}))
            found.setdefault((id(record), dtype, record.target or arch), (able, arch))
        except Unsupported as error:
            dtype_fits = isinstance(kernel, str) or kernel.takes(dtype)
            # The reason for a supported dtype is more useful than that of an unsupported dtype.
            if isinstance(refused, ValueError) or dtype_fits:
                refused = error
    if not found:
        raise refused
    return list(found.values())


def problem_to_compile(
    operation: str,
    dtype: str,
    d: int,
    dv: int | None,
    options: AttentionOptions | None,
    arrays: Mapping[str, Any] | None = None,
) -> Problem:
    """Returns the problem to compile for; its numbers of heads, queries and keys affect only tiles.

    arrays: forms of optional arrays, in the notation of ``shape_language``.
    """
    if operation == "softmax":
        return Problem.of_row_sizes(1, 1, dtype)
    of: dict[str, Any] = {"heads": 64, "M": 2048, "N": 2048, "d": d, "dv": dv}
    if shape_language.LENGTHS_OF in (arrays or {}):
        del of["M"], of["N"]
    return Problem.of_sizes(**of, dtype=dtype, options=options, **(arrays or {}))


def ptx(launch: PlannedLaunch, arch: str) -> str:
    made, _ = _compiled(launch, launch.target or arch, to_ptx=True)
    return made.rstrip(b"\0").decode()


def sass(compiled: Compiled) -> str:
    """Disassembles a compiled launch. Raises Unsupported if nvdisasm is not installed."""
    tool = shutil.which("nvdisasm")
    if tool is None:
        raise Unsupported(
            "showing machine code requires nvdisasm, which is not on the PATH; install the CUDA "
            "toolkit"
        )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.cubin + b"\0")  # CuPy's getCUBIN drops the last byte
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise Unsupported(
            f"{tool} cannot read sm_{compiled.arch} ({said}); install a newer CUDA toolkit"
        )
    return done.stdout


def compile_launch(launch: PlannedLaunch, arch: str) -> Compiled:
    """Compiles a launch for ``arch``, or for the architecture that its kernel requires."""
    arch = launch.target or arch
    cubin, log = _compiled(launch, arch)
    if f"entry function '{launch.entry}'" not in log:
        raise source.without_entry(launch)
    return Compiled(launch, arch, cubin, log)


def _compiled(launch: PlannedLaunch, arch: str, *, to_ptx: bool = False) -> tuple[bytes, str]:
    """Compiles a launch with NVRTC; returns the cubin or PTX, and the compiler's log."""
    from cupyfa.runtime.cuda.compiler import compile_text

    text, folders = source.text(launch), source.include_folders(launch)
    return compile_text(text, f"{launch.entry}.cu", arch, folders, to_ptx=to_ptx)


def compiled_row(plan: Plan, compiled: Compiled) -> Row:
    compiled_in = ("dtype", "d", *(name for name in OPTIONS if name != "scale"), "arrays")
    row = plan.problem.row()
    return {
        "kernel": plan.kernel.name,
        "entry": compiled.launch.entry,
        **{name: row[name] for name in compiled_in},
        "arch": compiled.arch,
        "registers": compiled.registers,
        "spilled_bytes": compiled.spilled_bytes,
        "shared_bytes": compiled.launch.shared_bytes,
        "blocks_per_sm": compiled.occupancy[0],
        "limited_by": compiled.occupancy[1],
        "warnings": "; ".join(compiled.warnings) or None,
    }


def compilations(rows: Sequence[Row], form: str) -> str:
    """Renders rows returned by ``compiled_row``; lists compiler warnings below a table."""
    if form != "table":
        return render(rows, form)
    below = [
        f"{row['entry']}, {row['dtype']}, sm_{row['arch']}: {row['warnings']}"
        for row in rows
        if row["warnings"]
    ]
    table = [{name: x for name, x in row.items() if name != "warnings"} for row in rows]
    return "\n".join([table_or_fields(table), *below])
