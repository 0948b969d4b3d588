"""Classifies a block mask's tiles, and builds the maps that tell kernels which tiles to visit.

On the host, interval arithmetic evaluates the mask for whole tiles. Tiles that remain undecided are
evaluated pair by pair. On a device, one kernel evaluates all pairs and another builds the map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np

from cupyfa.ladder.kernel import Kernel, Launch, cdiv
from cupyfa.planner import cuda_source
from cupyfa.planner.evaluate import SIZES
from cupyfa.planner.plan import Argument, Plan, PlannedLaunch
from cupyfa.problem.optional_inputs import KEY_TILES
from cupyfa.problem.problem import Problem
from cupyfa.runtime import launcher
from cupyfa.runtime.backend import Backend

EMPTY, PARTIAL, FULL = range(3)  # states of a tile
_UNSURE = 3  # undecided by intervals: each (query, key) pair has to be evaluated
_AT_ONCE = 1 << 20  # number of tiles evaluated with intervals at a time
_CLASSIFY_THREADS, _MAP_THREADS = 128, 1024
CLASSIFY = Launch(
    "classify_tiles",
    args="states.data sizes mods",
    grid=lambda p, c: c.count,
    threads=lambda p, c: _CLASSIFY_THREADS,
    file="blocks/classify_tiles.cu",
)
MAP = Launch(
    "map_tiles",
    args="map.data states.data counts.data lines tiles line_step tile_step alone",
    grid=lambda p, c: c.count,
    threads=lambda p, c: _MAP_THREADS,
    file="blocks/map_tiles.cu",
)


# On the host


def states_of(p: Problem, arrays: Mapping[str, Any], rows: int, keys: int) -> np.ndarray:
    """Classifies all tiles by intervals, and pair by pair where intervals are inconclusive."""
    names = p.modifiers.numbers | {x.name: arrays[x.name] for x in p.modifiers.arrays}
    states = np.empty(_shape(p, rows, keys), np.uint8)
    if not states.size:
        return states
    for batch, head in np.ndindex(p.batch, p.heads):
        for first in range(0, states.shape[2], together := _AT_ONCE // states.shape[3] + 1):
            part = states[batch, head, first : first + together]
            part[...] = _by_ranges(p, names, (batch, head, first, len(part)), rows, keys)
    unsure = np.flatnonzero(states == _UNSURE)
    if len(unsure):
        states.flat[unsure] = _from_pairs(p, arrays, unsure, rows, keys)
    return states


def _shape(p: Problem, rows: int, keys: int) -> tuple[int, int, int, int]:
    return p.batch, p.heads, cdiv(p.M, rows), cdiv(p.N, keys)


def _by_ranges(
    p: Problem, names: Mapping[str, Any], at: tuple[int, int, int, int], rows: int, keys: int
) -> np.ndarray:
    """Classifies consecutive rows of tiles by intervals. at: batch, head, first row, row count."""
    from cupyfa.score import intervals

    batch, head, first, lines = at
    query = np.arange(first, first + lines)[:, None] * rows
    key = np.arange(0, p.N, keys)[None]
    of_queries = intervals.Range(query, np.minimum(query + rows, p.M) - 1)
    places = {
        **{"batch": intervals.exactly(batch), "head": intervals.exactly(head), "query": of_queries},
        "key": intervals.Range(key, np.minimum(key + keys, p.N) - 1),
        "position": intervals.Range(
            of_queries.low + p.first_position, of_queries.high + p.first_position
        ),
        **{"queries": intervals.exactly(p.M), "keys": intervals.exactly(p.N)},
    }
    (text,) = p.modifiers.mask
    found = intervals.read(text, places, names)
    if found is None:
        return np.full((lines, key.size), _UNSURE, np.uint8)
    state = np.where(found.low == 1, FULL, np.where(found.high == 0, EMPTY, _UNSURE))
    return np.broadcast_to(state, (lines, key.size)).astype(np.uint8)


def _tile(number: int, p: Problem, rows: int, keys: int) -> tuple[int, int, np.ndarray, np.ndarray]:
    """Returns the batch, head, queries and keys of the tile with this flat index."""
    batch, head, row, key = map(int, np.unravel_index(number, _shape(p, rows, keys)))
    return (
        *(batch, head),
        np.arange(row * rows, min((row + 1) * rows, p.M)),
        np.arange(key * keys, min((key + 1) * keys, p.N)),
    )


def _from_pairs(
    p: Problem,
    arrays: Mapping[str, Any],
    numbers: np.ndarray,
    rows: int,
    keys: int,
) -> list[int]:
    """Classifies tiles pair by pair; a tile in which rounding decides a pair's mask is partial."""
    from cupyfa.score.numpy_evaluation import Modifications  # imported here: few calls need it

    found = p.modifiers
    texts = Modifications(
        mask_steps=found.mask,
        names=found.numbers | {x.name: arrays[x.name] for x in found.arrays},
        position=p.first_position,
        queries=p.M,
        keys=p.N,
    )
    states = []
    for number in numbers:
        batch, head, queries, of_keys = _tile(number, p, rows, keys)
        place = texts.place(
            np.full((1, 1), batch), np.full((1, 1), head), queries[:, None], of_keys[None]
        )
        hidden, unsure = texts.hidden(place, None, (len(queries), len(of_keys)))
        is_partial = unsure is not None or (hidden is not None and 0 < hidden.sum() < hidden.size)
        is_empty = hidden is not None and hidden.all()
        states.append(PARTIAL if is_partial else EMPTY if is_empty else FULL)
    return states


