"""Shrinks a case that fails: smaller sizes and default options, while the failure stays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from cupyfa.options import OPTIONS
from cupyfa.problem import Problem
from cupyfa.verify.case import Case


def shrunk(
    case: Case, fails: Callable[[Case], bool], *, tries: int = 300, seconds: float = 60.0
) -> Case:
    """The simplest failing case that is found within `tries` cases and about `seconds`."""
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
    """Cases with one simpler field, beginning with those that need no other compilation."""
    plain: dict[str, Any] = {"layout": "bhsd", "values": "normal", "seed": 0}
    for name in plain:
        if getattr(case, name) != plain[name]:
            yield replace(case, **{name: plain[name]})
    for problem in _smaller(case.problem):
        yield replace(case, problem=problem)


def _smaller(p: Problem) -> Iterator[Problem]:
    for batch in _sizes(p.batch):
        yield replace(p, batch=batch)
    for kv_heads in _sizes(p.kv_heads):
        yield replace(p, heads=kv_heads * p.group, kv_heads=kv_heads)
    for group in _sizes(p.group):
        yield replace(p, heads=p.kv_heads * group)
    for name in ("M", "N"):
        for size in _sizes(getattr(p, name)):
            yield replace(p, **{name: size})  # type: ignore[arg-type]
    for name in p.options.changed:
        yield p.with_options(**{name: OPTIONS[name].default})
    yield from _smaller_windows(p)
    if p.dv == p.d:
        for d in _sizes(p.d):
            yield replace(p, d=d, dv=d)
        return
    if p.d > 0:
        yield replace(p, dv=p.d)
    for name in ("d", "dv"):
        for size in _sizes(getattr(p, name)):
            yield replace(p, **{name: size})  # type: ignore[arg-type]


def _smaller_windows(p: Problem) -> Iterator[Problem]:
    """No limit on one side of a window, then smaller limits."""
    for side, size in enumerate(p.window):
        for smaller in (None, 0, *_sizes(size)) if size is not None else ():
            if smaller != size:
                window = [smaller if at == side else x for at, x in enumerate(p.window)]
                yield p.with_options(window=window)


def _sizes(size: int) -> list[int]:
    """Smaller sizes, the smallest first; faults often depend on the remainder by a tile's size."""
    remainders = {size % 2**power for power in range(1, 11)}
    parts = {1, 2, size // 2, size - size // 4, size - 1}
    return sorted(x for x in remainders | parts if 0 < x < size)
