"""Examples: rows with as many elements as the block has threads, with more, and with fewer."""

import numpy as np

from cupyfa.lab.exercises.exercise import Example


def examples(rng):
    for name, rows, n, mean in (
        ("a number per thread", 1, 64, 100),
        ("a long row", 2, 200, 100),
        ("a short row", 2, 5, 100),
        ("scores far below 0", 1, 64, -1000),
    ):
        x = (mean + 3 * rng.standard_normal((rows, n))).astype(np.float32)
        weights = np.exp(x.astype(float) - x.max(axis=1, keepdims=True))
        yield Example(
            name,
            {"x": x, "y": np.full_like(x, np.nan), "n": n},
            {"y": weights / weights.sum(axis=1, keepdims=True)},
            grid=(rows, 1, 1),
            block=(64, 1, 1),
        )
