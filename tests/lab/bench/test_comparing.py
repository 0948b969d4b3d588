"""Comparisons of two benchmarks: verdicts, their uncertainty, and the table."""

import json
import re
from collections import Counter
from math import exp
from random import Random

import pytest
from helpers.cli import cli, strict

import cupyfa
from cupyfa import Problem
from cupyfa.lab.bench import comparison as comparing
from cupyfa.lab.bench.results import Measurement, Results

PROBLEM = Problem.of_sizes(M=64, d=16, batch=2, heads=3, dtype="float16", causal=True)
WHERE = {"device": "a card", "cuda": "12.9", "time": "now", "command": "cupyfa bench fa2"}


def row(ms, *, noise=0.0, rounds=50, kernel="fa2", problem=PROBLEM, constants=None, **more):
    """Returns a measurement of `ms` milliseconds with normal noise, without times if `ms` is 0."""
    pick = Random(f"{kernel} {ms}")
    times = [ms * (1 + noise * pick.gauss(0, 1)) for _ in range(rounds)] if ms else []
    constants = {"Br": 64} if constants is None else constants
    return Measurement(kernel, "forward", problem, constants, times, True, 1.0, **more)


def verdict(old, new):
    (found,) = cupyfa.lab.compare([old], [new])
    return found


@pytest.mark.parametrize(
    "old, new, expected",
    [
        (row(1.0), row(1.0), "SAME"),
        (row(1.0), row(1.015), "SAME"),  # two runs of the same code may differ by 1.5 %
        (row(1.0), row(1.05), "SLOWER"),
        (row(1.05), row(1.0), "FASTER"),
        (row(1.0, noise=0.3), row(1.05, noise=0.3), "UNCLEAR"),
        (row(1.0, noise=0.3), row(1.5, noise=0.3), "SLOWER"),
        (row(1.0, rounds=1), row(1.05, rounds=1), "UNCLEAR"),  # one round: unknown noise
        (row(1.0, rounds=1), row(2.0, rounds=1), "SLOWER"),
        (row(1.0, rounds=2), row(1.05, rounds=2), "SAME"),
        (row(1.0), row(0), "not timed after"),
        (row(0), row(1.0), "not timed before"),
        (row(0), row(0), "not timed either time"),
    ],
)
def test_a_verdict_depends_on_the_noise(old, new, expected):
    assert verdict(old, new).verdict == expected


def test_a_wrong_kernel_has_no_speed():
    new = Measurement("fa2", "forward", PROBLEM, {"Br": 64}, (), False, 1.0, note="WRONG: …")
    assert verdict(row(1.0), new).verdict == "WRONG"


@pytest.mark.parametrize(
    "old, new, words",
    [
        (row(2.46), row(2.0), r"1\.23 ± 0\.01 × faster"),
        (row(2.0), row(2.46), r"1\.23 ± 0\.01 × slower"),
        (row(2.0), row(2.01), r"1\.00 ± 0\.01 ×"),
        (row(0), row(2.01), ""),
    ],
)
def test_a_change_has_an_uncertainty(old, new, words):
    assert re.fullmatch(words, verdict(old, new).change)


def test_the_uncertainty_is_that_of_many_repetitions():
    pick = Random(1)
    factors = []
    for _ in range(300):
        old, new = ([1 + 0.1 * pick.gauss(0, 1) for _ in range(40)] for _ in range(2))
        rows = [Measurement("fa2", "forward", PROBLEM, {}, times, True) for times in (old, new)]
        factors.append(verdict(*rows))
    mean = sum(x.factor for x in factors) / 300
    spread = (sum((x.factor - mean) ** 2 for x in factors) / 300) ** 0.5
    told = sum(x.uncertainty for x in factors) / 300
    assert 0.8 * spread < told < 1.3 * spread


KERNELS = ("changed", "v1", "v2", "v3")


def run(pick, *, drift, wander=0.0, **speeds):
    """Simulates an alternating run on a device whose speed drifts between and within runs.

    Only the kernel "changed" has different code in each run.
    """
    load, times = pick.gauss(0, drift), {name: [] for name in KERNELS}
    for _ in range(40):
        load += wander * pick.gauss(0, 1)
        for name in KERNELS:
            noise = pick.gauss(0, 0.01)
            times[name].append(speeds.get(name, 1.0) * exp(load + noise))
    codes = {name: str(pick.random()) if name == "changed" else name for name in KERNELS}
    return [
        Measurement(name, "forward", PROBLEM, {}, times[name], True, code=codes[name])
        for name in KERNELS
    ]


@pytest.mark.parametrize("drift, wander", [(0.001, 0), (0.1, 0), (0.5, 0), (0.001, 0.05)])
def test_a_drifting_device_makes_no_kernel_faster(drift, wander):
    pick, said = Random(2), Counter()
    for _ in range(100):
        before, after = (run(pick, drift=drift, wander=wander) for _ in range(2))
        one, *others = comparing.compare(before, after)
        said[one.verdict] += 1
        assert {x.verdict for x in others} == {"unchanged code"}
        assert not any(x.certain_slowdown for x in others)
    assert said["FASTER"] + said["SLOWER"] <= 6, said
    assert (said["SAME"] > 95) == (drift < 0.1 and not wander), said


def test_a_faster_kernel_is_found_on_a_steady_device():
    pick = Random(3)
    pairs = [(run(pick, drift=0.01), run(pick, drift=0.01, changed=0.8)) for _ in range(50)]
    assert sum(comparing.compare(*pair)[0].verdict == "FASTER" for pair in pairs) >= 48


