"""``cupyfa new``: the files that it writes are correct and run in a user's folder."""

import shutil
import sys
from pathlib import Path

import pytest
from helpers.cli import SMALL, cli, process, refused, strict

import cupyfa
from cupyfa import Problem
from cupyfa.planner.choose_kernel import plan as plan_of
from cupyfa.runtime.simulator import Simulator

OPERATIONS = ("forward", "backward")
RUNGS = [kernel.name for kernel in cupyfa.kernels()]
FILES = ("mine.cu", "mine.py", "test_mine.py")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_new_kernel_is_right_and_its_faults_are_found(folder, backend, operation):
    written = cli("new", "mine", "--operation", operation, code=0).stdout.splitlines()
    assert names(folder) == sorted(FILES)
    assert written[-3:] == [
        "cupyfa run mine.py:mine",
        "cupyfa check mine.py:mine",
        "pytest test_mine.py",
    ]
    run = ("run", "mine.py:mine", *SMALL, "--causal", "--backend", backend.name)
    assert cli(*run, code=0).stdout.endswith("PASS\n")
    code = Path("mine.cu").read_text()
    modification = "return score / (1 + fabs(score) / limit);"
    assert code.count(modification) == 1
    Path("mine.cu").write_text(code.replace(modification, "return score;"))
    assert cli(*run, code=1).stdout.endswith("FAIL\n")


@pytest.mark.parametrize("there", [*([x] for x in FILES), FILES], ids="+".join)
def test_nothing_is_overwritten(folder, there):
    for name in there:
        Path(name).write_text("mine\n")
    message = refused("new", "mine", code=2)
    words = "already exists" if len(there) == 1 else "already exist"
    assert message.startswith(f"{', '.join(there)} {words}, so nothing was written; choose another")
    assert names(folder) == sorted(there)
    assert {Path(name).read_text() for name in there} == {"mine\n"}


@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_can_be_copied(folder, rung):
    found = cli("new", "mine", "--from", rung, "--format", "json", code=0).stdout
    assert sorted(row["file"] for row in strict(found)) == names(folder)
    mine, original = cupyfa.kernel("mine.py:mine"), cupyfa.kernel(rung)
    assert (mine.name, mine.operation) == ("mine", original.operation)
    dtype = original.dtypes[0]
    problem = (
        Problem.of_row_sizes(M=70, N=45, dtype=dtype)
        if original.operation == "softmax"
        else Problem.of_sizes(M=70, N=45, d=64, dtype=dtype)
    )
    copy, plan = (plan_of(x, problem, Simulator().limits).programs for x in (mine, original))
    assert [(x.entry, x.grid, x.shared_bytes) for x in copy] == [
        (x.entry, x.grid, x.shared_bytes) for x in plan
    ]
    assert any(x.path.parent == folder for x in copy)


def test_files_that_other_rungs_share_are_not_copied(folder):
    for rung, files in {
        "fa2": ["mine.cu"],
        "softmax_safe": ["mine.cu"],
        "two_pass": ["mine_columns.cu", "mine_rows.cu"],
        "mma_split_kv": ["mine.cu"],
    }.items():
        cli("new", "mine", "--from", rung, code=0)
        assert names(folder) == sorted([*files, "mine.py", "test_mine.py"])
        for path in folder.iterdir():
            path.unlink()


@pytest.mark.parametrize("name", ["xx", "mine", "twenty_four_characters__"])
def test_files_are_formatted(folder, name):
    ruff, clang_format = shutil.which("ruff"), shutil.which("clang-format")
    if not (ruff and clang_format):
        pytest.skip("needs ruff and clang-format")
    for end, options in {"f": (), "b": ("--operation", "backward"), "c": ("--from", "fa2")}.items():
        cli("new", name[:-1] + end, *options, code=0)
    root = Path(__file__).parents[3]
    for command in (
        (ruff, "check", "--isolated", "--select", "E,F,I,W", "--line-length", "100", "."),
        (ruff, "format", "--isolated", "--line-length", "100", "--check", "."),
        (clang_format, f"--style=file:{root / '.clang-format'}", "--dry-run", "-Werror"),
    ):
        files = sorted(folder.glob("*.cu")) if command[0] == clang_format else ()
        done = process(files, begin=command)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_tests_of_a_new_kernel_pass(operation):
    cli("new", "mine", "--operation", operation, code=0)
    done = process(["-m", "pytest", "-q", "test_mine.py"], begin=[sys.executable])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("rung", RUNGS)
def test_copies_of_rungs_are_right(rung):
    cli("new", "mine", "--from", rung, code=0)
    sizes = ("-M", "70", "-N", "45")
    if cupyfa.kernel(rung).operation != "softmax":
        sizes = ("-B", "1", "-H", "1", *sizes, "-d", "32")
    done = cli("run", "mine.py:mine", *sizes, "--backend", "simulator", code=0)
    assert done.stdout.endswith("PASS\n")
