"""Memory for the temporary arrays of calls: scratch, and outputs that the call does not return.

Work in one stream runs in order, so calls in a stream share this memory. A graph has its own
memory, since it may be launched in any stream.
"""

import threading
from collections.abc import Sequence
from itertools import starmap
from math import prod
from typing import Any

import numpy as np

from cupyfa.ladder.kernel import cdiv
from cupyfa.planner.plan import Plan
from cupyfa.runtime.backend import Backend

PER_THREAD = 2  # handle of CUDA's per-thread default stream
SHARED = 4 << 20  # bytes per stream of the workspace that calls without ``keep`` share
# Maximum number of shared workspaces, and of streams in which a call with ``keep`` has memory.
MOST = 16
_ALIGNMENT = 512  # bytes

Space = tuple[Any, tuple[int, ...]]  # memory, and the address of each temporary in it
NO_SPACE: Space = (None, ())
_BYTE = np.dtype(np.uint8)
# Workspaces of graphs that were captured from calls without ``keep``. They are never freed, because
# CUDA does not report when a graph is deleted.
of_graphs: list[Any] = []
_threads = threading.local()


def allocate(backend: Backend, plan: Plan, name: str) -> Any:
    """Allocates an output or temporary of a plan, in the layout that its kernel needs."""
    shape, dtype = {**plan.outputs, **plan.scratch}[name]
    memory = backend.empty(plan.stored_shape(name), dtype)
    return memory if memory.shape == shape else memory[..., : shape[-1]]


def _this_thread() -> object:
    """Returns an object that identifies this thread; thread ids may be reused."""
    try:
        return _threads.token
    except AttributeError:
        _threads.token = object()
        return _threads.token


class Workspace:
    """The temporaries of one plan's calls on one device.

    With ``keep``, the plan has its own memory in each stream; otherwise calls of all plans share
    the backend's ``spaces``.
    """

    def __init__(self, backend: Backend, plan: Plan, names: Sequence[str], *, keep: bool) -> None:
        self._backend, self._plan, self._names, self._keep = backend, plan, names, keep
        self._device = backend.device
        self.by_stream: dict[Any, Space] = {}
        self._by_graph: dict[Any, Space] = {}
        kinds = {**plan.outputs, **plan.scratch}
        self._stored = [(plan.stored_shape(name), kinds[name][1]) for name in names]
        self._starts, self._bytes = _laid_out(self._stored)
        # Single-launch plans use a separate workspace, because another thread may launch one in the
        # same stream between the launches of a longer plan.
        self._several = len(plan.steps) > 1
        self._recent: tuple[Any, Any, Space] = None, None, NO_SPACE

    def __bool__(self) -> bool:
        return bool(self._names)

    def new(self) -> dict[str, Any]:
        return {name: allocate(self._backend, self._plan, name) for name in self._names}

    def forget(self) -> None:
        """Frees the memory of streams; keeps the memory of graphs."""
        self.by_stream.clear()

    def at(self, stream: Any, capturing: bool = False) -> Space:
        """Returns memory for work in the current stream, ``stream``, which may be captured."""
        if not self._names:
            return NO_SPACE
        if stream is None:  # without streams, calls of several threads run at the same time
            return self._space()
        key: Any = stream if stream != PER_THREAD else (stream, _this_thread())
        if capturing:
            return self._of_graph(key)
        if not self._keep:
            return self._shared(key)
        found = self.by_stream.get(key)
        if found is None:
            if len(self.by_stream) >= MOST:
                self.forget()
            found = self.by_stream[key] = self._space()
        return found

    def _of_graph(self, key: Any) -> Space:
        """Returns memory that stays allocated as long as a graph may be launched."""
        if not self._keep:
            made = self._space()
            of_graphs.append(made[0])
            return made
        found = self._by_graph.get(key)
        if found is None:
            found = self._by_graph[key] = self._space()
        return found

    def _shared(self, stream: Any) -> Space:
        """Returns the memory that calls in a stream share, or new memory if more is needed."""
        if self._bytes > SHARED:
            return self._space()
        spaces, key = self._backend.spaces, (self._device, stream, self._several)
        memory, (known, of, space) = spaces.get(key), self._recent
        if memory is not None and memory is known and stream == of:
            return space
        if memory is None:
            if len(spaces) >= MOST:
                spaces.clear()
            memory = spaces[key] = self._backend.empty((SHARED,), _BYTE)
        start = self._backend.address(memory)
        space = memory, tuple(start + x for x in self._starts)
        self._recent = memory, stream, space
        return space

    def _space(self) -> Space:
        arrays = [*starmap(self._backend.empty, self._stored)]
        return arrays, tuple(map(self._backend.address, arrays))


def _laid_out(stored: Sequence[tuple[tuple[int, ...], np.dtype]]) -> tuple[list[int], int]:
    """Lays out temporaries in one buffer; returns their offsets and the total bytes.

    stored: the shape and dtype of each temporary.
    """
    starts, end = [], 0
    for shape, dtype in stored:
        starts.append(end)
        end += cdiv(prod(shape) * dtype.itemsize, _ALIGNMENT) * _ALIGNMENT
    return starts, end
