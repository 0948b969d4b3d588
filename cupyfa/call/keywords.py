"""The keyword arguments of functions: their types, their values, and errors for unknown ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from cupyfa.call.call import Call, Tiles
from cupyfa.errors import closest, described
from cupyfa.ladder import lookup
from cupyfa.problem import optional_inputs
from cupyfa.problem.optional_inputs import is_array
from cupyfa.problem.options import (
    DROPOUT,
    NOT_GIVEN,
    OPTIONS,
    NotGiven,
    OptionKeywords,
    read_flag,
)
from cupyfa.problem.problem import TEXTS
from cupyfa.score.expressions import Expression

if TYPE_CHECKING:
    from cupyfa.call.call import BackendName, Devices, Layout
    from cupyfa.problem.options import AttentionOptions
    from cupyfa.runtime.backend import Backend

    class ScoreKeywords(OptionKeywords, total=False):
        """All that changes what attention computes."""

        alibi_slopes: Any
        bias: Any
        mask: Any
        sink: Any
        captured: Mapping[str, Any] | None

    class PaddedKeywords(ScoreKeywords, total=False):
        """And how many rows of each batch element count, and the factors of e4m3 numbers."""

        lengths_q: Any
        lengths_k: Any
        q_descale: Any
        k_descale: Any
        v_descale: Any

    class CompileKeywords(PaddedKeywords, total=False):
        """What prepared calls take: also where sequences of a ragged batch lie."""

        cu_seqlens_q: Any
        cu_seqlens_k: Any
        seqused_q: Any
        seqused_k: Any

    class RunKeywords(TypedDict, total=False):
        """How a call runs."""

        options: AttentionOptions | None
        backend: BackendName | Backend
        check: bool
        devices: Devices | None

    class CommonKeywords(PaddedKeywords, RunKeywords, total=False):
        """What ``attention`` and ``attention_backward`` both take, without kernel and tiles."""

        layout: Layout

    class NoKeywords(TypedDict):
        """No further keywords: type checkers report one that a function does not have."""

    class RaggedKeywords(ScoreKeywords, RunKeywords, total=False):
        """What the functions of ragged batches take besides."""

    class RaggedTilesKeywords(RaggedKeywords, total=False):
        """And tile sizes, which each kernel has of its own."""

        tiles: Tiles | None


# Of options that are keys as they are; a Python function is no such type.
_VALUES = frozenset({type(None), NotGiven, bool, int, float, str, tuple, Expression})
# Arguments that are arrays, beside q, k and v.
ARRAY_KEYWORDS = (
    *optional_inputs.OWN_ARRAYS,
    *optional_inputs.PADDED,
    *optional_inputs.DESCALES,
    "captured",
)
_KEYWORDS = {*OPTIONS, *ARRAY_KEYWORDS}
# Arguments of attention_vjp that go to both passes.
OF_BOTH_PASSES = dict.fromkeys(
    (*OPTIONS, *ARRAY_KEYWORDS, "options", "backend", "layout", "check", "devices")
)


def read_shape(what: str, shape: Sequence[Any]) -> tuple[int, ...]:
    if not isinstance(shape, Iterable):
        raise TypeError(f"{what} is {described(shape)}; give whole numbers from 0")
    sizes = tuple(shape)
    if not all(isinstance(size, int | np.integer) and size >= 0 for size in sizes):
        raise ValueError(f"{what} is {shape}; give whole numbers from 0")
    return sizes


def read_call(call: Call, check: Any, progress: Any) -> tuple[Call, bool]:
    """A call whose flags are bools, and whose options are values that keys can have; and ``check``.

    Expressions take the place of Python functions: a function is traced in each call, as it may
    have changed, and another one may have its address. Raises TypeError for wrong flags.
    """
    if progress is not None and not callable(progress):
        raise TypeError(
            f"progress is {described(progress)}; give a function of (done, total, what), or None"
        )
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
    """An option as a value that does not change any more."""
    if name in TEXTS and callable(given):
        return Expression.of(name, given)
    return given.item() if isinstance(given, np.ndarray) and not given.shape else given


def split_keywords(
    function: Callable[..., Any], keywords: Mapping[str, Any]
) -> tuple[dict[str, Any], OptionKeywords]:
    """The arrays and captured numbers among a function's arguments, and the options in their order.

    In place of seeds that are arrays the options have 0. Raises TypeError for other arguments.
    """
    given: dict[str, Any] = {}
    if not keywords.keys() <= OPTIONS.keys():
        if not keywords.keys() <= _KEYWORDS:
            raise unknown_argument(function, keywords, (*OPTIONS, *ARRAY_KEYWORDS))
        given = {x: keywords[x] for x in ARRAY_KEYWORDS if keywords.get(x) is not None}
    asked: Any = {x: keywords[x] for x in OPTIONS if keywords.get(x, NOT_GIVEN) is not NOT_GIVEN}
    if not asked.keys().isdisjoint(optional_inputs.SEEDS):
        seeds = select_arrays(
            {name: asked[name] for name in optional_inputs.SEEDS if name in asked}
        )
        given, asked = {**given, **seeds}, {**asked, **dict.fromkeys(seeds, 0)}
    return given, asked


def convert_lists(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The same arguments with arrays in place of lists: a pullback reads them again."""
    made = {
        name: optional_inputs.of_list(name, x) if name in ARRAY_KEYWORDS else x
        for name, x in keywords.items()
    }
    if isinstance(captured := made.get("captured"), Mapping):
        made["captured"] = {x: optional_inputs.of_list(str(x), y) for x, y in captured.items()}
    return made


