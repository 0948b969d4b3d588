"""Modified scores, gradients and decoding, compared with onnx's evaluator and JAX."""

import numpy as np
import pytest

import cupyfa

pytestmark = pytest.mark.slow
rng = np.random.default_rng(0)
HEADS, KV_HEADS, M, N, D = 4, 2, 9, 13, 16  # sqrt(scale) = 1/2 is exact in onnx's float32
Q, K, V = (rng.standard_normal((2, h, n, D)) for h, n in ((HEADS, M), (KV_HEADS, N), (KV_HEADS, N)))
BIAS, MASK = rng.standard_normal((HEADS, M, N)), rng.random((2, 1, M, N)) < 0.8
MASK[..., 0] = True
SLOPES, SINK = 0.5 ** np.arange(HEADS), rng.standard_normal(HEADS)
OPSET = 24  # RotaryEmbedding-23, Attention-24, TensorScatter-24
ON = {"backend": "simulator", "kernel": "fa2"}


@pytest.mark.parametrize(
    "ours, mask, theirs",
    [
        ({"bias": BIAS}, BIAS[None], {}),
        ({"mask": MASK}, MASK, {}),
        ({"causal": "top-left"}, None, {"is_causal": 1}),
        ({"softcap": 0.75, "bias": BIAS}, BIAS[None], {"softcap": 0.75}),
    ],
    ids=["bias", "mask", "causal", "softcap and bias"],
)
def test_onnx(ours, mask, theirs):
    expected = of_onnx("Attention", Q, K, V, mask, scale=D**-0.5, **theirs)
    np.testing.assert_allclose(cupyfa.attention(Q, K, V, **ours, **ON), expected, atol=1e-12)


def of_onnx(operator, *inputs, **attributes):
    """Runs an onnx operator on float64 arrays; None is an omitted input."""
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    if (has := onnx.defs.onnx_opset_version()) < OPSET:
        pytest.skip(f"onnx {onnx.__version__} has opset {has}, and {operator} is of opset {OPSET}")
    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
    arrays = {name: x for name, x in zip(names, inputs) if name}
    node = helper.make_node(operator, names, ["Y"], **attributes)
    kinds = {"f": TensorProto.DOUBLE, "b": TensorProto.BOOL, "i": TensorProto.INT64}
    values = [
        helper.make_tensor_value_info(name, kinds[x.dtype.kind], x.shape)
        for name, x in arrays.items()
    ]
    output = helper.make_tensor_value_info("Y", TensorProto.DOUBLE, None)
    model = helper.make_model(
        helper.make_graph([node], operator, values, [output]),
        opset_imports=[helper.make_opsetid("", OPSET)],
    )
    return ReferenceEvaluator(model).run(None, arrays)[0]


BATCH, CAPACITY, TOKENS, ANGLES = 3, 24, 3, 5
LENGTHS = np.array([0, 7, CAPACITY - TOKENS])


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("options", [{}, {"softcap": 0.75}], ids=["plain", "softcap"])
def test_decoding_of_onnx(options, interleaved):
    """Applies RotaryEmbedding to queries and keys, TensorScatter to the cache, then Attention."""
    q = rng.standard_normal((BATCH, HEADS, TOKENS, D))
    k, v = rng.standard_normal((2, BATCH, KV_HEADS, CAPACITY, D))
    new_k, new_v = rng.standard_normal((2, BATCH, KV_HEADS, TOKENS, D))
    angles = rng.uniform(-7, 7, (CAPACITY, ANGLES))
    rotary = np.cos(angles), np.sin(angles)
    places = LENGTHS[:, None] + np.arange(TOKENS)

    def turned(x):
        how = {"interleaved": int(interleaved), "rotary_embedding_dim": 2 * ANGLES}
        return of_onnx("RotaryEmbedding", x, *rotary, places, **how)

    keys, values = (
        of_onnx("TensorScatter", old, new, LENGTHS, axis=2)
        for old, new in ((k, turned(new_k)), (v, new_v))
    )
    seen = np.arange(CAPACITY) <= places[:, None, :, None]  # causal, bottom-right
    how = {"scale": D**-0.5, **options}
    expected = of_onnx("Attention", turned(q), keys, values, seen, **how)

    turning = cupyfa.Rotary(*rotary, interleaved=interleaved)
    cache = cupyfa.KVCache(k.copy(), v.copy(), LENGTHS.astype("i4"), rotary=turning)
    out = cupyfa.attention(q, cache, append=(new_k, new_v), **options, **ON)
    np.testing.assert_allclose(cache.k, keys, atol=1e-14)
    np.testing.assert_array_equal(cache.v, values)
    np.testing.assert_allclose(out, expected, atol=1e-12)


