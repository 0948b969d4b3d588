"""The exercises: solutions are right, each known mistake is named, and commands keep progress."""

import json
import runpy
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from cupyfa.lab.exercises import attempt
from cupyfa.lab.exercises.attempt import run_solutions
from cupyfa.lab.exercises.exercise import TASKS, exercise_named, exercises
from cupyfa.lab.exercises.judge import Verdict, find_mistake, judge, run_mistakes
from cupyfa.planner.source import ROOT

EXERCISES = exercises()
EACH = pytest.mark.parametrize("name", EXERCISES)
MOST_SECONDS = 10.0


def run(*arguments):
    main = runpy.run_path(str(ROOT / "cli.py"))["main"]
    return CliRunner().invoke(main, ["exercise", *arguments])


def test_every_folder_is_an_exercise():
    assert {x.name for x in TASKS.iterdir() if x.is_dir()} - {"__pycache__"} == EXERCISES.keys()


@EACH
def test_an_exercise_is_complete(name):
    exercise = EXERCISES[name]
    assert len(exercise.mistakes) >= 5
    assert all((ROOT / page).is_file() for page in exercise.pages)
    for language in ("en", "zh"):
        assert len(exercise.hints[language]) == 3
        assert exercise.statement(language).startswith("# ")
        causes = [mistake.cause[language] for mistake in exercise.mistakes]
        assert len({*causes}) == len(causes)


@EACH
def test_the_solution_is_right(name):
    exercise = EXERCISES[name]
    verdict = judge(exercise, exercise.solution())
    assert verdict.is_right, verdict.symptom


@pytest.mark.slow
@EACH
def test_the_starter_is_wrong_and_judged_in_time(name):
    exercise = EXERCISES[name]
    start = time.perf_counter()
    assert "hole" not in exercise.to_complete().replace("whole", "")
    assert not judge(exercise, exercise.to_complete()).is_right
    assert time.perf_counter() - start < MOST_SECONDS


