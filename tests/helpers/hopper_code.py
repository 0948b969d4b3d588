"""Runs snippets of device code with Hopper's headers as kernels in the simulator."""

from pathlib import Path

import numpy as np
import pytest
from helpers import device_code

from cupyfa.errors import SimulatorFault

HEAD = Path(__file__).with_name("hopper.cuh").read_text()
WRITE = """
    for (int j = 0; j < {n} / 2; ++j) {{
      int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + j / 2 % 2 * 8;
      c[row * {n} + j / 4 * 8 + threadIdx.x % 4 * 2 + j % 2] = d[j];
    }}
"""
MAP = np.dtype(
    [
        ("address", np.uint64), ("strides", np.int64, 3), ("sizes", np.int32, 4),
        ("box", np.int32, 2), ("itemsize", np.int32), ("unused", np.int32, 17),
    ]
)  # fmt: skip


class Map:
    """The tensor map of an array [batch, heads, rows, columns] with boxes of ``box_rows`` rows."""

    def __init__(self, array, box_rows):
        self.array = array
        batch, heads, rows, columns = array.shape
        batch_stride, head_stride, row_stride, _ = array.strides
        self.value = np.zeros((), MAP)
        self.value["address"] = array.ctypes.data
        self.value["strides"] = row_stride, head_stride, batch_stride
        self.value["sizes"] = columns, rows, heads, batch
        self.value["box"] = box_rows, 1
        self.value["itemsize"] = array.itemsize


def launch(body, *arguments, head="", **options):
    """Runs a kernel `test(a, b, …)` on arrays and tensor maps."""
    options = {"threads": 128, "shared_bytes": 65536, **options}
    device_code.launch(body, *arguments, head=f"{HEAD}\n{head}", names="abcdefg", **options)


def fault(body, *arguments, **options):
    with pytest.raises(SimulatorFault) as caught:
        launch(body, *arguments, **options)
    return caught.value


def numbers(shape, dtype=np.uint16, seed=0):
    """Draws small integers, for which sums of products are exact."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(dtype)
