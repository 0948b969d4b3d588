"""Windows: their meaning, the kernels that support them, and skipping of fully masked tiles."""

from itertools import product

import numpy as np
import pytest
from helpers.broken_kernels import changed
from helpers.problems import FORWARD, able, check_case, inputs_of, name, usual_first

import cupyfa
from cupyfa import Problem
from cupyfa.errors import SimulatorFault
from cupyfa.lab import Case
from cupyfa.lab.analysis.resources import limits_of
from cupyfa.lab.bench.sweeps import usual_dtype
from cupyfa.lab.verify import shrink as shrinking
from cupyfa.ladder.operations import visible_scores
from cupyfa.numerics import reference
from cupyfa.planner import choose_kernel as planning
from cupyfa.problem.problem import MOST
from cupyfa.runtime import guard
from cupyfa.runtime.simulator import Simulator

ABLE = able("window", "forward")
EACH = pytest.mark.parametrize("kernel", ABLE, ids=name)
MASKS = (None, "bottom-right", "top-left")
WINDOWS = ((0, 0), (7, None), (None, 7), (20, 3), (0, None), (None, 0), (2**31 - 1, 2**31 - 1))
SHAPES = ((70, 45), (45, 70), (130, 131), (1, 40), (40, 1), (5, 0))
H100 = limits_of("90")


def dense_mask(p):
    """Returns the mask [query, key] of visible pairs, by the definition of a window."""
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
    """Covers guard zones, fully masked rows, GQA, and several blocks and tiles."""
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
    sizes = {"heads": 4, "kv_heads": 2, "M": 100, "N": 140, "d": 20, "dv": 9}
    check_case(kernel, Simulator(schedule=schedule), {**sizes, "window": (30, 9), "scale": -0.2})


@pytest.mark.each_choice
@EACH
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_masked_keys_and_values_never_matter(backend, kernel, poison):
    """Poisons the keys and values outside every row's window, then a value that some rows see."""
    p = problem(40, 512, True, (16, None), d=16, dv=16, dtype=usual_dtype(kernel))
    plan = planning.plan(kernel, p, backend.limits)
    inputs = Case("forward", p).inputs()
    unseen = ~dense_mask(p).any(0)
    inputs["K"][:, :, unseen] = inputs["V"][:, :, unseen] = poison
    spoilt = guard.checked(backend, plan, inputs, {})
    assert np.isfinite(spoilt["O"]).all() and np.isfinite(spoilt["lse"]).all()
    inputs["V"][:, :, 480, 3] = poison
    guard.checked(backend, plan, inputs, {})


# Maps each kernel to the line of its main loop after which TRAP is inserted. TRAP faults in a tile
# that no row of the block sees.
LOOPS = {
    "fa2": "first_key = keys_of_tile.after<Bc>(first_key)) {\n",
    "fa2_coalesced": "first_key = keys_of_tile.after<Bc>(first_key)) {\n",
    "mma_split_q": "first_key = tile.after<Bc>(first_key)) {\n",
    "mma_swizzled": "first_key = tile.after<Bc>(first_key)) {\n",
    **dict.fromkeys(("mma_async", "mma_tma"), "next = tile.after<Bc>(first_key);\n"),
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
    line, family = LOOPS[kernel.name], kernel.name.split("_")[0]
    sees = {"fa2": "tile * Br", "mma": "first_row", "wgmma": "task.row"}[family]
    sees = "tile.row" if " tile." in line else sees
    trap = TRAP.format(first=f"{sees} + 480 - 16", end=f"{sees} + Br + 480 + 2")
    trapped = changed(tmp_path, kernel.name, line, line.replace("\n", "\n" + trap, 1))
    engine = Simulator()
    for window in ((16, 2), (16, None), (None, 2)):
        p = problem(96, 576, window=window, d=16, dv=16, dtype=usual_dtype(trapped))
        plan = planning.plan(trapped, p, engine.limits, Br=64 if family == "wgmma" else 32, Bc=16)
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
    kernel, change = FAULTS[fault]
    p = problem(70, 150, window=(9, None), dtype="float16")
    broken = changed(tmp_path, kernel, *change)
    plan = planning.plan(broken, p, backend.limits, Br=32, Bc=32)
    with pytest.raises(cupyfa.WrongResult, match="window=9,-"):
        guard.checked(backend, plan, inputs_of(plan), {})


def test_window_constants_and_offsets_of_a_plan():
    def plan(**options):
        return cupyfa.plan(kernel="fa2", limits=H100, M=10, N=30, d=8, **options)

    for window, compiled, offsets in (
        ((4, None), {"windowed": True, "causal": False}, (16, 0)),
        ((None, 4), {"windowed": False, "causal": True}, (0, 24)),
    ):
        made = plan(window=window)
        assert compiled.items() <= made.launches[0].constants.items()
        assert (made.problem.window_offset, made.problem.causal_offset) == offsets
    top = plan(window=(4, None), causal="top-left").problem
    assert (top.window_offset, top.causal_offset) == (-4, 0)
    # A window bounded only on the right is a mask that kernels without windows support.
    planning.plan(FORWARD["v1"], problem(5, 9, window=(None, 2)), H100)


def test_offsets_stay_within_32_bits():
    p = problem(MOST, 5, window=(2**31 - 1, 2**31 - 1))
    assert (p.window_offset, p.causal_offset) == (-MOST, 4)


def test_windows_are_shrunk():
    case = Case("forward", problem(90, 70, "bottom-right", (33, None)))
    assert shrinking.shrunk(case, lambda x: True).problem.window == (None, None)
    left = shrinking.shrunk(case, lambda x: (x.problem.left or 0) > 20).problem
    assert left.window[0] in range(21, 34) and left.causal is None
    both = Case("forward", problem(90, 70, window=(33, 12)))
    assert shrinking.shrunk(both, lambda x: x.problem.right is not None).problem.window == (None, 0)
