"""C++ source of a problem's expressions, and struct Mods with the values that they read."""

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from cupyfa.ladder.tiles import cdiv
from cupyfa.planner.plan import NO_MODS, Plan
from cupyfa.problem.dtypes import DTYPES
from cupyfa.problem.optional_inputs import (
    ALIBI,
    KEY_TILES,
    NONE,
    OFFSET,
    PADDED,
    SEED,
    SINK,
    SOFTCAP,
    USED,
    Modifiers,
    Operand,
    alibi_expression,
    gradient_of,
    indices,
)
from cupyfa.problem.problem import Problem
from cupyfa.score.dropout import ROUNDS, KeptWeights
from cupyfa.score.expressions import Captured, Expression, cpp_name

_ELEMENTS = {
    **{"bool": "bool", "int8": "signed char", "uint8": "unsigned char", "int16": "short"},
    **{"uint16": "unsigned short", "int32": "int", "uint32": "unsigned", "int64": "long long"},
    **{"uint64": "unsigned long long"},
    **{name: x.scalar for name, x in DTYPES.items()},
}
_NUMBERS = {"bool": ("bool", "?"), "int": ("long long", "i8")}  # types in C++ and in NumPy
_EMPTY = np.zeros((), "V1")  # sizeof of an empty C++ struct is 1
# Names of members of struct Mods.
_FIRST = "first_position"  # position of query 0
_PAGES = "page_count"  # number of pages in the KV cache
_UNIT = "unit"  # 1 / scale
_MOST_INLINE = 100  # maximum number of operations to inline for every pair
_MOST_SLOPES = 20_000  # maximum number of generated derivatives: operations times array accesses
# Parameters of every C++ function that evaluates expressions.
_PLACE = "int batch, int head, Index query, Key key, int queries, int keys"


@lru_cache(maxsize=64)
def header(p: Problem, *, taped: bool = False, moved: bool = False, copies: bool = False) -> str:
    """Returns the C++ declarations of a problem's expressions, to be placed above a kernel's file.

    taped: whether to declare the function that records derivatives of a modified score with respect
    to array elements. moved: whether to declare the function that differentiates a modified score
    along the tangents of arrays, and struct Tangents. copies: whether to declare the function that
    kernels use for copying tiles of a bias or mask to shared memory.
    """
    found = p.modifiers
    if found == NONE:
        return NO_MODS
    headers = {x.header for o in found.arrays if (x := DTYPES.get(o.dtype)) and x.header}
    return "\n".join(
        [
            *(f"#include <{name}>" for name in sorted(headers)),
            "#include <attention/score_mod.cuh>",
            *(["#include <attention/staged_bias_tile.cuh>"] if copies else []),
            *(
                f"template <> constexpr bool is_bfloat16<{DTYPES[x].scalar}> = true;"
                for x in ("bfloat16",)
                if x in {o.dtype for o in found.arrays}
            ),
            *(["#include <attention/dropout.cuh>"] if found.dropout else []),
            f"struct Mods {{{''.join(f' {x};' for x in _members(p))} }};",
            # Both functions are needed, because compilers look up names in discarded branches, too.
            _function(p, "score_mod", found.score),
            _function(p, "mask_mod", found.mask),
            *([_dropout_function(found)] if found.dropout else []),
            *([_held(found.held)] if found.held else []),
            *([_tape(p)] if taped else []),
            *([_along_tangents(p)] if moved and found.moving else []),
        ]
    )


def maps(plan: Plan, expressions: Iterable[Expression]) -> tuple[Operand, ...]:
    """Returns the tile maps that the plan's kernel reads to skip tiles hidden by the expressions.

    The batch or head axis has size 1 if no expression uses ``batch`` or ``head``.
    """
    p, names = plan.problem, {name for expression in expressions for name in expression.positions}
    if 0 in (p.batch, p.heads, p.M, p.N):
        return ()
    batch = p.batch if "batch" in names else 1
    heads = p.heads if "head" in names else 1
    found = []
    for name, (rows, keys) in plan.kernel.walks_of(p, plan.constants).items():
        lines, tiles = cdiv(p.M, rows), cdiv(p.N, keys)
        lines, tiles = (lines, tiles) if name == KEY_TILES else (tiles, lines)
        found.append(Operand(name, "int32", (batch, heads, lines, tiles + 2)))
    return tuple(found)


