"""Paged keys in commands and checks: forms, inputs, grids and failures."""

import json
import shlex

import numpy as np
import pytest
from helpers import broken_kernels
from helpers.cli import SIMULATOR, cli

import cupyfa
from cupyfa import Problem
from cupyfa.errors import Unsupported
from cupyfa.lab.verify import checker as checking, grids, shrink, transforms
from cupyfa.lab.verify.case import LAYOUTS, Case
from cupyfa.lab.verify.command_line import words_of_problem
from cupyfa.lab.verify.problem_records import problem_of_record, record_of_problem

SIZES = {"batch": 6, "heads": 4, "kv_heads": 2, "M": 3, "N": 70, "d": 8, "page_size": 16}
P = Problem.of_sizes(**SIZES, causal=True)


def test_a_problem_in_pages_is_the_one_of_its_record_and_of_its_options():
    assert (P.N, P.page_size, P.pages) == (80, 16, 31)
    assert problem_of_record(json.loads(json.dumps(record_of_problem(P)))) == P
    assert "--page-size=16" in words_of_problem(P) and "page_size=16" in str(P)
    assert not any("table" in x or "lengths" in x for x in words_of_problem(P))
    assert P.in_pages(None) == Problem.of_sizes(
        **{**SIZES, "N": 80, "page_size": None}, causal=True
    )
    smaller = transforms.resize(P, batch=2, N=33)
    assert (smaller.batch, smaller.N, smaller.pages, smaller.page_size) == (2, 48, 7, 16)
    texts = {"mask_mod": "key != n", "captured": {"n": 3}}
    options = {"mask_mod": texts.pop("mask_mod")}
    assert transforms.modify(P.in_pages(None), options, {**texts, "page_size": 32}).page_size == 32
    assert transforms.modify(P, options, texts).page_size == 16


def test_only_kernels_that_find_pages_take_them():
    for kernel in ("mma_pipelined", "mma_f64"):
        with pytest.raises(Unsupported, match="does not support"):
            cupyfa.check(kernel, backend="simulator", page_size=16, samples=1)
    done = cupyfa.check(
        "mma_split_kv", backend="simulator", page_size=16, samples=2, dtypes="float32"
    )
    assert done.runs == 0  # float32 keys would have to be rounded before the launch


@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x != "far"])
def test_inputs_in_pages_have_all_that_kernels_must_not_read(layout):
    case = Case("forward", P, 5, "nan", layout)
    inputs = case.inputs()
    lengths, table = inputs["mods.lengths_k"], inputs["mods.page_table"]
    assert sorted(lengths) == [0, 1, 15, 16, 17, 80]
    needed = np.arange(5) < -(-lengths[:, None] // 16)
    assert ((table[needed] >= 0) & (table[needed] < P.pages)).all()
    assert ((table[~needed] < 0) | (table[~needed] >= P.pages)).all()
    used = np.zeros((P.pages, 16), int)
    for b, length in enumerate(lengths):
        keys = np.arange(length)
        np.add.at(used, (table[b, keys // 16], keys % 16), 1)
    for name in ("K", "V"):
        keys = inputs[name].swapaxes(1, 2)
        assert np.isnan(keys[used == 0]).all()
        assert np.isfinite(keys[used > 0]).any()
    assert np.diff(table[lengths == 80]).min() < 0  # pages are not sorted
    of_all = (Case("forward", P, seed).inputs() for seed in range(9))
    first = [x["mods.page_table"][:, 0][x["mods.lengths_k"] > 0].tolist() for x in of_all]
    assert any(len(set(x)) < len(x) for x in first)  # sequences share pages


def test_the_edges_have_pages_of_all_sizes():
    problems = [x.problem for x in grids.cases("edges", "forward") if x.problem.pages]
    assert {x.page_size for x in problems} == {16, 32, 64, 128, 256}
    assert {x.batch for x in problems} >= {1, 5}
    assert not any(x.problem.pages for x in grids.cases("edges", "backward"))
    given = grids.cases("edges", "forward", arrays={"page_size": 32})
    assert {x.problem.page_size for x in given} == {32}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["fa2", "fa2_split_kv", "mma_split_kv"])
def test_kernels_are_checked_on_pages(kernel):
    done = cupyfa.check(
        kernel, backend="simulator", grid="edges", page_size=16, samples=4, dtypes="float16"
    )
    assert done.right == done.runs > 0


def test_commands_take_pages():
    sizes = ("-B", 3, "-H", 2, "-M", 2, "-N", 40, "-d", 8, "--page-size", 16)
    (row,) = json.loads(cli("run", "fa2_split_kv", *sizes, *SIMULATOR, "--format", "json").stdout)
    assert row["passed"] and row["N"] == 48 and "page_size=16" in row["arrays"]


FAULTS = {  # a header, its code, and the faulty replacement
    "the order of pages": (
        "attention/pages.cuh",
        "return max(0, min(listed(row), count - 1));",
        "return row / page_rows;",
    ),
    "a page before the last": (
        "attention/pages.cuh",
        "numbers[min(row / page_rows, most - 1)]",
        "numbers[max(0, row / page_rows - 1)]",
    ),
    "rows of other sequences": (
        "attention/batch.cuh",
        "table.data + batch * table.stride[0]",
        "table.data",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_pages_are_found(tmp_path, monkeypatch, fault):
    """Shrinking does not change the page size of a failure."""
    monkeypatch.setattr(checking, "_SHRINKING", 2.0)
    file, right, wrong = FAULTS[fault]
    made = broken_kernels.Fault("fa2", file, fault, right, wrong, "", None)
    kernel = broken_kernels.broken(tmp_path, made)
    files = tmp_path / "files"
    done = cupyfa.check(
        kernel,
        backend="simulator",
        grid="edges",
        page_size=16,
        samples=6,
        dtypes="float32",
        failures=files,
    )
    first = done.failures[0]
    assert "--page-size=16" in shlex.split(first.command)
    again = cupyfa.lab.replay(first.file, kernel, backend="simulator")
    assert again.stored.case == first.case and again.now.failed
    assert cupyfa.lab.replay(first.file, "fa2", backend="simulator").now.kind == "right"


def test_a_case_is_shrunk_without_its_pages():
    case = shrink.shrunk(Case("forward", P, 7, "nan"), lambda case: case.problem.M > 0)
    assert not case.problem.pages
    kept = shrink.shrunk(Case("forward", P, 7, "nan"), lambda case: case.problem.pages > 0)
    assert (kept.problem.page_size, kept.problem.batch, kept.problem.N) == (16, 1, 16)
