"""Attention of other libraries, for comparison of times and results.

All libraries are optional; if a library cannot be used, Unsupported states the reason. Arrays are
shared through DLPack without copies. Masks have the same meaning as in cupyfa.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from cupyfa.errors import Unsupported, nearest
from cupyfa.lab.bench import torch_masks
from cupyfa.ladder.operations import without_pages
from cupyfa.problem.lengths import DENSE
from cupyfa.problem.optional_inputs import DLSE, MASK, PADDED, PAGE_TABLE, SINK, STARTS, Operand
from cupyfa.problem.options import DROPOUT, OPTIONS
from cupyfa.problem.problem import Problem
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.environment import version_of

# torch's names for the kernels of scaled_dot_product_attention.
_TORCH = {"fa2": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
_TORCH |= {"efficient": "EFFICIENT_ATTENTION", "math": "MATH"}
FLEX = "flex"  # torch's flex_attention
_RAGGED = ("fa2", "efficient")  # peers that support packed sequences
_OF_TORCH = (*_TORCH, FLEX)
PACKAGES = {**dict.fromkeys(_OF_TORCH, "torch"), "cudnn-frontend": "nvidia-cudnn-frontend"}
NAMES = tuple(PACKAGES)
OPTIONS_OF_PEERS = ("causal", "scale")


@dataclass(frozen=True)
class Peer:
    """Another library's attention or gradients on fixed arrays, with the first call's ``outputs``.

    ``call`` recomputes the outputs on the backend's stream; gradients exclude the forward pass.
    ``capture`` captures a CUDA graph and returns a function that replays it.
    """

    label: str
    call: Callable[[], Any]
    outputs: Mapping[str, np.ndarray]
    capture: Callable[[], Callable[[], Any]] | None = None


def peer(
    name: str, backend: Backend, p: Problem, arrays: Mapping[str, Any], operation: str = "forward"
) -> Peer:
    """Creates a peer for arrays of the backend.

    ``arrays`` contains Q, K and V, dO if the operation is "backward", their tangents if it is
    "tangent", and score-modifying arrays under names such as "mods.bias".

    Raises Unsupported if the library is not installed or does not support the problem.
    """
    check_names([name])
    row = p.options.row()
    asked = [x for x in p.options.changed if (x, row[x]) != ("precision", "float32")]
    able = OPTIONS if name == FLEX else (*OPTIONS_OF_PEERS, *["window"] * (name in _TORCH))
    never = ("precision", "out_dtype", *DROPOUT)
    others = [f"{x}={row[x]}" for x in asked if x not in able or x in never]
    others += _foreign(name, p)
    inputs = [arrays[x] for x in "QKV"]
    with _reasons(label(name), p):
        if others:
            raise Unsupported(f"this implementation does not support {', '.join(others)} in bench")
        if p.wrt:
            raise Unsupported(
                "bench does not time this implementation's gradients with respect to "
                f"{', '.join(p.wrt)}"
            )
        if operation == "tangent" and name != "math":
            raise Unsupported("this implementation has no directional derivatives")
        if name in _OF_TORCH:
            more = {x: y for x, y in arrays.items() if x.startswith("mods.")}
            gradient = arrays["dO"] if operation == "backward" else None
            tangents = [y for x, y in arrays.items() if x.endswith("_dot")]
            return _torch(name, backend, p, inputs, more, gradient, tangents)
        if operation != "forward":
            raise Unsupported("bench does not time the gradients of this implementation")
        return _cudnn_frontend(name, backend, p, inputs)


def _foreign(name: str, p: Problem) -> list[str]:
    """Lists the inputs and features of a problem that a peer does not support."""
    if p.lengths is None:
        return [x.name for x in p.operands if name not in _OF_TORCH or x.name == DLSE]
    others = [x.name for x in p.operands if x.name not in STARTS]
    if name not in _RAGGED:
        return ["ragged batches", *others]
    if name == "efficient" and p.window != (None, None):
        others.append("window")
    if any(x.before or x.after for x in p.lengths):
        others.append("rows outside sequences")
    return others


def without_cache(
    p: Problem, inputs: Mapping[str, np.ndarray]
) -> tuple[Problem, dict[str, np.ndarray]]:
    """Converts a decoding problem and its inputs to contiguous keys without lengths.

    All sequences are extended to the longest one. If lengths differ, a mask hides unused keys.
    """
    assert p.cached is not None
    lengths, most = np.array(p.cached.rows), max(p.cached.rows)
    dense, p = without_pages(inputs, p) if p.pages else (inputs, p)
    ours = [f"mods.{x}" for x in (PADDED[1], PAGE_TABLE)]
    arrays = {name: x for name, x in dense.items() if name not in ours}
    arrays |= {name: arrays[name][:, :, :most] for name in "KV"}
    kept = tuple(x for x in p.operands if x.input not in ours)
    p = replace(p, N=most, rows=DENSE, operands=kept)
    whole = (lengths == most).all()
    if whole and p.M > 1:
        return p, arrays
    p = p.with_options(causal=None)  # one query needs no causal mask
    if whole:
        return p, arrays
    ends = lengths[:, None] - p.M + 1 + np.arange(p.M)
    mask = np.arange(p.N) < ends[:, None, :, None]
    operand = Operand(MASK, "bool", mask.shape)
    return replace(p, operands=(*p.operands, operand)), {**arrays, operand.input: mask}


def check_names(names: Sequence[str]) -> None:
    """Raises ValueError for a name that is not in NAMES."""
    for name in names:
        if name not in NAMES:
            raise ValueError(
                f"peer {name!r} is unknown{nearest(name, NAMES)}; use one of {', '.join(NAMES)}"
            )


def label(name: str) -> str:
    """Returns the name that tables print for a peer; it differs from all kernel names."""
    return f"torch {name}" if name in _OF_TORCH else name


def versions(names: Sequence[str]) -> dict[str, str]:
    """Returns the installed versions of peers' packages. Raises ValueError for unknown peers."""
    check_names(names)
    found = {PACKAGES[name]: version_of(PACKAGES[name]) for name in names}
    return {package: version for package, version in found.items() if version}


