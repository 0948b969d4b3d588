"""Launches kernels in all dtypes on ragged shapes, to be run under compute-sanitizer.

    compute-sanitizer --tool racecheck python tools/launches.py [KERNEL…]

Without names it launches all kernels. Each array has its own allocation, so that out-of-bounds
accesses are detected.
"""

import sys
from dataclasses import replace
from pathlib import Path

import cupy
import numpy as np

import cupyfa
from cupyfa import Problem
from cupyfa.lab.bench.sweeps import usual_dtype
from cupyfa.ladder import LADDER
from cupyfa.planner import choose_kernel as planning
from cupyfa.problem.dtypes import dtype_named
from cupyfa.runtime.arrays import readable_inputs
from cupyfa.runtime.choose_backend import backend_named
from cupyfa.runtime.launcher import run
from cupyfa.runtime.workspace import allocate

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.problems import DTYPES, RAGGED, WINDOWED, claimed, inputs_of

# SEVERAL is a problem of a few tiles. LONG has enough tiles for the pipeline stages to be reused.
# They are also planned for FEW multiprocessors, so that persistent blocks take several tiles.
SEVERAL = {"heads": 2, "kv_heads": 1, "M": 130, "N": 150, "causal": True}
LONG = SEVERAL | {"M": 530, "N": 550}
FEW = 3
WIDTHS = (64, 128, 192, 256, 320)
NARROW = (64,)  # d for kernels without tensor cores, which are slow under compute-sanitizer
CAPPED = SEVERAL | {"d": 64, "softcap": 5.0}


def main(names):
    cupy.cuda.set_allocator(None)
    backend = backend_named("cuda")
    every = backend.limits, replace(backend.limits, multiprocessors=FEW)
    kernels = {name: x for group in LADDER.values() for name, x in group.items()}
    chosen = {name: kernels[name] for name in names or kernels}
    for kernel, dtype in claimed(chosen, DTYPES):
        for sizes in RAGGED:
            launch(backend, planning.plan(kernel, problem_of(kernel, sizes, dtype), every[0]))
        several = LONG if has_ring(kernel) else SEVERAL
        wide = [several | {"d": d} for d in (WIDTHS if "mma" in kernel.name else NARROW)]
        others = [problem_of(kernel, sizes, dtype) for sizes in (*WINDOWED, *wide, CAPPED)]
        for problem in dict.fromkeys(others):  # drops duplicates: softmax problems ignore d
            for plan in distinct_plans(kernel, problem, every):
                launch(backend, plan)
    for kernel in chosen.values():
        if "places" in kernel.features:
            launch_modified(kernel)
        if "paged" in kernel.features:
            launch_decoding(kernel)


def has_ring(kernel):
    """Returns whether a kernel has a multistage pipeline."""
    return "stages" in kernel.choice.names


def problem_of(kernel, sizes, dtype):
    if kernel.operation == "softmax":
        return Problem.of_row_sizes(sizes["M"], sizes["N"], dtype)
    return Problem.of_sizes(**sizes, dtype=dtype)


def distinct_plans(kernel, problem, limits):
    """Returns the plans for devices with these limits that differ in their launches."""
    found = {}
    for each in limits:
        if planning.can(kernel, problem, each):
            plan = planning.plan(kernel, problem, each)
            found.setdefault(str([(x.entry, x.grid, x.constants) for x in plan.launches]), plan)
    return found.values()


def launch(backend, plan):
    inputs = {name: backend.upload(x) for name, x in inputs_of(plan).items()}
    inputs = readable_inputs(plan, inputs)
    outputs = {name: allocate(backend, plan, name) for name in plan.outputs}
    run(backend, plan, inputs, outputs)
    for array in outputs.values():
        backend.download(array)


def launch_modified(kernel):
    """Calls a kernel with expressions, captured arrays, sinks, dropout and a block mask.

    Some rows see no key, and some keys are visible to no row. A backward kernel also computes the
    gradients of these arrays, and of the bias alone, for which some kernels have a separate launch.
    The kernels of Hessian-vector products are launched with those of tangents.
    """
    rng, of = np.random.default_rng(0), dtype_named(usual_dtype(kernel))
    M, N = SEVERAL["M"], SEVERAL["N"]
    shapes = ((1, 2, M, 64), (1, 1, N, 64), (1, 1, N, 64), (1, 2, M, N))
    q, k, v, bias = (cupy.asarray(rng.standard_normal(x).astype(of.numpy)) for x in shapes)
    slope, sink = (cupy.asarray(rng.random(2).astype(of.sums)) for _ in range(2))
    mask = cupyfa.block_mask(mask_mod="key <= position and query >= 64 and key >= 40", M=M, N=N)
    how = {"mask": mask, "bias": bias, "sink": sink, "dropout": cupyfa.Dropout(0.2, 1)}
    how |= {"score_mod": "score * slope[head]", "captured": {"slope": slope}}
    if kernel.operation == "tangent":
        cupyfa.jvp(q, k, v, tangents=(q, k, v), kernel=kernel, **how)
        cupyfa.hvp(q, k, v, cupy.ones_like(q), tangents=(q, k, v), sink=sink)
        return
    forward = kernel.name if kernel.operation == "forward" else "fa2"
    out, lse = cupyfa.attention(q, k, v, return_lse=True, kernel=forward, **how)
    if kernel.operation == "backward":
        given = (cupy.ones_like(out), q, k, v, out, lse)
        for wrt in (("q", "k", "v", "bias", "slope", "sink"), ("bias",)):
            cupyfa.backward(*given, wrt=wrt, kernel=kernel, **how)


def launch_decoding(kernel):
    """Appends two rotated tokens to sequences in a paged cache and computes their attention.

    One sequence is empty, in one the new tokens begin a page, and in one they fill two pages.
    """
    rng, of = np.random.default_rng(0), dtype_named(usual_dtype(kernel)).numpy
    lengths, most, page_size = np.array([0, 64, 31], "i4"), 5, 16
    shapes = (
        (len(lengths) * most, 1, page_size, 64),
        (len(lengths), 1, 2, 64),
        (len(lengths), 2, 2, 64),
    )
    k, v, new_k, new_v, q = (
        cupy.asarray(rng.standard_normal(shapes[i]).astype(of)) for i in (0, 0, 1, 1, 2)
    )
    pages = cupy.asarray(rng.permutation(len(k)).astype("i4").reshape(len(lengths), most))
    angles = rng.random((most * page_size, 32))
    rotary = [cupy.asarray(x(angles).astype(np.float32)) for x in (np.cos, np.sin)]
    cache = cupyfa.KVCache(k, v, cupy.asarray(lengths), pages, rotary=rotary)
    cupyfa.attention(q, cache, append=(new_k, new_v), kernel=kernel)


if __name__ == "__main__":
    main(sys.argv[1:])
