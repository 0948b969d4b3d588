"""Block masks: masks whose tiles are known to be empty, full or partial before kernels run.

Kernels visit no tile that is empty, and evaluate a mask's text only where a tile is partial.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from cupyfa import modifiers, options
from cupyfa.dtypes import DTYPES
from cupyfa.errors import described
from cupyfa.expressions import Expression
from cupyfa.ladder.kernel import Kernel, Launch, cdiv
from cupyfa.modifiers import KEY_TILES, Operand
from cupyfa.numerics import ranges
from cupyfa.numerics.modification import Modifications
from cupyfa.options import AttentionOptions
from cupyfa.planner import mods, select
from cupyfa.planner.evaluate import SIZES
from cupyfa.planner.plan import Argument, Limits, Plan, PlannedLaunch
from cupyfa.problem import Problem
from cupyfa.runtime import launcher
from cupyfa.runtime.arrays import readable_inputs
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.select import adopt, backend_named

EMPTY, PARTIAL, FULL = range(3)  # states of tiles
_PREFIX = modifiers.OF_BLOCKS  # of the names of a block mask's arrays among those of a call
_DRAWN = 128  # rows and keys of a tile that `density` counts and that is drawn
_MOST_DRAWN = 64  # characters and lines
_SIGNS = " ░█"  # by states
_AT_ONCE = 1 << 20  # tiles that are read as ranges
CLASSIFY = Launch(
    "classify_tiles",
    args="states.data numbers.data sizes mods",
    grid=lambda p, c: c.count,
    threads=lambda p, c: 128,
    file="blocks/classify_tiles.cu",
)


class BlockMask:
    """A mask with the state of its tiles; ``block_mask`` makes one. It never changes.

    Arrays are copied. What is found out about its tiles is kept in it for later calls, for each
    device and size of tiles. ``a & b``, ``a | b`` and ``~a`` are block masks.
    """

    def __init__(
        self,
        text: Expression,
        captured: Mapping[str, Any],
        sizes: tuple[int, int, int, int],
        backend: str | Backend,
    ) -> None:
        self.text, self.captured, self.sizes, self.backend = text, captured, sizes, backend
        self._lock, self._kept = threading.RLock(), dict[Any, Any]()
        # What a call with this mask alone says of its arrays (see api.How): one object, which
        # the next call recognises.
        self.alone = (), (), (), self, ("q", "k", "v")
        _ = self._problem  # raises for texts and arrays that do not fit

    @property
    def batch(self) -> int:
        return self.sizes[0]

    @property
    def heads(self) -> int:
        return self.sizes[1]

    @property
    def M(self) -> int:
        return self.sizes[2]

    @property
    def N(self) -> int:
        return self.sizes[3]

    @property
    def density(self) -> float:
        """The share of tiles of 128 queries and 128 keys that are not empty."""
        states = self.states(_DRAWN, _DRAWN)
        return float((states != EMPTY).mean()) if states.size else 0.0

    def states(self, rows: int, keys: int) -> np.ndarray:
        """The state of each tile of so many rows and keys: 0 is empty, 1 partial, 2 full.

        Of uint8, [batch, heads, cdiv(M, rows), cdiv(N, keys)], where batch and heads are 1 unless
        the text names them.
        """
        return self._states(backend_named(self.backend), "float32", rows, keys, self.N - self.M)

    def __and__(self, other: BlockMask) -> BlockMask:
        return self._joined(other, "&")

    def __or__(self, other: BlockMask) -> BlockMask:
        return self._joined(other, "|")

    def __invert__(self) -> BlockMask:
        text = _expression(f"not ({self.text.text})")
        return BlockMask(text, self.captured, self.sizes, self.backend)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{x}={getattr(self, x)}" for x in ("batch", "heads", "M", "N"))
        return f"<block mask {self.text.text!r}: {sizes}>"

    def __str__(self) -> str:
        """The tiles of 128 queries (lines) and 128 keys, or larger ones: █ full, ░ partial.

        Of several batch elements and heads a tile shows what is alike in all, else partial.
        """
        states = self.drawn()
        return "\n".join(
            [
                f"{self!r}, density {self.density:.3g}",
                *("|" + "".join(_SIGNS[x] for x in line) + "|" for line in states),
            ]
        )

    def drawn(self, most: int = _MOST_DRAWN) -> np.ndarray:
        """The states of at most so many rows and columns of tiles, of all heads together."""
        states = self.states(_DRAWN, _DRAWN)
        if not states.size:
            return np.zeros((0, 0), np.uint8)
        least, largest = states.min(axis=(0, 1)), states.max(axis=(0, 1))
        for axis, tiles in enumerate(least.shape):
            starts = np.arange(0, tiles, cdiv(tiles, most))
            least = np.minimum.reduceat(least, starts, axis=axis)
            largest = np.maximum.reduceat(largest, starts, axis=axis)
        return np.where(least == largest, least, PARTIAL).astype(np.uint8)

    # What a call takes of it

    def masked(self, p: Problem) -> Problem:
        """The problem of a call with this mask. Raises ValueError for one of other sizes."""
        self._check(p)
        text = _renamed(self.text.text, {x: _PREFIX + x for x in self.captured})
        if p.options.mask_mod is not None:
            text = f"({text}) and ({p.options.mask_mod.text})"
        options = replace(p.options, mask_mod=Expression.of("mask_mod", text))
        mine = [replace(x, name=_PREFIX + x.name) for x in self._operands]
        mine.sort(key=lambda x: not x.is_array)
        return replace(p, options=options, operands=(*p.operands, *mine))

    def arrays(self, backend: Backend, on_host: bool) -> dict[str, Any]:
        """Its arrays by their names in a call, where the call's are."""
        return {
            f"mods.{_PREFIX}{x.name}": self._placed(backend, on_host, x.name, self.captured[x.name])
            for x in self._operands
            if x.is_array
        }

    def _check(self, p: Problem) -> None:
        sizes = ", ".join(f"{name}={x}" for name, x in zip(_SIZES, (p.batch, p.heads, p.M, p.N)))
        own = ", ".join(f"{name}={x}" for name, x in zip(_SIZES, self.sizes))
        if (self.M, self.N) != (p.M, p.N):
            raise ValueError(
                f"mask is a block mask of {own}, and the call has {sizes}; make one of its M and N"
            )
        for name, mine, given in (("batch", self.batch, p.batch), ("heads", self.heads, p.heads)):
            if mine == given or (mine == 1 and not self._depends(name)):
                continue
            why = "" if mine != 1 else f", and its text names {_PLACE_OF[name]}"
            raise ValueError(
                f"mask is a block mask of {own}{why}, and the call has {sizes}; make one with "
                f"{name}={given}"
            )

    def maps(self, plan: Plan, backend: Backend, on_host: bool, alone: bool) -> dict[str, Any]:
        """The maps of tiles that the kernel of a plan goes by; none for one that visits all tiles.

        alone: whether no other text hides pairs, so that full tiles need no text.
        """
        p, found = plan.problem, dict[str, Any]()
        if 0 in (p.batch, p.heads, p.M, p.N):
            return found
        for name, size in plan.kernel.walks_of(p, plan.constants).items():
            key = name, str(p.dtype.sums), *map(int, size), self._position(p), alone
            found[f"mods.{name}"] = self._placed(backend, on_host, key, self._map)
        return found

    def planned(self, plan: Plan, limits: Limits) -> Plan:
        """The plan of a call with this mask, whose kernel goes by its maps."""
        return select.with_maps(plan, limits, [self.text])

    # How it is found out

    @cached_property
    def _operands(self) -> tuple[Operand, ...]:
        return tuple(modifiers.of_value(name, x) for name, x in self.captured.items())

    @cached_property
    def _problem(self) -> Problem:
        """A problem of its tiles: a batch element and a head of 1 stand for all."""
        batch, heads, M, N = self.sizes
        batch, heads = (
            batch if self._depends("batch") else 1,
            heads if self._depends("heads") else 1,
        )
        of, chosen = DTYPES["float32"], AttentionOptions(mask_mod=self.text)
        return Problem(batch, heads, heads, M, N, 1, 1, of, chosen, operands=self._operands)

    def _depends(self, size: str) -> bool:
        return _PLACE_OF[size] in self.text.positions

    def _position(self, p: Problem) -> int:
        """The position of query 0, where it matters."""
        return p.first_position if "position" in self.text.positions else self.N - self.M

    def _placed(self, backend: Backend, on_host: bool, key: Any, made: Any) -> Any:
        """An array in the memory of a backend, kept; ``made`` is NumPy's, or makes it."""
        where = "host" if on_host else (backend.name, backend.device)
        with self._lock:
            if (where, key) not in self._kept:
                array = made(backend, *key) if callable(made) else made
                self._kept[where, key] = array if on_host else backend.upload(array)
            return self._kept[where, key]

    def _map(
        self,
        backend: Backend,
        name: str,
        sums: str,
        rows: int,
        keys: int,
        position: int,
        alone: bool,
    ) -> np.ndarray:
        states = self._states(backend, sums, rows, keys, position)
        return map_of(states if name == KEY_TILES else states.swapaxes(2, 3), alone)

    def _states(
        self, backend: Backend, sums: str, rows: int, keys: int, position: int
    ) -> np.ndarray:
        key = "states", sums, rows, keys, position
        with self._lock:
            if key not in self._kept:
                p = replace(self._problem, shift=position - (self.N - self.M))
                if sums == "float64":
                    p = replace(p, dtype=DTYPES[sums])
                own = isinstance(backend.empty((0,), np.dtype(np.uint8)), np.ndarray)
                self._kept[key] = states_of(p, self.captured, rows, keys, None if own else backend)
            return self._kept[key]

    def _joined(self, other: BlockMask, sign: str) -> BlockMask:
        if not isinstance(other, BlockMask):
            return NotImplemented
        if (self.M, self.N) != (other.M, other.N):
            raise ValueError(f"{self!r} and {other!r} differ in M or N; make them for one size")
        sizes: list[int] = []
        for name, a, b in (("batch", self.batch, other.batch), ("heads", self.heads, other.heads)):
            if 1 not in (a, b) and a != b:
                raise ValueError(f"{self!r} and {other!r} differ in {name}; make them for one size")
            short = self if a < b else other
            if a != b and short._depends(name):
                raise ValueError(
                    f"{short!r} names {_PLACE_OF[name]}; make it with {name}={max(a, b)}"
                )
            sizes.append(max(a, b))
        captured, names = dict(self.captured), {}
        for name, x in other.captured.items():
            if name in captured and captured[name] is not x:
                names[name] = next(
                    new
                    for new in (f"{name}_{i}" for i in count(2))
                    if new not in captured and new not in other.captured
                )
            captured[names.get(name, name)] = x
        text = f"({self.text.text}) {sign} ({_renamed(other.text.text, names)})"
        batch, heads = sizes
        return BlockMask(_expression(text), captured, (batch, heads, self.M, self.N), self.backend)


