"""Gradients of user kernels: valid results of `forward`, and attention without lse."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import sloped as sloped_scripts, squared_relu as scripts
from helpers.cli import SIMULATOR, cli
from helpers.problems import qkv

import cupyfa
from cupyfa.lab.verify import failures
from cupyfa.lab.verify.case import Case
from cupyfa.lab.verify.tasks import Task, perform

FORWARD, BACKWARD = scripts.squared_relu, scripts.squared_relu_backward
SCRIPT = Path(scripts.__file__)
SLOPED = sloped_scripts.sloped_backward
SIZES = {"M": 9, "N": 7, "d": 4, "heads": 2, "kv_heads": 1}


CASE = Case("backward", cupyfa.Problem.of_sizes(**SIZES, causal=True))


def outcomes(kernel, **how):
    """Returns the outcomes of checking a kernel on one small case."""
    steps = perform(cupyfa.Simulator(), Task(CASE, (kernel,), **how))
    return [x for x in steps if x.kind not in failures.STEPS]


def right(q, k, v, dout, **options):
    p = cupyfa.Problem.of(q, k, v, **options)
    names = dict(zip(("Q", "K", "V", "dO"), (x.astype(np.float64) for x in (q, k, v, dout))))
    found = scripts.gradients(names, p, None)
    return [found[x] for x in ("dQ", "dK", "dV")]


@pytest.mark.each_choice
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_gradients_of_attention_without_a_softmax(backend, dtype, causal):
    q, k, v = qkv(9, 7, dtype, d=4)
    how = {"backend": backend, "causal": causal, "check": True}
    kernels = {"kernel": FORWARD, "backward_kernel": BACKWARD}
    out, pullback = cupyfa.vjp(q, k, v, **kernels, **how)
    dout = np.cos(out.astype(np.float32)).astype(q.dtype)
    error = {2: 0.05, 4: 1e-4, 8: 1e-10}[q.itemsize]
    of_both = pullback(dout)
    alone = cupyfa.backward(dout, q, k, v, out, None, kernel=BACKWARD, **how)
    for made, again, expected in zip(of_both, alone, right(q, k, v, dout, causal=causal)):
        assert np.array_equal(made, again)
        np.testing.assert_allclose(made.astype(np.float64), expected, rtol=error, atol=error)


def test_an_lse_that_is_given_is_not_read():
    q, k, v = qkv(9, 7, d=4)
    out = cupyfa.attention(q, k, v, kernel=FORWARD, backend="simulator")
    how = {"kernel": BACKWARD, "backend": "simulator"}
    lse = np.full(q.shape[:-1], np.nan, np.float32)
    for x, y in zip(
        cupyfa.backward(out, q, k, v, out, lse, **how),
        cupyfa.backward(out, q, k, v, out, None, **how),
    ):
        assert np.array_equal(x, y)


def test_prepared_gradients_without_an_lse(backend):
    q, k, v = qkv(9, 7, d=4)
    how = {"kernel": BACKWARD, "backend": backend}
    out = cupyfa.attention(q, k, v, kernel=FORWARD, backend=backend)
    expected = cupyfa.backward(out, q, k, v, out, None, **how)
    of_arrays = cupyfa.compile(out, q, k, v, out, None, **how)
    shapes = out.shape, q.shape, k.shape, v.shape, out.shape
    of_shapes = cupyfa.compile(*shapes, None, dtype=q.dtype, **how)
    on_device = [backend.upload(x) for x in (out, q, k, v, out)]
    for prepared, given in ((of_arrays, (out, q, k, v, out)), (of_shapes, on_device)):
        for _ in range(2):
            for made, right in zip(prepared(*given, None), expected):
                assert np.array_equal(backend.download(made), right)
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (out, q, k, v, out)]
    of_shapes = [x.shape for x in turned]
    by_rows = cupyfa.compile(*of_shapes, None, dtype=q.dtype, layout="bshd", **how)
    for made, right in zip(by_rows(*map(backend.upload, turned), None), expected):
        assert np.array_equal(backend.download(made).swapaxes(1, 2), right)


def test_a_kernel_that_reads_lse_needs_one():
    q, k, v = qkv(9, 7, d=4)
    how = {"backend": "simulator"}
    for kernel in ("columns", "auto", SLOPED.bind(slopes=np.ones(4, "f4"))):
        with pytest.raises(TypeError, match="lse is None"):
            cupyfa.backward(q, q, k, v, q, None, kernel=kernel, **how)
    with pytest.raises(cupyfa.Unsupported, match="squared_relu does not compute lse"):
        cupyfa.vjp(q, k, v, kernel=FORWARD, backward_kernel="columns", **how)
    with pytest.raises(cupyfa.Unsupported, match="squared_relu does not compute lse"):
        kernels = {"kernel": FORWARD, "backward_kernel": BACKWARD}
        cupyfa.vjp(q, k, v, return_lse=True, **kernels, **how)


@pytest.mark.slow
def test_commands_take_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = f"{SCRIPT}:squared_relu_backward"
    sizes = ("-M", 20, "-N", 9, "-d", 4, "-H", 2, "-B", 1)
    assert "PASS" in cli("run", name, *sizes, *SIMULATOR).output
    done = cli("check", name, "--grid", "smoke", "--samples", 2, *SIMULATOR, "--jobs", 0)
    assert "2 of 2 runs right" in done.output
    cli("bench", name, "--alone", "--budget", 0, *sizes, *SIMULATOR, "--save", "x.json")


def test_a_failure_of_it_is_replayed(tmp_path):
    def off(*of):
        return {name: x + 1 for name, x in scripts.gradients(*of).items()}

    (outcome,) = outcomes(replace(BACKWARD, reference=off), keep=True)
    assert outcome.kind == failures.WRONG_RESULT
    file = failures.write(tmp_path, failures.Stored(CASE, outcome, has_name=False), "x")
    assert cupyfa.lab.replay(file, BACKWARD, "simulator").now.kind == failures.RIGHT


def without(name):
    return lambda *of: {x: y for x, y in sloped_scripts.forward(*of).items() if x != name}


def changed(name, change):
    def forward(*of):
        made = sloped_scripts.forward(*of)
        return {**made, name: change(made[name])}

    return forward


WRONG = {
    "no lse": (
        without("lse"),
        "returned O; it must return a dict {name: array} with the keys O, lse",
    ),
    "no O": (without("O"), "returned lse; it must return"),
    "None": (lambda *of: None, "returned NoneType; it must return"),
    "empty": (lambda *of: {}, "returned nothing; it must return"),
    "a tuple": (lambda *of: (1, 2), "returned tuple; it must return"),
    "lse None": (changed("lse", lambda x: None), "returned lse = None; it must be an array"),
    "lse text": (changed("lse", lambda x: "x"), "returned lse = 'x'; it must be an array"),
    "lse objects": (changed("lse", lambda x: x.astype(object)), "returned lse of dtype object; it"),
    "lse complex": (changed("lse", lambda x: x * 1j), "returned lse of dtype complex128; it must"),
    "lse a number": (
        changed("lse", lambda x: 0.0),
        r"returned lse of shape \(\); its shape must be",
    ),
    "lse an axis": (
        changed("lse", lambda x: x[..., None]),
        "returned lse of shape .*1.; its shape must",
    ),
    "lse fewer": (
        changed("lse", lambda x: x[..., :-1]),
        "returned lse of shape .*; its shape must be",
    ),
    "O fewer": (changed("O", lambda x: x[..., :-1]), "returned O of shape .*; its shape must be"),
    "fails": (lambda arrays, p, c: arrays["x"], "failed with KeyError: 'x'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_forward_is_named(what):
    forward, message = WRONG[what]
    kernel = replace(SLOPED, forward=forward)
    how = {"backend": "simulator"}
    sizes = {**SIZES, "batch": 1}
    for call in (
        lambda: cupyfa.bench(kernel, alone=True, budget=0, **sizes, **how),
        lambda: cupyfa.lab.tune(kernel, budget=0, **sizes, **how),
    ):
        with pytest.raises(ValueError, match=f"sloped_backward: the record's forward {message}"):
            call()
    (outcome,) = outcomes(kernel)
    assert outcome.kind == failures.ERROR and "the record's forward" in outcome.message


@pytest.mark.parametrize("lse", ["left out", None, "given"])
def test_an_lse_that_no_launch_reads_may_be_left_out(lse):
    def forward(arrays, p, c):
        made = scripts.attention(arrays, p, c)
        rows = np.zeros((p.batch, p.heads, p.M))
        return made if lse == "left out" else {**made, "lse": None if lse is None else rows}

    kernel = replace(BACKWARD, forward=forward)
    (outcome,) = outcomes(kernel)
    assert outcome.kind == failures.RIGHT


def test_a_forward_of_no_softmax_must_give_the_right_shape_of_o():
    kernel = replace(BACKWARD, forward=lambda arrays, p, c: {"O": arrays["Q"][..., :1]})
    with pytest.raises(ValueError, match="forward returned O of shape"):
        cupyfa.bench(kernel, alone=True, budget=0, batch=1, backend="simulator", **SIZES)
