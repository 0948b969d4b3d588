"""The public functions. They return NumPy arrays for NumPy inputs, and otherwise CuPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from math import prod
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from cupyfa.arrays.block_mask import BlockMask
from cupyfa.call import pullback
from cupyfa.call.call import ANYWHERE, BackendName, Call, Devices, Layout, Tiles
from cupyfa.call.dispatch import find_function
from cupyfa.call.execution import run_call
from cupyfa.call.inputs import TANGENTS, split_block_mask
from cupyfa.call.keywords import (
    DTYPES,
    OF_BOTH_PASSES,
    OF_HVP,
    OF_SCORES,
    convert_lists,
    read_devices,
    read_out,
    read_shape,
    read_tiles,
    split_keywords,
    unknown_argument,
)
from cupyfa.call.prepare import compile_call
from cupyfa.call.tangents import bound_hvp, read_tangents
from cupyfa.errors import Unsupported, described
from cupyfa.ladder.kernel import BoundKernel, Kernel
from cupyfa.planner import choose_kernel as planning
from cupyfa.planner.plan import Limits, Plan
from cupyfa.problem import optional_inputs
from cupyfa.problem.dtypes import INPUTS, DTypeLike, dtype_named
from cupyfa.problem.options import (
    AttentionOptions,
    Causal,
    OptionKeywords,
    OutDtype,
    Precision,
    Text,
    Window,
    read_size,
)
from cupyfa.problem.problem import MOST, Problem
from cupyfa.problem.structured_arrays import KINDS, unwrap
from cupyfa.problem.wrt import QKV, refuse_without_gradients
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.call_cache import repeat_call
from cupyfa.runtime.choose_backend import backend_named
from cupyfa.runtime.prepared import Prepared
from cupyfa.score.dropout import Dropout, KeptWeights

if TYPE_CHECKING:
    from cupyfa.call.keywords import (
        CallKeywords,
        CommonKeywords,
        HvpKeywords,
        NoKeywords,
        ScoreKeywords,
    )

Array = np.ndarray[Any, Any]


def attention(
    q: Any,
    k: Any,
    v: Any = None,
    *,
    causal: Causal | bool = False,
    window: Window | None = None,
    offset: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    score_mod: Text = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    captured: Mapping[str, Any] | None = None,
    sink: Any = None,
    dropout: Dropout | None = None,
    precision: Precision | None = None,
    append: tuple[Any, Any] | None = None,
    kernel: str | Kernel | BoundKernel = "auto",
    backend: BackendName | Backend | Devices = "auto",
    layout: Layout = "bhsd",
    tiles: Tiles | None = None,
    return_lse: bool = False,
    return_max: bool = False,
    out: Any = None,
    check: bool = False,
    **unknown: Unpack[NoKeywords],
) -> Any:
    """Computes softmax(q kᵀ · scale) v without storing the score matrix.

    q [..., heads, M, d], k [..., kv_heads, N, d], v [..., kv_heads, N, dv] of one dtype: float16,
    bfloat16 (ml_dtypes), float32, float64 or float8_e4m3fn (ml_dtypes). heads is a multiple of
    kv_heads, and query head h reads key head h // (heads // kv_heads). 2-D arrays are a single
    head, 3-D arrays are [heads, rows, d]; with ``layout="bshd"`` arrays are [batch, rows, heads,
    d]. Any size may be 0, and arrays may have any strides.

    Sequence lengths, float8 scales and caches are passed as part of the arrays:

    - ``Padded(q, lengths)``: only the first lengths[b] rows of batch element b are used. Masks,
      windows and expressions are aligned to these lengths. Padding rows never affect the results:
      their out and gradients are 0, and their lse is -infinity.
    - ``Packed(q, offsets)``: a ragged batch (varlen). q [total queries, heads, d], k [total keys,
      kv_heads, d | dv] and out hold the sequences one after the other, and lse is [heads, total
      queries]. Masks, windows and expressions apply within each sequence: query and key start at
      0, queries and keys are its lengths, and batch is its index, which also indexes alibi_slopes
      and sink [sequences, heads]. bias is not supported, and mask must be an expression. Rows
      outside all sequences have out = 0 and lse = -infinity.
    - Lists of arrays [heads, rows, d], one array per sequence, are packed; results are lists, too.
    - ``Scaled(q, scale)``: a float8_e4m3fn array with one scale per key head. Float8 inputs are
      used as they are, and out is bfloat16. ``Padded(Scaled(q, scale), lengths)`` combines both.
    - ``attention(q, cache)``: attention of new tokens, q [batch, heads, new tokens, d], over the
      keys and values in a ``KVCache``. The new tokens are the last of each sequence: in a sequence
      of n keys, token i sees keys j <= n - new tokens + i. In expressions, ``keys`` is the number
      of keys of a sequence. Grids are sized for the cache's capacity, and kernels read lengths and
      page tables on the device: the host does not synchronize, and a captured CUDA graph can be
      launched again with new lengths.
    - Dask arrays return lazy Dask arrays (see ``cupyfa.dask``), and ``cupyfa.distributed.Sharded``
      arrays hold this rank's rows of a sequence that is divided among ranks.

    causal: with True or "bottom-right" query i sees keys j <= i + N - M, with "top-left" j <= i.
    window: (left, right); query i at position p = i + N - M (p = i with a "top-left" mask) sees
        keys p - left <= j <= p + right. None means unlimited; a causal mask sets right = 0.
    offset: the position of query 0 among the keys, in place of N - M, for masks, windows and
        expressions: with a causal mask query i sees keys j <= i + offset. An offset lets a call on
        a slice of the queries or keys compute its share of the whole problem.
    scale: the factor that multiplies q kᵀ; 1/sqrt(d) by default.
    softcap: scores become softcap · tanh(score / softcap), after the scale.
    score_mod: a string expression or a Python function that computes the new score, after the
        softcap. It may use ``score batch head query key position queries keys`` and the names in
        ``captured``, as in "score - slope[head] * abs(position - key)". position is query + N - M,
        or query under a "top-left" mask.
    alibi_slopes: [heads] or [batch, heads]; slope · abs(position - key) is subtracted.
    bias: added to the scores; any float dtype, broadcastable to [batch, heads, M, N].
    mask: the visible pairs. A bool array that broadcasts to [batch, heads, M, N]; a ``block_mask``,
        whose empty tiles are skipped; or an expression like score_mod, as "key <= position". With a
        tuple of an array and an expression, a pair is visible if both allow it.
    captured: the arrays and numbers that the expressions read, as {"slope": array}. Arrays hold
        bools, integers or floats; indices must be in bounds.
    sink: [heads] or [batch, heads], any float dtype: one extra score per row, without a value
        (attention sink). The softmax and lse include it; -infinity has no effect.
    dropout: a ``Dropout``, which zeroes some softmax weights. It does not affect lse.
    precision: the format that inputs may be rounded to: for float32 "tf32", "float16", "bfloat16"
        or "float8_e4m3", for float16 and bfloat16 only "float8_e4m3". By default inputs are not
        rounded unless ``kernel`` always rounds them; "float32" rejects kernels that round.
    append: (k, v) of the new tokens, [batch, kv_heads, new tokens, d | dv]. They are written into
        the cache from row cache.lengths on, and then attended to as well. Without ``append`` the
        cache must already hold them, and cache.lengths must count them. The call never changes
        cache.lengths.
    kernel: a name from ``kernels()``, a Kernel, or "auto". ``kernel.bind(…)`` passes arrays and
        floats to a custom kernel, and names the extra outputs to return after lse.
    backend: "cuda", "simulator", "auto", or a configured Simulator. ``Devices`` computes NumPy
        arrays on several GPUs and reports progress.
    tiles: tile sizes of the kernel, for example ``{"Br": 64, "Bc": 32}``; missing ones are chosen.
        With a cache also ``{"splits": n}`` (split-KV): the keys of a row are divided into n parts,
        one per block; the default depends on the device, the batch, the capacity and, in large
        caches, the lengths. With a fixed n, the bits of a sequence's results do not depend on the
        other sequences.
    out: the output array, or the dtype of a new one. With "float32", float16 and bfloat16 inputs
        return the float32 result before its last rounding, for results that are merged or added
        later. By default out has the dtype of the inputs; for float8_e4m3fn inputs it is "bfloat16"
        (the default), "float16" or "float32".
    check: also compare all results with the reference, detect out-of-bounds writes, and validate
        lengths, offsets and pages in GPU memory.

    Returns out [..., heads, M, dv], an array of the inputs' type and dtype (see ``out``); with
    ``return_lse`` also the natural logarithm of each row's sum of exp(score), [..., heads, M] in
    float32 (float64 for float64); and with ``return_max`` each row's largest score, in the shape
    and dtype of lse, after the scale, all modifications and masks, without the sink. A row that
    sees no key has out = 0, lse = -infinity (or its sink) and maximum -infinity. Where lse is NaN,
    the maximum is NaN. Finite values in one batch element or sequence never change the bits of
    another one's results.

    Raises ValueError or TypeError for wrong arguments, Unsupported if the kernel or device does not
    support the problem, DeviceError if the device fails, SimulatorFault if the simulator detects an
    error in a kernel, CompilerNotFound if the simulator finds no compiler, WrongResult if a check
    fails.

    FlashAttention: Dao et al., 2022, arXiv:2205.14135; Dao, 2023, arXiv:2307.08691.
    """
    structure: Mapping[str, Any] = {}
    if type(q) in KINDS or type(k) in KINDS or type(v) in KINDS:
        if (function := find_function("attention", q, k, v)) is not None:
            return function(attention, locals())
        (q, k, v), structure = unwrap(q, k, v)
    if out is None or isinstance(out, DTYPES):
        dtype, into, repeated_as = out, None, "attention"
    else:  # an array, which determines the dtype of the result
        dtype, into, repeated_as = None, out, "attention into out"
    # In the order of OPTIONS and OWN_ARRAYS. All code below reads these tuples, so that no argument
    # in them can be forgotten further down.
    options = causal, window, offset, scale, softcap, score_mod, precision
    optional = alibi_slopes, bias, mask, sink
    others = dtype, kernel, backend, layout, tiles, return_lse, return_max, captured
    fixed: tuple[Any, ...] = options + others  # identifies a repeated call: all but arrays
    arrays: Sequence[Any] = (q, k, v)
    is_plain = not structure and dropout is None
    for x in optional:  # a loop, because any() would enter a Python function for each element
        if x is not None:
            is_plain = False
    if not is_plain:
        kinds: list[Any] = []  # True for an array, otherwise the argument itself
        dense: list[Any] = []
        for x in optional:
            is_dense = x is not None and not isinstance(x, _NOT_DENSE)
            kinds.append(is_dense or x)
            if is_dense:
                dense.append(x)
        numbers = dropout if isinstance(dropout, tuple) else (dropout,)
        fixed += *kinds, *structure, *numbers
        arrays = *arrays, *dense, *structure.values()
    if not check:
        repeated = repeat_call(repeated_as, fixed, arrays, into)
        if repeated is not None:
            return repeated
    if unknown:
        raise unknown_argument(attention, unknown)
    if append is not None:
        raise TypeError("append requires a KVCache, but k is an array; leave append out")
    inputs: dict[str, Any] = {}
    asked: OptionKeywords = {}
    scores = *options, *optional, captured, dropout  # in the order of OF_SCORES
    if not all(map(is_, scores, _DEFAULTS)):
        inputs, asked = split_keywords(attention, dict(zip(OF_SCORES, scores, strict=True)))
    target, asked = (None, asked) if out is None else read_out(out, q, asked)
    where: Any = backend
    devices = ANYWHERE
    if isinstance(backend, Devices):
        where, devices = read_devices(backend)
    call = Call("forward", kernel, where, None, asked, layout, tiles, return_lse, return_max)
    how: Any = {"check": check, "repeat": (repeated_as, fixed), "devices": devices}
    return run_call(call, (q, k, v), {**inputs, **structure}, target, **how)


_DEFAULTS = itemgetter(*OF_SCORES)(attention.__kwdefaults__ or {})  # in the order of OF_SCORES
_NOT_DENSE = (BlockMask, str, tuple)  # types of masks that are not arrays


def vjp(
    q: Any,
    k: Any,
    v: Any,
    *,
    deterministic: bool = False,
    kernel: str | Kernel | BoundKernel = "auto",
    backward_kernel: str | Kernel | BoundKernel = "auto",
    tiles: Tiles | None = None,
    backward_tiles: Tiles | None = None,
    return_lse: bool = False,
    out: OutDtype | None = None,
    wrt: Sequence[str] = QKV,
    **both: Unpack[CommonKeywords],
) -> tuple[Any, Callable[..., tuple[Any, ...]]]:
    """Computes attention and returns it with its vector-Jacobian product, as ``jax.vjp`` does.

    Returns out and ``pullback``. ``pullback(dout)`` returns the gradients of ``wrt``, by default
    dq, dk and dv, as ``backward`` does; dout has the dtype of q, even if out is float32. With
    ``return_lse`` it returns (out, lse) and ``pullback``; then ``pullback(dout, dlse)`` also takes
    the gradient of lse. ``kernel`` and ``tiles`` apply to ``attention``, and ``out`` is the dtype
    of its output; ``backward_kernel``, ``backward_tiles`` and ``deterministic`` apply to
    ``backward``. All further arguments apply to both. The pullback keeps references to q, k, v, out
    and lse, and reads their contents when it is called; it may be called several times.
    """
    is_other = type(q) in KINDS or type(k) in KINDS or type(v) in KINDS
    if is_other and (function := find_function("vjp", q, k, v)) is not None:
        return function(vjp, locals())
    if not both.keys() <= {*OF_BOTH_PASSES}:
        raise unknown_argument(vjp, both, OF_BOTH_PASSES)
    if out is not None and not isinstance(out, DTYPES):
        raise ValueError(
            f"out is {described(out)}, but vjp allocates the output itself, because the pullback "
            "keeps that array; pass a dtype as out, or call attention and backward"
        )
    pullback.refuse_gradients(INPUTS.get(str(getattr(q, "dtype", "")).removeprefix("torch.")))
    both = convert_lists(both) if both else both  # type: ignore[assignment]
    if wrt is not QKV:
        wrt = pullback.read_wrt(wrt)
        refuse_without_gradients(wrt, pullback.find_dtypes(both))
    return_lse, of_backward = pullback.read_pullback(
        return_lse, deterministic, backward_kernel, backward_tiles
    )
    lse, of_forward = None, dict[str, Any](kernel=kernel, tiles=tiles, out=out, **both)
    if (
        not return_lse
        and pullback.ignores_lse(backward_kernel)
        and not pullback.computes_lse(kernel)
    ):
        result = attention(q, k, v, **of_forward)
    else:
        result, lse = attention(q, k, v, return_lse=True, **of_forward)
    of_backward |= {"wrt": wrt, **both}
    pull = partial(_pullback, (q, k, v, result, lse), of_backward)
    return ((result, lse) if return_lse else result), pull


def _pullback(
    arrays: tuple[Any, ...], how: Mapping[str, Any], dout: Any, dlse: Any = None, **unknown: Any
) -> tuple[Any, ...]:
    """Calls ``backward``; a function at module level, so that pullbacks can be pickled."""
    if unknown:
        raise TypeError(
            f"pullback() has no argument {next(iter(unknown))!r}; its arguments are dout and dlse, "
            "and it returns new arrays: to write into existing arrays, call backward with grads="
        )
    return backward(dout, *arrays, dlse=dlse, **how)


def backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    deterministic: bool = False,
    dlse: Any = None,
    wrt: Sequence[str] = QKV,
    grads: Any = None,
    kernel: str | Kernel | BoundKernel = "auto",
    backend: BackendName | Backend | Devices = "auto",
    layout: Layout = "bhsd",
    tiles: Tiles | None = None,
    check: bool = False,
    **scores: Unpack[ScoreKeywords],
) -> tuple[Any, ...]:
    """Computes the gradients of ``attention`` from ``dout``, the gradient of its output.

    Pass the q, k, v and score arguments (causal, window, …) of the ``attention`` call; ``out``
    [..., heads, M, dv] and ``lse`` [..., heads, M] are its results with ``return_lse``. dout has
    the shape of out and the dtype of q. If out is float32, dq, dk and dv are float32, too. lse may
    be None for a custom kernel that computes no softmax.

    deterministic: whether every run must return the same bits.
    dlse: the gradient of lse, in the shape and dtype of lse; 0 by default.
    wrt: the names of the arrays to differentiate, as ("q", "bias") or "q,bias": q, k, v, bias,
        alibi_slopes, sink and captured float arrays.
    grads: an output array for each gradient, or None for a new array.

    ``attention`` describes all further arguments.

    Returns the gradients in the order of ``wrt``, by default dq, dk and dv, with the shapes and
    dtypes of their arrays (dq, dk and dv have the dtype of out), then the outputs that ``kernel``
    is bound to return. dk and dv are summed over the query heads that share a key head. The
    gradient of a row that sees no key is 0.

    Raises the errors of ``attention``, and Unsupported if ``deterministic`` is True and ``kernel``
    names a kernel that is not deterministic.

    FlashAttention: Dao et al., 2022, arXiv:2205.14135, appendix B; Dao, 2023, arXiv:2307.08691.
    """
    structure: Mapping[str, Any] = {}
    if type(q) in KINDS or type(k) in KINDS or type(v) in KINDS:
        if (function := find_function("backward", q, k, v)) is not None:
            return function(backward, locals())
        (q, k, v), structure = unwrap(q, k, v)
    # fmt: off
    fixed = (
        kernel, backend, layout, tiles, deterministic, wrt, dlse is None, *structure,
        *chain.from_iterable(scores.items()),
    )
    # fmt: on
    arrays: Sequence[Any] = (dout, q, k, v, out, lse)
    if not check:
        every = arrays if dlse is None else (*arrays, dlse)
        every = (*every, *structure.values()) if structure else every
        repeated = repeat_call("backward", fixed, every, grads=grads)
        if repeated is not None:
            return repeated
    where, devices = read_devices(backend)
    if lse is None:
        lse = pullback.make_unread_lse(kernel, q, where, layout)
        arrays = dout, q, k, v, out, lse
    inputs, asked = split_keywords(backward, scores) if scores else ({}, {})
    _, asked = read_out(out, q, asked)
    wrt = QKV if wrt is QKV else pullback.read_wrt(wrt)
    # fmt: off
    call = Call(
        "backward", kernel, where, None, asked, layout, tiles, deterministic=deterministic, wrt=wrt
    )
    # fmt: on
    if dlse is not None:
        inputs["dlse"] = pullback.check_dlse(dlse, lse)
    how: Any = {"check": check, "repeat": ("backward", fixed), "devices": devices}
    return run_call(call, arrays, {**inputs, **structure}, None, grads, **how)


def jvp(
    q: Any,
    k: Any,
    v: Any,
    *,
    tangents: Sequence[Any] | Mapping[str, Any],
    out: OutDtype | None = None,
    kernel: str | Kernel | BoundKernel = "auto",
    backend: BackendName | Backend | Devices = "auto",
    layout: Layout = "bhsd",
    tiles: Tiles | None = None,
    check: bool = False,
    **scores: Unpack[ScoreKeywords],
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Computes attention and its directional derivative in one launch, as ``jax.jvp`` does.

    tangents: (dq, dk, dv), the direction in which q, k and v move: arrays with the shapes and dtype
        of q, k and v, or None where an array does not move, which saves its products. Or a mapping
        from the names that ``wrt`` of ``backward`` may contain, as {"q": dq, "bias": d_bias}, to
        arrays with the shapes and dtypes of the named ones. For up to 64 directions in one launch,
        all tangents have a leading axis [directions, …].
    out: the dtype of out and d_out, "float32" for float16 and bfloat16 inputs.

    q, k and v are arrays, or ``Packed`` or ``Padded`` arrays in one direction. ``attention``
    describes all further arguments.

    Returns (out, lse) as ``attention`` with ``return_lse``, and (d_out, d_lse), their derivatives
    along the direction, with the same shapes and dtypes, and with the axis of the directions if
    there are several. A row that sees no key has d_out = 0 and d_lse = 0. d_out is NaN where out or
    d_lse is infinite or NaN. Memory is proportional to the arrays: no matrix of M x N numbers is
    stored.

    Raises the errors of ``attention``, and TypeError or ValueError for tangents of other shapes or
    dtypes and for names of arrays that are not given.

    Griewank and Walther, Evaluating Derivatives, 2008, chapter 3.
    """
    structure: Mapping[str, Any] = {}
    if type(q) in KINDS or type(k) in KINDS or type(v) in KINDS:
        if (function := find_function("jvp", q, k, v)) is not None:
            return function(jvp, locals())
        (q, k, v), structure = unwrap(q, k, v)
    if out is not None and not isinstance(out, DTYPES):
        raise ValueError(
            f"out is {described(out)}, but jvp allocates its results; pass a dtype as out"
        )
    pullback.refuse_gradients(INPUTS.get(str(getattr(q, "dtype", "")).removeprefix("torch.")))
    where, devices = read_devices(backend)
    scores = convert_lists(scores) if scores else scores  # type: ignore[assignment]
    inputs, asked = split_keywords(jvp, scores) if scores else ({}, {})
    along = read_tangents(tangents, q, scores)
    _, asked = read_out(out, q, asked)
    asked = {**asked, "tangents": along.letters, "directions": along.directions}
    call = Call("tangent", kernel, where, None, asked, layout, tiles, wrt=(*QKV, *along.others))
    how: Any = {"check": check, "devices": devices}
    given = {**inputs, **structure, **({TANGENTS: along.others} if along.others else {})}
    out, lse, d_out, d_lse = run_call(call, (q, k, v, *along.moving), given, **how)
    return (out, lse), (d_out, d_lse)


