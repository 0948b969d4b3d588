"""Operands as parts in float16: what split_operands writes, and which rows get flags."""

import numpy as np
import pytest
from helpers import parts
from helpers.broken_kernels import Fault, broken
from helpers.problems import FORWARD, inputs_of

from cupyfa import Problem
from cupyfa.ladder import LADDER
from cupyfa.numerics import tolerance
from cupyfa.planner import choose_kernel as planning
from cupyfa.runtime.launcher import replay

F = np.float32
EACH = pytest.mark.parametrize("kernel", ["mma_fp16x2", "wgmma_fp16x2"])
EACH_BACKWARD = pytest.mark.parametrize("kernel", ["mma_fp16x2_two_pass", "wgmma_fp16x2_two_pass"])


def run(backend, kernel="mma_fp16x2", values=None, tiles=None, **sizes):
    """The plan and its arrays, scratch too, after a kernel has run."""
    problem = Problem.of_sizes(**sizes, dtype="float32")
    if not planning.can(FORWARD[kernel], problem, backend.limits):
        pytest.skip(f"{backend.limits.device} is not of sm_90")
    plan = planning.plan(FORWARD[kernel], problem, backend.limits, **(tiles or {}))
    given = inputs_of(plan)
    change = values or (lambda **given: given)
    given |= {name: F(x) for name, x in change(**{x: given[x] for x in "QKV"}).items()}
    return replayed(backend, plan, given)


def run_gradients(backend, kernel="mma_fp16x2_two_pass", change=lambda given: None, **sizes):
    """The same of gradients."""
    problem = Problem.of_sizes(**sizes, dtype="float32")
    if not planning.can(LADDER["backward"][kernel], problem, backend.limits):
        pytest.skip(f"{backend.limits.device} is not of sm_90")
    plan = planning.plan(LADDER["backward"][kernel], problem, backend.limits)
    given = inputs_of(plan)
    change(given)
    return replayed(backend, plan, given)


def replayed(backend, plan, given):
    arrays = {name: backend.upload(x) for name, x in given.items()}
    for name, (shape, dtype) in {**plan.outputs, **plan.scratch}.items():
        arrays[name] = backend.empty(shape, dtype)
        arrays[name].fill(1)  # also flags: nothing may depend on what is there
    replay(backend, plan, arrays)()
    return plan, {name: backend.download(x) for name, x in arrays.items()}


def require_right(plan, arrays):
    inputs = {name: arrays[name] for name in plan.operation.inputs_of(plan.problem)}
    expected = plan.operation.reference(inputs, plan.problem, (None,))[None]
    verdicts = tolerance.compare({name: arrays[name] for name in plan.outputs}, expected)
    tolerance.require(verdicts, str(plan.problem))


