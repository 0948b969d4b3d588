"""Prefixes in decoding: keys that several sequences share, and that are read once for all of them.

The queries of all sequences that share a prefix are the rows of one problem, whose keys are the
prefix. Its result is merged with the attention to the keys of each sequence. The positions of
queries are not part of either problem, so expressions read them from arrays.

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

# The names of arrays that expressions read. For each sequence: the number of all of its keys, of
# keys in its prefixes, and of keys before a prefix. SLOPES are the slopes of ALiBi.
ENDS, KEYS, FIRST, SLOPES = "prefix_ends", "prefix_keys", "prefix_first", "prefix_slopes"
_OF_CACHE = "lengths", "pages"
# Options that expressions replace, or that do not matter for a prefix.
_PLAIN: dict[str, Any] = {"causal": None, "window": NO_WINDOW, "score_mod": None, "mask_mod": None}


@dataclass(frozen=True)
class Part:
    """A call for one prefix: its queries as rows [groups, heads, rows, d], and its keys."""

    q: Any
    k: Any
    v: Any
    options: AttentionOptions
    given: Mapping[str, Any]  # optional inputs of expressions and kernels


@dataclass(frozen=True)
class _Prefix:
    """The keys and values that each group of sequences shares.

    k, v: [groups or pages, kv_heads, rows, columns]. cache: the KVCache that they belong to, or
    None if all rows of k and v are keys.
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
        """All of its arrays, by their names in error messages."""
        more = {} if self.cache is None else {x: getattr(self.cache, x) for x in _OF_CACHE}
        own = {"k": self.k, "v": self.v, **more}
        return {f"{self.name}.{name}": x for name, x in own.items() if x is not None}