_SIZES = ("batch", "heads", "M", "N")
_PLACE_OF = {"batch": "batch", "heads": "head"}


def block_mask(
    mask: Any = None,
    *,
    mask_mod: options.Text = None,
    captured: Mapping[str, Any] | None = None,
    batch: int = 1,
    heads: int = 1,
    M: int | None = None,
    N: int | None = None,
    backend: str | Backend = "auto",
) -> BlockMask:
    """A mask that kernels skip by tiles, to be passed as ``mask=`` of ``attention`` and others.

    mask: an array of bool, broadcastable to [batch, heads, M, N]; True is seen.
    mask_mod, captured: in place of it an expression and what it names, as of ``attention``.
        ``position`` is that of the call.
    batch, heads, M, N: the sizes. M and N are those of the calls. A batch or heads of 1 serve any
        number, unless the expression names ``batch`` or ``head``. Of an array they follow from its
        shape, where its axes are not 1.
    backend: where ``density`` and pictures are computed, by name or as a Simulator.

    A tile of queries and keys is empty, full or partial, which is found out exactly, from all of
    its pairs, when it is first needed. Most kernels skip empty tiles, and evaluate
    the mask in partial ones only; the others evaluate it in all tiles. The results are those
    of the same mask without tiles.

    Raises ValueError or TypeError for wrong arguments.
    """
    given = {} if captured is None else captured
    if not isinstance(given, Mapping):
        raise TypeError(f'captured is {described(captured)}; give {{"name": array}}')
    if (mask is None) == (mask_mod is None):
        raise TypeError("give a bool array, or an expression as mask_mod=")
    sizes = [options.read_size("batch", batch, 2**31), options.read_size("heads", heads, 2**31)]
    if mask is not None:
        if given:
            raise TypeError("captured is for expressions; leave it out")
        array = _copied("mask", mask)
        return _of_array(array, (*sizes, M, N), backend)
    if M is None or N is None:
        raise TypeError("give M and N, the numbers of queries and keys")
    sizes += [options.read_size("M", M, 2**31), options.read_size("N", N, 2**31)]
    for name, x in given.items():
        modifiers.operand(name, _seen(name, x))
    text = Expression.of("mask_mod", mask_mod)
    own = {name: _copied(name, x) for name, x in given.items()}
    return BlockMask(text, own, tuple(sizes), backend)  # type: ignore[arg-type]


