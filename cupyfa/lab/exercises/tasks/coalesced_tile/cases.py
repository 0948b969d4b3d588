"""Examples: arrays of one tile, of a partial tile, and of several tiles."""

import numpy as np

from cupyfa.lab.exercises.exercise import Example

BR, D, THREADS = 16, 40, 64


def examples(rng):
    for name, M in (("one tile", 16), ("a partial tile", 5), ("two tiles, the last partial", 27)):
        blocks = -(-M // BR)
        x = rng.standard_normal((M, D)).astype(np.float32)
        tiles = np.zeros((blocks * BR, D), np.float32)
        tiles[:M] = x
        rows = np.minimum(BR, M - BR * np.arange(blocks))
        arguments = {
            "x": x,
            "tiles": np.full((blocks, BR, D), np.nan, np.float32),
            "sectors": np.zeros(blocks, np.int32),
            "reads": np.full((blocks, BR * D, THREADS), -1, np.int32),
            "M": M,
        }
        yield Example(
            name,
            arguments,
            {"tiles": tiles.reshape(blocks, BR, D), "sectors": rows * D // 8},
            grid=(blocks, 1, 1),
            block=(THREADS, 1, 1),
        )
