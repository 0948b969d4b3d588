"""Examples: first and later score tiles, M ≠ N, and numbers of heads that do not divide 8."""

import numpy as np

from cupyfa.lab.exercises.exercise import Example


def examples(rng):
    for name, shape, first_row, first_key, M, N in (
        ("the first tile", (8, 4, 4), 0, 0, 4, 4),
        ("twelve heads", (12, 4, 6), 0, 0, 4, 6),
        ("a tile further right", (8, 3, 4), 0, 8, 3, 12),
        ("a tile further down", (2, 5, 4), 10, 4, 15, 8),
        ("three heads, positions below 0", (3, 6, 4), 0, 0, 9, 4),
    ):
        S = rng.standard_normal(shape)
        expected = S.copy()
        for head, row, key in np.ndindex(shape):
            distance = abs(first_row + row + N - M - first_key - key)
            expected[head, row, key] -= 2.0 ** (-8 * (head + 1) / shape[0]) * distance
        arguments = {"S": S, "first_row": first_row, "first_key": first_key, "M": M, "N": N}
        yield Example(name, arguments, {"S": expected}, tolerance=1e-12)