class Prefixes:
    """The checked prefixes of a call, from the outermost to the innermost."""

    def __init__(
        self, backend: str | Backend, given: Any, q: Any, cache: KVCache, *, look: bool
    ) -> None:
        """look: whether to check lengths and pages that lie in GPU memory, too."""
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
        """The number of keys in all prefixes of each sequence: int32 [batch], beside lengths."""
        return self._counted(self._levels)

    def own(
        self, options: AttentionOptions, captured: Mapping[str, Any] | None
    ) -> tuple[AttentionOptions, dict[str, Any]]:
        """Returns the options of the call for the keys of the cache, and its captured arrays.

        Prefixes shift queries and keys alike, which leaves windows and ALiBi unchanged, but
        expressions may name positions.
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
        """Makes the calls for the prefixes. new: the number of tokens that are also appended."""
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
        """Repeats the copies of queries, which may have been rotated in the meantime."""
        with self._backend.working_on(self._q):
            for rows, queries in self._copies:
                rows[...] = queries

    def of_sequences(
        self, results: Sequence[tuple[Any, Any]], tokens: int
    ) -> list[tuple[Any, Any]]:
        """Converts out and lse of all calls to [batch, heads, tokens, ..].

        The last result is that of the keys of the cache, which has this form already.
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
        """Splits the rows of the sequences that share a prefix: [batch, heads, tokens, ..]."""
        together = self._together(prefix)
        groups, heads, _, *columns = array.shape
        split = array.reshape(groups, heads, together, tokens, *columns).swapaxes(1, 2)
        return split.reshape(groups * together, heads, tokens, *columns)

    def _keep(self, *arrays: Any) -> None:
        """Keeps arrays alive that a captured graph reads or writes when it is launched."""
        if self._backend.stream and self._backend.is_capturing:
            of_graphs.append(arrays)

    def _together(self, prefix: _Prefix) -> int:
        """Returns the number of sequences that share a prefix."""
        return self._cache.batch // prefix.groups

    def _rows_of(self, q: Any, prefix: _Prefix) -> Any:
        """Joins queries [batch, heads, tokens, d] of the sequences that share a prefix to rows."""
        _, heads, tokens, d = q.shape
        groups, together = prefix.groups, self._together(prefix)
        split = q.reshape(groups, together, heads, tokens, d).swapaxes(1, 2)
        rows = split.reshape(groups, heads, together * tokens, d)
        if address_of(rows) != address_of(q):
            self._copies.append((rows.reshape(split.shape), split))
        self._keep(rows)
        return rows

    def _counted(self, levels: Sequence[_Prefix], *, own: bool = False, more: int = 0) -> Any:
        """Counts the keys of each sequence in these prefixes.

        With ``own`` the count includes the keys of the cache and ``more`` new ones.
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
        """Adds the arrays of prefixes that expressions name to the caller's captured arrays."""
        if captured is not None and not isinstance(captured, Mapping):
            raise TypeError(f'captured is {described(captured)}; give {{"name": array}}')
        if taken := [x for x in (ENDS, KEYS, FIRST, SLOPES) if x in (captured or {})]:
            raise ValueError(
                f"captured has {taken[0]!r}, a name that prefixes use in expressions; rename it"
            )
        named = {name for text in texts for name in text.captured}
        return {**(captured or {}), **{x: array() for x, array in own.items() if x in named}}

    def _check_contents(self, prefix: _Prefix, look: bool) -> None:
        """Raises ValueError for lengths and pages of a prefix that are out of range."""
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
    """Adds the name of a prefix to error messages."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise type(error)(f"{name}: {error}") from None


def _levels(given: Any) -> Iterator[_Prefix]:
    """Reads the argument ``prefix``: one prefix or a list of prefixes."""
    several = isinstance(given, list)
    if several and not given:
        raise ValueError("prefix is an empty list; give at least one prefix, or leave it out")
    for i, x in enumerate(given if several else [given]):
        name = f"prefix[{i}]" if several else "prefix"
        if isinstance(x, KVCache):
            yield _Prefix(name, x.rows_of(x.k), x.rows_of(x.v), x)
            continue
        if isinstance(x, tuple) and x and isinstance(x[0], tuple | KVCache):
            raise TypeError(
                f"{name} is a tuple of prefixes; several prefixes are a list: [(k, v), ...]"
            )
        if not isinstance(x, tuple) or len(x) != 2:
            raise TypeError(
                f"{name} is {described(x)}; give a cupyfa.KVCache, a tuple (k, v) of arrays "
                "[1, kv_heads, keys, columns], or a list of such prefixes"
            )
        k, v = (seen(f"{name}.{half}", array) for half, array in zip("kv", x))
        with _named(name):
            check_keys(k, v, "bhsd")
        yield _Prefix(name, k, v)


def _check(prefix: _Prefix, cache: KVCache, outer: int) -> None:
    """Raises ValueError or TypeError for a prefix whose form does not fit the cache."""
    name, groups, batch = prefix.name, prefix.groups, cache.batch
    if groups < 1 or batch % groups or groups % outer:
        of_outer = f" and is a multiple of the {outer} of the prefix before it" * (outer > 1)
        raise ValueError(
            f"{name} has {groups} sequences, and the cache {batch}; each is shared by the same "
            f"number of consecutive sequences: give a number that divides {batch}{of_outer}"
        )
    for what, mine, its in (("k", prefix.k, cache.k), ("v", prefix.v, cache.v)):
        found, wanted = (x.shape[1::2] for x in (mine, cache.rows_of(its)))
        if found != wanted:
            raise ValueError(
                f"{name} has {what} of {found[0]} heads and {found[1]} columns, and the cache of "
                f"{wanted[0]} and {wanted[1]}; both must have the same"
            )
        if mine.dtype != its.dtype:
            raise TypeError(f"{name} is {mine.dtype} and the cache {its.dtype}; convert one")


# Expressions


def _places(tokens: int, together: int, *, is_first: bool) -> dict[str, str]:
    """Returns index expressions for the call of a prefix, whose rows join several sequences."""
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
    """Makes the expressions of a prefix's call, which include ALiBi, windows and masks.

    hides_later: whether the prefix may have keys after a query, as when a call has several queries
    and a sequence has fewer keys in the cache.
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
