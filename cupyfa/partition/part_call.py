"""Derives the options, offset and kernel of a call on some rows and keys of a problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cupyfa.call.call import Tiles
from cupyfa.call.keywords import read_tiles
from cupyfa.ladder import lookup
from cupyfa.ladder.kernel import Kernel
from cupyfa.planner import choose_kernel as planning
from cupyfa.planner.plan import Limits
from cupyfa.problem.options import AttentionOptions, read_flag
from cupyfa.problem.problem import Problem, can_give


def options_of_parts(p: Problem) -> AttentionOptions:
    """Returns the options that all parts share; each part adds its offset.

    A "top-left" mask becomes a "bottom-right" one, because offsets account for the difference.
    """
    given = p.options
    return replace(given, causal="bottom-right" if given.causal else None, offset=None)


def unrounded(options: AttentionOptions, p: Problem, kernel: str | Kernel) -> AttentionOptions:
    """Requests float32 results of 16-bit inputs, if the kernel supports them.

    The parts' results are then rounded only once, after they are merged or added.
    """
    record = kernel if isinstance(kernel, Kernel) else lookup.kernel(kernel)
    is_able = can_give("float32", p.dtype) and "out_dtype" in record.features
    return replace(options, out_dtype="float32") if is_able else options


def offset_of_part(p: Problem, first_row: int, first_key: int) -> int | None:
    """Returns the position of a part's first query among the part's keys.

    Returns None if no option of the call depends on query positions.
    """
    if not (p.is_masked or p.reads_position):
        return None
    return p.first_position + first_row - first_key


def split_passes(
    given: Mapping[str, Any],
) -> tuple[bool, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Splits arguments into return_lse, each pass's kernel choice, and the other arguments."""
    others = dict(given)
    return_lse = read_flag("return_lse", others.pop("return_lse", False))
    forward = {"kernel": others.pop("kernel", "auto"), "tiles": others.pop("tiles", None)}
    backward = {
        "kernel": others.pop("backward_kernel", "auto"),
        "tiles": others.pop("backward_tiles", None),
        "deterministic": read_flag("deterministic", others.pop("deterministic", False)),
    }
    return return_lse, forward, backward, others


def planned(
    operation: str,
    p: Problem,
    limits: Limits,
    kernel: str | Kernel,
    tiles: Tiles | None,
    **which: bool,
) -> dict[str, Any]:
    """Chooses kernel and constants for the whole problem; returns them as arguments of all parts.

    which: the arguments ``deterministic`` and ``persistent`` of ``select``.
    """
    record = planning.select(kernel, operation, p, limits, **which)
    plan = planning.plan(record, p, limits, **read_tiles(tiles))
    named = kernel if isinstance(kernel, Kernel) else record.name
    return {"kernel": named, "tiles": dict(plan.constants)}
