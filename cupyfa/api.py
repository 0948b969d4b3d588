"""The functions of the library: NumPy in, NumPy out; CuPy or DLPack in, CuPy out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, filterfalse
from math import prod
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np

from cupyfa.arrays.block_mask import BlockMask
from cupyfa.call import pullback, sequences
from cupyfa.call.call import BackendName, Call, Devices, Layout, Own, Tiles
from cupyfa.call.execution import run_call
from cupyfa.call.inputs import add_inputs, split_block_mask
from cupyfa.call.kernel_arrays import add_kernel_arrays, divide_arrays, find_record, set_floats
from cupyfa.call.keywords import (
    OF_BOTH_PASSES,
    convert_lists,
    read_shape,
    read_tiles,
    select_arrays,
    split_keywords,
    unknown_argument,
)
from cupyfa.call.prepare import compile_call
from cupyfa.ladder.kernel import Kernel
from cupyfa.planner import choose_kernel as planning
from cupyfa.planner.plan import Limits, Plan
from cupyfa.problem import optional_inputs
from cupyfa.problem.dtypes import INPUTS, DTypeLike, dtype_named
from cupyfa.problem.options import (
    NOT_GIVEN,
    OPTIONS,
    AttentionOptions,
    Causal,
    OutDtype,
    Precision,
    Text,
    Window,
    read_size,
)
from cupyfa.problem.problem import MOST, Problem
from cupyfa.problem.wrt import QKV, refuse_without_gradients
from cupyfa.runtime import ragged
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.call_cache import is_none, repeat_call
from cupyfa.runtime.choose_backend import backend_named
from cupyfa.runtime.prepared import Prepared, Progress
from cupyfa.score.dropout import Dropout

if TYPE_CHECKING:
    from cupyfa.arrays.kv_cache import KVCache
    from cupyfa.call.keywords import (
        CommonKeywords,
        CompileKeywords,
        NoKeywords,
        PaddedKeywords,
        RaggedKeywords,
        RaggedTilesKeywords,
    )

Array = np.ndarray[Any, Any]
# What ``attention`` reads besides q, k and v, the arrays in the order of calls.
_READ = (
    "captured",
    *optional_inputs.OWN_ARRAYS,
    *optional_inputs.PADDED,
    *optional_inputs.DESCALES,
)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Causal | bool | None = NOT_GIVEN,
    window: Window | None = NOT_GIVEN,
    offset: int | None = NOT_GIVEN,
    scale: float | None = NOT_GIVEN,
    softcap: float | None = NOT_GIVEN,
    score_mod: Text = NOT_GIVEN,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    mask_mod: Text = NOT_GIVEN,
    captured: Mapping[str, Any] | None = None,
    out_dtype: OutDtype | None = NOT_GIVEN,
    sink: Any = None,
    lengths_q: Any = None,
    lengths_k: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    dropout: float = NOT_GIVEN,
    dropout_seed: Any = NOT_GIVEN,
    dropout_offset: Any = NOT_GIVEN,
    precision: Precision | None = NOT_GIVEN,
    options: AttentionOptions | None = None,
    kernel: str | Kernel = "auto",
    backend: BackendName | Backend = "auto",
    layout: Layout = "bhsd",
    tiles: Tiles | None = None,
    own: Own | None = None,
    return_lse: bool = False,
    return_max: bool = False,
    return_own: Sequence[str] = (),
    out: Any = None,
    check: bool = False,
    progress: Progress | None = None,
    devices: Devices | None = None,
    **unknown: Unpack[NoKeywords],
) -> Any:
    """softmax(q kᵀ · scale) v, computed without storing the matrix of scores.

    q [..., heads, M, d], k [..., kv_heads, N, d], v [..., kv_heads, N, dv] of one dtype: float16,
    bfloat16 (ml_dtypes), float32, float64 or float8_e4m3fn (ml_dtypes). heads is a multiple of
    kv_heads, and query head h reads key head h // (heads // kv_heads). Arrays of two axes are one
    head, those of three are [heads, rows, d]; with ``layout="bshd"`` arrays are [batch, rows,
    heads, d]. Any size may be 0, and arrays may have any strides.

    causal: with True or "bottom-right" query i sees keys j <= i + N - M, with "top-left" j <= i.
    window: (left, right); query i at position p = i + N - M (p = i with a "top-left" mask) sees
        keys p - left <= j <= p + right. None is no limit; a causal mask is the limit right = 0.
    offset: the position of query 0 among the keys, in place of N - M, for masks, windows and
        expressions: a causal mask lets query i see keys j <= i + offset. It makes a call on some of
        the queries or keys a part of the call on all.
    scale: the factor of the scores, by default 1/sqrt(d).
    softcap: scores become softcap · tanh(score / softcap), after the scale.
    score_mod: an expression as text, or a Python function, that gives the score after that from
        ``score batch head query key position queries keys`` and from ``captured``, as in
        "score - slope[head] * abs(position - key)". position is query + N - M, or query under a
        "top-left" mask.
    alibi_slopes: [heads] or [batch, heads]; slope · abs(position - key) is subtracted.
    bias: added to the score; of any float, broadcastable to [batch, heads, M, N].
    mask: of bool, broadcastable likewise; True is seen. Or a ``block_mask``, whose empty tiles are
        skipped.
    mask_mod: an expression like score_mod that is True for the pairs that are seen. A pair is seen
        if all masks say so.
    captured: the arrays and numbers that the expressions name, as {"slope": array}. Arrays are of
        bool, whole numbers or floats; an index has to be inside its axis.
    sink: [heads] or [batch, heads], of any float: one more score of every row of a head, without a
        value. The softmax and lse include it; -infinity has no effect.
    lengths_q, lengths_k: [batch], how many queries and keys of each batch element count, from the
        first on; by default all. Masks, windows and expressions are aligned as for arrays of these
        lengths. The other rows have no influence: out and gradients are 0 there, and lse is
        -infinity. Whole numbers in a list or a NumPy array, which are checked; or an array of int32
        where q is, which kernels read when they run: wrong ones count as the nearest right ones.
    q_descale, k_descale, v_descale: [batch, kv_heads] of float32, by which q, k and v of
        float8_e4m3fn are multiplied; batch is the product of all batch axes, and all heads of q
        that share a key head have one q_descale. By default 1. Such inputs are not rounded, and
        their out is bfloat16.
    dropout: the probability, from 0 to below 1, with which a weight of the softmax is set to 0; the
        others are multiplied by 1/(1 - dropout). lse is that without dropout. ``dropout_seed``, a
        whole number of 64 bits that a dropout above 0 needs, and ``dropout_offset``, one of 32
        bits and by default 0, choose the weights: ``dropout_mask`` shows them. Each may also be an
        array of one whole number, NumPy's or CuPy's, which kernels read when they run: so a
        captured CUDA graph takes other weights each time. Of it the lowest 64 and 32 bits count.
    out_dtype: "float32" gives out of float16 and bfloat16 inputs in float32, in which it is summed,
        without its last rounding: for parts that are merged or added. By default out has the dtype
        of the inputs. Of float8_e4m3fn inputs it is "bfloat16", "float16" or "float32".
    precision: what float32 inputs may be rounded to, "tf32", "float16" or "bfloat16". By default
        they are not, unless ``kernel`` is one that always rounds them. "float8_e4m3" is also for
        float16 and bfloat16 inputs.
    options: all options that are not arrays, as one AttentionOptions.
    kernel: a name of ``kernels()``, a Kernel, or "auto".
    backend: "cuda", "simulator", "auto", or a Simulator with settings of its own.
    tiles: tile sizes of the kernel, for example ``{"Br": 64, "Bc": 32}``; the others are chosen.
    own: what a Kernel of your own takes besides: all arrays of its ``inputs``, where q is, in the
        order of the axes there (in any layout); and its ``floats`` that are to be other numbers.
    return_own: names of its ``outputs`` to return after the other results.
    check: also compare all results with the reference, and detect writes outside of them.
    progress: ``progress(done, total, what)`` is called as chunks of NumPy arrays are done.
    devices: for NumPy arrays, the GPUs that share the work: "all", or their numbers as [0, 1]; by
        default the current one. The bits are those of one GPU, but for kernels whose sums depend on
        the number of heads or rows.

    Returns out [..., heads, M, dv] of the dtype (see out_dtype) and kind of the inputs, in ``out``
    if it is given; with ``return_lse`` also the natural logarithm of each row's sum of exp(score),
    [..., heads, M] in float32 (float64 for float64); and with ``return_max`` the largest score of
    each row like lse, as the softmax takes it: after the scale, all changes and masks. A sink is
    no score of a key, and has no part in it. A row that sees no key has out = 0, lse = -infinity,
    or its sink, and the maximum -infinity. Where lse is NaN, the maximum is NaN.

    Raises ValueError or TypeError for wrong arguments, Unsupported if the kernel or device cannot
    do the problem, DeviceError if the device fails, SimulatorFault if a kernel does something wrong
    in the simulator, CompilerNotFound if the simulator finds no compiler, WrongResult if a check
    fails.

    FlashAttention: Dao et al., 2022, arXiv:2205.14135; Dao, 2023, arXiv:2307.08691.
    """
    if isinstance(q, list | tuple) and ragged.are_lists(q, k, v):
        return sequences.attention_of_lists(attention, attention_ragged, locals())
    if unknown:
        raise unknown_argument(attention, unknown)
    # fmt: off
    fixed: tuple[Any, ...] = (
        # In the order of OPTIONS.
        precision, causal, window, offset, scale, softcap, score_mod, mask_mod, out_dtype,
        dropout, dropout_seed, dropout_offset,
        kernel, backend, options, layout, tiles, return_lse, return_max, captured, own, return_own,
        devices,
    )
    # fmt: on
    arrays: Sequence[Any] = (q, k, v)
    read: tuple[Any, ...] = ()
    if not (
        alibi_slopes is bias is mask is sink is lengths_q is lengths_k is None
        and q_descale is k_descale is v_descale is None
    ):
        blocks, dense = (mask, None) if isinstance(mask, BlockMask) else (None, mask)
        read = alibi_slopes, bias, dense, sink, lengths_q, lengths_k
        read += q_descale, k_descale, v_descale
        fixed += blocks, *map(is_none, read)
        arrays = *arrays, *filterfalse(is_none, read)
    if not check and (repeated := repeat_call("attention", fixed, arrays, out)) is not None:
        return repeated
    asked: Any = {name: x for name, x in zip(OPTIONS, fixed) if x is not NOT_GIVEN}
    given: dict[str, Any] = {}
    if read or captured is not None or not asked.keys().isdisjoint(optional_inputs.SEEDS):
        named = dict(zip(_READ, (captured, *read)))
        given, asked = split_keywords(attention, {**asked, **named})
    if isinstance(mask, BlockMask):
        given["mask"] = mask
    call = Call(
        *("forward", kernel, backend, options, asked, layout, tiles, return_lse),
        return_max=return_max,
    )
    arrays = q, k, v
    if given:
        call, arrays = add_inputs(call, arrays, given, check)
    if own is not None or return_own:
        call, arrays = add_kernel_arrays(call, arrays, own, return_own)
    repeat = "attention", fixed
    return run_call(
        call, arrays, out, check=check, progress=progress, repeat=repeat, devices=devices
    )


def compile(
    q: Any,
    k: Any,
    v: Any,
    *,
    dtype: DTypeLike | None = None,
    options: AttentionOptions | None = None,
    kernel: str | Kernel = "auto",
    backend: BackendName | Backend = "auto",
    layout: Layout = "bhsd",
    tiles: Tiles | None = None,
    own: Own | None = None,
    return_lse: bool = False,
    return_max: bool = False,
    return_own: Sequence[str] = (),
    **keywords: Unpack[CompileKeywords],
) -> Prepared:
    """The prepared form of ``attention``: its plan is made and its kernels are compiled.

    q, k and v are arrays with the forms of later calls, or the shapes of contiguous arrays of
    ``dtype``, a name or NumPy's dtype (CuPy arrays; NumPy arrays in the simulator). The other
    arguments are those of ``attention``; with shapes, ``own`` has no arrays, whose shapes follow.
    Arrays that change scores are such arrays too, or with shapes the forms that ``plan`` takes.
    With cu_seqlens_q and cu_seqlens_k, arrays of int32 or their shapes, it is the prepared form of
    ``attention_ragged``: q, k and v are packed arrays, and seqused_q and seqused_k may be given.

    Returns a Prepared: ``prepared(q, k, v, out=None)`` takes a few microseconds for CuPy arrays. It
    refuses arrays of other shapes, strides, dtypes or devices. Arrays that change scores are given
    in each call, by name, ``prepared(q, k, v, bias=bias, captured={"slope": slope})``, or after v
    in the order alibi_slopes, bias, mask, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
    lengths_q, lengths_k, q_descale, k_descale, v_descale, captured, these sorted by name. Numbers
    keep their values.
    Offsets and lengths are int32; those in GPU memory are not checked.
    """
    of_sequences, others = sequences.split_offsets(compile, keywords)
    layout = "bshd" if of_sequences else layout
    given, asked = split_keywords(compile, others)
    call = Call(
        *("forward", kernel, backend, options, asked, layout, tiles, return_lse),
        return_max=return_max,
    )
    return compile_call(call, (q, k, v), dtype, given | of_sequences, own, return_own)


def compile_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dtype: DTypeLike | None = None,
    options: AttentionOptions | None = None,
    deterministic: bool = False,
    kernel: str | Kernel = "auto",
    backend: BackendName | Backend = "auto",
    layout: Layout = "bhsd",
    tiles: Tiles | None = None,
    own: Own | None = None,
    return_own: Sequence[str] = (),
    dlse: Any = None,
    wrt: Sequence[str] = QKV,
    **keywords: Unpack[CompileKeywords],
) -> Prepared:
    """The prepared form of ``attention_backward``, as ``compile`` makes that of ``attention``.

    As shapes, lse is of float32, or float64 for float64, and dlse, if there is one, like lse. The
    other arguments are those of ``attention_backward``. The Prepared is called as
    ``prepared(dout, q, k, v, out, lse, grads=None)``, with ``dlse=`` if it was made with one, and
    with ``cu_seqlens_q=`` and the others likewise. A kernel of your own that reads no lse takes
    None for it, here and in each call.
    """
    if lse is None and dtype is None:
        lse = pullback.make_unread_lse(kernel, q, backend, layout)
    elif lse is None and pullback.ignores_lse(kernel):
        lse = out[:-1] if layout == "bhsd" else (*out[:-3], out[-2], out[-3])
    of_sequences, others = sequences.split_offsets(compile_backward, keywords)
    layout = "bshd" if of_sequences else layout
    wrt = pullback.read_wrt(wrt)
    given, asked = split_keywords(compile_backward, others)
    given |= of_sequences
    if dlse is not None:
        given["dlse"] = pullback.check_dlse(dlse, lse) if dtype is None else dlse
    call = Call(
        "backward", kernel, backend, options, asked, layout, tiles, False, deterministic, wrt=wrt
    )
    return compile_call(call, (dout, q, k, v, out, lse), dtype, given, own, return_own)


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    options: AttentionOptions | None = None,
    deterministic: bool = False,
    kernel: str | Kernel = "auto",
    backend: BackendName | Backend = "auto",
    layout: Layout = "bhsd",
    tiles: Tiles | None = None,
    own: Own | None = None,
    return_own: Sequence[str] = (),
    dlse: Any = None,
    wrt: Sequence[str] = QKV,
    grads: Any = None,
    check: bool = False,
    devices: Devices | None = None,
    **keywords: Unpack[PaddedKeywords],
) -> tuple[Any, ...]:
    """The gradients of q, k and v, for the gradient ``dout`` of the output of ``attention``.

    q, k, v and the options (causal, window, …) are those of the call of ``attention``; ``out``
    [..., heads, M, dv] and ``lse`` [..., heads, M] are its results with ``return_lse``. dout has
    the shape of out and the dtype of q. With ``out_dtype="float32"`` out is in float32, and dq, dk
    and dv, too. With ``deterministic`` every run gives the same bits. ``dlse`` is the gradient
    of lse, of its shape and dtype; by default it is 0. A kernel of your own that computes
    no softmax takes None for lse. ``wrt`` names the arrays whose gradients are
    returned, as ("q", "bias") or "q,bias": q, k, v, bias, alibi_slopes, sink and captured arrays of
    floats. ``grads`` has an array for each of them, or None for a new one.
    ``own``, ``return_own`` and ``devices`` are as for ``attention``.

    Returns the gradients in the order of ``wrt``, by default dq, dk and dv, with the shapes and
    dtypes of their arrays (dq, dk and dv see out_dtype), then the arrays of ``return_own``; dk and
    dv are sums over the query heads that share a key head. The gradient of a row that sees no key
    is 0.

    Raises what ``attention`` raises, and Unsupported if the named kernel is not deterministic but
    has to be.

    FlashAttention: Dao et al., 2022, arXiv:2205.14135, appendix B; Dao, 2023, arXiv:2307.08691.
    """
    # fmt: off
    fixed = (
        kernel, backend, options, layout, tiles, deterministic, wrt, own, return_own, devices,
        dlse is None, *chain.from_iterable(keywords.items()),
    )
    # fmt: on
    arrays: Sequence[Any] = (dout, q, k, v, out, lse)
    if not check:
        every = arrays if dlse is None else (*arrays, dlse)
        repeated = repeat_call("attention_backward", fixed, every, grads=grads)
        if repeated is not None:
            return repeated
    if lse is None:
        lse = pullback.make_unread_lse(kernel, q, backend, layout)
        arrays = dout, q, k, v, out, lse
    given, asked = split_keywords(attention_backward, keywords) if keywords else ({}, {})
    wrt = QKV if wrt is QKV else pullback.read_wrt(wrt)
    call = Call(
        "backward", kernel, backend, options, asked, layout, tiles, False, deterministic, wrt=wrt
    )
    if dlse is not None:
        given["dlse"] = pullback.check_dlse(dlse, lse)
    if given:
        call, arrays = add_inputs(call, arrays, given, check)
    if own is not None or return_own:
        call, arrays = add_kernel_arrays(call, arrays, own, return_own)
    repeat = "attention_backward", fixed
    return run_call(call, arrays, None, grads, check=check, repeat=repeat, devices=devices)


def attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    *,
    deterministic: bool = False,
    kernel: str | Kernel = "auto",
    backward_kernel: str | Kernel = "auto",
    tiles: Tiles | None = None,
    backward_tiles: Tiles | None = None,
    own: Own | None = None,
    return_lse: bool = False,
    wrt: Sequence[str] = QKV,
    **options: Unpack[CommonKeywords],
) -> tuple[Any, Callable[..., tuple[Any, ...]]]:
    """The attention of q, k and v, and the function that computes its gradients.

    Returns out and ``pullback``; ``pullback(dout)`` gives the gradients of ``wrt``, by default dq,
    dk and dv; dout has the dtype of q, also if out is in float32. With ``return_lse`` it returns
    (out, lse) and ``pullback``; then ``pullback(dout, dlse)`` takes the gradient of lse too.
    ``kernel`` and ``tiles`` are passed to ``attention``; ``backward_kernel``, ``backward_tiles``
    and ``deterministic`` are passed to ``attention_backward``. The other arguments go to both, and
    each kernel gets the arrays of ``own`` that its record declares. The pullback keeps references
    to q, k, v, out and lse, and may be called several times; it uses their contents at that time.
    """
    if isinstance(q, list | tuple) and ragged.are_lists(q, k, v):
        return sequences.vjp_of_lists(attention_vjp, attention_ragged_vjp, locals())
    if not options.keys() <= OF_BOTH_PASSES.keys():
        if given := options.keys() & {"return_own", "out", "grads"}:
            raise ValueError(
                f"attention_vjp has no option {', '.join(sorted(given))}: its pullback keeps out "
                "and lse; call attention and attention_backward to have them"
            )
        raise unknown_argument(attention_vjp, options, tuple(OF_BOTH_PASSES))
    pullback.refuse_gradients(INPUTS.get(str(getattr(q, "dtype", "")).removeprefix("torch.")))
    options = convert_lists(options) if options else options  # type: ignore[assignment]
    if wrt is not QKV:
        wrt = pullback.read_wrt(wrt)
        refuse_without_gradients(wrt, pullback.find_dtypes(options))
    return_lse, how = pullback.read_pullback(
        return_lse, deterministic, backward_kernel, backward_tiles
    )
    forward, backward = divide_arrays(own, kernel, backward_kernel)
    lse, of_forward = None, dict[str, Any](kernel=kernel, tiles=tiles, own=forward, **options)
    if (
        not return_lse
        and pullback.ignores_lse(backward_kernel)
        and not pullback.computes_lse(kernel)
    ):
        out = attention(q, k, v, **of_forward)
    else:
        out, lse = attention(q, k, v, return_lse=True, **of_forward)

    how |= {"own": backward, "wrt": wrt}
    pull = partial(_pullback, attention_backward, (q, k, v, out, lse), {**how, **options})
    return ((out, lse) if return_lse else out), pull


def _pullback(
    backward: Callable[..., tuple[Any, ...]],
    arrays: tuple[Any, ...],
    how: Mapping[str, Any],
    dout: Any,
    dlse: Any = None,
    **unknown: Any,
) -> tuple[Any, ...]:
    """The function that ``attention_vjp`` returns, with its first arguments; it can be pickled."""
    if unknown:
        raise TypeError(
            f"pullback() has no argument {next(iter(unknown))!r}; it has dout and dlse, and "
            "returns new arrays: attention_backward writes into grads="
        )
    return backward(dout, *arrays, dlse=dlse, **how)


def attention_ragged(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    seqused_q: Any = None,
    seqused_k: Any = None,
    kernel: str | Kernel = "auto",
    return_lse: bool = False,
    return_max: bool = False,
    out: Any = None,
    **keywords: Unpack[RaggedTilesKeywords],
) -> Any:
    """``attention`` of sequences of different lengths, which lie one after the other.

    q [total queries, heads, d], k [total keys, kv_heads, d], v [total keys, kv_heads, dv]. Rows
    cu_seqlens_q[i] to cu_seqlens_q[i + 1] - 1 of q and cu_seqlens_k[i] to cu_seqlens_k[i + 1] - 1
    of k and v are sequence i; any may be empty. The first seqused_q[i] and seqused_k[i] of them
    count, by default all. These are [sequences + 1] and [sequences] of int32, of NumPy or where q
    is: kernels read them when they run, so that a captured CUDA graph takes other lengths each
    time.

    Masks, windows and expressions are each sequence's own: query and key count from 0 in it,
    queries and keys are its lengths, batch is its number, as in alibi_slopes and sink [sequences,
    heads]. The bits of a sequence do not depend on finite numbers of others. bias=, mask= and
    block masks are refused: give an expression that reads ``captured``. The other arguments are
    as for ``attention``.

    Returns out [total queries, heads, dv], with ``return_lse`` lse [heads, total queries], and with
    ``return_max`` the largest scores likewise. A row of no sequence has out = 0, and -infinity in
    the others.

    Raises what ``attention`` raises; ValueError for offsets that fall or go beyond the arrays,
    where they are NumPy's or with ``check``. From others nothing outside the arrays is read or
    written.
    """
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    asked = kernel, return_lse, return_max
    fixed, read = sequences.split_fixed(asked, keywords, (None, *lengths))
    if (repeated := repeat_call("attention_ragged", fixed, (q, k, v, *read), out)) is not None:
        return repeated
    returned: Any = {"return_lse": return_lse, "return_max": return_max}
    call = Call("forward", kernel, keywords.get("backend", "auto"), **returned)
    packed = {"q": q, "k": k, "v": v}
    call, arrays = sequences.add_sequences(attention_ragged, call, packed, lengths, keywords)
    how: Any = {"check": keywords.get("check", False), "devices": keywords.get("devices")}
    return run_call(call, arrays, out, **how, repeat=("attention_ragged", fixed))


def attention_ragged_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    seqused_q: Any = None,
    seqused_k: Any = None,
    deterministic: bool = False,
    kernel: str | Kernel = "auto",
    dlse: Any = None,
    **keywords: Unpack[RaggedTilesKeywords],
) -> tuple[Any, Any, Any]:
    """The gradients of q, k and v, for the gradient ``dout`` of the output of ``attention_ragged``.

    q, k, v, the offsets and the options are those of the call of ``attention_ragged``, ``out`` and
    ``lse`` its results with ``return_lse``. dlse is the gradient of lse, by default 0. With
    ``deterministic`` every run gives the same bits.

    Returns dq, dk and dv, like q, k and v; of rows of no sequence they are 0. Raises what
    ``attention_ragged`` raises.
    """
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    function = attention_ragged_backward
    arrays: Sequence[Any] = (dout, q, k, v, out, lse)
    fixed, read = sequences.split_fixed((kernel, deterministic), keywords, (dlse, *lengths))
    if (repeated := repeat_call(function.__name__, fixed, (*arrays, *read))) is not None:
        return repeated
    call = Call("backward", kernel, keywords.get("backend", "auto"), deterministic=deterministic)
    packed = dict(zip(("dout", "q", "k", "v", "out", "lse"), arrays))
    call, arrays = sequences.add_sequences(function, call, packed, lengths, keywords, dlse)
    how: Any = {"check": keywords.get("check", False), "devices": keywords.get("devices")}
    return run_call(call, arrays, **how, repeat=(function.__name__, fixed))


def attention_ragged_vjp(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    seqused_q: Any = None,
    seqused_k: Any = None,
    deterministic: bool = False,
    kernel: str | Kernel = "auto",
    backward_kernel: str | Kernel = "auto",
    tiles: Tiles | None = None,
    backward_tiles: Tiles | None = None,
    return_lse: bool = False,
    **keywords: Unpack[RaggedKeywords],
) -> tuple[Any, Callable[..., tuple[Any, Any, Any]]]:
    """``attention_ragged``, and the function that computes its gradients.

    Returns out and ``pullback``; ``pullback(dout, dlse=None)`` gives dq, dk and dv. With
    ``return_lse`` it returns (out, lse) and ``pullback``. ``kernel`` and ``tiles`` are those of
    ``attention_ragged``, ``backward_kernel`` and ``backward_tiles`` those of the gradients.
    """
    return_lse, how = pullback.read_pullback(
        return_lse, deterministic, backward_kernel, backward_tiles
    )
    of_both: Any = {"seqused_q": seqused_q, "seqused_k": seqused_k}
    of_both |= convert_lists(keywords)
    out, lse = attention_ragged(
        q, k, v, cu_seqlens_q, cu_seqlens_k, kernel=kernel, tiles=tiles, return_lse=True, **of_both
    )

    arrays = q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k
    pull = partial(_pullback, attention_ragged_backward, arrays, {**how, **of_both})
    return ((out, lse) if return_lse else out), pull


def decode(
    q: Any,
    cache: KVCache,
    *,
    k: Any = None,
    v: Any = None,
    rotary: tuple[Any, Any] | None = None,
    interleaved: bool = False,
    prefix: Any = None,
    window: Window | None = NOT_GIVEN,
    scale: float | None = NOT_GIVEN,
    softcap: float | None = NOT_GIVEN,
    score_mod: Text = NOT_GIVEN,
    mask_mod: Text = NOT_GIVEN,
    out_dtype: OutDtype | None = NOT_GIVEN,
    alibi_slopes: Any = None,
    sink: Any = None,
    captured: Mapping[str, Any] | None = None,
    options: AttentionOptions | None = None,
    splits: int | Literal["auto"] = "auto",
    kernel: str | Kernel = "auto",
    backend: BackendName | Backend = "auto",
    tiles: Tiles | None = None,
    return_lse: bool = False,
    return_max: bool = False,
    out: Any = None,
    check: bool = False,
    **unknown: Unpack[NoKeywords],
) -> Any:
    """``attention`` of new tokens to the keys and values of a ``KVCache``.

    q [batch, heads, new tokens, d]; heads is a multiple of the cache's kv_heads. The new tokens are
    the last ones of each sequence: of n keys, token i sees those up to n - new tokens + i.

    k, v: [batch, kv_heads, new tokens, d | dv], the keys and values of the new tokens, which are
        first written into the cache from row cache.lengths on; a sequence then has that many more
        keys. Without them the cache has them already, and cache.lengths counts them. Either way
        cache.lengths stays as it is.
    rotary: (cos, sin), each [positions, angles], of the dtype of q or of lse: the columns of q, and
        of k before it is written, are rotated by their positions, in pairs (x, x + angles). Columns
        from 2 · angles on stay as they are.
    interleaved: whether the pairs of rotary are (2 x, 2 x + 1).
    prefix: keys and values that all sequences share and that come before those of the cache: a
        tuple (k, v) of arrays [1, kv_heads, keys, d | dv], or a KVCache of one sequence. They are
        read once for all sequences, by the kernel that "auto" stands for; kernel, tiles and splits
        are for the sequences' own keys. With g sequences in place of one, each is shared by batch /
        g consecutive sequences. A list has several of these, from the outermost to the innermost.
        Positions, windows and expressions count as if one cache held all of these keys.
    splits: into how many parts the keys of a row are divided, each of which is computed by a block
        of its own; by default it depends on the device and the batch. With a number, the bits of a
        sequence do not depend on the others.
    options: all options of attention that are no arrays, as one AttentionOptions; without dropout,
        a precision or a "top-left" mask.

    window, scale, softcap, score_mod, mask_mod, out_dtype, alibi_slopes, sink, captured, kernel,
    backend, tiles, return_lse and out are as for ``attention``; expressions find in ``keys`` how
    many keys a sequence has. With ``check`` all that is written is compared with the reference, and
    lengths and pages in GPU memory are looked at too. float32 is not rounded.

    Kernels read lengths and page tables when they run, and grids are made for the capacity. So
    nothing waits for the GPU, and a captured CUDA graph takes other lengths each time.

    Returns out [batch, heads, new tokens, dv], and lse [batch, heads, new tokens] with
    ``return_lse``. A row without keys has out = 0 and lse = -infinity, or its sink. ``return_max``
    is as for ``attention``; with a prefix it is refused.

    Raises what ``attention`` raises; ValueError for lengths and pages that are not in the cache,
    where they are NumPy's or with ``check``. From others nothing outside the arrays is read or
    written.

    Rotary embedding: Su et al., 2021, arXiv:2104.09864.
    """
    from cupyfa.call import decode as decoding

    # fmt: off
    fixed = (
        interleaved, window, scale, softcap, score_mod, mask_mod, out_dtype, options, splits,
        kernel, backend, tiles, return_lse, return_max, captured, *unknown,
    )
    # fmt: on
    last, scores = None, (alibi_slopes, sink)
    if prefix is None and not check:
        last = decoding.last_step(q, cache, (k, v), rotary, (interleaved, backend))
    if last is not None:
        repeated = decoding.repeat_decode(last, fixed, scores, out)
        if repeated is not None:
            return repeated
    if unknown:
        raise unknown_argument(decode, unknown)
    every: dict[str, Any] = {"window": window, "scale": scale, "softcap": softcap}
    every |= {"score_mod": score_mod, "mask_mod": mask_mod, "out_dtype": out_dtype}
    asked: Any = {name: x for name, x in every.items() if x is not NOT_GIVEN}
    # fmt: off
    call = decoding.DecodeCall(
        q, cache, k, v, rotary, interleaved, prefix, options, asked, scores, captured, splits,
        kernel, backend, tiles, return_lse, return_max, out, check,
    )
    # fmt: on
    return decoding.run_decode(call, fixed, last)


def softmax(
    x: Any,
    *,
    kernel: str | Kernel = "auto",
    backend: BackendName | Backend = "auto",
    tiles: Tiles | None = None,
    own: Own | None = None,
    return_lse: bool = False,
    return_own: Sequence[str] = (),
    out: Any = None,
    check: bool = False,
    **unknown: Unpack[NoKeywords],
) -> Any:
    """exp(x) over its sum along the last axis, computed without overflow.

    x [..., N] of float16, bfloat16, float32 or float64; other arguments as for ``attention``.
    Returns an array like x; with ``return_lse`` also the natural logarithm of each row's sum of
    exp(x), [...] in float32 (float64 for float64).

    Online softmax: Milakov and Gimelshein, 2018, arXiv:1805.02867.
    """
    if unknown:
        raise unknown_argument(softmax, unknown)
    fixed = kernel, backend, tiles, return_lse, own, return_own
    if not check and (repeated := repeat_call("softmax", fixed, (x,), out)) is not None:
        return repeated
    call = Call("softmax", kernel, backend, tiles=tiles, return_lse=return_lse)
    arrays: Sequence[Any] = (x,)
    if own is not None or return_own:
        call, arrays = add_kernel_arrays(call, arrays, own, return_own)
    return run_call(call, arrays, out, check=check, repeat=("softmax", fixed))


def plan(
    *,
    kernel: str | Kernel = "auto",
    backend: BackendName | Backend = "auto",
    limits: Limits | None = None,
    tiles: Tiles | None = None,
    own: Own | None = None,
    M: int,
    N: int | None = None,
    d: int,
    dv: int | None = None,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int | None = None,
    dtype: DTypeLike = "float32",
    options: AttentionOptions | None = None,
    return_max: bool = False,
    **keywords: Unpack[PaddedKeywords],
) -> Plan:
    """The plan of an attention call of these sizes, without arrays and without a launch.

    N defaults to M, dv to d, kv_heads to heads. ``limits`` are those of the device to plan for,
    by default the backend's. ``own`` has floats of the kernel's own.

    alibi_slopes, bias, mask, sink and arrays of ``captured`` are forms: a shape, (1, 8, 64, 64),
    or the axes as letters, "1hmn", of float32 (a bias of ``dtype``, a mask of bool); with a dtype
    "f16[1hmn]", of captured arrays "i32[M]" or "f32[heads]"; or an array, whose shape and dtype are
    taken. A mask may also be a ``block_mask`` itself. lengths_q and lengths_k are True, or such a
    form, "i32[batch]". q_descale, k_descale and v_descale are True, shapes
    or arrays.

    Raises what ``attention`` raises.
    """
    arrays, asked = split_keywords(plan, keywords)
    chosen = AttentionOptions.of(options, asked)
    sizes: dict[str, Any] = {"M": M, "N": N, "d": d, "dv": dv, "batch": batch, "heads": heads}
    sizes |= {"kv_heads": kv_heads, "dtype": dtype}
    blocks, arrays = split_block_mask(arrays)
    problem = Problem.of_sizes(**sizes, options=chosen, return_max=return_max, **arrays)
    if blocks is not None:
        problem = blocks.masked(problem)
    limits = limits or backend_named(backend).limits
    if own is not None:
        kernel = set_floats(find_record(kernel, own), own)
    record = planning.select(kernel, "forward", problem, limits)
    made = planning.plan(record, problem, limits, **read_tiles(tiles))
    return made if blocks is None else blocks.planned(made, limits)


def dropout_mask(
    *,
    batch: int,
    heads: int,
    M: int,
    N: int,
    dropout: float,
    dropout_seed: Any,
    dropout_offset: Any = 0,
) -> Array:
    """The pairs of query and key whose weights ``attention`` keeps: bool, [batch, heads, M, N].

    ``heads`` counts the heads of q. The probability is rounded to multiples of 1/16384. Only batch
    element, head, query, key, seed and offset decide whether a pair is kept, not M and N. Another
    seed or offset gives independent bits. Each may be an array of one whole number.

    Raises ValueError or TypeError for wrong arguments.

    Philox 4x32-7: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011.
    """
    numbers = {"dropout_seed": dropout_seed, "dropout_offset": dropout_offset}
    given = select_arrays(numbers)
    options = AttentionOptions(dropout=dropout, **{**numbers, **dict.fromkeys(given, 0)})
    sizes = {"batch": batch, "heads": heads, "M": M, "N": N}
    shape = tuple(read_size(name, size, MOST) for name, size in sizes.items())
    read = tuple(optional_inputs.of_value(name, x) for name, x in given.items())
    optional_inputs.modifiers(options, read, shape)  # raises for arrays that are no seed
    arrays = {name.removeprefix("dropout_"): x for name, x in given.items()}
    chosen = Dropout.of(options, shape[1], **arrays)
    if chosen is None or 0 in shape:
        return np.ones(shape, bool)
    return chosen.kept(*np.ogrid[tuple(slice(size) for size in shape)])


def empty_pinned(
    shape: int | Sequence[int], dtype: Any = "float32", *, backend: BackendName | Backend = "auto"
) -> np.ndarray:
    """A NumPy array with unspecified elements in page-locked host memory.

    Copies to and from the GPU need no buffer for such arrays, but they take longer to allocate. In
    the simulator it is an ordinary array.
    """
    sizes = read_shape("shape", (shape,) if isinstance(shape, int | np.integer) else shape)
    of = dtype_named(dtype).numpy if dtype == "bfloat16" else np.dtype(dtype)
    backend = backend_named(backend)
    with backend.working_on(None):
        memory = backend.pinned(max(prod(sizes) * of.itemsize, 1))
        return memory[: prod(sizes) * of.itemsize].view(of).reshape(sizes)
