"""Combinations of options: which pairs a kernel supports, and how many of them a check meets."""

import random

import pytest

import cupyfa
from cupyfa import Problem, Simulator
from cupyfa.lab.verify.case import Case
from cupyfa.lab.verify.fuzz import _COMBINED, SAMPLES, TOGETHER, Fuzz
from cupyfa.lab.verify.option_pairs import (
    _ARRAYS,
    _OF_BOTH,
    TEXTS_IN_TURN,
    Combination,
    Combiner,
    options_of,
    pairs_met,
)
from cupyfa.lab.verify.sizes import some_lengths, with_long_rest, without_rows
from cupyfa.planner import choose_kernel
from cupyfa.problem.optional_inputs import OWN_ARRAYS

SIMULATOR = Simulator()


def combiner(name, dtypes=("float16", "float32")):
    kernel = cupyfa.kernel(name)
    return Combiner(
        kernel.operation, dtypes, lambda p: choose_kernel.can(kernel, p, SIMULATOR.limits)
    )


@pytest.mark.parametrize("name", ["fa2", "mma_split_kv", "two_pass", "wgmma_columns", "v1"])
def test_default_samples_meet_the_pairs_of_options_that_a_kernel_supports(name):
    kernel, count = cupyfa.kernel(name), SAMPLES["simulator"]
    drawing = Fuzz(kernel, SIMULATOR, seed=1)
    met = [pairs_met(drawing.sample(i).case) for i in range(count)]
    supported = combiner(name, drawing._dtypes).pairs
    assert len(supported - set().union(*met)) <= len(supported) / 50
    # The samples before the combinations, whose options are chosen independently, meet fewer.
    assert len(supported - set().union(*met[: _COMBINED * TOGETHER])) > len(supported) / 4


def test_pairs_that_exclude_each_other_are_not_supported():
    pairs = combiner("fa2").pairs
    assert {("sequences", "sink"), ("float32 results", "pages"), ("mask_mod", "sink")} <= pairs
    excluded = {("bias", "sequences"), ("offset", "pages"), ("lengths", "pages")}
    assert not {tuple(sorted(pair)) for pair in excluded} & pairs
    assert not any("gradient" in name for pair in pairs for name in pair)
    assert not any("float32 results" in pair for pair in combiner("fa2", ["float32"]).pairs)
    gradients = combiner("two_pass").pairs
    assert ("gradient of captured arrays", "gradient of sink") in gradients
    assert ("gradient of bias", "lengths") not in gradients
    assert combiner("softmax_safe", ["float32"]).pairs == set()


def test_combinations_meet_all_pairs_and_end():
    drawing, met, sizes = combiner("two_pass"), set(), []
    while combination := drawing.draw(met, random.Random(len(sizes))):
        assert combination.pairs - met
        met |= combination.pairs
        sizes.append(len(combination.names))
    assert met >= drawing.pairs and max(sizes) >= 10 and len(sizes) < 30


def test_a_combination_is_a_problem_with_its_options():
    drawing = combiner("two_pass")
    for seed in range(8):
        combination = drawing.draw(set(), random.Random(seed))
        problem = combination.problem(
            random.Random(seed), TEXTS_IN_TURN[seed % 3], M=40, N=50, d=16
        )
        found = {name for name, has in options_of(problem).items() if has}
        later = {"offset", "lengths"}  # are added when sizes are known
        of_gradients = {x for x in combination.names if x.startswith("gradient of ")}
        assert combination.names - later - of_gradients <= found
        assert bool(problem.wrt) == bool(of_gradients - {"gradient of lse"})


def test_what_an_option_needs_is_added():
    assert Combination.of({"block mask", "offset"}, "float32").names >= {"mask array", "mask"}
    assert Combination.of({"block mask", "mask_mod"}, "float32").names == {"block mask", "mask_mod"}


def test_pairs_of_a_case_include_gradients_and_new_tokens():
    sizes = {"M": 4, "N": 40, "d": 8, "heads": 2}
    of_sink = Problem.of_sizes(**sizes, sink="h", wrt="q,sink", softcap=2.0)
    assert pairs_met(Case("backward", of_sink)) == {
        *(("gradient of sink", "sink"), ("gradient of sink", "softcap"), ("sink", "softcap"))
    }
    paged = Problem.of_sizes(**sizes, page_size=16)
    assert pairs_met(Case("forward", paged, tokens="appended")) == {("new tokens", "pages")}
    assert pairs_met(Case("forward", paged)) == set()


def test_every_option_is_combined():
    """Fails for a new option or array that combinations leave out."""
    drawn = {*_OF_BOTH, "GQA", "descales"}  # these two are drawn for every group
    assert {*options_of(Problem.of_sizes(M=4, d=8))} <= drawn
    assert {*_ARRAYS.values()} == {*OWN_ARRAYS}


def test_what_the_caller_chooses_is_not_combined():
    kernel, first = cupyfa.kernel("fa2"), _COMBINED * TOGETHER
    for i in range(first, first + TOGETHER):
        given = Fuzz(kernel, SIMULATOR, options={"causal": "top-left"}).sample(i).case.problem
        assert given.causal == "top-left" and {x.name for x in given.operands} <= {"row_max"}


def test_samples_of_combinations_depend_on_seed_and_number_only():
    kernel, last = cupyfa.kernel("fa2"), SAMPLES["simulator"] - 1
    alone = Fuzz(kernel, SIMULATOR, seed=2).sample(last)
    drawing = Fuzz(kernel, SIMULATOR, seed=2)
    assert alone == [drawing.sample(i) for i in range(last + 1)][-1]


def test_groups_after_all_pairs_are_met_draw_other_sizes():
    drawing = Fuzz(cupyfa.kernel("two_pass"), SIMULATOR)
    last = SAMPLES["simulator"] // TOGETHER - 1
    first = drawing._first_alike(last)
    assert _COMBINED <= first < last

    def cases(group):
        return [drawing.sample(group * TOGETHER + i).case for i in range(TOGETHER)]

    def kinds(group):
        return {(x.problem.dtype, x.problem.d, *x.problem.wrt) for x in cases(group)}

    assert kinds(first) == kinds(last) and not {*cases(first)} & {*cases(last)}


def test_rare_lengths():
    for used in (False, True):
        for seed in range(6):
            packed = some_lengths(used=used)
            sides = without_rows(packed, random.Random(seed))
            assert {x.total for x in sides} >= {2} and 0 in {sum(x.counts) for x in sides}
            assert [len(x.rows) for x in sides] == [len(x.rows) for x in packed]
            assert [x.used is None for x in sides] == [not used] * 2
            longer = with_long_rest(packed, random.Random(seed))
            assert all(b.total - a.total > 256 for a, b in zip(packed, longer))
