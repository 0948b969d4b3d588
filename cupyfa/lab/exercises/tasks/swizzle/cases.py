"""Examples: tiles of 16 x 64 numbers, loaded unchanged and without bank conflicts."""

import numpy as np

from cupyfa.lab.exercises.exercise import Example


def examples(rng):
    tiles = {
        "row + column / 100": np.arange(16)[:, None] + np.arange(64) / 100,
        "random numbers": rng.standard_normal((16, 64)),
    }
    for name, tile in tiles.items():
        X = tile.astype(np.float16)
        Y, conflicts = np.full_like(X, np.nan), np.zeros((4, 32), np.int32)
        expected = {"Y": X.astype(float), "conflicts": np.ones((4, 32))}
        yield Example(name, {"X": X, "Y": Y, "conflicts": conflicts}, expected, tolerance=0.0)
