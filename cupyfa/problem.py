"""What one call asks for: sizes, dtype, mask and scale, checked when it is made."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyfa.dtypes import DType, dtype_named

Window = tuple[int | None, int | None]  # keys to the left and to the right of a query's position
NO_WINDOW: Window = (None, None)
CAUSAL = {False: None, None: None, True: "bottom-right"} | {
    word: word for word in ("bottom-right", "top-left")
}
MOST = 2**31 - 2**16  # of any size: the end of the last tile is a number of 32 bits, too
MOST_ELEMENTS = 2**59  # of one array: so many bytes can still be counted in 64 bits
LAYOUTS = ("bhsd", "bshd")
FLOAT8 = "float8_e4m3"
PRECISIONS = ("float32", "tf32", "float16", "bfloat16", FLOAT8)  # that inputs may be computed in


@dataclass(frozen=True)
class Problem:
    """One attention problem: q [batch, heads, M, d], k [batch, kv_heads, N, d], v [.., N, dv].

    ``causal`` is None, "bottom-right" (query i sees keys j <= i + N - M) or "top-left" (j <= i).
    ``window`` (left, right) lets query i, whose position among the keys is p = i + N - M (i under
    a "top-left" mask), see keys p - left <= j <= p + right; None is no limit. A causal mask is the
    limit on the right, so a window under it has none of its own. Scores are multiplied with
    ``scale``. ``precision``, one of PRECISIONS, is what float32 inputs may be rounded to, and
    "float8_e4m3" also what 16-bit ones may; None leaves it to the kernel. ``shift`` is added to
    every query's position, so that a part of a problem has its rows and keys where they are in the
    whole. A softmax over rows is a problem without d, ``is_softmax``: its scores are
    [batch, heads, M, N].
    """

    batch: int
    heads: int
    kv_heads: int
    M: int
    N: int
    d: int
    dv: int
    dtype: DType
    causal: str | None = None
    scale: float = 1.0
    window: Window = NO_WINDOW
    precision: str | None = None
    shift: int = 0
    is_softmax: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "kv_heads", "M", "N", "d", "dv"):
            object.__setattr__(self, name, _size(name, getattr(self, name), MOST))
        left, right = _window(self.window)
        object.__setattr__(self, "window", (left, None if self.causal else right))
        elements = self.batch * self.heads * max(self.M, self.N) * (max(self.d, self.dv) or self.N)
        if elements >= MOST_ELEMENTS:
            raise ValueError(f"an array would have {elements:,} elements; the most are 2**59")
        if self.heads and (not self.kv_heads or self.heads % self.kv_heads):
            raise ValueError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; "
                "every key head must serve the same number of query heads"
            )
        _check_precision(self.precision, self.dtype)
        with np.errstate(over="ignore"):
            finite = np.isfinite(self.dtype.sums.type(self.scale * math.log2(math.e)))
        if not finite:
            raise ValueError(
                f"scale is {self.scale}; give a finite number of {self.dtype.sums} whose product "
                "with log2(e) is finite, too"
            )

    @classmethod
    def of_sizes(
        cls,
        *,
        M: int,
        N: int | None = None,
        d: int,
        dv: int | None = None,
        batch: int = 1,
        heads: int = 1,
        kv_heads: int | None = None,
        dtype: str = "float32",
        causal: bool | str | None = False,
        window: Window | None = None,
        scale: float | None = None,
        precision: str | None = None,
    ) -> Problem:
        """The problem of these sizes; N defaults to M, dv to d and kv_heads to heads."""
        return cls(
            batch=batch,
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            M=M,
            N=M if N is None else N,
            d=d,
            dv=d if dv is None else dv,
            dtype=dtype_named(dtype),
            causal=_causal(causal),
            window=NO_WINDOW if window is None else window,
            scale=_scale(scale, _size("d", d, MOST)),
            precision=precision,
        )

    @classmethod
    def of(
        cls,
        q: Any,
        k: Any,
        v: Any,
        *,
        causal: bool | str | None = False,
        window: Window | None = None,
        scale: float | None = None,
        precision: str | None = None,
        layout: str = "bhsd",
    ) -> Problem:
        """The problem that arrays with these shapes and dtypes pose.

        Raises ValueError if shapes or options contradict each other, TypeError for dtypes.
        """
        batch, heads, M, d = _sizes("q", q, layout)
        _, kv_heads, N, k_d = _sizes("k", k, layout)
        _, v_heads, v_N, dv = _sizes("v", v, layout)
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        _same("the leading axes", shapes, _lead(q), _lead(k), _lead(v))
        _same("d, the last axis of q and k,", shapes, d, k_d)
        _same("the number of key heads", shapes, kv_heads, v_heads)
        _same("N, the number of keys,", shapes, N, v_N)
        names = [str(array.dtype) for array in (q, k, v)]
        if len(set(names)) > 1:
            raise TypeError(
                f"dtypes differ: q {names[0]}, k {names[1]}, v {names[2]}; convert them to one"
            )
        return cls(
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            M=M,
            N=N,
            d=d,
            dv=dv,
            dtype=dtype_named(names[0]),
            causal=_causal(causal),
            window=NO_WINDOW if window is None else window,
            scale=_scale(scale, d),
            precision=precision,
        )

    @classmethod
    def of_rows(cls, x: Any) -> Problem:
        """The softmax over the last axis of x: M rows of N scores."""
        if x.ndim == 0:
            raise ValueError("x has no axis to take the softmax over; give at least one dimension")
        return cls.of_row_sizes(math.prod(x.shape[:-1]), x.shape[-1], str(x.dtype))

    @classmethod
    def of_row_sizes(cls, M: int, N: int, dtype: str) -> Problem:
        """The softmax over M rows of N scores."""
        return cls(1, 1, 1, M, N, 0, 0, dtype_named(dtype), is_softmax=True)

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads if self.kv_heads else 1

    @property
    def right(self) -> int | None:
        """How many keys right of its position a query sees; None if all."""
        return 0 if self.causal else self.window[1]

    @property
    def left(self) -> int | None:
        """How many keys left of its position a query sees; None if all."""
        return self.window[0]

    @property
    def window_text(self) -> str | None:
        """The window as the command line takes it, 128,0 or 128,-; None if there is none."""
        if self.window == NO_WINDOW:
            return None
        return ",".join("-" if side is None else str(side) for side in self.window)

    @property
    def is_masked(self) -> bool:
        """Whether a key may be hidden from a query."""
        return self.left is not None or self.right is not None

    @property
    def causal_offset(self) -> int:
        """With a limit on the right, query i sees keys j <= i + causal_offset, at most N - 1.

        With a limit on the left as well, it is never below ``window_offset``.
        """
        if self.right is None:
            return 0
        offset = min(self._position + self.right, max(self.N - 1, 0))
        return offset if self.left is None else max(offset, self.window_offset)

    @property
    def window_offset(self) -> int:
        """With a limit on the left, query i sees keys j >= i + window_offset, from -M to N."""
        return 0 if self.left is None else min(max(self._position - self.left, -self.M), self.N)

    @property
    def _position(self) -> int:
        """Where the first query stands among the keys."""
        return self.shift + (0 if self.causal == "top-left" else self.N - self.M)

    def part(self, batch: int, kv_heads: int, rows: range, keys: range) -> Problem:
        """The problem of so many batch elements and key heads, for some rows and some keys."""
        part = replace(
            self,
            batch=batch,
            kv_heads=kv_heads,
            heads=kv_heads * self.group,
            M=len(rows),
            N=len(keys),
            shift=0,
        )
        if not self.is_masked:
            return part
        return replace(part, shift=self._position + rows.start - keys.start - part._position)

    @property
    def itemsize(self) -> int:
        """Bytes of one element of the inputs."""
        return self.dtype.itemsize

    @property
    def d8(self) -> int:
        """d rounded up: rows of so many 16-bit numbers begin at multiples of 16 bytes."""
        return _round_up(self.d, 8)

    @property
    def dv8(self) -> int:
        """dv rounded up likewise."""
        return _round_up(self.dv, 8)

    @property
    def d16(self) -> int:
        """d rounded up for rows of 8-bit numbers."""
        return _round_up(self.d, 16)

    @property
    def N32(self) -> int:
        """N rounded up to whole products of 8-bit numbers."""
        return _round_up(self.N, 32)

    @property
    def arithmetic(self) -> str:
        """The dtype, and the precision where that is another: what speeds are told for."""
        as_it_is = self.precision in (None, "float32")
        return self.dtype.name if as_it_is else f"{self.dtype.name} as {self.precision}"

    def bytes(self, *, reals: int = 0, scalars: int = 0, align: int = 0) -> int:
        """Bytes of a struct of so many sums followed by so many elements, as C++ lays it out."""
        size = self.dtype.sums.itemsize
        align = align or (size if reals else self.itemsize)
        return _round_up(reals * size, align) + _round_up(scalars * self.itemsize, align)

    def shape(self, axes: str) -> tuple[int, ...]:
        """The sizes of axes given by name, for example ``"batch heads M dv"``."""
        return tuple(getattr(self, axis) for axis in axes.split())

    def __str__(self) -> str:
        if self.is_softmax:
            return f"M={self.M} N={self.N} {self.dtype.name}"
        heads = f"heads={self.heads}" + (
            f" kv_heads={self.kv_heads}" if self.kv_heads != self.heads else ""
        )
        d = f"d={self.d}" + (f" dv={self.dv}" if self.dv != self.d else "")
        mask = f" causal={self.causal}" if self.causal else ""
        mask += f" window={self.window_text}" if self.window_text else ""
        mask += f" shift={self.shift}" if self.shift else ""
        dtype = self.dtype.name + (f" precision={self.precision}" if self.precision else "")
        return (
            f"batch={self.batch} {heads} M={self.M} N={self.N} {d} {dtype}{mask} "
            f"scale={self.scale:.6g}"
        )


def window_of_text(text: str) -> Window:
    """The window that is written LEFT,RIGHT, with - for no limit."""
    try:
        left, right = (None if x.strip() == "-" else int(x) for x in text.split(","))
    except ValueError:
        raise ValueError(
            f"window {text!r} is not LEFT,RIGHT; give two numbers of keys, - for no limit: 128,-"
        ) from None
    return left, right


def _window(window: Any) -> Window:
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ValueError(
            f"window={window!r} is no pair; give the keys to the left and to the right of a "
            "query's position, None for no limit"
        )
    for side in window:
        if isinstance(side, int | np.integer) and side < 0:
            raise ValueError(
                f"window={tuple(window)} has a negative number; give 0 or more keys to the left "
                "and to the right, or no limit: None (- on the command line)"
            )
    left, right = (_side(side) for side in window)
    return left, right


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Python's own whole number. Raises ValueError for what is none of a range."""
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not (is_whole and value >= least and (most is None or value <= most)):
        to = "" if most is None else f" to {most:,}"
        raise ValueError(f"{name} is {value!r}; give a whole number from {least}{to}")
    return int(value)


