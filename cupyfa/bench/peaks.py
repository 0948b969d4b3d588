"""The peak rates of a device, measured once: matrix products and copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite
from statistics import median
from typing import Any

import numpy as np

from cupyfa import store
from cupyfa.bench import timing
from cupyfa.dtypes import DTYPES
from cupyfa.errors import DeviceError
from cupyfa.runtime.backend import Backend

_SIZES = (256, 512, 1024, 2048, 4096, 8192)  # of square matrices
_BYTES = tuple(2**n for n in (22, 24, 26, 28, 30))
_LONGEST = 100.0  # milliseconds; longer sizes are not tried
_BUDGET = 0.2  # seconds for each size


def product_rate(engine: Backend, precision: str) -> float | None:
    """TFLOP/s of a large product in a precision: a dtype, or "tf32"; None without a library."""
    if engine.limits.no_matmul or precision not in (*DTYPES, "tf32"):
        return None
    tf32 = precision == "tf32"
    dtype = DTYPES["float32" if tf32 else precision].numpy

    def call(size: int) -> timing.Call:
        a, b = (_random(engine, (1, 1, size, size), dtype, seed) for seed in (1, 2))
        out = engine.empty((1, 1, size, size), dtype)
        return partial(engine.matmul, a, b, out, 1.0, tf32=tf32)

    return _best(engine, precision, _SIZES, call, lambda size: 2 * size**3 / 1e9)


def copy_rate(engine: Backend) -> float | None:
    """GB/s of a large copy in the device's memory, counting bytes read and bytes written."""

    def call(size: int) -> timing.Call:
        source = _random(engine, (size // 4,), np.dtype(np.float32), 1)
        target = engine.empty((size // 4,), np.dtype(np.float32))
        return partial(target.__setitem__, slice(None), source)

    return _best(engine, "copy", _BYTES, call, lambda size: 2 * size / 1e6)


def _best(
    engine: Backend,
    what: str,
    sizes: Sequence[int],
    call: Callable[[int], timing.Call],
    work: Callable[[int], float],
) -> float | None:
    """The stored rate, work per millisecond, or else the best of growing sizes, which is stored."""
    file = store.facts_file("peaks", engine.limits.device)
    fact = store.recall(file).get(what)
    if isinstance(fact, int | float) and isfinite(fact) and fact > 0:
        return float(fact)
    best = took = 0.0
    for i, size in enumerate(sizes):
        if i and took * work(size) / work(sizes[i - 1]) > _LONGEST:
            break
        try:
            with engine.working_on(None):
                (times,) = timing.measure(engine, [call(size)], budget=_BUDGET, cold=False)
        except (DeviceError, MemoryError):
            break
        took = median(times)
        best = max(best, work(size) / took)
    if best:
        store.remember(file, {**store.recall(file), what: best})
    return best or None


def _random(engine: Backend, shape: tuple[int, ...], dtype: np.dtype, seed: int) -> Any:
    """A million random numbers, repeated; zeros would need less power."""
    numbers = np.random.default_rng(seed).standard_normal(2**20, np.float32)
    return engine.upload(np.resize(numbers.astype(dtype), shape))
