"""Operands split into float16 parts: the output of split_operands, and the flagged rows."""

import numpy as np
import pytest
from helpers import parts
from helpers.broken_kernels import changed
from helpers.problems import inputs_of

from cupyfa import Problem
from cupyfa.ladder.lookup import record_named
from cupyfa.numerics import tolerance
from cupyfa.planner import choose_kernel as planning
from cupyfa.runtime.launcher import replay

F = np.float32
EACH = pytest.mark.parametrize("kernel", ["mma_fp16x2", "wgmma_fp16x2"])
EACH_BACKWARD = pytest.mark.parametrize("kernel", ["mma_fp16x2_two_pass", "wgmma_fp16x2_two_pass"])


def run(backend, kernel="mma_fp16x2", change=lambda given: None, tiles=None, **sizes):
    """Runs a kernel on changed inputs; returns the plan and all arrays, including scratch."""
    kernel = record_named(kernel) if isinstance(kernel, str) else kernel
    problem = Problem.of_sizes(**sizes, dtype="float32")
    if not planning.can(kernel, problem, backend.limits):
        pytest.skip(f"{backend.limits.device} is not of sm_90")
    plan = planning.plan(kernel, problem, backend.limits, **tiles or {})
    given = inputs_of(plan)
    change(given)
    return replayed(backend, plan, given)


def replayed(backend, plan, given):
    arrays = {name: backend.upload(x) for name, x in given.items()}
    for name, (shape, dtype) in {**plan.outputs, **plan.scratch}.items():
        arrays[name] = backend.empty(shape, dtype)
        arrays[name].fill(1)  # flags too: results must not depend on initial contents
    replay(backend, plan, arrays)()
    return plan, {name: backend.download(x) for name, x in arrays.items()}


def require_right(plan, arrays):
    inputs = {name: arrays[name] for name in plan.operation.inputs_of(plan.problem)}
    expected = plan.operation.reference(inputs, plan.problem, (None,))[None]
    verdicts = tolerance.compare({name: arrays[name] for name in plan.outputs}, expected)
    tolerance.require(verdicts, str(plan.problem))


def of_kind(make):
    """Returns a function that replaces Q, K and V with the arrays that `make` returns."""

    def change(given):
        made = make(np.random.default_rng(1), *(given[x] for x in "QKV"))
        given.update({name: F(x) for name, x in zip("QKV", made)})

    return change


def put(name, place, number):
    """Returns a function that sets the elements at `place` in an input to a number."""

    def change(given):
        given[name][place] = number

    return change


def wide(given):
    of_kind(lambda rng, *qkv: [x * parts.power(rng, *x.shape, low=-18, high=18) for x in qkv])(
        given
    )
    for name, places in {"Q": np.s_[..., :3, 1], "K": np.s_[..., 2], "V": np.s_[..., 4]}.items():
        given[name][places] = 0
    given["Q"][0, 0, 5, 0], given["K"][0, 0, 7, 3] = np.nan, np.inf
    given["V"][0, 1, 8, 2] = -np.inf


def of_columns(columns):
    """Returns a mask of the bits that column_bits.cuh defines for an array with these columns."""
    return parts.column_words(np.ones((1, columns)), np.zeros((1, columns)))


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0, 1e-36])
@pytest.mark.parametrize("change", [lambda given: None, wide], ids=["normal", "wide"])
def test_parts_are_those_of_numpy(backend, change, scale):
    sizes = {"batch": 1, "heads": 4, "kv_heads": 2, "M": 19, "N": 150, "d": 21, "dv": 37}
    with np.errstate(over="ignore"):
        plan, arrays = run(backend, change=change, **sizes, scale=scale)
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


