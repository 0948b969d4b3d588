"""Syntax trees of CUDA C++ files, by tree-sitter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# Nodes with code that only the compiler evaluates, and nodes that the grammar does not know.
_NOT_RUN = {
    *("static_assert_declaration", "template_argument_list", "template_parameter_list"),
    *(
        "type_descriptor",
        "sizeof_expression",
        "alignof_expression",
        "decltype",
        "alias_declaration",
    ),
    *("parameter_list", "launch_bounds", "attribute_declaration", "enumerator_list", "comment"),
    *("array_declarator", "requires_clause", "ERROR"),
}
_DECLARATIONS = ("declaration", "field_declaration")
_EXPRESSIONS = ("_expression", "identifier", "_literal", "true", "false")


class MissingParser(ImportError):
    """tree-sitter is not installed."""


@cache
def _parser() -> Parser:
    try:
        import tree_sitter_cuda
        from tree_sitter import Language, Parser
    except ImportError:
        raise MissingParser(
            "mutants need tree-sitter and tree-sitter-cuda, which are not installed; "
            "pip install 'cupyfa[compiler]'"
        ) from None
    return Parser(Language(tree_sitter_cuda.language()))


def parsed(code: bytes) -> Node:
    """Returns the root of the syntax tree. Raises MissingParser without tree-sitter."""
    return _parser().parse(code).root_node


def executed(node: Node) -> Iterator[Node]:
    """Yields a node and its descendants in order, except code that computes nothing at run time.

    This is code that only the compiler evaluates, and calls that record timelines.
    """
    yield node
    for child in node.named_children:
        if not (child.type in _NOT_RUN or _is_constexpr(child) or _records(child)):
            yield from executed(child)


def _records(node: Node) -> bool:
    field = {"call_expression": "function", "declaration": "type"}.get(node.type)
    return field is not None and text(node.child_by_field_name(field)).startswith("timeline::")


def _is_constexpr(node: Node) -> bool:
    if node.type not in _DECLARATIONS:
        return False
    return any(x.type == "type_qualifier" and text(x) == "constexpr" for x in node.children)


def text(node: Node | None) -> str:
    """Returns the code of a node; "" for None."""
    return node.text.decode() if node is not None and node.text is not None else ""


def words(name: str) -> set[str]:
    """Returns the words of a name in lower case: {"kv", "end"} for kv_end and kvEnd."""
    return {x.lower() for x in _WORD.findall(name)}


def name_of(node: Node | None) -> str:
    """Returns the last name in an expression: f for f(x), g.f(x), n::f<2>(x) and g.f; else ""."""
    while node is not None and not node.type.endswith("identifier"):
        fields = "function", "field", "name"
        node = next((x for x in map(node.child_by_field_name, fields) if x is not None), None)
    if node is not None and node.type == "qualified_identifier":
        return name_of(node.child_by_field_name("name"))
    return text(node)


def arguments_of(call: Node) -> list[Node]:
    found = call.child_by_field_name("arguments")
    return [x for x in found.named_children if x.type != "comment"] if found is not None else []


def called(statement: Node) -> Node | None:
    """Returns the call that an expression statement consists of, or None."""
    if statement.type != "expression_statement" or not statement.named_children:
        return None
    (only, *_) = statement.named_children
    return only if only.type == "call_expression" else None


def is_expression(node: Node) -> bool:
    return node.type.endswith(_EXPRESSIONS)
