"""Builds Dask graphs: assigns chunks to tasks and wraps their results in Dask arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from operator import getitem
from typing import Any

import dask.array as da
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from cupyfa.dask.chunk_tasks import Attend, Differentiate, output
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
from cupyfa.runtime.merging import merge

Key = tuple[Any, ...]  # the name of an array or task, then chunk indices
Graph = dict[Any, Any]  # tasks by key, or by chunk indices


@dataclass(frozen=True)
class Parts:
    """The arrays of a call, with matching chunks, and the whole problem.

    Each chunk of q holds the query heads of one chunk of key heads. captured: the numbers that
    expressions read.
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
        """Maps the name of each axis with several chunks to its number of chunks."""
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
        """The index names that expressions use."""
        return {*places(self.problem.options)}

    @property
    def heads(self) -> Iterator[tuple[int, int]]:
        """The pairs of chunk indices along batch and heads."""
        batch, heads, *_ = self.k.numblocks
        return product(range(batch), range(heads))

    def keys_of(self, rows: range, tile: int) -> Strip:
        """Returns the keys that these rows see, from key 0 if an expression uses key indices."""
        visible = visible_keys(self.problem, rows, tile)
        if self.counted & {"position", "key", "keys"}:
            visible = range(visible.stop)
        return strip_of(visible, self.keys)

    def rows_of(self, keys: range, tile: int) -> Strip:
        """Returns the rows that see these keys, from row 0 if an expression uses query indices."""
        visible = visible_rows(self.problem, keys, tile)
        if self.counted & {"query", "queries"}:
            visible = range(visible.stop)
        return strip_of(visible, self.rows)

    def differentiated(self, tile: int) -> Iterator[tuple[tuple[str, ...], Strip, Strip]]:
        """Yields which gradients each backward task computes, and the rows and keys that it reads.

        The tasks cover one chunk along batch and heads.
        """
        if len(self.rows) == len(self.keys) == 1:
            yield ("q", "k", "v"), Strip([0], 0), Strip([0], 0)
            return
        for i, rows in enumerate(self.rows):
            yield ("q",), Strip([i], rows.start), self.keys_of(rows, tile)
        for j, keys in enumerate(self.keys):
            yield ("k", "v"), self.rows_of(keys, tile), Strip([j], keys.start)


def forward(parts: Parts, how: Mapping[str, Any], fan_in: int | None) -> tuple[da.Array, da.Array]:
    """Builds the graphs of out and lse. fan_in: how many results a task merges, or None."""
    q, k, v = arrays = parts.q, parts.k, parts.v
    name = f"attention-{_token(parts, how, fan_in)}"
    options = options_of_parts(parts.problem)
    if fan_in is not None:
        options = unrounded(options, parts.problem, how["kernel"])
    attend = Attend(options, parts.captured, how)
    merged = partial(merge, backend=how["backend"], check=how["check"])
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
                offset = offset_of_part(parts.problem, rows.start, x.start)
                made.append((f"{name}-part", b, h, i, x.chunks[0]))
                graph[made[-1]] = attend, (q.name, b, h, i, 0), *of_keys, x.skipped, offset
            results[b, h, i] = _merge_all(graph, merged, (f"{name}-merge", b, h, i), made, fan_in)
    tasks = _graph_on(arrays, name, graph)
    dtype = parts.problem.out_dtype.numpy
    out = {(*place, 0): (output, x, dtype) for place, x in results.items()}
    lse = {place: (getitem, x, 1) for place, x in results.items()}
    chunks = q.chunks[:3]
    return (
        _array(tasks, name, "out", out, (*chunks, v.chunks[3]), dtype, q),
        _array(tasks, name, "lse", lse, chunks, parts.problem.dtype.sums, q),
    )


def backward(
    parts: Parts, how: Mapping[str, Any], of_rows: Sequence[da.Array]
) -> tuple[da.Array, ...]:
    """Builds the graphs of dq, dk and dv. of_rows: dout, out, lse and optionally dlse."""
    arrays = {"q": parts.q, "k": parts.k, "v": parts.v}
    of_rows = parts.q, *of_rows
    name = f"attention-gradients-{_token(parts, how, [x.name for x in of_rows])}"
    graph: Graph = {}
    results: dict[str, Graph] = {x: {} for x in arrays}
    for wrt, rows, keys in parts.differentiated(tile_of(how["tiles"])):
        task = Differentiate(options_of_parts(parts.problem), parts.captured, how, wrt)
        offset = offset_of_part(parts.problem, rows.start, keys.start)
        for b, h in parts.heads:
            key = f"{name}-{''.join(wrt)}", b, h, rows.chunks[0], keys.chunks[0]
            given = [_keys(x, b, h, rows) for x in of_rows]
            of_keys = [_keys(x, b, h, keys) for x in (parts.k, parts.v)]
            graph[key] = task, given, *of_keys, rows.skipped, keys.skipped, offset
            for n, x in enumerate(wrt):
                own = rows if x == "q" else keys
                results[x][b, h, own.chunks[0], 0] = getitem, key, n
    tasks = _graph_on([*of_rows, parts.k, parts.v], name, graph)
    dtype = parts.problem.out_dtype.numpy
    return tuple(
        _array(tasks, name, f"d{x}", results[x], array.chunks, dtype, array)
        for x, array in arrays.items()
    )


def _graph_on(arrays: Sequence[Any], name: str, tasks: Graph) -> HighLevelGraph:
    """Returns a graph with ``tasks`` and the arrays that they depend on.

    The arrays are of type Any, because Dask's type hints do not accept Dask arrays here.
    """
    return HighLevelGraph.from_collections(name, tasks, dependencies=arrays)


def _array(
    tasks: HighLevelGraph,
    of_tasks: str,
    what: str,
    results: Graph,
    chunks: Any,
    dtype: Any,
    like: da.Array,
) -> da.Array:
    """Makes a Dask array from the results of tasks, with the chunk type of ``like``."""
    name = f"{of_tasks}-{what}"
    layer = MaterializedLayer({(name, *place): x for place, x in results.items()})
    dependencies = {**tasks.dependencies, name: {of_tasks}}
    graph = HighLevelGraph({**tasks.layers, name: layer}, dependencies)
    return da.Array(graph, name, chunks, dtype=dtype, meta=like._meta)


def _token(parts: Parts, *others: Any) -> str:
    """Returns a token for task names; equal calls get equal names, so Dask computes them once."""
    names = parts.q.name, parts.k.name, parts.v.name
    return tokenize(names, parts.problem.options.changed, parts.captured, *others)


def _keys(array: da.Array, b: int, h: int, strip: Strip) -> list[Key]:
    """Returns the graph keys of a strip's chunks. lse and dlse have three axes, not four."""
    columns = (0,) * (array.ndim - 3)
    return [(array.name, b, h, n, *columns) for n in strip.chunks]


def _merge_all(
    graph: Graph, merged: Callable[..., Any], name: Key, parts: list[Key], fan_in: int | None
) -> Key:
    """Adds merge tasks to the graph and returns the key of the last one.

    The order of merging is fixed, so that every run returns the same bits.
    """
    level = 0
    while fan_in and len(parts) > 1:
        groups = [parts[n : n + fan_in] for n in range(0, len(parts), fan_in)]
        parts = [(*name, level, n) for n in range(len(groups))]
        graph.update((key, (merged, x)) for key, x in zip(parts, groups))
        level += 1
    return parts[0]
