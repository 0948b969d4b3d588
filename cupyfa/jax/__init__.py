"""Attention for JAX arrays, inside of ``jax.jit``, ``jax.grad``, ``jax.vmap`` and ``shard_map``.

``cupyfa.jax.attention`` takes the arguments of ``cupyfa.attention`` on JAX arrays. On a GPU each
pass is one custom call of XLA, which starts the same kernels in XLA's stream, on XLA's buffers.
Elsewhere it is a callback, which computes the same on the host.
"""

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError(f"cupyfa.jax requires JAX ({error}); install it: pip install jax") from None

from cupyfa.jax.attention_rule import attention

__all__ = ["attention"]
