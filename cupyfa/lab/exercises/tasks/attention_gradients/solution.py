import numpy as np


def gradients(Q, K, V, O, L, dO, scale, Bc):
    """Returns dQ [M, d], dK and dV [N, d], tile of keys by tile of keys."""
    dQ, dK, dV = np.zeros_like(Q), np.zeros_like(K), np.zeros_like(V)
    # hole
    D = (dO * O).sum(axis=1, keepdims=True)
    # end
    for first in range(0, len(K), Bc):
        keys = slice(first, min(first + Bc, len(K)))
        # hole
        P = np.exp(scale * Q @ K[keys].T - L[:, None])
        dP = dO @ V[keys].T
        dS = P * (dP - D)
        dV[keys] = P.T @ dO
        dK[keys] = scale * dS.T @ Q
        dQ += scale * dS @ K[keys]
        # end
    return dQ, dK, dV
