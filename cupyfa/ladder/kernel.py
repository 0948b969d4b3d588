"""Kernel records: descriptions of kernels that planning, launching and reports use.

A record describes each launch: its arguments, and one-line formulas of the problem ``p`` and the
constants ``c`` for grid, threads and shared memory. Users write records for their own kernels.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import isfinite
from numbers import Real
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from cupyfa.errors import described, nearest
from cupyfa.ladder.operations import INPUT_KINDS, OPERATIONS, Arrays, Excerpt, Input, Operation
from cupyfa.ladder.tiles import RULES as TILE_RULES, Rules, Tile, TileChoice, Tiles, cdiv, is_size
from cupyfa.problem.dtypes import DTYPES, E4M3_INPUTS, INPUTS
from cupyfa.problem.optional_inputs import MAPS, OPTIONAL_INPUTS
from cupyfa.problem.options import FEATURES as OPTION_FEATURES, FLOAT8, PRECISIONS
from cupyfa.problem.problem import Problem

if TYPE_CHECKING:
    from cupyfa.numerics.tolerance import ExpectedOfEach, Roundings

Formula = Callable[[Problem, SimpleNamespace], int]
Constant = Callable[[Problem, SimpleNamespace], float]  # returns a float, an int or a bool
Grid = Callable[[Problem, SimpleNamespace], "int | tuple[int, ...]"]
Float = Callable[[Problem, SimpleNamespace], float]
Walk = Callable[[Problem, SimpleNamespace], "tuple[int, int] | None"]  # tile size (rows, keys)
Reference = Callable[[Arrays, Problem, SimpleNamespace], Mapping[str, Any]]

AXES = (
    *("batch", "tangent_batch", "heads", "kv_heads", "M", "N", "d", "dv"),
    *("d8", "dv8", "d16", "dv16", "N32"),
)
KINDS = ("real", "scalar", "operand", "byte", "int")  # element types of scratch
FEATURES = (
    *OPTION_FEATURES,
    *dict.fromkeys(x.feature for x in OPTIONAL_INPUTS.values() if x.feature),
    *("wrt", "additive", "gqa", "strides", "lse", "dv"),
)
ARCHES = ("75", "80", "86", "89", "90", "100", "120")
ARCH_SPECIFIC = ("90a", "100a", "120a")  # targets with architecture-specific instructions
MOST_BOX_ROWS = 256
_FORMS = ("", "data", "map")  # how arrays are passed: as a Tensor, a pointer or a TensorMap
_BOXES_SINCE = 90
_OF_NUMBERS = "fiubV"  # NumPy kinds of numeric dtypes; V for dtypes of ml_dtypes
ROUNDINGS = ("float64", *PRECISIONS)


def padded(width: int, itemsize: int) -> int:
    """Returns the row length of a padded tile, in elements: an odd multiple of 16 bytes."""
    step = 16 // itemsize
    return (cdiv(width, step) | 1) * step


@cache
def _arrays_of(args: str) -> tuple[tuple[str, str], ...]:
    split = (name.partition(".") for name in args.split())
    return tuple((name, form) for name, _, form in split)


class _Record:
    """Base class of Launch and Kernel. Records are immutable, so a copy is the record itself."""

    def check(self, rules: Rules) -> None:
        """Raises ValueError for a field that violates a rule; rules begin with a field name."""
        for rule, holds in rules.items():
            try:
                kept = holds(self)
            except (AttributeError, TypeError, ValueError):  # a value of the wrong type
                kept = False
            if not kept:
                name, field = next(iter(vars(self).values())), rule.split()[0]
                value = reprlib.repr(getattr(self, field))
                raise ValueError(f"{type(self).__name__} {name!r}: {rule}; got {value}")

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self


@dataclass(frozen=True, repr=False)
class Launch(_Record):
    """One launch of a kernel.

    entry: the name of the ``extern "C"`` function and of its file.
    args: the arguments in order, separated by blanks:

        - arrays of the operation (``Q K V O lse``; for gradients also ``dO dQ dK dV``; for a
          softmax ``S P lse``), inputs of options, and the kernel's own inputs, outputs and scratch.
          ``Q`` is passed as the struct Tensor of tensor.cuh, ``Q.data`` as a bare pointer to
          contiguous elements, ``Q.map`` as the struct TensorMap of tma.cuh. An input that the
          problem lacks is passed as zeros;
        - int32: ``M N heads kv_heads batch group``, the mask's ``causal_offset window_offset``,
          and the names in ``numbers``;
        - the kernel's ``floats``, as ``real``;
        - ``scale`` as float (double for float64);
        - ``sizes``, the struct Sizes of extent.cuh: M, N and the two offsets of the mask;
        - ``mods``, the struct Mods that is declared above the file: the arrays and numbers of
          options that modify scores. It is empty for unmodified scores.

    grid, threads, shared: the number of blocks (or up to three numbers), threads per block, and
        bytes of dynamic shared memory.
    constants: additional constants to declare above the file, as ``{"name": lambda p, c: …}``:
        bools, integers, or floats, which are rounded to single precision.
    file: the path of the file, if it is neither in the folder of the kernel's operation nor in
        ``steps`` there.
    when: whether a problem needs this launch.
    needed: whether a problem needs this launch with the constants ``c``; a plan leaves it out
        otherwise.
    boxes: rows per TMA box, at most 256, for each ``Q.map``, as ``{"Q": lambda p, c: c.Br}``. A box
        has 64 columns of 16 bits or 128 of 8 bits, and its rows must be aligned to 16 bytes.
        Unaligned arrays (odd d, negative strides, broadcast axes, odd offsets) are copied to
        aligned memory; outputs are copied back.
    box_heads: query heads per TMA box, for boxes that hold rows of several heads, as ``{"Q": lambda
        p, c: 8}``. Row r of such a box is row r // 8 of head r % 8, and ``boxes`` counts the rows
        of all heads. The kernel passes the head before the row to tma_load().
    numbers: additional int32 arguments, as ``{"name": lambda p, c: …}``.
    in_rounds: whether the launch is repeated in each of the kernel's ``rounds``.
    begins_early: whether the launch may begin while the previous launch ends, on "90" and later
        (programmatic dependent launch). A thread must call wait_for_launch_before() of
        ptx/dependent_launch.cuh before it reads data that earlier launches write, and before it
        writes data that they read or write. At least one thread of each block must call it. The
        launch begins when all blocks of the previous launch have ended or called
        launch_dependents().
    awaits_all: whether every thread calls wait_for_launch_before() before its first access to
        global memory. The first launch of a call may begin early only if this is True: it follows
        a kernel of the caller in the stream, and that kernel may write any array.
    unawaited: names of arrays, separated by blanks, that the launch reads without waiting, as
        "row_sums", or "mods.lengths_k" for an option; or a formula that returns them. The previous
        launch must only read them, too, and call wait_for_launch_before() before
        launch_dependents(), so that the launches that write these arrays have ended when this one
        begins. Then only one block of this launch has to wait.
    walks: the tile maps of a block mask by which the launch skips tiles (see extent.cuh), as
        ``{"key_tiles": lambda p, c: (c.Br, c.Bc)}``: "key_tiles" if it loops over the keys of a row
        tile, "row_tiles" if it loops over the rows of a key tile. The formula returns the rows and
        keys of a tile, or None if the launch visits all tiles.

    In formulas for grid, numbers and constants, ``c`` also has ``c.multiprocessors`` of the device
    (few in the simulator, so that persistent blocks process several tiles there, too). In formulas
    for grid and numbers, it also has ``c.round``, the index of the round.
    """

    entry: str
    args: str
    grid: Grid
    threads: Formula
    shared: Formula = lambda p, c: 0
    constants: Mapping[str, Constant] = field(default_factory=dict)
    file: str | Path | None = None
    when: Callable[[Problem], bool] = lambda p: True
    needed: Callable[[Problem, SimpleNamespace], bool] = lambda p, c: True
    boxes: Mapping[str, Formula] = field(default_factory=dict)
    box_heads: Mapping[str, Formula] = field(default_factory=dict)
    numbers: Mapping[str, Formula] = field(default_factory=dict)
    in_rounds: bool = False
    begins_early: bool = False
    awaits_all: bool = False
    unawaited: str | Callable[[Problem, SimpleNamespace], str] = ""
    walks: Mapping[str, Walk] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check(_LAUNCH_RULES)

    def __repr__(self) -> str:
        return f"<launch {self.entry}({self.args})>"

    @property
    def arrays(self) -> tuple[tuple[str, str], ...]:
        """Names of the arguments, each with its form: "", "data" or "map"."""
        return _arrays_of(self.args)

    def reads(self, names: str) -> bool:
        """Returns whether each name is that of an argument, or mods.NAME of an option's array."""
        known = {name for name, _ in self.arrays}
        return all(x in known or ("mods" in known and x[:5] == "mods.") for x in names.split())


