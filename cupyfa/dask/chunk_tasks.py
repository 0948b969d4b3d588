"""The functions that Dask workers call on chunks, which are NumPy or CuPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyfa.api import attention, backward
from cupyfa.partition.part_call import Call

Chunks = Sequence[Any]  # consecutive chunks of an array
OF_ROWS = ("q", "dout", "out", "lse", "dlse")  # inputs of the backward pass; dlse is optional


class Attend(Call):
    """A task that computes (out, lse) for one chunk of q and consecutive chunks of keys."""

    def __call__(
        self, q: Any, ks: Chunks, vs: Chunks, skipped: int, offset: int | None
    ) -> tuple[Any, Any]:
        k, v = _joined(ks, skipped), _joined(vs, skipped)
        return attention(q, k, v, **self.forward_arguments(offset))


@dataclass(frozen=True)
class Differentiate(Call):
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
