"""The layers beside attention on a GPU: products by cuBLAS, and the kernels in kernels/.

Up to FEW rows, product.cu computes norm, product, and SwiGLU or sum in one launch, which may start
early (programmatic dependent launch).
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

FEW = 16
WARPS = 4  # of a block of product.cu and rms_norm.cu


class CupyLayers(NumpyLayers):
    xp = cupy

    def keep(self, x: np.ndarray) -> Any:
        if self.dtype == np.float64:
            raise ValueError("dtype=float64 is for NumPy; use bfloat16 or float32 on a GPU")
        return cupy.asarray(x.astype(self.dtype) if x.ndim == 2 else x)

    def embed(self, tokens: Any) -> Any:
        table = self.weights["embedding"]
        x = cupy.empty((len(tokens), table.shape[1]), np.float32)
        self._launch("embed", len(x), 192, tokens, table, x, x.shape[1])
        return x

    def norm(self, x: Any, name: str) -> Any:
        y, blocks = cupy.empty(x.shape, self.dtype), cupyfa.cdiv(len(x), WARPS)
        self._launch("rms_norm", blocks, (32, WARPS), x, self.weights[name], y, *x.shape)
        return y

    def product(
        self, x: Any, name: str, norm: str = "", gated: bool = False, into: Any = None
    ) -> Any:
        if len(x) > FEW:
            return super().product(x, name, norm, gated, into)
        w, out = self.weights[name], into
        if into is None:
            dtype = np.float32 if name == "embedding" else self.dtype
            out = cupy.empty((len(x), len(w) // (1 + gated)), dtype)
        at_once = 2 if gated else 4 if name == "embedding" else 1
        constants = {"input": _named(x.dtype), "output": _named(out.dtype), "K": x.shape[1]}
        constants |= {"normalizes": bool(norm), "gated": gated, "adds": into is not None}
        warps = cupyfa.cdiv(out.shape[1], 1 if gated else at_once)
        grid = cupyfa.cdiv(warps, WARPS), cupyfa.cdiv(len(x), 4)
        arguments = x, self.weights[norm or "norm"], w, out, out.shape[1], len(x)
        self._launch("product", grid, 32 * WARPS, *arguments, at_once=at_once, **constants)
        return out

    def multiply(self, y: Any, name: str) -> Any:
        from cupyfa.runtime.cuda import cublas  # may be captured in a graph, unlike cupy.matmul

        w, is_summed = self.weights[name], name.endswith(("embedding", "out", "down"))
        out = cupy.empty((len(y), len(w)), np.float32 if is_summed else self.dtype)
        cublas.matmul(y[None, None], w.T[None, None], out[None, None], 1.0)
        return out

    def swiglu(self, both: Any) -> Any:
        rows, inner = len(both), both.shape[1] // 2
        y = cupy.empty((rows, inner), self.dtype)
        self._launch("swiglu", (cupyfa.cdiv(inner, 256), rows), 256, both, y, inner)
        return y

    def rotate_into(self, qkv: Any, k: Any, v: Any, rows: tuple[Any, Any, Any]) -> Any:
        block, tables = (self.sizes.d // 2, qkv.shape[1]), (self.cos, self.sin)
        sizes = k.shape[1], self.sizes.heads, self.sizes.kv_heads
        self._launch("rotate", len(qkv), block, qkv, *rows, *tables, k, v, *sizes)
        return qkv

    def sample(self, logits: Any, seeds: Any, positions: Any, temperature: float) -> Any:
        tokens, how = cupy.empty(len(logits), np.int32), (logits.shape[1], float(temperature))
        self._launch("sample", len(logits), 1024, logits, seeds, positions, tokens, *how)
        return tokens

    def _launch(self, name: str, grid: Any, block: Any, *given: Any, **constants: Any) -> None:
        """Launches a kernel; product.cu may start before the launch before it has ended."""
        early = name == "product" and int(cupy.cuda.Device().compute_capability) >= 90
        constants |= {"scalar": _named(self.dtype), "epsilon": self.sizes.epsilon, "early": early}
        kernel = _compiled(name, **constants)
        kinds = {int: np.int32, float: np.float32}
        arguments = [kinds[type(x)](x) if type(x) in kinds else x for x in given]
        grid, block = (x if isinstance(x, tuple) else (x,) for x in (grid, block))
        if not early:
            return kernel(grid, block, arguments)
        launch = SimpleNamespace(
            grid=(*grid, 1), threads=block[0], shared_bytes=0, begins_early=True
        )
        start = backend_named("cuda").starter(kernel, launch, (), ())
        values = [ctypes.c_int(x) if type(x) is int else ctypes.c_void_p(x.data.ptr) for x in given]
        addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        start(cupy.cuda.get_current_stream().ptr, ctypes.addressof(addresses), 0)


def _named(dtype: np.dtype) -> str:
    return str(dtype).replace("float32", "float")


def source(name: str, **constants: Any) -> str:
    """Returns the text of a kernel below its constants, which are types, bools and numbers."""
    kinds = {str: "using", **{x: f"constexpr {x.__name__}" for x in (bool, int, float)}}
    lines = [f"{kinds[type(y)]} {x} = {str(y).lower()};" for x, y in constants.items()]
    folder = Path(__file__).parent / "kernels"
    common, kernel = ((folder / x).read_text() for x in ("common.cuh", f"{name}.cu"))
    return "\n".join([common, *lines, kernel])


@cache
def _compiled(name: str, **constants: Any) -> Any:
    """Compiles a kernel with NVRTC, once for each choice of constants."""
    text = source(name, **constants)
    return cupy.RawModule(code=text, options=("-std=c++17",)).get_function(name)
