"""The ``Job`` that both schedules run: how rows are divided, and the calls on parts of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from cupyfa.call.call import Call
from cupyfa.call.prepare import find_prepared
from cupyfa.distributed.communicator import Group
from cupyfa.distributed.packing import in_words, new
from cupyfa.distributed.shards import Part, Shards
from cupyfa.partition.part_call import offset_of_part
from cupyfa.partition.position_names import places
from cupyfa.partition.visible_chunks import overlap, tile_of, visible_keys
from cupyfa.problem.problem import Problem
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.merging import merge, merge_results

_STEP_BYTES = 32 << 20  # bytes of keys and values that the L2 cache of a large GPU holds
_ROWS_OF_BLOCK = 128  # rows or keys per thread block


@dataclass(frozen=True)
class Job:
    """A distributed call: the whole problem, and how it is divided into calls on parts.

    q_shards, k_shards: how queries and keys are divided among ranks. call: what the calls on parts
    have in common. check: whether to compare their results with the reference.
    """

    group: Group
    problem: Problem
    q_shards: Shards
    k_shards: Shards
    call: Call
    check: bool
    backend: Backend
    in_host: bool  # whether the arrays are NumPy arrays

    @cached_property
    def rows(self) -> list[Part]:
        return self.q_shards.parts(self.group.rank)

    @cached_property
    def results(self) -> np.dtype:
        """The dtype of out, dq, dk and dv."""
        return self.problem.out_dtype.numpy

    @cached_property
    def sums(self) -> np.dtype:
        """The dtype in which results of several ranks are added up."""
        return self.problem.dtype.sums

    def call_of(self, first_row: int, first_key: int) -> Call:
        """Returns the call on a part that begins at these rows and keys of the sequence."""
        offset = offset_of_part(self.problem, first_row, first_key)
        options = self.call.options
        assert options is not None
        return self.call._replace(options=replace(options, offset=offset))

    def run(self, call: Call, *arrays: Any) -> Any:
        """Runs the call on a part, whose arrays are slices of arrays that have been checked."""
        prepared, _ = find_prepared(call, self.backend, arrays, self.backend.forms(arrays))
        return prepared.run(arrays, prepared.all_new, check=self.check)

    def merge(self, parts: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
        """Merges the (out, lse) of several sets of keys into the result for all keys."""
        if len(parts) == 1:
            return parts[0]
        if self.backend.owns(parts[0][0]):
            return merge_results(self.backend, parts)
        return merge(parts, backend=self.backend)

    def sees(self, rows: range, keys: range) -> bool:
        """Returns whether any of these queries sees any of these keys."""
        return overlap(keys, visible_keys(self.problem, rows))

    def seen(self, rows: range) -> range:
        """Returns the range of keys that these queries see, which starts at a tile boundary.

        Returns one key if they see none, and all keys if an expression uses key indices.
        """
        p = self.problem
        if self._counts_keys:
            return range(p.N)
        return visible_keys(p, rows, tile_of(self.call.tiles or {})) or range(min(p.N, 1))

    @cached_property
    def _counts_keys(self) -> bool:
        return not {"position", "key", "keys"}.isdisjoint(places(self.problem.options))

    def heads_of_rows(self) -> int:
        """Returns the number of key heads per "gather" step of the forward pass."""
        p = self.problem
        rows = -(-p.M // sum(map(len, self.q_shards.ranges)))
        return self._heads(2, p.batch * p.group * -(-rows // _ROWS_OF_BLOCK), _STEP_BYTES)

    def heads_of_keys(self) -> int:
        """Returns the number of key heads per "gather" step of the backward pass."""
        p = self.problem
        # The first range of rows sees only this many keys under a causal mask.
        keys = -(-p.N // sum(map(len, self.q_shards.ranges)))
        return self._heads(1, p.batch * -(-keys // _ROWS_OF_BLOCK), 2 * _STEP_BYTES)

    def _heads(self, blocks: int, of_head: int, size: int) -> int:
        """Returns how many heads fill the GPU with ``blocks`` blocks per multiprocessor.

        of_head: blocks per head. size: more heads are added as long as their k and v together take
        at most this many bytes.
        """
        p = self.problem
        blocks *= self.backend.limits.multiprocessors
        keys = p.batch * p.N * (p.d + p.dv) * p.dtype.numpy.itemsize
        return max(-(-blocks // max(of_head, 1)), size // max(keys, 1))

    def steps_of_heads(self, wanted: int) -> Iterator[tuple[slice, slice]]:
        """Yields slices of key heads and of their query heads for each "gather" step.

        Divides the heads evenly into steps of about ``wanted`` key heads.
        """
        p = self.problem
        count = -(-p.kv_heads // max(min(wanted, p.kv_heads), 1))
        step = max(-(-p.kv_heads // max(count, 1)), 1)
        for first in range(0, p.kv_heads, step):
            last = min(first + step, p.kv_heads)
            yield slice(first, last), slice(p.group * first, p.group * last)

    def rows_of_messages(self, messages: Any) -> Any:
        """Reorders the messages of all ranks, [ranks · most, …], into the rows of the sequence."""
        places = self._places()
        if places is None:
            return messages[: self.k_shards.n]
        (words,) = in_words(messages)
        return np.take(words, places, axis=0).view(messages.dtype)

    def messages_of_rows(self, rows: Any) -> Any:
        """Reorders the rows of the sequence into one message per rank, [ranks · most, …].

        Padding rows stay uninitialized.
        """
        messages = new(rows, (self.group.ranks * self.k_shards.most, *rows.shape[1:]))
        places = self._places()
        to, words = in_words(messages, rows)
        to[slice(self.k_shards.n) if places is None else places] = words
        return messages

    def _places(self) -> Any:
        """Returns the index of each key's row in the messages; caches the result.

        Returns None if the messages contain the keys in the order of the sequence.
        """
        key = self.k_shards, self.in_host
        if key not in self.group.kept:
            places: Any = self.k_shards.padded_places
            if (places == np.arange(self.k_shards.n)).all():
                places = None
            elif not self.in_host:
                places = self.backend.upload(places)
            self.group.kept[key] = places
        return self.group.kept[key]