def hvp(
    q: Any,
    k: Any,
    v: Any,
    dout: Any,
    *,
    tangents: Sequence[Any],
    backend: BackendName | Backend = "auto",
    layout: Layout = "bhsd",
    check: bool = False,
    **scores: Unpack[HvpKeywords],
) -> tuple[Any, Any, Any]:
    """Computes the product of the Hessian of attention with a direction, in memory O(M d + N d).

    The function is f(q, k, v) = sum(dout * attention(q, k, v)), with the gradient that ``backward``
    returns for ``dout``. Returns the derivatives of its dq, dk and dv along the direction
    ``tangents``, (dq, dk, dv) or None for zeros, as for ``jvp`` with one direction: arrays with the
    shapes and dtype of q, k and v.

    q, k and v are arrays, not ``Packed`` or ``Padded``. score_mod must add to the score something
    that does not depend on it, as in "score + table[head, key]". ``attention`` describes all
    further arguments.

    Raises the errors of ``attention``, and Unsupported for other expressions.

    Pearlmutter, Fast exact multiplication by the Hessian, 1994.
    """
    if not scores.keys() <= {*OF_HVP}:
        raise unknown_argument(hvp, scores, OF_HVP)
    if type(q) in KINDS or type(k) in KINDS or type(v) in KINDS:
        raise Unsupported("hvp takes only dense arrays; call it for each sequence")
    if isinstance(tangents, Mapping):
        raise TypeError("tangents is a mapping, but hvp moves q, k and v; pass (dq, dk, dv)")
    how: Any = {"backend": backend, "layout": layout, "check": check, **scores}
    (out, lse), (d_out, d_lse) = jvp(q, k, v, tangents=tangents, **how)
    record = bound_hvp((q, k, v), tangents, d_out, d_lse, layout)
    return backward(dout, q, k, v, out, lse, kernel=record, **how)  # type: ignore[return-value]


