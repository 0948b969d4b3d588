"""Examples: weighted sums of one and of three tiles of values; weights are rounded to float16."""

import numpy as np

from cupyfa.lab.exercises.exercise import Example


def examples(rng):
    for name, N in (("one tile", 16), ("three tiles", 48)):
        Q, K, V = (
            (size * rng.standard_normal((rows, 16))).astype(np.float16)
            for size, rows in ((0.4, 16), (0.4, N), (1.0, N))
        )
        weights = np.exp(Q.astype(float) @ K.astype(float).T).astype(np.float16)
        out = np.full((16, 16), np.nan, np.float32)
        arguments = {"Q": Q, "K": K, "V": V, "O": out, "N": N}
        yield Example(
            name, arguments, {"O": weights.astype(float) @ V.astype(float)}, tolerance=1e-3
        )
