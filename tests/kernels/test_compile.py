"""NVRTC compiles every kernel for every architecture that its record claims; needs no GPU.

A kernel's dtypes and masks take turns: each of several architectures compiles a third of them.
Registers and spilled bytes are told at the end of the run. A tensor-core kernel must not spill:
its accumulators are what its registers are for. The others may, and some do: no launch bound asks
ptxas for it, but it stops at 48, 80 or 168 of the 255 registers that a thread could have, and lets
some dozens of bytes go to the cache for the sake of more warps at a time.
"""

import re
import runpy
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import own_kernel
from helpers.problems import DTYPES

from cupyfa import Launch, Problem
from cupyfa.analysis import resources as compiling
from cupyfa.analysis.resources import Compiled, compile_launch, limits_of
from cupyfa.ladder import LADDER
from cupyfa.ladder.kernel import ARCHES
from cupyfa.planner import select as planning
from cupyfa.planner import source as sources

pytest.importorskip("cupyfa.runtime.cuda.device", reason="CuPy and its NVRTC are not installed")

PARTS = 3
TENSOR_CORES = re.compile(r"#include <[\w/]*mma\w*\.cuh>")


def plans(arch, d):
    """Every plan for an architecture: each kernel, dtype and mask that it claims."""
    for kernels in LADDER.values():
        for kernel in kernels.values():
            for dtype in DTYPES:
                for causal in (False, True):
                    problem = Problem.of_sizes(M=64, d=d, dtype=dtype, causal=causal)
                    if planning.can(kernel, problem, limits_of(arch)):
                        yield planning.plan(kernel, problem, limits_of(arch))


def cases():
    """(architecture, launch) by a name: of a file's texts that differ, a part for each turn."""
    files = defaultdict(lambda: defaultdict(dict))
    for turn, (arch, d) in enumerate([*((arch, 64) for arch in ARCHES), ("80", 40)]):
        for plan in plans(arch, d):
            for launch in plan.launches:
                key = (launch.dtype.name, *launch.constants.items())
                mask = "causal" if plan.problem.causal else "full"
                name = f"{launch.entry}-{launch.dtype.name}-{mask}-d{d}-sm_{arch}"
                param = pytest.param(arch, launch, id=name)
                files[launch.path][turn].setdefault(key, param)
    chosen = []
    for turns in files.values():
        for turn, texts in enumerate(turns.values()):  # no text is left out of a file's turns
            step = min(PARTS, len(texts), len(turns))
            chosen += list(texts.values())[turn % step :: step]
    return chosen


@pytest.mark.parametrize("arch, launch", cases())
def test_every_kernel_for_every_architecture(record_property, arch, launch):
    made = compile_launch(launch, arch)
    assert made.cubin.startswith(b"\x7fELF")
    assert made.warnings == ()
    assert made.registers > 0
    told = [launch.entry, launch.dtype.name, made.spilled_bytes, made.registers]
    record_property("resources", told)
    if TENSOR_CORES.search((sources.KERNELS / launch.path).read_text()):
        assert made.spilled_bytes == 0


@pytest.mark.parametrize("d, causal", [(512, True), (1024, False)])
@pytest.mark.parametrize("arch", ARCHES)
def test_large_head_dimensions_do_not_spill(arch, d, causal):
    problem = Problem.of_sizes(M=64, d=d, dtype="float16", causal=causal)
    plan = planning.plan(LADDER["forward"]["mma_slices"], problem, limits_of(arch))
    assert compile_launch(plan.launches[0], arch).spilled_bytes == 0


# Bytes that are known to be spilled, for want of which tiles are measured fastest. On sm_90 "auto"
# takes wgmma instead.
SPILLED = {("mma_async", "90", 128, "causal"): 4, ("mma_async", "90", 128, "window"): 40}
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window": (32, None)}}


# All masks where all is measured, elsewhere one for each d.
FIRST = [("90", d, mask) for d in (64, 128, 256) for mask in MASKS] + [
    (arch, d, list(MASKS)[(i + j) % 3])
    for i, arch in enumerate(("75", "80", "100", "120"))
    for j, d in enumerate((64, 128, 256))
]


