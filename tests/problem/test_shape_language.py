"""Shapes of captured arrays: on the command line, in cases, and in failure files."""

import re
import shlex

import numpy as np
import pytest
from helpers.cli import SIMULATOR, cli

import cupyfa
from cupyfa import Problem, Simulator
from cupyfa.lab.analysis.resources import Compiled, compiled_row
from cupyfa.lab.bench.results import Measurement
from cupyfa.lab.bench.tuning import Candidate
from cupyfa.lab.verify import failures, transforms
from cupyfa.lab.verify.case import Case
from cupyfa.lab.verify.failures import RIGHT, Stored
from cupyfa.lab.verify.shrink import _smaller, shrunk
from cupyfa.lab.verify.tasks import Task, perform
from cupyfa.ladder import LADDER
from cupyfa.planner.choose_kernel import plan
from cupyfa.problem import shape_language

SIZES = {"batch": 2, "heads": 4, "M": 10, "N": 7, "d": 8, "dtype": "float16"}
MODIFIED = {
    "score_mod": "score + cap * slope[head] + table[doc[query], 1]",
    "mask_mod": "doc[query] == doc[key]",
    "alibi_slopes": "bh",
    "bias": "f64[b1mn]",
    "mask": "11m1",
    "captured": {"cap": 0.5, "slope": "bf16[heads]", "table": "f32[3,2]", "doc": "u8[M|N]"},
}


def arrays_of(p):
    return {x.name: (x.dtype, x.shape) for x in p.operands if x.is_array}


def test_forms_give_arrays_of_the_sizes_of_a_problem():
    p = Problem.of_sizes(**SIZES, **MODIFIED)
    assert arrays_of(p) == {
        "alibi_slopes": ("float32", (2, 4)),
        "bias": ("float64", (2, 1, 10, 7)),
        "mask": ("bool", (1, 1, 10, 1)),
        "slope": ("bfloat16", (4,)),
        "table": ("float32", (3, 2)),
        "doc": ("uint8", (10,)),
    }
    assert p.modifiers.numbers == {"cap": 0.5}
    assert "bias=f64[b1mn] mask=11m1 slope=bf16[4] table=f32[3,2] doc=u8[10] cap=0.5" in str(p)


@pytest.mark.parametrize(
    "form, expected",
    [
        (True, ("float16", (1, 4, 10, 7))),
        ("bhmn", ("float16", (2, 4, 10, 7))),
        ("f32[11m1]", ("float32", (1, 1, 10, 1))),
        ((10, 7), ("float16", (1, 1, 10, 7))),
        (np.zeros((4, 1, 7)), ("float64", (1, 4, 1, 7))),
    ],
    ids=str,
)
def test_a_bias_is_given_by_letters_a_shape_or_an_array(form, expected):
    assert arrays_of(Problem.of_sizes(**SIZES, bias=form)) == {"bias": expected}


def test_arrays_follow_other_sizes():
    p = Problem.of_sizes(**SIZES, **MODIFIED)
    p = transforms.resize(p, batch=3, heads=6, kv_heads=2, M=5, N=20)
    assert arrays_of(p) == {
        "alibi_slopes": ("float32", (3, 6)),
        "bias": ("float64", (3, 1, 5, 20)),
        "mask": ("bool", (1, 1, 5, 1)),
        "slope": ("bfloat16", (6,)),
        "table": ("float32", (3, 2)),
        "doc": ("uint8", (20,)),
    }
    every = list(_smaller(p))
    assert {x.M for x in every} >= {1, 2, 4} and len(every) > 10


def test_given_texts_and_arrays_replace_all_others():
    p = Problem.of_sizes(**SIZES, **MODIFIED)
    assert transforms.modify(p, {"causal": True}, {}).operands == p.operands
    assert transforms.modify(p, {"score_mod": "2 * score"}, {}).modifiers.operands == ()
    assert arrays_of(transforms.modify(p, {}, {"mask": True})) == {"mask": ("bool", (1, 1, 10, 7))}


