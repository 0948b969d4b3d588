"""Inputs that modify or mask scores: expressions, and the arrays and numbers that they read.

Softcap, ALiBi slopes, a bias and a mask become expressions here, so that kernels, the reference and
its error bounds only handle expressions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from keyword import iskeyword
from math import prod
from typing import Any

import numpy as np

from cupyfa.errors import described
from cupyfa.problem.dtypes import DTYPES
from cupyfa.problem.options import AttentionOptions
from cupyfa.score.expressions import TAKEN, Captured, Expression

ALIBI, BIAS, MASK, SINK, DLSE = "alibi_slopes", "bias", "mask", "sink", "dlse"
SOFTCAP = "softcap"
ROW_MAX = "row_max"  # an optional output: the row maxima of the scores
SEED, OFFSET = "dropout_seed", "dropout_offset"
PAGE_TABLE = "page_table"
KEY_TILES, ROW_TILES = "key_tiles", "row_tiles"
OF_BLOCKS = "block_mask_"  # name prefix of a block mask's arrays and numbers


@dataclass(frozen=True)
class OptionalInput:
    """An array that problems may read besides Q, K and V; docs/options.md explains how to add one.

    group: the group of arrays that are passed and read together.
    axes: the names of the problem sizes that its trailing axes must match; "-" for other sizes.
    broadcast: "axes" if any axis may have size 1, "lead" if the first axis may be omitted.
    dtype: a dtype name, or the kind "float" or "int"; empty if any dtype is allowed.
    usual_dtype: the default dtype of array forms; None for the dtype of results.
    shape_rule: the required shape, for messages; empty if callers do not choose the shape.
    in_expressions: whether an expression reads the array.
    is_keyword: whether calls accept the array as a keyword argument of this name.
    feature: the feature that a kernel must declare.
    constant: the C++ constant that tells the kernel whether the array is given.
    usual_axes, axes_examples: its default shape on the command line, and alternatives.
    help: the help text of its command-line option.
    in_parts: the remedy in error messages of calls that split a problem and reject the array.
    written: how messages refer to the array if callers do not pass it as ``name``.
    """

    name: str
    group: str
    axes: tuple[str, ...] = ()
    broadcast: str = ""
    dtype: str = ""
    usual_dtype: str | None = "float32"
    shape_rule: str = ""
    in_expressions: bool = False
    is_keyword: bool = False
    feature: str | None = None
    constant: str | None = None
    usual_axes: str = ""
    axes_examples: str = ""
    help: str = ""
    in_parts: str = ""
    written: str = ""

    def fits(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> bool:
        """Returns whether ``shape`` is valid for these problem sizes."""
        full = tuple(sizes[x] for x in self.axes)
        if self.broadcast == "axes":
            return len(shape) == len(full) and all(n in (1, x) for n, x in zip(shape, full))
        return shape == full or (self.broadcast == "lead" and shape == full[1:])


_BY_HEAD: dict[str, Any] = {
    "group": "scores",
    "axes": ("batch", "heads"),
    "broadcast": "lead",
    "dtype": "float",
    "is_keyword": True,
    "shape_rule": "[heads] or [batch, heads], here ({heads},) or ({batch}, {heads})",
    "usual_axes": "h",
    "axes_examples": "h or bh",
}
_BY_PAIR: dict[str, Any] = {
    "group": "scores",
    "axes": ("batch", "heads", "M", "N"),
    "broadcast": "axes",
    "shape_rule": "broadcastable to [batch, heads, M, N], here ({batch}, {heads}, {M}, {N}): each "
    "size must be equal or 1",
    "in_expressions": True,
    "is_keyword": True,
}
_SEED: dict[str, Any] = {
    "group": "seeds",
    "axes": ("one",),
    "dtype": "int",
    "shape_rule": "() or (1,)",
}
# The rows are in the order in which kernel features are checked.
_ROWS = (
    OptionalInput(
        ALIBI,
        **_BY_HEAD,
        in_expressions=True,
        help="ALiBi slopes of each head, h, or of each batch element too, bh; with a dtype, as "
        "bf16[h].",
        in_parts="use a score_mod with captured numbers",
    ),
    OptionalInput(
        BIAS,
        **_BY_PAIR,
        dtype="float",
        usual_dtype=None,
        usual_axes="1hmn",
        axes_examples="1hmn, b1mn or 11mn",
        help="An array that is added to the scores, by its axes: 1hmn is [1, heads, M, N]; with a "
        "dtype, as f32[b1mn].",
        in_parts="use a score_mod",
    ),
    OptionalInput(
        MASK,
        **_BY_PAIR,
        dtype="bool",
        usual_dtype="bool",
        usual_axes="11mn",
        axes_examples="11mn, b11n or bhmn",
        help="An array of bool that is True for the pairs that are seen, by its axes: 11mn, b11n.",
        in_parts="use causal=, window= or a mask expression",
    ),
    OptionalInput(
        SINK,
        **_BY_HEAD,
        feature="sink",
        constant="has_sink",
        help="Sinks of each head, h, or of each batch element too, bh: one more score of every "
        "row.",
        in_parts="leave sink out",
    ),
    OptionalInput(  # the gradient of lse
        DLSE,
        group="gradients",
        axes=("batch", "heads", "M"),
        dtype="float",
        shape_rule="the shape of lse, here ({batch}, {heads}, {M})",
        feature="dlse",
        constant="has_dlse",
    ),
    OptionalInput(  # an output of a call, not an input
        ROW_MAX,
        group="results",
        axes=("batch", "heads", "M"),
        feature="row_max",
        constant="has_row_max",
    ),
    # The page table of a paged cache: page numbers for each batch element.
    OptionalInput(PAGE_TABLE, group="pages", feature="paged"),
    # Scales of e4m3 keys and values: [batch or 1, kv_heads], or [pages, 1, kv_heads] if paged.
    OptionalInput("k_scale", group="scales", feature="e4m3", constant="has_e4m3"),
    OptionalInput("v_scale", group="scales"),
    *(
        OptionalInput(  # scales of e4m3 q, k and v; 1 where omitted
            name,
            group="descales",
            axes=("batch", "kv_heads"),
            dtype="float32",
            shape_rule="[batch, kv_heads], here ({batch}, {kv_heads})",
            is_keyword=True,
            constant=f"has_{name}",
            written=f"{name[0]}.scale",
            in_parts="convert q, k and v to float16 or bfloat16",
        )
        for name in ("q_descale", "k_descale", "v_descale")
    ),
    *(
        OptionalInput(  # start offsets of the sequences in a ragged batch
            name,
            group="starts",
            axes=(name,),
            dtype="int32",
            usual_dtype="int32",
            shape_rule="[sequences + 1], here ({batch} + 1,): the first row of each sequence, then "
            "the end of the last one",
            feature="ragged",
            written=f"{name[-1]}.offsets",
        )
        for name in ("cu_seqlens_q", "cu_seqlens_k")
    ),
    *(
        OptionalInput(  # number of valid rows of each sequence
            name,
            group="used",
            axes=("batch",),
            dtype="int32",
            usual_dtype="int32",
            shape_rule="[sequences], here ({batch},)",
            feature="ragged",
            written=f"{name[-1]}.used",
        )
        for name in ("seqused_q", "seqused_k")
    ),
    *(
        OptionalInput(  # number of valid rows of each batch element in padded arrays
            name,
            group="padded",
            axes=("batch",),
            dtype="int32",
            usual_dtype="int32",
            shape_rule="[batch], here ({batch},)",
            is_keyword=True,
            feature="lengths",
            written=f"{name[-1]}.lengths",
            in_parts="call for the batch elements of each length",
        )
        for name in ("lengths_q", "lengths_k")
    ),
    OptionalInput(SEED, **_SEED),  # a dropout seed or offset stored in a one-element array
    OptionalInput(OFFSET, **_SEED),
    # Tile maps of a block mask: K/V tiles for each Q tile, and Q tiles for each K/V tile.
    *(
        OptionalInput(name, group="maps", axes=("batch", "heads", "-", "-"), constant=f"has_{name}")
        for name in (KEY_TILES, ROW_TILES)
    ),
)
OPTIONAL_INPUTS = {x.name: x for x in _ROWS}


def written(name: str) -> str:
    """Returns the name by which messages refer to a caller's array or number."""
    known = OPTIONAL_INPUTS.get(name)
    return known.written or name if known else name