def value(p: Problem) -> tuple[Any, tuple[tuple[str, int], ...]]:
    """Returns struct Mods with its numbers filled in, and the name and offset of each array."""
    found, sums = p.modifiers, p.dtype.sums
    members = [(x.name, *_stored(x, sums)) for x in found.operands]
    if found.reads_position and not p.is_ragged:
        members.append(("position", "i4", p.first_position))
    if p.pages:
        members.append((_PAGES, "i4", p.pages))
    if of_products(p):
        members.append((_UNIT, sums, 1 / p.scale))
    if found.dropout:
        members.append(("dropout", _dropout_type(p), _dropout(p)))
    record, places = _struct({name: of for name, of, _ in members})
    for name, _, number in members:
        if number is not None:
            record[name] = number
    return record, tuple((x.input, places[x.name]) for x in found.operands if x.is_array)


def gradients(p: Problem) -> tuple[Any, tuple[tuple[str, int], ...]]:
    """Returns struct Gradients and the offsets of the gradient arrays in it; see ``value``."""
    found = p.modifiers.differentiated
    record, places = _struct({gradient_of(x.name): array_type(len(x.shape)) for x in found})
    return record, tuple(places.items())


def tangents(p: Problem) -> tuple[Any, tuple[tuple[str, int], ...]]:
    """Returns struct Tangents and the offsets of the arrays' tangents in it; see ``value``."""
    moving = p.modifiers.moving
    record, places = _struct({gradient_of(x.name): array_type(len(x.shape) + 1) for x in moving})
    return record, tuple(places.items())


def _struct(members: Mapping[str, Any]) -> tuple[Any, dict[str, int]]:
    if not members:
        return _EMPTY, {}
    of = np.dtype([*members.items()], align=True)
    return np.zeros((), of), {name: of.fields[name][1] for name in members}  # type: ignore[index]


def _stored(x: Operand, sums: np.dtype) -> tuple[Any, Any]:
    """Returns the dtype of an operand's member of struct Mods, and the value of a number.

    Clamps a softcap to a range whose reciprocals float32 can represent. Larger softcaps leave
    scores unchanged, as 2^126 does; smaller ones make scores 0, as 2^-100 does.
    """
    if x.value is None:
        return array_type(len(x.shape)), None
    number = x.value
    if x.name == SOFTCAP and sums.itemsize == 4:
        number = min(max(number, 2.0**-100), 2.0**126)
    return _NUMBERS.get(x.captured.kind, ("real", sums))[1], number


def of_products(p: Problem) -> bool:
    """Returns whether expressions modify q·k before it is scaled, which only ALiBi supports.

    ALiBi slopes are then divided by the scale. A modified q·k may overflow to -infinity where the
    score is finite; kernels can detect this only if no mask expression hides pairs.
    """
    expressions = p.modifiers.score
    is_alibi = [x.option for x in expressions] == [ALIBI] and not p.modifiers.mask
    return is_alibi and 2.0**-40 < p.scale < 2.0**40


def array_type(rank: int) -> np.dtype:
    """Returns the NumPy dtype of struct Array in expression.cuh."""
    members = [("data", "u8"), ("stride", "i8", (rank,)), ("size", "i4", (rank,))]
    return np.dtype(members, align=True)


def _dropout_type(p: Problem) -> np.dtype:
    numbers = [("offset", "u4"), ("least", "u4"), ("heads", "i4"), ("factor", p.dtype.sums)]
    return np.dtype([("round_keys", "u4", (2 * ROUNDS,)), *numbers], align=True)


def _dropout(p: Problem) -> tuple[Any, ...]:
    given = KeptWeights.of(p.options, p.heads)
    assert given is not None
    return given.round_keys, given.offset, given.least * 0x10001, given.heads, given.factor


def _dropout_function(found: Modifiers) -> str:
    """Prints the C++ function that returns struct Dropout; seed and offset may be in memory."""
    read = {
        SEED: f"made.take_seed(*mods.{cpp_name(SEED)}.data);",
        OFFSET: f"made.offset = unsigned(*mods.{cpp_name(OFFSET)}.data);",
    }
    given = [text for name, text in read.items() if any(x.name == name for x in found.arrays)]
    if not given:
        return "__device__ __forceinline__ const Dropout& dropout_of(const Mods& mods) {\n" + (
            "  return mods.dropout;\n}"
        )
    return "\n".join(
        [
            "__device__ __forceinline__ Dropout dropout_of(const Mods& mods) {",
            *("  Dropout made = mods.dropout;", *(f"  {x}" for x in given), "  return made;\n}"),
        ]
    )


