import numpy as np


def attention(Q, K, V, visible, Br, Bc):
    """Computes O [M, d] and L [M] with one pass over the keys for each tile of rows."""
    (M, d), N = Q.shape, len(K)
    out, lse = np.empty((M, d)), np.empty(M)
    for first_row in range(0, M, Br):
        rows = np.arange(first_row, min(first_row + Br, M))
        m = np.full((len(rows), 1), -np.inf)
        l = np.zeros((len(rows), 1))
        O = np.zeros((len(rows), d))
        for first_key in range(0, N, Bc):
            keys = np.arange(first_key, min(first_key + Bc, N))
            S = Q[rows] @ K[keys].T / np.sqrt(d)
            S[~visible[np.ix_(rows, keys)]] = -np.inf
            # hole
            m_new = np.maximum(m, S.max(axis=1, keepdims=True))
            m_safe = np.where(np.isfinite(m_new), m_new, 0)
            P, factor = np.exp(S - m_safe), np.exp(m - m_safe)
            l = factor * l + P.sum(axis=1, keepdims=True)
            O = factor * O + P @ V[keys]
            m = m_new
            # end
        # hole
        out[rows] = O / l
        lse[rows] = (m + np.log(l))[:, 0]
        # end
    return out, lse
