"""Memory for the temporary arrays of calls: scratch, and outputs that nobody asked for.

Work in one stream runs in order, so calls in a stream share this memory. A graph keeps its own,
for it may be launched in any stream.
"""

import threading
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from cupyfa.ladder.kernel import cdiv
from cupyfa.planner.plan import Plan
from cupyfa.runtime.backend import Backend

PER_THREAD = 2  # CUDA's stream that is a different one in every thread
SHARED = 4 << 20  # bytes that calls which keep no workspace share in a stream
ZEROS = 64 << 10  # bytes that are 0 between such calls
MOST = 16  # workspaces that such calls share in all; streams of a call that keeps its own
_ALIGNMENT = 512  # bytes

Space = tuple[Any, tuple[int, ...]]  # memory, and the address of each temporary in it
NO_SPACE: Space = (None, ())
_BYTE = np.dtype(np.uint8)
# Workspaces of graphs that were captured from calls which keep none: when such a graph is gone is
# not known.
of_graphs: list[Any] = []
_ZEROS_OF_GRAPHS = 1 << 20  # bytes, which are 0 already: a fill would become a part of the graph
_threads = threading.local()


def allocated(backend: Backend, plan: Plan, name: str) -> Any:
    """New memory for an output or temporary of a plan, in the layout that its kernel takes."""
    shape, dtype = {**plan.outputs, **plan.scratch}[name]
    memory = backend.empty(plan.stored_shape(name), dtype)
    if name in plan.zeroed:
        memory.fill(0)
    return memory if memory.shape == shape else memory[..., : shape[-1]]


def _this_thread() -> object:
    """An object of this thread alone; its number may be reused once it has ended."""
    try:
        return _threads.token
    except AttributeError:
        _threads.token = object()
        return _threads.token


class _Zeros:
    """Memory of zeros on a device, of which each captured call gets a part for itself."""

    def __init__(self, backend: Backend) -> None:
        self._memory = _zeros(backend, _ZEROS_OF_GRAPHS)
        backend.download(self._memory[:1])  # graphs may run in other streams: waits for the fill
        self._start, self._used = backend.address(self._memory), 0
        self._taking = threading.Lock()

    def part(self, size: int) -> int | None:
        """The address of so many bytes; None if there are not as many left."""
        with self._taking:
            if self._used + size > _ZEROS_OF_GRAPHS:
                return None
            self._used += size
            return self._start + self._used - size


def _zeros(backend: Backend, size: int) -> Any:
    memory = backend.empty((size,), _BYTE)
    memory.fill(0)
    return memory


