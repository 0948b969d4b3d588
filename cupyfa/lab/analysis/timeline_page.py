"""Writes a page that animates a simulated block step by step, with the state of one row."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupyfa import cache_folder
from cupyfa.lab.analysis import row_states
from cupyfa.lab.analysis.timeline_recorder import Kind, Span, Timeline, Visit
from cupyfa.lab.analysis.timeline_summary import merged
from cupyfa.lab.verify.case import Case

_TEMPLATE = Path(__file__).with_name("timeline_page.html")
_DATA = "{/* the recording */}"  # placeholder in the template
_MOST_STEPS = 20_000
_PRODUCTS = (Kind.PRODUCTS, Kind.ISSUE, Kind.ARITHMETIC)
_ACTIONS = {
    **dict.fromkeys(_PRODUCTS, "products"),
    Kind.SOFTMAX: "softmax",
    Kind.EPILOGUE: "epilogue",
    Kind.LOADS: "load",
    Kind.MARKED: "mark",
    Kind.COPIES_BEGUN: "copy",
}
# Maps operations and actions to the arrays that the action reads, and the arrays that it writes.
_ARRAYS = {
    "softmax": {"softmax": ("S", ""), "epilogue": ("S", "P")},
    "forward": {
        "scores": ("Q K", "S"),
        "softmax": ("S", "P"),
        "output": ("P V", "O"),
        "products": ("Q K V", "S O"),
        "epilogue": ("", "O"),
    },
    "backward": {
        "scores": ("Q K V dO", "S"),
        "softmax": ("S", "P dS"),
        "output": ("P dS Q K dO", "dQ dK dV"),
        "products": ("Q K V dO", ""),
        "epilogue": ("", "dQ dK dV"),
    },
    "tangent": {
        "scores": ("Q K", "S"),
        "softmax": ("S", "P"),
        "output": ("P V", "O"),
        "products": ("Q K V", "S O"),
        "epilogue": ("", "O"),
    },
}
_RESULTS = {"columns": "dK dV", "rows": "dQ", "scores": "P dS"}  # part of an entry name: outputs


class _Work(NamedTuple):
    """A warp's work on a tile: an action, its phase, and the arrays that it reads and writes."""

    action: str
    name: str
    reads: str
    writes: str
    row: int | None
    key: int | None


@dataclass
class _Step:
    """A piece of work that several warps perform together, with the start time of each warp."""

    work: _Work
    times: dict[int, float]


def save(timeline: Timeline, case: Case, path: Path) -> None:
    """Writes the page of a block to a file atomically.

    Raises ValueError if the timeline does not record a single block in the simulator, or if the
    block runs more than _MOST_STEPS steps.
    """
    if not (timeline.in_steps and timeline.is_detailed):
        raise ValueError(
            "a page shows a single block in the simulator; use --backend simulator and choose a "
            "block with --block"
        )
    data = json.dumps(_data(timeline, case), separators=(",", ":"), allow_nan=False)
    escaped = data.replace("<", "\\u003c")  # so that data cannot end the script
    page = _TEMPLATE.read_text("utf-8").replace(_DATA, escaped)
    cache_folder.write_whole(path, page.encode())


