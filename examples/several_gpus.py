"""Computes attention on NumPy arrays and its gradients on several GPUs, and compares with one GPU.

python examples/several_gpus.py                                # all GPUs
python examples/several_gpus.py --devices 0 1 --tokens 32768 --dtype float16
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
from train_transformer import has_gpu

import cupyfa


def pinned(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Draws random numbers in pinned memory, from which the GPU copies without a staging buffer."""
    array = cupyfa.empty_pinned(shape, dtype)
    array[...] = rng.standard_normal(shape, np.float32)
    return array


def milliseconds(call: Callable[[], Any]) -> float:
    call()  # warm-up: compiles kernels and allocates memory
    begin = perf_counter()
    call()
    return 1e3 * (perf_counter() - begin)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, nargs="+", help="numbers of GPUs; by default all")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("-d", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> None:
    given = options().parse_args()
    if not has_gpu():
        sys.exit("there is no GPU, and simulator times are meaningless; run `cupyfa doctor`")
    devices = cupyfa.Devices(given.devices or "all")
    rng = np.random.default_rng(given.seed)
    heads = given.heads, given.kv_heads, given.kv_heads
    q, k, v = (pinned(rng, (1, n, given.tokens, given.d), given.dtype) for n in heads)
    out = cupyfa.empty_pinned(q.shape, given.dtype)

    one = milliseconds(lambda: cupyfa.attention(q, k, v, out=out, causal=True))
    right = out.copy()
    several = milliseconds(lambda: cupyfa.attention(q, k, v, out=out, causal=True, backend=devices))
    print(f"one GPU: {one:.1f} ms; GPUs {devices.numbers}: {several:.1f} ms")
    is_same = np.array_equal(out, right)
    print("the bits are those of one GPU:", is_same)
    assert is_same

    out, pullback = cupyfa.vjp(q, k, v, causal=True, backend=devices)
    dq, dk, dv = pullback(out)
    print("gradients:", dq.shape, dk.shape, dv.shape)


if __name__ == "__main__":
    main()
