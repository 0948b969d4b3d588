"""Examples: new tokens in an empty cache, after cached tokens, and in unequal sequences."""

import numpy as np

from cupyfa.lab.exercises.exercise import Example

D, POSITIONS = 16, 40


def examples(rng):
    angles = np.arange(POSITIONS)[:, None] / 100 ** (np.arange(D // 2) / (D // 2))
    cosines, sines = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
    for name, lengths, tokens in (
        ("an empty cache", [0], 4),
        ("one token after others", [9], 1),
        ("sequences of different lengths", [5, 0, 20], 3),
    ):
        x = rng.standard_normal((len(lengths), tokens, D)).astype(np.float32)
        position = np.array(lengths)[:, None] + np.arange(tokens)
        pairs = x[..., : D // 2] + 1j * x[..., D // 2 :].astype(float)
        rotated = pairs * np.exp(1j * angles[position])
        yield Example(
            name,
            {
                "x": x,
                "cosines": cosines,
                "sines": sines,
                "lengths": np.array(lengths, np.int32),
                "tokens": tokens,
            },
            {"x": np.concatenate([rotated.real, rotated.imag], axis=-1)},
            grid=(len(lengths) * tokens, 1, 1),
            block=(D // 2, 1, 1),
        )
