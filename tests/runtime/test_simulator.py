"""The simulator: semantics of CUDA C++, detected faults, and the build of kernels."""
# ruff: noqa: SIM300 (arrays have capital letters here and are not constants)

import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from helpers.cli import table
from helpers.device_code import INCLUDE, answer, code, fault, in_new_process, launch, run, run_fresh
from helpers.private_cache import with_runtime
from helpers.threads import in_threads

import cupyfa
from cupyfa import Problem, Simulator
from cupyfa.errors import CompileError, SimulatorFault
from cupyfa.planner import choose_kernel, source as sources
from cupyfa.runtime.simulator import lines, machine

pytestmark = pytest.mark.usefixtures("every_check")


def test_every_thread_of_a_three_dimensional_grid_runs_once():
    A = np.zeros((2, 3, 4, 2, 3, 5), np.int32)
    body = """
        int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
        A[block * 30 + thread] += 1 + block * 100 + thread;
    """
    launch(body, A, grid=(4, 3, 2), threads=(5, 3, 2))
    want = 1 + 100 * np.arange(24)[:, None] + np.arange(30)
    assert (A.reshape(24, 30) == want).all()


def test_the_largest_block_and_a_grid_of_many_blocks():
    A = np.zeros(1024, np.int32)
    body = code("the_largest_block_and_a_grid_of_many_blocks")
    launch(body, A, threads=1024)
    assert (A == np.arange(1024)[::-1]).all()
    B = np.zeros(70_000, np.int32)
    launch("A[blockIdx.x] = blockIdx.x;", B, threads=1, grid=(70_000, 1, 1))
    assert (B == np.arange(70_000)).all()


