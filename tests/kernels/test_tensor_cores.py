"""Headers of mma.sync and cp.async: layouts of fragments, products, completion of copies."""
# ruff: noqa: SIM300 (arrays have capital letters here and are not constants)

import re

import ml_dtypes
import numpy as np
import pytest
from helpers import parts
from helpers.device_code import code, fault, launch, launch_on_device

from cupyfa.numerics import reference

MMA = "#include <ptx/mma.cuh>\n#include <ptx/mma_tf32.cuh>\n#include <cuda_bf16.h>"
COPIES = "#include <ptx/cp_async.cuh>"
# The part of the host's declarations that the float64 headers use.
HOST = "using operand = double;\nusing real = double;\nconstexpr bool packed = false;\n"
FRAGMENTS = HOST + "#include <tile/f64_fragments.cuh>"
LANE = np.arange(32)
ROW, PLACE = LANE // 4, LANE % 4
TYPES = pytest.mark.parametrize(
    "c_type, dtype", [("__half", np.float16), ("__nv_bfloat16", ml_dtypes.bfloat16)]
)
SCHEDULES = pytest.mark.parametrize("schedule", [None, 1, 2])


def random(shape, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def pairs(matrix):
    """Views every two neighbouring elements in a row of a 16-bit matrix as a 32-bit word."""
    return np.ascontiguousarray(matrix).view(np.uint32)


@pytest.mark.parametrize("transposed", [False, True])
def test_each_lane_gets_its_part_of_four_matrices(run_code, transposed):
    tile = np.arange(1000, 1256, dtype=np.uint16).reshape(32, 8)
    got = np.zeros((4, 32), np.uint32)
    body = code("each_lane_gets_its_part_of_four_matrices", trans="_trans" if transposed else "")
    run_code(body, tile, got, head=MMA)
    matrices = tile[np.arange(32) ^ 13].reshape(4, 8, 8)
    want = pairs(matrices.swapaxes(1, 2) if transposed else matrices)
    assert (got == want.reshape(4, 32)).all()


def fragments(a, b, D):
    """Returns the fragments of A, of B transposed and of D, laid out as the header defines."""
    parts_a = [a[:8, :4], a[8:, :4], a[:8, 4:], a[8:, 4:]]
    parts_b = [b[:, :4], b[:, 4:]]
    parts_d = [D[:8, 0::2], D[:8, 1::2], D[8:, 0::2], D[8:, 1::2]]
    return [np.stack(parts).reshape(len(parts), 32) for parts in (parts_a, parts_b, parts_d)]


def multiply(run_code, c_type, A, B, D):
    """Returns D + A B, computed by one instruction; float32 is multiplied as tf32."""
    if c_type == "double":
        return multiply_f64(run_code, A, B, D)
    words = np.asarray if c_type == "tf32" else pairs
    a, b, d = fragments(words(A), words(B.T), D)
    body = code("multiply_tf32") if c_type == "tf32" else code("multiply", c_type=c_type)
    run_code(body, a, b, d, head=MMA)
    got = np.empty((16, 8), np.float32)
    for part, rows, first in zip(d, (0, 0, 8, 8), (0, 1, 0, 1)):
        got[rows : rows + 8, first::2] = part.reshape(8, 4)
    return got


def multiply_f64(run_code, A, B, D):
    """Returns D + A B, computed by one float64 instruction with the header's fragment layout."""
    a = np.array([A[ROW + i % 2 * 8, PLACE + i // 2 * 4] for i in range(8)])
    b = np.array([B[PLACE + 4 * i, ROW] for i in range(4)])
    rows, columns = np.array([ROW, ROW, ROW + 8, ROW + 8]), 2 * PLACE + [[0], [1], [0], [1]]
    d = D[rows, columns]
    run_code(code("multiply_f64"), a, b, d, head="#include <ptx/mma_f64.cuh>")
    got = np.empty_like(D)
    got[rows, columns] = d
    return got


@pytest.mark.parametrize(
    "c_type, dtype, close", [(*x, 1e-5) for x in TYPES.args[1]] + [("double", np.float64, 1e-14)]
)
def test_products_are_those_of_numpy(run_code, c_type, dtype, close):
    sums = np.float64 if c_type == "double" else np.float32
    A, B, D = random((16, 16), dtype), random((16, 8), dtype, 1), random((16, 8), sums, 2)
    want = D + A.astype(float) @ B.astype(float)
    np.testing.assert_allclose(multiply(run_code, c_type, A, B, D), want, rtol=close, atol=close)


@pytest.mark.gpu
@TYPES
def test_sums_are_cut_off(hopper, c_type, dtype):
    """Matches the emulation by helpers.parts bit by bit."""
    products, sums = parts.probes()
    A, B, D = np.zeros((16, 16), dtype), np.full((16, 8), 2.0**-12, dtype), np.zeros((16, 8), "f4")
    A[: len(products)] = products * 2.0**12
    D[: len(products)] = sums[:, None]
    want = parts.add_products(D[:, 0].astype(float), A.astype(float) * 2.0**-12)
    got = multiply(launch_on_device, c_type, A, B, D)
    assert (got == want[:, None]).all(), f"{got[:, 0] - want}"


@pytest.mark.parametrize(
    "c_type, dtype", [*TYPES.args[1], ("tf32", np.float32), ("double", np.float64)]
)
def test_infinities_and_nan_follow_ieee(run_code, c_type, dtype):
    A, B = np.ones((16, 16), dtype), np.ones((16, 8), dtype)
    if c_type == "tf32":
        A, B = A[:, :8], B[:8]
    D = np.zeros((16, 8), np.float64 if c_type == "double" else np.float32)
    A[3, 4], A[9, 5], B[6, 2], B[4, 7], D[12, 0] = np.inf, np.nan, -np.inf, 0, np.inf
    with np.errstate(invalid="ignore"):
        want = D + (A.astype(D.dtype)[:, :, None] * B.astype(D.dtype)).sum(1)
    assert np.isnan(want[3, 7]) and want[3, 0] == np.inf and want[0, 2] == -np.inf
    np.testing.assert_array_equal(multiply(run_code, c_type, A, B, D), want)


@TYPES
@pytest.mark.parametrize("load, transposed", [("", True), ("_trans", False)])
def test_loaded_matrices_are_operands(run_code, c_type, dtype, load, transposed):
    """A packed product also serves as the first operand of the next product."""
    A, B = random((16, 16), dtype), random((16, 16), dtype, 1)
    tiles, out = np.concatenate([A, B]).view(np.uint16), np.zeros((2, 16, 16), np.float32)
    rows = "lane % 8 + lane / 16 * 8" if transposed else "lane % 16"
    column = "lane / 8 % 2 * 8" if transposed else "lane / 16 * 8"
    body = code("loaded_matrices_are_operands", load=load, rows=rows, column=column, c_type=c_type)
    run_code(body, tiles, out, head=MMA)
    right = B.astype(float).T if transposed else B.astype(float)
    np.testing.assert_allclose(out[0], A.astype(float) @ right, rtol=1e-5, atol=1e-5)
    packed = out[0].astype(dtype).astype(float)
    np.testing.assert_allclose(out[1], packed @ right, rtol=1e-5, atol=1e-4)


@TYPES
def test_pairs_are_rounded_to_nearest_ties_to_even(run_code, c_type, dtype):
    bits = np.random.default_rng(3).integers(0, 2**32, 2048, np.uint32)
    ties = random(2048, dtype).astype(np.float32).view(np.uint32)
    ties += np.uint32(0x1000 if dtype == np.float16 else 0x8000)
    numbers = np.concatenate([bits, ties, ties - 1, ties + 1]).view(np.float32)
    numbers[np.isnan(numbers)] = np.inf
    got = np.zeros(numbers.size // 2, np.uint32)
    body = f"""
        for (int i = threadIdx.x; i < s0; i += 32) B[i] = pack<{c_type}>(A[2 * i], A[2 * i + 1]);
    """
    run_code(body, numbers, got, scalars=(np.int32(got.size),), head=MMA)
    with np.errstate(over="ignore"):
        want = numbers.astype(dtype)
    assert (got.view(np.uint16) == want.view(np.uint16)).all()


ROWS = code("rows")


@pytest.mark.parametrize(
    "row, said",
    [
        ("&tile[threadIdx.x][threadIdx.x / 31 * 4]", "at a multiple of 16 bytes"),
        ("A", "not in shared memory"),
        ("tile[threadIdx.x + 1]", "that no thread of this block has written"),
    ],
)
def test_wrong_rows_of_matrices(row, said):
    A = np.zeros(16, np.uint16)
    caught = fault(ROWS.format(row=row), A, head=MMA)
    assert said in caught.what and caught.place == "test.cu:5"


@SCHEDULES
def test_rows_are_read_by_other_lanes_than_wrote_them(schedule):
    A, body = np.zeros(16, np.uint16), ROWS.format(row="tile[threadIdx.x]")
    launch(body, A, head=MMA, schedule=schedule)
    early = body.replace("__syncwarp();", "")
    assert "race" in fault(early, A, head=MMA, schedule=schedule).what


def test_matrix_loads_need_a_whole_warp():
    A = np.zeros(16, np.uint16)
    assert "32 threads" in fault(ROWS.format(row="tile[0]"), A, head=MMA, threads=40).what
    body = "unsigned a[4] = {}; float d[4] = {}; multiply_add<__half>(d, a, 0, 0);"
    assert "32 threads" in fault(body, head=MMA, threads=16).what
    late = "if (threadIdx.x < 9) return;\n" + body
    assert "wait in multiply_add" in fault(late, head=MMA).what


def cut(x):
    """Returns the float truncated to the bits that a tf32 product uses."""
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(float)


def test_products_of_tf32_do_not_look_at_the_last_bits(run_code):
    A, B, D = (random(x, np.float32, i) for i, x in enumerate([(16, 8), (8, 8), (16, 8)]))
    got = multiply(run_code, "tf32", A, B, D)
    np.testing.assert_allclose(got, D + cut(A) @ cut(B), rtol=1e-5, atol=1e-5)
    assert np.abs(got - (D + A.astype(float) @ B)).max() > 1e-4


def test_tf32_is_rounded_as_the_reference_rounds(run_code):
    bits = np.random.default_rng(3).integers(0, 2**32, 2048, np.uint32)
    ties = bits & np.uint32(0xFFFFE000) | np.uint32(0x1000)
    numbers = np.concatenate([bits, ties, ties - 1, ties + 1]).view(np.float32)
    got = np.zeros(numbers.size, np.uint32)
    body = "for (int i = threadIdx.x; i < s0; i += 32) B[i] = round_to_tf32(A[i]);"
    run_code(body, numbers, got, scalars=(np.int32(got.size),), head=MMA)
    nan = np.isnan(numbers)
    want = reference.rounded(numbers[~nan], "tf32")
    normal = np.abs(want) >= 2.0**-126  # a device may flush subnormal numbers to zero
    assert (got[~nan][normal] == want.view(np.uint32)[normal]).all()
    assert np.isnan(got.view(np.float32)[nan]).all()


def test_matrices_of_floats_are_operands_of_tf32(run_code):
    """Loads floats with ldmatrix, as mma_tf32 does: both operands by rows, 8 columns at a time."""
    A, B = random((16, 8), np.float32), random((16, 8), np.float32, 1)
    tiles, out = np.concatenate([A, B]), np.zeros((16, 16), np.float32)
    body = code("matrices_of_floats_are_operands_of_tf32")
    run_code(body, tiles, out, head=MMA)
    np.testing.assert_allclose(out, cut(A) @ cut(B).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunks", [4, 8, 12, 16, 20, 28, 64])
def test_chunks_that_are_read_together_lie_in_different_banks(chunks):
    """Tests reading one chunk of each of eight rows (ldmatrix), and two of every second row."""
    places = np.zeros((16, chunks), np.int32)
    body = code("chunks_that_are_read_together_lie_in_different_banks", chunks=chunks)
    host = "using operand = float;\nusing real = float;\nconstexpr bool packed = false;\n"
    launch(body, places, head=host + "#include <tile/async_copy.cuh>")
    assert sorted(places.ravel()) == list(range(16 * chunks)), "each chunk has a place of its own"
    groups = places % 8  # groups of 4 banks
    for first in (0, 8):
        for chunk in range(chunks):
            assert len(set(groups[first : first + 8, chunk])) == 8
        for second in (0, 1):
            for chunk in range(0, chunks, 2):
                rows = groups[first + second : first + 8 : 2, chunk : chunk + 2]
                assert len(set(rows.ravel())) == 8


TILE = code("tile")


def numbers(count):
    return np.arange(1, 1 + 8 * count, dtype=np.uint16).reshape(count, 8)


def test_partial_copies_are_filled_with_zeros(run_code):
    A, B = numbers(32), np.ones((32, 8), np.uint16)
    body = TILE + code("part_of_a_copy_is_zeros_and_nothing_is_read_for_none")
    run_code(body, A, B, scalars=(np.int32(32 * 8),), head=COPIES)
    assert (B == np.where(np.arange(8) < np.arange(32)[:, None] % 9, A, 0)).all()


def test_nothing_is_read_from_any_address():
    """An out-of-bounds row's address may happen to lie in a block's shared memory."""
    B = np.ones((32, 8), np.uint16)
    body = TILE + code("part_of_a_copy_is_zeros_and_nothing_is_read_for_none")
    launch(body.replace("A + s0", "tile[0]"), numbers(32), B, head=COPIES)
    assert (B[::9] == 0).all()


def test_many_copies_in_many_groups(run_code):
    """Issues more copies than the simulator stores in one block, and reuses stages."""
    A, B = numbers(32 * 60), np.zeros((60, 32, 8), np.uint16)
    body = code("many_copies_in_many_groups")
    run_code(body, A, B, head=COPIES)
    assert (B == A.reshape(60, 32, 8)[:, ::-1]).all()


@pytest.mark.parametrize(
    "wait, copy, access",
    [("group<1>();", 3, 9), ("group<0>();", 5, 11), ("group<0>();\nB[64", 7, 14)],
)
def test_copies_complete_at_the_wait(wait, copy, access):
    """Copies complete as late as a device allows: an earlier access races with the copy."""
    A, B = numbers(64), np.zeros((3, 32), np.uint16)
    body = code("copies_land_in_the_wait_that_requires_it")
    launch(body, A, B, head=COPIES)
    assert (B[:2] == A[:, 0].reshape(2, 32)).all() and (B[2] == 0).all()
    assert f"cp_async_wait_{wait}" in body
    early = body.replace(f"cp_async_wait_{wait}", wait.removeprefix(wait.partition("\n")[0]), 1)
    for verb, text in (("reads", early), ("writes", re.sub(r"(B.*) = (.*);", r"\2 = 1;", early))):
        caught = fault(text, A, B, head=COPIES)
        lands = f"began with cp_async at test.cu:{copy} is under way and this thread {verb} byte"
        assert lands in caught.what and caught.place == f"test.cu:{access}"
        assert caught.what.endswith("with no cp_async_wait_group of that thread between")


def test_a_copy_that_nobody_uses_does_not_reach_the_next_block():
    A, B = numbers(32), np.zeros(32, np.uint16)
    body = "if (blockIdx.x == 0) cp_async(tile[me], A, 16); else B[me] = tile[me][0] = 3;"
    launch(TILE + body, A, B, head=COPIES, grid=(2, 1, 1), workers=1)
    assert (B == 3).all()


SHARE = TILE + code("share")


@SCHEDULES
@pytest.mark.parametrize("other", [1, 33])
def test_copied_data_is_visible_to_others_after_a_barrier(schedule, other):
    A, B = numbers(64), np.zeros(64, np.uint16)
    options = {"scalars": (np.int32(other),), "head": COPIES, "threads": 64, "schedule": schedule}
    launch(SHARE, A, B, **options)
    assert (B == A[np.arange(64) ^ other, 0]).all()
    before, after = SHARE.rsplit("__syncthreads();", 1)
    caught = fault(before + after, A, B, **options)
    assert "race" in caught.what and caught.place in ("test.cu:5", "test.cu:9")
    waits_too_late = before.replace("cp_async_wait_group<0>();", "") + "__syncthreads();"
    waits_too_late += "cp_async_wait_group<0>();" + after
    what = fault(waits_too_late, A, B, **options).what
    assert "began with cp_async at test.cu:5 is under way and this thread reads" in what


@SCHEDULES
def test_a_copy_over_data_that_is_still_read(schedule):
    body = TILE + code("a_copy_to_what_others_still_read")
    A, B = numbers(64), np.zeros(64, np.uint16)
    options = {"head": COPIES, "threads": 64, "schedule": schedule}
    launch(body, A, B, **options)
    # The later barrier does not separate read and copy: the copy may already have begun.
    late = body.replace("[0];\n__syncthreads();", "[0];\n")
    caught = fault(late, A, B, **options)
    assert "race" in caught.what and caught.place in ("test.cu:5", "test.cu:7")


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("tile[0], A + 4, 16", "multiple of 16"),
        ("&tile[0][2], A, 16", "multiple of 16"),
        ("tile[0], A, 17", "more than 16"),
        ("tile[0], A, -1", "less than 0"),
        ("A, A, 16", "in shared and global memory"),
        ("tile[0], tile[1], 16", "in shared and global memory"),
        ("tile[0], A + 8, 8", "reads 8 bytes, just past the end of A"),
    ],
)
def test_wrong_copies(arguments, said):
    body = f"__shared__ __align__(16) unsigned short tile[2][8];\n\ncp_async({arguments});"
    A = np.zeros(8, np.uint16)
    caught = fault(body, A, head=COPIES, threads=1)
    assert said in caught.what and caught.place == "test.cu:3"


# float64


@pytest.mark.parametrize("columns", [16, 48, 256])
def test_fragments_are_read_without_bank_conflicts(columns):
    """Of 16 columns (A) or rows (B), lane c of a group reads 2c, 2c + 1, 2c + 8 and 2c + 9."""
    tile, where = random((16, columns), np.float64), np.zeros((4, 32), np.int32)
    a, b = np.zeros((8, 32)), np.zeros((8, 32))
    stored = np.empty_like(tile)
    for row in range(16):
        line = row & 6 ^ row % 2 * 4
        for chunk in range(columns // 2):
            stored[row, 2 * (chunk ^ line) : 2 * (chunk ^ line) + 2] = tile[
                row, 2 * chunk : 2 * chunk + 2
            ]
    launch(code("places_of_doubles", columns=columns), stored, where, a, b, head=FRAGMENTS)
    low, high, even, odd = where * 8 // 4 % 32  # the first bank of each lane
    for banks in (low, high):  # 16-byte accesses: eight lanes at a time
        assert all(len(set(banks[i : i + 8])) == 8 for i in range(0, 32, 8))
    for banks in (even, odd):  # 8-byte accesses: sixteen lanes at a time
        assert all(len(set(banks[i : i + 16])) == 16 for i in range(0, 32, 16))
    terms = 2 * PLACE + np.array([0, 1, 8, 9])[:, None]
    for i in range(8):
        assert (a[i] == tile[ROW + i % 2 * 8, columns - 16 + terms[i // 2]]).all()
        assert (b[i] == tile[terms[i // 2], columns - 16 + ROW + i % 2 * 8]).all()


def test_the_exponential_of_doubles(run_code):
    """Results from 2**-1021 on are exact to an ulp, smaller results are 0, and NaN yields NaN."""
    x = np.concatenate([-np.geomspace(1e-18, 1020, 4000), np.arange(-1021.0, 4), [0.5, -0.5]])
    special = [-1021.6, -1100.0, -1.7e308, -np.inf, np.nan]
    x, got = np.append(x, special), np.zeros(len(x) + len(special))
    head = "#include <attention/exp2_f64.cuh>"
    run_code(code("exponentials_of_doubles"), x, got, scalars=(np.int32(len(x)),), head=head)
    assert (got[-5:-1] == 0).all() and np.isnan(got[-1])
    x, got = x[:-5], got[:-5]
    error = np.abs(got - np.exp2(x.astype(np.longdouble)))
    assert (error <= 0.75 * np.spacing(got)).all()