def map_of(states: np.ndarray, alone: bool = True) -> np.ndarray:
    """Builds the map that kernels read: for each tile of a line, the next nonempty tile.

    A line is a row or a column of tiles.

    The map is int32 [..., lines, tiles + 2]. Element t is 2 * n, or 2 * n + 1 if tile n is partial,
    where n is the first nonempty tile with n >= t, or the number of tiles if there is none. The
    last column lists the lines by descending number of nonempty tiles. Unless the block mask is
    ``alone`` (the call has no other mask expression), all tiles are marked partial.
    """
    tiles = states.shape[-1]
    some = states != EMPTY
    at = np.where(some, np.arange(tiles, dtype=np.int32), np.int32(tiles))
    following = np.minimum.accumulate(at[..., ::-1], axis=-1)[..., ::-1]
    made = np.full((*states.shape[:-1], tiles + 2), 2 * tiles, np.int32)
    partial = np.concatenate(
        [states != FULL if alone else np.ones_like(some), np.zeros_like(some[..., :1])], axis=-1
    )
    made[..., :tiles] = 2 * following + np.take_along_axis(partial, following, axis=-1)
    made[..., -1] = np.argsort(-some.sum(axis=-1), axis=-1, kind="stable")
    return made


# On a device


def states_on_device(
    backend: Backend, p: Problem, arrays: Mapping[str, Any], rows: int, keys: int
) -> np.ndarray:
    """Classifies tiles with a kernel that evaluates all pairs.

    arrays: the backend's arrays that the expression reads, by name.
    """
    states = backend.empty(_shape(p, rows, keys), np.dtype(np.uint8))
    with backend.working_on(states):
        if states.size:
            _ready(backend, p, arrays, {"states": states}, _classify(p, rows, keys))()
        return backend.download(states)


class DeviceMap:
    """A tile map in a backend's memory, computed by two launches from the arrays' contents."""

    def __init__(
        self,
        backend: Backend,
        p: Problem,
        arrays: Mapping[str, Any],
        name: str,
        rows: int,
        keys: int,
        *,
        alone: bool,
    ) -> None:
        """name: KEY_TILES or ROW_TILES. arrays: the arrays that the mask reads, by name."""
        states = _shape(p, rows, keys)
        batch, heads, lines, across = states if name == KEY_TILES else _turned(states)
        whole = np.dtype(np.int32)
        self.array = backend.empty((batch, heads, lines, across + 2), whole)
        self._counts = backend.empty((batch, heads, lines), whole)
        made = {"states": backend.empty(states, np.dtype(np.uint8)), "counts": self._counts}
        made["map"] = self.array
        steps = launches(p, name, rows, keys, alone=alone)
        self._launch = _ready(backend, p, arrays, made, *steps)
        self._backend = backend

    def make(self) -> None:
        """Computes the map in the current stream without waiting for it."""
        with self._backend.working_on(self.array):
            self._launch()

    def wait(self) -> None:
        """Waits until the map is computed, so that other streams can use it."""
        self._backend.download(self._counts)


def launches(
    p: Problem, name: str, rows: int, keys: int, *, alone: bool
) -> tuple[PlannedLaunch, PlannedLaunch]:
    """Plans the launches that compute a map."""
    shape = _shape(p, rows, keys)
    *_, lines, tiles = shape if name == KEY_TILES else _turned(shape)
    line_step, tile_step = (tiles, 1) if name == KEY_TILES else (1, lines)
    arrays = (Argument(name, "data") for name in ("map", "states", "counts"))
    numbers = {"lines": lines, "tiles": tiles, "line_step": line_step, "tile_step": tile_step}
    numbers["alone"] = alone
    values = (Argument(name, value=np.int32(x)) for name, x in numbers.items())
    constants = {"threads": _MAP_THREADS}
    made = PlannedLaunch.of_helper(MAP, p.dtype, p.batch * p.heads, constants, *arrays, *values)
    return _classify(p, rows, keys), made


def _turned(shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    batch, heads, rows, keys = shape
    return batch, heads, keys, rows


def _ready(
    backend: Backend,
    p: Problem,
    arrays: Mapping[str, Any],
    made: Mapping[str, Any],
    *steps: PlannedLaunch,
) -> Callable[[], None]:
    """Returns a function that launches these helper steps, which are not part of the ladder."""
    kernel = Kernel("tile_maps", "the tiles of a block mask", tuple(x.launch for x in steps))
    outputs = {name: (x.shape, x.dtype) for name, x in made.items()}
    plan = Plan(kernel, p, {}, steps, {}, outputs)
    read = {x.input: arrays[x.name] for x in p.modifiers.arrays}
    return launcher.replay(backend, plan, {**read, **made})


def _classify(p: Problem, rows: int, keys: int) -> PlannedLaunch:
    p = p.with_row_max(False)
    value, inside = cuda_source.value(p)
    sizes = {"heads": p.heads, "ragged": False, "packed": False, "page_size": 0}
    sizes["caps_tiles"] = sizes["approximates_softcap"] = False  # a mask has no softcap
    options = {**p.options.constants, **p.modifiers.constants, **sizes}
    return PlannedLaunch.of_helper(
        CLASSIFY,
        p.dtype,
        prod(_shape(p, rows, keys)),
        {"rows": rows, "keys": keys, **options, "threads": _CLASSIFY_THREADS},
        Argument("states", "data"),
        Argument("sizes", value=np.array((p.M, p.N, 0, 0), SIZES)),
        Argument("mods", value=value, arrays=inside),
        mods=cuda_source.header(p),
    )
