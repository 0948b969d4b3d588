"""Summarizes a timeline: shares of phases, waits, overlap and idle tensor cores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from cupyfa.lab.analysis.timeline_recorder import Kind, Span, Timeline
from cupyfa.numerics.shown import ShownRow

_SHORT = 0.05  # a warp active for at most this fraction of the block's time does no work
Interval = tuple[float, float]


@dataclass(frozen=True, repr=False)
class Share(ShownRow):
    """A phase summed over all working warps, with times in the timeline's unit."""

    phase: str
    share: float  # percentage of the working warps' time
    mean: float  # mean time per warp that has this phase
    times: float  # mean number of occurrences per warp that has this phase
    longest: float
    longest_warp: int
    longest_at: float  # start of the longest occurrence
    longest_block: int | None = None  # None if only one block is recorded

    def row(self) -> dict[str, Any]:
        made = {name: x for name, x in asdict(self).items() if x is not None}
        return {"phase": made.pop("phase"), "share_%": made.pop("share"), **made}


def shares(timeline: Timeline) -> list[Share]:
    """Computes each phase's share of the time of all working warps, in descending order.

    The phase "idle" lasts from the end of a warp to the end of its block.
    """
    whole, found = extents(timeline), defaultdict[str, list[Span]](list)
    warps = working(timeline)
    total = sum(whole[block][1] - whole[block][0] for block, _ in warps) or 1.0
    for (block, warp), own in warps.items():
        for x in own:
            found[x.name].append(x)
        last, end = max(x.end for x in own), whole[block][1]
        if last < end:
            found["idle"].append(Span(block, warp, Kind.IN_BLOCK, "idle", last, end))
    rows = [_share(name, spans, total, timeline.is_detailed) for name, spans in found.items()]
    return sorted(rows, key=lambda row: -row.share)


def extents(timeline: Timeline) -> dict[int, Interval]:
    """Maps each block to its start and end time."""
    made: dict[int, Interval] = {}
    for x in timeline.phases:
        start, end = made.get(x.block, (x.start, x.end))
        made[x.block] = min(start, x.start), max(end, x.end)
    return made


def busiest_warps(timeline: Timeline) -> dict[int, int]:
    """Maps each block to its warp with the most phases, which represents the block."""
    counts: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for x in timeline.phases:
        counts[x.block][x.warp] += 1
    return {block: max(own, key=lambda warp: (own[warp], -warp)) for block, own in counts.items()}


def rows_of_blocks(timeline: Timeline) -> dict[int, tuple[int, int]]:
    """Maps each block to its multiprocessor and to a lane (row) of that multiprocessor.

    Blocks that run at the same time get different lanes.
    """
    free: dict[int, list[float]] = defaultdict(list)
    rows = {}
    for block, (start, end) in sorted(extents(timeline).items(), key=lambda item: item[1]):
        place = timeline.places.get(block, 0)
        lanes = free[place]
        lane = next((i for i, time in enumerate(lanes) if time <= start), len(lanes))
        lanes[lane:] = [end, *lanes[lane + 1 :]]
        rows[block] = place, lane
    return rows


def working(timeline: Timeline) -> dict[tuple[int, int], list[Span]]:
    """Maps (block, warp) to the warp's phases; omits warps that exit immediately."""
    whole, found = extents(timeline), defaultdict[tuple[int, int], list[Span]](list)
    for x in timeline.phases:
        found[x.block, x.warp].append(x)
    copying = {(x.block, x.warp) for x in timeline.copies}

    def works(key: tuple[int, int], own: Sequence[Span]) -> bool:
        start, end = whole[key[0]]
        return key in copying or sum(x.length for x in own) > _SHORT * (end - start)

    return {key: own for key, own in found.items() if works(key, own)}


def _share(name: str, spans: Sequence[Span], total: float, is_detailed: bool) -> Share:
    warps = len({(x.block, x.warp) for x in spans})
    time = sum(x.length for x in spans)
    longest = max(spans, key=lambda x: x.length)
    times = sum(x.is_first or x.kind is Kind.IN_BLOCK for x in spans)
    return Share(
        name,
        100 * time / total,
        time / warps,
        times / warps,
        longest.length,
        longest.warp,
        longest.start,
        None if is_detailed else longest.block,
    )


def facts(timeline: Timeline) -> dict[str, float]:
    """Computes named figures of the whole timeline.

    For one block: its time, the percentages of time with and without products in flight, the
    longest gap between products, and the percentage of the softmax that overlaps with products. A
    wgmma group is in flight from the fence before it to the end of the wait for it. For all blocks:
    their number, the maximum number that run at a time, the number of waves, the tail (from the
    first idle multiprocessor to the end), and the percentage of idle multiprocessor time. For the
    simulator: only the number of steps, since steps do not correspond to time.
    """
    if not timeline.phases:
        return {}
    if timeline.in_steps:
        return {"time": timeline.end}
    return _facts_of_block(timeline) if timeline.is_detailed else _facts_of_all(timeline)


