"""Peak rates of devices: published figures, and measured rates of matrix products and copies."""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from cupyfa import cache_folder
from cupyfa.errors import DeviceError, nearest
from cupyfa.lab.bench import timing
from cupyfa.numerics.shown import Shown
from cupyfa.problem.dtypes import DTYPES
from cupyfa.runtime.backend import Backend

# Results of ex2.approx per clock and multiprocessor, compute capability 7.5 to 12.0: CUDA C++
# Programming Guide, throughput of native arithmetic instructions. FlashAttention-3 (Shah et al.,
# 2024, arXiv:2407.08608, section 3.1) uses this figure: 3.9 TFLOP/s of exponentials on an H100 SXM.
EXP2_PER_CLOCK = 16
_FLOAT8_SINCE = 89  # compute capability 8.9; float8 is twice as fast as float16 on all devices
_SIZES = (256, 512, 1024, 2048, 4096, 8192)  # sizes of the square matrices to multiply
_BYTES = tuple(2**n for n in (22, 24, 26, 28, 30))
_LONGEST = 100.0  # milliseconds; sizes that would take longer are not tried
_BUDGET = 0.2  # seconds for each size


@dataclass(frozen=True, repr=False)
class Device(Shown):
    """The published peak rates of a device.

    Tensor-core rates assume dense matrices and float32 accumulators; CUDA-core rates assume
    multiply-adds. Both count a multiply-add as 2 FLOP.

    clock: GHz at which the tensor-core peak is reached, None if unknown.
    tensor, plain: TFLOP/s of tensor cores and of CUDA cores, by dtype or "tf32".
    bandwidth: memory bandwidth in GB/s.
    source: publication that lists the figures.
    called: device names reported by CUDA, without "NVIDIA".
    """

    name: str
    arch: str
    multiprocessors: int
    clock: float | None
    tensor: Mapping[str, float]
    plain: Mapping[str, float]
    bandwidth: float
    source: str
    called: tuple[str, ...] = ()

    def peak(self, precision: str, *, tensor: bool) -> float:
        """Returns the peak TFLOP/s for operands of a precision.

        Without ``tensor``, or if tensor cores do not support the precision, returns the rate of
        CUDA cores, which multiply 16-bit operands in float32.
        """
        if tensor and precision == "float8_e4m3" and int(self.arch or 0) >= _FLOAT8_SINCE:
            return 2 * self.tensor["float16"]
        if tensor and precision in self.tensor:
            return self.tensor[precision]
        return self.plain["float64" if precision == "float64" else "float32"]

    @property
    def exponentials(self) -> float | None:
        """The peak rate of exponentials, in 10¹² per second."""
        return self.clock and EXP2_PER_CLOCK * self.multiprocessors * self.clock / 1e3


def _device(row: Mapping[str, str]) -> Device:
    """Creates a device from a table row; bfloat16 has the rates of float16."""
    tensor = {name: row[name] for name in ("float16", "tf32", "float64")}
    tensor["bfloat16"] = row["float16"]
    return Device(
        row["name"],
        row["arch"],
        int(row["multiprocessors"]),
        float(row["clock"]),
        {dtype: float(rate) for dtype, rate in tensor.items() if rate},
        {dtype: float(row[f"plain_{dtype}"]) for dtype in ("float32", "float64")},
        float(row["bandwidth"]),
        row["source"],
        tuple(row["called"].split("; ")),
    )


with Path(__file__).with_suffix(".csv").open(encoding="utf-8") as _table:
    DEVICES = {row["key"]: _device(row) for row in csv.DictReader(_table)}


def named(name: str) -> Device:
    """Returns the device with this key in DEVICES. Raises ValueError for an unknown key."""
    if name not in DEVICES:
        known = ", ".join(DEVICES)
        raise ValueError(
            f"device {name!r} is unknown{nearest(name, DEVICES)}; use one of {known}, or "
            "'this' for the local GPU"
        )
    return DEVICES[name]


def known_as(name: str) -> Device | None:
    """Returns the device with this CUDA name, such as "NVIDIA L4", or None if it is not listed."""
    short = name.removeprefix("NVIDIA ")
    return next((device for device in DEVICES.values() if short in device.called), None)


def product_rate(backend: Backend, precision: str) -> float | None:
    """Measures the TFLOP/s of a matrix product in a dtype or "tf32".

    Returns None if the backend has no library for matrix products in this precision.
    """
    if backend.limits.no_matmul or precision not in (*DTYPES, "tf32"):
        return None
    tf32 = precision == "tf32"
    dtype = DTYPES["float32" if tf32 else precision].numpy

    def call(size: int) -> timing.Call:
        a, b = (_random(backend, (1, 1, size, size), dtype, seed) for seed in (1, 2))
        out = backend.empty((1, 1, size, size), dtype)
        return partial(backend.matmul, a, b, out, 1.0, tf32=tf32)

    return _best(backend, precision, _SIZES, call, lambda size: 2 * size**3 / 1e9)


def copy_rate(backend: Backend) -> float | None:
    """Measures the GB/s of a large copy within device memory, counting reads and writes."""

    def call(size: int) -> timing.Call:
        source = _random(backend, (size // 4,), np.dtype(np.float32), 1)
        target = backend.empty((size // 4,), np.dtype(np.float32))
        return partial(target.__setitem__, slice(None), source)

    return _best(backend, "copy", _BYTES, call, lambda size: 2 * size / 1e6)


def read_rate(backend: Backend) -> float | None:
    """Measures the GB/s at which a sum reads a large array in device memory."""

    def call(size: int) -> timing.Call:
        return _random(backend, (size // 4,), np.dtype(np.float32), 1).sum

    return _best(backend, "read", _BYTES, call, lambda size: size / 1e6)


def _best(
    backend: Backend,
    what: str,
    sizes: Sequence[int],
    call: Callable[[int], timing.Call],
    work: Callable[[int], float],
) -> float | None:
    """Returns a cached rate, or measures problems of increasing size and returns the best rate.

    A rate is work per millisecond.
    """
    file = cache_folder.facts_file("peaks", backend.limits.device)
    fact = cache_folder.recall(file).get(what)
    if isinstance(fact, int | float) and isfinite(fact) and fact > 0:
        return float(fact)
    best = took = 0.0
    for i, size in enumerate(sizes):
        if i and took * work(size) / work(sizes[i - 1]) > _LONGEST:
            break
        try:
            with backend.working_on(None):
                (times,) = timing.measure(backend, [call(size)], budget=_BUDGET, cold=False)
        except (DeviceError, MemoryError):
            break
        took = median(times)
        best = max(best, work(size) / took)
    if best:
        cache_folder.remember(file, {**cache_folder.recall(file), what: best})
    return best or None


def _random(backend: Backend, shape: tuple[int, ...], dtype: np.dtype, seed: int) -> Any:
    """Uploads an array of random numbers (a million, repeated); zeros would draw less power."""
    numbers = np.random.default_rng(seed).standard_normal(2**20, np.float32)
    return backend.upload(np.resize(numbers.astype(dtype), shape))
