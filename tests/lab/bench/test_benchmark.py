"""Benchmarks: timing, checks before timing, and the rows of results."""

import json
import os
import re
from dataclasses import replace
from random import Random
from statistics import median

import numpy as np
import pytest
from helpers import own_kernel
from helpers.cli import cli, refused, strict
from helpers.problems import DTYPES, FORWARD, inputs_of, planned

import cupyfa
from cupyfa import DeviceError, Problem, Simulator, cache_folder
from cupyfa.lab.bench import benchmark, peaks, peers, timing
from cupyfa.lab.bench.benchmark import bench
from cupyfa.lab.bench.results import Measurement, Results
from cupyfa.lab.bench.sweeps import problem_of_cache
from cupyfa.lab.verify import sampling
from cupyfa.lab.verify.case import LAYOUTS, Case
from cupyfa.ladder import LADDER, lookup as records
from cupyfa.ladder.operations import OPERATIONS, Excerpt
from cupyfa.numerics import tolerance
from cupyfa.runtime.arrays import readable_inputs
from cupyfa.runtime.launcher import replay

TINY = {"batch": 1, "heads": 2, "M": 20, "d": 8}
OF_ANY_M = ("-B", 1, "-H", 2, "-d", 8, "--backend", "simulator", "--budget", 0)
SMALL = ("-M", 20, *OF_ANY_M)


class Clock:
    """A backend with a fake clock: each call returns milliseconds, by which the clock advances."""

    def __init__(self, monkeypatch):
        self.now, self.called, self.cold = 0.0, [], set()
        monkeypatch.setattr(timing, "perf_counter", lambda: self.now)

    def time(self, call, *, cold=False):
        milliseconds = call()
        self.now += milliseconds / 1e3
        self.called.append(milliseconds)
        self.cold.add(cold)
        return milliseconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def noisy(ms, noise, seed=0):
    pick = Random(seed)
    return lambda: ms * (1 + noise * pick.gauss(0, 1))


def test_calls_alternate_in_every_round(clock):
    a, b, c = timing.measure(clock, [lambda: 1, lambda: 2, lambda: 3], budget=0.1, cold=True)
    assert clock.called[-60:] == [1, 2, 3] * 20
    assert (a, b, c) == ([1] * 20, [2] * 20, [3] * 20)
    assert clock.cold == {True}


def test_rounds_end_when_all_medians_are_known(clock):
    steady, loose = timing.measure(clock, [lambda: 1, noisy(1, 0.02)], budget=60, cold=False)
    assert timing.standard_error(loose) < 0.005
    assert 20 < len(loose) < 200
    assert len(steady) == len(loose)


def test_a_call_ends_when_its_budget_is_used_up(clock):
    slow, fast = timing.measure(clock, [noisy(300, 0.5, 1), noisy(1, 0.5, 2)], budget=1, cold=True)
    assert 2 <= len(slow) < 8
    assert len(fast) > 300
    assert 1 < (clock.now - 1e-3 * sum(fast)) < 3


@pytest.mark.parametrize("seconds, launches", [(0.9, 2), (2.9, 2), (3.1, 1), (100, 1)])
def test_slow_calls_are_made_twice_unless_that_takes_very_long(clock, seconds, launches):
    (times,) = timing.measure(clock, [lambda: 1e3 * seconds], budget=1, cold=True)
    assert times == [1e3 * seconds] * launches
    assert len(clock.called) == (1 if launches == 1 else 3)  # including a warm-up call


def test_the_number_of_rounds_is_limited(clock):
    (times,) = timing.measure(clock, [noisy(1, 0.5)], budget=60, cold=False, most=20)
    assert len(times) == 20


def test_the_standard_error_of_the_median_is_that_of_many_repetitions():
    pick = Random(0)
    samples = [[100 + pick.gauss(0, 2) for _ in range(50)] for _ in range(400)]
    medians = np.array([median(sample) for sample in samples])
    told = np.mean([timing.standard_error(sample) for sample in samples])
    assert told == pytest.approx(medians.std() / 100, rel=0.15)


def test_ratios_are_medians_of_pairs():
    drifting = [1, 2, 4, 8, 16, 32]
    assert timing.ratio([3 * x for x in drifting], drifting) == 3
    assert timing.ratio([3, 6, 12], drifting) == 3