@pytest.mark.parametrize("arch, d, mask", FIRST)
def test_the_first_tiles_do_not_spill(arch, d, mask):
    """sm_86 and sm_89 have the instructions of sm_80."""
    halves = ("mma_split_q", "mma_swizzled", "mma_async", "mma_split_kv")
    for name, dtype in (*((name, "float16") for name in halves), ("mma_tf32", "float32")):
        kernel = LADDER["forward"][name]
        # So many rows that the tiles for few blocks are not for them.
        problem = Problem.of_sizes(M=3840, heads=16, d=d, dtype=dtype, **MASKS[mask])
        if planning.can(kernel, problem, limits_of(arch)):
            launch = planning.plan(kernel, problem, limits_of(arch)).launches[0]
            allowed = SPILLED.get((name, arch, d, mask), 0)
            assert compile_launch(launch, arch).spilled_bytes <= allowed, launch.constants


@pytest.mark.parametrize("d, mask", [(64, "causal"), (128, "window"), (256, "causal")])
@pytest.mark.parametrize("arch", ["80", "86", "90", "100"])
def test_gradients_do_not_spill(arch, d, mask):
    for name in ("mma_columns", "mma_two_pass"):
        problem = Problem.of_sizes(M=3840, d=d, dtype="float16", **MASKS[mask])
        plan = planning.plan(LADDER["backward"][name], problem, limits_of(arch))
        for launch in plan.launches:
            allowed = SPILLED.get((launch.entry, arch, d, mask), 0)
            assert compile_launch(launch, arch).spilled_bytes <= allowed, launch.constants


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("arch", ["80", "90", "120"])
def test_tiles_of_few_blocks_do_not_spill(arch, d):
    limits = replace(limits_of(arch), multiprocessors=100)
    for M in (128, 512):
        problem = Problem.of_sizes(M=M, d=d, dtype="float16", causal=True)
        plan = planning.plan(LADDER["forward"]["mma_async"], problem, limits)
        assert plan.constants["Br"] == 64
        assert compile_launch(plan.launches[0], arch).spilled_bytes == 0


HOPPER = [kernel for name, kernel in LADDER["forward"].items() if name.startswith("wgmma")]


@pytest.mark.parametrize(
    "d, mask",
    [
        *((d, mask) for d in (64, 128, 256) for mask in MASKS),
        *((40, "full"), (96, "causal"), (192, "window")),
    ],
)
@pytest.mark.parametrize("kernel", HOPPER, ids=lambda kernel: kernel.name)
def test_every_tile_that_hopper_is_given(kernel, mask, d):
    """Without spills, and without products that wait for each other."""
    dtype = (
        "bfloat16" if (d, mask) in ((64, "causal"), (128, "full"), (256, "window")) else "float16"
    )
    for heads in (1, 64) if kernel.choice.short else (64,):
        problem = Problem.of_sizes(M=2048, heads=heads, d=d, dtype=dtype, **MASKS[mask])
        *_, launch = planning.plan(kernel, problem, limits_of("90")).launches
        made = compile_launch(launch, "90a")
        assert made.warnings == ()
        assert made.spilled_bytes == 0
        assert made.registers * launch.threads <= 65536, "one block fills a multiprocessor"


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("arch", ["75", "80", "90", "120"])
def test_tiles_of_few_rows_do_not_spill(arch, d):
    for M, mask in ((1, {}), (64, {"window": (100, 0)})):
        problem = Problem.of_sizes(M=M, N=4096, d=d, dtype="float16", **mask)
        plan = planning.plan(LADDER["forward"]["mma_split_kv"], problem, limits_of(arch))
        assert plan.constants["Br"] == max(M, 16)
        assert compile_launch(plan.launches[0], arch).spilled_bytes == 0


