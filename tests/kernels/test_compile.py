"""NVRTC compiles every kernel for every architecture that its record claims; needs no GPU.

Architectures share the work: each compiles about a third of a file's programs. Tensor-core kernels
must not spill, since their accumulators are registers. Other kernels may spill a few dozen bytes:
without launch bounds, ptxas limits them to 48, 80 or 168 registers a thread for occupancy.
"""

import re
from collections import defaultdict
from dataclasses import replace
from itertools import product

import pytest
from helpers.problems import DTYPES, EVERY, able, arch_of, usual_dtype, usual_first

from cupyfa import Launch, Problem
from cupyfa.lab.analysis import resources as compiling
from cupyfa.lab.analysis.resources import Compiled, compile_launch, limits_of
from cupyfa.ladder import LADDER
from cupyfa.ladder.kernel import ARCHES
from cupyfa.ladder.lookup import record_named
from cupyfa.planner import choose_kernel as planning, source as sources
from cupyfa.problem.dtypes import E4M3_INPUTS
from cupyfa.problem.optional_inputs import Operand
from cupyfa.problem.options import AttentionOptions
from cupyfa.runtime import tile_maps

pytest.importorskip("cupyfa.runtime.cuda.device", reason="CuPy and its NVRTC are not installed")

PARTS = 6
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window": (32, None)}}
TENSOR_CORES = re.compile(r"#include <[\w/]*mma\w*\.cuh>")


def plans(arch, d):
    """Yields a plan for each kernel, dtype and mask that the architecture supports."""
    masks = MASKS if arch == "90" else ("full", "causal")
    for kernel, dtype, mask in product(EVERY, (*DTYPES, E4M3_INPUTS.name), masks):
        problem = Problem.of_sizes(M=64, d=d, dtype=dtype, **MASKS[mask])
        if planning.can(kernel, problem, limits_of(arch)):
            yield planning.plan(kernel, problem, limits_of(arch))


def cases():
    """Returns (architecture, launch) pairs; each architecture compiles a share of every file."""
    files = defaultdict(lambda: defaultdict(dict))
    for turn, (arch, d) in enumerate([*((arch, 64) for arch in ARCHES), ("80", 40)]):
        for plan in plans(arch, d):
            for launch in plan.launches:
                key = (launch.dtype.name, *launch.constants.items())
                name = f"{launch.entry}-{launch.dtype.name}-{plan.problem.causal}-d{d}-sm_{arch}"
                param = pytest.param(arch, launch, id=name)
                files[launch.path][turn].setdefault(key, param)
    chosen = []
    for turns in files.values():
        for turn, texts in enumerate(turns.values()):  # turn i: programs i, i + step, …
            step = min(PARTS, len(texts), len(turns))
            chosen += list(texts.values())[turn % step :: step]
    return chosen


@pytest.mark.few(400)
@pytest.mark.each_choice
@pytest.mark.parametrize("arch, launch", cases())
def test_every_kernel_for_every_architecture(arch, launch):
    made = compile_launch(launch, arch)
    assert made.cubin.startswith(b"\x7fELF")
    assert made.warnings == ()
    assert made.registers > 0
    if TENSOR_CORES.search((sources.KERNELS / launch.path).read_text()):
        assert made.spilled_bytes <= SPILLED_BY_ALL.get(launch.entry, 0)


