"""A smaller case that fails in the same way: sizes and options go, as far as the fault stays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from cupyfa.problem import NO_WINDOW, Problem
from cupyfa.verify.case import Case


def shrunk(
    case: Case, fails: Callable[[Case], bool], *, tries: int = 300, seconds: float = 60.0
) -> Case:
    """The simplest case found that still fails, in at most so many tries and about so long.

    Whatever is simpler and fails is taken, and simplified further.
    """
    end = time.monotonic() + seconds
    tried = {case}
    simpler = _simpler(case)
    while (candidate := next(simpler, None)) and len(tried) <= tries and time.monotonic() < end:
        if candidate in tried:
            continue
        tried.add(candidate)
        if fails(candidate):
            case, simpler = candidate, _simpler(candidate)
    return case


def _simpler(case: Case) -> Iterator[Case]:
    """Cases that are simpler in one thing; sizes that need no other program come first."""
    plain: dict[str, Any] = {"layout": "bhsd", "values": "normal", "seed": 0}
    for name in plain:
        if getattr(case, name) != plain[name]:
            yield replace(case, **{name: plain[name]})
    for problem in _smaller(case.problem):
        yield replace(case, problem=problem)


def _smaller(p: Problem) -> Iterator[Problem]:
    for batch in _sizes(p.batch):
        yield _changed(p, batch=batch)
    for kv_heads in _sizes(p.kv_heads):
        yield _changed(p, heads=kv_heads * p.group, kv_heads=kv_heads)
    for group in _sizes(p.group):
        yield _changed(p, heads=p.kv_heads * group)
    for name in ("M", "N"):
        for size in _sizes(getattr(p, name)):
            yield _changed(p, **{name: size})
    if p.causal:
        yield _changed(p, causal=None)
    yield from _smaller_windows(p)
    if p.scale != _usual_scale(p.d):
        yield _changed(p, scale=_usual_scale(p.d))
    if p.dv == p.d:
        for d in _sizes(p.d):
            yield _changed(p, d=d, dv=d)
        return
    if p.d > 0:
        yield _changed(p, dv=p.d)
    for name in ("d", "dv"):
        for size in _sizes(getattr(p, name)):
            yield _changed(p, **{name: size})


def _smaller_windows(p: Problem) -> Iterator[Problem]:
    """No window, no limit on one side, then smaller ones."""
    if p.window == NO_WINDOW:
        return
    yield _changed(p, window=NO_WINDOW)
    left, right = p.window
    if left is not None:
        yield from (_changed(p, window=(x, right)) for x in (None, 0, *_sizes(left)) if x != left)
    if right is not None:
        yield from (_changed(p, window=(left, x)) for x in (None, 0, *_sizes(right)) if x != right)


def _changed(p: Problem, **changes: Any) -> Problem:
    """The problem with other sizes; a scale that is the usual one stays the usual one."""
    other = replace(p, **changes)
    return replace(other, scale=_usual_scale(other.d)) if p.scale == _usual_scale(p.d) else other


def _usual_scale(d: int) -> float:
    return Problem.of_sizes(M=1, d=d).scale


def _sizes(size: int) -> list[int]:
    """Smaller sizes, the smallest first.

    Faults often depend on what a division by a tile's size leaves, so all such rests are there.
    """
    rests = {size % 2**power for power in range(1, 11)}
    parts = {1, 2, size // 2, size - size // 4, size - 1}
    return sorted(x for x in rests | parts if 0 < x < size)
