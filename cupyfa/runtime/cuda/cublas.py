"""Matrix products of the baselines, computed by cuBLAS.

Sums are accumulated in float32, or in float64 for float64 inputs."""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import cupy
import numpy as np
from cupy.cuda import cublas, device
from cupy_backends.cuda.api import runtime

from cupyfa.runtime.cuda.product_batches import batches

# (cudaDataType, cublasComputeType_t), as enumerated in library_types.h and cublas_api.h.
_TYPES = {"float32": (0, 68), "float64": (1, 70), "float16": (2, 68), "bfloat16": (14, 68)}
_FAST_TF32 = 77
_DEFAULT_ALGORITHM = -1
_DISALLOW_REDUCED_PRECISION_REDUCTION = 16
_INT_MAX = 2**31 - 1


def matmul(a: Any, b: Any, out: Any, scale: float, *, tf32: bool = False) -> None:
    """Computes out = a b * scale per head.

    a is [batch, heads, M, K], b is [batch, kv_heads or heads, K, N]. out has as many heads as a, or
    only the key heads, each of which is then the sum over its group. The dtype of out is that of a
    and b, or float32. cuBLAS is column-major, so it computes out^T = b^T a^T. ``tf32`` lets cuBLAS
    round float32 inputs to TF32.
    """
    (M, N), K = out.shape[-2:], a.shape[-1]
    if out.size == 0:
        return
    if K == 0 or a.shape[1] == 0:  # an empty sum
        out.fill(0)
        return
    if scale == 0:  # cuBLAS would skip a and b, but their NaN and infinities must propagate
        smallest = np.finfo(np.float64 if out.dtype == np.float64 else np.float32).tiny
        matmul(a, b, out, float(smallest), tf32=tf32)
        out *= 0
        return
    row_length = _row_length(out)
    if row_length is None:
        whole = cupy.empty_like(out, order="C")
        matmul(a, b, whole, scale, tf32=tf32)
        out[...] = whole
        return
    a, a_transposed, ldb = _readable(a)
    b, b_transposed, lda = _readable(b)
    (element, _), (out_element, compute) = _TYPES[str(a.dtype)], _TYPES[str(out.dtype)]
    compute = _FAST_TF32 if tf32 else compute
    sums = np.float64 if out.dtype == np.float64 else np.float32
    alpha, none, once = np.array([scale, 0, 1], sums).reshape(3, 1)
    operations = cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_T
    transposed = operations[b_transposed], operations[a_transposed]
    gemm, handle = _gemm(), device.get_cublas_handle()
    mode = cublas.getMathMode(handle)
    # cuBLAS might add partial sums in float16, which can overflow although the whole sum does not.
    cublas.setMathMode(handle, _DISALLOW_REDUCED_PRECISION_REDUCTION)
    try:
        for starts, steps, count, adds in batches(a, b, out):
            beta = once if adds else none
            at_a, at_b, at_out = (x.data.ptr + start for x, start in zip((a, b, out), starts))
            step_a, step_b, step_out = (s // x.dtype.itemsize for x, s in zip((a, b, out), steps))
            gemm(
                *(handle, *transposed, N, M, K),
                *(alpha.ctypes.data, at_b, element, lda, step_b),
                *(at_a, element, ldb, step_a),
                *(beta.ctypes.data, at_out, out_element, row_length, step_out),
                *(count, compute, _DEFAULT_ALGORITHM),
            )
    finally:
        cublas.setMathMode(handle, mode)


def _gemm() -> Callable[..., Any]:
    """Returns CuPy's GEMM wrapper or, during a capture, where it fails, cuBLAS's own function."""
    stream = cupy.cuda.get_current_stream().ptr
    if not runtime.streamIsCapturing(stream):
        return cublas.gemmStridedBatchedEx
    library = _library()
    _succeed(library.cublasSetStream_v2(device.get_cublas_handle(), stream))
    return lambda *arguments: _succeed(library.cublasGemmStridedBatchedEx(*arguments))


@cache
def _library() -> ctypes.CDLL:
    """Returns the cuBLAS library that CuPy has loaded."""
    library = ctypes.CDLL(cublas.__file__)
    whole, wide, pointer = ctypes.c_int, ctypes.c_longlong, ctypes.c_void_p
    matrix = (pointer, whole, whole, wide)  # data, type, leading dimension, batch stride
    library.cublasSetStream_v2.argtypes = (pointer, pointer)
    library.cublasGemmStridedBatchedEx.argtypes = (
        *(pointer, whole, whole, whole, whole, whole),  # handle, two transpose flags, sizes
        *(pointer, *matrix, *matrix, pointer, *matrix),
        *(whole, whole, whole),  # batch count, compute type, algorithm
    )
    return library


def _succeed(status: int) -> None:
    if status:
        raise cublas.CUBLASError(status)


def _row_length(array: Any, row: int = -2, column: int = -1) -> int | None:
    """Returns the row stride in elements; None if rows overlap or are not contiguous."""
    size, columns = array.dtype.itemsize, array.shape[column]
    length = array.strides[row] // size if array.shape[row] > 1 else columns
    dense = array.strides[column] == size or columns == 1
    usable = dense and columns <= length <= _INT_MAX and min(array.strides[:2]) >= 0
    return length if usable else None


def _readable(array: Any) -> tuple[Any, bool, int]:
    """Returns an array that cuBLAS can read, whether it is transposed, and its row stride."""
    if (length := _row_length(array)) is not None:
        return array, False, length
    if (length := _row_length(array, -1, -2)) is not None:
        return array, True, length
    return _readable(array.copy())
