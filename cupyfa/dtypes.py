"""The element types; every fact about a type is in its row."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from cupyfa.errors import described


@dataclass(frozen=True)
class DType:
    """An element type of inputs and outputs, and the type of its sums."""

    name: str
    numpy: np.dtype
    scalar: str  # its C++ name
    real: str  # the C++ name of the type that sums, maxima and lse are kept in
    sums: np.dtype  # that type in NumPy
    header: str | None = None  # what declares `scalar`

    @property
    def itemsize(self) -> int:
        return self.numpy.itemsize


_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)  # of keys and values in a cache
_SINGLE, _DOUBLE = np.dtype(np.float32), np.dtype(np.float64)
DTYPES = {
    row.name: row
    for row in (
        DType("float16", np.dtype(np.float16), "__half", "float", _SINGLE, "cuda_fp16.h"),
        DType("bfloat16", _BFLOAT16, "__nv_bfloat16", "float", _SINGLE, "cuda_bf16.h"),
        DType("float32", _SINGLE, "float", "float", _SINGLE),
        DType("float64", _DOUBLE, "double", "double", _DOUBLE),
    )
}


def dtype_named(name: str) -> DType:
    if not isinstance(name, str) or name not in DTYPES:
        by_name = "" if isinstance(name, str) else ", by name"
        known = ", ".join(DTYPES)
        raise TypeError(f"dtype {described(name)} is not supported; use one of {known}{by_name}")
    return DTYPES[name]
