"""Tuning: candidates, stored measurements, and the plans that use them."""

import json
import os
import sys
from dataclasses import replace
from functools import cache as cached
from pathlib import Path
from random import Random
from time import monotonic

import pytest
from helpers import own_kernel
from helpers.cli import SIMULATOR, cli
from helpers.private_cache import with_runtime

import cupyfa
from cupyfa import Kernel, Launch, Limits, Problem, cache_folder
from cupyfa.errors import DeviceLost
from cupyfa.lab.bench import timing, tuning
from cupyfa.lab.bench.results import Measurement
from cupyfa.lab.bench.sweeps import usual_dtype
from cupyfa.lab.bench.tuning import Candidate
from cupyfa.lab.bench.watch import Watch
from cupyfa.ladder import LADDER, lookup as records
from cupyfa.planner import choose_kernel as planning, tuned
from cupyfa.planner.plan import Tuned
from cupyfa.runtime.choose_backend import backend_named

FORWARD = LADDER["forward"]
H100 = Limits("an H100", shared_bytes=232448, arch="90")
ON = tuned.on  # the original function, which conftest.py replaces
TINY = {"batch": 1, "heads": 2, "M": 20, "d": 8}
PROBLEM = Problem.of_sizes(**TINY)

# A kernel that repeats its work `laps` times, and omits the last key if laps is 2.
LAPS = own_kernel.MINE.replace(
    "  real maximum", "  for (int lap = 0; lap < laps; ++lap) {\n  real maximum"
).replace("key < N;", "key < N - (laps == 2);")
LAPS = LAPS.rstrip().removesuffix("}") + "  }\n}\n"
RECORD = own_kernel.SCRIPT.replace(
    "    features=", '    tiles=({"laps": 200},),\n    candidates={"laps": (1, 2)},\n    features='
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Makes a cache folder for this module's compiled kernels and measurements."""
    return with_runtime(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def engine(cache, monkeypatch):
    """Returns the simulator without stored tile sizes."""
    monkeypatch.setenv("CUPYFA_CACHE_DIR", str(cache))
    monkeypatch.setattr(tuned, "on", ON)
    for kind in ("tuned", "tuning"):
        for file in (cache / kind).glob("*"):
            file.unlink()
    engine = backend_named("simulator")
    engine.refresh()
    yield engine
    monkeypatch.undo()
    engine.refresh()


@pytest.fixture
def device(engine, monkeypatch):
    """Makes the simulator act as a GPU, whose times are stored for plans."""
    usual = engine.limits
    limits = cached(lambda device: replace(usual, device="a GPU", tuned=tuned.on("a GPU")))
    monkeypatch.setattr(engine, "name", "a GPU")
    monkeypatch.setattr(engine, "read_limits", limits)
    return engine


@pytest.fixture
def laps(tmp_path):
    """Writes a kernel with slow default tiles, a correct candidate and a wrong one."""
    return f"{own_kernel.write(tmp_path, LAPS, RECORD)}:mine"


def tune(kernel, engine, **options):
    return cupyfa.lab.tune(kernel, backend=engine, **{**TINY, "budget": 60.0, **options})


def planned(kernel, engine, **how):
    return cupyfa.plan(kernel=kernel, backend=engine, **how).constants


def states(rows):
    return {row.measurement.constants["laps"]: row.state for row in rows}


def count_checks(monkeypatch, *, interrupted=None):
    """Collects the constants of every check; interrupts the check with index `interrupted`."""
    seen, check = [], tuning._check

    def counted(engine, plan, watch):
        if len(seen) == interrupted:
            raise KeyboardInterrupt
        seen.append(plan.constants)
        check(engine, plan, watch)

    monkeypatch.setattr(tuning, "_check", counted)
    return seen


@pytest.mark.slow
def test_the_fastest_right_candidate_is_found_and_planned(laps, device):
    before = device.limits
    rows = tune(laps, device)
    assert states(rows) == {1: "right", 200: "right", 2: "wrong"}
    best, own, wrong = rows
    assert best.measurement.constants == {"laps": 1} and best.factor > 1.5 and own.factor == 1
    assert best.measurement.time < own.measurement.time
    assert wrong.measurement.time is None and "O" in wrong.measurement.note
    record = records.record_named(laps)
    assert planned(record, device, **TINY) == {"laps": 1}
    assert planned(record, device, tiles={"laps": 200}, **TINY) == {"laps": 200}
    assert planned(record, device, M=5, d=9) == {"laps": 200}
    assert device.limits != before and hash(device.limits) == hash(before)
    assert cupyfa.plan(backend=device, **TINY).kernel.name in FORWARD


@pytest.mark.slow
def test_plans_ignore_times_of_the_simulator(laps, engine, cache):
    record = records.record_named(laps)
    done = cli("tune", laps, *SIZES)
    assert "laps=1 " in done.stdout
    assert "note: plans ignore these tiles, because simulator times" in done.stderr
    assert planned(record, engine, **TINY) == {"laps": 200}
    assert not (cache / "tuned").is_dir() or not list((cache / "tuned").iterdir())


@pytest.mark.slow
def test_candidates_that_do_not_return_use_up_the_budget(laps, engine, monkeypatch):
    seen = count_checks(monkeypatch)
    first = tuning.candidates(records.record_named(laps), PROBLEM, engine.limits)[0]
    watch = Watch(timeout=60, hung=[tuning._call(first)], began=monotonic() - 70)
    assert states(tune(laps, engine, watch=watch)) == {200: "timed out", 1: "untried", 2: "untried"}
    assert not seen
    assert states(tune(laps, engine)) == {200: "timed out", 1: "right", 2: "wrong"}


@pytest.mark.slow
def test_a_second_tuning_measures_nothing_again(laps, engine, monkeypatch):
    first = [row.row() for row in tune(laps, engine)]
    seen = count_checks(monkeypatch)
    assert [row.row() for row in tune(laps, engine)] == first and not seen
    tune(laps, engine, fresh=True)
    assert len(seen) == 3


@pytest.mark.slow
def test_an_interrupted_tuning_is_continued(laps, engine, monkeypatch):
    with monkeypatch.context() as patch:
        seen = count_checks(patch, interrupted=1)
        with pytest.raises(KeyboardInterrupt):
            tune(laps, engine)
    again = count_checks(monkeypatch)
    assert len(tune(laps, engine)) == 3
    assert len(seen) == 1 and len(again) == 2 and seen[0] not in again


@pytest.mark.slow
def test_changed_source_is_tuned_again(laps, engine, monkeypatch):
    tune(laps, engine)
    file = Path(laps.rpartition(":")[0]).with_name("mine.cu")
    file.write_text(file.read_text().replace("laps == 2", "laps == 200"))
    seen = count_checks(monkeypatch)
    assert states(tune(laps, engine)) == {1: "right", 2: "right", 200: "wrong"} and len(seen) == 3


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["{", "[]", '{"x": 1}', '{"KEY": {"state": "right"}}'])
def test_damaged_facts_are_measured_again(laps, engine, cache, damage):
    tune(laps, engine)
    (file,) = (cache / "tuning").glob("mine-*.json")
    key = next(iter(json.loads(file.read_text())))
    file.write_text(damage.replace("KEY", key))
    if damage in ("{", "[]"):
        with pytest.warns(UserWarning, match="is ignored"):
            rows = tune(laps, engine)
    else:
        rows = tune(laps, engine)
    assert states(rows)[1] == "right"


def test_candidates_not_tried_in_time_are_tried_next_time(laps, engine, monkeypatch):
    measured(monkeypatch, {200: 10.0, 2: 10.0, 1: 10.0})
    first = states(tune(laps, engine, budget=0.0))
    assert sorted(first.values()) == ["right", "untried", "untried"]
    assert states(tune(laps, engine)) == dict.fromkeys((1, 2, 200), "right")


@pytest.mark.slow
def test_candidates_that_do_not_compile_are_refused(tmp_path, engine):
    broken = LAPS.replace(
        "  const int row", '  static_assert(laps != 1, "not one");\n  const int row'
    )
    rows = tune(f"{own_kernel.write(tmp_path, broken, RECORD)}:mine", engine)
    assert states(rows) == {200: "right", 2: "wrong", 1: "refused"}
    refused = next(row for row in rows if row.state == "refused")
    assert "not one" in refused.measurement.note and "\n" not in refused.measurement.note


@pytest.mark.slow
def test_a_candidate_that_lost_the_device_is_skipped_next_time(laps, engine, monkeypatch):
    def check(engine, plan, watch):
        if plan.constants["laps"] == 1:
            raise DeviceLost("an illegal memory access: the context is lost")

    monkeypatch.setattr(tuning, "_check", check)
    with pytest.raises(DeviceLost):
        tune(laps, engine)
    assert states(tune(laps, engine)) == {200: "right", 2: "right", 1: "refused"}


@pytest.mark.slow
def test_each_of_several_problems_is_tuned(laps, device):
    rows = tune(laps, device, d=[8, 9], dtype=["float32", "float64"])
    problems = {(x.measurement.problem.d, x.measurement.problem.dtype.name) for x in rows}
    assert len(rows) == 12 and len(problems) == 4
    assert {(x.d, x.dtype) for x in device.limits.tuned} == problems


def test_a_softmax_is_tuned_too(device):
    (row,) = cupyfa.lab.tune("softmax_online", backend=device, M=5, N=40, budget=1.0)
    assert row.state == "right" and row.factor == 1
    assert device.limits.tuned[0].constants == ()


def measured(monkeypatch, speeds):
    """Fakes times: ``speeds[laps]`` milliseconds with noise of 2 % on a drifting clock."""
    noise, clock, bouts = Random(0), [1.0], []

    def measure(engine, timed, *, budget, cold, most, **_):
        names = [plan.constants["laps"] for plan in timed]
        bouts.append(names)
        times = [[] for _ in names]
        for _ in range(most):
            clock[0] *= 1.01
            for name, its in zip(names, times):
                its.append(speeds[name] * clock[0] * noise.uniform(0.98, 1.02))
        return times

    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(tuning, "replay", lambda engine, plan, arrays: plan)
    monkeypatch.setattr(tuning, "_check", lambda engine, plan, watch: None)
    return bouts


def test_close_candidates_are_distinguished_despite_clock_drift(laps, engine, monkeypatch):
    bouts = measured(monkeypatch, {200: 10.05, 2: 10.0, 1: 30.0})
    rows = tune(laps, engine)
    assert [row.measurement.constants["laps"] for row in rows] == [2, 200, 1]
    assert rows[0].factor == pytest.approx(1.005, abs=0.003)
    assert rows[0].rounds == rows[1].rounds > rows[2].rounds > 0
    times = [row.measurement.time for row in rows]  # the last row has fewer rounds
    assert times == sorted(times) and times[2] / times[1] == pytest.approx(30 / 10.05, rel=0.02)
    first, *later = bouts[3:]
    assert len(first) == 3 and later and all(sorted(names) == [2, 200] for names in later)


def test_tuning_ends_early_if_candidates_are_equal(laps, engine, monkeypatch):
    bouts = measured(monkeypatch, {200: 10.0, 2: 10.0, 1: 10.0})
    rows = tune(laps, engine, budget=1e6)
    assert rows[0].factor == pytest.approx(1, abs=0.01) and len(bouts) < 100


def entry(kernel="fa2", d=64, dv=None, dtype="float32", tflops=1.0, folder=None, **constants):
    return Tuned(kernel, folder, dtype, d, dv or d, tuple(constants.items()), tflops)


def plan(kernel, *entries, **sizes):
    limits = replace(H100, tuned=entries)
    return planning.plan(FORWARD[kernel], Problem.of_sizes(**{"M": 9, "d": 64, **sizes}), limits)


def test_tuned_constants_are_planned_for_exactly_what_they_were_tuned_for():
    tile = {"Br": 32, "Bc": 8}
    assert plan("fa2", entry(**tile)).constants == tile
    assert plan("fa2", entry(**tile), causal=True, M=70).constants == tile
    own = plan("fa2").constants
    for changed in ({"d": 65}, {"dv": 65}, {"dtype": "float16"}):
        assert plan("fa2", entry(**tile), **changed).constants == plan("fa2", **changed).constants
    assert plan("fa2", entry(kernel="fa2_coalesced", **tile)).constants == own
    assert plan("fa2", entry(folder="/elsewhere", **tile)).constants == own


@pytest.mark.parametrize(
    "constants",
    [
        *({"Br": 32}, {"Br": 32, "Bc": 24}, {"Br": 32, "Bc": 8, "Bd": 8}, {"Br": 1024, "Bc": 512}),
        *({"Br": x, "Bc": 8} for x in (0, -32, 4096, "32")),
    ],
    ids=str,
)
def test_stale_and_invalid_entries_are_ignored(constants):
    assert plan("fa2", entry(**constants)).constants == plan("fa2").constants
    after = entry(Br=32, Bc=8)
    assert plan("fa2", entry(**constants), after).constants == {"Br": 32, "Bc": 8}


def test_given_constants_take_precedence_over_tuned_ones():
    limits = replace(H100, tuned=(entry(Br=32, Bc=8),))
    problem = Problem.of_sizes(M=9, d=64)
    assert planning.plan(FORWARD["fa2"], problem, limits, Br=64).constants == {"Br": 64, "Bc": 8}
    assert planning.plan(FORWARD["fa2"], problem, limits, Bc=16).constants["Bc"] == 16


def auto(*entries, d=64, dtype="float32", **sizes):
    problem = Problem.of_sizes(M=9, d=d, dtype=dtype, **sizes)
    return planning.select("auto", "forward", problem, replace(H100, tuned=entries)).name


def test_auto_uses_speeds_measured_on_this_device():
    assert auto() == "fa2_coalesced"
    fast = entry(tflops=30.0, Br=32, Bc=8), entry("fa2_coalesced", tflops=20.0, Br=32, Bc=8)
    assert auto(*fast) == "fa2"
    assert auto(*fast, dtype="float16") == "wgmma_persistent"


def test_one_tuned_kernel_on_a_slower_device_is_not_at_a_disadvantage():
    recorded = FORWARD["fa2_coalesced"].tflops["float32"][64]
    slow = entry("fa2_coalesced", tflops=recorded / 10, Br=32, Bc=8)
    assert auto(slow) == "fa2_coalesced"
    others = FORWARD["fa2"].tflops["float32"][64]
    assert auto(slow, entry("fa2", tflops=others / 2, Br=32, Bc=8)) == "fa2"


def test_a_speed_counts_for_the_nearest_d():
    at_64 = entry(tflops=30.0, Br=32, Bc=8), entry("fa2_coalesced", tflops=20.0, Br=32, Bc=8)
    assert auto(*at_64, d=80) == "fa2"
    assert auto(*at_64, d=1024) == "fa2_coalesced"
    for_dv = entry(d=64, dv=8, tflops=1e-3, Br=32, Bc=8)
    assert auto(*at_64, for_dv) == "fa2"
    assert auto(*at_64, for_dv, dv=8) == "fa2_coalesced"


def test_auto_ignores_tuned_kernels_that_it_does_not_know():
    assert auto(entry(tflops=1e6, folder="/elsewhere", Br=32, Bc=8)) == "fa2_coalesced"
    assert auto(entry("baseline", tflops=1e6)) == "fa2_coalesced"
    assert auto(entry("v3", tflops=1e6, Br=64, Bc=32, Wr=32, Wc=16)) == "fa2_coalesced"


def test_candidates_obey_the_rules_and_fit():
    for kernel in FORWARD.values():
        dtype = usual_dtype(kernel)
        own, *others = planning.candidates(kernel, Problem.of_sizes(M=9, d=128, dtype=dtype), H100)
        assert own.constants == plan(kernel.name, d=128, dtype=dtype).constants
        seen = [tuple(sorted(x.constants.items())) for x in (own, *others)]
        assert len(set(seen)) == len(seen)
        assert bool(others) == bool(kernel.choice.names)
        for one in (own, *others):
            assert all(x.shared_bytes <= H100.shared_bytes for x in one.launches)
    launch = Launch("plain", args="Q.data", grid=lambda p, c: 1, threads=lambda p, c: c.t)
    rules = {"t is no 64": lambda c: c.t != 64}
    plain = Kernel(
        name="plain",
        adds="",
        launches=(launch,),
        tiles=({"t": 32},),
        candidates={"t": (32, 64, 2048, 128)},
        rules=rules,
    )
    tried = planning.candidates(plain, Problem.of_sizes(M=9, d=8), H100)
    assert [x.constants["t"] for x in tried] == [32, 128]


_AUDITED = {"open", "os.listdir", "os.scandir", "os.mkdir", "subprocess.Popen", "import"}
_audit: list[str] | None = None
sys.addaudithook(
    lambda event, _: _audit.append(event) if _audit is not None and event in _AUDITED else None
)


def test_planning_touches_neither_files_nor_processes():
    global _audit
    limits = replace(H100, tuned=(entry(Br=32, Bc=8), entry("fa2_coalesced", tflops=9.0, Br=1)))
    problem = Problem.of_sizes(M=9, d=64)
    planning.select("auto", "forward", problem, limits)  # warms up the caches
    _audit = []
    try:
        record = planning.select("auto", "forward", problem, limits)
        planning.plan(record, problem, limits)
        planning.candidates(FORWARD["fa2"], problem, limits)
        seen = _audit
    finally:
        _audit = None
    assert seen == []


@pytest.mark.parametrize(
    "change",
    [
        *({"constants": x} for x in (None, {"Br": "32"}, {"Br": 0}, {"Br": True}, {"Br": 1.5})),
        *({"tflops": x} for x in ("fast", -1.0, float("nan"))),
        {"d": "64"},
        {"kernel": None, "tflops": None},
    ],
    ids=str,
)
def test_invalid_entries_are_not_read(engine, change):
    sound = entry(Br=32, Bc=8)
    tuned.remember("a device", sound, {"time": "now"})
    assert tuned.on("a device") == (sound,)
    file = cache_folder.facts_file("tuned", "a device")
    facts = json.loads(file.read_text())
    (fact,) = facts.values()
    cache_folder.remember(file, {**facts, "other": {**fact, **change}, "third": 3})
    assert tuned.on("a device") == (sound,)


def test_a_later_tuning_replaces_an_earlier_one(engine):
    tuned.remember("a device", entry(Br=32, Bc=8), {})
    tuned.remember("a device", entry(Br=16, Bc=8), {})
    tuned.remember("a device", entry(folder="/elsewhere", Br=64, Bc=8), {})
    assert [dict(x.constants)["Br"] for x in tuned.on("a device")] == [16, 64]


SIZES = ("-B", 1, "-H", 2, "-M", 20, "-d", 8, "--budget", 60, "--backend", "simulator")


@pytest.mark.slow
def test_the_command_succeeds_if_one_candidate_is_right(laps, engine):
    done = cli("tune", laps, *SIZES)
    assert "laps=1 " in done.stdout and "wrong" in done.stdout
    assert "note: laps=2: wrong: " in done.stderr
    assert "note: fastest for float32, d=8: laps=1" in done.stderr
    rows = json.loads(cli("tune", laps, *SIZES, "--format", "json").stdout)
    assert [row["state"] for row in rows] == ["right", "right", "wrong"]
    assert rows[2]["ms"] is None and rows[2]["note"] and rows[0]["ms"] > 0


def test_notes_name_a_kernel_without_tiles(tmp_path, engine):
    wrong = own_kernel.MINE.replace("key < N;", "key < N - 1;")
    done = cli("tune", f"{own_kernel.write(tmp_path, wrong)}:mine", *SIZES, code=1)
    assert "note: mine: wrong: " in done.stderr


def of_states(*states):
    """Yields one candidate per state; all candidates in the state "wrong" have the same error."""
    problem = Problem.of_sizes(M=20, d=8)
    for laps, state in enumerate(states):
        note = "off" if state == "wrong" else ""
        yield Candidate(Measurement("mine", "forward", problem, {"laps": laps}, note=note), state)


def test_notes_have_singular_and_plural(monkeypatch):
    def notes(*states):
        monkeypatch.setattr(tuning, "tune", lambda *_, **__: list(of_states(*states)))
        return cli("tune", "fa2", *SIMULATOR, code=1).stderr

    assert "note: 1 was not tried in time; run" in notes("untried", "wrong")
    assert "note: 2 were not tried in time; run" in notes("untried", "untried")
    assert "note: laps=0 and 1 other: wrong: off" in notes("wrong", "wrong")
    assert "note: laps=0 and 2 others: wrong: off" in notes("wrong", "wrong", "wrong")


@pytest.mark.slow
def test_an_unwritable_cache_is_reported_once(laps, engine, monkeypatch):
    monkeypatch.setenv("CUPYFA_CACHE_DIR", "/proc/x")
    done = cli("tune", laps, *SIZES[:-4], "--budget", 0, "--backend", "simulator")
    assert done.stderr.count("note: /proc/x cannot be written, so nothing is stored") == 1
    assert "set CUPYFA_CACHE_DIR" in done.stderr
    assert "not tried in time; use a larger --budget" in done.stderr
    assert "run the command again" not in done.stderr


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_fits_the_terminal(monkeypatch, columns):
    """Prints all columns that tuning on a GPU has, for the kernel with the most constants."""
    monkeypatch.setenv("COLUMNS", str(columns))
    problem = Problem.of_sizes(batch=4, heads=16, M=2048, d=64, dtype="float16")
    rows = []
    for i, made in enumerate(planning.candidates(FORWARD["v3"], problem, H100)):
        measured = Measurement("v3", "forward", problem, made.constants)
        times = [38.89123 + i, 40.5 + i / 3]
        right = replace(measured, milliseconds=times, registers=128 + i, spilled_bytes=1000 + i)
        rows.append(Candidate(right, "right", 0.98761 + i, 116736 - i, 3 + i))
        rows.append(Candidate(measured, "untried", shared_bytes=116736))
    monkeypatch.setattr(tuning, "tune", lambda *_, **__: rows)
    table = cli("tune", "v3", *SIMULATOR).stdout.splitlines()
    assert max(map(len, table[1:])) <= columns
    assert sum("untried" in line for line in table) == len(rows) / 2


def test_the_others_are_not_compared_with_the_finalists(laps, engine, monkeypatch):
    measured(monkeypatch, {200: 10.0, 2: 9.0, 1: 30.0})
    monkeypatch.setattr(tuning, "_FINALISTS", 2)
    best, own, other = tune(laps, engine)
    assert best.factor > own.factor == 1 and best.rounds and own.rounds
    assert (other.factor, other.rounds) == (None, 0) and other.first_ms > best.first_ms
    assert other.row()["ms"] is None and best.row()["ms"] > 0
    monkeypatch.setattr(tuning, "tune", lambda *_, **__: [best, own, other])
    done = cli("tune", laps, *SIMULATOR)
    rows = done.stdout.splitlines()
    line = next(i for i, row in enumerate(rows) if row.startswith("─"))
    assert [row.split()[0] for row in rows[line - 2 : line]] == ["laps=2", "laps=200"]
    (last,) = rows[line + 1 :]
    assert last.split()[:2] == ["laps=1", f"{other.first_ms:.4g}"] and "x own" in rows[line - 3]
    # The columns "ms" and "x own" are empty.
    assert last.split()[2] == f"{round(other.row()['spread_%'], 2):.4g}"


@pytest.mark.gpu
def test_tuning_on_a_gpu(cuda, tmp_path, monkeypatch):
    monkeypatch.setenv("CUPYFA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuned, "on", ON)
    cuda.refresh()
    try:
        rows = cupyfa.lab.tune("fa2_coalesced", backend=cuda, M=512, dtype="float16", budget=40)
        best = rows[0]
        assert best.state == "right" and best.factor > 0.95
        assert best.measurement.registers > 0 and best.blocks_per_sm > 0
        assert {row.state for row in rows} <= {"right", "untried"}
        plan = cupyfa.plan(kernel="fa2_coalesced", backend=cuda, M=512, d=64, dtype="float16")
        assert plan.constants == best.measurement.constants
        assert os.listdir(tmp_path / "tuned")
    finally:
        monkeypatch.undo()
        cuda.refresh()
