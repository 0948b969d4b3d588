"""The mutants of a kernel: their files, numbers, copies and the trials of a kernel of one's own."""

import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers import broken_kernels
from helpers.cli import SIMULATOR, cli, refused, says, strict

import cupyfa
from cupyfa.lab.mutation import syntax, trials
from cupyfa.lab.mutation.kinds import KINDS, changes
from cupyfa.lab.mutation.mutants import files_of, mutants_in, mutants_of, sample
from cupyfa.ladder.lookup import record_named
from cupyfa.planner import choose_kernel, source

FILES = sorted(source.KERNELS.rglob("*.cu*"))


@pytest.fixture
def own(tmp_path):
    """The name of a copy of softmax_safe in a folder of its own."""
    return broken_kernels.write(tmp_path)


def test_the_ladder_has_thousands_of_mutants_of_every_kind():
    count = Counter(x.kind for path in FILES for x in changes(path.read_bytes()))
    assert count.total() > 10_000 and set(count) == set(KINDS)


def test_mutants_are_numbered_by_files_and_places():
    found = mutants_of(record_named("fa2"))
    assert [x.number for x in found] == [*range(1, len(found) + 1)]
    assert found == mutants_of(record_named("fa2"))
    places = [(x.line, x.column) for x in found if x.file.name == "fa2.cu"]
    assert places == sorted(places) and found[0].place.startswith("kernels/forward/fa2.cu:")


def test_a_mutant_differs_in_one_place():
    for mutant in mutants_of(record_named("softmax_online")):
        line = mutant.code.splitlines()[mutant.line - 1].decode()
        assert mutant.before.startswith(" ".join(line.split())), mutant
        assert mutant.before != mutant.after and mutant.changed() != mutant.code


def test_headers_of_options_belong_to_kernels_with_options():
    names = {
        x: {path.name for path in files_of(record_named(x))[1]} for x in ("softmax_safe", "fa2")
    }
    assert "score_mod.cuh" in names["fa2"] - names["softmax_safe"]
    assert "block.cuh" in names["softmax_safe"]
    assert "mbarrier.cuh" not in {path.name for path in files_of(record_named("wgmma"))[1]}


def test_files_of_an_own_kernel_are_those_in_its_folder(own, tmp_path):
    assert files_of(record_named(own)) == (
        tmp_path,
        [tmp_path.joinpath("mine.cu").relative_to(tmp_path)],
    )


def test_a_sample_takes_the_kinds_in_turn():
    every = mutants_of(record_named("fa2"))
    drawn = sample(every, 12, seed=1)
    assert len({x.kind for x in drawn}) == 12 and drawn == sample(every, 12, seed=1)
    assert drawn != sample(every, 12, seed=2)
    assert sample(every[:5], 12, seed=1) == every[:5]


def test_a_copy_has_the_changed_file_and_links_to_the_others(tmp_path):
    header = next(x for x in mutants_of(record_named("fa2")) if x.file.name == "extent.cuh")
    header.copy_to(tmp_path, header.changed())
    copies = {source.KERNELS: tmp_path}
    problem, limits = cupyfa.Problem.of_sizes(M=32, d=16), cupyfa.Simulator().limits
    launch = choose_kernel.plan(record_named("fa2"), problem, limits).launches[0]
    before = source.text(launch)
    with source.reading(copies):
        assert source.text(launch) != before
        assert tmp_path / "include" in source.include_folders(launch)
    assert source.text(launch) == before
    changed = [
        path.relative_to(tmp_path)
        for path in tmp_path.rglob("*.cu*")
        if path.read_bytes() != (source.KERNELS / path.relative_to(tmp_path)).read_bytes()
    ]
    assert changed == [header.file]


def test_known_equivalents_are_few_mutants_of_the_ladder():
    """Fails for a row of equivalents.csv whose code has changed."""
    known = set(trials.known_equivalents())
    assert len(known) <= 0.03 * 10_000  # see test_the_ladder_has_thousands_of_mutants
    there = {
        (file, x.before, x.after)
        for file in {file for file, _, _ in known}
        for x in mutants_in(source.KERNELS, Path(file))
    }
    assert known <= there


def test_a_mutant_may_be_equivalent_in_one_kernel_only():
    of_fa2, of_others = (set(trials.known_equivalents(x)) for x in ("fa2", "two_pass"))
    assert {file for file, _, _ in of_fa2 - of_others} == {"include/tile/math.cuh"}
    assert of_others < of_fa2 < set(trials.known_equivalents())


def test_positions_that_are_0_in_every_softmax_are_equal(own):
    def told(name):
        record = record_named(name)
        every = mutants_of(record)
        return [x for x in every if trials.equal_positions(x, record.operation)]

    assert told("softmax_online") and not told("fa2") and not told(own)
    for mutant in told("softmax_online"):
        assert mutant.kind in ("wrong index", "indices swapped") and "+ 1" not in mutant.change.new
        assert mutant.before.count("row)") == mutant.after.count("row)")


def test_without_tree_sitter_the_remedy_is_named(monkeypatch):
    for cached in (syntax._parser, changes):
        cached.cache_clear()
    monkeypatch.setitem(sys.modules, "tree_sitter", None)
    says(refused("mutate", "fa2", "--dry-run", code=3), "tree-sitter", "pip install")
    syntax._parser.cache_clear()


def test_a_number_beyond_the_last_mutant_is_refused(own):
    says(refused("mutate", own, "--number", "999", code=2), "999", "mutants")


def number_of(own, kind, before):
    """Returns the number of the mutant of a kind whose line contains ``before``."""
    found = [x for x in mutants_of(record_named(own)) if x.kind == kind and before in x.before]
    return found[0].number


def test_a_dry_run_lists_the_chosen_mutants(own):
    done = cli("mutate", own, "--number", 2, "--number", 1, "--dry-run", "--format", "json")
    rows = strict(done.stdout)
    assert [x["number"] for x in rows] == [1, 2]
    assert set(rows[0]) == {"number", "place", "kind", "before", "after"}


@pytest.mark.slow
def test_trials_of_an_own_kernel(own):
    chosen = {
        number_of(own, "wrong index", "extent_of(sizes, batch)"): "equivalent",  # no lengths differ
        number_of(own, "clamp left out", "fmax(largest,") + 1: "missed",  # needs large scores
        number_of(own, "sum or maximum left out", "sum += softmax.p"): "found",
    }
    only = [x for number in chosen for x in ("--number", number)]
    args = ["mutate", own, *only, "--cases", 1, *SIMULATOR, "--format", "json"]
    done = cli(*args, code=1)
    rows = strict(done.stdout)
    assert {x["number"]: x["verdict"] for x in rows} == chosen
    says(rows[1]["why"], "executed")
    says(rows[2]["why"], "wrong result")
    assert rows[2]["case"] == 1
    says(done.stderr, r"1 of 2 mutants found \(50%\), 1 equivalent")


@pytest.mark.slow
def test_a_kernel_that_fails_itself_has_no_mutants(tmp_path):
    own = broken_kernels.write(tmp_path, broken_kernels.DIES)
    says(refused("mutate", own, "--number", 1, *SIMULATOR, code=2), "itself fails", "cupyfa check")
