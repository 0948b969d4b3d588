"""Keyword arguments of public functions: their types, checks, and errors for unknown names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from cupyfa.arrays.block_mask import BlockMask
from cupyfa.call.call import ANYWHERE, Call, Devices, Tiles
from cupyfa.errors import closest, described
from cupyfa.ladder import lookup
from cupyfa.problem import optional_inputs
from cupyfa.problem.dtypes import INPUTS
from cupyfa.problem.optional_inputs import is_array
from cupyfa.problem.options import OptionKeywords, read_flag
from cupyfa.problem.problem import TEXTS, can_give
from cupyfa.problem.shape_language import is_array_form
from cupyfa.score.dropout import Dropout
from cupyfa.score.expressions import Expression

if TYPE_CHECKING:
    from cupyfa.call.call import BackendName, Layout
    from cupyfa.ladder.kernel import BoundKernel, Kernel
    from cupyfa.problem.options import Causal, Precision, Text, Window
    from cupyfa.runtime.backend import Backend

    class HvpKeywords(TypedDict, total=False):
        """Keywords that change the result of attention, and that ``hvp`` supports."""

        causal: Causal | bool
        window: Window | None
        offset: int | None
        scale: float | None
        score_mod: Text
        alibi_slopes: Any
        bias: Any
        mask: Any
        captured: Mapping[str, Any] | None
        sink: Any
        dropout: Dropout | None
        precision: Precision | None

    class ScoreKeywords(HvpKeywords, total=False):
        """Keywords that change the result of attention."""

        softcap: float | None

    class CommonKeywords(ScoreKeywords, total=False):
        """Keywords that ``attention`` and ``backward`` share, except kernel and tiles."""

        backend: BackendName | Backend | Devices
        layout: Layout
        check: bool

    class CallKeywords(CommonKeywords, total=False):
        """Keywords of all functions that compute attention."""

        kernel: str | Kernel | BoundKernel
        tiles: Tiles | None

    class NoKeywords(TypedDict):
        """No keywords: makes type checkers report any keyword argument as unknown."""


DTYPES = (str, np.dtype, type)  # types of ``out`` that name a dtype
# Option types that can be part of a cache key; Python functions are traced first.
_VALUES = frozenset({type(None), bool, int, float, str, tuple, Expression})
# Keywords that are also fields of AttentionOptions. ``attention`` lists their values in this order.
OPTIONS = ("causal", "window", "offset", "scale", "softcap", "score_mod", "precision")
# Keywords for optional arrays and captured values.
_ARRAYS = (*optional_inputs.OWN_ARRAYS, "captured")
OF_SCORES = (*OPTIONS, *_ARRAYS, "dropout")
OF_HVP = tuple(name for name in OF_SCORES if name != "softcap")
# Keywords that ``vjp`` passes to both the forward and the backward pass.
OF_BOTH_PASSES = (*OF_SCORES, "backend", "layout", "check")


def read_shape(what: str, shape: Sequence[Any]) -> tuple[int, ...]:
    if not isinstance(shape, Iterable):
        raise TypeError(f"{what} is {described(shape)}; pass non-negative integers")
    sizes = tuple(shape)
    if not all(isinstance(size, int | np.integer) and size >= 0 for size in sizes):
        raise ValueError(f"{what} is {shape}; pass non-negative integers")
    return sizes


def read_call(call: Call, check: Any) -> tuple[Call, bool]:
    """Checks a call's flags and makes its options hashable; returns the call and ``check``.

    Python functions are traced in every call, since their identity is not a safe cache key: a
    function may read changed variables, and a new one may reuse the id of a deleted one. Raises
    TypeError for wrong flags.
    """
    if type(call.return_lse) is not bool:
        call = call._replace(return_lse=read_flag("return_lse", call.return_lse))
    if type(call.return_max) is not bool:
        call = call._replace(return_max=read_flag("return_max", call.return_max))
    if type(call.deterministic) is not bool:
        call = call._replace(deterministic=read_flag("deterministic", call.deterministic))
    if type(check) is not bool:
        check = read_flag("check", check)
    if not _VALUES.issuperset(map(type, call.asked.values())):
        values: Any = {name: _read_value(name, x) for name, x in call.asked.items()}
        call = call._replace(asked=values)
    return call, check


def _read_value(name: str, given: Any) -> Any:
    if name in TEXTS and callable(given):
        return Expression.of(name, given)
    return given.item() if isinstance(given, np.ndarray) and not given.shape else given


def read_devices(backend: Any) -> tuple[Any, Devices]:
    """Splits the argument ``backend``, which may be Devices, into a backend and Devices."""
    if not isinstance(backend, Devices):
        return backend, ANYWHERE
    progress = backend.progress
    if progress is not None and not callable(progress):
        raise TypeError(
            f"progress is {described(progress)}; pass a callable(done, total, what) or None"
        )
    return backend.backend, backend


def split_keywords(
    function: Callable[..., Any], keywords: Mapping[str, Any], others: Iterable[str] = ()
) -> tuple[dict[str, Any], OptionKeywords]:
    """Splits a function's keyword arguments into optional inputs (arrays, captured) and options.

    A block mask is returned among the inputs as ``mask``. If a dropout seed or offset is an array,
    it is an input, and the option is 0. others: names of further arguments of the function, for
    error messages. Raises TypeError for unknown arguments.
    """
    if not keywords.keys() <= {*OF_SCORES}:
        raise unknown_argument(function, keywords, (*OF_SCORES, *others))
    given = {x: keywords[x] for x in _ARRAYS if keywords.get(x) is not None}
    asked: Any = {x: keywords[x] for x in OPTIONS if keywords.get(x) is not None}
    if asked.get("causal") is False:
        del asked["causal"]
    if (mask := given.pop("mask", None)) is not None:
        given |= split_mask(mask)
        if (expression := given.pop("mask_mod", None)) is not None:
            asked["mask_mod"] = expression
    if (dropout := keywords.get("dropout")) is not None:
        asked |= _read_dropout(dropout)
        seeds = {name: asked[name] for name in optional_inputs.SEEDS if is_array(asked[name])}
        given |= seeds
        asked |= dict.fromkeys(seeds, 0)
    return given, asked


def read_out(out: Any, q: Any, asked: OptionKeywords) -> tuple[Any, OptionKeywords]:
    """Returns the caller's output array, or None, and ``asked`` extended by the output's dtype.

    out: an array, the dtype of a new array, or None.
    """
    if out is None:
        return None, asked
    if isinstance(out, DTYPES):
        return None, {**asked, "out_dtype": out}  # type: ignore[typeddict-item]
    name, of = (str(getattr(x, "dtype", "")).removeprefix("torch.") for x in (out, q))
    if name == of or of not in INPUTS or not can_give(name, INPUTS[of]):  # a later check raises
        return out, asked
    return out, {**asked, "out_dtype": name}  # type: ignore[typeddict-item]


def split_mask(mask: Any) -> dict[str, Any]:
    """Splits ``mask`` into an array or block mask ("mask") and an expression ("mask_mod")."""
    found: dict[str, Any] = {}
    is_shape = isinstance(mask, tuple) and all(isinstance(x, int | np.integer) for x in mask)
    for x in mask if isinstance(mask, tuple) and not is_shape else (mask,):
        is_expression = isinstance(x, str | Expression) or (
            callable(x) and not isinstance(x, BlockMask)
        )
        if isinstance(x, str) and is_array_form(x):  # ``plan`` accepts shapes like "1hmn"
            is_expression = False
        kind = "mask_mod" if is_expression else "mask"
        if kind in found:
            one = "expressions" if is_expression else "arrays"
            remedy = "join them with `and`" if is_expression else "combine them with &"
            raise TypeError(f"mask contains two {one}; {remedy}")
        found[kind] = x
    return found


def _read_dropout(dropout: Any) -> dict[str, Any]:
    if not isinstance(dropout, Dropout):
        raise TypeError(
            f"dropout is {described(dropout)}; pass cupyfa.Dropout(rate, seed), with a different "
            "seed for each layer and step"
        )
    values = dropout.rate, dropout.seed, dropout.offset
    return dict(zip(("dropout", *optional_inputs.SEEDS), values))


def convert_lists(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Converts lists among the arguments to arrays, because a pullback reads them again."""
    made = {
        name: optional_inputs.of_list(name, x)
        if name in _ARRAYS and not (name == optional_inputs.MASK and isinstance(x, tuple))
        else x
        for name, x in keywords.items()
    }
    if isinstance(captured := made.get("captured"), Mapping):
        made["captured"] = {x: optional_inputs.of_list(str(x), y) for x, y in captured.items()}
    return made


