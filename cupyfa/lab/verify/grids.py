"""Grids: named lists of cases on which kernels are checked."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, islice, product
from typing import Any

from cupyfa.lab.verify import transforms
from cupyfa.lab.verify.case import LAYOUTS, VALUES, Case
from cupyfa.lab.verify.option_pairs import other_options
from cupyfa.lab.verify.problem_records import record_of_problem
from cupyfa.lab.verify.random_modifiers import MODIFIED, OF_SEQUENCES
from cupyfa.problem import shape_language
from cupyfa.problem.dtypes import DTYPES, INPUTS
from cupyfa.problem.optional_inputs import OF_PAIRS
from cupyfa.problem.options import OF_TANGENTS, OPTIONS
from cupyfa.problem.problem import Problem, can_give
from cupyfa.problem.wrt import WRT

ALL = "all"
GRIDS = {
    "fuzz": "random cases, with sizes near those of a kernel's tiles",
    "smoke": "lengths, head dimensions, masks and shared key heads: 180 cases for each dtype",
    "edges": "sizes of 0 and 1, odd and large sizes, windows, ragged batches, keys in pages, every "
    "layout, every kind of values",
    ALL: "all of these, one after the other",
}

Axes = Mapping[str, Sequence[Any]]
Choice = Mapping[str, Any]  # a value for each axis

_EVERY = tuple(DTYPES)
_MASKS = (None, "bottom-right")
_EVERY_MASK = (None, *OPTIONS["causal"].tried)
_NEAR = tuple(layout for layout in LAYOUTS if layout != "far")


def parts_of(grid: str) -> list[str]:
    """Returns the names of the grids that a grid combines: only its own, except for "all"."""
    return [x for x in GRIDS if x != ALL] if grid == ALL else [grid]


def cases(
    grid: str,
    operation: str,
    *,
    dtypes: Sequence[str] | None = None,
    samples: int | None = None,
    seed: int = 0,
    options: Choice | None = None,
    arrays: Choice | None = None,
    can: Sequence[Callable[[Case], bool]] = (),
) -> list[Case]:
    """Returns the cases of ``smoke`` or ``edges``, or a sample that covers many value pairs.

    dtypes, options (of attention), arrays (their forms): replace the grid's. samples: number of
    cases to draw, by default all. seed: seed of the sample and of the inputs. can: one predicate
    per kernel, which returns whether the kernel can run a case. Samples alternate between kernels
    so that each kernel gets cases; cases that no kernel can run are drawn only if no case can run.
    """
    chosen = _choices(grid, operation, dtypes)
    if operation in ("backward", "tangent"):
        chosen = (x for x in chosen if shape_language.PAGE_SIZE not in x)
    found = list(dict.fromkeys(_case(operation, seed, **one) for one in chosen))
    if (options or arrays) and operation != "softmax":
        given = options or {}, arrays or {}
        found = [x for x in found if _takes(x.problem, *given)]
        found = [replace(x, problem=transforms.modify(x.problem, *given)) for x in found]
        found = list(dict.fromkeys(found))
    if samples is None:
        return found
    return _sampled(found, samples, seed, can) or _sampled(found, samples, seed, ())


def _takes(p: Problem, options: Choice, arrays: Choice) -> bool:
    """Returns whether a problem can be combined with these options and arrays.

    A ragged batch has no bias, mask or wrt. A problem with an offset must be dense, and its options
    causal and window cannot be replaced.
    """
    if not can_give(options.get("out_dtype"), p.dtype):
        return False
    is_ragged = p.lengths is not None or shape_language.LENGTHS_OF in arrays
    is_paged = p.pages or shape_language.PAGE_SIZE in arrays
    if p.offset is not None and (is_ragged or is_paged or options.keys() & {"causal", "window"}):
        return False
    named = {*arrays, *(x.name for x in p.operands)}
    if is_paged and (is_ragged or named & {shape_language.BLOCK_MASK, WRT}):
        return False
    return not (is_ragged and named & {*OF_PAIRS, shape_language.BLOCK_MASK, WRT})


SMOKE: Axes = {
    "batch": (1,),
    "heads": (6,),
    "kv_heads": (6, 2, 1),
    "lengths": ((1, 1), (113, 203), (512, 256), (1023, 1024), (1, 339)),
    "d": (32, 59, 64, 111, 128, 256),
    "causal": _MASKS,
}


def _choices(grid: str, operation: str, dtypes: Sequence[str] | None) -> Iterator[Choice]:
    """Yields a grid's choices for an operation: attention, or a softmax over rows."""
    rows = operation == "softmax"
    if grid == "smoke":
        axes = {**({"lengths": _ROWS_SMOKE} if rows else SMOKE), "dtype": dtypes or _EVERY}
        yield from (dict(zip(axes, values)) for values in product(*axes.values()))
        return
    yield from _row_edges(dtypes or _EVERY) if rows else _edges(dtypes or _EVERY, operation)


