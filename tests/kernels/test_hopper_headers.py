"""The Hopper headers mbarrier.cuh, tma.cuh, wgmma.cuh and setmaxnreg.cuh in the simulator."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers import parts
from helpers.device_code import code, launch_on_device
from helpers.hopper_code import HEAD, WRITE, Map, fault, launch, numbers

from cupyfa.errors import CompileError, SimulatorFault

BODIES = Path(__file__).with_name("device_code")


def faults(section):
    """Maps names to (right code, wrong code, message, line) for a section of faults.txt."""
    text = (BODIES / "faults.txt").read_text().split(f"## {section}\n")[1].partition("\n## ")[0]
    rows = [line.replace("\\n", "\n").split(" | ") for line in text.splitlines()]
    return {name: (*cells, None)[:4] for name, *cells in rows}


TYPES = pytest.mark.parametrize(
    "c_type, dtype", [("__half", np.float16), ("__nv_bfloat16", ml_dtypes.bfloat16)]
)
SCHEDULES = pytest.mark.parametrize("schedule", [None, 1, 2])
SEEDS = (None, 1, 2, 3)
BOX = code("box")

COPY = code("copy")


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


def boxes(matrix):
    """Reorders a matrix into the layout of TmaTile; its width must be a multiple of 64 columns."""
    rows, columns = matrix.shape
    chunks = matrix.reshape(rows, columns // 64, 8, 8).transpose(1, 0, 2, 3)
    order = np.arange(8) ^ np.arange(rows)[:, None] % 8
    return np.take_along_axis(chunks, order[None, :, :, None], 2).copy()


WIDTHS = (16, 48, 64, 80, 128, 256)


@TYPES
@pytest.mark.parametrize("n", WIDTHS)
def test_products_by_rows(c_type, dtype, n):
    A, B = numbers((64, 128), dtype), numbers((n, 128), dtype, 1)
    start = numbers((64, n), np.float32, 2)
    got = start.copy()
    body = code("products_by_rows", n=n, c_type=c_type, write=WRITE.format(n=n))
    shared = f"struct Shared {{ TmaTile<{c_type}, 64, 128> A; TmaTile<{c_type}, {n}, 128> B; }};"
    launch(body, boxes(A), boxes(B), got, head=shared, shared_bytes=1 << 17)
    assert (got == start + A.astype(np.float32) @ B.astype(np.float32).T).all()


@pytest.mark.gpu
@TYPES
def test_sums_are_cut_off(hopper, c_type, dtype):
    """Sums match the emulation by helpers.parts bit by bit.

    Only the first 16 columns of A are nonzero, so that one wgmma adds all the terms.
    """
    products, sums = parts.probes()
    A, B, got = np.zeros((64, 128), dtype), np.full((16, 128), 2.0**-12, dtype), np.zeros((64, 16))
    A[: len(products), :16] = products * 2.0**12
    got[: len(products)] = sums[:, None]
    want = parts.add_products(got[:, 0], A[:, :16].astype(float) * 2.0**-12)
    got = got.astype(np.float32)
    body = code("products_by_rows", n=16, c_type=c_type, write=WRITE.format(n=16))
    shared = f"struct Shared {{ TmaTile<{c_type}, 64, 128> A; TmaTile<{c_type}, 16, 128> B; }};"
    operands = [boxes(x).view(np.uint16) for x in (A, B)]
    how = {"names": "abc", "threads": 128, "shared_bytes": 1 << 15, "arch": "90a"}
    launch_on_device(body, *operands, got, head=f"{HEAD}\n{shared}", **how)
    assert (got == want[:, None]).all(), f"{got[:, 0] - want}"


@TYPES
@pytest.mark.parametrize(
    "n, program",
    [
        *((n, "products_by_columns_with_registers") for n in WIDTHS),
        *((n, "products_of_stored_matrices_by_columns") for n in (16, 64, 112)),
    ],
)
def test_products_by_columns(c_type, dtype, n, program):
    """The first matrix is in registers or in shared memory."""
    wide, depth = -(-n // 64) * 64, 32 if "registers" in program else 64
    A, B = numbers((64, depth), dtype), numbers((depth, wide), dtype, 1)
    got = np.zeros((64, n), np.float32)
    body = code(program, wide=wide, n=n, c_type=c_type, write=WRITE.format(n=n))
    shared = f"using Shared = TmaTile<{c_type}, 32, {wide}>;"
    if depth == 64:
        tiles = f"TmaTile<{c_type}, 64, 64> A; TmaTile<{c_type}, 64, {wide}> B;"
        shared = f"struct Shared {{ {tiles} }};"
    launch(body, A, boxes(B), got, head=shared)
    assert (got == A.astype(np.float32) @ B[:, :n].astype(np.float32)).all()


def test_every_finite_half_is_multiplied_exactly():
    A = np.arange(65536, dtype=np.uint16).view(np.float16)
    A = np.where(np.isfinite(A), A, 0).reshape(64, 1024).astype(np.float16)
    got = np.zeros((64, 64), np.float32)
    body = code("every_finite_half_is_multiplied_exactly", write=WRITE.format(n=64))
    for start in range(0, 1024, 64):
        part = A[:, start : start + 64]
        launch(body, boxes(part), boxes(np.eye(64, dtype=np.float16)), got, head=SQUARES)
        assert (got == part).all()


RING_HEAD = code("ring_head")
RING = code("ring") + WRITE.format(n=32)


def ring(body=RING, **options):
    """Returns the kernel's result and the expected one; the last of 5 tiles ends out of bounds."""
    A, B = numbers((1, 3, 64, 304), np.float16), numbers((1, 3, 27, 304), np.float16, 1)
    got = np.zeros((3, 64, 32), np.float32)
    launch(
        body, Map(A, 64), Map(B, 32), got, head=RING_HEAD, threads=256, grid=(3, 1, 1), **options
    )
    want = np.zeros_like(got)
    want[:, :, :27] = A[0].astype(np.float32) @ B[0].astype(np.float32).transpose(0, 2, 1)
    return got, want