def _data(timeline: Timeline, case: Case) -> dict[str, Any]:
    p = case.problem
    visits = timeline.visits or (Visit(0, 0, timeline.blocks[0] % p.M, 0),)
    operation = "softmax" if timeline.entry.startswith("softmax") else case.operation
    of, rows = timeline.constants.get, {x.row for x in visits}
    height = _size_of_tiles(rows, int(of("Br", 0)) // int(of("pack_gqa", 1)), p.M)
    width = _size_of_tiles({x.key for x in visits}, int(of("Bc", 0)), p.N)
    if not timeline.visits:
        height = 1
    steps = _steps(timeline, operation, visits, (height, width))
    if len(steps) > _MOST_STEPS:
        raise ValueError(
            f"the block runs {len(steps):,} steps, but a page shows at most {_MOST_STEPS:,}; "
            "choose smaller sizes, such as -M 64 -N 64"
        )
    visible = p.visible()
    phases = list(dict.fromkeys(x.name for x in timeline.phases))
    actions = list(dict.fromkeys(x.work[:4] for x in steps))
    return {
        "entry": timeline.entry,
        "block": timeline.blocks[0],
        "grid": timeline.grid,
        "problem": timeline.problem,
        "warps": timeline.warps,
        "operation": operation,
        **{"M": p.M, "N": p.N, "height": height, "width": width},
        # One digit per tile: 0 if all of its pairs are masked, 2 if none are, otherwise 1.
        "visible": [
            "".join(_seen(visible[i : i + height, j : j + width]) for j in range(0, p.N, width))
            for i in range(0, p.M, height)
        ],
        "phases": phases,
        "actions": actions,
        "steps": list(_rows(timeline, steps, phases, actions)),
        "buffers": _buffers(timeline, steps),
        "state": _state(timeline, case, steps, height, width),
    }


def _seen(pairs: np.ndarray) -> str:
    return "2" if pairs.all() else "1" if pairs.any() else "0"


def _size_of_tiles(starts: set[int], constant: int, whole: int) -> int:
    """Returns the number of rows or keys in a tile.

    This is the launch's constant or, if smaller, the smallest distance between tile starts."""
    gaps = [after - before for before, after in pairwise(sorted(starts))]
    return max(min([*gaps, constant or whole, whole]), 1)


# Steps


def _steps(
    timeline: Timeline, operation: str, visits: Sequence[Visit], size: tuple[int, int]
) -> list[_Step]:
    """Returns the steps of all warps in order.

    The simulator runs one warp until it waits, then the next. On a GPU the warps would run
    together. Warps that do the same work after the same number of waits therefore share a step: all
    warps of the block if they wait only at block barriers, otherwise the warps of a warpgroup.
    """
    found = []
    for warp in range(timeline.warps):
        spans = [x for x in (*timeline.phases, *timeline.copies) if x.warp == warp and x.is_first]
        own = sorted((x for x in spans if x.kind in _ACTIONS), key=lambda x: x.start)
        barriers = [x.start for x in spans if x.kind is Kind.BLOCK_WAIT]
        waits = [x.start for x in spans if x.kind in (Kind.BARRIER_WAIT, Kind.NAMED_WAIT)]
        its_visits = [x for x in visits if x.warp == warp] or visits[:1]
        repeated: Counter[Any] = Counter()
        for x, work in _work(timeline, operation, own, its_visits, size):
            after = bisect_right(barriers, x.start), bisect_right(waits, x.start)
            same = work, *after, warp // 4 if waits else -1
            found.append((x.start, warp, (*same, repeated[same])))
            repeated[same] += 1
    made: list[_Step] = []
    shared: dict[Any, int] = {}  # latest step for each kind of work and number of waits
    last = [-1] * timeline.warps  # latest step of each warp
    for time, warp, key in sorted(found, key=lambda x: x[:2]):
        if shared.get(key, -1) <= last[warp]:
            shared[key] = len(made)
            made.append(_Step(key[0], {}))
        last[warp] = shared[key]
        made[last[warp]].times[warp] = time
    return made


def _work(
    timeline: Timeline,
    operation: str,
    spans: Sequence[Span],
    visits: Sequence[Visit],
    size: tuple[int, int],
) -> Iterator[tuple[Span, _Work]]:
    """Yields a warp's phases, each with the work that its position within the tile implies."""
    times = [x.time for x in visits]
    by_visit = {
        number: list(own)
        for number, own in groupby(spans, lambda x: bisect_right(times, x.start) - 1)
    }
    # Products that precede the softmax of the first tile.
    ahead = next((_products_ahead(own) for own in by_visit.values() if _softmax(own)), [])
    for number, own in by_visit.items():
        for x in own:
            action, arrays, visit = _ACTIONS[x.kind], None, visits[max(number, 0)]
            if action == "products":
                action = _kind_of_products(x, own, operation, len(ahead))
                if action == "output" and x in _products_ahead(own):
                    visit = visits[max(number - 1, 0)]
            elif action == "load":
                arrays = _loaded(timeline, x, own, number < 0 and operation == "forward"), ""
            elif action == "copy":
                arrays = (x.name if x.name in timeline.arrays else ""), ""
            reads, writes = arrays or _ARRAYS[operation].get(action, ("", ""))
            of_pass = "two_pass" in timeline.entry or "slices" in timeline.entry
            if writes == "dQ dK dV" and (action == "epilogue" or of_pass):
                writes = next((y for part, y in _RESULTS.items() if part in timeline.entry), writes)
            if x.name == "cp.async":
                yield x, _Work(action, x.name, *_copied(timeline, x, *size))
            else:
                yield x, _Work(action, x.name, reads, writes, visit.row, visit.key)


def _softmax(of_tile: Sequence[Span]) -> list[Span]:
    return [x for x in of_tile if x.kind is Kind.SOFTMAX]


def _products_ahead(of_tile: Sequence[Span]) -> list[Span]:
    """Returns the products that precede a tile's softmax."""
    start = min((x.start for x in _softmax(of_tile)), default=0)
    return [x for x in of_tile if x.kind in _PRODUCTS and x.start < start]


def _kind_of_products(
    product: Span, of_tile: Sequence[Span], operation: str, first_products: int
) -> str:
    """Returns "scores" or "output", depending on what a product computes; "products" if unknown.

    Scores are computed before their tile's softmax. A kernel that overlaps them with the output of
    the previous tile has one product before its first softmax, and two before each later softmax.
    """
    softmax = _softmax(of_tile)
    if not softmax:
        if product.kind is not Kind.ARITHMETIC:
            return "products"
        first = next(x for x in of_tile if x.kind is Kind.ARITHMETIC)
        return "scores" if product is first else "output"
    before = _products_ahead(of_tile)
    if product in before:
        overlaps = operation == "forward" and first_products == 1 and len(before) == 2
        return "output" if overlaps and product is before[1] else "scores"
    if product.start < softmax[-1].start or (operation == "forward" and first_products == 0):
        return "products"
    return "output"


def _loaded(timeline: Timeline, load: Span, of_tile: Sequence[Span], has_queries: bool) -> str:
    """Returns the names of the arrays that a load phase reads."""
    for name, array in timeline.arrays.items():
        if load.argument and array.row_at(load.argument) is not None:
            return name
    if has_queries:
        return "Q"
    unknown = [x for x in of_tile if x.kind is Kind.LOADS and not x.argument]
    return "KV"[unknown.index(load) % 2] if len(unknown) > 1 else "K V"


def _copied(
    timeline: Timeline, group: Span, height: int, width: int
) -> tuple[str, str, int | None, int | None]:
    """Returns the arrays that a cp.async group reads and writes (""), and its first row and key."""
    groups = [x.start for x in timeline.copies if (x.warp, x.name) == (group.warp, group.name)]
    before = max((x for x in groups if x < group.start), default=-1)
    found: dict[str, int] = {}
    for copy in timeline.lane_copies:
        if copy.warp == group.warp and before < copy.time <= group.start:
            for name, array in timeline.arrays.items():
                if (row := array.row_at(copy.address)) is not None:
                    found.setdefault(name.partition("_")[0], row)  # Q_high and Q_low count as Q
    rows = [row // height * height for name, row in found.items() if name[0] in "Qd"]
    keys = [row // width * width for name, row in found.items() if name[0] in "KV"]
    return " ".join(found), "", next(iter(rows), None), next(iter(keys), None)


def _rows(
    timeline: Timeline, steps: Sequence[_Step], phases: Sequence[str], actions: Sequence[Any]
) -> Iterator[list[Any]]:
    """Yields steps for JSON: action, row, key, active warps, and phases of all warps.

    Active warps and phases are lists of runs of adjacent warps, each with its first and last warp.
    The phases are replaced by 0 if they equal the previous step's phases.
    """
    numbers, codes = ({x: i for i, x in enumerate(names)} for names in (phases, actions))
    columns = [_phases_of_warp(timeline, steps, warp) for warp in range(timeline.warps)]
    shown = None
    for step, *now in zip(steps, *columns):
        states = [[first, last, numbers.get(name, -1)] for first, last, name in _runs(now)]
        joined = _runs([warp in step.times for warp in range(timeline.warps)])
        active = [[first, last] for first, last, is_active in joined if is_active]
        work = step.work
        yield [codes[work[:4]], work.row, work.key, active, 0 if states == shown else states]
        shown = states


def _phases_of_warp(timeline: Timeline, steps: Sequence[_Step], warp: int) -> Iterator[str | None]:
    """Yields a warp's phase at each step, or None after the warp's end.

    At a step that other warps perform, the phase is the warp's current wait, if there is one.
    """
    phases = [x for x in timeline.phases if x.warp == warp]
    starts = [x.start for x in phases]
    times = _times(steps)
    active = [number for number, step in enumerate(steps) if warp in step.times]
    for before, after in pairwise([-1, *active, len(steps)]):
        is_last = after == len(steps)
        begin = bisect_right(starts, steps[before].times[warp]) if before >= 0 else 0
        end = len(phases) if is_last else bisect_left(starts, steps[after].times[warp])
        if before >= 0:
            work = steps[before].work
            yield "other" if work.action == "copy" else work.name
        for number in range(before + 1, after):
            if is_last and (not phases or times[number] >= phases[-1].end):
                yield None
                continue
            begun = [x.name for x in phases[begin:end] if x.start <= times[number]]
            waits = [x.name for x in phases[begin:end] if x.name.startswith("wait")]
            waits_begun = [x for x in begun if x.startswith("wait")]
            yield next(iter([*reversed(waits_begun), *waits]), "other")


def _times(steps: Sequence[_Step]) -> list[float]:
    """Returns, for each step, the time by which its warps have begun this and all earlier steps."""
    return list(accumulate((max(x.times.values()) for x in steps), max))


def _runs(values: Sequence[Any]) -> Iterator[tuple[int, int, Any]]:
    for value, run in groupby(enumerate(values), lambda x: x[1]):
        places = [place for place, _ in run]
        yield places[0], places[-1], value


def _buffers(timeline: Timeline, steps: Sequence[_Step]) -> list[dict[str, Any]]:
    """Returns the shared-memory buffers with the steps at which their states change."""
    times = _times(steps)
    found: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for x in timeline.buffers:
        change = bisect_left(times, x.time), x.state
        found.setdefault((x.name, x.stage), []).append(change)
    copies = [(x.start, x.end) for x in timeline.copies if x.name == "cp.async"]
    for start, end in merged(copies):
        for time, state in ((start, "in flight"), (end, "full")):
            found.setdefault(("cp.async", 0), []).append((bisect_left(times, time), state))
    return [
        {"name": name, "stage": stage, "changes": changes}
        for (name, stage), changes in sorted(found.items())
    ]


def _state(
    timeline: Timeline, case: Case, steps: Sequence[_Step], height: int, width: int
) -> dict[str, Any] | None:
    """Returns intermediate results of a row or key, each with its step and its tile's start."""
    of_keys = "columns" in timeline.entry
    has_softmax = any(x.work.action == "softmax" for x in steps)
    found: dict[tuple[int, int], int] = {}  # maps (row, key) of each tile to its step
    for number, step in enumerate(steps):
        row, key = step.work.row, step.work.key
        is_shown = step.work.action == ("softmax" if has_softmax else "scores")
        if is_shown and row is not None and key is not None:
            found.setdefault((row, key), number)
    if not found:
        return None
    first_row, first_key = next(iter(found))
    # With a causal mask, the last row of a tile sees more keys than the tile's other rows, and the
    # first key is visible to more rows than the tile's other keys.
    index = first_key if of_keys else min(first_row + height, case.problem.M) - 1
    of_tile = {
        row if of_keys else key: number
        for (row, key), number in found.items()
        if (key == first_key if of_keys else row == first_row)
    }
    size = height if of_keys else width
    states = row_states.states(case, index, of_keys, [*of_tile], size)
    if states is None:
        return None
    return {
        "of": "key" if of_keys else "row",
        "index": index,
        "size": size,
        "entries": [[step, start, x] for (start, step), x in zip(of_tile.items(), states)],
    }
