"""Shared prefixes in decoding: keys that several sequences share are read once (cascade attention).

Each prefix gets a separate call, whose rows are the queries of all sequences that share the
prefix. The result is merged with the attention over each sequence's own keys. In such a call the
row index does not determine a query's position, so expressions read positions from arrays.

A captured graph writes to fixed addresses, so all arrays are kept alive and written in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from cupyfa.arrays.block_mask import rename_in_text
from cupyfa.arrays.kv_cache import KVCache, Step, check_keys, scales_of, seen
from cupyfa.errors import described
from cupyfa.problem.optional_inputs import PADDED, PAGE_TABLE
from cupyfa.problem.options import NO_WINDOW, AttentionOptions
from cupyfa.runtime.arrays import address_of, require_one_device
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.choose_backend import adopt
from cupyfa.runtime.workspace import of_graphs
from cupyfa.score.expressions import Expression

# Names of arrays that expressions read. ENDS, KEYS and FIRST hold, per sequence, the total number
# of keys, the number of prefix keys, and the number of keys before a prefix. SLOPES holds
# alibi_slopes.
ENDS, KEYS, FIRST, SLOPES = "prefix_ends", "prefix_keys", "prefix_first", "prefix_slopes"
_OF_CACHE = "lengths", "pages"
# Options that expressions replace or that have no effect on a prefix.
_PLAIN: dict[str, Any] = {"causal": None, "window": NO_WINDOW, "score_mod": None, "mask_mod": None}


@dataclass(frozen=True)
class Part:
    """The arguments of one prefix's call. q: [groups, heads, rows, d]."""

    q: Any
    k: Any
    v: Any
    options: AttentionOptions
    given: Mapping[str, Any]  # optional inputs by name


@dataclass(frozen=True)
class _Prefix:
    """Keys and values, each shared by a group of consecutive sequences.

    k, v: [groups or pages, kv_heads, rows, columns]. cache: the KVCache that holds k and v, or None
    if the prefix is a tuple of arrays.
    """

    name: str
    k: Any
    v: Any
    cache: KVCache | None = None

    @property
    def groups(self) -> int:
        return len(self.k) if self.cache is None else self.cache.batch

    @property
    def arrays(self) -> dict[str, Any]:
        """Maps names for error messages to the prefix's arrays."""
        more = {} if self.cache is None else {x: getattr(self.cache, x) for x in _OF_CACHE}
        own = {"k": self.k, "v": self.v, **more}
        return {f"{self.name}.{name}": x for name, x in own.items() if x is not None}


