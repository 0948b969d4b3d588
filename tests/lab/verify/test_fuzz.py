"""Random cases: sizes near the limits of a kernel's tiles, stages and schedule."""

import random
from collections import Counter
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

import cupyfa
from cupyfa import Problem, Simulator
from cupyfa.lab.verify.case import LAYOUTS, VALUES, Case
from cupyfa.lab.verify.fuzz import (
    _COMBINED,
    _MOST_WORK,
    _RECOMPUTED,
    _RECOMPUTED_SHARE,
    SAMPLES,
    TOGETHER,
    Fuzz,
    covers,
)
from cupyfa.lab.verify.random_expressions import CAPTURED, draw_integers
from cupyfa.lab.verify.random_modifiers import _FUNCTIONS, MODIFIED, some_arrays
from cupyfa.lab.verify.shrink import shrunk
from cupyfa.lab.verify.sizes import splits_of, work_of
from cupyfa.ladder.common import CLEARING
from cupyfa.ladder.lookup import record_named
from cupyfa.planner import choose_kernel, source
from cupyfa.problem.optional_inputs import OWN_ARRAYS, SEEDS

SIMULATOR = Simulator()
SINGLY = _COMBINED * TOGETHER  # number of samples before those that combine options
# Coverage that the default number of samples must reach for kernels of different families.
SIZES = ("below a tile", "a tile's edge", "several tiles", "GQA", "mask", "softcap")
COVERED = {
    "v3": SIZES,
    "fa2": (*SIZES, "window"),
    "mma_pipelined": (*SIZES, "window", "beyond the ring"),
    "mma_split_kv": (*SIZES, "beyond the ring", "several splits"),
    "mma_slices": (*SIZES, "beyond the ring", "several spans", "slices of d"),
    "wgmma": (*SIZES, "window", "beyond the ring"),
    "wgmma_persistent": (*SIZES, "beyond the ring", "several tasks a block"),
    "wgmma_slices": (*SIZES, "beyond the ring", "slices of d", "several splits"),
    "baseline_backward": ("several rounds", "GQA", "mask", "softcap"),
    "mma_slices_backward": (*SIZES, "several rounds", "slices of d"),
    "wgmma_columns": (*SIZES, "beyond the ring"),
    "softmax_safe": ("below a tile", "a tile's edge", "several tiles"),
}


def samples(name, count=32, **how):
    drawing = Fuzz(cupyfa.kernel(name) if name != "auto" else None, SIMULATOR, **how)
    return [drawing.sample(i) for i in range(count)]


def limits_of(drawn):
    usual = SIMULATOR.limits
    return replace(usual, multiprocessors=drawn.multiprocessors or usual.multiprocessors)


def planned(drawn):
    problem = drawn.case.problem
    return choose_kernel.plan(drawn.kernel, problem, limits_of(drawn), **drawn.constants)


@pytest.mark.parametrize("name", COVERED)
def test_samples_cover_sizes_relative_to_the_tiles(name):
    count = Counter(
        what
        for drawn in samples(name, seed=1)
        for what, has in covers(planned(drawn), SIMULATOR.limits).items()
        if has
    )
    assert {what: count[what] for what in COVERED[name] if count[what] < 4} == {}


def test_what_a_problem_covers():
    kernel, limits = cupyfa.kernel("wgmma"), SIMULATOR.limits
    tile = {"Br": 64, "Bc": 32, "stages": 2}

    def found(M, N, **more):
        p = Problem.of_sizes(M=M, N=N, d=16, dtype="float16", **more)
        return {
            x
            for x, has in covers(choose_kernel.plan(kernel, p, limits, **tile), limits).items()
            if has
        }

    assert found(63, 70) == {"below a tile", "a tile's edge", "several tiles", "beyond the ring"}
    assert found(70, 40) == {"several tiles"}
    assert found(64, 64) == {"a tile's edge", "several tiles"}
    assert found(70, 0, causal=True) == {"several tiles", "no rows or keys", "mask"}
    assert "several splits" not in found(64, 640)
    assert {"GQA", "window", "softcap"} <= found(
        70, 70, heads=2, kv_heads=1, window=(3, None), softcap=2.0
    )


