"""Row maxima of the scores, which every rung from fa2 on returns in addition to out and lse."""

from itertools import pairwise

import numpy as np
import pytest
from helpers.problems import FORWARD, able, qkv, usual_first

import cupyfa
from cupyfa.lab.bench.sweeps import usual_dtype
from cupyfa.problem.structured_arrays import wrap

F = np.float32
ABLE = able("row_max", "forward")
SINKS = np.array([6.0, -np.inf, 0.5, -2.0], F)  # the first sink exceeds all scores
BIAS = np.random.default_rng(3).standard_normal((1, 4, 70, 45)).astype(F)
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], F)
# The first 25 rows see no key.
CAUSAL = {"M": 70, "N": 45, "causal": True}
PLAIN = (CAUSAL, {"M": 3, "N": 170, "scale": -0.3})
MODIFIED = (
    {**CAUSAL, "sink": SINKS},
    {**CAUSAL, "softcap": 2.0, "alibi_slopes": SLOPES},
    {"M": 70, "N": 45, "bias": BIAS, "mask": BIAS > 0},
    {"M": 67, "N": 131, "window": (20, 3), "score_mod": "score - 0.1 * key"},
    {"M": 3, "N": 170, "mask": "key > 200 * (query % 2)", "sink": SINKS},
    {"M": 40, "N": 60, "dropout": cupyfa.Dropout(0.25, 7), "scale": 2.0},
    {"M": 5, "N": 0, "sink": SINKS},
    {"M": 70, "N": 90, "lengths_q": [70, 7], "lengths_k": [0, 81]},
)


def checked(kernel, backend, *, M, N, dtype=None, size=1.0, **how):
    lengths = {name: how.pop(name) for name in ("lengths_q", "lengths_k") if name in how}
    q, k, v = qkv(M, N, dtype or usual_dtype(kernel))
    q, k, v = wrap(*(q.dtype.type(size) * x for x in (q, k, v)), lengths)
    how = {"kernel": kernel, "backend": backend, "check": True, **how}
    return cupyfa.attention(q, k, v, return_lse=True, return_max=True, **how)


def exact(q, k, *, causal=False, scale=None):
    """Computes the row maxima of scores with NumPy."""
    q, k = q.astype(np.float64), k.astype(np.float64).repeat(q.shape[1] // k.shape[1], axis=1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    M, N = scores.shape[2:]
    seen = np.arange(N) <= np.arange(M)[:, None] + N - M
    return np.where(seen | (not causal), scores, -np.inf).max(-1, initial=-np.inf)


@pytest.mark.parametrize("how", PLAIN, ids=str)
@pytest.mark.parametrize("kernel", usual_first(ABLE))
def test_every_rung_gives_the_largest_scores(backend, kernel, how):
    _, lse, largest = checked(kernel, backend, **how)
    assert largest.dtype == lse.dtype and largest.shape == lse.shape
    options = {x: y for x, y in how.items() if x not in "MN"}
    q, k, _ = qkv(how["M"], how["N"], usual_dtype(kernel))
    bound = 0.3 if kernel.rounding == "float8_e4m3" else 1e-2 if kernel.rounding else 1e-5
    np.testing.assert_allclose(largest, exact(q, k, **options), atol=bound)


QUICK = ("fa2", "mma_pipelined", "mma_split_kv")
ALWAYS = (MODIFIED[0], MODIFIED[2], MODIFIED[-1])


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(x, marks=[pytest.mark.slow] * all(x is not y for y in ALWAYS), id=" ".join(x))
        for x in MODIFIED
    ],
)
@pytest.mark.parametrize("kernel", usual_first(ABLE, QUICK))
def test_scores_are_those_after_all_modifications(backend, kernel, how):
    lengths = "lengths_q" in how
    if lengths and "lengths" not in kernel.features:
        pytest.skip("it takes no lengths")
    _, lse, largest = checked(kernel, backend, **how)
    if how["N"] == 0 or lengths:
        assert np.isneginf(largest[0]).all()
    if "sink" in how:  # the maximum excludes the sink
        assert np.all(largest[:, 0] < lse[:, 0])


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_dtypes_of_the_maximum(backend, dtype):
    kernel = FORWARD["fa2"]
    _, lse, largest = checked(kernel, backend, **CAUSAL, dtype=dtype)
    assert lse.dtype == largest.dtype == (np.float64 if dtype == "float64" else F)


@pytest.mark.parametrize("how", ({}, {"sink": SINKS}), ids=["plain", "sink"])
@pytest.mark.parametrize("kernel", ["fa2_split_kv", "mma_split_kv"])
def test_splits_keep_the_maximum(backend, kernel, how):
    tiles = {"Br": 16, "Bc": 16, "Wr": 16, "stages": 3, "blocks_per_sm": 3}
    tiles = tiles if kernel == "mma_split_kv" else {"Br": 2, "Bc": 16, "blocks_per_sm": 4}
    checked(FORWARD[kernel], backend, M=2, N=330, tiles=tiles, **how)


