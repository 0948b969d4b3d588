"""Computes attention and gradients of a sequence that is divided among GPUs; checks some rows.

Without a launcher the process is a group of one, which needs no GPU:

    python examples/distributed_attention.py
    for rank in 0 1; do
        RANK=$rank WORLD_SIZE=2 python examples/distributed_attention.py --file ranks.id &
    done; wait
    mpirun -n 2 python -m mpi4py examples/distributed_attention.py --over mpi  # NumPy arrays
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np

import cupyfa
import cupyfa.distributed as ranks


def drawn(given: argparse.Namespace) -> list[np.ndarray]:
    """Draws q, k and v of the whole sequence, equal on all ranks."""
    rng = np.random.default_rng(given.seed)
    heads = given.heads, given.kv_heads, given.kv_heads
    shapes = [(1, n, given.tokens, given.d) for n in heads]
    return [rng.standard_normal(shape, np.float32).astype(given.dtype) for shape in shapes]


def on_host(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


def error_of_rows(out: np.ndarray, arrays: list[np.ndarray], rows: range) -> float:
    """Returns the largest error of some rows of the last head against plain NumPy attention."""
    q, k, v = (x[0, -1].astype(np.float64) for x in arrays)
    scores = q[rows.start : rows.stop] @ k.T / np.sqrt(q.shape[1])
    scores[np.arange(len(k)) > np.array(rows)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    right = weights @ v / weights.sum(axis=1, keepdims=True)
    return float(abs(right - out.astype(np.float64)).max())


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--over", choices=("nccl", "mpi"), default="nccl")
    parser.add_argument("--file", help="where ranks that MPI has not started find each other")
    parser.add_argument("--schedule", choices=("gather", "ring"), default="gather")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("-d", type=int, default=32)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> None:
    given = options().parse_args()
    whole = drawn(given)
    with ranks.group(over=given.over, file=given.file) as group:
        own = [ranks.shard(x, group) for x in whole]  # this rank's rows
        if given.over == "nccl" and group.ranks > 1:
            import cupy

            own = [cupy.asarray(x) for x in own]
        n = given.tokens
        q, k, v = (ranks.Sharded(x, group, n, schedule=given.schedule) for x in own)
        out, pullback = cupyfa.vjp(q, k, v, causal=True)
        gradients = pullback(out)
        *_, last = ranks.rows(n, group)
        rows = last[-16:]
        found = out[0, -1, out.shape[2] - len(rows) :]
        error = error_of_rows(on_host(found), whole, rows)
        shapes = ", ".join(str(x.shape) for x in gradients)
        # A single write, so that lines of different ranks do not mix.
        sys.stdout.write(
            f"rank {group.rank} of {group.ranks}: gradients {shapes}, largest error {error:.1e}\n"
        )
        # |out| < 4: bfloat16 rounds out by at most 2**-7, and rounded weights change it by as much
        # again. float32 is 2**16 times finer; the remaining margin is for exp and long sums.
        assert error < (1e-5 if given.dtype in ("float32", "float64") else 2e-2)


if __name__ == "__main__":
    main()
