"""Block masks: masks whose tiles are classified as empty, partial or full before kernels run.

Kernels skip empty tiles and evaluate the mask's expression only in partial tiles.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np

from cupyfa.errors import Unsupported, described
from cupyfa.ladder.kernel import cdiv
from cupyfa.planner import choose_kernel
from cupyfa.planner.plan import Limits, Plan
from cupyfa.problem import optional_inputs, options
from cupyfa.problem.dtypes import DTYPES
from cupyfa.problem.optional_inputs import KEY_TILES, Operand, is_array
from cupyfa.problem.options import AttentionOptions
from cupyfa.problem.problem import Problem
from cupyfa.runtime.arrays import readable_inputs
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.choose_backend import adopt, backend_named
from cupyfa.runtime.tile_maps import EMPTY, PARTIAL, DeviceMap, map_of, states_of, states_on_device
from cupyfa.score.expressions import Expression

# A call adds this prefix to the names of a block mask's arrays.
_PREFIX = optional_inputs.OF_BLOCKS
_DRAWN = 128  # rows per tile, and keys per tile, in `density` and `str`
_MOST_DRAWN = 64  # largest number of lines, and of columns, that `str` returns
_SIGNS = " ░█"  # characters for EMPTY, PARTIAL and FULL


class BlockMask:
    """A mask whose tiles are classified as empty, partial or full; created by ``block_mask``.

    The mask's arrays are copied. Tile states are cached per device and tile size. Only ``update``
    changes a block mask. ``a & b``, ``a | b`` and ``~a`` are block masks, too.
    """

    def __init__(
        self,
        text: Expression,
        captured: Mapping[str, Any],
        sizes: tuple[int, int, int, int],
        backend: str | Backend,
    ) -> None:
        self.text, self.captured, self.sizes, self.backend = text, captured, sizes, backend
        self._lock = threading.RLock()
        self._states_kept = dict[Any, np.ndarray]()
        # Copies of arrays by (memory, name), and tile maps by memory and parameters. They are never
        # reallocated, because prepared calls hold their addresses.
        self._placed, self._maps = dict[Any, Any](), dict[Any, _HostMap | DeviceMap]()
        self._updated = set[str]()  # names of captured arrays that the next update overwrites
        _ = self._problem  # raises if the expression does not match the captured arrays

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the mask's definition, without maps, device copies or the lock."""
        return BlockMask, (self.text, self._unchanging(), self.sizes, self.backend)

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
        """The fraction of tiles, each of 128 queries and 128 keys, that are not empty."""
        states = self.states(_DRAWN, _DRAWN)
        return float((states != EMPTY).mean()) if states.size else 0.0

    def states(self, rows: int, keys: int) -> np.ndarray:
        """Returns the state of each tile of ``rows`` x ``keys`` pairs: 0 empty, 1 partial, 2 full.

        The result is uint8, [batch, heads, cdiv(M, rows), cdiv(N, keys)], where batch and heads are
        1 unless the expression uses these indices.
        """
        return self._states(backend_named(self.backend), "float32", rows, keys, self.N - self.M)

    def __and__(self, other: BlockMask) -> BlockMask:
        return self._joined(other, "&")

    def __or__(self, other: BlockMask) -> BlockMask:
        return self._joined(other, "|")

    __rand__, __ror__ = __and__, __or__  # these refuse operands that are not block masks
    __array_ufunc__ = None  # makes NumPy arrays defer & and | to this class

    def __invert__(self) -> BlockMask:
        text = _expression(f"not ({self.text.text})")
        return BlockMask(text, self._unchanging(), self.sizes, self.backend)

    def update(self, captured: Mapping[str, Any]) -> None:
        """Replaces the elements of captured arrays and recomputes the tile states.

        captured: new arrays by name, with the shapes and dtypes of the current ones; a mask that
        was passed as an array is called ``array``. The arrays are copied. All later calls use them,
        including prepared calls and captured CUDA graphs. On a GPU two launches recompute each
        cached map in CuPy's current stream, which may be capturing; with CuPy arrays the host does
        not wait for them. Work in other streams must wait for this stream. Block masks that were
        derived from this one earlier do not change.

        Raises ValueError or TypeError for unknown names, and for other shapes or dtypes.
        """
        if not isinstance(captured, Mapping):
            raise TypeError(f'captured is {described(captured)}; pass a dict {{"name": array}}')
        given = {name: self._like_before(name, _seen(name, x)) for name, x in captured.items()}
        with self._lock:
            for (_, name), array in self._placed.items():
                if name in given:
                    _write(array, given[name])
            places = {name: array for (_, name), array in self._placed.items()}
            new = {
                name: places[name] if name in places else _copied(name, given[name])
                for name in given
            }
            self.captured = {**self.captured, **new}
            self._updated |= places.keys() & given.keys()
            self._states_kept.clear()
            for made in self._maps.values():
                made.make()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{x}={getattr(self, x)}" for x in ("batch", "heads", "M", "N"))
        return f"<block mask {self.text.text!r}: {sizes}>"

    def __str__(self) -> str:
        """Draws the mask, one character per tile of at least 128 queries (lines) and 128 keys.

        █ marks full tiles. ░ marks partial tiles, and tiles whose state differs between heads.
        """
        states = self.drawn()
        return "\n".join(
            [
                f"{self!r}, density {self.density:.3g}",
                *("|" + "".join(_SIGNS[x] for x in line) + "|" for line in states),
            ]
        )

    def drawn(self, most: int = _MOST_DRAWN) -> np.ndarray:
        """Returns the states of at most ``most`` x ``most`` tiles, combined over all heads."""
        states = self.states(_DRAWN, _DRAWN)
        if not states.size:
            return np.zeros((0, 0), np.uint8)
        least, largest = states.min(axis=(0, 1)), states.max(axis=(0, 1))
        for axis, tiles in enumerate(least.shape):
            starts = np.arange(0, tiles, cdiv(tiles, most))
            least = np.minimum.reduceat(least, starts, axis=axis)
            largest = np.maximum.reduceat(largest, starts, axis=axis)
        return np.where(least == largest, least, PARTIAL).astype(np.uint8)

    # Use in a call

    def masked(self, p: Problem) -> Problem:
        """Returns the problem with this mask added.

        Raises ValueError if the sizes of problem and mask differ, and Unsupported for a ragged
        batch, because tile states are computed for one pair of M and N.
        """
        if p.is_ragged:
            raise Unsupported(
                f"a block mask cannot be used with {p.ragged_by}; pass the block mask's expression "
                "as mask="
            )
        self._check(p)
        text = rename_in_text(self.text.text, {x: _PREFIX + x for x in self.captured})
        if p.options.mask_mod is not None:
            text = f"({text}) and ({p.options.mask_mod.text})"
        options = replace(p.options, mask_mod=Expression.of("mask_mod", text))
        mine = [replace(x, name=_PREFIX + x.name) for x in self._operands]
        mine.sort(key=lambda x: not x.is_array)
        return replace(p, options=options, operands=(*p.operands, *mine))

    def arrays(self, backend: Backend, on_host: bool) -> dict[str, Any]:
        """Returns copies of the mask's arrays on the host or a device, by their names in a call."""
        return {
            f"mods.{_PREFIX}{x.name}": self._array(backend, on_host, x.name)
            for x in self._operands
            if x.is_array
        }

    def _check(self, p: Problem) -> None:
        sizes = ", ".join(f"{name}={x}" for name, x in zip(_SIZES, (p.batch, p.heads, p.M, p.N)))
        own = ", ".join(f"{name}={x}" for name, x in zip(_SIZES, self.sizes))
        if (self.M, self.N) != (p.M, p.N):
            raise ValueError(
                f"mask is a block mask for {own}, but the call has {sizes}; create a block mask "
                f"with M={p.M} and N={p.N}"
            )
        for name, mine, given in (("batch", self.batch, p.batch), ("heads", self.heads, p.heads)):
            if mine == given or (mine == 1 and not self._depends(name)):
                continue
            why = "" if mine != 1 else f" whose expression uses {_PLACE_OF[name]}"
            raise ValueError(
                f"mask is a block mask for {own}{why}, but the call has {sizes}; create a block "
                f"mask with {name}={given}"
            )

    def maps(self, plan: Plan, backend: Backend, on_host: bool, alone: bool) -> dict[str, Any]:
        """Returns the tile maps that a plan's kernel reads; empty if the kernel visits all tiles.

        alone: whether this is the call's only mask expression. If so, the kernel skips its
        evaluation in full tiles.
        """
        p, found = plan.problem, dict[str, Any]()
        if 0 in (p.batch, p.heads, p.M, p.N):
            return found
        for name, size in plan.kernel.walks_of(p, plan.constants).items():
            how = str(p.dtype.sums), *map(int, size), self._position(p), alone
            found[f"mods.{name}"] = self._map(backend, on_host, name, *how)
        return found

    def planned(self, plan: Plan, limits: Limits) -> Plan:
        """Returns the plan with the tile maps of this mask as inputs of its kernel."""
        return choose_kernel.with_maps(plan, limits, [self.text])

    # Computation of tile states and maps

    @cached_property
    def _operands(self) -> tuple[Operand, ...]:
        return tuple(optional_inputs.of_value(name, x) for name, x in self.captured.items())

    @cached_property
    def _problem(self) -> Problem:
        """The problem whose tiles are classified; batch or heads is 1 if the mask ignores it."""
        batch, heads, M, N = self.sizes
        batch, heads = (
            batch if self._depends("batch") else 1,
            heads if self._depends("heads") else 1,
        )
        of, chosen = DTYPES["float32"], AttentionOptions(mask_mod=self.text)
        p = Problem(batch, heads, heads, M, N, 1, 1, of, chosen, operands=self._operands)
        optional_inputs.refuse_short(p.modifiers, p.of_scores)
        return p

    def _depends(self, size: str) -> bool:
        return _PLACE_OF[size] in self.text.positions

    def _position(self, p: Problem) -> int:
        """Returns query 0's position in a problem, or N - M if the mask does not use positions."""
        return p.first_position if "position" in self.text.positions else self.N - self.M

    def _array(self, backend: Backend, on_host: bool, name: str) -> Any:
        """Returns a captured array's copy on the host or a device; creates it on first use."""
        key = _place(backend, on_host), name
        with self._lock:
            if key not in self._placed:
                array = self.captured[name]
                there = _on_host(array) if on_host else backend.upload(array)
                self._placed[key] = there.copy()
            return self._placed[key]

    def _map(self, backend: Backend, on_host: bool, name: str, *how: Any) -> Any:
        """Returns a tile map on the host or a device; creates it on first use."""
        key = _place(backend, on_host), name, *how
        *tiles, alone = how
        with self._lock:
            if key not in self._maps:
                self._maps[key] = (
                    _HostMap(lambda: self._states(backend, *tiles), name, alone)
                    if on_host or _is_host(backend)
                    else self._device_map(backend, name, *how)
                )
            return self._maps[key].array

    def _device_map(
        self, backend: Backend, name: str, sums: str, rows: int, keys: int, *how: Any
    ) -> DeviceMap:
        position, alone = how
        if backend.is_capturing:
            raise ValueError(
                "the block mask has no tile states for this call yet, and they cannot be computed "
                "while a CUDA graph is captured; compile or run the call before the capture"
            )
        p, arrays = self._problem_at(sums, position), self._arrays(backend)
        made = DeviceMap(backend, p, arrays, name, rows, keys, alone=alone)
        made.make()
        made.wait()  # calls in other streams may use the map, too
        return made

    def _states(
        self, backend: Backend, sums: str, rows: int, keys: int, position: int
    ) -> np.ndarray:
        key = sums, rows, keys, position
        with self._lock:
            if key not in self._states_kept:
                p = self._problem_at(sums, position)
                self._states_kept[key] = (
                    states_of(p, {x: _on_host(y) for x, y in self.captured.items()}, rows, keys)
                    if _is_host(backend)
                    else states_on_device(backend, p, self._arrays(backend), rows, keys)
                )
            return self._states_kept[key]

    def _problem_at(self, sums: str, position: int) -> Problem:
        """Returns the problem with query 0 at ``position`` and sums in the dtype ``sums``."""
        p = replace(self._problem, shift=position - (self.N - self.M))
        return replace(p, dtype=DTYPES[sums]) if sums == "float64" else p

    def _arrays(self, backend: Backend) -> dict[str, Any]:
        return {x.name: self._array(backend, False, x.name) for x in self._operands if x.is_array}

    def _unchanging(self) -> dict[str, Any]:
        """Returns captured values for a derived mask; copies arrays that ``update`` overwrites."""
        return {x: y.copy() if x in self._updated else y for x, y in self.captured.items()}

    def _like_before(self, name: str, given: Any) -> Any:
        mine = {x.name: x for x in self._operands if x.is_array}
        if name not in mine:
            raise ValueError(
                f"captured contains {name!r}, but the captured arrays of this block mask are "
                f"{', '.join(mine) or 'none'}; to change a number, create a new block mask"
            )
        before, now = mine[name], optional_inputs.of_value(name, given)
        if now != before:
            raise ValueError(
                f"{name} is {now.dtype} {now.shape}, but the array that it replaces is "
                f"{before.dtype} {before.shape}; convert {name}, or create a new block mask"
            )
        return given

    def _joined(self, other: BlockMask, sign: str) -> BlockMask:
        if not isinstance(other, BlockMask):
            raise TypeError(
                f"{sign} combines two block masks, but one operand is {described(other)}; convert "
                "that operand with block_mask(array)"
            )
        if (self.M, self.N) != (other.M, other.N):
            raise ValueError(f"{self!r} and {other!r} must have the same M and N")
        sizes: list[int] = []
        for name, a, b in (("batch", self.batch, other.batch), ("heads", self.heads, other.heads)):
            if 1 not in (a, b) and a != b:
                raise ValueError(
                    f"{self!r} and {other!r} must have the same {name}, or one must have {name}=1"
                )
            short = self if a < b else other
            if a != b and short._depends(name):
                raise ValueError(
                    f"the expression of {short!r} uses {_PLACE_OF[name]}; create that block mask "
                    f"with {name}={max(a, b)}"
                )
            sizes.append(max(a, b))
        captured, names = self._unchanging(), {}
        for name, x in other._unchanging().items():
            if name in captured and captured[name] is not x:
                names[name] = next(
                    new
                    for new in (f"{name}_{i}" for i in count(2))
                    if new not in captured and new not in other.captured
                )
            captured[names.get(name, name)] = x
        text = f"({self.text.text}) {sign} ({rename_in_text(other.text.text, names)})"
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
    """Makes a block-sparse mask, whose empty tiles kernels skip; pass it as ``mask=``.

    mask: a bool array, broadcastable to [batch, heads, M, N]; True means visible.
    mask_mod, captured: instead of an array, an expression and the arrays and numbers that it reads,
        as for ``attention``. Its ``position`` follows the causal mask and offset of each call.
    batch, heads, M, N: the mask's sizes. M and N must match the calls. batch=1 and heads=1
        match any number, unless the expression uses ``batch`` or ``head``. For an array, the sizes
        follow from its axes that are not 1.
    backend: the backend that computes ``density`` and ``str(mask)``, by name or as a Simulator.

    Each tile of queries and keys is classified as empty, full or partial, exactly and from all of
    its pairs, when a call first needs it. Most kernels skip empty tiles and evaluate the mask only
    in partial tiles; a few evaluate it in all tiles. Results are the same as with an ordinary mask.

    Raises ValueError or TypeError for wrong arguments.
    """
    given = {} if captured is None else captured
    if not isinstance(given, Mapping):
        raise TypeError(f'captured is {described(captured)}; pass a dict {{"name": array}}')
    if (mask is None) == (mask_mod is None):
        raise TypeError("pass exactly one of mask (a bool array) and mask_mod (an expression)")
    sizes = [options.read_size("batch", batch, 2**31), options.read_size("heads", heads, 2**31)]
    if mask is not None:
        if given:
            raise TypeError(
                "captured is only for expressions, but mask is an array; leave captured out"
            )
        array = _copied("mask", mask)
        return _of_array(array, (*sizes, M, N), backend)
    if M is None or N is None:
        raise TypeError("mask_mod requires M and N; pass the numbers of queries and keys")
    sizes += [options.read_size("M", M, 2**31), options.read_size("N", N, 2**31)]
    for name, x in given.items():
        optional_inputs.operand(name, _seen(name, x))
    text = Expression.of("mask_mod", mask_mod)
    own = {name: _copied(name, x) for name, x in given.items()}
    return BlockMask(text, own, tuple(sizes), backend)  # type: ignore[arg-type]