def _group(name: str) -> tuple[str, ...]:
    return tuple(x.name for x in _ROWS if x.group == name)


OWN_ARRAYS = _group("scores")  # array arguments that modify scores
OF_PAIRS = tuple(x for x in OWN_ARRAYS if "N" in OPTIONAL_INPUTS[x].axes)  # per query and key
OF_HEADS = tuple(x for x in OWN_ARRAYS if x not in OF_PAIRS)  # per head and batch element
SEEDS, SCALES, DESCALES, MAPS = map(_group, ("seeds", "scales", "descales", "maps"))
STARTS, USED, PADDED = map(_group, ("starts", "used", "padded"))
LENGTHS = (*STARTS, *USED, *PADDED)
KEYWORDS = tuple(x.name for x in _ROWS if x.is_keyword)
RESERVED = (*OPTIONAL_INPUTS, SOFTCAP, "dropout")  # names that captured arrays must not use
_CALLERS = ("score_mod", "mask_mod")  # options whose expressions are written by the caller
_AXES = ("batch", "head", "query", "key")
MOST_AXES = 64  # NumPy's limit on the number of axes
_DTYPES = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
# Maps dtypes to kinds of Captured; all other dtypes are integers.
_KINDS = {"bool": "bool", **dict.fromkeys(_FLOATS, "float")}


