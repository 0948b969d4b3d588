"""Attention options: everything besides shapes, dtypes and arrays that affects the result."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypedDict

import numpy as np

from cupyfa.errors import described, nearest
from cupyfa.problem.dtypes import DTYPES, name_of
from cupyfa.score.dropout import Dropout
from cupyfa.score.expressions import POSITIONS, Expression

FLOAT8 = "float8_e4m3"
PRECISIONS = ("float32", "tf32", "float16", "bfloat16", FLOAT8)  # formats of rounded inputs
Precision = Literal["float32", "tf32", "float16", "bfloat16", "float8_e4m3"]
Causal = Literal["bottom-right", "top-left"]
OutDtype = Literal["float16", "bfloat16", "float32", "float64"] | np.dtype | type
MASKS = ("bottom-right", "top-left")
FARTHEST = 2**30  # largest distance between query 0 and key 0
DROPOUT = ("dropout", "dropout_seed", "dropout_offset")  # options that class Dropout bundles
Window = tuple[int | None, int | None]  # visible keys before and after a query's position
MOST_USUAL_SOFTCAP = 64.0  # existing models use 15 to 50
_PLACES = ", ".join(POSITIONS)
NO_WINDOW: Window = (None, None)
# Which of q, k and v have a tangent; with "none", arrays of scores alone have one.
TANGENTS = ("qkv", "qk", "qv", "kv", "q", "k", "v", "none")
MOST_DIRECTIONS = 64
OF_TANGENTS = ("tangents", "directions")  # options of directional derivatives alone
Text = Expression | str | Callable[..., Any] | None  # accepted types of an expression argument


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Option:
    """Describes one option; docs/options.md explains how to add one.

    help: help text of the command-line option.
    read: normalizes an argument; raises TypeError or ValueError for an invalid one.
    default: the default in AttentionOptions, in normal form.
    parse: parses a command-line value; ``separator`` separates several values.
    shown: formats the value for a result row, so that ``parse`` can read it.
    choices: all valid texts, for options with few values. flag: the value of a bare ``--option``.
    tried: values that checks combine with other options and sizes.
    features: maps a feature that a kernel must declare to the option values that require it.
    constants: computes constants that are declared above a kernel's source.
    """

    help: str
    read: Callable[[Any], Any]
    default: Any = None
    parse: Callable[[str], Any] = _same
    shown: Callable[[Any], Any] = _same
    separator: str = ","
    metavar: str | None = None
    choices: Sequence[str] | None = None
    flag: str | None = None
    tried: Sequence[Any] = ()
    features: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    constants: Callable[[AttentionOptions], Mapping[str, bool]] = lambda options: {}


class OptionKeywords(TypedDict, total=False):
    """The options as keyword arguments, for type checkers."""

    precision: Precision | None
    causal: Causal | bool | None
    window: Window | None
    offset: int | None
    scale: float | None
    softcap: float | None
    score_mod: Text
    mask_mod: Text
    out_dtype: OutDtype | None
    dropout: float
    dropout_seed: Any  # an int, or an array of one element
    dropout_offset: Any
    tangents: str
    directions: int


def _read_precision(value: Any) -> str | None:
    if value is None or (isinstance(value, str) and value in PRECISIONS):
        return value
    raise ValueError(f"precision is {described(value)}; use one of {', '.join(PRECISIONS)}")


def _read_out_dtype(value: Any) -> str | None:
    value = name_of(value)
    if value is None or (isinstance(value, str) and value in DTYPES):
        return value
    raise ValueError(
        f"out_dtype is {described(value)}; use 'float32', or leave out_dtype out for the dtype "
        "of q; for float8_e4m3fn inputs, use 'bfloat16', 'float16' or 'float32'"
    )


def _read_causal(value: Any) -> str | None:
    value = without_axes(value)
    if value is None or isinstance(value, bool | np.bool_):
        return MASKS[0] if value else None
    if isinstance(value, str) and value in MASKS:
        return value
    raise ValueError(
        f"causal is {described(value)}; use False, True (the same as 'bottom-right': query i sees "
        "keys j <= i + N - M) or 'top-left' (j <= i)"
    )


def _parse_causal(text: str) -> str | None:
    words = {"false": None, "none": None, "true": MASKS[0], **dict(zip(MASKS, MASKS))}
    if text.lower() not in words:
        raise ValueError(
            f"causal={text!r} is unknown{nearest(text, words)}; use one of {', '.join(words)}"
        )
    return words[text.lower()]


def _read_window(value: Any) -> Window:
    if value is None:
        return NO_WINDOW
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(
            f"window is {described(value)}; pass a pair (left, right): how many keys a query sees "
            "on each side of its position, or None for no limit"
        )
    left, right = (_read_side(side) for side in value)
    return left, right


def _read_side(side: Any) -> int | None:
    if (side := without_axes(side)) is None:
        return None
    if isinstance(side, int | np.integer) and side < 0:
        raise ValueError(
            f"window has a negative limit, {side}; pass a number of keys that is at least 0, or "
            "None for no limit (- on the command line)"
        )
    try:
        return read_size("a window's side", side, 2**31 - 1)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error}; None means no limit (- on the command line)") from None


def _read_offset(value: Any) -> int | None:
    if (value := without_axes(value)) is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"offset is {described(value)}; pass a whole number, or None for N - M")
    if not -FARTHEST <= (offset := int(value)) <= FARTHEST:
        raise ValueError(f"offset is {value}; pass a whole number from -2**30 to 2**30")
    return offset


def read_size(name: str, size: Any, most: int) -> int:
    """Returns a size as a Python int, because products of NumPy integers may overflow.

    Raises TypeError unless it is an integer, and ValueError if it is negative or above ``most``.
    """
    size = without_axes(size)
    if isinstance(size, bool) or not isinstance(size, int | np.integer):
        raise TypeError(f"{name} is {described(size)}; sizes must be whole numbers")
    if not 0 <= size <= most:
        raise ValueError(f"{name} is {size}; sizes must be from 0 to {most:,}")
    return int(size)


def _parse_window(text: str) -> Window:
    try:
        left, right = (None if x.strip() == "-" else int(x) for x in text.split(","))
    except ValueError:
        raise ValueError(
            f"window {text!r} is not LEFT,RIGHT; pass two numbers of keys, or - for no limit: 128,-"
        ) from None
    return _read_window((left, right))


def without_axes(value: Any) -> Any:
    """Converts NumPy scalars and 0-d arrays to Python numbers; returns other objects unchanged."""
    is_scalar = isinstance(value, np.generic | np.ndarray) and not value.shape
    return value.item() if is_scalar else value


def read_flag(name: str, value: Any) -> bool:
    """Returns a bool or NumPy bool as bool. Raises TypeError for anything else."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} is {described(value)}; pass True or False")
    return bool(value)


