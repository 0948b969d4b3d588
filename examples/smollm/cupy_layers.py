"""The layers beside attention on a GPU: products by cuBLAS, and the kernels in kernels/.

Up to FEW rows, product.cu computes norm, product, and SwiGLU or sum in one launch.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from numpy_layers import Layers

import cupyfa

FEW = 4
WARPS = 4  # of a block of product.cu and rms_norm.cu


class CupyLayers(Layers):
    xp = cupy

    def keep(self, x: np.ndarray) -> Any:
        if self.dtype == np.float64:
            raise ValueError("dtype=float64 is for NumPy; use bfloat16 or float32 on a GPU")
        return cupy.asarray(x.astype(self.dtype) if x.ndim == 2 else x)

    def project(self, x: Any, norm: str, name: str) -> Any:
        if len(x) <= FEW:
            return self._few(x, name, self.dtype, norm=norm)
        return super().project(x, norm, name)

    def gate(self, x: Any, norm: str, name: str) -> Any:
        if len(x) <= FEW:
            return self._few(x, name, self.dtype, norm=norm, gated=True)
        return super().gate(x, norm, name)

    def add(self, x: Any, y: Any, name: str) -> Any:
        return self._few(y, name, out=x) if len(x) <= FEW else super().add(x, y, name)

    def logits(self, x: Any) -> Any:
        if len(x) <= FEW:
            return self._few(x, "embedding", np.float32, norm="norm")
        return super().logits(x)

    def _few(
        self,
        x: Any,
        name: str,
        dtype: Any = None,
        *,
        norm: str = "",
        gated: bool = False,
        out: Any = None,
    ) -> Any:
        """Launches product.cu, which adds to out if it is given."""
        w, adds = self.weights[name], out is not None
        if out is None:
            out = cupy.empty((len(x), len(w) // (1 + gated)), dtype)
        constants = {"input": _named(x.dtype), "output": _named(out.dtype), "K": x.shape[1]}
        constants |= {"normalizes": bool(norm), "gated": gated, "adds": adds}
        grid = cupyfa.cdiv(out.shape[1], WARPS), len(x)
        arguments = x, self.weights[norm or "norm"], w, out, np.int32(out.shape[1])
        self._launch("product", grid, (32, WARPS), *arguments, **constants)
        return out

    def product(self, y: Any, name: str, dtype: Any) -> Any:
        from cupyfa.runtime.cuda import cublas  # may be captured in a graph, unlike cupy.matmul

        w = self.weights[name]
        out = cupy.empty((len(y), len(w)), dtype)
        cublas.matmul(y[None, None], w.T[None, None], out[None, None], 1.0)
        return out

    def embed(self, tokens: Any) -> Any:
        table = self.weights["embedding"]
        x = cupy.empty((len(tokens), table.shape[1]), np.float32)
        self._launch("embed", (len(x),), (192,), tokens, table, x, np.int32(x.shape[1]))
        return x

    def norm(self, x: Any, name: str) -> Any:
        y, sizes = cupy.empty(x.shape, self.dtype), map(np.int32, x.shape)
        grid = (cupyfa.cdiv(len(x), WARPS),)
        self._launch("rms_norm", grid, (32, WARPS), x, self.weights[name], y, *sizes)
        return y

    def swiglu(self, both: Any) -> Any:
        rows, inner = len(both), both.shape[1] // 2
        y = cupy.empty((rows, inner), self.dtype)
        self._launch("swiglu", (cupyfa.cdiv(inner, 256), rows), (256,), both, y, np.int32(inner))
        return y

    def rotate_into(self, qkv: Any, k: Any, v: Any, rows: tuple[Any, Any, Any]) -> Any:
        sizes = map(np.int32, (k.shape[1], self.sizes.heads, self.sizes.kv_heads))
        block, tables = (self.sizes.d // 2, qkv.shape[1]), (self.cos, self.sin)
        self._launch("rotate", (len(qkv),), block, qkv, *rows, *tables, k, v, *sizes)
        return qkv

    def sample(self, logits: Any, seeds: Any, positions: Any, temperature: float) -> Any:
        tokens, (rows, vocabulary) = cupy.empty(len(logits), np.int32), logits.shape
        how = np.int32(vocabulary), np.float32(temperature)
        self._launch("sample", (rows,), (1024,), logits, seeds, positions, tokens, *how)
        return tokens

    def _launch(self, name: str, grid: Any, block: Any, *arguments: Any, **constants: Any) -> None:
        constants |= {"scalar": _named(self.dtype), "epsilon": self.sizes.epsilon}
        _compiled(name, **constants)(grid, block, arguments)


def _named(dtype: np.dtype) -> str:
    return str(dtype).replace("float32", "float")


def source(name: str, **constants: Any) -> str:
    """Returns the text of a kernel below its constants, which are types, bools and numbers."""
    folder = Path(__file__).parent / "kernels"
    lines = [
        f"using {constant} = {value};"
        if isinstance(value, str)
        else f"constexpr {type(value).__name__} {constant} = {str(value).lower()};"
        for constant, value in constants.items()
    ]
    texts = ((folder / file).read_text() for file in ("common.cuh", f"{name}.cu"))
    return next(texts) + "\n".join([*lines, *texts])


@cache
def _compiled(name: str, **constants: Any) -> Any:
    """Compiles a kernel with NVRTC, once for each choice of constants."""
    text = source(name, **constants)
    return cupy.RawModule(code=text, options=("-std=c++17",)).get_function(name)
