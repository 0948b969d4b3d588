"""dS that kernels of two passes keep between them, in rounds over query heads."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.gradients import BACKWARD, MMA_TILE
from helpers.problems import inputs_of, planned, require_same_bits

from cupyfa import Problem
from cupyfa.lab.analysis.resources import limits_of
from cupyfa.ladder import kept_score_gradients
from cupyfa.ladder.kept_score_gradients import USUAL_ROOM, KeptDS
from cupyfa.planner import choose_kernel as planning
from cupyfa.runtime import guard

H200 = replace(limits_of("90"), multiprocessors=132)
KERNEL = BACKWARD["mma_two_pass"]
TILE = MMA_TILE["mma_two_pass"]
ENOUGH, NONE = 64, 1
SIZES = [
    {"heads": 2, "M": 67, "N": 90, "d": 24, "dv": 40},
    {"batch": 2, "heads": 4, "kv_heads": 2, "M": 50, "N": 45, "d": 32, "causal": True},
    {"heads": 2, "kv_heads": 1, "M": 70, "N": 33, "d": 16, "causal": "top-left"},
    # The last tiles of keys are seen by no row, not even of the partial row tile.
    {"heads": 2, "kv_heads": 1, "M": 35, "N": 120, "d": 16, "causal": "top-left"},
    {"heads": 2, "M": 50, "N": 45, "d": 16, "mask_mod": "(query + key) % 3 > 0"},
]
DROPOUT = {"dropout": 0.4, "dropout_seed": 7}
WGMMA = BACKWARD["wgmma_two_pass"]
# Boxes of 64 rows and 64 keys that no row or no key sees lie in tiles of twice as many.
WGMMA_SIZES = [
    {"heads": 2, "M": 200, "N": 260, "d": 64, "dv": 40},
    {"batch": 2, "heads": 4, "kv_heads": 2, "M": 150, "N": 145, "d": 72, "causal": True},
    {"heads": 2, "kv_heads": 1, "M": 200, "N": 130, "d": 64, "causal": "top-left"},
    {"heads": 2, "kv_heads": 1, "M": 70, "N": 300, "d": 128, "causal": "top-left"},
    {"heads": 2, "kv_heads": 1, "M": 170, "N": 130, "d": 200, "causal": True},
    {"heads": 2, "M": 100, "N": 90, "d": 32, **DROPOUT, "score_mod": "score + key / 50"},
]


def entries(plan):
    return [x.entry.removeprefix(f"{plan.kernel.name}_") for x in plan.launches]


def plan_of(backend, sizes, room, **tile):
    return planned(KERNEL, backend, sizes, **{**TILE, "room": room, **tile})


@pytest.mark.few(1)
@pytest.mark.parametrize("values", ["normal", "nan"])
@pytest.mark.parametrize("sizes", SIZES)
def test_gradients_have_the_bits_of_scores_that_are_computed_twice(backend, sizes, values):
    """The second pass adds products in the same order, so only the source of dS differs."""
    kept, twice = (plan_of(backend, sizes, room) for room in (ENOUGH, NONE))
    assert entries(kept) == ["mma_delta", "columns", "kept_rows"]
    assert entries(twice) == ["mma_delta", "columns", "rows"]
    inputs = inputs_of(kept, values=values)
    expected = guard.checked(backend, twice, inputs, {})
    require_same_bits(expected, guard.checked(backend, kept, inputs, {}))


@pytest.mark.few(1)
@pytest.mark.parametrize("values", ["normal", "nan"])
@pytest.mark.parametrize("sizes", WGMMA_SIZES)
def test_wgmma_gradients_of_kept_dS_are_right(backend, sizes, values):
    """The passes compute S from transposed operands, so the last bits of dQ may differ."""
    limits = replace(backend.limits, multiprocessors=1)  # enough blocks for few heads
    problem = Problem.of_sizes(**sizes, dtype="bfloat16")
    kept, twice = (planning.plan(WGMMA, problem, limits, room=x) for x in (USUAL_ROOM, NONE))
    columns = "columns_wide" if problem.d > 128 else "columns"
    assert entries(kept) == ["sum_rows", columns, "kept_rows"]
    assert entries(twice) == ["sum_rows", columns, "rows"]
    inputs = inputs_of(kept, values=values)
    found, expected = (guard.checked(backend, x, inputs, {}) for x in (kept, twice))
    for name in ("dK", "dV"):  # assert_array_equal takes NaN of bfloat16 for different
        np.testing.assert_array_equal(*(x[name].astype(np.float32) for x in (found, expected)))


@pytest.mark.few(1)
@pytest.mark.parametrize("heads", [1, 2])
def test_rounds_cover_all_heads(backend, monkeypatch, heads):
    """Shares of a group may be in different rounds; the last of them adds dK and dV."""
    monkeypatch.setattr(KeptDS, "heads_in_room", lambda self, p, c: heads * (c.room > 1))
    monkeypatch.setattr(
        kept_score_gradients, "_shares_at_a_time", lambda shares, most, *_: min(shares, most)
    )
    sizes = {"batch": 2, "heads": 2, "kv_heads": 1, "M": 280, "N": 270, "d": 16, "causal": True}
    kept, twice = (plan_of(backend, sizes, room) for room in (2, 1))
    assert entries(kept) == ["mma_delta", *["columns", "kept_rows"] * (4 // heads)]
    shape, _ = kept.scratch["dS"]
    lines, tiles = 9, 10  # of 18 row tiles, two a line, which see at most 9 tiles of keys each
    assert shape == (heads * lines * tiles * 16 * 32,)
    inputs = inputs_of(kept)
    found, expected = (guard.checked(backend, x, inputs, {}) for x in (kept, twice))
    np.testing.assert_array_equal(found["dQ"], expected["dQ"])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "heads, sizes",
    [
        (1, {"heads": 2, "kv_heads": 1, "M": 150, "N": 140, "d": 64, "causal": True}),
        (2, {"heads": 4, "kv_heads": 2, "M": 90, "N": 200, "d": 72}),
        (2, {"heads": 2, "kv_heads": 1, "M": 100, "N": 70, "d": 136, "causal": "top-left"}),
    ],
)
def test_rounds_of_wgmma_cover_all_heads(backend, monkeypatch, heads, sizes):
    """Above d = 128 a round has whole groups of query heads."""
    monkeypatch.setattr(KeptDS, "heads_in_room", lambda self, p, c: heads * (c.room > 1))
    monkeypatch.setattr(
        kept_score_gradients, "_shares_at_a_time", lambda shares, most, *_: min(shares, most)
    )
    problem = Problem.of_sizes(**sizes, batch=2, dtype="bfloat16")
    kept, twice = (planning.plan(WGMMA, problem, backend.limits, room=x) for x in (2, NONE))
    assert entries(kept).count("kept_rows") == 2 * sizes["heads"] // heads
    inputs = inputs_of(kept)
    for plan in (kept, twice):
        guard.checked(backend, plan, inputs, {})


@pytest.mark.parametrize(
    "sizes",
    [
        {"window": (9, 2)},
        {"batch": 2, "lengths_q": (2,), "lengths_k": (2,)},
        {"M": 0},
        {"N": 0},
        {"batch": 0},
        {"heads": 0},
        {"M": 200, "N": 200},
    ],
)
def test_scores_are_computed_twice_where_dS_is_not_kept(backend, sizes):
    """Rows see few keys, differ in length, or the dS of one head takes more than its room."""
    plan = plan_of(backend, {"heads": 2, "M": 40, "N": 40, "d": 16, **sizes}, room=2)
    assert "rows" in entries(plan) and "kept_rows" not in entries(plan)
    assert plan.scratch["dS"][0] == (0,)


@pytest.mark.parametrize("heads, keeps", [(4, False), (8, True), (9, False), (64, True)])
def test_passes_of_few_blocks_overlap_instead(heads, keeps):
    """16 tiles of keys for each head: 8 heads fill an H200, 9 leave most of it without work."""
    p = Problem.of_sizes(batch=1, heads=heads, M=2048, N=2048, d=128, dtype="float16")
    plan = planning.plan(WGMMA, p, H200)
    assert ("kept_rows" in entries(plan)) == keeps
    assert ("rows" in entries(plan)) != keeps


@pytest.mark.parametrize("d, N, keeps", [(64, 2048, True), (64, 4096, False), (72, 4096, True)])
def test_dS_of_few_columns_and_many_keys_is_computed_twice(d, N, keeps):
    p = Problem.of_sizes(batch=4, heads=16, M=N, N=N, d=d, dtype="float16")
    assert ("kept_rows" in entries(planning.plan(WGMMA, p, H200))) == keeps


def argument(launch, name):
    return next(x.value for x in launch.arguments if x.name == name)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("M", [1000, 3072, 5120, 7168, 9216, 16384, 20480])
def test_rounds_on_an_h200_cover_each_share_once_within_the_room(M, causal):
    p = Problem.of_sizes(heads=32, kv_heads=4, M=M, N=M, d=64, dtype="float16", causal=causal)
    plan = planning.plan(KERNEL, p, H200)
    steps = dict.fromkeys(entries(plan))
    columns, rows = (
        [x for x in plan.launches if x.entry == f"mma_two_pass_{name}"]
        for name in ("columns", "kept_rows")
    )
    assert ("rows" in steps) == (not rows) == (M == 20480 and not causal)
    assert len(columns) == (len(rows) or 1)
    blocks = heads = 0
    for launch in columns:
        assert argument(launch, "first_block") == blocks
        blocks += launch.grid[0]
    for launch in rows:
        assert argument(launch, "first_head") == heads
        heads += launch.grid[0] // -(-M // plan.constants["Qr"])
    assert blocks == argument(columns[0], "splits") * 4 * -(-M // plan.constants["Bc"])
    assert heads == (32 if rows else 0)
    (elements,), _ = plan.scratch["dS"]
    assert 2 * elements <= 1088 << 20


@pytest.mark.parametrize("seed", range(20))
def test_two_row_tiles_fit_into_a_line(seed):
    """Whatever the offset: the first row tile shares a line with the last one, and so on."""
    rng = np.random.default_rng(seed)
    for _ in range(100):
        M, N = (int(x) for x in rng.integers(1, 700, 2))
        c = SimpleNamespace(**{x: 16 << int(rng.integers(4)) for x in ("Br", "Bc")})
        offset = int(rng.choice([N - M, 0, rng.integers(-M, N)]))
        p = SimpleNamespace(M=M, N=N, right=0, causal_offset=max(-M, min(offset, N - 1)))
        ends = (min(row + c.Br, M) + p.causal_offset for row in range(0, M, c.Br))
        seen = [-(-max(0, min(end, N)) // c.Bc) for end in ends]
        middle = (len(seen) + 1) // 2
        first, last = seen[:middle], seen[middle:]
        both = [x + y for x, y in zip(first, reversed(last))]
        assert max([*both, *first]) <= kept_score_gradients.line_tiles(p, c.Br, c.Bc)


@pytest.mark.parametrize("options", [{"window": (9, None)}, {"lengths_q": (1,)}])
def test_problems_without_dS_have_the_same_tiles_on_all_devices(options):
    """Tiles of 128 rows, which are fast with dS, would compute more hidden scores of a window."""
    p = Problem.of_sizes(heads=32, M=1000, N=1000, d=256, dtype="float16", **options)
    ampere, hopper = (planning.plan(KERNEL, p, x).constants for x in (limits_of("80"), H200))
    assert hopper["Br"] == 64 and (hopper["Qs"], ampere["Qs"]) == (2, 1)
