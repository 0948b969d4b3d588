"""Array forms, which describe an array's dtype and shape as text: "1hmn", "f16[1hmn]", "i32[M]".

Command lines and plans contain forms in place of arrays. A form states the shape in terms of
problem sizes, so that the same form describes arrays for other sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cupyfa.errors import described
from cupyfa.problem.dtypes import INPUTS
from cupyfa.problem.lengths import Packed
from cupyfa.problem.optional_inputs import (
    DESCALES,
    DLSE,
    KEYWORDS,
    OPTIONAL_INPUTS,
    OWN_ARRAYS,
    PADDED,
    ROW_MAX,
    SEEDS,
    STARTS,
    USED,
    Operand,
    OptionalInput,
    is_array,
    of_value,
    operand,
)
from cupyfa.problem.options import OptionKeywords
from cupyfa.problem.wrt import WRT, differentiated, names_of_gradients

CAPTURED, BLOCK_MASK = "captured", "block_mask"
LENGTHS_OF = "lengths"  # sequence lengths of a ragged batch
RETURN_MAX = "return_max"  # whether the call also returns row maxima
PAGE_SIZE = "page_size"  # number of keys per page
# Arguments that describe arrays, or how a call uses them.
NAMES = (*OWN_ARRAYS, CAPTURED, WRT, BLOCK_MASK, DLSE, RETURN_MAX, LENGTHS_OF, PAGE_SIZE)
USUAL = {x: OPTIONAL_INPUTS[x].usual_axes for x in OWN_ARRAYS}  # default axes
DTYPES = {
    **{"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "bool": "bool"},
    **{f"{kind[0]}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
}
Sizes = tuple[int, int, int, int]  # batch, heads, M and N
AXES = ("batch", "heads", "M", "N")
_LETTERS = "bhmn"
_SHORT = {long: short for short, long in DTYPES.items()}


def is_array_form(text: str) -> bool:
    """Returns whether a string is an array form, such as "bool[11mn]", not an expression."""
    dtype, bracket, _ = text.partition("[")
    return dtype in DTYPES if bracket else len(text) > 1 and {*text} <= {*_LETTERS, "1"}


class FormKeywords(OptionKeywords, total=False):
    """Options and array forms as keyword arguments, for type checkers."""

    alibi_slopes: Any
    bias: Any
    mask: Any
    sink: Any
    lengths_q: Any
    lengths_k: Any
    q_descale: Any
    k_descale: Any
    v_descale: Any
    captured: Mapping[str, Any] | None
    wrt: str | Sequence[str] | None
    dlse: bool | None
    return_max: bool | None


class Keywords(FormKeywords, total=False):
    """FormKeywords plus the arguments of block masks, ragged batches and paged caches."""

    block_mask: bool | None
    lengths: Any
    page_size: int | None


def operands(given: Mapping[str, Any], sizes: Sequence[int], dtype: str) -> tuple[Operand, ...]:
    """Makes the operands that array forms describe, for the given problem sizes and dtype.

    given: maps names from NAMES to forms. A form is a string, a shape, an array, or True for the
        default shape. Exceptions: ``captured`` is a mapping of forms or numbers, a seed is an array
        or "u64[1]", lengths of padded batches are written "i32[batch]", descales are a shape or an
        array, and offsets of packed sequences are a shape. ``dlse`` and ``return_max`` are flags:
        whether the problem has a gradient of lse, and whether it returns row maxima. ``wrt`` holds
        names, such as "q,bias"; see ``differentiated``. Without a dtype in the form, a bias has the
        dtype of results, and other floating-point arrays are float32.

    Raises ValueError or TypeError for invalid forms.
    """
    if unknown := ", ".join(given.keys() - {*NAMES, *_READERS}):
        raise TypeError(f"unknown array {unknown}; use one of {', '.join(NAMES)}")
    if RETURN_MAX in given:
        given = {ROW_MAX if name == RETURN_MAX else name: x for name, x in given.items()}
    named = dict(zip(AXES, sizes))
    found = [
        read(OPTIONAL_INPUTS[name], form, named, dtype)
        for name, read in _READERS.items()
        if (form := given.get(name)) is not None and form is not False
    ]
    if STARTS[0] in given:
        of_rows = (DLSE, ROW_MAX)
        found = [replace(x, shape=(1, *x.shape[1:])) if x.name in of_rows else x for x in found]
    captured = given.get(CAPTURED) or {}
    if not isinstance(captured, Mapping):
        raise TypeError(f'captured is {described(captured)}; pass a dict {{"name": form}}')
    more = [_captured(name, form, named) for name, form in captured.items()]
    every = (*found, *sorted(more, key=lambda x: not x.is_array))  # arrays first, as in calls
    return differentiated(every, given.get(WRT) or ())


def of_heads(given: Mapping[str, Any], batch: int, kv_heads: int) -> dict[str, Any]:
    """Replaces True by the default shape in the forms of descales."""
    usual = {x: (batch, kv_heads) for x in DESCALES if given.get(x) is True}
    return {**given, **usual}


def _read_score_array(
    record: OptionalInput, form: Any, named: Mapping[str, int], dtype: str
) -> Operand:
    name, usual = record.name, record.usual_dtype or INPUTS[dtype].usual_result
    if form is True:
        form = record.usual_axes
    if not isinstance(form, str):
        return _of_shape(name, form, usual)
    short, letters = _parts(form) or ("", form)
    known = DTYPES.get(short, usual if not short else "")
    if not known or not letters or set(letters) - set(_LETTERS + "1"):
        raise ValueError(
            f"{name} is {form!r}; write its shape as letters, for example {record.axes_examples}, "
            f"optionally with a dtype, as in f32[{record.usual_axes}]"
        )
    by_letter = {"1": 1, **dict(zip(_LETTERS, named.values()))}
    return Operand(name, known, tuple(by_letter[x] for x in letters))


def seeds_in_memory(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the dropout seed and offset that are arrays or array forms rather than numbers."""
    given = {name: options[name] for name in SEEDS if name in options}
    return {name: x for name, x in given.items() if is_array(x) or isinstance(x, str)}