@dataclass(frozen=True)
class Operand:
    """Describes an array or a number that an expression reads; it does not hold array elements.

    name: its name in expressions. dtype: a dtype name such as "bfloat16". shape: the array's shape;
    a broadcast axis of a bias or mask has size 1. value: the number; None for an array. gradient:
    whether the backward operation computes its gradient, or that of tangents takes its tangent.
    given: the caller's shape, for messages, where it differs from ``shape``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    value: float | int | bool | None = field(default=None, compare=False)
    gradient: bool = False
    given: tuple[int, ...] | None = field(default=None, compare=False, repr=False)
    # Compared in place of the value, because 0.0 == -0.0 and NaN != NaN.
    _written: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_written", repr(self.value))

    @property
    def record(self) -> OptionalInput | None:
        """The operand's row in OPTIONAL_INPUTS; None for captured arrays and numbers."""
        return OPTIONAL_INPUTS.get(self.name)

    @property
    def is_in_expressions(self) -> bool:
        """Whether an expression reads the operand; always true for captured operands."""
        return self.record is None or self.record.in_expressions

    @property
    def captured(self) -> Captured:
        kind = _KINDS.get(self.dtype, "int")
        most = -np.iinfo(self.dtype).min or np.iinfo(self.dtype).max if kind == "int" else 0
        return Captured(self.name, kind, len(self.shape), most)  # type: ignore[arg-type]

    @property
    def numpy(self) -> np.dtype:
        known = DTYPES.get(self.dtype)
        return known.numpy if known else np.dtype(self.dtype)

    @property
    def is_array(self) -> bool:
        return self.value is None

    @property
    def is_differentiable(self) -> bool:
        is_other = self.name in (DLSE, ROW_MAX)
        return self.is_array and self.captured.kind == "float" and not is_other

    @property
    def in_pairs(self) -> bool:
        """Whether kernels load the operand's elements for two adjacent keys in one instruction."""
        return self.name in (BIAS, MASK) and self.shape[-1] > 1 and self.numpy.itemsize <= 2

    @property
    def axes(self) -> tuple[str, ...]:
        """The name of the problem size along each axis; "-" for broadcast axes.

        For a captured array, every name is "-".
        """
        rank = len(self.shape)
        axes = self.record.axes if self.record else ()
        known = axes[len(axes) - rank :] if axes else ("-",) * rank
        return tuple("-" if n == 1 else x for x, n in zip(known, self.shape))

    def part(self, sizes: Mapping[str, int]) -> Operand:
        """Returns the operand resized for a sub-problem of these sizes."""
        return replace(self, shape=tuple(sizes.get(x, n) for x, n in zip(self.axes, self.shape)))

    @property
    def input(self) -> str:
        """The operand's name among an operation's inputs or outputs."""
        return self.name if self.name == ROW_MAX else f"mods.{self.name}"


