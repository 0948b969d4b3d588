"""Attention of JAX arrays under JAX's transformations, compared with attention written in JAX."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers.cli import table
from numpy.testing import assert_array_equal

import cupyfa
from cupyfa import Dropout, Packed, Padded, Unsupported

jax = pytest.importorskip("jax")

from jax import numpy as jnp  # noqa: E402  # after the check for JAX
from jax.test_util import check_grads  # noqa: E402

from cupyfa.jax import attention  # noqa: E402

B, H, KV, M, N, D = 2, 4, 2, 9, 13, 8
RATE, KEY = 0.25, 5
rng = np.random.default_rng(0)
Q, K, V = (rng.standard_normal((B, h, n, D)) for h, n in ((H, M), (KV, N), (KV, N)))
DOUT, DLSE = rng.standard_normal(Q.shape), rng.standard_normal(Q.shape[:-1])
POSITION, COLUMN = np.arange(M)[:, None] + N - M, np.arange(N)
SLOPES, SINK, MASK = 0.5 ** np.arange(H), rng.standard_normal(H), rng.random((B, 1, M, N)) < 0.7
BIAS, TABLE = rng.standard_normal((H, M, N)), rng.standard_normal((H, M + N))
DOCUMENT = np.arange(M + N) // 5
LENGTHS = np.array([[M, 4], [6, N]], np.int32)
MASK[..., 0] = True

# Numbers, arrays by the names of attention or as captured arrays, and what JAX adds to the scores.
CASES = {
    "plain": ({}, {}, lambda s, x: s),
    "causal": ({"causal": True}, {}, lambda s, x: jnp.where(COLUMN <= POSITION, s, -jnp.inf)),
    "window": (
        {"window": (3, 2)},
        {},
        lambda s, x: jnp.where((COLUMN >= POSITION - 3) & (COLUMN <= POSITION + 2), s, -jnp.inf),
    ),
    "softcap": ({"softcap": 2.0}, {}, lambda s, x: 2 * jnp.tanh(s / 2)),
    "score_mod": (
        {"score_mod": "score + table[head, abs(position - key)]"},
        {"table": TABLE},
        lambda s, x: s + x["table"][:, np.abs(POSITION - COLUMN)],
    ),
    "mask_mod": (
        {"mask": "document[query] == document[key]"},
        {"document": DOCUMENT},
        lambda s, x: jnp.where(x["document"][:M, None] == x["document"][None, :N], s, -jnp.inf),
    ),
    "mask": ({}, {"mask": MASK}, lambda s, x: jnp.where(x["mask"], s, -jnp.inf)),
    "bias": ({}, {"bias": BIAS}, lambda s, x: s + x["bias"]),
    "alibi": (
        {},
        {"alibi_slopes": SLOPES},
        lambda s, x: s - x["alibi_slopes"][:, None, None] * np.abs(POSITION - COLUMN),
    ),
    "sink": ({}, {"sink": SINK}, lambda s, x: s),
    "dropout": ({"dropout": RATE}, {}, lambda s, x: s),
}
OWN = {"mask", "bias", "alibi_slopes", "sink"}


@pytest.fixture(autouse=True)
def x64():
    """Globally, since callbacks run in other threads."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def ours(backend, numbers, q, k, v, arrays, **how):
    numbers = dict(numbers)
    if "dropout" in numbers:
        numbers["dropout"] = Dropout(RATE, jax.random.key(KEY))
    own = {x: y for x, y in arrays.items() if x in OWN}
    captured = {x: y for x, y in arrays.items() if x not in OWN}
    return attention(q, k, v, backend=backend, captured=captured, **numbers, **own, **how)


def kept_weights():
    with jax.ensure_compile_time_eval():
        words = np.asarray(jax.random.bits(jax.random.key(KEY), (2,), np.uint32))
    seed = int(words.view(np.uint64)[0])
    return cupyfa.dropout_mask(Dropout(RATE, seed), batch=B, heads=H, M=M, N=N)


