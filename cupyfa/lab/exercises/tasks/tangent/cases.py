"""Examples; the expected tangents use the Jacobian of each row's softmax."""

import numpy as np

from cupyfa.lab.exercises.exercise import Example


def examples(rng):
    for name, M, N in (("one tile of keys", 5, 4), ("several tiles", 6, 10)):
        Q, Q_dot = rng.standard_normal((2, M, 3))
        K, V, K_dot, V_dot = rng.standard_normal((4, N, 3))
        scale = 0.7
        S = scale * Q @ K.T
        P = np.exp(S - S.max(axis=1, keepdims=True))
        P /= P.sum(axis=1, keepdims=True)
        S_dot = scale * (Q_dot @ K.T + Q @ K_dot.T)
        # For each row, multiply the Jacobian of the softmax, diag(p) - p pᵀ, by the row of S_dot.
        P_dot = np.stack([(np.diag(p) - np.outer(p, p)) @ s for p, s in zip(P, S_dot)])
        expected = {"O": P @ V, "O_dot": P_dot @ V + P @ V_dot}
        arguments = {"Q": Q, "K": K, "V": V, "Q_dot": Q_dot, "K_dot": K_dot, "V_dot": V_dot}
        yield Example(name, {**arguments, "scale": scale, "Bc": 4}, expected, tolerance=1e-12)
