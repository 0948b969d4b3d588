"""The forms of arrays that texts read, as texts: "1hmn", "f16[1hmn]", "i32[M]"; also lengths.

A command line and a plan have no arrays, so they name an array's form: its dtype, and its shape by
the sizes of the problem. A problem of other sizes has arrays of the same form. The lengths of a
ragged batch are texts too: "349,263,0,115", "5,0:7,3".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from cupyfa.errors import described
from cupyfa.problem.dtypes import DTYPES as FLOATS, INPUTS
from cupyfa.problem.optional_inputs import (
    ALIBI,
    BIAS,
    DESCALES,
    DLSE,
    MASK,
    OWN_ARRAYS,
    PADDED,
    SEEDS,
    SINK,
    STARTS,
    USED,
    Operand,
    is_array,
    of_value,
    operand,
)
from cupyfa.problem.options import OptionKeywords
from cupyfa.score.expressions import Expression

CAPTURED, WRT, BLOCK_MASK = "captured", "wrt", "block_mask"
LENGTHS_OF = "lengths"  # of the sequences of a ragged batch
PAGE_SIZE = "page_size"  # keys of a page, where batch elements have lengths and pages
QKV = ("q", "k", "v")  # which wrt names too, and not captured arrays of these names
# Arguments that give forms, or say what is done with the arrays.
NAMES = (*OWN_ARRAYS, CAPTURED, WRT, BLOCK_MASK, DLSE, LENGTHS_OF, PAGE_SIZE)
USUAL = {ALIBI: "h", BIAS: "1hmn", MASK: "11mn", SINK: "h"}  # shapes if nothing is said about them
DTYPES = {
    **{"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "bool": "bool"},
    **{f"{kind[0]}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
}
Sizes = tuple[int, int, int, int]  # batch, heads, M and N
_AXES = ("batch", "heads", "M", "N")
_LETTERS = "bhmn"
_SHORT = {long: short for short, long in DTYPES.items()}
_PLACES = dict(zip(("batch", "head", "query", "key"), _AXES))
_SHAPES = {
    **{ALIBI: "h or bh", SINK: "h or bh"},
    **{BIAS: "1hmn, b1mn or 11mn", MASK: "11mn, b11n or bhmn"},
}
MOST_ROWS = 2**31 - 2**16  # of all sequences together
_SHOWN = 8  # longer lists have a short form in lines and tables
_OF_PACKED = (*STARTS, *USED)
_OF_LENGTHS = (
    "give whole numbers, as 349,263,0,115; 7/9 where 7 of a sequence's 9 rows count, _3 at an end "
    "for 3 rows of no sequence, and 5,0:7,3 where keys are not as many as queries"
)
_LENGTHS = re.compile(r"(?:_(\d+),)?((?:\d+(?:/\d+)?,)+)(?:_(\d+),)?")


class Keywords(OptionKeywords, total=False):
    """The options and forms as keyword arguments, for type checkers."""

    alibi_slopes: Any
    bias: Any
    mask: Any
    sink: Any
    captured: Mapping[str, Any] | None
    wrt: str | Sequence[str] | None
    block_mask: bool | None
    dlse: bool | None
    lengths: Any
    page_size: int | None


def operands(given: Mapping[str, Any], sizes: Sequence[int], dtype: str) -> tuple[Operand, ...]:
    """The arrays and numbers of these forms, in a problem of these sizes and this dtype.

    given: by the names of NAMES. A form is a text, a shape, an array, or True for the usual shape;
        of ``captured`` a mapping of such, or of numbers; of SEEDS an array, or "u64[1]", of PADDED
        "i32[batch]", of DESCALES a shape or an array, of those of packed rows a shape. A bias has
        by default the dtype of results, other floats have float32. ``dlse`` is whether there is a
        gradient of lse. ``wrt`` are names, as "q,bias": see ``differentiated``.

    Raises ValueError and TypeError for what is no form.
    """
    if unknown := ", ".join(given.keys() - {*NAMES, *SEEDS, *PADDED, *_OF_PACKED, *DESCALES}):
        raise TypeError(f"there is no array {unknown}; there are {', '.join(NAMES)}")
    named = dict(zip(_AXES, sizes))
    found = [
        _own(name, form, named, dtype)
        for name in OWN_ARRAYS
        if (form := given.get(name)) is not None and form is not False
    ]
    if given.get(DLSE):
        batch = 1 if STARTS[0] in given else sizes[0]
        found.append(Operand(DLSE, INPUTS[dtype].sums.name, (batch, *sizes[1:3])))
    found += [_length(x, given[x], named) for x in PADDED if given.get(x) is not None]
    found += [Operand(name, "int32", given[name]) for name in _OF_PACKED if name in given]
    found += [_of_shape(x, given[x], "float32") for x in DESCALES if given.get(x) is not None]
    found += [_seed(name, given[name]) for name in SEEDS if name in given]
    captured = given.get(CAPTURED) or {}
    if not isinstance(captured, Mapping):
        raise TypeError(f'captured is {described(captured)}; give {{"name": form}}')
    more = [_captured(name, form, named) for name, form in captured.items()]
    every = (*found, *sorted(more, key=lambda x: not x.is_array))  # numbers last, as in calls
    return differentiated(every, given.get(WRT) or ())


def of_heads(given: Mapping[str, Any], batch: int, kv_heads: int) -> dict[str, Any]:
    """The same forms, with the usual shape for descales that are True."""
    usual = {x: (batch, kv_heads) for x in DESCALES if given.get(x) is True}
    return {**given, **usual}


def differentiated(found: Iterable[Operand], wrt: str | Sequence[str]) -> tuple[Operand, ...]:
    """The operands of which those that ``wrt`` names have gradients, and no others.

    It may name q, k and v, too, whose gradients kernels compute in any case. Raises ValueError for
    other names.
    """
    names, every = names_of(wrt), tuple(found)
    refuse_without_gradients(names, {x.name: x.dtype for x in every if x.is_array})
    return tuple(replace(x, gradient=x.name in names and x.name not in QKV) for x in every)


def names_of(wrt: str | Iterable[str]) -> tuple[str, ...]:
    """The names that ``wrt`` gives, as "q,bias" or each by itself."""
    return tuple(x.strip() for x in wrt.split(",")) if isinstance(wrt, str) else tuple(wrt)


def refuse_without_gradients(names: Iterable[str], dtypes: Mapping[str, str]) -> None:
    """Raises ValueError for names of ``wrt`` that are no arrays of floats; dtypes: of a call's."""
    able = (*QKV, *(x for x in dtypes if dtypes[x] in FLOATS and x != DLSE))
    unable = [str(x) for x in names if x not in able]
    for name in unable:
        if name in dtypes and name != DLSE:
            raise ValueError(
                f"wrt names {name}, whose dtype is {dtypes[name]}; only arrays of floats have "
                "gradients, so leave it out"
            )
        if name in OWN_ARRAYS:
            raise ValueError(
                f"wrt names {name}, and no {name} is given; give {name}=, or leave it out of wrt"
            )
    if unable:
        raise ValueError(
            f"wrt names {', '.join(unable)}; of these arrays it can name {', '.join(able)}; a "
            "number that texts read has a gradient as an array of one element, "
            f"{unable[0]}[0] in the text"
        )


