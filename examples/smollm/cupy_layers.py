"""The layers beside attention on a GPU: products by cuBLAS, and the kernels in kernels/.

Up to FEW rows, product.cu computes norm, product, and SwiGLU or sum in one launch, which may begin
before the launch before has ended (programmatic dependent launch).
"""

import ctypes
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np
from numpy_layers import NumpyLayers

import cupyfa
from cupyfa.runtime.choose_backend import backend_named

FEW = 4
THREADS = 128  # of a block of product.cu, rms_norm.cu and swiglu.cu


class CupyLayers(NumpyLayers):
    xp = cupy

    def keep(self, x: np.ndarray) -> Any:
        if self.dtype == np.float64:
            raise ValueError("dtype=float64 is for NumPy; use bfloat16 or float32 on a GPU")
        return cupy.asarray(x.astype(self.dtype) if x.ndim == 2 else x)

    def embed(self, tokens: Any) -> Any:
        table = self.weights["embedding"]
        x = cupy.empty((len(tokens), table.shape[1]), np.float32)
        self._launch("embed", (len(x),), THREADS, tokens, table, x, x.shape[1])
        return x

    def norm(self, x: Any, name: str) -> Any:
        y, blocks = cupy.empty(x.shape, self.dtype), cupyfa.cdiv(len(x), THREADS // 32)
        self._launch("rms_norm", (blocks,), THREADS, x, self.weights[name], y, *x.shape)
        return y

    def product(self, x: Any, name: str, norm: str = "", gated: bool = False, into: Any = None):
        if len(x) > FEW:
            return super().product(x, name, norm, gated, into)
        w, out, at_once = self.weights[name], into, 4 if name == "embedding" else 1 + gated
        if into is None:
            out = cupy.empty((len(x), len(w) // (1 + gated)), self._result(name))
        constants = {"input": str(x.dtype), "output": str(out.dtype), "K": x.shape[1]}
        constants |= {"normalizes": bool(norm), "gated": gated, "adds": into is not None}
        warps = cupyfa.cdiv(out.shape[1], 1 if gated else at_once)
        grid = cupyfa.cdiv(32 * warps, THREADS), cupyfa.cdiv(len(x), 4)
        arguments = x, self.weights[norm or "norm"], w, out, out.shape[1], len(x)
        self._launch("product", grid, THREADS, *arguments, at_once=at_once, **constants)
        return out

    def multiply(self, y: Any, name: str) -> Any:
        from cupyfa.runtime.cuda import cublas  # may be captured in a graph, unlike cupy.matmul

        w = self.weights[name]
        out = cupy.empty((len(y), len(w)), self._result(name))
        cublas.matmul(y[None, None], w.T[None, None], out[None, None], 1.0)
        return out

    def _result(self, name: str) -> Any:
        return self.sums if name.endswith(("embedding", "out", "down")) else self.dtype

    def swiglu(self, both: Any) -> Any:
        y = cupy.empty((len(both), both.shape[1] // 2), self.dtype)
        grid = cupyfa.cdiv(y.shape[1], THREADS), len(y)
        self._launch("swiglu", grid, THREADS, both, y, y.shape[1])
        return y

    def rotate_into(self, qkv: Any, k: Any, v: Any, rows: tuple[Any, Any, Any]) -> Any:
        threads, tables = qkv.shape[1] * self.sizes.d // 2, (self.cos, self.sin)
        sizes = k.shape[1], self.sizes.heads, self.sizes.kv_heads, self.sizes.d
        self._launch("rotate", (len(qkv),), threads, qkv, *rows, *tables, k, v, *sizes)
        return qkv

    def sample(self, logits: Any, seeds: Any, positions: Any, temperature: float) -> Any:
        tokens, how = cupy.empty(len(logits), np.int32), (logits.shape[1], float(temperature))
        self._launch("sample", (len(logits),), 1024, logits, seeds, positions, tokens, *how)
        return tokens

    def _launch(self, name: str, grid: Any, threads: int, *given: Any, **constants: Any) -> None:
        """Launches a kernel; product.cu itself waits for the launch before, so it begins early."""
        early = name == "product" and int(cupy.cuda.Device().compute_capability) >= 90
        constants |= {"scalar": str(self.dtype), "epsilon": self.sizes.epsilon, "early": early}
        launch = SimpleNamespace(threads=threads, shared_bytes=0, begins_early=early)
        launch.grid = (*grid, 1, 1)[:3]
        start = backend_named("cuda").starter(_compiled(name, **constants), launch, (), ())
        kinds, address = {int: ctypes.c_int, float: ctypes.c_float}, ctypes.c_void_p
        values = [kinds[type(x)](x) if type(x) in kinds else address(x.data.ptr) for x in given]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        start(cupy.cuda.get_current_stream().ptr, ctypes.addressof(pointers), 0)


def source(name: str, **constants: Any) -> str:
    """Returns the text of a kernel below its constants, which are types, bools and numbers."""
    kinds = {str: "using", **{x: f"constexpr {x.__name__}" for x in (bool, int, float)}}
    lines = [f"{kinds[type(y)]} {x} = {str(y).lower()};" for x, y in constants.items()]
    folder = Path(__file__).parent / "kernels"
    common, kernel = ((folder / x).read_text() for x in ("common.cuh", f"{name}.cu"))
    return "\n".join([common, *lines, kernel])


@cache
def _compiled(name: str, **constants: Any) -> Any:
    text = source(name, **constants)
    return cupy.RawModule(code=text, options=("-std=c++17",)).get_function(name)
