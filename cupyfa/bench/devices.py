"""Published peaks of devices: arithmetic, bandwidth, and the data sheets they come from.

Peaks of tensor cores are for dense matrices with float32 sums, those of the other units for
multiply-adds; both count 2 FLOP for a multiply-add.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Results of ex2.approx per clock and multiprocessor, compute capability 7.5 to 12.0: CUDA C++
# Programming Guide, throughput of native arithmetic instructions. FlashAttention-3 (Shah et al.,
# 2024, arXiv:2407.08608, section 3.1) uses the same: 3.9 TFLOP/s of exponentials on an H100 SXM.
EXP2_PER_CLOCK = 16
_FLOAT8_SINCE = 89  # compute capability 8.9; twice as fast as float16 on all devices here


@dataclass(frozen=True)
class Device:
    """The peaks of a device.

    clock: GHz at the peak of the tensor cores, None if unknown.
    tensor, plain: TFLOP/s of tensor cores and of the other units by dtype; "tf32" is one here.
    bandwidth: GB/s. source: where the figures come from. called: CUDA's names, without "NVIDIA".
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
        """TFLOP/s for operands of a precision.

        The plain units compute what tensor cores cannot, and 16-bit operands in float32.
        """
        if tensor and precision == "float8_e4m3" and int(self.arch or 0) >= _FLOAT8_SINCE:
            return 2 * self.tensor["float16"]
        if tensor and precision in self.tensor:
            return self.tensor[precision]
        return self.plain["float64" if precision == "float64" else "float32"]

    @property
    def exponentials(self) -> float | None:
        """10¹² exponentials a second."""
        return self.clock and EXP2_PER_CLOCK * self.multiprocessors * self.clock / 1e3


def _device(row: Mapping[str, str]) -> Device:
    """A row of the table; its rates of tensor cores in float16 are also those in bfloat16."""
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
    """The device of a key in DEVICES. Raises ValueError for another."""
    if name not in DEVICES:
        raise ValueError(f"device {name!r} is unknown; there are {', '.join(DEVICES)}, and this")
    return DEVICES[name]


def known_as(name: str) -> Device | None:
    """The device with a CUDA name such as "NVIDIA GeForce RTX 4060"; None if it is not listed."""
    short = name.removeprefix("NVIDIA ")
    return next((device for device in DEVICES.values() if short in device.called), None)