def names_of_gradients(found: Iterable[Operand]) -> str:
    """The value of ``wrt`` that gives the gradients of these operands; empty if there are none."""
    return ",".join(x.name for x in found if x.gradient)


def _own(name: str, form: Any, named: Mapping[str, int], dtype: str) -> Operand:
    usual = {BIAS: INPUTS[dtype].usual_result, MASK: "bool"}.get(name, "float32")
    if form is True:
        form = USUAL[name]
    if not isinstance(form, str):
        return _of_shape(name, form, usual)
    short, letters = _parts(form) or ("", form)
    known = DTYPES.get(short, usual if not short else "")
    if not known or not letters or set(letters) - set(_LETTERS + "1"):
        raise ValueError(
            f"{name} is {form!r}; give its shape by letters, for example {_SHAPES[name]}, also "
            f"with a dtype, as f32[{USUAL[name]}]"
        )
    by_letter = {"1": 1, **dict(zip(_LETTERS, named.values()))}
    return Operand(name, known, tuple(by_letter[x] for x in letters))


def seeds_in_memory(options: Mapping[str, Any]) -> dict[str, Any]:
    """The seed and the offset of dropout, where options give an array or the form of one."""
    given = {name: options[name] for name in SEEDS if name in options}
    return {name: x for name, x in given.items() if is_array(x) or isinstance(x, str)}