@dataclass(frozen=True)
class Matmul:
    """A cuBLAS product per head, ``out = a b * scale``; ``"K.T"`` is K transposed.

    A group of heads of ``a`` may share a head of ``b``. If a group shares a head of ``out``, its
    products are added up. Inputs may have the problem's dtype while ``out`` has the accumulation
    type. With ``in_rounds`` each of the kernel's rounds multiplies its own heads; see
    ``Kernel.round_heads``.
    """

    out: str
    a: str
    b: str
    scaled: bool = False
    in_rounds: bool = False

    @property
    def names(self) -> tuple[str, str, str]:
        """The arrays that are multiplied, and the result."""
        return self.a.removesuffix(".T"), self.b.removesuffix(".T"), self.out.removesuffix(".T")


@dataclass(frozen=True, repr=False)
class Kernel(_Record):
    """One version of an operation.

    name: the name in calls and on the command line.
    adds: a few words about what this version adds to the previous one.
    launches: the launches and matrix products, in order.
    operation: "forward" (O and lse of Q, K and V), "backward" (dQ, dK and dV of Q, K, V, O, lse and
        dO), "tangent" (O, lse, O_dot and lse_dot of Q, K, V, Q_dot, K_dot and V_dot) or "softmax"
        (P and lse of S). Intermediate arrays, such as delta, the row sums of dO ∘ O, are
        ``scratch``.
    tiles: tile sizes to compile with, in order of preference, or a TileChoice, which depends on
        head dimension, architecture and number of rows.
    candidates: values of each constant that ``cupyfa tune`` combines, as ``{"Br": (16, 32)}``; if
        empty, it tries the tiles.
    rules: conditions on constants, as ``{"Br <= Bc": lambda c: …}``; c also has d and dv.
    dtypes: supported dtypes of arrays.
    features: what the kernel supports beyond the plain case: "causal" (a right limit on keys, also
        of a window), "window" (a left limit), "gqa", "strides" (otherwise inputs are made
        contiguous), "lse" (otherwise it is not returned), "dv" (dv other than d), "sink", "row_max"
        (row maxima of scores), "dlse" (a gradient of lse), "ragged" (sequences in packed arrays),
        "lengths" (lengths of batch elements in padded arrays), "paged" (keys and values in pages),
        "e4m3" (8-bit keys and values, with scales), "out_dtype" (float32 results of 16-bit inputs;
        its files use the type ``result`` for O, dQ, dK and dV), "zero_tangents" (tangents of
        None), "directions" (several directions), "wrt" (gradients or tangents of arrays that change
        scores), and the options that modify scores, or "additive" in place of "score" for
        expressions that only add to it.
    scratch: temporary arrays, as ``{name: (axes, kind)}``, of kind "real", "scalar", "operand",
        "byte" or "int". Only arrays that a problem's launches use are allocated. ``d8`` and ``dv8``
        are d and dv rounded up to a multiple of 8, ``d16`` and ``dv16`` to a multiple of 16, and
        ``N32`` is N rounded up to a multiple of 32. A formula for the number of elements, which may
        use ``c.multiprocessors``, can replace the axes.
    rounds: number of times that launches with ``in_rounds`` are repeated, to limit scratch memory.
    round_heads: maximum number of key heads per round, over all batch elements, for rounds over
        heads. Launches and products with ``in_rounds`` then see only the key heads of their round
        and the query heads of these: in their arrays, in ``batch``, ``heads`` and ``kv_heads``, and
        in p of their formulas. Scratch that no other step uses holds the heads of one round. The
        kernel must not have features that depend on a head's index in the problem, such as "places"
        and "dropout".
    round_group: maximum number of query heads per round of a single key head, if its group may be
        divided. In formulas for grid and numbers, ``c.round`` is 0 in the first round of a key head
        and 1 in its other rounds.
    round_rows: maximum number of rows per round of a single query head, if they may be divided.
    arch: minimum compute capability, or an architecture-specific target such as "90a", to which the
        kernel is then restricted.
    dtype_arch: minimum compute capability of dtypes that require more, as ``{"bfloat16": "80"}``.
    largest_d: maximum d and dv, if limited by anything other than shared memory.
    largest_dv: maximum dv, if below largest_d.
    rounding: the precision to which operands are rounded by design, if not that of the dtype.
    parts: the dtype of the hi and lo halves of split float32 operands, which its files call
        ``operand``; None for kernels that do not split operands.
    precisions: precisions to which the kernel can round float32 inputs, even if float32 is not in
        ``dtypes``; launches read it from ``p.precision``, which is None for float32 itself.
    tflops: measured speed on an H100 SXM, as ``{dtype: {d: TFLOP/s}}``, with keys such as
        ``"float32 as tf32"`` for precisions: for batch 4, heads 16, M = N = 2048 or the problem on
        the kernel's page; for a softmax (d = 0), 16384 rows of 4096. ``kernel="auto"`` compares
        these speeds. It selects a kernel without a measured speed only if none was measured for the
        precision or dtype.
    shares: the shares of its measured speed that a kernel reaches for a problem, as
        ``{reason: lambda p, c: share}``, where c also has ``c.multiprocessors``. ``kernel="auto"``
        multiplies the speed by all of them.
    made_for: whether the kernel was made for a problem, ``lambda p, c: bool`` with
        ``c.multiprocessors`` and ``c.arch``, the device's compute capability. ``kernel="auto"``
        selects the kernel, if it has a measured speed, for these problems only.
    yields_to: kernels that are faster for some problems although their measured speed is lower, as
        ``{"two_pass": lambda p, c: …}``, where c also has ``c.multiprocessors``. The formula
        returns the reason, or None for other problems. ``kernel="auto"`` then selects that kernel.
    unordered: outputs that are summed in arbitrary order, for example by atomics, so that their
        last bits differ from run to run.
    unordered_with: further such outputs of plans with a launch in which a constant is true, as
        ``{constant: outputs}``.
    persistent: whether tiles are assigned to persistent blocks in advance, so that the launch waits
        for blocks that begin late.
    folder: the folder of a user's kernel files. If it contains at least one of the kernel's files,
        missing files are taken from the project.
    after: rungs to read before this one, because its files are small changes of their files.

    For a kernel that computes something other than its operation, or needs additional arrays:

    inputs: additional arrays, as ``{"slopes": Input("heads", "real")}``. Callers pass them with
        ``kernel.bind(slopes=array)``. In a Tensor, the axes ``batch``, ``heads`` and
        ``kv_heads`` determine the batch and head strides, and other axes are rows and columns. If
        the shape is a formula, the last axis holds the columns.
    outputs: additional outputs, as ``{"rowmax": ("batch heads M", "real")}``. Callers request them
        with ``kernel.bind(returns=("rowmax",))``.
    floats: arguments of type ``real``, as ``{"cap": lambda p, c: 30.0}``. Callers can override the
        default with ``kernel.bind(cap=50.0)``.
    reference: computes the expected results for checks: ``reference(arrays, p, c)`` returns
        ``{output: array}`` with every output of the kernel, in float64. ``arrays`` maps names to
        inputs: Q is [batch, heads, M, d], additional inputs have the axes in ``inputs``, and floats
        are float64. ``c`` has constants and floats, and ``c.rounding``, the precision to which
        operands are rounded by design, or None. Error bounds are derived by evaluating the
        reference several times (docs/checking.md); it may also return ``Expected(value, bound)``.
    forward: for gradients, ``forward(arrays, p, c)`` returns ``{"O": …, "lse": …}`` of random
        inputs for checks; by default, O and lse of plain attention. Attention without a softmax has
        no lse: if no launch uses it, ``forward`` omits it, callers pass None, and the arrays of
        ``reference`` do not contain it.
    """

    name: str
    adds: str
    launches: Sequence[Launch | Matmul]
    operation: str = "forward"
    tiles: TileChoice | Tiles = ({},)
    candidates: Mapping[str, Sequence[int]] = field(default_factory=dict)
    rules: Mapping[str, Callable[[SimpleNamespace], bool]] = field(default_factory=dict)
    dtypes: Sequence[str] = ("float16", "bfloat16", "float32", "float64")
    features: Sequence[str] = ()
    scratch: Mapping[str, tuple[str | Formula, str]] = field(default_factory=dict)
    rounds: Formula = lambda p, c: 1
    round_heads: Formula | None = None
    round_group: Formula = lambda p, c: max(p.group, 1)
    round_rows: Formula = lambda p, c: max(p.M, 1)
    arch: str = "75"
    dtype_arch: Mapping[str, str] = field(default_factory=dict)
    largest_d: int | None = None
    largest_dv: int | None = None
    rounding: str | None = None
    parts: str | None = None
    precisions: Sequence[str] = ()
    tflops: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    shares: Mapping[str, Callable[[Problem, SimpleNamespace], float]] = field(default_factory=dict)
    made_for: Callable[[Problem, SimpleNamespace], bool] | None = None
    yields_to: Mapping[str, Callable[[Problem, SimpleNamespace], str | None]] = field(
        default_factory=dict
    )
    unordered: Sequence[str] = ()
    unordered_with: Mapping[str, Sequence[str]] = field(default_factory=dict)
    persistent: bool = False
    folder: str | Path | None = None
    after: Sequence[str] = ()
    inputs: Mapping[str, Input] = field(default_factory=dict)
    outputs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    floats: Mapping[str, Float] = field(default_factory=dict)
    reference: Reference | None = None
    forward: Reference | None = None

    def __post_init__(self) -> None:
        self.check(_KERNEL_RULES)

    def __repr__(self) -> str:
        return f"<{self.operation} kernel {self.name}: sm_{self.arch}, {' '.join(self.dtypes)}>"

    def bind(self, *, returns: Sequence[str] = (), **own: Any) -> BoundKernel:
        """Binds a kernel's additional arrays and floats for a call: ``kernel=mine.bind(slopes=x)``.

        own: arrays for the record's ``inputs``, with the axes given there, in any layout and
            memory; numbers that override its ``floats``.
        returns: names of ``outputs``, which a call returns after its other results.

        Raises TypeError and ValueError for names that the kernel does not have, and for floats that
        are not finite numbers.
        """
        return BoundKernel(self, own, returns)

    @property
    def choice(self) -> TileChoice:
        return self.tiles if isinstance(self.tiles, TileChoice) else TileChoice(self.tiles)

    @property
    def target(self) -> str | None:
        return self.arch if self.arch in ARCH_SPECIFIC else None

    @property
    def float32_as(self) -> tuple[str, ...]:
        """The precisions in which the kernel can process float32 inputs."""
        own = self.rounding if self.rounding in PRECISIONS else "float32"
        return (*((own,) if "float32" in self.dtypes else ()), *self.precisions)

    def precisions_of(self, dtype: str) -> tuple[str, ...]:
        """Returns the precisions that a call may request for inputs of a dtype; empty if none."""
        if dtype == "float32":
            return self.float32_as
        is_rounded = self.rounding == FLOAT8 and dtype != E4M3_INPUTS.name
        return (FLOAT8,) if is_rounded else ()

    def suits(self, dtype: str, precision: str | None) -> bool:
        """Returns whether "auto" may select the kernel for this dtype and precision.

        A kernel that rounds to float8 requires float8 precision or float8 inputs.
        """
        return self.rounding != FLOAT8 or precision == FLOAT8 or dtype == E4M3_INPUTS.name

    def takes(self, dtype: str) -> bool:
        """Returns whether the kernel supports inputs of a dtype, in any precision."""
        return dtype in self.dtypes or (dtype == "float32" and bool(self.precisions))

    def resolved(self, p: Problem) -> Problem:
        """Sets a missing precision of the problem to the precision that the kernel rounds to."""
        if p.precision or not self.precisions_of(p.dtype.name):
            return p
        if p.dtype.name == "float32" and "float32" in self.float32_as:
            return p
        return p.with_options(precision=self.precisions_of(p.dtype.name)[0])

    def tiles_for(self, p: Problem, arch: str | None, multiprocessors: int) -> tuple[Tile, ...]:
        formulas = (x.constants.get("pack_gqa") for x in self.launches if isinstance(x, Launch))
        pack_gqa = next(filter(None, formulas), lambda p, c: 1)
        return self.choice.ordered(
            p, arch, multiprocessors, lambda tile: int(pack_gqa(p, SimpleNamespace(**tile)))
        )

    def walks_of(self, p: Problem, constants: Mapping[str, float]) -> dict[str, tuple[int, int]]:
        """Maps each tile map that the kernel's launches read to the rows and keys of a tile."""
        c, found = SimpleNamespace(**constants), {}
        for launch in self.steps(p):
            for name, formula in launch.walks.items() if isinstance(launch, Launch) else ():
                if size := self.evaluated(f"walks {name}", formula, p, c):
                    found[name] = size
        return found

    @property
    def is_plain(self) -> bool:
        """Whether the record adds no inputs, outputs or reference to its operation."""
        return not (self.inputs or self.outputs or self.reference)

    @property
    def reads_lse(self) -> bool:
        """Whether the kernel's gradients need lse, which attention without a softmax does not have.

        Records without a custom reference always need lse.
        """
        named = {name for x in self.launches if isinstance(x, Launch) for name, _ in x.arrays}
        return self.reference is None or "lse" in named

    def forward_of(self, arrays: Arrays, p: Problem, c: SimpleNamespace) -> dict[str, np.ndarray]:
        """Calls ``forward``; returns O and lse, which is 0 if no launch reads it.

        Raises ValueError unless ``forward`` returns arrays of the expected shapes.
        """
        known = OPERATIONS[self.operation].inputs_of(p)
        shapes = {name: known[name].shape(p) for name in ("O", "lse")}
        found = self.evaluated("forward", self.forward, arrays, p, c)  # type: ignore[arg-type]
        if not self.reads_lse and isinstance(found, Mapping) and found.get("lse") is None:
            found = {**found, "lse": np.zeros(shapes["lse"])}
        made = self._checked("forward", found, shapes)
        return {x: np.asarray(made[x]).astype(known[x].dtype(p)) for x in shapes}

    def computes(self, constants: Mapping[str, float] | None = None) -> Operation:
        """Returns the operation, extended by the record's inputs, outputs and reference.

        constants: constants and floats that the reference receives as attributes of ``c``.
        """
        base = OPERATIONS[self.operation]
        if self.is_plain:
            return base
        inputs, outputs = {**base.inputs, **self.inputs}, {**base.outputs, **self.outputs}
        reference = partial(self._expected, constants or {}) if self.reference else base.reference
        return replace(base, inputs=inputs, outputs=outputs, reference=reference)

    def floats_of(self, p: Problem, constants: Mapping[str, float]) -> dict[str, float]:
        """Evaluates ``floats`` and rounds them to ``real``, as passed to the kernel."""
        c, found = SimpleNamespace(**constants), {}
        for name, formula in self.floats.items():
            value = self.evaluated(f"float {name}", formula, p, c)
            if isinstance(value, bool) or not isinstance(
                value, int | float | np.integer | np.floating
            ):
                raise ValueError(
                    f"{self.name}: the record's float {name} is {value!r} for {p}, not a number"
                )
            found[name] = float(p.dtype.sums.type(value))
        return found

    def evaluated(self, what: str, formula: Callable[..., Any], *values: Any) -> Any:
        """Evaluates a formula of the record; converts any exception to ValueError."""
        try:
            return formula(*values)
        except Exception as error:
            shown = ", ".join("arrays" if isinstance(x, Mapping) else str(x) for x in values)
            why = f" with {type(error).__name__}: {error}"
            if isinstance(error, AttributeError) and isinstance(error.obj, SimpleNamespace):
                known = ", ".join(vars(error.obj))
                why = f": c has no {error.name}, only {known}; its tiles= defines constants"
            raise ValueError(
                f"{self.name}: the record's {what} failed{why}; the formula was called with {shown}"
            ) from error

    def _expected(
        self,
        constants: Mapping[str, float],
        inputs: Arrays,
        p: Problem,
        roundings: Roundings,
        excerpt: Excerpt | None = None,
    ) -> ExpectedOfEach:
        """Evaluates the custom reference and bounds its errors; excerpts are not supported."""
        from cupyfa.numerics import deviation

        assert excerpt is None, "a custom reference computes all rows, not an excerpt"
        operation = self.computes()
        wanted = {
            name: Input(*x)
            for name, x in operation.outputs.items()
            if name != "lse" or "lse" in self.features
        }
        known = operation.inputs_of(p)
        operands = [name for name, x in known.items() if x.kind in ("scalar", "result")]
        arrays = {x: inputs[x] for x in known if x != "lse" or self.reads_lse}
        floats = {name: constants[name] for name in self.floats}
        shapes = {name: x.shape(p) for name, x in wanted.items()}
        dtypes = {name: x.dtype(p) for name, x in wanted.items()}
        terms = max(p.M * p.group, p.N, p.d, p.dv)

        def function(
            precision: str | None, operands: Arrays, others: Mapping[str, float]
        ) -> Mapping[str, Any]:
            c = SimpleNamespace(**{**constants, **others, "rounding": precision})
            assert self.reference is not None
            found = self.evaluated("reference", self.reference, operands, p, c)
            return self._checked("reference", found, shapes)

        return {
            precision: deviation.expected(
                partial(function, precision),
                *(arrays, floats, dtypes),
                deviation.Rounding(p.dtype.name, precision, operands, terms),
            )
            for precision in roundings
        }

    def _checked(
        self, what: str, found: Any, shapes: Mapping[str, tuple[int, ...]]
    ) -> Mapping[str, Any]:
        """Raises ValueError unless a function of the record returned arrays of numbers with these
        shapes.
        """
        from cupyfa.numerics.tolerance import Expected  # imported here, because only checks need it

        returned = f"{self.name}: the record's {what} returned"
        if not isinstance(found, Mapping) or not found.keys() >= shapes.keys():
            is_mapping = isinstance(found, Mapping)
            names = ", ".join(map(str, found)) if is_mapping else type(found).__name__
            raise ValueError(
                f"{returned} {names or 'nothing'}; it must return a dict {{name: array}} with the "
                f"keys {', '.join(shapes)}"
            )
        for name, shape in shapes.items():
            value = found[name].value if isinstance(found[name], Expected) else found[name]
            array = value if hasattr(value, "dtype") else self.evaluated(what, np.asarray, value)
            if array.dtype.kind not in _OF_NUMBERS:
                given = f"of dtype {array.dtype}" if array is value else f"= {described(value)}"
                raise ValueError(f"{returned} {name} {given}; it must be an array of numbers")
            if array.shape != shape:
                raise ValueError(
                    f"{returned} {name} of shape {array.shape}; its shape must be {shape}"
                )
        return found

    def steps(self, p: Problem) -> tuple[Launch | Matmul, ...]:
        p = self.resolved(p)
        return tuple(x for x in self.launches if isinstance(x, Matmul) or x.when(p))


