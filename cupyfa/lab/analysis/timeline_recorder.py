"""Records the timeline of a kernel launch: the phases and waits of each warp.

The launch is compiled with the headers in kernels/timeline, which log a time-stamped entry where a
phase begins or ends. On a GPU the time stamps are read from the clocks of the multiprocessor and of
the device. The simulator has no clock and numbers the entries in the order of execution.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from cupyfa.arrays import block_mask as block_masks
from cupyfa.errors import Unsupported, nearest
from cupyfa.lab.bench import timing
from cupyfa.lab.verify.case import Case
from cupyfa.ladder.kernel import Kernel, Matmul
from cupyfa.numerics.shown import Shown
from cupyfa.planner import source
from cupyfa.planner.choose_kernel import plan as plan_of
from cupyfa.planner.plan import Plan, PlannedLaunch, Recording
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.environment import Progress, no_progress
from cupyfa.runtime.launcher import Launcher, compile_kernels
from cupyfa.runtime.workspace import allocate

CAPACITY = 65536  # maximum number of entries per warp
_FEWEST, _MANY = 16, 4096  # minimum and maximum entries per warp when all blocks are recorded
_MOST_BYTES = 2**28  # maximum size of the log when all blocks are recorded
_ENTRY_BYTES = 16
_ENDED = 0x80
_NANOSECONDS_OF_STEP = 1e3  # nanoseconds per simulator step in a trace
_TIMES = 5  # number of timed runs with recording, and of timed runs without
_LISTED = 20  # maximum number of launches listed in a message


class Kind(IntEnum):
    """Kinds of log entries; mirrors enum Kind in timeline_kinds.cuh."""

    IN_BLOCK = 0
    BARRIER_WAIT = 1
    NAMED_WAIT = 2
    BLOCK_WAIT = 3
    COPY_WAIT = 4
    PRODUCT_WAIT = 5
    STORE_WAIT = 6
    PRODUCTS = 7
    ISSUE = 8
    SOFTMAX = 9
    EPILOGUE = 10
    LOADS = 11
    ARITHMETIC = 12
    MARKED = 13
    BARRIER_ARRIVE = 14
    NAMED_ARRIVE = 15
    COPIES_BEGUN = 16
    SHARED_BEGINS = 17
    PLACED = 18
    TILE = 19
    COPIED = 20


_TIMELESS = (Kind.TILE, Kind.COPIED)  # entries not counted as simulator steps
# Phase names. The barrier's name is appended to a wait for a barrier.
NAMES = {
    Kind.IN_BLOCK: "other",
    Kind.BARRIER_WAIT: "wait",
    Kind.NAMED_WAIT: "wait",
    Kind.BLOCK_WAIT: "wait: __syncthreads",
    Kind.COPY_WAIT: "wait: cp.async",
    Kind.PRODUCT_WAIT: "wait: wgmma",
    Kind.STORE_WAIT: "wait: stores",
    Kind.PRODUCTS: "mma",
    Kind.ISSUE: "issue: wgmma",
    Kind.SOFTMAX: "softmax",
    Kind.EPILOGUE: "epilogue",
    Kind.LOADS: "loads",
    Kind.ARITHMETIC: "products",
    Kind.MARKED: "mark",
}


class Entry(NamedTuple):
    """A warp's log entry: its kind, whether it ends a phase, and two kind-specific numbers."""

    time: float
    block: int
    warp: int
    kind: Kind
    ended: bool
    amount: int
    argument: int


