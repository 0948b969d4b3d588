"""Examples: equal and unequal parts, large and small scores, and parts without keys.

The scores of a part are around its shift.
"""

import numpy as np

from cupyfa.lab.exercises.exercise import Example

D = 8


def examples(rng):
    for name, lengths, M, shifts in (
        ("two parts", [6, 6], 3, (0, 0)),
        ("parts of unequal size", [10, 1, 4], 3, (0, 0, 0)),
        ("large scores", [5, 5, 5], 2, (120, 120, 120)),
        ("scores far below 0", [4, 6], 2, (-200, -200)),
        ("empty parts", [4, 0, 3, 0], 3, (0, 0, 0, 0)),
        ("no keys at all", [0, 0], 2, (0, 0)),
        ("one part far above the others", [0, 4, 5, 3], 3, (0, -60, 60, -60)),
    ):
        S = [shift + 2 * rng.standard_normal((M, n)) for n, shift in zip(lengths, shifts)]
        V = [rng.standard_normal((n, D)) for n in lengths]
        O_parts = np.full((len(lengths), M, D), np.nan, np.float32)  # parts without keys stay NaN
        lse_parts = np.full((len(lengths), M), -np.inf, np.float32)
        for part, n in enumerate(lengths):
            if n > 0:
                O_parts[part], lse_parts[part] = attention(S[part], V[part])
        results = {"out": np.full((M, D), np.nan), "lse": np.full(M, np.nan)}
        out, lse = attention(np.hstack(S), np.vstack(V))
        yield Example(
            name,
            {
                "O_parts": O_parts,
                "lse_parts": lse_parts,
                **{x: array.astype(np.float32) for x, array in results.items()},
                "parts": len(lengths),
                "M": M,
            },
            {"out": out, "lse": lse},
            grid=(M, 1, 1),
            block=(D, 1, 1),
        )


def attention(S, V):
    if S.shape[1] == 0:
        return np.zeros((len(S), D)), np.full(len(S), -np.inf)
    m = S.max(axis=1)
    lse = m + np.log(np.exp(S - m[:, None]).sum(axis=1))
    return np.exp(S - lse[:, None]) @ V, lse
