"""The device memory of the arrays of a piece, and the launches on them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cupyfa.planner.plan import Plan
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.launcher import Launcher
from cupyfa.runtime.workspace import allocated

Orders = Mapping[str, tuple[int, ...]]  # of the axes of arrays in memory, outer ones first
Slot = Mapping[str, tuple[Any, int]]  # device memory for the arrays of a piece, and its address


class _Array(NamedTuple):
    """The layout of an array of a piece in device memory."""

    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    order: tuple[int, ...]  # of its axes in memory, outermost first
    memory: tuple[int, ...]  # their sizes, with padded columns

    @staticmethod
    def of(plan: Plan, name: str, order: tuple[int, ...]) -> _Array:
        shape, dtype = plan.arrays[name]
        stored = plan.stored_shape(name)
        memory = tuple(stored[axis] for axis in order)
        strides = [0] * len(shape)
        for at, axis in enumerate(order):
            strides[axis] = dtype.itemsize * math.prod(memory[at + 1 :])
        return _Array(dtype, shape, tuple(strides), order, memory)


class Layout:
    """The device memory of the arrays of a piece, and the launcher of its kernels."""

    def __init__(self, plan: Plan, orders: Orders) -> None:
        self.plan = plan
        self.arrays = {name: _Array.of(plan, name, order) for name, order in orders.items()}
        self._launcher: Launcher | None = None

    def launch(self, backend: Backend, slot: Slot) -> None:
        """Launches the kernels on a slot's memory, in the current stream."""
        scratch = {name: allocated(backend, self.plan, name) for name in self.plan.scratch}
        if self._launcher is None:
            views = {
                name: backend.view(slot[name][0], x.shape, x.dtype, 0, x.strides)
                for name, x in self.arrays.items()
            }
            self._launcher = Launcher(backend, self.plan, {**views, **scratch})
        addresses = [slot[name][1] for name in self.arrays]
        addresses += map(backend.address, scratch.values())
        self._launcher(addresses, backend.stream)


class Place(NamedTuple):
    """The host's part of an array of a piece, and where it lies on the device."""

    address: int
    host: np.ndarray | None  # with the axes of the memory
    shape: tuple[int, ...]  # of the memory
    pinned: bool

    def slabs(self, most: int) -> Iterator[tuple[np.ndarray, int, tuple[int, ...]]]:
        """Parts of the host's array, and where each lies on the device: address and shape."""
        assert self.host is not None
        size = self.host.itemsize
        if self.host.size and size * math.prod(self.shape) <= most:
            yield self.host, self.address, self.shape
            return
        steps = [size * math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        for index in slabs(self.shape, max(most // size, 1)):
            offset = sum(part.start * step for part, step in zip(index, steps))
            shape = tuple(part.stop - part.start for part in index)
            yield self.host[index], self.address + offset, shape


def slabs(shape: Sequence[int], most: int) -> Iterator[tuple[slice, ...]]:
    """Contiguous parts of a contiguous array, in order, of at most ``most`` elements."""
    if not math.prod(shape):
        return
    inner = math.prod(shape[1:])
    if inner > most:
        for i in range(shape[0]):
            for rest in slabs(shape[1:], most):
                yield (slice(i, i + 1), *rest)
        return
    step, rest = max(most // inner, 1), tuple(slice(0, n) for n in shape[1:])
    for i in range(0, shape[0], step):
        yield (slice(i, min(i + step, shape[0])), *rest)