# Names of arguments of calls and launches, which additional arrays and floats must not use.
_TAKEN = {
    *("q", "k", "v", "x", "out", "dout", "grads", "own", "Q", "K", "V", "O", "lse", "dO", "dQ"),
    *("dK", "dV", "S", "P", "M", "N", "d", "dv", "heads", "kv_heads", "batch", "group", "scale"),
    *("causal_offset", "window_offset", "sizes", "mods", "round"),
    "multiprocessors",
}


@dataclass(frozen=True, eq=False)
class BoundKernel:
    """A kernel with arrays and floats bound for a call, returned by ``Kernel.bind``."""

    kernel: Kernel
    own: Mapping[str, Any]
    returns: Sequence[str]

    def __post_init__(self) -> None:
        record, returns = self.kernel, self.returns
        are_names = isinstance(returns, Iterable) and not isinstance(returns, str)
        if not are_names or not all(isinstance(x, str) for x in returns):
            raise TypeError(f"returns is {described(returns)}; pass names, such as ('rowmax',)")
        for names, known, kind in (
            (self.own, (*record.inputs, *record.floats), "argument"),
            (returns, tuple(record.outputs), "output"),
        ):
            for name in names:
                if name not in known:
                    raise TypeError(
                        f"{record.name} has no additional {kind} {name!r}{nearest(name, known)}; "
                        f"its additional {kind}s: {', '.join(known) or 'none'}"
                    )
        object.__setattr__(self, "returns", tuple(returns))

    def with_floats(self) -> Kernel:
        """Returns the kernel with bound numbers in place of the defaults in ``floats``."""
        given = {name: self.own[name] for name in self.kernel.floats if name in self.own}
        for name, value in given.items():
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if not (is_number and isfinite(value)):
                raise ValueError(f"{name} is {described(value)}; pass a finite number")
        if not given:
            return self.kernel
        fixed = {name: lambda p, c, value=float(x): value for name, x in given.items()}
        return replace(self.kernel, floats={**self.kernel.floats, **fixed})


