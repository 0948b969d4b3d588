"""Kinds of faults: what each of them replaces in a syntax tree, and by which code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

from cupyfa.lab.mutation.syntax import (
    arguments_of,
    called,
    executed,
    is_expression,
    name_of,
    parsed,
    text,
    words,
)

if TYPE_CHECKING:
    from tree_sitter import Node

Replaced = Iterator[tuple["Node", str]]  # nodes and the code to write in their place

# Words in the names of functions, variables and members.
_SYNCHRONIZING = {
    *("syncthreads", "syncwarp", "sync", "synchronize", "barrier", "fence", "threadfence"),
    *("wait", "arrive", "commit", "release", "expect"),
}
_ATOMICS = {
    "atomicAdd": "{0} += {1}",
    "atomicSub": "{0} -= {1}",
    "atomicOr": "{0} |= {1}",
    "atomicMax": "{0} = max({0}, {1})",
    "atomicMin": "{0} = min({0}, {1})",
}
_STAGES, _PHASES = {"stage", "slot"}, {"phase", "parity", "buffer"}
_POSITIONS = {
    *("begin", "end", "first", "last", "edge", "offset", "window", "position", "distance"),
}
_ROWS, _MASKS = (
    {"row", "key", "query"},
    {"sees", "reach", "shown", "hides", "masked", "full", "dropped"},
)
_INDICES = {"head", "batch", "page", "split", "sequence"}
_REDUCTIONS = {
    *("max", "maximum", "sum", "raise", "rescale", "reduce", "add", "accumulate", "scale"),
}
_OPTIONS = {
    *("dropout", "dropped", "sink", "bias", "softcap", "capped", "cap", "slopes", "alibi"),
    *("descale", "descales", "descaled", "rotary", "rotated"),
}
_ZEROS = {"real", "scalar", "result", "float", "double", "half", "int", "unsigned", "infinity"}
_NEIGHBOURS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
_CLAMPS = ("min", "max", "fmin", "fmax")


@dataclass(frozen=True)
class Change:
    """Code to write in place of the bytes from ``start`` to ``end`` of a file.

    probe: code in their place that does the same but is marked: ``{trap}`` is called first.
    function: first and last line, from 1, of the function around the change, or of the change if
        there is none.
    """

    kind: str
    start: int
    end: int
    new: str
    probe: str
    function: tuple[int, int]


@lru_cache(maxsize=256)  # exceeds the number of files in kernels/
def changes(code: bytes) -> tuple[Change, ...]:
    """Returns the changes of all kinds in a file, in the order of their places.

    Raises MissingParser without tree-sitter.
    """
    found: dict[tuple[int, int, str], Change] = {}
    for node in executed(parsed(code)):
        for kind, replaced in KINDS.items():
            for place, new in replaced(node):
                start, end = place.start_byte, place.end_byte
                made = Change(kind, start, end, new, _probe(place), _function(place))
                found.setdefault((start, end, new), made)
    return tuple(found[key] for key in sorted(found))


def _function(node: Node) -> tuple[int, int]:
    """Returns the first and last line of the function around a node, or of the node itself."""
    around: Node | None = node
    while around is not None and around.type != "function_definition":
        around = around.parent
    of = around or node
    return of.start_point.row + 1, of.end_point.row + 1


def _probe(node: Node) -> str:
    old = text(node).replace("{", "{{").replace("}", "}}")
    if is_expression(node):
        return f"({{trap}}(), {old})"
    if node.parent is not None and node.parent.type == "compound_statement":
        return f"{{trap}}(); {old}"
    return f"{{{{ {{trap}}(); {old} }}}}"


# Barriers and pipelines


def _synchronization(node: Node) -> Replaced:
    call = called(node)
    if call is not None and words(name_of(call)) & _SYNCHRONIZING:
        yield node, ";"


def _atomic(node: Node) -> Replaced:
    call = called(node)
    made = _ATOMICS.get(name_of(call)) if call is not None else None
    if call is not None and made and len(arguments_of(call)) == 2:
        pointer, value = map(text, arguments_of(call))
        yield node, made.format(f"*({pointer})", f"({value})") + ";"


def _stage(node: Node) -> Replaced:
    left, right = _operands(node, "%")
    if right is not None and "stages" in words(text(right)):
        yield node, f"({text(left)} + 1) % {text(right)}"
    if _is_read(node):
        if words(name_of(node)) & _STAGES:
            yield node, _grouped(node, "+ 1")
        elif words(name_of(node)) & _PHASES:
            yield node, _grouped(node, "^ 1")


def _not_advanced(node: Node) -> Replaced:
    changed = _changed(node)
    if changed is not None and words(name_of(changed)) & (_STAGES | _PHASES):
        yield node, ";"


def _changed(statement: Node) -> Node | None:
    """Returns the variable that a statement assigns to or increments, or None."""
    if statement.type != "expression_statement" or not statement.named_children:
        return None
    of = statement.named_children[0]
    return of.child_by_field_name("left" if of.type == "assignment_expression" else "argument")


# Bounds, positions and indices


def _bound(node: Node) -> Replaced:
    operator = _operator(node)
    if node.type == "binary_expression" and operator in _NEIGHBOURS:
        left, right = _operands(node, operator)
        yield node, f"{text(left)} {_NEIGHBOURS[operator]} {text(right)}"


def _untested(node: Node) -> Replaced:
    for operator in ("&&", "||"):
        for operand in filter(None, _operands(node, operator)):
            yield node, text(operand)
    if node.type == "conditional_expression":
        condition = node.child_by_field_name("condition")
        if condition is not None:
            yield condition, "true"
    if node.type == "if_statement":
        condition = node.child_by_field_name("condition")
        if condition is not None and (value := condition.child_by_field_name("value")) is not None:
            yield value, "false" if _leaves(node) else "true"


def _leaves(statement: Node) -> bool:
    """Returns whether all that an if statement does is to leave a function or a loop."""
    body = statement.child_by_field_name("consequence")
    return body is not None and body.type in (
        *("return_statement", "continue_statement", "break_statement"),
    )


def _unclamped(node: Node) -> Replaced:
    if node.type == "call_expression" and name_of(node) in _CLAMPS:
        for argument in arguments_of(node):
            yield node, text(argument)


def _position(node: Node) -> Replaced:
    if _is_read(node) and words(name_of(node)) & (_POSITIONS | _masked_positions(node)):
        yield node, _grouped(node, "+ 1")
        yield node, _grouped(node, "- 1")


def _masked_positions(argument: Node) -> set[str]:
    """Returns words for rows and keys if a node is an argument of a mask."""
    call = argument.parent.parent if argument.parent is not None else None
    is_masked = call is not None and call.type == "call_expression"
    return _ROWS if is_masked and words(name_of(call)) & _MASKS else set()


def _index(node: Node) -> Replaced:
    if node.type == "identifier" and _is_index(node):
        yield node, "0"
        yield node, _grouped(node, "+ 1")


def _swapped(node: Node) -> Replaced:
    if node.type != "argument_list":
        return
    listed = [x for x in node.named_children if x.type != "comment"]
    for first, second in pairwise(listed):
        call = node.parent
        both = _is_index(first) and _is_index(second) and text(first) != text(second)
        if both and call is not None and is_expression(call):
            start, code = call.start_byte, call.text or b""
            a, b = (slice(x.start_byte - start, x.end_byte - start) for x in (first, second))
            made = code[: a.start] + code[b] + code[a.stop : b.start] + code[a] + code[b.stop :]
            yield call, made.decode()


def _is_index(node: Node) -> bool:
    lists = "argument_list", "subscript_argument_list"
    is_argument = node.parent is not None and node.parent.type in lists
    return is_argument and node.type == "identifier" and bool(words(text(node)) & _INDICES)


# Arithmetic


def _factor(node: Node) -> Replaced:
    left, right = _operands(node, "*")
    if left is not None and right is not None and not _is_place(node, left, right):
        yield node, text(left)
        yield node, text(right)
    left, right = _operands(node, "/")
    if left is not None and right is not None and not _is_place(node, left, right):
        yield node, text(left)


def _is_place(node: Node, left: Node, right: Node) -> bool:
    """Returns whether a product looks like the place of an element, as j * 8 and x[i / width]."""
    is_index = node.parent is not None and node.parent.type == "subscript_argument_list"
    return is_index or "number_literal" in (left.type, right.type)


def _sign(node: Node) -> Replaced:
    left, right = _operands(node, "-")
    if left is not None:
        yield node, f"{text(left)} + {text(right)}"
    if node.type == "unary_expression" and _operator(node) == "-":
        yield node, text(node.child_by_field_name("argument"))


def _term(node: Node) -> Replaced:
    left, right = _operands(node, "-")
    if left is not None and right is not None and right.type != "number_literal":
        yield node, text(left)


def _sum(node: Node) -> Replaced:
    call = called(node)
    if call is not None and words(name_of(call)) & _REDUCTIONS:
        yield node, ";"
    if node.type == "expression_statement" and node.named_children:
        of = node.named_children[0]
        if of.type == "assignment_expression" and _operator(of) in ("+=", "*=", "-="):
            yield node, ";"


def _reduction(node: Node) -> Replaced:
    if node.type == "call_expression" and name_of(node) not in _CLAMPS:
        is_used = node.parent is not None and node.parent.type != "expression_statement"
        if is_used and words(name_of(node)) & _REDUCTIONS and arguments_of(node):
            yield node, text(arguments_of(node)[0])


def _initialization(node: Node) -> Replaced:
    if node.type in ("declaration", "field_declaration"):
        is_loop = node.parent is not None and node.parent.type == "for_statement"
        if not is_loop and not _has_fixed_type(node) and (bare := _without_values(node)):
            yield node, bare
    if node.type == "expression_statement" and node.named_children:
        of = node.named_children[0]
        is_set = of.type == "assignment_expression" and _operator(of) == "="
        if is_set and _is_zero(of.child_by_field_name("right")):
            yield node, ";"


def _has_fixed_type(declaration: Node) -> bool:
    of = declaration.child_by_field_name("type")
    is_const = any(text(x) in ("const", "static") for x in declaration.children)
    return is_const or of is None or of.type == "placeholder_type_specifier"


def _without_values(declaration: Node) -> str:
    """Returns a declaration without the zeros that it sets its variables to; "" without any."""
    cuts: list[tuple[int, int]] = []
    for node in declaration.children:
        if node.type == "init_declarator":
            name, value = node.child_by_field_name("declarator"), node.child_by_field_name("value")
            if name is not None and _is_zero(value):
                cuts.append((name.end_byte, node.end_byte))
    before: Node | None = None
    for index, node in enumerate(declaration.children):
        if declaration.field_name_for_child(index) == "default_value" and before is not None:
            if _is_zero(node):
                cuts.append((before.end_byte, node.end_byte))
        elif node.type != "=":
            before = node
    code, start = declaration.text or b"", declaration.start_byte
    for begin, end in sorted(cuts, reverse=True):
        code = code[: begin - start] + code[end - start :]
    return code.decode() if cuts else ""


def _is_zero(value: Node | None) -> bool:
    """Returns whether a value is an empty list, a number or an infinity, or a cast of these."""
    if value is None or value.type == "argument_list":
        return False
    inside = [value]
    for node in inside:
        inside += node.named_children
    names = {text(x) for x in inside if x.type.endswith(("identifier", "primitive_type"))}
    kinds = {x.type for x in inside} - {"argument_list", "call_expression", "unary_expression"}
    allowed = {"identifier", "number_literal", "initializer_list", "primitive_type"}
    return names <= _ZEROS and kinds <= allowed


# Options


def _option_left_out(node: Node) -> Replaced:
    call = called(node)
    if call is not None and words(name_of(call)) & _OPTIONS:
        yield node, ";"
    elif node.type == "call_expression" and _takes_value(node):
        yield node, text(arguments_of(node)[0])
    elif node.type == "identifier" and _is_condition(node) and words(text(node)) & _OPTIONS:
        yield node, "false"


def _option_twice(node: Node) -> Replaced:
    call = called(node)
    if call is not None and words(name_of(call)) & _OPTIONS:
        yield node, f"{{ {text(node)} {text(node)} }}"
    elif node.type == "call_expression" and _takes_value(node):
        first = arguments_of(node)[0]
        before = text(node).encode()[: first.start_byte - node.start_byte].decode()
        after = text(node).encode()[first.end_byte - node.start_byte :].decode()
        yield node, f"{before}{text(node)}{after}"


def _takes_value(call: Node) -> bool:
    """Returns whether a call whose value is used applies an option to its first argument."""
    is_used = call.parent is not None and call.parent.type != "expression_statement"
    name = name_of(call)
    changes_value = bool(words(name) & _OPTIONS) and not name.endswith("_of")
    return is_used and changes_value and bool(arguments_of(call))


def _is_condition(node: Node) -> bool:
    of = node.parent
    if of is None:
        return False
    is_tested = of.type == "condition_clause" or _operator(of) in ("&&", "||", "!")
    return is_tested or node == of.child_by_field_name("condition")


# Nodes


def _operator(node: Node) -> str:
    return text(node.child_by_field_name("operator"))


def _operands(node: Node, operator: str) -> tuple[Node | None, Node | None]:
    """Returns the operands of a binary expression with this operator, or (None, None)."""
    if node.type != "binary_expression" or _operator(node) != operator:
        return None, None
    return node.child_by_field_name("left"), node.child_by_field_name("right")


def _grouped(node: Node, added: str) -> str:
    """Returns the code of a node and more code, in parentheses if the node is an operand."""
    both = f"{text(node)} {added}"
    is_operand = node.parent is not None and node.parent.type == "binary_expression"
    return f"({both})" if is_operand else both


def _is_read(node: Node) -> bool:
    """Returns whether a name, member or call is an operand, an index, an argument or a value."""
    if node.type not in ("identifier", "field_expression", "call_expression"):
        return False
    of = node.parent
    if of is None:
        return False
    if of.type in ("argument_list", "subscript_argument_list", "binary_expression"):
        return True
    values = {"assignment_expression": "right", "init_declarator": "value"}
    return of.type == "return_statement" or node == of.child_by_field_name(
        values.get(of.type, "no field")
    )


KINDS: dict[str, Callable[[Node], Replaced]] = {
    "synchronization left out": _synchronization,
    "atomic made plain": _atomic,
    "stage or phase off by one": _stage,
    "stage or phase not advanced": _not_advanced,
    "bound off by one": _bound,
    "test left out": _untested,
    "clamp left out": _unclamped,
    "position off by one": _position,
    "wrong index": _index,
    "indices swapped": _swapped,
    "factor left out": _factor,
    "wrong sign": _sign,
    "term left out": _term,
    "sum or maximum left out": _sum,
    "reduction left out": _reduction,
    "initialization left out": _initialization,
    "option left out": _option_left_out,
    "option applied twice": _option_twice,
}
