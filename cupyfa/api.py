"""The functions of the library: NumPy in, NumPy out; CuPy or DLPack in, CuPy out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from inspect import signature
from math import prod
from operator import is_
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from cupyfa.dtypes import dtype_named
from cupyfa.errors import described
from cupyfa.ladder import lookup
from cupyfa.ladder.kernel import Kernel
from cupyfa.options import (
    OPTIONS,
    AttentionOptions,
    Causal,
    OptionKeywords,
    Precision,
    Window,
)
from cupyfa.planner import select as planning
from cupyfa.planner.plan import Limits, Plan
from cupyfa.problem import Problem
from cupyfa.runtime import transfer
from cupyfa.runtime.arrays import require_one_device
from cupyfa.runtime.backend import Backend, recent
from cupyfa.runtime.prepared import Form, Prepared, Progress, Result, form
from cupyfa.runtime.select import adopt, backend_named, owner
from cupyfa.runtime.transfer import Transfer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    class _Common(OptionKeywords, total=False):
        """What ``attention`` and ``attention_backward`` both take, besides the kernel."""

        options: AttentionOptions | None
        backend: BackendName | Backend
        layout: Layout
        tiles: Tiles | None
        check: bool

    class _Keywords(_Common, total=False):
        """What ``attention`` takes, besides return_lse, which decides what it returns."""

        kernel: str | Kernel
        out: Any
        progress: Progress | None


Tiles = Mapping[str, int]
Layout = Literal["bhsd", "bshd"]
BackendName = Literal["auto", "cuda", "simulator"]
# Arguments that cannot change between two calls.
_FIXED = {type(None), bool, int, float, str, tuple, AttentionOptions, Kernel}
_MOST_KNOWN = 256  # calls that are remembered, each by its arrays' forms and options


Array = np.ndarray[Any, Any]


@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: Literal[False] = False,
    **keywords: Unpack[_Keywords],
) -> Array: ...
@overload
def attention(
    q: Array, k: Array, v: Array, *, return_lse: Literal[True], **keywords: Unpack[_Keywords]
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: Literal[False] = False, **keywords: Unpack[_Keywords]
) -> Any: ...
@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: Literal[True], **keywords: Unpack[_Keywords]
) -> tuple[Any, Any]: ...
@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: bool, **keywords: Unpack[_Keywords]
) -> Any: ...
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Causal | bool | None = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    precision: Precision | None = None,
    options: AttentionOptions | None = None,
    kernel: str | Kernel = "auto",
    backend: BackendName | Backend = "auto",
    layout: Layout = "bhsd",
    tiles: Tiles | None = None,
    return_lse: bool = False,
    out: Any = None,
    check: bool = False,
    progress: Progress | None = None,
    **unknown: Any,
) -> Any:
    """softmax(q kᵀ · scale) v, computed without storing the matrix of scores.

    q [..., heads, M, d], k [..., kv_heads, N, d], v [..., kv_heads, N, dv] of one dtype: float16,
    bfloat16 (ml_dtypes), float32 or float64. heads is a multiple of kv_heads, and query head h
    reads key head h // (heads // kv_heads). Arrays of two axes are one head, those of three are
    [heads, rows, d]; with ``layout="bshd"`` arrays are [batch, rows, heads, d]. Any size may be 0,
    and arrays may have any strides.

    causal: with True or "bottom-right" query i sees keys j <= i + N - M, with "top-left" j <= i.
    window: (left, right); query i at position p = i + N - M (p = i with a "top-left" mask) sees
        keys p - left <= j <= p + right. None is no limit; a causal mask is the limit right = 0.
    scale: the factor of the scores, by default 1/sqrt(d).
    softcap: scores become softcap · tanh(score / softcap), after the scale.
    precision: what float32 inputs may be rounded to, "tf32", "float16" or "bfloat16". By default
        they are not, unless ``kernel`` is one that always rounds them. "float8_e4m3" is also for
        float16 and bfloat16 inputs.
    options: all of these as one AttentionOptions.
    kernel: a name of ``kernels()``, a Kernel, or "auto".
    backend: "cuda", "simulator", "auto", or a Simulator with settings of its own.
    tiles: tile sizes of the kernel, for example ``{"Br": 64, "Bc": 32}``; the others are chosen.
    check: also compare the result with the float64 reference, and detect writes outside of it.
    progress: ``progress(done, total, what)`` is called as chunks of NumPy arrays are done.

    Returns out [..., heads, M, dv] of the dtype and kind of the inputs, in ``out`` if it is given;
    with ``return_lse`` also the natural logarithm of each row's sum of exp(score), [..., heads, M]
    in float32 (float64 for float64). A row that sees no key has out = 0 and lse = -infinity.

    Raises ValueError or TypeError for wrong arguments, Unsupported if the kernel or device cannot
    do the problem, DeviceError if the device fails, SimulatorFault if a kernel does something wrong
    in the simulator, CompilerNotFound if the simulator finds no compiler, WrongResult if a check
    fails.

    FlashAttention: Dao et al., 2022, arXiv:2205.14135; Dao, 2023, arXiv:2307.08691.
    """
    if unknown:
        raise _unknown("attention", unknown)
    given: Sequence[Any] = (q, k, v)
    targets = None if out is None else (out,)
    asked = precision, causal, window, scale, softcap
    how = (options, kernel, backend, layout, return_lse, tiles, *asked)
    if not check and (repeated := _repeated("forward", given, targets, how)) is not None:
        return repeated
    engine, arrays, forms = _adopted(backend, ("q", "k", "v"), given)
    key = "forward", forms, _which(kernel), repr(asked), options, layout, return_lse, repr(tiles)
    prepared = _known(engine, key)
    if prepared is None:
        chosen = AttentionOptions.of(options, dict(zip(OPTIONS, asked)))
        prepared = _forward(engine, arrays, kernel, chosen, layout, return_lse, tiles, keep=False)
        _keep(engine, key, prepared)
    else:
        _remember("forward", prepared, engine, how)
    return prepared.run(arrays, targets, check=check, progress=progress)


def compile(
    q: Any,
    k: Any,
    v: Any,
    *,
    dtype: str | None = None,
    options: AttentionOptions | None = None,
    kernel: str | Kernel = "auto",
    backend: BackendName | Backend = "auto",
    layout: Layout = "bhsd",
    tiles: Tiles | None = None,
    return_lse: bool = False,
    **keywords: Unpack[OptionKeywords],
) -> Prepared:
    """The prepared form of ``attention``: its plan is made and its kernels are compiled.

    q, k and v are arrays with the forms of later calls, or the shapes of contiguous arrays of
    ``dtype`` (CuPy arrays; NumPy arrays in the simulator). The other arguments are those of
    ``attention``.

    Returns a Prepared. ``prepared(q, k, v, out=None)`` takes a few microseconds for CuPy arrays. It
    refuses arrays of other shapes, strides, dtypes or devices. Raises what ``attention`` raises.
    """
    chosen = _options("compile", options, keywords)
    engine, arrays = _arrays(backend, dtype, q=q, k=k, v=v)
    return _forward(engine, arrays, kernel, chosen, layout, return_lse, tiles, keep=True)


def compile_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dtype: str | None = None,
    options: AttentionOptions | None = None,
    deterministic: bool = False,
    kernel: str | Kernel = "auto",
    backend: BackendName | Backend = "auto",
    layout: Layout = "bhsd",
    tiles: Tiles | None = None,
    **keywords: Unpack[OptionKeywords],
) -> Prepared:
    """The prepared form of ``attention_backward``: its plan is made, its kernels are compiled.

    The arrays have the forms of later calls, or all are shapes of contiguous arrays of ``dtype``
    (lse of float32, or float64 for float64). The other arguments are those of
    ``attention_backward``.

    Returns a Prepared. ``prepared(dout, q, k, v, out, lse, grads=None)`` takes a few microseconds
    for CuPy arrays. It refuses arrays of other shapes, strides, dtypes or devices. Raises what
    ``attention_backward`` raises.
    """
    chosen = _options("compile_backward", options, keywords)
    engine, arrays = _arrays(backend, dtype, dout=dout, q=q, k=k, v=v, out=out, lse=lse)
    return _backward(engine, arrays, kernel, chosen, layout, deterministic, tiles, keep=True)


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
    grads: Any = None,
    check: bool = False,
    **keywords: Unpack[OptionKeywords],
) -> tuple[Any, Any, Any]:
    """The gradients of q, k and v, for the gradient ``dout`` of the output of ``attention``.

    q, k, v and the options (causal, window, …) are those of the call of ``attention``; ``out``
    [..., heads, M, dv] and ``lse`` [..., heads, M] are its results with ``return_lse``. dout has
    the shape of out. With ``deterministic`` every run gives the same bits. ``grads`` are three
    arrays for the results, each None for a new one.

    Returns dq, dk and dv with the shapes of q, k and v; dk and dv are sums over the query heads
    that share a key head. The gradient of a row that sees no key is 0.

    Raises what ``attention`` raises, and Unsupported if the named kernel is not deterministic but
    has to be.

    FlashAttention: Dao et al., 2022, arXiv:2205.14135, appendix B; Dao, 2023, arXiv:2307.08691.
    """
    given: Sequence[Any] = (dout, q, k, v, out, lse)
    how = (options, kernel, backend, layout, deterministic, tiles, *keywords, *keywords.values())
    if not check and (repeated := _repeated("backward", given, grads, how)) is not None:
        return repeated
    names = ("dout", "q", "k", "v", "out", "lse")
    engine, arrays, forms = _adopted(backend, names, given)
    asked = repr(keywords), bool(deterministic)
    key = "backward", forms, _which(kernel), asked, options, layout, repr(tiles)
    prepared = _known(engine, key)
    if prepared is None:
        chosen = _options("attention_backward", options, keywords)
        prepared = _backward(
            engine, arrays, kernel, chosen, layout, deterministic, tiles, keep=False
        )
        _keep(engine, key, prepared)
    else:
        _remember("backward", prepared, engine, how)
    targets = None if grads is None else prepared.targets(None, grads)
    return prepared.run(arrays, targets, check=check)


def attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    *,
    deterministic: bool = False,
    kernel: str | Kernel = "auto",
    backward_kernel: str | Kernel = "auto",
    **options: Unpack[_Common],
) -> tuple[Any, Callable[[Any], tuple[Any, Any, Any]]]:
    """The attention of q, k and v, and the function that computes its gradients.

    Returns out and ``pullback``; ``pullback(dout)`` gives dq, dk and dv. ``kernel`` is the argument
    of ``attention``, ``backward_kernel`` and ``deterministic`` are those of ``attention_backward``;
    the other arguments go to both. The pullback keeps references to q, k, v, out and lse, and may
    be called several times; it uses their contents at that time.
    """
    if given := options.keys() & {"return_lse", "out", "grads"}:
        raise ValueError(
            f"attention_vjp has no option {', '.join(sorted(given))}: its pullback keeps out and "
            "lse; call attention and attention_backward to have them"
        )
    out, lse = attention(q, k, v, kernel=kernel, return_lse=True, **options)

    def pullback(dout: Any) -> tuple[Any, Any, Any]:
        return attention_backward(
            dout,
            *(q, k, v, out, lse),
            deterministic=deterministic,
            kernel=backward_kernel,
            **options,
        )

    return out, pullback


def softmax(
    x: Any,
    *,
    kernel: str | Kernel = "auto",
    backend: BackendName | Backend = "auto",
    tiles: Tiles | None = None,
    return_lse: bool = False,
    out: Any = None,
    check: bool = False,
    **unknown: Any,
) -> Any:
    """exp(x) over its sum along the last axis, computed without overflow.

    x [..., N] of float16, bfloat16, float32 or float64; other arguments as for ``attention``.
    Returns an array like x; with ``return_lse`` also the natural logarithm of each row's sum of
    exp(x), [...] in float32 (float64 for float64).

    Online softmax: Milakov and Gimelshein, 2018, arXiv:1805.02867.
    """
    if unknown:
        raise _unknown("softmax", unknown)
    engine, arrays, forms = _adopted(backend, ("x",), (x,))
    key = "softmax", forms, _which(kernel), return_lse, repr(tiles)
    prepared = _known(engine, key)
    if prepared is None:
        (x,) = arrays
        results = [Result("P", tuple(x.shape), "out")]
        if return_lse:
            results.append(Result("lse", tuple(x.shape[:-1]), None))
        problem = Problem.of_rows(x)
        with engine.working_on(x):
            plan = _plan(engine, "softmax", kernel, problem, tiles)
            prepared = Prepared(engine, plan, {"x": x}, results, layout=None, keep=False)
        _keep(engine, key, prepared)
    return prepared.run(arrays, None if out is None else (out,), check=check)


def plan(
    *,
    kernel: str | Kernel = "auto",
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
    dtype: str = "float32",
    options: AttentionOptions | None = None,
    **keywords: Unpack[OptionKeywords],
) -> Plan:
    """The plan of an attention call of these sizes, without arrays and without a launch.

    N defaults to M, dv to d, kv_heads to heads. ``limits`` are those of the device to plan for,
    by default the backend's. Raises what ``attention`` raises.
    """
    problem = Problem.of_sizes(
        M=M,
        N=N,
        d=d,
        dv=dv,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        dtype=dtype,
        options=_options("plan", options, keywords),
    )
    limits = limits or backend_named(backend).limits
    record = planning.select(kernel, "forward", problem, limits)
    return planning.plan(record, problem, limits, **_given(tiles))


def empty_pinned(
    shape: int | Sequence[int], dtype: Any = "float32", *, backend: BackendName | Backend = "auto"
) -> np.ndarray:
    """A NumPy array with unspecified elements in page-locked host memory.

    Copies to and from the GPU need no buffer for such arrays, but they take longer to allocate. In
    the simulator it is an ordinary array.
    """
    sizes = _shape("shape", (shape,) if isinstance(shape, int | np.integer) else shape)
    of = dtype_named(dtype).numpy if dtype == "bfloat16" else np.dtype(dtype)
    engine = backend_named(backend)
    with engine.working_on(None):
        memory = engine.pinned(max(prod(sizes) * of.itemsize, 1))
        return memory[: prod(sizes) * of.itemsize].view(of).reshape(sizes)


def _shape(what: str, shape: Sequence[Any]) -> tuple[int, ...]:
    sizes = tuple(shape)
    if not all(isinstance(size, int | np.integer) and size >= 0 for size in sizes):
        raise ValueError(f"{what} is {shape}; give whole numbers from 0")
    return sizes


def configure_transfer(**changes: Any) -> Transfer:
    """Sets how NumPy arrays are copied to and from the GPU, from the next call on.

    The names are the fields of ``Transfer``: threads, chunk_bytes, buffers, piece_bytes, pieces,
    device_bytes, pinned_results. Returns all settings. Raises TypeError for other names and
    ValueError for wrong values.
    """
    return transfer.configure(**changes)


def held_buffers() -> int:
    """Bytes of page-locked memory in use for NumPy arrays: buffers, and results not yet freed.

    Buffers take up to ``configure_transfer().most_held``. Buffers that calls of other threads still
    use after ``free_buffers`` are not counted.
    """
    return transfer.held()


def free_buffers() -> None:
    """Frees the page-locked memory of buffers and of results that no longer exist.

    Calls of other threads go on; the next call allocates buffers again.
    """
    transfer.release()


def _adopted(
    backend: BackendName | Backend, names: Sequence[str], arrays: Sequence[Any]
) -> tuple[Backend, Sequence[Any], tuple[Form, ...]]:
    """The backend for arrays, the arrays as its own or NumPy's, and their forms."""
    engine = owner(backend, arrays)
    if engine is not None:
        return engine, arrays, tuple(map(engine.form, arrays))
    engine, arrays = adopt(backend, **dict(zip(names, arrays)))
    return engine, arrays, tuple([form(engine, x) for x in arrays])


