import numpy as np


def softmax(S, scale):
    """Returns the softmax of scale * S along each row of S [rows, keys]."""
    visible = np.isfinite(S)  # masked scores are -infinity
    scores = np.where(visible, np.float32(scale) * np.where(visible, S, 0), -np.inf)
    # hole
    largest = scores.max(axis=1, keepdims=True)
    largest = np.where(np.isfinite(largest), largest, 0)
    weights = np.exp(scores - largest)
    total = weights.sum(axis=1, keepdims=True)
    return weights / np.where(total > 0, total, 1)
    # end