def _read_seed(record: OptionalInput, form: Any, named: Mapping[str, int], dtype: str) -> Operand:
    if not isinstance(form, str):
        return of_value(record.name, form)
    short, size = _parts(form) or ("", "")
    if short not in DTYPES or short[0] not in "iu" or size != "1":
        raise ValueError(
            f"{record.name} is {form!r}; pass a whole number, or an array form: u64[1] or i32[1]"
        )
    return Operand(record.name, DTYPES[short], (1,))


def _read_lengths(
    record: OptionalInput, form: Any, named: Mapping[str, int], dtype: str
) -> Operand:
    name = record.name
    if form is True:
        form = (named["batch"],)
    if not isinstance(form, str):
        found = _of_shape(name, form, "int32")
        is_converted = isinstance(form, np.ndarray) and form.dtype.kind in "iu"
        return replace(found, dtype="int32") if is_converted else found
    short, axis = _parts(form) or ("", "")
    size = _size(axis, named)
    if short not in DTYPES or size is None:
        raise ValueError(f"{name} is {form!r}; pass its dtype and size, as in i32[batch]")
    return Operand(name, DTYPES[short], (size,))


# Maps the name of an array to the function that parses its form, in operand order.
_READERS: dict[str, Callable[..., Operand]] = {
    **dict.fromkeys(OWN_ARRAYS, _read_score_array),
    **dict.fromkeys(
        (DLSE, ROW_MAX),
        lambda record, form, named, dtype: Operand(
            record.name, INPUTS[dtype].sums.name, tuple(named[x] for x in record.axes)
        ),
    ),
    **dict.fromkeys(PADDED, _read_lengths),
    **dict.fromkeys(
        (*STARTS, *USED, *DESCALES),
        lambda record, form, named, dtype: _of_shape(record.name, form, record.usual_dtype),
    ),
    **dict.fromkeys(SEEDS, _read_seed),
}
FORMS = {*KEYWORDS, DLSE, RETURN_MAX, CAPTURED, WRT}  # keyword arguments whose values are forms