@dataclass(frozen=True)
class Span:
    """A time interval of a warp: a phase, or a copy or wgmma group in flight."""

    block: int
    warp: int
    kind: Kind
    name: str
    start: float
    end: float
    bytes: int = 0
    is_first: bool = True  # False for later pieces of a phase that nested phases split
    argument: int = 0  # argument of the entry that begins the phase

    @property
    def length(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Arrow:
    """An arrow from a copy's start or a buffer's release to the end of the wait for it."""

    block: int
    start_warp: int
    start: float
    end_warp: int
    end: float
    is_copy: bool


class Visit(NamedTuple):
    """The time at which a warp starts work on a tile, and the tile's first row and key."""

    warp: int
    time: float
    row: int
    key: int


class Copy(NamedTuple):
    """A lane's cp.async, with its source address / 16, modulo 2^32."""

    warp: int
    time: float
    address: int


class GlobalArray(NamedTuple):
    """The address and size of an array in global memory, and its number of rows per head."""

    start: int
    bytes: int
    row_bytes: int
    rows: int

    def row_at(self, address: int) -> int | None:
        """Returns the row at byte ``16 * address`` (modulo 2^36), or None outside the array."""
        distance = (address - self.start // 16) % 2**32 * 16
        return distance // self.row_bytes % self.rows if distance < self.bytes else None


class BufferChange(NamedTuple):
    """A change of the state of a shared-memory buffer that mbarriers guard."""

    time: float
    name: str
    stage: int
    state: str  # "in flight", "full" or "empty"


@dataclass(frozen=True, repr=False)
class Timeline(Shown):
    """The recorded phases of one block (times in cycles) or of all blocks (in microseconds).

    In the simulator, times are numbers of log entries of the block.
    """

    kernel: str
    entry: str
    problem: str
    device: str
    in_steps: bool  # whether times are simulator steps rather than measured times
    grid: int  # number of blocks in the launch
    warps: int  # warps per block
    blocks: tuple[int, ...]  # indices of the recorded blocks
    phases: tuple[Span, ...]
    copies: tuple[Span, ...] = ()
    products: tuple[Span, ...] = ()  # wgmma groups, from issue to the end of their waits
    arrows: tuple[Arrow, ...] = ()
    visits: tuple[Visit, ...] = ()  # simulator only, in each warp's order
    lane_copies: tuple[Copy, ...] = ()
    buffers: tuple[BufferChange, ...] = ()
    constants: Mapping[str, int | float] = field(default_factory=dict)  # constants of the launch
    arrays: Mapping[str, GlobalArray] = field(default_factory=dict)
    places: Mapping[int, int] = field(default_factory=dict)  # maps blocks to multiprocessors
    multiprocessors: int = 1
    is_detailed: bool = True
    unit: str = "cycles"
    nanoseconds: float = 1.0  # nanoseconds per time unit
    lost: int = 0  # number of entries dropped because the log was full
    milliseconds: float | None = None  # time of a call without recording, including all launches
    recorded_milliseconds: float | None = None  # time of a call with recording
    undisturbed: float | None = None  # the block's cycles when only its start and end are logged
    other_launches: tuple[str, ...] = ()  # entry points of the call's other launches
    library_products: int = 0  # number of cuBLAS products in the call, which cannot be recorded

    @property
    def overhead(self) -> float | None:
        """Fraction by which recording lengthens the call."""
        if not self.milliseconds or not self.recorded_milliseconds:
            return None
        return self.recorded_milliseconds / self.milliseconds - 1

    @property
    def end(self) -> float:
        return max((x.end for x in self.phases), default=0.0)


def record(
    kernel: Kernel,
    case: Case,
    backend: Backend,
    *,
    launch: str | None = None,
    block: int | None = None,
    tiles: Mapping[str, int] | None = None,
    progress: Progress = no_progress,
) -> Timeline:
    """Runs a kernel and records one of its launches.

    ``launch`` is an entry point, or the index of a launch as a string, such as "0". The default is
    the entry point with the kernel's name, else the first entry point whose name begins with it,
    else the launch with the most threads.
    ``block`` is the index of the block to record. None records all blocks, but only their starts,
    ends, epilogues and marks.

    Raises ValueError if the launch or block does not exist or nothing was recorded, and Unsupported
    if recording all blocks would take too much memory.
    """
    plan = plan_of(kernel, case.problem, backend.limits, **(tiles or {}))
    chosen = _chosen(plan, launch)
    recording = _recording(chosen, block, backend)
    progress(0, 3, "drawing inputs")
    readable = block_masks.readable(backend, plan, case.inputs(backend, kernel))
    arrays = dict(timing.placed(backend, readable, {}))
    arrays |= {name: allocate(backend, plan, name) for name in (*plan.outputs, *plan.scratch)}
    progress(1, 3, "compiling")
    call = _Recorded(backend, plan, chosen, recording, arrays)
    names = source.members(source.file_of(chosen))
    members = backend.variable(call.program, "timeline_members", 16 * len(names)) if names else None
    progress(2, 3, "running")
    times, undisturbed = None, None
    if backend.name == "cuda":
        plain = Launcher(backend, plan, arrays)
        times = [_shortest(backend, call.log, partial(x, *call.given)) for x in (plain, call.run)]
        if recording.detailed and block is not None:
            without = replace(recording, detailed=False)
            ends, lost = _Recorded(backend, plan, chosen, without, arrays).entries()
            clocks = [x.time for x in ends if x.kind is Kind.IN_BLOCK]
            undisturbed = max(clocks) - min(clocks) if clocks and not lost else None
    entries, full = call.entries()
    progress(3, 3, "running")
    if not entries:
        raise ValueError(
            f"no warp of {chosen.entry} recorded anything, because no code in {chosen.path} was "
            f"executed; move the body of {chosen.entry} into that file"
        )
    table = backend.download(members) if members is not None else None
    texts = source.texts(chosen)
    barriers = _Barriers(names, table, texts)
    made = Timeline(
        kernel=kernel.name,
        entry=_title(plan, chosen),
        problem=str(plan.problem),
        device=backend.limits.device,
        in_steps=backend.name != "cuda",
        grid=math.prod(chosen.grid),
        warps=chosen.warps,
        blocks=tuple(sorted({x.block for x in entries})),
        phases=(),
        constants=chosen.constants,
        arrays={
            name: GlobalArray(backend.address(x), x.nbytes, x.shape[-1] * x.itemsize, x.shape[-2])
            for name, x in arrays.items()
            if x.ndim > 1 and x.nbytes
        },
        multiprocessors=backend.limits.multiprocessors,
        is_detailed=block is not None,
        lost=sum(full.values()),
        milliseconds=times[0] if times else None,
        recorded_milliseconds=times[1] if times else None,
        undisturbed=undisturbed,
        other_launches=tuple(dict.fromkeys(x.entry for x in _launches(plan) if x is not chosen)),
        library_products=sum(isinstance(x, Matmul) for x in plan.steps),
    )
    literals = (literal for text in texts for literal in _MARK.findall(text))
    marks = {_hash(x): x for x in (_ESCAPE.sub(r"\1", literal) for literal in literals)}
    if block is None:
        return _of_all_blocks(made, entries, marks, full, backend.limits.clock)
    return _of_block(made, entries, barriers, marks, full, backend.limits.clock)


class _Recorded:
    """A call of a plan in which one launch is recorded.

    The recorded launch is compiled separately, since several launches may share a program.
    """

    def __init__(
        self,
        backend: Backend,
        plan: Plan,
        chosen: PlannedLaunch,
        recording: Recording,
        arrays: Mapping[str, Any],
    ) -> None:
        self._backend = backend
        self._launch = replace(chosen, recording=recording, launch=replace(chosen.launch))
        self._recording = recording
        steps = tuple(self._launch if x is chosen else x for x in plan.steps)
        recorded = replace(plan, steps=steps)
        kernels = compile_kernels(backend, recorded)
        self.run = Launcher(backend, recorded, arrays, kernels)
        self.given = tuple(map(backend.address, arrays.values())), backend.stream
        self.program = kernels[id(self._launch.launch)]
        size = recording.blocks * self._launch.warps * (1 + recording.capacity) * _ENTRY_BYTES
        self.log = backend.variable(self.program, "timeline_log", size)

    def entries(self) -> tuple[list[Entry], dict[tuple[int, int], int]]:
        """Runs the call once and returns the decoded log, as ``_entries`` does."""
        self.log[...] = 0
        self.run(*self.given)
        self._backend.synchronize()
        return _entries(self._backend.download(self.log), self._launch, self._recording)


def _shortest(backend: Backend, log: Any, call: Callable[[], None]) -> float:
    """Returns the shortest time of several runs.

    The log is emptied before each run, because recording into a full log takes less time.
    """
    times = []
    for _ in range(_TIMES):
        log[...] = 0
        times.append(backend.time(call))
    return min(times)


def _launches(plan: Plan) -> list[PlannedLaunch]:
    """Returns a call's launches in order; omits empty grids, which CUDA rejects."""
    return [x for x in plan.launches if all(x.grid)]


def _chosen(plan: Plan, name: str | None) -> PlannedLaunch:
    """Returns the launch with this index or entry point; by default the kernel's main launch."""
    there = _launches(plan)
    if not there:
        raise ValueError(f"{plan.problem} has no rows, so nothing is launched; choose larger sizes")
    if name is not None:
        for number, one in enumerate(there):
            if name in (one.entry, str(number)):
                return one
        known = ", ".join(f"{number}: {x.entry}" for number, x in enumerate(there[:_LISTED]))
        more = f" and {len(there) - _LISTED} more" if len(there) > _LISTED else ""
        raise ValueError(
            f"{plan.kernel.name} has no launch {name!r}{nearest(name, [x.entry for x in there])}; "
            f"its launches are {known}{more}; choose a launch by number or name"
        )
    usual = plan.kernel.name
    alike = [x for x in there if x.entry == usual] or [
        x for x in there if x.entry.startswith(usual)
    ]
    return alike[0] if alike else max(there, key=lambda x: math.prod(x.grid) * x.threads)


def _title(plan: Plan, launch: PlannedLaunch) -> str:
    """Returns the entry point of a launch, and its index if several launches share the entry."""
    there = _launches(plan)
    if sum(x.entry == launch.entry for x in there) == 1:
        return launch.entry
    (number,) = (i for i, x in enumerate(there) if x is launch)
    return f"{launch.entry} (launch {number})"


def _recording(launch: PlannedLaunch, block: int | None, backend: Backend) -> Recording:
    count = math.prod(launch.grid)
    if block is not None:
        if not 0 <= block < count:
            known = "0" if count == 1 else f"0 to {count - 1}"
            raise ValueError(f"{launch.entry} has no block {block}; use {known}, or 'all'")
        return Recording(block, 1, CAPACITY)
    detailed = backend.name != "cuda"
    capacity = _MOST_BYTES // (count * launch.warps * _ENTRY_BYTES) - 1
    capacity = min(capacity, CAPACITY if detailed else _MANY)
    if capacity < _FEWEST:
        raise Unsupported(
            f"recording all {count} blocks would take more than {_MOST_BYTES >> 20} MiB; choose "
            "smaller sizes, or record a single block with --block"
        )
    return Recording(0, count, capacity, detailed)


def _entries(
    log: np.ndarray, launch: PlannedLaunch, recording: Recording
) -> tuple[list[Entry], dict[tuple[int, int], int]]:
    """Decodes a log; returns the entries in each warp's order, and counts of lost entries.

    The counts are indexed by (block, warp).
    """
    shape = recording.blocks, launch.warps, 1 + recording.capacity, 4
    words = log.view(np.uint32).reshape(shape)
    counts = words[:, :, 0, 0]
    made: list[Entry] = []
    full = {}
    for block, warp in np.argwhere(counts > 0).tolist():
        if counts[block, warp] > recording.capacity:
            full[recording.first + block, warp] = int(counts[block, warp]) - recording.capacity
        own = words[block, warp, 1 : 1 + min(int(counts[block, warp]), recording.capacity)]
        # Nested epilogues form one phase. Several fences before a commit begin one issue phase.
        depths = {Kind.EPILOGUE: 0, Kind.ISSUE: 0}
        for low, high, kind, argument in own.tolist():
            ended = bool(kind & _ENDED)
            what, amount = Kind(kind & (_ENDED - 1)), kind >> 8
            here = recording.first + block
            if what in depths:
                before = depths[what]
                left = 0 if what is Kind.ISSUE else max(before - 1, 0)
                depths[what] = left if ended else before + 1
                if left if ended else before:
                    continue
            made.append(Entry(high << 32 | low, here, warp, what, ended, amount, argument))
    return made, full


def _complete(entries: Sequence[Entry], full: Container[tuple[int, int]]) -> Sequence[Entry]:
    """Truncates blocks that lost entries: their warps end at the time of the block's first loss."""
    # PLACED entries hold device time, which cannot be compared with the other entries' cycles.
    by_warp = _by_warp([x for x in entries if x.kind is not Kind.PLACED])
    ends: dict[int, float] = {}
    for (block, warp), own in by_warp.items():
        if (block, warp) in full:
            ends[block] = min(own[-1].time, ends.get(block, own[-1].time))
    made = [x for x in entries if x.block not in ends]
    for (block, warp), own in by_warp.items():
        if block not in ends:
            continue
        end = ends[block]
        kept = [x for x in own if x.time <= end]
        made += kept
        if kept and (len(kept) < len(own) or (block, warp) in full):
            made.append(Entry(end, block, warp, Kind.IN_BLOCK, True, 0, 0))
    return made


# Names of barriers and phases


class _Barriers:
    """Names of barriers. A barrier in shared memory is named after its member of struct Shared.

    ``table`` holds four numbers per member in ``names``: its size, its alignment, the size of an
    element, and the number of "full" barriers per element. A named barrier is named after the
    constant that the sources ``texts`` pass to barrier_sync or barrier_arrive.
    """

    def __init__(
        self,
        names: Sequence[str] = (),
        table: np.ndarray | None = None,
        texts: Sequence[str] = (),
    ) -> None:
        self.base = 0  # address of struct Shared
        self._found: list[tuple[int, str, int, int]] = []
        at = 0
        rows = table.view(np.int32).reshape(-1, 4).tolist() if table is not None else []
        for name, (size, alignment, element, full) in zip(names, rows):
            at = -(-at // alignment) * alignment
            self._found.append((at, name, element, full))
            at += size
        called = {x for text in texts for x in _CALLED.findall(text)}
        numbers = (x for text in texts for x in _NUMBER.findall(text))
        self._named = {int(number): name for name, number in numbers if name in called}

    def named(self, number: int) -> str:
        return self._named.get(number, f"named barrier {number}")

    def name(self, address: int) -> str:
        """Returns a barrier's name such as "K full", or "barrier +64" if its member is unknown."""
        name, _, is_full = self.buffer(address)
        return name if is_full is None else f"{name} {'full' if is_full else 'empty'}"

    def buffer(self, address: int) -> tuple[str, int, bool | None]:
        """Returns the buffer and stage that a barrier guards, and whether it is a "full" barrier.

        The last value is None for a barrier outside a pipeline.
        """
        offset = address - self.base
        index = bisect_right(self._found, offset, key=itemgetter(0)) - 1
        if index < 0:
            return f"barrier +{offset}", 0, None
        start, name, element, full = self._found[index]
        name = re.sub(r"_?pipeline$", "", name) or "pipeline"
        if not full:
            return name, (offset - start) // 8, None
        which, within = divmod(offset - start, element)
        stages, number = element // 8 - full, within // 8
        return name, which * stages + (number - full * (number >= full)) % stages, number < full


_CALLED = re.compile(r"\bbarrier_(?:sync|arrive)\((\w+),")
_NUMBER = re.compile(r"\bconstexpr int (\w+) = (\d+);")
_ESCAPE = re.compile(r"\\([\"'\\])")  # an escaped quote or backslash in a C literal
_MARK = re.compile(r'\bmark\(\s*"((?:[^"\\]|\\.)*)"')


def _hash(name: str) -> int:
    """Computes the FNV-1a hash of a name, as timeline.cuh does."""
    value = 2166136261
    for byte in name.encode():
        value = (value ^ byte) * 16777619 % 2**32
    return value


def _name(entry: Entry, barriers: _Barriers, marks: Mapping[int, str]) -> str:
    if entry.kind is Kind.BARRIER_WAIT:
        return f"wait: {barriers.name(entry.argument)}"
    if entry.kind is Kind.NAMED_WAIT:
        return f"wait: {barriers.named(entry.argument)}"
    if entry.kind is Kind.MARKED:
        return marks.get(entry.argument, f"mark {entry.argument:#x}")
    return NAMES[entry.kind]


# Converting entries to phases


def _of_block(
    made: Timeline,
    entries: Sequence[Entry],
    barriers: _Barriers,
    marks: Mapping[int, str],
    full: Container[tuple[int, int]],
    clock: float | None,
) -> Timeline:
    """Builds the timeline of one block, in cycles or simulator steps from the block's start."""
    shown = _complete([x for x in entries if x.kind is not Kind.PLACED], full)
    if made.in_steps:
        unit, nanoseconds, entries = "steps", _NANOSECONDS_OF_STEP, _in_steps(shown)
    else:
        rate = _cycles_per_nanosecond(entries) or clock or 1.0
        unit, nanoseconds, entries = "cycles", 1 / rate, shown
    origin = min((x.time for x in entries), default=0)
    entries = [x._replace(time=x.time - origin) for x in entries]
    barriers.base = next((x.argument for x in entries if x.kind is Kind.SHARED_BEGINS), 0)
    by_warp = _by_warp(entries)
    phases = [x for own in by_warp.values() for x in _phases(own, barriers, marks)]
    copies, arrows = _copies(by_warp, barriers)
    products = (_in_flight(x, Kind.ISSUE, Kind.PRODUCT_WAIT, "wgmma") for x in by_warp.values())
    return replace(
        made,
        phases=tuple(phases),
        copies=tuple(copies),
        products=tuple(chain.from_iterable(products)),
        arrows=tuple(arrows),
        visits=tuple(
            Visit(x.warp, x.time, x.amount, x.argument) for x in entries if x.kind is Kind.TILE
        ),
        lane_copies=tuple(
            Copy(x.warp, x.time, x.argument) for x in entries if x.kind is Kind.COPIED
        ),
        buffers=tuple(_buffers(by_warp, barriers)),
        unit=unit,
        nanoseconds=nanoseconds,
    )


def _by_warp(entries: Sequence[Entry]) -> dict[tuple[int, int], list[Entry]]:
    found: dict[tuple[int, int], list[Entry]] = defaultdict(list)
    for entry in entries:
        found[entry.block, entry.warp].append(entry)
    return found


def _phases(
    entries: Sequence[Entry], barriers: _Barriers, marks: Mapping[int, str]
) -> Iterator[Span]:
    """Yields the phases of one warp in order; a nested phase splits the phase around it."""
    cut: set[int] = set()  # depths whose open phase has already yielded a piece
    open_: list[Entry] = []
    since = entries[0].time if entries else 0
    own = [x for x in entries if x.kind <= Kind.MARKED]

    def until(now: float) -> Iterator[Span]:
        if open_ and now > since:
            top = open_[-1]
            name = _name(top, barriers, marks)
            first = len(open_) not in cut
            cut.add(len(open_))
            yield Span(
                *(top.block, top.warp, top.kind, name, since, now),
                is_first=first,
                argument=top.argument,
            )

    for entry in own:
        if entry.kind is Kind.IN_BLOCK and entry.ended and entry is not own[-1]:
            continue  # this lane exits while another lane is still copying
        if entry.ended:
            if not any(x.kind is entry.kind for x in open_):
                continue  # the phase's begin was recorded by another lane, or lost
            yield from until(entry.time)
            while open_.pop().kind is not entry.kind:
                continue
        else:
            yield from until(entry.time)
            open_.append(entry)
            cut.discard(len(open_))
        since = entry.time
    if entries:
        yield from until(entries[-1].time)


def _in_flight(entries: Sequence[Entry], kind: Kind, wait: Kind, name: str) -> Iterator[Span]:
    """Yields a span for each of a warp's async copy or wgmma groups, up to the end of its wait."""
    groups: list[Entry] = []
    begun: Entry | None = None
    pending = 0
    for entry in entries:
        if entry.kind is kind and kind is Kind.ISSUE and not entry.ended:
            begun = entry
        elif entry.kind is kind:
            groups.append(begun or entry)
            begun = None
        elif entry.kind is wait and not entry.ended:
            pending = entry.argument
        elif entry.kind is wait:
            while len(groups) > pending:
                start = groups.pop(0).time
                yield Span(entry.block, entry.warp, kind, name, start, entry.time)


def _copies(
    by_warp: Mapping[tuple[int, int], Sequence[Entry]], barriers: _Barriers
) -> tuple[list[Span], list[Arrow]]:
    """Returns the copies, and arrows from barrier arrivals to the end of other warps' waits.

    A copy lasts until the first wait for it ends.
    """
    copies: list[Span] = []
    arrows: list[Arrow] = []
    waits: dict[tuple[int, int], list[tuple[float, int, float]]] = defaultdict(list)
    for (block, warp), own in by_warp.items():
        begun = None
        for entry in own:
            if entry.kind is Kind.BARRIER_WAIT and not entry.ended:
                begun = entry
            elif entry.kind is Kind.BARRIER_WAIT and begun:
                waits[block, begun.argument].append((entry.time, warp, entry.time - begun.time))
        copies += _in_flight(own, Kind.COPIES_BEGUN, Kind.COPY_WAIT, "cp.async")
    for found in waits.values():
        found.sort()
    for (block, warp), own in by_warp.items():
        for entry in (x for x in own if x.kind is Kind.BARRIER_ARRIVE):
            found = waits[block, entry.argument]
            following = found[bisect_left(found, (entry.time, -1, 0)) :]
            first = next(iter(following), None)
            if first is None:
                continue
            name = barriers.name(entry.argument).removesuffix(" full")
            if entry.amount:
                copies.append(
                    Span(block, warp, Kind.COPIES_BEGUN, name, entry.time, first[0], entry.amount)
                )
            if first[1] != warp:
                arrows.append(
                    Arrow(block, warp, entry.time, first[1], first[0], bool(entry.amount))
                )
    return copies, arrows


def _buffers(
    by_warp: Mapping[tuple[int, int], Sequence[Entry]], barriers: _Barriers
) -> list[BufferChange]:
    """Returns when copies into each buffer begin and end, and when the last warp has read it."""
    events = []
    for own in by_warp.values():
        waited = 0
        for x in own:
            if x.kind is Kind.BARRIER_WAIT and not x.ended:
                waited = x.argument
            elif x.kind is Kind.BARRIER_WAIT:
                name, stage, is_full = barriers.buffer(waited)
                if is_full:
                    events.append(BufferChange(x.time, name, stage, "full"))
            elif x.kind is Kind.BARRIER_ARRIVE:
                name, stage, is_full = barriers.buffer(x.argument)
                if x.amount or is_full is False:
                    state = "in flight" if x.amount else "empty"
                    events.append(BufferChange(x.time, name, stage, state))
    made: dict[tuple[str, int], list[BufferChange]] = defaultdict(list)
    for change in sorted(events):
        before = made[change.name, change.stage]
        state = before[-1].state if before else "empty"
        if state == "empty" == change.state and before:
            before[-1] = change  # the previous warp to release the buffer was not the last
        elif state != change.state and (change.state != "full" or state == "in flight"):
            before.append(change)
    return sorted(chain.from_iterable(made.values()))


# All blocks


def _cycles_per_nanosecond(entries: Sequence[Entry]) -> float | None:
    """Computes the multiprocessors' clock rate from blocks with two PLACED entries."""
    cycles = time = 0.0
    for own in _by_warp(entries).values():
        places = [x for x in own if x.kind is Kind.PLACED]
        ends = [x for x in own if x.kind is Kind.IN_BLOCK]
        if len(places) >= 2 and len(ends) >= 2:
            cycles += ends[-1].time - ends[0].time
            time += places[-1].time - places[0].time
    return cycles / time if time > 0 and cycles > 0 else None


def _of_all_blocks(
    made: Timeline,
    entries: Sequence[Entry],
    marks: Mapping[int, str],
    full: Container[tuple[int, int]],
    clock: float | None,
) -> Timeline:
    """Builds the timeline of all blocks, in microseconds from the start of the first block.

    In the simulator, which runs blocks one by one, each block starts at 0 and has its own row.
    """
    if made.in_steps:
        entries = _in_steps(_complete(entries, full))
        places = {block: block for block in made.blocks}
        unit, nanoseconds = "steps", _NANOSECONDS_OF_STEP
    else:
        entries, places = _on_one_clock(entries, clock)
        entries = _complete(entries, full)
        unit, nanoseconds = "\N{MICRO SIGN}s", 1e3
    kept = (Kind.IN_BLOCK, Kind.EPILOGUE, Kind.MARKED)
    entries = [x for x in entries if x.kind in kept]
    origin = min((x.time for x in entries), default=0)
    entries = [x._replace(time=x.time - origin) for x in entries]
    phases = [x for own in _by_warp(entries).values() for x in _phases(own, _Barriers(), marks)]
    phases = [replace(x, name="work") if x.kind is Kind.IN_BLOCK else x for x in phases]
    return replace(made, phases=tuple(phases), places=places, unit=unit, nanoseconds=nanoseconds)


def _in_steps(entries: Sequence[Entry]) -> list[Entry]:
    """Replaces times with step numbers, counted per block in the simulator's order."""
    steps: Counter[int] = Counter()
    numbered = []
    for x in sorted(entries):
        numbered.append(x._replace(time=steps[x.block]))
        steps[x.block] += x.kind not in _TIMELESS
    return sorted(numbered, key=lambda x: (x.block, x.warp))  # stable, so each warp keeps its order


def _on_one_clock(
    entries: Sequence[Entry], clock: float | None
) -> tuple[list[Any], dict[int, int]]:
    """Converts times to microseconds on the device's clock; also maps blocks to multiprocessors.

    The multiprocessors' clocks have constant offsets from the device's clock. An offset is the
    difference between the device time in a PLACED entry and the cycles in the entry next to it.
    """
    rate = _cycles_per_nanosecond(entries) or clock or 1.0
    by_warp = _by_warp(entries)
    places: dict[int, int] = {}
    offsets: dict[int, list[float]] = defaultdict(list)
    for (block, _), own in by_warp.items():
        for before, after in pairwise(own):
            if Kind.PLACED in (before.kind, after.kind) and before.kind is not after.kind:
                place, other = (before, after) if before.kind is Kind.PLACED else (after, before)
                places[block] = place.argument
                offsets[place.argument].append(place.time - other.time / rate)
    shift = {sm: float(np.median(found)) for sm, found in offsets.items()}
    return [
        x._replace(time=(x.time / rate + shift[places[x.block]]) / 1e3)
        for x in entries
        if x.kind is not Kind.PLACED and x.block in places
    ], places