def _case(
    operation: str,
    seed: int,
    *,
    lengths: tuple[Any, Any] = (None, None),
    d: int | tuple[int, int] = 0,
    values: str = "normal",
    layout: str = "bhsd",
    sequences: str | None = None,
    **sizes: Any,
) -> Case:
    """Creates a case from the chosen values; d may be a (d, dv) pair."""
    M, N = lengths
    d, dv = d if isinstance(d, tuple) else (d, d)
    if operation == "softmax":
        problem = Problem.of_row_sizes(M, N, **sizes)
    else:
        problem = Problem.of_sizes(M=M, N=N, d=d, dv=dv, lengths=sequences, **sizes)
    return Case(operation, problem, seed, values, layout)


# The grid "edges"

_SMALL = {"batch": 1, "heads": 2, "lengths": (5, 7), "d": 8}
_EMPTY = (
    *({**_SMALL, "batch": 0}, {**_SMALL, "heads": 0}),
    *({**_SMALL, "lengths": lengths} for lengths in ((0, 7), (5, 0), (0, 0))),
    *({**_SMALL, "d": d} for d in ((0, 8), (8, 0), (0, 0))),
)
_MANY = (  # more than 65,535, the limit of a launch's y and z dimensions
    {"batch": 70_000, "lengths": (3, 5), "d": 4},
    {"heads": 70_000, "lengths": (3, 5), "d": 4},
    {"batch": 300, "heads": 300, "kv_heads": 100, "lengths": (3, 5), "d": 4},
)
_FAR = (
    {"batch": 2, "heads": 3, "lengths": (5, 7), "d": 8, "layout": "far"},
    {"heads": 2, "lengths": (33, 17), "d": 40, "layout": "far"},
    {"lengths": (2, 2), "d": 16, "layout": "far"},
)
_ODD: Axes = {
    "batch": (1, 2),
    "heads": (1, 2, 6),
    "kv_heads": (1, 2, 6),
    "lengths": ((1, 1), (1, 70), (70, 1), (33, 17), (17, 65), (64, 64), (129, 127)),
    "d": (
        *(1, 3, 7, 17, 65, 127, 129, 257, 384, 511, 512, 577, 768, 1000, 1024),
        *((17, 1), (1, 17), (65, 129), (129, 40), (40, 768), (768, 7)),
    ),
    "causal": _EVERY_MASK,
    "scale": (None, *OPTIONS["scale"].tried),
    "values": tuple(VALUES),
    "layout": _NEAR,
}
_OFFSETS = (-200, -5, 0, 7, 64, 1000)
_OF_RESULTS = 8  # number of cases with float32 results
# Number of cases with odd sizes. The numbers of cases with windows, with all options and with
# sequences are a quarter of this.
_OF_ODD = 196
# Query and key lengths: 0, 1, near a tile boundary, several tiles. Some sequences have unused rows,
# and some arrays have padding rows that belong to no sequence.
_SEQUENCES = (
    *("1", "0:0", "0,0,5", "1,1,1:3,0,1", "64,0,128,1", "5,70,0:7,0,9", "33,17,64,1:17,64,33,1"),
    *("15,16,17,31,32,33:33,32,31,17,16,15", "63,64,65:129,127,128", "_3,20,30,_10:_3,25,35,_10"),
    *("127,129:1,257", "5/5,0/9,60/73", "_1,64,2:0/7,33/40", "70/129,1/2:80,3", "_65,1,_2:1"),
)


# Number of queries, maximum number of keys, keys per page, batch and d, in this order. Case draws
# the number of keys of each batch element.
_PAGED: tuple[Choice, ...] = tuple(
    {"lengths": (M, N), "page_size": size, "batch": batch, "d": d}
    for M, N, size, batch, d in (
        *((1, 1, 16, 1, 64), (1, 70, 16, 7, 128), (2, 300, 16, 5, 65), (17, 65, 16, 2, (65, 129))),
        *((1, 70, 32, 5, 17), (40, 257, 32, 2, 64), (3, 16, 32, 7, 1), (1, 300, 64, 5, 128)),
        *((17, 65, 64, 7, 129), (1, 257, 128, 5, 64), (2, 300, 256, 5, (40, 17)), (0, 9, 16, 2, 8)),
    )
)