@pytest.mark.parametrize("values", ["normal", "nan", "inf", "tiny"])
def test_drawn_arrays_can_be_read(values):
    case = Case("forward", Problem.of_sizes(**SIZES, **MODIFIED), 3, values, "gaps")
    inputs = case.inputs()
    slopes, doc = inputs["mods.alibi_slopes"], inputs["mods.doc"]
    assert slopes.min() > 0 and slopes.max() <= 1
    assert doc.max() <= 2 and (np.diff(doc.astype(int)) >= 0).all()  # doc indexes rows of the table
    assert np.isfinite(inputs["mods.bias"]).all() == (values not in ("nan", "inf"))
    other = Case("forward", Problem.of_sizes(**SIZES, bias="f64[b1mn]"), 3, values, "gaps")
    np.testing.assert_array_equal(other.inputs()["mods.bias"], inputs["mods.bias"])


def store_and_replay(folder, case, kernel):
    """Checks a case and replays it from its file; returns the outcome and the command's words."""
    *_, outcome = perform(Simulator(), Task(case, (kernel,), keep=True))
    command = failures.command(case, outcome, {"backend": "simulator"})
    file = failures.write(folder, Stored(case, outcome, made_with={}), command)
    again = cupyfa.lab.replay(file, backend="simulator")
    assert again.stored.case == case and again.now == outcome and outcome.kind == RIGHT
    return outcome, shlex.split(command)[1:]


def test_a_stored_case_and_its_command_have_the_same_arrays(tmp_path):
    case = Case("forward", Problem.of_sizes(**SIZES, **MODIFIED), seed=5, layout="bshd")
    _, words = store_and_replay(tmp_path, case, "fa2")
    row = cli(*words, "--format", "json")
    assert '"arrays": "alibi_slopes=f32[bh] bias=f64[b1mn]' in row.stdout


WRT = {"wrt": "k,bias,slope", "score_mod": "score * slope[head]", "sink": "h", "bias": "1hmn"}
WRT |= {"captured": {"slope": "f32[heads]"}}


def test_gradients_of_arrays_are_named_on_the_command_line_and_in_files(tmp_path):
    p = Problem.of_sizes(**{**SIZES, "dtype": "float32"}, **WRT)
    assert p.wrt == ("bias", "slope") and str(p).endswith("slope=f32[4] wrt=bias,slope")
    case = Case("backward", p, seed=2)
    outcome, words = store_and_replay(tmp_path, case, "two_pass")
    assert [x.name for x in outcome.verdicts] == ["dQ", "dK", "dV", "d_bias", "d_slope"]
    assert re.search("^d_slope +error", cli(*words).stdout, re.M)
    kept = shrunk(case, lambda x: "bias" in x.problem.wrt).problem
    assert kept.wrt == ("bias",) and [x.name for x in kept.operands] == ["bias"]


IN_MEMORY = {"dlse": True, "dropout": 0.3, "dropout_seed": "u64[1]", "dropout_offset": "i32[1]"}


def test_a_gradient_of_lse_and_seeds_in_memory_are_on_the_command_line_and_in_files(tmp_path):
    p = Problem.of_sizes(**{**SIZES, "dtype": "float32"}, **IN_MEMORY)
    assert str(p).endswith(" dropout=0.3 dlse dropout_seed=u64[1] dropout_offset=i32[1]")
    case = Case("backward", p, seed=2)
    seed, offset = (case.inputs()[f"mods.dropout_{name}"] for name in ("seed", "offset"))
    assert (seed.dtype, offset.dtype) == ("uint64", "int32") and seed[0] > 2**32
    outcome, words = store_and_replay(tmp_path, case, "two_pass")
    assert outcome.arrays["mods.dlse"].shape == (2, 4, 10)
    assert [x for x in words if "dropout-" in x] == [
        "--dropout-seed=u64[1]",
        "--dropout-offset=i32[1]",
    ]
    shown = cli(*words, "--format", "json").stdout
    assert '"arrays": "dlse dropout_seed=u64[1] dropout_offset=i32[1]"' in shown