def _are_own(names: Iterable[str]) -> bool:
    return all(name.isidentifier() and name not in _TAKEN for name in names)


# Features that depend on the index of a head or batch element in the problem, in expressions or for
# arrays in struct Mods. In a round over heads, indices count from the round's first head.
_BY_HEAD = ("places", "dropout", "ragged", "lengths", "paged", "e4m3")

# Validation rules for the fields of records.
_LAUNCH_RULES: Rules = {
    "entry must be the name of a C function": lambda x: x.entry.isidentifier(),
    "args must be one string of names separated by blanks": lambda x: isinstance(x.args, str),
    f"args must name arrays as {', '.join(f'Q.{x}' if x else 'Q' for x in _FORMS)}": lambda x: (
        {form for _, form in x.arrays} <= set(_FORMS)
    ),
    "grid must be a formula, lambda p, c: …": lambda x: callable(x.grid),
    "threads must be a formula, lambda p, c: …": lambda x: callable(x.threads),
    "shared must be a formula, lambda p, c: …": lambda x: callable(x.shared),
    "when must be a formula, lambda p: …": lambda x: callable(x.when),
    "needed must be a formula, lambda p, c: …": lambda x: callable(x.needed),
    f"walks must be {{name: lambda p, c: (rows, keys)}} for {', '.join(MAPS)}": lambda x: (
        set(x.walks) <= set(MAPS) and all(map(callable, x.walks.values()))
    ),
    "numbers must be {name: lambda p, c: …} for names in args": lambda x: (
        set(x.numbers) <= {name for name, form in x.arrays if not form}
        and all(map(callable, x.numbers.values()))
    ),
    "unawaited must be names in args of a launch with begins_early=True, or a formula": lambda x: (
        callable(x.unawaited) or not x.unawaited or (x.begins_early and x.reads(x.unawaited))
    ),
    "awaits_all must be False without begins_early=True, and with unawaited arrays": lambda x: (
        not x.awaits_all or (x.begins_early and not x.unawaited)
    ),
    "boxes must be {array: lambda p, c: rows} for each Q.map in args": lambda x: (
        set(x.boxes) == {name for name, form in x.arrays if form == "map"}
        and all(map(callable, x.boxes.values()))
    ),
    "box_heads must be {array: lambda p, c: heads} for arrays in boxes": lambda x: (
        set(x.box_heads) <= set(x.boxes) and all(map(callable, x.box_heads.values()))
    ),
}
_KERNEL_RULES: Rules = {
    "after must be a tuple of kernel names": lambda x: not isinstance(x.after, str),
    "name must be a word": lambda x: isinstance(x.name, str) and bool(x.name.strip()),
    "launches must be a tuple of at least one Launch or Matmul": lambda x: (
        bool(x.launches) and all(isinstance(step, Launch | Matmul) for step in x.launches)
    ),
    **{
        rule: lambda x, holds=holds: holds(x.choice)  # type: ignore[misc]
        for rule, holds in TILE_RULES.items()
    },
    "candidates must be whole numbers for each tile size": lambda x: (
        not x.candidates
        or (
            set(x.candidates) == set(x.choice.names)
            and all(values and all(map(is_size, values)) for values in x.candidates.values())
        )
    ),
    "rules must be {description: lambda c: …}": lambda x: all(map(callable, x.rules.values())),
    f"dtypes must be among {', '.join(INPUTS)}": lambda x: (
        bool(x.dtypes) and set(x.dtypes) <= set(INPUTS)
    ),
    f"features must be among {', '.join(FEATURES)}": lambda x: set(x.features) <= set(FEATURES),
    f"scratch must be {{name: (axes, one of {', '.join(KINDS)})}}": lambda x: all(
        kind in KINDS for _, kind in x.scratch.values()
    ),
    f"scratch must have axes {', '.join(AXES)}, or a formula": lambda x: all(
        callable(axes) or set(axes.split()) <= set(AXES) for axes, _ in x.scratch.values()
    ),
    "rounds must be a formula, lambda p, c: …": lambda x: callable(x.rounds),
    "shares must be {reason: formula}": lambda x: (
        isinstance(x.shares, Mapping) and all(map(callable, x.shares.values()))
    ),
    "yields_to must be {kernel's name: formula}": lambda x: (
        isinstance(x.yields_to, Mapping) and all(map(callable, x.yields_to.values()))
    ),
    "round_group and round_rows must be formulas, lambda p, c: …": lambda x: (
        callable(x.round_group) and callable(x.round_rows)
    ),
    "round_heads must be a formula, lambda p, c: …, if a Matmul is in rounds": lambda x: (
        callable(x.round_heads)
        or (
            x.round_heads is None
            and not any(isinstance(step, Matmul) and step.in_rounds for step in x.launches)
        )
    ),
    f"round_heads requires features other than {', '.join(_BY_HEAD)}": lambda x: (
        x.round_heads is None or not set(_BY_HEAD) & set(x.features)
    ),
    f"arch must be one of {', '.join((*ARCHES, *ARCH_SPECIFIC))}": lambda x: (
        x.arch in (*ARCHES, *ARCH_SPECIFIC)
    ),
    f"arch must be at least {_BOXES_SINCE} if launches have boxes": lambda x: (
        int(x.arch.removesuffix("a")) >= _BOXES_SINCE
        or not any(isinstance(step, Launch) and step.boxes for step in x.launches)
    ),
    "dtype_arch must be {dtype: arch} and requires an arch without the suffix a": lambda x: (
        set(x.dtype_arch) <= set(x.dtypes)
        and set(x.dtype_arch.values()) <= set(ARCHES)
        and not (x.dtype_arch and x.target)
    ),
    "largest_d must be None or a whole number from 1": lambda x: (
        x.largest_d is None or is_size(x.largest_d)
    ),
    "largest_dv must be None or a whole number from 1": lambda x: (
        x.largest_dv is None or is_size(x.largest_dv)
    ),
    f"rounding must be None or one of {', '.join(ROUNDINGS)}": lambda x: (
        x.rounding in (None, *ROUNDINGS)
    ),
    f"parts must be None or one of {', '.join(DTYPES)}": lambda x: x.parts in (None, *DTYPES),
    f"precisions must be among {', '.join(PRECISIONS)}": lambda x: (
        not isinstance(x.precisions, str) and set(x.precisions) <= set(PRECISIONS)
    ),
    "made_for must be None or a formula, lambda p, c: …": lambda x: (
        x.made_for is None or callable(x.made_for)
    ),
    "unordered must be a tuple of output names": lambda x: not isinstance(x.unordered, str),
    "inputs must be {name: Input(axes, kind)}": lambda x: all(
        isinstance(of, Input) for of in x.inputs.values()
    ),
    "inputs must have names that no other argument has": lambda x: _are_own(x.inputs),
    "floats must not be named like inputs, outputs, scratch or tile sizes": lambda x: (
        len({*x.inputs, *x.outputs, *x.floats, *x.scratch, *x.choice.names})
        == sum(map(len, (x.inputs, x.outputs, x.floats, x.scratch, x.choice.names)))
    ),
    f"inputs must have axes {', '.join(AXES)}, or a formula": lambda x: all(
        callable(of.axes) or (of.axes.strip() and set(of.axes.split()) <= set(AXES))
        for of in x.inputs.values()
    ),
    f"inputs must be of kind {', '.join(INPUT_KINDS)}": lambda x: all(
        of.kind in INPUT_KINDS for of in x.inputs.values()
    ),
    "outputs must be {name: (axes, kind)} and require a reference": lambda x: (
        all(
            axes.strip() and set(axes.split()) <= set(AXES) and kind in INPUT_KINDS
            for axes, kind in x.outputs.values()
        )
        and (not x.outputs or x.reference is not None)
    ),
    "outputs must have names that no other argument has": lambda x: _are_own(x.outputs),
    "floats must be {name: lambda p, c: …}": lambda x: all(map(callable, x.floats.values())),
    "floats must have names that no other argument has": lambda x: _are_own(x.floats),
    "reference must be None or a function of arrays, p and c": lambda x: (
        x.reference is None or callable(x.reference)
    ),
    "forward must be None or a function of arrays, p and c": lambda x: (
        x.forward is None or callable(x.forward)
    ),
    "folder must be None or a path": lambda x: isinstance(x.folder, str | Path | None),
}
