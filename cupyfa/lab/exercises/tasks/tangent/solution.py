import numpy as np


def tangent(Q, K, V, Q_dot, K_dot, V_dot, scale, Bc):
    """Returns O [M, dv] and its tangent O_dot [M, dv], in one pass over tiles of keys."""
    top = np.full((len(Q), 1), -np.inf)
    total, moved = np.zeros((2, len(Q), 1))
    O, O_dot = np.zeros((2, len(Q), V.shape[1]))
    for first in range(0, len(K), Bc):
        keys = slice(first, min(first + Bc, len(K)))
        S = scale * Q @ K[keys].T
        # hole
        S_dot = scale * (Q_dot @ K[keys].T + Q @ K_dot[keys].T)
        # end
        before, top = top, np.maximum(top, S.max(axis=1, keepdims=True))
        P, factor = np.exp(S - top), np.exp(before - top)
        total = total * factor + P.sum(axis=1, keepdims=True)
        O = O * factor + P @ V[keys]
        # hole
        moved = moved * factor + (P * S_dot).sum(axis=1, keepdims=True)
        O_dot = O_dot * factor + (P * S_dot) @ V[keys] + P @ V_dot[keys]
        # end
    O = O / total
    # hole
    O_dot = O_dot / total - moved / total * O
    # end
    return O, O_dot
