"""The functions of the library: NumPy in, NumPy out; CuPy or DLPack in, CuPy out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from itertools import chain
from math import isfinite, prod
from numbers import Real
from operator import is_
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import numpy as np

from cupyfa.arrays.block_mask import BlockMask
from cupyfa.errors import Unsupported, closest, described, nearest
from cupyfa.ladder import lookup
from cupyfa.ladder.forward import for_decoding
from cupyfa.ladder.kernel import Kernel
from cupyfa.planner import choose_kernel as planning
from cupyfa.planner.plan import Limits, Plan
from cupyfa.problem import optional_inputs, shape_language
from cupyfa.problem.dtypes import DTYPES, E4M3, INPUTS, DType, DTypeLike, dtype_named, name_of
from cupyfa.problem.optional_inputs import Operand, is_array
from cupyfa.problem.options import (
    DROPOUT,
    NOT_GIVEN,
    OPTIONS,
    PLAIN,
    AttentionOptions,
    Causal,
    NotGiven,
    OptionKeywords,
    OutDtype,
    Precision,
    Text,
    Window,
    read_flag,
    read_size,
)
from cupyfa.problem.problem import MOST, TEXTS, Problem, rows_of, sizes_of
from cupyfa.problem.wrt import QKV, names_of, refuse_without_gradients
from cupyfa.runtime import ragged
from cupyfa.runtime.arrays import require_one_device
from cupyfa.runtime.backend import Backend, recent
from cupyfa.runtime.choose_backend import (
    adopt,
    as_array,
    backend_named,
    devices_of,
    owner,
    where_q_is,
    writable_view,
)
from cupyfa.runtime.prepared import Form, Prepared, Progress, Result, form
from cupyfa.score.dropout import Dropout
from cupyfa.score.expressions import Expression

if TYPE_CHECKING:
    from cupyfa.arrays.kv_cache import KVCache, Step
    from cupyfa.arrays.prefixes import Prefixes

    class _Modified(OptionKeywords, total=False):
        """All that changes what attention computes."""

        alibi_slopes: Any
        bias: Any
        mask: Any
        sink: Any
        captured: Mapping[str, Any] | None

    class _Padded(_Modified, total=False):
        """And how many rows of each batch element count, and the factors of e4m3 numbers."""

        lengths_q: Any
        lengths_k: Any
        q_descale: Any
        k_descale: Any
        v_descale: Any

    class _Compiled(_Padded, total=False):
        """What prepared calls take: also where sequences of a ragged batch lie."""

        cu_seqlens_q: Any
        cu_seqlens_k: Any
        seqused_q: Any
        seqused_k: Any

    class _Common(_Padded, total=False):
        """What ``attention`` and ``attention_backward`` both take, without kernel and tiles."""

        options: AttentionOptions | None
        backend: BackendName | Backend
        layout: Layout
        check: bool
        devices: Devices | None

    class _NoMore(TypedDict):
        """No further keywords: type checkers report one that a function does not have."""

    class _OfSequences(_Modified, total=False):
        """What the functions of ragged batches take besides."""

        options: AttentionOptions | None
        backend: BackendName | Backend
        check: bool
        devices: Devices | None

    class _OfSequencesInTiles(_OfSequences, total=False):
        """And tile sizes, which each kernel has of its own."""

        tiles: Tiles | None


Tiles = Mapping[str, int]
Own = Mapping[str, Any]  # arrays and floats of a kernel's own
Layout = Literal["bhsd", "bshd"]
BackendName = Literal["auto", "cuda", "simulator"]
Devices = Literal["all"] | Sequence[int]  # numbers of GPUs that share a call
# Arguments that cannot change between two calls.
_FIXED = {type(None), NotGiven, bool, int, float, str, tuple, AttentionOptions, Kernel}
_MOST_KNOWN = 256  # calls that are remembered, each by its arrays' forms and options


Array = np.ndarray[Any, Any]
_QKV = QKV


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
    return_own: Sequence[str] = (),
    out: Any = None,
    check: bool = False,
    progress: Progress | None = None,
    devices: Devices | None = None,
    **unknown: Unpack[_NoMore],
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
        first on; by default all. Masks, windows and texts are aligned as for arrays of these
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
    return_own: names of its ``outputs`` to return after out and lse.
    check: also compare all results with the reference, and detect writes outside of them.
    progress: ``progress(done, total, what)`` is called as chunks of NumPy arrays are done.
    devices: for NumPy arrays, the GPUs that share the work: "all", or their numbers as [0, 1]; by
        default the current one. The bits are those of one GPU, but for kernels whose sums depend on
        the number of heads or rows.

    Returns out [..., heads, M, dv] of the dtype (see out_dtype) and kind of the inputs, in ``out``
    if it is given; with ``return_lse`` also the natural logarithm of each row's sum of exp(score),
    [..., heads, M] in float32 (float64 for float64). A row that sees no key has out = 0 and
    lse = -infinity, or its sink.

    Raises ValueError or TypeError for wrong arguments, Unsupported if the kernel or device cannot
    do the problem, DeviceError if the device fails, SimulatorFault if a kernel does something wrong
    in the simulator, CompilerNotFound if the simulator finds no compiler, WrongResult if a check
    fails.

    FlashAttention: Dao et al., 2022, arXiv:2205.14135; Dao, 2023, arXiv:2307.08691.
    """
    if isinstance(q, list | tuple) and ragged.are_lists(q, k, v):
        return _attention_of_lists(locals())
    if unknown:
        raise unknown_argument(attention, unknown)
    # fmt: off
    how: How = (
        "forward", kernel, backend, options, layout, tiles, return_lse, _NO_OWN,
        # In the order of OPTIONS.
        precision, causal, window, offset, scale, softcap, score_mod, mask_mod, out_dtype,
        dropout, dropout_seed, dropout_offset,
    )
    # fmt: on
    arrays: Sequence[Any] = (q, k, v)
    repeat: Repeatable | None = None
    if not (
        dropout_seed is dropout_offset is NOT_GIVEN
        and alibi_slopes is bias is mask is sink is captured is None
        and lengths_q is lengths_k is q_descale is k_descale is v_descale is None
    ):
        seeds, descales = (dropout_seed, dropout_offset), (q_descale, k_descale, v_descale)
        if (
            not (alibi_slopes is bias is sink is captured is lengths_q is lengths_k is None)
            or any(map(is_array, seeds))
            or any(x is not None for x in descales)
        ):
            others = check, return_own, isinstance(mask, BlockMask), any(map(is_array, seeds))
            if own is captured is devices is None and not any(others):
                read = alibi_slopes, bias, mask, sink, lengths_q, lengths_k, *descales
                repeat = _repeatable("attention", how, read)
                if (repeated := _again(repeat, (*arrays, *read), out)) is not None:
                    return repeated
            given = {"alibi_slopes": alibi_slopes, "bias": bias, "mask": mask, "sink": sink}
            given |= {"lengths_q": lengths_q, "lengths_k": lengths_k}
            given |= dict(zip(optional_inputs.DESCALES, descales))
            given |= {"captured": captured, **_arrays_of(dict(zip(optional_inputs.SEEDS, seeds)))}
            how = *how[: -len(seeds)], *(0 if is_array(x) else x for x in seeds)
            how, arrays = _with_operands(how, arrays, given, check)
        elif isinstance(mask, BlockMask):
            how = (*how[:_OWN_AT], mask.alone, *how[_OWN_AT + 1 :])
        elif mask is not None:
            how, arrays = _with_operands(how, arrays, {"mask": mask})
    if own is not None or return_own:
        how, arrays = _with_own(how, arrays, own, return_own)
    return _call(how, arrays, out, None, check, progress, repeat=repeat, devices=devices)


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
    return_own: Sequence[str] = (),
    **keywords: Unpack[_Compiled],
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
    of_sequences, others = _without_sequences(compile, keywords)
    layout = "bshd" if of_sequences else layout
    how = ("forward", kernel, backend, options, layout, tiles, return_lse, _NO_OWN)
    given, asked = _without_arrays(others)
    given |= of_sequences
    how += _values(compile, asked)
    return _compiled(how, (q, k, v), dtype, given, own, return_own)


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
    wrt: Sequence[str] = _QKV,
    **keywords: Unpack[_Compiled],
) -> Prepared:
    """The prepared form of ``attention_backward``, as ``compile`` makes that of ``attention``.

    As shapes, lse is of float32, or float64 for float64, and dlse, if there is one, like lse. The
    other arguments are those of ``attention_backward``. The Prepared is called as
    ``prepared(dout, q, k, v, out, lse, grads=None)``, with ``dlse=`` if it was made with one, and
    with ``cu_seqlens_q=`` and the others likewise. A kernel of your own that reads no lse takes
    None for it, here and in each call.
    """
    if lse is None and dtype is None:
        lse = _unread_lse(kernel, q, backend, layout)
    elif lse is None and _does_without_lse(kernel):
        lse = out[:-1] if layout == "bhsd" else (*out[:-3], out[-2], out[-3])
    of_sequences, others = _without_sequences(compile_backward, keywords)
    layout = "bshd" if of_sequences else layout
    how = ("backward", kernel, backend, options, layout, tiles, deterministic, _own_of(wrt))
    given, asked = _without_arrays(others)
    given |= of_sequences
    if dlse is not None:
        given["dlse"] = _like_lse(dlse, lse) if dtype is None else dlse
    how += _values(compile_backward, asked)
    return _compiled(how, (dout, q, k, v, out, lse), dtype, given, own, return_own)


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
    wrt: Sequence[str] = _QKV,
    grads: Any = None,
    check: bool = False,
    devices: Devices | None = None,
    **keywords: Unpack[_Padded],
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
    how: How = ("backward", kernel, backend, options, layout, tiles, deterministic, _own_of(wrt))
    if lse is None:
        lse = _unread_lse(kernel, q, backend, layout)
    arrays: Sequence[Any] = (dout, q, k, v, out, lse)
    if keywords or dlse is not None:
        given, asked = _without_arrays(keywords)
        how += _values(attention_backward, asked)
        if dlse is not None:
            given["dlse"] = _like_lse(dlse, lse)
        if given:
            how, arrays = _with_operands(how, arrays, given, check)
    else:
        how += _NOT_GIVEN
    if own is not None or return_own:
        how, arrays = _with_own(how, arrays, own, return_own)
    return _call(how, arrays, None, grads, check, devices=devices)


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
    wrt: Sequence[str] = _QKV,
    **options: Unpack[_Common],
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
        return _vjp_of_lists(q, k, v, locals())
    if not options.keys() <= _OF_BOTH.keys():
        if given := options.keys() & {"return_own", "out", "grads"}:
            raise ValueError(
                f"attention_vjp has no option {', '.join(sorted(given))}: its pullback keeps out "
                "and lse; call attention and attention_backward to have them"
            )
        raise unknown_argument(attention_vjp, options, tuple(_OF_BOTH))
    _refuse_gradients(INPUTS.get(str(getattr(q, "dtype", "")).removeprefix("torch.")))
    options = _with_arrays_of_lists(options)  # type: ignore[assignment]
    if wrt is not _QKV:
        *_, wrt = _own_of(wrt)
        refuse_without_gradients(wrt, _dtypes_of(options))
    return_lse, how = _how_of_pullback(return_lse, deterministic, backward_kernel, backward_tiles)
    forward, backward = _shared_own(own, kernel, backward_kernel)
    lse, of_forward = None, dict[str, Any](kernel=kernel, tiles=tiles, own=forward, **options)
    if not return_lse and _has_no_lse(kernel, backward_kernel):
        out = attention(q, k, v, **of_forward)
    else:
        out, lse = attention(q, k, v, return_lse=True, **of_forward)

    how |= {"own": backward, "wrt": wrt}
    pull = partial(_pullback, (q, k, v, out, lse), {**how, **options})
    return ((out, lse) if return_lse else out), pull