def test_lengths_of_onnx():
    """Decodes one new token per sequence; nonpad_kv_seqlen counts its keys."""
    q = rng.standard_normal((BATCH, HEADS, 1, D))
    k, v = rng.standard_normal((2, BATCH, KV_HEADS, CAPACITY, D))
    used = LENGTHS + 1
    given = None, None, None, used  # attn_mask, past_key, past_value
    expected = of_onnx("Attention", q, k, v, *given, scale=D**-0.5)
    cache = cupyfa.KVCache(k, v, used.astype("i4"), layout="bhsd")
    np.testing.assert_allclose(cupyfa.attention(q, cache, **ON), expected, atol=1e-12)


@pytest.fixture
def jax():
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        yield jax


@pytest.mark.parametrize(
    "ours, theirs",
    [
        ({"bias": BIAS, "mask": MASK}, {"bias": BIAS[None], "mask": MASK}),
        ({"causal": "top-left", "window": (3, None)}, {"is_causal": True, "local_window_size": 3}),
    ],
    ids=["bias and mask", "window"],
)
def test_attention_of_jax(jax, ours, theirs):
    q, k, v = (x.swapaxes(1, 2) for x in (Q, K, V))
    expected = jax.nn.dot_product_attention(q, k, v, **theirs)
    out = cupyfa.attention(q, k, v, layout="bshd", **ours, **ON)
    np.testing.assert_allclose(out, expected, atol=2e-6)  # JAX computes the softmax in float32


def test_gradients_of_jax(jax):
    """Combines all options, including a gradient of lse; JAX differentiates."""
    jnp = jax.numpy
    head = np.arange(HEADS)[:, None, None]
    position, key = np.arange(M)[:, None] + N - M, np.arange(N)
    document = rng.integers(0, 3, N)
    text = "score * (1 + 0.1 * sin(score)) if key % 2 == 0 else log1p(exp(score))"

    def attention(q, k, v):
        k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=1) for x in (k, v))
        S = 2 * jnp.tanh(q @ k.swapaxes(2, 3) * D**-0.5 / 2)
        S = jnp.where(key % 2 == 0, S * (1 + 0.1 * jnp.sin(S)), jnp.log1p(jnp.exp(S)))
        S = S - SLOPES[head] * abs(position - key) + BIAS
        S = jnp.where(MASK & (document[position] == document[key]), S, -jnp.inf)
        S = jnp.concatenate([S, jnp.broadcast_to(SINK[head], (*S.shape[:3], 1))], axis=3)
        lse = jax.nn.logsumexp(S, axis=3)
        return jnp.exp(S[..., :-1] - lse[..., None]) @ v, lse

    how = {"softcap": 2.0, "score_mod": text, "alibi_slopes": SLOPES, "bias": BIAS}
    how |= {
        "mask": (MASK, "doc[position] == doc[key]"),
        "captured": {"doc": document},
        "sink": SINK,
    }
    ours, pullback = cupyfa.vjp(
        *(Q, K, V), **how, **ON, backward_kernel="two_pass", return_lse=True
    )
    theirs, derivative = jax.vjp(attention, Q, K, V)
    steps = rng.standard_normal((2, HEADS, M, D)), rng.standard_normal((2, HEADS, M))
    for mine, expected in zip((*ours, *pullback(*steps)), (*theirs, *derivative(steps))):
        np.testing.assert_allclose(mine, expected, atol=1e-10)
