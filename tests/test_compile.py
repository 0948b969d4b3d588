"""NVRTC compiles every kernel for every architecture that its record claims; needs no GPU.

Registers and spilled bytes are told at the end of the run. A tensor-core kernel must not spill:
its accumulators are what its registers are for. The others may, and some do: no launch bound asks
ptxas for it, but it stops at 48, 80 or 168 of the 255 registers that a thread could have, and lets
some dozens of bytes go to the cache for the sake of more warps at a time.
"""

import re
import runpy
from pathlib import Path

import own_kernel
import pytest
from problems import DTYPES

from cupyfa import Launch, Limits, Problem, planning, sources
from cupyfa.kernel import ARCHES
from cupyfa.ladder import LADDER

cuda = pytest.importorskip("cupyfa.backends.cuda", reason="CuPy and its NVRTC are not installed")

# The shared memory that a block may ask for, by architecture, in KiB (CUDA programming guide).
SHARED = {"75": 64, "80": 163, "86": 99, "89": 99, "90": 227, "100": 227, "120": 99}
TENSOR_CORES = re.compile(r"#include <\w*mma\.cuh>")


def limits(arch):
    return Limits(f"sm_{arch}", shared_bytes=1024 * SHARED[arch], arch=arch)


def plans(arch, d):
    """Every plan for an architecture: each kernel, dtype and mask that it claims."""
    for kernels in LADDER.values():
        for kernel in kernels.values():
            for dtype in DTYPES:
                for causal in (False, True):
                    problem = Problem.of_sizes(M=64, d=d, dtype=dtype, causal=causal)
                    if planning.can(kernel, problem, limits(arch)):
                        yield planning.plan(kernel, problem, limits(arch))


def cases():
    """(architecture, launch) of every text that differs, by a name; baselines share a launch."""
    found = {}
    for arch, d in [*((arch, 64) for arch in ARCHES), ("80", 40)]:
        for plan in plans(arch, d):
            for launch in plan.launches:
                key = (arch, launch.path, launch.dtype.name, *launch.constants.items())
                mask = "causal" if plan.problem.causal else "full"
                name = f"{launch.entry}-{launch.dtype.name}-{mask}-d{d}-sm_{arch}"
                found.setdefault(key, pytest.param(arch, launch, id=name))
    return list(found.values())


def compiled(launch, arch):
    text = sources.text(launch)
    folders = sources.include_folders(launch)
    return cuda.compile_without_gpu(text, f"{launch.entry}.cu", arch, folders)


@pytest.mark.parametrize("arch, launch", cases())
def test_every_kernel_for_every_architecture(record_property, arch, launch):
    cubin, log = compiled(launch, arch)
    assert cubin.startswith(b"\x7fELF")
    assert "warning" not in log
    (registers,) = map(int, re.findall(r"Used (\d+) registers", log))
    (spilled,) = map(int, re.findall(r"(\d+) bytes spill stores", log))
    record_property("resources", [launch.entry, launch.dtype.name, spilled, registers])
    if TENSOR_CORES.search((sources.KERNELS / launch.path).read_text()):
        assert spilled == 0


def test_every_launch_of_every_record_is_compiled():
    names = {param.values[1].entry for param in cases()}
    records = [kernel for kernels in LADDER.values() for kernel in kernels.values()]
    launches = [x for kernel in records for x in kernel.launches if isinstance(x, Launch)]
    assert names == {launch.entry for launch in launches}


def launch_of(script):
    """The launch of a user's kernel, of 64 rows and d = 64."""
    kernel = runpy.run_path(str(script))["mine"]
    return planning.plan(kernel, Problem.of_sizes(M=64, d=64), limits("80")).launches[0]


def test_a_users_kernel_compiles_too(tmp_path):
    cubin, _ = compiled(launch_of(own_kernel.write(tmp_path)), "80")
    assert b"mine" in cubin


@pytest.mark.parametrize(
    "right, wrong, message",
    [
        ("real score = 0;", "real score = nought;", 'identifier "nought" is undefined'),
        ("maximum = higher;", "maximum = higher", 'expected a ";"'),
    ],
)
def test_broken_source_is_told_by_its_own_file_and_line(tmp_path, right, wrong, message):
    from cupy.cuda.compiler import CompileException

    launch = launch_of(own_kernel.write(tmp_path, cu=(right, wrong)))
    with pytest.raises(CompileException) as error:
        compiled(launch, "80")
    place = re.search(rf"^(.*)\((\d+)\): error: {re.escape(message)}", str(error.value), re.M)
    file, line = place.groups()
    first = own_kernel.MINE[: own_kernel.MINE.index(right)].count("\n") + 1
    assert Path(file) == tmp_path / "mine.cu"
    assert int(line) - first in (0, 1)  # a missing semicolon is seen on the next line


def test_a_broken_assumption_is_told_in_words(tmp_path):
    right = "  if (row >= M) return;"
    wrong = f'  static_assert(d % 128 == 0, "rows are whole lines");\n{right}'
    launch = launch_of(own_kernel.write(tmp_path, cu=(right, wrong)))
    with pytest.raises(Exception, match="rows are whole lines"):
        compiled(launch, "80")
