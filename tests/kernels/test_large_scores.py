"""Scores that are finite but huge, where the multiply-add of a GPU leaves a large rest.

``S * scale - maximum`` is rounded once on a GPU: for the largest score of a row the difference is
the rounding error of the product, not 0. Above 2^26 that error is more than 2, and above 2^30 its
exponential overflows. The simulator's compiler contracts in the same way if it is asked to.
"""

from pathlib import Path

import numpy as np
import pytest
from helpers.problems import FORWARD, check_case, usual_first

import cupyfa

CONTRACTED = "-O2 -mfma -ffp-contract=fast"


@pytest.fixture
def contracting(backend, monkeypatch):
    """The backend, with multiplication and addition contracted to one instruction."""
    if backend.name == "simulator":
        cpu = Path("/proc/cpuinfo")
        if not cpu.exists() or " fma " not in cpu.read_text():
            pytest.skip("this CPU has no fused multiply-add")
        monkeypatch.setenv("CUPYFA_COMPILER_FLAGS", CONTRACTED)
    return backend


@pytest.mark.sampled(8)
@pytest.mark.each_choice
@pytest.mark.parametrize("scale", [3e9, 1e36, -1e36])
@pytest.mark.parametrize("kernel", usual_first(FORWARD.values()))
def test_finite_scores_of_any_size(contracting, kernel, scale):
    sizes = {"heads": 1, "M": 20, "N": 40, "d": 16, "causal": "top-left", "scale": scale}
    # The baselines keep S in the dtype of the inputs, which has to hold it.
    dtype = "float32" if kernel.name.startswith("baseline") else None
    check_case(kernel, contracting, sizes, dtype)


@pytest.mark.parametrize("kernel", ["mma_pipelined", "wgmma_persistent"])
def test_scores_of_two_to_the_26(contracting, kernel):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 64)).astype(np.float16) for n in (70, 140, 140))
    scale = 2.0**26 / np.abs(q.astype(np.float64) @ k.astype(np.float64).swapaxes(1, 2)).max()
    given = {"scale": scale, "return_lse": True, "kernel": kernel, "backend": contracting}
    out, lse = cupyfa.attention(q, k, v, **given)
    assert np.isfinite(lse).all()
    assert (np.abs(out) <= 1.01 * np.abs(v).max()).all()
