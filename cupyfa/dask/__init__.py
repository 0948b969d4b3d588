"""Attention of Dask arrays: a lazy graph of tasks, each a call of ``attention`` on some chunks."""

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

from cupyfa.dask.array_functions import attention, attention_vjp

__all__ = ["attention", "attention_vjp"]
