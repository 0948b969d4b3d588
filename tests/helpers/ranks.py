"""What each rank of a launcher does: its rows of attention, compared with one call on the whole."""

import os
import signal
import sys
import time

import numpy as np

import cupyfa
import cupyfa.distributed as ranks

SIZES = {"nccl": (4096, 64, "float16", {}), "mpi": (48, 8, "float32", {"backend": "simulator"})}


def compare(group, over):
    """All schedules; the results of heads have the bits of one call."""
    n, d, dtype, how = SIZES[over]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, h, n, d)).astype(dtype) for h in (4, 2, 2, 4)]
    if over == "nccl":
        import cupy

        arrays = [*map(cupy.asarray, arrays)]
    q, k, v, dout = arrays
    out, pullback = cupyfa.attention_vjp(q, k, v, causal=True, deterministic=True, **how)
    right = out, *pullback(dout)
    for schedule in ("gather", "heads", "ring"):
        own = [ranks.shard(x, group) for x in (q, k, v)]
        out, pullback = ranks.attention_vjp(
            *own, group=group, causal=True, schedule=schedule, deterministic=True, **how
        )
        found = out, *pullback(ranks.shard(dout, group))
        for x, y in zip(found, right):
            error = abs(x.astype("f4") - ranks.shard(y, group).astype("f4")).max()
            bound = 1e-5 if dtype == "float32" else 2e-2
            assert error <= (0 if schedule == "heads" else bound), (schedule, error)


def ones(over):
    """An array for q, k and v, and what else a call is given."""
    n, d, dtype, how = SIZES[over]
    x = np.ones((1, 2, n, d), dtype)
    if over == "nccl":
        import cupy

        x = cupy.asarray(x)
    return x, how


def wrong(group, over):
    """One rank has other options, and then all go on."""
    x, how = ones(over)
    try:
        ranks.attention(x, x, x, group=group, causal=group.rank == 1, **how)
    except ValueError as error:
        assert "options must be equal on all ranks" in str(error)
    else:
        raise AssertionError("no error")
    ranks.attention(x, x, x, group=group, **how)


def killed(group, over):
    """The last rank is killed while the others wait for it."""
    x, how = ones(over)
    ranks.attention(x, x, x, group=group, **how)
    if group.rank == group.ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        for _ in range(2):
            ranks.attention(x, x, x, group=group, **how)
    except cupyfa.DeviceError as error:
        assert "has ended" in str(error)
        assert time.monotonic() - begin < group.timeout + 5
    else:
        raise AssertionError("no error")
    group.close()  # does not wait for the dead one


def main():
    over, what, timeout = sys.argv[1], sys.argv[2], float(sys.argv[3])
    with ranks.group(over=over, timeout=timeout) as group:
        {"compare": compare, "wrong": wrong, "killed": killed}[what](group, over)
        sys.stdout.write(f"rank {group.rank} of {group.ranks} is right\n")


if __name__ == "__main__":
    main()
