"""Bytes between memory and chip: of attention as it is written down, of tiles, of real loops.

What is counted is what loads and stores ask for, element by element and to within a tile at the
edge of a mask. Caches answer part of it: what the memory itself moves lies between the least that
must move (``operations.Operation.bytes``) and this.

``naive`` and ``tiled`` are the two computations that Dao et al., 2022, arXiv:2205.14135, compare in
theorem 2; ``of`` walks through the steps of a plan. All of them return steps, which add up:
``moved(steps)`` is the total.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from cupyfa.ladder.kernel import Matmul
from cupyfa.operations import OPERATIONS
from cupyfa.planner.plan import Plan, PlannedLaunch
from cupyfa.problem import Problem

_SCORES = "batch heads M N"
NAIVE, TILED = "naive", "tiled"  # the computations that are no kernel's
_OF_KEYS = ("K", "V", "dK", "dV", "dK_sum", "dV_sum")
_OF_ROWS = ("Q", "O", "dO", "dQ", "dQ_sum", "lse", "delta", "row_sums")


@dataclass(frozen=True)
class Step:
    """One step of a computation, and the bytes that it reads and writes by array."""

    name: str
    reads: Mapping[str, int]
    writes: Mapping[str, int]

    @property
    def read(self) -> int:
        """Bytes that it reads."""
        return sum(self.reads.values())

    @property
    def written(self) -> int:
        """Bytes that it writes."""
        return sum(self.writes.values())

    @property
    def bytes(self) -> int:
        """Bytes that it moves in all."""
        return self.read + self.written


def moved(steps: Iterable[Step]) -> int:
    """The bytes that all steps move."""
    return sum(step.bytes for step in steps)


def inputs(operation: str, p: Problem) -> dict[str, int]:
    """The bytes of each input of an operation."""
    its = OPERATIONS[operation]
    kinds = {name: (axes, its.input_kind(name)) for name, axes in its.inputs.items()}
    return {name: _size(p, axes, kind) for name, (axes, kind) in kinds.items()}


def outputs(operation: str, p: Problem) -> dict[str, int]:
    """The bytes of each output of an operation, lse among those of the forward pass."""
    return {
        name: _size(p, axes, kind) for name, (axes, kind) in OPERATIONS[operation].outputs.items()
    }


def naive(operation: str, p: Problem) -> tuple[Step, ...]:
    """The steps of an operation as it is written down, each through memory in the inputs' dtype.

    The forward pass makes up to four arrays [batch, heads, M, N]: the scores, these scaled, these
    masked (if there is a mask), and the weights; there is no dropout, which would make a fifth.
    The backward pass makes them again from Q and K, with lse, and two more: the gradients of the
    weights and of the scores. A softmax reads its scores once and writes its weights once.
    """
    if operation == "softmax":
        return (_step("P = softmax(S)", p, {"S": _SCORES}, {"P": _SCORES, "lse": "batch heads M"}),)
    sizes: dict[str, str] = {**OPERATIONS["backward"].inputs, "dQ": "batch heads M d"}
    sizes |= {"dK": "batch kv_heads N d", "dV": "batch kv_heads N dv", "D": "batch heads M"}

    def step(name: str, reads: str, writes: str) -> Step:
        return _step(
            name,
            p,
            {x: sizes.get(x, _SCORES) for x in reads.split()},
            {x: sizes.get(x, _SCORES) for x in writes.split()},
        )

    scores = "masked" if p.is_masked else "scaled"
    common = [step("S = Q K^T", "Q K", "S"), step("scaled = scale S", "S", "scaled")]
    if p.is_masked:
        common.append(step("masked = mask(scaled)", "scaled", "masked"))
    if operation == "forward":
        return (
            *common,
            step(f"P = softmax({scores})", scores, "P lse"),
            step("O = P V", "P V", "O"),
        )
    return (
        *common,
        step(f"P = exp({scores} - lse)", f"{scores} lse", "P"),
        step("dV = P^T dO", "P dO", "dV"),
        step("dP = dO V^T", "dO V", "dP"),
        step("D = rowsum(dO * O)", "dO O", "D"),
        step("dS = P * (dP - D)", "P dP D", "dS"),
        step("dQ = scale dS K", "dS K", "dQ"),
        step("dK = scale dS^T Q", "dS Q", "dK"),
    )


def tiled(operation: str, p: Problem, chip_bytes: int) -> tuple[Step, ...]:
    """One step: the algorithm of FlashAttention with ``chip_bytes`` of fast memory for a head.

    It is algorithm 1 of the paper (4 for gradients): tiles of K and V outside, of which
    chip_bytes / (4 d) rows fit, rows of Q inside. K and V are read once; Q, O and the rows' maxima
    and sums pass by for each tile of keys that sees them: Θ(M N d² / chip) numbers. A mask leaves
    out tiles. Of gradients K, V, dK and dV stay; Q, O, dO and dQ pass by.
    """
    if operation == "softmax":
        return naive(operation, p)
    widest = max(p.d, p.dv, 1)
    Bc = max(chip_bytes // (4 * widest * p.itemsize), 1)
    Br = max(min(Bc, widest), 1)
    rows = p.batch * p.heads * rows_passed(p, Br, Bc)
    real, scalar = p.dtype.sums.itemsize, p.itemsize
    reads = {name: size for name, size in inputs(operation, p).items() if name in ("K", "V")}
    if operation == "forward":
        reads |= {"Q": rows * p.d * scalar, "O": rows * p.dv * scalar, "l, m": rows * 2 * real}
        writes = {"O": rows * p.dv * scalar, "l, m": rows * 2 * real}
    else:
        reads |= {"Q": rows * p.d * scalar, "dQ": rows * p.d * scalar, "lse": rows * real}
        reads |= {"O": rows * p.dv * scalar, "dO": rows * p.dv * scalar}
        writes = {"dQ": rows * p.d * scalar}
        writes |= {x: outputs(operation, p)[x] for x in ("dK", "dV")}
    return (Step(f"tiles of {Br} rows and {Bc} keys", reads, writes),)


def held(plan: Plan) -> tuple[int, int, int]:
    """The bytes of a plan's inputs, of its outputs and of its temporaries."""
    made = sum(prod(shape) * dtype.itemsize for shape, dtype in plan.outputs.values())
    return (
        sum(inputs(plan.kernel.operation, plan.problem).values()),
        made,
        plan.scratch_bytes,
    )


