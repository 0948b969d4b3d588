"""The graphs: which task takes which chunks, and the arrays that results are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from operator import getitem
from typing import Any

import dask.array as da
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from cupyfa.dask.chunk_tasks import Attend, Differentiate, Merge, output
from cupyfa.partition.part_call import offset_of_part, options_of_parts, unrounded
from cupyfa.partition.position_names import places
from cupyfa.partition.visible_chunks import (
    Strip,
    ranges,
    strip_of,
    tile_of,
    visible_keys,
    visible_rows,
)
from cupyfa.problem.problem import Problem

Key = tuple[Any, ...]  # the name of an array or task, and then its place
Graph = dict[Any, Any]  # tasks by their keys, or by the places of chunks in an array


@dataclass(frozen=True)
class Parts:
    """The arrays of a call, whose chunks go together, and the whole problem.

    A chunk of q has the query heads of one chunk of key heads. captured: numbers that expressions
    read.
    """

    q: da.Array
    k: da.Array
    v: da.Array
    problem: Problem
    captured: Mapping[str, Any] | None

    @classmethod
    def of(
        cls, q: da.Array, k: da.Array, v: da.Array, p: Problem, captured: Mapping[str, Any] | None
    ) -> Parts:
        batch, heads, rows, _ = k.chunks
        q = q.rechunk({0: batch, 1: tuple(p.group * n for n in heads), 3: -1})
        k, v = k.rechunk({3: -1}), v.rechunk({0: batch, 1: heads, 2: rows, 3: -1})
        return cls(q, k, v, p, captured)

    @property
    def cut_axes(self) -> dict[str, int]:
        """The axes that have several chunks, and how many."""
        counts = dict(zip(("batch", "heads", "queries"), self.q.numblocks))
        counts["keys"] = self.k.numblocks[2]
        return {name: count for name, count in counts.items() if count > 1}

    @cached_property
    def rows(self) -> list[range]:
        return ranges(self.q.chunks[2])

    @cached_property
    def keys(self) -> list[range]:
        return ranges(self.k.chunks[2])

    @cached_property
    def counted(self) -> set[str]:
        """What expressions count."""
        return {*places(self.problem.options)}

    @property
    def heads(self) -> Iterator[tuple[int, int]]:
        """The numbers of chunks of the batch and of heads."""
        batch, heads, *_ = self.k.numblocks
        return product(range(batch), range(heads))

    def offset(self, first_row: int, first_key: int) -> int | None:
        """The position of a part's first query among its keys; None if nothing depends on it."""
        return offset_of_part(self.problem, first_row, first_key)

    def keys_of(self, rows: range, tile: int) -> Strip:
        """The keys that rows see; from the first on, if an expression counts keys."""
        visible = visible_keys(self.problem, rows, tile)
        if self.counted & {"position", "key", "keys"}:
            visible = range(visible.stop)
        return strip_of(visible, self.keys)

    def rows_of(self, keys: range, tile: int) -> Strip:
        """The rows that see keys; from the first on, if an expression counts rows."""
        visible = visible_rows(self.problem, keys, tile)
        if self.counted & {"query", "queries"}:
            visible = range(visible.stop)
        return strip_of(visible, self.rows)

    def differentiated(self, tile: int) -> Iterator[tuple[tuple[str, ...], Strip, Strip]]:
        """What the tasks of a batch and head differentiate, and their rows and keys."""
        if len(self.rows) == len(self.keys) == 1:
            yield ("q", "k", "v"), Strip([0], 0), Strip([0], 0)
            return
        for i, rows in enumerate(self.rows):
            yield ("q",), Strip([i], rows.start), self.keys_of(rows, tile)
        for j, keys in enumerate(self.keys):
            yield ("k", "v"), self.rows_of(keys, tile), Strip([j], keys.start)


