"""The element types; every fact about a type is in its row."""

from __future__ import annotations

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
    accumulator: str  # the name of that type here
    header: str | None = None  # what declares `scalar`

    @property
    def itemsize(self) -> int:
        return self.numpy.itemsize

    @property
    def sums(self) -> np.dtype:
        """The NumPy dtype of sums, maxima and lse."""
        return DTYPES[self.accumulator].numpy


_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {
    row.name: row
    for row in (
        DType("float16", np.dtype(np.float16), "__half", "float", "float32", "cuda_fp16.h"),
        DType("bfloat16", _BFLOAT16, "__nv_bfloat16", "float", "float32", "cuda_bf16.h"),
        DType("float32", np.dtype(np.float32), "float", "float", "float32"),
        DType("float64", np.dtype(np.float64), "double", "double", "float64"),
    )
}


def dtype_named(name: str) -> DType:
    """The row of a dtype given by name."""
    if not isinstance(name, str) or name not in DTYPES:
        by_name = "" if isinstance(name, str) else ", by name"
        known = ", ".join(DTYPES)
        raise TypeError(f"dtype {described(name)} is not supported; use one of {known}{by_name}")
    return DTYPES[name]
