"""The schedule "ring" (ring attention): keys and values are passed from rank to rank.

In each step a rank attends to the keys that it holds, while the keys of the next step arrive. The
results of all steps are merged by lse. In the backward pass the gradients dk and dv travel one step
behind their keys, and return to their rank at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cupyfa.distributed.job import Job
from cupyfa.distributed.packing import add_to, copy_to, new, pack, packed, unpacked
from cupyfa.distributed.shards import Part

Result = tuple[Any, Any]  # out and lse

# Largest number of partial results per row range before they are merged. Each merge rounds `out`.
MOST_HELD = 8


def forward(job: Job, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Computes out and lse of this rank's rows."""
    found: dict[int, list[Result]] = {x.start: [] for x in job.rows}  # by index of the first row
    now, columns = packed(k, v), (k.shape[3], v.shape[3])
    for owner in _owners(job):
        is_last = owner == (job.group.rank + 1) % job.group.ranks
        arriving = None if is_last else _passed_on(job, (now, owner))
        for rows in job.rows:
            parts = found[rows.start]
            for keys in _seen(job, rows, owner):
                ks, vs = unpacked(now[keys.at], *columns)
                first = rows.rows.start, keys.rows.start
                parts.append(job.attend(q[:, :, rows.at], ks, vs, *first))
            if len(parts) > MOST_HELD:
                parts[:] = [_merged(job, parts)]
        if arriving is not None:
            (now,) = arriving()
    return _results(job, q, v, found)


def backward(job: Job, of_rows: Sequence[Any], k: Any, v: Any) -> tuple[Any, ...]:
    """Computes dq of this rank's rows, and dk and dv of its keys."""
    sums: dict[int, Any] = {}  # accumulated dq, by index of the first row
    now, total = packed(k, v), None  # this step's k and v, and the previous step's dk and dv
    columns, ranks = (k.shape[3], v.shape[3]), job.group.ranks
    for owner in _owners(job):
        travelling = [] if owner == (job.group.rank + 1) % ranks else [(now, owner)]
        if total is not None:
            travelling.append((total, (owner + 1) % ranks))
        arriving = _passed_on(job, *travelling)
        made, unseen = new(now, now.shape, job.sums), {*job.k_shards.parts(owner)}
        for rows in job.rows:
            own = [x[:, :, rows.at] for x in of_rows]
            for keys in _seen(job, rows, owner):
                ks, vs = unpacked(now[keys.at], *columns)
                first = rows.rows.start, keys.rows.start
                of_q, *of_keys = job.differentiate(own, ks, vs, *first)
                sums[rows.start] = _added(job, sums.get(rows.start), of_q)
                (pack if keys in unseen else add_to)(made[keys.at], *of_keys)
                unseen.discard(keys)
        for keys in unseen:
            made[keys.at] = 0
        arrived = arriving()
        if total is not None:
            made += arrived.pop()
        total, now = made, arrived[0] if arrived else now
    if ranks > 1:
        (total,) = _passed_on(job, (total, (job.group.rank + 1) % ranks))()
    dq, dk, dv = (new(x, x.shape, job.results) for x in (of_rows[0], k, v))
    for rows in job.rows:
        if rows.start in sums:
            copy_to(dq[:, :, rows.at], sums[rows.start])
        else:  # these rows see no key
            dq[:, :, rows.at] = 0
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


def _owners(job: Job) -> Iterator[int]:
    """Yields the rank whose keys this rank holds in each step, starting with itself."""
    return ((job.group.rank - step) % job.group.ranks for step in range(job.group.ranks))


def _seen(job: Job, rows: Part, owner: int) -> list[Part]:
    """Returns the parts of the owner's keys that contain a key visible to these rows."""
    return [x for x in job.k_shards.parts(owner) if job.sees(rows.rows, x.rows)]


def _passed_on(job: Job, *arrays: tuple[Any, int]) -> Callable[[], list[Any]]:
    """Starts to send arrays to the next rank and to receive arrays from the previous rank.

    arrays: pairs of an array and the rank that owns its keys. The returned function waits for the
    received arrays: for an array of keys of rank r, an array of keys of rank r - 1.
    """
    group, sizes = job.group, job.k_shards.sizes
    sends = [(x, (group.rank + 1) % group.ranks) for x, _ in arrays]
    rooms = [new(x, (sizes[owner - 1], *x.shape[1:])) for x, owner in arrays]
    arrived = group.exchange(sends, [(x, (group.rank - 1) % group.ranks) for x in rooms])

    def wait() -> list[Any]:
        arrived()
        return rooms

    return wait


def _merged(job: Job, parts: Sequence[Result]) -> Result:
    return job.merge([(out.astype(job.sums, copy=False), lse) for out, lse in parts])


def _results(job: Job, q: Any, v: Any, found: Mapping[int, Sequence[Result]]) -> Result:
    """Merges each row's results into out and lse; rows without keys get 0 and -infinity."""
    out = new(q, (*q.shape[:3], v.shape[3]), job.results)
    lse = new(q, q.shape[:3], job.sums)
    for rows in job.rows:
        at, parts = (slice(None), slice(None), rows.at), found[rows.start]
        if not parts:
            out[at], lse[at] = 0, -float("inf")
            continue
        is_even = len({x.dtype for x, _ in parts}) == 1
        total, lse[at] = job.merge(parts) if is_even else _merged(job, parts)
        copy_to(out[at], total)
    return out, lse