def read_number(name: str, value: Any, default: str) -> float | None:
    if value is None:
        return None
    value = without_axes(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {described(value)}; pass a number, or None for {default}")
    try:
        return float(value)
    except OverflowError:  # an int of more than 308 digits
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]  # of Real


def parse_number(name: str, text: str, read: type[int] | type[float] = float) -> int | float | None:
    """Parses a number, or "none" as None. Raises ValueError for anything else."""
    try:
        return None if text.lower() == "none" else read(text)
    except ValueError:
        kind = "whole number" if read is int else "number"
        raise ValueError(f"{name}={text!r} is not a {kind}") from None


def _read_softcap(value: Any) -> float | None:
    number = read_number("softcap", value, "none")
    if number is not None and not 0 < number < math.inf:
        raise ValueError(f"softcap is {value}; use a finite number above 0, or leave softcap out")
    return number


def _read_dropout(value: Any) -> float:
    number = read_number("dropout", value, "none") or 0.0
    if not 0 <= number < 1 or round(number * 16384) == 16384:
        raise ValueError(
            f"dropout is {value}; pass the probability of dropping a weight, which must be at "
            "least 0 and, rounded to a multiple of 1/16384, below 1"
        )
    return number if round(number * 16384) else 0.0


def _read_bits(name: str, bits: int) -> Callable[[Any], int | None]:
    """Returns a function that checks integers of at most ``bits`` bits and passes None through."""

    def read(value: Any) -> int | None:
        if (value := without_axes(value)) is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(
                f"{name} is {described(value)}; pass a whole number or a one-element array"
            )
        if not 0 <= value < 2**bits:
            raise ValueError(f"{name} is {value}; pass a whole number from 0 to 2**{bits} - 1")
        return int(value)

    return read