GRADIENT = "d_"  # begins the names of gradients, and of tangents, of arrays that change scores


def gradient_of(name: str) -> str:
    """Returns the name of an array's gradient among an operation's outputs."""
    return f"{GRADIENT}{name}"


def is_of_scores(name: str) -> bool:
    """Returns whether an operation's input is an array that expressions read, or its tangent."""
    return name.startswith(("mods.", GRADIENT))


def name_of(name: str) -> str:
    """Returns the name by which messages refer to an operation's input."""
    own = name.removeprefix("mods.")
    if own.startswith(OF_BLOCKS) or own in MAPS:
        return MASK
    return own if own == name or own in OPTIONAL_INPUTS else f"captured {own}"


@dataclass(frozen=True)
class Modifiers:
    """A problem's score and mask expressions, in the order in which they are applied.

    score: score expressions; the first one is applied to scale * q @ k, and each further one to the
    previous result. mask: mask expressions; a pair is visible if all of them are True. operands:
    the arrays and numbers that expressions read, plus the sink, the gradient of lse, and the output
    row_max. dropout: whether weights are dropped.
    """

    score: tuple[Expression, ...] = ()
    mask: tuple[Expression, ...] = ()
    operands: tuple[Operand, ...] = ()
    dropout: bool = False

    @property
    def arrays(self) -> tuple[Operand, ...]:
        """The operands that are input arrays."""
        return tuple(x for x in self.operands if x.is_array and x.name != ROW_MAX)

    @property
    def differentiated(self) -> tuple[Operand, ...]:
        """The arrays that expressions read and whose gradients the call returns."""
        return tuple(x for x in self.arrays if x.gradient and x.is_in_expressions)

    @property
    def moving(self) -> tuple[Operand, ...]:
        """The arrays whose tangents change the results of the tangent operation."""
        found = tuple(x for x in self.arrays if x.gradient)
        return found if self.score or any(x.name == SINK for x in found) else ()

    @property
    def elements(self) -> int:
        """The total number of elements of the differentiated arrays."""
        return sum(prod(x.shape) for x in self.differentiated)

    @property
    def numbers(self) -> dict[str, float]:
        return {x.name: x.value for x in self.operands if x.value is not None}

    @property
    def counts_heads(self) -> bool:
        """Whether the caller's expressions or dropout depend on the batch or head index."""
        return self.dropout or self._is_named("batch", "head")

    @property
    def counts_rows(self) -> bool:
        """Whether the caller's expressions, tile maps or lengths depend on row or key indices."""
        has_maps = any(self._has(x) for x in MAPS)
        named = self._is_named("query", "key", "position", "queries", "keys")
        return has_maps or named or self.is_ragged

    @property
    def reads_position(self) -> bool:
        """Whether an expression uses ``position``, a query's position among the keys."""
        return any("position" in x.positions for x in (*self.score, *self.mask))

    def _is_named(self, *places: str) -> bool:
        """Returns whether score_mod or mask_mod uses one of these index names.

        Built-in expressions of bias, slopes and masks are ignored, because their arrays are sliced
        together with the problem.
        """
        own = (x for x in (*self.score, *self.mask) if x.option in _CALLERS)
        return any(not x.positions.isdisjoint(places) for x in own)

    @property
    def features(self) -> list[str]:
        needed = [x.feature for x in _ROWS if x.feature and self._has(x.name)]
        asked = ["wrt"] * any(x.gradient for x in self.arrays)
        scores = ["score"] * bool(self.score) + ["places"] * self._reads_places
        return [*scores, *dict.fromkeys(needed), *asked]

    @property
    def _reads_places(self) -> bool:
        read = any(x.is_in_expressions for x in self.arrays)
        return bool(self.mask) or read or any(x.positions for x in self.score)

    @property
    def has_sink(self) -> bool:
        return self._has(SINK)

    @property
    def has_row_max(self) -> bool:
        """Whether the call returns the row maxima of the scores."""
        return self._has(ROW_MAX)

    @property
    def is_e4m3(self) -> bool:
        """Whether keys and values are stored as e4m3 with scales."""
        return self._has(SCALES[0])

    @property
    def is_ragged(self) -> bool:
        """Whether batch elements differ in length."""
        return any(map(self._has, LENGTHS))

    @property
    def is_packed(self) -> bool:
        """Whether batch elements are sequences of packed rows."""
        return self._has(STARTS[0])

    @property
    def used(self) -> tuple[bool, ...]:
        """Two flags: whether the call passes numbers of valid queries, and of valid keys."""
        return tuple(self._has(x) or self._has(y) for x, y in zip(USED, PADDED))

    def _has(self, name: str) -> bool:
        return any(x.name == name for x in self.operands)

    @property
    def held(self) -> Operand | None:
        """The bias or mask whose tiles kernels may copy to shared memory, if any."""
        if not (self.score or self.mask):  # no expression
            return None
        return next((x for x in self.operands if x.in_pairs), None)

    @property
    def has_softcap(self) -> bool:
        return any(x.option == SOFTCAP for x in self.score)

    @property
    def constants(self) -> dict[str, bool]:
        return {
            "has_score_mod": bool(self.score),
            "has_mask_mod": bool(self.mask),
            "reads_places": self._reads_places,
            "has_dropout": self.dropout,
            "moves_arrays": bool(self.moving),
            **{x.constant: self._has(x.name) for x in _ROWS if x.constant},
            "unit_slope": all(x.is_additive for x in self.score),
        }


