"""Results of parts of the keys, merged."""

from __future__ import annotations

from typing import Any

import numpy as np


class Sums:
    """Outputs of parts of the keys, merged: each counts by exp of its lse."""

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.o: Any = None
        self.lse: Any = None

    def add(self, o: np.ndarray, lse: np.ndarray) -> None:
        o = o.astype(self.dtype)
        if self.o is None:
            self.o, self.lse = o, lse
            return
        with np.errstate(all="ignore"):  # rows that see no key are -inf, and NaN is data
            total = np.logaddexp(self.lse, lse)
            mine, its = (
                np.where(np.isneginf(total), 0, np.exp(x - total))[..., None]
                for x in (self.lse, lse)
            )
            self.o, self.lse = self.o * mine + o * its, total
