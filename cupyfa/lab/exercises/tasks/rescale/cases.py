"""Examples: one tile of keys, several, a partial tile, and scores that differ by more than 100."""

import numpy as np

from cupyfa.lab.exercises.exercise import Example


def examples(rng):
    keys = np.arange(12)
    levels = {
        "scores that rise": 15 * keys,
        "scores that fall": -15 * keys,
        "scores far below 0": -200 - 60 * np.tile([2, 0, 1, 3], 3),
    }
    for name, M, N in (
        ("one tile", 5, 4),
        ("several tiles", 40, 12),
        ("a partial tile", 5, 11),
        ("scores that rise", 5, 12),
        ("scores that fall", 5, 12),
        ("scores far below 0", 5, 12),
    ):
        q, k, v = (rng.standard_normal((rows, 8)).astype(np.float32) for rows in (M, N, N))
        if name in levels:
            q[:, 0] = 1
            k[:, 0] = levels[name]
        S = q.astype(float) @ k.T
        lse = np.log(np.exp(S - S.max(axis=1, keepdims=True)).sum(axis=1)) + S.max(axis=1)
        arrays = {"q": q, "k": k, "v": v}
        results = {"out": np.full_like(q, np.nan), "lse": np.full(M, np.nan, np.float32)}
        yield Example(
            name,
            {**arrays, **results, "M": M, "N": N, "scale": 1.0},
            {"out": np.exp(S - lse[:, None]) @ v, "lse": lse},
            grid=(-(-M // 32), 1, 1),
        )
