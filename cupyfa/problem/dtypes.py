"""The element types; every fact about a type is in its row."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

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
    result: str | None = None  # the default dtype of results, if it differs from that of inputs

    @property
    def itemsize(self) -> int:
        return self.numpy.itemsize

    @property
    def usual_result(self) -> str:
        """The name of the default dtype of results."""
        return self.result or self.name


_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)  # also of keys and values in a cache
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
# A dtype of attention inputs only: no result, gradient or sum has it.
E4M3_INPUTS = DType(
    "float8_e4m3fn", E4M3, "E4m3", "float", _SINGLE, "ptx/e4m3.cuh", result="bfloat16"
)
INPUTS = {**DTYPES, E4M3_INPUTS.name: E4M3_INPUTS}

DTypeLike = str | np.dtype | type  # a name, as "float16", or NumPy's dtype, as np.float16


def name_of(dtype: object) -> Any:
    """The name of a NumPy dtype or scalar type; any other object is returned unchanged."""
    if isinstance(dtype, np.dtype | type):
        with suppress(TypeError):  # the type is not a scalar type
            found = np.dtype(dtype)
            return found.name if found.isnative else str(found)
    return dtype


def dtype_named(given: DTypeLike) -> DType:
    """The DType with this name or NumPy dtype. Raises TypeError for unsupported ones."""
    name = name_of(given)
    if not isinstance(name, str) or name not in INPUTS:
        raise TypeError(f"dtype {described(name)} is not supported; use one of {', '.join(INPUTS)}")
    return INPUTS[name]