def _arrays(
    backend: BackendName | Backend, dtype: str | None, **given: Any
) -> tuple[Backend, Sequence[Any]]:
    """The arrays to compile for, made from their shapes if there is a dtype."""
    if {isinstance(x, tuple | list) for x in given.values()} != {dtype is not None}:
        *names, last = given
        raise TypeError(
            f"give {', '.join(names)} and {last} as arrays, or all as shapes and with them a dtype"
        )
    if dtype is None:
        return adopt(backend, **given)
    engine, of = backend_named(backend), dtype_named(dtype)
    sizes = {name: _shape(f"the shape of {name}", x) for name, x in given.items()}
    with engine.working_on(None):
        return engine, [
            engine.empty(x, np.dtype(of.sums) if name == "lse" else of.numpy)
            for name, x in sizes.items()
        ]


def _forward(
    engine: Backend,
    arrays: Sequence[Any],
    kernel: str | Kernel,
    options: AttentionOptions,
    layout: str,
    return_lse: bool,
    tiles: Tiles | None,
    *,
    keep: bool,
) -> Prepared:
    """``attention`` for arrays like these."""
    q, k, v = arrays
    problem = Problem.of(q, k, v, options=options, layout=layout)
    inputs = {"q": q, "k": k, "v": v}
    require_one_device(engine, inputs)
    results = [Result("O", (*q.shape[:-1], v.shape[-1]), "out")]
    if return_lse:
        results.append(Result("lse", _rows_of(q, layout), None))
    with engine.working_on(q):
        plan = _plan(engine, "forward", kernel, problem, tiles)
        return Prepared(engine, plan, inputs, results, layout=layout, keep=keep)