def _captured(name: str, form: Any, named: Mapping[str, int]) -> Operand:
    if isinstance(form, str):
        short, axes = _parts(form) or ("", "")
        sizes = [_size(x.strip(), named) for x in axes.split(",")]
        if short not in DTYPES or None in sizes:
            raise ValueError(
                f"captured {name} is {form!r}; pass a number, or a dtype ({', '.join(DTYPES)}) and "
                "sizes by name or number, as in f32[heads], i32[M] or bool[batch,N]; M|N is the "
                "larger of M and N"
            )
        return replace(operand(name, 0), dtype=DTYPES[short], shape=tuple(sizes), value=None)  # type: ignore[arg-type]
    if isinstance(form, tuple | list):
        return replace(_of_shape(name, form, "float32"), name=operand(name, 0).name)
    return operand(name, form)


def _of_shape(name: str, given: Any, dtype: str) -> Operand:
    if isinstance(given, tuple | list):
        if not all(isinstance(n, int) and n >= 0 for n in given):
            raise ValueError(
                f"the shape of {name} is {given}; sizes must be whole numbers of at least 0"
            )
        return Operand(name, dtype, _with_four(name, given), given=tuple(given))
    found = of_value(name, given)
    return replace(found, shape=_with_four(name, found.shape), given=found.shape)


def _with_four(name: str, shape: Iterable[int]) -> tuple[int, ...]:
    sizes = tuple(shape)
    record = OPTIONAL_INPUTS.get(name)
    has_four = record is not None and record.broadcast == "axes"
    return (1,) * (4 - len(sizes)) + sizes if has_four else sizes


def _parts(form: str) -> tuple[str, str] | None:
    """Splits a form such as "f32[1h]" into dtype and bracketed text; None for other strings."""
    found = re.fullmatch(r"(\w+)\[(.*)\]", form.replace(" ", ""))
    return (found[1], found[2]) if found else None


def _size(axis: str, named: Mapping[str, int]) -> int | None:
    sizes = [int(x) if x.isdecimal() else named.get(x) for x in axis.split("|")]
    return None if None in sizes else max(x for x in sizes if x is not None)


def value_of(text: str) -> str | bool | int | float:
    """Parses a captured value on the command line as a bool or number, or returns it as a form."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def is_form(text: str) -> bool:
    """Returns whether a command-line word should be read as the form of a score array."""
    return _parts(text) is not None or (bool(text) and not set(text) - set(_LETTERS + "1"))


def shown(found: Iterable[Operand]) -> dict[str, str]:
    """Formats operands as text forms, which ``operands`` can read back."""
    every = tuple(found)
    wrt = names_of_gradients(every)
    names = {ROW_MAX: RETURN_MAX}
    texts = {names.get(x.name, x.name): _shown(x) for x in every}
    return texts | ({WRT: wrt} if wrt else {})


def _shown(x: Operand) -> str:
    if not x.is_array:
        return str(x.value)
    if x.name in (DLSE, ROW_MAX):
        return ""
    if x.record is None or x.name not in OWN_ARRAYS:
        return f"{_SHORT[x.dtype]}[{','.join(map(str, x.shape))}]"
    axes = zip(x.record.axes[-len(x.shape) :], x.shape)
    serves_all = x.record.broadcast == "axes"
    letters = "".join("1" if serves_all and n == 1 else _LETTERS[AXES.index(a)] for a, n in axes)
    return letters if x.dtype == "bool" else f"{_SHORT[x.dtype]}[{letters}]"


def forms_of_lengths(packed: Packed | None) -> dict[str, tuple[int]]:
    """Returns the shapes of a packed batch's offsets, and of its `used` arrays if given."""
    if packed is None:
        return {}
    count = len(packed[0].rows)
    used = {name: (count,) for name, x in zip(USED, packed) if x.used is not None}
    return dict.fromkeys(STARTS, (count + 1,)) | used
