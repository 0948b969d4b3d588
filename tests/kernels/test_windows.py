"""Windows: their meaning, the kernels that support them, and skipping of fully masked tiles."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from helpers.cli import cli
from helpers.problems import FORWARD, inputs_of, name, usual_first

import cupyfa
from cupyfa import Problem
from cupyfa.errors import SimulatorFault
from cupyfa.lab import Case
from cupyfa.lab.analysis.resources import limits_of
from cupyfa.lab.bench.sweeps import usual_dtype
from cupyfa.lab.verify import shrink as shrinking
from cupyfa.ladder.operations import visible_scores
from cupyfa.numerics import reference
from cupyfa.planner import choose_kernel as planning, source as sources
from cupyfa.problem.options import FLOAT8
from cupyfa.problem.problem import MOST
from cupyfa.runtime import guard
from cupyfa.runtime.simulator import Simulator

ABLE = [kernel for kernel in FORWARD.values() if "window" in kernel.features]
UNABLE = [kernel for kernel in FORWARD.values() if "window" not in kernel.features]
EACH = pytest.mark.parametrize("kernel", ABLE, ids=name)
MASKS = (None, "bottom-right", "top-left")
WINDOWS = ((0, 0), (7, None), (None, 7), (20, 3), (0, None), (None, 0), (2**31 - 1, 2**31 - 1))
SHAPES = ((70, 45), (45, 70), (130, 131), (1, 40), (40, 1), (5, 0))
H100 = limits_of("90")


def dense_mask(p):
    """Which query sees which key, by the definition."""
    left, right = p.window
    right = 0 if p.causal else right
    at = np.arange(p.M)[:, None] + (0 if p.causal == "top-left" else p.N - p.M)
    key = np.arange(p.N)
    seen = np.ones((p.M, p.N), bool)
    if left is not None:
        seen &= key >= at - left
    if right is not None:
        seen &= key <= at + right
    return seen


def dense(inputs, p):
    """Attention through all scores, in float64."""
    q, k, v = (inputs[x].astype(np.float64) for x in "QKV")
    k, v = (np.repeat(x, p.group, axis=1) for x in (k, v))
    weights = np.where(dense_mask(p), np.exp(p.scale * q @ k.mT), 0)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return weights @ v / np.where(total == 0, 1, total), np.log(total)[..., 0]


def mask_of(p):
    return {
        "causal_offset": None if p.right is None else p.causal_offset,
        "window_offset": None if p.left is None else p.window_offset,
    }


def problem(M, N, causal=None, window=None, **sizes):
    sizes = {"heads": 4, "kv_heads": 2, "d": 20, "dv": 9, "dtype": "float16", **sizes}
    return Problem.of_sizes(M=M, N=N, causal=causal, window=window, **sizes)


@pytest.mark.each_choice
@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("M, N", SHAPES)
def test_the_reference_equals_dense_attention(M, N, causal, monkeypatch):
    monkeypatch.setattr(reference, "_TILE_SCORES", 1)
    monkeypatch.setattr(reference, "_TILE_ROWS", 16)
    for window in WINDOWS:
        p = problem(M, N, causal, window, dtype="float64")
        inputs = Case("forward", p).inputs()
        actual = reference.attention(*inputs.values(), scale=p.scale, **mask_of(p))
        for one, other in zip(actual, dense(inputs, p)):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)
        assert visible_scores(p) == dense_mask(p).sum()


@pytest.mark.parametrize("precision", ["float16", "tf32"])
def test_the_rounded_reference_has_the_same_mask(precision):
    p = problem(30, 50, "bottom-right", (9, None))
    inputs = Case("forward", p).inputs()
    out, lse = reference.attention(
        *inputs.values(), scale=p.scale, **mask_of(p), precision=precision
    )
    expected_out, expected_lse = dense(inputs, p)
    np.testing.assert_allclose(out, expected_out, atol=5e-3)
    np.testing.assert_allclose(lse, expected_lse, atol=5e-3)


def test_causal_is_a_window_with_right_0():
    assert problem(5, 9, True, (3, 0)) == problem(5, 9, True, (3, None))
    assert problem(5, 9, True, (3, 4)) == problem(5, 9, True, (3, None))
    assert problem(5, 9, window=(None, None)) == problem(5, 9)
    assert str(problem(5, 9, True, (3, 0))).split()[-3:-1] == ["causal=bottom-right", "window=3,-"]
    assert (dense_mask(problem(5, 9, window=(None, 0))) == dense_mask(problem(5, 9, True))).all()


@pytest.mark.each_choice
@pytest.mark.sampled(4)
@pytest.mark.parametrize("kernel", usual_first(ABLE))
@pytest.mark.parametrize("causal", MASKS)
def test_kernels_are_right(backend, kernel, causal):
    """Between guard zones; with fully masked rows, GQA, several blocks and tiles."""
    every = list(product(SHAPES, WINDOWS))
    for (M, N), window in every[MASKS.index(causal) :: len(MASKS)]:
        p = problem(M, N, causal, window, dtype=usual_dtype(kernel))
        plan = planning.plan(kernel, p, backend.limits)
        results = guard.checked(backend, plan, inputs_of(plan), {})
        empty = ~dense_mask(p).any(-1)
        assert (results["O"][:, :, empty] == 0).all()
        assert (results["lse"][:, :, empty] == -np.inf).all()


@pytest.mark.few(4)
@pytest.mark.each_choice
@EACH
@pytest.mark.parametrize("schedule", [1, 2])
def test_kernels_are_right_in_other_orders_of_threads(kernel, schedule):
    p = problem(100, 140, window=(30, 9), scale=-0.2, dtype=usual_dtype(kernel))
    engine = Simulator(schedule=schedule)
    plan = planning.plan(kernel, p, engine.limits)
    guard.checked(engine, plan, inputs_of(plan), {})


@pytest.mark.each_choice
@EACH
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_masked_keys_and_values_never_matter(backend, kernel, poison):
    """A window of 16 keys at N = 512: keys that no row sees are NaN or infinite."""
    p = problem(40, 512, True, (16, None), d=16, dv=16, dtype=usual_dtype(kernel))
    plan = planning.plan(kernel, p, backend.limits)
    inputs = Case("forward", p).inputs()
    clean = guard.checked(backend, plan, inputs, {})
    unseen = ~dense_mask(p).any(0)
    assert unseen.sum() == 512 - 40 - 16
    inputs["K"][:, :, unseen] = inputs["V"][:, :, unseen] = poison
    spoilt = guard.checked(backend, plan, inputs, {})
    # Repaired rows are summed in another order, and nothing in them is rounded to tf32.
    rtol = 2e-4 if kernel.rounding == "tf32" else 1e-6
    if kernel.rounding != FLOAT8:  # whose repaired rows are exact
        np.testing.assert_allclose(spoilt["lse"], clean["lse"], rtol=rtol)
        np.testing.assert_allclose(spoilt["O"], clean["O"], atol=2e-3)
    # Key 480 is seen by some rows of the tile alone, and its value spoils their columns.
    inputs["V"][:, :, 480, 3] = poison
    some = guard.checked(backend, plan, inputs, {})
    rows = dense_mask(p)[:, 480]
    assert 0 < rows.sum() < 40
    assert (np.isfinite(some["O"][..., 3]) == ~rows).all()
    assert np.isfinite(np.delete(some["O"], 3, axis=-1)).all()


# A line that faults as soon as a block comes to a tile of keys that none of its rows sees.
LOOPS = {
    "fa2": "first_key = keys_of_tile.after<Bc>(first_key)) {\n",
    "fa2_coalesced": "first_key = keys_of_tile.after<Bc>(first_key)) {\n",
    "mma_split_q": "first_key = tile.after<Bc>(first_key)) {\n",
    "mma_swizzled": "first_key = tile.after<Bc>(first_key)) {\n",
    "mma_async": "next = tile.after<Bc>(first_key);\n",
    "mma_pipelined": "first_key = task.after<Bc>(first_key)) {\n",
    "mma_tf32": "first_key = task.after<Bc>(first_key)) {\n",
    "mma_fp16x2": "first_key = task.after<Bc>(first_key)) {\n",
    **dict.fromkeys(("wgmma", "wgmma_overlap", "wgmma_persistent"), "tile.advance()) {\n"),
}
TRAP = """
  if (first_key + Bc <= {first} || first_key >= {end}) *reinterpret_cast<volatile int*>(16) = 0;
