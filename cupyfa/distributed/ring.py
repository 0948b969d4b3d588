"""The schedule "ring": keys travel from rank to rank, and each computes what its rows see of them.

The keys of the next step arrive while those of this one are computed. Results of steps are merged
by their lse. Gradients of keys follow the keys by one step, and are at home after the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cupyfa.distributed.job import Job
from cupyfa.distributed.packing import new, packed, unpacked
from cupyfa.distributed.shards import Part

Merged = tuple[Any, Any]  # out, in the dtype of sums, and lse


def forward(job: Job, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """out and lse of this rank's rows."""
    merged: dict[int, Merged] = {}  # by the first of the rows that have seen keys
    now, columns = packed(k, v), (k.shape[3], v.shape[3])
    for owner in _owners(job):
        is_last = owner == (job.group.rank + 1) % job.group.ranks
        arriving = None if is_last else _passed_on(job, (now, owner))
        for rows in job.rows:
            parts = [merged[rows.start]] if rows.start in merged else []
            for keys in _seen(job, rows, owner):
                ks, vs = unpacked(now[keys.at], *columns)
                out, lse = job.attend(q[:, :, rows.at], ks, vs, rows.rows.start, keys.rows.start)
                parts.append((out.astype(job.sums, copy=False), lse))
            if parts:
                merged[rows.start] = job.merge(parts)
        if arriving is not None:
            (now,) = arriving()
    return _results(job, q, v, merged)


def backward(job: Job, of_rows: Sequence[Any], k: Any, v: Any) -> tuple[Any, ...]:
    """dq, dk and dv of this rank's rows and keys."""
    dq = new(of_rows[0], of_rows[0].shape, job.sums)
    dq[...] = 0
    now, total = packed(k, v), None  # keys, and the gradients of those of the step before
    columns, ranks = (k.shape[3], v.shape[3]), job.group.ranks
    for owner in _owners(job):
        travelling = [] if owner == (job.group.rank + 1) % ranks else [(now, owner)]
        if total is not None:
            travelling.append((total, (owner + 1) % ranks))
        arriving = _passed_on(job, *travelling)
        made = new(now, now.shape, job.sums)
        made[...] = 0
        for rows in job.rows:
            own = [x[:, :, rows.at] for x in of_rows]
            for keys in _seen(job, rows, owner):
                ks, vs = unpacked(now[keys.at], *columns)
                first = rows.rows.start, keys.rows.start
                of_q, *of_keys = job.differentiate(own, ks, vs, *first)
                dq[:, :, rows.at] += of_q.astype(job.sums, copy=False)
                made[keys.at] += packed(*of_keys, dtype=job.sums)
        arrived = arriving()
        if total is not None:
            made += arrived.pop()
        total, now = made, arrived[0] if arrived else now
    if ranks > 1:
        (total,) = _passed_on(job, (total, (job.group.rank + 1) % ranks))()
    dk, dv = unpacked(total, *columns)
    return dq.astype(k.dtype), dk.astype(k.dtype, order="C"), dv.astype(k.dtype, order="C")


def _owners(job: Job) -> Iterator[int]:
    """The rank whose keys this one has in each step, beginning with its own."""
    return ((job.group.rank - step) % job.group.ranks for step in range(job.group.ranks))


def _seen(job: Job, rows: Part, owner: int) -> list[Part]:
    """The keys of a rank that some rows see any of."""
    return [x for x in job.k_shards.parts(owner) if job.sees(rows.rows, x.rows)]


def _passed_on(job: Job, *arrays: tuple[Any, int]) -> Callable[[], list[Any]]:
    """Starts to send arrays to the next rank; waiting gives those of the rank before.

    Each comes with the rank whose keys it belongs to: what arrives is of the rank before that one.
    """
    group, sizes = job.group, job.k_shards.sizes
    sends = [(x, (group.rank + 1) % group.ranks) for x, _ in arrays]
    rooms = [new(x, (sizes[owner - 1], *x.shape[1:])) for x, owner in arrays]
    arrived = group.exchange(sends, [(x, (group.rank - 1) % group.ranks) for x in rooms])

    def wait() -> list[Any]:
        arrived()
        return rooms

    return wait


def _results(job: Job, q: Any, v: Any, merged: dict[int, Merged]) -> tuple[Any, Any]:
    """out and lse; rows that have seen no key have 0 and -infinity."""
    out = new(q, (*q.shape[:3], v.shape[3]))
    lse = new(q, q.shape[:3], job.sums)
    for rows in job.rows:
        out[:, :, rows.at], lse[:, :, rows.at] = merged.get(rows.start, (0, -float("inf")))
    return out, lse
