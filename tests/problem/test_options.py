"""Attention options in every layer, and launch arguments."""

import json
import subprocess
import sys
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner
from helpers import own_kernel

import cupyfa
from cupyfa import Dropout, Problem, Simulator, Unsupported, api
from cupyfa.lab.bench import peers, sweeps
from cupyfa.lab.bench.results import Measurement
from cupyfa.lab.commands.command_options import attention_options, with_flag_values
from cupyfa.lab.verify import failures, grids, workers
from cupyfa.lab.verify.case import Case
from cupyfa.lab.verify.failures import RIGHT, WRONG_RESULT, Outcome
from cupyfa.lab.verify.fuzz import Fuzz
from cupyfa.lab.verify.problem_records import problem_of_record, record_of_problem
from cupyfa.planner import choose_kernel as planning, source as sources
from cupyfa.planner.source import ROOT
from cupyfa.problem.options import DROPOUT, OF_TANGENTS, OPTIONS, AttentionOptions
from cupyfa.runtime.arrays import readable_inputs
from cupyfa.runtime.guard import run_guarded

VALUES = [
    *({"precision": "tf32"}, {"causal": "top-left"}, {"causal": "bottom-right"}),
    *({"window": (128, 0)}, {"window": (None, 3)}, {"window": (7, None), "causal": "top-left"}),
    *({"causal": True, "offset": -3}, {"window": (2, 1), "offset": 2**30}),
    *({"scale": -0.3}, {"scale": 1e-7, "window": (0, 0), "precision": "float16"}),
    {"dropout": 0.1, "dropout_seed": 2**64 - 1, "dropout_offset": 2**32 - 1},
    {"out_dtype": "float32"},
]
SIZES = {"M": 40, "N": 30, "d": 16, "heads": 2}


@pytest.mark.parametrize("given", VALUES, ids=str)
def test_options_survive_the_command_line(given):
    @click.command()
    @attention_options
    def command(**found):
        options = AttentionOptions(**{name: x for name, x in found.items() if x is not None})
        click.echo(repr(options))

    options = AttentionOptions(**given)
    done = CliRunner().invoke(command, with_flag_values(options.command_line()))
    assert done.exit_code == 0 and done.output.strip() == repr(options)


@pytest.mark.parametrize("given", VALUES, ids=str)
def test_sweeps_parse_values_as_rows_print_them(given):
    options = AttentionOptions(**given)
    for name, value in options.changed.items():
        assert sweeps.parsed(f"{name}={options.row()[name]}") == (name, [value])


@pytest.mark.parametrize("given", VALUES, ids=str)
def test_problems_survive_records(given):
    p = Problem.of_sizes(**SIZES, **given)
    assert problem_of_record(record_of_problem(p)) == p
    assert {"M", "dtype", *OPTIONS} <= p.row().keys()


@pytest.mark.parametrize("given", VALUES, ids=str)
def test_files_of_failures_and_of_results_hold_the_options(tmp_path, given):
    case = Case("forward", Problem.of_sizes(**SIZES, **given), seed=3)
    outcome = Outcome("fa2", WRONG_RESULT, arrays=case.inputs())
    path = failures.write(tmp_path, failures.Stored(case, outcome), "command")
    assert failures.read(path).case == case
    row = Measurement("fa2", "forward", case.problem)
    again = Measurement.of_record(json.loads(json.dumps(row.record())))
    assert again.problem == row.problem


def test_a_record_without_an_option_has_its_default():
    record = record_of_problem(Problem.of_sizes(**SIZES))
    assert record["scale"] == 0.25  # files store the default too, since it depends on d
    del record["window"]
    assert problem_of_record(record) == Problem.of_sizes(**SIZES, options=AttentionOptions())


