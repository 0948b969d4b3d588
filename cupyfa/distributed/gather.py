"""The schedule "gather": each rank all-gathers the keys of some heads and computes its own rows.

The keys of the next heads arrive while a step computes. Results are the same as in one call on the
whole arrays. dk and dv are summed over the ranks by a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from cupyfa.call.call import Call
from cupyfa.distributed.communicator import Pending
from cupyfa.distributed.job import Job
from cupyfa.distributed.packing import copy_to, new, packed, unpacked

# Names of indices that have the same value in a rank's calls as in the whole problem.
KNOWN = frozenset({"batch", "position", "key", "keys"})
PERSISTENT = True  # whether "auto" may choose a kernel with persistent blocks

Heads = tuple[slice, slice]  # key heads, and the query heads that share them


class Steps(NamedTuple):
    """The heads of each step, and the calls of every step.

    calls: for each part of this rank's rows, its call, its rows, and the keys that the call reads.
    """

    heads: Sequence[Heads]
    calls: Sequence[tuple[Call, slice, slice]]


def prepare(job: Job) -> Steps:
    """Prepares the steps of ``forward`` or ``backward``."""
    is_forward = job.call.operation == "forward"
    heads = job.steps_of_heads(job.heads_of_rows() if is_forward else job.heads_of_keys())
    calls = []
    for part in job.rows:
        keys = range(job.problem.N) if is_forward else job.seen(part.rows)
        call = job.call_of(part.rows.start, keys.start)
        calls.append((call, part.at, slice(keys.start, keys.stop)))
    return Steps([*heads], calls)


def forward(job: Job, steps: Steps, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Computes out and lse of this rank's rows."""
    out = new(q, (*q.shape[:3], v.shape[3]), job.results)
    lse = new(q, q.shape[:3], job.sums)
    for _, heads, ks, vs in _steps(job, steps.heads, k, v):
        for call, rows, _ in steps.calls:
            at = (slice(None), heads, rows)
            found, lse[at] = job.run(call, q[at], ks, vs)
            copy_to(out[at], found)
    return out, lse


def backward(job: Job, steps: Steps, of_rows: Sequence[Any], k: Any, v: Any) -> tuple[Any, ...]:
    """Computes dq of this rank's rows, and dk and dv of its keys."""
    dq, dk, dv = (new(x, x.shape, job.results) for x in (of_rows[0], k, v))
    arriving: list[tuple[slice, Pending]] = []

    def add_up() -> None:
        """Waits for a step's sums over all ranks and stores them in dk and dv."""
        kv_heads, total = arriving.pop()
        found = unpacked(total()[: k.shape[2]], k.shape[3], v.shape[3])
        dk[:, kv_heads], dv[:, kv_heads] = found

    for kv_heads, heads, ks, vs in _steps(job, steps.heads, k, v):
        columns = ks.shape[3] + vs.shape[3]
        total = np.zeros_like(ks, job.sums, "C", shape=(ks.shape[2], *ks.shape[:2], columns))
        for call, rows, seen in steps.calls:
            at = (slice(None), heads, rows)
            q, dout, *others = (x[at] for x in of_rows)
            keys = ks[:, :, seen], vs[:, :, seen]
            found, *of_keys = job.run(call, dout, q, *keys, *others)
            copy_to(dq[at], found)
            for sums, x in zip(unpacked(total[seen], k.shape[3], v.shape[3]), of_keys):
                sums += x
        if arriving:
            add_up()
        arriving.append((kv_heads, _sent(job, total)))
    if arriving:
        add_up()
    return dq, dk, dv


def _steps(
    job: Job, steps: Sequence[Heads], k: Any, v: Any
) -> Iterator[tuple[slice, slice, Any, Any]]:
    """Yields the heads, keys and values of each step; the next step's are in transfer."""
    shards, arriving = job.k_shards, None
    for kv_heads, heads in (*steps, (None, None)):
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
