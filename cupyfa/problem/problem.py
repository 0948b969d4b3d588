"""The Problem of a call: sizes, dtype, options and optional inputs, checked on construction."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Unpack

import numpy as np

from cupyfa.errors import Unsupported, described
from cupyfa.problem import optional_inputs, shape_language
from cupyfa.problem.dtypes import DTYPES, E4M3_INPUTS, INPUTS, DType, DTypeLike, dtype_named
from cupyfa.problem.lengths import DENSE, Lengths, Packed, Rows, lengths_of, pairs_of, shown_lengths
from cupyfa.problem.optional_inputs import (
    ALIBI,
    DESCALES,
    LENGTHS,
    MAPS,
    MASK,
    OF_PAIRS,
    PADDED,
    PAGE_TABLE,
    ROW_MAX,
    SCALES,
    SEEDS,
    STARTS,
    Modifiers,
    Operand,
)
from cupyfa.problem.options import FLOAT8, PLAIN, AttentionOptions, OptionKeywords, read_size
from cupyfa.problem.resizing import resized
from cupyfa.score.expressions import Expression

SIZES = ("batch", "heads", "kv_heads", "M", "N", "d", "dv")
MOST = 2**31 - 2**16  # largest size; indices in its last tile fit in 32 bits
MOST_ELEMENTS = 2**59  # per array, so that its size in bytes fits in 64 bits
LAYOUTS = ("bhsd", "bshd")
TEXTS = ("score_mod", "mask_mod")  # options that are expressions
PAGE_SIZES = (16, 32, 64, 128, 256)  # supported numbers of keys per page
# Fields of the sub-problem for a single sequence, which is dense and reads no arrays.
_ALONE: dict[str, Any] = {"operands": (), "rows": DENSE}


@dataclass(frozen=True, repr=False)
class Problem:
    """One attention problem: q [batch, heads, M, d], k [batch, kv_heads, N, d], v [.., N, dv].

    ``options.scale`` is None for the default scale, even if the caller passed its value. ``shift``
    is added to every query's position, and is 0 except in sub-problems. With ``is_softmax`` the
    problem is a row-wise softmax of scores [batch, heads, M, N], and d is 0. ``operands`` are the
    arrays and numbers that expressions read. With ``block_mask`` kernels skip the empty tiles of a
    block mask, whose tile maps are computed from the inputs (``blocks.readable``). ``rows``
    describes packed sequences and pages. A paged problem's operands include the page table.
    """

    batch: int
    heads: int
    kv_heads: int
    M: int
    N: int
    d: int
    dv: int
    dtype: DType
    options: AttentionOptions = PLAIN
    shift: int = 0
    is_softmax: bool = False
    operands: tuple[Operand, ...] = ()
    block_mask: bool = False
    rows: Rows = DENSE

    def __post_init__(self) -> None:
        for name in SIZES:
            object.__setattr__(self, name, read_size(name, getattr(self, name), MOST))
        if self.options.scale == _default_scale(self.d):
            object.__setattr__(self, "options", replace(self.options, scale=None))
        elements = self.batch * self.heads * max(self.M, self.N) * (max(self.d, self.dv) or self.N)
        if elements >= MOST_ELEMENTS:
            raise ValueError(f"an array would have {elements:,} elements; the limit is 2**59")
        if self.heads and (not self.kv_heads or self.heads % self.kv_heads):
            raise ValueError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; "
                "every key head must serve the same number of query heads"
            )
        _check_precision(self.precision, self.dtype)
        _check_out_dtype(self.options.out_dtype, self.dtype)
        if self.options.out_dtype == self.dtype.usual_result:
            object.__setattr__(self, "options", replace(self.options, out_dtype=None))
        _ = self.modifiers  # validates expressions and arrays
        self._check_descales()
        if self.is_ragged:
            self._check_ragged()
        if self.lengths is not None:
            self._check_lengths(*self.lengths)
        if self.block_mask and not self.has_mask:
            object.__setattr__(self, "block_mask", False)
        with np.errstate(over="ignore"):
            finite = np.isfinite(self.dtype.sums.type(self.scale * math.log2(math.e)))
        if not finite:
            raise ValueError(
                f"scale is {self.scale}; pass a finite {self.dtype.sums} number whose product with "
                "log2(e) is finite"
            )

    @classmethod
    def of_sizes(
        cls,
        *,
        M: int | None = None,
        N: int | None = None,
        d: int,
        dv: int | None = None,
        batch: int | None = None,
        heads: int = 1,
        kv_heads: int | None = None,
        dtype: DTypeLike = "float32",
        options: AttentionOptions | None = None,
        block_mask: bool | None = None,
        lengths: Any = None,
        page_size: int | None = None,
        **keywords: Unpack[shape_language.FormKeywords],
    ) -> Problem:
        """Makes a problem from sizes; N defaults to M, dv to d and kv_heads to heads.

        lengths: replaces batch, M and N in a ragged batch: the sequence lengths, such as [349, 263]
            or "349,263", or lengths of queries and of keys: ([5, 0], [7, 3]) or "5,0:7,3".
        block_mask: whether mask and mask_mod form a block mask.
        page_size: number of keys per page of a paged cache; see ``in_pages``.
        keywords: options and array forms (see ``shape_language``), plus wrt, the arrays whose
            gradients a backward kernel returns; dlse, whether a backward kernel reads a gradient of
            lse; return_max, whether a forward kernel returns row maxima. dropout_seed and
            dropout_offset may also be arrays, or forms such as "u64[1]".
        """
        kv_heads = heads if kv_heads is None else kv_heads
        dv = d if dv is None else dv
        packed = None if lengths is None else lengths_of(lengths)
        batch, M, N = _sizes_of_rows(packed, batch, M, N)
        asked = dict[str, Any](keywords)
        arrays = {x: asked.pop(x) for x in shape_language.FORMS if x in asked}
        seeds = shape_language.seeds_in_memory(asked)
        asked |= dict.fromkeys(seeds, 0)
        known, chosen = dtype_named(dtype), AttentionOptions.of(options, asked)
        given = shape_language.of_heads(arrays, batch, kv_heads)
        given |= seeds if chosen.dropout else {}
        given |= shape_language.forms_of_lengths(packed)
        operands = shape_language.operands(given, (batch, heads, M, N), known.name)
        batch = 1 if packed else batch
        sizes = batch, heads, kv_heads, M, N, d, dv
        p = cls(*sizes, known, chosen, operands=operands, rows=Rows(packed))
        return p.in_blocks(block_mask).in_pages(page_size)

    @classmethod
    def of(
        cls,
        q: Any,
        k: Any,
        v: Any,
        *,
        layout: str = "bhsd",
        options: AttentionOptions | None = None,
        operands: tuple[Operand, ...] = (),
        **keywords: Unpack[OptionKeywords],
    ) -> Problem:
        """Makes the problem of a call from the shapes and dtypes of q, k and v.

        Raises ValueError for inconsistent shapes or options, and TypeError for unsupported dtypes.
        """
        batch, heads, M, d = sizes_of("q", q, layout)
        _, kv_heads, N, k_d = sizes_of("k", k, layout)
        _, v_heads, v_N, dv = sizes_of("v", v, layout)
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        table = next((x for x in operands if x.name == PAGE_TABLE), None)
        of_pages = (k, v) if table else (q, k, v)
        _same("the leading axes", shapes, *(tuple(x.shape[:-3]) for x in of_pages))
        _same("d, the last axis of q and k,", shapes, d, k_d)
        _same("the number of key heads", shapes, kv_heads, v_heads)
        _same("N, the number of keys,", shapes, N, v_N)
        is_e4m3 = any(x.name in SCALES for x in operands)
        of_dtype = {"q": q} if is_e4m3 else {"q": q, "k": k, "v": v}
        dtype = _common_dtype(INPUTS, **of_dtype)
        chosen = AttentionOptions.of(options, keywords)
        pages = len(k) if table else 0
        N *= table.shape[1] if table else 1
        sizes = batch, heads, kv_heads, M, N, d, dv
        p = cls(*sizes, dtype, chosen, operands=operands, rows=Rows(pages=pages))
        optional_inputs.refuse_short(p.modifiers, p.of_scores)
        return p

    def row(self) -> dict[str, Any]:
        """Returns the columns of a result row: sizes, dtype, options and arrays.

        Missing values are None. For a ragged batch, batch is the number of sequences, and M and N
        are total rows.
        """
        options = self._explicit.row()
        if self.is_softmax:
            options = dict.fromkeys(options)
        sizes = {x: None if self.is_softmax and x not in "MN" else getattr(self, x) for x in SIZES}
        sizes["batch"] = self.sequences or sizes["batch"]
        lengths = self.rows.known_lengths and shown_lengths(self.rows.known_lengths)
        arrays = " ".join(self._arrays_shown) or None
        return {**sizes, "lengths": lengths, "dtype": self.dtype.name, **options, "arrays": arrays}

    def with_options(self, **changes: Any) -> Problem:
        return replace(self, options=replace(self.options, **changes))

    @property
    def has_mask(self) -> bool:
        """Whether an array or an expression hides pairs."""
        return self.options.mask_mod is not None or any(x.name == MASK for x in self.operands)

    def in_blocks(self, asked: bool | None = True) -> Problem:
        """Turns the mask into a block mask, or back into a plain mask if ``asked`` is false.

        Raises ValueError if ``asked`` is true and the problem has no mask.
        """
        if asked and not self.has_mask:
            raise ValueError("block_mask requires a mask; pass mask_mod= or mask=")
        return replace(self, block_mask=bool(asked))

    def without(self, *names: str) -> Problem:
        """Removes optional inputs and outputs by name."""
        kept = tuple(x for x in self.operands if x.name not in names)
        return self if len(kept) == len(self.operands) else replace(self, operands=kept)

    def without_maps(self) -> Problem:
        """Removes a block mask's tile maps, which depend on the kernel's tile sizes."""
        return self.without(*MAPS)

    def with_row_max(self, asked: bool = True) -> Problem:
        """Adds row maxima to the outputs, or removes them if ``asked`` is false."""
        form = Operand(ROW_MAX, self.dtype.sums.name, (self.batch, self.heads, self.M))
        others = self.without(ROW_MAX)
        return replace(others, operands=(*others.operands, form)) if asked else others

    @property
    def wrt(self) -> tuple[str, ...]:
        """Names of the score arrays whose gradients a backward kernel returns."""
        return tuple(x.name for x in self.operands if x.gradient)

    def in_pages(self, size: int | None) -> Problem:
        """Returns the problem with keys in pages of ``size`` keys; None removes pages.

        Rounds N up to whole pages and adds a page table and a key length for each batch element.
        """
        if size is None:
            return replace(self.without(PADDED[1], PAGE_TABLE), rows=DENSE) if self.pages else self
        check_page_size(shape_language.PAGE_SIZE, size)
        if self.sequences is not None:
            raise ValueError(
                "page_size and lengths are both given, but packed sequences cannot be paged; "
                "leave one of them out"
            )
        most = max(-(-self.N // size), 1)
        lengths = Operand(PADDED[1], "int32", (self.batch,))
        table = Operand(PAGE_TABLE, "int32", (self.batch, most))
        dense, after = self.in_pages(None), (*self.of_scores[:3], most * size)
        fitting = resized(dense.operands, self.expressions, self.of_scores, after)
        operands = (*fitting, lengths, table)
        rows = Rows(pages=self.batch * most + 1)
        return replace(dense, N=most * size, operands=operands, rows=rows)

    @property
    def pairs(self) -> int:
        """The number of (query, key) pairs per head, including masked ones."""
        if self.cached is not None:
            return self.M * self.cached.total
        if self.lengths is None:
            return self.batch * self.M * self.N
        return sum(x * y for x, y in pairs_of(*self.lengths))

    @property
    def expressions(self) -> list[Expression]:
        """The caller's expressions: score_mod and mask_mod, where given."""
        return [x for x in (self.options.score_mod, self.options.mask_mod) if x is not None]

    @property
    def reads_position(self) -> bool:
        """Whether ALiBi or an expression of the caller uses the query's position."""
        has_slopes = any(x.name == ALIBI for x in self.operands)
        return has_slopes or any("position" in x.positions for x in self.expressions)

    @property
    def of_scores(self) -> shape_language.Sizes:
        """Sizes that array forms refer to: batch (or packed sequences), heads, M and N."""
        return self.batch if self.sequences is None else self.sequences, self.heads, self.M, self.N

    @property
    def sequences(self) -> int | None:
        """Number of sequences of a packed batch; None for other problems.

        In a packed batch, batch is 1, M and N are the rows of the packed arrays, and masks are
        aligned separately for each sequence.
        """
        return next((x.shape[0] - 1 for x in self.operands if x.name == STARTS[0]), None)

    @property
    def is_ragged(self) -> bool:
        """Whether kernels read a length for each batch element or packed sequence.

        In that case M and N are the row counts of the arrays, not the lengths.
        """
        return self.modifiers.is_ragged

    @property
    def ragged_by(self) -> str:
        """The inputs that make the problem ragged, for messages."""
        return " and ".join(x.name for x in self.operands if x.name in PADDED) or "a ragged batch"

    @property
    def page_size(self) -> int:
        """Number of keys per page; 0 without pages."""
        table = next((x for x in self.operands if x.name == PAGE_TABLE), None)
        return self.N // table.shape[1] if table and table.shape[1] else 0

    @property
    def reach(self) -> tuple[int, int] | None:
        """Mask limits (right, -left) of a ragged batch, relative to each query's position.

        Other problems use causal_offset and window_offset, and their ``reach`` is None.
        """
        if not self.is_ragged:
            return None
        return min(self.right or 0, MOST), -min(self.left or 0, MOST)

    def sequence(self, M: int, N: int) -> Problem:
        """Returns the problem of one batch element, without expressions and arrays."""
        plain = replace(self.options, softcap=None, score_mod=None, mask_mod=None)
        return replace(self, batch=1, M=M, N=N, options=plain, **_ALONE)

    def _check_lengths(self, q: Lengths, k: Lengths) -> None:
        sizes = {"sequences": self.sequences, "M": self.M, "N": self.N}
        if (len(q.rows), q.total, k.total) != tuple(sizes.values()):
            raise ValueError(f"lengths {q.short} and {k.short} do not match the sizes {sizes}")

    def _check_descales(self) -> None:
        for x in self.operands:
            if x.name not in DESCALES:
                continue
            if self.dtype != E4M3_INPUTS:
                raise ValueError(
                    f"{x.name} is given, but the dtype is {self.dtype.name}; descales are only for "
                    f"{E4M3_INPUTS.name}: leave {x.name} out"
                )
            if self.is_ragged:
                raise Unsupported(
                    f"{x.name} cannot be used with sequences of different lengths; convert q, k "
                    "and v to float16 or bfloat16"
                )
            optional_inputs.check_input(x, vars(self))

    def check_offset(self) -> None:
        """Raises ValueError for an offset that has no effect; call it on complete problems only."""
        if self.offset is None or self.is_masked or self.reads_position:
            return
        raise ValueError(
            f"offset is {self.offset}, but no option of this call depends on query positions; pass "
            "causal=True or a window, or leave offset out"
        )

    def _check_ragged(self) -> None:
        by_pair = OF_PAIRS if self.modifiers.is_packed else ()
        asked = [x.name for x in self.operands if x.name in by_pair]
        for what, given, remedy in (
            (" and ".join(asked), asked, "pass an expression that reads captured arrays"),
            ("a block mask", self.block_mask, "pass its expression as mask="),
            (
                f"offset={self.offset}",
                self.offset is not None,
                "each sequence has its own offset: leave offset out",
            ),
            (
                f"{self.directions} directions",
                self.directions > 1,
                "call jvp for each direction",
            ),
        ):
            if given:
                raise Unsupported(f"{what} cannot be used with {self.ragged_by}; {remedy}")

    @property
    def _arrays_shown(self) -> list[str]:
        p = self.without_maps()
        found = shape_language.shown(p.shown_operands).items()
        shown = [f"{name}={x}" if x else name for name, x in found]
        if self.cached is not None:
            pages = f"cache in pages of {self.page_size}" if self.pages else "contiguous cache"
        else:
            pages = f"{shape_language.PAGE_SIZE}={self.page_size}" if self.pages else ""
        return [*shown, *[pages] * bool(pages), *[shape_language.BLOCK_MASK] * self.block_mask]

    @property
    def shown_operands(self) -> tuple[Operand, ...]:
        """The operands to print; offsets, lengths and page tables are printed in other columns."""
        named = (*LENGTHS, PAGE_TABLE) if self.rows != DENSE else ()
        return tuple(x for x in self.operands if x.name not in named)

    @classmethod
    def of_rows(cls, x: Any) -> Problem:
        """Makes the problem of a softmax over the last axis of x: M rows of N scores."""
        if x.ndim == 0:
            raise ValueError("x is 0-D; softmax requires at least one axis")
        return cls.of_row_sizes(
            math.prod(x.shape[:-1]), x.shape[-1], _common_dtype(DTYPES, x=x).name
        )

    @classmethod
    def of_row_sizes(cls, M: int, N: int, dtype: DTypeLike) -> Problem:
        return cls(1, 1, 1, M, N, 0, 0, dtype_named(dtype), is_softmax=True)

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads if self.kv_heads else 1

    @property
    def scale(self) -> float:
        """Factor of the scores: ``options.scale``, or 1/sqrt(d) if that is None."""
        scale = self.options.scale
        return _default_scale(self.d) if scale is None else scale

    lengths = property(attrgetter("rows.lengths"))
    pages = property(attrgetter("rows.pages"))
    cached = property(attrgetter("rows.cached"))
    # Shortcuts to options, for the formulas in kernel records.
    causal = property(attrgetter("options.causal"))
    window = property(attrgetter("options.window"))
    offset = property(attrgetter("options.offset"))
    precision = property(attrgetter("options.precision"))
    tangents = property(attrgetter("options.tangents"))
    directions = property(attrgetter("options.directions"))
    right = property(attrgetter("options.right"))
    left = property(attrgetter("options.left"))

    @property
    def tangent_batch(self) -> int:
        """The first axis of tangents: batch elements of all directions, direction by direction."""
        return self.directions * self.batch

    @property
    def modifiers(self) -> Modifiers:
        return optional_inputs.modifiers(self.options, self.operands, self.of_scores)

    @property
    def _explicit(self) -> AttentionOptions:
        return replace(self.options, scale=self.scale)

    @property
    def is_masked(self) -> bool:
        return self.left is not None or self.right is not None

    @property
    def causal_offset(self) -> int:
        """Right mask limit: query i sees keys j <= i + causal_offset; clipped to -M ... N - 1."""
        if self.right is None:
            return 0
        offset = max(min(self.first_position + self.right, max(self.N - 1, 0)), -self.M)
        return offset if self.left is None else max(offset, self.window_offset)

    @property
    def window_offset(self) -> int:
        """Left mask limit: query i sees keys j >= i + window_offset; clipped to -M ... N."""
        return (
            0 if self.left is None else min(max(self.first_position - self.left, -self.M), self.N)
        )

    def visible(self) -> np.ndarray:
        """Returns a bool array [M, N], True where query i sees key j; for custom references."""
        rows, keys = np.arange(self.M)[:, None], np.arange(self.N)
        seen = np.ones((self.M, self.N), bool)
        if self.right is not None:
            seen &= keys <= rows + self.causal_offset
        if self.left is not None:
            seen &= keys >= rows + self.window_offset
        return seen

    @property
    def first_position(self) -> int:
        """The position of query 0 among the keys."""
        usual = 0 if self.causal == "top-left" else self.N - self.M
        return self.shift + (usual if self.offset is None else self.offset)

    def part(
        self, batch: int, kv_heads: int, rows: range, keys: range, group: int | None = None
    ) -> Problem:
        """Returns the sub-problem of ``batch`` elements, ``kv_heads`` key heads, rows and keys.

        Each key head has ``group`` query heads, by default all. Operands are sliced accordingly. In
        expressions, indices count from the start of the sub-problem, while positions remain those
        of the whole problem.
        """
        heads, M, N = kv_heads * (self.group if group is None else group), len(rows), len(keys)
        sizes = {"batch": batch, "heads": heads, "M": M, "N": N}
        of_arrays = {**sizes, "batch": self.sequences or batch, "kv_heads": kv_heads}
        operands = tuple(x.part(of_arrays) for x in self.operands)
        part = replace(self, **sizes, kv_heads=kv_heads, shift=0, operands=operands)  # type: ignore[arg-type]
        if not (self.is_masked or self.reads_position):
            return part
        return replace(
            part, shift=self.first_position + rows.start - keys.start - part.first_position
        )

    def of_sequences(self, count: int, M: int, N: int) -> Problem:
        """Returns the sub-problem of ``count`` packed sequences with M rows and N keys in total."""
        sizes = {"batch": count, "M": M, "N": N, **dict.fromkeys(STARTS, count + 1)}
        operands = tuple(x.part(sizes) for x in self.operands)
        return replace(self, M=M, N=N, operands=operands, rows=DENSE)

    @property
    def out_dtype(self) -> DType:
        """Dtype of the output, and of the gradients of Q, K and V."""
        return DTYPES[self.options.out_dtype or self.dtype.usual_result]

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def arithmetic(self) -> str:
        """Key of ``Kernel.tflops``: the dtype, or for example "float32 as tf32"."""
        same = self.precision in (None, "float32")
        return self.dtype.name if same else f"{self.dtype.name} as {self.precision}"

    def bytes(self, *, reals: int = 0, scalars: int = 0, align: int = 0) -> int:
        """Returns the size in bytes of ``reals`` sums and ``scalars`` elements in shared memory."""
        size = self.dtype.sums.itemsize
        align = align or (size if reals else self.itemsize)
        return round_up(reals * size, align) + round_up(scalars * self.itemsize, align)

    def shape(self, axes: str) -> tuple[int, ...]:
        """Returns a shape for axis names such as "batch heads M d8", where d8 is d rounded up to a
        multiple of 8.
        """
        named = ((x.rstrip("0123456789"), x) for x in axes.split())
        return tuple(round_up(getattr(self, name), int(x[len(name) :] or 1)) for name, x in named)

    def __repr__(self) -> str:
        return f"<problem {self}>"

    def __str__(self) -> str:
        if self.is_softmax:
            return f"M={self.M} N={self.N} {self.dtype.name}"
        kv_heads = f" kv_heads={self.kv_heads}" if self.kv_heads != self.heads else ""
        dv = f" dv={self.dv}" if self.dv != self.d else ""
        shift = f" shift={self.shift}" if self.shift else ""
        arrays = "".join(f" {x}" for x in self._arrays_shown)
        batch = self.batch if self.lengths is None else self.sequences
        known = self.rows.known_lengths
        lengths = f" lengths={shown_lengths(known, short=True)}" if known else ""
        in_memory = [x.name for x in self.operands if x.name in SEEDS]
        return (
            f"batch={batch} heads={self.heads}{kv_heads} M={self.M} N={self.N}{lengths} d={self.d}"
            f"{dv} {self.dtype.name}{shift} {self._explicit.text(in_memory)}{arrays}"
        )