def wide(Q, K, V):
    rng = np.random.default_rng(1)
    Q, K, V = (x * 10.0 ** rng.uniform(-18, 18, x.shape) for x in (Q, K, V))
    Q[..., :3, 1], K[..., 2], V[..., 4] = 0, 0, 0
    Q[0, 0, 5, 0], K[0, 0, 7, 3], V[0, 1, 8, 2] = np.nan, np.inf, -np.inf
    return {"Q": Q, "K": K, "V": V}


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0, 1e-36])
@pytest.mark.parametrize("values", [None, wide])
def test_parts_are_those_of_numpy(backend, values, scale):
    sizes = {"batch": 1, "heads": 4, "kv_heads": 2, "M": 19, "N": 150, "d": 21, "dv": 37}
    with np.errstate(over="ignore"):
        plan, arrays = run(backend, values=values, **sizes, scale=scale)
    for head in range(4):
        q, k, v = arrays["Q"][0, head], arrays["K"][0, head // 2], arrays["V"][0, head // 2]
        own = parts.split(q, k, v, scale)
        for name, width in (("Q", 21), ("K", 21), ("V", 37)):
            of = head if name == "Q" else head // 2
            for part in ("high", "low"):
                got = arrays[f"{name}_{part}"][0, of]
                np.testing.assert_array_equal(got[:, :width], getattr(getattr(own, name), part))
                assert (got[:, width:] == 0).all() and got.shape[1] % 16 == 0
        exponents = arrays["V_exponents"].reshape(2, 37)[head // 2]
        np.testing.assert_array_equal(exponents, own.V_exponents)
        np.testing.assert_allclose(arrays["scale2"][0, head], own.scale2, rtol=3e-7)
        assert (arrays["flags"][0, head] >= own.flags).all()
    require_right(plan, arrays)


def one_hot(size):
    def values(Q, K, V):
        row = np.arange(V.shape[2])
        V[:] = row[:, None] % V.shape[3] == np.arange(V.shape[3])
        return {"Q": size * Q, "K": size * K, "V": V}

    return values


def cancelling(Q, K, V):
    """Pairs of equal keys with opposite values: O is 0."""
    K[:, :, 1::2], V[:, :, 1::2] = K[:, :, ::2], -V[:, :, ::2]
    return {"Q": Q, "K": K, "V": V}


def few_values(Q, K, V):
    """A column of V has one value, of a key whose weight is tiny. The weights of the others add up
    to more than there are keys, where a maximum between 2^15 and 2^16 is rounded down.
    """
    Q[:], K[:] = np.linspace(3e3, 5e3, Q.shape[2])[:, None], 1
    K[:, :, 0], V[..., 3], V[:, :, 0, 3] = 0.998, 0, 1
    return {"Q": Q, "K": K, "V": V}


def outliers(Q, K, V):
    rng = np.random.default_rng(1)
    return {
        name: x + 10 * rng.standard_normal(x.shape) * (rng.random(x.shape) < 0.001)
        for name, x in (("Q", Q), ("K", K), ("V", V))
    }


def hidden(number):
    """The last key, which causal masks hide from all queries but the last."""

    def values(Q, K, V):
        K[:, :, -1, 3], V[:, :, -1, 5] = number, number
        return {"Q": Q, "K": K, "V": V}

    return values


def columns(Q, K, V):
    u = 10 ** np.random.default_rng(1).uniform(-18, 18, Q.shape[-1])
    return {"Q": Q * u, "K": K / u, "V": V * u}


LARGE = {"M": 40, "N": 512, "d": 64}
CAUSAL = {"M": 70, "N": 70, "d": 20, "causal": True}


@pytest.mark.few(8)
@EACH
@pytest.mark.parametrize(
    "values, sizes, flagged",
    [
        (None, LARGE, 0),
        (None, CAUSAL, 0),
        (lambda Q, K, V: {"Q": 30 * Q, "K": 30 * K, "V": V}, LARGE, 0),
        (lambda Q, K, V: {"Q": abs(Q), "K": abs(K), "V": abs(V)}, LARGE, 0),
        (outliers, LARGE, 0),
        (columns, LARGE, 0),
        (one_hot(1), LARGE, 0),
        (one_hot(8), LARGE, 0.5),
        (cancelling, LARGE, 0),
        (few_values, {**LARGE, "N": 1024}, 1),
        (hidden(np.nan), CAUSAL, 1),
        (hidden(np.inf), CAUSAL, 1),
        (hidden(-np.inf), CAUSAL, 1),
        (hidden(1e30), CAUSAL, 0.9),
    ],
    ids=lambda x: "" if isinstance(x, dict) else getattr(x, "__qualname__", str(x)),
)
def test_flags(backend, kernel, values, sizes, flagged):
    """At least this share of the rows has flags, and none if it is 0; all results are right."""
    plan, arrays = run(backend, kernel, values, heads=2, **sizes)
    share = (arrays["flags"] == 1).mean()
    assert share >= flagged and (share == 0) == (flagged == 0)
    require_right(plan, arrays)


@EACH
def test_small_values_are_those_of_the_key_head(backend, kernel):
    def few(Q, K, V):
        V[1, 0, 2:, 3] = 0
        return cancelling(Q, K, V)

    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "M": 40, "N": 300, "d": 16}
    plan, arrays = run(backend, kernel, few, **sizes)
    flagged = np.array([[False] * 4, [True, True, False, False]])
    np.testing.assert_array_equal((arrays["flags"] == 1).all(axis=2), flagged)
    np.testing.assert_array_equal((arrays["flags"] == 1).any(axis=2), flagged)
    require_right(plan, arrays)


@EACH
def test_rows_without_flags_do_not_depend_on_their_neighbours(backend, kernel):
    _, alone = run(backend, kernel, heads=1, **LARGE)
    rng = np.random.default_rng(2)

    def some(Q, K, V):
        rows = rng.random(Q.shape[2]) < 0.5
        Q[:, :, rows, 0] = np.nan
        return {"Q": Q, "K": K, "V": V}

    _, mixed = run(backend, kernel, some, heads=1, **LARGE)
    rows = mixed["flags"] == 0
    assert 0 < rows.sum() < rows.size
    for name in ("O", "lse"):
        np.testing.assert_array_equal(mixed[name][rows], alone[name][rows])


@pytest.mark.parametrize("size", [1, 1e-12, 1e12])
def test_parts_of_dO_are_those_of_numpy(backend, size):
    def change(given):
        given["dO"] *= F(size)
        given["dO"][..., 4, :], given["dO"][..., 3] = 0, 0

    sizes = {"batch": 1, "heads": 4, "kv_heads": 2, "M": 19, "N": 150, "d": 21, "dv": 37}
    plan, arrays = run_gradients(backend, change=change, **sizes, scale=0.3)
    for head in range(4):
        q, k, v = arrays["Q"][0, head], arrays["K"][0, head // 2], arrays["V"][0, head // 2]
        do, out = arrays["dO"][0, head], arrays["O"][0, head]
        own = parts.split_gradient(do, out, parts.split(q, k, v, 0.3))
        for part in ("high", "low"):
            got = arrays[f"dO_{part}"][0, head]
            np.testing.assert_array_equal(got[:, :37], getattr(own.dO, part))
            assert (got[:, 37:] == 0).all() and got.shape[1] % 16 == 0
        units = np.ldexp(1.0, np.clip(own.exponents + 32, -126, 127))
        np.testing.assert_array_equal(arrays["dO_units"][0, head], units)
        exponents = arrays["K_exponents"].reshape(2, 21)[head // 2]
        np.testing.assert_array_equal(exponents, parts.exponents(np.abs(k).max(0)))
        np.testing.assert_allclose(arrays["delta"][0, head], own.delta, rtol=1e-4, atol=1e-6 * size)
    assert not any(arrays[name].any() for name in ("flags", "dK_flags", "dV_flags"))
    require_right(plan, arrays)


def put(name, place, number):
    """A change of inputs."""

    def change(given):
        given[name][place] = number

    return change


LAST = (0, 0, -1, 3)  # of the keys, which causal masks hide from all queries but the last
SHARED = {**CAUSAL, "heads": 2, "kv_heads": 1}
CHANGES = {
    "nothing": (lambda given: None, LARGE, (0, 0, 0)),
    "causal": (lambda given: None, SHARED, (0, 0, 0)),
    "columns of zeros": (
        lambda given: [put(x, (..., 3), 0)(given) for x in ("Q", "K", "V", "dO")],
        SHARED,
        (0, 0, 0),
    ),
    "rows of zeros": (
        lambda given: [put(x, (0, 0, slice(3, 9)), 0)(given) for x in ("Q", "dO")],
        SHARED,
        (0, 0, 0),
    ),
    "NaN in a row of dO": (put("dO", (0, 1, 5, 3), np.nan), SHARED, (1, 6, 6)),
    "NaN in a row of Q": (put("Q", (0, 1, 5, 3), np.nan), SHARED, (1, 6, 6)),
    "NaN in a key": (put("K", LAST, np.nan), SHARED, (140, 70, 70)),
    "infinity in a value": (put("V", LAST, -np.inf), SHARED, (140, 70, 70)),
    "tiny dO": (lambda given: given["dO"].__imul__(F(1e-25)), SHARED, (140, 70, 70)),
    "no scale": (lambda given: None, {**SHARED, "scale": 0.0}, (0, 0, 0)),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("change, sizes, flagged", CHANGES.values(), ids=CHANGES)
@EACH_BACKWARD
def test_flags_of_gradients(backend, kernel, change, sizes, flagged):
    """How many rows of dQ, keys of dK and keys of dV have flags; all results are right."""
    plan, arrays = run_gradients(backend, kernel, change, **sizes)
    found = tuple((arrays[x] == 1).sum() for x in ("flags", "dK_flags", "dV_flags"))
    assert found == flagged
    require_right(plan, arrays)


@EACH_BACKWARD
def test_keys_without_flags_do_not_depend_on_others(backend, kernel):
    _, alone = run_gradients(backend, kernel, **SHARED)
    _, mixed = run_gradients(backend, kernel, put("dO", (0, 1, 5, 3), np.nan), **SHARED)
    for name, flags in (("dQ", "flags"), ("dK", "dK_flags"), ("dV", "dV_flags")):
        held = mixed[flags] == 0
        assert 0 < held.sum() < held.size
        np.testing.assert_array_equal(mixed[name][held], alone[name][held])


@pytest.mark.parametrize(
    "kernel", [pytest.param("mma_fp16x2", marks=pytest.mark.slow), "wgmma_fp16x2"]
)
def test_sections_of_keys(backend, tmp_path, monkeypatch, kernel):
    """Rows see 4 to 6 sections of 64 keys, the first from its midst on; blocks have many tasks."""
    at = "constexpr int section = "
    short = Fault(
        kernel,
        "forward/parts/split_f32/sectioned_output.cuh",
        "",
        f"{at}8192;",
        f"{at}64;",
        "",
        None,
    )
    monkeypatch.setitem(FORWARD, kernel, broken(tmp_path, short))
    sizes = dict(batch=2, heads=6, kv_heads=2, M=30, N=330, d=8)
    seen = dict(causal=True, window=(250, None), offset=295)
    plan, arrays = run(backend, kernel, lambda **given: given, tiles={"Br": 64}, **sizes, **seen)
    packed = {x.launch.entry: x.constants.get("pack_gqa") for x in plan.launches}
    assert packed[kernel] == (3 if kernel == "mma_fp16x2" else 1)
    assert not arrays["flags"].any()
    require_right(plan, arrays)


@pytest.mark.gpu
@EACH
@pytest.mark.parametrize("d", [64, 128, 256])
def test_long_sums_on_tensor_cores(cuda, kernel, d):
    """Sums that tensor cores cut off would be 11 times the bound."""
    rng = np.random.default_rng(0)
    uniform = lambda **given: {name: rng.random(x.shape) for name, x in given.items()}  # noqa: E731
    plan, arrays = run(cuda, kernel, uniform, heads=1, M=128, N=65536, d=d)
    inputs = {name: arrays[name] for name in "QKV"}
    expected = plan.operation.reference(inputs, plan.problem, (None,))[None]
    verdicts = tolerance.compare({name: arrays[name] for name in ("O", "lse")}, expected)
    assert not arrays["flags"].any()
    assert {x.name: x.ratio for x in verdicts}["O"] <= 0.2
    tolerance.require(verdicts, str(plan.problem))


@pytest.mark.gpu
@pytest.mark.parametrize("M, N", [(128, 32768), (32768, 128)])
@pytest.mark.parametrize("d", [64, 128, 256])
@EACH_BACKWARD
def test_long_sums_of_gradients_on_tensor_cores(cuda, kernel, d, M, N):
    """Sums of numbers above 0, which tensor cores would cut off, and the same bits in both runs."""
    rng = np.random.default_rng(0)
    uniform = lambda **given: {name: rng.random(x.shape) for name, x in given.items()}  # noqa: E731
    _, forward = run(cuda, values=uniform, heads=1, M=M, N=N, d=d)

    def change(given):
        given.update({name: forward[name] for name in ("Q", "K", "V", "O", "lse")})
        given["dO"] = np.random.default_rng(1).random(given["dO"].shape, F)

    plan, arrays = run_gradients(cuda, kernel, change, heads=1, M=M, N=N, d=d)
    require_right(plan, arrays)
    for name in ("flags", "dK_flags", "dV_flags"):
        assert arrays[name].mean() < 0.001, "few rows, by chance"
    _, again = run_gradients(cuda, kernel, change, heads=1, M=M, N=N, d=d)
    for name in plan.outputs:
        np.testing.assert_array_equal(arrays[name], again[name])