def _seed(name: str, form: Any) -> Operand:
    if not isinstance(form, str):
        return of_value(name, form)
    short, size = _parts(form) or ("", "")
    if short not in DTYPES or short[0] not in "iu" or size != "1":
        raise ValueError(f"{name} is {form!r}; give a whole number, or a form as u64[1] or i32[1]")
    return Operand(name, DTYPES[short], (1,))


def _length(name: str, form: Any, named: Mapping[str, int]) -> Operand:
    if form is True:
        form = (named["batch"],)
    if not isinstance(form, str):
        found = _of_shape(name, form, "int32")
        is_converted = isinstance(form, np.ndarray) and form.dtype.kind in "iu"
        return replace(found, dtype="int32") if is_converted else found
    short, axis = _parts(form) or ("", "")
    size = _size(axis, named)
    if short not in DTYPES or size is None:
        raise ValueError(f"{name} is {form!r}; give its dtype and size, i32[batch]")
    return Operand(name, DTYPES[short], (size,))


def _captured(name: str, form: Any, named: Mapping[str, int]) -> Operand:
    if isinstance(form, str):
        short, axes = _parts(form) or ("", "")
        sizes = [_size(x.strip(), named) for x in axes.split(",")]
        if short not in DTYPES or None in sizes:
            raise ValueError(
                f"captured {name} is {form!r}; give a number, or a dtype ({', '.join(DTYPES)}) and "
                "sizes by name or number, as f32[heads], i32[M] or bool[batch,N]; M|N is the "
                "larger one"
            )
        return replace(operand(name, 0), dtype=DTYPES[short], shape=tuple(sizes), value=None)  # type: ignore[arg-type]
    if isinstance(form, tuple | list):
        return replace(_of_shape(name, form, "float32"), name=operand(name, 0).name)
    return operand(name, form)


def _of_shape(name: str, given: Any, dtype: str) -> Operand:
    """The form of an array, or of one of a shape."""
    if isinstance(given, tuple | list):
        if not all(isinstance(n, int) and n >= 0 for n in given):
            raise ValueError(f"the shape of {name} is {given}; give whole numbers from 0")
        return Operand(name, dtype, _with_four(name, given), given=tuple(given))
    found = of_value(name, given)
    return replace(found, shape=_with_four(name, found.shape), given=found.shape)


def _with_four(name: str, shape: Iterable[int]) -> tuple[int, ...]:
    sizes = tuple(shape)
    return (1,) * (4 - len(sizes)) + sizes if name in (BIAS, MASK) else sizes


def _parts(form: str) -> tuple[str, str] | None:
    """The dtype and what is in brackets."""
    found = re.fullmatch(r"(\w+)\[(.*)\]", form.replace(" ", ""))
    return (found[1], found[2]) if found else None


def _size(axis: str, named: Mapping[str, int]) -> int | None:
    sizes = [int(x) if x.isdecimal() else named.get(x) for x in axis.split("|")]
    return None if None in sizes else max(x for x in sizes if x is not None)