def _pullback(
    arrays: tuple[Any, ...], how: Mapping[str, Any], dout: Any, dlse: Any = None, **unknown: Any
) -> tuple[Any, ...]:
    """What ``attention_vjp`` returns; a function of the module, so that it can be pickled."""
    if unknown:
        raise TypeError(
            f"pullback() has no argument {next(iter(unknown))!r}; it has dout and dlse, and "
            "returns new arrays: attention_backward writes into grads="
        )
    return attention_backward(dout, *arrays, dlse=dlse, **how)


def _how_of_pullback(
    return_lse: Any, deterministic: Any, kernel: str | Kernel, tiles: Tiles | None
) -> tuple[bool, dict[str, Any]]:
    """Whether lse is returned, and what a pullback hands to the backward pass.

    Raises for what no call of it could have, so that the call is refused and not its pullback.
    """
    planning.check_named(kernel, "backward", given_tiles(tiles))
    of_backward = {
        "deterministic": read_flag("deterministic", deterministic),
        "kernel": kernel,
        "tiles": tiles,
    }
    return read_flag("return_lse", return_lse), of_backward


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
    out: Any = None,
    **keywords: Unpack[_OfSequencesInTiles],
) -> Any:
    """``attention`` of sequences of different lengths, which lie one after the other.

    q [total queries, heads, d], k [total keys, kv_heads, d], v [total keys, kv_heads, dv]. Rows
    cu_seqlens_q[i] to cu_seqlens_q[i + 1] - 1 of q and cu_seqlens_k[i] to cu_seqlens_k[i + 1] - 1
    of k and v are sequence i; any may be empty. The first seqused_q[i] and seqused_k[i] of them
    count, by default all. These are [sequences + 1] and [sequences] of int32, of NumPy or where q
    is: kernels read them when they run, so that a captured CUDA graph takes other lengths each
    time.

    Masks, windows and texts are each sequence's own: query and key count from 0 in it, queries and
    keys are its lengths, batch is its number, as in alibi_slopes and sink [sequences, heads]. The
    bits of a sequence do not depend on finite numbers of others. bias=, mask= and block masks are
    refused: give a text that reads ``captured``. The other arguments are those of ``attention``.

    Returns out [total queries, heads, dv], and with ``return_lse`` lse [heads, total queries]. A
    row of no sequence has out = 0 and lse = -infinity.

    Raises what ``attention`` raises; ValueError for offsets that fall or go beyond the arrays,
    where they are NumPy's or with ``check``. From others nothing outside the arrays is read or
    written.
    """
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    repeat, read = _repeatable_sequences(
        attention_ragged, (kernel, return_lse), keywords, (None, *lengths)
    )
    if (repeated := _again(repeat, (q, k, v, *read), out)) is not None:
        return repeated
    where, arrays, given = _sequences({"q": q, "k": k, "v": v}, lengths, keywords)
    how, check = _how_of_sequences(
        ("forward", kernel, where), attention_ragged, return_lse, keywords, given
    )
    how, arrays = _with_operands(how[0], arrays, how[1])
    devices = keywords.get("devices")
    return _call(how, arrays, out, None, check, repeat=repeat, devices=devices)


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
    **keywords: Unpack[_OfSequencesInTiles],
) -> tuple[Any, Any, Any]:
    """The gradients of q, k and v, for the gradient ``dout`` of the output of ``attention_ragged``.

    q, k, v, the offsets and the options are those of the call of ``attention_ragged``, ``out`` and
    ``lse`` its results with ``return_lse``. dlse is the gradient of lse, by default 0. With
    ``deterministic`` every run gives the same bits.

    Returns dq, dk and dv, like q, k and v; of rows of no sequence they are 0. Raises what
    ``attention_ragged`` raises.
    """
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    repeat, read = _repeatable_sequences(
        attention_ragged_backward, (kernel, deterministic), keywords, (dlse, *lengths)
    )
    if (repeated := _again(repeat, (dout, q, k, v, out, lse, *read), None)) is not None:
        return repeated
    named = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    where, arrays, given = _sequences(named, lengths, keywords)
    how, check = _how_of_sequences(
        ("backward", kernel, where), attention_ragged_backward, deterministic, keywords, given
    )
    if dlse is not None:
        how[1]["dlse"] = _like_lse(dlse, lse)
    how, arrays = _with_operands(how[0], arrays, how[1])
    devices = keywords.get("devices")
    return _call(how, arrays, None, None, check, repeat=repeat, devices=devices)


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
    **keywords: Unpack[_OfSequences],
) -> tuple[Any, Callable[..., tuple[Any, Any, Any]]]:
    """``attention_ragged``, and the function that computes its gradients.

    Returns out and ``pullback``; ``pullback(dout, dlse=None)`` gives dq, dk and dv. With
    ``return_lse`` it returns (out, lse) and ``pullback``. ``kernel`` and ``tiles`` are those of
    ``attention_ragged``, ``backward_kernel`` and ``backward_tiles`` those of the gradients.
    """
    return_lse, how = _how_of_pullback(return_lse, deterministic, backward_kernel, backward_tiles)
    of_both: Any = {"seqused_q": seqused_q, "seqused_k": seqused_k}
    of_both |= _with_arrays_of_lists(keywords)
    out, lse = attention_ragged(
        q, k, v, cu_seqlens_q, cu_seqlens_k, kernel=kernel, tiles=tiles, return_lse=True, **of_both
    )

    arrays = q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k
    pull = partial(_ragged_pullback, arrays, {**how, **of_both})
    return ((out, lse) if return_lse else out), pull