def select_arrays(seeds: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in seeds.items() if is_array(x)}


def read_tiles(tiles: Tiles | None) -> Tiles:
    """The tile sizes that a caller fixes."""
    if tiles is None:
        return {}
    if not isinstance(tiles, Mapping) or not all(isinstance(name, str) for name in tiles):
        raise TypeError(f'tiles is {described(tiles)}; give tile sizes by name, as {{"Br": 64}}')
    return tiles


# What to write in place of an argument that a function lacks: by function or package, and under ""
# names in other libraries.
_ON_PARTS = {
    "layout": "arrays are [batch, heads, rows, d]: give q.swapaxes(1, 2)",
    **dict.fromkeys(("out", "grads"), "results are new arrays: leave it out"),
    **dict.fromkeys(("own", "return_own"), "a kernel's own arrays are not divided: leave it out"),
    "return_max": "parts are merged by lse alone: leave it out",
    "devices": "each rank or worker computes on its own device: start one for each device",
}
_REMEDIES = {
    "": {
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
        **dict.fromkeys(("max_scores", "return_row_max"), "write return_max=True"),
        **dict.fromkeys(("axis", "dim"), "the softmax is over the last axis: move yours there"),
    },
    "decode": {
        **dict.fromkeys((*DROPOUT, "precision"), "decoding does not have it: leave it out"),
        **dict.fromkeys(
            ("causal", "offset"),
            "it is always causal, and the new tokens are the last ones: leave it out",
        ),
        **dict.fromkeys(
            (optional_inputs.BIAS, optional_inputs.MASK),
            "write score_mod= or mask_mod=, which may read a captured array",
        ),
    },
    **{
        f"{name}_vjp": {
            "return_max": f"call {name} for it, and {name}_backward with its out and lse"
        }
        for name in ("attention", "attention_ragged")
    },
    "softmax": dict.fromkeys((*OPTIONS, *ARRAY_KEYWORDS), "a softmax has no options: leave it out"),
    "cupyfa.dask": {
        **_ON_PARTS,
        **dict.fromkeys(
            ("out", "grads"),
            "results are new Dask arrays, which dask.array.store writes into others",
        ),
        "progress": "dask.diagnostics.ProgressBar shows the progress of tasks",
    },
    "cupyfa.distributed": {**_ON_PARTS, "progress": "ranks work in lockstep: leave it out"},
}


def _known_remedy(function: Callable[..., Any], name: str) -> str | None:
    package = function.__module__.rpartition(".")[0]
    found = (_REMEDIES.get(where, {}).get(name) for where in (function.__name__, package, ""))
    return next(filter(None, found), None)


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
    elif known := _known_remedy(function, name):
        remedy = known
    elif name in OPTIONS and "options" in names:
        remedy = f"give options=AttentionOptions({name}={described(given[name])})"
    elif close := closest(name, names):
        remedy = f"did you mean {close}?"
    else:
        remedy = f'it has {", ".join(dict.fromkeys(names))}; tile sizes go into tiles={{"Br": 64}}'
    return TypeError(f"{function.__name__}() has no argument {name!r}; {remedy}")