def value_of(text: str) -> str | bool | int | float:
    """A captured value on the command line: a number, or else a form."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def is_form(text: str) -> bool:
    """Whether a word of the command line is, or should be, the form of one of OWN_ARRAYS."""
    return _parts(text) is not None or (bool(text) and not set(text) - set(_LETTERS + "1"))


def shown(found: Iterable[Operand], sizes: Sequence[int]) -> dict[str, str]:
    """The texts of operands by name, which give them again in a problem of these sizes."""
    every = tuple(found)
    wrt = names_of_gradients(every)
    return {x.name: _shown(x, sizes) for x in every} | ({WRT: wrt} if wrt else {})


def _shown(x: Operand, sizes: Sequence[int]) -> str:
    if not x.is_array:
        return str(x.value)
    if x.name == DLSE:
        return ""
    if x.name not in OWN_ARRAYS:
        return f"{_SHORT[x.dtype]}[{','.join(map(str, x.shape))}]"
    axes = tuple(zip(_LETTERS, sizes))
    axes = axes if len(x.shape) == 4 else axes[2 - len(x.shape) : 2]  # of ALiBi slopes
    letters = "".join(
        "1" if n == 1 and len(axes) == 4 else axis for n, (axis, _) in zip(x.shape, axes)
    )
    return letters if x.name == MASK else f"{_SHORT[x.dtype]}[{letters}]"


def command_line(found: Iterable[Operand], sizes: Sequence[int]) -> list[str]:
    """The options of the command line for operands."""
    own = (*OWN_ARRAYS, WRT, DLSE, *SEEDS)
    return [
        f"--{name.replace('_', '-')}" + f"={text}" * bool(text)
        if name in own
        else f"--captured={name}={text}"
        for name, text in shown(found, sizes).items()
    ]


def arguments(found: Iterable[Operand], sizes: Sequence[int]) -> dict[str, Any]:
    """The forms of operands, as ``operands`` takes them, in a problem of these sizes."""
    every = tuple(x for x in found if x.name not in SEEDS)
    texts = shown(every, sizes)
    own: dict[str, Any] = {x: text for x, text in texts.items() if x in (*OWN_ARRAYS, *PADDED, WRT)}
    own |= {DLSE: True} if DLSE in texts else {}
    others = [x for x in every if x.name not in (*OWN_ARRAYS, *PADDED, DLSE)]
    return {**own, CAPTURED: {x.name: texts[x.name] if x.is_array else x.value for x in others}}


def resized(
    found: Iterable[Operand], texts: Iterable[Expression], before: Sizes, after: Sizes
) -> tuple[Operand, ...]:
    """The operands for a problem of other sizes.

    An axis that a text indexes with places alone, as doc[query], gets the larger one of their
    sizes; others stay as they are.
    """
    new, read, found = dict(zip(_AXES, after)), tuple(texts), tuple(found)
    is_packed = any(x.name == STARTS[0] for x in found)
    return tuple(
        replace(x, shape=_own_shape(x, before, after, is_packed))
        if x.name in (*OWN_ARRAYS, DLSE, *PADDED)
        else replace(x, shape=tuple(_fitting(x, axis, read, new) for axis in range(len(x.shape))))
        for x in found
    )


def _own_shape(x: Operand, before: Sizes, after: Sizes, is_packed: bool) -> tuple[int, ...]:
    if x.name == DLSE and is_packed:
        return (1, *after[1:3])
    if x.name in (DLSE, *PADDED):
        return after[: len(x.shape)]
    axes = tuple(zip(before, after))
    axes = axes if len(x.shape) == 4 else axes[2 - len(x.shape) : 2]
    is_bias = len(x.shape) == 4
    return tuple(1 if is_bias and n == 1 != b else a for n, (b, a) in zip(x.shape, axes))


def _fitting(x: Operand, axis: int, texts: Iterable[Expression], new: Mapping[str, int]) -> int:
    indices = [index for text in texts for index in indices_of(text, x.name, axis)]
    places = [i.id for i in indices if isinstance(i, ast.Name) and i.id in _PLACES]
    if not places or len(places) < len(indices):
        return x.shape[axis]
    return max(new[_PLACES[name]] for name in places)


def limits(found: Iterable[Operand], texts: Iterable[Expression]) -> dict[str, int]:
    """The largest sizes, by name, whose places have elements in every array that they index."""
    most: dict[str, int] = {}
    for x in found:
        for axis, n in enumerate(x.shape):
            for text in texts:
                for index in indices_of(text, x.name, axis):
                    if isinstance(index, ast.Name) and index.id in _PLACES:
                        size = _PLACES[index.id]
                        most[size] = min(n, most.get(size, n))
    return most


def indices_of(text: Expression, name: str, axis: int) -> Iterator[ast.expr]:
    """The indices of an array's axis in a text."""
    for node in ast.walk(text.tree):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            every = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if node.value.id == name and axis < len(every):
                yield every[axis]


def largest_index(x: Operand, found: Iterable[Operand], texts: Iterable[Expression]) -> int | None:
    """The largest element that an array may have where it is part of an index; else None."""
    ends = [
        array.shape[axis] - 1
        for text in texts
        for array in found
        for axis in range(len(array.shape))
        for index in indices_of(text, array.name, axis)
        if any(isinstance(node, ast.Name) and node.id == x.name for node in ast.walk(index))
    ]
    return min(ends, default=None)


# Lengths of sequences


