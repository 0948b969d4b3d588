"""Examples: one-sided and two-sided windows, M ≠ N, and rows that see no key."""

import numpy as np

from cupyfa.lab.exercises.exercise import Example

BR, BC, D = 8, 4, 8


def examples(rng):
    for name, M, N, left, right in (
        ("a window to the left", 32, 32, 6, 0),
        ("to both sides", 32, 32, 5, 9),
        ("more keys than queries", 13, 39, 7, 2),
        ("more queries than keys", 30, 11, 3, 1),
        ("the own key only", 20, 26, 0, 0),
    ):
        Q, K, V = (rng.standard_normal((rows, D)) for rows in (M, N, N))
        distance = np.arange(N) - (np.arange(M)[:, None] + N - M)
        seen = (distance >= -left) & (distance <= right)
        P = np.where(seen, np.exp(Q @ K.T / np.sqrt(D)), 0)
        total = P.sum(axis=1, keepdims=True)
        visited = np.zeros((-(-M // BR), -(-N // BC)), int)
        row, key = np.nonzero(seen)
        visited[row // BR, key // BC] = 1
        yield Example(
            name,
            {"Q": Q, "K": K, "V": V, "left": left, "right": right, "Br": BR, "Bc": BC},
            {"out": P @ V / np.where(total > 0, total, 1), "visited": visited},
            tolerance=1e-12,
        )
