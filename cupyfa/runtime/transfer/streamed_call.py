"""Runs one call on host arrays, piece by piece."""

import math
from collections.abc import Generator, Iterable, Mapping
from contextlib import closing
from itertools import chain
from typing import Any

import numpy as np

from cupyfa.problem.optional_inputs import ROW_MAX, STARTS
from cupyfa.runtime.backend import Backend, Lane, Mark
from cupyfa.runtime.environment import Progress
from cupyfa.runtime.transfer.host import Copies, Move, Transfer, bring, host_of, send
from cupyfa.runtime.transfer.pieces import Cut, Pieces, Place, Slot, Starts

_BITS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
_BYTE = np.dtype(np.uint8)
Merged = tuple[np.ndarray, ...]  # O, lse and perhaps the largest scores of some of the keys
_STARTS = [f"mods.{name}" for name in STARTS]
_INLINE = 1 << 18  # up to so many bytes, one thread copies faster than others wake up
_CHUNK_COST = 1 << 20  # bytes that a thread copies while a chunk waits for Python's lock
_SPARE = 0.9  # share of the free memory that a call may take
_CATCH_UP = 2  # pieces that are sent after a kernel while fewer are there than may be


class Call:
    """Computes a plan on host arrays in pieces and fills the host outputs.

    The arrays are [batch, heads, rows, columns] with any strides; outputs that are not given are
    not copied back. Everything is compiled, and the memory taken, before any output is written.
    The calling thread starts the copies and kernels of the pieces and sleeps while others copy, so
    it seldom holds Python's lock.
    """

    def __init__(
        self,
        backend: Backend,
        lanes: tuple[Lane, Lane, Lane],
        pieces: Pieces,
        inputs: Mapping[str, np.ndarray],
        outputs: Mapping[str, np.ndarray],
        free: int | None = None,
        share: Cut | None = None,
    ) -> None:
        """Raises OutOfMemory, with the size, for a problem of which no piece fits the device.

        free: bytes of the device's memory that the call may take, if they are known. share: the
        pieces of this device, if several share the problem.
        """
        self.backend, self.host, self.plan = backend, host_of(backend), pieces.plan
        self.up, self.work, self.down = lanes
        self.given, self.results = tuple(inputs), outputs
        chosen = self.host.chosen
        free = room(backend, chosen, pieces.bytes) if free is None else free
        self.cut = share or pieces.cut(piece_bytes(chosen, free), free, starts_of(inputs))
        self.axes = self.cut.axes
        there = {name: x for name, x in (*inputs.items(), *outputs.items()) if x.size}
        self.bits = {name: x.view(_BITS[x.itemsize]) for name, x in there.items()}
        self.pinned = {name for name, x in there.items() if backend.is_pinned(x)}
        # Results of a part of the keys are merged on the host; their strides do not matter.
        strided: Mapping[str, np.ndarray] = inputs if self.cut.by_keys else self.bits
        strided = strided if "strides" in self.plan.kernel.features else {}
        order = _packed_order if self.cut.of_sequences else _order
        self.layouts = self.cut.layouts(
            {
                name: order(None if name in self.plan.pointed else strided.get(name), len(axes))
                for name, axes in self.axes.items()
            }
        )
        self.count = self.cut.count(chosen.pieces, free)
        moved = sum(x.nbytes for x in there.values())
        self.threaded = moved > _INLINE
        # The bus waits for the first chunk, and threads, also those of calls on other devices, for
        # Python's lock at every chunk, which hands it over several times: the minimum of grain +
        # moved / grain * _CHUNK_COST.
        self.grain = min(chosen.chunk_bytes, math.isqrt(moved * _CHUNK_COST))
        self.started: list[Copies] = []
        self.merged: Merged | None = None

    def run(self, progress: Progress | None) -> None:
        told, total, what = -1, len(self.cut.pieces), self.what if progress else ""
        with closing(self.steps()) as steps:
            for done in steps:
                if progress is not None and done > told:
                    told = done
                    progress(done, total, what)

    @property
    def what(self) -> str:
        """What is computed, for who watches."""
        return f"{self.plan.kernel.name} on {self.plan.problem}"

    def steps(self) -> Generator[int]:
        """Does a part of the work for each item; items are how many pieces have been computed.

        When the generator ends or is closed, nothing is on its way any more.
        """
        pieces, count = self.cut.pieces, self.count
        later = int(count > 1)  # so that waiting for a kernel seldom keeps the bus waiting
        memory = self.memory()
        places: list[dict[str, Place]] = []
        sent: list[Copies] = []
        brought: list[Copies] = []
        computed: list[Mark] = []

        def send_next() -> None:
            i = len(places)
            if i >= count:
                self.up.wait(computed[i - count])
            places.append(self.placed(i, memory))
            sent.append(self.moved(self.up, places[i], self.new_in(i), send))

        try:
            send_next()
            yield 0
            # Threads copy long before a kernel, so all pieces are handed to them first.
            for _ in range(count - 1 if sent[0].end is None else 0):
                send_next()
                yield 0
            self.cut.compile(self.backend)  # while the first pieces are on their way
            for i in range(len(pieces)):
                sent[i].wait()
                self.work.wait(sent[i].end or self.up.record())
                if i >= count:
                    self.finish(i - count, places, brought)
                    if (end := brought[i - count].end) is not None:
                        self.work.wait(end)
                with self.work.context:
                    self.layouts[i].launch(self.backend, self.slot(i, memory))
                computed.append(self.work.record())
                self.down.wait(computed[i])
                brought.append(self.moved(self.down, places[i], self.plan.outputs, bring))
                there = min(i + 1 - later + count, len(pieces))
                for _ in range(min(there - len(places), _CATCH_UP)):
                    send_next()
                yield i
            for i in range(max(len(pieces) - count, 0), len(pieces)):
                self.finish(i, places, brought)
            self.down.synchronize()
            yield len(pieces)
        finally:  # nothing may be on its way to memory that is given back
            self.wait_for_all()

    def wait_for_all(self) -> None:
        """Returns when nothing is on its way any more, even if Ctrl-C comes again."""
        try:
            for copies in self.started:
                copies.sleep()
            for lane in (self.up, self.work, self.down):
                lane.synchronize()
        except KeyboardInterrupt:
            self.wait_for_all()
            raise

    def memory(self) -> Mapping[str, list[Any]]:
        """Device memory for parts of each array, sized for the largest."""
        with self.work.context:
            made = {
                name: [
                    self.backend.empty((size,), _BYTE)
                    for _ in range(self.cut.copies(name, self.count))
                ]
                for name, size in self.cut.sizes.items()
            }
            if self.cut.of_sequences:  # NaN after the last rows of a piece would slow it down
                for memory in chain.from_iterable(made.values()):
                    memory[...] = 0
                self.up.wait(self.work.record())
        return made

    def slot(self, i: int, memory: Mapping[str, list[Any]]) -> Slot:
        """Where the arrays of a piece lie.

        A part of an array takes the place of one that only pieces before the last ``count`` read.
        """
        numbers = self.cut.numbers[i]
        return {name: parts[numbers[name] % len(parts)] for name, parts in memory.items()}

    def new_in(self, i: int) -> list[str]:
        """The inputs of a piece that the piece before it does not have."""
        numbers = self.cut.numbers
        return [x for x in self.given if i == 0 or numbers[i][x] != numbers[i - 1][x]]

    def placed(self, i: int, memory: Mapping[str, list[Any]]) -> dict[str, Place]:
        """The arrays of a piece: the part on the host and the memory on the device."""
        slot = self.slot(i, memory)
        piece, places, group = self.cut.pieces[i], {}, self.plan.problem.group
        for name, lying in self.layouts[i].arrays.items():
            part, pinned = None, name in self.pinned
            if self.cut.by_keys and name in self.plan.outputs:
                part, pinned = np.empty(lying.shape, _BITS[lying.dtype.itemsize]), False
            elif name in self.bits:
                part = piece.of(self.bits[name], self.axes[name], group)
            host = None if part is None else part.transpose(lying.order)
            shape = lying.memory
            if host is not None and self.cut.of_sequences:
                shape = _filled(shape, host.shape)
            places[name] = Place(self.backend.address(slot[name]), host, shape, pinned)
        return places

    def moved(
        self, lane: Lane, places: Mapping[str, Place], names: Iterable[str], move: Move
    ) -> Copies:
        """Starts all copies of a piece in one direction, directly or through buffers."""
        chunks: list[tuple[np.ndarray, int, tuple[int, ...]]] = []
        for name in names:
            place, host = places[name], places[name].host
            if host is None or not host.size:
                continue
            if place.pinned and (runs := place.runs()):
                for part, there in runs:
                    here = part.ctypes.data
                    to, source = (there, here) if move is send else (here, there)
                    lane.copy(to, source, part.nbytes)
            else:
                chunks.extend(place.slabs(self.grain))
        buffers = self.host.buffers[move]
        if not self.threaded:
            for chunk in chunks:
                move(lane, buffers, *chunk)
            chunks = []
        copies = Copies(lane, buffers, chunks)
        self.started.append(copies)
        self.host.submit(move, copies)
        return copies

    def finish(self, i: int, places: list[dict[str, Place]], brought: list[Copies]) -> None:
        """Waits for the results of a piece, and adds them up if keys were cut."""
        brought[i].wait()
        if self.cut.by_keys:
            self.down.synchronize()
            self.merge(i, {name: places[i][name].host for name in self.plan.outputs})
        places[i] = {}

    def merge(self, i: int, parts: Mapping[str, Any]) -> None:
        """Adds the results of a part of the keys; each counts by exp of its lse."""
        piece, outputs = self.cut.pieces[i], self.cut.plans[i].outputs
        names = "O", "lse", *[ROW_MAX] * (ROW_MAX in outputs)
        o, *of_rows = (parts[name].view(outputs[name][1]) for name in names)
        own = (o.astype(of_rows[0].dtype), *of_rows)
        if self.merged is not None and piece.keys.start > 0:
            own = _merged(self.merged, own)
        self.merged = own
        if piece.keys.stop == self.plan.problem.N:
            for name, total in zip(names, own):
                if name in self.results and self.results[name].size:
                    group = self.plan.problem.group
                    piece.of(self.results[name], self.axes[name], group)[...] = total