def test_local_arrays_of_many_kilobytes():
    A = np.zeros(64, np.int32)
    body = code("local_arrays_of_many_kilobytes")
    launch(body, A, threads=64)
    assert (A == 8192 * 8191 // 2 + 8192 * np.arange(64)).all()


def test_shared_memory_starts_as_nan_and_belongs_to_the_block():
    body = code("shared_memory_starts_as_nan_and_belongs_to_the_block")
    A = np.zeros((50, 32), np.float32)
    launch(body, A, grid=(50, 1, 1), shared_bytes=128, head="#include <tile/shared.cuh>")
    assert (A == np.arange(50)[:, None]).all()


def test_arguments_by_value():
    head = "struct Pair { double a; int b[6]; };"
    text = head + 'extern "C" __global__ void test(double* A, Pair p, int i, float f) {'
    text += " A[0] = p.a + p.b[5] + i + f; }"
    pair = np.zeros((), np.dtype([("a", "f8"), ("b", "i4", 6)]))
    pair["a"], pair["b"] = 0.5, [0, 0, 0, 0, 0, 100]
    A = np.zeros(1)
    run(text, "test", A, pair, np.int32(1000), np.float32(0.25), threads=1)
    assert A[0] == 1100.75


@pytest.mark.parametrize("values", [(), (np.float64(1),)])
def test_arguments_unlike_the_parameters(values):
    with pytest.raises(ValueError, match="has parameters"):
        run('extern "C" __global__ void test(int a) {}', "test", *values)


def test_shuffles_with_width():
    A = np.zeros((4, 32), np.int32)
    body = code("shuffles_with_width")
    launch(body, A)
    lane = np.arange(32)
    assert (A[0] == lane // 8 * 8 + 3).all()
    assert (A[1] == np.where(lane % 16 < 2, lane, lane - 2)).all()
    assert (A[2] == np.where(lane + 5 < 32, lane + 5, lane)).all()
    assert (A[3] == (lane ^ 5)).all()


@pytest.mark.parametrize("kind", ["double", "unsigned long long", "__half"])
def test_shuffles_of_other_types(kind):
    A = np.zeros(32)
    body = f"typedef {kind} T;\nA[threadIdx.x] = float(__shfl_xor_sync(~0u, T(threadIdx.x), 1));"
    launch(body, A, head="#include <cuda_fp16.h>")
    assert (A == (np.arange(32) ^ 1)).all()


def test_several_masks_at_a_time_in_one_warp():
    A = np.zeros(32, np.int32)
    body = code("several_masks_at_a_time_in_one_warp")
    for schedule in (None, 1, 2):
        launch(body, A, schedule=schedule)
        quads = np.arange(32).reshape(8, 4).sum(1) * 4 ** np.arange(8)
        assert (A == quads.repeat(4) + 11_000).all()


def test_votes_reductions_and_block_wide_predicates():
    A = np.zeros((9, 64), np.int32)
    body = code("votes_reductions_and_block_wide_predicates")
    launch(body, A, threads=64)
    low, high = A[:, 0], A[:, 32]
    assert (A[:, :32] == low[:, None]).all() and (A[:, 32:] == high[:, None]).all()
    assert low.tolist() == [0, 1, 0, 496, 31, 22, 1, 0, 0]
    assert high.tolist() == [1, 0, 2, 496 + 1024, 63, 22, 1, 0, 0]


def test_named_barriers_pass_data_between_warps():
    A = np.zeros(10 * 32, np.int32)
    body = code("named_barriers_pass_data_between_warps")
    for schedule in (None, 5, 6):
        launch(body, A, threads=64, schedule=schedule, head="#include <ptx/named_barrier.cuh>")
        assert (A.reshape(10, 32) == 100 * np.arange(10)[:, None] + np.arange(32)[::-1]).all()
    late = body.replace("barrier_sync(2, 64);", "").replace("barrier_arrive(2, 64);", "")
    caught = fault(late, A, threads=64, schedule=5, head="#include <ptx/named_barrier.cuh>")
    assert "race" in caught.what


@pytest.mark.parametrize("dtype", [np.int32, np.uint64, np.float32, np.float64])
def test_atomics_on_global_memory_across_workers(dtype):
    A = np.array([0, 0, 10**6, 0], dtype)
    body = code("atomics_on_global_memory_across_workers")
    launch(body, A, grid=(200, 1, 1), threads=64, workers=2)
    assert A.tolist() == [12800, 12799, 0, 25600]


def test_atomics_on_shared_memory_are_no_race():
    A = np.zeros(2, np.uint32)
    body = code("atomics_on_shared_memory_are_no_race")
    launch(body, A, threads=64)
    assert A.tolist() == [64, 64 % 10]
    plain = body.replace("atomicInc(&next, 9);", "count = 3;")
    assert "race" in fault(plain, A, threads=64).what


@pytest.mark.parametrize("level", ["-O0", "-O1", "-O2"])
@pytest.mark.parametrize("number, header", [("__half", "fp16"), ("__nv_bfloat16", "bf16")])
def test_reads_of_16_bit_arguments_are_checked(monkeypatch, level, number, header):
    monkeypatch.setenv("CUPYFA_COMPILER_FLAGS", level)
    head = f"""
        #include <cuda_{header}.h>
        __attribute__((noinline)) float twice({number} x) {{ return 2 * float(x); }}
    """
    body = code("16_bit_numbers_that_are_passed_by_value_are_read", number=number)
    A = np.zeros(64, np.float32)
    launch(body, A, head=head, threads=64)
    assert (A == 2.0 * np.arange(64)[::-1]).all()
    unwritten = fault(body.replace("__syncthreads();", ""), A, head=head, threads=64)
    assert "no thread of this block has written" in unwritten.what
    assert unwritten.place == "test.cu:4"


@pytest.mark.parametrize("level", ["-O0", "-O1"])
def test_a_struct_that_an_inlined_function_takes_by_value_is_checked(monkeypatch, level):
    monkeypatch.setenv("CUPYFA_COMPILER_FLAGS", level)
    head = """
        struct Row { float numbers[8]; };
        __device__ __forceinline__ float last(Row row) { return row.numbers[7]; }
    """
    body = """
        __shared__ Row rows[64];
        A[threadIdx.x] = last(rows[threadIdx.x]);
        __syncthreads();
        rows[threadIdx.x].numbers[7] = A[63 - threadIdx.x];
    """
    unwritten = fault(body, np.zeros(64, np.float32), head=head, threads=64)
    assert "no thread of this block has written" in unwritten.what


def test_functions_of_the_ladder_may_be_called_and_those_of_own_files_are_inlined(
    monkeypatch, tmp_path
):
    inlined = []
    monkeypatch.setattr(machine, "build", lambda *_, inlines: inlined.append(inlines))
    kernel, p = cupyfa.kernel("softmax_safe"), Problem.of_row_sizes(2, 7, "float32")
    (launch,) = choose_kernel.plan(kernel, p, Simulator().limits).programs
    own = tmp_path / "own.cu"
    own.write_text(sources.file_of(launch))
    for one in (launch, replace(launch, path=own)):
        Simulator().compile_launch(one)
    assert inlined == [False, True]


RIGHT_ACCESSES = (
    "A[threadIdx.x] = 1; __syncthreads(); A[63 - threadIdx.x] = 2;",
    "A[threadIdx.x] = 1; __syncwarp(); A[threadIdx.x ^ 31] = 2;",
    "if (atomicAdd(&A[64], 1) % 64 == 63) A[0] = 1;",
    "reinterpret_cast<char*>(A)[threadIdx.x] = 1;",
    "int x = A[threadIdx.x ^ 1]; __syncwarp(); A[threadIdx.x] = x;",
    "int i = threadIdx.x, x = A[63 - i]; barrier_sync(1, 64); A[i] = x; A[i] += 1;",
    "A[threadIdx.x] = 1; __threadfence(); if (atomicAdd(&A[64], 1) % 64 == 63) A[0] = A[9];",
)


def test_accesses_of_the_same_global_memory():
    A = np.zeros(65, np.int32)
    for body, schedule in product(RIGHT_ACCESSES, (None, 1, 2)):
        # workers=1: threads of two concurrent blocks could draw the same remainder and race.
        grid = (4 if body.startswith("if (atomicAdd") else 1, 1, 1)
        head = "#include <ptx/named_barrier.cuh>"
        launch(body, A, threads=64, grid=grid, workers=1, schedule=schedule, head=head)
    of_blocks = "if (threadIdx.x == 0) A[blockIdx.x / 2] = 1;"
    what = fault(of_blocks, A, grid=(4, 1, 1), workers=1).what
    assert "block (0, 0, 0) wrote and this block writes byte 0 of A with no atomic between" in what
    of_blocks = "if (threadIdx.x == 0) A[blockIdx.x] = A[blockIdx.x ^ 1];"
    what = fault(of_blocks, A, grid=(4, 1, 1), workers=1).what
    assert "block (0, 0, 0) wrote and this block reads byte 0 of A with no atomic between" in what


def test_a_byte_of_global_memory_may_have_one_writer():
    A = np.zeros(64, np.uint8)
    launch("A[threadIdx.x] = 1;", A, threads=64)
    what = fault("A[threadIdx.x == 63 ? 62 : threadIdx.x] = 1;", A, threads=64).what
    assert "race" in what and "byte 62 of A" in what


def test_a_plain_write_races_with_the_atomics_of_other_threads():
    body = code("a_plain_write_races_with_the_atomics_of_other_threads")
    A = np.zeros(64, np.int32)
    for schedule in (None, 1, 2):
        launch(body, A, threads=64, schedule=schedule)
        for barrier in ("", "if (threadIdx.x < 32) __syncwarp();"):
            early = body.replace("__syncthreads();", barrier)
            what = fault(early, A, threads=64, schedule=schedule).what
            assert "race" in what or "has written" in what
        late = body.replace("A[threadIdx.x] = 0;", "A[threadIdx.x] = count;")
        assert "race" in fault(late, A, threads=64, schedule=schedule).what
    mixed = body.replace("atomicAdd(&count, 1);", "if (count == 0) atomicAdd(&count, 1);")
    assert "race" in fault(mixed, A, threads=64).what


LAST_BLOCK = code("last_block")


def test_the_last_block_reduces_results_after_fences():
    for workers in (1, 2, 4):
        A, B = np.zeros(500, np.uint32), np.zeros(2, np.uint32)
        launch(LAST_BLOCK, A, B, grid=(500, 1, 1), threads=1, workers=workers)
        assert B.tolist() == [0, 500 * 501 // 2]


def test_mathematics():
    A = np.linspace(0.1, 3, 32).astype(np.float32)
    B = np.zeros((8, 32), np.float32)
    body = code("mathematics")
    launch(body, A, B)
    x, i = A.astype(float), np.arange(32)
    bits = [bin(n).count("1") + (n & -n).bit_length() + 32 - n.bit_length() for n in range(32)]
    want = [
        2 * np.exp(x), 2**x * np.log(x), x**-0.5 + x**0.5,
        np.maximum(x, 1) + np.minimum(x, 2) + x + np.maximum(i, 3) + 7,
        x * x + 2 * x, 0 * x, bits, 2 * x + 5,
    ]  # fmt: skip
    np.testing.assert_allclose(B, want, rtol=1e-5, atol=1e-5)


HALVES = [("cuda_fp16.h", np.float16), ("cuda_bf16.h", ml_dtypes.bfloat16)]


@pytest.mark.parametrize("header, dtype", HALVES)
def test_all_sixteen_bit_values_become_floats_and_come_back(header, dtype):
    A = np.arange(65536, dtype=np.uint16).view(dtype)
    B, C = np.zeros(65536, np.float32), np.zeros(65536, dtype)
    body = "int i = threadIdx.x + blockIdx.x * 256; B[i] = float(A[i]); C[i] = B[i];"
    launch(body, A, B, C, threads=256, grid=(256, 1, 1), head=f"#include <{header}>")
    want = A.astype(np.float32)
    nan = np.isnan(want)
    assert (B[~nan].view(np.uint32) == want[~nan].view(np.uint32)).all()
    assert np.isnan(B[nan]).all() and np.isnan(C[nan].astype(np.float32)).all()
    assert (C[~nan].view(np.uint16) == A[~nan].view(np.uint16)).all()


@pytest.mark.parametrize("header, dtype", HALVES)
def test_floats_round_to_sixteen_bits_as_numpy_rounds(header, dtype):
    rng = np.random.default_rng(3)
    random = rng.integers(0, 2**32, 2**17, dtype=np.uint32).view(np.float32)
    near = np.arange(65536, dtype=np.uint16).view(dtype).astype(np.float32).view(np.uint32)
    ties = np.concatenate([near + step for step in (0x1000, 0x0FFF, 0x1001, 0x8000)])
    A = np.concatenate([random, ties.astype(np.uint32).view(np.float32)])
    B = np.zeros(A.size, dtype)
    body = "int i = threadIdx.x + blockIdx.x * 256; B[i] = A[i];"
    launch(body, A, B, threads=256, grid=(A.size // 256, 1, 1), head=f"#include <{header}>")
    with np.errstate(over="ignore", invalid="ignore"):
        want = A.astype(dtype)
    nan = np.isnan(A)
    assert np.isnan(B[nan].astype(np.float32)).all()
    wrong = np.flatnonzero(B.view(np.uint16)[~nan] != want.view(np.uint16)[~nan])
    assert wrong.size == 0, A[~nan][wrong[:5]]


@pytest.mark.parametrize("header, dtype", HALVES)
def test_sixteen_bit_arithmetic(header, dtype):
    rng = np.random.default_rng(4)
    A = rng.standard_normal(512).astype(dtype)
    B = rng.standard_normal(512).astype(dtype)
    C = np.zeros((5, 512), dtype)
    body = code("sixteen_bit_arithmetic")
    launch(body, A, B, C, threads=512, head=f"#include <{header}>")
    want = np.stack([A + B, A - B, A * B, A / B, np.where(A < B, -A, B)])
    assert (C.view(np.uint16) == want.view(np.uint16)).all()


def test_doubles_round_to_halves_once():
    # Slightly above the midpoint of two float16 numbers; rounding to float first would hide that.
    A = np.array([1 + 2**-11 + 2**-40, 1 + 2**-11, 1 + 3 * 2**-11 - 2**-40, 65519.999999, 1e300])
    B = np.zeros(5, np.float16)
    launch("B[threadIdx.x] = A[threadIdx.x];", A, B, threads=5, head="#include <cuda_fp16.h>")
    with np.errstate(over="ignore"):
        assert (B == A.astype(np.float16)).all()


@pytest.mark.parametrize("load, transposed", [("load_b_rows", False), ("load_b_columns", True)])
def test_tensor_core_tiles(load, transposed):
    rng = np.random.default_rng(5)
    A, B = (rng.standard_normal((16, 24)).astype(np.float16) for _ in range(2))
    memory = np.zeros(2 * 16 * 24 + 32, np.float16)  # tiles start at multiples of 32 bytes
    start = -memory.ctypes.data % 32 // 2
    memory[start : start + 768] = np.concatenate([A, B], axis=None)
    out = np.zeros(16 * 20 + 8, np.float32)
    skip = -out.ctypes.data % 32 // 4
    body = code("tensor_core_tiles", load=load)
    scalars = (np.int32(start), np.int32(skip))
    launch(body, memory, out, scalars=scalars, head="#include <ptx/wmma.cuh>")
    a, b = A[:, :16].astype(float), B[:, :16].astype(float)
    want = 2 * a @ (b.T if transposed else b)
    got = out[skip : skip + 320].reshape(16, 20)
    np.testing.assert_allclose(got[:, :16], want, rtol=1e-5, atol=1e-5)
    assert (got[:, 16:] == 0).all()
    shifted = (np.int32(start + 8), np.int32(skip))
    caught = fault(body, memory, out, scalars=shifted, head="#include <ptx/wmma.cuh>")
    assert "multiple of 32 bytes" in caught.what


@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, 100, 120])
def test_the_headers_with_ptx_compile_for_devices(arch):
    pathfinder = pytest.importorskip("cuda.pathfinder", reason="needs the CUDA headers' wheel")
    nvrtc = pytest.importorskip("cupy.cuda", reason="needs CuPy").nvrtc
    text = code("the_headers_with_ptx_compile_for_devices_text")
    headers = pathfinder.find_nvidia_header_directory("cudart")
    program = nvrtc.createProgram(text, "test.cu", [], [])
    options = ["--std=c++17", f"-arch=sm_{arch}", f"-I{headers}", f"-I{INCLUDE[-1]}"]
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    assert len(nvrtc.getCUBIN(program)) > 0


NEIGHBOUR = code("neighbour")


def ones(count=64, dtype=np.float32):
    return np.ones(count, dtype)


@pytest.mark.parametrize("schedule", [None, 0, 1])
def test_a_missing_barrier_between_write_and_read(schedule):
    body = NEIGHBOUR.replace("__syncthreads();", "__syncwarp();")
    caught = fault(body, ones(), threads=64, schedule=schedule)
    assert "race" in caught.what or "no thread of this block has written" in caught.what
    assert caught.place in ("test.cu:2", "test.cu:4")


@pytest.mark.parametrize("schedule", [None, 0, 1])
def test_a_missing_barrier_between_read_and_next_write(schedule):
    body = code("a_missing_barrier_between_read_and_next_write")
    A = ones()
    launch(body, A, threads=64, schedule=schedule)
    assert (A == 6).all()
    last = body.rindex("__syncthreads();")
    caught = fault(body[:last] + body[last + 16 :], A, threads=64, schedule=schedule)
    assert "race: thread" in caught.what and "no barrier between" in caught.what
    assert caught.place in ("test.cu:4", "test.cu:6")


def test_lanes_of_one_warp_need_a_barrier_too():
    body = code("lanes_of_one_warp_need_a_barrier_too")
    launch(body, ones(dtype=np.int32))
    last = body.rindex("__syncwarp();")
    caught = fault(body[:last] + body[last + 13 :], ones(dtype=np.int32))
    assert "race" in caught.what


@pytest.mark.parametrize(
    "collective",
    [
        "__shfl_xor_sync(~0u, t, 1)",
        "__shfl_sync(~0u, t, 0)",
        "__ballot_sync(~0u, 1)",
        "__all_sync(~0u, 1)",
        "__reduce_add_sync(~0u, t)",
    ],
)
def test_shuffles_and_votes_do_not_order_memory(collective):
    body = code("shuffles_and_votes_do_not_order_memory", collective=collective)
    A = np.zeros(32, np.int32)
    for schedule in (None, 1, 2):
        assert "race" in fault(body, A, schedule=schedule).what
        launch(body.replace("A[t] =", "__syncwarp(); A[t] ="), A, schedule=schedule)


def test_bytes_of_one_granule_may_belong_to_two_threads():
    A = np.zeros(32, np.uint8)
    body = code("bytes_of_one_granule_may_belong_to_two_threads")
    launch(body, A)
    assert (A == (np.arange(32) ^ 1)).all()


def test_an_index_one_past_a_row_inside_a_struct():
    head = "#include <tile/shared.cuh>\nstruct Shared { float K[8][4]; float V[8][4]; };"
    body = """
        Shared& shared = shared_memory<Shared>();
        shared.K[threadIdx.x][0] = 1;
        shared.K[threadIdx.x][1 + s0] = 1;
    """
    options = {"threads": 8, "shared_bytes": 256, "head": head}
    launch(body, scalars=(np.int32(2),), **options)
    caught = fault(body, scalars=(np.int32(3),), **options)
    assert "index 4 is out of bounds for 'float" in caught.what
    assert (caught.block, caught.thread, caught.place) == ((0, 0, 0), (0, 0, 0), "test.cu:3")


@pytest.mark.parametrize("threads, body, parts", table("runtime/faults.txt"))
def test_faults_of_one_line(threads, body, parts):
    memory = np.ones(80, np.float32)
    A = memory[-memory.ctypes.data % 16 // 4 :][:64]
    body = body.replace("\\n", "\n")
    head = "#include <ptx/named_barrier.cuh>"
    caught = str(fault(body, A, threads=int(threads), head=head, workers=1))
    assert all(part in caught for part in parts), caught


def test_dynamic_shared_memory_ends_where_the_launch_says():
    head = "#include <tile/shared.cuh>\nstruct Shared { float x[64]; };"
    body = "shared_memory<Shared>().x[threadIdx.x] = 1;"
    launch(body, threads=32, shared_bytes=128, head=head)
    caught = fault(body, threads=33, shared_bytes=128, head=head)
    assert "just past the end of shared memory (128 bytes)" in caught.what
    assert caught.thread == (32, 0, 0)


DECLARATIONS = [
    "extern __shared__ float x[];",
    "extern __shared__ __align__(16) float x[];",
    "extern __align__(sizeof(float4)) __shared__ float x [ ] ;",
    "extern __shared__ alignas(128)\n float\n x[];",
    "__shared__ extern volatile float x[];",
    "extern __shared__ __attribute__((aligned(32))) scalar x[];",
]
# Maps each scope to the source text around the declaration ({}); in the scope "function" the
# declaration is in the body.
SCOPES = {
    "function": "",
    "file": "{} struct After {{ }};",
    "namespace": "namespace own {{ {} struct After {{ }}; }}\nusing namespace own;",
}


@pytest.mark.each_choice
@pytest.mark.parametrize("declaration", DECLARATIONS)
@pytest.mark.parametrize("scope", SCOPES)
def test_extern_shared_arrays_are_dynamic_shared_memory(scope, declaration):
    body = """
        x[threadIdx.x] = A[threadIdx.x];
        __syncthreads();
        A[threadIdx.x] = x[31 - threadIdx.x + s0];
    """
    head = "using scalar = float;\n" + SCOPES[scope].format(declaration)
    if scope == "function":
        body = declaration.replace("\n", " ") + body
    A = np.arange(32, dtype=np.float32)
    launch(body, A, scalars=(np.int32(0),), shared_bytes=128, head=head)
    assert (A == np.arange(32)[::-1]).all()
    caught = fault(body, A, scalars=(np.int32(1),), shared_bytes=128, head=head)
    assert caught.what == "reads 4 bytes, just past the end of shared memory (128 bytes)"
    assert caught.place == f"test.cu:{3 + (scope == 'function')}"
    caught = fault(body, A, scalars=(np.int32(1),), shared_bytes=132, head=head)
    assert "no thread of this block has written" in caught.what
    race = body.replace("__syncthreads();", "")
    caught = fault(race, A, scalars=(np.int32(0),), shared_bytes=128, head=head)
    assert "race" in caught.what or "no thread of this block has written" in caught.what


def test_extern_shared_arrays_of_other_shapes():
    head = code("extern_shared_arrays_of_other_shapes_head")
    body = code("extern_shared_arrays_of_other_shapes")
    A = np.zeros(4, np.float32)
    launch(body, A, threads=1, shared_bytes=16, head=head)
    assert A.tolist() == [4, 11, ord("e"), 1]


def test_extern_shared_arrays_beside_shared_variables():
    body = code("extern_shared_arrays_beside_shared_variables")
    A = np.zeros(3, np.int32)
    options = {"threads": 3, "shared_bytes": 12, "grid": (20, 1, 1)}
    launch(body, A, scalars=(np.int32(0),), **options)
    assert A.tolist() == [14, 12, 10]
    caught = fault(body, A, scalars=(np.int32(-1),), **options)
    assert "4 bytes before the start of shared memory (12 bytes)" in caught.what
    caught = fault(body, A, scalars=(np.int32(1),), **options)
    assert "just past the end of shared memory (12 bytes)" in caught.what


@pytest.mark.parametrize("name", ["dynamic", "static"])
def test_a_read_of_uninitialised_shared_memory(name):
    head = "#include <tile/shared.cuh>\nstruct Shared { float x[64]; };"
    declare = "__shared__ Shared shared;" if name == "static" else (
        "Shared& shared = shared_memory<Shared>();"
    )  # fmt: skip
    body = code("a_read_of_shared_memory_nobody_wrote", declare=declare)
    options = {"shared_bytes": 256, "head": head, "grid": (2, 1, 1)}
    launch(body, ones(), scalars=(np.int32(0),), **options)
    caught = fault(body, ones(), scalars=(np.int32(1),), **options)
    assert "at byte 128 of" in caught.what and "no thread of this block" in caught.what
    assert caught.thread == (31, 0, 0)
    # A value that an earlier block wrote does not make the element initialized.
    stale = body.replace("shared.x[thr", "if (blockIdx.x == 0) shared.x[thr", 1)
    caught = fault(stale, ones(), scalars=(np.int32(0),), **options, workers=1)
    assert caught.block == (1, 0, 0)


def test_a_variable_without_a_value_is_far_from_zero():
    A = ones()
    launch("float x;\nif (A[threadIdx.x] < 0) x = 1;\nA[threadIdx.x] = x;", A)
    assert not (abs(A[:32]) < 1e30).any()


@pytest.mark.parametrize("schedule", [None, 3])
def test_a_return_before_a_barrier_names_the_thread(schedule):
    body = "if (threadIdx.y == 7) return;\n__syncthreads();"
    caught = fault(body, threads=(4, 8, 1), grid=(1, 1, 3), schedule=schedule)
    assert (caught.block, caught.thread) == ((0, 0, 0), (0, 7, 0))
    assert "28 threads wait in __syncthreads at test.cu:2" in caught.what
    assert "this thread has returned" in caught.what


def test_a_deadlocked_wait():
    body = code("a_wait_that_nothing_ends")
    launch(body, scalars=(np.int32(1),))
    caught = fault(body, scalars=(np.int32(0),))
    assert "waits for ever" in caught.what and "wait_for_flag" in caught.what


def test_publish_and_observe_order_threads():
    body = code("twins_order_threads_by_publishing_and_observing")
    for schedule in (None, 8):
        A = np.zeros(3, np.int32)
        launch(body, A, threads=64, schedule=schedule)
        assert A[1] == 7
    assert "race" in fault(body.replace("simulator::observe(&ready);", ""), A, threads=64).what


def test_a_fault_does_not_affect_the_next_launch():
    for schedule in (None, 4, 5):
        A = np.arange(64, dtype=np.float32)
        fault("if (threadIdx.x < 40) __syncthreads();", threads=64, schedule=schedule)
        fault("A[64 + threadIdx.x] = 1;", A, schedule=schedule)
        launch(NEIGHBOUR, A, threads=64, schedule=schedule)
        assert (A == np.arange(64)[::-1]).all()


ORDER = code("order")


def order(**options):
    A = np.zeros((20, 64), np.int32)
    launch(ORDER, A, threads=64, grid=(20, 1, 1), **options)
    return A


def test_schedules():
    assert (np.sort(order(schedule=7), axis=1) == np.arange(64)).all()
    assert (order(schedule=7, workers=1) == order(schedule=7, workers=2)).all()
    assert (order(schedule=7) != order(schedule=8)).any()
    assert (order(schedule=7)[0] != order(schedule=7)[1]).any()
    assert (order(workers=1) == order(workers=2)).all()


def test_the_fault_reported_is_that_of_the_first_block():
    body = "if (blockIdx.x >= 30) A[64 + blockIdx.x] = 1; else __syncthreads();"
    for workers in (1, 2, 4):
        assert fault(body, ones(), grid=(200, 1, 1), workers=workers).block == (30, 0, 0)


def test_launches_from_several_python_threads():
    def call(number):
        A = np.full(64, number, np.float32)
        body = NEIGHBOUR if number % 2 else NEIGHBOUR.replace("63 -", "62 -")
        try:
            for _ in range(20):
                launch(body, A, threads=64, workers=2)
        except SimulatorFault as caught:
            return caught
        return A

    for number, result in enumerate(in_threads(call, range(8))):
        if number % 2:
            assert (result == number).all()
        else:
            assert "is out of bounds for 'float" in result.what


def test_stack_frames_larger_than_a_fiber_do_not_compile():
    with pytest.raises(CompileError, match="frame"):
        launch("volatile int x[100000]; x[threadIdx.x] = 1; A[0] = x[s0];", ones(),
               scalars=(np.int32(1),))  # fmt: skip


@pytest.mark.parametrize("recorded", [False, True])
def test_the_headers_compile_without_warnings(tmp_path, recorded):
    folder = Path(machine.__file__).parent
    names = [path.relative_to(folder / "include") for path in folder.glob("include/**/*.cuh")]
    names = ["simulator.h", "cuda_fp16.h", "cuda_bf16.h", *sorted(names)]
    # Constants that the host declares.
    text = "constexpr int threads = 32;\nconstexpr bool timeline_detailed = true;\n"
    limits = ("first", "blocks", "warps", "capacity")
    text += "".join(f"constexpr unsigned timeline_{x} = 2;\n" for x in limits)
    text += "".join(f"#include <{name}>\n" for name in names)
    text += "void f(int* a) {\n#pragma unroll\nfor (int i = 0; i < 4; ++i) a[i] = i;\n}\n"
    file = tmp_path / "all.cpp"
    file.write_text(text)
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-c"]
    for source in (file, *((folder / "runtime.cpp",) if not recorded else ())):
        ours = (*((sources.RECORDING,) if recorded else ()), sources.INCLUDE, sources.KERNELS)
        places = (f"-I{x}" for x in (folder / "include", *ours))
        command = [*machine.compiler(), *flags, *places, str(source)]
        command += ["-o", str(tmp_path / "out.o")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_zig_is_the_fallback_compiler(monkeypatch):
    pytest.importorskip("ziglang", reason="the ziglang wheel is not installed")
    for name in ("CUPYFA_COMPILER", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    wheel = [sys.executable, "-m", "ziglang", "c++"]
    monkeypatch.setattr(machine, "_libc", lambda: ("glibc", "2.36"))
    assert machine.compiler() == [*wheel, "-target", "native-linux-gnu.2.36"]
    monkeypatch.setattr(machine, "_libc", lambda: ("", ""))
    assert machine.compiler() == wheel


@pytest.mark.slow
def test_cxx_names_the_compiler_unless_it_is_no_such_compiler(monkeypatch):
    monkeypatch.delenv("CUPYFA_COMPILER", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    usual = machine.compiler()
    useless = {
        "nvcc-of-nowhere": "it is not a program on the PATH; set CXX to g",
        "true": r"it is neither g\+\+ nor clang\+\+; set CXX to g",
        "false -x": "it cannot be used: .*false -x does not report its version",
        "an 'open quote": "it cannot be used: No closing quotation; set CXX to g",
    }
    for given, why in useless.items():
        monkeypatch.setenv("CXX", given)
        machine._warn_of_ignored.cache_clear()
        with pytest.warns(UserWarning, match=f"CXX=.* is ignored: {why}"):
            assert machine.compiler() == usual
        with warnings.catch_warnings(action="error"):  # warns once
            assert machine.compiler() == usual
    assert '(found first; CXX="an \'open quote" is ignored' in machine.compiler_choice()
    monkeypatch.setenv("CXX", "")
    assert machine.compiler() == usual
    assert "found first; CUPYFA_COMPILER or CXX names another" in machine.compiler_choice()
    monkeypatch.setenv("CXX", f"{' '.join(usual)} -DNUMBER=61")
    assert machine.compiler() == [*usual, "-DNUMBER=61"]
    assert machine.compiler_choice().endswith("-DNUMBER=61 (named by CXX)")
    assert run_fresh("NUMBER") == 61
    monkeypatch.setenv("CUPYFA_COMPILER", usual[0])
    assert machine.compiler() == usual[:1]
    assert machine.compiler_choice().endswith("(named by CUPYFA_COMPILER)")


@pytest.mark.parametrize(
    "version, is_used",
    [
        ("g++-14 (Debian 14.2.0-19) 14.2.0\nCopyright (C) 2024 Free Software Foundation", True),
        ("g++.real (GCC) 15.1.0\nCopyright (C) 2025 Free Software Foundation", True),
        ("Ubuntu clang version 18.1.3 (1ubuntu1)", True),
        ("gcc (Debian 14.2.0-19) 14.2.0\nCopyright (C) 2024 Free Software Foundation", False),
        ("nvc++ 24.7-0 64-bit target\nNVIDIA Compilers and Tools", False),
    ],
)
def test_cxx_may_have_any_name_of_these_compilers(monkeypatch, tmp_path, version, is_used):
    program = tmp_path / "compiler"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "{version}"\n')
    program.chmod(0o755)
    monkeypatch.delenv("CUPYFA_COMPILER", raising=False)
    monkeypatch.setenv("CXX", str(program))
    monkeypatch.setattr(machine, "_warn_of_ignored", lambda what: None)
    assert (machine.compiler() == [str(program)]) == is_used


def test_a_fault_says_what_reads_source_lines(monkeypatch):
    monkeypatch.setattr(lines, "can_read", lambda: False)
    monkeypatch.setattr(lines, "frames", lambda path, addresses: [])
    caught = fault("A[64] = 1;", ones(), threads=1)
    assert not caught.place and "pip install pyelftools" in caught.what


CALLS = """
#line 1 "calls.cuh"
__device__ __noinline__ void set(float* A) {
  A[64] = 1;
}
__device__ __noinline__ void call(float* A) {
  set(A);
}
"""
CALLED = "A[0] = 1;\ncall(A);"


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["g++", "zig"])
def test_both_compilers_run_and_check(monkeypatch, compiler):
    if compiler == "zig":
        pytest.importorskip("ziglang", reason="the ziglang wheel is not installed")
    elif shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    monkeypatch.setenv("CUPYFA_COMPILER", compiler)
    A = np.arange(64, dtype=np.float32)
    launch(NEIGHBOUR, A, threads=64)
    assert (A == np.arange(64)[::-1]).all()
    for tool in ("addr2line", "pyelftools"):
        if tool == "pyelftools":
            monkeypatch.setattr(lines, "shutil", SimpleNamespace(which=lambda name: None))
        race = fault("__shared__ int x;\nx = threadIdx.x;\n__syncthreads();\nA[x] = 1;", A)
        assert "race: thread (0, 0, 0) wrote" in race.what and race.place == "test.cu:2"
        assert fault(CALLED, A, head=CALLS).place == "calls.cuh:2 (called from test.cu:2)"
    assert "out of bounds" in fault(NEIGHBOUR.replace("63 -", "64 -"), A, threads=64).what
    past = fault("A[64 + threadIdx.x] = 1;", A)
    assert past.what == "writes 4 bytes, just past the end of A (256 bytes)"
    increment = "__shared__ int x;\nif (threadIdx.x == 0) x += 1;"
    assert "no thread of this block has written" in fault(increment).what
    head = "struct alignas(16) F { float x[4]; };"
    copied = fault("((F*)A)[16] = ((F*)A)[0];", A, head=head, threads=1)
    assert "writes 16 bytes, just past the end of A" in copied.what


def test_a_text_beyond_ascii_in_the_c_locale(tmp_path):
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert (
        answer(in_new_process(with_runtime(tmp_path), "45 /* \u03b1 = \u221ad */", **plain)) == "45"
    )


@pytest.mark.slow
def test_several_processes_build_the_same_kernel_at_once(tmp_path):
    processes = [in_new_process(tmp_path, 51, 52) for _ in range(3)]
    assert [answer(process) for process in processes] == ["51 52"] * 3
    assert len(list(tmp_path.glob("*.so"))) == 3  # the runtime and two kernels
    assert not list(tmp_path.glob("build-*"))


def test_equal_headers_in_two_folders_share_an_object_and_faults_name_their_own(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("CUPYFA_CACHE_DIR", str(with_runtime(tmp_path / "cache")))
    text = '#include <deep/own.cuh>\nextern "C" __global__ void test(int* A) { write(A); }'
    for name in ("first", "second"):
        header = tmp_path / name / "deep" / "own.cuh"
        header.parent.mkdir(parents=True)
        header.write_text("#pragma once\n__device__ void write(int* A) { A[1] = 2; }\n")
        with pytest.raises(SimulatorFault) as caught:
            run(text, "test", np.zeros(1, np.int32), threads=1, folders=[tmp_path / name])
        assert caught.value.place.startswith(f"{header}:2")
    assert len(list((tmp_path / "cache").glob("test-*.so"))) == 1


@pytest.mark.parametrize("file", ["number.cuh", "helper.h", "deep/er/number.hpp"])
def test_changed_headers_make_a_new_kernel(tmp_path, file):
    (tmp_path / "bad.cuh").mkdir()
    (tmp_path / "nowhere.cuh").symlink_to(tmp_path / "missing")
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "outer.cuh").write_text(f'#pragma once\n#include "{file}"\n')
    text = '#include <outer.cuh>\nextern "C" __global__ void test(int* A) { A[0] = number; }'
    for number in (70, 71):
        (tmp_path / file).write_text(f"constexpr int number = {number};")
        A = np.zeros(1, np.int32)
        run(text, "test", A, threads=1, folders=[tmp_path])
        assert A[0] == number
