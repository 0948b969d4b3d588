"""Bytes moved: the loops of kernels walked one tile after another, and attention written down."""

import itertools
from collections import defaultdict
from dataclasses import replace

import pytest
from helpers.problems import name

from cupyfa import Problem
from cupyfa.analysis import resources as compiling
from cupyfa.analysis import traffic
from cupyfa.bench.sweeps import usual_dtype
from cupyfa.ladder import LADDER
from cupyfa.ladder.kernel import cdiv
from cupyfa.operations import OPERATIONS
from cupyfa.planner import select as planning

H100 = compiling.limits_of("90")
MASKS = (
    {},
    {"causal": True},
    {"causal": "top-left"},
    {"window": (7, 2)},
    {"window": (None, 3)},
    {"window": (4, None)},
)
SIZES = ({"M": 50, "N": 37}, {"M": 20, "N": 61}, {"M": 33, "N": 33})
RUNGS = [kernel for kernels in LADDER.values() for kernel in kernels.values()]


def sees(p, row, key):
    return (p.right is None or key <= row + p.causal_offset) and (
        p.left is None or key >= row + p.window_offset
    )


def passing(seen, size, count):
    """From the first to the last tile that is seen, in elements; all tiles between are visited."""
    tiles = [i // size for i in seen]
    return min(count, (max(tiles) + 1) * size) - min(tiles) * size if tiles else 0


@pytest.mark.parametrize("mask", MASKS, ids=name)
@pytest.mark.parametrize("sizes", SIZES, ids=name)
def test_what_passes_by_is_what_loops_would_load(sizes, mask):
    p = Problem.of_sizes(d=4, **sizes, **mask)
    pairs = [(i, j) for i in range(p.M) for j in range(p.N) if sees(p, i, j)]
    for Br, Bc in itertools.product((1, 8, 16), (1, 8, 32)):
        of_rows, of_keys = defaultdict(set), defaultdict(set)
        for i, j in pairs:
            of_rows[i // Br].add(j)
            of_keys[j // Bc].add(i)
        keys = sum(passing(seen, Bc, p.N) for seen in of_rows.values())
        rows = sum(passing(seen, Br, p.M) for seen in of_keys.values())
        assert traffic.KeyTiles.of(p, Br, Bc).keys.sum() == keys
        assert traffic.rows_passed(p, Br, Bc) == rows


def planned(kernel, **sizes):
    problem = (
        Problem.of_row_sizes(sizes["M"], sizes["M"], "float32")
        if kernel.operation == "softmax"
        else Problem.of_sizes(dtype=usual_dtype(kernel), **sizes)
    )
    return planning.plan(kernel, problem, H100)


@pytest.mark.parametrize("kernel", RUNGS, ids=name)
@pytest.mark.parametrize("more", [{}, {"causal": True}, {"kv_heads": 2}], ids=name)
def test_every_rung_moves_its_arrays_at_least_once(kernel, more):
    plan = planned(kernel, batch=2, heads=4, M=300, d=64, **more)
    steps = traffic.of(plan)
    assert steps is not None and len(steps) == len(plan.steps)
    operation, p = kernel.operation, plan.problem
    for array, size in traffic.outputs(operation, p).items():
        written = sum(step.writes.get(array, 0) for step in steps)
        assert written == (size if array in plan.outputs else 0), array
    for array, size in traffic.inputs(operation, p).items():
        read = sum(step.reads.get(array, 0) for step in steps)
        assert read >= size * (0.4 if p.causal else 1), array
    assert traffic.moved(steps) >= OPERATIONS[operation].bytes(p) * (0.4 if p.causal else 1)


def test_a_rung_by_hand():
    p = {"batch": 2, "heads": 4, "kv_heads": 2, "M": 256, "d": 64}
    (step,) = traffic.of(planned(LADDER["forward"]["fa2"], **p))
    q = 2 * 4 * 256 * 64 * 4
    assert step.reads == {"Q": q, "K": 2 * q, "V": 2 * q}  # two tiles of 128 rows for each head
    assert step.writes == {"O": q, "lse": 2 * 4 * 256 * 4}
    columns = {x.name: x for x in traffic.of(planned(LADDER["backward"]["columns"], **p))}
    assert columns["columns"].reads["Q"] == columns["columns"].writes["dQ_sum"] == 8 * q
    assert columns["columns"].reads["K"] == columns["columns"].writes["dK"] == q // 2


def test_rows_and_keys_of_boxes_are_those_of_tiles():
    plan = planned(LADDER["backward"]["wgmma_two_pass"], M=256, N=300, d=128)
    assert plan.constants["Br"] == 64  # of the first pass; the second one has 128 rows
    *_, rows = traffic.of(plan)
    assert rows.reads["K"] == rows.reads["V"] == 2 * 2 * 300 * 128


def test_shared_heads_are_added_up_in_memory():
    plan = planned(LADDER["backward"]["baseline_backward"], heads=6, kv_heads=2, M=40, d=8)
    step = next(x for x in traffic.of(plan) if "dK_sum" in x.writes)
    assert (step.reads["dK_sum"], step.writes["dK_sum"]) == (4 * 2 * 40 * 8 * 2, 4 * 2 * 40 * 8 * 3)


def test_parts_of_keys_read_the_queries_again_and_are_merged():
    plan = planned(LADDER["forward"]["mma_split_k"], M=1, N=65536, d=64)
    parts = plan.launches[0].numbers["parts"]
    first, merge = traffic.of(plan)
    assert parts > 1 and first.reads["Q"] == parts * 2 * 64
    assert first.reads["K"] == 2 * 64 * 65536
    assert (first.writes["O"], merge.writes["O"]) == (0, 2 * 64)
    assert first.writes["O_parts"] == merge.reads["O_parts"] == 4 * 64 * parts


def test_attention_as_it_is_written_down():
    p = Problem.of_sizes(batch=2, heads=3, M=50, N=70, d=16, dtype="float16")
    masked = replace(p, causal="bottom-right")
    scores = 2 * 3 * 50 * 70 * 2

    def of_scores(operation, p):
        made = [x for step in traffic.naive(operation, p) for x in step.writes.items()]
        return [name for name, size in made if size == scores]

    assert of_scores("forward", p) == ["S", "scaled", "P"]
    assert of_scores("forward", masked) == ["S", "scaled", "masked", "P"]
    assert len(of_scores("backward", masked)) == 6
    steps = traffic.naive("forward", p)
    assert sum(step.writes.get("O", 0) for step in steps) == 2 * 3 * 50 * 16 * 2
    assert sum(step.reads.get("P", 0) + step.writes.get("P", 0) for step in steps) == 2 * scores
    both = traffic.moved(steps)
    assert both - 6 * scores == sum(traffic.inputs("forward", p).values()) + sum(
        traffic.outputs("forward", p).values()
    )


def test_tiles_move_fewer_bytes_the_more_fits_on_chip():
    p = Problem.of_sizes(batch=4, heads=16, M=4096, d=64, dtype="float16")
    for operation in ("forward", "backward"):
        sizes = [traffic.moved(traffic.tiled(operation, p, x)) for x in (2**14, 2**15, 2**17)]
        assert sizes[0] > sizes[1] > sizes[2] > OPERATIONS[operation].bytes(p)
        assert sizes[2] < traffic.moved(traffic.naive(operation, p)) / 4
    # Theorem 2: Q and O pass by N / Bc times, with Bc = chip / (4 d) rows.
    (step,) = traffic.tiled("forward", p, 2**15)
    assert step.reads["Q"] == 4 * 16 * 4096 * 64 * 2 * cdiv(4096, 2**15 // (4 * 64 * 2))


def test_what_is_held():
    plan = planned(LADDER["forward"]["baseline"], batch=1, heads=2, M=30, N=20, d=8)
    q, kv, s = 4 * 2 * 30 * 8, 4 * 2 * 20 * 8, 4 * 2 * 30 * 20
    assert traffic.held(plan) == (q + 2 * kv, q + 4 * 2 * 30, 2 * s)
