"""The schedule "ring" (ring attention): keys and values are passed from rank to rank.

In each step a rank attends to the keys that it holds, while the keys of the next step arrive. The
results of all steps are merged by lse. In the backward pass the gradients dk and dv travel one step
behind their keys, and return to their rank at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from cupyfa.call.call import Call
from cupyfa.distributed.job import Job
from cupyfa.distributed.packing import copy_to, new, packed, unpacked
from cupyfa.distributed.shards import Part

Result = tuple[Any, Any]  # out and lse
# The place of some keys in [batch, heads, keys, columns], and the calls of the rows that see them:
# the index in ``job.rows`` with the call.
Calls = tuple[tuple[slice, ...], Sequence[tuple[int, Call]]]

# Largest number of partial results per row range before they are merged. Each merge rounds `out`.
MOST_HELD = 8
# Names of indices that have the same value in a rank's calls as in the whole problem.
KNOWN = frozenset({"batch"})
# "auto" chooses no kernel with persistent blocks. NCCL kernels that wait for another rank occupy
# multiprocessors, and persistent blocks would queue behind them.
PERSISTENT = False


class Step(NamedTuple):
    """A step: the rank whose keys this rank holds, and the calls on each part of these keys."""

    owner: int
    calls: Sequence[Calls]


def prepare(job: Job) -> list[Step]:
    """Prepares the steps of ``forward`` or ``backward``; a rank begins with its own keys."""
    owners = [(job.group.rank - step) % job.group.ranks for step in range(job.group.ranks)]
    return [Step(x, [_calls(job, keys) for keys in job.k_shards.parts(x)]) for x in owners]


def _calls(job: Job, keys: Part) -> Calls:
    seeing = [(i, x.rows) for i, x in enumerate(job.rows) if job.sees(x.rows, keys.rows)]
    return np.s_[:, :, keys.at], [(i, job.call_of(x.start, keys.rows.start)) for i, x in seeing]


def forward(job: Job, steps: Sequence[Step], q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Computes out and lse of this rank's rows."""
    rows = [q[:, :, x.at] for x in job.rows]
    found: list[list[Result]] = [[] for _ in rows]
    now = packed(k, v)
    for step in steps:
        ks, vs = unpacked(now, k.shape[3], v.shape[3])
        arriving = None if step is steps[-1] else _passed_on(job, {step.owner: now})
        for at, calls in step.calls:
            for i, call in calls:
                found[i].append(job.run(call, rows[i], ks[at], vs[at]))
        for parts in found:
            if len(parts) > MOST_HELD:
                parts[:] = [_merged(job, parts)]
        if arriving is not None:
            (now,) = arriving()
    return _results(job, q, v, found)


def backward(
    job: Job, steps: Sequence[Step], of_rows: Sequence[Any], k: Any, v: Any
) -> tuple[Any, ...]:
    """Computes dq of this rank's rows, and dk and dv of its keys."""
    rows = [[x[:, :, part.at] for x in of_rows] for part in job.rows]
    sums: list[Any] = [None] * len(rows)  # accumulated dq of each part of the rows
    now, total = packed(k, v), None  # this step's k and v, and the previous step's dk and dv
    columns, ranks = (k.shape[3], v.shape[3]), job.group.ranks
    for step in steps:
        ks, vs = unpacked(now, *columns)
        travelling = {} if step is steps[-1] else {step.owner: now}
        if total is not None:
            travelling[(step.owner + 1) % ranks] = total
        arriving = _passed_on(job, travelling)
        made = new(now, now.shape, job.sums)
        dks, dvs = unpacked(made, *columns)
        for at, calls in step.calls:
            if not calls:
                dks[at], dvs[at] = 0, 0
            for n, (i, call) in enumerate(calls):
                q, dout, *others = rows[i]
                of_q, of_k, of_v = job.run(call, dout, q, ks[at], vs[at], *others)
                sums[i] = _added(job, sums[i], of_q)
                if n:
                    dks[at] += of_k
                    dvs[at] += of_v
                else:
                    copy_to(dks[at], of_k)
                    copy_to(dvs[at], of_v)
        arrived = arriving()
        if total is not None:
            made += arrived.pop()
        total, now = made, arrived[0] if arrived else now
    if ranks > 1:
        (total,) = _passed_on(job, {(job.group.rank + 1) % ranks: total})()
    dq, dk, dv = (new(x, x.shape, job.results) for x in (of_rows[0], k, v))
    for part, x in zip(job.rows, sums):
        if x is not None:
            copy_to(dq[:, :, part.at], x)
        else:  # these rows see no key
            dq[:, :, part.at] = 0
    for gradient, x in zip((dk, dv), unpacked(total, *columns)):
        copy_to(gradient, x)
    return dq, dk, dv


def _added(job: Job, total: Any, x: Any) -> Any:
    """Adds ``x`` to ``total`` in the dtype of sums; returns the first ``x`` unchanged."""
    if total is None:
        return x
    total = total.astype(job.sums, copy=False)
    total += x
    return total


def _passed_on(job: Job, arrays: Mapping[int, Any]) -> Callable[[], list[Any]]:
    """Starts to send arrays to the next rank and to receive arrays from the previous rank.

    arrays: by the rank that owns their keys. The returned function waits for the received arrays:
    for an array of keys of rank r, an array of keys of rank r - 1.
    """
    group, sizes = job.group, job.k_shards.sizes
    after, before = (group.rank + 1) % group.ranks, (group.rank - 1) % group.ranks
    rooms = [new(x, (sizes[owner - 1], *x.shape[1:])) for owner, x in arrays.items()]
    arrived = group.exchange([*zip(arrays.values(), repeat(after))], [*zip(rooms, repeat(before))])

    def wait() -> list[Any]:
        arrived()
        return rooms

    return wait


def _merged(job: Job, parts: Sequence[Result]) -> Result:
    return job.merge([(out.astype(job.sums, copy=False), lse) for out, lse in parts])


def _results(job: Job, q: Any, v: Any, found: Sequence[Sequence[Result]]) -> Result:
    """Merges each row's results into out and lse; rows without keys get 0 and -infinity."""
    out = new(q, (*q.shape[:3], v.shape[3]), job.results)
    lse = new(q, q.shape[:3], job.sums)
    for rows, parts in zip(job.rows, found):
        at = (slice(None), slice(None), rows.at)
        if not parts:
            out[at], lse[at] = 0, -float("inf")
            continue
        is_even = len({x.dtype for x, _ in parts}) == 1
        total, lse[at] = job.merge(parts) if is_even else _merged(job, parts)
        copy_to(out[at], total)
    return out, lse
