"""Attention of Dask arrays: a lazy graph of tasks, each a call of ``attention`` on some chunks.

``cupyfa.attention(q, k, v)`` takes Dask arrays q [batch, heads, M, d], k [batch, kv_heads, N, d]
and v [batch, kv_heads, N, dv] of one dtype, float16, bfloat16, float32 or float64, whose chunks are
NumPy or CuPy arrays, and gives lazy arrays with the chunks of q. Chunks of k divide batch and
heads; q and v are rechunked like them where they differ, and d and dv are not divided. Rows of q
and of k may have any chunks. A task for each chunk of q takes all keys that its rows see, in one
call; with ``MergedKeys(k)`` it takes one chunk of keys at a time, and other tasks merge.

Arguments are those of ``cupyfa.attention``; kernel and tiles are chosen once for the whole problem
by the process that calls. ``backend`` says where tasks run, and ``Devices(limits=…)`` for which
device that process plans. Expressions may name the score and position - key; where keys are not
merged also position and key alone; other places where their axis has one chunk. out has the bits of
one call with the same kernel and tiles if rows are cut at multiples of its tiles, except with
merged keys and with kernels that docs/many-gpus.md names.

``cupyfa.vjp(q, k, v)`` gives lazy gradients dq, dk and dv with the chunks of q, k and v after
rechunking. Compute out and the gradients together, ``dask.compute(out, *gradients)``: else the
attention is computed twice. A task for each chunk of q takes the keys that it sees and gives dq. A
task for each chunk of k takes all rows that see it and gives dk and dv. Nothing is added up, at the
price that the products are computed twice; if rows and keys have one chunk each, one task gives all
three. With ``deterministic`` every run gives the same bits, also where a task is repeated.

Both raise TypeError and ValueError for wrong arguments, Unsupported for arrays besides q, k and v,
for dropout and for expressions that name more, all of them before anything is computed. Tasks raise
what ``cupyfa.attention`` raises.
"""

try:
    import dask.array
except ImportError as error:
    raise ImportError(
        f'cupyfa.dask computes Dask arrays ({error}); install them: pip install "dask[array]"'
    ) from None
if getattr(dask.array, "array_expr_enabled", bool)():  # older versions of Dask do not have it
    raise ImportError(
        "cupyfa.dask builds graphs, and Dask's query planning of arrays is on; set "
        "array.query-planning to False in dask.config before dask.array is imported"
    )

from cupyfa.dask.array_functions import MergedKeys

__all__ = ["MergedKeys"]
