"""Finds indices in expressions whose values depend on where a part of the problem begins."""

from __future__ import annotations

import ast

from cupyfa.problem.options import AttentionOptions
from cupyfa.problem.problem import TEXTS
from cupyfa.score.expressions import POSITIONS

_DISTANCE = {"position", "key"}  # position - key does not depend on where a part begins


def places(options: AttentionOptions) -> dict[str, str]:
    """Maps the names of indices that start at 0 in each part to the options that use them.

    ``position - key``, or a comparison of the two, has the same value in the part and in the whole
    problem, so it does not count as a use of these indices.
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