class Apart(Simulator):
    """A simulator with separate memory, to which arrays must be uploaded."""

    def owns(self, array):
        return False

    def upload(self, array):
        return array.copy()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_keep_their_strides_on_the_device(layout):
    plan = planned(FORWARD["fa2"], Simulator(), {"batch": 2, "heads": 2, "M": 9, "d": 5})
    inputs = readable_inputs(plan, inputs_of(plan, layout=layout))
    memory = {}
    arrays = timing.arrays_of(Apart(), plan, inputs, memory)
    for name, array in inputs.items():
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].strides == array.strides
        assert not np.shares_memory(arrays[name], array)
        if layout == "unaligned":
            assert arrays[name].ctypes.data % 16 == array.ctypes.data % 16 != 0
    again = timing.arrays_of(Apart(), plan, inputs, memory)
    assert all(again[name] is arrays[name] for name in arrays)


FORWARD_PROBLEMS = [
    Problem.of_sizes(batch=2, heads=4, kv_heads=2, M=90, N=70, d=8, causal=True),
    Problem.of_sizes(batch=2, heads=4, kv_heads=1, M=70, N=90, d=8, causal=True),
    Problem.of_sizes(batch=1, heads=2, M=90, N=70, d=8, causal="top-left"),
    Problem.of_sizes(batch=1, heads=2, M=90, N=70, d=8, dv=3),
]


@pytest.mark.parametrize("p", FORWARD_PROBLEMS, ids=str)
def test_an_excerpt_has_the_expected_values_of_the_whole(p):
    plan = planned(FORWARD["fa2"], Simulator(), {"M": 1, "d": 1})
    plan = replace(plan, problem=p)
    inputs = inputs_of(plan)
    reference = OPERATIONS["forward"].reference
    whole = reference(inputs, p, [None])[None]
    for excerpt in (Excerpt(0, 1, slice(0, 5)), Excerpt(p.batch - 1, 0, slice(60, 70))):
        part = reference(inputs, p, [None], excerpt)[None]
        for name in part:
            np.testing.assert_allclose(part[name].value, excerpt.of(whole[name].value), rtol=1e-12)


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("window", [None, (9, 0)])
def test_an_excerpt_of_a_cache_has_the_expected_values_of_the_whole(page, window):
    sizes = {"heads": 4, "kv_heads": 2, "d": 8, "M": 3, "dtype": "float32", "sink": "h"}
    p = problem_of_cache([20, 0, 33], page=page, window=window, **sizes)
    inputs = Case("forward", p).inputs()
    reference = OPERATIONS["forward"].reference
    whole = reference(inputs, p, [None])[None]
    for batch, head in ((0, 3), (1, 0), (2, 1)):
        excerpt = Excerpt(batch, head, slice(0, 3))
        part = reference(inputs, p, [None], excerpt)[None]
        for name in part:
            np.testing.assert_allclose(part[name].value, excerpt.of(whole[name].value), rtol=1e-12)


def test_large_caches_are_sampled_by_sequences_and_heads():
    p = problem_of_cache([4096] * 16, page=16, heads=32, kv_heads=8, d=128, dtype="bfloat16")
    excerpts = sampling.excerpts(p, seed=0)
    assert {(x.rows.start, x.rows.stop) for x in excerpts} == {(0, 1)}
    assert {(0, 0), (15, 31)} < {(x.batch, x.head) for x in excerpts}


def test_a_peer_that_differs_in_decoding_is_judged(monkeypatch):
    """FA2 is wrong in one element of the second sequence, which the reference tells."""
    wrong = np.zeros((3, 4, 1, 8), np.float32)

    def peer(name, backend, p, arrays, operation):
        wrong[...] = OPERATIONS["forward"].reference(known, cached, [None])[None]["O"].value
        wrong[2, 1, 0, 5] += 1
        return peers.Peer("torch fa2", lambda: None, {"O": wrong})

    monkeypatch.setattr(peers, "peer", peer)
    sizes = {"heads": 4, "kv_heads": 2, "d": 8, "dtype": "float32"}
    cached = problem_of_cache([40, 0, 7], page=16, **sizes)
    known = Case("forward", cached).inputs()
    with pytest.warns(UserWarning, match=r"differ by 1 at \[2, 1, 0, 5\].* torch fa2 is farther"):
        rows = quick(
            "fa2",
            alone=True,
            against="fa2",
            cache="paged",
            lengths=[40, 0, 7],
            M=None,
            batch=None,
            **sizes,
        )
    assert [row.passed for row in rows] == [True, None]


def test_large_problems_are_sampled_at_the_corners_and_at_random():
    p = Problem.of_sizes(batch=3, heads=5, M=4096, d=128)
    excerpts = sampling.excerpts(p, seed=0)
    for batch, head in ((0, 0), (2, 4)):
        assert Excerpt(batch, head, slice(0, 64)) in excerpts
        assert Excerpt(batch, head, slice(4096 - 64, 4096)) in excerpts
    assert len(excerpts) >= 6
    assert excerpts == sampling.excerpts(p, seed=0) != sampling.excerpts(p, seed=1)
    assert sampling.excerpts(replace(p, M=100, N=100), seed=0) == [None]
    softmax = sampling.excerpts(Problem.of_row_sizes(65536, 4096, "float32"), seed=0)
    assert Excerpt(0, 0, slice(65536 - 64, 65536)) in softmax


