"""What a record's fields must be: rules in words, each with a check."""

from __future__ import annotations

import numbers
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

Rules = Mapping[str, Callable[[Any], bool]]


def check(record: Any, rules: Rules) -> None:
    """Raises ValueError, with the rule and the value, if a record breaks one of its rules.

    A rule begins with the name of the field that it is about.
    """
    for rule, holds in rules.items():
        try:
            kept = holds(record)
        except (AttributeError, TypeError, ValueError):  # the value has not even the right type
            kept = False
        if not kept:
            first, field = next(iter(vars(record).values())), rule.split()[0]
            value = reprlib.repr(getattr(record, field))
            raise ValueError(f"{type(record).__name__} {first!r}: {rule}, but here {value}")


def is_size(value: Any) -> bool:
    """Whether a value is a whole number from 1 to 2**31 - 1."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return whole and 1 <= value < 2**31