NONE = Modifiers()


@lru_cache(maxsize=256)
def modifiers(
    options: AttentionOptions, operands: tuple[Operand, ...], sizes: tuple[int, int, int, int]
) -> Modifiers:
    """Builds expressions from options and arrays and checks them; sizes: batch, heads, M and N.

    Raises ValueError for arrays of wrong shape, unknown names in expressions, and arrays that no
    expression reads.
    """
    plain = options.score_mod is options.mask_mod is options.softcap is None
    has_dropout = options.dropout > 0 and 0 not in sizes
    if plain and not operands:
        return Modifiers(dropout=True) if has_dropout else NONE
    by_name = {x.name: x for x in operands}
    if options.softcap is not None:
        by_name[SOFTCAP] = Operand(SOFTCAP, "float64", (), options.softcap)
    named = dict(zip(("batch", "heads", "M", "N"), sizes))
    for x in operands:
        if x.name not in DESCALES:  # Problem._check_descales checks descales
            check_input(x, named, is_packed=STARTS[0] in by_name)
    score = [*_softcap_step(options), *_score_steps(options, by_name)]
    mask = list(_mask_steps(options, by_name))
    read = {name for step in (*score, *mask) for name in step.captured}
    for step in (*score, *mask):
        reserved = RESERVED if step.option in _CALLERS else ()
        kinds = {name: x.captured for name, x in by_name.items() if name not in reserved}
        step.check(kinds, reserved)
    if unread := [x for x, y in by_name.items() if y.is_in_expressions and x not in read]:
        raise ValueError(
            f"no expression reads {', '.join(unread)}; remove unused names from captured"
        )
    if 0 in sizes:  # S is empty
        return Modifiers(operands=tuple(x for x in by_name.values() if x.is_array))
    return Modifiers(tuple(score), tuple(mask), tuple(by_name.values()), has_dropout)


def refuse_short(found: Modifiers, sizes: tuple[int, int, int, int]) -> None:
    """Raises ValueError if a bare index such as `query` exceeds an axis of a captured array.

    sizes: batch, heads, M and N. M and N are not checked for batches with lengths.
    """
    shapes = {x.name: x.shape for x in found.operands}
    has_lengths = not shapes.keys().isdisjoint((*LENGTHS, PAGE_TABLE))
    ends = dict(zip(_AXES, sizes[:2] if has_lengths else sizes))
    for step in (*found.score, *found.mask):
        for name, axis, index in step.indices:
            place, shape = getattr(index, "id", ""), shapes[name]
            if (end := ends.get(place, 0)) > shape[axis]:
                raise ValueError(
                    f"captured {name} has shape {shape}, but {step.option} indexes axis {axis} "
                    f"with {place}, from 0 to {end - 1}; make this axis at least {end} long, or "
                    f"write an index such as min({place}, {max(shape[axis] - 1, 0)})"
                )


