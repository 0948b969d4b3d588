"""Checks the lengths and offsets of ragged batches, and packs lists of arrays."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from cupyfa.errors import described
from cupyfa.problem.optional_inputs import OF_HEADS, PADDED, STARTS, USED, written
from cupyfa.runtime.arrays import require_form

_ROWS = {"bhsd": -2, "bshd": -3}  # index of the row axis in each layout
_LARGE = 4 << 20  # bytes; several threads share larger copies
_AT_ONCE = 1 << 20  # bytes that a thread copies at a time


Download = Callable[[Any], np.ndarray]


def lengths(
    q: Any, k: Any, given: Mapping[str, Any], download: Download | None = None
) -> dict[str, Any]:
    """Checks the offsets and lengths of a ragged batch on the host; returns them as int32.

    q, k: the packed arrays, [rows, heads, d]. given: offsets and lengths, by the names in STARTS
    and USED. download: copies arrays from GPU memory, so that they are checked, too. Raises
    ValueError for invalid offsets or lengths, TypeError if they are not integers.
    """
    made = {name: _whole(name, x) for name, x in given.items() if x is not None}
    for start, used, array, rows in zip(STARTS, USED, (q, k), ("q", "k")):
        offsets, counts = made[start], made.get(used)
        if len(offsets.shape) != 1 or offsets.shape[0] < 1:
            raise ValueError(
                f"{written(start)} has shape {tuple(offsets.shape)}; it must be 1-D: the start of "
                "each sequence, followed by the end of the last sequence"
            )
        total = int(array.shape[0])
        if (seen := _look(offsets, download)) is not None:
            _check_offsets(start, seen, rows, total)
            if counts is not None and (counts := _look(counts, download)) is not None:
                _check_counts(used, counts, np.diff(seen))
    return {name: _as_int32(x) for name, x in made.items()}


def padded_lengths(
    given: Mapping[str, Any], batch: int, rows: tuple[int, int], download: Download | None = None
) -> dict[str, Any]:
    """Checks the lengths of padded batch elements on the host; returns them as int32.

    given: lengths, by the names in PADDED. rows: their upper bounds, M and N. download: copies
    arrays from GPU memory, so that they are checked, too.
    """
    made = {name: _whole(name, x) for name, x in given.items()}
    for name, array in made.items():
        most = rows[PADDED.index(name)]
        if tuple(array.shape) == (batch,) and (seen := _look(array, download)) is not None:
            _check_counts(name, seen, np.full(batch, most), "batch element")
    return {name: _as_int32(x) for name, x in made.items()}


def _look(array: Any, download: Download | None) -> np.ndarray | None:
    """Returns an array on the host, or None for an array in GPU memory without ``download``."""
    if isinstance(array, np.ndarray):
        return array
    return None if download is None else download(array)


def with_a_sequence(given: Mapping[str, Any]) -> dict[str, Any]:
    """Adds an empty sequence to a ragged batch without sequences.

    Kernels require at least one sequence. The values of the added elements have no effect.
    """
    made = dict(given)
    if not has_no_sequence(given):
        return made
    for name, x in given.items():
        shape = tuple(x.shape)
        if name in STARTS:
            made[name] = np.zeros(2, np.int32)
        elif name in USED and shape == (0,):
            made[name] = np.zeros(1, np.int32)
        elif name in OF_HEADS and len(shape) == 2 and not shape[0]:
            made[name] = np.zeros((1, shape[1]), x.dtype)
        elif name.startswith("captured "):
            made[name] = with_elements(x)
    return made


def has_no_sequence(given: Mapping[str, Any]) -> bool:
    return all(tuple(given[x].shape) == (1,) for x in STARTS)


def with_elements(array: Any) -> Any:
    """Replaces an empty captured array with zeros, of length 1 along its empty axes."""
    shape = getattr(array, "shape", ())
    return np.zeros([max(x, 1) for x in shape], array.dtype) if 0 in shape else array


def _whole(name: str, given: Any) -> Any:
    if isinstance(given, list | tuple):
        given = np.array(given, None if len(given) else np.int32)
    if not hasattr(given, "dtype") or not hasattr(given, "shape"):
        raise TypeError(f"{written(name)} is {described(given)}; pass an int32 NumPy or CuPy array")
    if isinstance(given, np.ndarray) and given.dtype.kind not in "iu":
        raise TypeError(
            f"{written(name)} is {given.dtype}; it must have an integer dtype: convert it"
        )
    return given


def _as_int32(array: Any) -> Any:
    """Converts a checked NumPy array to contiguous int32; returns CuPy arrays unchanged."""
    return np.ascontiguousarray(array, np.int32) if isinstance(array, np.ndarray) else array


def _check_offsets(name: str, offsets: np.ndarray, rows: str, total: int) -> None:
    seen = [int(x) for x in offsets]
    falls = next((i for i, (a, b) in enumerate(pairwise(seen)) if b < a), None)
    if falls is not None:
        raise ValueError(
            f"{written(name)}[{falls + 1}] is {seen[falls + 1]}, less than the preceding "
            f"{seen[falls]}; offsets must not decrease"
        )
    if seen[0] < 0 or seen[-1] > total:
        raise ValueError(
            f"{written(name)} range from {seen[0]} to {seen[-1]}, but {rows} has {total} rows; "
            f"offsets must begin with 0 and end with {total}"
        )


def _check_counts(name: str, counts: np.ndarray, most: np.ndarray, what: str = "sequence") -> None:
    if counts.shape != most.shape:
        raise ValueError(
            f"{written(name)} has shape {counts.shape}; it must be {most.shape}, with one "
            f"number per {what}"
        )
    wrong = np.flatnonzero((counts < 0) | (counts > most))
    if wrong.size:
        i = int(wrong[0])
        raise ValueError(
            f"{written(name)}[{i}] is {counts[i]}, but {what} {i} has {most[i]} rows; pass a "
            f"number from 0 to {most[i]}"
        )


# Lists of arrays


def are_lists(*given: Any) -> bool:
    """Returns whether all arguments are lists of arrays (or empty), not lists of numbers."""
    return all(isinstance(x, list | tuple) and all(hasattr(y, "dtype") for y in x) for x in given)


def packed(name: str, arrays: Sequence[Any], layout: str) -> tuple[Any, np.ndarray]:
    """Packs a list of arrays into one array [rows, heads, columns]; returns it and the offsets.

    Raises ValueError or TypeError for arrays that differ in more than the number of rows.
    """
    if layout not in _ROWS:
        raise ValueError(f"layout is {described(layout)}; use one of {', '.join(_ROWS)}")
    axis, first = _ROWS[layout], arrays[0]
    for i, x in enumerate(arrays):
        if len(x.shape) != 3:
            raise ValueError(
                f"{name}[{i}] has shape {tuple(x.shape)}; arrays in a list must be 3-D, "
                f"{'[heads, rows, columns]' if layout == 'bhsd' else '[rows, heads, columns]'}"
            )
        if type(x) is not type(first) or x.dtype != first.dtype:
            raise TypeError(
                f"{name}[{i}] is a {x.dtype} {type(x).__name__}, but {name}[0] is a {first.dtype} "
                f"{type(first).__name__}; pass arrays of the same type and dtype"
            )
        if _others(x, axis) != _others(first, axis):
            raise ValueError(
                f"{name}[{i}] has shape {tuple(x.shape)}, but {name}[0] has {tuple(first.shape)}; "
                "only the number of rows may differ"
            )
    offsets = np.array([0, *accumulate(int(x.shape[axis]) for x in arrays)], np.int32)
    heads, columns = _others(first, axis)
    if not hasattr(first, "__array_function__"):
        raise TypeError(f"{name} is a list of {type(first).__name__}; pass NumPy or CuPy arrays")
    made = np.empty_like(first, order="C", shape=(int(offsets[-1]), heads, columns))
    rows = arrays if layout == "bshd" else [x.swapaxes(0, 1) for x in arrays]
    _copy_all((made[a:b], x) for x, (a, b) in zip(rows, pairwise(offsets.tolist())))
    return made, offsets


def _copy_all(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Copies the second array of each pair to the first, using threads for large NumPy arrays."""
    found = list(pairs)
    is_large = sum(x.nbytes for x, _ in found) > _LARGE and isinstance(found[0][0], np.ndarray)
    if not is_large:
        for to, source in found:
            to[...] = source
        return
    from concurrent.futures import ThreadPoolExecutor

    some = (
        (to[i : i + step], source[i : i + step])
        for to, source in found
        if (step := max(len(to) * _AT_ONCE // max(to.nbytes, 1), 1))
        for i in range(0, len(to), step)
    )
    from cupyfa.runtime.transfer import configure

    with ThreadPoolExecutor(configure().threads) as threads:
        deque(threads.map(np.copyto, *zip(*some)), maxlen=0)


def _others(array: Any, axis: int) -> tuple[int, ...]:
    sizes = list(array.shape)
    del sizes[axis]
    return tuple(sizes)


def parts(array: Any, offsets: Iterable[int], layout: str, out: Any = None) -> list[Any]:
    """Splits a packed array [rows, heads, columns] into sequences: views, or copies in ``out``."""
    found = [array[a:b] for a, b in pairwise(offsets)]
    if layout == "bhsd":
        found = [x.swapaxes(0, 1) for x in found]
    if out is None:
        return found
    if not isinstance(out, list | tuple) or len(out) != len(found):
        raise TypeError(f"out is {described(out)}; pass a list of {len(found)} arrays")
    for i, (x, y) in enumerate(zip(out, found)):
        require_form(f"out[{i}]", x, y.shape, y.dtype)
    _copy_all(zip(out, found))
    return list(out)


def row_parts(lse: Any, offsets: Iterable[int]) -> list[Any]:
    """Splits lse [heads, rows] into sequences."""
    return [lse[:, a:b] for a, b in pairwise(offsets)]