"""


@pytest.mark.each_choice
@pytest.mark.parametrize("kernel", [FORWARD[x] for x in LOOPS], ids=name)
def test_fully_masked_tiles_are_skipped(tmp_path, kernel):
    file, line = f"{kernel.name}.cu", LOOPS[kernel.name]
    text = (sources.KERNELS / "forward" / file).read_text()
    sees = {"fa2": "tile * Br", "mma": "first_row", "wgmma": "task.row"}[kernel.name.split("_")[0]]
    sees = "tile.row" if " tile." in line else sees
    trap = TRAP.format(first=f"{sees} + 480 - 16", end=f"{sees} + Br + 480 + 2")
    assert text.count(line) == 1
    (tmp_path / file).write_text(text.replace(line, line.replace("\n", "\n" + trap, 1)))
    trapped = replace(kernel, folder=tmp_path)
    engine = Simulator()
    for window in ((16, 2), (16, None), (None, 2)):
        p = problem(96, 576, window=window, d=16, dv=16, dtype=usual_dtype(trapped))
        rows = 64 if kernel.name.startswith("wgmma") else 32
        plan = planning.plan(trapped, p, engine.limits, Br=rows, Bc=16)
        inputs = Case("forward", p).inputs()
        if None in window:
            with pytest.raises(SimulatorFault, match="writes 4 bytes"):
                guard.checked(engine, plan, inputs, {})
        else:
            guard.checked(engine, plan, inputs, {})


FAULTS = {
    "one key too many": ("fa2", ("seen_in_tile(extent, row,", "seen_in_tile(extent, row - 1,")),
    "one key too few": ("fa2", ("seen_in_tile(extent, row,", "seen_in_tile(extent, row + 1,")),
    "a tile too few": (
        "mma_pipelined",
        ("kv_begin(first_query) / Bc * Bc)", "kv_begin(first_query) / Bc * Bc + Bc)"),
    ),
    "unmasked tiles": (
        "mma_pipelined",
        (
            "is_masked(extent, first_query, last_query + 1 - first_query, first_key, Bc)",
            "is_masked(extent, first_query, 1, first_key, Bc)",
        ),
    ),
    "another first tile": ("mma_pipelined", ("K[0], keys, start)", "K[0], keys, 0)")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_window_is_found(tmp_path, backend, fault):
    kernel, (right, wrong) = FAULTS[fault]
    text = (sources.KERNELS / f"forward/{kernel}.cu").read_text()
    assert text.count(right) == 1
    (tmp_path / f"{kernel}.cu").write_text(text.replace(right, wrong))
    p = problem(70, 150, window=(9, None), dtype="float16")
    broken = replace(FORWARD[kernel], folder=tmp_path)
    plan = planning.plan(broken, p, backend.limits, Br=32, Bc=32)
    with pytest.raises(cupyfa.WrongResult, match="window=9,-"):
        guard.checked(backend, plan, inputs_of(plan), {})


@pytest.mark.parametrize("kernel", UNABLE, ids=name)
def test_kernels_without_windows_name_those_with(kernel):
    planning.plan(kernel, problem(5, 9, window=(None, 2)), H100)  # the right side alone is a mask
    with pytest.raises(cupyfa.Unsupported) as refused:
        planning.plan(kernel, problem(5, 9, window=(2, None)), H100)
    assert "window=2,-" in str(refused.value)
    assert "it does not support window; kernels that can: " in str(refused.value)
    assert (
        "mma_pipelined" in str(refused.value) and "v2" not in str(refused.value).split("can: ")[1]
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("d", [16, 128, 1000])
def test_auto_takes_a_kernel_with_windows(dtype, d):
    p = Problem.of_sizes(M=64, d=d, dtype=dtype, window=(5, 5))
    chosen = planning.select("auto", "forward", p, H100)
    assert "window" in chosen.features


def test_window_constants_and_offsets_of_a_plan():
    plan = cupyfa.plan(kernel="fa2", limits=H100, M=10, N=30, d=8, window=(4, None))
    assert plan.launches[0].constants["windowed"] is True
    assert plan.launches[0].constants["causal"] is False
    assert (plan.problem.window_offset, plan.problem.causal_offset) == (16, 0)
    plan = cupyfa.plan(kernel="fa2", limits=H100, M=10, N=30, d=8, window=(None, 4))
    assert plan.launches[0].constants["windowed"] is False
    assert plan.launches[0].constants["causal"] is True
    assert plan.problem.causal_offset == 24
    top = cupyfa.plan(
        kernel="fa2", limits=H100, M=10, N=30, d=8, window=(4, None), causal="top-left"
    ).problem
    assert (top.window_offset, top.causal_offset) == (-4, 0)


def test_offsets_stay_within_32_bits():
    p = problem(MOST, 5, window=(2**31 - 1, 2**31 - 1))
    assert (p.window_offset, p.causal_offset) == (-MOST, 4)


def test_attention_takes_a_window(backend):
    p = problem(20, 33, window=(4, 1), dtype="float32")
    q, k, v = Case("forward", p).inputs().values()
    out = np.empty((1, 4, 20, 9), np.float32)
    options = {"window": (4, 1), "backend": backend, "check": True, "return_lse": True}
    got, lse = cupyfa.attention(q, k, v, **options, out=out)
    expected_out, expected_lse = dense({"Q": q, "K": k, "V": v}, p)
    assert got is out
    np.testing.assert_allclose(out, expected_out, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)
    bshd = cupyfa.attention(
        *(x.swapaxes(1, 2) for x in (q, k, v)), window=(4, 1), layout="bshd", backend=backend
    )
    np.testing.assert_allclose(bshd.swapaxes(1, 2), expected_out, atol=1e-5)


SIZES = ("-B", 1, "-H", 2, "-M", 20, "-N", 30, "-d", 16, "--backend", "simulator")


@pytest.mark.parametrize(
    "options, problem",
    [
        (("--window", "5,2"), (None, "5,2")),
        (("--window", "-,2"), (None, "-,2")),
        (("--window=3,-", "--causal"), ("bottom-right", "3,-")),
        (("--window", "3,1", "--causal", "top-left"), ("top-left", "3,-")),
        (("--window", "-,-"), (None, None)),
    ],
)
def test_run_takes_a_window(options, problem):
    shown = cli("run", "fa2", *SIZES, *options, "--seed", 1, "--format", "json").stdout
    (row,) = json.loads(shown)
    assert row["passed"] and (row["causal"], row["window"]) == problem


def test_a_case_is_reproduced_by_its_options():
    case = Case("forward", problem(5, 9, "top-left", (3, None)), 7)
    assert "--window=3,-" in case.options()
    shown = cli("run", "auto", *case.options(), "--backend", "simulator").stdout
    assert str(case) in " ".join(shown.split())


def test_windows_are_swept():
    options = ("-p", "window=5,0/-,-", "--alone", "--budget", 0.01, "--format", "json")
    rows = json.loads(cli("bench", "fa2", *SIZES, *options).stdout)
    assert [row["window"] for row in rows] == ["5,0", None]
    flops = [row["TFLOP/s"] * row["ms"] for row in rows]
    seen = dense_mask(problem(20, 30, window=(5, 0))).sum()
    assert flops[0] / flops[1] == pytest.approx(seen / 600)


def test_show_and_compile_know_windows():
    shown = cli("show", "mma_pipelined", "--plan", "--window", "64,-", "-M", 100).stdout
    assert "window=64,-" in shown and "sizes heads group scale mods" in shown
    text = cli("show", "fa2", "--source", "--window", "64,-").stdout
    assert "constexpr bool windowed = true;" in text and "constexpr bool causal = false;" in text
    rows = cli("compile", "fa2", "--arch", 90, "--dtype", "float16", "--window", "9,0")
    assert "9,0" in rows.stdout


def test_windows_are_shrunk():
    case = Case("forward", problem(90, 70, "bottom-right", (33, None)))
    assert shrinking.shrunk(case, lambda x: True).problem.window == (None, None)
    left = shrinking.shrunk(case, lambda x: (x.problem.left or 0) > 20).problem
    assert left.window[0] in range(21, 34) and left.causal is None
    both = Case("forward", problem(90, 70, window=(33, 12)))
    assert shrinking.shrunk(both, lambda x: x.problem.right is not None).problem.window == (None, 0)