def _parse_bits(name: str) -> Callable[[str], int | str]:
    def parse(text: str) -> int | str:
        if text.endswith("[1]"):  # an array form
            return text
        try:
            return int(text)
        except ValueError:
            raise ValueError(
                f"{name}={text!r} is neither a whole number nor an array form; pass u64[1] or "
                "i32[1] for an array"
            ) from None

    return parse


def _read_tangents(value: Any) -> str:
    if value is None or (isinstance(value, str) and value in TANGENTS):
        return value or TANGENTS[0]
    raise ValueError(f"tangents is {described(value)}; use one of {', '.join(TANGENTS)}")


def _read_directions(value: Any) -> int:
    count = 1 if value is None else read_size("directions", value, 2**31 - 1)
    if not 1 <= count <= MOST_DIRECTIONS:
        raise ValueError(
            f"directions is {count}; a call takes from 1 to {MOST_DIRECTIONS}: divide them among "
            "several calls"
        )
    return count


def _text(name: str, help: str, feature: str, tried: Sequence[str] = ()) -> Option:
    return Option(
        help=help,
        read=lambda value: None if value is None else Expression.of(name, value),
        shown=lambda value: None if value is None else value.text,
        separator=";",
        metavar="TEXT",
        tried=tried,
        features={feature: lambda value: value is not None},
    )


# Options by name. OPTIONS below copies the defaults from AttentionOptions.
_TABLE = {
    "precision": Option(
        help="Format to which float32 inputs may be rounded; float8_e4m3 also applies to "
        "16-bit inputs.  [default: float32, if the kernel can]",
        read=_read_precision,
        choices=PRECISIONS,
    ),
    "causal": Option(
        help="Query i sees keys j <= i + N - M (bottom-right, also --causal alone) or j <= i "
        "(top-left).",
        read=_read_causal,
        parse=_parse_causal,
        choices=MASKS,
        flag=MASKS[0],
        tried=MASKS,
        features={"causal": lambda value: value is not None},
        constants=lambda options: {"causal": options.right is not None},
    ),
    "window": Option(
        help="The keys that query i sees to the left and right of key i + N - M (of key i "
        "under a top-left mask); - is no limit, as in 128,-.",
        read=_read_window,
        parse=_parse_window,
        shown=lambda window: (
            None if window == NO_WINDOW else ",".join("-" if x is None else str(x) for x in window)
        ),
        separator="/",
        metavar="LEFT,RIGHT",
        tried=((0, 0), (0, None), (None, 3), (5, 20), (40, None), (1000, 1000)),
        features={
            "causal": lambda value: value[1] is not None,
            "window": lambda value: value[0] is not None,
        },
        constants=lambda options: {"windowed": options.left is not None},
    ),
    "offset": Option(
        help="Position of query 0 among the keys, for causal masks, windows and expressions.  "
        "[default: N - M]",
        read=_read_offset,
        parse=lambda text: parse_number("offset", text, int),
        metavar="INTEGER",
    ),
    "scale": Option(
        help="Factor of the scores.  [default: 1/sqrt(d)]",
        read=lambda value: read_number("scale", value, "1/sqrt(d)"),
        parse=lambda text: parse_number("scale", text),
        metavar="FLOAT",
        tried=(0.0, -0.3, 2.0),
        constants=lambda options: {"positive_scale": options.scale is None or options.scale > 0},
    ),
    "softcap": Option(
        help="Scores become softcap * tanh(score / softcap), after the scale.",
        read=_read_softcap,
        parse=lambda text: parse_number("softcap", text),
        metavar="FLOAT",
        tried=(0.5, 20.0),
        features={"score": lambda value: value is not None},
    ),
    "score_mod": _text("score_mod", f"The score, as an expression of score, {_PLACES}.", "score"),
    "mask_mod": _text(
        "mask_mod", f"The pairs that are seen, as an expression of {_PLACES}.", "places"
    ),
    "out_dtype": Option(
        help="Dtype of the output and the gradients of 16-bit inputs: float32 leaves out their "
        "last rounding.  [default: that of the inputs]",
        read=_read_out_dtype,
        choices=tuple(DTYPES),
        tried=("float32",),
        features={"out_dtype": lambda value: value is not None},
    ),
    "dropout": Option(
        help="Probability with which a weight is dropped; needs a seed.",
        read=_read_dropout,
        parse=lambda text: parse_number("dropout", text),
        shown=lambda value: value or None,
        metavar="FLOAT",
        features={"dropout": bool},
    ),
    "dropout_seed": Option(
        help="Seed of dropout; u64[1] or i32[1] is an array of one random number.",
        read=_read_bits("dropout_seed", 64),
        parse=_parse_bits("dropout_seed"),
        metavar="INTEGER",
    ),
    "dropout_offset": Option(
        help="Selects another sequence of random bits for the same seed, 0 to 2**32 - 1.  "
        "[default: 0]",
        read=lambda value: _read_bits("dropout_offset", 32)(value) or 0,
        parse=_parse_bits("dropout_offset"),
        shown=lambda value: value or None,
        metavar="INTEGER",
    ),
    "tangents": Option(
        help="Tangent kernels: which of q, k and v move; the tangents of others are 0. --wrt moves "
        "other arrays.  [default: qkv]",
        read=_read_tangents,
        shown=lambda value: None if value == TANGENTS[0] else value,
        choices=TANGENTS,
        tried=("qk", "v", "kv"),
        features={"zero_tangents": lambda value: value != TANGENTS[0]},
        constants=lambda options: {f"moves_{x}": x in options.tangents for x in TANGENTS[0]},
    ),
    "directions": Option(
        help="Tangent kernels: number of directions along which one launch differentiates.  "
        "[default: 1]",
        read=_read_directions,
        parse=lambda text: parse_number("directions", text, int),
        shown=lambda value: None if value == 1 else value,
        metavar="INTEGER",
        tried=(2,),
        features={"directions": lambda value: value > 1},
    ),
}