@pytest.mark.parametrize("schedule", SEEDS)
def test_a_ring_of_two_stages(schedule):
    got, want = ring(schedule=schedule)
    assert (got == want).all()


FAULTS = faults("ring")


@pytest.mark.few(8)
@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_a_ring(name):
    right, wrong, message, line = FAULTS[name]
    assert RING.count(right) == 1
    for schedule in SEEDS:
        with pytest.raises(SimulatorFault, match=message) as caught:
            ring(RING.replace(right, wrong), schedule=schedule)
        assert caught.value.place.startswith("test.cu:")
        if line is not None:
            assert caught.value.place == f"test.cu:{line}"


@pytest.mark.parametrize("schedule", SEEDS)
def test_two_warpgroups_and_products_of_two_groups_at_a_time(schedule):
    A, B = numbers((64, 128), np.float16), numbers((64, 128), np.float16, 1)
    got = np.zeros((2, 64, 64), np.float32)
    body = code("two_warpgroups_and_products_of_two_groups_at_a_time")
    shared = "struct Shared { TmaTile<__half, 64, 128> A; TmaTile<__half, 64, 128> B; };"
    launch(body, boxes(A), boxes(B), got, head=shared, threads=256, schedule=schedule)
    A, B = A.astype(np.float32), B.astype(np.float32)
    assert (got[0] == 2 * A @ B.T + A[:, :16] @ B[:, :16].T).all()
    assert (got[1] == -B[:, :16] @ A[:, :16].T).all()


@pytest.mark.parametrize("barrier", ["__syncwarp();", "__syncthreads();", "__ballot_sync(~0u, 1);"])
def test_a_wait_of_one_lane_covers_others_after_a_barrier(barrier):
    body = COPY.replace(
        "wait(shared.full, 0);", f"if (threadIdx.x == 0) wait(shared.full, 0); {barrier}"
    )
    arguments = boxed_arrays()
    if "__sync" in barrier:
        launch(body, *arguments, head=BOX, threads=32)
        return
    caught = fault(body, *arguments, head=BOX, threads=32)
    assert "race: a box that thread (0, 0, 0) loads at test.cu:10 wrote" in caught.what


def test_a_tensor_map_larger_than_its_array():
    wrong, *others = boxed_arrays()
    wrong.value["address"] += 1 << 32  # an address outside all arrays
    caught = fault(COPY, wrong, *others, head=BOX)
    assert re.search("reads .* bytes.* (past the end|before the start|outside)", caught.what)
    assert caught.place == "test.cu:10"
    for field in ("address", "sizes", "unused"):
        wrong, *others = boxed_arrays()
        wrong.value[field] = -1 if field == "sizes" else 3
        assert "with an invalid tensor map" in str(fault(COPY, wrong, *others, head=BOX))