def _members(p: Problem) -> list[str]:
    found = p.modifiers
    names = dict(zip(PADDED, USED))  # ragged.cuh reads padded lengths by these names
    made = [
        f"{_member(x, x is found.held)} {cpp_name(names.get(x.name, x.name))}"
        for x in found.operands
    ]
    made += [f"int {_FIRST}"] * (found.reads_position and not p.is_ragged)
    made += [f"int {_PAGES}"] * bool(p.pages)
    made += [f"real {_UNIT}"] * of_products(p)
    return made + ["Dropout dropout"] * found.dropout + _of_lengths(p)


def _of_lengths(p: Problem) -> list[str]:
    """Returns the constants that batch.cuh reads in addition to offsets and lengths."""
    if not p.is_ragged:
        return []
    known = {f"has_{name}": is_given for name, is_given in zip(USED, p.modifiers.used)}
    known["is_packed"] = p.modifiers.is_packed
    known["bottom_right"] = p.causal != "top-left"
    return [f"static constexpr bool {name} = {str(x).lower()}" for name, x in known.items()]


def _member(x: Operand, is_held: bool = False) -> str:
    if x.is_array:
        pairs = ", true" * x.in_pairs + ", true" * is_held
        return f"Array<{_ELEMENTS[x.dtype]}, {len(x.shape)}{pairs}>"
    return _NUMBERS.get(x.captured.kind, ("real", ""))[0]


def _held(x: Operand) -> str:
    """Prints the C++ function that returns a row of the bias or mask that kernels may copy."""
    return (
        "__device__ __forceinline__ auto held_row(const Mods& mods, [[maybe_unused]] int batch,\n"
        "    [[maybe_unused]] int head, [[maybe_unused]] Index query) {\n"
        f"  return mods.{cpp_name(x.name)}.row({indices(x.shape[:-1])});\n}}"
    )


def _tape(p: Problem) -> str:
    """Prints the declarations that expression_gradients.cu needs for a problem's expressions."""
    found, of = p.modifiers.differentiated, [x.name for x in p.modifiers.differentiated]
    accesses: list[str] = []

    def slot(array: str) -> int | None:
        if array not in of:
            return None
        accesses.append(array)
        return len(accesses) - 1

    function = _function(p, "score_mod", p.modifiers.score, slot)
    _refuse_slopes(p, len(accesses))
    # Without pairs no expression reads an array, but C++ arrays have an element.
    accesses = accesses or of[:1]
    members = (f" {_member(x)} {gradient_of(x.name)};" for x in found)
    sizes = [prod(x.shape) for x in found]
    starts = [sum(sizes[:i]) for i in range(len(found))]
    return "\n".join(
        [
            f"struct Gradients {{{''.join(members)} }};",
            f"constexpr int accesses = {len(accesses)}, arrays = {len(found)};",
            f"constexpr long long elements = {p.modifiers.elements};",
            f"constexpr int array_of[] = {{{', '.join(str(of.index(x)) for x in accesses)}}};",
            f"constexpr long long starts[] = {{{', '.join(map(str, starts))}}};",
            "using Slopes = Tape<accesses>;",
            function,
            "template <class Body> __device__ __forceinline__",
            "void for_gradients(const Gradients& gradients, Body body) {",
            *(f"  body({i}, gradients.{gradient_of(x.name)});" for i, x in enumerate(found)),
            "}",
        ]
    )


def _along_tangents(p: Problem) -> str:
    """Prints struct Tangents, and the function that differentiates scores along its arrays."""
    moving, of = p.modifiers.moving, p.modifiers.differentiated
    names = [x.name for x in of]
    members = (
        f" {_member(replace(x, shape=(0, *x.shape)))} {gradient_of(x.name)};" for x in moving
    )
    cases = (
        f"    if constexpr (array == {i}) return ({gradient_of(x.name)});" for i, x in enumerate(of)
    )
    element = "0"
    if sink := [x for x in moving if x.name == SINK]:
        at = ("batch, head", "head")[2 - len(sink[0].shape)]
        element = f"{gradient_of(SINK)}.read(direction, {at}).value"
    place = ", ".join(f"[[maybe_unused]] int {x}" for x in ("direction", "batch", "head"))
    return "\n".join(
        [
            "#include <tangent/parts/array_tangents.cuh>",
            f"struct Tangents {{{''.join(members)}",
            "  template <int array> __device__ __forceinline__ decltype(auto) of() const {",
            *cases,
            "  }",
            f"  __device__ real of_sink({place}) const {{ return {element}; }}",
            "};",
            "using Slopes = const DirectionTape<Tangents>;",
            _function(
                p,
                "score_mod",
                p.modifiers.score,
                lambda array: names.index(array) if array in names else None,
            ),
        ]
    )