# Accepted spills in bytes: the fastest tiles need slightly more registers than a thread has.
SPILLED_BY_ALL = {  # for d = 64; spilled outside the main loop
    "mma_fp16x2": 40,
    "mma_fp16x2_two_pass_rows": 8,
}
SPILLED = {
    ("mma_async", "120", 256, "window"): 4,
    ("mma_pipelined", "90", 128, "causal"): 12,
    # Spilled at the end of a section of keys, or in the epilogue.
    ("mma_fp16x2", "80", 128, "window"): 4,
    ("mma_fp16x2", "80", 256, "causal"): 36,
    ("mma_fp16x2", "90", 128, "window"): 8,
    ("mma_fp16x2", "90", 256, "causal"): 38,
    ("wgmma_fp16x2", "90", 128, "window"): 4,
    ("wgmma_fp16x2", "90", 256, "causal"): 28,
    ("wgmma_fp16x2", "90", 256, "window"): 8,
    ("wgmma_fp16x2", "90", 40, "full"): 4,  # in repair_split_output
    ("wgmma_fp16x2", "90", 64, "full"): 4,
    # Most spilled values are copy addresses that are reloaded once per tile. In the largest entry,
    # the dQ launch loads and stores ten dQ accumulators per tile in both copies of the loop body.
    ("mma_fp16x2_two_pass", "80", 64, "causal"): 8,
    ("mma_fp16x2_two_pass", "80", 128, "window"): 56,
    ("mma_fp16x2_two_pass", "80", 256, "causal"): 164,
    ("mma_fp16x2_two_pass", "90", 64, "causal"): 16,
    ("mma_fp16x2_two_pass", "90", 128, "window"): 24,
    ("mma_fp16x2_two_pass", "90", 256, "causal"): 72,
    ("mma_f64_columns", "90", 256, "causal"): 44,
    ("mma_tf32", "90", 256, "full"): 16,
    ("mma_tf32", "90", 256, "window"): 12,
}
# split_operands spills addresses: it is memory-bound and faster with few registers and more blocks.
SPILLED_BY_SPLITTING = {"split_operands": 36}
HOPPER = [name for name in LADDER["forward"] if name.startswith("wgmma")]


def without_spills():
    """Yields (kernel, architecture, d, mask, other sizes) of plans whose launches must not spill.

    sm_86 and sm_89 have the same instructions as sm_80. M = 3840 gives every launch many blocks.
    """
    masks = list(MASKS)
    for i, arch in enumerate(("75", "80", "100", "120", "90")):
        for j, d in enumerate((64, 128, 256)):
            for mask in masks if arch == "90" else [masks[(i + j) % 3]]:
                for name in (
                    "mma_split_q",
                    "mma_swizzled",
                    "mma_async",
                    "mma_tma",
                    "mma_pipelined",
                    "mma_split_kv",
                ):
                    yield name, arch, d, mask, {"M": 3840, "heads": 16}
                yield "mma_tf32", arch, d, mask, {"M": 3840, "heads": 16, "dtype": "float32"}
    for d in (64, 128, 256):  # devices of sm_120 have TMA, but no wgmma
        yield "mma_tma", "120", d, "causal", {"M": 3840, "heads": 16}
    for arch, d in product(("75", "80", "90", "120"), (64, 128, 256)):
        yield "mma_split_kv", arch, d, "full", {"M": 1, "N": 4096, "Br": 16}
        yield "mma_split_kv", arch, d, "window", {"M": 64, "N": 4096, "Br": 64}
    for arch, d, M in product(("80", "90", "120"), (64, 128), (128, 512)):
        yield "mma_pipelined", arch, d, "causal", {"M": M, "Br": 64, "multiprocessors": 100}
    for arch, (d, mask) in product(ARCHES, ((512, "causal"), (1024, "full"))):
        yield "mma_slices", arch, d, mask, {"M": 64}
    for arch, name in product(("80", "86", "90", "100"), ("mma_columns", "mma_two_pass")):
        for d, mask in ((64, "causal"), (128, "window"), (256, "causal")):
            yield name, arch, d, mask, {"M": 3840}
    for arch, (d, mask) in product(
        ("80", "90"), ((64, "causal"), (128, "window"), (256, "causal"))
    ):
        for name in ("mma_f64", "mma_f64_columns"):
            yield name, arch, d, mask, {"M": 3840, "heads": 16, "dtype": "float64"}
        for name in ("mma_fp16x2", "mma_fp16x2_two_pass"):
            yield name, arch, d, mask, {"M": 3840, "heads": 16, "dtype": "float32"}
    odd = ((40, "full"), (96, "causal"), (192, "window"))
    for name, (d, mask) in product(HOPPER, (*product((64, 128, 256), masks), *odd)):
        turn = (d, mask) in ((64, "causal"), (128, "full"), (256, "window"))
        for heads in (1, 64):
            dtype = "float32" if name == "wgmma_fp16x2" else "bfloat16" if turn else "float16"
            sizes = {"M": 2048, "heads": heads, "dtype": dtype}
            yield name, "90", d, mask, sizes
    for mask in ("full", "causal"):
        yield "wgmma_columns", "90", 64, mask, {"M": 512, "batch": 8, "heads": 16}
    # Launches whose last blocks finish dQ, and launches for d > 128.
    yield "wgmma_columns", "90", 128, "causal", {"M": 512, "batch": 8, "heads": 16}
    yield "wgmma_columns", "90", 256, "window", {"M": 64, "N": 64, "heads": 128}
    yield "wgmma_columns", "90", 256, "full", {"M": 5000, "N": 64, "dtype": "bfloat16"}
    yield "wgmma_two_pass", "90", 192, "causal", {"M": 64, "dv": 128, "dtype": "bfloat16"}
    for d, mask in ((64, "causal"), (128, "window"), (256, "causal")):
        yield "wgmma_fp16x2_two_pass", "90", d, mask, {"M": 2048, "dtype": "float32"}