@dataclass(frozen=True)
class AttentionOptions:
    """The options of an attention call, in normal form.

    precision: the format from PRECISIONS to which a kernel may round float32 inputs; "float8_e4m3"
        also applies to 16-bit inputs. None leaves the choice to the kernel.
    causal: None, "bottom-right" or True (query i sees keys j <= i + N - M), or "top-left"
        (j <= i).
    window: (left, right) lets query i, whose position among the keys is p = i + N - M (i under a
        "top-left" mask), see keys p - left <= j <= p + right; None means no limit. A causal mask
        replaces the right limit.
    offset: the position of query 0 among the keys, in place of N - M; a causal mask then lets query
        i see keys j <= i + offset. Use ``offset`` if q and k are slices of larger arrays.
    scale: the factor of the scores, by default 1/sqrt(d).
    softcap: scores become softcap * tanh(score / softcap), after the scale.
    score_mod: an expression that is applied to the scaled (and softcapped) score, such as
        "score + 0.1 * abs(query - key)".
    mask_mod: an expression that is True for visible pairs, such as "key <= position".
    out_dtype: for float16 and bfloat16 inputs, "float32" returns outputs and gradients in float32,
        the accumulation type; None rounds them to the input dtype. For float8_e4m3fn inputs the
        output dtype is "bfloat16" (the default), "float16" or "float32".
    dropout: the probability of setting a weight to 0, rounded to multiples of 1/16384; other
        weights are multiplied by 1/(1 - dropout). ``dropout_mask`` shows how dropout_seed (64 bits)
        and dropout_offset (32 bits) select weights. Both are ignored if dropout is 0.
    tangents: for directional derivatives, which of q, k and v move, as "qkv" or "kv".
    directions: the number of directions that a kernel of tangents differentiates along.
    """

    precision: str | None = None
    causal: str | None = None
    window: Window = NO_WINDOW
    offset: int | None = None
    scale: float | None = None
    softcap: float | None = None
    score_mod: Expression | None = None
    mask_mod: Expression | None = None
    out_dtype: str | None = None
    dropout: float = 0.0
    dropout_seed: int | None = None
    dropout_offset: int = 0
    tangents: str = "qkv"
    directions: int = 1

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            object.__setattr__(self, name, option.read(getattr(self, name)))
        if not self.dropout:
            object.__setattr__(self, "dropout_seed", None)
            object.__setattr__(self, "dropout_offset", 0)
        elif self.dropout_seed is None:
            raise ValueError(
                f"dropout is {self.dropout} without a seed; pass a whole number from 0 to "
                "2**64 - 1 as the seed, and a different one for each layer and step, because calls "
                "keep no state"
            )
        if self.causal:
            object.__setattr__(self, "window", (self.window[0], None))
        if self.offset is not None and self.causal == "top-left":
            raise ValueError(
                f"offset is {self.offset} under a 'top-left' mask, which implies offset=0; pass "
                "causal=True with the offset, or leave the offset out"
            )

    @classmethod
    def of(cls, options: AttentionOptions | None, keywords: Mapping[str, Any]) -> AttentionOptions:
        """Overrides ``options`` with keyword arguments. Raises TypeError for unknown names."""
        if unknown := ", ".join(keywords.keys() - OPTIONS.keys()):
            raise TypeError(f"unknown option {unknown}; options are {', '.join(OPTIONS)}")
        if options is None:
            return cls(**keywords)
        return replace(options, **keywords) if keywords else options

    @property
    def changed(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in OPTIONS}
        return {name: x for name, x in values.items() if x != OPTIONS[name].default}

    def keywords(self) -> dict[str, Any]:
        """Returns non-default options except out_dtype, as keyword arguments of ``attention``."""
        found = {x: y for x, y in self.changed.items() if x not in ("out_dtype", *DROPOUT)}
        if "mask_mod" in found:
            found["mask"] = found.pop("mask_mod")
        if self.dropout:
            found["dropout"] = Dropout(*(getattr(self, name) for name in DROPOUT))
        return found

    @property
    def form(self) -> tuple[Any, ...]:
        """Cache key of plans and kernel sources: all options except numbers read at run time."""
        softcap = self.softcap is not None, self.has_usual_softcap
        alike = {"softcap": softcap, "dropout": self.dropout > 0}
        alike |= {"dropout_seed": False, "dropout_offset": False}
        return tuple(alike.get(name, getattr(self, name)) for name in OPTIONS)

    @property
    def has_usual_softcap(self) -> bool:
        """Whether an error of 2**-22 * softcap is small compared with 16-bit rounding errors."""
        return self.softcap is not None and self.softcap <= MOST_USUAL_SOFTCAP

    @property
    def right(self) -> int | None:
        """Number of visible keys after the query's position; None if all are visible."""
        return 0 if self.causal else self.window[1]

    @property
    def left(self) -> int | None:
        """Number of visible keys before the query's position; None if all are visible."""
        return self.window[0]

    @property
    def features(self) -> list[str]:
        given = [(option, getattr(self, name)) for name, option in OPTIONS.items()]
        needed = (
            x for option, value in given for x in option.features if option.features[x](value)
        )
        return list(dict.fromkeys(needed))

    @property
    def constants(self) -> dict[str, bool]:
        found: dict[str, bool] = {}
        for option in OPTIONS.values():
            found |= option.constants(self)
        return found

    def row(self) -> dict[str, Any]:
        return {name: option.shown(getattr(self, name)) for name, option in OPTIONS.items()}

    def command_line(self, besides: Collection[str] = ()) -> list[str]:
        """Formats non-default options as command-line options, except those in ``besides``."""
        row = self.row()
        changed = [name for name in self.changed if name not in besides]
        return [f"--{name.replace('_', '-')}={row[name]}" for name in changed]

    def __str__(self) -> str:
        return self.text()

    def text(self, besides: Collection[str] = ()) -> str:
        """Formats non-default options as "name=value ...", except those in ``besides``."""
        changed = self.changed.keys() - {*besides}
        shown = ((name, x) for name, x in self.row().items() if name in changed)
        return " ".join(f"{x}={y:.6g}" if isinstance(y, float) else f"{x}={y}" for x, y in shown)


OPTIONS = {x.name: replace(_TABLE[x.name], default=x.default) for x in fields(AttentionOptions)}
FEATURES = tuple(dict.fromkeys(x for option in OPTIONS.values() for x in option.features))
PLAIN = AttentionOptions()