ADD = code("add")
SQUARES = "struct Shared { TmaTile<__half, 64, 64> A; TmaTile<__half, 64, 64> B; };"


def boxed_arrays():
    """Returns COPY's arguments: source, target and tile."""
    source = np.zeros((2, 3, 29, 96), np.uint16)
    return Map(source, 16), Map(source.copy(), 16), np.zeros((16, 128), np.uint16)


# Code, arguments and preceding source for each section of faults.txt.
PIECES = {
    "products": lambda: (code("faults_of_products"), [numbers((64, 64), np.float16)], SQUARES),
    "copy": lambda: (COPY, boxed_arrays(), BOX),
    "add": lambda: (ADD, [np.ones(64, np.float32), np.ones(64, np.float32)], ""),
}


@pytest.mark.parametrize("section, name", [(x, name) for x in PIECES for name in faults(x)])
def test_faults(section, name):
    right, wrong, message, line = faults(section)[name]
    body, arguments, head = PIECES[section]()
    launch(body, *arguments, head=head)
    threads = 64 if name == "half a warpgroup" else 128
    if right:
        assert right in body
        body = body.replace(right, wrong)
    caught = fault(body, *arguments, head=head, threads=threads)
    assert re.search(message, str(caught)), str(caught)
    assert caught.place.startswith(f"test.cu:{line or ''}"), str(caught)


@pytest.mark.parametrize("schedule", SEEDS)
def test_floats_of_all_blocks_are_added(schedule):
    numbers_, sums = numbers((7, 64), np.float32), numbers(64, np.float32, 1)
    want = sums + (3 * numbers_ + 6).sum(0)
    launch(ADD, numbers_, sums, grid=(7, 1, 1), schedule=schedule)
    assert (sums == want).all()


@pytest.mark.parametrize("schedule", SEEDS)
def test_one_lane_of_each_warp_is_elected(schedule):
    elected = np.zeros(256, np.int32)
    launch("a[threadIdx.x] = elect_one() + elect_one();", elected, threads=256, schedule=schedule)
    assert (np.sort(elected.reshape(8, 32))[:, -2:] == [0, 2]).all()


SPLIT = "if (threadIdx.x < 128) {{ decrease_registers<{}>(); return; }} increase_registers<{}>();"


@pytest.mark.parametrize("threads, fewer, more", [(256, 40, 232), (384, 24, 240), (512, 32, 160)])
def test_warpgroups_share_the_registers_of_the_launch(threads, fewer, more):
    launch(SPLIT.format(fewer, more), threads=threads)
    launch(f"decrease_registers<{fewer}>(); increase_registers<{fewer + 8}>();", threads=threads)


@pytest.mark.parametrize(
    "body, message",
    [
        (
            SPLIT.format(32, 240),
            "waits forever for registers that the block does not have: threads of its warpgroups "
            "ask for 32, 240, 240, in all 65536, and 384 threads have at most 168 each at the "
            "launch, in all 64512; increase_registers to fewer, or decrease_registers of others",
        ),
        (
            "if (threadIdx.x >= 128) increase_registers<176>();",
            "ask for 168, 176, 176, in all 66560,",
        ),
        (
            "if (threadIdx.x < 32) decrease_registers<24>(); else decrease_registers<32>();",
            "calls decrease_registers<32>, and thread (0, 0, 0) of its warpgroup calls "
            "decrease_registers<24> at test.cu:",
        ),
        (
            "if (threadIdx.x >= 32) decrease_registers<24>();",
            "calls decrease_registers<24> with 96 threads of its warpgroup; all 128 must make",
        ),
    ],
)
def test_registers_that_a_block_does_not_have_are_a_fault(body, message):
    found = fault(body, threads=384)
    assert message in found.what and re.fullmatch(r"test\.cu:\d+", found.place)


def test_registers_are_those_of_whole_warpgroups():
    found = fault("decrease_registers<24>();", threads=96)
    assert found.what == "calls decrease_registers in a warpgroup of less than 128 threads"


@pytest.mark.parametrize("count", [20, 44, 264])
def test_register_counts_are_multiples_of_8(count):
    with pytest.raises(CompileError, match="a number of registers"):
        launch(f"increase_registers<{count}>();")
