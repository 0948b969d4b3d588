"""Lengths that differ: longer batch elements of mma_split_kv have more splits of their keys."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.broken_kernels import changed
from helpers.problems import FORWARD, drawn, name

import cupyfa
from cupyfa import Problem
from cupyfa.lab.analysis.resources import limits_of
from cupyfa.ladder.forward import (
    MOST_BALANCED,
    REST,
    for_decoding,
    rounded_first,
    split_kv,
    with_cleared_rest,
)
from cupyfa.planner import choose_kernel as planning

SPLIT = FORWARD["mma_split_kv"]
H100 = limits_of("90")
SMALL = {"Br": 16, "Bc": 16, "Wr": 16, "stages": 2, "blocks_per_sm": 2}
DECODING = {"heads": 32, "kv_heads": 8, "d": 128, "dtype": "bfloat16", "page_size": 16}
LENGTHS = (
    (300, 20, 0, 33),
    (100, 100, 100),
    (1, 0),
    (500, *[3] * 40),  # the warp's lanes find the element in their second turn
    (16, 17, 400, 15, 90),
)


def balanced(splits):
    """Returns mma_split_kv with this number of splits if lengths are equal, at any size."""
    kernel = split_kv(lambda p, c: splits, may_differ=lambda *_: True)
    return with_cleared_rest(rounded_first(kernel), *REST)


def cache_of(lengths, size=None, kv_heads=2, d=24, rows=0):
    """Returns a cache with these lengths, in pages if `size` is given; unused rows are NaN."""
    batch, most = len(lengths), max(max(lengths), rows, 1)
    k, v = drawn(*[(batch, kv_heads, most, d)] * 2, dtype="float16")
    for array in (k, v):
        for b, n in enumerate(lengths):
            array[b, :, n:] = np.nan
    n = np.array(lengths, np.int32)
    if size is None:
        return cupyfa.KVCache(k, v, n)
    count = -(-most // size)
    table = np.random.default_rng(0).permutation(batch * count).reshape(batch, count)
    pages = np.full((2, batch * count, kv_heads, size, d), np.nan, "f2")
    for to, array in zip(pages, (k, v)):
        padded = np.full((batch, kv_heads, count * size, d), np.nan, "f2")
        padded[:, :, :most] = array
        to[table] = padded.reshape(batch, kv_heads, count, size, d).swapaxes(1, 2)
    return cupyfa.KVCache(*pages, n, table.astype(np.int32))


def queries(cache, M=1, heads=4, d=24):
    return drawn((len(np.asarray(cache.lengths)), heads, M, d), dtype="float16")[0]


def planned(batch, N=8192, M=1, kernel=SPLIT, **others):
    problem = Problem.of_sizes(**{**DECODING, "batch": batch, "N": N, "M": M, **others})
    return planning.plan(kernel, problem, H100)


def is_balanced(plan):
    return all(x.constants["balances"] for x in plan.launches)


@pytest.mark.few(6)
@pytest.mark.parametrize("size", [None, 16])
@pytest.mark.parametrize("M", [1, 5])
@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_results_are_right(backend, lengths, splits, M, size):
    cache = cache_of([n and max(n, M) for n in lengths], size)
    how = {"kernel": balanced(splits), "tiles": SMALL, "backend": backend, "check": True}
    cupyfa.attention(queries(cache, M), cache, return_lse=True, **how)


OPTIONS = (
    {"sink": np.linspace(-1, 2, 4)},
    {"return_max": True},
    {"softcap": 5.0},
    {"window": (70, 0)},
)


@pytest.mark.parametrize("options", OPTIONS, ids=name)
def test_options_see_all_splits(backend, options):
    cache = cache_of((200, 7, 0, 60))
    how = {"kernel": balanced(2), "tiles": SMALL, "backend": backend, "check": True}
    cupyfa.attention(queries(cache), cache, **options, **how)


def test_new_tokens_are_counted(backend):
    cache = cache_of((200, 7, 0, 60), rows=220)
    new = drawn(*[(4, 2, 3, 24)] * 2, dtype="float16")
    how = {"kernel": balanced(2), "tiles": SMALL, "backend": backend, "check": True}
    cupyfa.attention(queries(cache, M=3), cache, append=tuple(new), **how)


@pytest.mark.few(6)
@pytest.mark.parametrize("M, size", [(1, 16), (5, None)])
@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_no_row_is_left_to_be_repaired(tmp_path, lengths, splits, M, size):
    """A row whose keys no block reads may be NaN, and then a repair would hide the fault."""
    changed(tmp_path, SPLIT.name, "repair_rows<d", "__builtin_trap(), repair_rows<d")
    merge, right = tmp_path / "merge_splits.cu", "repair_row<d"
    assert merge.read_text().count(right) == 1
    merge.write_text(merge.read_text().replace(right, f"__builtin_trap(), {right}"))
    cache = cache_of([n and max(n, M) for n in lengths], size)
    how = {"kernel": replace(balanced(splits), folder=tmp_path), "tiles": SMALL, "check": True}
    cupyfa.attention(queries(cache, M), cache, backend="simulator", **how)


# Traps if a split has more keys than the mean of S - 1 splits of each element, in whole tiles: with
# S blocks for each, at most one split of an element is shorter than the others.
RIGHT = "index / tiles, num_splits);"
TRAP = RIGHT + " if (split.end - split.first_key > {}) __builtin_trap();"


@pytest.mark.parametrize("splits", [2, 3])
@pytest.mark.parametrize("lengths", [(320, 16, 16, 32), (96, 96, 96, 96), (90, 20, 1, 70)], ids=str)
def test_no_split_has_more_than_its_share_of_the_keys(tmp_path, lengths, splits):
    share = -(-sum(-(-n // 16) for n in lengths) // (4 * (splits - 1))) * 16
    changed(tmp_path, SPLIT.name, RIGHT, TRAP.format(share))
    cache = cache_of(lengths)
    how = {"kernel": replace(balanced(splits), folder=tmp_path), "tiles": SMALL, "check": True}
    cupyfa.attention(queries(cache), cache, backend="simulator", **how)


def test_the_grid_has_at_least_two_splits_for_each_element():
    for batch, N in (2, 32768), (8, 8192), (16, 16384), (64, 4096):
        plan, alike = (planned(batch, N, page_size=x) for x in (64, None))
        assert is_balanced(plan) and not is_balanced(alike)
        splits = alike.launches[0].grid[0] // (batch * 8)
        assert plan.launches[0].grid[0] == batch * 8 * max(splits, 2)
        assert plan.launches[1].grid[0] == batch * 32
        assert plan.launches[0].numbers["num_splits"] == splits
        assert plan.arrays["sum_splits"][0] == (batch * 32 * MOST_BALANCED,)


@pytest.mark.parametrize(
    "batch, others",
    [
        (1, {}),  # nothing to balance
        (8, {"window": (1000, 0)}),  # all elements see about as many keys
        (8, {"M": 64}),  # many rows of each key head
        (16, {"N": 4096, "page_size": 64}),  # one split, which needs no merge
        (8, {"N": 1024}),  # too few keys
        (64, {"N": 32768, "M": 4}),  # too much scratch
        (100, {"N": 32768}),  # many tiles, which the device balances
        (2, {"kv_heads": 1, "N": 1 << 20}),  # more splits than half of the scratch
    ],
    ids=str,
)
def test_other_problems_have_equal_numbers_of_splits(batch, others):
    assert not is_balanced(planned(batch, **others))


def test_a_fixed_number_of_splits_is_that_of_each_element():
    kernel = for_decoding("auto", 5, "bfloat16", 4)
    plan = planned(8, kernel=kernel)
    assert not is_balanced(plan) and plan.launches[0].numbers["num_splits"] == 5


def test_results_are_the_same_bits_in_every_run(backend):
    cache = cache_of((300, 20, 0, 33))
    how = {"kernel": balanced(2), "tiles": SMALL, "backend": backend}
    first, again = (cupyfa.attention(queries(cache), cache, **how) for _ in range(2))
    np.testing.assert_array_equal(first, again)