@pytest.mark.parametrize(
    "name",
    [
        "fa2",
        "v3",
        "mma_tf32",
        "wgmma_columns",
        "softmax_safe",
        pytest.param("auto", marks=pytest.mark.slow),
    ],
)
def test_a_sample_is_one_that_the_kernel_runs_and_depends_on_seed_and_number_only(name):
    many = samples(name, 30, seed=3)
    assert all(planned(drawn).problem for drawn in many)
    assert many[7] == samples(name, 8, seed=3)[7]
    cases = {drawn.case for drawn in many}
    assert len(cases) == 30 and not cases & {x.case for x in samples(name, 30, seed=4)}
    for drawn in many:
        p = drawn.case.problem
        assert p.batch * p.heads * p.M * p.N * (p.d + p.dv) <= 2**26


def test_successive_samples_share_what_is_compiled():
    for first in range(0, 28, TOGETHER):
        programs = {
            (program.entry, str(sorted(program.constants.items())), program.dtype)
            for drawn in samples("wgmma", first + TOGETHER)[first or 1 :]
            for program in planned(drawn).programs
        }
        assert len(programs) == 1


@pytest.mark.parametrize("name", ["fa2", "minimal", "mma_two_pass", "auto"])
def test_the_first_sample_is_plain_and_others_are_not(name):
    for seed in range(4):
        first, *rest = (drawn.case for drawn in samples(name, 4, seed=seed))
        plain, others = first.problem, [case.problem for case in rest]
        assert (first.values, first.layout) == ("normal", "bhsd")
        assert (plain.d, plain.dv, plain.is_masked) == (64, 64, False)
        assert not plain.options.changed.keys() - {"scale"}
        assert any(p.is_masked or p.d != 64 for p in others)
    masked = samples(name, 1, options={"causal": "top-left"})[0].case.problem
    assert masked.causal == "top-left"


@pytest.mark.slow
def test_choices_take_turns():
    cases = [drawn.case for drawn in samples("fa2", 200)]
    problems = [case.problem for case in cases]
    assert {case.values for case in cases} == set(VALUES)
    assert {case.layout for case in cases} == set(LAYOUTS) - {"far"}
    assert {p.causal for p in problems} == {None, "bottom-right", "top-left"}
    assert {tuple(x is None for x in p.window) for p in problems} == {
        *((True, True), (True, False), (False, True), (False, False))
    }
    assert {p.dtype.name for p in problems[:16]} == {"float16", "bfloat16", "float32", "float64"}
    assert {0, 1} & {p.M for p in problems} and max(p.d for p in problems) > 256
    assert any(p.options.scale is not None and p.scale < 0 for p in problems)
    assert any(p.dv != p.d for p in problems)


def test_features_that_a_kernel_lacks_are_not_drawn():
    plain = replace(cupyfa.kernel("fa2"), features=())
    for i in range(40):
        p = Fuzz(plain, SIMULATOR).sample(i).case.problem
        assert p.group == 1 and p.d == p.dv and not p.is_masked and p.options.softcap is None


def test_dtypes_and_options_replace_the_drawn_ones():
    options = {"causal": "top-left", "window": (5, None), "scale": 2.0, "softcap": None}
    for drawn in samples("fa2", 12, dtypes=["float64"], options=options):
        p = drawn.case.problem
        assert p.dtype.name == "float64" and p.options.scale == 2.0
        assert (p.causal, p.window, p.options.softcap) == ("top-left", (5, None), None)


def has_text(p):
    return p.options.score_mod is not None or p.options.mask_mod is not None


