"""Examples: one key head per query head, per group, or for all heads; several batch elements."""

import numpy as np

from cupyfa.lab.exercises.exercise import Example


def examples(rng):
    M, N, d = 5, 7, 8
    for name, batch, heads, kv_heads in (
        ("one batch element", 1, 6, 2),
        ("three batch elements", 3, 6, 3),
        ("one key head for all", 2, 4, 1),
        ("no sharing", 2, 3, 3),
    ):
        q = rng.standard_normal((batch, heads, M, d)).astype(np.float32)
        k, v = rng.standard_normal((2, batch, kv_heads, N, d)).astype(np.float32)
        K, V = (np.repeat(x.astype(float), heads // kv_heads, axis=1) for x in (k, v))
        P = np.exp(q @ K.swapaxes(2, 3) / np.sqrt(d))
        arrays = {"q": q, "k": k, "v": v, "out": np.full_like(q, np.nan)}
        sizes = {"heads": heads, "kv_heads": kv_heads, "M": M, "N": N}
        yield Example(
            name,
            {**arrays, **sizes, "scale": float(1 / np.sqrt(d))},
            {"out": P @ V / P.sum(axis=-1, keepdims=True)},
            grid=(batch * heads, 1, 1),
        )
