"""Messages: rows come first, so that those of a rank lie side by side, with k and v in one."""

from __future__ import annotations

from typing import Any

import numpy as np


def new(like: Any, shape: tuple[int, ...], dtype: Any = None) -> Any:
    """A contiguous array with unspecified elements, where another one is."""
    return np.empty_like(like, shape=shape, dtype=dtype, order="C")


def packed(*arrays: Any, room: int | None = None, dtype: Any = None) -> Any:
    """Arrays [batch, heads, rows, columns] as one, [rows, batch, heads, all columns].

    room: for how many rows; those after the last are unspecified.
    """
    batch, heads, rows, _ = arrays[0].shape
    columns = sum(x.shape[3] for x in arrays)
    made = new(arrays[0], (rows if room is None else room, batch, heads, columns), dtype)
    first = 0
    for x in arrays:
        made[:rows, ..., first : first + x.shape[3]] = x.transpose(2, 0, 1, 3)
        first += x.shape[3]
    return made


def unpacked(made: Any, *columns: int) -> list[Any]:
    """The arrays [batch, heads, rows, columns] of a packed one, without a copy."""
    whole, found, first = made.transpose(1, 2, 0, 3), [], 0
    for count in columns:
        found.append(whole[..., first : first + count])
        first += count
    return found