def of_jax(case, q, k, v, arrays):
    """Returns out and lse of attention written in JAX."""
    numbers, _, modified = CASES[case]
    k, v = (jnp.repeat(x, H // KV, 1) for x in (k, v))
    s = modified(q @ k.mT * D**-0.5, arrays)
    if "sink" in arrays:
        sink = jnp.broadcast_to(arrays["sink"][:, None, None], (B, H, M, 1))
        s = jnp.concatenate([s, sink], -1)
    lse = jax.nn.logsumexp(s, -1)
    p = jnp.exp(s - lse[..., None])[..., :N]
    if "dropout" in numbers:
        p = jnp.where(kept_weights(), p / (1 - RATE), 0)
    return p @ v, lse


def total(found):
    out, lse = found
    return (out * DOUT).sum() + (lse * DLSE).sum()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "backend",
    [
        "reference",
        pytest.param("simulator", marks=pytest.mark.slow),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def test_values_and_gradients_are_those_of_jax(case, backend):
    numbers, arrays, _ = CASES[case]
    floats = {x: y for x, y in arrays.items() if y.dtype.kind == "f"}
    others = {x: y for x, y in arrays.items() if x not in floats}

    def mine(q, k, v, some):
        return total(ours(backend, numbers, q, k, v, {**some, **others}, return_lse=True))

    def theirs(q, k, v, some):
        return total(of_jax(case, q, k, v, {**some, **others}))

    found, expected = (
        jax.jit(jax.value_and_grad(f, (0, 1, 2, 3)))(Q, K, V, floats) for f in (mine, theirs)
    )
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", ["causal", "bias", "sink"])
def test_gradients_are_finite_differences(case):
    numbers, arrays, _ = CASES[case]

    def f(q, k, v, some):
        return total(ours("reference", numbers, q, k, v, some, return_lse=True))

    check_grads(f, (Q, K, V, dict(arrays)), order=1, modes=["rev"])


def test_arrays_without_a_gradient_get_none():
    """The gradient of lse alone, and of q alone, with other arrays that are not differentiated."""

    def f(q):
        return attention(q, K, V, bias=BIAS, return_lse=True)[1].sum()

    found = jax.grad(f)(Q)
    expected = jax.grad(lambda q: of_jax("bias", q, K, V, {"bias": BIAS})[1].sum())(Q)
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_results_have_the_dtype_of_q(dtype):
    q, k, v = (jnp.asarray(x, dtype) for x in (Q, K, V))
    out, lse = attention(q, k, v, return_lse=True)
    exact, _ = of_jax("plain", *(x.astype("float64") for x in (q, k, v)), {})
    assert out.dtype == dtype and lse.dtype == ("float64" if dtype == "float64" else "float32")
    bound = jnp.finfo(dtype).eps / 2 * abs(exact) + 1e-12  # the reference rounds once
    assert (abs(out.astype("float64") - exact) <= bound).all()
    (dq,) = jax.vjp(lambda q: attention(q, k, v), q)[1](out)
    assert dq.dtype == dtype


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("axes", [2, 3, 4, 5])
def test_shapes_are_those_of_cupyfa(layout, axes):
    shape = (1, 2, 5, 3, 4)[5 - axes :]
    q = rng.standard_normal(shape)
    found = attention(q, q, q, layout=layout, return_lse=True, causal=True)
    how = {"kernel": "fa2", "backend": "simulator"}
    expected = cupyfa.attention(q, q, q, layout=layout, return_lse=True, causal=True, **how)
    for a, b in zip(found, expected):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, atol=1e-12)


# Transformations


def stacked(x, times=3):
    return rng.standard_normal((times, *np.shape(x)))


VMAPS = {
    "q, k and v": ({}, {}, ()),
    "bias": ({}, {"bias": BIAS}, ("bias",)),
    "bias for all": ({}, {"bias": BIAS}, ()),
    "sink": ({}, {"sink": SINK}, ("sink",)),
    "slopes": ({"causal": True}, {"alibi_slopes": SLOPES}, ("alibi_slopes",)),
    "captured": (CASES["score_mod"][0], {"table": TABLE}, ("table",)),
    "captured for all": (CASES["score_mod"][0], {"table": TABLE}, ()),
    "batch in an expression": ({"score_mod": "score * (1 + batch)"}, {}, ()),
    "batch in an index": (
        {"score_mod": "score + table[batch, head] * shift[key]"},
        {"table": rng.standard_normal((B, H)), "shift": rng.standard_normal(N)},
        ("table",),
    ),
    "dropout": ({"dropout": RATE}, {}, ()),
}


@pytest.mark.parametrize("case", VMAPS)
def test_vmap_equals_a_loop(case):
    numbers, arrays, varying = VMAPS[case]
    fixed = {x: y for x, y in arrays.items() if x not in varying}
    some = {x: stacked(arrays[x]) for x in varying}
    many = stacked(Q), stacked(K), stacked(V), some, stacked(DOUT)

    def f(q, k, v, some, dout):
        def g(q, k, v, some, fixed):
            return ours("reference", numbers, q, k, v, {**some, **fixed})

        out, pull = jax.vjp(g, q, k, v, some, fixed)
        return out, pull(dout)

    found = jax.jit(jax.vmap(f))(*many)
    expected = [f(*jax.tree.map(lambda x: x[i], many)) for i in range(3)]  # noqa: B023
    expected = jax.tree.map(lambda *x: np.stack(x), *expected)
    (out, (*of_qkv, some, fixed)), (its_out, (*its_qkv, its_some, its_fixed)) = found, expected
    for a, b in zip((out, *of_qkv), (its_out, *its_qkv), strict=True):
        assert_array_equal(a, b)
    for a, b in zip(*map(jax.tree.leaves, ((some, fixed), (its_some, its_fixed))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-13)  # sums in another order


def test_vmap_of_some_arrays_equals_a_loop():
    f = partial(attention, causal=True)
    many = stacked(Q)
    assert_array_equal(jax.vmap(f, (0, None, None))(many, K, V), [f(q, K, V) for q in many])
    q, k, v = map(stacked, (Q, K, V))
    twice = jax.vmap(jax.vmap(f))(q, k, v)  # of arrays [heads, rows, d]
    assert_array_equal(twice, jax.vmap(f)(q, k, v))


@pytest.mark.parametrize("loops", [False, True])
def test_vmap_has_a_loop_only_where_it_must(loops):
    how = {"dropout": Dropout(RATE, 1)} if loops else {"causal": True}
    f = jax.vmap(partial(attention, **how))
    text = str(jax.make_jaxpr(f)(stacked(Q), stacked(K), stacked(V)))
    assert ("scan" in text) is loops


def test_checkpoint_and_scan():
    def f(q):
        def layer(x, _):
            return attention(x, K, V, causal=True) + x, None

        return jax.lax.scan(jax.checkpoint(layer), q, None, length=3)[0].sum()

    def g(q):
        for _ in range(3):
            q = of_jax("causal", q, K, V, {})[0] + q
        return q.sum()

    np.testing.assert_allclose(jax.grad(f)(Q), jax.grad(g)(Q), atol=1e-10)


def test_donated_buffers_and_other_shapes():
    f = jax.jit(partial(attention, causal=True), donate_argnums=0)
    for rows in (M, 5, M):
        q = jnp.asarray(Q[:, :, :rows])
        expected = attention(q, K, V, causal=True)
        assert_array_equal(f(q + 0, K, V), expected)


def test_threads_trace_and_call():
    shapes = [(1, rows, 8) for rows in range(1, 9)]

    def run(shape):
        x = jnp.asarray(np.ones(shape))
        return np.asarray(jax.jit(partial(attention, causal=True))(x, x, x))

    with ThreadPoolExecutor(8) as threads:
        for shape, out in zip(shapes, threads.map(run, shapes)):
            np.testing.assert_allclose(out, np.ones(shape), rtol=1e-15)


# Sequences


def padded(q, k, v, lengths):
    rows, keys = lengths
    return attention(Padded(q, rows), Padded(k, keys), Padded(v, keys))


@pytest.mark.parametrize("traced", [False, True])
def test_padded_batches(traced):
    f = jax.jit(padded) if traced else padded
    out = f(Q, K, V, LENGTHS)
    for i, (m, n) in enumerate(LENGTHS.T):
        alone = attention(Q[i, :, :m], K[i, :, :n], V[i, :, :n])
        np.testing.assert_allclose(out[i, :, :m], alone, atol=1e-12)
        assert not out[i, :, m:].any()


def test_vmap_of_padded_batches():
    many = stacked(Q), stacked(K), stacked(V)
    found = jax.vmap(partial(padded, lengths=LENGTHS))(*many)
    assert_array_equal(found, [padded(*x, LENGTHS) for x in zip(*many)])


def test_packed_sequences_and_their_gradients():
    q, k, v = (x.swapaxes(1, 2).reshape(-1, x.shape[1], D) for x in (Q, K, V))
    starts, ends = np.array([0, 5, 2 * M], np.int32), np.array([0, 9, 2 * N], np.int32)

    def packed(q, k, v, starts, ends):
        return attention(Packed(q, starts), Packed(k, ends), Packed(v, ends), causal=True)

    def apart(q, k, v):
        parts = [
            attention(q[a:b], k[c:d], v[c:d], causal=True, layout="bshd")
            for a, b, c, d in zip(starts, starts[1:], ends, ends[1:])
        ]
        return jnp.concatenate(parts)

    (out, pull), (expected, theirs) = (
        jax.vjp(f, q, k, v) for f in (lambda *x: jax.jit(packed)(*x, starts, ends), apart)
    )
    np.testing.assert_allclose(out, expected, atol=1e-12)
    for a, b in zip(pull(out), theirs(out)):
        np.testing.assert_allclose(a, b, atol=1e-12)


# Errors, which are raised while a program is traced


@pytest.mark.parametrize(("given", "error", "words"), table("jax_arrays/bad_calls.txt"))
def test_errors_are_raised_while_tracing(given, error, words):
    arguments = {"q": Q, "k": K, "v": V, **eval(f"dict({given})")}
    with pytest.raises(eval(error), match=".*".join(words)):
        jax.make_jaxpr(lambda: attention(**arguments))()


def test_attention_of_traced_arrays_names_the_function_for_jax():
    q = jnp.ones((5, 8))
    for transformed in (jax.jit(cupyfa.attention), jax.vmap(cupyfa.attention)):
        with pytest.raises(TypeError, match=r"Tracer; inside of jax\.jit .*jax\.attention"):
            transformed(q, q, q)


def test_a_traced_number_is_refused():
    def f(x):
        return attention(Q, K, V, score_mod="score * x", captured={"x": x})

    with pytest.raises(TypeError, match="captured x is a traced number"):
        jax.jit(f)(2.0)
    assert f(2.0).shape == Q.shape


def test_captured_arrays_may_have_names_of_arguments_without_gradients():
    def f(k):
        return attention(Q, K, V, score_mod="score + k[head]", captured={"k": k}).sum()

    assert_array_equal(f(SINK), attention(Q, K, V, bias=SINK[:, None, None]).sum())
    assert jax.vmap(f)(stacked(SINK)).shape == (3,)
    with pytest.raises(Unsupported, match="captured k is differentiated"):
        jax.grad(f)(SINK)


def test_lengths_with_known_values_are_checked():
    with pytest.raises(ValueError, match=r"q.lengths\[1\] is 99, but batch element 1 has 9 rows"):
        padded(Q, K, V, np.array([[1, 99], [1, 1]]))


def test_empty_arrays_have_empty_or_zero_results():
    assert attention(Q[:0], K[:0], V[:0]).shape == (0, H, M, D)
    out, lse = attention(Q, K[:, :, :0], V[:, :, :0], return_lse=True)
    assert not out.any() and (lse == -jnp.inf).all()


# On a GPU, by kernels on tensor cores


def draw(dtype, rows=200, columns=64):
    return (
        jax.random.normal(jax.random.key(i), (2, 4, rows, columns), "float32").astype(dtype)
        for i in range(3)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("columns", [64, 60])
def test_the_gpu_has_the_bits_of_calls_outside_of_jit(dtype, columns):
    q, k, v = draw(dtype, columns=columns)
    how = {"causal": True, "deterministic": True}

    def f(q, k, v):
        out, pull = jax.vjp(partial(attention, **how), q, k, v)
        return out, *pull(out)

    out, pull = cupyfa.vjp(q, k, v, **how)
    for a, b in zip(jax.jit(f)(q, k, v), (out, *pull(out)), strict=True):
        assert_array_equal(np.asarray(a), cupy_to_numpy(b))


def cupy_to_numpy(array):
    return np.asarray(jax.dlpack.from_dlpack(array))


@pytest.mark.gpu
def test_command_buffers_are_replayed_on_other_buffers():
    def f(q, k, v):
        for _ in range(4):
            q = q + attention(q, k, v, causal=True)
        return q

    lowered = jax.jit(f).lower(*draw("float16"))
    recorded = lowered.compile(compiler_options={"xla_gpu_graph_min_graph_size": 1})
    apart = lowered.compile(compiler_options={"xla_gpu_graph_min_graph_size": 100_000})
    for factor in range(1, 6):
        arrays = [factor * x for x in draw("float16")]
        assert_array_equal(np.asarray(recorded(*arrays)), np.asarray(apart(*arrays)))


@pytest.mark.gpu
def test_threads_and_other_devices_have_equal_bits():
    f = jax.jit(partial(attention, causal=True))
    arrays = [*draw("float16")]
    expected = np.asarray(f(*arrays))
    places = jax.devices() * 8

    def run(device):
        return np.asarray(f(*jax.device_put(arrays, device)))

    with ThreadPoolExecutor(8) as threads:
        for out in threads.map(run, places):
            assert_array_equal(out, expected)


# Several devices


@pytest.mark.slow
def test_shard_map_over_batch_and_heads_equals_one_device():
    """In another process, because XLA makes its devices once."""
    code = """
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
from cupyfa.jax import attention
from jax.sharding import PartitionSpec as P

q, k, v = (jax.random.normal(jax.random.key(i), (2, 4, 9, 8)) for i in range(3))
f = lambda *x: attention(*x, causal=True)
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
for spec in (P("x"), P(None, "x")):
    split = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)
    loss = lambda g: lambda *x: (g(*x) ** 2).sum()
    for g, h in ((f, split), *((jax.grad(loss(x), (0, 1, 2)) for x in y) for y in [(f, split)])):
        for a, b in zip(*map(jax.tree.leaves, (g(q, k, v), jax.jit(h)(q, k, v)))):
            np.testing.assert_array_equal(a, b)
"""
    environment = dict(os.environ, PYTHONPATH=str(Path(cupyfa.__file__).parents[1]))
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)
