"""The functions of tasks, which workers call with chunks that are NumPy or CuPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyfa.api import attention, backward
from cupyfa.partition.part_call import Call

Chunks = Sequence[Any]  # consecutive chunks of an array
OF_ROWS = ("q", "dout", "out", "lse", "dlse")  # dlse may be left out


class Attend(Call):
    """The attention of a chunk of rows to chunks of keys: (out, lse)."""

    def __call__(
        self, q: Any, ks: Chunks, vs: Chunks, skipped: int, offset: int | None
    ) -> tuple[Any, Any]:
        k, v = _joined(ks, skipped), _joined(vs, skipped)
        return attention(q, k, v, **self.forward_arguments(offset))


@dataclass(frozen=True)
class Differentiate(Call):
    """The gradients of ``wrt`` from some rows and keys; rows: chunks of the arrays OF_ROWS."""

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
    """The output of a task, converted to ``dtype``: float32 results are rounded only here."""
    return result[0].astype(dtype, copy=False)


def _joined(chunks: Chunks, skipped: int) -> Any:
    """Concatenates chunks along the axis of rows, on the device where they are."""
    whole = chunks[0] if len(chunks) == 1 else np.concatenate(chunks, axis=2)
    return whole[:, :, skipped:]
