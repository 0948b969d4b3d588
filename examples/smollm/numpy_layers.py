"""The layers beside attention in NumPy.

The residual stream, logits and sums are of float32 at least, other results of the model's dtype.
"""

from typing import Any

import ml_dtypes
import numpy as np
from weights import Arrays

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}


class NumpyLayers:
    """The layers of a model. Matrices are rounded to its dtype and kept in that of sums."""

    xp: Any = np

    def __init__(self, sizes: Any, weights: Arrays, dtype: str) -> None:
        self.sizes, self.dtype = sizes, np.dtype(DTYPES[dtype])
        self.sums = np.dtype(np.float64 if dtype == "float64" else np.float32)
        self.weights = {name: self.keep(x) for name, x in weights.items()}
        frequencies = sizes.base ** -(np.arange(0, sizes.d, 2) / sizes.d)
        angle = np.arange(sizes.context)[:, None] * frequencies  # [positions, d / 2]
        self.cos, self.sin = (self.xp.asarray(f(angle), self.sums) for f in (np.cos, np.sin))

    def keep(self, x: np.ndarray) -> Any:
        return (x.astype(self.dtype) if x.ndim == 2 else x).astype(self.sums)

    def embed(self, tokens: Any) -> Any:
        return self.weights["embedding"][tokens]

    def norm(self, x: Any, name: str) -> Any:
        mean = np.mean(x * x, -1, keepdims=True)
        return (x / np.sqrt(mean + self.sizes.epsilon) * self.weights[name]).astype(self.dtype)

    def product(self, x: Any, name: str, norm: str = "", gated: bool = False, into: Any = None):
        """Computes y wᵀ, where y is x or, if `norm` names its weights, the RMS norm of x.

        gated: returns silu(g) u (SwiGLU) of the product's halves. into: an array to add it to.
        """
        out = self.multiply(self.norm(x, norm) if norm else x, name)
        if into is not None:
            into += out
            return into
        out = out if name == "embedding" else out.astype(self.dtype, copy=False)
        return self.swiglu(out) if gated else out

    def multiply(self, y: Any, name: str) -> Any:
        return y.astype(self.sums) @ self.weights[name].T

    def swiglu(self, both: Any) -> Any:
        gate, up = np.split(both.astype(self.sums), 2, -1)
        return (gate * np.exp(-np.logaddexp(0, -gate)) * up).astype(self.dtype)

    def rotate_into(self, qkv: Any, k: Any, v: Any, rows: tuple[Any, Any, Any]) -> Any:
        """Rotates queries and keys of qkv [rows, all heads, d]; writes keys and values to pages."""
        pages, places, positions = rows  # of each row: its page, its place there, its position
        ends = self.sizes.heads, self.sizes.heads + self.sizes.kv_heads
        x = qkv[:, : ends[1]].astype(self.sums)
        cos, sin = (table[positions][:, None] for table in (self.cos, self.sin))
        even, odd = x[..., ::2], x[..., 1::2]  # pairs of columns, as the file orders them
        turned = np.stack([cos * even - sin * odd, sin * even + cos * odd], -1)
        qkv[:, : ends[1]] = turned.reshape(x.shape)
        k[pages, places], v[pages, places] = qkv[:, ends[0] : ends[1]], qkv[:, ends[1] :]
        return qkv

    def sample(self, logits: Any, seeds: Any, positions: Any, temperature: float) -> Any:
        """Draws tokens [rows] by adding Gumbel noise of each row's seed and position to logits."""
        if temperature > 0:
            random = map(np.random.default_rng, zip(seeds.tolist(), positions.tolist()))
            logits = logits / temperature + [x.gumbel(size=logits.shape[1]) for x in random]
        return logits.argmax(-1).astype(np.int32)
