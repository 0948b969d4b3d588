import numpy as np


def alibi(S, first_row, first_key, M, N):
    """Adds the bias of ALiBi to a tile of scores S [heads, rows, keys]."""
    heads, rows, keys = S.shape
    # hole
    slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
    positions = first_row + np.arange(rows) + N - M
    distances = np.abs(positions[:, None] - (first_key + np.arange(keys)))
    S = S - slopes[:, None, None] * distances
    # end
    return S