def _refuse_slopes(p: Problem, accesses: int) -> None:
    work = sum(x.work for x in p.modifiers.score)
    if work * accesses > _MOST_SLOPES:
        names = ", ".join(x.name for x in p.modifiers.differentiated)
        raise ValueError(
            f"wrt: the expressions read elements of {names} in {accesses} places and have about "
            f"{work} operations, which would require {work * accesses:,} derivatives; the limit is "
            f"{_MOST_SLOPES:,}: list fewer arrays in wrt, or read fewer elements"
        )


def _function(
    p: Problem,
    name: str,
    expressions: tuple[Expression, ...],
    slot: Callable[[str], int | None] | None = None,
) -> str:
    """Prints a C++ function that applies expressions in order and, with ``slot``, records
    derivatives.
    """
    found = p.modifiers
    kinds = {x.name: x.captured for x in found.operands}
    is_score = name == "score_mod"
    result, first = ("Score", "Capped<is_capped>, Score score, ") if is_score else ("bool", "")
    if slot is not None:
        result, first = "Slopes::Number", "Slopes::Number score, Slopes& tape, "
    read = {x for expression in expressions for x in expression.captured}
    by_name = {x.name: x for x in found.operands if x.name in read}
    place = ", ".join(f"[[maybe_unused]] {x}" for x in _PLACE.split(", "))
    lines = [
        f"template <{'bool is_capped, class Score, ' * (is_score and slot is None)}class Key>",
        f"__device__ {_inlining(expressions, p)} {result} {name}(",
        f"    {first}[[maybe_unused]] const Mods& mods, {place}) {{",
        *(f"  const {_taken(x)};" for x in by_name.values()),
    ]
    if any("position" in x.positions for x in expressions):
        lines.append(f"  const Index position = query + Index({_first(p)});")

    def bounded(index: ast.expr, array: str, axis: int) -> bool:
        return not _fits(p, index, by_name[array].shape[axis])

    if is_score and slot is None and of_products(p):
        unit = f"is_capped ? real(1) : mods.{_UNIT}"
        lines.append(f"  const auto {cpp_name(_UNIT)} = Real({unit});")
        expressions = (alibi_expression(by_name[ALIBI], _UNIT),)
        kinds[_UNIT] = Captured(_UNIT, "float", 0)
    if is_score:
        note = slot or (lambda array: None)
        for x in expressions:
            once = "if constexpr (!is_capped) " * (x.option == SOFTCAP and slot is None)
            lines.append(f"  {once}score = {x.cpp(bounded, kinds, note, _farthest(p))};")
        lines.append("  return score;\n}")
    else:
        shown = " & ".join(f"({x.cpp(bounded, kinds, farthest=_farthest(p))})" for x in expressions)
        lines.append(f"  return {shown or 'true'};\n}}")
    return "\n".join(lines)


def _inlining(expressions: tuple[Expression, ...], p: Problem) -> str:
    """Returns the C++ qualifier that forces or prevents inlining of the expressions.

    Compilers take minutes to inline hundreds of operations for every pair of a tile.
    """
    work = sum(x.work for x in expressions) * (1 if p.dtype.sums.itemsize == 4 else 2)
    return "__forceinline__" if work <= _MOST_INLINE else "__noinline__"


def _farthest(p: Problem) -> int:
    """Returns an upper bound of positions; usually 2**24, so that problems share compiled code."""
    first = p.N if p.is_ragged else abs(p.first_position)
    return max(2**24, first + p.M, p.N, p.batch, p.heads)


def _first(p: Problem) -> str:
    if not p.is_ragged:
        return f"mods.{_FIRST}"
    return "0" if p.causal == "top-left" else "keys - queries"


def _taken(x: Operand) -> str:
    if x.is_array:
        return f"auto& {cpp_name(x.name)} = mods.{cpp_name(x.name)}"
    made = f"mods.{cpp_name(x.name)}"
    if x.captured.kind == "float":
        made = f"Real({made})"
    return f"auto {cpp_name(x.name)} = {made}"


def _fits(p: Problem, index: ast.expr, size: int) -> bool:
    if isinstance(index, ast.Constant):
        return isinstance(index.value, int) and 0 <= index.value < size
    ends: Mapping[str, int] = {
        "batch": p.sequences or p.batch,
        "head": p.heads,
        "query": p.M,
        "key": p.N,
    }
    return isinstance(index, ast.Name) and ends.get(index.id, size + 1) <= size