def _ragged_pullback(
    arrays: tuple[Any, ...], how: Mapping[str, Any], dout: Any, dlse: Any = None
) -> tuple[Any, Any, Any]:
    given: Any = {"dlse": dlse, **how}
    return attention_ragged_backward(dout, *arrays, **given)


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
    out: Any = None,
    check: bool = False,
    **unknown: Unpack[_NoMore],
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
        Positions, windows and texts count as if one cache held all of these keys.
    splits: into how many parts the keys of a row are divided, each of which is computed by a block
        of its own; by default it depends on the device and the batch. With a number, the bits of a
        sequence do not depend on the others.
    options: all options of attention that are no arrays, as one AttentionOptions; without dropout,
        a precision or a "top-left" mask.

    window, scale, softcap, score_mod, mask_mod, out_dtype, alibi_slopes, sink, captured, kernel,
    backend, tiles, return_lse and out are as for ``attention``; texts find in ``keys`` how many
    keys a sequence has. With ``check`` all that is written is compared with the reference, and
    lengths and pages in GPU memory are looked at too. float32 is not rounded.

    Kernels read lengths and page tables when they run, and grids are made for the capacity. So
    nothing waits for the GPU, and a captured CUDA graph takes other lengths each time.

    Returns out [batch, heads, new tokens, dv], and lse [batch, heads, new tokens] with
    ``return_lse``. A row without keys has out = 0 and lse = -infinity, or its sink.

    Raises what ``attention`` raises; ValueError for lengths and pages that are not in the cache,
    where they are NumPy's or with ``check``. From others nothing outside the arrays is read or
    written.

    Rotary embedding: Su et al., 2021, arXiv:2104.09864.
    """
    from cupyfa.arrays import kv_cache

    # fmt: off
    fixed = (
        interleaved, window, scale, softcap, score_mod, mask_mod, out_dtype, options, splits,
        kernel, backend, tiles, return_lse, captured, *unknown,
    )
    # fmt: on
    last = None
    if prefix is None and not check:
        last = kv_cache.last_step(q, cache, (k, v), rotary, (interleaved, backend))
    if last is not None:
        repeated = _repeated_decode(last, fixed, (alibi_slopes, sink), out)
        if repeated is not None:
            return repeated
    if unknown:
        raise unknown_argument(decode, unknown)
    if (k is None) != (v is None):
        raise TypeError("k and v are the keys and values of the same tokens; give both or none")
    flags = {"interleaved": interleaved, "return_lse": return_lse, "check": check}
    interleaved, return_lse, check = (read_flag(*x) for x in flags.items())
    if interleaved and rotary is None:
        raise TypeError("interleaved says how rotary pairs columns; give rotary= too")
    asked: dict[str, Any] = {"window": window, "scale": scale, "softcap": softcap}
    asked |= {"score_mod": score_mod, "mask_mod": mask_mod, "out_dtype": out_dtype}
    chosen = _options_of_decoding(options, asked)
    shared = None if prefix is None else _prefixes(backend, prefix, q, cache, check)
    step = last or kv_cache.step(
        *(backend, q, cache, None if k is None else (k, v), rotary),
        interleaved=interleaved,
        look=bool(check),
        prefix_keys=None if shared is None or rotary is None else shared.keys,
    )
    if out is not None and step.is_moved:  # before anything is written
        _check_out(out, (*step.q.shape[:3], step.v.shape[3]), _out_dtype_of(step, chosen))
    if str(step.q.dtype) == "float32":  # also by a kernel that would round it
        chosen = replace(chosen, precision="float32")
    kernel = _kernel_of_tokens(step.q, step.k, kernel, splits)
    given = {"alibi_slopes": alibi_slopes, "sink": sink, "captured": captured}
    given |= {optional_inputs.PADDED[1]: step.lengths, optional_inputs.PAGE_TABLE: step.pages}
    given |= dict(zip(optional_inputs.SCALES, step.scales))
    call = _Decoding(step, chosen, given, kernel, tiles, return_lse, out, check)
    if shared is not None:
        return _decoded_in_parts(shared, call, new=0 if k is None else step.q.shape[2])
    return _decoded(call, _repeatable("decode", fixed, _read_by(step, (alibi_slopes, sink))))


@dataclass(frozen=True)
class _Decoding:
    """A call of ``decode`` whose new tokens are not written yet.

    given: arrays and numbers that are read besides. kernel, tiles: for the sequences' own keys.
    """

    step: Step
    options: AttentionOptions
    given: Mapping[str, Any]
    kernel: str | Kernel
    tiles: Tiles | None
    return_lse: bool
    out: Any
    check: bool

    @property
    def write(self) -> Callable[[], None] | None:
        """Writes and turns the new tokens; None if there is nothing to do."""
        if not self.step.writes:
            return None
        return self.step.write_and_check if self.check else self.step.write


def _read_by(step: Step, own: tuple[Any, Any]) -> tuple[Any, ...]:
    """All that is read besides q, k and v in the order of calls. own: slopes and sinks."""
    return *own, step.lengths, step.pages, *step.scales


def _repeated_decode(last: Step, fixed: Sequence[Any], own: tuple[Any, Any], out: Any) -> Any:
    """The call of ``decode`` with the very arrays of the step before; None if there was none.

    fixed: the arguments that are no arrays. own: slopes and sinks.
    """
    read = _read_by(last, own)
    before = last.write if last.writes else None
    repeat = _repeatable("decode", fixed, read)
    return _again(repeat, (last.q, last.k, last.v, *read), out, before)


def _prefixes(
    backend: BackendName | Backend, prefix: Any, q: Any, cache: KVCache, check: bool
) -> Prefixes:
    from cupyfa.arrays.prefixes import Prefixes

    return Prefixes(backend, prefix, q, cache, look=bool(check))


def _decoded(call: _Decoding, repeat: Repeatable) -> Any:
    """The attention to the sequences' own keys, which are all."""
    step = call.step
    how = _how_of_decoding(step.backend, call.options, call.kernel, call.tiles, call.return_lse)
    how, arrays = _with_operands(how, (step.q, step.k, step.v), call.given)
    moved = step.is_moved
    return _call_moved(step.backend, how, arrays, call.out, call.check, moved, call.write, repeat)


_DECODING = AttentionOptions(causal="bottom-right")


def _kernel_of_tokens(
    q: Any, k: Any, kernel: str | Kernel = "auto", splits: int | str = "auto"
) -> str | Kernel:
    rows = q.shape[1] // max(k.shape[1], 1) * q.shape[2]
    return for_decoding(kernel, splits, str(q.dtype), rows, is_e4m3=k.dtype == E4M3)


def _how_of_decoding(
    backend: Backend,
    options: AttentionOptions,
    kernel: str | Kernel = "auto",
    tiles: Tiles | None = None,
    return_lse: bool = True,
) -> How:
    return ("forward", kernel, backend, options, "bhsd", tiles, return_lse, _NO_OWN, *_NOT_GIVEN)


def _decoded_in_parts(shared: Prefixes, call: _Decoding, *, new: int) -> Any:
    """The attention to prefixes and to the sequences' own keys, merged in this order.

    new: how many of the tokens come with their keys.
    """
    from cupyfa.runtime.merging import merge

    step, write = call.step, call.write
    out = None if step.is_moved else call.out
    if out is not None:  # before anything is written
        _check_target(out, step, call.options)
    calls = _calls_of_parts(shared, call, new)

    def begin() -> None:
        if write is not None:
            write()
            shared.take_queries()

    parts = shared.of_sequences(_called_together(calls, begin, call.check), step.q.shape[2])
    made = merge(parts, out=out, backend=step.backend, check=call.check)
    if step.is_moved:
        made = _moved_to(call.out, _moved_back(step.backend, made, is_moved=True))
    return made if call.return_lse else made[0]


def _out_dtype_of(step: Step, options: AttentionOptions) -> np.dtype:
    return dtype_named(options.out_dtype or str(step.q.dtype)).numpy


def _check_target(out: Any, step: Step, options: AttentionOptions) -> None:
    """Raises for a caller's array that cannot take the result."""
    from cupyfa.runtime.arrays import target

    shape = *step.q.shape[:3], step.v.shape[3]
    inputs = {"q": step.q, "cache.k": step.k, "cache.v": step.v}
    mine = writable_view(step.backend, "out", out)
    dtype = _out_dtype_of(step, options)
    target(step.backend, "out", mine, shape, dtype, inputs, lambda x: x)


def _calls_of_parts(shared: Prefixes, call: _Decoding, new: int) -> list[tuple[How, Sequence[Any]]]:
    """A call for each prefix, and the one for the sequences' own keys."""
    step, given, backend = call.step, call.given, call.step.backend
    captured, slopes = given["captured"], given["alibi_slopes"]
    if slopes is not None:
        slopes = as_array(backend, "alibi_slopes", slopes)
    calls = []
    for x in shared.parts(step, call.options, captured, slopes, new):
        how = _how_of_decoding(backend, x.options, _kernel_of_tokens(x.q, x.k))
        calls.append(_with_operands(how, (x.q, x.k, x.v), x.given))
    own, captured = shared.own(call.options, captured)
    how = _how_of_decoding(backend, own, call.kernel, call.tiles)
    last = _with_operands(how, (step.q, step.k, step.v), {**given, "captured": captured})
    return [*calls, last]


def _called_together(
    calls: Sequence[tuple[How, Sequence[Any]]], begin: Callable[[], None], check: bool
) -> list[Any]:
    """The results of calls, all planned before ``begin`` is done: what is refused is not begun."""
    first, *others = calls
    found: list[Any] = []

    def before() -> None:
        if others:
            found.extend(_called_together(others, begin, check))
        else:
            begin()

    return [_call(*first, None, None, check, None, before), *found]


def _options_of_decoding(
    options: AttentionOptions | None, asked: Mapping[str, Any]
) -> AttentionOptions:
    """The options of a call of ``decode``. Raises ValueError for those that it cannot have."""
    if options is None and all(x is NOT_GIVEN for x in asked.values()):
        return _DECODING
    chosen = AttentionOptions.of(options, asked)
    for name, is_asked, why in (
        ("causal", chosen.causal == "top-left", "new tokens are the last ones"),
        ("offset", chosen.offset is not None, "new tokens are the last ones"),
        ("dropout", chosen.dropout, "there are no gradients"),
        ("precision", chosen.precision, "products are in the dtype of the cache"),
    ):
        if is_asked:
            what = f"{name}={getattr(chosen, name)!r}"
            raise ValueError(f"decode has no {what}: {why}; leave it out of options")
    return replace(chosen, causal="bottom-right")