def _backward(
    engine: Backend,
    arrays: Sequence[Any],
    kernel: str | Kernel,
    options: AttentionOptions,
    layout: str,
    deterministic: bool,
    tiles: Tiles | None,
    *,
    keep: bool,
) -> Prepared:
    """``attention_backward`` for arrays like these."""
    dout, q, k, v, out, lse = arrays
    problem = Problem.of(q, k, v, options=options, layout=layout)
    shape = (*q.shape[:-1], problem.dv)
    _check_like("dout", dout, shape, problem.dtype.numpy)
    _check_like("out", out, shape, problem.dtype.numpy)
    _check_like("lse", lse, _rows_of(q, layout), problem.dtype.sums)
    inputs = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse}
    require_one_device(engine, inputs)
    inputs = {"dout": dout, **{name: x for name, x in inputs.items() if name != "dout"}}
    results = [
        Result(f"d{name}", tuple(x.shape), f"d{name.lower()} of grads")
        for name, x in zip("QKV", (q, k, v))
    ]
    with engine.working_on(q):
        plan = _plan(engine, "backward", kernel, problem, tiles, deterministic=deterministic)
        return Prepared(engine, plan, inputs, results, layout=layout, keep=keep)


def _rows_of(q: Any, layout: str) -> tuple[int, ...]:
    """The shape of lse, [..., heads, M]: that of q without columns, heads before rows."""
    if layout == "bshd" and q.ndim > 2:
        return (*q.shape[:-3], q.shape[-2], q.shape[-3])
    return tuple(q.shape[:-1])