@pytest.mark.parametrize(
    "kernel", ["fa2", "two_pass", "v3", pytest.param("auto", marks=pytest.mark.slow)]
)
def test_more_than_a_third_of_the_samples_have_texts_or_arrays(kernel):
    record = None if kernel == "auto" else record_named(kernel)
    drawn = [Fuzz(record, SIMULATOR).sample(i).case.problem for i in range(SINGLY)]
    modified = [p for p in drawn if p.modifiers.arrays or p.options.dropout or has_text(p)]
    assert not drawn[0].operands
    if kernel == "v3":
        assert not modified
    else:
        assert len({(p.options, tuple(x.name for x in p.operands)) for p in modified}) >= 5
        assert len(drawn) / 3 < len(modified) < len(drawn) * 2 / 3
        assert sum(p.options.dropout > 0 for p in drawn) >= 8
        assert any(p.wrt for p in drawn) == (kernel == "two_pass")
    given = {"options": {"mask_mod": "x[key] > 0"}, "arrays": {"captured": {"x": "i8[N]"}}}
    if kernel != "v3":
        for i in range(4):
            p = Fuzz(record, SIMULATOR, **given).sample(i).case.problem
            assert [(x.name, x.shape) for x in p.operands] == [("x", (p.N,))]


@pytest.mark.slow
def test_gradients_of_lse_and_seeds_in_memory_are_drawn():
    def of(name):
        problems = [x.case.problem for x in samples(name, 80) if not x.case.problem.lengths]
        return [{x.name for x in p.operands} for p in problems], problems

    arrays, problems = of("two_pass")
    assert sum("dlse" in x for x in arrays) >= 8 and not any(arrays[:16])
    in_memory = [p for p in problems if any(x.name in SEEDS for x in p.operands)]
    assert in_memory and all(p.options.dropout for p in in_memory)
    drawn = {x.dtype for p in in_memory for x in p.operands if x.name in SEEDS}
    assert drawn <= {"int32", "int64", "uint32", "uint64"} and len(drawn) > 1
    assert not any("dlse" in x for x in of("fa2")[0])
    plain = replace(cupyfa.kernel("two_pass"), features=())
    assert not any(Fuzz(plain, SIMULATOR).sample(i).case.problem.operands for i in range(64))


@pytest.mark.parametrize(
    "kernel", ["fa2", "wgmma_columns", "v3", pytest.param("auto", marks=pytest.mark.slow)]
)
def test_the_eighth_group_is_of_ragged_batches(kernel):
    drawn = [x.case for x in samples(kernel, 40)]
    packed = [i for i, case in enumerate(drawn) if case.problem.lengths]
    assert packed == ([] if kernel == "v3" else [*range(28, 32)])
    problems = [drawn[i].problem for i in packed]
    for p in problems:
        q, k = p.lengths
        assert p.pairs == sum(m * n for m, n in zip(q.counts, k.counts, strict=True))
        assert p.sequences >= 2
    if problems:
        assert sum(p.pairs > 0 for p in problems) >= 3
        sides = [x for p in problems for x in p.lengths]
        assert any(0 in x.counts for x in sides) and any(x.before for x in sides)


# Features that the default samples must cover for every seed.
OF_EVERY_SEED = {
    "mma_split_kv": ("pages", "new tokens", "sink", "packed heads", "dropout", "largest scores"),
    "fa2": (
        *("pages", "new tokens", "sequences", "sink"),
        *("mask array", "score_mod", "largest scores"),
    ),
    "mma_pipelined": ("lengths", "packed heads", "sink", "sequences", "score_mod"),
    "wgmma_fp8": ("descales", "sink", "score_mod"),
    "wgmma_columns": ("lengths", "gradients of arrays", "gradient of lse", "score_mod"),
    "two_pass": ("lengths", "gradients of arrays", "gradient of lse", "sink", "score_mod"),
}


