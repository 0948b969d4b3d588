"""Sweeps: the notation of values, and the problems of all combinations."""

import ast
import json

import pytest
from helpers.cli import table

from cupyfa.lab.bench import sweeps
from cupyfa.lab.bench.sweeps import parsed, problems
from cupyfa.lab.verify.problem_records import problem_of_record, record_of_problem


@pytest.mark.parametrize("text, name, values", table("lab/bench/sweeps.txt"))
def test_values(text, name, values):
    assert parsed(text) == (name, ast.literal_eval(*values))


def test_every_combination_in_order_and_once():
    found = problems("forward", {"M": [8, 16], "d": [4, 8, 4], "batch": 1})
    assert [(p.M, p.d) for p in found] == [(8, 4), (8, 8), (16, 4), (16, 8)]


def test_names_of_gradients_and_a_shape_are_one_value():
    sizes = {"heads": 2, "M": 8, "d": 4, "bias": (1, 2, 8, 8), "sink": "h"}
    (p,) = problems("backward", {**sizes, "wrt": ("bias", "sink")})
    assert p.wrt == ("bias", "sink") and p.operands[0].shape == (1, 2, 8, 8)
    found = problems("backward", {**sizes, "bias": ("1hmn", "11mn"), "wrt": ["bias", "bias,sink"]})
    assert len(found) == 4


def test_missing_sizes_have_defaults():
    (p,) = problems("forward", {"M": 100, "kv_heads": None})
    assert (p.batch, p.heads, p.kv_heads, p.M, p.N, p.d, p.dv) == (4, 16, 16, 100, 100, 64, 64)
    assert (p.dtype.name, p.causal, p.scale) == ("float32", None, 1 / 8)
    assert [p.N for p in problems("forward", {"M": [8, 16], "N": 5})] == [5, 5]


def test_a_cache_has_lengths_or_as_many_keys_for_all():
    sizes = {"cache": "paged", "heads": 4, "kv_heads": 2, "d": 8, "lengths": "40,0,7"}
    (p,) = problems("forward", {**sizes, "page": 16})
    assert (p.batch, p.M, p.N, p.page_size, p.pages, p.causal) == (3, 1, 48, 16, 4, "bottom-right")
    assert p.row()["lengths"] == "40,0,7" and p.row()["arrays"] == "cache in pages of 16"
    assert problem_of_record(json.loads(json.dumps(record_of_problem(p)))) == p
    (p,) = problems("forward", {**sizes, "cache": "contiguous", "M": 2, "N": 64})
    assert (p.batch, p.M, p.N, p.page_size) == (3, 2, 64, 0) and "contiguous cache" in str(p)
    (p,) = problems("forward", {"cache": "contiguous", "batch": 2, "N": 30})
    assert (p.batch, p.M, p.N, str(p.cached)) == (2, 1, 30, "30,30")


def test_a_cache_takes_options_that_change_nothing_in_decoding():
    plain = {"cache": "contiguous", "heads": 2, "d": 8, "lengths": "40,0,7", "M": 7}
    others = {"causal": True, "dropout": 0.0, "bias": None, "block_mask": False}
    assert problems("forward", {**plain, **others}) == problems("forward", plain)


def test_the_default_grid():
    sizes = {"tokens": 16384, "width": 2048, "M": [512, 16384], "d": [64, 256], "causal": [0, 1]}
    found = problems("forward", {**sizes, "causal": [False, True]})
    assert len(found) == 8
    assert all(p.batch * p.M == 16384 and p.heads * p.d == 2048 == p.kv_heads * p.d for p in found)


def test_a_softmax_has_rows_and_no_d():
    (p,) = problems("softmax", {"d": 32})
    assert (p.M, p.N, p.d) == (16384, 4096, 0)
    assert [p.M for p in problems("softmax", {"M": [5, 7], "N": 3})] == [5, 7]
    with pytest.raises(ValueError, match="have no size or option d; .* are M, N, dtype$"):
        sweeps.refuse_foreign(["softmax"], {"M": 3, "d": 4, "heads": None})
    for operations in (["forward"], ["softmax", "forward"]):
        with pytest.raises(
            ValueError,
            match='forward kernels have no size or option Br; .*tiles={"Br": 5}',
        ):
            sweeps.refuse_foreign(operations, {"M": 3, "tokens": 4, "Br": 5})
