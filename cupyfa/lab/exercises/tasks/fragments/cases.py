"""Examples: scores of one tile of rows, whole or with rows or keys past the end."""

import numpy as np

from cupyfa.lab.exercises.exercise import Example


def examples(rng):
    for name, M, N in (("whole tiles", 16, 32), ("13 rows", 13, 16), ("19 keys", 16, 19)):
        Q, K = (rng.standard_normal((count, 16)).astype(np.float16) for count in (M, N))
        S = np.full((M, N), np.nan, np.float32)
        expected = Q.astype(float) @ K.astype(float).T
        yield Example(name, {"Q": Q, "K": K, "S": S, "M": M, "N": N}, {"S": expected})