def _sizes_of_rows(
    packed: Packed | None,
    batch: int | None,
    M: int | None,
    N: int | None,
) -> tuple[int, int, int]:
    """Returns batch, M and N; for packed lengths, the number of sequences and total rows."""
    if packed is None:
        if M is None:
            raise TypeError("M is missing; pass M, or the lengths of a ragged batch")
        N = M if N is None else N
        return (1 if batch is None else batch), M, N
    if given := [x for x, y in (("batch", batch), ("M", M), ("N", N)) if y is not None]:
        raise ValueError(
            f"lengths and {given[0]} are both given; leave out {given[0]}, which lengths determine"
        )
    q, k = packed
    return len(q.rows), q.total, k.total


def check_page_size(name: str, size: Any, error: type[Exception] = ValueError) -> None:
    """Raises ``error`` unless ``size`` is one of PAGE_SIZES."""
    if not isinstance(size, int | np.integer) or size not in PAGE_SIZES:
        sizes = ", ".join(map(str, PAGE_SIZES))
        raise error(f"{name} is {described(size)}; use one of {sizes}")


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Returns ``value`` as an int. Raises ValueError unless it is an integer within the limits."""
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not (is_whole and value >= least and (most is None or value <= most)):
        to = "" if most is None else f" to {most:,}"
        raise ValueError(f"{name} is {described(value)}; pass a whole number from {least}{to}")
    return int(value)


def round_up(size: int, multiple: int) -> int:
    """Rounds ``size`` up to a multiple of ``multiple``."""
    return -(-size // multiple) * multiple


def sizes_of(name: str, array: Any, layout: str) -> tuple[int, int, int, int]:
    """Returns batch, heads, rows and columns of an array; missing axes have size 1."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout is {described(layout)}; use one of {', '.join(LAYOUTS)}")
    if array.ndim < 2:
        raise ValueError(
            f"{name} has shape {tuple(array.shape)}; it must have at least two axes, [rows, "
            "columns]"
        )
    heads = array.shape[-3] if array.ndim > 2 else 1
    rows = array.shape[-2]
    if layout == "bshd" and array.ndim > 2:
        heads, rows = rows, heads
    return math.prod(array.shape[:-3]), heads, rows, array.shape[-1]


