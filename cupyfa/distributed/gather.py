"""The schedule "gather": each rank all-gathers the keys of some heads and computes its own rows.

The keys of the next heads arrive while a step computes. Results are the same as in one call on the
whole arrays. dk and dv are summed over the ranks by a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cupyfa.distributed.communicator import Pending
from cupyfa.distributed.job import Job
from cupyfa.distributed.packing import add_to, copy_to, new, packed, unpacked

Step = tuple[slice, slice, Any, Any]  # key heads, query heads, k and v


def forward(job: Job, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Computes out and lse of this rank's rows."""
    out = new(q, (*q.shape[:3], v.shape[3]), job.results)
    lse = new(q, q.shape[:3], job.sums)
    for _, heads, ks, vs in _steps(job, k, v, job.heads_of_rows()):
        for part in job.rows:
            at = (slice(None), heads, part.at)
            found, lse[at] = job.attend(q[at], ks, vs, part.rows.start, 0)
            copy_to(out[at], found)
    return out, lse


def backward(job: Job, of_rows: Sequence[Any], k: Any, v: Any) -> tuple[Any, ...]:
    """Computes dq of this rank's rows, and dk and dv of its keys."""
    dq, dk, dv = (new(x, x.shape, job.results) for x in (of_rows[0], k, v))
    arriving: list[tuple[slice, Pending]] = []

    def add_up() -> None:
        """Waits for a step's sums over all ranks and stores them in dk and dv."""
        kv_heads, total = arriving.pop()
        found = unpacked(total()[: k.shape[2]], k.shape[3], v.shape[3])
        dk[:, kv_heads], dv[:, kv_heads] = found

    for kv_heads, heads, ks, vs in _steps(job, k, v, job.heads_of_keys()):
        columns = ks.shape[3] + vs.shape[3]
        total = np.zeros_like(ks, job.sums, "C", shape=(ks.shape[2], *ks.shape[:2], columns))
        for part in job.rows:
            at, keys = (slice(None), heads, part.at), job.seen(part.rows)
            seen = slice(keys.start, keys.stop)
            rows = [x[at] for x in of_rows]
            first = part.rows.start, keys.start
            found, *of_keys = job.differentiate(rows, ks[:, :, seen], vs[:, :, seen], *first)
            copy_to(dq[at], found)
            add_to(total[seen], *of_keys)
        if arriving:
            add_up()
        arriving.append((kv_heads, _sent(job, total)))
    if arriving:
        add_up()
    return dq, dk, dv


def _steps(job: Job, k: Any, v: Any, most: int) -> Iterator[Step]:
    """Yields all keys of up to ``most`` heads per step; the next step's keys are in flight."""
    shards, arriving = job.k_shards, None
    for kv_heads, heads in (*job.steps_of_heads(most), (None, None)):
        before = arriving
        if kv_heads is not None:
            message = packed(k[:, kv_heads], v[:, kv_heads], room=shards.most)
            arriving = kv_heads, heads, job.group.gather(message)
        if before is not None:
            yield *before[:2], *_whole(job, before[2](), k.shape[3], v.shape[3])


def _whole(job: Job, gathered: Any, d: int, dv: int) -> list[Any]:
    """Unpacks the messages from all ranks into k and v [batch, heads, N, columns]."""
    ranks, most, *others = gathered.shape
    return unpacked(job.rows_of_messages(gathered.reshape(ranks * most, *others)), d, dv)


def _sent(job: Job, total: Any) -> Pending:
    """Starts the reduce-scatter of dk and dv, which hold the contributions of this rank's rows."""
    shards = job.k_shards
    parts = job.messages_of_rows(total).reshape(job.group.ranks, shards.most, *total.shape[1:])
    for part, size in zip(parts, shards.sizes):
        if size < shards.most:
            part[size:] = 0  # uninitialized padding might overflow in the sum
    return job.group.reduce_scatter(parts)
