"""Computes attention of a long causal sequence on Dask arrays with any number of workers.

Each chunk of q is one task, which reads the chunks of k and v that its rows see. Workers create the
chunks, so the arrays may be larger than the memory of the calling process. Install the dependencies
with the extra ".[dask]".

    python examples/dask_attention.py                              # threads of this process
    python examples/dask_attention.py --workers 2                  # processes, each with its GPU
    python examples/dask_attention.py --scheduler tcp://host:8786  # a cluster, by its scheduler
    python examples/dask_attention.py --gpu --dtype float16 --tokens 65536 --rows 8192
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from contextlib import ExitStack
from typing import Any

import numpy as np


def random_arrays(given: argparse.Namespace) -> list[Any]:
    """Makes q, k and v. A chunk has --rows tokens of one key head or of its query heads."""
    import dask.array as da

    group = given.heads // given.kv_heads
    random = da.random.default_rng(given.seed)
    arrays = []
    for heads, chunk in ((given.heads, group), (given.kv_heads, 1), (given.kv_heads, 1)):
        shape, chunks = (1, heads, given.tokens, given.d), (1, chunk, given.rows, given.d)
        arrays.append(random.standard_normal(shape, chunks=chunks).astype(given.dtype))
    if given.gpu:
        import cupy

        meta = cupy.empty((0, 0, 0, 0), given.dtype)
        arrays = [x.map_blocks(cupy.asarray, meta=meta) for x in arrays]
    return arrays


def cluster(count: int) -> Any:
    """Starts single-threaded worker processes on this machine and assigns its GPUs to them."""
    from dask.distributed import Nanny, Scheduler, SpecCluster

    gpus = visible_gpus()
    usual = {"nthreads": 1, "memory_limit": 1 / count, "silence_logs": logging.WARNING}
    workers = {}
    for number in range(count):
        # A Nanny restarts its worker with the same environment, and so on the same GPU.
        environment = {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else {}
        workers[number] = {"cls": Nanny, "options": {**usual, "env": environment}}
    scheduler = {"cls": Scheduler, "options": {"host": "localhost", "dashboard": False}}
    return SpecCluster(workers, scheduler, silence_logs=logging.WARNING)


def visible_gpus() -> list[str]:
    """Lists the GPUs that this process may use, in the notation of CUDA_VISIBLE_DEVICES."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [x.strip() for x in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if x.strip()]
    import cupy

    try:
        return [str(x) for x in range(cupy.cuda.runtime.getDeviceCount())]
    except cupy.cuda.runtime.CUDARuntimeError:  # no driver or no GPU
        return []


def error_of_rows(out: Any, q: Any, k: Any, v: Any, rows: slice) -> float:
    """Returns the largest error of some rows of the last head against plain NumPy attention."""
    on_host = (x if isinstance(x, np.ndarray) else x.get() for x in (out[0, -1, rows], q, k, v))
    out, q, k, v = (x.astype(np.float64) for x in on_host)
    scores = q @ k.T / np.sqrt(q.shape[1])
    places = np.arange(len(k))
    scores[places > places[rows, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return float(abs(weights @ v / weights.sum(axis=1, keepdims=True) - out).max())


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=0, help="processes to start; 0: threads")
    parser.add_argument("--scheduler", help="the address of a running Dask scheduler")
    parser.add_argument("--gpu", action="store_true", help="chunks are CuPy arrays")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rows", type=int, default=128, help="tokens in a chunk")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("-d", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--keys", choices=("gather", "merge"), default="gather")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> None:
    given = options().parse_args()
    try:
        import dask.array as da

        import cupyfa.dask

        if given.scheduler or given.workers:
            import distributed  # noqa: F401
    except ImportError as error:
        sys.exit(f"this needs Dask ({error}); in the checkout: pip install -e '.[dask]'")
    with ExitStack() as stack:
        if given.scheduler or given.workers:
            from dask.distributed import Client

            where = given.scheduler or stack.enter_context(cluster(given.workers))
            stack.enter_context(Client(where))
        q, k, v = random_arrays(given)
        keys = cupyfa.dask.MergedKeys(k) if given.keys == "merge" else k
        out = cupyfa.attention(q, keys, v, causal=True)
        print(f"{out.npartitions} chunks of {out.chunksize}")
        last = slice(given.tokens - 16, given.tokens)
        out, *of_head = da.compute(out, q[0, -1, last], k[0, -1], v[0, -1])
    error = error_of_rows(out, *of_head, last)
    print(f"largest error in the last rows: {error:.1e}")
    # |out| < 4: bfloat16 rounds out by at most 2**-7, and rounded weights change it by as much
    # again. float32 is 2**16 times finer; the remaining margin is for exp and long sums.
    assert error < (1e-5 if given.dtype in ("float32", "float64") else 2e-2)


if __name__ == "__main__":
    main()
