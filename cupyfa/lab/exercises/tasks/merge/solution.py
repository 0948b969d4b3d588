import numpy as np


def merge(O1, L1, O2, L2):
    """Merges O [rows, d] and L [rows] over two disjoint sets of keys."""
    # hole
    largest = np.maximum(L1, L2)
    safe = np.where(np.isfinite(largest), largest, 0)
    weight1, weight2 = np.exp(L1 - safe), np.exp(L2 - safe)
    total = weight1 + weight2
    with np.errstate(divide="ignore"):
        L = safe + np.log(total)
    share1, share2 = (w / np.where(total > 0, total, 1) for w in (weight1, weight2))
    return share1[:, None] * O1 + share2[:, None] * O2, L
    # end