@pytest.mark.sampled(16, "name", "arch", "d", "mask")
@pytest.mark.slow
@pytest.mark.parametrize("name, arch, d, mask, sizes", list(without_spills()))
def test_tensor_core_kernels_do_not_spill_or_serialize_products(name, arch, d, mask, sizes):
    launches = planned(name, arch, d, mask, **sizes)
    for launch in launches:
        made = compile_launch(launch, launch.target or arch)
        assert made.warnings == ()
        known = SPILLED_BY_SPLITTING.get(launch.entry, SPILLED.get((name, arch, d, mask), 0))
        assert made.spilled_bytes <= known, launch.constants
        if name in HOPPER:
            assert made.registers * launch.threads <= 65536, "one block fills a multiprocessor"


def planned(name, arch, d, mask, Br=None, multiprocessors=None, **sizes):
    """Returns a kernel's launches on an architecture, or () if it does not support the problem."""
    kernel, limits = record_named(name), limits_of(arch)
    if multiprocessors is not None:
        limits = replace(limits, multiprocessors=multiprocessors)
    problem = Problem.of_sizes(d=d, **{"dtype": "float16", **sizes}, **MASKS[mask])
    if not planning.can(kernel, problem, limits):
        return ()
    plan = planning.plan(kernel, problem, limits)
    assert Br is None or plan.constants["Br"] == Br
    return plan.launches


H, M = 4, 64
SEEDS = Operand("dropout_seed", "int64", (1,)), Operand("dropout_offset", "uint32", (1,))
SLOPES = Operand("alibi_slopes", "float32", (H,))
TEXTS = {
    "additive": ({}, (SLOPES, Operand("bias", "bfloat16", (1, H, M, M)))),
    "curved": ({"softcap": 30.0}, ()),
    "mask": ({"mask_mod": "doc[query] == doc[key]"}, (Operand("doc", "int64", (M,)),)),
    "all": (
        {"score_mod": "tanh(score) * slope[head]", "mask_mod": "key <= position"},
        (Operand("slope", "float64", (H,)), Operand("mask", "bool", (1, 1, M, M)), SLOPES),
    ),
    "sink": ({}, (Operand("sink", "bfloat16", (1, H)),)),
    "dropout": ({"dropout": 0.1, "dropout_seed": 1}, ()),
    "curved dropout": ({"dropout": 0.1, "dropout_seed": 1, "softcap": 30.0}, (SLOPES, *SEEDS)),
}
DLSE = Operand("dlse", "float32", (1, H, M))
GRADIENTS = (
    *(Operand(name, "float32", (H,), gradient=True) for name in ("sink", "alibi_slopes")),
    Operand("bias", "bfloat16", (1, H, M, 1), gradient=True),
    Operand("slope", "float64", (H,), gradient=True),
)