def trim() -> None:
    """Frees the device memory that torch caches."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextmanager
def _reasons(label: str, p: Problem) -> Iterator[None]:
    """Converts a library's errors to Unsupported, with reasons taken from its warnings."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            yield
        except ImportError as error:
            raise Unsupported(f"{label} is not installed ({error})") from None
        except Exception as error:
            reason = f"{error}".partition("\n")[0]
            if reason.startswith("No available kernel"):  # torch's warnings contain the reasons
                reasons = [str(warning.message).partition(" (Triggered")[0] for warning in warned]
                telling = [x for x in reasons if not x.endswith(("because:", "runtime disabled."))]
                reason = "; ".join(dict.fromkeys(telling)) or reason
            raise Unsupported(f"{label} cannot compute {p}: {reason}") from None


def _torch(
    name: str,
    backend: Backend,
    p: Problem,
    arrays: Sequence[Any],
    more: Mapping[str, Any],
    gradient: Any,
    tangents: Sequence[Any],
) -> Peer:
    """Creates a peer of torch's attention, its gradients after a forward pass, or its tangents.

    Autograd runs each backward step on the stream of its forward step. To capture gradients in a
    graph, the forward pass is therefore run again on the capturing stream, with new tensors.
    """
    torch = import_module("torch")
    q, k, v = (_tensor(torch, array) for array in arrays)
    modified = {x: _tensor(torch, array) for x, array in more.items()}
    make = _scaled_dot_product
    if p.lengths:
        make = _packed
    elif name == FLEX:
        make = _flex
    attend = make(torch, name, p, modified, q.device)

    def on_stream(function: Callable[[], Any]) -> Any:
        with _torch_stream(torch, backend):
            return function()

    def differentiable() -> Callable[[], Any]:
        """Runs the forward pass and returns the function that computes its gradients."""
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend(*inputs)
        return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)

    names: tuple[str, ...] = ("O",)
    compute: Callable[[], Any] = partial(attend, q, k, v)
    if gradient is not None:
        dout = _tensor(torch, gradient)
        names, compute = ("dQ", "dK", "dV"), on_stream(differentiable)
    elif tangents:
        moved = tuple(_tensor(torch, array) for array in tangents)
        names, compute = ("O", "O_dot"), partial(torch.func.jvp, attend, (q, k, v), moved)

    def capture() -> Callable[[], Any]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with _reasons(label(name), p):
            call = compute
            if gradient is not None:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    call = differentiable()
                    call()
                stream.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                call()
        return partial(on_stream, graph.replay)

    results = on_stream(compute)
    results = results if isinstance(results, tuple) else (results,)
    outputs = {x: _numpy(torch, result, p) for x, result in zip(names, results)}
    # torch 2.11 fails to capture these gradients, and the device is lost.
    has_graphs = not (name == "efficient" and p.lengths and gradient is not None)
    call = partial(on_stream, compute)
    return Peer(label(name), call, outputs, capture if has_graphs else None)