def counted(name, seed):
    found = Counter()
    for drawn in samples(name, SAMPLES["simulator"], seed=seed):
        found["new tokens"] += drawn.case.tokens != "cached"
        found.update(what for what, has in covers(planned(drawn), limits_of(drawn)).items() if has)
    return found


@pytest.mark.each_choice
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", OF_EVERY_SEED)
def test_the_default_samples_cover_what_a_kernel_has(name, seed):
    found = counted(name, seed)
    assert [x for x in OF_EVERY_SEED[name] if not found[x]] == []


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
def test_default_samples_reach_every_schedule(seed):
    """Schedules: merging in several rounds, blocks without a tile, and both sorts of counters.

    wgmma_columns counts the finished blocks of a head, or the tiles that persistent blocks fetch.
    """

    def plans(name):
        return [planned(drawn) for drawn in samples(name, SAMPLES["simulator"], seed=seed)]

    assert sum(splits_of(plan) > 32 for plan in plans("mma_split_kv")) > 1
    turned = [x for x in plans("wgmma_persistent") if has_a_block_without_a_tile(x)]
    assert turned
    counts = [y.constants for x in plans("wgmma_columns") for y in x.launches]
    for name in ("finishes", "persistent", "shares_groups"):
        assert any(x.get(name) for x in counts), name


def test_persistent_blocks_of_gradients_take_several_tiles_of_a_head():
    long = [
        x.constants["Bc"] < drawn.case.problem.N
        for drawn in samples("wgmma_columns", SAMPLES["simulator"])
        for x in planned(drawn).launches
        if x.constants.get("persistent")
    ]
    assert any(long)


@pytest.mark.parametrize("name", ["mma_fp16x2", "wgmma_fp16x2"])
def test_sums_over_several_sections_are_drawn(name):
    assert any(x.case.problem.N > 8192 for x in samples(name, SINGLY))


@pytest.mark.parametrize("name", ["fa2", "wgmma", "two_pass", "mma_tangent"])
def test_some_sample_has_no_keys(name):
    assert any(x.case.problem.N == 0 and x.case.problem.M for x in samples(name, SINGLY))


@pytest.mark.parametrize("name", ["fa2", "mma_tma", "wgmma", "wgmma_two_pass"])
def test_some_window_begins_in_the_first_tile_before_a_whole_one(name):
    found = []
    for drawn in samples(name, SINGLY):
        p, keys = drawn.case.problem, planned(drawn).constants.get("Bc", 32)
        if p.left is not None and not p.is_ragged and p.M:
            first = p.N - p.M - p.left
            found.append(0 < first < first + p.M <= keys and 2 * keys <= p.N)
    assert any(found)