def readable(backend: Backend, plan: Plan, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs on the host as the kernel of a plan reads them.

    Those of a problem with a block mask get the maps of the plan's tiles.
    """
    p, found = plan.problem, dict(inputs)
    if any(x.name in modifiers.MAPS for x in p.operands):
        found |= _of_inputs(p, inputs, backend).maps(plan, backend, on_host=True, alone=True)
    return readable_inputs(plan, found)


def _of_inputs(p: Problem, inputs: Mapping[str, Any], backend: Backend) -> BlockMask:
    """The block mask of all masks of a problem."""
    texts, own = p.modifiers.mask, {modifiers.MASK: f"{_PREFIX}array"}
    text = _expression(" and ".join(f"({_renamed(x.text, own)})" for x in texts))
    captured = {
        own.get(x.name, x.name): _copied(x.name, inputs[x.input]) if x.is_array else x.value
        for x in p.modifiers.operands
        if any(x.name in text.captured for text in texts)
    }
    return BlockMask(text, captured, (p.batch, p.heads, p.M, p.N), backend)


def _of_array(
    array: np.ndarray, given: tuple[int | None, ...], backend: str | Backend
) -> BlockMask:
    if not isinstance(array, np.ndarray) or array.dtype != bool or array.ndim > 4:
        what = described(array) if not isinstance(array, np.ndarray) else f"{array.dtype}"
        raise TypeError(
            f"mask is {what}, of {np.ndim(array)} axes; give an array of bool, broadcastable to "
            "[batch, heads, M, N]"
        )
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    sizes = []
    for name, n, asked in zip(_SIZES, array.shape, given):
        if asked is not None and n not in (1, asked) and not (asked == 1 and name in _PLACE_OF):
            raise ValueError(f"mask has shape {array.shape}, and {name}={asked}; let them be equal")
        sizes.append(max(n, asked or 1) if n else 0)
    text = _expression(f"array[{modifiers.indices(array.shape)}]")
    return BlockMask(text, {"array": array}, tuple(sizes), backend)  # type: ignore[arg-type]


def _expression(text: str) -> Expression:
    return Expression.of("mask_mod", text)


def _seen(name: str, given: Any) -> Any:
    """Another library's array as NumPy's or CuPy's."""
    if isinstance(given, np.ndarray) or hasattr(given, "get") or not hasattr(given, "shape"):
        return given
    return given if isinstance(given, np.generic) else adopt("auto", **{name: given})[1][0]


def _copied(name: str, given: Any) -> Any:
    """A number, or an array as NumPy's that nobody changes."""
    seen = _seen(name, given)
    if not hasattr(seen, "shape") or isinstance(seen, np.generic):
        return seen
    array = np.array(seen.get() if hasattr(seen, "get") else seen, order="C")
    if not array.shape:
        return array.item()
    array.flags.writeable = False
    return array


def _renamed(text: str, names: Mapping[str, str]) -> str:
    tree = ast.parse(text, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = names.get(node.id, node.id)
    return ast.unparse(tree)


# Finding states

_UNSURE = 3  # of tiles whose pairs have to be looked at


def states_of(
    p: Problem, arrays: Mapping[str, Any], rows: int, keys: int, backend: Backend | None
) -> np.ndarray:
    """The states of tiles of rows and keys: by ranges, then from all pairs of unsure tiles.

    These are evaluated by a kernel of the backend, or by NumPy if it is None.
    """
    names = p.modifiers.numbers | {x.name: arrays[x.name] for x in p.modifiers.arrays}
    states = np.empty((p.batch, p.heads, cdiv(p.M, rows), cdiv(p.N, keys)), np.uint8)
    if not states.size:
        return states
    for batch, head in np.ndindex(p.batch, p.heads):
        for first in range(0, states.shape[2], together := _AT_ONCE // states.shape[3] + 1):
            part = states[batch, head, first : first + together]
            part[...] = _by_ranges(p, names, (batch, head, first, len(part)), rows, keys)
    unsure = np.flatnonzero(states == _UNSURE)
    if len(unsure):
        how = p, arrays, unsure, rows, keys
        states.flat[unsure] = (
            _pairs_by_numpy(*how) if backend is None else _pairs_by_kernel(*how, backend)
        )
    return states


def _by_ranges(
    p: Problem, names: Mapping[str, Any], at: tuple[int, int, int, int], rows: int, keys: int
) -> np.ndarray:
    """Of some lines of tiles: batch, head, the first line and their number."""
    batch, head, first, lines = at
    query = np.arange(first, first + lines)[:, None] * rows
    key = np.arange(0, p.N, keys)[None]
    of_queries = ranges.Range(query, np.minimum(query + rows, p.M) - 1)
    places = {
        **{"batch": ranges.exactly(batch), "head": ranges.exactly(head), "query": of_queries},
        "key": ranges.Range(key, np.minimum(key + keys, p.N) - 1),
        "position": ranges.Range(
            of_queries.low + p.first_position, of_queries.high + p.first_position
        ),
        **{"queries": ranges.exactly(p.M), "keys": ranges.exactly(p.N)},
    }
    (text,) = p.modifiers.mask
    found = ranges.read(text, places, names)
    if found is None:
        return np.full((lines, key.size), _UNSURE, np.uint8)
    state = np.where(found.low == 1, FULL, np.where(found.high == 0, EMPTY, _UNSURE))
    return np.broadcast_to(state, (lines, key.size)).astype(np.uint8)


def _tile(number: int, p: Problem, rows: int, keys: int) -> tuple[int, int, np.ndarray, np.ndarray]:
    """Batch, head, queries and keys of a tile."""
    shape = p.batch, p.heads, cdiv(p.M, rows), cdiv(p.N, keys)
    batch, head, row, key = map(int, np.unravel_index(number, shape))
    return (
        *(batch, head),
        np.arange(row * rows, min((row + 1) * rows, p.M)),
        np.arange(key * keys, min((key + 1) * keys, p.N)),
    )


def _pairs_by_numpy(
    p: Problem,
    arrays: Mapping[str, Any],
    numbers: np.ndarray,
    rows: int,
    keys: int,
) -> list[int]:
    """The states of tiles from all of their pairs. Where rounding decides, they are partial."""
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


def _pairs_by_kernel(
    p: Problem,
    arrays: Mapping[str, Any],
    numbers: np.ndarray,
    rows: int,
    keys: int,
    backend: Backend,
) -> np.ndarray:
    """The same, by a kernel of the backend."""
    operands = {x.input: backend.upload(arrays[x.name]) for x in p.modifiers.arrays}
    operands["numbers"] = backend.upload(numbers.astype(np.int64))
    states = backend.empty(numbers.shape, np.dtype(np.uint8))
    with backend.working_on(states):
        plan = _plan(p, len(numbers), {"rows": rows, "keys": keys})
        launcher.run(backend, plan, operands, {"states": states})
        return backend.download(states)


def _plan(p: Problem, count: int, constants: Mapping[str, int]) -> Plan:
    """The plan of one launch for some tiles, which is no kernel of the ladder."""
    value, inside = mods.value(p)
    sizes = np.array((p.M, p.N, 0, 0), SIZES)
    threads = int(CLASSIFY.threads(p, SimpleNamespace()))
    step = PlannedLaunch(
        launch=CLASSIFY,
        path=Path(str(CLASSIFY.file)),
        dtype=p.dtype,
        operand=p.dtype,
        constants={
            **constants,
            **p.options.constants,
            **p.modifiers.constants,
            "threads": threads,
            "heads": p.heads,
        },
        grid=(count, 1, 1),
        threads=threads,
        shared_bytes=0,
        mods=mods.header(p),
        arguments=(
            Argument("states", "data"),
            Argument("numbers", "data"),
            Argument("sizes", value=sizes),
            Argument("mods", value=value, arrays=inside),
        ),
    )
    kernel = Kernel("classify_tiles", "the states of a block mask's tiles", (CLASSIFY,))
    outputs = {"states": ((count,), np.dtype(np.uint8))}
    return Plan(kernel, p, constants, (step,), {}, outputs)


def map_of(states: np.ndarray, alone: bool = True) -> np.ndarray:
    """What kernels read: of each line of tiles where the next tile is that is not empty.

    Of int32, [..., lines, tiles + 2]. Element t is 2 * n, or 2 * n + 1 if that tile is partial: n
    is the first tile from t on that is not empty, or the number of tiles. Without ``alone`` all
    tiles are partial. The last column has the lines in the order of their numbers of tiles, the
    longest first.
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
