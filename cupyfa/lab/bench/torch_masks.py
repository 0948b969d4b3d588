"""Converts a problem's masks, biases and expressions to arguments of torch's attention functions.

scaled_dot_product_attention accepts a single mask array; flex_attention accepts functions of a
score and its indices.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import reduce
from operator import attrgetter
from typing import Any

from cupyfa.errors import Unsupported
from cupyfa.problem.optional_inputs import BIAS, DLSE, MASK
from cupyfa.problem.options import NO_WINDOW
from cupyfa.problem.problem import Problem
from cupyfa.score.expressions import Expression
from cupyfa.score.functions import FUNCTIONS

_PLACE = ("batch", "head", "query", "key")


def one_array(torch: Any, p: Problem, arrays: Mapping[str, Any], device: Any) -> Any:
    """Returns the bias and all masks as attn_mask: a float bias, or booleans, True if visible.

    Returns None if the problem has at most a causal mask. Raises Unsupported for any other
    modification of scores.
    """
    if others := [x.name for x in p.operands if x.name not in (BIAS, MASK)]:
        raise Unsupported(f"this implementation does not support {', '.join(others)}")
    bias, mask = arrays.get(f"mods.{BIAS}"), arrays.get(f"mods.{MASK}")
    if p.window != NO_WINDOW or (p.causal and p.operands):
        seen = torch.as_tensor(p.visible(), device=device)
        mask = seen if mask is None else mask & seen
    if bias is not None:
        bias = bias.to(getattr(torch, p.dtype.name))
    if bias is None or mask is None:
        return bias if mask is None else mask
    return bias.masked_fill(~mask, float("-inf"))


def flex(
    torch: Any, module: Any, p: Problem, arrays: Mapping[str, Any], device: Any
) -> dict[str, Any]:
    """Returns the arguments of flex_attention for a problem's expressions and mask.

    A sink is not among them, since flex_attention has none.
    """
    known = {name.removeprefix("mods."): x for name, x in arrays.items()}
    if any(x.name == DLSE for x in p.modifiers.arrays):
        raise Unsupported(f"flex_attention does not support {DLSE}")
    known |= p.modifiers.numbers | {"queries": p.M, "keys": p.N, "first": p.first_position}
    scores = [_function(torch, x, ("score", *_PLACE), known) for x in p.modifiers.score]
    masks = [_function(torch, x, _PLACE, known) for x in p.modifiers.mask]
    masks += _reach(p)
    given: dict[str, Any] = {}
    if scores:
        given["score_mod"] = _in_turn(scores)
    if masks:
        own = {x for text in p.modifiers.mask for x in text.positions}
        given["block_mask"] = module.create_block_mask(
            _all_of(masks),
            p.batch if "batch" in own else None,
            p.heads if "head" in own else None,
            *(p.M, p.N),
            device=device,
        )
    return given


def _reach(p: Problem) -> list[Callable[..., Any]]:
    """Returns the causal mask and the window as functions of batch, head, query and key."""
    right, left = p.causal_offset, p.window_offset
    found: list[Callable[..., Any]] = []
    if p.right is not None:
        found.append(lambda batch, head, query, key: key <= query + right)
    if p.left is not None:
        found.append(lambda batch, head, query, key: key >= query + left)
    return found


def _in_turn(texts: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    def score_mod(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        for text in texts:
            score = text(score, batch, head, query, key)
        return score

    return score_mod


def _all_of(masks: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    def mask_mod(batch: Any, head: Any, query: Any, key: Any) -> Any:
        seen = masks[0](batch, head, query, key)
        for mask in masks[1:]:
            seen = seen & mask(batch, head, query, key)
        return seen

    return mask_mod


def _function(
    torch: Any, text: Expression, names: Sequence[str], known: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compiles an expression to a function of ``names``; all other names are closure variables.

    torch.compile can trace closure variables.
    """
    body = _Selecting().visit(deepcopy(text.tree))
    if "position" in text.positions:
        body = _Shifted().visit(body)
    names_around = {**_functions(torch), **known}
    inner = ast.Lambda(_arguments(names), body)
    outer = ast.fix_missing_locations(ast.Expression(ast.Lambda(_arguments(names_around), inner)))
    return eval(compile(outer, f"<{text.option}>", "eval"))(*names_around.values())


def _arguments(names: Sequence[str] | Mapping[str, Any]) -> ast.arguments:
    return ast.arguments([], [ast.arg(x) for x in names], None, [], [], None, [])


def _functions(torch: Any) -> dict[str, Callable[..., Any]]:
    own = {
        "min": lambda a, b: torch.where(a < b, a, b),
        "max": lambda a, b: torch.where(a > b, a, b),
    }
    return {
        name: own.get(name) or attrgetter(x.torch or name)(torch) for name, x in FUNCTIONS.items()
    }


class _Selecting(ast.NodeTransformer):
    """Rewrites expressions for tensors, which have no truth value.

    Replaces ``and``, ``or`` and ``not`` with &, | and ~, conditional expressions with ``where``,
    and chained comparisons with pairwise comparisons joined by &.
    """

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        sign = ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr()
        return reduce(lambda a, b: ast.BinOp(a, sign, b), node.values)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        return ast.UnaryOp(ast.Invert(), node.operand) if isinstance(node.op, ast.Not) else node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        return ast.Call(ast.Name("where", ast.Load()), [node.test, node.body, node.orelse], [])

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        sides = [node.left, *node.comparators]
        pairs = [ast.Compare(a, [op], [b]) for a, op, b in zip(sides, node.ops, sides[1:])]
        return reduce(lambda a, b: ast.BinOp(a, ast.BitAnd(), b), pairs)  # type: ignore[arg-type, return-value]


class _Shifted(ast.NodeTransformer):
    """Replaces the name ``position`` with ``query + first``."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id != "position":
            return node
        query, first = (ast.Name(x, ast.Load()) for x in ("query", "first"))
        return ast.BinOp(query, ast.Add(), first)
