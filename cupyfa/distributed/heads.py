"""The schedule "heads": every rank computes some heads for the whole sequence.

All ranks exchange with all: rows of all heads become all rows of some heads, and results go back.
No result is a sum over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupyfa.distributed.communicator import Message
from cupyfa.distributed.job import Job
from cupyfa.distributed.packing import copy_to, new, packed, unpacked
from cupyfa.distributed.shards import Shards

Divided = tuple[Any, Shards]  # an array [batch, heads, rows, columns], and how rows are divided


def forward(job: Job, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """out and lse of this rank's rows."""
    q, k, v = _to_heads(job, *_of_rows(job, q), *_of_keys(job, k, v))
    out, lse = job.attend(q, k, v, 0, 0)
    out, lse = _to_rows(job, *_of_rows(job, out, lse[..., None]))
    return out, lse[..., 0]


def backward(job: Job, of_rows: Sequence[Any], k: Any, v: Any) -> tuple[Any, ...]:
    """dq, dk and dv of this rank's rows and keys."""
    given = [x if x.ndim == 4 else x[..., None] for x in of_rows]
    *whole, k, v = _to_heads(job, *_of_rows(job, *given), *_of_keys(job, k, v))
    rows = [x if like.ndim == 4 else x[..., 0] for x, like in zip(whole, of_rows)]
    dq, dk, dv = job.differentiate(rows, k, v, 0, 0)
    return tuple(_to_rows(job, *_of_rows(job, dq), *_of_keys(job, dk, dv)))


def _of_rows(job: Job, *arrays: Any) -> list[Divided]:
    return [(x, job.q_shards) for x in arrays]


def _of_keys(job: Job, *arrays: Any) -> list[Divided]:
    return [(x, job.k_shards) for x in arrays]


def _to_heads(job: Job, *arrays: Divided) -> list[Any]:
    """All rows of this rank's heads, of arrays that have this rank's rows of all heads."""
    group, found = job.group, []
    sends: list[Message] = []
    recvs: list[Message] = []
    for x, shards in arrays:
        batch, heads, _, columns = x.shape
        count = heads // group.ranks
        whole = new(x, (shards.n, batch, count, columns))
        for s in (group.rank, *group.others):
            part = packed(x[:, s * count : (s + 1) * count])
            room = whole[shards.starts[s] : shards.starts[s + 1]]
            _add(job, sends, recvs, part, room, s)
        found.append((whole, shards, columns))
    group.exchange(sends, recvs)()
    return [unpacked(job.taken(x, shards, "places"), n)[0] for x, shards, n in found]


def _to_rows(job: Job, *arrays: Divided) -> list[Any]:
    """This rank's rows of all heads, of arrays that have all rows of this rank's heads."""
    group, found = job.group, []
    sends: list[Message] = []
    recvs: list[Message] = []
    for x, shards in arrays:
        by_rank = job.taken(packed(x), shards, "by_rank")
        own = new(x, (group.ranks, shards.sizes[group.rank], *by_rank.shape[1:]))
        for s in (group.rank, *group.others):
            part = by_rank[shards.starts[s] : shards.starts[s + 1]]
            _add(job, sends, recvs, part, own[s], s)
        found.append(own)
    group.exchange(sends, recvs)()
    return [_joined(x) for x in found]


def _add(
    job: Job, sends: list[Message], recvs: list[Message], part: Any, room: Any, rank: int
) -> None:
    """Adds what goes to a rank, and the room for what comes from it; this rank's is copied."""
    if rank == job.group.rank:
        room[...] = part
    else:
        sends.append((part, rank))
        recvs.append((room, rank))


def _joined(x: Any) -> Any:
    """[ranks, rows, batch, heads of a rank, columns] as [batch, heads, rows, columns]."""
    ranks, rows, batch, heads, columns = x.shape
    made = new(x, (batch, ranks, heads, rows, columns))
    copy_to(made, x.transpose(2, 0, 3, 1, 4))
    return made.reshape(batch, ranks * heads, rows, columns)
