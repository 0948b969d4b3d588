"""Examples: dot products of 32 columns; each warp of a block computes one."""

import numpy as np

from cupyfa.lab.exercises.exercise import Example


def examples(rng):
    for name, warps in (("one key", 1), ("four keys", 4)):
        query = rng.standard_normal(32).astype(np.float32)
        keys = rng.standard_normal((warps, 32)).astype(np.float32)
        scores = np.full((warps, 32), np.nan, np.float32)
        expected = np.repeat((keys.astype(float) @ query)[:, None], 32, axis=1)
        yield Example(
            name,
            {"query": query, "keys": keys, "scores": scores},
            {"scores": expected},
            block=(32 * warps, 1, 1),
        )
