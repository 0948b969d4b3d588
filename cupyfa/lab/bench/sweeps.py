"""Expands sizes that have several values into one problem per combination."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from math import prod
from typing import Any

from cupyfa.errors import described, nearest
from cupyfa.ladder.kernel import Kernel
from cupyfa.ladder.lookup import tile_remedy
from cupyfa.problem import shape_language
from cupyfa.problem.dtypes import DTYPES
from cupyfa.problem.lengths import Lengths, Rows, lengths_of
from cupyfa.problem.optional_inputs import BIAS, MASK, OWN_ARRAYS, PAGE_TABLE, Operand
from cupyfa.problem.options import OPTIONS, PLAIN
from cupyfa.problem.problem import PAGE_SIZES, SIZES, Problem, check_page_size
from cupyfa.problem.wrt import WRT

# Default sizes of benchmarks, tuning and profiles, and smaller sizes for the simulator.
_ATTENTION: dict[str, Any] = {"batch": 4, "heads": 16, "M": 2048, "d": 64, "dtype": "float32"}
_SOFTMAX: dict[str, Any] = {"M": 16384, "N": 4096, "dtype": "float32"}
_OF_ATTENTION = ("forward", "backward", "tangent")
USUAL = {**dict.fromkeys(_OF_ATTENTION, _ATTENTION), "softmax": _SOFTMAX}
_FEW = {"batch": 1, "heads": 2, "M": 128}
SMALL = {**dict.fromkeys(_OF_ATTENTION, _FEW), "softmax": {"M": 64, "N": 256}}
MOST = 10_000  # maximum number of problems per call
CACHES = "contiguous", "paged"
_OF_CACHE = "cache", "page"
AXES = (*SIZES, "dtype", *OPTIONS, *shape_language.NAMES, *_OF_CACHE)
_SHORT = {"B": "batch", "H": "heads", "kv-heads": "kv_heads"}
_OF_SOFTMAX = ("M", "N", "dtype")


def usual_dtype(*kernels: Kernel, precision: Any = None) -> str:
    """Returns float32 if a precision requires it or all kernels support it, else a common dtype."""
    able = [x for x in DTYPES if all(x in kernel.dtypes for kernel in kernels)]
    return "float32" if precision or not able or "float32" in able else able[0]


def parsed(text: str) -> tuple[str, list[Any]]:
    """Parses ``NAME=VALUES``: the name of an axis or of a kernel's constant, and its values.

    VALUES are a list ``64,128``, or a range with a factor ``512:16384:*2`` or a step
    ``64:256:+64``. Slashes separate windows, ``64,0/128,-``; semicolons separate expressions,
    values of wrt, and lengths.
    """
    name, equals, values = text.partition("=")
    name = _SHORT.get(name.strip(), name.strip())
    if not equals or not name or not values.strip():
        raise ValueError(f"{text!r} is not NAME=VALUES, for example M=512:4096:*2 or d=64,128")
    if name in OPTIONS:
        option = OPTIONS[name]
        return name, [option.parse(value.strip()) for value in values.split(option.separator)]
    if name in (WRT, shape_language.LENGTHS_OF):
        return name, [value.strip() for value in values.split(";")]
    if name in (shape_language.BLOCK_MASK, shape_language.DLSE, shape_language.RETURN_MAX):
        return name, [_truth(name, value.strip()) for value in values.split(",")]
    if name == shape_language.CAPTURED:
        raise ValueError(f"-p cannot vary captured inputs; use --captured {values.strip()}")
    if name in OWN_ARRAYS:
        return name, [value.strip() for value in values.split(",")]
    if ":" in values:
        several = list(islice(_range(values), MOST + 1))
        if len(several) > MOST:
            raise ValueError(f"{text!r} has more than {MOST:,} values; use a larger step")
        return name, several
    return name, [_value(name, value.strip()) for value in values.split(",")]


def problems(
    operation: str, sizes: Mapping[str, Any], *kernels: Kernel, small: bool = False
) -> list[Problem]:
    """Returns a problem for each combination of sizes; each size has one value or several.

    Sizes are named as in ``Problem.of_sizes``. N defaults to M, dv to d, kv_heads to heads, and
    dtype to a dtype that the kernels support. ``tokens`` is batch * M, ``width`` heads * d. Several
    values are passed as a list or a tuple. Several windows, shapes or values of ``wrt`` must be
    passed as a list, since a tuple may be a single value. ``options`` is an AttentionOptions.
    Score-modifying arrays are described by forms of ``shape_language``:
    ``bias="1hmn", captured={"slope": "f32[heads]"}, wrt="bias,slope"``; ``block_mask=True`` turns
    masks into a block mask. ``lengths``, as in ``Problem.of_sizes``, replaces batch, M and N;
    several ``lengths`` must be passed as a list. A softmax has M rows of N elements.

    ``cache``, "contiguous" or "paged", selects decoding: each sequence has M new tokens (1 by
    default) and ``lengths`` or N keys, including new keys; with ``lengths``, N is the capacity.
    ``page`` is the number of keys per page (16 by default). Other sizes default to USUAL, or to
    SMALL for the simulator if ``small``.
    """
    # Unknown operations get default sizes; the planner rejects their records later.
    usual = {**USUAL.get(operation, _ATTENTION), **(SMALL.get(operation, _FEW) if small else {})}
    usual["dtype"] = usual_dtype(*kernels, precision=sizes.get("precision"))
    several: dict[str, Sequence[Any]] = {}
    # ``options`` conflicts with options that are passed by name, even if their value is None.
    has_options = sizes.get("options") is not None
    for name, value in sizes.items():
        if value is not None or (has_options and name in OPTIONS):
            several[name] = value if _is_several(name, value) else [value]
            if not several[name]:
                raise ValueError(f"{name} is {value}; pass at least one value")
    if (count := prod(map(len, several.values()))) > MOST:
        raise ValueError(f"the sizes form {count:,} combinations; the limit is {MOST:,}")
    combined = (dict(zip(several, values)) for values in product(*several.values()))
    return list(dict.fromkeys(_problem(operation, usual, one) for one in combined))


def _is_several(name: str, value: Any) -> bool:
    """Returns whether a value is a list or tuple of several values rather than a single value."""
    if name == shape_language.LENGTHS_OF:  # a list of integers is one value
        return isinstance(value, list) and any(isinstance(x, list | tuple | str) for x in value)
    if not isinstance(value, tuple):
        return isinstance(value, list)
    if name in OWN_ARRAYS:  # a tuple may be a single shape
        return not all(isinstance(n, int) for n in value)
    return name != WRT and not (name in OPTIONS and isinstance(OPTIONS[name].default, tuple))


def refuse_foreign(
    operations: Collection[str], sizes: Mapping[str, Any], *, tiles: str | None = None
) -> None:
    """Raises ValueError for sizes that none of the operations accepts.

    ``tiles`` is the name of the caller's argument for tile sizes, if it has one.
    """
    known = _OF_SOFTMAX if set(operations) == {"softmax"} else (*AXES, "options", "tokens", "width")
    unknown = sorted(name for name in sizes if sizes[name] is not None and name not in known)
    if names := ", ".join(unknown):
        remedy = tile_remedy({name: sizes[name] for name in unknown}, tiles) or f"omit {names}"
        raise ValueError(
            f"{' and '.join(operations)} kernels have no size or option {names}; {remedy}. The "
            f"sizes and options are {', '.join(known)}"
        )


def _problem(operation: str, usual: Mapping[str, Any], given: Mapping[str, Any]) -> Problem:
    sizes = {**usual, **given}
    if operation == "softmax":
        return Problem.of_row_sizes(*(sizes[name] for name in _OF_SOFTMAX))
    cache, page = (sizes.pop(name, None) for name in _OF_CACHE)
    if cache is not None:
        return _of_cache(operation, sizes, given, cache, page)
    if page is not None:
        raise ValueError(f"page is {page}, but cache is omitted; use cache='paged'")
    if given.get(shape_language.LENGTHS_OF) is not None:
        if given.get("tokens") is not None:
            raise ValueError(
                "lengths and tokens cannot be combined; omit tokens, which lengths determine"
            )
        sizes = {x: y for x, y in sizes.items() if x in given or x not in ("batch", "M", "N")}
    for whole, count, each in (("tokens", "batch", "M"), ("width", "heads", "d")):
        if (total := sizes.pop(whole, None)) is not None:
            if count in given:
                raise ValueError(f"{whole} and {count} cannot be combined; omit {whole} or {count}")
            if not sizes[each] or total % sizes[each]:
                raise ValueError(f"{whole}={total} is not a multiple of {each}={sizes[each]}")
            sizes[count] = total // sizes[each]
    return Problem.of_sizes(**sizes)


def _of_cache(
    operation: str, sizes: Mapping[str, Any], given: Mapping[str, Any], cache: str, page: int | None
) -> Problem:
    """Returns the problem of decoding with a cache. Raises ValueError if arguments conflict."""
    if cache not in CACHES:
        raise ValueError(f"cache is {described(cache)}; use one of {', '.join(CACHES)}")
    if operation != "forward":
        raise ValueError(
            f"cache requires forward kernels, not {operation} kernels; choose forward kernels or "
            "omit cache"
        )
    if cache == "contiguous" and page is not None:
        raise ValueError(f"page is {page}, but the cache is contiguous; use cache='paged'")
    if (size := sizes.get(shape_language.PAGE_SIZE)) is not None:
        raise ValueError(
            f"page_size is {size}, which cannot be combined with cache; use page= instead"
        )
    _refuse_in_decoding(sizes)
    if cache == "paged" and page is None:
        page = PAGE_SIZES[0]
    own = {
        x: y for x, y in sizes.items() if x not in ("batch", "M", "N", shape_language.LENGTHS_OF)
    }
    tokens = given.get("M", 1)
    if (asked := given.get(shape_language.LENGTHS_OF)) is None:
        room = given.get("N", sizes["M"])
        lengths = [room] * sizes["batch"]
    elif "batch" in given:
        raise ValueError(
            "lengths and batch cannot be combined; omit batch, which lengths determine"
        )
    else:
        q, k = lengths_of(asked)
        if q != k or k.used or k.before or k.after:
            raise ValueError(
                f"lengths are {described(asked)}; the lengths of a cache are whole numbers, one "
                "for each sequence, such as 20,5"
            )
        lengths, room = list(k.rows), given.get("N", 0)
    if few := [n for n in lengths if 0 < n < tokens]:  # a sequence of length 0 has no new tokens
        raise ValueError(
            f"M is {tokens}, but a sequence has only {few[0]} keys, including the keys of the "
            f"new tokens; M must be at most {few[0]}"
        )
    return problem_of_cache(lengths, capacity=room, page=page, M=tokens, **own)


def problem_of_cache(
    lengths: Sequence[int], *, capacity: int = 0, page: int | None = None, **sizes: Any
) -> Problem:
    """Returns a decoding problem; each sequence has ``lengths`` keys, including M new ones.

    capacity: number of keys for which each sequence has room, at least the longest length. page:
    keys per page; None for a contiguous cache. Other sizes are named as in ``Problem.of_sizes``.
    """
    if page is not None:
        check_page_size("page", page)
    cached = Lengths(tuple(lengths))
    capacity = max(capacity, *cached.rows)
    most = 0 if page is None else max(-(-capacity // page), 1)
    room = most * page if page else capacity
    p = Problem.of_sizes(**{"M": 1, **sizes}, batch=len(cached.rows), N=room, lengths_k=True)
    p = replace(p.with_options(causal="bottom-right"), rows=Rows(cached=cached))
    if page is None:
        return p
    table = Operand(PAGE_TABLE, "int32", (p.batch, most))
    pages = max(sum(-(-n // page) for n in cached.rows), 1)
    return replace(p, rows=replace(p.rows, pages=pages), operands=(*p.operands, table))


def _refuse_in_decoding(sizes: Mapping[str, Any]) -> None:
    """Raises ValueError for options and arrays that decoding does not support."""
    options = sizes.get("options") or PLAIN
    asked = {name: sizes.get(name) for name in (BIAS, MASK, shape_language.BLOCK_MASK)}
    for name in ("causal", "precision", "dropout"):
        value = sizes.get(name)
        asked[name] = getattr(options, name) if value is None else OPTIONS[name].read(value)
    if (causal := asked.pop("causal")) == "top-left":
        raise ValueError(
            f"causal is {causal!r}, but the new tokens are always the last tokens of the cache; "
            "omit causal"
        )
    for name, value in asked.items():
        is_off = value is None or value is False or (name == "dropout" and not value)
        if not is_off:
            raise ValueError(f"decoding does not support {name}; omit {name} or cache")


def _range(text: str) -> Iterator[int]:
    parts: Sequence[str] = [part.strip() for part in text.split(":")]
    step = parts[-1]
    whole = [part for part in (*parts[:-1], step[1:]) if part.isdecimal()]
    if len(parts) != 3 or len(whole) != 3 or step[0] not in "*+":
        raise ValueError(f"{text!r} is not a range; write FIRST:LAST:*FACTOR or FIRST:LAST:+STEP")
    first, last, by = map(int, whole)
    if by < 1 or (step[0] == "*" and (by < 2 or first < 1)) or first > last:
        raise ValueError(f"range {text!r} never reaches {last}; use FIRST:LAST:+STEP or *FACTOR")
    while first <= last:
        yield first
        first = first * by if step[0] == "*" else first + by


def _truth(name: str, text: str) -> bool:
    value = shape_language.value_of(text)
    if not isinstance(value, bool):
        raise ValueError(f"{name}={text!r} is neither true nor false")
    return value


def _value(name: str, text: str) -> Any:
    if name in ("dtype", "cache") or text.isdecimal():
        return text if name in ("dtype", "cache") else int(text)
    if name not in AXES and (near := nearest(name, AXES)) and not text.lstrip("+-").isdecimal():
        raise ValueError(f"{name!r} is neither a size nor an option{near}")
    least = 0 if name in AXES else 1
    example = f"for example {name}=64"
    raise ValueError(f"{name}={text!r} is not a whole number of at least {least}; {example}")
