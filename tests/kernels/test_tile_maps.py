"""Block masks in kernels: results match the same mask without a map; empty tiles are skipped."""

import numpy as np
import pytest
from helpers.problems import PAIRED, able, drawn, qkv, usual_first

import cupyfa
from cupyfa.arrays import block_mask
from cupyfa.lab.bench.sweeps import usual_dtype
from cupyfa.ladder.kernel import Launch

M, N = 150, 170
RNG = np.random.default_rng(0)
DOC = np.sort(RNG.integers(0, 6, N))
DOCUMENTS = cupyfa.block_mask(
    mask_mod="doc[query] == doc[key] and key <= position",
    captured={"doc": DOC},
    M=M,
    N=N,
    backend="simulator",
)
OF_DOCUMENTS = {"mask": DOCUMENTS.text.text, "captured": {"doc": DOC}}
OF_HEADS = cupyfa.block_mask(
    mask_mod="(key // 16 + head) % 3 == 0 and query >= 64",
    heads=4,
    M=M,
    N=N,
    backend="simulator",
)
KERNELS = able("places")
# Index of the case that each of these kernels runs by default.
FAST = {"mma_pipelined": 1, "wgmma_persistent": 1, "mma_columns": 0, "wgmma_columns": 1}
CASES = [
    pytest.param(kernel, mask, how, id=f"{kernel.name}-{at}", marks=mark)
    for kernel in KERNELS
    for at, (mask, how) in enumerate(
        (
            (DOCUMENTS, {}),
            (OF_HEADS, {"window": (50, None), "mask": "key != 7", "bias": "11mn"}),
            (DOCUMENTS, {"causal": "top-left", "sink": "h", "score_mod": "score * 1.5"}),
            (OF_HEADS, {"scale": -0.3}),
        )
    )
    for mark in [[pytest.mark.slow] * (FAST.get(kernel.name) != at or kernel.name in PAIRED)]
]


def walks(plan):
    """Returns whether all launches of a plan that support tile maps use them."""
    found = [
        x.constants[f"has_{map_name}"]
        for x in plan.launches
        for map_name in (x.launch.walks if isinstance(x.launch, Launch) else ())
    ]
    return bool(found) and all(found)


def inputs_of_call(kernel):
    dtype = usual_dtype(kernel).replace("bfloat16", "float16")
    return qkv(M, N, dtype, batch=1)


def arrays_of(how):
    made = {"bias": RNG.standard_normal((M, N)), "sink": RNG.standard_normal(4)}
    return {x: made[x].astype(np.float32) if x in made else value for x, value in how.items()}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kernel, mask, how", CASES)
def test_the_results_are_those_of_the_mask(backend, kernel, mask, how):
    q, k, v = inputs_of_call(kernel)
    how = arrays_of(how) | {"backend": backend}
    mask = (mask, how.pop("mask")) if "mask" in how else mask
    if kernel.operation == "forward":
        cupyfa.attention(q, k, v, mask=mask, kernel=kernel.name, check=True, **how)
        return
    if kernel.operation == "tangent":
        how |= {"tangents": (q, v, k), "kernel": kernel.name}
        cupyfa.jvp(q, k, v, mask=mask, check=True, **how)
        return
    out, lse = cupyfa.attention(q, k, v, mask=mask, kernel="auto", return_lse=True, **how)
    dout, how = RNG.standard_normal(out.shape).astype(q.dtype), {**how, "kernel": kernel.name}
    cupyfa.backward(dout, q, k, v, out, lse, mask=mask, check=True, **how)


PERSISTENT = ("wgmma_persistent", "wgmma_fp16x2")  # their row tiles have at least one tile of keys


