"""Sequence lengths of a ragged batch, and their text form: "349,263,0,115", "5,0:7,3"."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from cupyfa.errors import described

MOST_ROWS = 2**31 - 2**16  # limit on the total number of rows
_SHOWN = 8  # longer lists of sequences are abbreviated in output
_OF_LENGTHS = (
    "use whole numbers, such as 349,263,0,115; 7/9 for a sequence with 9 rows and 7 valid ones, "
    "_3 at an end for 3 rows outside of sequences, and 5,0:7,3 if queries and keys differ"
)
_LENGTHS = r"(?:_(\d+),)?((?:\d+(?:/\d+)?,)+)(?:_(\d+),)?"


@dataclass(frozen=True)
class Lengths:
    """The lengths of the sequences in packed queries, or in packed keys and values.

    rows: the number of rows of each sequence, from one offset to the next. used: the number of
    valid rows at the start of each sequence; None if all rows are valid. before, after: the number
    of rows before the first sequence and after the last one. For example "_2,5,3/9,_4" means 2 rows
    before the first sequence, a sequence of 5 rows, a sequence of 9 rows of which 3 are valid, and
    4 rows after it.
    """

    rows: tuple[int, ...]
    used: tuple[int, ...] | None = None
    before: int = 0
    after: int = 0

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError(f"the list of lengths is empty; {_OF_LENGTHS}")
        if self.total > MOST_ROWS:
            raise ValueError(
                f"the total number of rows is {self.total:,}; the limit is {MOST_ROWS:,}"
            )
        for i, (count, rows) in enumerate(zip(self.counts, self.rows)):
            if count > rows:
                raise ValueError(
                    f"sequence {i} has {rows} rows, but {count} are marked as valid; at most "
                    f"{rows} can be valid"
                )

    @classmethod
    def of(cls, given: Any) -> Lengths:
        """Reads lengths from a string or from integers. Raises ValueError for anything else."""
        if isinstance(given, Lengths):
            return given
        is_list = isinstance(given, list | tuple | np.ndarray)
        text = ",".join(map(str, given)) if is_list else given
        if not isinstance(text, str) or not (found := re.fullmatch(_LENGTHS, f"{text},")):
            raise ValueError(f"{described(given)} is not a list of lengths; {_OF_LENGTHS}")
        before, middle, after = found.groups()
        each = [x.split("/") for x in middle.rstrip(",").split(",")]
        used = tuple(int(x[0]) for x in each) if any(len(x) > 1 for x in each) else None
        return cls(tuple(int(x[-1]) for x in each), used, int(before or 0), int(after or 0))

    def __str__(self) -> str:
        each = [str(x) for x in self.rows]
        if self.used is not None:
            each = [f"{n}/{x}" for n, x in zip(self.used, each)]
        ends = ([f"_{x}"] if x else [] for x in (self.before, self.after))
        first, last = ends
        return ",".join([*first, *each, *last])

    @property
    def short(self) -> str:
        """The lengths as text; more than 8 sequences are summarized, as in "12 of 3-40" (rows)."""
        if len(self.rows) <= _SHOWN:
            return str(self)
        least, most = min(self.counts), max(self.counts)
        return f"{len(self.rows)} of {least}{f'-{most}' if most > least else ''}"

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of valid rows of each sequence."""
        return self.rows if self.used is None else self.used

    @cached_property
    def total(self) -> int:
        """Number of rows of the packed array."""
        return self.before + sum(self.rows) + self.after

    @property
    def offsets(self) -> np.ndarray:
        """First row of each sequence, followed by the end of the last sequence."""
        return np.array([*accumulate(self.rows, initial=self.before)], np.int32)

    def is_in_a_sequence(self) -> np.ndarray:
        """Returns, for each row of the packed array, whether it is a valid row of a sequence."""
        found = np.zeros(self.total, bool)
        for start, count in zip(self.offsets, self.counts):
            found[start : start + count] = True
        return found

    def _changed(self, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Lengths:
        return replace(self, rows=change(self.rows), used=self.used and change(self.used))

    def only(self, numbers: Collection[int]) -> Lengths:
        """Returns the lengths of the sequences with these indices only."""
        return self._changed(lambda x: tuple(n for i, n in enumerate(x) if i in numbers))

    def with_rows(self, number: int, rows: int) -> Lengths:
        """Returns the lengths with sequence ``number`` resized to ``rows`` rows, all valid."""
        return self._changed(lambda x: (*x[:number], rows, *x[number + 1 :]))

    @property
    def twice(self) -> Lengths:
        """Lengths of a batch in which all sequences occur twice."""
        return self._changed(lambda x: 2 * x)

    def first(self, count: int | None) -> Lengths:
        """Returns the lengths of the first ``count`` sequences; None keeps all sequences."""
        return self._changed(lambda x: x[:count])

    def limited(self, most: int) -> Lengths:
        """Limits every sequence, ``before`` and ``after`` to at most ``most`` rows each."""
        fewer = self._changed(lambda x: tuple(min(n, most) for n in x))
        return replace(fewer, before=min(self.before, most), after=min(self.after, most))

    def cut(self, total: int) -> Lengths:
        """Truncates the packed array to ``total`` rows; sequences past the end become empty."""
        ends = [min(int(x), total) for x in self.offsets]
        rows = tuple(b - a for a, b in pairwise(ends))
        used = self.used and tuple(map(min, self.used, rows))
        return Lengths(rows, used, ends[0], max(min(total, self.total) - ends[-1], 0))


Packed = tuple[Lengths, Lengths]  # lengths of queries and of keys


@dataclass(frozen=True)
class Rows:
    """Describes how rows are stored in a problem's arrays; the default is a dense batch.

    lengths: the lengths of queries and keys in a ragged batch, if known. cached: the number of
    cached keys of each batch element, if known. Both affect the amount of work and random inputs,
    but not compiled code. pages: the number of pages in k [pages, kv_heads, page_size, d] and v; 0
    without a paged cache.
    """

    lengths: Packed | None = None
    pages: int = 0
    cached: Lengths | None = None

    @property
    def known_lengths(self) -> Packed | None:
        """Lengths of packed sequences or of cached keys; None if unknown."""
        return self.lengths if self.cached is None else (self.cached, self.cached)


DENSE = Rows()


def pairs_of(q: Lengths, k: Lengths) -> Iterable[tuple[int, int]]:
    """Returns (number of valid queries, number of valid keys) for each sequence."""
    return zip(q.counts, k.counts)


def lengths_of(given: Any) -> Packed:
    """Parses lengths of queries and keys: one list for both, a tuple of two lists, or "5,0:7,3".

    Raises ValueError for invalid lengths and for different numbers of sequences.
    """
    parts = given.split(":") if isinstance(given, str) else [given]
    if isinstance(given, tuple) and any(isinstance(x, str | list | tuple | Lengths) for x in given):
        parts = list(given)
    if len(parts) > 2:
        raise ValueError(f"lengths is {described(given)}; {_OF_LENGTHS}")
    q, *others = map(Lengths.of, parts)
    k = others[0] if others else q
    if len(q.rows) != len(k.rows):
        raise ValueError(
            f"lengths has {len(q.rows)} sequences for queries, but {len(k.rows)} for keys; both "
            "must have the same number of sequences"
        )
    return q, k


def shown_lengths(lengths: Packed, *, short: bool = False) -> str:
    """Formats the lengths of queries and keys as text; ``short`` abbreviates long lists."""
    q, k = (x.short if short else str(x) for x in lengths)
    return q if lengths[0] == lengths[1] else f"{q}:{k}"
