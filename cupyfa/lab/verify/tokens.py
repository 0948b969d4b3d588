"""Appends new tokens to a paged KV cache and applies rotary embeddings before attention."""

import numpy as np

from cupyfa.arrays import kv_cache
from cupyfa.errors import WrongResult
from cupyfa.lab.verify.case import WRITTEN, Case
from cupyfa.ladder.operations import Arrays
from cupyfa.problem.optional_inputs import PADDED, PAGE_TABLE
from cupyfa.problem.problem import Problem
from cupyfa.runtime.backend import Backend

_MORE = 5  # extra rows of the rotary tables, for positions shifted by prefix keys


def written(backend: Backend, case: Case, inputs: Arrays) -> Arrays:
    """Appends new tokens to the cache, applies rotary embeddings and returns attention's inputs.

    The last rows of each batch element are its new tokens. Raises WrongResult if they are written
    incorrectly or if any other row of the cache changes.
    """
    if case.tokens == "cached":
        return inputs
    p = case.problem
    if not p.pages or not 0 < p.M <= p.N:
        raise ValueError(
            f"tokens is {case.tokens!r}, which requires page_size and an M between 1 and N"
        )
    rng = np.random.default_rng((case.seed, *b"tokens"))
    lengths, table = inputs[f"mods.{PADDED[1]}"], inputs[f"mods.{PAGE_TABLE}"]
    filled = {name: inputs[name].copy() for name in "KV"}
    new: tuple[np.ndarray, np.ndarray] | None = None
    before = lengths
    if case.tokens in WRITTEN:
        before = (lengths - p.M).astype(np.int32)
        new = tuple(_taken_out(x, before, table, p) for x in filled.values())  # type: ignore[assignment]
    rotary = None
    if case.tokens != "appended":
        rotary = kv_cache.Rotary(*_angles(rng, p), interleaved=case.tokens == "interleaved")
    cache = kv_cache.KVCache(filled["K"], filled["V"], before, table, rotary=rotary)
    unwritten = {name: x.copy() for name, x in filled.items()}
    prefix_keys = None
    if rotary is not None and rng.random() >= 0.5:
        prefix_keys = rng.integers(0, _MORE, p.batch).astype(np.int32)
    step = kv_cache.step(*(backend, inputs["Q"], cache, new), look=False, prefix_keys=prefix_keys)
    step.write_and_check()
    _check_rest(step, cache, unwritten, table, lengths, p)
    turned = step.q if backend.owns(inputs["Q"]) else backend.download(step.q)
    return {**inputs, "Q": turned, **filled}


def _places(before: np.ndarray, table: np.ndarray, p: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Returns the page of each new token and its row in that page, both [batch, tokens]."""
    rows = before[:, None] + np.arange(p.M)
    pages = np.take_along_axis(table, rows // p.page_size, axis=1)
    return pages, rows % p.page_size


def _taken_out(array: np.ndarray, before: np.ndarray, table: np.ndarray, p: Problem) -> np.ndarray:
    """Removes the new tokens' rows [batch, kv_heads, tokens, columns], leaving NaN in the cache."""
    pages, rows = _places(before, table, p)
    by_row = array.swapaxes(1, 2)
    found = np.ascontiguousarray(by_row[pages, rows].swapaxes(1, 2))
    by_row[pages, rows] = np.nan
    return found


def _angles(rng: np.random.Generator, p: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Returns cosines and sines of random angles per position, in q's dtype or that of the sums."""
    angles = rng.uniform(-4, 4, (p.N + _MORE, int(rng.integers(1, p.d // 2 + 1))))
    numbers = p.dtype.numpy if rng.random() < 0.5 else p.dtype.sums
    return np.cos(angles).astype(numbers), np.sin(angles).astype(numbers)


def _check_rest(
    step: kv_cache.Step,
    cache: kv_cache.KVCache,
    before: Arrays,
    table: np.ndarray,
    lengths: np.ndarray,
    p: Problem,
) -> None:
    """Raises WrongResult if lengths are wrong or a row that holds no new token has changed."""
    used = step.backend.download(step.lengths) if step.is_moved else step.lengths
    if (used != lengths).any():
        raise WrongResult(
            f"append_keys on {cache!r}: lengths are {used} after the call; expected {lengths}"
        )
    new = np.zeros(before["K"].shape[:3:2], bool)  # [pages, page_size]
    if (cache.lengths != lengths).any():
        new[_places(cache.lengths, table, p)] = True
    for name, now in (("K", cache.k), ("V", cache.v)):
        bits = f"u{now.dtype.itemsize}"
        changed = (now.view(bits) != before[name].view(bits)).any(axis=(1, 3)) & ~new
        if changed.any():
            page, row = map(int, np.argwhere(changed)[0])
            raise WrongResult(
                f"append_keys on {cache!r} changed row {row} of page {page} of {name}"
            )