def test_flags_take_no_value_that_is_another_argument():
    assert with_flag_values(["--causal", "fa2"]) == ["--causal=bottom-right", "fa2"]
    assert with_flag_values(["--causal", "top-left"]) == ["--causal", "top-left"]
    assert with_flag_values(["fa2", "--causal"]) == ["fa2", "--causal=bottom-right"]


def test_options_are_normalised():
    assert AttentionOptions(causal=True) == AttentionOptions(causal="bottom-right")
    assert AttentionOptions(causal=np.False_, window=[3, None]) == AttentionOptions(
        window=(3, None)
    )
    assert AttentionOptions(causal=True, window=(3, 5)).window == (3, None)
    assert hash(AttentionOptions(scale=2)) == hash(AttentionOptions(scale=2.0))
    assert str(AttentionOptions(window=(5, None), scale=0.5)) == "window=5,- scale=0.5"


def test_option_numbers_are_not_compiled_in():
    def text(**options):
        problem = Problem.of_sizes(**SIZES, **options)
        record = cupyfa.kernel("fa2")
        return sources.text(planning.plan(record, problem, Simulator().limits).launches[0])

    assert text(window=(3, 2), scale=2.0) == text(window=(20, 7)) != text(window=(3, None))
    assert text(causal=True) == text(window=(None, 5)) != text()


def test_options_are_keywords_of_attention():
    q, k, v = (np.random.default_rng(i).normal(size=(5, 8)).astype("f4") for i in range(3))
    options = AttentionOptions(causal=True, scale=0.5)
    one = cupyfa.attention(q, k, v, **options.keywords(), backend="simulator")
    other = cupyfa.attention(q, k, v, causal=True, scale=0.5, backend="simulator")
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("peer", peers.NAMES)
def test_peers_without_an_option_are_refused(peer):
    p = Problem.of_sizes(**SIZES, dropout=0.1, dropout_seed=3, precision="tf32")
    lacking = "precision=tf32, dropout=0.1, dropout_seed=3"
    with pytest.raises(Unsupported, match=f"cannot compute .*does not support {lacking} in bench"):
        peers.peer(peer, Simulator(), p, Case("forward", p).inputs())


def drawn():
    drawing = Fuzz(cupyfa.kernel("fa2"), Simulator(), dtypes=["float32"])
    return [drawing.sample(i).case for i in range(100)]


def test_grids_try_values_of_every_option(monkeypatch):
    edges = grids.cases("edges", "forward", dtypes=["float32"])
    fuzzed = drawn()
    monkeypatch.setitem(OPTIONS, "precision", replace(OPTIONS["precision"], tried=("float32",)))
    for before, now in (
        (edges, grids.cases("edges", "forward", dtypes=["float32"])),
        (fuzzed, drawn()),
    ):
        tried = [x for x in now if x.problem.precision == "float32"]
        assert 10 < len(tried) < len(now) / 2 and not any(x.problem.precision for x in before)
        if before is fuzzed:  # the other fields stay unchanged
            plain = [replace(x, problem=x.problem.with_options(precision=None)) for x in now]
            assert plain == before
            continue
        for kept in ("values", "layout"):
            assert {getattr(x, kept) for x in before} == {getattr(x, kept) for x in now}
        for kept in ("M", "N", "d", "dv", "causal", "window", "options.scale"):
            values = [{attrgetter(kept)(x.problem) for x in some} for some in (before, now)]
            assert values[0] <= values[1], kept


def test_a_sweep_takes_options_as_one_value():
    sizes = {"M": [8, 16], "d": 4, "options": AttentionOptions(causal=True)}
    sweeps.refuse_foreign(["forward"], sizes)
    assert [(x.M, x.causal) for x in sweeps.problems("forward", sizes)] == [
        *((8, "bottom-right"), (16, "bottom-right"))
    ]


