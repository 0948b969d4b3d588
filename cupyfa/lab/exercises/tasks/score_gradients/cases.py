"""Examples: score gradients without a mask, with a causal mask, and with rows that see no key."""

import numpy as np

from cupyfa.lab.exercises.exercise import Example

_CASES = (("no mask", 11, 13, 0), ("causal", 12, 12, 1), ("causal, rows without keys", 12, 7, 1))


def examples(rng):
    scale = 0.5
    for name, M, N, causal in _CASES:
        Q, K, V, dO = (rng.standard_normal((rows, 8)) for rows in (M, N, N, M))
        visible = (np.arange(N) <= np.arange(M)[:, None] + N - M) | (causal == 0)
        weights = np.where(visible, np.exp(scale * Q @ K.T), 0.0)
        sums = weights.sum(axis=1, keepdims=True)
        P = weights / np.maximum(sums, np.finfo(float).tiny)
        with np.errstate(divide="ignore"):
            lse = np.log(sums[:, 0])
        dP = dO @ V.T
        D = (P * dP).sum(axis=1)
        inputs = {"Q": Q, "K": K, "V": V, "dO": dO, "lse": lse, "D": D}
        arguments = {name: x.astype(np.float32) for name, x in inputs.items()}
        arguments["gradients"] = np.full((M, N), np.nan, np.float32)
        arguments |= {"M": M, "N": N, "causal": causal, "scale": scale}
        expected = {"gradients": scale * P * (dP - D[:, None])}
        yield Example(name, arguments, expected, grid=(2, 2, 1), block=(8, 8, 1))
