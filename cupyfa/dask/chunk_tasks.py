"""The functions that Dask workers call on chunks, which are NumPy or CuPy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyfa.api import attention, backward
from cupyfa.problem.options import AttentionOptions

Chunks = Sequence[Any]  # consecutive chunks of an array
OF_ROWS = ("q", "dout", "out", "lse", "dlse")  # inputs of the backward pass; dlse is optional


@dataclass(frozen=True)
class _Task:
    """The non-array arguments that all tasks of one problem share.

    options: the options of the whole problem, without an offset. captured: the numbers that
    expressions read. how: kernel, tiles, backend and check.
    """

    options: AttentionOptions
    captured: Mapping[str, Any] | None
    how: Mapping[str, Any]

    def arguments(self, offset: int | None) -> dict[str, Any]:
        """Returns the task's non-array arguments for a part at this query offset."""
        keywords = replace(self.options, offset=offset).keywords()
        return {**keywords, "captured": self.captured, **self.how}


class Attend(_Task):
    """A task that computes (out, lse) for one chunk of q and consecutive chunks of keys."""

    def __call__(
        self, q: Any, ks: Chunks, vs: Chunks, skipped: int, offset: int | None
    ) -> tuple[Any, Any]:
        k, v = _joined(ks, skipped), _joined(vs, skipped)
        more = self.arguments(offset)
        return attention(q, k, v, out=self.options.out_dtype, return_lse=True, **more)


@dataclass(frozen=True)
class Differentiate(_Task):
    """A task that computes the gradients with respect to ``wrt``.

    rows: the chunks of each array in OF_ROWS.
    """

    wrt: Sequence[str]

    def __call__(
        self,
        rows: Sequence[Chunks],
        ks: Chunks,
        vs: Chunks,
        skipped_rows: int,
        skipped_keys: int,
        offset: int | None,
    ) -> tuple[Any, ...]:
        of_rows = {name: _joined(x, skipped_rows) for name, x in zip(OF_ROWS, rows)}
        k, v = _joined(ks, skipped_keys), _joined(vs, skipped_keys)
        more = self.arguments(offset)
        return backward(k=k, v=v, wrt=self.wrt, **of_rows, **more)


def output(result: tuple[Any, Any], dtype: Any) -> Any:
    """Returns a task's out, converted to ``dtype``."""
    return result[0].astype(dtype, copy=False)


def _joined(chunks: Chunks, skipped: int) -> Any:
    """Concatenates chunks along the row axis and drops the first ``skipped`` rows."""
    whole = chunks[0] if len(chunks) == 1 else np.concatenate(chunks, axis=2)
    return whole[:, :, skipped:]
