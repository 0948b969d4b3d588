"""The records that describe a kernel to everything else; one record per version.

A kernel is one or more launches of ``.cu`` files (or matrix products, for the baselines). Its
record says which arguments, grid, threads and shared memory each launch takes, as one-line
arithmetic on the problem ``p`` and the constants ``c``. Users write records for their own files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from cupyfa.problem import Problem

Formula = Callable[[Problem, SimpleNamespace], int]
Grid = Callable[[Problem, SimpleNamespace], "int | tuple[int, ...]"]

FEATURES = ("causal", "gqa", "strides", "lse", "dv")
ARCHES = ("75", "80", "86", "89", "90", "100", "120")


def cdiv(count: int, size: int) -> int:
    """How many tiles of ``size`` cover ``count``."""
    return -(-count // size)


def padded(width: int, itemsize: int) -> int:
    """The row length that padding.cuh gives a tile: an odd multiple of 16 bytes, in elements."""
    step = 16 // itemsize
    return (cdiv(width, step) | 1) * step


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    ``entry`` is the name of the ``extern "C"`` function and of its file; ``file`` says where that
    is if not in the folder of the kernel's operation. ``args`` are the arguments in order, out of

    - arrays: the operation's (``Q K V O lse``, or ``S P lse``) and the kernel's scratch, each
      passed as the struct Tensor of tensor.cuh, or as a bare pointer if written ``Q.data``;
    - int32: ``M N heads kv_heads batch group diagonal``;
    - ``scale``, as float (as double for float64).

    ``grid`` counts blocks (one number, or up to three), ``threads`` a block's threads and
    ``shared`` the bytes of dynamic shared memory of one block. ``when`` says which problems need
    this launch at all.
    """

    entry: str
    args: str
    grid: Grid
    threads: Formula
    shared: Formula = lambda p, c: 0
    file: str | Path | None = None
    when: Callable[[Problem], bool] = lambda p: True


@dataclass(frozen=True)
class Matmul:
    """``out = a b * scale`` per head, left to cuBLAS; ``"K.T"`` is K transposed."""

    out: str
    a: str
    b: str
    scaled: bool = False


@dataclass(frozen=True)
class Kernel:
    """One version of an operation.

    adds: what this version adds to the one before, in a few words.
    tiles: the constants it is compiled with, in order of preference; a plan takes the first that
        fits the device and what the caller fixed.
    rules: what constants must keep, as ``{"in words": c -> bool}``.
    features: what it can do beyond the plain case: "causal", "gqa", "strides" (else inputs are
        copied to be contiguous), "lse" (else it is not returned), "dv" (dv other than d).
    scratch: temporaries, as ``{name: (axes, "real" | "scalar")}``.
    arch: the least compute capability.
    rounding: the precision that operands are rounded to by design, where that is not the dtype's.
    tflops: what it reached on an H100 SXM, as ``{dtype: {d: TFLOP/s}}``, at batch 4, heads 16,
        M = N = 2048; a softmax at 16384 rows of 4096, under d = 0. ``kernel="auto"`` goes by it,
        and never takes a kernel that was not measured.
    folder: where the files of a kernel from outside the project are.
    """

    name: str
    adds: str
    launches: Sequence[Launch | Matmul]
    operation: str = "forward"
    tiles: Sequence[Mapping[str, int]] = ({},)
    rules: Mapping[str, Callable[[SimpleNamespace], bool]] = field(default_factory=dict)
    dtypes: Sequence[str] = ("float16", "bfloat16", "float32", "float64")
    features: Sequence[str] = ()
    scratch: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    arch: str = "75"
    rounding: str | None = None
    tflops: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    folder: Path | None = None

    def __post_init__(self) -> None:
        kinds = {kind for _, kind in self.scratch.values()}
        mistakes = {
            "tiles must hold at least one mapping, if an empty one": not self.tiles,
            f"features are {', '.join(FEATURES)}": not set(self.features) <= set(FEATURES),
            f"arch is one of {', '.join(ARCHES)}": self.arch not in ARCHES,
            "scratch is {name: (axes, 'real' or 'scalar')}": not kinds <= {"real", "scalar"},
        }
        for rule, broken in mistakes.items():
            if broken:
                raise ValueError(f"Kernel {self.name!r}: {rule}")

    @property
    def arches(self) -> tuple[str, ...]:
        """The architectures it can be compiled for."""
        return tuple(arch for arch in ARCHES if int(arch) >= int(self.arch))

    def steps(self, p: Problem) -> tuple[Launch | Matmul, ...]:
        """The launches that a problem needs."""
        return tuple(x for x in self.launches if isinstance(x, Matmul) or x.when(p))