def _softcap_step(options: AttentionOptions) -> Iterator[Expression]:
    """Yields the first step: tensor-core kernels cap whole tiles before they apply other steps."""
    if options.softcap is not None:
        yield _expression(SOFTCAP, "softcap * tanh(score / softcap)")


def _score_steps(
    options: AttentionOptions, operands: Mapping[str, Operand]
) -> Iterator[Expression]:
    """Yields the steps after the softcap, in the order in which they are applied."""
    if options.score_mod is not None:
        yield options.score_mod
    if ALIBI in operands:
        yield alibi_expression(operands[ALIBI])
    if BIAS in operands:
        yield _expression(BIAS, f"score + {BIAS}[{indices(operands[BIAS].shape)}]")


def _mask_steps(options: AttentionOptions, operands: Mapping[str, Operand]) -> Iterator[Expression]:
    if MASK in operands:
        yield _expression(MASK, f"{MASK}[{indices(operands[MASK].shape)}]")
    if options.mask_mod is not None:
        yield options.mask_mod


_expression = lru_cache(maxsize=64)(Expression.of)


def alibi_expression(slopes: Operand, factor: str = "") -> Expression:
    """Returns the ALiBi expression; ``factor`` names a number that multiplies the slopes."""
    slope = f"{ALIBI}[{'head' if len(slopes.shape) == 1 else 'batch, head'}]"
    slope += f" * {factor}" * bool(factor)
    return _expression(ALIBI, f"score - {slope} * abs(position - key)")


def indices(shape: Sequence[int]) -> str:
    """Returns the indices, such as "0, head, query, key", with which expressions read an array.

    shape: the array's sizes along batch, heads, M and N; axes of size 1 are broadcast.
    """
    return ", ".join("0" if n == 1 else axis for axis, n in zip(_AXES, shape))


_DTYPE_RULES = {
    "float": "a floating-point dtype",
    "bool": "bool, True for visible pairs",
    "int": "an integer dtype",
}


def check_input(x: Operand, sizes: Mapping[str, int], is_packed: bool = False) -> None:
    """Raises ValueError for a wrong shape of an optional input, and TypeError for a wrong dtype.

    sizes: maps names to problem sizes; in a packed batch, "batch" is the number of sequences.
    """
    if x.record is None or not (rule := x.record.shape_rule):
        return
    sizes = {**sizes, "one": 1, **dict.fromkeys(STARTS, sizes["batch"] + 1)}
    if x.name == DLSE and is_packed:
        sizes["batch"] = 1
    if not x.record.fits(x.shape, sizes):
        wanted = rule.format(**sizes)
        shape = x.given or x.shape
        raise ValueError(f"{written(x.name)} has shape {shape}; it must be {wanted}")
    kind, dtype = x.captured.kind, x.record.dtype
    if dtype not in (x.dtype, kind):
        wanted = _DTYPE_RULES.get(dtype, dtype)
        other = "; to add numbers to scores, pass them as bias" * (
            dtype == "bool" and kind == "float"
        )
        raise TypeError(f"{written(x.name)} is {x.dtype}; it must be {wanted}: convert it{other}")


def operand(name: str, given: Any) -> Operand:
    """Makes the operand for a captured array or number.

    Raises TypeError for any other object, and ValueError for a name that is reserved or invalid.
    """
    is_name = isinstance(name, str) and name.isidentifier() and name.isascii()
    if not is_name or iskeyword(name) or name.startswith("__"):
        raise ValueError(
            f"captured contains {name!r}; names must consist of letters, digits and _, must not be "
            "Python keywords, and must not begin with __"
        )
    if name in (*TAKEN, *RESERVED) or name.startswith(OF_BLOCKS):
        raise ValueError(
            f"captured contains {name!r}, a name that is reserved in expressions; rename this entry"
        )
    return of_value(name, given)