def _sequences(
    named: Mapping[str, Any], lengths: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[Backend, Sequence[Any], dict[str, Any]]:
    """The backend of a ragged batch, its packed arrays, and its offsets where these are."""
    _check_packed(named)
    backend, arrays = adopt(keywords.get("backend", "auto"), **named)
    by_name = dict(zip(named, arrays))
    names = (*optional_inputs.STARTS, *optional_inputs.USED)
    given = {name: as_array(backend, name, x) for name, x in zip(names, lengths)}
    if isinstance(by_name["q"], np.ndarray):  # sequences are copied piece by piece
        given = {name: where_q_is(backend, by_name["q"], x) for name, x in given.items()}
    if missing := [name for name in optional_inputs.STARTS if given[name] is None]:
        raise TypeError(f"{missing[0]} is None; give where each sequence begins, and the end")
    look = bool(keywords.get("check"))
    given = ragged.lengths(by_name["q"], by_name["k"], given, look=look, download=backend.download)
    return backend, arrays, given


def _check_packed(named: Mapping[str, Any]) -> None:
    """Raises ValueError for arrays, or their shapes, that are no packed ones."""
    for name, x in named.items():
        shape = getattr(x, "shape", x)
        if name != "lse" and isinstance(shape, tuple) and len(shape) != 3:
            raise ValueError(f"{name} has shape {shape}; packed arrays are [rows, heads, columns]")


def _without_sequences(
    function: Callable[..., Any], keywords: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The offsets and lengths of packed sequences among the arguments of a call, and the others."""
    names = (*optional_inputs.STARTS, *optional_inputs.USED)
    given = {name: x for name, x in keywords.items() if name in names and x is not None}
    if given and (missing := [name for name in optional_inputs.STARTS if name not in given]):
        raise TypeError(
            f"{function.__name__}() has {next(iter(given))} and no {missing[0]}; give both offsets"
        )
    others = {name: x for name, x in keywords.items() if name not in names}
    if given:
        _refuse_padded(function, others)
    return given, others


def _refuse_padded(function: Callable[..., Any], keywords: Mapping[str, Any]) -> None:
    for name, used in zip(optional_inputs.PADDED, optional_inputs.USED):
        if keywords.get(name) is not None:
            raise TypeError(
                f"{function.__name__}() of packed sequences has no argument {name!r}; write {used}="
            )


def _how_of_sequences(
    which: tuple[str, str | Kernel, Backend],
    function: Callable[..., Any],
    flag: bool,
    keywords: Mapping[str, Any],
    given: Mapping[str, Any],
) -> tuple[tuple[How, dict[str, Any]], bool]:
    """A call for a ragged batch with the arrays that it reads besides; and whether to check it.

    which: the operation, the kernel and the backend.
    """
    own = ("options", "tiles", "backend", "check", "devices")
    others = {name: x for name, x in keywords.items() if name not in own}
    _refuse_padded(function, others)
    read, asked = _without_arrays(others)
    options, tiles = keywords.get("options"), keywords.get("tiles")
    how = (*which, options, "bshd", tiles, flag, _NO_OWN, *_values(function, asked))
    return (how, {**read, **given}), keywords.get("check", False)


def _call_moved(
    backend: Backend,
    how: How,
    arrays: Sequence[Any],
    out: Any,
    check: bool,
    is_moved: bool,
    before: Callable[[], None] | None,
    repeat: Repeatable,
) -> Any:
    """A call of the forward pass on arrays that may be copies of NumPy's; see ``_call``."""
    if not is_moved:
        return _call(how, arrays, out, None, check, None, before, repeat)
    if out is None:
        return _moved_back(backend, _call(how, arrays, None, None, check, None, before), is_moved)
    result = _call(how, arrays, None, None, check, None, before)
    result = _moved_back(backend, result, is_moved)
    made, *lse = _moved_to(out, result if isinstance(result, tuple) else (result,))
    return (made, *lse) if lse else made


def _moved_to(out: Any, results: tuple[Any, ...]) -> tuple[Any, ...]:
    """Results of which the first one is copied into an array of the caller's, if there is one."""
    made = results[0]
    if out is None:
        return results
    _check_out(out, made.shape, made.dtype)
    out[...] = made
    return (out, *results[1:])


def _check_out(out: Any, shape: Sequence[int], dtype: Any) -> None:
    if tuple(out.shape) != tuple(shape) or str(out.dtype) != str(dtype):
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)}, the result is {dtype} {tuple(shape)}; "
            "give an array like that"
        )


def _moved_back(backend: Backend, results: Any, is_moved: bool) -> Any:
    """The results as NumPy arrays, if the inputs were."""
    if not is_moved:
        return results
    if isinstance(results, tuple):
        return tuple(map(backend.download, results))
    return backend.download(results)


def _packed_lists(q: Any, k: Any, v: Any, layout: str) -> tuple[list[Any], list[np.ndarray]]:
    """Lists of arrays as packed arrays, and the offsets of q and of k."""
    counts = {name: len(x) for name, x in zip("qkv", (q, k, v))}
    if len({*counts.values()}) > 1:
        sizes = ", ".join(f"{name} has {n} arrays" for name, n in counts.items())
        raise ValueError(f"{sizes}; give as many of each")
    arrays, offsets = zip(*(ragged.packed(*x, layout) for x in (("q", q), ("k", k), ("v", v))))
    if wrong := np.flatnonzero(np.diff(offsets[1]) != np.diff(offsets[2])).tolist():
        rows = [int(np.diff(x)[wrong[0]]) for x in offsets[1:]]
        raise ValueError(
            f"k[{wrong[0]}] has {rows[0]} rows and v[{wrong[0]}] {rows[1]}; a value for each key"
        )
    return list(arrays), [offsets[0], offsets[1]]


def _check_of_no_sequence(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raises for arguments that no call on lists can have, where there is no array to look at."""
    own = dict.fromkeys(("q", "k", "v", *signature(function).parameters, *_OF_BOTH))
    others = {name: x for name, x in given.items() if name not in own}
    if others:
        raise unknown_argument(function, others, tuple(_OF_BOTH))
    _, asked = _without_arrays({x: y for x, y in given.items() if x in OPTIONS})
    AttentionOptions.of(given.get("options"), asked)
    planning.check_named(given.get("kernel", "auto"), "forward", given_tiles(given.get("tiles")))
    _how_of_pullback(
        given.get("return_lse", False),
        given.get("deterministic", False),
        given.get("backward_kernel", "auto"),
        given.get("backward_tiles"),
    )
    read_flag("check", given.get("check", False))
    backend_named(given.get("backend", "auto"))


def _attention_of_lists(given: Mapping[str, Any]) -> Any:
    """``attention`` of lists of arrays, with its arguments by name."""
    given = _for_lists(attention, given)
    if not any(map(len, (given["q"], given["k"], given["v"]))):
        _check_of_no_sequence(attention, given)
        made = ragged.parts(None, [0], "bshd", given.get("out"))
        return (made, []) if given.get("return_lse") else made
    layout, out = given.pop("layout", "bhsd"), given.pop("out", None)
    arrays, offsets = _packed_lists(given.pop("q"), given.pop("k"), given.pop("v"), layout)
    found = attention_ragged(*arrays, *offsets, **given)
    if not given.get("return_lse"):
        return ragged.parts(found, offsets[0], layout, out)
    return ragged.parts(found[0], offsets[0], layout, out), ragged.row_parts(found[1], offsets[0])


def _vjp_of_lists(
    q: Any, k: Any, v: Any, given: Mapping[str, Any]
) -> tuple[Any, Callable[..., tuple[Any, ...]]]:
    """``attention_vjp`` of lists of arrays, with its arguments by name."""
    given = _for_lists(attention_vjp, {**given, "options": None, **given["options"]})
    if not any(map(len, (q, k, v))):
        return _vjp_of_no_sequence(given)
    layout = given.pop("layout", "bhsd")
    arrays, (rows, keys) = _packed_lists(given.pop("q"), given.pop("k"), given.pop("v"), layout)
    return_lse = read_flag("return_lse", given.pop("return_lse", False))
    (out, lse), back = attention_ragged_vjp(*arrays, rows, keys, return_lse=True, **given)  # type: ignore[call-arg]
    outs = ragged.parts(out, rows, layout)
    pull = partial(_pullback_of_lists, back, (rows, keys, keys), layout)
    return ((outs, ragged.row_parts(lse, rows)) if return_lse else outs), pull


def _pullback_of_lists(
    back: Callable[..., Any], offsets: tuple[Any, ...], layout: str, dout: Any, dlse: Any = None
) -> tuple[Any, ...]:
    if not ragged.are_lists(dout):
        raise TypeError(f"dout is {described(dout)}; give a list of arrays like out")
    packed, _ = ragged.packed("dout", dout, layout)
    if dlse is not None:
        dlse = np.concatenate(dlse, axis=1)
    found = back(packed, dlse)
    return tuple(ragged.parts(x, of, layout) for x, of in zip(found, offsets, strict=True))


def _vjp_of_no_sequence(given: Mapping[str, Any]) -> tuple[Any, Callable[..., tuple[Any, ...]]]:
    _check_of_no_sequence(attention_vjp, given)
    return (([], []) if given.get("return_lse") else []), _pullback_of_no_sequence


def _pullback_of_no_sequence(dout: Any, dlse: Any = None) -> tuple[Any, ...]:
    for name, x in (("dout", dout), ("dlse", dlse or [])):
        if not isinstance(x, list | tuple) or len(x):
            raise TypeError(f"{name} is {described(x)}; give an empty list, like out")
    return [], [], []


def _for_lists(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that differ from a function's defaults. Raises for those lists cannot have."""
    known = signature(function).parameters
    asked = {**given, **given.get("unknown", {})}
    usual = {name: x.default for name, x in known.items() if x.kind is not x.VAR_KEYWORD}
    found = {
        name: x
        for name, x in asked.items()
        if name not in ("unknown", "options")
        and (name in OPTIONS or x is not None)
        and x is not usual.get(name, NOT_GIVEN)
    }
    if isinstance(given.get("options"), AttentionOptions):
        found["options"] = given["options"]
    for name in (
        "own",
        "return_own",
        "progress",
        "wrt",
        *optional_inputs.PADDED,
        *optional_inputs.DESCALES,
    ):
        if name in found:
            raise Unsupported(
                f"{name} cannot be used with lists of arrays; pack them and leave it out, or call "
                f"{function.__name__} for each"
            )
    return found


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
    **unknown: Unpack[_NoMore],
) -> Any:
    """exp(x) over its sum along the last axis, computed without overflow.

    x [..., N] of float16, bfloat16, float32 or float64; other arguments as for ``attention``.
    Returns an array like x; with ``return_lse`` also the natural logarithm of each row's sum of
    exp(x), [...] in float32 (float64 for float64).

    Online softmax: Milakov and Gimelshein, 2018, arXiv:1805.02867.
    """
    if unknown:
        raise unknown_argument(softmax, unknown)
    how: How = ("softmax", kernel, backend, None, None, tiles, return_lse, _NO_OWN)
    arrays: Sequence[Any] = (x,)
    if own is not None or return_own:
        how, arrays = _with_own(how, arrays, own, return_own)
    return _call(how, arrays, out, None, check)


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
    **keywords: Unpack[_Padded],
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
    arrays, asked = _without_arrays(keywords)
    chosen = AttentionOptions.of(options, dict(zip(OPTIONS, _values(plan, asked))))
    sizes: dict[str, Any] = {"M": M, "N": N, "d": d, "dv": dv, "batch": batch, "heads": heads}
    sizes |= {"kv_heads": kv_heads, "dtype": dtype}
    blocks, arrays = _blocks(arrays)
    problem = Problem.of_sizes(**sizes, options=chosen, **arrays)
    if blocks is not None:
        problem = blocks.masked(problem)
    limits = limits or backend_named(backend).limits
    if own is not None:
        kernel = _with_floats(_record_with_own(kernel, own), own)
    record = planning.select(kernel, "forward", problem, limits)
    made = planning.plan(record, problem, limits, **given_tiles(tiles))
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
    given = _arrays_of(numbers)
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
    sizes = _shape("shape", (shape,) if isinstance(shape, int | np.integer) else shape)
    of = dtype_named(dtype).numpy if dtype == "bfloat16" else np.dtype(dtype)
    backend = backend_named(backend)
    with backend.working_on(None):
        memory = backend.pinned(max(prod(sizes) * of.itemsize, 1))
        return memory[: prod(sizes) * of.itemsize].view(of).reshape(sizes)


