"""Machine code tells equivalent mutants from others, and which functions a kernel uses."""

import pytest
from helpers import broken_kernels

from cupyfa import Problem, Simulator
from cupyfa.lab.mutation import machine_code
from cupyfa.lab.mutation.mutants import mutants_of
from cupyfa.lab.mutation.trials import compiled_mutants
from cupyfa.ladder.lookup import record_named
from cupyfa.planner import choose_kernel, source


@pytest.fixture
def programs():
    problem = Problem.of_row_sizes(2, 7, "float32")
    return choose_kernel.plan(record_named("softmax_safe"), problem, Simulator().limits).programs


def first(kind, before):
    """Returns the first mutant of softmax_safe of a kind whose line contains ``before``."""
    every = mutants_of(record_named("softmax_safe"))
    return next(x for x in every if x.kind == kind and before in x.before)


@pytest.mark.parametrize(
    "kind, before, is_other",
    [
        ("sum or maximum left out", "sum += softmax.p", True),
        ("wrong index", "extent_of(sizes, batch)", False),  # all batch elements have equal lengths
    ],
)
def test_only_a_change_of_results_changes_machine_code(tmp_path, programs, kind, before, is_other):
    mutant = first(kind, before)
    mutant.copy_to(tmp_path, mutant.changed())
    copies = {source.KERNELS: tmp_path}
    assert machine_code.differ(programs, copies) == is_other
    mutant_path = tmp_path / mutant.file
    mutant_path.write_bytes(mutant.changed(mutant.change.probe.format(trap="__trap")))
    assert machine_code.differ(programs, copies)


def test_code_that_does_not_compile_differs(tmp_path, programs):
    mutant = first("sum or maximum left out", "sum += softmax.p")
    mutant.copy_to(tmp_path, mutant.changed("no such thing;"))
    assert machine_code.differ(programs, {source.KERNELS: tmp_path})


def test_lines_of_used_functions_are_compiled(programs):
    (file,) = {source.KERNELS / x.path for x in programs}
    lines = machine_code.compiled_lines(programs)
    code = file.read_text().splitlines()
    assert any("softmax.p" in code[line - 1] for line in lines[file] if line)
    assert source.INCLUDE / "attention" / "online_softmax.cuh" in lines


def test_mutants_of_unused_functions_are_not_drawn():
    every = mutants_of(record_named("softmax_safe"))
    compiled = compiled_mutants("softmax_safe", every, backend=Simulator())
    names = {x.file.name for x in compiled}
    assert "softmax_safe.cu" in names and "row_tile.cuh" not in names
    assert {x.file.name for x in every} > names and 20 < len(compiled) < len(every)


def test_an_own_kernel_has_no_mutants_of_the_projects_headers(tmp_path):
    own = broken_kernels.write(tmp_path)
    assert {x.file.name for x in mutants_of(record_named(own))} == {"mine.cu"}
