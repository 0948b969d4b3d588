"""Examples: products of four rows with one tile, two tiles, and a partial last tile of keys."""

import numpy as np

from cupyfa.lab.exercises.exercise import Example


def examples(rng):
    for name, N in (("one tile", 16), ("two tiles", 32), ("a partial fifth tile", 75)):
        P = rng.random((4, N)).astype(np.float32)
        V = rng.standard_normal((N, 32)).astype(np.float32)
        out = np.full((4, 32), np.nan, np.float32)
        expected = P.astype(float) @ V
        yield Example(name, {"P": P, "V": V, "O": out, "N": N}, {"O": expected}, block=(128, 1, 1))
