"""Computes in NumPy which weights dropout keeps; kernels do so in attention/dropout.cuh.

Philox 4x32-7 (Salmon et al., 2011, doi:10.1145/2063384.2063405), with the seed as its key, turns
the counter (key & ~9, query & ~8, batch * heads + head, offset) into four words of 32 bits, which
decide for eight pairs of query and key. Bit 3 of the key and bit 3 of the query choose the word,
bit 0 of the key its lower or upper half, and the last 14 bits of the half are compared. A pair is
kept if they are not below 16384 times the probability.
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
    """Dropout of the weights of the softmax, for ``attention``.

    rate: the probability, from 0 to below 1, with which a weight is set to 0, rounded to multiples
        of 1/16384; the others are multiplied by 1/(1 - rate).
    seed: a whole number of 64 bits. Give another one for each layer and step: calls keep no state.
    offset: a whole number of 32 bits, which selects other weights for the same seed.

    seed and offset may also be NumPy or CuPy arrays of one whole number, which kernels read when
    they run, so that a captured CUDA graph can drop other weights each time. The lowest 64 and 32
    bits are used. ``dropout_mask`` returns the pairs that are kept.
    """

    rate: float
    seed: Any
    offset: Any = 0


@dataclass(frozen=True)
class KeptWeights:
    """The weights that dropout keeps, with `heads` heads in each batch element.

    probability: that of dropping, 0 to 1, rounded to multiples of 1 / STEPS. seed: 64 bits. offset:
    32 bits.
    """

    probability: float
    seed: int
    offset: int
    heads: int

    @classmethod
    def of(
        cls, options: AttentionOptions, heads: int, *, seed: Any = None, offset: Any = None
    ) -> KeptWeights | None:
        """Returns the dropout of options, or None; arrays replace their seed and offset."""
        if not options.dropout or options.dropout_seed is None:
            return None
        own = options.dropout_seed if seed is None else _bits(seed, 64)
        number = options.dropout_offset if offset is None else _bits(offset, 32)
        return cls(options.dropout, own, number, heads)

    @property
    def least(self) -> int:
        """The smallest value of the 14 bits with which a weight is kept."""
        return round(self.probability * STEPS)

    @property
    def factor(self) -> float:
        """The factor of kept weights, 1 / (1 - probability)."""
        return STEPS / (STEPS - self.least)

    @property
    def round_keys(self) -> list[int]:
        """The two keys of each round."""
        halves = self.seed & 0xFFFFFFFF, self.seed >> 32
        return [
            (half + i * step) & 0xFFFFFFFF
            for i in range(ROUNDS)
            for half, step in zip(halves, _KEY_STEPS)
        ]

    def kept(self, batch: Array, head: Array, query: Array, key: Array) -> Array:
        """Returns True where weights are kept, in the shape that the indices broadcast to.

        batch, head [..., 1, 1], query [..., rows, 1] and key [..., keys] are whole numbers.
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
    """Returns the lowest ``count`` bits of the only element of an array."""
    return int(array.item()) & (2**count - 1)


def philox(counter: Sequence[Array], round_keys: Sequence[int]) -> Array:
    """Returns the four words of counters, as uint64 [4, ...]; the words of counters broadcast."""
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
