"""Offsets: the position of query 0, so that a part of a problem is masked like the whole."""

import numpy as np
import pytest
from helpers.gradients import BACKWARD, tiles_of
from helpers.problems import FORWARD, USUAL, check_case, qkv, usual_first

import cupyfa
from cupyfa import Problem
from cupyfa.lab.bench.sweeps import usual_dtype
from cupyfa.lab.verify import transforms
from cupyfa.lab.verify.case import Case
from cupyfa.lab.verify.shrink import shrunk
from cupyfa.ladder.operations import visible_scores

OFFSETS = (-80, -3, 0, 11, 60)
LIMITS = ({"causal": True}, {"window": (5, 2)}, {"window": (None, 3)}, {"window": (4, None)})
SIZES = {"heads": 4, "kv_heads": 2, "d": 20, "dv": 9}
KERNELS = usual_first((*FORWARD.values(), *BACKWARD.values()))


def arrays(M, N):
    return qkv(M, N, d=16)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("offset", OFFSETS)
def test_query_0_is_at_the_offset(offset, limits):
    p = Problem.of_sizes(M=37, N=50, d=8, offset=offset, **limits)
    position, key = np.arange(37)[:, None] + offset, np.arange(50)
    left, right = p.left, p.right
    seen = np.ones((37, 50), bool)
    if right is not None:
        seen &= key <= position + right
    if left is not None:
        seen &= key >= position - left
    assert (p.visible() == seen).all()
    assert visible_scores(p) == seen.sum()
    assert p.first_position == offset


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_are_right(backend, kernel):
    """Some rows see no keys, some rows see a part of the keys, and some rows see all keys.

    To save time, most kernels run with only two of the offsets.
    """
    is_able = "window" in kernel.features
    for i, offset in enumerate(OFFSETS if kernel.name in USUAL else OFFSETS[1:3]):
        limits = LIMITS[i % 2] if is_able else LIMITS[0]
        sizes = {**SIZES, "M": 45, "N": 70, "offset": offset, **limits}
        if "dv" not in kernel.features:
            sizes["dv"] = sizes["d"]
        tiles = tiles_of(kernel)
        check_case(kernel, backend, sizes, usual_dtype(kernel), **tiles)


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (40, 3)}], ids=str)
def test_parts_have_the_bits_of_the_whole(backend, options):
    """Rows are cut at tile boundaries; positions in expressions shift with the offset."""
    q, k, v = arrays(96, 120)
    how = {"kernel": "fa2", "tiles": {"Br": 32, "Bc": 32}, "backend": backend, **options}
    how["score_mod"] = "score - 0.01 * abs(position - key)"
    whole, lse = cupyfa.attention(q, k, v, return_lse=True, **how)
    for rows in (slice(0, 32), slice(32, 96)):
        offset = rows.start + 120 - 96
        part = cupyfa.attention(q[:, :, rows], k, v, offset=offset, return_lse=True, **how)
        np.testing.assert_array_equal(part[0], whole[:, :, rows])
        np.testing.assert_array_equal(part[1], lse[:, :, rows])


def test_a_block_mask_is_at_the_offset(backend):
    q, k, v = arrays(70, 100)
    mask = cupyfa.block_mask(mask_mod="key <= position", M=70, N=100)
    how = {"kernel": "fa2", "backend": backend, "offset": -9}
    right = cupyfa.attention(q, k, v, causal=True, **how)
    np.testing.assert_array_equal(cupyfa.attention(q, k, v, mask=mask, **how), right)


def test_prepared_calls_have_offsets(backend):
    q, k, v = (backend.upload(x) for x in arrays(30, 50))
    prepared = cupyfa.compile(q, k, v, causal=True, offset=7, backend=backend)
    right = cupyfa.attention(q, k, v, causal=True, offset=7, backend=backend)
    other = cupyfa.attention(q, k, v, causal=True, offset=8, backend=backend)
    assert bool((prepared(q, k, v) == right).all()) and bool((other != right).any())


def test_offsets_of_minus_m_hide_everything(backend):
    q, k, v = arrays(30, 50)
    out, lse = cupyfa.attention(
        q, k, v, causal=True, offset=-(2**30), return_lse=True, backend=backend
    )
    assert not out.any() and (lse == -np.inf).all()


def test_shrinking_drops_the_offset_with_its_mask():
    p = Problem.of_sizes(M=30, N=40, d=8, causal=True, offset=5)
    assert transforms.leave_out(p, "causal").offset is None
    assert transforms.leave_out(p, "scale").offset == 5
    kept = shrunk(Case("forward", p), lambda case: case.problem.offset is not None)
    assert kept.problem.options.changed == {"causal": "bottom-right", "offset": 0}
    gone = shrunk(Case("forward", p), lambda case: True)
    assert gone.problem == Problem.of_sizes(M=1, N=1, d=1)
