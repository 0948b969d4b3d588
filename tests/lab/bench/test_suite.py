"""The suite of models: its list, what a row measures, and its table."""

import csv
import io
from dataclasses import replace

import numpy as np
import pytest
from helpers.cli import cli, refused, strict

from cupyfa import Problem, Simulator, Unsupported
from cupyfa.lab.analysis.resources import limits_of
from cupyfa.lab.bench import benchmark, peaks, peers, suite
from cupyfa.lab.bench.benchmark import Method
from cupyfa.lab.bench.results import Measurement, Results
from cupyfa.lab.bench.suite import Standing, Workload
from cupyfa.lab.bench.sweeps import problem_of_cache
from cupyfa.lab.bench.watch import Watch
from cupyfa.lab.report.suite_table import suite_table
from cupyfa.lab.report.tables import markdown
from cupyfa.planner.choose_kernel import plan, select
from cupyfa.planner.source import ROOT
from cupyfa.runtime.launcher import replay

# Workloads for which "auto" has no kernel on tensor cores.
WITHOUT_TENSOR_CORES = {"DeepSeek-V3 decode", "Psiformer forward"}


def named(name):
    return next(x for x in suite.workloads() if x.name == name)


def test_each_row_of_the_list_has_its_own_name_and_a_source():
    names = [x.name for x in suite.workloads()]
    assert len({*names}) == len(names)
    assert {x.phase for x in suite.workloads()} == {*suite.PHASES}
    assert all(x.use and x.source for x in suite.workloads())
    assert len({x.model for x in suite.workloads()}) >= 12


def test_the_list_has_what_grids_of_powers_of_two_lack():
    problems = [x.problem for x in suite.workloads()]
    for has in (
        lambda p: p.group == 7,
        lambda p: p.d % 16,
        lambda p: p.M % 64 and p.M > 64,
        lambda p: p.d != p.dv,
        lambda p: p.window[0] is not None,
        lambda p: p.options.softcap,
        lambda p: any(x.name == "sink" for x in p.operands),
        lambda p: any(x.name == "bias" for x in p.operands),
        lambda p: p.lengths,
        lambda p: p.cached and p.pages and p.M > 1,
        lambda p: p.N == 77 and not p.causal,
    ):
        assert any(map(has, problems))
    assert [x.name for x in suite.workloads() if x.is_latent] == ["DeepSeek-V3 decode"]


def test_auto_has_a_kernel_for_every_row_on_hopper():
    chosen, limits = {}, limits_of("90")
    for x in suite.workloads():
        kernel = select("auto", x.operation, x.problem, limits)
        assert plan(kernel, x.problem, limits).launches
        chosen[x.name] = kernel.name
    slow = {x for x, kernel in chosen.items() if not kernel.startswith(("mma", "wgmma"))}
    assert slow <= WITHOUT_TENSOR_CORES, {x: chosen[x] for x in slow}


@pytest.mark.parametrize(
    "name, shape",
    [
        ("Llama 3.1 8B backward", "2×8192 32/8 d=128 causal"),
        ("Llama 3.1 70B prefill", "1×2048×16384 64/8 d=128 causal"),
        ("Llama 3.1 70B decode", "16 of 300-16384 64/8 d=128 pages=16"),
        ("Qwen2.5 7B decode", "4 of 32768 28/4 d=128"),
        ("Qwen3 30B-A3B decode", "4 on 16 of 8192 32/4 d=128 pages=16"),
        ("Gemma 2 9B local forward", "1×8192 16/8 d=256 causal window=4096 softcap=50"),
        ("gpt-oss 20B local forward", "1×8192 64/8 d=64 causal window=128 sink"),
        ("DeepSeek-V3 prefill", "1×1024×8192 128 d=192/128 causal"),
        ("SDXL cross forward", "2×4096×77 10 d=64"),
        ("BERT base forward", "32 of 31-512 12 d=64"),
        ("AlphaFold 2 forward", "128×256 8 d=32 bias"),
        ("Psiformer forward", "4096×42 4 d=64 float32"),
    ],
)
def test_shapes_in_short(name, shape):
    assert named(name).shape == shape


