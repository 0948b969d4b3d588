"""Expressions that modify or mask scores, written by users in a subset of Python.

``Expression.of`` parses a string or traces a Python function, and rejects anything outside the
subset. All operands are evaluated, even in ``and`` and ``if``, because kernels select values
without branches.
"""

from __future__ import annotations

import ast
import inspect
import math
import numbers
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from cupyfa.errors import described
from cupyfa.score.functions import FUNCTIONS, Function

# Kind of a node's value; None for a captured value whose kind is not known yet.
Kind = Literal["number", "whole", "bool"]
SCORE = "score"
POSITIONS = ("batch", "head", "query", "key", "position", "queries", "keys")
MASKS = ("mask_mod", "mask")  # options whose expressions return a condition, not a number


@dataclass(frozen=True)
class Captured:
    """Kind and rank of an array or number that an expression captures.

    most: the largest magnitude that an integer dtype can hold.
    """

    name: str
    kind: Literal["bool", "int", "float"]
    rank: int  # number of axes; 0 for a number
    most: int = 2**63


# ---------------------------------------------------------------------------------------------
# Functions that users import, which accept numbers, NumPy arrays and tracers


def __getattr__(name: str) -> Callable[..., Any]:
    """Returns a function by name, such as ``where`` or ``tanh``; ``minimum`` stands for ``min``."""
    try:
        return TRACEABLE[_OTHER_NAMES.get(name, name)]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def _traceable(function: Function) -> Callable[..., Any]:
    """Wraps a function so that it accepts NumPy arrays, and tracers to build an expression."""

    def call(*arguments: Any) -> Any:
        if any(isinstance(x, Tracer) for x in arguments):
            return Tracer.call(function.name, *arguments)
        return function.value(*arguments)

    call.__name__ = call.__qualname__ = function.name
    call.__doc__ = f"{function.meaning}, of numbers, NumPy's arrays or traced values."
    return call


TRACEABLE = {name: _traceable(x) for name, x in FUNCTIONS.items()}

KNOWN = frozenset({SCORE, *POSITIONS, *FUNCTIONS})  # names that captured arrays must not use
TAKEN = KNOWN | {"inf", "nan"}
_FUNCTION_NAMES = ", ".join(FUNCTIONS)
# Maps names used in other libraries to the names used here.
_OTHER_NAMES = {
    "s": "score", "b": "batch", "h": "head", "q_idx": "query", "kv_idx": "key", "row": "query",
    "col": "key", "i": "query", "j": "key", "q": "query", "k": "key", "M": "queries", "N": "keys",
    **{other: x.name for x in FUNCTIONS.values() for other in x.other_names},
}  # fmt: skip

# ---------------------------------------------------------------------------------------------
# Errors

_LONGEST = 4000  # maximum number of characters of an expression
# Maximum nesting depth, where a chain a + b + c + ... counts once, and maximum number of operations
# in a chain. Compilers and Python's recursion support more.
_DEEPEST, _LONGEST_CHAIN = 100, 200
_LARGEST = 3.4028234e38  # largest float32
_SHOWN = 90  # number of characters of an expression that errors print


class _Wrong(Exception):
    """An error at a location in an expression."""

    def __init__(self, node: ast.AST | int, what: str) -> None:
        self.column = node if isinstance(node, int) else getattr(node, "col_offset", 0)
        self.what = what


