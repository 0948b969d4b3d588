"""Attention on Dask arrays: builds a lazy graph whose tasks call ``attention`` on chunks.

``cupyfa.attention(q, k, v)`` takes Dask arrays q [batch, heads, M, d], k [batch, kv_heads, N, d]
and v [batch, kv_heads, N, dv] of the same dtype, float16, bfloat16, float32 or float64, whose
chunks are NumPy or CuPy arrays. It returns lazy arrays with the chunks of q. The chunks of k
determine how batch and heads are divided; q and v are rechunked to match, and d and dv become one
chunk. Rows of q and k may be chunked differently. By default one task per chunk of q attends to all
keys that its rows see, in one call. With ``MergedKeys(k)`` each task attends to one chunk of keys,
and further tasks merge the results.

The arguments are the same as for ``cupyfa.attention``. The calling process chooses kernel and tiles
once for the whole problem. ``backend`` selects where tasks run, and ``Devices(limits=…)`` describes
the device to plan for. Expressions may use the score and position - key; ``attention`` without
merged keys also allows position and key separately; all other indices require one chunk along their
axis. out has the same bits as in a single call with the same kernel and tiles if the chunks of rows
begin at multiples of the tile size, except with merged keys and for the kernels listed in
docs/many-gpus.md.

``cupyfa.vjp(q, k, v)`` returns lazy gradients dq, dk and dv with the chunks of q, k and v after
rechunking. Compute out and the gradients together, ``dask.compute(out, *gradients)``, so that
attention is computed once. One task per chunk of q reads the keys that its rows see and computes
dq. One task per chunk of k reads all rows that see its keys and computes dk and dv. No partial
gradients are summed, but score products are computed twice. If rows and keys have one chunk each,
one task computes all three. With ``deterministic`` every run returns the same bits, even if a task
is repeated.

Both functions raise TypeError and ValueError for wrong arguments, and Unsupported for arrays other
than q, k and v, for dropout and for unsupported indices in expressions, before any task runs.
Tasks raise the errors of ``cupyfa.attention``.
"""

try:
    import dask.array
except ImportError as error:
    raise ImportError(
        f'cupyfa.dask requires dask.array ({error}); install it: pip install "dask[array]"'
    ) from None
if getattr(dask.array, "array_expr_enabled", bool)():  # missing in older versions of Dask
    raise ImportError(
        "cupyfa.dask does not support Dask's array query planning, which is enabled; set "
        "array.query-planning to False in dask.config before importing dask.array"
    )

from cupyfa.dask.array_functions import MergedKeys

__all__ = ["MergedKeys"]
