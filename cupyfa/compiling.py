"""What NVRTC makes of a kernel, for any architecture it claims; no GPU is needed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cupyfa import sources
from cupyfa.kernel import Kernel
from cupyfa.planning import Limits, PlannedLaunch, Unsupported, plan
from cupyfa.problem import Problem

# The shared memory that a block may ask for, in KiB, by compute capability (CUDA C++ programming
# guide, technical specifications).
SHARED_KIB = {"75": 64, "80": 163, "86": 99, "89": 99, "90": 227, "100": 227, "120": 99}


@dataclass(frozen=True)
class Compiled:
    """A launch compiled for an architecture: its cubin, and what the compiler said."""

    launch: PlannedLaunch
    arch: str
    cubin: bytes
    log: str

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        return self._number(r"Used (\d+) registers")

    @property
    def spilled_bytes(self) -> int:
        """Bytes that a thread stores to local memory for want of registers."""
        return self._number(r"(\d+) bytes spill stores")

    def _number(self, pattern: str) -> int:
        found = re.search(pattern, self.log)
        return int(found[1]) if found else 0


def limits_of(arch: str) -> Limits:
    """The limits of an architecture's devices."""
    if arch not in SHARED_KIB:
        raise ValueError(f"architecture {arch!r} is unknown; there are {', '.join(SHARED_KIB)}")
    return Limits(f"sm_{arch}", shared_bytes=1024 * SHARED_KIB[arch], arch=arch)


def jobs(
    kernels: Sequence[Kernel],
    arches: Sequence[str],
    dtypes: Sequence[str],
    d: int,
    dv: int | None = None,
    causal: bool = False,
) -> list[tuple[Kernel, Problem, str]]:
    """(kernel, problem, architecture) of all combinations that the kernels claim.

    Raises Unsupported, with the reason, if that is none.
    """
    possible: list[tuple[Kernel, Problem, str]] = []
    refused: Exception = ValueError("there is nothing to compile")
    for kernel in kernels:
        for dtype in dtypes:
            problem = _problem(kernel, dtype, d, dv, causal)
            for arch in arches:
                try:
                    plan(kernel, problem, limits_of(arch))
                    possible.append((kernel, problem, arch))
                except Unsupported as error:
                    refused = error
    if not possible:
        raise refused
    return possible


def _problem(kernel: Kernel, dtype: str, d: int, dv: int | None, causal: bool) -> Problem:
    """The problem to compile for; lengths do not matter, for they are not compiled in."""
    if kernel.operation == "softmax":
        return Problem.of_row_sizes(1, 1, dtype)
    return Problem.of_sizes(M=1, d=d, dv=dv, dtype=dtype, causal=causal)


def compile_kernel(kernel: Kernel, problem: Problem, arch: str, **constants: int) -> list[Compiled]:
    """Every launch of a kernel for a problem, compiled for an architecture.

    Raises Unsupported if the kernel does not claim it, and the compiler's error unchanged.
    """
    planned = plan(kernel, problem, limits_of(arch), **constants)
    return [compile_launch(launch, arch) for launch in planned.launches]


def compile_launch(launch: PlannedLaunch, arch: str) -> Compiled:
    """One launch, compiled for an architecture."""
    from cupyfa.backends.cuda import compile_without_gpu

    cubin, log = compile_without_gpu(
        sources.text(launch), f"{launch.entry}.cu", arch, sources.include_folders(launch)
    )
    return Compiled(launch, arch, cubin, log)
