"""Examples with M = N, with M < N, and with M > N, where the first rows see no key."""

import numpy as np

from cupyfa.lab.exercises.exercise import Example

BR, BC, D = 32, 8, 8


def examples(rng):
    for name, M, N in (
        ("M = N", 40, 40),
        ("fewer queries than keys", 5, 29),
        ("several tiles of queries", 70, 85),
        ("rows without a visible key", 45, 9),
    ):
        q, k, v = (rng.standard_normal((rows, D)).astype(np.float32) for rows in (M, N, N))
        row, key = np.arange(M)[:, None], np.arange(N)
        P = np.where(key <= row + N - M, np.exp(q.astype(float) @ k.T / np.sqrt(D)), 0)
        total = P.sum(axis=1, keepdims=True)
        blocks = -(-M // BR)
        last_rows = np.minimum(BR * np.arange(1, blocks + 1), M) - 1
        arrays = {"q": q, "k": k, "v": v, "out": np.full_like(q, 7)}
        yield Example(
            name,
            {
                **arrays,
                "visited": np.zeros(blocks, np.int32),
                "M": M,
                "N": N,
                "scale": float(1 / np.sqrt(D)),
            },
            {
                "out": P @ v / np.where(total == 0, 1, total),
                "visited": np.maximum(-(-(last_rows + 1 + N - M) // BC), 0),
            },
            grid=(blocks, 1, 1),
        )