def _scaled_dot_product(
    torch: Any, name: str, p: Problem, arrays: Mapping[str, Any], device: Any
) -> Callable[..., Any]:
    """Returns scaled_dot_product_attention, restricted to one of its kernels."""
    attention = import_module("torch.nn.attention")
    kernel = getattr(attention.SDPBackend, _TORCH[name])
    mask = torch_masks.one_array(torch, p, arrays, device)
    options = _usual(p)
    options |= _causal(name, p) if mask is None else {"attn_mask": mask}

    def attend(*inputs: Any) -> Any:
        with attention.sdpa_kernel(kernel):
            return torch.nn.functional.scaled_dot_product_attention(*inputs, **options)

    return attend


def _packed(
    torch: Any, name: str, p: Problem, arrays: Mapping[str, Any], device: Any
) -> Callable[..., Any]:
    """Returns one of torch's kernels for packed sequences, called through its operator.

    FA2 aligns causal masks to the bottom right; `efficient` also supports the top left.
    """
    assert p.lengths is not None
    starts = [arrays[f"mods.{x}"] for x in STARTS]
    longest = [max(x.rows) for x in p.lengths]
    is_top_left = p.causal == "top-left" and p.lengths[0] != p.lengths[1]
    if name == "fa2" and is_top_left:
        raise Unsupported(
            "this implementation supports only causal masks aligned to the bottom right"
        )
    if name == "efficient" and p.group > 1:
        raise Unsupported("this implementation requires one key head per query head")

    def fa2(q: Any, k: Any, v: Any) -> Any:
        sides = zip(("window_size_left", "window_size_right"), p.window)
        window = {side: keys for side, keys in sides if keys is not None}
        found = torch.ops.aten._flash_attention_forward(
            *(q, k, v, *starts, *longest, 0.0, bool(p.causal), False), scale=p.scale, **window
        )
        return found[0]

    def efficient(q: Any, k: Any, v: Any) -> Any:
        mask = {None: 0, "top-left": 1, "bottom-right": 2}[p.causal]
        found = torch.ops.aten._efficient_attention_forward(
            *(q[None], k[None], v[None], None, *starts, *longest, 0.0, mask, True), scale=p.scale
        )
        return found[0][0]

    def attend(*inputs: Any) -> Any:
        q, k, v = (x[0].swapaxes(0, 1) for x in inputs)  # [rows, heads, columns]
        return (fa2 if name == "fa2" else efficient)(q, k, v).swapaxes(0, 1)[None]

    return attend


def _flex(
    torch: Any, name: str, p: Problem, arrays: Mapping[str, Any], device: Any
) -> Callable[..., Any]:
    """Returns flex_attention, compiled on a GPU, with its block mask already created.

    A sink leaves a row the share exp(lse) / (exp(lse) + exp(sink)) of its output.
    """
    module = import_module("torch.nn.attention.flex_attention")
    options = _usual(p) | torch_masks.flex(torch, module, p, arrays, device)
    sink = arrays.get(f"mods.{SINK}")

    def attend(*inputs: Any) -> Any:
        if sink is None:
            return module.flex_attention(*inputs, **options)
        out, lse = module.flex_attention(*inputs, **options, return_lse=True)
        return (out * (lse - sink[..., None]).sigmoid()[..., None]).to(out.dtype)

    if device.type != "cuda":
        return attend
    torch.compiler.reset()  # after eight compilations torch would run the function uncompiled
    return torch.compile(attend, dynamic=False)