@pytest.fixture
def by_sample(monkeypatch):
    """Makes checks compare only excerpts, as they do for large problems."""
    monkeypatch.setattr(sampling, "_WORK", 1)


@pytest.mark.parametrize(
    "index, value, found",
    [
        ((0, 0, 3, 2), 9.0, True),
        ((1, 2, 199, 0), 9.0, True),
        ((1, 2, 199, 0), np.nan, True),
        ((0, 1, 100, 4), np.nan, True),  # outside the compared excerpts; NaN still shows
        (None, 0.0, False),
    ],
)
def test_a_sample_finds_errors_in_it_and_unwritten_elements_anywhere(
    by_sample, index, value, found
):
    p = Problem.of_sizes(batch=2, heads=3, M=200, N=50, d=8)
    plan = replace(planned(FORWARD["fa2"], Simulator(), {"M": 1, "d": 1}), problem=p)
    inputs = inputs_of(plan)
    results = {"O": OPERATIONS["forward"].reference(inputs, p, [None])[None]["O"].value}
    if index:
        results["O"][index] = value
    chosen = [Excerpt(0, 0, slice(0, 64)), Excerpt(1, 2, slice(136, 200))]
    judge = sampling.Judge.of(plan, inputs, chosen)
    (verdict,) = judge.verdicts(results)
    assert verdict.passed != found
    assert not found or verdict.index == index
    assert judge.share == 128 / 1200


def test_bytes_are_inputs_and_outputs_once():
    p = Problem.of_sizes(batch=2, heads=4, kv_heads=2, M=8, N=16, d=32, dv=64, dtype="float16")
    q, k, v, o, lse = 2 * 4 * 8 * 32, 2 * 2 * 16 * 32, 2 * 2 * 16 * 64, 2 * 4 * 8 * 64, 2 * 4 * 8
    assert OPERATIONS["forward"].bytes(p) == 2 * (q + k + v + o) + 4 * lse
    rows = Problem.of_row_sizes(8, 16, "float32")
    assert OPERATIONS["softmax"].bytes(rows) == 4 * (2 * 8 * 16 + 8)


class Fast(Simulator):
    """A simulator that counts timed calls, each of which takes a second."""

    def __init__(self):
        super().__init__()
        self.timed = 0

    def time(self, call, *, cold=False):
        call()
        self.timed += 1
        return 1e3


@pytest.fixture
def facts(monkeypatch, tmp_path):
    monkeypatch.setenv("CUPYFA_CACHE_DIR", str(tmp_path))
    return cache_folder.facts_file("peaks", "the simulator")


def test_peaks_are_measured_once_and_remembered(facts):
    engine = Fast()
    rate = peaks.product_rate(engine, "float32")
    assert rate == pytest.approx(2 * 256**3 / 1e12)
    timed = engine.timed
    assert peaks.product_rate(engine, "float32") == rate
    assert engine.timed == timed
    assert peaks.copy_rate(engine) == pytest.approx(2 * 2**22 / 1e9)
    assert set(json.loads(facts.read_text())) == {"float32", "copy"}


def test_without_a_library_for_products_there_is_no_peak(facts):
    class Bare(Fast):
        limits = replace(Fast().limits, no_matmul="it needs cuBLAS")

    engine = Bare()
    assert peaks.product_rate(engine, "float32") is None
    assert not facts.exists()


@pytest.mark.parametrize("dtype", [*DTYPES, "tf32"])
def test_every_precision_has_a_peak_here(facts, dtype):
    assert peaks.product_rate(Fast(), dtype) > 0


class Paced(Simulator):
    """A simulator in which each kernel takes a fixed number of milliseconds on a drifting clock."""

    def __init__(self, **milliseconds):
        super().__init__()
        self.milliseconds, self.drift = milliseconds, 1.0

    @property
    def limits(self):
        # Stored peaks are looked up by the device's name.
        return replace(super().limits, device="a paced simulator")

    def time(self, call, *, cold=False):
        plan = getattr(call, "plan", None)
        if plan is not None:  # skips the matrix products that measure a peak
            call()
        self.drift *= 1.0001
        kernel = plan.kernel.name if plan else "product"
        return self.milliseconds.get(kernel, 1.0) * self.drift


