"""Examples: sinks close to the scores, far from them, or missing; scores near -100."""

import numpy as np

from cupyfa.lab.exercises.exercise import Example


def examples(rng):
    heads, M, N, d = 3, 4, 6, 8
    for name, sinks, shift in (
        ("sinks among the scores", [-1, 0.5, 2], 0),
        ("large scores", [88, 90, 92], 90),
        ("a sink above all scores", [100, 3, 95], 0),
        ("a head without a sink", [1, -np.inf, 0], 0),
        ("scores near -100 and no sink", [-np.inf] * 3, -100),
    ):
        q, k, v = (rng.standard_normal((heads, rows, d)).astype(np.float32) for rows in (M, N, N))
        scale = 0.5
        q[..., 0], k[..., 0] = 1, shift / scale
        S = scale * q.astype(float) @ k.swapaxes(1, 2)
        sinks = np.array(sinks, np.float32)
        with_sink = np.concatenate(
            [S, np.broadcast_to(sinks[:, None, None], (heads, M, 1))], axis=2
        )
        m = with_sink.max(axis=2)
        lse = m + np.log(np.exp(with_sink - m[..., None]).sum(axis=2))
        arrays = {"q": q, "k": k, "v": v, "sinks": sinks}
        results = {"out": np.full_like(q, np.nan), "lse": np.full((heads, M), np.nan, np.float32)}
        yield Example(
            name,
            {**arrays, **results, "M": M, "N": N, "scale": scale},
            {"out": np.exp(S - lse[..., None]) @ v, "lse": lse},
            grid=(heads, 1, 1),
        )