@pytest.mark.parametrize("name", ["dlse", "dropout_seed", "dropout_offset"])
def test_a_gradient_of_lse_and_seeds_in_memory_are_left_out_alone(name):
    case = Case("backward", Problem.of_sizes(**SIZES, **IN_MEMORY))
    kept = shrunk(case, lambda x: name in [o.name for o in x.problem.operands]).problem
    assert [x.name for x in kept.operands] == [name] and (kept.M, kept.batch) == (1, 1)
    assert kept.options.dropout == (0 if name == "dlse" else 0.3)
    dropped = shrunk(case, lambda x: x.problem.options.dropout > 0).problem
    assert not dropped.operands and dropped.options.dropout_seed == 0


def test_forms_of_a_seed_replace_those_of_a_grid():
    given = {name: x for name, x in IN_MEMORY.items() if name != "dlse"}
    p = transforms.modify(Problem.of_sizes(**SIZES, bias="1hmn"), given, {})
    assert [x.name for x in p.operands] == ["dropout_seed", "dropout_offset"]
    drawn = transforms.modify(
        Problem.of_sizes(**SIZES, dropout=0.1, dropout_seed=5), {"dropout_seed": "i32[1]"}, {}
    )
    assert [x.name for x in drawn.operands] == ["dropout_seed"] and drawn.options.dropout == 0.1
    without = transforms.modify(
        Problem.of_sizes(**SIZES), {"dropout": 0.0, "dropout_seed": "u64[1]"}, {}
    )
    assert not without.operands


def test_rows_of_all_commands_have_the_arrays():
    p = Problem.of_sizes(**{**SIZES, "dtype": "float32"}, bias="1hmn", sink="h", wrt="bias")
    shown = "bias=f32[1hmn] sink=f32[h] wrt=bias"
    measured = Measurement("two_pass", "backward", p)
    made = plan(LADDER["backward"]["two_pass"], p, Simulator().limits)
    log = "Used 8 registers, 0 bytes spill stores"
    compiled = compiled_row(made, Compiled(made.programs[0], "90", b"", log))
    for row in (measured.row(), Candidate(measured, "right").row(), compiled):
        assert row["arrays"] == shown
    hidden = {"mask_mod": "key <= query", "block_mask": True}
    assert Problem.of_sizes(M=8, d=8, **hidden).row()["arrays"] == "block_mask"
    assert Problem.of_sizes(M=8, d=8).row()["arrays"] is None


SLOPES = ("--captured", "slope=f32[heads]")
OF_ARRAYS = ("--bias", "--score-mod", "score * slope[head]", *SLOPES)
WRONG_WORDS = [
    ("fa2", ("--mask-mod", "doc[query] == doc[key]"), 2, "pass it by --captured doc=VALUE"),
    *(
        ("fa2", ("--score-mod", text, *SLOPES), 2, f"\n    {text}\n            ^\n")
        for text in ("score + slop[head]", "score + slope[head, key]")
    ),
    ("fa2", ("--bias", "wide"), 2, "--bias takes axes, as 1hmn"),
    ("two_pass", (*OF_ARRAYS, "--wrt", "bias,slop"), 2, "wrt may contain q, k, v, bias, slope"),
    (
        "fa2",
        (*OF_ARRAYS, "--wrt", "bias"),
        3,
        "does not support wrt (derivatives with respect to arrays",
    ),
]


@pytest.mark.parametrize("kernel, words, code, message", WRONG_WORDS)
def test_wrong_arrays_are_refused_on_the_command_line(kernel, words, code, message):
    assert message in cli("run", kernel, *SIMULATOR, *words, code=code).stderr


def test_numbers_of_the_command_line():
    assert [shape_language.value_of(x) for x in ("3", "-0.5", "true", "1e3", "i32[M]")] == [
        *(3, -0.5, True, 1000.0, "i32[M]")
    ]


