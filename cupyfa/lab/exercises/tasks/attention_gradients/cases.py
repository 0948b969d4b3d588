"""Examples; the expected gradients use the Jacobian of each row's softmax."""

import numpy as np

from cupyfa.lab.exercises.exercise import Example


def examples(rng):
    for name, M, N in (("one tile of keys", 5, 4), ("several tiles", 6, 10)):
        Q, dO = rng.standard_normal((2, M, 3))
        K, V = rng.standard_normal((2, N, 3))
        scale = 0.7
        S = scale * Q @ K.T
        P = np.exp(S - S.max(axis=1, keepdims=True))
        L = S.max(axis=1) + np.log(P.sum(axis=1))
        P /= P.sum(axis=1, keepdims=True)
        dP = dO @ V.T
        # For each row, multiply the Jacobian of the softmax, diag(p) - p pᵀ, by the row of dP.
        dS = np.stack([(np.diag(p) - np.outer(p, p)) @ dp for p, dp in zip(P, dP)])
        expected = {"dQ": scale * dS @ K, "dK": scale * dS.T @ Q, "dV": P.T @ dO}
        arguments = {"Q": Q, "K": K, "V": V, "O": P @ V, "L": L, "dO": dO}
        yield Example(name, {**arguments, "scale": scale, "Bc": 4}, expected, tolerance=1e-12)
