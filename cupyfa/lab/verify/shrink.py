"""Shrinks a failing case to smaller sizes and default options, as long as it still fails."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from cupyfa.lab.verify import transforms
from cupyfa.lab.verify.case import Case
from cupyfa.problem.lengths import Lengths
from cupyfa.problem.optional_inputs import DLSE, OWN_ARRAYS, ROW_MAX, SEEDS
from cupyfa.problem.problem import Problem


def shrunk(
    case: Case, fails: Callable[[Case], bool], *, tries: int = 300, seconds: float = 60.0
) -> Case:
    """Returns the simplest failing case found within `tries` cases and about `seconds`."""
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
    """Yields cases with one field simplified, starting with fields that need no recompilation."""
    plain_values = {"tokens": "cached", "layout": "bhsd", "values": "normal", "seed": 0}
    for name, plain in plain_values.items():
        yield replace(case, **{name: plain})  # type: ignore[arg-type]
    for problem in _smaller(case.problem):
        yield replace(case, problem=problem)


def _smaller(p: Problem) -> Iterator[Problem]:
    yield from _of_fewer_rows(p) if p.lengths else ()
    if p.pages:
        yield from (p.in_pages(None), p.in_pages(16))
    yield from (transforms.resize(p, batch=batch) for batch in _sizes(p.batch))
    for kv_heads in _sizes(p.kv_heads):
        yield transforms.resize(p, heads=kv_heads * p.group, kv_heads=kv_heads)
    yield from (transforms.resize(p, heads=p.kv_heads * group) for group in _sizes(p.group))
    if not p.lengths:
        yield from (transforms.resize(p, M=M) for M in _sizes(p.M))
        yield from (transforms.resize(p, N=N) for N in _sizes(p.N))
    able = (*OWN_ARRAYS, DLSE, ROW_MAX, *SEEDS)
    yield from (transforms.leave_out(p, x.name) for x in p.operands if x.name in able)
    changed = [name for name in p.options.changed if name not in SEEDS[:1]]
    yield from (transforms.leave_out(p, name) for name in changed)
    if p.offset:
        yield p.with_options(offset=0)
    if p.block_mask:
        yield p.in_blocks(False)
    yield from (transforms.differentiate(p, [x for x in p.wrt if x != name]) for name in p.wrt)
    for side, size in enumerate(p.window):  # remove a side's limit, then reduce it
        for smaller in (None, 0, *_sizes(size)) if size is not None else ():
            window = [smaller if at == side else x for at, x in enumerate(p.window)]
            is_left = p.causal or window != [None, None]
            yield p.with_options(window=window) if is_left else transforms.leave_out(p, "window")
    if p.dv == p.d:
        yield from (replace(p, d=d, dv=d) for d in _sizes(p.d))
        return
    if p.d > 0:
        yield replace(p, dv=p.d)
    yield from (replace(p, d=d) for d in _sizes(p.d))
    yield from (replace(p, dv=dv) for dv in _sizes(p.dv))


def _of_fewer_rows(p: Problem) -> Iterator[Problem]:
    """Yields a dense problem, then ragged problems with fewer sequences, rows or padding rows."""
    assert p.lengths is not None
    q, k = p.lengths
    yield transforms.make_dense(p)
    count = len(q.rows)
    for some in (*({i} for i in range(count)), *({*range(count)} - {i} for i in range(count))):
        if 0 < len(some) < count:
            yield transforms.make_ragged(p, tuple(x.only(some) for x in p.lengths))
    for side, one in enumerate(p.lengths):

        def like(other: Lengths, side: int = side) -> Problem:
            return transforms.make_ragged(p, (other, k) if side == 0 else (q, other))

        if one.before or one.after:
            yield like(replace(one, before=0, after=0))
        if one.used is not None:
            yield like(replace(one, used=None))
            yield like(replace(one, rows=one.used))
        for i, rows in enumerate(one.counts):
            yield from (like(one.with_rows(i, n)) for n in (0, *_sizes(rows)) if n < rows)


def _sizes(size: int) -> list[int]:
    """Returns smaller sizes, ascending; faults often depend on a size modulo the tile size."""
    remainders = {size % 2**power for power in range(1, 11)}
    parts = {1, 2, size // 2, size - size // 4, size - 1}
    return sorted(x for x in remainders | parts if 0 < x < size)
