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
Merged = tuple[np.ndarray, ...]  # O, lse and optionally the row maxima over some of the keys
_STARTS = [f"mods.{name}" for name in STARTS]
_INLINE = 1 << 18  # bytes; smaller calls are copied before another thread would wake up
_CHUNK_COST = 1 << 20  # bytes that a thread could copy while a chunk waits for the GIL
_SPARE = 0.9  # fraction of the free memory that a call may use
_CATCH_UP = 2  # maximum number of pieces sent after each kernel, until the device is full


class Call:
    """Runs a plan on host arrays in pieces and fills the host outputs.

    Arrays are [batch, heads, rows, columns] with any strides; outputs that are not passed are not
    copied back. All kernels are compiled and all memory is allocated before any output is written.
    The calling thread starts the copies and kernels of the pieces and sleeps while other threads
    copy, so it rarely holds the GIL.
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
        """Raises OutOfMemory, with the required size, if not even the smallest piece fits.

        free: bytes of device memory that the call may use, by default derived from the settings.
        share: this device's pieces, if several devices share the problem.
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
        # Partial results over some keys are merged on the host, so their strides do not matter.
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
        # The bus idles until the first chunk is copied, and every chunk makes threads wait for the
        # GIL several times, also in calls on other devices. The best size minimises
        # grain + moved / grain * _CHUNK_COST.
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
        """The description of this call in progress reports."""
        return f"{self.plan.kernel.name} on {self.plan.problem}"

    def steps(self) -> Generator[int]:
        """Runs the call step by step; yields the number of pieces that have been computed.

        When the generator ends or is closed, no copy or kernel is in flight.
        """
        pieces, count = self.cut.pieces, self.count
        later = int(count > 1)  # sends wait for the second-to-last kernel, so the bus rarely idles
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
            # Threads copy slowly, so all first pieces are submitted before the first kernel.
            for _ in range(count - 1 if sent[0].end is None else 0):
                send_next()
                yield 0
            self.cut.compile(self.backend)  # while the first pieces are being copied
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
        finally:  # no copy may be in flight when its memory is freed
            self.wait_for_all()

    def wait_for_all(self) -> None:
        """Waits until no copy or kernel is in flight, even if Ctrl-C is pressed again."""
        try:
            for copies in self.started:
                copies.sleep()
            for lane in (self.up, self.work, self.down):
                lane.synchronize()
        except KeyboardInterrupt:
            self.wait_for_all()
            raise

    def memory(self) -> Mapping[str, list[Any]]:
        """Allocates device memory for parts of each array, sized for the largest part."""
        with self.work.context:
            made = {
                name: [
                    self.backend.empty((size,), _BYTE)
                    for _ in range(self.cut.copies(name, self.count))
                ]
                for name, size in self.cut.sizes.items()
            }
            if self.cut.of_sequences:  # NaN in the unused rows of a piece would slow kernels down
                for memory in chain.from_iterable(made.values()):
                    memory[...] = 0
                self.up.wait(self.work.record())
        return made

    def slot(self, i: int, memory: Mapping[str, list[Any]]) -> Slot:
        """Returns the device memory for each array of a piece.

        A part of an array reuses the memory of a part that none of the last ``count`` pieces read.
        """
        numbers = self.cut.numbers[i]
        return {name: parts[numbers[name] % len(parts)] for name, parts in memory.items()}

    def new_in(self, i: int) -> list[str]:
        """Returns the inputs whose part differs from that of the previous piece."""
        numbers = self.cut.numbers
        return [x for x in self.given if i == 0 or numbers[i][x] != numbers[i - 1][x]]

    def placed(self, i: int, memory: Mapping[str, list[Any]]) -> dict[str, Place]:
        """Returns, for each array of a piece, its part on the host and its device memory."""
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
        """Waits for the results of a piece, and merges them if the keys were cut."""
        brought[i].wait()
        if self.cut.by_keys:
            self.down.synchronize()
            self.merge(i, {name: places[i][name].host for name in self.plan.outputs})
        places[i] = {}

    def merge(self, i: int, parts: Mapping[str, Any]) -> None:
        """Merges results over some keys into the results so far, weighted by exp(lse)."""
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
    """Returns the offsets of packed queries and keys, or [] if the arrays are not packed."""
    return [inputs[name] for name in _STARTS if name in inputs]


def room(backend: Backend, chosen: Transfer, size: int) -> int:
    """Returns the bytes of device memory that a call on a problem of this size may use."""
    if chosen.device_bytes is not None:
        return chosen.device_bytes
    is_one_piece = size <= chosen.piece_bytes
    return chosen.pieces * size if is_one_piece else int(_SPARE * backend.free_bytes())


def piece_bytes(chosen: Transfer, free: int) -> int:
    """Returns the bytes of a piece if the call may use ``free`` bytes."""
    return min(chosen.piece_bytes, free // 2)


def _merged(a: Merged, b: Merged) -> Merged:
    (a_o, a_lse, *a_max), (b_o, b_lse, *b_max) = a, b
    with np.errstate(all="ignore"):  # lse is -inf in rows without visible keys; NaN is data
        lse = np.logaddexp(a_lse, b_lse)
        a_share, b_share = (
            np.where(np.isneginf(lse), 0, np.exp(x - lse))[..., None] for x in (a_lse, b_lse)
        )
        return a_o * a_share + b_o * b_share, lse, *map(np.maximum, a_max, b_max)


def _filled(memory: tuple[int, ...], host: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the prefix of ``memory`` that a smaller host array fills."""
    axis = next((i for i, n in enumerate(memory[:-1]) if n > 1), len(memory) - 1)
    return tuple(min(n, m) if i == axis else n for i, (n, m) in enumerate(zip(memory, host)))


def _packed_order(array: np.ndarray | None, axes: int) -> tuple[int, ...]:
    """Returns a packed array's axis order: rows outermost, so that a few rows are contiguous."""
    return tuple(range(axes)) if array is None or axes != 4 else (0, 2, 1, 3)


def _order(array: np.ndarray | None, axes: int) -> tuple[int, ...]:
    """Returns an array's axis order on the device, outermost first: the host's if possible."""
    if array is None or axes != 4:
        return tuple(range(axes))
    return (*sorted(range(3), key=lambda axis: -abs(array.strides[axis])), 3)
