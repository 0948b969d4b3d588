"""Hessian-vector products, compared with jax, finite differences and their own symmetry."""

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from helpers.problems import drawn

import cupyfa
from cupyfa import Dropout
from cupyfa.lab.verify.case import Case
from cupyfa.ladder.hvp import HVP
from cupyfa.planner.source import KERNELS, ROOT
from cupyfa.problem.problem import Problem

PAIRS = np.random.default_rng(6).random((2, 1, 21, 35)) < 0.7
SHAPES = (2, 4, 21, 12), (2, 2, 35, 12), (2, 2, 35, 7)
OPTIONS = (
    {},
    {"causal": True, "scale": -0.4},
    {"window": (3, 5), "offset": 4},
    {"causal": "top-left", "sink": np.array([1.0, -np.inf, 0.5, -2.0])},
    {"bias": drawn((4, 21, 35), dtype="float64", seed=5)[0], "mask": "(query + key) % 3 > 0"},
    {"alibi_slopes": np.array([0.5, 0.25, 0.0, 1.0]), "scale": -0.3, "causal": True},
    {"score_mod": "score + w[key] * head", "captured": {"w": np.arange(35) / 35}},
    {"mask": PAIRS, "dropout": Dropout(0.3, 7)},
)


def arrays(seed=0, dtype="float64", shapes=SHAPES):
    """Returns q, k and v, dout, and a direction in which q, k and v move."""
    dout = (*shapes[0][:-1], shapes[2][-1])
    *qkv, dout = drawn(*shapes, dout, dtype=dtype, seed=seed)
    return qkv, dout, drawn(*shapes, dtype=dtype, seed=seed + 100)


@pytest.mark.few(3)
@pytest.mark.parametrize("how", OPTIONS, ids=range(len(OPTIONS)))
def test_products_are_finite_differences_of_gradients(backend, how):
    qkv, dout, tangents = arrays()
    how, step = {**how, "backend": backend}, 1e-5
    found = cupyfa.hvp(*qkv, dout, tangents=tangents, check=True, **how)
    ends = [
        cupyfa.vjp(*(x + y * t for x, t in zip(qkv, tangents)), **how)[1](dout)
        for y in (step, -step)
    ]
    for mine, above, below, like in zip(found, *ends, qkv):
        assert mine.shape == like.shape and np.abs(mine).max() > 0.1
        np.testing.assert_allclose(mine, (above - below) / (2 * step), rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_products_are_those_of_jax_forward_over_reverse():
    jax = pytest.importorskip("jax")
    qkv, dout, tangents = arrays()

    def loss(q, k, v):
        k, v = (x.repeat(2, axis=1) for x in (k, v))
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        seen = np.tril(np.ones(scores.shape[2:], bool), 35 - 21)
        return (dout * (jax.nn.softmax(jax.numpy.where(seen, scores, -np.inf)) @ v)).sum()

    with jax.enable_x64(True):
        _, expected = jax.jvp(jax.grad(loss, (0, 1, 2)), tuple(qkv), tuple(tangents))
    found = cupyfa.hvp(*qkv, dout, tangents=tangents, causal=True, backend="simulator")
    for mine, its in zip(found, expected):
        np.testing.assert_allclose(mine, its, rtol=1e-10, atol=1e-11)


def test_the_hessian_is_symmetric():
    qkv, dout, one = arrays()
    *_, other = arrays(seed=1)
    how = {"window": (9, 3), "backend": "simulator"}
    of_one, of_other = (cupyfa.hvp(*qkv, dout, tangents=x, **how) for x in (one, other))
    left, right = (
        sum((x * y).sum() for x, y in zip(of, direction))
        for of, direction in ((of_one, other), (of_other, one))
    )
    np.testing.assert_allclose(left, right, rtol=1e-10)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_dtypes_layouts_and_tangents_of_none(backend, dtype, layout):
    qkv, dout, tangents = arrays(dtype=dtype)
    expected = cupyfa.hvp(*qkv, dout, tangents=tangents[:2] + [None], backend=backend)
    if layout == "bshd":
        qkv, tangents = ([x.swapaxes(1, 2) for x in of] for of in (qkv, tangents))
        dout = dout.swapaxes(1, 2)
    zeros = [*tangents[:2], np.zeros_like(qkv[2])]
    how = {"layout": layout, "backend": backend}
    found = cupyfa.hvp(*qkv, dout, tangents=zeros, check=True, **how)
    unit = 8 * float(ml_dtypes.finfo(dtype).eps)  # a compiler may contract other sums
    for mine, other in zip(found, expected):
        assert mine.dtype == dtype
        same, other = (mine.swapaxes(1, 2) if layout == "bshd" else mine), other.astype("f8")
        atol = unit * np.abs(other).max()
        np.testing.assert_allclose(same.astype("f8"), other, rtol=unit, atol=atol)


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8)])
def test_arrays_of_two_and_three_axes(shape):
    qkv, dout, tangents = arrays(shapes=[shape] * 3)
    how = {"causal": True, "backend": "simulator"}
    found = cupyfa.hvp(*qkv, dout, tangents=tangents, **how)
    lead = (None,) * (4 - len(shape))
    more = cupyfa.hvp(*(x[lead] for x in (*qkv, dout)), tangents=[x[lead] for x in tangents], **how)
    for mine, other in zip(found, more):
        np.testing.assert_array_equal(mine, other.reshape(shape))


