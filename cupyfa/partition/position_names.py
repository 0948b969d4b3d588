"""Finds the names in expressions whose values depend on where a part of the problem begins."""

from __future__ import annotations

import ast

from cupyfa.problem.options import AttentionOptions
from cupyfa.problem.problem import TEXTS
from cupyfa.score.expressions import POSITIONS

_DISTANCE = {"position", "key"}  # position - key does not depend on where a part begins


def places(options: AttentionOptions) -> dict[str, str]:
    """Returns the names that every part counts from 0, each with the option that uses it.

    ``position - key``, or a comparison of the two, has the same value in the part and in the whole
    problem, so it does not count as a use.
    """
    texts = {name: getattr(options, name) for name in TEXTS}
    found = {x: name for name, text in texts.items() if text for x in _named(text.tree)}
    return {x: found[x] for x in POSITIONS if x in found}


def _named(node: ast.AST) -> set[str]:
    match node:
        case ast.Name(name):
            return {name}
        case ast.BinOp(ast.Name(a), ast.Sub(), ast.Name(b)) | ast.Compare(
            ast.Name(a), comparators=[ast.Name(b)]
        ) if {a, b} == _DISTANCE:
            return set()
    return set().union(*map(_named, ast.iter_child_nodes(node)))