def _facts_of_block(timeline: Timeline) -> dict[str, float]:
    found = {"time": timeline.end}
    # Products in flight: wgmma groups, and mma.sync phases of any warp.
    in_flight = [*timeline.products, *(x for x in timeline.phases if x.kind is Kind.PRODUCTS)]
    busy = merged((x.start, x.end) for x in in_flight)
    softmax = [x for x in timeline.phases if x.kind is Kind.SOFTMAX]
    if busy:
        found["products_%"] = 100 * _total(busy) / timeline.end
        gaps = [after - end for (_, end), (after, _) in pairwise(busy)]
        if gaps:
            found["gaps_%"] = 100 * sum(gaps) / timeline.end
            found["longest_gap"] = max(gaps)
    if busy and softmax:
        both = sum(_shared(busy, x.start, x.end) for x in softmax)
        found["softmax_overlap_%"] = 100 * both / (sum(x.length for x in softmax) or 1.0)
    return found


def _facts_of_all(timeline: Timeline) -> dict[str, float]:
    blocks = extents(timeline)
    of_place: dict[int, list[Interval]] = defaultdict(list)
    for block, interval in blocks.items():
        of_place[timeline.places.get(block, 0)].append(interval)
    first_free = min(max(end for _, end in own) for own in of_place.values())
    busy = sum(_total(merged(own)) for own in of_place.values())
    together = max(sum(s <= start < e for s, e in blocks.values()) for start, _ in blocks.values())
    return {
        "time": timeline.end,
        "blocks": float(len(blocks)),
        "blocks_at_a_time": float(together),
        "waves": len(blocks) / together,
        "tail": timeline.end - first_free,
        "idle_multiprocessors_%": 100 * (1 - busy / (timeline.end * timeline.multiprocessors)),
    }


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Merges intervals into a sorted list of disjoint intervals."""
    made: list[Interval] = []
    for start, end in sorted(intervals):
        if made and start <= made[-1][1]:
            made[-1] = made[-1][0], max(made[-1][1], end)
        else:
            made.append((start, end))
    return made


def _total(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _shared(busy: Sequence[Interval], start: float, end: float) -> float:
    """Returns how much of the interval [start, end] the disjoint intervals ``busy`` cover."""
    return sum(max(0.0, min(end, e) - max(start, s)) for s, e in busy)


_TEXTS = {
    "time": "{} {unit}",
    "products_%": "{products} in flight for {:.0f} % of the time",
    "gaps_%": "gaps without {products} are {:.1f} %",
    "longest_gap": "the longest {} {unit}",
    "softmax_overlap_%": "{:.0f} % of the softmax overlaps with {products} in flight",
    "blocks": "{:.0f} blocks",
    "blocks_at_a_time": "at most {:.0f} at a time",
    "waves": "{:.2f} waves",
    "tail": "the last blocks run {} {unit} after the first multiprocessor is idle",
    "idle_multiprocessors_%": "multiprocessors are idle {:.1f} % of the time",
}
_TIMES = ("time", "longest_gap", "tail")


def rounded(value: float | str) -> str:
    """Formats a number with three significant digits, or as an integer if it is at least 100.

    Returns a string unchanged.
    """
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _computing(timeline: Timeline) -> list[Span]:
    """Returns the phases of the warps that compute products or a softmax.

    If there are no such warps, returns the phases of all warps.
    """
    found = list(working(timeline).values())
    kinds = {Kind.PRODUCTS, Kind.ISSUE, Kind.SOFTMAX, Kind.ARITHMETIC}
    computing = [own for own in found if not kinds.isdisjoint(x.kind for x in own)]
    return [x for own in computing or found for x in own]


def lines(timeline: Timeline) -> list[str]:
    """Renders a summary: the launch, its figures, the longest wait, and the cost of recording."""
    unit = timeline.unit
    blocks = f"all {timeline.grid} blocks" if timeline.grid > 1 else "the only block"
    if timeline.is_detailed:
        blocks = f"block {timeline.blocks[0]} of {timeline.grid}"
    head = f"{timeline.entry}, {blocks} on {timeline.device}"
    known = facts(timeline)
    words = {"unit": unit, "products": "wgmma" if timeline.products else "mma"}
    text = ", ".join(
        _TEXTS[x].format(rounded(y) if x in _TIMES else y, **words)
        for x, y in known.items()
        if x in _TEXTS
    )
    made = [head, timeline.problem, text]
    if timeline.lost:
        ends = "the timeline ends" if timeline.is_detailed else "blocks end"
        made.insert(
            0,
            f"the log was full; {ends} at the first of {timeline.lost:,} lost entries; record "
            "less, with a smaller N or fewer marks",
        )
    if count := timeline.library_products:
        were = "a product" if count == 1 else f"{count} products"
        made.append(f"not recorded: {were} of the call by cuBLAS, or by NumPy in the simulator")
    if waits := [x for x in _computing(timeline) if x.name.startswith("wait")]:
        one = max(waits, key=lambda x: x.length)
        made.append(
            f"longest wait of a computing warp: {rounded(one.length)} {unit} for "
            f"{one.name.removeprefix('wait: ')}, warp {one.warp} from {rounded(one.start)} on"
        )
    if timeline.in_steps:
        made.append("a step is one recorded event, in the order of the simulator")
    elif timeline.overhead is not None:
        made.append(
            f"recording made the call {100 * timeline.overhead:.1f} % longer: "
            f"{timeline.milliseconds:.4g} ms without, {timeline.recorded_milliseconds:.4g} ms with"
        )
    if timeline.undisturbed and not timeline.lost:
        made.append(
            f"the recorded block took {rounded(timeline.end)} {unit}, and "
            f"{rounded(timeline.undisturbed)} without phases "
            f"({timeline.end / timeline.undisturbed:.1f} times)"
        )
    return made