def _shape(what: str, shape: Sequence[Any]) -> tuple[int, ...]:
    if not isinstance(shape, Iterable):
        raise TypeError(f"{what} is {described(shape)}; give whole numbers from 0")
    sizes = tuple(shape)
    if not all(isinstance(size, int | np.integer) and size >= 0 for size in sizes):
        raise ValueError(f"{what} is {shape}; give whole numbers from 0")
    return sizes


# A call without its arrays: the operation, kernel, backend, options, layout and tiles;
# ``return_lse`` or ``deterministic``; the names of more arrays that are given, of the kernel's own
# arrays that are asked for, the numbers that texts read, and a block mask; and the values of
# OPTIONS, of which softmax has none.
How = tuple[Any, ...]
_NO_OWN: tuple[Any, ...] = (), (), (), None, _QKV
_OWN_AT = 7  # of these names in How
_FLAG_AT = 6  # of ``return_lse`` or ``deterministic``
# Of options that are keys as they are; a Python function is no such type.
_VALUES = frozenset({type(None), NotGiven, bool, int, float, str, tuple, Expression})
_NOT_GIVEN = (NOT_GIVEN,) * len(OPTIONS)
_MORE = (
    *optional_inputs.OWN_ARRAYS,
    *optional_inputs.PADDED,
    *optional_inputs.DESCALES,
    "captured",
)
_ARRAYS_OF_CALLS = (
    *(
        *optional_inputs.OWN_ARRAYS,
        optional_inputs.DLSE,
        *optional_inputs.LENGTHS,
        optional_inputs.PAGE_TABLE,
    ),
    *optional_inputs.SCALES,
    *optional_inputs.DESCALES,
    *optional_inputs.SEEDS,
)
# What attention_vjp hands to both passes.
_OF_BOTH = dict.fromkeys((*OPTIONS, *_MORE, "options", "backend", "layout", "check", "devices"))
# A function, and the arguments of its call that are no arrays, or how many arrays it has of which
# each may be left out.
Repeatable = tuple[str, tuple[Any, ...]]
_ARRAYS = {
    "forward": ("q", "k", "v"),
    "backward": ("dout", "q", "k", "v", "out", "lse"),
    "softmax": ("x",),
}


def _call(
    how: How,
    arrays: Sequence[Any],
    out: Any,
    grads: Any,
    check: bool,
    progress: Progress | None = None,
    before: Callable[[], None] | None = None,
    repeat: Repeatable | None = None,
    devices: Devices | None = None,
    several: tuple[int, ...] = (),
) -> Any:
    """A call of a function of the library.

    before: what is done when all arguments were checked, ahead of the launches. repeat: what
    ``_again`` knows the call by; without it calls with these arrays alone are known. devices: as
    callers give them; ``several`` of them share the work.
    """
    if devices is not None:
        return _call_on(devices, how, arrays, out, grads, check, progress)
    last = recent.get(how[0])
    if last is not None and not check and before is repeat is None:
        like, prepared = last  # compared by identity: True equals 1, which is refused
        if len(like) == len(how) and all(map(is_, like, how)):
            repeated = prepared.again(arrays, prepared.targets(out, grads), shapes=True)
            if repeated is not None:
                return repeated
    how, check = _read(how, check, progress)
    operation, kernel, named, options, layout, tiles, flag, own, *asked = how
    backend, arrays, forms = _adopted(named, (*_ARRAYS[operation], *own[0]), arrays)
    which = kernel if isinstance(kernel, str) else id(kernel)  # a record is kept, too
    sizes = None if tiles is None else _key_of(tiles)
    key = operation, forms, str(which), repr(asked), options, layout, flag, own, sizes
    try:
        prepared = backend.known.get(key)
    except TypeError:  # an argument that cannot be hashed, and will be refused
        prepared = None
    if prepared is None:
        prepared = _planned(how, backend, arrays, forms)
        _remember(backend, key, prepared)
    elif backend.stream is not None and not check:
        name, like = repeat or (operation, how)
        if {type(x) for x in like if x is not backend} <= _FIXED:
            recent[name] = like, prepared
    targets = prepared.targets(out, grads)
    if before is not None:
        before()
    return prepared.run(arrays, targets, check=check, progress=progress, devices=several)


def _call_on(
    devices: Devices,
    how: How,
    arrays: Sequence[Any],
    out: Any,
    grads: Any,
    check: bool,
    progress: Progress | None,
) -> Any:
    """A call on NumPy arrays that devices share; what they cannot share runs on the first one."""
    backend, (q,) = adopt(how[2], q=_leading(how[0], arrays))
    if not isinstance(q, np.ndarray):
        raise TypeError(
            f"devices is {described(devices)}, and the arrays lie on a device already; leave "
            "devices out, or give NumPy arrays"
        )
    numbers = devices_of(backend, devices)
    several = numbers if len(numbers) > 1 else ()
    with backend.on(numbers[0]):
        return _call(how, arrays, out, grads, check, progress, several=several)


def _repeatable(name: str, fixed: Sequence[Any], read: Iterable[Any]) -> Repeatable:
    """What a call is known by: its arguments that are no arrays, and which of ``read`` it has."""
    return name, (*fixed, *(x is None for x in read))


def _repeatable_sequences(
    function: Callable[..., Any],
    fixed: Sequence[Any],
    keywords: Mapping[str, Any],
    others: Sequence[Any],
) -> tuple[Repeatable, Sequence[Any]]:
    """The same of a ragged batch, and the arrays that it reads, in the order of calls.

    others: the gradient of lse, offsets and lengths.
    """
    read = keywords.get(optional_inputs.ALIBI), keywords.get(optional_inputs.SINK), *others
    asked = [
        x for x in keywords.items() if x[0] not in (optional_inputs.ALIBI, optional_inputs.SINK)
    ]
    return _repeatable(function.__name__, (*fixed, *chain.from_iterable(asked)), read), read


def _again(
    repeat: Repeatable,
    arrays: Iterable[Any],
    out: Any,
    before: Callable[[], None] | None = None,
) -> Any:
    """The call of a function on the very arrays of a call before; None if there was none.

    arrays: all of them in the order of calls, each None if it is not given.
    """
    name, like = repeat
    last = recent.get(name)
    if last is None or len(last[0]) != len(like) or not all(map(is_, last[0], like)):
        return None
    prepared, given = last[1], [x for x in arrays if x is not None]
    return prepared.again(given, prepared.targets(out, None), shapes=True, before=before)


def _planned(
    how: How, backend: Backend, arrays: Sequence[Any], forms: tuple[Form, ...]
) -> Prepared:
    """A call whose like was not seen before, or only with other numbers in texts and dropout."""
    operation, kernel, _, options, layout, tiles, flag, own, *asked = how
    # A record's formulas may depend on the numbers.
    of_texts = operation != "softmax" and isinstance(kernel, str)
    chosen = AttentionOptions.of(options, dict(zip(OPTIONS, asked))) if of_texts else PLAIN
    before, results, numbers, *others = own
    if not of_texts or not (numbers or chosen.softcap is not None or chosen.dropout):
        return _prepared(how, backend, arrays, keep=False)
    named = tuple((x.name, x.dtype) for x in numbers)
    key = (
        *(operation, forms, kernel, chosen.form, layout, flag, before, results, named),
        *(*others, _key_of(tiles)),
    )
    try:
        like = backend.known.get(key)
    except TypeError:  # an argument that cannot be hashed, and will be refused
        like = None
    if like is not None:
        return like.with_numbers(chosen, numbers)
    prepared = _prepared(how, backend, arrays, keep=False)
    _remember(backend, key, prepared)
    return prepared


def _key_of(tiles: Tiles | None) -> str:
    """What a key has of tile sizes, whatever kind of mapping they are in."""
    return repr(dict(tiles) if isinstance(tiles, Mapping) else tiles)


def _remember(backend: Backend, key: Any, prepared: Prepared) -> None:
    if any(x.path.is_absolute() for x in prepared.plan.launches):  # own files may change
        return
    if len(backend.known) >= _MOST_KNOWN:
        backend.known.clear()
    backend.known[key] = prepared