def test_options_that_stand_alone_have_the_usual_shape():
    words = ("--mask", "--alibi-slopes", "--bias", "--sink", "fa2", "-M", 8, "-H", 2)
    row = cli("run", *words, *SIMULATOR, "--format", "json").stdout
    assert '"arrays": "alibi_slopes=f32[h] bias=f32[1hmn] mask=11mn sink=f32[h]"' in row


@pytest.mark.slow
def test_check_takes_arrays():
    given = ("--alibi-slopes", "--mask-mod", "doc[key] < 2", "--captured", "doc=i8[N]")
    plain = ("--samples", 4, "--jobs", 0, "--format", "json")
    assert '"right": 4' in cli("check", "fa2", *SIMULATOR, *plain, *given).stdout
    refused = cli("check", "v3", *SIMULATOR, "--mask", code=3).stderr
    assert "does not support places" in refused


def test_every_kernel_with_places_has_scores():
    for kernel in (k for group in LADDER.values() for k in group.values()):
        assert "places" not in kernel.features or "score" in kernel.features


def test_plans_of_forms_are_those_of_arrays():
    text = {"score_mod": "score + slope[head]", "kernel": "fa2", "backend": "simulator"}
    for given in (
        {"bias": "1hmn", "captured": {"slope": "f32[heads]"}},
        {"bias": (1, 4, 10, 7), "captured": {"slope": (4,)}},
        {"bias": np.ones((1, 4, 10, 7), np.float16), "captured": {"slope": np.ones(4, "f4")}},
    ):
        p = cupyfa.plan(**SIZES, **text, **given).problem
        assert arrays_of(p) == {"bias": ("float16", (1, 4, 10, 7)), "slope": ("float32", (4,))}


RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((1, 2, n, 8)).astype(np.float32) for n in (6, 5, 5))
READ = {
    "bias": RNG.standard_normal((6, 5)).astype(np.float32),
    "mask": RNG.random((2, 1, 5)) < 0.8,
    "captured": {"slope": RNG.random(2), "cap": 0.5},
}
TEXT = {"score_mod": "score + cap * slope[head] * key"}
ON = {"kernel": "fa2", "backend": "simulator"}
FORMS = {"bias": "11mn", "mask": "1h1n", "captured": {"slope": "f64[heads]", "cap": 0.5}}


def test_prepared_calls_take_arrays_by_name_or_after_v():
    expected = cupyfa.attention(Q, K, V, **TEXT, **READ, **ON)
    prepared = cupyfa.compile(Q, K, V, **TEXT, **READ, **ON)
    slope = READ["captured"]["slope"]
    by_name = {"bias": READ["bias"], "mask": READ["mask"], "captured": {"slope": slope}}
    for out in (
        prepared(Q, K, V, **by_name),
        prepared(Q, K, V, READ["bias"], READ["mask"], slope),
        prepared(Q, K, V, slope=slope, mask=READ["mask"], bias=READ["bias"]),
        prepared(Q, K, V, **by_name, out=np.empty_like(expected)),
    ):
        np.testing.assert_array_equal(out, expected)
    twice = prepared(Q, K, V, 2 * READ["bias"], READ["mask"], slope)
    assert np.abs(twice - expected).max() > 0.01
    with pytest.raises(TypeError, match="slope; bias, mask, slope are missing"):
        prepared(Q, K, V)
    with pytest.raises(ValueError, match=r"bias is float64 \(6, 5\).* compiled for float32"):
        prepared(Q, K, V, **{**by_name, "bias": READ["bias"].astype(float)})


