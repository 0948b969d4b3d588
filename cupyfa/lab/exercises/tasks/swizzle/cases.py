"""A tile of 16 rows of 64 numbers, in and out; each of eight lanes has banks of its own."""

import numpy as np

from cupyfa.lab.exercises.exercise import Example


def examples():
    rng = np.random.default_rng(0)
    tiles = {
        "row + column / 100": np.arange(16)[:, None] + np.arange(64) / 100,
        "random numbers": rng.standard_normal((16, 64)),
    }
    for name, tile in tiles.items():
        X = tile.astype(np.float16)
        Y, conflicts = np.full_like(X, np.nan), np.zeros((4, 32), np.int32)
        expected = {"Y": X.astype(float), "conflicts": np.ones((4, 32))}
        yield Example(name, {"X": X, "Y": Y, "conflicts": conflicts}, expected, tolerance=0.0)
