"""The program that MPI or torchrun starts on each rank to test attention over sharded sequences."""

import gc
import os
import signal
import sys
import time

import numpy as np
from helpers.merged import of_parts

import cupyfa
import cupyfa.distributed as ranks
from cupyfa import Problem
from cupyfa.distributed import Sharded
from cupyfa.distributed.shards import Shards
from cupyfa.ladder.operations import OPERATIONS
from cupyfa.numerics import tolerance
from cupyfa.numerics.tolerance import Expected

SIZES = {"nccl": (1024, 64, "float16", {}), "mpi": (48, 8, "float32", {"backend": "simulator"})}


def joined(parts, order):
    """Joins the rows of all ranks into the whole array."""
    held = Shards.of(sum(x.shape[2] for x in parts), len(parts), order).ranges
    rows = [row for ranges in held for own in ranges for row in own]
    return np.concatenate(parts, axis=2)[:, :, np.argsort(rows)]


def expected(given, rows, keys, results, **options):
    """Computes the expected results and their error bounds.

    Results are computed for each pair of a range of queries and a range of keys, then summed.
    """
    q, k, v, dout, dlse = given
    out, lse = results[:2]
    p = Problem.of(q, k, v, **options)
    arrays = {"Q": q, "K": k, "V": v, "O": out, "lse": lse, "dO": dout, "mods.dlse": dlse}
    backward = OPERATIONS["backward"].reference
    made = {
        x: Expected(np.zeros(y.shape), np.zeros(y.shape))
        for x, y in zip(("O", "lse", "dQ", "dK", "dV"), results)
    }
    for i in rows:
        of = {x: y if x in "KV" else y[:, :, i.start : i.stop] for x, y in arrays.items()}
        for j in keys:
            inputs = of | {x: arrays[x][:, :, j.start : j.stop] for x in "KV"}
            found = backward(inputs, p.part(p.batch, p.kv_heads, i, j), (None,))[None]
            for x, own in (("dQ", i), ("dK", j), ("dV", j)):
                for total, one in zip(made[x], found[x]):
                    total[:, :, own.start : own.stop] += one
        of_rows = of_parts(arrays, p, i, keys)
        for x in ("O", "lse"):
            for array, one in zip(made[x], of_rows[x]):
                array[:, :, i.start : i.stop] = one
    return made


def ranges(n, count, order="zigzag"):
    """Returns the nonempty ranges of all shards, or a single empty range if there are none."""
    found = Shards.of(n, count, order).ranges
    return [x for own in found for x in own if len(x)] or [range(0)]


def sharded(q, k, v, group, M=None, N=None, order="zigzag", schedule="gather"):
    """Wraps a rank's rows of a sequence of M queries and N keys as Sharded arrays."""
    rows = zip((q, k, v), (M, N, N))
    return [Sharded(x, group, n, order, schedule) for x, n in rows]


def compare(group, over):
    """Checks the results of each schedule against the error bounds of its sums."""
    n, d, dtype, how = SIZES[over]
    rng = np.random.default_rng(0)
    given = [rng.standard_normal((1, h, n, d)).astype(dtype) for h in (4, 2, 2, 4)]
    given.append(np.zeros((1, 4, n), "f4"))  # the gradient of lse
    arrays = given
    if over == "nccl":
        import cupy

        arrays = [*map(cupy.asarray, given)]
    how = {"causal": True, "return_lse": True, "deterministic": True, **how}
    how["kernel"] = "fa2" if over == "mpi" else "mma_async"  # kernels without split-KV
    rows, keys = ranges(n, group.ranks), [range(n)]
    for schedule in ("gather", "ring"):
        of_ranks = [group.gather(x)() for x in of_rank(group, arrays, schedule, how)]
        found = [joined(on_host(x), "zigzag") for x in of_ranks]
        wanted = expected(given, rows, rows if schedule == "ring" else keys, found, causal=True)
        tolerance.require(tolerance.compare(dict(zip(wanted, found)), wanted), schedule)


def on_host(array):
    return array if isinstance(array, np.ndarray) else array.get()


def of_rank(group, arrays, schedule, how):
    """Computes out, lse, dq, dk and dv of this rank's rows."""
    q, k, v, dout, dlse = (ranks.shard(x, group) for x in arrays)
    results, pullback = cupyfa.vjp(*sharded(q, k, v, group, schedule=schedule), **how)
    return *results, *pullback(dout, dlse)


def ones(over):
    """Returns an array of ones for q, k and v, and the call's other arguments."""
    n, d, dtype, how = SIZES[over]
    x = np.ones((1, 2, n, d), dtype)
    if over == "nccl":
        import cupy

        x = cupy.asarray(x)
    return x, how


def wrong(group, over):
    """Passes other options on one rank; all ranks must raise, and the next call must succeed."""
    x, how = ones(over)
    try:
        cupyfa.attention(*sharded(x, x, x, group), causal=group.rank == 1, **how)
    except ValueError as error:
        assert "options must be equal on all ranks" in str(error)
    else:
        raise AssertionError("options that differ between ranks raised no error")
    cupyfa.attention(*sharded(x, x, x, group), **how)


def used_bytes(over):
    """Returns the bytes of this rank's GPU memory that arrays occupy."""
    if over != "nccl":
        return 0
    import cupy

    gc.collect()
    return cupy.get_default_memory_pool().used_bytes()


def killed(group, over):
    """Kills the last rank; all other ranks must raise and free all memory of the call."""
    x, how = ones(over)
    cupyfa.attention(*sharded(x, x, x, group), **how)
    before = used_bytes(over)
    if group.rank == group.ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        for _ in range(2):
            cupyfa.attention(*sharded(x, x, x, group), **how)
    except cupyfa.DeviceError as error:
        assert "has ended" in str(error)
        assert time.monotonic() - begin < group.timeout + 5
    else:
        raise AssertionError("calls without the killed rank raised no error")
    assert used_bytes(over) == before
    group.close()  # must not wait for the killed rank


def main():
    over, what, timeout = sys.argv[1], sys.argv[2], float(sys.argv[3])
    file = sys.argv[4] if len(sys.argv) > 4 else None
    with ranks.group(over=over, timeout=timeout, file=file) as group:
        {"compare": compare, "wrong": wrong, "killed": killed}[what](group, over)
        sys.stdout.write(f"rank {group.rank} of {group.ranks} is right\n")


if __name__ == "__main__":
    main()
