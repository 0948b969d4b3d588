"""Examples: attention over two sets of keys, with rows that see no key of one or both sets."""

import numpy as np

from cupyfa.lab.exercises.exercise import Example


def attention(scores, V):
    """Computes O and L from scores [rows, keys]."""
    largest = scores.max(axis=1, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(largest), largest, 0)[:, None])
    total = weights.sum(axis=1)
    with np.errstate(divide="ignore"):
        L = np.where(total > 0, largest + np.log(total), -np.inf)
    return (weights / np.where(total > 0, total, 1)[:, None]) @ V, L


def examples(rng):
    V = rng.standard_normal((12, 3))
    usual = rng.standard_normal((4, 12))
    one_sided = usual.copy()
    one_sided[0, :5] = one_sided[1, 5:] = -np.inf
    nothing = one_sided.copy()
    nothing[2] = -np.inf
    for name, scores in (
        ("usual scores", usual),
        ("sets of different weight", usual + 6 * (np.arange(12) < 5)),
        ("large scores", 900 + usual),
        ("sets of very different scores", usual + 2000 * (np.arange(12) < 5)),
        ("rows of very different scores", usual + [[1000], [-1000], [0], [500]]),
        ("rows that see one set", 900 + one_sided),
        ("a row that sees nothing", nothing),
    ):
        O1, L1 = attention(scores[:, :5], V[:5])
        O2, L2 = attention(scores[:, 5:], V[5:])
        O, L = attention(scores, V)
        arguments = {"O1": O1, "L1": L1, "O2": O2, "L2": L2}
        yield Example(name, arguments, {"O": O, "L": L}, tolerance=1e-12)