class Workspace:
    """The temporaries of one plan's calls, on one device.

    With ``keep`` they have memory of their own in each stream; without, calls of all plans share
    the backend's ``spaces``.
    """

    def __init__(self, backend: Backend, plan: Plan, names: Sequence[str], *, keep: bool) -> None:
        self._backend, self._plan, self._names, self._keep = backend, plan, names, keep
        self._device = backend.device
        self.by_stream: dict[Any, Space] = {}
        self._by_graph: dict[Any, Space] = {}
        self._spares: list[Space] = []  # for the next graph: while it is captured, none can be had
        self._zeroed = [name for name in names if name in plan.zeroed]
        self._others = [name for name in names if name not in plan.zeroed]
        self._starts, self._bytes = _laid_out(plan, self._others)
        self._zero_starts, self._zero_bytes = _laid_out(plan, self._zeroed)
        # Between the launches of a call other threads may launch, in the same stream, calls of one
        # launch only: so these have another workspace.
        self._several = len(plan.started) > 1
        self._recent: tuple[Any, Any, Space] = None, None, NO_SPACE

    def __bool__(self) -> bool:
        return bool(self._names)

    def new(self) -> dict[str, Any]:
        """New arrays for all temporaries; with ``keep`` they serve the first stream."""
        arrays = {name: allocated(self._backend, self._plan, name) for name in self._names}
        if self._keep and arrays:
            self._spares.append(self._for_any_stream(arrays))
        return arrays

    def at(self, stream: Any) -> Space:
        """Memory for work in a stream, the backend's current one."""
        if not self._names:
            return NO_SPACE
        if stream is None:  # calls of other threads run at the same time
            return self._space()
        key: Any = stream if stream != PER_THREAD else (stream, _this_thread())
        if stream and self._backend.is_capturing:
            return self._of_graph(key)
        if not self._keep:
            return self._shared(key)
        if not self._spares:
            self._spares.append(self._for_any_stream())
        found = self.by_stream.get(key)
        if found is None:
            if len(self.by_stream) >= MOST:
                self.by_stream.clear()
            found = self.by_stream[key] = self._space()
        return found

    def _of_graph(self, key: Any) -> Space:
        """Memory that stays as long as a graph may be launched."""
        if not self._keep:
            reserve = self._backend.spaces.get((self._device, _Zeros)) if self._zeroed else None
            made = self._space(zeros=reserve and reserve.part(self._zero_bytes))
            of_graphs.append((made[0], reserve) if reserve else made[0])
            return made
        found = self._by_graph.get(key)
        if found is None:
            try:
                found = self._spares.pop()
            except IndexError:
                found = self._space()
            self._by_graph[key] = found
        return found

    def _shared(self, stream: Any) -> Space:
        """Memory that all calls in a stream share, if it is large enough."""
        if self._bytes > SHARED:
            zeros = self._shared_zeros(stream)
            at = None if zeros is None else self._backend.address(zeros)
            arrays, addresses = self._space(zeros=at)
            return (arrays, zeros), addresses
        spaces, key = self._backend.spaces, (self._device, stream, self._several)
        memory, (known, of, space) = spaces.get(key), self._recent
        if memory is not None and memory is known and stream == of:
            return space
        if memory is None:
            if len(spaces) >= MOST:
                spaces.clear()
            memory = spaces[key] = self._backend.empty((SHARED,), _BYTE)
        start, zeros = self._backend.address(memory), self._shared_zeros(stream)
        others = {name: start + x for name, x in zip(self._others, self._starts)}
        more = {} if zeros is None else self._zeroed_at(self._backend.address(zeros))
        space = (memory, zeros), tuple({**others, **more}[name] for name in self._names)
        self._recent = memory, stream, space
        return space

    def _for_any_stream(self, arrays: dict[str, Any] | None = None) -> Space:
        """Memory for a graph, whose zeros are there whatever stream it runs in."""
        made = self._space(arrays)
        for name in self._zeroed:
            self._backend.download(made[0][name])
        return made

    def _shared_zeros(self, stream: Any) -> Any:
        """Memory of zeros that all calls in a stream share; None without such temporaries."""
        if not self._zeroed:
            return None
        spaces, key = self._backend.spaces, (self._device, stream, _zeros)
        if (self._device, _Zeros) not in spaces:
            spaces[self._device, _Zeros] = _Zeros(self._backend)
        found = spaces.get(key)
        if found is None or found.nbytes < self._zero_bytes:
            found = spaces[key] = _zeros(self._backend, max(ZEROS, self._zero_bytes))
        return found

    def _zeroed_at(self, start: int) -> dict[str, int]:
        return {name: start + x for name, x in zip(self._zeroed, self._zero_starts)}

    def _space(self, arrays: dict[str, Any] | None = None, zeros: int | None = None) -> Space:
        """New memory for all, or the memory given; zeros: the address of memory that is 0."""
        at = {} if zeros is None else self._zeroed_at(zeros)
        if arrays is None:
            new = (name for name in self._names if name not in at)
            arrays = {name: allocated(self._backend, self._plan, name) for name in new}
        addresses = {name: self._backend.address(x) for name, x in arrays.items()} | at
        return arrays, tuple(addresses[name] for name in self._names)


def _laid_out(plan: Plan, names: Sequence[str]) -> tuple[list[int], int]:
    """The offset of each temporary in memory for all, and the bytes of that memory."""
    kinds, starts, end = {**plan.outputs, **plan.scratch}, [], 0
    for name in names:
        starts.append(end)
        size = prod(plan.stored_shape(name)) * kinds[name][1].itemsize
        end += cdiv(size, _ALIGNMENT) * _ALIGNMENT
    return starts, end
