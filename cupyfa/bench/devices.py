"""What devices can do by their makers' sheets: peaks of arithmetic, bandwidth, and where from.

The peak of tensor cores is that of dense matrices with sums in float32, the one of the plain units
that of multiply-adds; both count 2 for a multiply-add.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Results of ex2.approx per clock and multiprocessor, from compute capability 7.5 to 12.0: CUDA C++
# Programming Guide, throughput of native arithmetic instructions. FlashAttention-3 (Shah et al.,
# 2024, arXiv:2407.08608, section 3.1) goes by it: 3.9 TFLOP/s of exponentials on an H100 SXM.
EXP2_PER_CLOCK = 16
_FLOAT8_SINCE = 89  # compute capability 8.9; twice as fast as 16 bits on all devices here


@dataclass(frozen=True)
class Device:
    """A device: multiprocessors, their clock in GHz, TFLOP/s by dtype, GB/s, and the source.

    ``tensor`` is what tensor cores do with inputs of a dtype ("tf32" is one here), ``plain`` what
    the other units do. ``clock`` is the one that the peak of the tensor cores is told for, or None
    if it is not known. ``called`` are CUDA's names for it, without "NVIDIA".
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
        """TFLOP/s on inputs rounded to a precision; sums of 16-bit inputs are float32's work.

        What tensor cores cannot take, the plain units do.
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


def _halves(tflops: float, tf32: float, **more: float) -> dict[str, float]:
    return {"float16": tflops, "bfloat16": tflops, "tf32": tf32, **more}


_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet"
_ADA = "NVIDIA Ada GPU Architecture"

DEVICES = {
    "t4": Device(
        *("NVIDIA T4", "75", 40, 1.59),
        *({"float16": 65.0}, {"float32": 8.1, "float64": 0.254}, 320.0),
        source="NVIDIA T4 Tensor Core GPU data sheet",
        called=("Tesla T4",),
    ),
    "a100": Device(
        *("NVIDIA A100 40GB", "80", 108, 1.41),
        *(_halves(312.0, 156.0, float64=19.5), {"float32": 19.5, "float64": 9.7}, 1555.0),
        source=_A100,
        called=("A100-SXM4-40GB", "A100-PCIE-40GB"),
    ),
    "a100-80gb": Device(
        *("NVIDIA A100 80GB SXM", "80", 108, 1.41),
        *(_halves(312.0, 156.0, float64=19.5), {"float32": 19.5, "float64": 9.7}, 2039.0),
        source=_A100,
        called=("A100-SXM4-80GB",),
    ),
    "a10": Device(
        *("NVIDIA A10", "86", 72, 1.695),
        *(_halves(125.0, 62.5), {"float32": 31.2, "float64": 0.488}, 600.0),
        source="NVIDIA A10 Tensor Core GPU data sheet",
        called=("A10",),
    ),
    "rtx3090": Device(
        *("GeForce RTX 3090", "86", 82, 1.695),
        *(_halves(71.0, 35.6), {"float32": 35.6, "float64": 0.556}, 936.0),
        source="NVIDIA Ampere GA102 GPU Architecture, appendix A",
        called=("GeForce RTX 3090",),
    ),
    "l4": Device(
        *("NVIDIA L4", "89", 58, 2.04),
        *(_halves(121.0, 60.0), {"float32": 30.3, "float64": 0.473}, 300.0),
        source="NVIDIA L4 Tensor Core GPU data sheet",
        called=("L4",),
    ),
    "l40s": Device(
        *("NVIDIA L40S", "89", 142, 2.52),
        *(_halves(362.0, 183.0), {"float32": 91.6, "float64": 1.43}, 864.0),
        source="NVIDIA L40S GPU data sheet",
        called=("L40S",),
    ),
    "rtx4060": Device(
        *("GeForce RTX 4060", "89", 24, 2.46),
        *(_halves(30.2, 15.1), {"float32": 15.1, "float64": 0.236}, 272.0),
        source=f"its specifications at nvidia.com; tensor cores as in {_ADA}: 512 FLOP per clock",
        called=("GeForce RTX 4060",),
    ),
    "rtx4090": Device(
        *("GeForce RTX 4090", "89", 128, 2.52),
        *(_halves(165.2, 82.6), {"float32": 82.6, "float64": 1.29}, 1008.0),
        source=f"{_ADA}, appendix A",
        called=("GeForce RTX 4090",),
    ),
    "h100": Device(
        *("NVIDIA H100 SXM", "90", 132, 1.83),
        *(_halves(989.4, 494.7, float64=66.9), {"float32": 66.9, "float64": 33.5}, 3352.0),
        source=_HOPPER,
        called=("H100 80GB HBM3",),
    ),
    "h100-pcie": Device(
        *("NVIDIA H100 PCIe", "90", 114, 1.62),
        *(_halves(756.0, 378.0, float64=51.2), {"float32": 51.2, "float64": 25.6}, 2039.0),
        source=_HOPPER,
        called=("H100 PCIe",),
    ),
    "h200": Device(
        *("NVIDIA H200 SXM", "90", 132, 1.83),
        *(_halves(989.4, 494.7, float64=66.9), {"float32": 66.9, "float64": 33.5}, 4800.0),
        source="NVIDIA H200 Tensor Core GPU data sheet",
        called=("H200",),
    ),
    "b200": Device(
        *("NVIDIA B200", "100", 148, 1.85),
        *(_halves(2250.0, 1125.0, float64=37.0), {"float32": 75.0, "float64": 37.0}, 8000.0),
        source="NVIDIA HGX B200 data sheet; the clock as its float16 peak implies",
        called=("B200",),
    ),
    "rtx5090": Device(
        *("GeForce RTX 5090", "120", 170, 2.407),
        *(_halves(209.5, 104.8), {"float32": 104.8, "float64": 1.64}, 1792.0),
        source="NVIDIA RTX Blackwell GPU Architecture, appendix A",
        called=("GeForce RTX 5090",),
    ),
}


def named(name: str) -> Device:
    """The device of a name in DEVICES. Raises ValueError, with the names there are."""
    if name not in DEVICES:
        raise ValueError(f"device {name!r} is unknown; there are {', '.join(DEVICES)}, and this")
    return DEVICES[name]


def known_as(name: str) -> Device | None:
    """The device that CUDA calls so, as "NVIDIA GeForce RTX 4060"; None if it is not known."""
    short = name.removeprefix("NVIDIA ")
    return next((device for device in DEVICES.values() if short in device.called), None)
