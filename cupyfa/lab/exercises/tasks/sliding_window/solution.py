import numpy as np


def sliding_window(Q, K, V, left, right, Br, Bc):
    """Returns attention with a window, and the number of visits to each tile [Q tile, K tile]."""
    (M, d), N = Q.shape, len(K)
    out = np.zeros((M, d))
    visited = np.zeros((-(-M // Br), -(-N // Bc)), int)
    for first_row in range(0, M, Br):
        rows = np.arange(first_row, min(first_row + Br, M))
        positions = rows + N - M
        # hole
        begin = max(0, positions[0] - left) // Bc
        end = -(-min(N, positions[-1] + right + 1) // Bc)
        # end
        total, products = np.zeros((len(rows), 1)), np.zeros((len(rows), d))
        for tile in range(begin, end):
            visited[first_row // Br, tile] += 1
            keys = np.arange(tile * Bc, min((tile + 1) * Bc, N))
            S = Q[rows] @ K[keys].T / np.sqrt(d)
            # hole
            distance = keys - positions[:, None]
            S[(distance < -left) | (distance > right)] = -np.inf
            # end
            P = np.exp(S)  # scores are small here, so no maximum is subtracted
            total += P.sum(axis=1, keepdims=True)
            products += P @ V[keys]
        out[rows] = products / np.where(total > 0, total, 1)
    return out, visited