def _plan(
    engine: Backend,
    operation: str,
    kernel: str | Kernel,
    problem: Problem,
    tiles: Tiles | None,
    *,
    deterministic: bool = False,
) -> Plan:
    record = planning.select(kernel, operation, problem, engine.limits, deterministic=deterministic)
    return planning.plan(record, problem, engine.limits, **_given(tiles))


def _given(tiles: Tiles | None) -> Tiles:
    """The tile sizes that a caller fixes."""
    if tiles is None:
        return {}
    if not isinstance(tiles, Mapping) or not all(isinstance(name, str) for name in tiles):
        raise TypeError(f'tiles is {described(tiles)}; give tile sizes by name, as {{"Br": 64}}')
    return tiles


def _options(
    function: str, options: AttentionOptions | None, keywords: Mapping[str, Any]
) -> AttentionOptions:
    """The options that a call of a function asks for."""
    if keywords.keys() - OPTIONS.keys():
        raise _unknown(function, keywords)
    return AttentionOptions.of(options, keywords)


# Names in other libraries, and what to write here.
_ELSEWHERE = {
    "is_causal": "write causal=True",
    **dict.fromkeys(
        ("attn_mask", "attention_mask", "mask", "key_padding_mask"),
        "there are no mask arrays: use causal= or window=",
    ),
    **dict.fromkeys(("attn_bias", "bias"), "scores have no bias: leave it out"),
    **dict.fromkeys(("dropout_p", "dropout"), "there is no dropout: leave it out"),
    **dict.fromkeys(("softmax_scale", "sm_scale", "attn_scale"), "write scale="),
    "enable_gqa": "leave it out: k and v may have fewer heads than q",
    "window_size": "write window=(left, right)",
    **dict.fromkeys(("return_softmax_lse", "return_attn_probs"), "write return_lse=True"),
    **dict.fromkeys(("axis", "dim"), "the softmax is over the last axis: move yours there"),
}


