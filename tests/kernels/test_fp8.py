"""float8_e4m3: conversions and products in the simulator, kernels and their accuracy."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from helpers import e4m3_sums
from helpers.device_code import code, launch_on_device
from helpers.hopper_code import HEAD, WRITE, launch
from helpers.problems import FORWARD, check_case, inputs_of

import cupyfa
from cupyfa import Problem
from cupyfa.numerics import reference, tolerance
from cupyfa.planner import choose_kernel as planning
from cupyfa.planner.plan import Limits
from cupyfa.problem.dtypes import E4M3_INPUTS
from cupyfa.runtime import guard
from cupyfa.runtime.simulator import Simulator

FP8 = FORWARD["wgmma_fp8"]
E4M3 = ml_dtypes.float8_e4m3fn


def planned(backend=None, tiles=None, **sizes):
    problem = Problem.of_sizes(**{"heads": 1, "dtype": "float16", **sizes})
    return planning.plan(FP8, problem, (backend or Simulator()).limits, **(tiles or {}))


def test_conversions_are_to_nearest_even_and_saturate():
    every = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    every = np.sort(every[np.isfinite(every)])
    between = (every[1:] + every[:-1]) / 2
    beside = np.nextafter(between, np.float32(np.inf)), np.nextafter(between, -np.float32(np.inf))
    rng = np.random.default_rng(0)
    random = rng.normal(size=2000).astype(np.float32) * np.exp2(rng.integers(-20, 12, 2000))
    special = [449, 463, 464, 465, 1e30, -1e30, np.inf, -np.inf, np.nan, 0.0, 1e-30, -1e-40]
    x = np.concatenate([every, between, *beside, random, special]).astype(np.float32)
    x = np.resize(x, -(-x.size // 512) * 512)
    bits = np.zeros(x.size // 4, np.int32)
    body = """
        for (int i = threadIdx.x; i < COUNT; i += blockDim.x)
          b[i] = pack_e4m3(a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3]);
    """
    launch(body.replace("COUNT", str(bits.size)), x, bits)
    want = np.clip(x, -448, 448).astype(np.float32).astype(E4M3).view(np.uint8)
    got = bits.view(np.uint8)
    numbers = ~np.isnan(x)
    assert (got[numbers] == want[numbers]).all()
    assert (got[~numbers] & 0x7F == 0x7F).all()


def products(a, b, in_registers=False, run=launch):
    """Multiplies A [64][128] by the transpose of B [32][128]."""
    order = np.arange(8) ^ np.arange(64)[:, None] % 8

    def boxed(x):
        chunks = x.astype(E4M3).view(np.uint16).reshape(len(x), 8, 8)
        return np.take_along_axis(chunks, order[: len(x), :, None], 1).copy()

    head = "struct Shared { TmaTile<E4m3, 64, 128> A; TmaTile<E4m3, 32, 128> B; };"
    registers = code("products_registers")
    from_shared = """
        multiply<E4m3>(d, by_rows(shared.A.box[0]) + 32 * k, by_rows(shared.B.box[0]) + 32 * k,
                       k > 0);
    """
    body = code("products", product=registers if in_registers else from_shared)
    c = np.zeros((64, 32), np.float32)
    run(body + WRITE.format(n=32), boxed(a), boxed(b), c, head=head)
    return c


def on_device(body, *operands, head):
    how = {"names": "abc", "threads": 128, "shared_bytes": 1 << 15, "arch": "90a"}
    launch_on_device(body, *operands, head=f"{HEAD}\n{head}", **how)


@pytest.mark.parametrize("in_registers", [False, True])
def test_products(in_registers):
    """Operands are integers, whose sums are exact."""
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-4, 5, (n, 128)).astype(np.float32) for n in (64, 32))
    assert (products(a, b, in_registers) == a @ b.T).all()


SUMS = [(x, y) for x in e4m3_sums.KINDS for y in (False, True)]


@pytest.mark.parametrize("kind, in_registers", SUMS)
def test_sums_are_cut_off(kind, in_registers, run=launch):
    """Matches the emulation by helpers.e4m3_sums bit by bit."""
    a, b = (e4m3_sums.drawn(kind, (n, 128), seed=n) for n in (64, 32))
    np.testing.assert_array_equal(products(a, b, in_registers, run), e4m3_sums.multiplied(a, b))


@pytest.mark.gpu
@pytest.mark.parametrize("kind, in_registers", SUMS)
def test_sums_are_cut_off_on_a_device(hopper, kind, in_registers):
    test_sums_are_cut_off(kind, in_registers, on_device)


def test_float8_must_be_requested():
    problem = Problem.of_sizes(M=64, d=64, dtype="float16")
    limits = Limits("an H100", 232448, arch="90")
    assert planning.select("auto", "forward", problem, limits).name != "wgmma_fp8"
    for dtype in ("float16", "bfloat16", "float32"):
        asked = Problem.of_sizes(M=64, d=64, dtype=dtype, precision="float8_e4m3")
        assert planning.select("auto", "forward", asked, limits).name == "wgmma_fp8"
        named = planning.plan(FP8, Problem.of_sizes(M=64, d=64, dtype=dtype), limits)
        assert named.problem.precision == named.rounding == "float8_e4m3"
    asked = Problem.of_sizes(M=64, d=64, dtype="float16", precision="float8_e4m3")
    with pytest.raises(cupyfa.Unsupported, match=r"computes float16 in float16; .*wgmma_fp8"):
        planning.plan(FORWARD["wgmma"], asked, limits)
    with pytest.raises(cupyfa.Unsupported) as refused:  # the message must not suggest float8
        wide = Problem.of_sizes(M=problem.M, d=300, dtype=problem.dtype.name)
        planning.plan(FORWARD["mma_pipelined"], wide, limits)
    assert "wgmma_fp8" not in str(refused.value)


def test_masked_keys_do_not_change_the_scale_of_others():
    """A larger tile scale changes only elements 2^15 times smaller than the tile's maximum."""
    plan = planned(M=60, N=60, d=32, causal="top-left", tiles={"Br": 64, "Bc": 64})
    inputs = inputs_of(plan)
    before = guard.checked(Simulator(), plan, inputs, {})
    inputs["K"][..., 50:, :] *= 8
    inputs["V"][..., 50:, :] *= 8
    after = guard.checked(Simulator(), plan, inputs, {})
    assert (after["lse"][..., :50] == before["lse"][..., :50]).all()
    assert (after["O"][..., :50, :] == before["O"][..., :50, :]).mean() > 0.99