def _usual(p: Problem) -> dict[str, Any]:
    """Returns the arguments that scaled_dot_product_attention and flex_attention have in common.

    ``enable_gqa`` is only passed if needed, since older torch versions lack it.
    """
    return {"scale": p.scale} | ({"enable_gqa": True} if p.heads != p.kv_heads else {})


def _causal(name: str, p: Problem) -> dict[str, Any]:
    """Returns a causal mask as an argument of scaled_dot_product_attention."""
    if not p.causal:
        return {}
    if p.causal_offset == 0:
        return {"is_causal": True}
    if name == "cudnn":
        raise Unsupported("this implementation supports only causal masks aligned to the top left")
    if p.M > p.N:
        raise Unsupported("this implementation returns NaN for rows that see no keys")
    bias = import_module("torch.nn.attention.bias")
    return {"attn_mask": bias.causal_lower_right(p.M, p.N)}


def _tensor(torch: Any, array: Any) -> Any:
    """Shares an array with torch; bfloat16 is shared as bits, since NumPy's DLPack lacks it."""
    if str(array.dtype) == "bfloat16":
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def _numpy(torch: Any, tensor: Any, p: Problem) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return tensor.detach().cpu().numpy().view(p.dtype.numpy)


def _torch_stream(torch: Any, backend: Backend) -> Any:
    if backend.stream is None:
        return nullcontext()
    stream = torch.cuda.ExternalStream(backend.stream) if backend.stream else None
    return torch.cuda.stream(stream or torch.cuda.default_stream())


def _cudnn_frontend(name: str, backend: Backend, p: Problem, arrays: Sequence[Any]) -> Peer:
    """Creates a peer of cuDNN's attention graph, built by cuDNN's Python frontend."""
    cudnn = import_module("cudnn")
    if backend.stream is None:
        raise Unsupported("this implementation requires a GPU")
    kinds = {"float16": cudnn.data_type.HALF, "bfloat16": cudnn.data_type.BFLOAT16}
    if p.dtype.name not in kinds:
        raise Unsupported(f"this implementation supports only {', '.join(kinds)}")
    kind, single = kinds[p.dtype.name], cudnn.data_type.FLOAT
    out = backend.empty((p.batch, p.heads, p.M, p.dv), p.dtype.numpy)

    def layout(array: Any) -> dict[str, list[int]]:
        strides = [stride // p.itemsize for stride in array.strides]
        return {"dim": list(array.shape), "stride": strides}

    mask = {}
    if p.causal:
        corner = "TOP_LEFT" if p.causal_offset == 0 else "BOTTOM_RIGHT"
        mask["diagonal_alignment"] = getattr(cudnn.diagonal_alignment, corner)
        mask["diagonal_band_right_bound"] = 0
    handle = cudnn.create_handle()
    sums = {"intermediate_data_type": single, "compute_data_type": single}
    graph = cudnn.pygraph(io_data_type=kind, handle=handle, **sums)
    q, k, v = (graph.tensor(name=x, data_type=kind, **layout(y)) for x, y in zip("qkv", arrays))
    o, _ = graph.sdpa(q=q, k=k, v=v, generate_stats=False, attn_scale=p.scale, **mask)
    placed = layout(out)
    o.set_output(True).set_dim(placed["dim"]).set_stride(placed["stride"])
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = backend.empty((max(graph.get_workspace_size(), 1),), np.dtype(np.uint8))

    def call() -> None:
        cudnn.set_stream(handle=handle, stream=backend.stream)
        buffers = zip((q, k, v, o), map(backend.address, (*arrays, out)))
        graph.execute(dict(buffers), backend.address(workspace), handle=handle)

    call()
    return Peer(label(name), call, {"O": backend.download(out)}, partial(backend.capture, call))