def _edges(dtypes: Sequence[str], operation: str) -> Iterator[Choice]:
    special = (*product(_EMPTY, _EVERY_MASK), *product(_MANY, _MASKS))
    for i, (sizes, causal) in enumerate(special):
        yield {**sizes, "causal": causal, "dtype": dtypes[i % len(dtypes)]}
    for sizes, dtype in product(_FAR, dtypes):
        yield {**sizes, "causal": "top-left", "dtype": dtype}
    odd = {**_ODD, "dtype": dtypes}
    yield from _paired(odd, _OF_ODD)
    odd["window"] = OPTIONS["window"].tried
    yield from _paired(odd, _OF_ODD // 4 - len(_OFFSETS) - _OF_RESULTS)
    for chosen, offset in zip(_paired({**odd, "causal": _MASKS[1:]}, len(_OFFSETS)), _OFFSETS):
        yield {**chosen, "offset": offset}
    if narrow := [x for x in dtypes if INPUTS[x].itemsize <= 2]:
        for chosen in _paired({**odd, "dtype": narrow}, _OF_RESULTS):
            yield {**chosen, "out_dtype": "float32"}
    names = [x for x in other_options() if operation == "tangent" or x not in OF_TANGENTS]
    others = {name: (OPTIONS[name].default, *OPTIONS[name].tried) for name in names}
    yield from _paired({**odd, **others}, _OF_ODD // 4 if others else 0)
    for chosen, text in zip(_paired(odd, len(MODIFIED)), MODIFIED):
        yield {**chosen, **text}
    sequences = {**odd, **others, "sequences": _SEQUENCES}
    for name in ("batch", "lengths", "directions"):
        sequences.pop(name, None)
    for i, chosen in enumerate(_paired(sequences, _OF_ODD // 4)):
        yield {**chosen, **OF_SEQUENCES[i % len(OF_SEQUENCES)]}
    for chosen, paged in zip(_paired({**odd, **others}, len(_PAGED)), _PAGED):
        yield {**chosen, **paged}


# Softmax over rows

_ROWS_SMOKE = tuple(product((1, 7, 113), (1, 31, 32, 33, 256, 1000, 4096)))
_ROWS_SPECIAL: tuple[Choice, ...] = (
    *({"lengths": lengths} for lengths in ((0, 7), (5, 0), (0, 0), (70_000, 3))),
    {"lengths": (2, 100), "layout": "far"},
)
_ODD_COLUMNS = (1, 2, 3, 31, 33, 127, 255, 257, 511, 1023, 1025, 4097, 10_000, 20_000)
_ROWS_ODD: Axes = {
    "lengths": tuple(product((1, 2, 5, 70, 300), _ODD_COLUMNS)),
    "values": tuple(VALUES),
    "layout": _NEAR,
}


def _row_edges(dtypes: Sequence[str]) -> Iterator[Choice]:
    for sizes, dtype in product(_ROWS_SPECIAL, dtypes):
        yield {**sizes, "dtype": dtype}
    yield from _paired({**_ROWS_ODD, "dtype": dtypes}, _OF_ODD)


# Sampling for pairwise coverage of values

_TRIED = 30  # number of candidates compared for each case that is drawn


def _sampled(
    found: Sequence[Case], samples: int, seed: int, can: Sequence[Callable[[Case], bool]]
) -> list[Case]:
    """Draws cases that can run and that cover many different pairs of values."""
    pick = random.Random(seed)
    left, met = list(found), set[Any]()
    chosen: list[Case] = []
    of_others: list[Case] = []  # drawn cases that their kernel cannot run
    while left and len(chosen) < samples:
        tried = pick.sample(range(len(left)), min(_TRIED, len(left)))
        best = max(tried, key=lambda i: len(_pairs(_fields(left[i])) - met))
        left[best], left[-1] = left[-1], left[best]
        case = left.pop()
        if not can or can[len(chosen) % len(can)](case):
            chosen.append(case)
            met |= _pairs(_fields(case))
        else:
            of_others.append(case)
    able = (case for case in of_others if any(runs(case) for runs in can))
    return chosen + list(islice(able, samples - len(chosen)))


def _paired(axes: Axes, count: int) -> list[Choice]:
    """Draws `count` choices of one value per axis that cover many different pairs of values."""
    pick = random.Random(0)
    met, chosen = set[Any](), list[Choice]()
    while len(chosen) < count:
        drawn = [{x: pick.choice(values) for x, values in axes.items()} for _ in range(_TRIED)]
        best = max(filter(_is_valid, drawn), key=lambda one: len(_pairs(one) - met))
        chosen.append(best)
        met |= _pairs(best)
    return chosen


def _is_valid(chosen: Choice) -> bool:
    """Returns whether kv_heads divides heads and no scale is applied to "huge" values."""
    is_huge = chosen["values"] == "huge" and chosen.get("scale") not in (None, 0.0)
    return not is_huge and chosen.get("heads", 1) % chosen.get("kv_heads", 1) == 0


def _fields(case: Case) -> Choice:
    return {**record_of_problem(case.problem), "values": case.values, "layout": case.layout}


def _pairs(chosen: Choice) -> set[Any]:
    return set(combinations(chosen.items(), 2))