@pytest.fixture(autouse=True)
def calls_with_plans(monkeypatch):
    """Attaches plans to calls, so that a paced simulator can identify the kernel."""

    def replay_of(engine, plan, arrays):
        call = replay(engine, plan, arrays)
        call.plan = plan
        return call

    monkeypatch.setattr(benchmark, "replay", replay_of)


def names(rows):
    return [row.kernel for row in rows]


def quick(kernels, backend="simulator", **options):
    """Measures kernels on a tiny problem with a budget of 0, which still runs two launches."""
    return bench(kernels, backend=backend, budget=0, **{**TINY, **options})


def test_a_kernel_is_measured_beside_its_baseline_and_the_rung_before():
    rows = bench("v2", backend=Paced(baseline=10, v1=40, v2=20), budget=0.01, **TINY)
    assert names(rows) == ["baseline", "v1", "v2"]
    assert all(row.passed and row.checked == 1 and row.note == "" for row in rows)
    baseline, v1, v2 = rows
    assert baseline.factors == {"baseline": None, "rung before": None}
    assert v2.factors["baseline"] == pytest.approx(0.5, rel=0.03)
    assert v2.factors["rung before"] == pytest.approx(2, rel=0.02)
    assert v1.factors["baseline"] == pytest.approx(0.25, rel=0.02)
    assert v1.factors["rung before"] is None  # the rung before v1 was not measured


@pytest.mark.parametrize(
    "kernels, options, expected",
    [
        ("fa2", {"alone": True}, ["fa2"]),
        ("minimal", {}, ["baseline", "baseline_online", "minimal"]),
        ("baseline_online", {}, ["baseline", "baseline_online"]),
        ("baseline", {}, ["baseline"]),
        (["v1", "fa2"], {}, ["v1", "fa2"]),
        ("softmax_online", {}, ["softmax_safe", "softmax_online"]),
        (FORWARD["v2"], {"alone": True}, ["v2"]),
    ],
)
def test_kernels_that_are_measured_by_default(kernels, options, expected):
    sizes = {"M": 9, "N": 7} if kernels == "softmax_online" else TINY
    rows = bench(kernels, backend="simulator", budget=0, **sizes, **options)
    assert names(rows) == expected
    assert all(row.time > 0 for row in rows)


def test_auto_is_measured_as_what_it_chooses():
    (row,) = quick("auto", alone=True)
    assert row.kernel == "fa2_coalesced"


class Card(Paced):
    """A paced simulator that benchmarks treat as a GPU."""

    name = "card"


def test_figures_of_a_row():
    engine = Card(fa2=2.0)
    (row,) = bench("fa2", backend=engine, alone=True, budget=0.001, dtype="float16", **TINY)
    p = row.problem
    assert row.tflops == pytest.approx(OPERATIONS["forward"].flops(p) / row.time / 1e9)
    assert row.bandwidth == pytest.approx(OPERATIONS["forward"].bytes(p) / row.time / 1e6)
    assert row.percent_of_peak == pytest.approx(100 * row.tflops / row.peak)
    columns = row.row()
    assert columns["ms"] == median(row.milliseconds)
    assert columns["launches"] == len(row.milliseconds)
    assert (columns["M"], columns["dtype"], columns["checked_%"]) == (20, "float16", 100)
    assert Measurement.of_record(json.loads(json.dumps(row.record()))) == row


CACHE = {"lengths": [40, 0, 7], "heads": 4, "kv_heads": 2, "d": 8, "budget": 0}


@pytest.mark.parametrize("cache", [{"cache": "contiguous"}, {"cache": "paged", "page": 32}])
@pytest.mark.parametrize("kernel, dtype", [("fa2", "float32"), ("mma_split_kv", "float16")])
def test_decoding_is_measured_by_the_keys_that_there_are(kernel, dtype, cache):
    rows = bench(kernel, backend="simulator", dtype=dtype, **CACHE, **cache)
    own = next(x for x in rows if x.kernel == kernel)
    assert own.passed and own.checked == 1
    itemsize = 4 if dtype == "float32" else 2
    assert own.bandwidth == pytest.approx(47 * 2 * 16 * itemsize / own.time / 1e6)
    assert own.flops == 2 * 4 * 47 * 16
    assert replace(own, peak=2 * own.bandwidth).percent_of_peak == pytest.approx(50)
    assert Measurement.of_record(json.loads(json.dumps(own.record()))) == own


def test_a_window_limits_the_keys_that_decoding_reads():
    (own,) = bench(
        "fa2", backend="simulator", cache="contiguous", M=2, window=(9, 0), alone=True, **CACHE
    )
    assert own.bandwidth == pytest.approx((11 + 7) * 2 * 16 * 4 / own.time / 1e6)


