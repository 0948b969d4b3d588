"""Published peaks of devices: arithmetic, bandwidth, and the data sheets they come from.

Peaks of tensor cores are for dense matrices with float32 sums, those of the other units for
multiply-adds; both count 2 FLOP for a multiply-add.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


# Key, name, compute capability, multiprocessors, GHz; TFLOP/s of tensor cores in float16 (and
# bfloat16), tf32 and float64, of the other units in float32 and float64; GB/s.
_PEAKS = (
    ("t4", "NVIDIA T4", "75", 40, 1.59, 65.0, None, None, 8.1, 0.254, 320.0),
    ("a100", "NVIDIA A100 40GB", "80", 108, 1.41, 312.0, 156.0, 19.5, 19.5, 9.7, 1555.0),
    ("a100-80gb", "NVIDIA A100 80GB SXM", "80", 108, 1.41, 312.0, 156.0, 19.5, 19.5, 9.7, 2039.0),
    ("a10", "NVIDIA A10", "86", 72, 1.695, 125.0, 62.5, None, 31.2, 0.488, 600.0),
    ("rtx3090", "GeForce RTX 3090", "86", 82, 1.695, 71.0, 35.6, None, 35.6, 0.556, 936.0),
    ("l4", "NVIDIA L4", "89", 58, 2.04, 121.0, 60.0, None, 30.3, 0.473, 300.0),
    ("l40s", "NVIDIA L40S", "89", 142, 2.52, 362.0, 183.0, None, 91.6, 1.43, 864.0),
    ("rtx4060", "GeForce RTX 4060", "89", 24, 2.46, 30.2, 15.1, None, 15.1, 0.236, 272.0),
    ("rtx4090", "GeForce RTX 4090", "89", 128, 2.52, 165.2, 82.6, None, 82.6, 1.29, 1008.0),
    ("h100", "NVIDIA H100 SXM", "90", 132, 1.83, 989.4, 494.7, 66.9, 66.9, 33.5, 3352.0),
    ("h100-pcie", "NVIDIA H100 PCIe", "90", 114, 1.62, 756.0, 378.0, 51.2, 51.2, 25.6, 2039.0),
    ("h200", "NVIDIA H200 SXM", "90", 132, 1.83, 989.4, 494.7, 66.9, 66.9, 33.5, 4800.0),
    ("b200", "NVIDIA B200", "100", 148, 1.85, 2250.0, 1125.0, 37.0, 75.0, 37.0, 8000.0),
    ("rtx5090", "GeForce RTX 5090", "120", 170, 2.407, 209.5, 104.8, None, 104.8, 1.64, 1792.0),
)
_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet"
_ADA = "NVIDIA Ada GPU Architecture"
_RTX4060 = f"specifications at nvidia.com; tensor cores as in {_ADA}: 512 FLOP per clock"
_SOURCES = {
    "t4": ("NVIDIA T4 Tensor Core GPU data sheet", "Tesla T4"),
    "a100": (_A100, "A100-SXM4-40GB", "A100-PCIE-40GB"),
    "a100-80gb": (_A100, "A100-SXM4-80GB"),
    "a10": ("NVIDIA A10 Tensor Core GPU data sheet", "A10"),
    "rtx3090": ("NVIDIA Ampere GA102 GPU Architecture, appendix A", "GeForce RTX 3090"),
    "l4": ("NVIDIA L4 Tensor Core GPU data sheet", "L4"),
    "l40s": ("NVIDIA L40S GPU data sheet", "L40S"),
    "rtx4060": (_RTX4060, "GeForce RTX 4060"),
    "rtx4090": (f"{_ADA}, appendix A", "GeForce RTX 4090"),
    "h100": (_HOPPER, "H100 80GB HBM3"),
    "h100-pcie": (_HOPPER, "H100 PCIe"),
    "h200": ("NVIDIA H200 Tensor Core GPU data sheet", "H200"),
    "b200": ("NVIDIA HGX B200 data sheet; the clock follows from its float16 peak", "B200"),
    "rtx5090": ("NVIDIA RTX Blackwell GPU Architecture, appendix A", "GeForce RTX 5090"),
}


def _device(
    key: str, name: str, arch: str, multiprocessors: int, clock: float, *rates: Any
) -> Device:
    half, tf32, double, plain, plain_double, bandwidth = rates
    tensor = {"float16": half, "bfloat16": half, "tf32": tf32, "float64": double}
    tensor = {dtype: rate for dtype, rate in tensor.items() if rate}
    others = {"float32": plain, "float64": plain_double}
    about = (name, arch, multiprocessors, clock, tensor, others, bandwidth)
    source, *called = _SOURCES[key]
    return Device(*about, source, tuple(called))


DEVICES = {row[0]: _device(*row) for row in _PEAKS}


def named(name: str) -> Device:
    """The device of a key in DEVICES. Raises ValueError for another."""
    if name not in DEVICES:
        raise ValueError(f"device {name!r} is unknown; there are {', '.join(DEVICES)}, and this")
    return DEVICES[name]


def known_as(name: str) -> Device | None:
    """The device with a CUDA name such as "NVIDIA GeForce RTX 4060"; None if it is not listed."""
    short = name.removeprefix("NVIDIA ")
    return next((device for device in DEVICES.values() if short in device.called), None)
