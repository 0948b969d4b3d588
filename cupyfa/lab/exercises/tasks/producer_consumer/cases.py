"""Examples: tiles for one round of the ring, for three rounds, and a partial last tile."""

import numpy as np

from cupyfa.lab.exercises.exercise import Example


def examples(rng):
    for name, N in (("one round of the ring", 16), ("three rounds", 48), ("a partial tile", 37)):
        P = rng.random((2, N)).astype(np.float32)
        V = rng.standard_normal((N, 32)).astype(np.float32)
        out = np.full((2, 32), np.nan, np.float32)
        expected = P.astype(float) @ V
        yield Example(name, {"P": P, "V": V, "O": out, "N": N}, {"O": expected}, block=(96, 1, 1))