def test_several_new_tokens_see_as_many_keys_less():
    (own,) = bench("fa2", backend="simulator", cache="contiguous", M=3, alone=True, **CACHE)
    assert own.passed and own.flops == 2 * 4 * 16 * ((38 + 39 + 40) + (5 + 6 + 7))


@pytest.mark.parametrize("more", [{}, {"cache": "contiguous"}, {"cache": "paged"}])
def test_rungs_without_sequences_are_not_compared_with(more):
    rows = bench("fa2", backend="simulator", **CACHE, **more)
    assert [x.kernel for x in rows] == ["fa2"]
    sizes = {**CACHE, "lengths": None, "batch": 1, "M": 20}
    assert bench("fa2", backend="simulator", **sizes)[0].kernel == "baseline"


def test_bench_of_a_cache_on_the_command_line(tmp_path):
    sizes = ("-H", 4, "-d", 8, "--lengths", "40,0,7", "--budget", 0, "--backend", "simulator")
    file = tmp_path / "x.json"
    out = cli("bench", "fa2", "--cache", "paged", "-p", "page=16,32", *sizes, "--save", file)
    assert "cache in pages of 16" in out.stdout and "cache in pages of 32" in out.stdout
    assert "GB/s counts keys and values" in out.stderr
    assert "not measured on a GPU" in cli("compare", file, file).stdout
    assert "use cache='paged'" in refused("bench", "fa2", "--page", 16, *sizes, code=2)


def test_registers_are_the_largest_of_all_launches():
    class Telling(Simulator):
        def resources(self, prepared):
            wanting = "repair_rows" in str(vars(prepared).values())
            return {"registers": 168 if wanting else 40, "spilled bytes": 8 if wanting else 0}

    (row,) = quick("baseline", backend=Telling(), causal=True)
    assert (row.registers, row.spilled_bytes) == (168, 8)


def test_the_simulator_has_no_share_of_a_peak(facts):
    (row,) = quick("fa2", alone=True)
    assert (row.peak, row.percent_of_peak, row.row()["%_of_peak"]) == (None, None, None)
    assert not facts.exists()


def test_the_peak_is_that_of_what_the_kernel_multiplies_in(facts):
    facts.parent.mkdir()
    facts.with_name("a-paced-simulator.json").write_text(
        '{"float16": 7.0, "float32": 3.0, "copy": 5.0}'
    )
    rows = quick(["v3", "fa2"], backend=Card())
    assert [row.peak for row in rows] == [7.0, 3.0]
    (row,) = bench("softmax_safe", backend=Card(), budget=0, M=5, N=5)
    assert row.peak == 5.0
    assert row.percent_of_peak == pytest.approx(100 * row.bandwidth / 5)


@pytest.fixture
def two_of_a_name(tmp_path):
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
        own_kernel.write(tmp_path / folder)
    return [f"{tmp_path / folder}/script.py:mine" for folder in ("old", "new")]


def test_kernels_of_the_same_name_are_shown_by_their_scripts(two_of_a_name, tmp_path):
    file = tmp_path / "a.json"
    cli("bench", *two_of_a_name, *SMALL, "--save", file)
    assert names(Results.load(file).rows) == two_of_a_name
    compared = strict(cli("compare", file, file, "--format", "json").stdout)
    assert [row["kernel"] for row in compared] == two_of_a_name
    old = two_of_a_name[0]
    assert names(quick([old, old])) == ["mine", "mine"]


def test_a_users_kernel_named_like_the_baseline(tmp_path):
    script = own_kernel.write(tmp_path, py=('name="mine"', 'name="baseline"'))
    rows = quick(f"{script}:mine")
    assert names(rows) == ["baseline", f"{script}:mine"]
    assert rows[1].factors["baseline"] > 0


def test_different_records_of_the_same_name_are_refused(two_of_a_name):
    one, other = map(records.record_named, two_of_a_name)
    with pytest.raises(ValueError, match="two kernels have the name 'mine'; rename"):
        quick([one, other])
    assert names(quick([one, one])) == ["mine", "mine"]


def test_all_constants_of_a_kernel_are_measured_in_the_same_rounds():
    tiles = {"Br": [8, 16], "Bc": 4}
    rows = quick(["v1", "fa2"], tiles=tiles)
    assert [(row.kernel, row.constants) for row in rows] == [
        ("v1", {"Bc": 4}),
        ("fa2", {"Br": 8, "Bc": 4}),
        ("fa2", {"Br": 16, "Bc": 4}),
    ]