def _side(side: Any) -> int | None:
    return None if side is None else _size("a window's side", side, 2**31 - 1)


def _size(name: str, size: Any, most: int) -> int:
    """A size as Python's own whole number: products of NumPy's would overflow."""
    if isinstance(size, bool) or not isinstance(size, int | np.integer):
        raise TypeError(f"{name} is {size!r}; sizes are whole numbers")
    if not 0 <= size <= most:
        raise ValueError(f"{name} is {size}; sizes are 0 to {most:,}")
    return int(size)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _lead(array: Any) -> tuple[int, ...]:
    return tuple(array.shape[:-3])


def _sizes(name: str, array: Any, layout: str) -> tuple[int, int, int, int]:
    """Batch, heads, rows and columns of an array in a layout; missing axes are 1."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is unknown; use one of {', '.join(LAYOUTS)}")
    if array.ndim < 2:
        raise ValueError(
            f"{name} has shape {tuple(array.shape)}; it needs at least two axes, [rows, columns]"
        )
    heads = array.shape[-3] if array.ndim > 2 else 1
    rows = array.shape[-2]
    if layout == "bshd" and array.ndim > 2:
        heads, rows = rows, heads
    return math.prod(array.shape[:-3]), heads, rows, array.shape[-1]


def _same(what: str, shapes: str, *values: Any) -> None:
    if len(set(values)) > 1:
        raise ValueError(f"{what} must be equal; the shapes are {shapes}")


def _check_precision(precision: str | None, dtype: DType) -> None:
    if precision is None:
        return
    if precision not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise ValueError(f"precision {precision!r} is unknown; use one of {known}")
    narrower = dtype.itemsize == 2 and precision == FLOAT8
    if dtype.name != "float32" and not narrower:
        remedy = f"leave it out or give {FLOAT8!r}" if dtype.itemsize == 2 else "leave it out"
        raise ValueError(
            f"precision={precision!r} is for float32, and the dtype is {dtype.name}; {remedy}"
        )


def _causal(causal: bool | str | None) -> str | None:
    if not isinstance(causal, bool | np.bool_ | str | None) or causal not in CAUSAL:
        raise ValueError(
            f"causal={causal!r} is unknown; use False, True (the same as 'bottom-right': query i "
            "sees keys j <= i + N - M) or 'top-left' (j <= i)"
        )
    return CAUSAL[causal]


def _scale(scale: float | None, d: int) -> float:
    """1/sqrt(d) unless given; with d = 0 every score is 0, whatever the scale."""
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real | None):
        raise TypeError(f"scale is {scale!r}; give a number, or None for 1/sqrt(d)")
    if scale is None:
        return 1.0 / math.sqrt(d) if d > 0 else 1.0
    try:
        return float(scale)
    except OverflowError:  # a whole number of more than 308 digits
        return math.inf if scale > 0 else -math.inf


def four_axes(array: Any, layout: str) -> Any:
    """An array in a layout seen as [batch, heads, rows, columns]; a copy only where it must be."""
    if layout == "bshd" and array.ndim > 2:
        array = array.swapaxes(-2, -3)
    if array.ndim < 4:
        return array[(None,) * (4 - array.ndim)]
    lead: Sequence[int] = array.shape[:-3]
    return array.reshape(math.prod(lead), *array.shape[-3:])