def _unknown(function: str, given: Mapping[str, Any]) -> TypeError:
    """The error for a keyword argument that a function does not have, with what to write."""
    parameters = signature(globals()[function]).parameters
    names = [name for name in parameters if name not in ("keywords", "unknown")]
    names += OPTIONS if "options" in names else []
    name = next(name for name in given if name not in names)
    tiles = {tile for record in lookup.kernels() for tile in record.choice.names}
    close = get_close_matches(name, names, 1)
    if name in tiles:
        remedy = f'give tile sizes as tiles={{"{name}": {described(given[name])}}}'
    elif name in _ELSEWHERE:
        remedy = _ELSEWHERE[name]
    elif close:
        remedy = f"did you mean {close[0]}?"
    else:
        remedy = f'it has {", ".join(dict.fromkeys(names))}; tile sizes go into tiles={{"Br": 64}}'
    return TypeError(f"{function}() has no argument {name!r}; {remedy}")


def _which(kernel: str | Kernel) -> str | int:
    """A kernel in the key of what is kept, with which a record is kept, too."""
    return str(kernel) if isinstance(kernel, str) else id(kernel)


def _known(engine: Backend, key: Any) -> Prepared | None:
    """The call for arrays and arguments like these, if there was one."""
    try:
        return engine.known.get(key)
    except TypeError:  # an argument that cannot be hashed, and will be refused
        return None


