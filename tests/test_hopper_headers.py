"""The headers of Hopper, barrier.cuh, tma.cuh, wgmma.cuh and warpgroup.cuh, in the simulator."""
# ruff: noqa: SIM300 (arrays have capital letters here and are no constants)

import textwrap

import ml_dtypes
import numpy as np
import pytest
from test_simulator import INCLUDE

from cupyfa.backends.simulator import machine

HEAD = """
#include <barrier.cuh>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <named_barrier.cuh>
#include <shared.cuh>
#include <tma.cuh>
#include <warpgroup.cuh>
#include <wgmma.cuh>
"""
TYPES = pytest.mark.parametrize(
    "c_type, dtype", [("__half", np.float16), ("__nv_bfloat16", ml_dtypes.bfloat16)]
)
SCHEDULES = pytest.mark.parametrize("schedule", [None, 1, 2])
SEEDS = (None, 1, 2, 3)
MAP = np.dtype(
    [
        ("address", np.uint64), ("strides", np.int64, 3), ("sizes", np.int32, 4),
        ("box_rows", np.int32), ("unused", np.int32, 19),
    ]
)  # fmt: skip


class Map:
    """The tensor map of an array [batch, heads, rows, columns] in boxes of so many rows."""

    def __init__(self, array, box_rows):
        self.array = array
        batch, heads, rows, columns = array.shape
        batch_stride, head_stride, row_stride, _ = array.strides
        self.value = np.zeros((), MAP)
        self.value["address"] = array.ctypes.data
        self.value["strides"] = row_stride, head_stride, batch_stride
        self.value["sizes"] = columns, rows, heads, batch
        self.value["box_rows"] = box_rows


def launch(body, *arguments, head="", threads=128, shared_bytes=65536, **options):
    """Runs a kernel `test(a, b, …)`, whose arguments are arrays and tensor maps."""
    names = "abcdefg"
    types = {"float32": "float", "int32": "int", "uint16": "unsigned short", "float16": "__half",
             "bfloat16": "__nv_bfloat16"}  # fmt: skip
    parameters, values, buffers = [], [], []
    for name, argument in zip(names, arguments):
        if isinstance(argument, Map):
            parameters.append(f"const __grid_constant__ TensorMap {name}")
            values.append(argument.value)
            array = argument.array
        else:
            array = argument
            parameters.append(f"{types[array.dtype.name]}* {name}")
            values.append(np.uint64(array.ctypes.data))
        span = array if array.base is None else array.base
        buffers.append(machine.Buffer(name, span.ctypes.data, span.nbytes))
    text = (
        f'{HEAD}\n{head}\nextern "C" __global__ void test({", ".join(parameters)}) {{\n'
        f'#line 1 "test.cu"\n{textwrap.dedent(body).strip()}\n}}\n'
    )
    machine.launch(
        text,
        "test",
        values,
        buffers=buffers,
        include_dirs=INCLUDE,
        grid=options.pop("grid", (1, 1, 1)),
        threads=threads,
        shared_bytes=shared_bytes,
        **options,
    )


def fault(body, *arguments, **options):
    with pytest.raises(machine.SimulatorFault) as caught:
        launch(body, *arguments, **options)
    return caught.value


def numbers(shape, dtype=np.uint16, seed=0):
    """Small whole numbers: sums of their products are exact."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(dtype)


# tma.cuh and barrier.cuh

BOX = """
struct Shared {
  Boxes<unsigned short, 16, 128> tile;
  Barrier full;
};
"""

COPY = """
    Shared& shared = shared_memory<Shared>();
    if (threadIdx.x == 0) {
      make_barrier(shared.full, 1);
      publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      arrive_expecting(shared.full, sizeof shared.tile);
      for (int i = 0; i < 2; ++i) load_box(shared.tile.box[i], a, shared.full, 64 * i - 3, 21, 1, 1);
    }
    wait(shared.full, 0);
    for (int i = threadIdx.x; i < 16 * 16; i += blockDim.x) {
      int row = i / 16, chunk = i % 16;
      unsigned short* at = chunk_of(shared.tile.box[chunk / 8][row], row, chunk % 8);
      for (int j = 0; j < 8; ++j) c[row * 128 + chunk * 8 + j] = at[j]++;
    }
    publish_to_copies();
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) store_box(b, shared.tile.box[i], 64 * i - 3, 21, 1, 1);
      commit_stores();
      wait_until_stores_have_read();
    }
"""


def copied(**options):
    memory = np.arange(2 * 3 * 29 * 104, dtype=np.uint16).reshape(2, 29, 3, 104)
    source = memory.transpose(0, 2, 1, 3)[..., :99]
    target = np.zeros((2, 3, 29, 96), np.uint16)
    tile = np.full((16, 128), 7, np.uint16)
    launch(COPY, Map(source, 16), Map(target[..., :93], 16), tile, head=BOX, **options)
    return source, target, tile


@SCHEDULES
def test_boxes_end_where_the_array_ends(schedule):
    source, target, tile = copied(schedule=schedule)
    want = np.zeros((16, 128), np.uint16)
    want[:8, 3:102] = source[1, 1, 21:29]
    assert (tile == want).all()
    stored = np.zeros_like(target)
    stored[1, 1, 21:29, :93] = want[:8, 3:96] + 1
    assert (target == stored).all()