def test_unsupported_problems_are_rows_with_a_note():
    rows = quick("v3", alone=True, dtype=["float64", "float16"])
    assert [row.time is None for row in rows] == [True, False]
    assert rows[0].note == "it supports only float16, bfloat16, float32"
    assert rows[0].passed is None


def test_constants_that_break_a_rule_are_rows_with_a_note():
    tiles = {"Br": [32, 8], "Bc": 24}
    rows = quick(["v1", "fa2"], tiles=tiles)
    rule = "violate a constraint of fa2: Bc is less than 16 or a multiple of 16"
    assert [(row.time is not None, row.note.partition(";")[0]) for row in rows] == [
        (True, ""),
        (False, f"constants Br=32, Bc=24 {rule}"),
        (False, f"constants Br=8, Bc=24 {rule}"),
    ]
    with pytest.raises(ValueError, match="Br=32, Bc=24 violate a constraint"):
        quick("fa2", tiles=tiles)


class Cramped(Simulator):
    """A simulator that cannot allocate arrays of more than 20,000 bytes."""

    def empty(self, shape, dtype):
        if np.prod(shape) * dtype.itemsize > 20_000:
            raise DeviceError("out of memory: 20,000 bytes fit")
        return super().empty(shape, dtype)


def test_problems_that_do_not_fit_in_memory_are_left_out():
    sizes = {**TINY, "M": [8, 80]}  # for M = 80, S and P need 51,200 bytes, O 5,120
    rows = bench("baseline_online", backend=Cramped(), budget=0, **sizes)
    assert [(row.problem.M, row.time is not None, row.note) for row in rows] == [
        (8, True, ""),
        (8, True, ""),
        (80, False, "out of memory: 20,000 bytes fit"),
        (80, False, "out of memory: 20,000 bytes fit"),
    ]


def test_slow_kernels_end_early():
    sizes = {**TINY, "M": [10, 20, 40]}
    engine = Paced(v1=1000, fa2=1)
    rows = bench(["v1", "fa2"], backend=engine, budget=0, patience=3, **sizes)
    assert [(row.kernel, row.problem.M) for row in rows if row.time] == [
        ("v1", 10),
        ("fa2", 10),
        ("fa2", 20),
        ("fa2", 40),
    ]
    assert "one launch would take about 4" in rows[2].note
    assert "one launch would take about 1" in rows[4].note


WRONG = ("sum = sum * factor + weight;", "sum = sum * factor + weight * (key > 0);")


BEYOND = ("O.row(batch, head, row)[i]", "O.row(batch, head, row)[i + (row == M - 1)]")


@pytest.mark.parametrize(
    "fault, note", [(WRONG, "WRONG: O: error .*x the bound"), (BEYOND, "WRONG")]
)
def test_a_wrong_kernel_is_not_timed(tmp_path, fault, note):
    script = own_kernel.write(tmp_path, cu=fault)
    rows = quick([f"{script}:mine", "fa2"])
    assert [row.passed for row in rows] == [False, True]
    assert rows[0].milliseconds == () and re.match(note, rows[0].note)


def test_the_checked_share_of_a_large_problem_is_reported(by_sample):
    sizes = {"batch": 1, "heads": 3, "M": 200, "N": 20, "d": 8}
    (row,) = bench("fa2", backend="simulator", alone=True, budget=0, **sizes)
    assert 0.3 < row.checked < 1
    assert row.passed


class Forgetful(Simulator):
    """A simulator whose CUDA graphs do nothing."""

    def capture(self, call):
        return lambda: None


def test_graphs_are_replayed_and_incomplete_ones_found():
    how = {"graph": True, "alone": True, "budget": 0, **TINY}
    (row,) = bench("fa2", backend="simulator", **how)
    assert row.passed and row.time
    (row,) = bench("fa2", backend=Forgetful(), **how)
    assert (row.passed, row.time) == (False, None)
    assert row.note == "WRONG: the CUDA graph of fa2 does not write all of O"


@pytest.fixture
def peer(monkeypatch):
    """Returns a function that installs a peer whose results a given function computes."""

    def make(function):
        def prepare(name, engine, problem, arrays, operation):
            return peers.Peer(f"torch {name}", lambda: None, function(**arrays))

        monkeypatch.setattr(peers, "peer", prepare)

    return make


def attention(Q, K, V, **how):
    return {"O": cupyfa.attention(Q, K, V, backend="simulator", kernel="minimal", **how)}


def gradients(Q, K, V, O, lse, dO):  # noqa: E741
    grads = cupyfa.backward(
        *(dO, Q, K, V, O, lse), backend="simulator", kernel="two_pass", causal=True
    )
    return dict(zip(("dQ", "dK", "dV"), grads))