def test_words_select_rows():
    names = [x.name for x in suite.selected(["LLAMA decode", "sdxl"])]
    assert names == [
        "Llama 3.1 8B decode",
        "Llama 3.1 70B decode",
        "SDXL forward",
        "SDXL cross forward",
        "SDXL cross backward",
    ]
    assert suite.selected([]) == [*suite.workloads()]


class Card(Simulator):
    """A simulator that benchmarks treat as a GPU; a call of a kernel takes 2 ms, of a peer 3 ms."""

    name = "card"

    @property
    def limits(self):
        return replace(super().limits, device="a card")

    def time(self, call, *, cold=False):
        call()
        return 2.0 if getattr(call, "arrays", None) else 3.0


@pytest.fixture
def launched(monkeypatch):
    """Returns the arrays of each kernel that is measured."""
    found = []

    def replay_of(engine, plan, arrays):
        call = replay(engine, plan, arrays)
        call.arrays = arrays
        found.append(arrays)
        return call

    monkeypatch.setattr(benchmark, "replay", replay_of)
    monkeypatch.setattr(peaks, "product_rate", lambda backend, precision: 1e-6)
    monkeypatch.setattr(peaks, "read_rate", lambda backend: 1e-3)
    return found


@pytest.fixture
def libraries(monkeypatch, launched):
    """Replaces the peers: FA2 computes problems without a softcap, cuDNN nothing."""
    asked = []

    def peer(name, backend, p, arrays, operation):
        asked.append((name, p, arrays))
        if name == "cudnn" or p.options.softcap:
            why = "nothing: it is off" if name == "cudnn" else "no softcap"
            raise Unsupported(f"{peers.label(name)} cannot compute {p}: {why}")
        return peers.Peer(peers.label(name), lambda: None, {})

    monkeypatch.setattr(peers, "peer", peer)
    monkeypatch.setattr(suite, "installed_peers", lambda: ["fa2", "cudnn"])
    return asked


def workload(model="small", phase="forward", **sizes):
    usual = {"heads": 2, "M": 8, "d": 8, "dtype": "float32"}
    return Workload(model, phase, "a test", Problem.of_sizes(**{**usual, **sizes}), "nowhere")


def latent():
    sizes = {"heads": 4, "kv_heads": 1, "d": 24, "dv": 16, "dtype": "float32"}
    return Workload("latent", "decode", "a test", problem_of_cache([20, 7], page=16, **sizes), "")


SMALL = [
    workload("plain", causal=True),
    workload("plain", "backward"),
    workload("capped", softcap=5.0),
    workload("too wide", d=10**7, M=1),
]


def measured(chosen, against=("fa2", "cudnn")):
    rows = suite.measure(chosen, Method(Card(), budget=0), against)
    return suite.standings(chosen, rows, 1e-3)


def test_a_row_has_the_fastest_peer_or_the_reasons_why_there_is_none(libraries):
    plain, backward, capped, wide = measured(SMALL)
    for row in (plain, backward):
        assert (row.peer, row.ratio, row.measurement.note) == ("torch fa2", 1.5, "")
        assert row.measurement.passed and row.measurement.time == 2
    assert backward.measurement.operation == "backward"
    assert (capped.peer, capped.ratio, capped.measurement.time) == (None, None, 2)
    assert capped.measurement.note == "torch fa2: no softcap; torch cudnn: nothing: it is off"
    assert (wide.peer, wide.measurement.time) == (None, None)
    assert "has no measured kernel" in wide.measurement.note
    assert suite.mean_ratio([plain, backward, capped, wide]) == pytest.approx(1.5)


def test_math_is_a_peer_only_beyond_16_bits(libraries):
    chosen = [workload(dtype=x) for x in ("float16", "float64")]
    measured(chosen, ["fa2", "math"])
    assert [name for name, *_ in libraries] == ["fa2", "fa2", "math"]