def compile(
    *arrays: Any, dtype: DTypeLike | None = None, **keywords: Unpack[CallKeywords]
) -> Prepared:
    """Plans a call of ``attention``, ``backward`` or ``jvp`` and compiles its kernels.

    ``compile(q, k, v, …)`` prepares ``attention``, ``compile(dout, q, k, v, out, lse, …)`` prepares
    ``backward``, and ``compile(q, k, v, tangents=(dq, dk, dv), …)`` prepares ``jvp``.

    arrays: arrays with the shapes, strides and dtypes of later calls, or only the shapes of
        contiguous arrays of ``dtype``, a name or a NumPy dtype (CuPy arrays; NumPy arrays in the
        simulator). Fields of structured arrays such as ``Packed(q, offsets)`` are arrays or shapes
        in the same way. With shapes, lse is float32, or float64 for float64.
    keywords: further arguments of the prepared function. bias, mask, sink and other optional
        arrays are given as arrays or, with shapes, in the notation of ``plan``; dlse is an array or
        shape like lse. With shapes, ``out=`` is the dtype of the output, also for
        ``backward``, and a kernel must not be bound to arrays, since the problem determines their
        shapes. tangents are arrays; with shapes, they are the shapes of dq, dk and dv.

    Returns a Prepared. ``prepared(q, k, v, out=None)`` or ``prepared(dout, q, k, v, out, lse,
    grads=None)`` takes a few microseconds for CuPy arrays, and raises for arrays of other shapes,
    strides, dtypes or devices. Optional arrays and dlse are passed by name in each call:
    ``prepared(q, k, v, bias=bias, captured={"slope": slope})``. That of ``jvp`` takes the tangents
    that move, ``prepared(q, k, v, dq, dk, dv)`` or d_bias=… by name, and returns (out, lse, d_out,
    d_lse). Numbers such as scale are fixed at compile time. Offsets and lengths are int32; in GPU
    memory they are not checked.
    """
    if len(arrays) not in (3, 6):
        raise TypeError(
            f"compile() got {len(arrays)} arrays; pass q, k and v for attention, or dout, q, k, v, "
            "out and lse for backward"
        )
    return compile_call(compile, arrays, dtype, keywords)


