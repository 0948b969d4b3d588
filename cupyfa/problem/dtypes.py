"""Supported element types, one table row per type."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cupyfa.errors import described


@dataclass(frozen=True)
class DType:
    """An element type of arrays, with the type in which its sums accumulate."""

    name: str
    numpy: np.dtype
    scalar: str  # C++ name of the element type
    real: str  # C++ name of the type of sums, row maxima and lse
    sums: np.dtype  # NumPy dtype of `real`
    header: str | None = None  # C++ header that declares `scalar`
    result: str | None = None  # default dtype of results where it differs from the input dtype

    @property
    def itemsize(self) -> int:
        return self.numpy.itemsize

    @property
    def usual_result(self) -> str:
        return self.result or self.name


_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)  # dtype of inputs, and of cached keys and values
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
# Supported for attention inputs only, not for results, gradients or sums.
E4M3_INPUTS = DType(
    "float8_e4m3fn", E4M3, "E4m3", "float", _SINGLE, "ptx/e4m3.cuh", result="bfloat16"
)
INPUTS = {**DTYPES, E4M3_INPUTS.name: E4M3_INPUTS}

DTypeLike = str | np.dtype | type  # for example "float16" or np.float16


def name_of(dtype: object) -> Any:
    """Returns the name of a NumPy dtype or scalar type, and any other object unchanged."""
    if isinstance(dtype, np.dtype | type):
        with suppress(TypeError):  # raised if ``dtype`` is not a scalar type
            found = np.dtype(dtype)
            return found.name if found.isnative else str(found)
    return dtype


def dtype_named(given: DTypeLike) -> DType:
    """Returns the DType for a name or NumPy dtype. Raises TypeError for unsupported dtypes."""
    name = name_of(given)
    if not isinstance(name, str) or name not in INPUTS:
        raise TypeError(f"dtype {described(name)} is not supported; use one of {', '.join(INPUTS)}")
    return INPUTS[name]
