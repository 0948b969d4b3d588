"""The layers beside attention in NumPy.

x, the residual stream, is of the dtype of sums, which is float64 if the model's dtype is, otherwise
float32. All other arrays are of the model's dtype. Matrices are [outputs, inputs], as in the file.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from weights import Arrays

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}


class Layers:
    """What the layers of NumPy and CuPy have in common."""

    xp: Any

    def __init__(self, sizes: Any, weights: Arrays, dtype: str) -> None:
        self.sizes, self.dtype = sizes, np.dtype(DTYPES[dtype])
        self.sums = np.dtype(np.float64 if dtype == "float64" else np.float32)
        self.weights = {name: self.keep(x) for name, x in weights.items()}
        frequencies = sizes.base ** -(np.arange(0, sizes.d, 2) / sizes.d)
        angle = np.arange(sizes.context)[:, None] * frequencies  # [positions, d / 2]
        self.cos, self.sin = (self.xp.asarray(f(angle), self.sums) for f in (np.cos, np.sin))

    def project(self, x: Any, norm: str, name: str) -> Any:
        """Computes norm(x) wᵀ."""
        return self.product(self.norm(x, norm), name, self.dtype)

    def gate(self, x: Any, norm: str, name: str) -> Any:
        """Computes silu(g) u, where norm(x) wᵀ has the columns of g, then those of u (SwiGLU)."""
        return self.swiglu(self.project(x, norm, name))

    def add(self, x: Any, y: Any, name: str) -> Any:
        """Computes x + y wᵀ in place of x."""
        x += self.product(y, name, self.sums)
        return x

    def logits(self, x: Any) -> Any:
        """Computes logits [rows, vocabulary]; the embeddings are the weights."""
        return self.product(self.norm(x, "norm"), "embedding", self.sums)


class NumpyLayers(Layers):
    xp = np

    def keep(self, x: np.ndarray) -> np.ndarray:
        """Rounds a matrix to the model's dtype, and keeps it in the dtype of sums."""
        return (x.astype(self.dtype) if x.ndim == 2 else x).astype(self.sums)

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        return self.weights["embedding"][tokens]

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean = np.mean(x * x, -1, keepdims=True)
        return (x / np.sqrt(mean + self.sizes.epsilon) * self.weights[name]).astype(self.dtype)

    def product(self, y: np.ndarray, name: str, dtype: Any) -> np.ndarray:
        return (y.astype(self.sums) @ self.weights[name].T).astype(dtype)

    def swiglu(self, both: np.ndarray) -> np.ndarray:
        gate, up = np.split(both.astype(self.sums), 2, -1)
        with np.errstate(over="ignore"):  # exp of a large number is infinity, and silu 0
            return (gate / (1 + np.exp(-gate)) * up).astype(self.dtype)

    def rotate_into(self, qkv: Any, k: Any, v: Any, rows: tuple[Any, Any, Any]) -> Any:
        """Rotates queries and keys of qkv [rows, all heads, d]; writes keys and values to pages.

        rows: the page of each row, its place in the page, and its position in the sequence.
        """
        pages, places, positions = rows
        ends = self.sizes.heads, self.sizes.heads + self.sizes.kv_heads
        x = qkv[:, : ends[1]].astype(self.sums)
        cos, sin = (table[positions][:, None] for table in (self.cos, self.sin))
        even, odd = x[..., ::2], x[..., 1::2]  # pairs of columns, as the file orders them
        turned = np.stack([cos * even - sin * odd, sin * even + cos * odd], -1).reshape(x.shape)
        qkv[:, : ends[1]] = turned
        k[pages, places], v[pages, places] = qkv[:, ends[0] : ends[1]], qkv[:, ends[1] :]
        return qkv

    def sample(self, logits: Any, seeds: Any, positions: Any, temperature: float) -> Any:
        """Draws tokens [rows] as kernels/sample.cu does, where it is explained."""
        if temperature > 0:
            row = hashed(seeds ^ hashed(positions.astype(np.uint32)))
            places = hashed(np.arange(logits.shape[1], dtype=np.uint32))
            u = ((hashed(row[:, None] ^ places) >> np.uint32(9)) + 0.5) / 2**23
            logits = logits / temperature - np.log(-np.log(u))
        return logits.argmax(-1).astype(np.int32)


def hashed(x: np.ndarray) -> np.ndarray:
    """Mixes the bits of uint32 numbers, as in sample.cu."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ x >> np.uint32(shift)) * np.uint32(factor)
    return x ^ x >> np.uint32(16)
