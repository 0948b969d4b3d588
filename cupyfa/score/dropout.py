"""Dropout masks in NumPy, equal to the kernels' masks (attention/dropout.cuh).

Philox 4x32-7 (Salmon et al., 2011, doi:10.1145/2063384.2063405), keyed by the seed, maps the
counter (key & ~9, query & ~8, batch * heads + head, offset) to four 32-bit words, enough for eight
(query, key) pairs. Bit 3 of the key index and bit 3 of the query index select the word, and bit 0
of the key index selects its lower or upper half. A pair is kept if the last 14 bits of that half
are at least 16384 times the dropout probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from cupyfa.problem.options import AttentionOptions

Array = np.ndarray[Any, Any]

STEPS = 1 << 14  # probabilities are multiples of 1 / STEPS
ROUNDS = 7
_LOW = np.uint64(0xFFFFFFFF)
_FACTORS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85


class Dropout(NamedTuple):
    """Dropout of softmax weights, for ``attention``.

    rate: the probability of setting a weight to 0, from 0 to below 1, rounded to multiples of
        1/16384; kept weights are multiplied by 1/(1 - rate).
    seed: a 64-bit integer. Use a different seed for each layer and step, because calls keep no
        state.
    offset: a 32-bit integer that selects a different mask for the same seed.

    seed and offset may also be NumPy or CuPy arrays with one integer, which kernels read at run
    time, so that each replay of a CUDA graph can drop different weights. Only the lowest 64 and 32
    bits are used. ``dropout_mask`` returns the kept pairs.
    """

    rate: float
    seed: Any
    offset: Any = 0


@dataclass(frozen=True)
class KeptWeights:
    """The dropout mask of a problem with `heads` heads.

    probability: the dropout probability, 0 to 1, rounded to multiples of 1 / STEPS. seed: 64 bits.
    offset: 32 bits.
    """

    probability: float
    seed: int
    offset: int
    heads: int

    @classmethod
    def of(
        cls, options: AttentionOptions, heads: int, *, seed: Any = None, offset: Any = None
    ) -> KeptWeights | None:
        """Returns the dropout mask of options, or None; seed and offset override the options."""
        if not options.dropout or options.dropout_seed is None:
            return None
        own = options.dropout_seed if seed is None else _bits(seed, 64)
        number = options.dropout_offset if offset is None else _bits(offset, 32)
        return cls(options.dropout, own, number, heads)

    @property
    def least(self) -> int:
        """Threshold for the 14 random bits: a weight is kept if they are at least this large."""
        return round(self.probability * STEPS)

    @property
    def factor(self) -> float:
        """Factor by which kept weights are multiplied, 1 / (1 - probability)."""
        return STEPS / (STEPS - self.least)

    @property
    def round_keys(self) -> list[int]:
        halves = self.seed & 0xFFFFFFFF, self.seed >> 32
        return [
            (half + i * step) & 0xFFFFFFFF
            for i in range(ROUNDS)
            for half, step in zip(halves, _KEY_STEPS)
        ]

    def kept(self, batch: Array, head: Array, query: Array, key: Array) -> Array:
        """Returns a bool array [..., rows, keys], True where weights are kept.

        batch, head [..., 1, 1], query [..., rows, 1] and key [..., keys] are integer arrays.
        """
        queries, of_query = np.unique(query.ravel() & ~8, return_inverse=True)
        keys, of_key = np.unique(key.ravel() & ~9, return_inverse=True)
        counter = keys, queries[:, None], batch * self.heads + head, np.asarray(self.offset)
        words = philox(counter, self.round_keys)[..., of_query[:, None], of_key]
        query, key = query.reshape(-1, 1), key.ravel()
        which = np.broadcast_to((key >> 3 & 1) * 2 + (query >> 3 & 1), words.shape[1:])
        word = np.take_along_axis(words, which[None], 0)[0]
        half = np.where(key & 1, word >> np.uint64(16), word)
        return half % np.uint64(STEPS) >= self.least


def _bits(array: Array, count: int) -> int:
    return int(array.item()) & (2**count - 1)


def philox(counter: Sequence[Array], round_keys: Sequence[int]) -> Array:
    """Applies Philox to a counter of four broadcastable words; returns uint64 [4, ...]."""
    a, b, c, d = (np.asarray(x).astype(np.uint64) & _LOW for x in counter)
    keys = [np.uint64(x) for x in round_keys]
    for of_even, of_odd in zip(keys[::2], keys[1::2]):
        x, y = a * _FACTORS[0], c * _FACTORS[1]
        a, b, c, d = (
            (y >> np.uint64(32)) ^ b ^ of_even,
            y & _LOW,
            (x >> np.uint64(32)) ^ d ^ of_odd,
            x & _LOW,
        )
    return np.stack(np.broadcast_arrays(a, b, c, d))