def softmax(
    x: Any,
    *,
    kernel: str | Kernel | BoundKernel = "auto",
    backend: BackendName | Backend | Devices = "auto",
    tiles: Tiles | None = None,
    return_lse: bool = False,
    out: Any = None,
    check: bool = False,
    **unknown: Unpack[NoKeywords],
) -> Any:
    """Computes the softmax along the last axis without overflow.

    x [..., N] of float16, bfloat16, float32 or float64; further arguments as for ``attention``.
    Returns an array like x; with ``return_lse`` also the natural logarithm of each row's sum of
    exp(x), [...] in float32 (float64 for float64).

    Online softmax: Milakov and Gimelshein, 2018, arXiv:1805.02867.
    """
    if unknown:
        raise unknown_argument(softmax, unknown)
    fixed = kernel, backend, tiles, return_lse
    if not check and (repeated := repeat_call("softmax", fixed, (x,), out)) is not None:
        return repeated
    where, devices = read_devices(backend)
    call = Call("softmax", kernel, where, tiles=tiles, return_lse=return_lse)
    how: Any = {"check": check, "repeat": ("softmax", fixed), "devices": devices}
    return run_call(call, (x,), {}, out, **how)


def plan(
    *,
    kernel: str | Kernel | BoundKernel = "auto",
    backend: BackendName | Backend = "auto",
    limits: Limits | None = None,
    tiles: Tiles | None = None,
    M: int,
    N: int | None = None,
    d: int,
    dv: int | None = None,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int | None = None,
    dtype: DTypeLike = "float32",
    out: OutDtype | None = None,
    lengths_q: Any = None,
    lengths_k: Any = None,
    scales: Sequence[str] = (),
    return_max: bool = False,
    **scores: Unpack[ScoreKeywords],
) -> Plan:
    """Plans an attention call from its sizes, without arrays and without launching kernels.

    N defaults to M, dv to d, kv_heads to heads. ``limits`` describes the target device, by default
    that of the backend. ``out`` is the dtype of the output.

    alibi_slopes, bias, mask, sink and the arrays of ``captured`` are given as a shape, (1, 8, 64,
    64), or as letters for the axes, "1hmn". Their dtype is then float32, except that bias has
    ``dtype`` and mask is bool. To set the dtype, write "f16[1hmn]", or for captured arrays "i32[M]"
    or "f32[heads]". Arrays are accepted as well, and only their shapes and dtypes are used. A mask
    may also be a ``block_mask`` or an expression. lengths_q and lengths_k, the lengths of
    ``Padded`` arrays, are True or "i32[batch]". ``scales`` lists the ``Scaled`` arrays, as "qkv".
    With ``return_max`` the call also returns each row's largest score.

    Raises the errors of ``attention``.
    """
    arrays, asked = split_keywords(plan, scores)
    if out is not None:
        asked = {**asked, "out_dtype": out}  # type: ignore[typeddict-item]
    padded = {"lengths_q": lengths_q, "lengths_k": lengths_k}
    arrays |= {name: x for name, x in padded.items() if x is not None}
    arrays |= {f"{name}_descale": True for name in scales}
    chosen = AttentionOptions.of(None, asked)
    sizes: dict[str, Any] = {"M": M, "N": N, "d": d, "dv": dv, "batch": batch, "heads": heads}
    sizes |= {"kv_heads": kv_heads, "dtype": dtype}
    blocks, arrays = split_block_mask(arrays)
    problem = Problem.of_sizes(**sizes, options=chosen, return_max=return_max, **arrays)
    if blocks is not None:
        problem = blocks.masked(problem)
    limits = limits or backend_named(backend).limits
    if isinstance(kernel, BoundKernel):
        kernel = kernel.with_floats()
    record = planning.select(kernel, "forward", problem, limits)
    made = planning.plan(record, problem, limits, **read_tiles(tiles))
    return made if blocks is None else blocks.planned(made, limits)