def test_values_are_columns_of_the_latent_keys_for_kernels_and_peers(libraries, launched):
    (row,) = measured([latent()], ["fa2"])
    assert row.measurement.passed and row.peer == "torch fa2"
    ((_, _, theirs),) = libraries
    for arrays in (*launched, theirs):
        assert np.shares_memory(arrays["K"], arrays["V"])
        np.testing.assert_array_equal(arrays["V"], arrays["K"][..., :16])
    assert row.bandwidth == pytest.approx(27 * 24 * 4 / 2 / 1e6)


def test_a_wrong_kernel_does_not_end_the_table(libraries, monkeypatch):
    judged = benchmark._Measuring.judged

    def with_nan(self, plan, results):
        if self.case.problem.causal:
            results["O"][0, 0, 0, 0] = np.nan
        return judged(self, plan, results)

    monkeypatch.setattr(benchmark._Measuring, "judged", with_nan)
    wrong, right = measured(SMALL[:2])
    assert wrong.measurement.passed is False and wrong.measurement.note.startswith("WRONG: O")
    assert right.ratio == 1.5


def test_a_process_that_was_restarted_goes_on_after_the_finished_rows(libraries):
    how, peer = Method(Card(), budget=0), ["fa2"]
    first = suite.measure(SMALL[:1], how, peer)
    assert [row.kernel for row in first][1:] == ["torch fa2"]
    rows = suite.measure(SMALL[:2], how, peer, watch=Watch(done=1, rows=first))
    assert [p for _, p, _ in libraries] == [x.problem for x in SMALL[:2]]
    assert [x.ratio for x in suite.standings(SMALL[:2], rows)] == [1.5, 1.5]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [
        "SmolLM2 135M decode",
        "gpt-oss 20B local forward",
        "SDXL cross backward",
        "BERT base forward",
        "DeepSeek-V3 decode",
    ],
)
def test_rows_are_right_on_a_gpu(cuda, name):
    (x,) = suite.selected([name])
    rows = suite.measure([x], Method(cuda, budget=0.05), suite.installed_peers())
    (found,) = suite.standings([x], rows, peaks.read_rate(cuda))
    assert found.measurement.passed and found.measurement.time, found.measurement.note


def standing(x, kernel, ms, ratios, note="", **more):
    times = [ms] if ms else []
    row = Measurement(kernel, x.operation, x.problem, milliseconds=times, **more)
    return Standing(x, replace(row, factors=ratios, note=note), 4000.0)


FOUND = [
    standing(
        named("Llama 3.1 8B forward"),
        *("wgmma_persistent", 2.0, {"torch cudnn": 0.97, "torch flex": 1.4}),
        peak=700.0,
    ),
    standing(named("Llama 3.1 8B decode"), "mma_split_kv", 0.2, {"torch fa2": 1.25}, peak=4000.0),
    standing(named("SDXL cross forward"), "wgmma_persistent", 0.02, {"torch fa2": 2.0}, peak=700.0),
    standing(named("AlphaFold 2 backward"), "wgmma_columns", 1.0, {}, "torch fa2: no wrt"),
    standing(named("FLUX.1 forward"), "wgmma_persistent", None, {}, "WRONG: O: 3", passed=False),
    standing(named("FLUX.1 backward"), "wgmma_columns", None, {}, "out of memory"),
]
NARROW = """\
device=an H200
model         phase     kernel            rate          peer   ratio
Llama 3.1 8B  forward   wgmma_persistent  550 TFLOP/s   cudnn   0.97
Llama 3.1 8B  decode    mma_split_kv      1340 GB/s     fa2     1.25
SDXL cross    forward   wgmma_persistent  1080 GB/s     fa2        2
AlphaFold 2   backward  wgmma_columns     21.5 TFLOP/s  -          -
FLUX.1        forward   wgmma_persistent  WRONG         -          -
FLUX.1        backward  wgmma_columns     not measured  -          -
geometric mean of 3 ratios: 1.34
below 1: Llama 3.1 8B forward (0.97)
AlphaFold 2 backward: torch fa2: no wrt
FLUX.1 forward: WRONG: O: 3
FLUX.1 backward: out of memory"""