def few_values(given):
    """Sets one column of V to a single nonzero value, whose key has a tiny weight.

    The other weights sum to more than the number of keys, because a row maximum between 2^15 and
    2^16 is rounded down.
    """
    Q, K, V = (given[x] for x in "QKV")
    Q[:], K[:] = np.linspace(3e3, 5e3, Q.shape[2])[:, None], 1
    K[:, :, 0], V[..., 3], V[:, :, 0, 3] = 0.998, 0, 1


def hidden(number):
    """Returns a function that sets elements of the last key and value, which causal masks hide."""

    def change(given):
        given["K"][:, :, -1, 3] = given["V"][:, :, -1, 5] = number

    return change


LARGE = {"M": 40, "N": 512, "d": 64}
CAUSAL = {"M": 70, "N": 70, "d": 20, "causal": True}


FLAGS = {
    **{kind: (of_kind(make), LARGE, 0) for kind, make in parts.HELD.items()},
    "causal": (lambda given: None, CAUSAL, 0),
    "one_hot, 8 times": (of_kind(parts.NOT_HELD["one_hot, 8 times"]), LARGE, 0.5),
    "few values": (few_values, {**LARGE, "N": 1024}, 1),
    "NaN": (hidden(np.nan), CAUSAL, 1),
    "infinity": (hidden(np.inf), CAUSAL, 1),
    "-infinity": (hidden(-np.inf), CAUSAL, 1),
    "a large number": (hidden(1e30), CAUSAL, 0.9),
}


@pytest.mark.few(8)
@pytest.mark.parametrize("change, sizes, flagged", FLAGS.values(), ids=FLAGS)
@EACH
def test_flags(backend, kernel, change, sizes, flagged):
    """Requires flags for at least a fraction `flagged` of the rows, or for no row if it is 0."""
    plan, arrays = run(backend, kernel, change, heads=2, **sizes)
    share = (arrays["flags"] == 1).mean()
    assert share >= flagged and (share == 0) == (flagged == 0)
    require_right(plan, arrays)


