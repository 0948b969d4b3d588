"""Examples: 64 rows with random scores, or with exponentials that overflow or underflow."""

import numpy as np

from cupyfa.lab.exercises.exercise import Example


def examples(rng):
    for name, size in (("random scores", 0.5), ("large scores", 4.0), ("scores far below 0", 0.5)):
        Q, K = ((size * rng.standard_normal((n, 64))).astype(np.float16) for n in (64, 32))
        if name == "scores far below 0":  # also sets rows r and r + 8 far apart
            Q[:, 0], K[:, 0] = np.where(np.arange(64) % 16 < 8, -200, -400), 1
        S = Q.astype(float) @ K.astype(float).T
        expected = np.logaddexp.reduce(S, axis=1)
        lse = np.full(64, np.nan, np.float32)
        yield Example(name, {"Q": Q, "K": K, "lse": lse}, {"lse": expected}, block=(128, 1, 1))
