"""Wrong lengths, offsets and pages, as device arrays may hold them: kernels read them unchecked.

A wrong length of a padded batch element counts as the nearest right one. With wrong offsets of a
ragged batch, and wrong lengths or pages of a cache, results are not defined, but nothing outside
the arrays may be read or written.
"""

import zlib

import numpy as np

from cupyfa.ladder.operations import Arrays
from cupyfa.problem.optional_inputs import PADDED, PAGE_TABLE, STARTS
from cupyfa.problem.problem import Problem

_ENDS = np.iinfo(np.int32)
_LONG = 2**22  # multiply-adds of problems that take too long to run once more
_CHANGED = 0.75  # fraction of the lengths 0, and of the largest ones, that become wrong
_FAR = 300  # limit of the usual distances of offsets from their arrays, in rows


def with_wrong_lengths(p: Problem, inputs: Arrays) -> dict[str, np.ndarray]:
    """Replaces some lengths of padded elements that are 0, or all rows, with lengths out of range.

    Equal inputs get equal lengths. Results must not change.
    """
    found = dict(inputs)
    for name, most in zip(PADDED, (p.M, p.N)):
        if not p.pages and (given := inputs.get(f"mods.{name}")) is not None:
            found[f"mods.{name}"] = _out_of_range(given, most, _random(given))
    return found


def with_undefined_results(p: Problem, inputs: Arrays) -> dict[str, np.ndarray] | None:
    """Returns inputs that lead out of the arrays.

    Returns None for problems that have no such inputs or no pairs, and for long ones in pages. In
    long ragged batches, sequences are empty except where their offsets lead outside.
    """
    work = p.heads * p.pairs * (p.d + p.dv)
    if p.sequences is not None and work:
        return _with_wrong_offsets(p, inputs, are_empty=work > _LONG)
    is_quick = 0 < work <= _LONG
    return _with_wrong_pages(p, inputs) if p.pages and p.cached is None and is_quick else None


def _with_wrong_pages(p: Problem, inputs: Arrays) -> dict[str, np.ndarray]:
    """Replaces some lengths that are 0, or all keys, and about half of the page numbers."""
    of_lengths, of_table = f"mods.{PADDED[1]}", f"mods.{PAGE_TABLE}"
    lengths, table = inputs[of_lengths], inputs[of_table].copy()
    rng = _random(lengths, table)
    wrong = rng.choice((-1, p.pages, _ENDS.max, _ENDS.min), table.shape)
    table[...] = np.where(rng.random(table.shape) < 0.5, wrong, table)
    return {**inputs, of_lengths: _out_of_range(lengths, p.N, rng), of_table: table}


def _out_of_range(given: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    lengths = given.copy()
    for end, others in ((most, (most + 1, _ENDS.max)), (0, (-1, _ENDS.min))):
        changed = (given == end) & (rng.random(given.shape) < _CHANGED)
        lengths[changed] = rng.choice(others, int(changed.sum()))
    return lengths


def _with_wrong_offsets(p: Problem, inputs: Arrays, *, are_empty: bool) -> dict[str, np.ndarray]:
    """Moves ends of sequences of queries, keys or both out of their arrays.

    The first offset, or another one, becomes negative, or the first or the last one exceeds the
    rows of the array. No two sequences share a row, which two blocks would both write. are_empty:
    whether all sequences are empty before that, and begin where the rows end, or further on.
    """
    found, rng = dict(inputs), _random(inputs["Q"], *(inputs[f"mods.{name}"] for name in STARTS))
    sides = tuple(zip(STARTS, (p.M, p.N)))
    if are_empty:
        more = rng.choice((0, _FAR))
        ends = {f"mods.{name}": rows + more for name, rows in sides}
        found |= {name: np.full_like(inputs[name], end) for name, end in ends.items()}
    for name, rows in (sides, sides[:1], sides[1:])[rng.integers(2 if are_empty else 3)]:
        found[f"mods.{name}"] = _led_outside(found[f"mods.{name}"], rows, rng)
    return found


def _led_outside(offsets: np.ndarray, rows: int, rng: np.random.Generator) -> np.ndarray:
    """Returns offsets of which one or two lead out of an array with this many rows."""
    moved, last = offsets.copy(), len(offsets) - 1
    any_but_last = 0 if rng.random() < 0.5 else int(rng.integers(max(last, 1)))
    for place in rng.permutation([any_but_last, last])[: rng.integers(1, 3)]:
        is_far, distance = rng.random() < 0.2, int(rng.integers(1, _FAR))
        is_past = place == 0 and rng.random() < 0.5
        if place == last > 0 or is_past:
            moved[place] = _ENDS.max if is_far else rows + distance
        else:
            moved[place] = _ENDS.min if is_far else -distance
    return moved


def _random(*arrays: np.ndarray) -> np.random.Generator:
    return np.random.default_rng([zlib.crc32(x.tobytes()) for x in arrays])
