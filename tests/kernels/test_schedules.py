"""The static schedule of persistent blocks: each tile has a block, and blocks have equal work."""

import heapq

import numpy as np
import pytest
from helpers.device_code import code, run, source

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