def _keep(engine: Backend, key: Any, prepared: Prepared) -> None:
    """Remembers a call; not of a kernel from outside, whose source may have changed by the next."""
    if prepared.plan.is_from_outside:
        return
    if len(engine.known) >= _MOST_KNOWN:
        engine.known.clear()
    engine.known[key] = prepared


def _remember(function: str, prepared: Prepared, engine: Backend, how: tuple[Any, ...]) -> None:
    """Remembers a function's call, if its arguments cannot change before the next."""
    if engine.stream is not None and all(map(_FIXED.__contains__, map(type, how))):
        recent[function] = how, prepared


def _repeated(function: str, arrays: Any, targets: Any, how: tuple[Any, ...]) -> Any:
    """A call's results if it repeats an earlier one, with the same options as the last; else None.

    Arguments are compared by identity: True equals 1, which is refused.
    """
    last = recent.get(function)
    if last is None or not (targets is None or isinstance(targets, tuple | list)):
        return None
    before, prepared = last
    same = len(before) == len(how) and all(map(is_, before, how))
    return prepared.again(arrays, targets) if same else None


def _check_like(name: str, array: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Raises if an array is not what the forward pass of the same q, k and v returns."""
    if tuple(array.shape) != tuple(shape):
        raise ValueError(
            f"{name} has shape {tuple(array.shape)}, and q, k and v make it {tuple(shape)}; "
            "give what attention makes of them"
        )
    if str(array.dtype) != str(dtype):
        raise TypeError(f"{name} is {array.dtype}, and q, k and v make it {dtype}; convert it")