def of_value(name: str, given: Any) -> Operand:
    if isinstance(given, bool | np.bool_):
        return Operand(name, "bool", (), bool(given))
    if isinstance(given, int | np.integer):
        if not -(2**63) <= given < 2**63:
            raise ValueError(f"{name} is {described(given)}; whole numbers must fit in int64")
        return Operand(name, "int64", (), int(given))
    if isinstance(given, float | np.floating):
        return Operand(name, "float64", (), float(given))
    what = "" if name in KEYWORDS else "a number, or "
    if not hasattr(given, "dtype") or not hasattr(given, "shape"):
        raise TypeError(f"{written(name)} is {described(given)}; pass {what}a NumPy or CuPy array")
    dtype, floats = str(given.dtype), " or ".join((", ".join(_FLOATS[:-1]), _FLOATS[-1]))
    any_of = f"bool, whole numbers or {', '.join(_FLOATS)}"
    if dtype not in (*_DTYPES, *_FLOATS):
        known = OPTIONAL_INPUTS.get(name)
        wanted = {"bool": "bool", "float": floats}.get(known.dtype, any_of) if known else any_of
        raise TypeError(
            f"{written(name)} is {dtype}; it must be {wanted} in native byte order: convert it"
        )
    if not given.shape:
        return Operand(name, dtype, (1,)) if name in SEEDS else of_value(name, given.item())
    return Operand(name, dtype, tuple(map(int, given.shape)))


def of_record(
    name: str, dtype: str, shape: Sequence[int], value: Any = None, gradient: bool = False
) -> Operand:
    """Makes an operand from fields that may come from a file.

    Checks the name, because generated C++ contains it.
    """
    if name not in OPTIONAL_INPUTS and not name.startswith(OF_BLOCKS):
        operand(name, 0)  # raises for names that callers must not use
    elif not (name.isidentifier() and name.isascii()):
        raise ValueError(f"{name!r} is not a valid array name")
    if value is not None:
        return of_value(name, value)
    if dtype not in (*_DTYPES, *_FLOATS) or not shape:
        raise ValueError(
            f"{name} is an array of dtype {dtype!r} and shape {tuple(shape)}; the dtype must be "
            "supported and the array must have at least one axis"
        )
    return Operand(name, dtype, tuple(shape), None, gradient)


def of_list(name: str, given: Any) -> Any:
    """Converts a list or tuple of numbers to a NumPy array; returns other values unchanged.

    Raises TypeError for a list that cannot be converted.
    """
    if not isinstance(given, list | tuple) or name in LENGTHS:
        return given
    try:
        return np.array(given, np.float32 if name in DESCALES else None)
    except (ValueError, TypeError, OverflowError) as error:
        raise TypeError(
            f"{written(name)} is a {type(given).__name__} that NumPy cannot convert to an array "
            f"({error}); pass numbers, in rows of equal length"
        ) from None


def is_array(given: Any) -> bool:
    """Returns whether the argument is an array; NumPy scalars count as numbers."""
    return hasattr(given, "shape") and not isinstance(given, np.generic)


def with_four_axes(name: str, array: Any, lead: Sequence[int]) -> Any:
    """Reshapes a bias or mask to [batch, heads, M, N]; axes of size 1 are broadcast.

    ``lead`` holds the sizes of q's axes before heads, which are flattened into the batch axis.
    """
    shape = tuple(array.shape)
    if len(shape) < 4:
        return array.reshape((1,) * (4 - len(shape)) + shape)
    own = (1,) * (len(lead) - len(shape) + 3) + shape[:-3]
    if all(n == 1 for n in own) or own == tuple(lead):
        return array.reshape(-1 if array.size else int(np.prod(own)), *shape[-3:])
    raise ValueError(
        f"{name} has shape {shape}; its leading axes must equal q's leading axes, {tuple(lead)}, "
        "or all be 1: broadcast the array"
    )