def _read(how: How, check: Any, progress: Any) -> tuple[How, bool]:
    """A call whose flags are bools, and whose options are values that keys can have.

    Expressions take the place of Python functions: a function is traced in each call, as it may
    have changed, and another one may have its address. Raises TypeError for wrong flags.
    """
    if progress is not None and not callable(progress):
        raise TypeError(
            f"progress is {described(progress)}; give a function of (done, total, what), or None"
        )
    flag = how[_FLAG_AT]
    if type(flag) is not bool:
        name = "deterministic" if how[0] == "backward" else "return_lse"
        how = (*how[:_FLAG_AT], read_flag(name, flag), *how[_FLAG_AT + 1 :])
    if type(check) is not bool:
        check = read_flag("check", check)
    asked = how[_OWN_AT + 1 :]
    if not _VALUES.issuperset(map(type, asked)):
        values = map(_value, OPTIONS, asked)
        how = (*how[: _OWN_AT + 1], *values)
    return how, check


def _value(name: str, given: Any) -> Any:
    """An option as a value that does not change any more."""
    if name in TEXTS and callable(given):
        return Expression.of(name, given)
    return given.item() if isinstance(given, np.ndarray) and not given.shape else given


def _adopted(
    backend: BackendName | Backend, names: Sequence[str], arrays: Sequence[Any]
) -> tuple[Backend, Sequence[Any], tuple[Form, ...]]:
    """The backend for arrays, the arrays as its own or NumPy's, and their forms."""
    theirs = owner(backend, arrays)
    if theirs is not None:
        return theirs, arrays, tuple(map(theirs.form, arrays))
    theirs, arrays = adopt(backend, **dict(zip(map(optional_inputs.name_of, names), arrays)))
    return theirs, arrays, tuple([form(theirs, x) for x in arrays])


def _compiled(
    how: How,
    given: Sequence[Any],
    dtype: DTypeLike | None,
    modified: Mapping[str, Any],
    own: Own | None,
    return_own: Sequence[str],
) -> Prepared:
    """The prepared form of calls on arrays like these, or of these shapes if there is a dtype.

    modified: the arrays that change scores, or their forms, and the numbers that texts read.
    """
    operation, backend = how[0], how[2]
    *names, last = _ARRAYS[operation]
    if {isinstance(x, tuple | list) for x in given} != {dtype is not None}:
        raise TypeError(
            f"give {', '.join(names)} and {last} as arrays, or all as shapes and with them a dtype"
        )
    how, _ = _read(how, False, None)
    inputs = dict(zip(_ARRAYS[operation], given))
    if optional_inputs.STARTS[0] in modified:
        _check_packed(inputs)
    if modified and dtype is None:
        how, given = _with_operands(how, given, modified)
    if own is not None or return_own:
        how, given = _with_own(how, given, own, return_own, shapes=dtype is not None)
    inputs |= dict(zip(how[_OWN_AT][0], given[len(inputs) :]))
    if dtype is None:
        return _prepared(how, *adopt(backend, **inputs), keep=True)
    backend, of = backend_named(backend), dtype_named(dtype)
    sizes = {name: _shape(f"the shape of {name}", x) for name, x in inputs.items()}
    with backend.working_on(None):
        dtypes = {"lse": of.sums, "out": _out_dtype(how, of)}
        arrays = [_empty(backend, x, dtypes.get(name, of.numpy)) for name, x in sizes.items()]
        if modified:
            how, more = _with_forms(how, dict(zip(sizes, arrays)), modified, of.name)
            arrays += [backend.empty(*x) for x in more]
    return _prepared(how, backend, arrays, keep=True, of_shapes=True)


def _out_dtype(how: How, dtype: DType) -> np.dtype:
    """The dtype of the output of a call on inputs of a dtype."""
    name = name_of(getattr(how[3], "out_dtype", None) or _asked(how).get("out_dtype"))
    known = DTYPES.get(name) if isinstance(name, str) else None  # others are refused later
    return (known or DTYPES[dtype.usual_result]).numpy