@pytest.mark.parametrize(
    "kernel",
    usual_first(
        (k for k in KERNELS if any(isinstance(x, Launch) and x.walks for x in k.launches)), FAST
    ),
)
def test_empty_tiles_are_not_visited(backend, kernel, monkeypatch):
    """If the map declares all tiles empty, all rows are empty, whatever the expression says."""
    monkeypatch.setattr(
        block_mask.BlockMask,
        "_states",
        lambda mask, at, sums, rows, keys, _: np.zeros(
            (1, 1, -(-M // rows), -(-N // keys)), np.uint8
        ),
    )
    mask = cupyfa.block_mask(mask_mod="doc[key] >= 0", captured={"doc": DOC}, M=M, N=N)
    q, k, v = inputs_of_call(kernel)
    how = {"mask": mask, "kernel": kernel.name, "backend": backend}
    if kernel.operation == "forward":
        prepared = cupyfa.compile(q, k, v, return_lse=True, **how)
        out, lse = prepared(q, k, v)
        results = (out,)
        assert kernel.name in PERSISTENT or np.isneginf(lse).all()
    elif kernel.operation == "tangent":
        (out, lse), (d_out, _) = cupyfa.jvp(q, k, v, tangents=(q, k, v), **how)
        assert np.isneginf(lse).all() and not out.any() and not d_out.any()
        return
    else:
        lse = np.zeros(q.shape[:-1], np.promote_types(q.dtype, np.float32))
        prepared = cupyfa.compile(q, q, k, v, q, lse, **how)
        results = prepared(q, q, k, v, q, lse)
    assert walks(prepared.plan)
    if kernel.name not in PERSISTENT:
        assert not any(x.any() for x in results)


def test_packed_heads_evaluate_the_mask_in_all_tiles(backend):
    q, k, v = qkv(20, 20, "float16", batch=1)
    mask = cupyfa.block_mask(mask_mod="key <= query", M=20, N=20)
    prepared = cupyfa.compile(q, k, v, mask=mask, kernel="mma_pipelined", backend=backend)
    assert not walks(prepared.plan)
    expected = cupyfa.attention(q, k, v, causal=True, kernel="mma_pipelined", backend=backend)
    np.testing.assert_allclose(prepared(q, k, v), expected, atol=2e-3)


def test_the_map_is_kept_and_calls_are_repeated(backend, monkeypatch):
    found = []
    map_of = block_mask.map_of
    monkeypatch.setattr(block_mask, "map_of", lambda *given: found.append(1) or map_of(*given))
    q, k, v = drawn((2, M, 24), (2, N, 24), (2, N, 24))
    mask = cupyfa.block_mask(mask_mod="key <= position", M=M, N=N)
    how = {"mask": mask, "kernel": "fa2", "backend": backend}
    first, again = (cupyfa.attention(q, k, v, **how) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    made = cupyfa.compile((2, M, 24), (2, N, 24), (2, N, 24), dtype="float32", **how)
    if backend.name == "simulator":
        np.testing.assert_array_equal(made(q, k, v), first)
    assert len(found) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["two_pass", "mma_columns", "wgmma_columns"])
def test_the_gradient_of_a_bias_under_a_block_mask(backend, kernel):
    of = next(k for k in KERNELS if k.name == kernel)
    q, k, v = inputs_of_call(of)
    how = {"bias": RNG.standard_normal((4, M, N)), "wrt": ("bias", "k"), "backend": backend}
    how |= {"kernel": "fa2" if kernel == "two_pass" else "auto", "backward_kernel": kernel}
    dout = RNG.standard_normal(q.shape).astype(q.dtype)
    (bias, _), (same, _) = (
        cupyfa.vjp(q, k, v, **how, **mask)[1](dout)
        for mask in ({"mask": DOCUMENTS, "check": True}, OF_DOCUMENTS)
    )
    np.testing.assert_array_equal(bias, same)
    assert (bias[:, DOC[:M, None] != DOC] == 0).all() and bias.any()


def test_gradients_by_a_pullback(backend):
    q, k, v = (RNG.standard_normal((2, n, 8)) for n in (20, 30, 30))
    mask = cupyfa.block_mask(np.tri(20, 30, 5, dtype=bool))
    how = {"backend": backend, "kernel": "fa2", "backward_kernel": "two_pass"}
    out, pullback = cupyfa.vjp(q, k, v, mask=mask, **how)
    same, plain = cupyfa.vjp(q, k, v, mask=np.tri(20, 30, 5, dtype=bool), **how)
    np.testing.assert_array_equal(out, same)
    for x, y in zip(pullback(out), plain(out)):
        np.testing.assert_allclose(x, y, rtol=1e-12)
