"""Times of what the simulator ran, by a simple model of a multiprocessor of an H100.

The simulator knows the order of all events and which warp waits for which event, but no durations.
Here each kind of work has a cost in cycles, and what is shared is used by one at a time: the engine
of copies, and in each quarter of the multiprocessor the tensor core and the arithmetic units. A
wait ends with the copy, product or arrival that the warp waits for. The order in which warps do
things is that of the simulator, so a model's timeline shows the structure of a kernel, and not its
speed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cupyfa.lab.analysis.timeline_recorder import Entry

# Cycles.
COPY_LATENCY = 600  # from the start of a copy to its first bytes
COPY_BYTES = 64  # that come in a cycle
WGMMA_COLUMNS = 2  # that a product computes in a cycle: 64 rows, sums of 16
MMA = 6.5  # of one 16x8x16 in a quarter of the multiprocessor
ELEMENT = 5  # of softmax, for each element of a lane
EPILOGUE = 250
LOAD_LATENCY = 400  # of loads that a thread waits for itself
MULTIPLY_ADD = 3  # of a warp, with the loads of its operands from shared memory
STEP = 20  # any entry
UNKNOWN = 300  # the same where no work is counted, but not the end of a wait

_QUARTERS = 4
_OF_TENSOR_CORES = ("WORKED_WGMMA", "WORKED_MMA")
_WORK = (*_OF_TENSOR_CORES, "ARITHMETIC", "LOADS", "SOFTMAX")


class _Unit:
    """A unit that serves one warp at a time; a use may lie in a gap between earlier ones."""

    def __init__(self) -> None:
        self._busy: list[tuple[float, float]] = []

    def use(self, earliest: float, length: float) -> float:
        """When a use ends that begins as early as possible."""
        start = earliest
        first = max(bisect_left(self._busy, (earliest, 0.0)) - 1, 0)
        for begin, end in self._busy[first:]:
            if start + length <= begin:
                break
            start = max(start, end)
        self._busy.insert(bisect_left(self._busy, (start, 0.0)), (start, start + length))
        return start + length


class _Block:
    """The time of each warp of a block, and of what warps wait for."""

    def __init__(self, has_work: bool) -> None:
        self.has_work = has_work
        self.now: defaultdict[int, float] = defaultdict(float)
        self.copies, self.tensor_cores, self.arithmetic = (
            _Unit(),
            [_Unit() for _ in range(_QUARTERS)],
            [_Unit() for _ in range(_QUARTERS)],
        )
        self.barriers: defaultdict[int, float] = defaultdict(float)
        self.named: defaultdict[int, list[list[float]]] = defaultdict(list)
        self.waits_named: dict[int, list[float]] = {}
        self.rounds: defaultdict[int, int] = defaultdict(int)
        self.arrivals: defaultdict[int, dict[int, float]] = defaultdict(dict)
        self.issue: dict[int, float] = {}
        self.groups: defaultdict[int, list[float]] = defaultdict(list)
        self.copy_groups: defaultdict[int, list[float]] = defaultdict(list)
        self.columns: defaultdict[int, int] = defaultdict(int)
        self.bytes: defaultdict[int, int] = defaultdict(int)
        self.begun: dict[tuple[int, int], int] = {}

    def advance(self, x: Entry) -> float:
        """The time of an entry."""
        warp, quarter = x.warp, x.warp % _QUARTERS
        ends_wait = x.ended and x.kind.name.endswith("_WAIT")
        self.now[warp] += STEP if self.has_work or ends_wait else UNKNOWN
        begin = getattr(self, f"_{x.kind.name.lower()}", None)
        if begin is not None:
            begin(x, warp, quarter)
        if not x.ended:
            self.begun[warp, x.kind] = x.argument
        return self.now[warp]

    def _barrier_arrive(self, x: Entry, warp: int, quarter: int) -> None:
        done = self.now[warp]
        if x.amount:
            done = self.copies.use(done, x.amount / COPY_BYTES) + COPY_LATENCY
        self.barriers[x.argument] = max(self.barriers[x.argument], done)

    def _barrier_wait(self, x: Entry, warp: int, quarter: int) -> None:
        if x.ended:
            self._wait_until(warp, self.barriers[self.begun[warp, x.kind]])

    def _join(self, x: Entry, warp: int) -> list[float]:
        """Takes part in the current round of a named barrier: [threads so far, time]."""
        rounds = self.named[x.argument]
        if not rounds or rounds[-1][0] >= x.amount:
            rounds.append([0.0, 0.0])
        rounds[-1][0] += 32
        rounds[-1][1] = max(rounds[-1][1], self.now[warp])
        return rounds[-1]

    def _named_arrive(self, x: Entry, warp: int, quarter: int) -> None:
        self._join(x, warp)

    def _named_wait(self, x: Entry, warp: int, quarter: int) -> None:
        if x.ended:
            self._wait_until(warp, self.waits_named[warp][1])
        else:
            self.waits_named[warp] = self._join(x, warp)

    def _block_wait(self, x: Entry, warp: int, quarter: int) -> None:
        number = self.rounds[warp]
        if x.ended:
            self._wait_until(warp, max(self.arrivals[number].values()))
            self.rounds[warp] += 1
        else:
            self.arrivals[number][warp] = self.now[warp]

    def _worked_wgmma(self, x: Entry, warp: int, quarter: int) -> None:
        self.columns[warp] += x.argument

    def _issue(self, x: Entry, warp: int, quarter: int) -> None:
        if not x.ended:
            self.issue[warp] = self.now[warp]
            return
        length = self.columns.pop(warp, 0) / WGMMA_COLUMNS
        start = self.issue.pop(warp, self.now[warp])
        self.groups[warp].append(self.tensor_cores[quarter].use(start, length))

    def _product_wait(self, x: Entry, warp: int, quarter: int) -> None:
        if x.ended:
            self._finish(self.groups[warp], self.begun[warp, x.kind], warp)

    def _worked_mma(self, x: Entry, warp: int, quarter: int) -> None:
        self.now[warp] = self.tensor_cores[quarter].use(self.now[warp], MMA * x.argument)

    def _worked_copies(self, x: Entry, warp: int, quarter: int) -> None:
        self.bytes[warp] += 32 * x.argument  # of all lanes

    def _copies_begun(self, x: Entry, warp: int, quarter: int) -> None:
        count = self.bytes.pop(warp, 0)
        done = self.now[warp]
        if count:
            done = self.copies.use(done, count / COPY_BYTES) + COPY_LATENCY
        self.copy_groups[warp].append(done)

    def _copy_wait(self, x: Entry, warp: int, quarter: int) -> None:
        if x.ended:
            self._finish(self.copy_groups[warp], self.begun[warp, x.kind], warp)

    def _softmax(self, x: Entry, warp: int, quarter: int) -> None:
        if x.ended:
            length = ELEMENT * self.begun[warp, x.kind]
            self.now[warp] = self.arithmetic[quarter].use(self.now[warp], length)

    def _epilogue(self, x: Entry, warp: int, quarter: int) -> None:
        if x.ended:
            self.now[warp] += EPILOGUE

    def _loads(self, x: Entry, warp: int, quarter: int) -> None:
        if x.ended:
            length = self.begun[warp, x.kind] / COPY_BYTES
            self.now[warp] = self.copies.use(self.now[warp], length) + LOAD_LATENCY

    def _arithmetic(self, x: Entry, warp: int, quarter: int) -> None:
        if x.ended:
            length = MULTIPLY_ADD * self.begun[warp, x.kind]
            self.now[warp] = self.arithmetic[quarter].use(self.now[warp], length)

    def _finish(self, groups: list[float], pending: int, warp: int) -> None:
        """Waits for all groups but the last ones."""
        while len(groups) > pending:
            self._wait_until(warp, groups.pop(0))

    def _wait_until(self, warp: int, time: float) -> None:
        self.now[warp] = max(self.now[warp], time)


def counts_work(entries: Sequence[Entry]) -> bool:
    """Whether the entries record the work of products of tensor cores."""
    return any(x.kind.name in _OF_TENSOR_CORES for x in entries)


def timed(entries: Sequence[Entry]) -> list[Entry]:
    """The entries of blocks with times in cycles in place of their order, warp by warp."""
    has_work = any(x.kind.name in _WORK for x in entries)
    blocks: dict[int, _Block] = {}
    made = []
    for x in sorted(entries):
        block = blocks.setdefault(x.block, _Block(has_work))
        made.append(x._replace(time=round(block.advance(x))))
    return sorted(made, key=lambda x: (x.block, x.warp))  # stable: a warp's own order stays


def scheduled(entries: Sequence[Entry], multiprocessors: int) -> tuple[list[Entry], dict[int, int]]:
    """The same; each block runs alone, on the multiprocessor that is free first."""
    made, places = [], {}
    free = [0.0] * multiprocessors
    found: dict[int, list[Entry]] = defaultdict(list)
    for x in timed(entries):
        found[x.block].append(x)
    for block in sorted(found):
        place = free.index(min(free))
        places[block] = place
        made += [x._replace(time=round(x.time + free[place])) for x in found[block]]
        free[place] += max(x.time for x in found[block])
    return made, places
