"""What NVRTC makes of a kernel, for any architecture it claims; no GPU is needed."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field

from cupyfa.errors import Unsupported
from cupyfa.ladder.kernel import ARCH_SPECIFIC, Kernel, cdiv
from cupyfa.options import AttentionOptions
from cupyfa.planner import source as sources
from cupyfa.planner.plan import Limits, Plan, PlannedLaunch
from cupyfa.planner.select import plan
from cupyfa.problem import Problem


@dataclass(frozen=True)
class Multiprocessor:
    """What one multiprocessor holds: KiB of shared memory for a block and in all, warps, blocks."""

    shared_of_block: int
    shared: int
    warps: int
    blocks: int
    reserved: int = 1024  # bytes of shared memory that the system takes of each block


REGISTERS = 16384  # of each of a multiprocessor's four parts, given to warps by the 256
# By compute capability (CUDA C++ programming guide, technical specifications).
MULTIPROCESSORS = {
    "75": Multiprocessor(64, 64, warps=32, blocks=16, reserved=0),
    "80": Multiprocessor(163, 164, warps=64, blocks=32),
    "86": Multiprocessor(99, 100, warps=48, blocks=16),
    "89": Multiprocessor(99, 100, warps=48, blocks=24),
    "90": Multiprocessor(227, 228, warps=64, blocks=32),
    "100": Multiprocessor(227, 228, warps=64, blocks=32),
    "120": Multiprocessor(99, 100, warps=48, blocks=24),
}

# What the log says of code that is slower than it need be: (C7510) and its like, warnings.
_SLOW = re.compile(r"^(?:ptxas info *: *)?(\(C\d+\).*|.*\bwarning\b.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Compiled:
    """A launch compiled for an architecture: its cubin, and what the compiler said."""

    launch: PlannedLaunch
    arch: str
    cubin: bytes = field(repr=False)
    log: str = field(repr=False)

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        return self._number(r"Used (\d+) registers")

    @property
    def spilled_bytes(self) -> int:
        """Bytes that a thread stores to local memory for want of registers."""
        return self._number(r"(\d+) bytes spill stores")

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the compiler found amiss: products in turn, registers that cannot be given, …"""
        found = (re.sub(r" in around line \d+", "", x.strip()) for x in _SLOW.findall(self.log))
        return tuple(dict.fromkeys(found))

    @property
    def occupancy(self) -> tuple[int, str]:
        """Blocks that a multiprocessor runs at a time, and what there is not enough of for more."""
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
        assert found, f"the compiler did not tell {pattern!r}: {self.log}"
        return int(found[1])


def limits_of(arch: str) -> Limits:
    """The limits of an architecture's devices, "90" or with its own instructions "90a"."""
    family = arch.removesuffix("a") if arch in ARCH_SPECIFIC else arch
    if family not in MULTIPROCESSORS:
        known = ", ".join([*MULTIPROCESSORS, *ARCH_SPECIFIC])
        raise ValueError(f"architecture {arch!r} is unknown; there are {known}")
    return Limits(f"sm_{arch}", 1024 * MULTIPROCESSORS[family].shared_of_block, arch=family)


def plans(
    kernels: Sequence[Kernel],
    arches: Sequence[str],
    dtypes: Sequence[str],
    d: int,
    dv: int | None = None,
    options: AttentionOptions | None = None,
) -> list[tuple[Plan, str]]:
    """(plan, architecture) of all combinations that the kernels claim, and each text once: 90 and
    90a are one to a kernel for sm_90a.

    Raises Unsupported, with the reason, if that is none.
    """
    possible: list[tuple[Plan, str]] = []
    refused: Exception | None = None
    for kernel in kernels:
        for dtype in dict.fromkeys(dtypes):
            problem = problem_to_compile(kernel.operation, dtype, d, dv, options)
            found: dict[str, tuple[Plan, str]] = {}
            for arch in arches:
                try:
                    able = plan(kernel, problem, limits_of(arch))
                    found.setdefault(kernel.target or arch, (able, arch))
                except Unsupported as error:
                    if refused is None or kernel.takes(dtype):  # its dtypes are the duller reason
                        refused = error
            possible += found.values()
    if not possible:
        raise refused or ValueError("there is nothing to compile")
    return possible


def problem_to_compile(
    operation: str,
    dtype: str,
    d: int,
    dv: int | None,
    options: AttentionOptions | None = None,
    sizes: tuple[int, int, int] = (64, 2048, 2048),
    group: int = 1,
) -> Problem:
    """The problem to compile for. Its sizes are not compiled in, but tiles are chosen by them.

    They are the key heads, queries and keys; a group of heads shares a key head.
    """
    kv_heads, M, N = sizes
    if operation == "softmax":
        return Problem.of_row_sizes(1, 1, dtype)
    return Problem.of_sizes(
        heads=kv_heads * group,
        kv_heads=kv_heads,
        M=M,
        N=N,
        d=d,
        dv=dv,
        dtype=dtype,
        options=options,
    )


def ptx(launch: PlannedLaunch, arch: str) -> str:
    """One launch as PTX for an architecture, or for its own."""
    from cupyfa.runtime.cuda.device import compile_without_gpu

    arch = launch.target or arch
    text, folders = sources.text(launch), sources.include_folders(launch)
    made, _ = compile_without_gpu(text, f"{launch.entry}.cu", arch, folders, to_ptx=True)
    return made.rstrip(b"\0").decode()


def sass(compiled: Compiled) -> str:
    """The machine code of a launch, as nvdisasm of the CUDA toolkit writes it.

    Raises Unsupported if nvdisasm is not on the PATH.
    """
    tool = shutil.which("nvdisasm")
    if tool is None:
        raise Unsupported(
            "machine code is read by nvdisasm, of the CUDA toolkit; put it on the PATH"
        )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.cubin + b"\0")  # CuPy's getCUBIN drops the last byte
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise Unsupported(f"{tool} cannot read sm_{compiled.arch} ({said}); install a newer one")
    return done.stdout


def compile_launch(launch: PlannedLaunch, arch: str) -> Compiled:
    """One launch, compiled for an architecture, or for its own."""
    from cupyfa.runtime.cuda.device import compile_without_gpu

    arch = launch.target or arch
    cubin, log = compile_without_gpu(
        sources.text(launch), f"{launch.entry}.cu", arch, sources.include_folders(launch)
    )
    if f"entry function '{launch.entry}'" not in log:
        raise sources.without_entry(launch)
    return Compiled(launch, arch, cubin, log)