def _empty(backend: Backend, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """An array of any numbers; CuPy allocates e4m3 as bytes alone."""
    if dtype == E4M3:
        return backend.empty(shape, np.dtype(np.uint8)).view(E4M3)
    return backend.empty(shape, dtype)


def _prepared(
    how: How, backend: Backend, arrays: Sequence[Any], *, keep: bool, of_shapes: bool = False
) -> Prepared:
    """The prepared form of a call on arrays like these.

    ``of_shapes``: arrays of the kernel's own are not given, but made.
    """
    operation, kernel, _, options, layout, tiles, flag, own, *asked = how
    inputs, blocks = dict(zip((*_ARRAYS[operation], *own[0]), arrays)), own[3]
    if operation == "softmax":
        x = inputs["x"]
        problem = Problem.of_rows(x)
        results = [Result("P", tuple(x.shape), "out"), Result("lse", tuple(x.shape[:-1]), None)]
    else:
        q, k, v = inputs["q"], inputs["k"], inputs["v"]
        chosen = AttentionOptions.of(options, dict(zip(OPTIONS, asked)))
        operands = _operands(inputs, own[2], own[4])
        problem = Problem.of(*(q, k, v), options=chosen, layout=layout, operands=operands)
        if blocks is not None:
            problem = blocks.masked(problem)
        out, lse = (*q.shape[:-1], v.shape[-1]), rows_of(q, layout)
        results = [Result("O", out, "out"), Result("lse", lse, None)]
    if operation == "backward":
        _refuse_gradients(problem.dtype)
        for name, shape, of in (
            ("dout", out, problem.dtype.numpy),
            ("out", out, problem.out_dtype.numpy),
            ("lse", lse, problem.dtype.sums),
        ):
            _check_like(name, inputs[name], shape, of)
        _check_wrt(own[4], inputs)
        results = [_gradient(name, inputs) for name in own[4]]
    elif not flag:  # return_lse
        del results[1]
    require_one_device(backend, {optional_inputs.name_of(name): x for name, x in inputs.items()})
    deterministic = operation == "backward" and flag
    with backend.working_on(arrays[0]):
        limits = backend.limits
        record = planning.select(kernel, operation, problem, limits, deterministic=deterministic)
        plan = planning.plan(record, problem, limits, **given_tiles(tiles))
        bound: dict[str, Any] = {}
        if blocks is not None:
            on_host = not backend.owns(arrays[0])
            maps = blocks.maps(plan, backend, on_host, alone=chosen.mask_mod is None)
            plan = blocks.planned(plan, limits)
            bound = {**blocks.arrays(backend, on_host), **maps}
        if not record.is_plain:
            lead = () if operation == "softmax" else inputs["q"].shape[:-3]
            inputs |= _own_arrays(record, problem, inputs, backend if of_shapes else None, lead)
            results += _own_results(record, problem, own[1], lead)
        return Prepared(backend, plan, inputs, results, layout=layout, keep=keep, bound=bound)


# What modifies scores


def _with_operands(
    how: How, arrays: Sequence[Any], given: Mapping[str, Any], look: bool = False
) -> tuple[How, Sequence[Any]]:
    """A call with the arrays and numbers that texts read.

    look: whether to look at lengths in GPU memory too. Raises TypeError and ValueError for wrong
    ones.
    """
    _, (q,) = adopt(how[2], q=_leading(how[0], arrays))
    captured = {} if (x := given.get("captured")) is None else x
    if not isinstance(captured, Mapping):
        raise TypeError(f'captured is {described(captured)}; give {{"name": array}}')
    blocks, given = _blocks(given)
    names = (
        _ARRAYS_OF_CALLS if _has_dropout(how) else _ARRAYS_OF_CALLS[: -len(optional_inputs.SEEDS)]
    )
    found = {x: as_array(how[2], x, given[x]) for x in names if given.get(x) is not None}
    if lengths := {x: found[x] for x in optional_inputs.PADDED if x in found}:
        table = found.get(optional_inputs.PAGE_TABLE)
        most = 1 if table is None else table.shape[1]  # pages
        found |= _padded_lengths(how, arrays, lengths, most, look)
    by_name = sorted(captured.items(), key=lambda item: str(item[0]))
    captured = {name: as_array(how[2], str(name), x) for name, x in by_name}
    if optional_inputs.STARTS[0] in found:
        found = ragged.as_lengths(found)
        if ragged.has_no_sequence(found):
            captured = {name: ragged.with_elements(x) for name, x in captured.items()}
        found = ragged.with_a_sequence(found)
    operands = [optional_inputs.of_value(name, x) for name, x in found.items()]
    if numbers := [x.name for x in operands if not x.is_array]:
        raise TypeError(f"{numbers[0]} is {described(given[numbers[0]])}; give an array with axes")
    operands += [optional_inputs.operand(name, x) for name, x in captured.items()]
    every = {**found, **captured}
    named = [x for x in operands if x.is_array]
    before, asked, _, _, wrt = how[_OWN_AT]
    others = tuple(x for x in operands if not x.is_array)
    made = (*before, *(x.input for x in named)), asked, others, blocks, wrt
    like_q = [where_q_is(how[2], q, every[x.name]) for x in named]
    return (*how[:_OWN_AT], made, *how[_OWN_AT + 1 :]), (*arrays, *like_q)


def _padded_lengths(
    how: How, arrays: Sequence[Any], given: Mapping[str, Any], most: int, look: bool
) -> dict[str, Any]:
    """The lengths of batch elements of a call, checked, where keys may lie in ``most`` pages."""
    by_name = dict(zip(_ARRAYS[how[0]], arrays))
    backend, (q, k) = adopt(how[2], q=by_name["q"], k=by_name["k"])
    batch, _, M, _ = sizes_of("q", q, how[4])
    rows = M, sizes_of("k", k, how[4])[2] * most
    return ragged.padded_lengths(given, batch, rows, look=look, download=backend.download)


def _blocks(given: Mapping[str, Any]) -> tuple[BlockMask | None, dict[str, Any]]:
    """The block mask among arrays that texts read, and the others."""
    mask = given.get(optional_inputs.MASK)
    if not isinstance(mask, BlockMask):
        return None, dict(given)
    return mask, {name: x for name, x in given.items() if name != optional_inputs.MASK}


def _without_arrays(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments that are arrays or numbers of texts, and the others.

    In place of seeds that are arrays the others have 0.
    """
    given = {name: x for name, x in keywords.items() if name in _MORE and x is not None}
    seeds = _arrays_of({name: keywords.get(name) for name in optional_inputs.SEEDS})
    asked = {name: x for name, x in keywords.items() if name not in _MORE}
    return {**given, **seeds}, {**asked, **dict.fromkeys(seeds, 0)}


def _with_arrays_of_lists(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The same arguments with arrays in place of lists: a pullback reads them again."""
    made = {
        name: optional_inputs.of_list(name, x) if name in _MORE else x
        for name, x in keywords.items()
    }
    if isinstance(captured := made.get("captured"), Mapping):
        made["captured"] = {x: optional_inputs.of_list(str(x), y) for x, y in captured.items()}
    return made


def _arrays_of(seeds: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in seeds.items() if is_array(x)}


def _has_dropout(how: How) -> bool:
    """Whether a call drops weights, so that arrays of a seed are read; wrong options may."""
    return bool(getattr(how[3], "dropout", None) or _asked(how).get("dropout"))


def _asked(how: How) -> dict[str, Any]:
    """The options that a call gives by name."""
    asked = zip(OPTIONS, how[_OWN_AT + 1 :])
    return {name: x for name, x in asked if x is not NOT_GIVEN}


def _with_forms(
    how: How, inputs: Mapping[str, Any], given: Mapping[str, Any], dtype: str
) -> tuple[How, list[tuple[tuple[int, ...], np.dtype]]]:
    """A call with arrays of these forms, and their shapes and dtypes; see ``_with_operands``."""
    layout = how[4]
    batch, heads, M, _ = sizes_of("q", inputs["q"], layout)
    _, kv_heads, N, _ = sizes_of("k", inputs["k"], layout)
    blocks, given = _blocks(shape_language.of_heads(given, batch, kv_heads))
    packed, is_empty = _shapes_of_sequences(given)
    elements = packed[optional_inputs.STARTS[0]][0] - 1 if packed else batch
    sizes = elements, heads, M, N
    unread = () if _has_dropout(how) else optional_inputs.SEEDS
    others = {name: x for name, x in given.items() if name not in (optional_inputs.DLSE, *unread)}
    others |= packed
    found = list(shape_language.operands(others, sizes, dtype))
    if is_empty:  # as ``ragged.with_elements`` has it
        captured = given.get("captured") or ()
        grown = [tuple(max(size, 1) for size in x.shape) for x in found]
        found = [replace(x, shape=y) if x.name in captured else x for x, y in zip(found, grown)]
    shapes = {}
    if (dlse := given.get(optional_inputs.DLSE)) is not None:
        lse = inputs["lse"]
        shapes[optional_inputs.DLSE] = lse.shape
        if _shape("the shape of dlse", dlse) != lse.shape:
            raise ValueError(f"the shape of dlse is {dlse}; it must be {lse.shape}, that of lse")
        own = sum(x.name in optional_inputs.OWN_ARRAYS for x in found)
        found.insert(own, Operand(optional_inputs.DLSE, str(lse.dtype), (batch, heads, M)))
    named = [x for x in found if x.is_array]
    before, asked, _, _, wrt = how[_OWN_AT]
    numbers = tuple(x for x in found if not x.is_array)
    made = (*before, *(x.input for x in named)), asked, numbers, blocks, wrt
    arrays = [(shapes.get(x.name, x.shape), x.numpy) for x in named]
    return (*how[:_OWN_AT], made, *how[_OWN_AT + 1 :]), arrays


def _shapes_of_sequences(given: Mapping[str, Any]) -> tuple[dict[str, tuple[int, ...]], bool]:
    """The shapes of the offsets and lengths of packed sequences, which may be given as arrays.

    There is at least one sequence, as ``ragged.with_a_sequence`` has it. Also returns whether there
    was none.
    """
    least = dict.fromkeys(optional_inputs.STARTS, (2,)) | dict.fromkeys(optional_inputs.USED, (1,))
    shapes = {
        name: _shape(f"the shape of {name}", getattr(given[name], "shape", given[name]))
        for name in least
        if name in given
    }
    is_empty = shapes.get(optional_inputs.STARTS[0]) == (1,)
    return {x: max(y, least[x]) if is_empty else y for x, y in shapes.items()}, is_empty


def _does_without_lse(kernel: str | Kernel) -> bool:
    """Whether a kernel for gradients does not read lse."""
    record = lookup.kernel(kernel) if isinstance(kernel, str) and kernel != "auto" else kernel
    return isinstance(record, Kernel) and record.operation == "backward" and not record.reads_lse


def _has_no_lse(kernel: str | Kernel, backward: str | Kernel) -> bool:
    """Whether a forward kernel does not compute lse, and the one for gradients does without."""
    if not _does_without_lse(backward):
        return False
    record = lookup.kernel(kernel) if isinstance(kernel, str) and kernel != "auto" else kernel
    return isinstance(record, Kernel) and "lse" not in record.features


def _unread_lse(kernel: str | Kernel, q: Any, backend: BackendName | Backend, layout: str) -> Any:
    """An array in the place of an lse that a kernel does not read; None, if it reads lse."""
    if not _does_without_lse(kernel):
        return None
    where, (q,) = adopt(backend, q=q)
    if str(q.dtype) not in DTYPES:  # which is refused later
        return None
    shape, dtype = rows_of(q, layout), DTYPES[str(q.dtype)].sums
    return np.zeros(shape, dtype) if isinstance(q, np.ndarray) else where.empty(shape, dtype)


def _like_lse(dlse: Any, lse: Any) -> Any:
    """The gradient of lse. Raises TypeError and ValueError for what cannot be one."""
    if not hasattr(dlse, "shape"):
        raise TypeError(f"dlse is {described(dlse)}; give an array like lse")
    if tuple(dlse.shape) != tuple(lse.shape) or str(dlse.dtype) != str(lse.dtype):
        raise ValueError(
            f"dlse is {dlse.dtype} {tuple(dlse.shape)}; it must be {lse.dtype} {tuple(lse.shape)}, "
            "as lse is"
        )
    return dlse


def _gradient(name: str, inputs: Mapping[str, Any]) -> Result:
    if name in _QKV:
        return Result(f"d{name.upper()}", tuple(inputs[name].shape), f"d{name} of grads")
    shape = tuple(inputs[f"mods.{name}"].shape)
    return Result(optional_inputs.gradient_of(name), shape, f"d{name} of grads")


def _own_of(wrt: Sequence[str]) -> tuple[Any, ...]:
    """What a call has besides its arrays: the names of those whose gradients it gives."""
    if wrt is _QKV:
        return _NO_OWN
    if not isinstance(wrt, str | Iterable) or not all(isinstance(x, str) for x in wrt):
        raise TypeError(f"wrt is {described(wrt)}; give names, as ('q', 'k', 'v', 'sink')")
    names = names_of(wrt)
    if len(set(names)) < len(names) or not names:
        raise ValueError(f"wrt is {names}; give at least one name, and each once")
    return (*_NO_OWN[:-1], names)


def _refuse_gradients(dtype: DType | None) -> None:
    """Raises Unsupported for inputs of a dtype that gradients cannot have."""
    if dtype is not None and dtype.result:
        raise Unsupported(
            f"q, k and v are {dtype.name}, and no kernel computes their gradients; convert them to "
            "float16 or bfloat16"
        )


def _check_wrt(wrt: Sequence[str], inputs: Mapping[str, Any]) -> None:
    read = [x for x in inputs if x.startswith("mods.")]
    dtypes = {x.removeprefix("mods."): str(inputs[x].dtype) for x in read}
    refuse_without_gradients(wrt, dtypes)


def _dtypes_of(keywords: Mapping[str, Any]) -> dict[str, str]:
    """The dtypes, by name, of the arrays that change scores, before any is converted."""
    given, _ = _without_arrays(keywords)
    captured = given.get("captured")
    own = {name: given[name] for name in optional_inputs.OWN_ARRAYS if name in given}
    found = {**own, **(captured if isinstance(captured, Mapping) else {})}
    arrays = {name: x for name, x in found.items() if getattr(x, "shape", ())}
    dtypes = {name: str(getattr(x, "dtype", "")) for name, x in arrays.items()}
    return {name: x.removeprefix("torch.") for name, x in dtypes.items() if x}


def _operands(
    inputs: Mapping[str, Any], numbers: tuple[Operand, ...], wrt: Sequence[str]
) -> tuple[Operand, ...]:
    lead, given = tuple(inputs["q"].shape[:-3]), []
    for name, array in inputs.items():
        own, asked_shape = name.removeprefix("mods."), tuple(map(int, array.shape))
        if own in ("bias", "mask") and own != name:
            array = optional_inputs.with_four_axes(own, array, lead)
        if name == f"mods.{optional_inputs.DLSE}":
            array = array.reshape(prod(lead), *array.shape[-2:])
        if own != name:
            made = optional_inputs.of_value(own, array)
            asked = own in wrt and own not in _QKV  # these name the inputs
            given.append(replace(made, gradient=asked, given=asked_shape))
    return (*given, *numbers)


def _leading(operation: str, arrays: Sequence[Any]) -> Any:
    """Of the arrays of a call the one that says in which memory it computes: q, or x."""
    names = _ARRAYS[operation]
    return arrays[names.index("q") if "q" in names else 0]


# What a kernel of the user's own takes and gives besides


def _with_own(
    how: How,
    arrays: Sequence[Any],
    own: Own | None,
    return_own: Sequence[str],
    *,
    shapes: bool = False,
) -> tuple[How, Sequence[Any]]:
    """A call with the arrays, floats and results of its kernel's own.

    The arrays may lie in host or in GPU memory. With ``shapes`` they are not given.
    """
    given = {} if own is None else own
    are_names = isinstance(return_own, Iterable) and not isinstance(return_own, str)
    if not are_names or not all(isinstance(x, str) for x in return_own):
        raise TypeError(f"return_own is {described(return_own)}; give names, as ('rowmax',)")
    record = _record_with_own(how[1], given)
    before, _, *others_of_texts = how[_OWN_AT]
    names = () if shapes else tuple(name for name in record.inputs if name in given)
    if shapes and (wrong := [name for name in record.inputs if name in given]):
        raise TypeError(
            f"own has {', '.join(wrong)}, and q is a shape; leave it out: its shape follows"
        )
    operation, _, *others = how
    others[_OWN_AT - 2] = (*before, *names), tuple(return_own), *others_of_texts
    made = (operation, _with_floats(record, given), *others)
    if not names:
        return made, arrays
    theirs = [as_array(how[2], name, given[name]) for name in names]
    if not all(hasattr(x, "dtype") for x in theirs):
        return made, (*arrays, *theirs)  # refused later, by name
    _, (first,) = adopt(how[2], q=_leading(operation, arrays))
    return made, (*arrays, *(where_q_is(how[2], first, x) for x in theirs))


def _record_with_own(kernel: str | Kernel, own: Own) -> Kernel:
    """The record of a kernel. Raises TypeError for names that it does not have."""
    if not isinstance(own, Mapping) or not all(isinstance(name, str) for name in own):
        raise TypeError(f'own is {described(own)}; give arrays and floats by name, as {{"x": x}}')
    if isinstance(kernel, str) and kernel == "auto":
        raise TypeError("own and return_own are for a kernel of your own; give it as kernel=")
    record = kernel if isinstance(kernel, Kernel) else lookup.kernel(kernel)
    known = (*record.inputs, *record.floats)
    for name in own:
        if name not in known:
            raise TypeError(
                f"{record.name} takes no {name!r} of its own{nearest(name, known)}; it "
                f"takes {', '.join(known) or 'nothing'}"
            )
    return record


def _with_floats(record: Kernel, own: Own) -> Kernel:
    """The record with these numbers in place of its own."""
    given = {name: own[name] for name in record.floats if name in own}
    for name, value in given.items():
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not (is_number and isfinite(value)):
            raise ValueError(f"{name} is {described(value)}; give a finite number")
    if not given:
        return record
    fixed = {name: lambda p, c, value=float(x): value for name, x in given.items()}
    return replace(record, floats={**record.floats, **fixed})


def _shared_own(own: Own | None, *kernels: str | Kernel) -> tuple[dict[str, Any] | None, ...]:
    """What each of several kernels takes of ``own``. Raises TypeError for what none takes."""
    if own is None:
        return (None,) * len(kernels)
    records = [
        x if isinstance(x, Kernel) else None if x == "auto" else lookup.kernel(x) for x in kernels
    ]
    known = [{*x.inputs, *x.floats} if x else set() for x in records]
    if unknown := [name for name in own if not any(name in names for names in known)]:
        takes = ", ".join(sorted(set().union(*known))) or "nothing"
        raise TypeError(f"no kernel takes {', '.join(unknown)} of its own; these take {takes}")
    return tuple({x: own[x] for x in own if x in names} or None for names in known)


def _own_arrays(
    record: Kernel,
    p: Problem,
    given: Mapping[str, Any],
    backend: Backend | None,
    lead: tuple[int, ...],
) -> dict[str, Any]:
    """The arrays of a kernel's own, checked; with a backend they are made."""
    found = {}
    for name, wanted in record.inputs.items():
        shape, dtype = wanted.shape(p), wanted.dtype(p)
        takes = f"{name} must be {dtype} {shape}"
        if isinstance(wanted.axes, str):
            takes += f", [{', '.join(wanted.axes.split())}]"
        if not wanted.when(p):
            if name in given:
                raise ValueError(f"{record.name} takes no {name} for {p}; leave it out of own")
        elif backend is not None:
            found[name] = backend.empty(shape, dtype)
        elif name not in given:
            raise TypeError(
                f"{record.name} needs {name}, an array of its own; {takes}: give it as "
                f'own={{"{name}": …}}'
            )
        elif tuple(given[name].shape) not in (shape, _led(wanted.axes, shape, lead)):
            raise ValueError(
                f"{name} has shape {tuple(given[name].shape)}; {takes} for {record.name} on {p}"
            )
        elif given[name].dtype != dtype:
            raise TypeError(f"{name} is {given[name].dtype}; {takes}: convert it")
        else:
            found[name] = given[name]
    return found


def _own_results(
    record: Kernel, p: Problem, names: Sequence[str], lead: tuple[int, ...]
) -> list[Result]:
    for name in names:
        if name not in record.outputs:
            raise ValueError(
                f"{record.name} has no output {name!r} of its own; it has "
                f"{', '.join(record.outputs) or 'none'}"
            )
    axes = {name: record.outputs[name][0] for name in names}
    return [Result(name, _led(x, p.shape(x), lead), None) for name, x in axes.items()]


def _led(axes: Any, shape: tuple[int, ...], lead: tuple[int, ...]) -> tuple[int, ...]:
    """A shape with the caller's leading axes in place of the batch, where that is the first."""
    if not isinstance(axes, str) or axes.split()[0] != "batch":
        return shape
    return (*lead, *shape[1:])


def given_tiles(tiles: Tiles | None) -> Tiles:
    """The tile sizes that a caller fixes."""
    if tiles is None:
        return {}
    if not isinstance(tiles, Mapping) or not all(isinstance(name, str) for name in tiles):
        raise TypeError(f'tiles is {described(tiles)}; give tile sizes by name, as {{"Br": 64}}')
    return tiles


def _values(function: Callable[..., Any], keywords: Mapping[str, Any]) -> tuple[Any, ...]:
    """The values of OPTIONS in a call of a function, or NOT_GIVEN."""
    if not keywords:
        return _NOT_GIVEN
    if not keywords.keys() <= OPTIONS.keys():
        raise unknown_argument(function, keywords, (*OPTIONS, *_MORE))
    return tuple(keywords.get(name, NOT_GIVEN) for name in OPTIONS)


# Names in other libraries, and what to write here.
_ELSEWHERE = {
    "is_causal": "write causal=True",
    **dict.fromkeys(
        ("attn_mask", "attention_mask"), "write mask= for an array of bool, bias= for floats"
    ),
    "key_padding_mask": "write mask=, of the shape [batch, 1, 1, N], where True is seen",
    "attn_bias": "write bias=",
    "block_mask": "write mask=, of cupyfa.block_mask",
    **{f"max_seqlen_{x}": "leave it out: it is computed from the arrays" for x in "qk"},
    "seqused_q": "write lengths_q=",
    **dict.fromkeys(("seqused_k", "cache_seqlens"), "write lengths_k="),
    "dropout_p": "write dropout= and dropout_seed=",
    **dict.fromkeys(("softmax_scale", "sm_scale", "attn_scale"), "write scale="),
    "devices": "attention, attention_ragged and their gradients have it; elsewhere call with "
    "cupy.cuda.Device(i):",
    "enable_gqa": "leave it out: k and v may have fewer heads than q",
    "window_size": "write window=(left, right)",
    **dict.fromkeys(("return_softmax_lse", "return_attn_probs"), "write return_lse=True"),
    **dict.fromkeys(("axis", "dim"), "the softmax is over the last axis: move yours there"),
}
# Arguments of attention that decode does not have.
_NOT_IN_DECODING = {
    **dict.fromkeys((*DROPOUT, "precision"), "decoding has no {}: leave it out"),
    **dict.fromkeys(
        ("causal", "offset"),
        "it is always causal, and the new tokens are the last ones: leave it out",
    ),
    **dict.fromkeys(
        (optional_inputs.BIAS, optional_inputs.MASK),
        "write score_mod= or mask_mod=, which may read a captured array",
    ),
}


def unknown_argument(
    function: Callable[..., Any], given: Mapping[str, Any], keywords: Iterable[str] = ()
) -> TypeError:
    """The error for a keyword argument that a function does not have, with what to write.

    ``keywords`` are the names that it takes besides those of its signature.
    """
    parameters = signature(function).parameters.values()
    names = [*(x.name for x in parameters if x.kind is not x.VAR_KEYWORD), *keywords]
    name = next(name for name in given if name not in names)
    if tiles := lookup.tile_remedy({name: given[name]}, "tiles"):
        remedy = tiles
    elif function is softmax and name in (*OPTIONS, *_MORE):
        remedy = f"a softmax has no {name}: leave it out"
    elif function is decode and name in _NOT_IN_DECODING:
        remedy = _NOT_IN_DECODING[name].format(name)
    elif name in _ELSEWHERE:
        remedy = _ELSEWHERE[name]
    elif name in OPTIONS and "options" in names:
        remedy = f"give options=AttentionOptions({name}={described(given[name])})"
    elif close := closest(name, names):
        remedy = f"did you mean {close}?"
    else:
        remedy = f'it has {", ".join(dict.fromkeys(names))}; tile sizes go into tiles={{"Br": 64}}'
    return TypeError(f"{function.__name__}() has no argument {name!r}; {remedy}")


def _check_like(name: str, array: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Raises if an array is not what the forward pass of the same q, k and v returns."""
    if tuple(array.shape) != tuple(shape):
        remedy = (
            "give the gradient of out, in its shape"
            if name == "dout"
            else "pass the out and lse that attention returned"
        )
        raise ValueError(
            f"{name} has shape {tuple(array.shape)}; expected is {tuple(shape)} for these q, k and "
            f"v: {remedy}"
        )
    if str(array.dtype) != str(dtype):
        other = "convert it, or give the out_dtype of that call" if name == "out" else "convert it"
        raise TypeError(
            f"{name} is {array.dtype}; expected is {dtype} for these q, k and v: {other}"
        )
