"""Checks with wrong lengths and offsets, and with other inputs that few calls have."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from helpers import broken_kernels

import cupyfa
from cupyfa import Problem, Simulator
from cupyfa.lab.verify import tasks, transforms, unchecked
from cupyfa.lab.verify.case import FINITE, Case
from cupyfa.planner import choose_kernel

SIMULATOR = Simulator()
SIZES = {"batch": 3, "heads": 4, "kv_heads": 2, "M": 20, "N": 30, "d": 8}
PACKED = Problem.of_sizes(lengths="_2,5,0,9,_4:3,40,7", heads=2, d=8)


def cases(p, count=40, operation="forward", **how):
    return [Case(operation, p, seed, **how) for seed in range(count)]


@pytest.mark.parametrize("sides", ["q", "k", "qk"])
def test_wrong_lengths_count_as_the_nearest_right_ones(sides):
    p = transforms.pad(Problem.of_sizes(**SIZES), sides)
    ends = Counter()
    for case in cases(p, 100):
        right = case.inputs()
        wrong = unchecked.with_wrong_lengths(p, right)
        for name in right.keys() - {"mods.lengths_q", "mods.lengths_k"}:
            assert wrong[name] is right[name]
        for side, most in zip("qk", (p.M, p.N), strict=True):
            if side in sides:
                x, y = right[f"mods.lengths_{side}"], wrong[f"mods.lengths_{side}"]
                assert (y.clip(0, most) == x).all() and x.dtype == y.dtype
                ends += Counter(below=int((y < 0).sum()), above=int((y > most).sum()))
    assert min(ends["below"], ends["above"]) >= 10


def test_wrong_offsets_lead_out_of_the_arrays_and_share_no_row():
    inputs = Case("forward", PACKED).inputs()
    outside = Counter()
    for seed in range(60):
        moved = np.random.default_rng(seed).integers(0, 9, 4).cumsum().astype(np.int32)
        given = {**inputs, "mods.cu_seqlens_q": moved}
        wrong, before = unchecked.with_undefined_results(PACKED, given), outside.total()
        for side, rows in zip("qk", (PACKED.M, PACKED.N), strict=True):
            offsets = wrong[f"mods.cu_seqlens_{side}"].astype(int)
            outside["negative"] += bool((offsets < 0).any())
            outside["beyond"] += bool((offsets > rows).any())
            outside["begins beyond"] += bool(offsets[0] > rows)
            inside = [
                range(first, min(end, rows)) for first, end in pairwise(offsets) if 0 <= first < end
            ]
            assert sum(map(len, inside)) == len(set().union(*inside))
        assert outside.total() > before
    assert min(outside["negative"], outside["beyond"]) >= 20 and outside["begins beyond"] >= 5
    assert unchecked.with_undefined_results(Problem.of_sizes(**SIZES), {}) is None


def test_wrong_offsets_of_long_batches_leave_few_rows():
    long = Problem.of_sizes(lengths="_100,300,70,0,90:300,200,80,9", heads=64, d=64)
    given, beyond = Case("forward", long).inputs(), 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        wrong = unchecked.with_undefined_results(
            long, {**given, "Q": rng.random(given["Q"].shape, np.float32)}
        )
        sides = [wrong[f"mods.cu_seqlens_{side}"].astype(int) for side in "qk"]
        pairs = [
            max(min(q[1], long.M) - max(q[0], 0), 0) * max(min(k[1], long.N) - max(k[0], 0), 0)
            for q, k in zip(*map(pairwise, sides), strict=True)
        ]
        assert sum(pairs) <= long.M * long.N
        beyond += bool(sides[0][0] > long.M)
        assert (sides[0] < 0).any() or (sides[0] > long.M).any()
    assert beyond >= 5


def test_wrong_pages_and_lengths_of_a_cache_leave_other_inputs():
    p = Problem.of_sizes(**{**SIZES, "M": 1}, page_size=16)
    wrong = Counter()
    for case in cases(p, 200):
        right = case.inputs()
        assert unchecked.with_wrong_lengths(p, right) == right
        found = unchecked.with_undefined_results(p, right)
        assert all(found[name] is right[name] for name in "QKV")
        table, lengths = found["mods.page_table"], found["mods.lengths_k"]
        needed = np.arange(table.shape[1]) < -(-right["mods.lengths_k"][:, None] // 16)
        wrong["pages"] += int((needed & ((table < 0) | (table >= p.pages))).sum())
        wrong["lengths"] += int(((lengths < 0) | (lengths > p.N)).sum())
    assert min(wrong.values()) >= 20
    long = Problem.of_sizes(batch=2, heads=4, M=64, N=512, d=64, page_size=16)
    assert unchecked.with_undefined_results(long, {}) is None


@pytest.mark.parametrize("kernel", ["fa2", "mma_split_kv"])
@pytest.mark.parametrize("rows", [{"lengths": "5,30,9:3,40,7"}, {**SIZES, "page_size": 16}])
def test_kernels_stay_inside_arrays_whatever_lengths_say(kernel, rows):
    p = Problem.of_sizes(**{"heads": 4, "d": 8, **rows}, dtype="float16", causal=True)
    kernel = "mma_pipelined" if p.lengths and kernel != "fa2" else kernel
    plan = choose_kernel.plan(cupyfa.kernel(kernel), p, SIMULATOR.limits)
    for case in cases(p, 2):
        readable = tasks.unchecked_inputs(SIMULATOR, plan, case.inputs())
        tasks.run_with_undefined_results(SIMULATOR, plan, readable)


@pytest.mark.slow
def test_a_kernel_that_trusts_offsets_is_found(tmp_path):
    right, wrong = "if (first < 0 || end <= first)", "if (end <= first)"
    fault = broken_kernels.Fault(
        "fa2", "attention/batch.cuh", "a negative offset is trusted", right, wrong, "", None
    )
    broken = broken_kernels.broken(tmp_path, fault)
    checked = cupyfa.check(broken, backend="simulator", samples=6, lengths="20,9,30")
    assert [x.outcome.kind for x in checked.failures][:1] == ["simulator fault"]


def test_some_sinks_are_infinite_and_some_far_above_all_scores():
    p = Problem.of_sizes(**SIZES, sink="bh")
    for values in ("normal", "scales", "nan", "inf"):
        for operation in ("forward", "backward"):
            sinks = [x._read(sink_of(p)) for x in cases(p, 40, operation, values=values)]
            infinite = sum(bool((x == np.inf).any()) for x in sinks)
            spoils = values not in FINITE and operation == "forward"
            if values in ("nan", "inf"):
                assert infinite == 40
            else:
                assert 10 <= infinite <= 30 if spoils else infinite == 0
            assert 10 <= sum(bool((x == -np.inf).any()) for x in sinks) <= 30
            assert 10 <= sum(bool((np.isfinite(x) & (x > 10)).any()) for x in sinks) <= 30


def sink_of(p):
    (found,) = (x for x in p.operands if x.name == "sink")
    return found


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_heads_of_q_and_k_differ_by_powers_of_two_that_cancel(dtype, page_size):
    p = Problem.of_sizes(**SIZES, dtype=dtype, page_size=page_size)
    sizes, scores = [], []
    for case in cases(p, 12, values="scales"):
        inputs = case.inputs()
        q, k = (inputs[name].astype(np.float64) for name in "QK")
        sizes += [*np.log2(q.std((2, 3))).ravel()]
        heads_of_q, heads_of_k = q.std((0, 2, 3))[::2], np.nanstd(k, (0, 2, 3))
        scores += [*(heads_of_q * heads_of_k)] if page_size else []
        if not page_size:
            scores += [*(q.std((2, 3))[:, ::2] * k.std((2, 3))).ravel()]
    least = {"float16": 3, "float32": 30, "float64": 200}[dtype]
    assert np.ptp(sizes) > least and 0.3 < np.median(scores) < 3


@pytest.mark.parametrize("dtype, least", [("float16", 3), ("float32", 25), ("float64", 200)])
def test_values_of_some_keys_are_smaller_than_those_of_others(dtype, least):
    smaller = Counter()
    for case in cases(Problem.of_sizes(**SIZES, dtype=dtype), values="scales"):
        sizes = np.log2(np.abs(case.inputs()["V"].astype(np.float64)).max(3))
        before, after = sizes[..., 0], sizes[..., -1]
        smaller += Counter(
            first=bool((after > before + least).any()), last=bool((before > after + least).any())
        )
    assert min(smaller["first"], smaller["last"]) >= 5


@pytest.mark.parametrize("value, least", [("nan", 0), ("inf", 20)])
def test_the_last_batch_element_and_scores_of_a_query_are_not_finite(value, least):
    p = Problem.of_sizes(**SIZES, dtype="float32", scale=-0.3)
    without = 0
    for case in cases(p, values=value):
        inputs = {name: x.astype(np.float64) for name, x in case.inputs().items()}
        assert not np.isfinite(inputs["V"][-1]).all()
        assert not np.isfinite(inputs["Q"][-1]).all()
        for b, h, row, _ in np.argwhere(~np.isfinite(inputs["Q"]))[-1:]:
            with np.errstate(invalid="ignore"):  # of both infinities
                scores = inputs["K"][b, h // p.group] @ inputs["Q"][b, h, row] * p.scale
            without += bool((scores == -np.inf).all())
    assert least <= without <= 35


@pytest.mark.parametrize("dtype, value", [("float16", 2**10), ("bfloat16", 2**90)])
@pytest.mark.parametrize("scale", [0.125, -1.0])
def test_a_key_or_a_range_of_keys_has_most_or_least_weight(dtype, value, scale):
    p = Problem.of_sizes(**{**SIZES, "N": 200}, dtype=dtype, scale=scale)
    highest = Counter()
    for case in cases(p, 12, values="steps"):
        inputs = {name: x.astype(np.float64) for name, x in case.inputs().items()}
        scores = inputs["Q"] @ inputs["K"].repeat(p.group, 1).swapaxes(2, 3) * p.scale / np.log(2)
        steps = scores.max(3) - np.median(scores, 3)
        assert steps.max() < 160 and np.isfinite(inputs["V"]).all()
        highest += Counter(far=int((steps > 28).sum()), near=int((steps < 28).sum()))
        single = scores > scores.max(3, keepdims=True) - 20
        highest["one"] += bool((single.sum(3)[steps > 60] == 1).all())
        sizes = np.abs(inputs["V"]).max(3)
        assert sizes.max() > value and sizes[..., 0].max() != sizes[..., -1].max()
    assert min(highest["far"], highest["near"]) > 100 and 2 <= highest["one"] <= 10


def test_all_scores_with_an_infinite_column_of_keys_may_be_lowest():
    p = Problem.of_sizes(**SIZES, dtype="float32", scale=-0.3)
    without, signs = 0, Counter()
    for case in cases(p, values="inf"):
        inputs = {name: x.astype(np.float64) for name, x in case.inputs().items()}
        signs += Counter(np.sign(inputs["V"][np.isinf(inputs["V"])]).tolist())
        for b, h in np.argwhere(np.isinf(inputs["K"]).any(3).all(2)):
            queries = inputs["Q"][b, h * p.group : (h + 1) * p.group]
            with np.errstate(invalid="ignore"):  # of both infinities
                scores = queries @ inputs["K"][b, h].T * p.scale
            without += bool((scores == -np.inf).all())
    assert 10 <= without <= 30 and min(signs[-1], signs[1]) >= 20


def test_descales_of_q_and_k_are_far_from_1_and_cancel():
    p = transforms.add_descales(Problem.of_sizes(**SIZES, dtype="float8_e4m3fn"), "qkv")
    found = [case.inputs() for case in cases(p, 12)]
    q, k, v = (np.array([x[f"mods.{y}_descale"] for x in found]) for y in "qkv")
    assert np.abs(q).max() > 2**57 and np.abs(q).min() < 2**-57
    assert np.abs(np.log2(np.abs(q * k))).max() <= 4 and np.abs(np.log2(np.abs(v))).max() <= 2
    assert all(x.min() < 0 < x.max() for x in (q, k, v))


def test_some_masks_and_biases_hide_whole_rows_and_keys():
    p = Problem.of_sizes(**SIZES, mask="1hmn", bias="1hmn")
    mask, bias = (x for name in ("mask", "bias") for x in p.operands if x.name == name)
    hidden = [~case._read(mask) for case in cases(p)]
    lowest = [case._read(bias) == -np.inf for case in cases(p, values="inf")]
    for drawn in (hidden, lowest):
        for axis in (2, 3):
            count = sum(bool(x.all(axis).any()) for x in drawn)
            assert 10 <= count <= 35
    assert not any((case._read(bias) == -np.inf).any() for case in cases(p, 8))


def test_the_last_table_of_pages_is_often_full():
    p = Problem.of_sizes(**{**SIZES, "M": 2, "N": 70}, page_size=16)
    full = sum(case.inputs()["mods.lengths_k"][-1] == p.N for case in cases(p))
    assert 10 <= full <= 25


@pytest.mark.parametrize("dtype, least", [("float16", 2e9), ("bfloat16", 1e35), ("float32", 1e35)])
def test_one_score_is_far_above_or_below_all_others(dtype, least):
    p, found = Problem.of_sizes(**SIZES, dtype=dtype), Counter()
    for case in cases(p, 24, values="largest"):
        inputs = {name: x.astype(np.float64) for name, x in case.inputs().items()}
        scores = inputs["Q"] @ inputs["K"].repeat(p.group, 1).swapaxes(2, 3)
        far = np.argwhere(np.abs(scores) > 100)
        assert (np.abs(scores[tuple(far.T)]) > least).all()
        assert len(far) == p.batch * p.group == len({(b, h) for b, h, *_ in far})
        (row, key), *others = {(row, key) for *_, row, key in far.tolist()}
        assert not others
        found[(row, key) in ((0, 0), (p.M - 1, p.N - 1))] += 1
        found["above"] += bool(scores.max() > least)
    assert min(found[True], found[False], found["above"], 24 - found["above"]) >= 4


@pytest.mark.parametrize("form", ["h", "f16[bh]"])
def test_some_finite_sinks_are_near_an_end_of_the_range(form):
    p, signs = Problem.of_sizes(**SIZES, dtype="bfloat16", sink=form), Counter()
    for case in cases(p, 30):
        (sinks,) = (x.astype(np.float64) for name, x in case.inputs().items() if "sink" in name)
        signs += Counter(np.sign(sinks[np.isfinite(sinks) & (np.abs(sinks) > 5e4)]).tolist())
    assert min(signs[-1], signs[1]) >= 5