def test_shapes_and_forms_are_compiled_too():
    expected, lse = cupyfa.attention(Q, K, V, **TEXT, **READ, **ON, return_lse=True)
    given = (
        READ["bias"].reshape(1, 1, 6, 5),
        READ["mask"].reshape(1, 2, 1, 5),
        READ["captured"]["slope"],
    )
    shapes = Q.shape, K.shape, V.shape
    prepared = cupyfa.compile(*shapes, dtype="float32", **TEXT, **FORMS, **ON)
    np.testing.assert_array_equal(prepared(Q, K, V, *given), expected)
    on = {**ON, "kernel": "two_pass"}
    grads = cupyfa.backward(expected, Q, K, V, expected, lse, **TEXT, **READ, **on)
    every = expected.shape, *shapes, expected.shape, lse.shape
    backward = cupyfa.compile(*every, dtype="float32", **TEXT, **FORMS, **on)
    for made, wanted in zip(backward(expected, Q, K, V, expected, lse, *given), grads):
        np.testing.assert_array_equal(made, wanted)
    forms = {**TEXT, **FORMS, **on, "dlse": lse.shape}
    of_lse = cupyfa.compile(*every, dtype="float32", **forms)
    given = *(expected, Q, K, V, expected, lse, *given[:2]), lse, given[2]
    wanted = cupyfa.backward(*given[:6], dlse=lse, **TEXT, **READ, **on)
    np.testing.assert_array_equal(of_lse(*given)[0], wanted[0])
    one = cupyfa.compile(*given[:6], dlse=lse, **TEXT, **READ, **on)
    arrays = {"bias": READ["bias"], "mask": READ["mask"], "slope": given[-1], "dlse": lse}
    np.testing.assert_array_equal(one(*given[:6], **arrays)[2], wanted[2])
    with pytest.raises(ValueError, match=r"dlse has shape \(3,\); it must be .*, the shape of lse"):
        cupyfa.compile(*every, dtype="float32", **{**forms, "dlse": (3,)})
    arrays = cupyfa.compile(expected, Q, K, V, expected, lse, **TEXT, **READ, **on)
    made = arrays(expected, Q, K, V, expected, lse, READ["bias"], READ["mask"], given[-1])
    np.testing.assert_array_equal(made[0], grads[0])


WRONG_SHAPES = [
    ("mask", (7, 9)),
    ("mask", (3, 5, 6)),
    ("mask", (1, 1, 7, 9)),
    ("bias", (7, 9)),
    ("bias", (2, 4, 5, 7)),
    ("alibi_slopes", (3,)),
    ("alibi_slopes", (4, 4)),
    ("sink", (3,)),
    ("sink", (1, 2, 4)),
]


@pytest.mark.parametrize("name, shape", WRONG_SHAPES)
@pytest.mark.parametrize("call", ["attention", "vjp", "compile", "plan"])
def test_wrong_shapes_are_reported_as_given(call, name, shape):
    q, k = np.ones((2, 4, 5, 8), np.float32), np.ones((2, 2, 6, 8), np.float32)
    array = np.ones(shape, bool if name == "mask" else np.float32)
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "M": 5, "N": 6, "d": 8}
    with pytest.raises(ValueError, match=re.escape(f"{name} has shape {shape}; it must be")):
        if call == "plan":
            cupyfa.plan(backend="simulator", **sizes, **{name: shape})
        else:
            getattr(cupyfa, call)(q, k, k, backend="simulator", **{name: array})


@pytest.mark.parametrize("layout, rows", [("bshd", 3), ("bhsd", 16)])
def test_a_cache_says_how_its_shape_is_read(layout, rows):
    room = np.zeros((2, 3, 16, 8), np.float32)
    cache = cupyfa.KVCache(room, room.copy(), np.full(2, 20, np.int32), layout=layout)
    axes = {"bshd": "capacity, kv_heads", "bhsd": "kv_heads, capacity"}[layout]
    shape = f"(its k has shape (2, 3, 16, 8), with layout='{layout}' [batch, {axes}, d])"
    heads = {"bshd": 16, "bhsd": 3}[layout]
    with pytest.raises(ValueError, match=re.escape(f"room for {rows} keys per sequence {shape}")):
        cupyfa.attention(
            np.ones((2, heads, 1, 8), np.float32), cache, check=True, backend="simulator"
        )
