"""Examples: partial tiles, masks, and rising scores."""

import numpy as np

from cupyfa.lab.exercises.exercise import Example


def reference(Q, K, V, visible):
    S = np.where(visible, Q @ K.T / np.sqrt(Q.shape[1]), -np.inf)
    m = S.max(axis=1, keepdims=True)
    P = np.exp(S - m)
    l = P.sum(axis=1, keepdims=True)
    return P @ V / l, (m + np.log(l))[:, 0]


def examples(rng):
    for name, M, N, window, growth in (
        ("one tile", 4, 4, 99, 0),
        ("several tiles", 8, 12, 99, 0),
        ("scores that rise", 8, 12, 99, 40),
        ("partial tiles", 7, 13, 99, 0),
        ("rows that see three keys", 12, 12, 3, 0),
        ("large scores", 8, 12, 99, 3000),
    ):
        Q, K, V = (rng.standard_normal((rows, 4)) for rows in (M, N, N))
        Q[:, 0] = 1.0
        K[:, 0] += growth * (1 + np.arange(N) / N)
        if growth > 1000:  # rows with scores of both signs
            Q[1::2, 0] = -1.0
        distance = np.arange(M)[:, None] - np.arange(N)
        visible = (np.abs(distance) < window) & ((distance >= 0) | (window == 99))
        O, L = reference(Q, K, V, visible)
        arguments = {"Q": Q, "K": K, "V": V, "visible": visible, "Br": 4, "Bc": 4}
        yield Example(name, arguments, {"O": O, "L": L}, tolerance=1e-12)
