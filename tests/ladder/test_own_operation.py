"""Kernels that compute something of their own: arrays, floats, outputs and a reference."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import sloped as scripts
from helpers.cli import cli

import cupyfa
from cupyfa import Input, Launch
from cupyfa.runtime.simulator import Simulator

SLOPED, SCRIPT = scripts.sloped, Path(scripts.__file__)
FULL = SCRIPT.with_suffix(".cu").read_text()


def arrays(M=20, N=33, d=8, heads=2, dtype="float32"):
    rng = np.random.default_rng(0)
    of = cupyfa.Problem.of_sizes(M=1, d=1, dtype=dtype).dtype.numpy
    q, k, v = (rng.standard_normal((2, heads, n, d)).astype(of) for n in (M, N, N))
    own = {"slopes": rng.random(heads).astype("f4"), "is_shown": rng.random((2, N)) < 0.8}
    return q, k, v, own


def right(q, k, v, own, cap=30.0):
    """What the record's reference gives."""
    p = cupyfa.Problem.of(q, k, v)
    c = type("constants", (), {"cap": cap})
    return scripts.attention({"Q": q, "K": k, "V": v, **own}, p, c)


def test_a_call_takes_arrays_and_floats_and_gives_outputs(backend):
    q, k, v, own = arrays()
    o, lse, top = cupyfa.attention(
        *(q, k, v),
        kernel=SLOPED,
        own={**own, "cap": 2.0},
        return_lse=True,
        return_own=("top",),
        backend=backend,
        check=True,
    )
    for name, x in right(q, k, v, own, cap=2.0).items():
        np.testing.assert_allclose({"O": o, "lse": lse, "top": top}[name], x, rtol=1e-4, atol=1e-5)
    plain = cupyfa.attention(q, k, v, kernel=SLOPED, own=own, backend=backend)
    np.testing.assert_allclose(plain, right(q, k, v, own)["O"], rtol=1e-4, atol=1e-5)


def test_a_prepared_call_takes_own_arrays_in_order_and_by_name():
    q, k, v, own = arrays()
    how = {"kernel": SLOPED, "backend": "simulator", "return_own": ["top"]}
    expected = right(q, k, v, own, cap=5.0)
    for prepared in (
        cupyfa.compile(q, k, v, own={**own, "cap": 5.0}, **how),
        cupyfa.compile(q.shape, k.shape, v.shape, dtype="float32", own={"cap": 5.0}, **how),
    ):
        for o, top in (
            prepared(q, k, v, *own.values()),
            prepared(q, k, v, **own),
            prepared(q, k, v, own=own),
        ):
            np.testing.assert_allclose(o, expected["O"], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(top, expected["top"], rtol=1e-4, atol=1e-5)


def test_arrays_of_any_strides_and_leading_axes_are_taken():
    q, k, v, own = arrays()
    own["is_shown"] = np.repeat(own["is_shown"], 2, 1)[:, ::2]  # which the kernel takes by pointer
    split = [x.reshape(2, 1, *x.shape[1:]) for x in (q, k, v)]
    own_split = {**own, "is_shown": own["is_shown"].reshape(2, 1, -1)}
    how = {"kernel": SLOPED, "backend": "simulator", "return_own": ("top",)}
    o, top = cupyfa.attention(q, k, v, own=own, **how)
    o_split, top_split = cupyfa.attention(*split, own=own_split, **how)
    np.testing.assert_allclose(o, right(q, k, v, own)["O"], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(o_split.reshape(o.shape), o)
    assert top_split.shape == (2, 1, *top.shape[1:])


SHOWN = np.ones((2, 33), bool)
SLOPES = np.ones(2, "f4")


@pytest.mark.parametrize(
    "own, more, message",
    [
        (None, {}, r"sloped needs slopes.*must be float32 \(2,\), \[heads\]: give it as own="),
        ({"slopes": SLOPES}, {}, "needs is_shown"),
        ({"slope": SLOPES}, {}, r"takes no 'slope' of its own \(did you mean 'slopes'\?\)"),
        ({"slopes": SLOPES[:1], "is_shown": SHOWN}, {}, r"slopes has shape \(1,\); slopes must be"),
        ({"slopes": SLOPES.astype("f8"), "is_shown": SHOWN}, {}, "slopes is float64.*convert it"),
        ({"slopes": SLOPES, "is_shown": SHOWN, "cap": True}, {}, "cap is True; give a finite"),
        ({"slopes": SLOPES, "is_shown": SHOWN, "cap": np.inf}, {}, "cap is inf; give a finite"),
        ({"slopes": 0.5, "is_shown": SHOWN}, {}, "slopes is 0.5; pass a NumPy or CuPy array"),
        ([1], {}, r"own is \[1\]; give arrays and floats by name"),
        ({}, {"return_own": "top"}, "return_own is 'top'; give names"),
        ({"slopes": SLOPES, "is_shown": SHOWN}, {"return_own": ["tip"]}, "no output 'tip'.*top"),
        ({}, {"kernel": "auto"}, "own and return_own are for a kernel of your own"),
        (
            {"slopes": SLOPES},
            {"kernel": "fa2"},
            "fa2 takes no 'slopes' of its own; it takes nothing",
        ),
    ],
)
def test_wrong_own_arrays_are_refused(own, more, message):
    q, k, v, _ = arrays()
    with pytest.raises((ValueError, TypeError), match=message):
        cupyfa.attention(q, k, v, own=own, **{"kernel": SLOPED, "backend": "simulator", **more})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"inputs": {"Q": Input("heads")}}, "inputs have names that no other argument has"),
        ({"inputs": {"x.y": Input("heads")}}, "inputs have names that no other"),
        ({"inputs": {"slopes": ("heads", "real")}}, "inputs are {name: Input"),
        ({"inputs": {"slopes": Input("head")}}, "inputs have axes batch"),
        ({"inputs": {"slopes": Input("heads", "half")}}, "inputs are of kind scalar"),
        ({"floats": {"cap": 30.0}}, "floats are {name: lambda p, c"),
        ({"floats": {"top": lambda p, c: 1.0}}, "floats differ from inputs, outputs"),
        ({"reference": None}, "outputs are {name: .axes, kind.}, and need a reference"),
        ({"reference": "numpy"}, "reference is None or a function"),
    ],
)
def test_wrong_fields_of_a_record_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(SLOPED, **changes)


