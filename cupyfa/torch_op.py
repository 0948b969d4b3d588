"""Attention as an operator of torch, which is one node in the graphs of ``torch.compile``."""

from contextlib import nullcontext
from typing import Any

import torch

from cupyfa import api
from cupyfa.errors import nearest
from cupyfa.problem.problem import rows_of
from cupyfa.runtime.choose_backend import backend_named

_ARRAYS = ("q", "k", "v", "bias", "alibi_slopes", "sink")
_OPTIONS = dict.fromkeys(("causal", "score_mod", "mask", "layout", "backend"), "str")
_OPTIONS |= {"left": "int", "right": "int", "offset": "int", "scale": "float", "softcap": "float"}
_KNOWN = (*_ARRAYS, *_OPTIONS, "window")
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? alibi_slopes, Tensor? sink"
_GIVEN = ", ".join(f"{kind}? {name}=None" for name, kind in _OPTIONS.items())
_RESULTS = "Tensor out, Tensor lse, Tensor dout, Tensor? dlse"
_FORWARD = f"({_TENSORS}, *, {_GIVEN}) -> (Tensor, Tensor)"
_BACKWARD = f"({_TENSORS}, {_RESULTS}, *, str wrt, {_GIVEN}) -> Tensor[]"
# Results lie in CuPy's memory pool, which torch's CUDA graphs do not keep.
_HOW: Any = {"mutates_args": (), "tags": (torch.Tag.cudagraph_unsafe,)}


def attention(q: Any, k: Any, v: Any, *, return_lse: bool = False, **options: Any) -> Any:
    """Computes ``cupyfa.attention`` on torch tensors, also inside of ``torch.compile``.

    options: bias, alibi_slopes, sink, causal, window, offset, scale, softcap, layout and backend of
    ``cupyfa.attention``, and its score_mod and mask as strings that read no captured arrays. The
    tensors can be differentiated once. Kernels are queued in torch's current stream.

    Returns out, or (out, lse) with ``return_lse``. Raises the errors of ``cupyfa.attention``,
    TypeError for its other arguments, and Unsupported while a CUDA graph is captured.
    """
    given = {"q": q, "k": k, "v": v, **options}
    if isinstance(given.get("causal"), bool):
        given["causal"] = "bottom-right" if given["causal"] else None
    window = options.get("window") or (None, None)
    if isinstance(window, tuple) and len(window) == 2:
        given.pop("window", None)
        given["left"], given["right"] = window
    for name, x in given.items():
        fits = torch.Tensor if name in _ARRAYS else str | int | float if name in _OPTIONS else ()
        if x is not None and not isinstance(x, fits):
            found = f"{name} is of type {type(x).__name__}, which torch_op.attention does not take"
            guess = "" if name in _KNOWN else nearest(name, _KNOWN)
            remedy = "call cupyfa.attention, outside of torch.compile"
            if name == "window":
                remedy = "pass (left, right)"
            raise TypeError(f"{found}{guess}; {remedy}")
    arrays = [given.pop(name, None) for name in _ARRAYS]
    out, lse = _attention(*arrays, **given)
    return (out, lse) if return_lse else out


def _call(function: Any, names: Any, arrays: Any, options: Any) -> list[Any]:
    given = {name: x.detach() for name, x in zip(names, arrays) if x is not None}
    given |= {name: x for name, x in options.items() if x is not None}
    given["window"], q = (given.pop("left", None), given.pop("right", None)), given["q"]
    with backend_named("cuda").in_stream_of(q) if q.is_cuda else nullcontext():
        return [torch.from_dlpack(x) for x in function(**given)]


@torch.library.custom_op("cupyfa::attention", schema=_FORWARD, **_HOW)
def _attention(*arrays: Any, **options: Any) -> Any:
    return tuple(_call(api.attention, _ARRAYS, arrays, {**options, "return_lse": True}))


@torch.library.register_fake("cupyfa::attention")
def _(q: Any, k: Any, v: Any, *others: Any, layout: str = "bhsd", **options: Any) -> Any:
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(rows_of(q, layout), dtype=sums)


@torch.library.custom_op("cupyfa::attention_backward", schema=_BACKWARD, **_HOW)
def _backward(*arrays: Any, **options: Any) -> Any:
    return _call(api.backward, (*_ARRAYS, "out", "lse", "dout", "dlse"), arrays, options)


@torch.library.register_fake("cupyfa::attention_backward")
def _(*arrays: Any, wrt: str, **options: Any) -> Any:
    named = dict(zip(_ARRAYS, arrays))
    return [named[name].new_empty(named[name].shape) for name in wrt.split(",")]


def _save(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.options = keyword_only_inputs
    ctx.save_for_backward(*inputs, *output)


def _differentiate(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
    *arrays, out, lse = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    wrt = [name for name, is_needed in zip(_ARRAYS, ctx.needs_input_grad) if is_needed]
    grads = _backward(*arrays, out, lse, dout, dlse, wrt=",".join(wrt), **ctx.options)
    return tuple(map(dict(zip(wrt, grads)).get, _ARRAYS))


torch.library.register_autograd("cupyfa::attention", _differentiate, setup_context=_save)
