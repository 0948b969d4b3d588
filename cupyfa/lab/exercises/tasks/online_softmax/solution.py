import numpy as np


def online_softmax(x, tile):
    """Returns the maximum of x and the sum of exp(x - maximum)."""
    largest, total = -np.inf, 0.0
    for start in range(0, len(x), tile):
        part = x[start : start + tile]
        # hole
        new = max(largest, part.max())
        if new == -np.inf:
            continue
        total = total * np.exp(largest - new) + np.exp(part - new).sum()
        largest = new
        # end
    return largest, total