def wide_launches():
    """Of gradients, those that only d or dv above 128, or a long sequence, needs."""
    for kernel, M, d, dv, dtype, mask in (
        ("wgmma_columns", 64, 256, 256, "float16", {"window": (100, 20)}),
        ("wgmma_columns", 5000, 256, 256, "bfloat16", {}),
        ("wgmma_two_pass", 64, 192, 128, "bfloat16", {"causal": True}),
    ):
        problem = Problem.of_sizes(M=M, N=64, d=d, dv=dv, dtype=dtype, **mask)
        yield from planning.plan(LADDER["backward"][kernel], problem, limits_of("90")).launches[1:]


@pytest.mark.parametrize("launch", list(wide_launches()), ids=lambda launch: launch.entry)
def test_wide_launches_neither_spill_nor_serialize(launch):
    made = compile_launch(launch, "90a")
    assert (made.warnings, made.spilled_bytes) == ((), 0)


def test_every_launch_of_every_record_is_compiled():
    names = {param.values[1].entry for param in cases()} | {x.entry for x in wide_launches()}
    records = [kernel for kernels in LADDER.values() for kernel in kernels.values()]
    launches = [x for kernel in records for x in kernel.launches if isinstance(x, Launch)]
    assert names == {launch.entry for launch in launches}


def launch_of(script):
    """The launch of a user's kernel, of 64 rows and d = 64."""
    kernel = runpy.run_path(str(script))["mine"]
    return planning.plan(kernel, Problem.of_sizes(M=64, d=64), limits_of("80")).launches[0]


def test_a_users_kernel_compiles_too(tmp_path):
    assert b"mine" in compile_launch(launch_of(own_kernel.write(tmp_path)), "80").cubin


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
        compile_launch(launch, "80")
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
        compile_launch(launch, "80")


def made_of(registers, threads, shared_bytes, arch):
    """A launch that the compiler is said to have made so."""
    launch = planning.plan(LADDER["forward"]["v1"], Problem.of_sizes(M=1, d=8), limits_of(arch))
    launch = replace(launch.launches[0], threads=threads, shared_bytes=shared_bytes)
    return Compiled(launch, arch, b"", f"Used {registers} registers, 0 bytes spill stores")


@pytest.mark.parametrize(
    "registers, threads, shared_bytes, arch, blocks, limit",
    [
        (32, 256, 0, "90", 8, "warps"),
        (16, 32, 0, "90", 32, "blocks"),
        (168, 384, 0, "90", 1, "registers"),
        (32, 128, 100 * 1024, "90", 2, "shared"),
        (32, 128, 64 * 1024, "75", 1, "shared"),
        (64, 512, 0, "86", 2, "registers"),
    ],
)
def test_occupancy_by_hand(registers, threads, shared_bytes, arch, blocks, limit):
    assert made_of(registers, threads, shared_bytes, arch).occupancy == (blocks, limit)


@pytest.mark.gpu
def test_occupancy_is_what_the_driver_says(cuda):
    from cupy_backends.cuda.api import driver

    for kernel in LADDER["forward"].values():
        for dtype in kernel.dtypes:
            problem = Problem.of_sizes(M=64, d=64, dtype=dtype)
            for launch in planning.plan(kernel, problem, cuda.limits).launches:
                function = cuda.prepare(launch).kernel
                told = driver.occupancyMaxActiveBlocksPerMultiprocessor(
                    function.ptr, launch.threads, launch.shared_bytes
                )
                assert compile_launch(launch, cuda.limits.arch).occupancy[0] == told, launch.entry


def test_an_architecture_with_its_own_instructions():
    plan = compiling.plans([LADDER["forward"]["v2"]], ["90a"], ["float32"], 16)[0][0]
    compiled = compiling.compile_launch(plan.launches[0], "90a")
    assert compiled.registers > 0 and compiled.occupancy[0] > 0
    assert ".target sm_90a" in compiling.ptx(plan.launches[0], "90a")
    with pytest.raises(ValueError, match="architecture '80a' is unknown; there are 75, 80"):
        compiling.limits_of("80a")
