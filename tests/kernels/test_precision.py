"""The option ``precision``, which rounds float32 inputs: in plans, commands and calls."""

import json
from dataclasses import replace

import numpy as np
import pytest
from helpers.cli import SIMULATOR, SIZES, cli, strict
from helpers.private_cache import with_runtime
from helpers.problems import FORWARD, RAGGED, check_case, name

import cupyfa
from cupyfa import Kernel, Launch, Limits, Problem
from cupyfa.lab.bench import sweeps
from cupyfa.lab.verify.case import Case
from cupyfa.numerics import reference
from cupyfa.planner import choose_kernel as planning, source as sources
from cupyfa.planner.plan import Tuned
from cupyfa.runtime import guard
from cupyfa.runtime.simulator import Simulator

H100 = Limits("an H100", shared_bytes=232448, arch="90")
TURING = Limits("a T4", shared_bytes=65536, arch="75")
SMALL = {"heads": 2, "M": 9, "N": 7, "d": 8}
ROUNDING = [
    *(("mma_tf32", "tf32"), ("mma_pipelined", "float16")),
    *(("mma_slices", "float16"), ("v3", "float16")),
]


def problem(precision=None, dtype="float32", **sizes):
    return Problem.of_sizes(**{"M": 64, "d": 64, **sizes}, dtype=dtype, precision=precision)


def plan(kernel, *args, limits=H100, **sizes):
    return planning.plan(FORWARD[kernel], problem(*args, **sizes), limits)


def arrays(seed=0, size=1.0, **sizes):
    case = Case("forward", Problem.of_sizes(**{**SMALL, **sizes}), seed)
    return [np.float32(size) * x for x in case.inputs().values()]


def test_precision_in_the_text_of_a_problem():
    assert "float32 precision=tf32 causal" in str(problem("tf32", causal=True))
    assert "precision" not in str(problem())
    assert problem("tf32").arithmetic == "float32 as tf32"
    assert problem("float32").arithmetic == problem().arithmetic == "float32"


@pytest.mark.parametrize("kernel, own", [*ROUNDING, ("fa2", None)])
def test_a_kernel_that_is_named_runs_at_the_only_precision_it_has(kernel, own):
    for asked in (None, own or "float32"):
        assert plan(kernel, asked).rounding == own


def test_rounding_depends_on_the_dtype():
    assert plan("mma_pipelined", "float16", limits=TURING).rounding == "float16"
    assert plan("mma_pipelined", dtype="float16", limits=TURING).rounding is None
    assert plan("v3", dtype="bfloat16").rounding == "float16"


def test_auto_uses_speeds_of_the_precision(monkeypatch):
    slow, fast = {"float32 as float16": {64: 1.0}}, {"float32 as float16": {64: 2.0}}
    monkeypatch.setitem(FORWARD, "v3", replace(FORWARD["v3"], tflops=fast))
    monkeypatch.setitem(FORWARD, "mma_pipelined", replace(FORWARD["mma_pipelined"], tflops=slow))
    assert planning.select("auto", "forward", problem("float16"), H100).name == "v3"
    here = [
        Tuned(kernel, None, "float32 as float16", 64, 64, (), tflops)
        for kernel, tflops in (("v3", 1.0), ("mma_pipelined", 3.0))
    ]
    here = replace(H100, tuned=tuple(here))
    assert planning.select("auto", "forward", problem("float16"), here).name == "mma_pipelined"


def test_tiles_that_were_tuned_are_those_of_the_precision():
    constants = (("Br", 64), ("Bc", 16), ("Wr", 16), ("stages", 1))
    tuned = Tuned("mma_pipelined", None, "float32 as float16", 64, 64, constants, 1.0)
    here = replace(H100, tuned=(tuned,))
    assert plan("mma_pipelined", limits=here).constants == dict(constants)
    assert plan("mma_pipelined", dtype="float16", limits=here).constants != dict(constants)