def read_tiles(tiles: Tiles | None) -> Tiles:
    if tiles is None:
        return {}
    if not isinstance(tiles, Mapping) or not all(isinstance(name, str) for name in tiles):
        raise TypeError(f'tiles is {described(tiles)}; pass sizes by name, such as {{"Br": 64}}')
    return tiles


def given_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a call's keyword arguments that differ from the function's defaults.

    arguments: the function's ``locals()``. Raises TypeError for unknown keywords.
    """
    given = list_arguments(function, arguments)
    parameters = signature(function).parameters.values()
    names = {x.name for x in parameters if x.kind is x.KEYWORD_ONLY} | {*OF_BOTH_PASSES}
    if not given.keys() <= names:
        raise unknown_argument(function, given, OF_BOTH_PASSES)
    return given


def list_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Like ``given_arguments``, but accepts unknown keywords."""
    parameters = signature(function).parameters.values()
    given = {
        x.name: arguments[x.name]
        for x in parameters
        if x.kind is x.KEYWORD_ONLY and arguments[x.name] is not x.default
    }
    of_names = [x.name for x in parameters if x.kind is x.VAR_KEYWORD]
    others: dict[str, Any] = arguments[of_names[0]] if of_names else {}
    return {**given, **others}


_NEW_DROPOUT = "write dropout=Dropout(rate, seed, offset)"
_OF_KERNELS = "write kernel=kernel.bind(name=array, returns=(…)) with the record of your kernel"
_ON_PARTS = {
    "layout": "arrays must be [batch, heads, rows, d]: pass q.swapaxes(1, 2)",
    **dict.fromkeys(("out", "grads"), "results are always new arrays"),
    "return_max": "row maxima are not computed for partitioned calls",
}
# Remedies for unknown arguments, by function or package. The entry "" covers names that other
# libraries or earlier versions use.
_REMEDIES = {
    "": {
        "is_causal": "write causal=True",
        **dict.fromkeys(
            ("attn_mask", "attention_mask"), "write mask= for a bool array, bias= for a float array"
        ),
        "key_padding_mask": "write mask=, of shape [batch, 1, 1, N], with True for visible keys",
        "attn_bias": "write bias=",
        "block_mask": "write mask=, with the result of cupyfa.block_mask",
        "mask_mod": 'write mask="key <= query", an expression or a Python function; a tuple '
        "combines it with an array",
        **{f"max_seqlen_{x}": "the maximum length is computed from the arrays" for x in "qk"},
        "cu_seqlens_q": "write q as Packed(q, cu_seqlens_q)",
        "cu_seqlens_k": "write k and v as Packed(k, cu_seqlens_k) and Packed(v, cu_seqlens_k)",
        "seqused_q": "write q as Packed(q, offsets, used=seqused_q), or Padded(q, lengths)",
        **dict.fromkeys(
            ("seqused_k", "cache_seqlens"),
            "write k and v as Padded(k, lengths), Packed(k, offsets, used), or a KVCache",
        ),
        "lengths_q": "write q as Padded(q, lengths_q)",
        "lengths_k": "write k and v as Padded(k, lengths_k) and Padded(v, lengths_k)",
        **{f"{x}_descale": f"write {x} as Scaled({x}, {x}_descale)" for x in "qkv"},
        **{f"{x}_scale": f"write {x} as Scaled({x}, {x}_scale)" for x in "kv"},
        "dropout_p": "write dropout=Dropout(rate, seed)",
        **dict.fromkeys(("dropout_seed", "dropout_offset"), _NEW_DROPOUT),
        **dict.fromkeys(("softmax_scale", "sm_scale", "attn_scale"), "write scale="),
        "options": "pass each option as a keyword, or a dict of options as **options",
        "out_dtype": 'write out="float32"',
        **dict.fromkeys(("own", "return_own"), _OF_KERNELS),
        "devices": 'write backend=Devices("all") or backend=Devices([0, 1])',
        "progress": "write backend=Devices(progress=function)",
        "splits": 'write tiles={"splits": n}',
        "rotary": "write KVCache(…, rotary=(cos, sin))",
        "prefix": "write KVCache(…, prefix=(k, v))",
        "interleaved": "write KVCache(…, rotary=Rotary(cos, sin, interleaved=True))",
        "enable_gqa": "k and v may always have fewer heads than q",
        "window_size": "write window=(left, right)",
        **dict.fromkeys(("return_softmax_lse", "return_attn_probs"), "write return_lse=True"),
        **dict.fromkeys(("max_scores", "return_row_max"), "write return_max=True"),
        **dict.fromkeys(("axis", "dim"), "softmax runs over the last axis; use numpy.moveaxis"),
    },
    "vjp": {"return_max": "call attention with return_max=True, and then backward"},
    "softmax": dict.fromkeys(OF_SCORES, "softmax has no attention options"),
    "cupyfa.dask": {
        **_ON_PARTS,
        **dict.fromkeys(
            ("out", "grads"),
            "results are new Dask arrays, which dask.array.store writes into others",
        ),
    },
    "cupyfa.distributed": _ON_PARTS,
}


def _known_remedy(function: Callable[..., Any], name: str) -> str | None:
    package = function.__module__.rpartition(".")[0]
    found = (_REMEDIES.get(where, {}).get(name) for where in (function.__name__, package, ""))
    return next(filter(None, found), None)


def unknown_argument(
    function: Callable[..., Any], given: Mapping[str, Any], keywords: Iterable[str] = ()
) -> TypeError:
    """Returns the TypeError for an unknown keyword argument, with a remedy.

    keywords: argument names that the function accepts in addition to its signature.
    """
    parameters = signature(function).parameters.values()
    names = [*(x.name for x in parameters if x.kind is not x.VAR_KEYWORD), *keywords]
    name = next(name for name in given if name not in names)
    if tiles := lookup.tile_remedy({name: given[name]}, "tiles"):
        remedy = tiles
    elif known := _known_remedy(function, name):
        remedy = known
    elif close := closest(name, names):
        remedy = f"did you mean {close}?"
    else:
        remedy = f'it accepts {", ".join(dict.fromkeys(names))}; tile sizes: tiles={{"Br": 64}}'
    return TypeError(f"{function.__name__}() has no argument {name!r}; {remedy}")
