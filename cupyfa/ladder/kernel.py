"""The records that describe a kernel to everything else; one record per version.

A kernel is one or more launches of ``.cu`` files (or matrix products, for the baselines). Its
record says which arguments, grid, threads and shared memory each launch takes, as one-line
arithmetic on the problem ``p`` and the constants ``c``. Users write records for their own files.
"""

from __future__ import annotations

import numbers
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cupyfa.dtypes import DTYPES
from cupyfa.numerics import reference
from cupyfa.problem import FLOAT8, PRECISIONS, Problem

Formula = Callable[[Problem, SimpleNamespace], int]
Grid = Callable[[Problem, SimpleNamespace], "int | tuple[int, ...]"]

AXES = ("batch", "heads", "kv_heads", "M", "N", "d", "dv", "d8", "dv8", "d16", "N32")
_MUCH = 0.05  # of a problem's tiles to be empty
_MORE, _FAR_MORE = 1.15, 1.5  # times as many scores as with other tiles
_FEW = 4  # tiles of keys, of which a mask hides much of one
KINDS = ("real", "scalar", "operand", "byte")  # of scratch
# What the text above every kernel's file declares.
RESERVED = (
    *("d", "dv", "causal", "windowed", "threads", "shared_bytes"),
    *("scalar", "operand", "real"),
    *("multiprocessors", "round"),  # in formulas alone
)
FEATURES = ("causal", "window", "gqa", "strides", "lse", "dv")
ARCHES = ("75", "80", "86", "89", "90", "100", "120")
WITH_THEIR_OWN = ("90a", "100a", "120a")  # instructions, which no other architecture has
MOST_BOX_ROWS = 256
_FORMS = ("", "data", "map")  # of array arguments
_BOXES_SINCE = 90
_KEEPS = ("rows", "keys", "neither", "nothing")


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

    - arrays: the operation's (``Q K V O lse``, of gradients also ``dO dQ dK dV``; or ``S P lse``)
      and the kernel's scratch, each passed as the struct Tensor of tensor.cuh, as a bare pointer if
      written ``Q.data``, or as the struct TensorMap of tma.cuh if written ``Q.map``;
    - int32: ``M N heads kv_heads batch group``, of the mask ``causal_offset window_offset`` (also
      named ``diagonal lower``), and those of ``numbers``, which are more of them, as
      ``{"name": lambda p, c: …}``;
    - ``scale``, as float (as double for float64);
    - ``sizes``, the struct Sizes of extent.cuh: M, N and the two offsets of the mask;
    - ``mods``, the struct Mods that the host declares above the file: the numbers of the options
      that change scores. It is empty if the problem has none.

    ``grid`` counts blocks (one number, or up to three), ``threads`` a block's threads and
    ``shared`` the bytes of dynamic shared memory of one block. ``constants`` are more for its text,
    as ``{"name": lambda p, c: …}``. ``when`` says which problems need this launch at all. A grid of
    blocks that stay and take one tile after another finds in ``c.multiprocessors`` how many the
    device has, as numbers do; the simulator has few, so that a block has several tiles there too.

    A kernel with ``rounds`` repeats the launches that are ``in_rounds``; their grids, numbers and
    moves find in ``c.round`` which round it is, from 0 on.

    ``boxes`` says for each ``Q.map`` how many rows, at most 256, a box of the array has, as
    ``{"Q": lambda p, c: c.Br}``; it has 64 columns of 16 bits, or 128 of 8. The copies of boxes
    need rows that begin at multiples of 16 bytes: an array that has none (an odd d, a negative or a
    broadcast axis, an odd offset) is copied to memory where they do, or, if an output, from there.

    ``keeps`` and ``moves`` are for counting bytes (traffic.py). A launch on Q and K goes through
    tiles of Br rows, or of as many as a box of Q has if those are more, and of Bc keys, or of as
    many as a box of K has: a block keeps its "rows" while keys pass by, or its "keys" while rows
    do, or "neither", if Q passes by again with each tile of keys; "nothing" says that there are no
    such tiles. Without it those that write dK keep keys, all others rows. ``moves`` says how many
    times an array is read or written where that is otherwise, as ``{"S": lambda p, c: 3}``; it
    finds ``c.multiprocessors`` as grids do.
    """

    entry: str
    args: str
    grid: Grid
    threads: Formula
    shared: Formula = lambda p, c: 0
    constants: Mapping[str, Formula] = field(default_factory=dict)
    file: str | Path | None = None
    when: Callable[[Problem], bool] = lambda p: True
    boxes: Mapping[str, Formula] = field(default_factory=dict)
    numbers: Mapping[str, Formula] = field(default_factory=dict)
    keeps: str | None = None
    moves: Mapping[str, Formula] = field(default_factory=dict)
    in_rounds: bool = False

    def __post_init__(self) -> None:
        _check(self, _LAUNCH_RULES)

    @property
    def arrays(self) -> tuple[tuple[str, str], ...]:
        """The names of its arguments, and how they are passed: "", "data" or "map"."""
        parts = (name.partition(".") for name in self.args.split())
        return tuple((name, form) for name, _, form in parts)


@dataclass(frozen=True)
class Matmul:
    """``out = a b * scale`` per head, left to cuBLAS; ``"K.T"`` is K transposed.

    Heads of ``b`` may be shared by groups of ``a``'s, and heads of ``out`` by groups of both, whose
    products are added up. The inputs' dtype may go in and that of sums come out.
    """

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
    tiles_up_to: those to take before them for head dimensions up to a number, as ``{64: tiles}``.
    tiles_on: those to take before these on an architecture, as ``{"90": {64: tiles}}``; of both,
        tiles that would leave much of their last keys empty come last, and before these such as
        compute many more scores than others.
    tiles_few_rows: those to take before all of these where the query heads of a group have no more
        rows together than a number, as ``{16: {64: tiles}}``.
    tiles_short: smaller ones, likewise up to a head dimension, to take before all of these where
        there are too few blocks for the device: where the multiprocessor that has the most to do
        has far less with them. Under a mask those come first that hold few of a short row's keys.
    resident: how many blocks a multiprocessor runs at a time, of the usual tiles.
    candidates: the values of each constant that ``cupyfa tune`` tries in all combinations that keep
        the rules, as ``{"Br": (16, 32)}``; without any it tries the tiles.
    rules: what constants must keep, as ``{"in words": c -> bool}``; there c has d and dv too.
    features: what it can do beyond the plain case: "causal" (a limit to the keys on the right,
        also a window's), "window" (one on the left), "gqa", "strides" (else inputs are copied to be
        contiguous), "lse" (else it is not returned), "dv" (dv other than d).
    scratch: temporaries, as ``{name: (axes, kind)}``, of a kind "real", "scalar", "operand" or
        "byte"; a problem has those that its launches name. ``d8`` and ``dv8`` are d and dv rounded
        up to a multiple of 8, ``d16`` is d to one of 16 and ``N32`` is N to one of 32. In place of
        axes a formula may count the elements, ``lambda p, c: …``, as grids with
        ``c.multiprocessors``.
    rounds: how often the launches that are ``in_rounds`` follow one another, in the place of the
        first of them, so that scratch need not hold all at once.
    arch: the least compute capability; or one with the instructions that only it has, as "90a",
        which then runs on devices of that one alone.
    dtype_arch: that of a dtype that needs more, as ``{"bfloat16": "80"}``.
    largest_d: of d and dv, if there is a limit beside shared memory.
    rounding: the precision that operands are rounded to by design, where that is not the dtype's.
    precisions: others that it can round float32 inputs to, whether float32 is among its dtypes or
        not; its launches tell them by ``p.precision``, which is None for float32 itself.
    tflops: what it reached on an H100 SXM, as ``{dtype: {d: TFLOP/s}}``, with ``"float32 as tf32"``
        and the like for precisions, at batch 4, heads 16, M = N = 2048, or where its page measures
        it; a softmax at 16384 rows of 4096, under d = 0. ``kernel="auto"`` goes by it, and never
        takes a kernel that was not measured, unless that is so of all that can do a precision, or
        of all that have a dtype.
    made_for: the problems that it was made for, ``lambda p, c: bool``, as grids with
        ``c.multiprocessors``. ``kernel="auto"`` takes it for these, once it was measured, and for
        no others.
    predicts: what ``cupyfa profile`` should show on an H100 SXM for the problem it takes by itself,
        as ``{counter: value in words}``, and what the kernel's page explains.
    unordered: outputs that are sums in any order, as of atomics, so that their last bits differ
        from run to run.
    folder: where the files of a kernel from outside the project are.
    """

    name: str
    adds: str
    launches: Sequence[Launch | Matmul]
    operation: str = "forward"
    tiles: Sequence[Mapping[str, int]] = ({},)
    tiles_up_to: Mapping[int, Sequence[Mapping[str, int]]] = field(default_factory=dict)
    tiles_on: Mapping[str, Mapping[int, Sequence[Mapping[str, int]]]] = field(default_factory=dict)
    tiles_few_rows: Mapping[int, Mapping[int, Sequence[Mapping[str, int]]]] = field(
        default_factory=dict
    )
    tiles_short: Mapping[int, Sequence[Mapping[str, int]]] = field(default_factory=dict)
    resident: int = 1
    candidates: Mapping[str, Sequence[int]] = field(default_factory=dict)
    rules: Mapping[str, Callable[[SimpleNamespace], bool]] = field(default_factory=dict)
    dtypes: Sequence[str] = ("float16", "bfloat16", "float32", "float64")
    features: Sequence[str] = ()
    scratch: Mapping[str, tuple[str | Formula, str]] = field(default_factory=dict)
    rounds: Formula = lambda p, c: 1
    arch: str = "75"
    dtype_arch: Mapping[str, str] = field(default_factory=dict)
    largest_d: int | None = None
    rounding: str | None = None
    precisions: Sequence[str] = ()
    tflops: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    made_for: Callable[[Problem, SimpleNamespace], bool] | None = None
    predicts: Mapping[str, str] = field(default_factory=dict)
    unordered: Sequence[str] = ()
    folder: str | Path | None = None

    def __post_init__(self) -> None:
        _check(self, _KERNEL_RULES)

    @property
    def arches(self) -> tuple[str, ...]:
        """The architectures it can be compiled for."""
        if self.target:
            return (self.target,)
        return tuple(arch for arch in ARCHES if int(arch) >= int(self.arch))

    @property
    def target(self) -> str | None:
        """The architecture that it has to be compiled for, if it has instructions of its own."""
        return self.arch if self.arch in WITH_THEIR_OWN else None

    def arch_for(self, dtype: str) -> str:
        """The least compute capability for a dtype."""
        return self.dtype_arch.get(dtype, self.arch)

    @property
    def float32_as(self) -> tuple[str, ...]:
        """The PRECISIONS in which it computes float32 inputs."""
        own = self.rounding if self.rounding in PRECISIONS else "float32"
        return (*((own,) if "float32" in self.dtypes else ()), *self.precisions)

    def precisions_of(self, dtype: str) -> tuple[str, ...]:
        """The PRECISIONS in which it computes inputs of a dtype, where that is to be chosen."""
        if dtype == "float32":
            return self.float32_as
        return (FLOAT8,) if self.rounding == FLOAT8 else ()

    def suits(self, precision: str | None) -> bool:
        """Whether it may be taken unnamed: what rounds to float8 is for who asks for float8."""
        return self.rounding != FLOAT8 or precision == FLOAT8

    def takes(self, dtype: str) -> bool:
        """Whether it computes inputs of a dtype, in whatever precision."""
        return dtype in self.dtypes or (dtype == "float32" and bool(self.precisions))

    def resolved(self, p: Problem) -> Problem:
        """The problem, with the kernel's own precision if none is given and that is not float32."""
        if p.precision or not self.precisions_of(p.dtype.name):
            return p
        if p.dtype.name == "float32" and "float32" in self.float32_as:
            return p
        return replace(p, precision=self.precisions_of(p.dtype.name)[0])

    def tiles_for(
        self, p: Problem, arch: str | None, multiprocessors: int
    ) -> tuple[Mapping[str, int], ...]:
        """The constants to try for a problem on a device, in order of preference."""

        def of_d(sizes: Mapping[int, Sequence[Mapping[str, int]]]) -> list[Mapping[str, int]]:
            d = max(p.d, p.dv)
            return list(sizes.get(min((most for most in sizes if d <= most), default=0), ()))

        def is_much_empty(tile: Mapping[str, int]) -> bool:
            return _empty_share(p.N, tile.get("Bc", 1)) > _MUCH

        def few_keys(tile: Mapping[str, int]) -> int:
            return max(tile.get("Bc", 1), p.N // _FEW) if p.is_masked else 0

        def scores(tile: Mapping[str, int]) -> float:
            return _scores(p, tile, self._packed(p, tile), multiprocessors * self.resident)

        by_d = of_d(self.tiles_on.get(arch or "", {})) + of_d(self.tiles_up_to)
        least = min(map(scores, by_d), default=0)
        by_d.sort(key=lambda x: (is_much_empty(x), scores(x) > _MORE * least))
        few = min((x for x in self.tiles_few_rows if p.M * p.group <= x), default=0)
        tiles = (*of_d(self.tiles_few_rows.get(few, {})), *by_d, *self.tiles)
        short = of_d(self.tiles_short)
        if not short or scores(tiles[0]) <= _FAR_MORE * min(map(scores, short)):
            return tiles
        return (*sorted(short, key=lambda x: (is_much_empty(x), few_keys(x))), *tiles)

    def _packed(self, p: Problem, tile: Mapping[str, int]) -> int:
        """Query heads whose rows share tiles."""
        launches = [x for x in self.launches if isinstance(x, Launch)]
        formulas = (x.constants["pack_gqa"] for x in launches if "pack_gqa" in x.constants)
        return next(formulas, lambda p, c: 1)(p, SimpleNamespace(**tile))

    def steps(self, p: Problem) -> tuple[Launch | Matmul, ...]:
        """The launches that a problem needs."""
        p = self.resolved(p)
        return tuple(x for x in self.launches if isinstance(x, Matmul) or x.when(p))


def _scores(p: Problem, tile: Mapping[str, int], packed: int, at_a_time: int) -> float:
    """How many scores are computed one after the other, with so many blocks at a time.

    Under a mask these are about half of all, and those at its edge; rows with few keys make up for
    others there, but a row tile is one block's.
    """
    Br, Bc = tile.get("Br", 1), tile.get("Bc", 1)
    blocks = cdiv(p.M * packed, Br) * p.heads // packed * p.batch
    if p.is_masked:
        return max(blocks / at_a_time * Br * (p.N + Br + Bc) / 2, Br * p.N)
    return cdiv(blocks, at_a_time) * Br * cdiv(p.N, Bc) * Bc


def _empty_share(N: int, Bc: int) -> float:
    """The share of keys in tiles of Bc that are none of N."""
    return 1 - N / (cdiv(N, Bc) * Bc) if N else 0


# What records must be, in words, and whether one is.
_LAUNCH_RULES: dict[str, Callable[[Any], bool]] = {
    "entry is the name of a C function": lambda x: x.entry.isidentifier(),
    "args is one string, names with blanks between": lambda x: isinstance(x.args, str),
    f"args name arrays as {', '.join(f'Q.{x}' if x else 'Q' for x in _FORMS)}": lambda x: (
        {form for _, form in x.arrays} <= set(_FORMS)
    ),
    "grid is a formula, lambda p, c: …": lambda x: callable(x.grid),
    "threads is a formula, lambda p, c: …": lambda x: callable(x.threads),
    "shared is a formula, lambda p, c: …": lambda x: callable(x.shared),
    "when is a formula, lambda p: …": lambda x: callable(x.when),
    f"keeps is None or one of {', '.join(_KEEPS)}": lambda x: x.keeps in (None, *_KEEPS),
    "moves are {array: lambda p, c: …}, of names that the args have": lambda x: (
        set(x.moves) <= {name for name, _ in x.arrays} and all(map(callable, x.moves.values()))
    ),
    "numbers are {name: lambda p, c: …}, of names that the args have": lambda x: (
        set(x.numbers) <= {name for name, form in x.arrays if not form}
        and all(map(callable, x.numbers.values()))
    ),
    "boxes are {array: rows, lambda p, c: …}, one for each Q.map of the args": lambda x: (
        set(x.boxes) == {name for name, form in x.arrays if form == "map"}
        and all(map(callable, x.boxes.values()))
    ),
}
_KERNEL_RULES: dict[str, Callable[[Any], bool]] = {
    "name is a word": lambda x: isinstance(x.name, str) and bool(x.name.strip()),
    "launches are one or more Launch or Matmul, in a tuple": lambda x: (
        bool(x.launches) and all(isinstance(step, Launch | Matmul) for step in x.launches)
    ),
    "tiles must hold at least one mapping, if an empty one": lambda x: bool(x.tiles),
    "tiles give all the same names a whole number from 1 to 2**31 - 1": lambda x: all(
        set(tile) == set(x.tiles[0]) and all(map(_is_size, tile.values())) for tile in x.tiles
    ),
    f"tiles are not named {', '.join(RESERVED)}": lambda x: all(
        name.isidentifier() and name not in RESERVED for name in x.tiles[0]
    ),
    "tiles_up_to are {head dimension: tiles}, which name what the tiles do": lambda x: _are_sizes(
        x.tiles_up_to, x.tiles[0]
    ),
    "tiles_short are {head dimension: tiles}, which name what the tiles do": lambda x: _are_sizes(
        x.tiles_short, x.tiles[0]
    ),
    "tiles_few_rows are {rows: {head dimension: tiles}}, named as the tiles are": lambda x: all(
        _is_size(rows) and _are_sizes(sizes, x.tiles[0]) for rows, sizes in x.tiles_few_rows.items()
    ),
    "tiles_on are {architecture: {head dimension: tiles}}, named as the tiles are": lambda x: all(
        _are_sizes(sizes, x.tiles[0]) for sizes in x.tiles_on.values()
    ),
    "candidates are some whole numbers for each constant of the tiles": lambda x: (
        not x.candidates
        or (
            set(x.candidates) == set(x.tiles[0])
            and all(values and all(map(_is_size, values)) for values in x.candidates.values())
        )
    ),
    "rules are {in words: c -> bool}": lambda x: all(map(callable, x.rules.values())),
    f"dtypes are {', '.join(DTYPES)}": lambda x: bool(x.dtypes) and set(x.dtypes) <= set(DTYPES),
    f"features are {', '.join(FEATURES)}": lambda x: set(x.features) <= set(FEATURES),
    f"scratch is {{name: (axes, one of {', '.join(KINDS)})}}": lambda x: all(
        kind in KINDS for _, kind in x.scratch.values()
    ),
    f"scratch has axes {', '.join(AXES)}, or a formula": lambda x: all(
        callable(axes) or set(axes.split()) <= set(AXES) for axes, _ in x.scratch.values()
    ),
    "rounds is a formula, lambda p, c: …": lambda x: callable(x.rounds),
    f"arch is one of {', '.join((*ARCHES, *WITH_THEIR_OWN))}": lambda x: (
        x.arch in (*ARCHES, *WITH_THEIR_OWN)
    ),
    f"arch is at least {_BOXES_SINCE} if launches have boxes": lambda x: (
        int(x.arch.removesuffix("a")) >= _BOXES_SINCE
        or not any(isinstance(step, Launch) and step.boxes for step in x.launches)
    ),
    "dtype_arch are {dtype: compute capability}, beside an arch that is one": lambda x: (
        set(x.dtype_arch) <= set(x.dtypes)
        and set(x.dtype_arch.values()) <= set(ARCHES)
        and not (x.dtype_arch and x.target)
    ),
    "resident is a whole number from 1": lambda x: _is_size(x.resident),
    "largest_d is None or a whole number from 1": lambda x: (
        x.largest_d is None or _is_size(x.largest_d)
    ),
    f"rounding is None or one of {', '.join(reference.PRECISIONS)}": lambda x: (
        x.rounding is None or x.rounding in reference.PRECISIONS
    ),
    f"precisions are {', '.join(PRECISIONS)}": lambda x: (
        not isinstance(x.precisions, str) and set(x.precisions) <= set(PRECISIONS)
    ),
    "made_for is None or a formula, lambda p, c: …": lambda x: (
        x.made_for is None or callable(x.made_for)
    ),
    "predicts are {counter: value in words}": lambda x: all(
        isinstance(words, str) for words in x.predicts.values()
    ),
    "unordered are names of outputs, in a tuple": lambda x: not isinstance(x.unordered, str),
    "folder is None or a path": lambda x: isinstance(x.folder, str | Path | None),
}


def _check(record: Any, rules: Mapping[str, Callable[[Any], bool]]) -> None:
    """Raises ValueError, with the rule and the value, if a record does not keep its rules."""
    for rule, holds in rules.items():
        try:
            kept = holds(record)
        except (AttributeError, TypeError, ValueError):  # not even of the kind that it is about
            kept = False
        if not kept:
            first, field = next(iter(vars(record).values())), rule.split()[0]
            value = reprlib.repr(getattr(record, field))
            raise ValueError(f"{type(record).__name__} {first!r}: {rule}, but here {value}")


def _are_sizes(tiles_up_to: Any, names: Any) -> bool:
    return all(
        _is_size(most) and set(tile) == set(names) and all(map(_is_size, tile.values()))
        for most, tiles in tiles_up_to.items()
        for tile in tiles
    )


def _is_size(value: Any) -> bool:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return whole and 1 <= value < 2**31