def dropout_mask(dropout: Dropout, *, batch: int, heads: int, M: int, N: int) -> Array:
    """Returns the dropout mask of ``attention``: bool [batch, heads, M, N], True for kept weights.

    ``heads`` counts query heads. An element of the mask depends on its batch, head, query and key
    indices and on the seed and offset, not on M and N. Different seeds or offsets are independent.

    Raises ValueError or TypeError for wrong arguments.

    Philox 4x32-7: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011.
    """
    inputs, asked = split_keywords(dropout_mask, {"dropout": dropout})
    options = AttentionOptions.of(None, asked)
    sizes = {"batch": batch, "heads": heads, "M": M, "N": N}
    shape = tuple(read_size(name, size, MOST) for name, size in sizes.items())
    read = tuple(optional_inputs.of_value(name, x) for name, x in inputs.items())
    optional_inputs.modifiers(options, read, shape)  # raises for arrays that cannot be seeds
    arrays = {name.removeprefix("dropout_"): x for name, x in inputs.items()}
    chosen = KeptWeights.of(options, shape[1], **arrays)
    if chosen is None or 0 in shape:
        return np.ones(shape, bool)
    return chosen.kept(*np.ogrid[tuple(slice(size) for size in shape)])


def empty_pinned(
    shape: int | Sequence[int], dtype: Any = "float32", *, backend: BackendName | Backend = "auto"
) -> np.ndarray:
    """Allocates an uninitialized NumPy array in page-locked host memory.

    Copies between pinned memory and the GPU need no staging buffer, but allocation takes longer.
    The simulator returns an ordinary array.
    """
    sizes = read_shape("shape", (shape,) if isinstance(shape, int | np.integer) else shape)
    of = dtype_named(dtype).numpy if dtype == "bfloat16" else np.dtype(dtype)
    backend = backend_named(backend)
    with backend.working_on(None):
        memory = backend.pinned(max(prod(sizes) * of.itemsize, 1))
        return memory[: prod(sizes) * of.itemsize].view(of).reshape(sizes)
