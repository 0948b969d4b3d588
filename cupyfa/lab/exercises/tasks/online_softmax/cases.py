"""Examples: vectors with a rising maximum, large and small scores, a masked and a partial tile."""

import numpy as np

from cupyfa.lab.exercises.exercise import Example


def examples(rng):
    vectors = {
        "one tile": rng.standard_normal(8),
        "a maximum that rises": np.arange(32.0),
        "a maximum that falls": np.arange(32.0)[::-1].copy(),
        "a partial tile": rng.standard_normal(21),
        "large scores": 900 + 10 * rng.standard_normal(24),
        "scores far below 0": -900 + 10 * rng.standard_normal(24),
        "masked first tile": np.concatenate([np.full(8, -np.inf), rng.standard_normal(8)]),
    }
    for name, x in vectors.items():
        largest = x.max()
        expected = {"largest": largest, "total": np.exp(x - largest).sum()}
        yield Example(name, {"x": x, "tile": 8}, expected, tolerance=1e-12)
