"""Writes timelines as traces for Perfetto and Chrome."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cupyfa import cache_folder
from cupyfa.lab.analysis.timeline_recorder import Kind, Span, Timeline
from cupyfa.lab.analysis.timeline_summary import busiest_warps, extents, rows_of_blocks


def trace(timeline: Timeline) -> dict[str, Any]:
    """Returns the trace as JSON-serializable data, which https://ui.perfetto.dev opens.

    The trace shows one block as a process with its warps as threads, or all blocks as a process
    with multiprocessors as threads. Times are whole nanoseconds, so that phases neither overlap
    nor leave gaps.
    """
    place_of = _places(timeline)
    return {
        "displayTimeUnit": "ns",
        "traceEvents": [*_names(timeline, place_of), *_events(timeline, place_of)],
    }


def save(timeline: Timeline, path: str | Path) -> None:
    """Writes the trace to a file atomically."""
    cache_folder.write_whole(
        Path(path), json.dumps(trace(timeline), separators=(",", ":")).encode()
    )


_Places = Callable[[Span], dict[str, int]]


def _places(timeline: Timeline) -> _Places:
    """Returns a function that maps a span to its process and thread."""
    if timeline.is_detailed:
        return lambda x: {"pid": x.block, "tid": x.warp}
    rows = rows_of_blocks(timeline)
    lanes = 1 + max(lane for _, lane in rows.values())
    numbers = {block: place * lanes + lane for block, (place, lane) in rows.items()}
    return lambda x: {"pid": 0, "tid": numbers[x.block]}


def _names(timeline: Timeline, place_of: _Places) -> Iterator[dict[str, Any]]:
    rows = {} if timeline.is_detailed else rows_of_blocks(timeline)
    said = set()
    for x in timeline.phases:
        place = place_of(x)
        process, thread = f"block {x.block}", f"warp {x.warp}"
        if rows:
            number, lane = rows[x.block]
            of = "block" if timeline.in_steps else "SM"
            process, thread = "all blocks", f"{of} {number}" + (f", row {lane + 1}" if lane else "")
        for what, name, where in (
            ("process_name", process, {"pid": place["pid"]}),
            ("thread_name", thread, place),
        ):
            if (key := (what, *where.values())) not in said:
                said.add(key)
                yield {"ph": "M", "name": what, **where, "args": {"name": name}}


def _events(timeline: Timeline, place_of: _Places) -> Iterator[dict[str, Any]]:
    def at(time: float, less: int = 0) -> float:
        return (round(time * timeline.nanoseconds) - less) / 1e3

    spans = timeline.phases if timeline.is_detailed else _blocks(timeline)
    for x in spans:
        times = {"ts": at(x.start), "dur": round(at(x.end) - at(x.start), 3)}
        kind = x.kind.name.lower()
        yield {"ph": "X", "name": x.name, "cat": kind, **times, **place_of(x)}
    in_flight = [("wgmma", f"wgmma of warp {x.warp}", x) for x in timeline.products]
    in_flight += [("copy", f"copy of {x.name}", x) for x in timeline.copies]
    for number, (kind, name, x) in enumerate(in_flight):  # async events, which may overlap
        # The id is local to a process, so Perfetto shows the event below that process.
        own = {"local": hex(number)}
        common = {"cat": kind, "name": name, "id2": own, **place_of(x)}
        size = {"args": {"bytes": x.bytes}} if x.bytes else {}
        yield {"ph": "b", "ts": at(x.start), **common, **size}
        yield {"ph": "e", "ts": at(x.end), **common}
    for number, arrow in enumerate(timeline.arrows):
        common = {"cat": "flow", "name": "copy" if arrow.is_copy else "free buffer", "id": number}
        start = {"pid": arrow.block, "tid": arrow.start_warp}
        end = {"pid": arrow.block, "tid": arrow.end_warp}
        yield {"ph": "s", "ts": at(arrow.start), **common, **start}
        # End the arrow just before the wait ends, so that it does not point into the next phase.
        in_wait = max(at(arrow.start), at(arrow.end, less=1))
        yield {"ph": "f", "bp": "e", "ts": in_wait, **common, **end}


def _blocks(timeline: Timeline) -> Iterator[Span]:
    """Yields a span for each block, and the phases of each block's busiest warp."""
    for block, (start, end) in extents(timeline).items():
        yield Span(block, 0, Kind.IN_BLOCK, f"block {block}", start, end)
    warps = busiest_warps(timeline)
    yield from (x for x in timeline.phases if x.warp == warps[x.block])