def test_a_check_takes_options_for_all_cases(monkeypatch):
    seen = []

    def run(worker, task):
        seen.append(task.case.problem.options)
        return [Outcome(kernel, RIGHT) for kernel in task.kernels]

    monkeypatch.setattr(workers.Here, "run", run)
    given = {"scale": 2.0, "causal": "top-left"}
    done = cupyfa.check("fa2", grid="fuzz", samples=3, backend="simulator", **given)
    assert len(seen) == len(done.tallies) * 3 == 3
    assert all((x.scale, x.causal) == (2.0, "top-left") for x in seen)


STRUCTS = Path(own_kernel.__file__).with_name("structs.cu").read_text()


def structs(folder):
    text = own_kernel.SCRIPT.replace(
        "Q K V O M N scale", "O sizes mods causal_offset window_offset"
    ).replace('"strides", "dv"', '"strides", "dv", "causal", "window"')
    script = own_kernel.write(folder, STRUCTS, text)
    return cupyfa.kernel(f"{script}:mine")


def test_structs_reach_a_kernel(tmp_path):
    p = Problem.of_sizes(M=5, N=7, d=4, dv=6, window=(1, 2))
    engine, inputs = Simulator(), Case("forward", p).inputs()
    plan = planning.plan(structs(tmp_path), p, engine.limits)
    out = run_guarded(engine, plan, readable_inputs(plan, inputs), {})["O"]
    expected = (5, 7, p.causal_offset, p.window_offset, p.causal_offset, p.window_offset)
    np.testing.assert_array_equal(out[0, 0], [expected] * 5)


def test_attention_takes_every_option(monkeypatch):
    monkeypatch.setattr(api, "run_call", lambda call, *_, **more: call.asked)
    dropout, mask = Dropout(0.1, 3, 2), "key <= query"
    expected = dict(zip(DROPOUT, (0.1, 3, 2))) | {"mask_mod": mask, "out_dtype": "float32"}
    named = {name: object() for name in OPTIONS if name not in {*expected, *OF_TANGENTS}}
    asked = api.attention(1, 2, 3, **named, dropout=dropout, mask=mask, out="float32")
    assert asked == {**named, **expected}


def test_the_numbers_of_texts_are_members_of_mods(tmp_path):
    p = Problem.of_sizes(M=5, N=7, d=4, dv=6)
    kernel = structs(tmp_path)
    kernel, limits = replace(kernel, features=(*kernel.features, "score")), Simulator().limits
    assert "struct Mods {};\n" in sources.text(planning.plan(kernel, p, limits).launches[0])
    capped = planning.plan(kernel, p.with_options(softcap=30.0), limits).launches[0]
    assert "struct Mods { real softcap_; };\n" in sources.text(capped)


TYPED = """\
import numpy as np
import cupyfa

x = np.zeros((4, 8), np.float32)
out: np.ndarray = cupyfa.attention(x, x, x, causal="top-left", scale=2.0, tiles={"Br": 64})
pair: tuple[np.ndarray, np.ndarray] = cupyfa.attention(x, x, x, return_lse=True)
cupyfa.attention(x, x, x, causal="botom")  # refused
cupyfa.attention(x, x, x, is_causal=True)  # refused
cupyfa.attention(x, x, x, layout="bhds")  # refused
cupyfa.attention(x, x, x, Br=64)  # refused
cupyfa.compile(x, x, x, precision="fp8")  # refused
cupyfa.backward(x, x, x, x, x, x, window=3)  # refused
cupyfa.vjp(x, x, x, causal=True, drop=0.1)  # refused
cupyfa.plan(M=5, d=8, causal="top")  # refused
"""


@pytest.mark.slow
def test_mypy_refuses_wrong_calls(tmp_path):
    file = tmp_path / "typed.py"
    file.write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", file]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    refused = [i for i, line in enumerate(TYPED.splitlines(), 1) if line.endswith("# refused")]
    errors = [x for x in done.stdout.splitlines() if ": error:" in x]
    assert sorted({int(x.split(":")[1]) for x in errors}) == refused, done.stdout + done.stderr