@pytest.mark.parametrize(
    "kernel", ["fa2", "mma_pipelined", pytest.param("wgmma_persistent", marks=pytest.mark.slow)]
)
def test_rows_that_are_computed_again_have_it(backend, kernel):
    checked(FORWARD[kernel], backend, **CAUSAL, size=200.0, scale=3e4)


@pytest.mark.parametrize("kernel", ["fa2", "mma_pipelined", "mma_split_kv"])
def test_scores_that_are_no_numbers_make_it_nan(backend, kernel):
    q, k, v = qkv(5, 40, usual_dtype(FORWARD[kernel]))
    q[0, 1, 2, 0], q[1, 3, 4, 0] = np.nan, np.inf
    how = {"kernel": kernel, "backend": backend, "return_lse": True, "return_max": True}
    _, lse, largest = cupyfa.attention(q, k, v, check=True, **how)
    np.testing.assert_array_equal(np.isnan(largest), np.isnan(lse))
    assert np.isnan(largest).sum() == 2


def test_results_are_in_the_order_of_their_names(backend):
    q, k, v = qkv(9, 12, "float32")
    how = {"backend": backend}
    out, _, largest = cupyfa.attention(q, k, v, return_lse=True, return_max=True, **how)
    np.testing.assert_allclose(largest, exact(q, k), rtol=1e-5)
    for _ in range(2):  # the second call is cached
        alone = cupyfa.attention(q, k, v, return_max=True, **how)
        for made, wanted in zip(alone, (out, largest), strict=True):
            np.testing.assert_array_equal(made, wanted)
    np.testing.assert_array_equal(cupyfa.attention(q, k, v, **how), out)


def test_prepared_calls_and_plans_have_it(backend):
    q, k, v = qkv(9, 12, "float32")
    for given in ((q, k, v), (q.shape, k.shape, v.shape)):
        of_shapes = {} if given[0] is q else {"dtype": "float32"}
        prepared = cupyfa.compile(*given, return_max=True, backend=backend, **of_shapes)
        # A call compiled for shapes requires arrays in the backend's memory.
        taken = map(backend.upload, (q, k, v)) if of_shapes else (q, k, v)
        _, largest = prepared(*taken)
        np.testing.assert_allclose(backend.download(largest), exact(q, k), rtol=1e-5)
    sizes = {"M": 9, "N": 12, "d": 24, "backend": backend}
    assert "row_max" in cupyfa.plan(**sizes, return_max=True).outputs
    assert "row_max" not in cupyfa.plan(**sizes).outputs


def test_layouts_and_block_masks_have_it(backend):
    q, k, v = qkv(40, 40, "float32")
    mask = cupyfa.block_mask(mask_mod="key <= query", M=40, N=40, backend=backend)
    how = {"backend": backend, "return_max": True, "check": True}
    _, largest = cupyfa.attention(q, k, v, mask=mask, **how)
    np.testing.assert_allclose(largest, exact(q, k, causal=True), rtol=1e-5)
    turned = (x.swapaxes(1, 2) for x in (q, k, v))
    _, same = cupyfa.attention(*turned, layout="bshd", causal=True, **how)
    np.testing.assert_allclose(same, largest, rtol=1e-6)


def test_sequences_have_it(backend):
    q, k, v = (x[0].swapaxes(0, 1) for x in qkv(30, 30, "float32", batch=1))
    offsets = np.array([0, 11, 11, 27], np.int32)
    how = {"backend": backend, "return_lse": True, "return_max": True, "causal": True}
    _, lse, largest = cupyfa.attention(
        cupyfa.Packed(q, offsets),
        cupyfa.Packed(k, offsets),
        cupyfa.Packed(v, offsets),
        check=True,
        **how,
    )
    assert lse.shape == largest.shape == (4, 30) and np.isneginf(largest[:, 27:]).all()
    cut = [slice(*x) for x in pairwise(offsets)]
    lists = ([x[rows].swapaxes(0, 1) for rows in cut] for x in (q, k, v))
    _, _, parts = cupyfa.attention(*lists, **how)
    for rows, part in zip(cut, parts, strict=True):
        np.testing.assert_array_equal(part, largest[:, rows])
        one = exact(*(x[rows].swapaxes(0, 1)[None] for x in (q, k)), causal=True)
        np.testing.assert_allclose(part, one[0], rtol=1e-5)


def test_decoding_has_it(backend):
    q, k, v = qkv(1, 70, "float32")
    cache = cupyfa.KVCache(k, v, lengths=np.array([70, 33], np.int32), layout="bhsd")
    how = {"backend": backend, "return_max": True, "check": True}
    _, largest = cupyfa.attention(q, cache, **how)
    np.testing.assert_allclose(largest[:1], exact(q[:1], k[:1]), rtol=1e-5)
    np.testing.assert_allclose(largest[1:], exact(q[1:], k[1:, :, :33]), rtol=1e-5)