class Prefixes:
    """The checked prefixes of a call, from the outermost to the innermost."""

    def __init__(
        self, backend: str | Backend, given: Any, q: Any, cache: KVCache, *, look: bool
    ) -> None:
        """Checks the prefixes; with ``look`` also the lengths and pages in GPU memory."""
        self._cache, self._levels = cache, tuple(_levels(given))
        self._copies: list[tuple[Any, Any]] = []
        outer, named = 1, {"q": q, "lengths": cache.lengths}
        for x in self._levels:
            _check(x, cache, outer)
            outer, named = x.groups, {**named, **x.arrays}
        self._backend, (self._q, *_) = adopt(backend, **named)
        require_one_device(self._backend, named)
        for x in self._levels:
            self._check_contents(x, look)

    @cached_property
    def keys(self) -> Any:
        """The number of prefix keys per sequence: int32 [batch], in the same memory as lengths."""
        return self._counted(self._levels)

    def own(
        self, options: AttentionOptions, captured: Mapping[str, Any] | None
    ) -> tuple[AttentionOptions, dict[str, Any]]:
        """Returns options and captured arrays for the call on the keys in the cache.

        A prefix shifts the positions of queries and keys by the same amount, which does not affect
        windows and ALiBi. Expressions that use positions are rewritten to add this shift.
        """
        names = {x: f"{x} + {KEYS}[batch]" for x in ("key", "position", "keys")}
        texts: dict[str, Any] = {
            name: Expression.of(name, rename_in_text(text.text, names))
            for name in ("score_mod", "mask_mod")
            if (text := getattr(options, name)) is not None
        }
        read = self._read(texts.values(), {KEYS: lambda: self.keys}, captured)
        return replace(options, **texts), read

    def parts(
        self,
        step: Step,
        options: AttentionOptions,
        captured: Mapping[str, Any] | None,
        slopes: Any,
        new: int,
    ) -> list[Part]:
        """Makes one call per prefix. new: the number of tokens that this step appends."""
        tokens, made = step.q.shape[2], []
        for i, x in enumerate(self._levels):
            texts = _texts(
                options,
                _places(max(tokens, 1), self._together(x), is_first=i == 0),
                axes_of_slopes=0 if slopes is None else len(slopes.shape),
                hides_later=new < tokens > 1,
            )
            own: dict[str, Callable[[], Any]] = {
                FIRST: partial(self._counted, self._levels[:i]),
                ENDS: partial(self._counted, self._levels, own=True, more=new),
                SLOPES: lambda: slopes,
            }
            given: dict[str, Any] = {"captured": self._read(texts.values(), own, captured)}
            if x.cache is not None:
                given |= {PADDED[1]: x.cache.lengths, PAGE_TABLE: x.cache.pages}
            given |= scales_of(step.backend, x.cache, x.k, step.q)
            k, v = map(step.backend.upload, (x.k, x.v)) if step.is_moved else (x.k, x.v)
            changed = {**_PLAIN, **texts}
            made.append(Part(self._rows_of(step.q, x), k, v, replace(options, **changed), given))
        return made

    def take_queries(self) -> None:
        """Copies the queries to the rows of the prefix calls, after the step has rotated them."""
        with self._backend.working_on(self._q):
            for rows, queries in self._copies:
                rows[...] = queries

    def of_sequences(
        self, results: Sequence[tuple[Any, Any]], tokens: int
    ) -> list[tuple[Any, Any]]:
        """Reshapes out and lse of the prefix calls to [batch, heads, tokens, ..].

        The last result, for the keys in the cache, already has this shape.
        """
        *of_prefixes, last = results
        self._keep(*last)
        made = []
        for x, result in zip(self._levels, of_prefixes):
            out, lse = (self._split(x, array, tokens) for array in result)
            self._keep(*result, out, lse)
            made.append((out, lse))
        return [*made, last]

    def _split(self, prefix: _Prefix, array: Any, tokens: int) -> Any:
        """Splits the rows of a prefix call by sequence: returns [batch, heads, tokens, ..]."""
        together = self._together(prefix)
        groups, heads, _, *columns = array.shape
        split = array.reshape(groups, heads, together, tokens, *columns).swapaxes(1, 2)
        return split.reshape(groups * together, heads, tokens, *columns)

    def _keep(self, *arrays: Any) -> None:
        """During a graph capture, keeps arrays alive that the graph will read or write."""
        if self._backend.stream and self._backend.is_capturing:
            of_graphs.append(arrays)

    def _together(self, prefix: _Prefix) -> int:
        """Returns the number of consecutive sequences that share one group of the prefix."""
        return self._cache.batch // prefix.groups

    def _rows_of(self, q: Any, prefix: _Prefix) -> Any:
        """Joins the queries of sequences that share a prefix: returns [groups, heads, rows, d]."""
        _, heads, tokens, d = q.shape
        groups, together = prefix.groups, self._together(prefix)
        split = q.reshape(groups, together, heads, tokens, d).swapaxes(1, 2)
        rows = split.reshape(groups, heads, together * tokens, d)
        if address_of(rows) != address_of(q):
            self._copies.append((rows.reshape(split.shape), split))
        self._keep(rows)
        return rows

    def _counted(self, levels: Sequence[_Prefix], *, own: bool = False, more: int = 0) -> Any:
        """Counts each sequence's keys in the given prefixes.

        own: whether to also count the sequence's keys in the cache and ``more`` new keys.
        """
        with self._backend.working_on(self._q):
            counted = np.zeros_like(self._cache.lengths)
            for x in levels:
                by_prefix = counted.reshape(x.groups, self._together(x))
                by_prefix += x.k.shape[2] if x.cache is None else x.cache.lengths[:, None]
            if own:
                counted += self._cache.lengths
                counted += more
        self._keep(counted)
        return counted

    def _read(
        self,
        texts: Iterable[Expression],
        own: Mapping[str, Callable[[], Any]],
        captured: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """Returns the caller's captured arrays plus the prefix arrays that expressions read."""
        if captured is not None and not isinstance(captured, Mapping):
            raise TypeError(f'captured is {described(captured)}; pass a dict {{"name": array}}')
        if taken := [x for x in (ENDS, KEYS, FIRST, SLOPES) if x in (captured or {})]:
            raise ValueError(
                f"captured contains {taken[0]!r}, which is reserved in calls with a prefix; rename "
                "this entry"
            )
        named = {name for text in texts for name in text.captured}
        return {**(captured or {}), **{x: array() for x, array in own.items() if x in named}}

    def _check_contents(self, prefix: _Prefix, look: bool) -> None:
        """Raises ValueError if a prefix has lengths or pages that are out of range."""
        cache = prefix.cache
        if cache is None or not (look or isinstance(cache.lengths, np.ndarray)):
            return
        lengths, pages = (
            x if x is None or isinstance(x, np.ndarray) else self._backend.download(x)
            for x in (cache.lengths, cache.pages)
        )
        with _named(prefix.name):
            cache.check_numbers(lengths, pages, 0)  # type: ignore[arg-type]  # lengths are not None


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError) as error:
        raise type(error)(f"{name}: {error}") from None