@pytest.mark.slow
@EACH
def test_the_cause_of_each_mistake_is_named(name):
    exercise = EXERCISES[name]
    outcomes = run_mistakes(exercise)
    named = [find_mistake(exercise, x, outcomes) for x in outcomes]
    assert named == [*exercise.mistakes]
    (right,) = run_solutions(exercise, [exercise.solution()])
    assert find_mistake(exercise, right, outcomes) is None


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_learner_starts_fails_takes_hints_and_solves(folder):
    assert "open" in run("list", "--language", "en").stdout
    started = run("start", "warp_sum", "--language", "en")
    assert started.exit_code == 0
    assert "Complete `sum_of_lanes`" in started.stdout
    untouched = run("check", "warp_sum", "--language", "en")
    assert untouched.exit_code == 2
    assert "is unchanged" in untouched.stderr

    exercise = exercise_named("warp_sum")
    file = Path("warp_sum", exercise.file)
    file.write_text(exercise.wrong_solution(exercise.mistakes[0]))
    wrong = run("check", "warp_sum", "--language", "en")
    assert wrong.exit_code == 1
    assert "Cause: The last exchange" in wrong.stdout
    assert "1/3" in run("hint", "warp_sum", "--language", "zh").stdout
    assert "3/3" not in run("hint", "warp_sum", "--language", "zh").stdout
    assert "3/3" in run("hint", "warp_sum", "--language", "zh").stdout

    file.write_text(run("solution", "warp_sum").stdout)
    right = run("check", "warp_sum", "--language", "zh")
    assert right.exit_code == 0
    assert "正确" in right.stdout
    assert json.loads(Path("exercises.json").read_text())["warp_sum"] == {
        "tries": 2,
        "hints": 3,
        "solved": True,
    }
    assert "solved" in run("list", "--language", "en").stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("start", "warp_sun"), "did you mean 'warp_sum'"),
        (("check", "warp_sum"), "cupyfa exercise start warp_sum"),
        (("hint", "nothing"), "cupyfa exercise list"),
    ],
)
def test_wrong_commands_say_what_to_write(folder, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_folder_is_not_overwritten(folder):
    run("start", "warp_sum")
    again = run("start", "warp_sum")
    assert again.exit_code == 2
    assert "already exists" in again.stderr


@pytest.mark.parametrize("content", ["", "[1]", '{"warp_sum": 3}', "\x00"])
def test_a_damaged_file_of_progress_counts_as_none(folder, content):
    Path("exercises.json").write_text(content)
    result = run("list", "--language", "en")
    assert result.exit_code == 0
    assert "solved" not in result.stdout.replace("solved=", "")


@pytest.mark.parametrize(
    "text, symptom",
    [
        ("def online_softmax(x, tile):\n    while True: pass", "did not end within"),
        ("import os\nos._exit(3)", "ended the process with 3"),
        ("def online_softmax(x, tile):\n    return x[99], 1", "IndexError"),
        ("def online_softmax(x, tile):\n    return 1", "returns 1 values, not 2"),
        ("def other(): pass", "no function online_softmax"),
        ("def online_softmax(x, tile:", "SyntaxError"),
    ],
)
def test_a_solution_may_fail_in_any_way(monkeypatch, text, symptom):
    monkeypatch.setattr(attempt, "SECONDS", 3.0)
    verdict = judge(exercise_named("online_softmax"), text)
    assert verdict.right == 0
    assert symptom in verdict.symptom


def test_a_slow_solution_has_no_known_cause(monkeypatch):
    """A time limit explains nothing: known mistakes also exceed it on a slow machine."""
    monkeypatch.setattr(attempt, "SECONDS", 0.001)
    slow = "import time\ndef online_softmax(x, tile):\n    time.sleep(1)"
    verdict = judge(exercise_named("online_softmax"), slow)
    assert "did not end within" in verdict.symptom
    assert verdict.mistake is None


def test_a_mistake_is_named_that_is_guarded_against_in_some_examples():
    exercise = exercise_named("alibi")
    text = exercise.solution().replace("first_key +", "first_key * (first_key > 4) +")
    verdict = judge(exercise, text)
    assert verdict.right > 0
    assert "add first_key" in verdict.mistake.cause["en"]
    assert not verdict.is_sure


def test_a_cause_is_only_possible_if_examples_differ(folder):
    run("start", "alibi")
    exercise = exercise_named("alibi")
    file = Path("alibi", exercise.file)
    file.write_text(exercise.solution().replace("first_key +", "first_key * (first_key > 4) +"))
    assert "\nPossible cause: The keys" in run("check", "alibi", "--language", "en").stdout
    file.write_text(exercise.solution().replace("first_key +", ""))
    assert "\nCause: The keys" in run("check", "alibi", "--language", "en").stdout


def test_a_race_is_found_that_needs_another_order_of_threads():
    exercise = exercise_named("block_softmax")
    barrier = "__syncthreads();  // every thread has read it"
    verdict = judge(exercise, exercise.solution().replace(barrier, "__syncwarp();  //"))
    assert "race" in verdict.symptom
    assert "after the result has been read" in verdict.mistake.cause["en"]


def test_pages_are_named_in_the_language_of_the_learner(folder):
    run("start", "safe_softmax")
    exercise = exercise_named("safe_softmax")
    Path("safe_softmax", exercise.file).write_text(exercise.solution())
    assert "docs/zh/theory.md" in run("check", "safe_softmax", "--language", "zh").stdout
    assert "docs/theory.md" in run("check", "safe_softmax", "--language", "en").stdout


def test_a_missing_compiler_is_no_mistake_of_the_solution(folder, monkeypatch):
    run("start", "warp_sum")
    exercise = exercise_named("warp_sum")
    Path("warp_sum", exercise.file).write_text(exercise.solution())
    monkeypatch.setenv("CUPYFA_COMPILER", "no-such-compiler")
    result = run("check", "warp_sum", "--language", "en")
    assert result.exit_code == 3
    assert "'no-such-compiler'" in result.stderr
    assert "Cause" not in result.stdout


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("warp_sum", "int f() { return x; }", "It does not compile: warp_sum.cu"),
        ("online_softmax", "def f(:", "It does not compile: SyntaxError"),
    ],
)
def test_examples_of_a_file_that_does_not_compile_are_not_counted(folder, name, text, said):
    run("start", name)
    Path(name, exercise_named(name).file).write_text(text)
    result = run("check", name, "--language", "en")
    assert result.exit_code == 1
    assert said in result.stdout
    assert "examples" not in result.stdout
    assert "无法编译" in run("check", name, "--language", "zh").stdout


@pytest.mark.parametrize(
    "symptom",
    [
        "it ended the process with 1: ModuleNotFoundError: No module named 'cupyfa'",
        "it does not compile: In file included from warp_sum.cu:2:\n/x/mma.cuh:1:2: error: no",
        "CompilerNotFound: g++ cannot compile the simulator",
    ],
)
def test_a_fault_of_cupyfa_is_not_in_the_file(folder, monkeypatch, symptom):
    run("start", "warp_sum")
    Path("warp_sum", "warp_sum.cu").write_text("")
    found = Verdict(0, 2, f"example 'x': {symptom}")
    monkeypatch.setattr("cupyfa.lab.commands.exercises.judge", lambda *_: found)
    result = run("check", "warp_sum", "--language", "en")
    assert result.exit_code == 3
    assert "The fault is not in warp_sum/warp_sum.cu" in result.stderr
    assert "tries" not in Path("exercises.json").read_text()


@pytest.mark.parametrize(
    "change, symptom",
    [
        (("return x;", "return x"), "does not compile"),
        (("query[lane]", "query[lane + 32]"), "query"),
    ],
)
def test_faults_of_a_kernel_are_told(change, symptom):
    exercise = exercise_named("warp_sum")
    verdict = judge(exercise, exercise.solution().replace(*change))
    assert not verdict.is_right
    assert symptom in verdict.symptom