@pytest.mark.parametrize("command", ["run", "check", "bench", "tune"])
def test_commands_work_as_for_a_rung(command):
    sizes = () if command == "check" else ("-B", "1", "-H", "2", "-M", "40", "-d", "8")
    more = {
        "check": ("--grid", "fuzz", "--samples", "3", "--seed", "8", "--dtype", "float32"),
        "bench": ("--budget", "0.01", "--format", "json"),
        "tune": ("--budget", "1", "--fresh", "--format", "json"),
    }.get(command, ())
    done = cli(command, f"{SCRIPT}:sloped", "--backend", "simulator", *sizes, *more, code=0)
    shown = {
        "run": r"top +error",
        "check": r"(\d+) of \1 runs right",
        "bench": r'"kernel": "sloped"(?s:.*)"checked_%": 100.0,\s+"note": ""',
        "tune": r'"state": "right"',
    }
    assert re.search(shown[command], done.stdout), done.stdout


FAULTS = {
    "one key is missing": ("key < extent.kv_end(row)", "key < extent.kv_end(row) - 1"),
    "the scale is wrong by 1 %": ("product * scale", "product * scale * real(1.01)"),
    "an own array is not read": ("real slope = *slopes.row(batch, head, 0)", "real slope = 0"),
    "a float is not read": ("cap * tanh(score / cap)", "score"),
    "an own output is wrong": ("fmax(highest, score)", "score"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(tmp_path, fault):
    assert FULL.count(FAULTS[fault][0]) == 1
    (tmp_path / "sloped.cu").write_text(FULL.replace(*FAULTS[fault]))
    case = cupyfa.Case("forward", cupyfa.Problem.of_sizes(M=70, N=70, d=16, heads=2))
    q, k, v, *own = case.inputs(kernel=SLOPED).values()
    with pytest.raises(cupyfa.WrongResult, match="wrong result of sloped"):
        cupyfa.attention(
            *(q, k, v),
            kernel=replace(SLOPED, folder=tmp_path),
            own=dict(zip(SLOPED.inputs, own)),
            backend="simulator",
            check=True,
        )


def test_a_failure_is_stored_with_own_arrays_and_replayed(tmp_path):
    (tmp_path / "sloped.cu").write_text(FULL.replace(*FAULTS["an own array is not read"]))
    (tmp_path / "sloped.py").write_text(SCRIPT.read_text())
    name = f"{tmp_path / 'sloped.py'}:sloped"
    how = {"grid": "fuzz", "samples": 2, "seed": 8, "dtypes": "float32", "jobs": 1}
    done = cupyfa.check(name, **how, backend="simulator", failures=tmp_path / "failures")
    (failure, *_) = done.failures
    assert failure.found_on is not None and failure.outcome.worst.name in ("O", "lse", "top")
    with np.load(failure.file) as stored:
        assert {"slopes", "is_shown", "expected_top"} <= set(stored)
    assert cupyfa.replay(failure.file, backend="simulator").now.kind == "wrong result"
    (tmp_path / "sloped.cu").write_text(FULL)
    assert cupyfa.replay(failure.file, backend="simulator").now.kind == "right"


def one_launch(args, **fields):
    """A record that has these arguments and the arrays of its own in ``fields``."""
    launch = Launch("own", args=args, grid=lambda p, c: 1, threads=lambda p, c: 32)
    features = ("strides", "lse", "dv")
    return replace(SLOPED, name="own", launches=(launch,), outputs={}, features=features, **fields)


@pytest.mark.parametrize(
    "axes, strides",
    [
        ("heads", (None, 0, None)),
        ("batch N", (0, None, 1)),
        ("batch heads M", (0, 1, 2)),
        ("kv_heads N d", (None, 0, 1)),
        ("M N", (None, None, 0)),
        (lambda p: (3, 4), (None, None, 0)),
        (lambda p: (5,), (None, None, None)),
    ],
)
def test_strides_of_a_tensor_follow_the_names_of_axes(axes, strides):
    kernel = one_launch("table", inputs={"table": Input(axes)}, floats={})
    plan = cupyfa.plan(kernel=kernel, M=4, d=2, limits=Simulator().limits)
    assert plan.launches[0].arguments[0].strides == strides


@pytest.mark.parametrize("axes", ["M d heads", "batch heads M N d", lambda p: (1, 2, 3, 4, 5)])
def test_other_arrays_are_passed_by_pointer(axes):
    inputs = {"table": Input(axes)}
    how = {"M": 4, "d": 2, "limits": Simulator().limits}
    cupyfa.plan(kernel=one_launch("table.data", inputs=inputs, floats={}), **how)
    with pytest.raises(ValueError, match="cannot have; pass it as table.data"):
        cupyfa.plan(kernel=one_launch("table", inputs=inputs, floats={}), **how)