def test_the_table_in_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    assert suite_table(FOUND, {"device": "an H200"}, "table") == NARROW


def test_a_wide_terminal_shows_shapes_and_times(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    head, first, *_ = suite_table(FOUND, {"device": "an H200"}, "table").splitlines()[1:]
    assert head.split() == ["model", "phase", "shape", "kernel", "ms", "rate", "peer", "ratio"]
    assert " 2×8192 32/8 d=128 causal " in first and "  2  550 TFLOP/s" in first


def test_tables_for_programs_and_pages():
    about = {"device": "an H200"}
    rows = strict(suite_table(FOUND, about, "json"))
    assert [row["ratio"] for row in rows] == [0.97, 1.25, 2.0, None, None, None]
    assert [row["bound"] for row in rows] == ["compute", "memory", "memory", *["compute"] * 3]
    assert rows[0]["ratios"] == {"torch cudnn": 0.97, "torch flex": 1.4}
    assert (rows[0]["device"], rows[0]["M"], rows[0]["peer"]) == ("an H200", 8192, "torch cudnn")
    (first, *_) = csv.DictReader(io.StringIO(suite_table(FOUND, about, "csv")))
    assert (first["model"], first["kernel"]) == ("Llama 3.1 8B", "wgmma_persistent")
    page = suite_table(FOUND, about, "md").split("\n\n")
    assert page[1].startswith("| model | phase | shape | kernel | ms | rate | peer | ratio |\n|")
    assert page[2:4] == ["geometric mean of 3 ratios: 1.34", "below 1: Llama 3.1 8B forward (0.97)"]


def test_without_peers_the_table_says_so():
    (first, *_) = FOUND
    alone = [replace(first, measurement=replace(first.measurement, factors={}))]
    assert "no other library was measured" in suite_table(alone, {"device": "x"}, "table")


@pytest.fixture
def card(monkeypatch, libraries):
    """Lets the command measure small workloads on a card."""
    engine = Card()
    monkeypatch.setattr("cupyfa.lab.commands.bench.backend_named", lambda name: engine)
    monkeypatch.setattr(suite, "workloads", lambda: tuple(SMALL))


def test_the_command_prints_and_saves_all_rows(card, tmp_path):
    file = tmp_path / "x.json"
    done = cli("bench", "--suite", "--budget", 0, "--save", file, "--format", "json", code=3)
    rows = strict(done.stdout)
    assert [row["model"] for row in rows] == ["plain", "plain", "capped", "too wide"]
    assert [row["ratio"] for row in rows] == [1.5, 1.5, None, None]
    saved = Results.load(file)
    assert [row.kernel for row in saved.rows].count("torch fa2") == 2
    assert saved.environment["device"] == "a card"
    cli("compare", file, file)
    done = cli("bench", "--suite", "--only", "plain", "--budget", 0, "--against", "fa2")
    assert "geometric mean of 2 ratios: 1.5" in done.stdout and "capped" not in done.stdout
    assert "peer 'fa4' is unknown" in refused("bench", "--suite", "--against", "fa4", code=2)


def test_the_exit_code_tells_of_wrong_results(card, monkeypatch):
    judged = benchmark._Measuring.judged

    def with_nan(self, plan, results):
        results["O"][0, 0, 0, 0] = np.nan
        return judged(self, plan, results)

    monkeypatch.setattr(benchmark._Measuring, "judged", with_nan)
    done = cli("bench", "--suite", "--only", "capped", "--budget", 0, code=1)
    assert "WRONG" in done.stdout


def test_the_page_lists_all_rows_and_their_sources():
    page = (ROOT / "docs" / "models.md").read_text()
    rows = [
        {"model": x.model, "phase": x.phase, "shape": x.shape, "what it is": x.use}
        for x in suite.workloads()
    ]
    sources = dict.fromkeys((x.model, x.source) for x in suite.workloads())
    assert markdown(rows) in page
    assert markdown([{"model": model, "source": source} for model, source in sources]) in page