@dataclass(frozen=True)
class Lengths:
    """How many rows the sequences have in packed queries, or keys and values.

    rows: of each sequence, from one offset to the next. used: how many of these count, from the
    first on; None where this is not given, and all count. before, after: rows of no sequence at the
    begin and at the end. As text, "_2,5,3/9,_4" has 2 rows of no sequence, then a sequence of 5
    rows, one of 9 of which 3 count, and 4 rows of no sequence.
    """

    rows: tuple[int, ...]
    used: tuple[int, ...] | None = None
    before: int = 0
    after: int = 0

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError(f"there is no sequence; {_OF_LENGTHS}")
        if self.total > MOST_ROWS:
            raise ValueError(f"the sequences have {self.total:,} rows; the limit is {MOST_ROWS:,}")
        for i, (count, rows) in enumerate(zip(self.counts, self.rows)):
            if count > rows:
                raise ValueError(f"{count} of the {rows} rows of sequence {i} count; give fewer")

    @classmethod
    def of(cls, given: Any) -> Lengths:
        """The lengths of a text or of whole numbers. Raises ValueError for anything else."""
        if isinstance(given, Lengths):
            return given
        is_list = isinstance(given, list | tuple | np.ndarray)
        text = ",".join(map(str, given)) if is_list else given
        if not isinstance(text, str) or not (found := _LENGTHS.fullmatch(f"{text},")):
            raise ValueError(f"{described(given)} is no list of lengths; {_OF_LENGTHS}")
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
        """The text, or for many sequences how many there are, and the rows that count of them."""
        if len(self.rows) <= _SHOWN:
            return str(self)
        least, most = min(self.counts), max(self.counts)
        return f"{len(self.rows)} of {least}{f'-{most}' if most > least else ''}"

    @property
    def counts(self) -> tuple[int, ...]:
        """How many rows of each sequence count."""
        return self.rows if self.used is None else self.used

    @cached_property
    def total(self) -> int:
        """The rows of the packed array."""
        return self.before + sum(self.rows) + self.after

    @property
    def offsets(self) -> np.ndarray:
        """Where each sequence begins, and where the last one ends."""
        return np.array([*accumulate(self.rows, initial=self.before)], np.int32)

    def is_in_a_sequence(self) -> np.ndarray:
        """Of each row of the packed array, whether it counts in a sequence."""
        found = np.zeros(self.total, bool)
        for start, count in zip(self.offsets, self.counts):
            found[start : start + count] = True
        return found

    def only(self, numbers: Collection[int]) -> Lengths:
        """Some of the sequences, by number."""
        rows, used = (
            x and tuple(n for i, n in enumerate(x) if i in numbers) for x in (self.rows, self.used)
        )
        return replace(self, rows=rows or (), used=used)

    def with_rows(self, number: int, rows: int) -> Lengths:
        """One of the sequences with so many rows, which count."""
        change = lambda x: (*x[:number], rows, *x[number + 1 :])  # noqa: E731
        return replace(self, rows=change(self.rows), used=self.used and change(self.used))

    @property
    def twice(self) -> Lengths:
        """All sequences two times."""
        return replace(self, rows=2 * self.rows, used=self.used and 2 * self.used)

    def first(self, count: int | None) -> Lengths:
        """The first so many sequences, or all; the rows of the others are of no sequence."""
        if count is None or count >= len(self.rows):
            return self
        return replace(self, rows=self.rows[:count], used=self.used and self.used[:count])

    def limited(self, most: int) -> Lengths:
        """The first rows of every sequence, at most so many, and of what is of none."""
        rows, *ends = (
            tuple(min(x, most) for x in y) for y in (self.rows, (self.before, self.after))
        )
        return Lengths(rows, self.used and tuple(min(x, most) for x in self.used), *ends[0])

    def cut(self, total: int) -> Lengths:
        """The first so many rows, of as many sequences, of which the last may become empty."""
        ends = [min(int(x), total) for x in self.offsets]
        rows = tuple(b - a for a, b in pairwise(ends))
        used = self.used and tuple(map(min, self.used, rows))
        return Lengths(rows, used, ends[0], max(min(total, self.total) - ends[-1], 0))


Packed = tuple[Lengths, Lengths]  # of queries and of keys


def pairs_of(q: Lengths, k: Lengths) -> Iterable[tuple[int, int]]:
    """How many queries and keys count of each sequence."""
    return zip(q.counts, k.counts)


def lengths_of(given: Any) -> Packed:
    """The lengths of queries and of keys: one for both, or a tuple of two, as text "5,0:7,3".

    Raises ValueError for wrong ones, and if they have not as many sequences.
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
            f"there are lengths of {len(q.rows)} sequences for queries and of {len(k.rows)} for "
            "keys; give as many"
        )
    return q, k


def shown_lengths(lengths: Packed, *, short: bool = False) -> str:
    """The text of both lengths, or a short form of it."""
    q, k = (x.short if short else str(x) for x in lengths)
    return q if lengths[0] == lengths[1] else f"{q}:{k}"