def forward(parts: Parts, how: Mapping[str, Any], fan_in: int | None) -> tuple[da.Array, da.Array]:
    """out and lse. fan_in: how many parts are merged at a time; None gathers the keys."""
    q, k, v = arrays = parts.q, parts.k, parts.v
    name = f"attention-{_token(parts, how, fan_in)}"
    options = options_of_parts(parts.problem)
    if fan_in is not None:
        options = unrounded(options, parts.problem, how["kernel"])
    attend = Attend(options, parts.captured, how)
    merge = Merge({x: how[x] for x in ("backend", "check")})
    tile = tile_of(how["tiles"])
    graph: Graph = {}
    results: dict[tuple[int, ...], Key] = {}
    for i, rows in enumerate(parts.rows):
        met = parts.keys_of(rows, tile)
        strips = [met] if fan_in is None else met.apart(parts.keys)
        for b, h in parts.heads:
            made = []
            for x in strips:
                of_keys = [_keys(y, b, h, x) for y in (k, v)]
                offset = parts.offset(rows.start, x.start)
                made.append((f"{name}-part", b, h, i, x.chunks[0]))
                graph[made[-1]] = attend, (q.name, b, h, i, 0), *of_keys, x.skipped, offset
            results[b, h, i] = _merged(graph, merge, (f"{name}-merge", b, h, i), made, fan_in)
    tasks = _Tasks.of(name, graph, arrays)
    dtype = parts.problem.out_dtype.numpy
    out = {(*place, 0): (output, x, dtype) for place, x in results.items()}
    lse = {place: (getitem, x, 1) for place, x in results.items()}
    chunks = q.chunks[:3]
    return (
        tasks.array("out", out, (*chunks, v.chunks[3]), q, dtype),
        tasks.array("lse", lse, chunks, q, parts.problem.dtype.sums),
    )


def backward(
    parts: Parts, how: Mapping[str, Any], of_rows: Sequence[da.Array]
) -> tuple[da.Array, ...]:
    """dq, dk and dv. of_rows: dout, out and lse, and dlse if it is given."""
    arrays = {"q": parts.q, "k": parts.k, "v": parts.v}
    of_rows = parts.q, *of_rows
    name = f"attention-gradients-{_token(parts, how, [x.name for x in of_rows])}"
    graph: Graph = {}
    results: dict[str, Graph] = {x: {} for x in arrays}
    for wrt, rows, keys in parts.differentiated(tile_of(how["tiles"])):
        task = Differentiate(options_of_parts(parts.problem), parts.captured, how, wrt)
        offset = parts.offset(rows.start, keys.start)
        for b, h in parts.heads:
            key = f"{name}-{''.join(wrt)}", b, h, rows.chunks[0], keys.chunks[0]
            given = [_keys(x, b, h, rows) for x in of_rows]
            of_keys = [_keys(x, b, h, keys) for x in (parts.k, parts.v)]
            graph[key] = task, given, *of_keys, rows.skipped, keys.skipped, offset
            for n, x in enumerate(wrt):
                own = rows if x == "q" else keys
                results[x][b, h, own.chunks[0], 0] = getitem, key, n
    tasks = _Tasks.of(name, graph, [*of_rows, parts.k, parts.v])
    return tuple(
        tasks.array(f"d{x}", results[x], array.chunks, array, parts.problem.out_dtype.numpy)
        for x, array in arrays.items()
    )


@dataclass(frozen=True)
class _Tasks:
    """Tasks, and all that they need."""

    name: str
    graph: HighLevelGraph

    @classmethod
    def of(cls, name: str, tasks: Graph, taken: Sequence[Any]) -> _Tasks:
        return cls(name, HighLevelGraph.from_collections(name, tasks, dependencies=taken))

    def array(self, what: str, results: Graph, chunks: Any, like: da.Array, dtype: Any) -> da.Array:
        """An array whose chunks are results of the tasks, of the kind of another array's."""
        name = f"{self.name}-{what}"
        layer = MaterializedLayer({(name, *place): x for place, x in results.items()})
        layers = {**self.graph.layers, name: layer}
        graph = HighLevelGraph(layers, {**self.graph.dependencies, name: {self.name}})
        return da.Array(graph, name, chunks, dtype=dtype, meta=like._meta)


def _token(parts: Parts, *others: Any) -> str:
    """Equal calls have equal names, so that Dask computes them once."""
    names = parts.q.name, parts.k.name, parts.v.name
    return tokenize(names, parts.problem.options.changed, parts.captured, *others)


def _keys(array: da.Array, b: int, h: int, strip: Strip) -> list[Key]:
    """The chunks of a strip; lse has no columns."""
    columns = (0,) * (array.ndim - 3)
    return [(array.name, b, h, n, *columns) for n in strip.chunks]


def _merged(graph: Graph, merge: Merge, name: Key, parts: list[Key], fan_in: int | None) -> Key:
    """The task that gives the result of all parts, in their order: every run has the same bits."""
    level = 0
    while fan_in and len(parts) > 1:
        groups = [parts[n : n + fan_in] for n in range(0, len(parts), fan_in)]
        parts = [(*name, level, n) for n in range(len(groups))]
        graph.update((key, (merge, x)) for key, x in zip(parts, groups))
        level += 1
    return parts[0]
