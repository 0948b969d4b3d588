"""Packs k and v into one message whose first axis is rows, so that a rank's rows are contiguous."""

from __future__ import annotations

from math import gcd
from operator import methodcaller
from typing import Any

import numpy as np

from cupyfa.runtime.arrays import address_of

_WORDS = {2: "u2", 4: "u4", 8: "u8", 16: "c16"}  # a GPU thread copies up to 16 bytes at a time


def new(like: Any, shape: tuple[int, ...], dtype: Any = None) -> Any:
    """Allocates an uninitialized contiguous array in the memory of ``like``."""
    return np.empty_like(like, shape=shape, dtype=dtype, order="C")


def packed(*arrays: Any, room: int | None = None) -> Any:
    """Packs arrays [batch, heads, rows, columns] into one array [rows, batch, heads, all columns].

    room: the number of rows to allocate; rows after the packed ones stay uninitialized.
    """
    batch, heads, rows, _ = arrays[0].shape
    columns = [x.shape[3] for x in arrays]
    made = new(arrays[0], (rows if room is None else room, batch, heads, sum(columns)))
    for part, x in zip(unpacked(made[:rows], *columns), arrays):
        copy_to(part, x)
    return made


def copy_to(made: Any, array: Any) -> None:
    """Copies an array into ``made``, which may have a different dtype."""
    if made.dtype == array.dtype:
        made, array = in_words(made, array)
    made[...] = array


def in_words(*arrays: Any) -> list[Any]:
    """Views arrays of one dtype as arrays of wider words, which are copied much faster.

    Chooses the widest word, up to 16 bytes, that addresses, strides and row lengths allow.
    """
    size = 16
    for x in arrays:
        if x.strides[-1] != x.itemsize:
            return [*arrays]
        size = gcd(size, address_of(x), x.shape[-1] * x.itemsize, *x.strides[:-1])
    return [*map(methodcaller("view", _WORDS[size]), arrays)] if size in _WORDS else [*arrays]


def unpacked(made: Any, *columns: int) -> list[Any]:
    """Splits a packed array into views [batch, heads, rows, columns]."""
    whole, found, first = made.transpose(1, 2, 0, 3), [], 0
    for count in columns:
        found.append(whole[..., first : first + count])
        first += count
    return found