def test_rounded_copies_are_made_only_if_needed():
    made = plan("mma_pipelined", batch=2, heads=4, kv_heads=2, M=70, N=45, d=33, dv=9)
    assert [x.entry for x in made.launches] == ["round_operands", "mma_pipelined"]
    assert made.scratch == {
        "Q16": ((2, 4, 70, 40), np.float16),
        "K16": ((2, 2, 45, 40), np.float16),
        "V16": ((2, 2, 45, 16), np.float16),
    }
    Br = made.constants["Br"]
    assert made.launches[0].grid == (2 * (4 * -(-70 // Br) + 2 * -(-45 // Br)), 1, 1)
    text = sources.text(made.launches[1])
    assert "using scalar = float;\nusing operand = __half;" in text and "cuda_fp16.h" in text
    half = plan("mma_pipelined", dtype="float16")
    assert [x.entry for x in half.launches] == ["mma_pipelined"] and not half.scratch


def test_a_record_may_declare_its_rounding():
    launch = Launch("own", args="Q", grid=lambda p, c: 1, threads=lambda p, c: 32)
    own = Kernel(name="own", adds="", launches=(launch,), rounding="bfloat16")
    made = planning.plan(own, problem(), H100)
    assert made.rounding == made.problem.precision == "bfloat16"
    both = replace(own, rounding=None, precisions=("tf32",))
    assert planning.plan(both, problem(), H100).rounding is None
    assert planning.plan(both, problem("tf32"), H100).rounding == "tf32"


@pytest.mark.each_choice
@pytest.mark.parametrize("sizes", RAGGED, ids=name)
@pytest.mark.parametrize("kernel, precision", ROUNDING)
def test_results_are_within_the_bounds_of_the_precision(backend, kernel, precision, sizes):
    made = planning.plan(FORWARD[kernel], problem(precision, **sizes), backend.limits)
    inputs = Case("forward", made.problem, layout="gaps").inputs()
    results = guard.checked(backend, made, inputs, {})
    assert results["O"].dtype == results["lse"].dtype == np.float32
    exact, _ = reference.attention(
        *inputs.values(),
        scale=made.problem.scale,
        causal_offset=made.problem.causal_offset if made.problem.causal else None,
    )
    assert np.abs(results["O"] - exact).max() > 1e-5, "something was rounded"


@pytest.mark.parametrize("precision", ["tf32", "float16"])
def test_attention_rounds_only_when_asked(backend, precision):
    q, k, v = arrays(M=40, N=70, d=64)
    plain, rounded = (
        cupyfa.attention(q, k, v, precision=x, backend=backend, check=True)
        for x in (None, precision)
    )
    scale = 64**-0.5
    exact, _ = reference.attention(q, k, v, scale=scale)
    assert rounded.dtype == np.float32
    assert np.abs(plain - exact).max() < 1e-5 < np.abs(rounded - exact).max() < 5e-3


def test_tf32_has_the_range_of_float32_and_float16_overflows(backend):
    q, k, v = arrays(seed=1)
    v[..., 3, :] = 1e5
    options = {"backend": backend, "check": True}
    assert np.isfinite(cupyfa.attention(q, k, v, precision="tf32", **options)).all()
    ended = cupyfa.attention(q, k, v, precision="float16", **options)
    assert not np.isfinite(ended).any()
    before = cupyfa.attention(q, k, v, precision="float16", causal="top-left", **options)
    assert np.isfinite(before[..., :3, :]).all() and not np.isfinite(before[..., 3:, :]).any()


def test_a_masked_value_that_overflows_in_tf32_does_not_matter(backend):
    q, k, v = arrays(seed=1)
    v[..., 3, :] = np.finfo(np.float32).max
    out = cupyfa.attention(q, k, v, precision="tf32", causal="top-left", backend=backend)
    assert np.isfinite(out[..., :3, :]).all()


@pytest.mark.few(2)
@pytest.mark.each_choice
@pytest.mark.parametrize("d, dv", [(1, 8), (24, 3), (47, 130), (80, 16), (112, 48), (255, 144)])
def test_every_head_dimension(backend, d, dv):
    for kernel, precision in ROUNDING[:2]:
        sizes = {"M": 20, "N": 37, "d": d, "dv": dv, "precision": precision}
        check_case(FORWARD[kernel], backend, sizes, "float32")


@pytest.mark.few(2)
@pytest.mark.parametrize("sizes", [{"N": 0}, {"d": 0}, {"dv": 0}, {"M": 0}, {"heads": 0}], ids=name)
def test_sizes_of_zero(backend, sizes):
    q, k, v = arrays(**{**SMALL, **sizes})
    for precision in ("tf32", "float16"):
        exact, same = (
            cupyfa.attention(q, k, v, precision=x, backend=backend) for x in (None, precision)
        )
        np.testing.assert_allclose(same, exact, atol=2e-3)


def test_run_shows_the_rounding_of_the_kernel():
    said = cli("run", "v3", *SIMULATOR, *SIZES, "--dtype", "float32").stdout
    assert "float32 precision=float16" in " ".join(said.split())
    done = cli(
        "run", "mma_pipelined", *SIMULATOR, *SIZES, "--precision", "float16", "--format", "json"
    )
    (row,) = strict(done.stdout)
    assert (row["dtype"], row["precision"], row["passed"]) == ("float32", "float16", True)
    assert [x["entry"] for x in row["launches"]] == ["round_operands", "mma_pipelined"]
    done = cli("run", "auto", *SIMULATOR, *SIZES, "--precision", "tf32", "--format", "json")
    assert strict(done.stdout)[0]["kernel"] == "mma_tf32"


@pytest.mark.slow
def test_check_notes_rounding_and_takes_a_precision():
    options = ("--grid", "fuzz", "--samples", "2", "--jobs", "0", *SIMULATOR)
    done = cli("check", "v3", "fa2", *options, "--dtype", "float32")
    assert "note: v3 computes float32 in float16" in done.stderr and "fa2 comp" not in done.stderr
    done = cli("check", "mma_tf32", "fa2", *options, "--precision", "tf32")
    for said in ("2 of 2 runs right", "2 not supported (it computes float32 in float32)"):
        assert said in done.stdout
    assert "note" not in done.stderr
    assert "note" not in cli("check", "v3", *options, "--dtype", "float16").stderr


@pytest.mark.slow
def test_tuned_entries_depend_on_the_precision(monkeypatch, tmp_path):
    monkeypatch.setenv("CUPYFA_CACHE_DIR", str(with_runtime(tmp_path)))
    tiles = {"Br": 16, "Bc": 16, "Wr": 16, "stages": 1}
    engine = Simulator()
    engine.name = "a GPU"  # tuning results are stored only for a GPU
    cupyfa.lab.tune(
        replace(FORWARD["mma_tf32"], candidates={}, tiles=(tiles,)),
        backend=engine,
        **{"batch": 1, "heads": 1, "M": 16, "d": 8, "budget": 0.01},
    )
    (file,) = (tmp_path / "tuned").glob("*.json")
    (fact,) = json.loads(file.read_text()).values()
    assert fact["dtype"] == "float32 as tf32"


def test_sweeps_go_through_precisions():
    found = sweeps.problems("forward", {"precision": ["float32", "tf32"], "d": 8})
    assert [x.precision for x in found] == ["float32", "tf32"]
    assert sweeps.usual_dtype(FORWARD["mma_pipelined"]) == "float16"
    assert sweeps.usual_dtype(FORWARD["mma_pipelined"], precision="float16") == "float32"
