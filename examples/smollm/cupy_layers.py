"""The layers beside attention on a GPU: products by cuBLAS, and the kernels in kernels/.

Up to FEW rows, product.cu computes norm, product, and SwiGLU or sum in one launch.
"""

import ctypes
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np
from numpy_layers import DTYPES, NumpyLayers
from weights import Arrays

import cupyfa
from cupyfa.runtime.choose_backend import backend_named

FEW = 4
AHEAD = 7 << 20  # bytes of the next matrices, which are read while attention is computed
THREADS = 128  # of a block of product.cu, rms_norm.cu and swiglu.cu


class CupyLayers(NumpyLayers):
    xp = cupy

    def __init__(self, sizes: Any, weights: Arrays, dtype: str) -> None:
        if dtype == "float64":
            raise ValueError("dtype=float64 is for NumPy; use bfloat16 or float32 on a GPU")
        count = sum(x.size for x in weights.values())
        self.free = cupy.empty(count + AHEAD, DTYPES[dtype])  # matrices, in the order of their use
        super().__init__(sizes, weights, dtype)

    def keep(self, x: np.ndarray) -> Any:
        if x.ndim == 1:
            return cupy.asarray(x)
        kept, self.free = self.free[: x.size].reshape(x.shape), self.free[x.size :]
        kept.set(x.astype(self.dtype))
        return kept

    def embed(self, tokens: Any) -> Any:
        table = self.weights["embedding"]
        x = cupy.empty((len(tokens), table.shape[1]), np.float32)
        return self._launch("embed", x, (len(x),), THREADS, tokens, table, x, x.shape[1])

    def norm(self, x: Any, name: str) -> Any:
        y, blocks = cupy.empty(x.shape, self.dtype), cupyfa.cdiv(len(x), THREADS // 32)
        return self._launch("rms_norm", y, (blocks,), THREADS, x, self.weights[name], y, *x.shape)

    def product(self, x: Any, name: str, norm: str = "", gated: bool = False, into: Any = None):
        if len(x) > FEW:
            return super().product(x, name, norm, gated, into)
        w, out, at_once = self.weights[name], into, 4 if name == "embedding" else 1 + gated
        if into is None:
            out = cupy.empty((len(x), len(w) // (1 + gated)), self._result(name))
        constants = {"input": str(x.dtype), "output": str(out.dtype), "K": x.shape[1]}
        constants |= {"normalizes": bool(norm), "gated": gated, "adds": into is not None}
        constants |= {"rows": len(x), "ahead": AHEAD * name.endswith("qkv"), "at_once": at_once}
        blocks = cupyfa.cdiv(32 * len(w) // at_once, THREADS)
        arguments = x, self.weights[norm or "norm"], w, out, out.shape[1]
        return self._launch("product", out, (blocks,), THREADS, *arguments, **constants)

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
        return self._launch("swiglu", y, grid, THREADS, both, y, y.shape[1])

    def rotate_into(self, qkv: Any, k: Any, v: Any, rows: tuple[Any, Any, Any]) -> Any:
        heads, kv_heads, d = self.sizes.heads, self.sizes.kv_heads, self.sizes.d
        given = qkv, *rows, self.cos, self.sin, k, v, k.shape[1], heads, kv_heads, d
        return self._launch("rotate", qkv, (len(qkv),), qkv.shape[1] * d // 2, *given)

    def sample(self, logits: Any, seeds: Any, positions: Any, temperature: float) -> Any:
        tokens = cupy.empty(len(logits), np.int32)
        given = logits, seeds, positions, tokens, logits.shape[1], float(temperature)
        return self._launch("sample", tokens, (len(logits),), 1024, *given)

    def _launch(self, name: str, out: Any, grid: Any, threads: int, *given: Any, **constants: Any):
        """Launches a kernel and returns `out`. product.cu begins early, and waits by itself."""
        early = name == "product" and int(cupy.cuda.Device().compute_capability) >= 90
        constants |= {"scalar": str(self.dtype), "epsilon": self.sizes.epsilon, "early": early}
        grid = (*grid, 1, 1)[:3]
        launch = SimpleNamespace(grid=grid, threads=threads, shared_bytes=0, begins_early=early)
        start = backend_named("cuda").starter(_compiled(name, **constants), launch, (), ())
        kinds, address = {int: ctypes.c_int, float: ctypes.c_float}, ctypes.c_void_p
        values = [kinds[type(x)](x) if type(x) in kinds else address(x.data.ptr) for x in given]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        start(cupy.cuda.get_current_stream().ptr, ctypes.addressof(pointers), 0)
        return out


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
