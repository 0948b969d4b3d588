"""Timelines as files: traces for Perfetto and Chrome, which also hold the summary to compare."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupyfa import cache_folder
from cupyfa.cache_folder import records
from cupyfa.lab.analysis.timeline_recorder import Kind, Span, Timeline
from cupyfa.lab.analysis.timeline_summary import (
    busiest_warps,
    extents,
    facts,
    lines,
    rounded,
    rows_of_blocks,
    shares,
)

_OWN = "cupyfa"  # where a trace has what compare reads
_VERSION = 1
_MOST_BYTES = 512 << 20  # of a file


def trace(timeline: Timeline) -> dict[str, Any]:
    """The trace as a value for JSON: https://ui.perfetto.dev opens it.

    A process is a block with its warps as threads, or all blocks with multiprocessors as threads.
    Times are whole nanoseconds, so that phases neither overlap nor leave gaps.
    """
    place_of = _places(timeline)
    return {
        "displayTimeUnit": "ns",
        "traceEvents": [*_names(timeline, place_of), *_events(timeline, place_of)],
        _OWN: {
            "timeline": _VERSION,
            "kernel": timeline.kernel,
            "entry": timeline.entry,
            "operation": timeline.operation,
            "tiles": timeline.tiles,
            "block": f"block {timeline.blocks[0]}" if timeline.is_detailed else "all blocks",
            "problem": timeline.problem,
            "device": timeline.device,
            "modelled": timeline.modelled,
            "unit": timeline.unit,
            "lines": lines(timeline),
            "facts": facts(timeline),
            "phases": [x.row() for x in shares(timeline)],
        },
    }


def save(timeline: Timeline, path: str | Path) -> None:
    """Writes the trace to a file, whole or not at all."""
    cache_folder.write_whole(
        Path(path), json.dumps(trace(timeline), separators=(",", ":")).encode()
    )


_Places = Callable[[Span], dict[str, int]]


def _places(timeline: Timeline) -> _Places:
    """The process and thread of a span: a block and a warp, or of all blocks a row of them."""
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
            process, thread = "all blocks", f"SM {number}" + (f", row {lane + 1}" if lane else "")
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
    for number, (kind, name, x) in enumerate(in_flight):  # spans of one warp may overlap
        own = {"local": hex(number)}  # of the process: shown with its block
        common = {"cat": kind, "name": name, "id2": own, **place_of(x)}
        size = {"args": {"bytes": x.bytes}} if x.bytes else {}
        yield {"ph": "b", "ts": at(x.start), **common, **size}
        yield {"ph": "e", "ts": at(x.end), **common}
    for number, arrow in enumerate(timeline.arrows):
        common = {"cat": "flow", "name": "copy" if arrow.is_copy else "free buffer", "id": number}
        start = {"pid": arrow.block, "tid": arrow.start_warp}
        end = {"pid": arrow.block, "tid": arrow.end_warp}
        yield {"ph": "s", "ts": at(arrow.start), **common, **start}
        in_wait = max(at(arrow.start), at(arrow.end, less=1))  # and not in what follows it
        yield {"ph": "f", "bp": "e", "ts": in_wait, **common, **end}


def _blocks(timeline: Timeline) -> Iterator[Span]:
    """Each block, and in it the phases of the warp that has most of them."""
    for block, (start, end) in extents(timeline).items():
        yield Span(block, 0, Kind.IN_BLOCK, f"block {block}", start, end)
    warps = busiest_warps(timeline)
    yield from (x for x in timeline.phases if x.warp == warps[x.block])


@dataclass(frozen=True)
class Saved:
    """What a file has of a timeline."""

    kernel: str
    entry: str
    operation: str
    tiles: str
    block: str
    problem: str
    device: str
    modelled: bool
    unit: str
    facts: Mapping[str, float]
    phases: Sequence[Mapping[str, Any]]


def is_timeline(path: str | Path) -> bool:
    """Whether a file is a trace of ``save``. Raises OSError if it cannot be read."""
    try:
        content = records.parsed(records.read_file(path, _MOST_BYTES))
    except ValueError:
        return False
    own = content.get(_OWN) if isinstance(content, dict) else None
    return isinstance(own, dict) and "timeline" in own


def load(path: str | Path) -> Saved:
    """Reads a file of ``save``. Raises OSError if that fails, ValueError for other files."""
    with records.refusing(f"{path} was not written by cupyfa timeline --save"):
        content = records.parsed(records.read_file(path, _MOST_BYTES))
        own = _FILE(content)[_OWN]
        if own["timeline"] == _VERSION:
            return Saved(**_SAVED(content[_OWN]))
    raise ValueError(
        f"{path} has version {own['timeline']!r} of timelines, and this program reads {_VERSION}; "
        "record it again"
    )


# A trace file holds every event; loading it needs only the summary.
_FINITE = records.number()
_FILE = records.record({_OWN: records.record({"timeline": records.whole()})})
_SAVED = records.record(
    {
        **{x: records.text() for x, kind in Saved.__annotations__.items() if kind == "str"},
        "modelled": records.flag,
        "facts": records.record({"time": _FINITE}),
        "phases": records.list_of(
            records.record({"phase": records.text(), **dict.fromkeys(("mean", "share_%"), _FINITE)})
        ),
    }
)


def named(saved: Saved) -> str:
    """What a file is of, and its time: "wgmma, block 0, 14,562 cycles"."""
    return f"{saved.entry}, {saved.block}, {rounded(saved.facts['time'])} {saved.unit}"


def differences(before: Saved, after: Saved) -> list[str]:
    """In what two timelines differ besides their times."""
    names = "problem", "device", "tiles", "block"
    pairs = ((name, getattr(before, name), getattr(after, name)) for name in names)
    return [f"{name}: {old} before, {new} after" for name, old, new in pairs if old != new]


def compared(before: Saved, after: Saved) -> list[dict[str, Any]]:
    """A row for each phase of two timelines: its time in a warp before and after, and the change.

    The largest change comes first. Raises ValueError for different operations, and where times are
    not of one kind.
    """
    if before.operation != after.operation:
        both = f"{before.entry} is {before.operation}, and {after.entry} {after.operation}"
        raise ValueError(f"{both}; give two timelines of one operation")
    if before.modelled != after.modelled or before.unit != after.unit:
        kinds = (f"{'modelled' if x.modelled else 'measured'} {x.unit}" for x in (before, after))
        raise ValueError(f"times differ in kind: {' and '.join(kinds)}; record both alike")
    old, new = ({x["phase"]: x for x in saved.phases} for saved in (before, after))
    rows = []
    for phase in dict.fromkeys((*old, *new)):
        was, now = (found.get(phase, {}).get("mean", 0.0) for found in (old, new))
        rows.append(
            {
                "phase": phase,
                f"before_{before.unit}": was,
                f"after_{after.unit}": now,
                "change": now - was,
                "before_%": old.get(phase, {}).get("share_%", 0.0),
                "after_%": new.get(phase, {}).get("share_%", 0.0),
            }
        )
    return sorted(rows, key=lambda row: -abs(row["change"]))