def _error(option: str, source: str, wrong: _Wrong) -> ValueError:
    if not source:
        return ValueError(f"{option}: {wrong.what}")
    first = max(0, wrong.column - _SHOWN // 2) if len(source) > _SHOWN else 0
    shown, column = source[first : first + _SHOWN], wrong.column - first
    if first:
        shown, column = f"...{shown}", column + 3
    if first + _SHOWN < len(source):
        shown += "..."
    return ValueError(f"{option}: {wrong.what}\n    {shown}\n    {' ' * column}^")


def _suggested(name: str, names: Iterator[str] | list[str]) -> str:
    import difflib

    known = list(names)
    near = difflib.get_close_matches(name, known, 1, cutoff=0.7)
    other = _OTHER_NAMES.get(name)
    found = other if other in known else next(iter(near), None)
    return f"; did you mean {found!r}?" if found else ""


# ---------------------------------------------------------------------------------------------
# Parsing


def _parsed(source: str) -> ast.expr:
    if not source:
        raise _Wrong(0, "the expression is empty")
    if len(source) > _LONGEST:
        raise _Wrong(0, f"the expression has {len(source):,} characters; the limit is {_LONGEST:,}")
    if strange := re.search(r"[^ -~]", source):
        raise _Wrong(strange.start(), f"{strange[0]!r} is not allowed; use ASCII characters")
    if (comment := source.find("#")) >= 0:
        raise _Wrong(comment, "expressions cannot contain comments; remove this comment")
    try:
        tree = ast.parse(source, mode="eval").body
    except SyntaxError as error:
        column = min(max((error.offset or 1) - 1, 0), len(source))
        raise _Wrong(column, f"this is not a Python expression: {error.msg}") from None
    except (RecursionError, MemoryError, ValueError):
        raise _Wrong(0, _too_deep()) from None
    _check_depth(tree)
    return tree


def _too_deep() -> str:
    return (
        f"the expression is nested too deeply; it may have at most {_DEEPEST} levels of operations"
    )


def _check_depth(tree: ast.expr) -> None:
    level: list[tuple[ast.AST, int]] = [(tree, 1)]  # (node, depth)
    operations = -2  # do not count the two deepest levels, a name and its context
    while level:
        if max(depth for _, depth in level) > _DEEPEST:
            raise _Wrong(0, _too_deep())
        operations += 1
        level = [
            (x, depth + (not _continues(node, x)))
            for node, depth in level
            for x in ast.iter_child_nodes(node)
        ]
    if operations > _LONGEST_CHAIN:
        raise _Wrong(
            0,
            f"the expression chains {operations} operations; the limit is {_LONGEST_CHAIN}; group "
            "some of them in parentheses, as in (a + b) + (c + d)",
        )


def _continues(node: ast.AST, operand: ast.AST) -> bool:
    """Returns whether ``operand`` and ``node`` form a chain, as a + b and a + b + c do."""
    return isinstance(node, ast.BinOp) and isinstance(operand, ast.BinOp) and operand is node.left


@dataclass(frozen=True)
class _Rules:
    """Infers the kind of every node; raises _Wrong for anything outside the language.

    Without ``kinds``, captured names may have any kind and rank.
    """

    option: str
    kinds: Mapping[str, Captured] | None = None
    reserved: Collection[str] = ()

    def result(self, tree: ast.expr) -> Kind | None:
        kind = self.kind(tree)
        if self.option in MASKS and kind not in ("bool", None):
            raise _Wrong(
                tree,
                f"{self.option} must be a condition, such as key <= position, not {_a(kind)}",
            )
        if self.option not in MASKS and kind == "bool":
            raise _Wrong(
                tree,
                f"{self.option} must be a number, not a condition; write where(condition, a, b), "
                "or hide pairs with mask_mod",
            )
        return kind

    def kind(self, node: ast.expr) -> Kind | None:
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise _Wrong(node, _not_available(node))
        return method(node)

    def _numeric(self, node: ast.expr, use: str) -> Kind | None:
        if (kind := self.kind(node)) == "bool":
            raise _Wrong(node, f"{use} a number, not a condition; write where(condition, 1, 0)")
        return kind

    def _condition(self, node: ast.expr, use: str, remedy: str = "") -> None:
        if (kind := self.kind(node)) not in ("bool", None):
            raise _Wrong(
                node, f"{use} a condition, such as key <= position, not {_a(kind)}{remedy}"
            )

    def _constant(self, node: ast.Constant) -> Kind:
        value = node.value
        if isinstance(value, bool):
            return "bool"
        if isinstance(value, int):
            if value >= 2**63:
                raise _Wrong(
                    node, f"{_short(value)} is too large; whole numbers must be less than 2**63"
                )
            return "whole"
        if isinstance(value, float):
            if value > _LARGEST:
                raise _Wrong(node, f"numbers must be at most {_LARGEST:.7g}; {_NO_INFINITY}")
            return "number"
        raise _Wrong(node, _not_available(node))

    def _name(self, node: ast.Name) -> Kind | None:
        self._check_name(node)
        if node.id == SCORE:
            return "number"
        return "whole" if node.id in POSITIONS else self._captured(node, 0)

    def _check_name(self, node: ast.Name) -> None:
        name = node.id
        if name == SCORE and self.option in MASKS:
            raise _Wrong(
                node,
                f"{self.option} cannot read the score, only {', '.join(POSITIONS)}",
            )
        if name in FUNCTIONS:
            raise _Wrong(node, f"{name} is a function; write {name}(...)")
        if name in ("inf", "nan"):
            raise _Wrong(node, f"there is no {name!r}; {_NO_INFINITY}")
        if name.startswith("__"):
            raise _Wrong(node, f"{name!r} cannot name an array; names must not begin with __")

    def _captured(self, node: ast.Name, indices: int) -> Kind | None:
        if self.kinds is None:
            return None
        name = node.id
        if name not in self.kinds:
            names = [*([SCORE] if self.option not in MASKS else []), *POSITIONS]
            what = f"there is no captured array {name!r}" if indices else f"there is no {name!r}"
            if name in self.reserved:
                raise _Wrong(node, f"{what}; choose another name and pass it in captured")
            near = _suggested(name, list(self.kinds) if indices else [*names, *self.kinds])
            if near and not indices and name in _OTHER_NAMES:
                near += f" Expressions and parameters of functions may use {', '.join(names)}"
            if not near and self.kinds:
                near = f"; the captured names are {', '.join(self.kinds)}"
            raise _Wrong(node, what + (near or f'; pass it in captured={{"{name}": ...}}'))
        found = self.kinds[name]
        if found.rank != indices:
            has = f"{name} has {_count(found.rank, 'axis', 'axes')}"
            if not found.rank:
                raise _Wrong(node, f"{name} is a number, not an array, and cannot be indexed")
            if not indices:
                example = ", ".join(("batch", "head", "query", "key")[-found.rank :])
                raise _Wrong(node, f"{has}; write one index per axis, such as {name}[{example}]")
            raise _Wrong(node, f"{has}, but {_count(indices, 'index is', 'indices are')} given")
        kinds: dict[str, Kind] = {"bool": "bool", "int": "whole", "float": "number"}
        return kinds[found.kind]

    def _subscript(self, node: ast.Subscript) -> Kind | None:
        if isinstance(node.value, ast.Subscript):
            raise _Wrong(node, "write all indices in one pair of brackets, as in table[head, key]")
        if not isinstance(node.value, ast.Name) or node.value.id in (SCORE, *POSITIONS):
            raise _Wrong(node, "only captured arrays can be indexed")
        self._check_name(node.value)
        indices = indices_at(node)
        if not indices:
            raise _Wrong(node, "write one index per axis")
        for index in indices:
            self._index(index)
        return self._captured(node.value, len(indices))

    def _index(self, node: ast.expr) -> None:
        if isinstance(node, ast.Slice | ast.Starred):
            places = (x for x in (node, *ast.iter_child_nodes(node)) if hasattr(x, "col_offset"))
            raise _Wrong(next(places, node), "an index must be a whole number, not a slice")
        if (kind := self.kind(node)) not in ("whole", None):
            remedy = "; write // to divide whole numbers" if kind == "number" else ""
            raise _Wrong(node, f"an index must be a whole number, not {_a(kind)}{remedy}")
        if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
            raise _Wrong(node, "indices count from 0 and cannot be negative")

    def _binop(self, node: ast.BinOp) -> Kind | None:
        op, left, right = node.op, node.left, node.right
        if isinstance(op, ast.BitAnd | ast.BitOr):
            sign = _SIGNS[type(op)]
            for side in (left, right):
                remedy = f"; {sign} binds tighter than comparisons: write (a) {sign} (b)"
                self._condition(side, f"{sign} takes", remedy)
            return "bool"
        if isinstance(op, ast.Pow):
            kind = self._numeric(left, "** takes")
            if ast.dump(right) != ast.dump(ast.Constant(2)):
                raise _Wrong(
                    right, "the exponent of ** must be 2; for other powers, write exp(y * log(x))"
                )
            return kind
        if type(op) not in _SIGNS:
            remedy = "; write != of conditions" if isinstance(op, ast.BitXor) else ""
            raise _Wrong(node, f"this operator is not available{remedy}")
        sign = _SIGNS[type(op)]
        kinds = [self._numeric(left, f"{sign} takes"), self._numeric(right, f"{sign} takes")]
        if isinstance(op, ast.Div | ast.FloorDiv | ast.Mod) and getattr(right, "value", None) == 0:
            raise _Wrong(right, "division by 0")
        if isinstance(op, ast.FloorDiv | ast.Mod):
            for side, kind in zip((left, right), kinds):
                if kind == "number":
                    raise _Wrong(side, f"{sign} requires whole numbers; write {_with_floor(node)}")
            return None if None in kinds else "whole"
        return "number" if isinstance(op, ast.Div) else _joined(kinds)

    def _unaryop(self, node: ast.UnaryOp) -> Kind | None:
        if isinstance(node.op, ast.Not | ast.Invert):
            self._condition(node.operand, f"{_SIGNS[type(node.op)]} takes")
            return "bool"
        return self._numeric(node.operand, f"{_SIGNS[type(node.op)]} takes")

    def _boolop(self, node: ast.BoolOp) -> Kind:
        for value in node.values:
            self._condition(value, f"{_SIGNS[type(node.op)]} takes")
        return "bool"

    def _compare(self, node: ast.Compare) -> Kind:
        sides = [node.left, *node.comparators]
        kinds = [self.kind(side) for side in sides]
        for i, op in enumerate(node.ops):
            if type(op) not in _COMPARISONS:
                raise _Wrong(node, "'in' and 'is' are not available; write == or !=")
            pair = {kinds[i], kinds[i + 1]}
            if "bool" in pair and pair & {"number", "whole"}:
                place = sides[i] if kinds[i] == "bool" else sides[i + 1]
                raise _Wrong(
                    place, "a condition cannot be compared with a number; use `and` and `not`"
                )
            if "bool" in pair and not isinstance(op, ast.Eq | ast.NotEq):
                raise _Wrong(sides[i], "conditions can only be compared with == and !=")
        return "bool"

    def _ifexp(self, node: ast.IfExp) -> Kind | None:
        self._condition(node.test, "if takes")
        return self._either(node.body, node.orelse)

    def _either(self, a: ast.expr, b: ast.expr) -> Kind | None:
        kinds = [self.kind(a), self.kind(b)]
        if "bool" in kinds and {"number", "whole"} & set(kinds):
            raise _Wrong(
                b,
                "one alternative is a number and the other is a condition; both must be numbers or "
                "both must be conditions",
            )
        return "bool" if "bool" in kinds else _joined(kinds)

    def _call(self, node: ast.Call) -> Kind | None:
        name = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
        if name not in FUNCTIONS or not isinstance(node.func, ast.Name):
            raise _Wrong(node, _no_function(node.func, name))
        if node.keywords or any(isinstance(x, ast.Starred) for x in node.args):
            raise _Wrong(
                node, f"{name} accepts positional arguments only, not keyword or starred arguments"
            )
        count = len(FUNCTIONS[name].arguments)
        if len(node.args) != count:
            takes = _count(count, "argument", "arguments")
            given = _count(len(node.args), "is", "are")
            raise _Wrong(node, f"{name} takes {takes}, but {given} given")
        if name == "where":
            self._condition(node.args[0], "where takes first")
            return self._either(*node.args[1:])
        kinds = [self._numeric(x, f"{name} takes") for x in node.args]
        return _joined(kinds) if FUNCTIONS[name].keeps_whole else "number"


_NO_INFINITY = (
    "hide pairs with mask_mod, or subtract a large number such as 1e4; exp then returns 0"
)
_SIGNS: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
    ast.BitAnd: "&", ast.BitOr: "|", ast.And: "and", ast.Or: "or", ast.Not: "not",
    ast.Invert: "~", ast.USub: "-", ast.UAdd: "+",
}  # fmt: skip
_COMPARISONS: dict[type[ast.AST], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip


def _joined(kinds: list[Kind | None]) -> Kind | None:
    """Returns the kind of an operation's result: "whole" only if all operands are whole."""
    if "number" in kinds:
        return "number"
    return None if None in kinds else "whole"


def _a(kind: Kind | None) -> str:
    return {"number": "a number", "whole": "a whole number", "bool": "a condition"}[str(kind)]


def _count(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"


def _short(value: object) -> str:
    text = ast.unparse(value) if isinstance(value, ast.AST) else _digits(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _digits(value: object) -> str:
    try:
        return str(value)
    except ValueError:  # Python refuses to format more than 4300 digits
        return hex(value)  # type: ignore[arg-type]


def _not_available(node: ast.expr) -> str:
    return (
        f"{_short(node)!r} is not available; an expression may contain numbers, names, indices, "
        f"operators and the functions {_FUNCTION_NAMES}"
    )


def _no_function(called: ast.expr, name: str | None) -> str:
    if name and isinstance(called, ast.Attribute):
        known = name if name in FUNCTIONS else _OTHER_NAMES.get(name)
        if known in FUNCTIONS:
            return f"{_short(called)!r} is not available; write {known}(...)"
    if not name or not isinstance(called, ast.Name):
        return _not_available(called)
    near = _suggested(name, list(FUNCTIONS))
    others = f"; functions are {_FUNCTION_NAMES}; an array element is {name}[...]"
    return f"there is no function {name!r}{near or others}"


def _with_floor(node: ast.BinOp) -> str:
    """Rewrites a // b or a % b in terms of floor(a / b), for operands that are not integers."""
    left, right = node.left, node.right
    floored: ast.expr = ast.Call(ast.Name("floor"), [ast.BinOp(left, ast.Div(), right)], [])
    if isinstance(node.op, ast.Mod):
        floored = ast.BinOp(left, ast.Sub(), ast.BinOp(right, ast.Mult(), floored))
    return ast.unparse(floored)


def indices_at(node: ast.Subscript) -> list[ast.expr]:
    """Returns the index expressions of a subscript, one per axis."""
    index = node.slice
    return list(index.elts) if isinstance(index, ast.Tuple) else [index]


def _captured_names(tree: ast.expr) -> dict[str, int]:
    """Maps captured names to their number of indices, in order of appearance."""
    nodes = [*ast.walk(tree)]
    arrays = {id(x.value): len(indices_at(x)) for x in nodes if isinstance(x, ast.Subscript)}
    names = [x for x in nodes if isinstance(x, ast.Name) and x.id not in TAKEN]
    found: dict[str, int] = {}
    for node in sorted(names, key=lambda x: x.col_offset):
        count = arrays.get(id(node), 0)
        if found.setdefault(node.id, count) != count:
            before = _count(found[node.id], "index", "indices")
            raise _Wrong(node, f"{node.id} is used with {before} elsewhere, but with {count} here")
    return found


# ---------------------------------------------------------------------------------------------
# Expressions


@dataclass(frozen=True)
class Expression:
    """A checked expression. Expressions compare equal if their options and normal forms are equal.

    option: the option that errors mention: "score_mod", "mask_mod", or an option such as "bias"
    that the library rewrites as an expression. text: the normal form, printed by ``ast.unparse``.
    source: the original string.
    """

    option: str
    text: str
    source: str = field(compare=False, repr=False)

    @classmethod
    def of(cls, option: str, given: Any) -> Expression:
        """Parses a string, or traces a Python function with parameters such as score and key.

        Raises ValueError, with a caret below the error's location, for invalid expressions, and
        TypeError unless ``given`` is a string or a traceable function.
        """
        if isinstance(given, Expression):
            given = given.source
        elif callable(given):
            given = _traced(option, given)
        if not isinstance(given, str):
            raise TypeError(
                f"{option} is {described(given)}; pass an expression as a string, or a Python "
                "function"
            )
        source = re.sub(r"\s*\n\s*", " ", given.strip()).replace("\t", " ")
        try:
            tree = _parsed(source)
            _Rules(option).result(tree)
            _captured_names(tree)
        except _Wrong as wrong:
            raise _error(option, source, wrong) from None
        return cls(option, ast.unparse(tree), source)

    @cached_property
    def tree(self) -> ast.expr:
        return _parsed(self.source)

    @cached_property
    def captured(self) -> Mapping[str, int]:
        """Captured names with their number of indices, 0 for numbers."""
        return _captured_names(self.tree)

    @cached_property
    def positions(self) -> frozenset[str]:
        """The names in POSITIONS that the expression uses."""
        return frozenset(_names(self.tree) & set(POSITIONS))

    def count_reads(self, array: str) -> int:
        """Returns how many elements of an array the expression reads per pair."""
        reads = (x for x in ast.walk(self.tree) if isinstance(x, ast.Subscript))
        return sum(isinstance(x.value, ast.Name) and x.value.id == array for x in reads)

    @cached_property
    def is_additive(self) -> bool:
        """Whether the expression only adds to the score, so that its derivative is 1."""
        return _is_additive(self.tree)

    @cached_property
    def indices(self) -> tuple[tuple[str, int, ast.expr], ...]:
        """All indices of captured arrays, as (array, axis, index expression)."""
        found = (x for x in ast.walk(self.tree) if isinstance(x, ast.Subscript))
        return tuple(
            (x.value.id, axis, index)  # type: ignore[attr-defined]  # _Rules allows only names here
            for x in found
            for axis, index in enumerate(indices_at(x))
        )

    @cached_property
    def work(self) -> int:
        """Approximate number of instructions per pair."""
        return sum(map(_work, ast.walk(self.tree)))

    def check(self, kinds: Mapping[str, Captured], reserved: Collection[str] = ()) -> None:
        """Raises ValueError if names, kinds or ranks do not match the captured values.

        reserved: names that captured arrays must not use.
        """
        try:
            rules = _Rules(self.option, kinds, reserved)
            rules.result(self.tree)
            _refuse_long(self.tree, rules)
        except _Wrong as wrong:
            raise _error(self.option, self.source, wrong) from None

    def cpp(
        self,
        bounded: Callable[[ast.expr, str, int], bool],
        kinds: Mapping[str, Captured] | None = None,
        slot: Callable[[str], int | None] = lambda array: None,
        farthest: int = 2**24,
    ) -> str:
        """Prints the expression in C++, for attention/expression.cuh.

        bounded: called as ``bounded(index, array, axis)``; returns whether the index may be out of
            range and needs a bounds check.
        slot: called as ``slot(array)`` for each access; returns the slot of its derivative on the
            tape, or None for an array without gradient.
        farthest: the largest magnitude of a position.

        A captured name x becomes x_ in C++, to avoid keywords and names of the header.
        """
        return _Printer(_Rules(self.option, kinds), bounded, slot, farthest).result(self.tree)


def _work(node: ast.AST) -> int:
    match node:
        case ast.Call(ast.Name(name)):
            return FUNCTIONS[name].work
        case ast.Subscript():
            return 2 + 3 * len(indices_at(node))
        case ast.BinOp(_, ast.FloorDiv() | ast.Mod(), divisor):
            return 4 if isinstance(divisor, ast.Constant) else 20
        case ast.BinOp(_, ast.Div()):
            return 3
        case ast.BinOp() | ast.UnaryOp() | ast.BoolOp() | ast.Compare() | ast.IfExp():
            return 1
    return 0


def cpp_name(captured: str) -> str:
    """Returns the C++ name of a captured array or number."""
    return f"{captured}_"


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _is_additive(node: ast.expr) -> bool:
    if isinstance(node, ast.Name):
        return node.id == SCORE
    if not isinstance(node, ast.BinOp):
        return False
    left, right = SCORE in _names(node.left), SCORE in _names(node.right)
    if isinstance(node.op, ast.Add) and not left:
        return _is_additive(node.right)
    return isinstance(node.op, ast.Add | ast.Sub) and not right and _is_additive(node.left)


def _capped(node: ast.BinOp) -> ast.expr | None:
    """Returns x if the node is a softcap, cap * tanh(x / cap); otherwise None.

    A single C++ function for softcaps needs half as many instructions.
    """
    match node:
        case ast.BinOp(
            left=cap,
            op=ast.Mult(),
            right=ast.Call(
                func=ast.Name(id="tanh"), args=[ast.BinOp(left=x, op=ast.Div(), right=divisor)]
            ),
        ) if ast.dump(cap) == ast.dump(divisor) and SCORE not in _names(cap):
            return x
    return None


# ---------------------------------------------------------------------------------------------
# C++

_MOST = 2**31 - 1  # largest int
# Maps the width of a C++ integer to the function that widens it and the resulting width.
_WIDER = {32: ("wide", 64), 64: ("widest", 128)}


@dataclass(frozen=True)
class _Printer:
    """Prints a tree in C++ without branches: `and` becomes &, `or` |, and `if` becomes where()."""

    rules: _Rules
    bounded: Callable[[ast.expr, str, int], bool] = lambda index, array, axis: True
    slot: Callable[[str], int | None] = lambda array: None
    farthest: int = 2**24

    def result(self, tree: ast.expr) -> str:
        return self.print(tree) if self.rules.option in MASKS else self._number(tree)

    def print(self, node: ast.expr) -> str:
        return getattr(self, f"_{type(node).__name__.lower()}")(node)

    def _constant(self, node: ast.Constant) -> str:
        value: Any = node.value
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, float):
            return f"Real({value!r})"
        return f"{value}LL" if value > _MOST else str(value)

    def _name(self, node: ast.Name) -> str:
        return node.id if node.id in KNOWN else cpp_name(node.id)

    def _subscript(self, node: ast.Subscript) -> str:
        array = node.value.id  # type: ignore[attr-defined]  # _Rules allows only names here
        indices = (
            f'bounded({text}, "{array} in {self.rules.option}")'
            if self.bounded(index, array, axis)
            else text
            for axis, index in enumerate(indices_at(node))
            for text in [self.print(index)]
        )
        given = ", ".join(indices)
        if (slot := self.slot(array)) is not None:
            return f"tape.template read<{slot}>({cpp_name(array)}, {given})"
        return f"{cpp_name(array)}.read({given})"

    def _binop(self, node: ast.BinOp) -> str:
        op = node.op
        if isinstance(op, ast.Div):
            return f"({self._number(node.left)} / {self._number(node.right)})"
        capped = _capped(node)
        if capped is not None and not any(
            isinstance(x, ast.Subscript) for x in ast.walk(node.left)
        ):
            return f"capped({self._number(capped)}, {self._number(node.left)})"
        if self._is_fused(node):
            return self._fused(node)
        left, right = self.print(node.left), self.print(node.right)
        if isinstance(op, ast.FloorDiv | ast.Mod):
            name = "floor_divide" if isinstance(op, ast.FloorDiv) else "floor_mod"
            value = getattr(node.right, "value", None)
            if isinstance(value, int) and value <= _MOST:  # compilers optimize constant divisors
                return f"{name}<{value}>({left})"
            return f"{name}({self._widened(left, node, node.left, node.right)}, {right})"
        if not isinstance(op, ast.BitAnd | ast.BitOr):
            left = self._widened(left, node, node.left, node.right)
        if isinstance(op, ast.Pow):
            return f"square({left})"
        return f"({left} {_SIGNS[type(op)]} {right})"

    def _is_fused(self, node: ast.BinOp) -> bool:
        """Returns whether a node adds or subtracts a product of floats and so becomes an FMA."""
        match node:
            case ast.BinOp(other, ast.Add() | ast.Sub(), ast.BinOp(op=ast.Mult()) as product):
                return {self.rules.kind(x) for x in (other, product)} == {"number"}
        return False

    def _fused(self, node: ast.BinOp) -> str:
        product: Any = node.right
        sign = "-" if isinstance(node.op, ast.Sub) else ""
        factors = f"{sign}{self._number(product.left)}, {self._number(product.right)}"
        return f"fused({factors}, {self.print(node.left)})"

    def _widened(self, text: str, node: ast.expr, *operands: ast.expr) -> str:
        """Widens an operand in C++ if the result may overflow the type of the operands."""
        if self.rules.kind(node) == "number":
            return text
        bits = max(self._whole(x).bits for x in operands)
        return f"{_WIDER[bits][0]}({text})" if self._whole(node).bits > bits else text

    def _whole(self, node: ast.expr) -> _Whole:
        match node:
            case ast.Constant(int(value)):
                return _Whole(32 if value <= _MOST else 64, value)
            case ast.Name(name) if name in POSITIONS:
                return _Whole(32 if self.farthest <= _MOST else 64, self.farthest)
            case ast.Name(name) | ast.Subscript(ast.Name(name)):
                return self._captured(name, isinstance(node, ast.Subscript))
            case ast.UnaryOp(_, operand) | ast.Call(args=[operand]):
                x = self._whole(operand)
                return x.holding(x.most)
            case ast.BinOp(left, op, right):
                return _combined(op, self._whole(left), self._whole(right), right)
            case ast.IfExp(_, a, b) | ast.Call(args=[_, a, b]) | ast.Call(args=[a, b]):
                x, y = self._whole(a), self._whole(b)
                return _Whole(max(x.bits, y.bits), max(x.most, y.most))
        return _Whole(32, 0)

    def _captured(self, name: str, is_array: bool) -> _Whole:
        found = (self.rules.kinds or {}).get(name)
        most = found.most if found and found.kind == "int" else 2**63
        if not is_array:  # kernels receive Python numbers as 64-bit values
            return _Whole(64, 2**63)
        if most <= 2**31:
            return _Whole(32, most)
        return _Whole(64 if most <= 2**63 else 128, most)

    def _unaryop(self, node: ast.UnaryOp) -> str:
        sign = "!" if isinstance(node.op, ast.Not | ast.Invert) else _SIGNS[type(node.op)]
        text = self.print(node.operand)
        if sign == "-":
            text = self._widened(text, node, node.operand)
        return text if sign == "+" else f"({sign}{text})"

    def _boolop(self, node: ast.BoolOp) -> str:
        sign = " & " if isinstance(node.op, ast.And) else " | "
        return f"({sign.join(map(self.print, node.values))})"

    def _compare(self, node: ast.Compare) -> str:
        sides = [self.print(x) for x in (node.left, *node.comparators)]
        signs = [_COMPARISONS[type(op)] for op in node.ops]
        pairs = [f"({a} {sign} {b})" for a, sign, b in zip(sides, signs, sides[1:])]
        return pairs[0] if len(pairs) == 1 else f"({' & '.join(pairs)})"

    def _ifexp(self, node: ast.IfExp) -> str:
        return f"where({', '.join(map(self.print, (node.test, node.body, node.orelse)))})"

    def _call(self, node: ast.Call) -> str:
        name: str = node.func.id  # type: ignore[attr-defined]
        if name == "abs":
            (x,) = node.args
            return f"abs({self._widened(self.print(x), node, x)})"
        if name in ("min", "max", "where"):
            called = FUNCTIONS[name].cpp or name
            return f"{called}({', '.join(map(self.print, node.args))})"
        return f"{name}({self._number(node.args[0])})"

    def _number(self, node: ast.expr) -> str:
        """Prints a node and converts integers to Real, as functions and divisions require."""
        text = self.print(node)
        return text if self.rules.kind(node) == "number" else f"number({text})"


@dataclass(frozen=True)
class _Whole:
    """The width of an integer in C++, and an upper bound of its magnitude.

    Results that might overflow 32 or 64 bits get a wider type: uint64, and the negation of -2**63,
    need 128 bits. Sums, differences and products of 64-bit integers must fit in 64 bits.
    """

    bits: int
    most: int

    def holding(self, most: int) -> _Whole:
        """Returns the type for results up to ``most``: the same width, or the next larger width."""
        wider = _WIDER.get(self.bits)
        return _Whole(wider[1] if wider and most >= 2 ** (self.bits - 1) else self.bits, most)


def _combined(op: ast.operator, a: _Whole, b: _Whole, divisor: ast.expr) -> _Whole:
    bits = max(a.bits, b.bits)
    if isinstance(op, ast.FloorDiv | ast.Mod):
        # -2**31 divided by -1 overflows.
        by_minus_1 = bits == 32 and not isinstance(divisor, ast.Constant)
        quotient = _Whole(bits, 0).holding(a.most) if by_minus_1 else _Whole(bits, a.most)
        return quotient if isinstance(op, ast.FloorDiv) else _Whole(quotient.bits, b.most)
    most = a.most + b.most
    if isinstance(op, ast.Mult):
        most = a.most * b.most
    if isinstance(op, ast.Pow):
        most = a.most**2
    if bits == 32:
        return _Whole(32, 0).holding(most)
    return _Whole(bits, min(most, 2**63) if bits == 64 else most)


def _refuse_long(tree: ast.expr, rules: _Rules) -> None:
    """Raises _Wrong for operations on uint64 values whose results may not fit in 128 bits."""
    if not any(x.most > 2**63 for x in (rules.kinds or {}).values()):
        return
    of = [x for x in ast.walk(tree) if isinstance(x, ast.BinOp) and rules.kind(x) == "whole"]
    for node in of:
        if _Printer(rules)._whole(node).most >= 2**127:
            raise _Wrong(
                node,
                "the result may need more than 127 bits; multiply a factor by 1.0 to compute "
                "in floating point, or pass int64 instead of uint64",
            )


# ---------------------------------------------------------------------------------------------
# Tracing of Python functions


def _binary(op: type[ast.operator]) -> tuple[Any, Any]:
    def made(left: Any, right: Any) -> Tracer:
        a, b = Tracer.of(left), Tracer.of(right)
        return Tracer(ast.BinOp(a.node, op(), b.node), a, b)

    return made, lambda right, left: made(left, right)


def _compared(op: type[ast.cmpop]) -> Any:
    def made(left: Any, right: Any) -> Tracer:
        a, b = Tracer.of(left), Tracer.of(right)
        return Tracer(ast.Compare(a.node, [op()], [b.node]), a, b)

    return made


_NO_ARRAY = (
    "a traced function cannot read an array directly; add a parameter for the array, index the "
    "parameter, and pass captured={name: array}"
)


class Tracer:
    """A traced value, passed to a Python function in place of a number.

    Operators, comparisons, indexing, abs, NumPy functions and functions of this module build the
    expression. Python control flow (if, and, or, not, chained comparisons) raises TypeError.
    """

    __slots__ = ("depth", "node", "size")
    __hash__ = None  # type: ignore[assignment]  # == builds an expression

    def __init__(self, node: ast.expr, *parts: Tracer) -> None:
        self.node = node
        self.size: int = 1 + sum(x.size for x in parts)  # number of nodes, with repetitions
        self.depth: int = 1 + max((x.depth for x in parts), default=0)
        if self.size > _LONGEST:
            raise ValueError(f"the function has more than {_LONGEST:,} operations; use fewer")
        if self.depth > _LONGEST_CHAIN:
            raise ValueError(_too_deep().replace("expression", "function"))

    @staticmethod
    def of(value: Any) -> Tracer:
        """Converts a constant to a tracer; returns tracers unchanged."""
        if isinstance(value, np.ndarray) and not value.ndim:
            value = value[()]
        if isinstance(value, Tracer):
            return value
        if isinstance(value, bool | np.bool_):
            return Tracer(ast.Constant(bool(value)))
        if isinstance(value, numbers.Integral):
            return _constant(int(value))
        if isinstance(value, numbers.Real | np.floating):
            return _constant(float(value))
        if getattr(value, "ndim", 0):
            raise TypeError(_NO_ARRAY)
        raise TypeError(f"a traced function cannot compute with {described(value)}")

    @staticmethod
    def call(name: str, *arguments: Any) -> Tracer:
        parts = [Tracer.of(x) for x in arguments]
        return Tracer(ast.Call(ast.Name(name), [x.node for x in parts], []), *parts)

    __add__, __radd__ = _binary(ast.Add)
    __sub__, __rsub__ = _binary(ast.Sub)
    __mul__, __rmul__ = _binary(ast.Mult)
    __truediv__, __rtruediv__ = _binary(ast.Div)
    __floordiv__, __rfloordiv__ = _binary(ast.FloorDiv)
    __mod__, __rmod__ = _binary(ast.Mod)
    __pow__, __rpow__ = _binary(ast.Pow)
    __and__, __rand__ = _binary(ast.BitAnd)
    __or__, __ror__ = _binary(ast.BitOr)
    __lt__, __le__, __eq__ = _compared(ast.Lt), _compared(ast.LtE), _compared(ast.Eq)
    __gt__, __ge__, __ne__ = _compared(ast.Gt), _compared(ast.GtE), _compared(ast.NotEq)

    def __neg__(self) -> Tracer:
        return Tracer(ast.UnaryOp(ast.USub(), self.node), self)

    def __pos__(self) -> Tracer:
        return self

    def __invert__(self) -> Tracer:
        return Tracer(ast.UnaryOp(ast.Invert(), self.node), self)

    def __abs__(self) -> Tracer:
        return Tracer.call("abs", self)

    def __floor__(self) -> Tracer:
        return Tracer.call("floor", self)

    def __getitem__(self, index: Any) -> Tracer:
        indices = index if isinstance(index, tuple) else (index,)
        if any(isinstance(x, slice) or x is Ellipsis or x is None for x in indices):
            raise TypeError("an index in a traced function must be a whole number, not a slice")
        parts = [Tracer.of(x) for x in indices]
        nodes = [x.node for x in parts]
        place = nodes[0] if len(nodes) == 1 else ast.Tuple(nodes)
        return Tracer(ast.Subscript(self.node, place), self, *parts)

    def __bool__(self) -> bool:
        raise TypeError(
            "Python's if, and, or, not, min, max and chained comparisons cannot be traced; write "
            "where(condition, a, b) of cupyfa.score.expressions or NumPy, & | ~, minimum, maximum "
            "and (0 <= x) & (x < 5), or pass the expression as a string, which may use all of these"
        )

    def _no_number(self) -> Any:
        raise TypeError(
            "a traced value cannot be converted to a number; use functions of NumPy or "
            "cupyfa.score.expressions instead of math, float, int, round and range"
        )

    __float__ = __int__ = __index__ = __complex__ = __round__ = __ceil__ = __trunc__ = _no_number

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a traced value cannot be iterated over; index it instead")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        name = ufunc.__name__
        if method == "__call__" and not options:
            if name in _OPERATORS:
                return _OPERATORS[name](*map(Tracer.of, inputs))
            name = _OTHER_NAMES.get(name, name)
            if name in FUNCTIONS:
                return Tracer.call(name, *inputs)
        raise TypeError(f"np.{ufunc.__name__} cannot be traced; use one of {_FUNCTION_NAMES}")

    def __array_function__(self, function: Any, types: Any, inputs: Any, options: Any) -> Any:
        if function is np.where and len(inputs) == 3 and not options:
            return Tracer.call("where", *inputs)
        raise TypeError(f"np.{function.__name__} cannot be traced; use one of {_FUNCTION_NAMES}")


_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul,
    "divide": operator.truediv, "floor_divide": operator.floordiv, "remainder": operator.mod,
    "power": operator.pow, "square": lambda x: x**2, "negative": operator.neg,
    "positive": operator.pos, "less": operator.lt, "less_equal": operator.le,
    "greater": operator.gt, "greater_equal": operator.ge, "equal": operator.eq,
    "not_equal": operator.ne, "logical_and": operator.and_, "logical_or": operator.or_,
    "logical_not": operator.invert, "bitwise_and": operator.and_, "bitwise_or": operator.or_,
    "invert": operator.invert,
}  # fmt: skip


def _constant(value: float) -> Tracer:
    """Makes a tracer from a number; a negative number becomes a negation, as in parsed code."""
    if value < 0 or (value == 0 and math.copysign(1, value) < 0):
        return -_constant(-value)
    return Tracer(ast.Name("nan") if value != value else ast.Constant(value))


def _traced(option: str, function: Callable[..., Any]) -> str:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise TypeError(
            f"{option} is a function without named parameters; write a lambda, such as lambda "
            "score, head: ..."
        ) from None
    ordered, named = [], {}
    for x in parameters:
        if x.kind in (x.VAR_POSITIONAL, x.VAR_KEYWORD):
            raise TypeError(f"{option}: the function must have named parameters, not {x}")
        if x.default is not x.empty and x.name not in (SCORE, *POSITIONS):
            if x.kind is x.POSITIONAL_ONLY:
                ordered.append(x.default)
            continue  # the default value becomes a constant of the expression
        if x.kind is x.POSITIONAL_ONLY:
            ordered.append(Tracer(ast.Name(x.name)))
        else:
            named[x.name] = Tracer(ast.Name(x.name))
    try:
        result = function(*ordered, **named)
        if result is None:
            raise TypeError("the function returns None; return the expression")
        if isinstance(result, tuple | list):
            raise TypeError("the function returns several values; return one expression")
        return ast.unparse(ast.fix_missing_locations(Tracer.of(result).node))
    except IndexError as error:  # NumPy raises this if a tracer indexes an array
        if "only integers" not in str(error):
            raise
        raise TypeError(f"{option}: {_NO_ARRAY}") from error
    except (TypeError, ValueError) as error:
        if not _raised_here(error):
            raise
        raise type(error)(f"{option}: {error}") from None


def _raised_here(error: BaseException) -> bool:
    """Returns whether this module, not the user's function, raised the error."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    return bool(trace) and trace.tb_frame.f_code.co_filename == __file__  # type: ignore[union-attr]