def readable(backend: Backend, plan: Plan, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Converts host inputs to a form that a plan's kernel can read.

    For a problem with a block mask, adds the tile maps for the plan's tile sizes.
    """
    p, found = plan.problem, dict(inputs)
    if any(x.name in optional_inputs.MAPS for x in p.operands):
        found |= _of_inputs(p, inputs, backend).maps(plan, backend, on_host=True, alone=True)
    return readable_inputs(plan, found)


def _of_inputs(p: Problem, inputs: Mapping[str, Any], backend: Backend) -> BlockMask:
    """Makes one block mask that combines all masks of a problem."""
    texts, own = p.modifiers.mask, {optional_inputs.MASK: f"{_PREFIX}array"}
    text = _expression(" and ".join(f"({rename_in_text(x.text, own)})" for x in texts))
    captured = {
        own.get(x.name, x.name): _copied(x.name, inputs[x.input]) if x.is_array else x.value
        for x in p.modifiers.operands
        if any(x.name in text.captured for text in texts)
    }
    return BlockMask(text, captured, (p.batch, p.heads, p.M, p.N), backend)


def _of_array(array: Any, given: tuple[int | None, ...], backend: str | Backend) -> BlockMask:
    if isinstance(array, str | Expression) or callable(array):
        raise TypeError(f"mask is {described(array)}; pass an expression as mask_mod=")
    if not is_array(array) or array.dtype != bool or array.ndim > 4:
        what = f"a {array.ndim}-D {array.dtype} array" if is_array(array) else described(array)
        raise TypeError(
            f"mask is {what}; pass a bool array that broadcasts to [batch, heads, M, N]"
        )
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    sizes = []
    for name, n, asked in zip(_SIZES, array.shape, given):
        if asked is not None and n not in (1, asked) and not (asked == 1 and name in _PLACE_OF):
            raise ValueError(f"mask has shape {array.shape}, which does not match {name}={asked}")
        sizes.append(max(n, asked or 1) if n else 0)
    text = _expression(f"array[{optional_inputs.indices(array.shape)}]")
    return BlockMask(text, {"array": array}, tuple(sizes), backend)  # type: ignore[arg-type]


def rename_in_text(text: str, names: Mapping[str, str]) -> str:
    """Replaces names in an expression with other names or expressions."""
    trees = {name: ast.parse(x, mode="eval").body for name, x in names.items()}

    class Renaming(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return trees.get(node.id, node)

    return ast.unparse(Renaming().visit(ast.parse(text, mode="eval")))


def _expression(text: str) -> Expression:
    return Expression.of("mask_mod", text)


def _seen(name: str, given: Any) -> Any:
    """Views another library's array as a NumPy or CuPy array."""
    if isinstance(given, np.ndarray) or hasattr(given, "get") or not hasattr(given, "shape"):
        return given
    return given if isinstance(given, np.generic) else adopt("auto", **{name: given})[1][0]


def _copied(name: str, given: Any) -> Any:
    """Copies an array within host memory or within GPU memory; returns numbers unchanged."""
    seen = _seen(name, given)
    if not is_array(seen):
        return seen
    if not seen.shape:
        return seen.item()
    if hasattr(seen, "get"):
        return seen.copy(order="C")
    array = np.array(seen, order="C")
    array.flags.writeable = False
    return array


def _on_host(array: Any) -> Any:
    return array.get() if hasattr(array, "get") else array


def _is_host(backend: Backend) -> bool:
    return backend.owns(np.empty(0))


def _place(backend: Backend, on_host: bool) -> Any:
    return "host" if on_host else (backend.name, backend.device)


def _write(array: Any, given: Any) -> None:
    """Copies elements between NumPy or CuPy arrays, in any combination."""
    if isinstance(array, np.ndarray):
        array[...] = _on_host(given)
    elif isinstance(given, np.ndarray):
        array.set(np.ascontiguousarray(given))
    elif given.flags.c_contiguous:  # a memcpy, since CuPy cannot compile kernels during a capture
        array.data.copy_from_device_async(given.data, array.nbytes)
    else:
        array[...] = given


class _HostMap:
    """A tile map in host memory, like ``DeviceMap`` on a device."""

    def __init__(self, states: Callable[[], np.ndarray], name: str, alone: bool) -> None:
        self._find, self._by_keys, self._alone = states, name == KEY_TILES, alone
        self.array = self._found()

    def make(self) -> None:
        self.array[...] = self._found()

    def _found(self) -> np.ndarray:
        states = self._find()
        return map_of(states if self._by_keys else states.swapaxes(2, 3), self._alone)