def test_a_peer_takes_part_in_all_rounds(peer, recwarn):
    peer(attention)
    rows = quick(["v2", "fa2"], against=["fa2"])
    assert names(rows) == ["v2", "fa2", "torch fa2"]
    assert all(row.factors["torch fa2"] > 0 for row in rows[:2])
    assert rows[2].factors["torch fa2"] is None
    assert "x_torch_fa2" in rows[0].row()
    peer(gradients)
    rows = quick("columns", against=["cudnn"], causal=True)
    assert names(rows) == ["baseline_backward", "columns", "torch cudnn"]
    assert rows[1].factors["torch cudnn"] > 0 and rows[1].factors["baseline"] > 0
    assert not [w for w in recwarn if "torch" in str(w.message)]


def test_a_peer_finds_an_error_outside_the_sample(monkeypatch, peer, by_sample):
    """One element is wrong, in a row outside all excerpts."""
    sizes = {"batch": 1, "heads": 3, "M": 300, "N": 20, "d": 8}
    p = Problem.of_sizes(**sizes)
    seen = {(w.head, i) for w in sampling.excerpts(p, 0) for i in range(300)[w.rows]}
    head, unseen = next((h, i) for h in range(3) for i in range(300) if (h, i) not in seen)
    honest = benchmark.run_guarded

    def spoilt(engine, plan, *arrays):
        results = honest(engine, plan, *arrays)
        results["O"][0, head, unseen, 5] += 1
        return results

    monkeypatch.setattr(benchmark, "run_guarded", spoilt)
    (row,) = bench("fa2", backend="simulator", alone=True, budget=0, **sizes)
    assert row.passed
    peer(attention)
    with pytest.warns(UserWarning, match="fa2 is farther from the reference"):
        row, other = bench(
            "fa2", backend="simulator", against=["math"], alone=True, budget=0, **sizes
        )
    assert row.passed is False and f"worst at [0, {head}, {unseen}, 5]" in row.note
    assert other.time is not None


@pytest.mark.parametrize("at_once", [7, 1 << 16])
@pytest.mark.parametrize("output", ["O", "dQ", "dK", "dV"])
def test_a_wrong_result_of_a_peer_is_named(peer, monkeypatch, output, at_once):
    monkeypatch.setattr(tolerance, "_BLOCK", at_once)
    kernel, results = ("fa2", attention) if output == "O" else ("rows", gradients)
    where = "" if output == "O" else f"{output} of "

    def wrong(**arrays):
        made = results(**arrays)
        made[output][0, 1, 7, 3] += 1
        return made

    peer(wrong)
    said = rf"torch math and {kernel} differ by 1 at \[0, 1, 7, 3\] of {where}.*: torch math is"
    with pytest.warns(UserWarning, match=said):
        rows = quick(kernel, against="math", alone=True, causal=output != "O")
    assert [row.time is not None for row in rows] == [True, True]


def rows_of(*args, sizes=SMALL, code=0):
    return strict(cli("bench", *args, *sizes, "--format", "json", code=code).stdout)


def test_bench_as_json():
    rows = rows_of("fa2", "-p", "M=8,16", "-p", "causal=none,true", sizes=OF_ANY_M)
    assert [(row["kernel"], row["M"], row["N"], row["causal"]) for row in rows] == [
        (kernel, M, M, causal)
        for M in (8, 16)
        for causal in (None, "bottom-right")
        for kernel in ("baseline", "v3", "fa2")
    ]
    assert all(row["ms"] > 0 and row["note"] == "" for row in rows)
    assert {row["device"] for row in rows} == {"the simulator"}


def test_measurements_before_an_error_are_printed_and_saved(tmp_path):
    own_kernel.write(tmp_path, cu=("extern", 'static_assert(sizeof(scalar) < 8, "no");\nextern'))
    script, file = tmp_path / "script.py", tmp_path / "saved.json"
    args = (f"{script}:mine", *SMALL, "--alone", "-p", "dtype=float32,float64", "--save", file)
    done = cli("bench", *args, code=2)
    assert "note: ended by an error; these are the measurements so far" in done.stderr
    assert [row.problem.dtype.name for row in Results.load(file).rows] == ["float32"]


def test_given_constants_are_printed_once():
    """Constants with one value are printed above the table, all other constants in a column."""
    for values, above, rows in (("8", "Br=8", 0), ("8,16", "", 2)):
        head, *table = cli(
            "bench", "fa2", *SMALL, "--alone", "-p", f"Br={values}"
        ).stdout.splitlines()
        assert ("Br=" in head) == bool(above) and above in head
        assert sum("Br=" in line for line in table) == rows


