"""Examples: large scores, a negative scale, and masked rows."""

import numpy as np

from cupyfa.lab.exercises.exercise import Example


def reference(S, scale):
    visible = np.isfinite(S)
    scores = np.where(visible, scale * np.where(visible, S, 0).astype(float), -np.inf)
    weights = np.zeros(S.shape)
    for row, each in enumerate(scores):
        if np.isfinite(each).any():
            weights[row] = np.exp(each - each.max())
            weights[row] /= weights[row].sum()
    return weights


def examples(rng):
    usual = rng.standard_normal((4, 6)).astype(np.float32)
    masked = usual.copy()
    masked[1, 2:] = masked[2] = -np.inf
    for name, S, scale in (
        ("usual scores", usual, 0.5),
        ("a negative scale", usual, -0.5),
        ("large scores", 4000 + 100 * usual, 1.0),
        ("large scores, a negative scale", 4000 + 100 * usual, -1.0),
        ("masked scores", masked, 0.5),
        ("masked scores, all far below 0", 4000 + 100 * masked, -1.0),
    ):
        weights = reference(S, scale)
        yield Example(name, {"S": S, "scale": scale}, {"weights": weights}, tolerance=1e-4)
