"""Ragged batches in commands and checks: notation of lengths, inputs, references, failures."""

import json
import shlex

import numpy as np
import pytest
from helpers import broken_kernels
from helpers.cli import SIMULATOR, cli

import cupyfa
from cupyfa import Problem
from cupyfa.lab.bench import sweeps
from cupyfa.lab.verify import checker as checking, sampling, transforms
from cupyfa.lab.verify.case import Case
from cupyfa.lab.verify.command_line import words_of_problem
from cupyfa.lab.verify.problem_records import problem_of_record, record_of_problem
from cupyfa.ladder.operations import OPERATIONS, Excerpt
from cupyfa.problem.lengths import lengths_of, shown_lengths
from cupyfa.problem.optional_inputs import LENGTHS

BATCH = "_2,5,0,9,3/7,_4:9,4,5,20"
OPTIONS = {"heads": 4, "kv_heads": 2, "d": 8, "causal": True, "alibi_slopes": "bh", "dlse": True}
CASE = Case("backward", Problem.of_sizes(lengths=BATCH, **OPTIONS), seed=3)


@pytest.mark.parametrize(
    "given, text",
    [
        ([3, 0, 5], "3,0,5"),
        (np.array([3, 5]), "3,5"),
        ("3,2/5", "3/3,2/5"),
        (([3, 0], [5, 7]), "3,0:5,7"),
        ("_1,3,_2:4", "_1,3,_2:4"),
        ("4:4", "4"),
    ],
    ids=str,
)
def test_lengths_are_texts_or_lists(given, text):
    lengths = lengths_of(given)
    assert shown_lengths(lengths) == text
    assert lengths_of(text) == lengths


def test_many_lengths_have_a_short_form():
    lengths = lengths_of([130, *range(200, 214), 3978])
    assert shown_lengths(lengths, short=True) == "16 of 130-3978"
    assert shown_lengths(lengths_of([7] * 9), short=True) == "9 of 7"
    (offsets, *_), counts = lengths[0].offsets, lengths[0].counts
    assert offsets == 0 and counts[-1] == 3978


def test_a_problem_is_the_one_of_its_record_and_of_its_options():
    p = CASE.problem
    assert problem_of_record(json.loads(json.dumps(record_of_problem(p)))) == p
    options = {x.partition("=")[0]: x.partition("=")[2] for x in words_of_problem(p)}
    assert (
        options["--lengths-q"] == "_2,5/5,0/0,9/9,3/7,_4" and options["--lengths-k"] == "9,4,5,20"
    )
    assert (p.M, p.N, p.sequences, p.batch) == (27, 38, 4, 1)
    assert [x.name for x in p.operands if x.name in LENGTHS] == [*LENGTHS[:3]]


def test_several_batches_are_swept():
    several = sweeps.problems("forward", {"lengths": [[3, 4], "5:6"]})
    assert [str(p.lengths[1]) for p in several] == ["3,4", "6"]
    assert len(sweeps.problems("forward", {"lengths": [3, 4]})) == 1


def test_rows_of_no_sequence_are_poison():
    inputs = CASE.inputs()
    unused = ~CASE.problem.lengths[0].is_in_a_sequence()
    assert unused.sum() == 10
    for name in ("Q", "dO"):
        assert np.isnan(inputs[name][:, :, unused]).all()
        assert np.isfinite(inputs[name][:, :, ~unused]).all()
    assert not inputs["O"][:, :, unused].any() and (inputs["lse"][:, :, unused] == -np.inf).all()
    (kind,) = {
        Case("forward", transforms.leave_out(CASE.problem, "dlse"), values=x) for x in ("nan",)
    }
    keys = np.isnan(kind.inputs()["V"][0, 0]).all(-1)
    starts, counts = CASE.problem.lengths[1].offsets, CASE.problem.lengths[1].counts
    assert any(keys[a : a + n].all() for a, n in zip(starts, counts, strict=False) if n)


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_an_excerpt_is_a_part_of_the_whole(operation):
    p = CASE.problem if operation == "backward" else transforms.leave_out(CASE.problem, "dlse")
    inputs, of = Case(operation, p, seed=3).inputs(), OPERATIONS[operation]
    whole = of.reference(inputs, p, [None])[None]
    for head, rows in ((0, slice(0, 6)), (3, slice(4, 20)), (2, slice(19, 27))):
        excerpt = Excerpt(0, head, rows)
        part = of.reference(inputs, p, [None], excerpt)[None]
        for name, found in part.items():
            here = of.place(name, excerpt, p)
            assert found.value.shape == here.of(whole[name].value).shape
            np.testing.assert_allclose(found.value, here.of(whole[name].value), rtol=1e-12)
            assert ((found.bound > 0) == (here.of(whole[name].bound) > 0)).all()


def test_large_batches_are_judged_by_excerpts(monkeypatch):
    p = Problem.of_sizes(lengths="300,0,150", d=8, heads=2)
    assert sampling.excerpts(p, 0) == [None]
    monkeypatch.setattr(sampling, "_WORK", 1)
    (row,) = cupyfa.bench(
        "fa2", backend="simulator", alone=True, lengths="300,0,150", d=8, heads=2, budget=0
    )
    assert 0 < row.checked < 1 and row.passed


def test_commands_take_lengths():
    how = ("-H", 2, "-d", 8, "--causal", *SIMULATOR)
    for kernel in ("fa2", "two_pass"):
        lengths = ("--lengths-q", "_2,5,0,9", "--lengths-k", "9,4,0")
        (row,) = json.loads(cli("run", kernel, *lengths, *how, "--format", "json").stdout)
        assert row["passed"] and row["lengths"] == "_2,5,0,9:9,4,0"
        assert (row["batch"], row["M"], row["N"]) == (3, 16, 13)
    lengths = ",".join(map(str, range(1, 12)))
    shown = cli("bench", "fa2", "--alone", "--lengths", lengths, "--budget", 0, *how).stdout
    assert "11 of 1-11" in shown
    done = cupyfa.check("fa2", backend="simulator", samples=2, lengths="5,0,30")
    assert done.right == done.runs == 2


@pytest.mark.slow
def test_a_failure_keeps_its_lengths(tmp_path, monkeypatch):
    monkeypatch.setattr(checking, "_SHRINKING", 4.0)
    right, wrong = "offsets.size[0] - 1;", "offsets.size[0] - 2;"
    fault = broken_kernels.Fault(
        "fa2", "attention/tile_index.cuh", "a tile is left out", right, wrong, "", None
    )
    kernel = broken_kernels.broken(tmp_path, fault)
    files = tmp_path / "files"
    done = cupyfa.check(kernel, backend="simulator", lengths="40,50", samples=2, failures=files)
    first = done.failures[0]
    assert "--lengths" in first.command and " -M" not in first.command
    assert shlex.split(first.command)[1] == "run"
    again = cupyfa.lab.replay(first.file, kernel, backend="simulator")
    assert again.stored.case == first.case and again.now.failed
    assert cupyfa.lab.replay(first.file, "fa2", backend="simulator").now.kind == "right"
