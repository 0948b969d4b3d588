"""Readers of untrusted JSON files, which check the type and range of each field.

A reader checks a value and returns it in normal form. For an invalid value it raises ValueError,
with the name of the field, the value and the rule.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

Reader = Callable[[Any], Any]
MOST_TEXT = 1 << 16  # largest number of characters in a string
MOST_ITEMS = 1 << 20  # largest number of elements in a list, or of keys in an object
INT32, INT64 = 2**31 - 1, 2**63 - 1


def read_file(path: str | Path, most: int) -> bytes:
    """Reads a file of at most ``most`` bytes. Raises OSError, or ValueError if it is larger."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise type(error)(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > most:
        raise ValueError(f"{path} is larger than {most:,} bytes")
    return content


def parsed(content: bytes | str) -> Any:
    """Parses a JSON text. Raises ValueError for invalid JSON and for duplicate keys."""
    try:
        return json.loads(content, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turns errors about a file's content into a one-line ValueError: ``what`` and the reason.

    Converts all exceptions except OSError, which reading the file may raise: values of the right
    types may still be inconsistent and cause any exception.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        reason = next(iter(str(error).splitlines()), "")
        raise ValueError(f"{what} ({kind}{reason})") from None


def record(
    fields: Mapping[str, Reader],
    optional: Mapping[str, Reader] | None = None,
    *,
    only: bool = False,
) -> Reader:
    """Returns a reader of an object with these fields; ``optional`` fields may be missing.

    The reader drops unknown fields, or rejects them if ``only`` is true.
    """
    known = {**fields, **(optional or {})}

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError(_wrong(value, "an object"))
        if missing := [name for name in fields if name not in value]:
            raise ValueError(f"{missing[0]} is missing")
        if only and (unknown := [name for name in value if name not in known]):
            raise ValueError(
                f"{reprlib.repr(unknown[0])} is an unknown field; the fields are {', '.join(known)}"
            )
        there = {name: value[name] for name in known if name in value}
        return {name: _inside(name, known[name], x) for name, x in there.items()}

    return read


def mapping_of(read: Reader, most: int = MOST_ITEMS) -> Reader:
    """Returns a reader of an object with arbitrary keys, whose values ``read`` accepts."""

    def read_all(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > most:
            raise ValueError(_wrong(value, f"an object with at most {most:,} keys"))
        return {text()(name): _inside(name, read, x) for name, x in value.items()}

    return read_all


def list_of(read: Reader, most: int = MOST_ITEMS) -> Reader:
    def read_all(value: Any) -> list[Any]:
        if not isinstance(value, list | tuple) or len(value) > most:
            raise ValueError(_wrong(value, f"a list of at most {most:,} values"))
        return [_inside(str(i), read, x) for i, x in enumerate(value)]

    return read_all


def row_of(*readers: Reader, least: int = 0) -> Reader:
    """Returns a reader of a list with one reader per element, of at least ``least`` elements."""

    def read_each(value: Any) -> list[Any]:
        if not isinstance(value, list | tuple) or not least <= len(value) <= len(readers):
            raise ValueError(_wrong(value, f"a list of {least} to {len(readers)} values"))
        return [_inside(str(i), read, x) for i, (read, x) in enumerate(zip(readers, value))]

    return read_each


def optional(read: Reader) -> Reader:
    """Returns a reader that also accepts None."""
    return lambda value: None if value is None else read(value)


def any_of(*readers: Reader) -> Reader:
    """Returns a reader that tries several readers in order; errors come from the last one."""

    def read(value: Any) -> Any:
        for first in readers[:-1]:
            with suppress(ValueError):
                return first(value)
        return readers[-1](value)

    return read


def _value(is_right: Callable[[Any], bool], rule: str) -> Reader:
    """Returns a reader that accepts values for which ``is_right`` is true, unchanged."""

    def read(value: Any) -> Any:
        if not is_right(value):
            raise ValueError(_wrong(value, rule))
        return value

    return read


def text(most: int = MOST_TEXT) -> Reader:
    rule = f"a string of at most {most:,} characters"
    return _value(lambda x: isinstance(x, str) and len(x) <= most, rule)


def one_of(known: Collection[Any]) -> Reader:
    return _value(lambda x: isinstance(x, str) and x in known, f"one of {', '.join(known)}")


def whole(least: int = 0, most: int = INT64) -> Reader:
    rule = f"a whole number from {least:,} to {most:,}"
    return _value(lambda x: type(x) is int and least <= x <= most, rule)


flag = _value(lambda x: isinstance(x, bool), "true or false")


def number(least: float = -math.inf, most: float = math.inf, *, finite: bool = True) -> Reader:
    """Returns a reader of a number in a range; with ``finite`` it rejects NaN and infinity."""

    def read(value: Any) -> float:
        if type(value) not in (int, float) or (abs(value) > INT64 and type(value) is int):
            raise ValueError(_wrong(value, "a number"))
        if finite and not math.isfinite(value):
            raise ValueError(_wrong(value, "a finite number"))
        if value < least or value > most:
            raise ValueError(_wrong(value, f"a number from {least:g} to {most:g}"))
        return value

    return read


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"key {reprlib.repr(twice)} occurs twice")
    return found


def _inside(name: str, read: Reader, value: Any) -> Any:
    """Reads the value of a field; error messages begin with its name."""
    try:
        return read(value)
    except ValueError as error:
        inner = str(error)
        between = "" if inner.startswith("is ") else "."
        raise ValueError(f"{reprlib.repr(name)[1:-1]}{between or ' '}{inner}") from None


def _wrong(value: Any, rule: str) -> str:
    return f"is {reprlib.repr(value)}, not {rule}"
