"""Examples: gradients of one tile, of several tiles, and of partial tiles."""

import numpy as np

from cupyfa.lab.exercises.exercise import Example


def examples(rng):
    scale = 0.5
    for name, M, N in (("one tile", 8, 8), ("partial tiles", 13, 21), ("four tiles", 32, 32)):
        Q, K, V, dO = (rng.standard_normal((rows, 8)) for rows in (M, N, N, M))
        scores = scale * Q @ K.T
        lse = np.log(np.exp(scores).sum(axis=1))
        P = np.exp(scores - lse[:, None])
        dP = dO @ V.T
        D = (P * dP).sum(axis=1)
        dS = P * (dP - D[:, None])
        inputs = {"Q": Q, "K": K, "V": V, "dO": dO, "lse": lse, "D": D}
        arguments = {name: x.astype(np.float32) for name, x in inputs.items()}
        arguments["dQ"] = np.zeros((M, 8), np.float32)
        arguments |= {name: np.full((N, 8), np.nan, np.float32) for name in ("dK", "dV")}
        arguments |= {"M": M, "N": N, "scale": scale}
        expected = {"dQ": scale * dS @ K, "dK": scale * dS.T @ Q, "dV": P.T @ dO}
        yield Example(name, arguments, expected, grid=((N + 7) // 8, 1, 1), block=(64, 1, 1))
