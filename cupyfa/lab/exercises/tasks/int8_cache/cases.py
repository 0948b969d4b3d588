"""Examples: equal scales, a different scale for each token, and scores far from 0."""

import numpy as np

from cupyfa.lab.exercises.exercise import Example


def examples(rng):
    M, N, d = 4, 9, 8
    scale = float(1 / np.sqrt(d))
    for name, sizes in (
        ("equal scales", np.full(N, 0.02)),
        ("a scale for each token", rng.uniform(0.002, 0.03, N)),
        ("large scores", rng.uniform(0.3, 0.6, N)),
    ):
        q = rng.standard_normal((M, d)).astype(np.float32)
        keys, values = rng.integers(-127, 128, (2, N, d), np.int8)
        if name == "large scores":  # each row has only scores above 150 or only some below -150
            q[:, 0], keys[:, 0] = [20, -20, 20, -20], 100
        key_scales = sizes.astype(np.float32)
        value_scales = sizes[::-1].astype(np.float32)
        S = scale * q.astype(float) @ (key_scales[:, None] * keys.astype(float)).T
        lse = S.max(axis=1) + np.log(np.exp(S - S.max(axis=1, keepdims=True)).sum(axis=1))
        arguments = {
            "q": q,
            "keys": keys,
            "key_scales": key_scales,
            "values": values,
            "value_scales": value_scales,
            "out": np.full_like(q, np.nan),
            "lse": np.full(M, np.nan, np.float32),
            "M": M,
            "N": N,
            "scale": scale,
        }
        V = value_scales[:, None] * values.astype(float)
        yield Example(name, arguments, {"out": np.exp(S - lse[:, None]) @ V, "lse": lse})