def of(plan: Plan) -> tuple[Step, ...] | None:
    """What the launches and products of a plan read and write, by their loops and tiles.

    A launch on Q and K goes through tiles of them: how often an array passes by follows from its
    record (``Launch.keeps`` and ``moves``), the constants Br and Bc, and the mask. Any other has
    each array once, a product its operands once. None if a launch goes through tiles of other
    names, of which nothing is known.
    """
    found = []
    for position, step in enumerate(plan.steps):
        if isinstance(step, Matmul):
            found.append(_product(plan, step))
            continue
        if _has_tiles(step) and "Bc" not in step.constants:
            return None
        found.append(_launch(plan, position, step))
    return tuple(found)


def rows_passed(p: Problem, Br: int, Bc: int) -> int:
    """How many rows pass by, for all tiles of Bc keys of one head together."""
    first = np.arange(0, p.N, Bc, dtype=np.int64)
    last = np.minimum(first + Bc, p.N) - 1
    start, end = np.zeros_like(first), np.full_like(first, p.M)
    if p.right is not None:
        start = np.clip(first - p.causal_offset, 0, p.M)
    if p.left is not None:
        end = np.clip(last - p.window_offset + 1, 0, p.M)
    passing = np.minimum(-(-end // Br) * Br, p.M) - start // Br * Br
    return int(np.where(start < end, passing, 0).sum())


@dataclass(frozen=True)
class KeyTiles:
    """For each tile of rows of one head: its rows, and the tiles and keys that one of them sees."""

    rows: Any
    tiles: Any
    keys: Any

    @staticmethod
    def of(p: Problem, Br: int, Bc: int, packed: int = 1) -> KeyTiles:
        first = np.arange(0, p.M * packed, Br, dtype=np.int64)
        end = np.minimum(first + Br, p.M * packed)
        hidden, visible = np.zeros_like(first), np.full_like(first, p.N)
        if p.left is not None:
            hidden = np.clip(first // packed + p.window_offset, 0, p.N)
        if p.right is not None:
            visible = np.clip((end - 1) // packed + p.causal_offset + 1, 0, p.N)
        start, stop = hidden // Bc, -(-visible // Bc)
        tiles = np.maximum(stop - start, 0)
        keys = np.where(tiles > 0, np.minimum(stop * Bc, p.N) - start * Bc, 0)
        return KeyTiles(end - first, tiles, keys)


def _has_tiles(step: PlannedLaunch) -> bool:
    names = {name.removesuffix("16") for name, _ in step.launch.arrays}
    return {"Q", "K"} <= names and step.launch.keeps != "nothing"


def _launch(plan: Plan, position: int, step: PlannedLaunch) -> Step:
    """The step of a launch."""
    arrays, reads, writes = _arrays(plan), {}, {}
    passes = _passes(plan, step) if _has_tiles(step) else {}
    for name in dict.fromkeys(name for name, _ in step.launch.arrays if name in arrays):
        size = passes.get(name, arrays[name])
        if name in step.moves:
            size = arrays[name] * step.moves[name]
        is_read, is_written = _directions(plan, position, name)
        if is_read:
            reads[name] = size
        if is_written:  # the last tile leaves the rows' maxima and sums behind, too
            writes[name] = size + (arrays[name] if name in ("row_max", "row_sum") else 0)
    return Step(step.entry, reads, writes)


def _passes(plan: Plan, step: PlannedLaunch) -> dict[str, int]:
    """The bytes of the arrays that pass by more than once, or for some tiles only."""
    p, c, arrays = plan.problem, step.constants, _arrays(plan)
    Br = max(step.boxes.get("Q", 1), c.get("Br", 1))  # a block's rows may come in several boxes
    Bc = step.boxes.get("K", c["Bc"])
    packed = c.get("pack_gqa", 1)
    keeps = step.launch.keeps or ("keys" if "dK" in arrays_of(step) else "rows")
    forward = plan.kernel.operation == "forward"
    if keeps == "keys" and forward:
        Br = 1  # whether a tile of keys counts is asked row by row
    tiles = KeyTiles.of(p, Br, Bc, packed)
    visits = np.maximum(tiles.tiles, 1)  # a row without a key is written in the first tile
    passed: dict[str, int] = {}
    for name in arrays_of(step) & arrays.keys():
        plain, size = name.removesuffix("16"), arrays[name]
        if plain == "O_sum":
            spans = -(-visits * Bc // c.get("span", Bc)) - 1
            size = _size(p, "batch heads M dv", "real")
            passed[name] = _times(size, int((tiles.rows * spans).sum()), p.M * packed)
        elif plain in ("row_max", "row_sum"):
            passed[name] = _times(size, int((tiles.rows * (visits - 1)).sum()), p.M)
        elif plain in _OF_KEYS and keeps == "keys":
            passed[name] = size * (p.group if forward else 1)
        elif plain in _OF_KEYS:
            passed[name] = _times(size, int(tiles.keys.sum()) * p.group, p.N * packed)
        elif plain == "Q" and forward and keeps != "rows":
            passed[name] = _times(size, int((tiles.rows * visits).sum()), p.M * packed)
        elif plain in _OF_ROWS and keeps == "keys" and not forward:
            passed[name] = _times(size, rows_passed(p, Br, Bc), p.M)
    return passed


def arrays_of(step: PlannedLaunch) -> set[str]:
    """The names of a launch's arguments."""
    return {name for name, _ in step.launch.arrays}


def _times(size: int, passed: int, once: int) -> int:
    return size * passed // once if once else 0


def _directions(plan: Plan, position: int, name: str) -> tuple[bool, bool]:
    """Whether a step reads an array, and whether it writes it.

    Sums that tiles are added to are read and written, and so is what no other step names. Other
    temporaries are written by the first step that names them.
    """
    operation = OPERATIONS[plan.kernel.operation]
    if name in operation.inputs:
        return True, False
    naming = [i for i, step in enumerate(plan.steps) if name in _names(step)]
    if name in operation.outputs:
        after_a_product = isinstance(plan.steps[naming[0]], Matmul) and naming[0] < position
        return after_a_product, not after_a_product
    step = plan.steps[position]
    added = name.endswith("_sum") and isinstance(step, PlannedLaunch) and _has_tiles(step)
    if added or naming == [position]:
        return True, True
    return naming[0] < position, naming[0] == position


def _names(step: PlannedLaunch | Matmul) -> set[str]:
    if isinstance(step, Matmul):
        return {name.removesuffix(".T") for name in (step.a, step.b, step.out)}
    return arrays_of(step)


def _product(plan: Plan, step: Matmul) -> Step:
    """The step of a product; of heads that share an output, all but the first add to it."""
    p, arrays = plan.problem, _arrays(plan)
    a, b = (name.removesuffix(".T") for name in (step.a, step.b))
    size, reads = arrays[step.out], {a: arrays[a], b: arrays[b]}
    times = p.group if step.out.removesuffix("_sum") in _OF_KEYS else 1
    if times > 1:
        reads[step.out] = size * (times - 1)
    return Step(f"{step.out} = {step.a} {step.b}", reads, {step.out: size * times})


def _arrays(plan: Plan) -> dict[str, int]:
    """The bytes of every array of a plan."""
    operation, p = plan.kernel.operation, plan.problem
    made = {**plan.outputs, **plan.scratch}
    return inputs(operation, p) | {
        name: prod(plan.stored_shape(name)) * dtype.itemsize for name, (_, dtype) in made.items()
    }


def _step(name: str, p: Problem, reads: Mapping[str, str], writes: Mapping[str, str]) -> Step:
    kind = {"lse": "real", "D": "real"}
    return Step(
        name,
        {x: _size(p, axes, kind.get(x, "scalar")) for x, axes in reads.items()},
        {x: _size(p, axes, kind.get(x, "scalar")) for x, axes in writes.items()},
    )


def _size(p: Problem, axes: str, kind: str) -> int:
    itemsize = p.itemsize if kind == "scalar" else p.dtype.sums.itemsize
    return prod(p.shape(axes)) * itemsize