@pytest.mark.parametrize("dv", [32, 144])  # dv > 128 splits the softmax into halves
@pytest.mark.parametrize("sizes", [(1e3, 500, 1e-3, 0), (1e-3, 1e3, 1, 1e4)])
def test_tiles_of_different_magnitude(sizes, dv):
    plan = planned(M=70, N=256, d=32, dv=dv, tiles={"Br": 64, "Bc": 64})
    inputs = inputs_of(plan)
    for name in "KV":
        for i, size in enumerate(sizes):
            inputs[name][..., 64 * i : 64 * (i + 1), :] *= size if name == "V" else min(size, 2)
    guard.checked(Simulator(), plan, inputs, {})


@pytest.mark.parametrize("blocks", [1, 3])
def test_persistent_blocks_process_tiles_with_and_without_keys(backend, blocks):
    """The first 70 rows see no key: with e4m3 inputs, their tiles come last."""
    dtype = "float8_e4m3fn"
    launches = (
        replace(x, grid=lambda p, c: blocks) if x.entry == "wgmma_fp8" else x for x in FP8.launches
    )
    few = replace(FP8, launches=tuple(launches))
    sizes = {"batch": 2, "heads": 2, "kv_heads": 1, "M": 150, "N": 80, "d": 24, "causal": True}
    if planning.can(FP8, Problem.of_sizes(**sizes, dtype=dtype), backend.limits):
        check_case(few, backend, sizes, dtype, Br=64, Bc=32, stages=2)


@pytest.mark.parametrize("schedule", range(8))
def test_no_thread_misses_a_phase_in_tiles_without_keys(schedule):
    """The first 390 of 400 rows see no key, so each block has several such tiles in a row."""
    backend = Simulator(schedule=schedule)
    sizes = {"heads": 12, "M": 400, "N": 10, "d": 32, "causal": True, "dtype": E4M3_INPUTS.name}
    plan = planned(backend, **sizes)
    assert plan.launches[-1].constants["persistent"] and plan.launches[-1].grid[0] < 12
    guard.checked(backend, plan, inputs_of(plan), {})


def test_faults_exceed_the_bounds():
    problem = Problem.of_sizes(M=40, N=48, d=64, dtype="float16", heads=2)
    inputs = cupyfa.lab.Case("forward", problem, values="uniform").inputs()
    q, k, v = (inputs[name] for name in "QKV")
    want = tolerance.expected_attention(
        q, k, v, scale=problem.scale, dtype="float16", roundings=["float8_e4m3"]
    )["float8_e4m3"]

    def ratio(scale=problem.scale, keys=48):
        kept = (x[:, :, :keys] for x in (k, v))
        out, lse = reference.attention(q, *kept, scale=scale, precision="float8_e4m3")
        return max(x.ratio for x in tolerance.compare({"O": out, "lse": lse}, want))

    assert ratio() < 0.5
    assert ratio(keys=32) > 1
    assert ratio(scale=1.5 * problem.scale) > 1


def test_accuracy():
    found = cupyfa.lab.accuracy(
        ["wgmma_overlap", "wgmma_fp8"], M=64, N=256, d=64, dtype="float16", backend="simulator"
    )
    errors = {(x.kernel, x.case.values): x.rmse / x.rms for x in found}
    for values in ("normal", "outliers"):
        half, eighth = errors["wgmma_overlap", values], errors["wgmma_fp8", values]
        assert half < 2e-3 < eighth < 0.15
