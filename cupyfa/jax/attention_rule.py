"""The function ``attention`` for JAX arrays, with its rule of differentiation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from cupyfa.arrays.block_mask import BlockMask
from cupyfa.call.call import Call, Layout, Tiles
from cupyfa.call.inputs import check_packed
from cupyfa.call.keywords import read_call, read_tiles, split_keywords
from cupyfa.call.pullback import refuse_gradients
from cupyfa.errors import Unsupported, described, nearest
from cupyfa.jax.array_forms import as_key
from cupyfa.jax.batched_calls import function_of
from cupyfa.ladder.kernel import Kernel
from cupyfa.planner.choose_kernel import check_named
from cupyfa.problem import optional_inputs
from cupyfa.problem.dtypes import DTYPES, INPUTS
from cupyfa.problem.optional_inputs import DLSE, LENGTHS, MASK, OF_PAIRS, SEEDS, STARTS, Operand
from cupyfa.problem.options import AttentionOptions, read_flag
from cupyfa.problem.problem import rows_of, sizes_of
from cupyfa.problem.structured_arrays import unwrap
from cupyfa.problem.wrt import QKV
from cupyfa.runtime import ragged

if TYPE_CHECKING:
    from cupyfa.call.keywords import ScoreKeywords

BackendName = Literal["auto", "cuda", "simulator", "reference"]
_BACKENDS = ("auto", "cuda", "simulator", "reference")


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    kernel: str | Kernel = "auto",
    backward_kernel: str | Kernel = "auto",
    backend: BackendName = "auto",
    layout: Layout = "bhsd",
    tiles: Tiles | None = None,
    backward_tiles: Tiles | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    **scores: Unpack[ScoreKeywords],
) -> Any:
    """Computes ``cupyfa.attention`` on JAX arrays, also while JAX traces a program.

    q [..., heads, M, d], k [..., kv_heads, N, d], v [..., kv_heads, N, dv] of float16, bfloat16,
    float32 or float64; or all three as ``Packed`` or ``Padded``, whose offsets and lengths may be
    JAX arrays. ``scores`` are the arguments causal, window, softcap, score_mod, bias, mask and so
    on of ``cupyfa.attention``. Arrays among them may be traced, numbers may not. The seed of
    ``Dropout(rate, seed)`` is a whole number or a key of ``jax.random``.

    The function may be jitted, differentiated once in reverse mode, checkpointed, mapped by vmap
    and by shard_map over batch and heads. Gradients of bias, sink, alibi_slopes and captured
    arrays are computed where JAX asks for them. vmap joins the mapped axis with the batch, except
    with dropout and packed sequences, for which it runs one call after the other.

    backend: "cuda" starts kernels in XLA's stream; "simulator" and "reference" compute on the
        host, by a callback, with the same kernels in the simulator, or in NumPy and float64. "auto"
        is "cuda" if JAX's default backend is a GPU, otherwise "reference".
    backward_kernel, backward_tiles, deterministic: as for ``cupyfa.vjp``.

    Returns out [..., heads, M, dv], and with ``return_lse`` also lse [..., heads, M], as
    ``cupyfa.attention`` does. Raises its errors, while the program is traced.
    """
    (q, k, v), structure = unwrap(q, k, v)
    given, asked = split_keywords(attention, scores)
    if isinstance(given.get(MASK), BlockMask):
        raise Unsupported(
            "mask is a BlockMask, which cupyfa.jax does not take; pass its expression"
        )
    call, _ = read_call(Call("forward", "auto", "auto", asked=asked), False)
    options = AttentionOptions.of(None, call.asked)
    q, k, v = (_as_array(name, x) for name, x in zip("qkv", (q, k, v)))
    refuse_gradients(INPUTS.get(str(q.dtype)))  # of float8, which cupyfa.jax takes nowhere
    if STARTS[0] in structure:
        check_packed({"q": q, "k": k, "v": v})
        layout, four = "bshd", (q, k, v)
    else:
        four = tuple(_with_four_axes(name, x, layout) for name, x in zip("qkv", (q, k, v)))
    optional, numbers = _read_optional(q, k, {**given, **structure}, layout, options)
    forward = Call(
        "forward",
        _read_kernel(kernel, "forward", tiles),
        _read_backend(backend),  # type: ignore[arg-type]  # "reference", too
        options=options,
        layout=layout,
        tiles=read_tiles(tiles),
        return_lse=True,
        inputs=tuple(f"mods.{x}" for x in optional),
        numbers=numbers,
    )
    backward = forward._replace(
        operation="backward",
        kernel=_read_kernel(backward_kernel, "backward", backward_tiles),
        tiles=read_tiles(backward_tiles),
        return_lse=False,
        deterministic=read_flag("deterministic", deterministic),
    )
    passes = _Passes(as_key(forward), as_key(backward), read_flag("return_lse", return_lse))
    found = _attend(passes, (*four, *optional.values()))
    out = (found[0] if return_lse else found).reshape(*q.shape[:-1], v.shape[-1])
    return (out, found[1].reshape(rows_of(q, layout))) if return_lse else out


# The rule of differentiation


class _Passes(NamedTuple):
    """All that is known when a program is traced: the calls of both passes, without wrt."""

    forward: Call
    backward: Call
    return_lse: bool


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Wrt:
    """Names of optional arrays to differentiate, which JAX carries among the residuals."""

    names: tuple[str, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(passes: _Passes, arrays: tuple[Any, ...]) -> Any:
    """Computes out, or (out, lse), of q, k, v and the optional arrays."""
    out, lse = function_of(passes.forward)(arrays)
    return (out, lse) if passes.return_lse else out


def _attend_forward(passes: _Passes, primals: tuple[Any, ...]) -> tuple[Any, Any]:
    arrays = tuple(x.value for x in primals)
    out, lse = function_of(passes.forward)(arrays)
    optional = list(zip(passes.forward.inputs, primals[len(QKV) :]))
    names = [x for x, y in optional if y.perturbed and str(y.value.dtype) in DTYPES]
    wrt = _Wrt(tuple(x.removeprefix("mods.") for x in names))
    if clash := {*QKV} & {*wrt.names}:
        raise Unsupported(
            f"captured {clash.pop()} is differentiated, but has the name of an argument; rename it"
        )
    return (out, lse) if passes.return_lse else out, (arrays, out, lse, wrt)


def _attend_backward(passes: _Passes, residuals: Any, cotangent: Any) -> tuple[Any]:
    (q, k, v, *optional), out, lse, wrt = residuals
    dout, dlse = cotangent if passes.return_lse else (cotangent, None)
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros(out.shape, out.dtype)
    call = passes.backward._replace(wrt=(*QKV, *wrt.names))
    arrays = dout, q, k, v, out, lse, *optional
    if dlse is not None and not isinstance(dlse, SymbolicZero):
        call = call._replace(inputs=(*call.inputs, f"mods.{DLSE}"))
        arrays = *arrays, dlse
    names = (*QKV, *(f"mods.{x}" for x in wrt.names))
    grads = dict(zip(names, function_of(call)(arrays)))
    return (tuple(map(grads.get, passes.forward.array_names)),)


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


# Arguments


def _as_array(name: str, given: Any) -> Any:
    if not hasattr(given, "shape") or not hasattr(given, "dtype"):
        raise TypeError(f"{name} is {described(given)}; pass a JAX or NumPy array")
    return jnp.asarray(given)


def _with_four_axes(name: str, array: Any, layout: str) -> Any:
    sizes = sizes_of(name, array, layout)
    batch, heads, rows, columns = sizes
    return array.reshape(sizes if layout == "bhsd" else (batch, rows, heads, columns))


def _read_kernel(kernel: Any, operation: str, tiles: Any) -> str | Kernel:
    check_named(kernel, operation, read_tiles(tiles))
    if isinstance(kernel, Kernel) and not kernel.is_plain:
        raise Unsupported(
            f"{kernel.name} has arrays or results of its own, which cupyfa.jax does not pass; use "
            "a kernel of the arguments of attention"
        )
    return kernel


def _read_backend(backend: Any) -> str:
    if backend not in _BACKENDS:
        remedy = nearest(backend, _BACKENDS) if isinstance(backend, str) else ""
        known = f"use one of {', '.join(_BACKENDS)}"
        raise ValueError(f"backend is {described(backend)}{remedy}; {known}")
    if backend == "auto":
        return "cuda" if jax.default_backend() == "gpu" else "reference"
    return backend


def _read_optional(
    q: Any, k: Any, given: Mapping[str, Any], layout: str, options: AttentionOptions
) -> tuple[dict[str, Any], tuple[Operand, ...]]:
    """Returns the optional arrays by name, as JAX arrays, and the captured numbers."""
    own = dict(given)
    captured = own.pop("captured", {})
    if not isinstance(captured, Mapping):
        raise TypeError(f'captured is {described(captured)}; pass a dict {{"name": array}}')
    own = {name: optional_inputs.of_list(name, x) for name, x in own.items()}
    own |= _read_lengths(q, k, own, layout)
    found: dict[str, Any] = {}
    for name, x in own.items():
        if name in SEEDS:
            if options.dropout:
                found[name] = _seed_words(x)
        else:
            x = _as_array(name, x)
            is_wide = name in OF_PAIRS
            found[name] = optional_inputs.with_four_axes(name, x, q.shape[:-3]) if is_wide else x
    numbers = []
    for name, x in sorted(captured.items(), key=lambda item: str(item[0])):
        x = optional_inputs.of_list(name, x)
        if isinstance(x, jax.core.Tracer) and not x.shape:
            raise TypeError(
                f"captured {name} is a traced number; pass a Python number, or an array of one "
                f"element and write {name}[0]"
            )
        operand = optional_inputs.operand(name, x)
        if operand.is_array:
            found[name] = jnp.asarray(x)
        else:
            numbers.append(operand)
    return found, tuple(numbers)


def _read_lengths(q: Any, k: Any, given: Mapping[str, Any], layout: str) -> dict[str, Any]:
    """Checks offsets and lengths whose values are known; returns them as int32."""
    seen = {name: _on_host(x) for name, x in given.items() if name in LENGTHS}
    if STARTS[0] in seen:
        return ragged.lengths(q, k, seen)
    if not seen:
        return {}
    (batch, _, M, _), (_, _, N, _) = (sizes_of(*x, layout) for x in (("q", q), ("k", k)))
    return ragged.padded_lengths(seen, batch, (M, N))


def _on_host(array: Any) -> Any:
    return array if isinstance(array, jax.core.Tracer) else np.asarray(array)


def _seed_words(given: Any) -> Any:
    """Returns 64 bits of a key of ``jax.random``, or of a whole number, as two uint32."""
    if jnp.issubdtype(given.dtype, jax.dtypes.prng_key) or given.shape[-1:] in ((2,), (4,)):
        return jax.random.bits(given, (2,), np.uint32)
    number = jnp.asarray(given).reshape(1)
    high = number >> 32 if number.dtype.itemsize == 8 else jnp.zeros_like(number)
    return jnp.concatenate([number, high]).astype(np.uint32)
