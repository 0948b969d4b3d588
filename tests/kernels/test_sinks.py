"""Sinks (one extra score per row) and gradients of lse, in every rung."""

import numpy as np
import pytest
from helpers.problems import FORWARD, able, qkv, usual_first

import cupyfa
from cupyfa.lab.bench.sweeps import usual_dtype
from cupyfa.ladder import LADDER

F = np.float32
ABLE = able("sink", "forward")
SINKS = np.array([0.5, -np.inf, 3.0, -2.0], F)
# The first 25 rows see no key.
RAGGED = {"M": 70, "N": 45, "causal": True}


def checked(kernel, backend, sinks, *, M, N, tiles=None, **options):
    q, k, v = qkv(M, N, usual_dtype(kernel))
    how = {"kernel": kernel, "backend": backend, "tiles": tiles, **options}
    return cupyfa.attention(q, k, v, sink=sinks, return_lse=True, check=True, **how)


@pytest.mark.parametrize("kernel", usual_first(ABLE))
def test_rows_begin_with_their_sink(backend, kernel):
    out, lse = checked(kernel, backend, SINKS, **RAGGED)
    assert not np.any(out[:, :, :25])
    np.testing.assert_allclose(lse[:, :, :25], np.broadcast_to(SINKS[:, None], (2, 4, 25)), 1e-6)


@pytest.mark.parametrize("how", [RAGGED, {"M": 2, "N": 170}], ids=str)
def test_one_of_several_splits_takes_the_sink(backend, how):
    tiles = {"Br": 16, "Bc": 16, "Wr": 16, "stages": 3, "blocks_per_sm": 3}
    checked(FORWARD["mma_split_kv"], backend, SINKS, tiles=tiles, **how)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "how",
    [RAGGED, {"M": 30, "N": 0}, pytest.param({"M": 40, "N": 60}, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("kernel", usual_first(ABLE, ["fa2", "mma_pipelined"]))
def test_sinks_of_any_size(backend, kernel, how):
    """A sink of 1e9 outweighs all scores; NaN and infinity make the row NaN."""
    out, lse = checked(kernel, backend, np.array([1e9, -3e38, np.nan, np.inf], F), **how)
    assert np.isnan(lse[:, 2:]).all() and np.isnan(out[:, 2:]).all()
    assert not np.any(out[:, 0]) and np.all(lse[:, 0] == F(1e9))
    np.testing.assert_array_equal(lse[:, 1, :25] == F(-3e38), how["M"] > how["N"])


BACKWARD = LADDER["backward"]
OF_EACH_DELTA = ("columns", "mma_columns", "wgmma_columns", "wgmma_two_pass")


@pytest.mark.parametrize("kernel", usual_first(BACKWARD.values(), OF_EACH_DELTA))
def test_the_gradient_of_lse_counts(backend, kernel):
    q, k, v = qkv(70, 45, usual_dtype(kernel), batch=1, heads=2, kv_heads=1)
    rng = np.random.default_rng(1)
    how = {"backend": backend, "causal": True, "sink": np.array([1.0, -np.inf], F), "check": True}
    forward = {"kernel": "fa2", "return_lse": True}
    (out, lse), pullback = cupyfa.vjp(q, k, v, backward_kernel=kernel, **forward, **how)
    dlse = rng.standard_normal(lse.shape).astype(lse.dtype)
    pullback(rng.standard_normal(out.shape).astype(out.dtype), dlse)