def test_rows_without_keys_and_problems_without_rows():
    for M, N in ((9, 4), (0, 4), (3, 0)):
        shapes = [(1, 2, M, 4), (1, 1, N, 4), (1, 1, N, 4)]
        qkv, dout, tangents = arrays(shapes=shapes)
        how = {"causal": True, "backend": "simulator", "check": True}
        dq, *_ = cupyfa.hvp(*qkv, dout, tangents=tangents, **how)
        assert not dq[:, :, : M - N].any()


def second_derivatives(*arrays, **how):
    """Calls the function of the same name that docs/howto/tangents.md shows."""
    page = (ROOT / "docs" / "howto" / "tangents.md").read_text("utf-8")
    code = re.search(r"<!-- second_derivatives.py -->\n```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(code[1], names)
    return names["second_derivatives"](*arrays, **how)


@pytest.mark.parametrize("how", [{}, {"causal": True, "sink": OPTIONS[3]["sink"]}], ids=str)
def test_second_derivatives_are_finite_differences_of_tangents(backend, how):
    shapes = [(3, *x) for x in SHAPES]  # three directions
    qkv, tangents = drawn(*shapes, dtype="float64"), drawn(*shapes, dtype="float64", seed=1)
    how, step = {**how, "backend": backend}, 1e-5
    found = second_derivatives(*qkv, *tangents, check=True, **how)

    def tangent(x):
        there = (y + x * z for y, z in zip(qkv, tangents))
        return cupyfa.jvp(*there, tangents=tangents, **how)[1][0]

    differences = (tangent(step) - tangent(-step)) / (2 * step)
    assert found.shape == (3, 2, 4, 21, 7) and np.abs(found).max() > 1
    np.testing.assert_allclose(found, differences, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_a_forward_laplacian_is_that_of_jax():
    """The Laplacian of out by all coordinates of x, through q, k and v that are not linear."""
    jax = pytest.importorskip("jax")
    x, *weights = drawn((6, 3), *[(2, 3, 4)] * 3, dtype="float64")

    def network(x, of=jax.numpy):
        return [of.tanh(x @ weights[0]), of.sin(x @ weights[1]), (x @ weights[2]) ** 2]

    def attention(x):
        q, k, v = network(x.reshape(6, 3))
        return jax.nn.softmax(q @ k.swapaxes(-1, -2) / 2.0, axis=-1) @ v

    def hessians(function):
        return np.asarray(jax.hessian(function)(x.reshape(18)))

    with jax.enable_x64(True):
        expected = np.trace(hessians(attention), axis1=-2, axis2=-1)
        of_inputs = [lambda x, i=i: network(x.reshape(6, 3))[i] for i in range(3)]
        first = [np.moveaxis(np.asarray(jax.jacobian(f)(x.reshape(18))), -1, 0) for f in of_inputs]
        second = [np.trace(hessians(f), axis1=-2, axis2=-1) for f in of_inputs]
    qkv = network(x, of=np)
    each = (np.broadcast_to(y, (18, *y.shape)) for y in qkv)
    found = second_derivatives(*each, *first, backend="simulator").sum(0)
    found += cupyfa.jvp(*qkv, tangents=second, backend="simulator")[1][0]
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-11)


FAULTS = {
    "dK has Q in place of its tangent": ("shared.dS, shared.Q_dot", "shared.dS, shared.Q"),
    "the scale is left out": ("shared.dK[key][col] * scale", "shared.dK[key][col]"),
    "dV has the weights of dS": ("shared.P_dot, shared.dO", "shared.dS_dot, shared.dO"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_check_finds_faults(tmp_path, fault):
    right, wrong = FAULTS[fault]
    text = (KERNELS / "backward" / "hvp_columns.cu").read_text()
    assert text.count(right) == 1
    (tmp_path / "hvp_columns.cu").write_text(text.replace(right, wrong))
    broken = replace(HVP, folder=tmp_path)
    case = Case("backward", Problem.of_sizes(M=40, N=40, d=8, heads=2, causal=True))
    *given, Q_dot, K_dot, V_dot, O_dot, lse_dot = case.inputs(kernel=broken).values()
    q, k, v, out, lse, dout = given
    bound = broken.bind(Q_dot=Q_dot, K_dot=K_dot, V_dot=V_dot, O_dot=O_dot, lse_dot=lse_dot)
    how = {"causal": True, "backend": "simulator", "check": True}
    with pytest.raises(cupyfa.WrongResult, match="wrong result of hvp"):
        cupyfa.backward(dout, q, k, v, out, lse, kernel=bound, **how)


@pytest.mark.slow
def test_a_check_of_random_problems_passes():
    checked = cupyfa.check(HVP, backend="simulator", samples=12)
    assert not checked.failures