def rows_of(q: Any, layout: str) -> tuple[int, ...]:
    """Returns the shape of lse, [..., heads, M]."""
    if layout == "bshd" and q.ndim > 2:
        return (*q.shape[:-3], q.shape[-2], q.shape[-3])
    return tuple(q.shape[:-1])


def _same(what: str, shapes: str, *values: Any) -> None:
    if len(set(values)) > 1:
        raise ValueError(f"{what} must be equal; the shapes are {shapes}")


def _common_dtype(known: Mapping[str, DType], **arrays: Any) -> DType:
    for name, dtype in ((name, array.dtype) for name, array in arrays.items()):
        if getattr(dtype, "byteorder", "=") == (">" if sys.byteorder == "little" else "<"):
            raise TypeError(
                f"{name} has dtype {dtype.str}, which is not in native byte order; convert it: "
                f"{name}.astype({dtype.newbyteorder('=').name!r})"
            )
        if str(dtype) not in known:
            raise TypeError(
                f"{name} has dtype {dtype}, which is not supported; use one of {', '.join(known)}"
            )
    names = {name: str(array.dtype) for name, array in arrays.items()}
    if len(set(names.values())) > 1:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in names.items())
        raise TypeError(f"dtypes differ: {listed}; convert them to one dtype")
    return known[next(iter(names.values()))]