@pytest.mark.parametrize("name", ["fa2", "mma_split_kv", "wgmma", "mma_tangent", "two_pass"])
def test_steps_of_scores_are_drawn_for_many_keys(name):
    steps = [planned(x) for x in samples(name, SINGLY) if x.case.values == "steps"]
    tiles = [-(-x.problem.N // x.constants.get("Bc", 32)) for x in steps]
    assert sum(n > 1 for n in tiles) >= 3
    assert name != "mma_split_kv" or any(splits_of(x) > 32 for x in steps)


@pytest.mark.parametrize("name", ["fa2", "mma_f64", "wgmma_fp8"])
@pytest.mark.parametrize("seed", range(3))
def test_row_maxima_of_wide_heads_are_drawn(name, seed):
    problems = [x.case.problem for x in samples(name, SINGLY, seed=seed)]
    wide = [p for p in problems if max(p.d, p.dv) > 128]
    assert any(p.modifiers.has_row_max for p in wide)


@pytest.mark.parametrize("dtype, far", [("float16", 1e30), ("bfloat16", 1e-38), ("float64", 1e269)])
def test_some_of_the_lowest_scores_have_a_scale_far_from_1(dtype, far):
    drawn = [x.case for x in samples("minimal", SAMPLES["simulator"], dtypes=[dtype])]
    scales = np.abs([x.problem.scale for x in drawn if x.values == "lowest"])
    assert 2 <= np.sum(scales == 1) < len(scales)
    assert (scales[scales != 1] >= far).all() if far > 1 else (scales[scales != 1] < 10 * far).all()


def has_a_block_without_a_tile(plan):
    """Returns whether some block gets no tile.

    static_schedule.cuh has the same condition for d > 64 and heads of 2 to 8 tiles.
    """
    p, blocks = plan.problem, plan.launches[0].grid[0]
    tiles = -(-p.M // plan.constants["Br"])
    rest = blocks % tiles if 2 <= tiles <= 8 else 0
    return p.causal and p.dv > 64 and 0 < rest <= blocks / 32 and p.batch * p.heads >= blocks // 2


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
def test_one_group_has_every_function_of_texts(seed):
    texts = [
        str(x.case.problem.options.score_mod)
        for x in samples("two_pass", SAMPLES["simulator"], seed=seed)
    ]
    for function in _FUNCTIONS:
        name = function.split("(")[0]
        assert any(f"0.2 * {name}(" in text for text in texts), name


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_of_a_bias_alone_is_drawn(seed):
    plans = [planned(drawn) for drawn in samples("wgmma_columns", SAMPLES["simulator"], seed=seed)]
    alone = [x.problem for x in plans if any(y.entry == "wgmma_bias_gradient" for y in x.launches)]
    assert len(alone) >= 3 and all({*p.wrt} - {"sink"} == {"bias"} for p in alone)


@pytest.mark.slow
def test_arrays_whose_gradients_are_asked_for_are_drawn_in_any_combination():
    found = {
        (frozenset(p.wrt), len([x for x in p.operands if x.is_differentiable]))
        for seed in range(5)
        for p in (x.case.problem for x in samples("columns", 80, seed=seed))
        if p.wrt
    }
    assert len({len(names) for names, _ in found}) >= 3
    assert any(len(names) < able for names, able in found)
    assert len({names for names, _ in found}) >= 8


def test_sums_do_not_overflow_where_the_reference_is_its_authors():
    own = replace(cupyfa.kernel("fa2"), reference=lambda arrays, p, c: {})

    def values_of(record):
        fuzz = Fuzz(record, SIMULATOR)
        return {fuzz.sample(i).case.values for i in range(SAMPLES["simulator"])}

    assert "lowest" in values_of(cupyfa.kernel("fa2")) and "lowest" not in values_of(own)


@pytest.mark.parametrize("name", ["baseline", "baseline_online"])
def test_scores_that_are_stored_in_float16_do_not_overflow(name):
    drawn = [x.case for seed in range(9) for x in samples(name, SAMPLES["simulator"], seed=seed)]
    lowest = {x.problem.dtype.name for x in drawn if x.values == "lowest"}
    assert lowest == {"bfloat16", "float32", "float64"}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bias", ["bf16[1hmn]", "f32[1hmn]", "f64[1hmn]"])
def test_a_kernel_of_scores_in_a_dtype_can_read_the_lowest_bias(dtype, bias):
    problem = Problem.of_sizes(M=40, N=50, d=8, dtype=dtype, bias=bias)
    read = Case("forward", problem, values="lowest").inputs()["mods.bias"].astype(dtype)
    assert np.isfinite(read).all() and read.min() < -3e38 and read.max() > 1e38


@pytest.mark.parametrize("name, most", [("fa2", 16), ("wgmma_persistent", 16), ("two_pass", 60)])
def test_the_default_samples_take_few_compilations(name, most):
    plans = [planned(drawn) for drawn in samples(name, SAMPLES["simulator"])]
    texts = [{source.text(x) for x in plan.launches} for plan in plans]
    assert len(set().union(*texts[:SINGLY])) <= most
    assert len(set().union(*texts)) <= 1.4 * most


def test_gradients_that_are_computed_again_are_few():
    found = [x.case for x in samples("mma_columns", SAMPLES["simulator"])]
    again = [x.problem for x in found if x.values in _RECOMPUTED and not x.problem.wrt]
    most = _MOST_WORK["simulator"] / _RECOMPUTED_SHARE
    assert len(again) >= 4 and all(work_of(p, "backward") <= most for p in again)


def test_lengths_replace_those_of_every_sample():
    for drawn in samples("fa2", 12, arrays={"lengths": "5,0,40/50"}):
        p = drawn.case.problem
        assert [str(x) for x in p.lengths] == ["5/5,0/0,40/50"] * 2 and p.M == 55


def test_ragged_batches_shrink_to_a_sequence_or_to_a_dense_problem():
    lengths = "_3,20,0,1,33/40,_5:_1,30,7,0,50"
    case = Case("forward", Problem.of_sizes(lengths=lengths, heads=2, d=8, alibi_slopes="bh"))
    assert shrunk(case, lambda x: x.problem.M > 2).problem.lengths is None
    least = shrunk(case, lambda x: bool(x.problem.lengths) and x.problem.pairs > 8).problem
    (m,), (n,) = (x.rows for x in least.lengths)
    assert m * n == 9 and not least.modifiers.arrays[2:]
    empty = shrunk(case, lambda x: bool(x.problem.lengths) and 0 in x.problem.lengths[1].rows)
    assert [str(x) for x in empty.problem.lengths] == ["0", "0"]


def test_arrays_with_sizes_given_as_numbers_keep_them():
    text = {"score_mod": "score + x[key] + y[head] + z[query]"}
    arrays = {"captured": {"x": "f32[4]", "y": "f32[3]", "z": "f32[M]"}}
    drawn = samples("fa2", 8, options=text, arrays=arrays)
    for p in (x.case.problem for x in drawn):
        assert [x.shape for x in p.operands] == [(4,), (3,), (p.M,)]
        assert p.N <= 4 and p.heads <= 3
    assert max(x.case.problem.M for x in drawn) > 4


def test_every_optional_array_is_drawn():
    seeds = map(random.Random, range(20))
    drawn = [some_arrays(pick, lambda feature: True, in_blocks=False) for pick in seeds]
    assert {*chain(*drawn)} == {*OWN_ARRAYS} <= {*chain(*MODIFIED)}


@pytest.mark.parametrize("given", MODIFIED, ids=str)
def test_drawn_texts_shrink_to_nothing(given):
    sizes = {"batch": 2, "heads": 4, "M": 40, "N": 50, "d": 8}
    case = Case("forward", Problem.of_sizes(**sizes, **given, softcap=3.0))
    least = shrunk(case, lambda case: case.problem.N > 2).problem
    assert least.modifiers.features == [] and least.N == 3
    arrays = {x.name for x in case.problem.operands if x.name in OWN_ARRAYS}
    for name in arrays:
        kept = shrunk(case, lambda x, name=name: name in [o.name for o in x.problem.operands])
        assert [x.name for x in kept.problem.operands] == [name] and kept.problem.M == 1


@pytest.mark.parametrize("seed", range(3))
def test_every_operator_of_integers_is_drawn_with_32_and_64_bits(seed):
    text, captured = draw_integers(random.Random(seed))
    assert captured.keys() <= CAPTURED.keys()
    small, wide = text.split(" + 0.05 * ")
    assert not any(name in small.replace("(1 + abs(long[batch]))", "") for name in captured)
    assert wide.count("distant") + wide.count("long[") >= 5
    assert all(f" {x} " in of for of in (small, wide) for x in ("-", "*", "//", "%"))
    drawn = [str(x.case.problem.options.score_mod) for x in samples("fa2", 28, seed=seed)[24:]]
    assert all(text.count("% 7") >= 10 for text in drawn)
    compared = [f"where({x} {sign} " for x in ("key", "score") for sign in ("<", "<=")]
    assert all(x in text for text in drawn for x in compared)


@pytest.mark.parametrize("name", ["fa2", "wgmma_persistent", "mma_two_pass", "fa2_tangent"])
def test_no_sample_is_plain_because_others_were_refused(name):
    drawing = Fuzz(cupyfa.kernel(name), SIMULATOR)
    assert [i for i in range(64) if drawing.sample(i) == drawing._plain(i)] == []


@pytest.mark.parametrize("name", ["mma_pipelined", "mma_tf32", "wgmma", "mma_two_pass"])
def test_some_groups_have_tiles_that_the_planner_does_not_choose(name):
    others, stages = 0, set()
    for seed in range(3):
        for drawn in samples(name, SINGLY, seed=seed)[::TOGETHER]:
            p, tile = drawn.case.problem, planned(drawn).constants
            others += tile != choose_kernel.plan(drawn.kernel, p, limits_of(drawn)).constants
            stages.add(tile["stages"])
    assert others >= 3 and len(stages) >= 2


@pytest.mark.parametrize("name", ["mma_fp16x2_two_pass", "mma_two_pass"])
def test_every_number_of_stages_is_drawn(name):
    tiles = [planned(x).constants for x in samples(name, SINGLY)[::TOGETHER]]
    assert {tile["stages"] for tile in tiles} == {tile["Qs"] for tile in tiles} == {1, 2}


def test_all_inputs_move_in_tangents_of_every_function():
    every = [x.case.problem for x in samples("mma_f64_tangent", 28)[24:]]
    assert {p.options.tangents for p in every} == {"qkv"}


def test_some_last_tiles_lack_one_key_beside_arrays():
    found = [x for x in samples("mma_two_pass", 64) if x.case.problem.operands]
    lengths = [(x.case.problem, planned(x).constants["Bc"]) for x in found]
    assert sum((p.N + 1) % Bc == 0 for p, Bc in lengths if not p.is_ragged) >= 8


def test_some_windows_begin_past_the_last_key():
    past = sum(
        p.left is not None and p.M + p.window_offset > p.N
        for seed in range(3)
        for p in (x.case.problem for x in samples("fa2", SAMPLES["simulator"], seed=seed))
        if not p.is_ragged and p.offset is not None
    )
    assert past >= 3


def test_some_padded_rows_are_more_than_the_threads_of_a_block():
    long = [
        p.M
        for seed in range(3)
        for p in (x.case.problem for x in samples("mma_pipelined", 64, seed=seed))
        if any(x.name == "lengths_q" for x in p.operands)
    ]
    assert any(M > CLEARING for M in long) and any(M <= CLEARING for M in long)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["fa2", "mma_split_kv", "mma_f64_columns", "wgmma_two_pass"])
def test_groups_of_one_three_and_eight_query_heads_are_drawn(name):
    found = [x.case.problem for x in samples(name, SAMPLES["simulator"])]
    assert {1, 3, 8} <= {p.group for p in found}
    assert any(p.kv_heads == 1 and p.group == 8 for p in found)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["mma_columns", "mma_f64_columns", "wgmma_two_pass"])
def test_blocks_share_the_heads_of_a_group_with_several_heads_each(name):
    shared = []
    for drawn in samples(name, SAMPLES["simulator"]):
        splits = max(x.numbers.get("splits", 1) for x in planned(drawn).launches)
        if 1 < splits < drawn.case.problem.group:
            shared.append(drawn.case.problem.kv_heads)
    assert len(shared) >= 2 and max(shared) > 1


def test_some_tiles_have_more_keys_than_a_warp_has_lanes():
    tiles = [x.constants for x in samples("v3", SAMPLES["simulator"])]
    assert {tile["Bc"] for tile in tiles} > {64}