def plan_of_gradients(name, dtype, d=64):
    plain = Problem.of_sizes(batch=1, heads=H, M=M, d=d, dtype=dtype)
    options = AttentionOptions(score_mod="tanh(score) * slope[head]", dropout=0.1, dropout_seed=1)
    problem = replace(plain, options=options, operands=(*GRADIENTS, DLSE))
    return planning.plan(LADDER["backward"][name], problem, limits_of("90"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_arrays_compile(dtype):
    for launch in plan_of_gradients("two_pass", dtype).launches:
        if "gradient" in launch.entry or "text" in launch.entry:
            assert compile_launch(launch, "80").warnings == ()


def plan_of_a_bias(d, options):
    plain = Problem.of_sizes(batch=2, heads=H, M=M, d=d, dtype="bfloat16")
    bias = Operand("bias", "bfloat16", (1, H, M, M), gradient=True)
    problem = replace(plain, options=AttentionOptions(**options), operands=(bias,))
    return planning.plan(LADDER["backward"]["wgmma_columns"], problem, limits_of("90"))


@pytest.mark.parametrize(
    "d, options",
    [
        (64, {"causal": True}),
        *(
            pytest.param(d, options, marks=pytest.mark.slow)
            for d in (64, 128)
            for options in ({}, {"softcap": 30.0})
        ),
        pytest.param(256, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_gradient_of_a_bias_on_hopper_does_not_spill(d, options):
    *_, launch = plan_of_a_bias(d, options).launches
    made = compile_launch(launch, launch.target)
    assert made.warnings == () and made.spilled_bytes == 0


def test_launches_that_make_tile_maps_compile():
    options, operands = TEXTS["mask"]
    plain = Problem.of_sizes(M=M, d=1)
    problem = replace(plain, options=AttentionOptions(**options), operands=operands)
    launches = tile_maps.launches(problem, "key_tiles", 128, 96, alone=True)
    for launch in launches:
        assert compile_launch(launch, "90").spilled_bytes == 0


@pytest.mark.slow
@pytest.mark.sampled(16)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "kernel",
    able("places"),
    ids=lambda kernel: kernel.name,
)
def test_texts_compile_in_every_kernel(kernel, text):
    (options, operands), arch = TEXTS[text], arch_of(kernel)
    if text == "sink" and kernel.operation == "backward":
        operands += (DLSE,)
    plain = Problem.of_sizes(batch=1, heads=H, M=M, d=64, dtype=usual_dtype(kernel))
    problem = replace(plain, options=AttentionOptions(**options), operands=operands)
    for launch in planning.plan(kernel, problem, limits_of(arch)).launches:
        made = compile_launch(launch, arch)
        assert made.warnings == ()


@pytest.mark.slow
@pytest.mark.parametrize("text", ["curved", "dropout"])
def test_texts_compile_for_the_oldest_tensor_cores(text):
    """For sm_75, which has fewer instructions than the architectures of the other test."""
    options, operands = TEXTS[text]
    plain = Problem.of_sizes(batch=1, heads=H, M=M, d=64, dtype="float16")
    problem = replace(plain, options=AttentionOptions(**options), operands=operands)
    (launch,) = planning.plan(record_named("mma_split_q"), problem, limits_of("75")).launches
    assert compile_launch(launch, "75").warnings == ()


def plan_of_kept_dS(kernel, **sizes):
    sizes = {"batch": 4, "heads": 32, "M": 1024, "d": 64, "dtype": "float16"} | sizes
    device = replace(limits_of("90"), multiprocessors=132)
    return planning.plan(record_named(kernel), Problem.of_sizes(**sizes), device)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("kernel", ["mma_two_pass", "wgmma_two_pass"])
def test_launches_with_kept_dS_compile(kernel, d, causal):
    plan = plan_of_kept_dS(kernel, d=d, causal=causal)
    assert any("kept_rows" in launch.entry for launch in plan.launches)
    for launch in plan.launches:
        compiled = compile_launch(launch, "90")
        assert compiled.warnings == () and compiled.spilled_bytes == 0


@pytest.mark.slow
def test_every_launch_of_every_record_is_compiled():
    names = {param.values[1].entry for param in cases()}
    for name, *sizes, others in without_spills():
        names |= {launch.entry for launch in planned(name, *sizes, **others)}
    for plan in (
        plan_of_gradients("two_pass", "float32"),
        plan_of_a_bias(64, {}),
        plan_of_sequences(record_named("fa2"), "ragged", "90"),
        plan_of_sequences(record_named("wgmma_persistent"), "ragged", "90"),
        plan_of_kept_dS("mma_two_pass"),
        plan_of_kept_dS("wgmma_two_pass"),
    ):
        names |= {launch.entry for launch in plan.launches}
    launches = [x for kernel in EVERY for x in kernel.launches if isinstance(x, Launch)]
    assert names == {launch.entry for launch in launches}


OFFSETS = tuple(Operand(f"cu_seqlens_{x}", "int32", (4,)) for x in "qk")
COUNTS = tuple(Operand(f"seqused_{x}", "int32", (3,)) for x in "qk")
LENGTHS = tuple(Operand(f"lengths_{x}", "int32", (3,)) for x in "qk")
# Batch size and operands of three packed or padded sequences.
SEQUENCES = {"ragged": (1, (*OFFSETS, *COUNTS)), "lengths": (3, LENGTHS)}


def plan_of_sequences(kernel, feature, arch):
    batch, operands = SEQUENCES[feature]
    plain = Problem.of_sizes(batch=batch, heads=H, M=M, d=64, dtype=usual_dtype(kernel))
    problem = replace(plain, options=AttentionOptions(causal=True, softcap=30.0), operands=operands)
    return planning.plan(kernel, problem, limits_of(arch))


@pytest.mark.parametrize("feature", ["ragged", pytest.param("lengths", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kernel", usual_first(EVERY))
def test_sequences_compile_in_every_kernel(kernel, feature):
    if feature not in kernel.features:
        pytest.skip(f"{kernel.name} does not support {feature}")
    arch = arch_of(kernel)
    for launch in plan_of_sequences(kernel, feature, arch).launches:
        assert compile_launch(launch, arch).warnings == ()


def made_of(registers, threads, shared_bytes, arch):
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
@pytest.mark.parametrize("kernel", LADDER["forward"].values(), ids=lambda kernel: kernel.name)
def test_occupancy_is_what_the_driver_says(cuda, kernel):
    from cupy_backends.cuda.api import driver

    problem = Problem.of_sizes(M=64, d=64, dtype=usual_dtype(kernel))
    for launch in planning.plan(kernel, problem, cuda.limits).launches:
        function = cuda.compile_launch(launch).kernel
        told = driver.occupancyMaxActiveBlocksPerMultiprocessor(
            function.ptr, launch.threads, launch.shared_bytes
        )
        assert compile_launch(launch, cuda.limits.arch).occupancy[0] == told, launch.entry


def test_an_architecture_with_its_own_instructions():
    plan = compiling.plans([LADDER["forward"]["v2"]], ["90a"], ["float32"], 16)[0][0]
    compiled = compiling.compile_launch(plan.launches[0], "90a")
    assert compiled.registers > 0 and compiled.occupancy[0] > 0
    assert ".target sm_90a" in compiling.ptx(plan.launches[0], "90a")