def test_a_table_of_one_row():
    shown = cli("bench", "fa2", *SMALL, "--alone").stdout
    assert re.search("^kernel +fa2$", shown, re.MULTILINE) and "TFLOP/s" in shown


@pytest.mark.slow
def test_every_kernel_of_the_ladder():
    rows = rows_of("--all", "-p", "M=6", "--dtype", "float16", sizes=OF_ANY_M)
    assert [row["kernel"] for row in rows] == [name for group in LADDER.values() for name in group]
    of_other_dtypes = ["mma_tf32", "mma_fp16x2", "mma_f64", "wgmma_fp16x2"]
    of_other_dtypes += ["mma_fp16x2_two_pass", "mma_f64_columns", "wgmma_fp16x2_two_pass"]
    of_other_dtypes += ["mma_f64_tangent"]
    assert [row["kernel"] for row in rows if not row["ms"]] == of_other_dtypes


def test_a_wrong_kernel_ends_with_exit_code_1(tmp_path):
    script = own_kernel.write(tmp_path, cu=WRONG)
    done = cli("bench", f"{script}:mine", *SMALL, code=1)
    row = next(line for line in done.stdout.splitlines() if line.startswith("mine"))
    assert "WRONG" in row
    assert "mine on batch=1 heads=2 M=20" in done.stdout
    assert "x the bound" in done.stdout


@pytest.mark.parametrize("command", [("bench", "fa2"), ("ladder",)])
def test_times_of_a_gpu_are_not_replaced_by_those_of_the_simulator(tmp_path, command):
    saved = tmp_path / "a.json"
    Results({"backend": "cuda", "device": "an H100"}, []).save(saved)
    before = saved.read_text()
    message = refused(*command, "--backend", "simulator", "--save", saved, code=2)
    assert "a.json contains times of an H100, which simulator times would overwrite" in message
    assert saved.read_text() == before


def test_save_holds_every_round(tmp_path):
    file = tmp_path / "a.json"
    cli("bench", "fa2", *SMALL[:-1], 0.3, "--save", file, "--hot")
    saved = Results.load(file)
    assert names(saved.rows) == ["baseline", "v3", "fa2"]
    assert all(len(row.milliseconds) >= 2 for row in saved.rows)
    assert saved.environment["device"] == "the simulator"
    assert saved.environment["caches"] == "hot"
    assert saved.environment["cupyfa"] == cupyfa.__version__
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    done = cli("compare", file, file)
    verdict = "not measured on a GPU"  # printed once for all rows
    assert done.stdout.count(verdict) == 1 and f"3 {verdict}" in done.stderr


def test_peers_that_are_not_installed_are_noted_once(monkeypatch):
    for module in ("torch", "cudnn"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    done = cli("bench", "fa2", *OF_ANY_M, "-p", "M=5,6", "--against", "math,cudnn-frontend")
    notes = [line for line in done.stderr.splitlines() if "not installed" in line]
    assert [note.split(" is not")[0] for note in notes] == [
        "note: torch math",
        "note: cudnn-frontend",
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("cold", [False, True])
def test_times_on_the_gpu_are_repeatable(cuda, graph, cold):
    sizes = {"batch": 2, "heads": 8, "M": 512, "d": 64, "dtype": "float16"}
    kernels = ["baseline", "fa2_coalesced"]
    first, second = (
        bench(kernels, backend=cuda, graph=graph, cold=cold, budget=0.3, **sizes) for _ in range(2)
    )
    for a, b in zip(first, second):
        assert a.passed and a.note == ""
        assert b.time == pytest.approx(a.time, rel=0.2)
        assert 0 < a.percent_of_peak < 100


@pytest.mark.gpu
def test_host_time_is_not_measured(cuda):
    """The call takes much longer on the host than its kernel takes on the GPU."""
    import time

    import cupy

    x = cupy.zeros(1 << 10, np.float32)

    def call():
        x.fill(1)
        time.sleep(1e-4)

    assert min(cuda.time(call) for _ in range(20)) < 0.05
    assert median(cuda.time(lambda: x.fill(1)) for _ in range(20)) < 0.02


@pytest.mark.gpu
def test_cold_caches_are_slower_than_hot_ones(cuda):
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("the caches are shared with other tests: run without -n")
    import cupy

    x = cupy.ones(1 << 21, np.float32)  # the call reads 8 MiB and writes 8 MiB
    out = cupy.empty_like(x)
    times = {
        cold: min(cuda.time(lambda: cupy.copyto(out, x), cold=cold) for _ in range(50))
        for cold in (False, True)
    }
    assert times[True] > 1.1 * times[False]
