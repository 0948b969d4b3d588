"""The static schedule of persistent blocks: each tile has a block, and blocks have equal work."""

import heapq

import numpy as np
import pytest
from helpers.device_code import code, run, source

from cupyfa import Problem
from cupyfa.lab.analysis.resources import limits_of
from cupyfa.ladder.lookup import record_named
from cupyfa.planner import choose_kernel as planning, source as sources
from cupyfa.planner.source import INCLUDE, KERNELS

BLOCKS = 132
BEGIN = 1  # what begins and ends a tile takes about as long as a tile of keys
HEAD = """
#include <cuda_fp16.h>
using scalar = __half; using real = float;
struct Mods {};
constexpr bool causal = true, windowed = false, ragged = false, packed = false;
constexpr int dv = 128;
constexpr bool has_mask_mod = false, has_key_tiles = false, has_row_tiles = false;
#include <forward/parts/static_schedule.cuh>
"""


def assigned(M, heads, blocks=BLOCKS, **tile):
    """Returns head, row and number of keys of the tiles of each block, [blocks, 3, tiles]."""
    room = 3 + 3 * -(-M // tile["Br"]) * heads // blocks
    found = np.full((3, blocks, room), -1, np.int32)
    sizes = np.int32(M), np.int32(heads), np.int32(room)
    text = source(code("schedule", **tile), *found, scalars=sizes, head=HEAD)
    run(text, "test", *found, *sizes, folders=[INCLUDE, KERNELS], grid=(blocks, 1, 1), threads=1)
    return found.swapaxes(0, 1)


def work(keys, Bc):
    return -(-keys // Bc) + BEGIN


def busiest_of_greedy(works):
    """Returns the work of the busiest block if each tile, longest first, goes to the least busy."""
    blocks = [0] * BLOCKS
    for x in sorted(works, reverse=True):
        heapq.heapreplace(blocks, blocks[0] + x)
    return max(blocks)


@pytest.mark.parametrize(
    "Br, Bc, M, heads",
    [
        (128, 128, 512, 512),
        (128, 128, 1500, 48),
        (128, 128, 1024, 256),
        (128, 128, 2048, 128),
        (128, 64, 1024, 128),
        (128, 128, 6000, 24),
        (192, 128, 512, 1024),
        (192, 128, 4096, 16),
        (192, 128, 8192, 64),
    ],
)
def test_no_block_has_much_more_work_than_others(Br, Bc, M, heads):
    tiles = assigned(M, heads, Br=Br, Bc=Bc, may_skip=int(Br == 128))
    is_tile = tiles[:, 0] >= 0
    head, row, keys = tiles.swapaxes(0, 1)[:, is_tile]
    assert sorted(zip(head, row)) == [(h, r) for h in range(heads) for r in range(0, M, Br)]
    busiest = np.where(is_tile, work(tiles[:, 2], Bc), 0).sum(1).max()
    assert busiest <= 1.03 * busiest_of_greedy(work(keys, Bc))


@pytest.mark.parametrize("blocks", [1, 4, 7, 8, 9, 12, 114])
@pytest.mark.parametrize("count", range(1, 10))
def test_every_tile_has_one_block(blocks, count):
    for heads in (1, 2 * blocks, 3 * blocks + 1):
        tiles = assigned(64 * count, heads, blocks, Br=64, Bc=64, may_skip=1)
        head, row, _ = tiles.swapaxes(0, 1)[:, tiles[:, 0] >= 0]
        want = [(h, 64 * tile) for h in range(heads) for tile in range(count)]
        assert sorted(zip(head, row)) == want


LENGTHS = {
    "equal": [1024] * 6,
    "different": [1072, 829, 1794, 0, 554, 1357, 3484, 1, 468, 266],
    "many": [17 * i % 301 for i in range(100)],
    "none": [],
    "empty": [0, 0],
}


def ragged_order(lengths, heads, size, before=0, after=0, *, causal=True, of_keys=False):
    """Returns head, sequence and rank of the tiles in RaggedOrder, [tiles, 3], and its indices."""
    offsets = np.cumsum([before, *lengths], dtype=np.int32)
    found = np.full((heads * sum(-(-n // size) for n in lengths) + 1, 3), -1, np.int32)
    indices = np.zeros(1, np.int32)
    scalars = np.int32(len(lengths)), np.int32(offsets[-1] + after), np.int32(heads)
    # The constants and types that the host puts above kernels of ragged batches.
    problem = Problem.of_sizes(d=64, dtype="float16", lengths=[size], causal=causal)
    plan = planning.plan(record_named("wgmma_persistent"), problem, limits_of("90a"))
    above, _ = sources.text(plan.launches[1]).split("#line 1", 1)
    head = f"{above}#include <attention/ragged_order.cuh>"
    body = code("ragged_order", size=size, of_keys=str(of_keys).lower())
    arrays = found, indices, offsets
    text = source(body, *arrays, scalars=scalars, head=head)
    folders = sources.include_folders(plan.launches[1])
    run(text, "test", *arrays, *scalars, folders=folders)
    return found[:-1], int(indices[0]) * heads


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("of_keys", [True, False], ids=["keys", "rows"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_tiles_of_ragged_batches_are_in_order(lengths, of_keys, causal):
    size, heads = 128, 5
    found, indices = ragged_order(lengths, heads, size, 300, 900, causal=causal, of_keys=of_keys)
    tiles = [-(-n // size) for n in lengths]
    assert sorted(map(tuple, found)) == [
        (head, sequence, tile)
        for head in range(heads)
        for sequence, count in enumerate(tiles)
        for tile in range(count)
    ]
    assert len(found) <= indices
    # Sets of tiles follow one another, in each of which the longest come first.
    all_keys = np.array([-(-lengths[b] // size) for _, b, _ in found], int)
    length = all_keys - causal * found[:, 2]
    sets = 1 + np.count_nonzero(np.diff(length) > 0)
    groups = -(-len(lengths) // 32)
    assert sets <= max(1, groups * heads, len(found) // (2 * BLOCKS))
    if len(lengths) <= 32:
        assert sets <= max(1, -(-len(found) // (2 * BLOCKS)))