def starts_of(inputs: Mapping[str, np.ndarray]) -> Starts:
    """Where the sequences of packed rows and keys begin, if the arrays are packed."""
    return [inputs[name] for name in _STARTS if name in inputs]


def room(backend: Backend, chosen: Transfer, size: int) -> int:
    """Bytes of the current device's memory that a call on a problem of this size may take."""
    if chosen.device_bytes is not None:
        return chosen.device_bytes
    is_one_piece = size <= chosen.piece_bytes
    return chosen.pieces * size if is_one_piece else int(_SPARE * backend.free_bytes())


def piece_bytes(chosen: Transfer, free: int) -> int:
    """Bytes of a piece, where a call may take ``free``."""
    return min(chosen.piece_bytes, free // 2)


def _merged(a: Merged, b: Merged) -> Merged:
    (a_o, a_lse, *a_max), (b_o, b_lse, *b_max) = a, b
    with np.errstate(all="ignore"):  # rows that see no key are -inf, and NaN is data
        lse = np.logaddexp(a_lse, b_lse)
        a_share, b_share = (
            np.where(np.isneginf(lse), 0, np.exp(x - lse))[..., None] for x in (a_lse, b_lse)
        )
        return a_o * a_share + b_o * b_share, lse, *map(np.maximum, a_max, b_max)


def _filled(memory: tuple[int, ...], host: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of the first part of memory, which a smaller array of the host fills."""
    axis = next((i for i, n in enumerate(memory[:-1]) if n > 1), len(memory) - 1)
    return tuple(min(n, m) if i == axis else n for i, (n, m) in enumerate(zip(memory, host)))


def _packed_order(array: np.ndarray | None, axes: int) -> tuple[int, ...]:
    """The axes of an array of sequences: rows are outermost, so that a few begin it."""
    return tuple(range(axes)) if array is None or axes != 4 else (0, 2, 1, 3)


def _order(array: np.ndarray | None, axes: int) -> tuple[int, ...]:
    """The axes of an array, outer ones first: on the device as on the host, where possible."""
    if array is None or axes != 4:
        return tuple(range(axes))
    return (*sorted(range(3), key=lambda axis: -abs(array.strides[axis])), 3)