def test_unchanged_code_on_another_device_is_compared(files):
    rows = [row(1.0, code="as before")], [row(2.0, code="as before")]
    assert "unchanged code" in cli("compare", *files(*rows)).stdout
    assert "SLOWER" in cli("compare", *files(*rows, device="another card")).stdout


def test_times_of_the_simulator_are_not_compared(files):
    names = files([row(1.0)], [row(2.83)], backend="simulator")
    done = cli("compare", *names, "--fail-slower", "0%")
    assert "not measured on a GPU" in done.stdout and "×" not in done.stdout
    assert "note: 1 not measured on a GPU" in done.stderr


def test_a_benchmark_knows_whether_the_code_is_the_same():
    how = {"backend": "simulator", "alone": True, "budget": 0, "M": 5, "d": 8, "batch": 1}
    one, again, other = (cupyfa.bench("fa2", **how, tiles={"Br": x})[0].code for x in (16, 16, 32))
    assert one == again != other


def test_rows_are_matched_by_kernel_problem_and_constants():
    longer = Problem.of_sizes(M=128, d=16)
    old = [row(1), row(2, constants={"Br": 32}), row(3, problem=longer), row(4, kernel="v1")]
    new = [row(3, problem=longer), row(1), row(5, kernel="v2"), row(2, constants={"Br": 16})]
    found = comparing.compare(old, new)
    assert [(x.measurement.kernel, x.verdict) for x in found] == [
        ("fa2", "SAME"),
        ("fa2", "SAME"),
        ("fa2", "only before"),
        ("v1", "only before"),
        ("v2", "only after"),
        ("fa2", "only after"),
    ]


def test_equal_rows_are_compared_in_order():
    found = comparing.compare([row(1), row(2)], [row(1), row(4), row(5)])
    assert [(x.verdict, x.measurement.time) for x in found] == [
        ("SAME", 1),
        ("SLOWER", 4),
        ("only after", 5),
    ]


def test_saved_results_can_be_loaded(tmp_path):
    rows = [row(1.0, noise=0.1, registers=40, factors={"baseline": 2.0}), row(0, note="too large")]
    Results(WHERE, rows).save(tmp_path / "a.json")
    assert Results.load(tmp_path / "a.json") == Results(WHERE, rows)
    strict((tmp_path / "a.json").read_text())


def test_files_without_the_kind_of_problem_can_be_loaded(tmp_path):
    problem = Problem.of_row_sizes(5, 7, "float32")
    rows, file = [Measurement("softmax_safe", "softmax", problem, {}, [1.0])], tmp_path / "a.json"
    Results(WHERE, rows).save(file)
    content = json.loads(file.read_text())
    del content["rows"][0]["problem"]["is_softmax"]
    file.write_text(json.dumps(content))
    assert Results.load(file).rows == rows
    assert str(rows[0].problem) == "M=5 N=7 float32"


@pytest.fixture
def files(tmp_path):

    def write(old, new, **about):
        names = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
        Results(WHERE, old).save(names[0])
        Results(WHERE | about, new).save(names[1])
        return names

    return write


def test_compare_as_json(files):
    done = cli("compare", *files([row(1.0)], [row(2.0)]), "--format", "json")
    (found,) = strict(done.stdout)
    assert (found["ms_before"], found["ms_after"], found["verdict"]) == (1.0, 2.0, "SLOWER")
    assert found["factor"] == 0.5
    assert (found["kernel"], found["constants"]) == ("fa2", {"Br": 64})


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_fits_the_terminal(monkeypatch, files, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    old = [row(1.0, kernel=name) for name in ("fa2", "fa2_coalesced", "baseline")]
    new = [row(ms, kernel=x.kernel) for x, ms in zip(old, (1.0, 0.5, 2.0))]
    done = cli("compare", *files(old, new))
    assert max(map(len, done.stdout.splitlines())) <= columns
    for words in ("SAME", "2.00 ± 0.02 × faster", "2.00 ± 0.02 × slower"):
        assert words in done.stdout
    assert "1 SAME, 1 FASTER, 1 SLOWER" in done.stderr


@pytest.mark.parametrize(
    "new, limit, code",
    [
        (1.0, "5%", 0),
        (1.06, "5%", 0),  # 6 % slower, but less than 5 % beyond the noise
        (1.10, "5%", 1),
        (1.10, "5", 1),
        (1.10, "20%", 0),
        (0.5, "0%", 0),
        (1.05, "0%", 1),
    ],
)
def test_slower_rows_may_fail(files, new, limit, code):
    cli("compare", *files([row(1.0)], [row(new)]), "--fail-slower", limit, code=code)


def test_a_kernel_that_became_wrong_fails_too(files):
    new = Measurement("fa2", "forward", PROBLEM, {"Br": 64}, (), False, 1.0, note="WRONG: …")
    cli("compare", *files([row(1.0)], [new]), "--fail-slower", "5%", code=1)
    cli("compare", *files([row(1.0)], [new]))


def test_other_devices_and_versions_are_noted(files):
    names = files([row(1)], [row(1)], device="another card", time="later", cuda="13.0")
    notes = cli("compare", *names).stderr
    assert "note: device: a card before, another card after" in notes
    assert "note: cuda: 12.9 before, 13.0 after" in notes
    assert "later" not in notes


def test_two_files_without_rows(files):
    assert cli("compare", *files([], [])).stdout.strip() == ""