def _levels(given: Any) -> Iterator[_Prefix]:
    """Reads the argument ``prefix``: one prefix or a list of prefixes."""
    several = isinstance(given, list)
    if several and not given:
        raise ValueError("prefix is an empty list; pass at least one prefix, or leave prefix out")
    for i, x in enumerate(given if several else [given]):
        name = f"prefix[{i}]" if several else "prefix"
        if isinstance(x, KVCache):
            yield _Prefix(name, x.rows_of(x.k), x.rows_of(x.v), x)
            continue
        if isinstance(x, tuple) and x and isinstance(x[0], tuple | KVCache):
            raise TypeError(f"{name} is a tuple of prefixes; pass a list: [(k, v), ...]")
        if not isinstance(x, tuple) or len(x) != 2:
            raise TypeError(
                f"{name} is {described(x)}; pass a cupyfa.KVCache, a tuple (k, v) of arrays "
                "[1, kv_heads, keys, columns], or a list of such prefixes"
            )
        k, v = (seen(f"{name}.{half}", array) for half, array in zip("kv", x))
        with _named(name):
            check_keys(k, v, "bhsd")
        yield _Prefix(name, k, v)


def _check(prefix: _Prefix, cache: KVCache, outer: int) -> None:
    """Raises ValueError or TypeError if a prefix's batch, k or v does not match the cache's."""
    name, groups, batch = prefix.name, prefix.groups, cache.batch
    if groups < 1 or batch % groups or groups % outer:
        of_outer = f" and be a multiple of the previous prefix's {outer}" * (outer > 1)
        raise ValueError(
            f"{name} has {groups} sequences, but the cache has {batch}; the number of prefix "
            f"sequences must divide {batch}{of_outer}, because each of them is shared by the same "
            "number of consecutive sequences in the cache"
        )
    for what, mine, its in (("k", prefix.k, cache.k), ("v", prefix.v, cache.v)):
        found, wanted = (x.shape[1::2] for x in (mine, cache.rows_of(its)))
        if found != wanted:
            raise ValueError(
                f"{name}.{what} has {found[0]} heads and {found[1]} columns, but cache.{what} has "
                f"{wanted[0]} heads and {wanted[1]} columns; these numbers must be equal"
            )
        if mine.dtype != its.dtype:
            raise TypeError(f"{name} is {mine.dtype}, but the cache is {its.dtype}; convert {name}")


# Expressions


def _places(tokens: int, together: int, *, is_first: bool) -> dict[str, str]:
    """Maps index names to expressions for a prefix call, whose rows belong to several sequences."""
    sequence, token = f"batch * {together} + query // {tokens}", f"query % {tokens}"
    return {
        "batch": sequence,
        "query": token,
        "queries": f"{tokens}",
        "key": "key" if is_first else f"key + {FIRST}[batch * {together}]",
        "position": f"{ENDS}[{sequence}] - {tokens} + {token}",
        "keys": f"{ENDS}[{sequence}]",
    }


def _texts(
    options: AttentionOptions,
    places: Mapping[str, str],
    *,
    axes_of_slopes: int,
    hides_later: bool,
) -> dict[str, Expression]:
    """Makes a prefix call's score_mod and mask_mod, which include ALiBi, window and mask.

    hides_later: whether to mask keys at later positions than the query. A prefix can contain such
    keys if a call has more queries than the sequence has keys in the cache.
    """
    score = None if options.score_mod is None else options.score_mod.text
    if axes_of_slopes:
        slope = f"{SLOPES}[{'head' if axes_of_slopes == 1 else 'batch, head'}]"
        alibi = f"score - {slope} * abs(position - key)"
        score = alibi if score is None else rename_in_text(alibi, {"score": score})
    masks = []
    if options.left is not None:
        masks.append(f"position - key <= {options.left}")
    if hides_later:
        masks.append("key <= position")
    if options.mask_mod is not None:
        masks.append(options.mask_mod.text)
    mask = " and ".join(f"({x})" for x in masks) or None
    return {
        name: Expression.of(name, rename_in_text(text, places))
        for name, text in (("score_mod", score), ("mask_mod", mask))
        if text is not None
    }