def _check_precision(precision: str | None, dtype: DType) -> None:
    narrower = dtype.itemsize == 2 and precision == FLOAT8
    if precision is not None and dtype.name != "float32" and not narrower:
        remedy = f"leave precision out{f', or use {FLOAT8!r}' * (dtype.itemsize == 2)}"
        if dtype.result:
            remedy = "such inputs are not rounded, so leave precision out"
        raise ValueError(
            f"precision={precision!r} is only for float32 inputs, but the dtype is {dtype.name}; "
            f"{remedy}"
        )


def can_give(name: str | None, dtype: DType) -> bool:
    """Returns whether inputs of ``dtype`` may have results of the dtype called ``name``."""
    if dtype.result:
        return name in (None, "float16", "bfloat16", "float32")
    return name in (None, dtype.name) or (name == "float32" and dtype.itemsize == 2)


def _check_out_dtype(name: str | None, dtype: DType) -> None:
    if can_give(name, dtype):
        return
    able = [repr(x) for x in DTYPES if can_give(x, dtype)]
    which = " or ".join(filter(None, (", ".join(able[:-1]), able[-1])))
    raise ValueError(
        f"out_dtype is {name!r}, but the dtype is {dtype.name}; use {which}, or leave out_dtype out"
    )


def _default_scale(d: int) -> float:
    return 1.0 / math.sqrt(d) if d > 0 else 1.0


def four_axes(array: Any, layout: str) -> Any:
    """Reshapes an array to [batch, heads, rows, columns], without a copy where possible."""
    if layout == "bshd" and array.ndim > 2:
        array = array.swapaxes(-2, -3)
    if array.ndim < 4:
        return array[(None,) * (4 - array.ndim)]
    lead: Sequence[int] = array.shape[:-3]
    return array.reshape(math.prod(lead), *array.shape[-3:])