@EACH
def test_small_values_are_those_of_the_key_head(backend, kernel):
    def few(given):
        given["V"][1, 0, 2:, 3] = 0
        of_kind(parts.cancelling)(given)

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

    def some(given):
        given["Q"][:, :, rng.random(LARGE["M"]) < 0.5, 0] = np.nan

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
    plan, arrays = run(backend, "mma_fp16x2_two_pass", change, **sizes, scale=0.3)
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
        words = arrays["column_bits"].view(np.uint32).reshape(2, 5, 32)[head // 2]
        expected = (k, parts.split(q, k, v, 0.3).K), (q, parts.split(q, k, v, 0.3).Q), (do, own.dO)
        for place, (x, of_x) in zip((0, 1 + head % 2 * 2, 2 + head % 2 * 2), expected):
            mask = of_columns(x.shape[1])
            wanted = parts.column_words(x, of_x.high)
            np.testing.assert_array_equal(words[place] & mask, wanted & mask)
        np.testing.assert_allclose(arrays["delta"][0, head], own.delta, rtol=1e-4, atol=1e-6 * size)
    assert not any(arrays[name].any() for name in ("flags", "dK_flags", "dV_flags"))
    require_right(plan, arrays)


def repeat(name, signs):
    """Returns a function that replaces every second row by signs, [d], times the row before."""

    def change(given):
        x = given[name]
        x[..., 1::2, :] = x[..., ::2, :] * np.resize(F(signs), x.shape[-1])

    return change


def pairs_of_rows(given):
    """Makes pairs of rows whose terms cancel in each sum of dK and dV."""
    repeat("Q", [1])(given), repeat("O", [1])(given), repeat("dO", [-1])(given)
    given["lse"][..., 1::2] = given["lse"][..., ::2]


def pairs_of_keys(given):
    """Makes pairs of keys whose terms cancel in every second column of dQ."""
    put("Q", (..., slice(1, None, 2)), 0)(given)
    repeat("K", [1, -1])(given), repeat("V", [1])(given)


LAST = (0, 0, -1, 3)  # an element of the last key, which only the last query sees
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
    "rows that cancel": (pairs_of_rows, LARGE, (0, 0, 0)),
    "keys that cancel": (pairs_of_keys, LARGE, (0, 0, 0)),
    "rows that cancel, two numbers are small": (
        lambda given: [pairs_of_rows(given), put("dO", (..., [8, 9], 3), 1e-9)(given)],
        LARGE,
        (0, 0, 512),
    ),
    "keys that cancel, two numbers are small": (
        lambda given: [pairs_of_keys(given), put("K", (..., [8, 9], 3), 1e-9)(given)],
        LARGE,
        (40, 0, 0),
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("change, sizes, flagged", CHANGES.values(), ids=CHANGES)
@EACH_BACKWARD
def test_flags_of_gradients(backend, kernel, change, sizes, flagged):
    """Compares the number of flagged rows of each gradient: dQ, dK and dV."""
    plan, arrays = run(backend, kernel, change, **sizes)
    found = tuple((arrays[x] == 1).sum() for x in ("flags", "dK_flags", "dV_flags"))
    assert found == flagged
    require_right(plan, arrays)


@EACH_BACKWARD
def test_keys_without_flags_do_not_depend_on_others(backend, kernel):
    _, alone = run(backend, kernel, **SHARED)
    _, mixed = run(backend, kernel, put("dO", (0, 1, 5, 3), np.nan), **SHARED)
    for name, flags in (("dQ", "flags"), ("dK", "dK_flags"), ("dV", "dV_flags")):
        held = mixed[flags] == 0
        assert 0 < held.sum() < held.size
        np.testing.assert_array_equal(mixed[name][held], alone[name][held])


@pytest.mark.parametrize(
    "kernel", [pytest.param("mma_fp16x2", marks=pytest.mark.slow), "wgmma_fp16x2"]
)
def test_sections_of_keys(backend, tmp_path, kernel):
    """Sections are shortened to 64 keys; visible keys span 4 to 6 of them and start inside one."""
    file, section = "forward/parts/split_f32/sectioned_output.cuh", "constexpr int section = "
    short = changed(tmp_path, kernel, f"{section}8192;", f"{section}64;", file)
    sizes = dict(batch=2, heads=6, kv_heads=2, M=30, N=330, d=8)
    seen = dict(causal=True, window=(250, None), offset=295)
    plan, arrays = run(backend, short, tiles={"Br": 64}, **sizes, **seen)
    packed = {x.launch.entry: x.constants.get("pack_gqa") for x in plan.launches}
    assert packed[kernel] == (3 if kernel == "mma_fp16x2" else 1)
    assert not arrays["flags"].any()
    require_right(plan, arrays)


@pytest.mark.gpu
@EACH
@pytest.mark.parametrize("d", [64, 128, 256])
def test_long_sums_on_tensor_cores(cuda, kernel, d):
    """Sums truncated by tensor cores would be off by 11 times the bound."""
    plan, arrays = run(cuda, kernel, of_kind(parts.HELD["uniform"]), heads=1, M=128, N=65536, d=d)
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
    """Long sums of positive numbers stay accurate, although tensor cores truncate.

    Two runs return equal bits.
    """
    _, forward = run(cuda, change=of_kind(parts.HELD["uniform"]), heads=1, M=M, N=N, d=d)

    def change(given):
        given.update({name: forward[name] for name in ("Q", "K", "V", "O", "lse")})
        given["dO"] = np.random.default_rng(1).random(given["dO"].shape, F)

    plan, arrays = run(cuda, kernel, change, heads=1, M=M, N=N, d=d)
    require_right(plan, arrays)
    for name in ("flags", "dK_flags", "dV_flags"):
        assert arrays[name].mean() < 0.001, "few rows, by chance"
    _, again = run(cuda, kernel, change, heads=1, M=M, N=N, d=d)
    for name in plan.outputs:
        np.testing.assert_array_equal(arrays[name], again[name])
