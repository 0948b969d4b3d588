"""FlashAttention without torch: CUDA C++ kernels from NumPy, on the GPU or in a simulator."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cupyfa.api import (
    attention,
    backward,
    compile,
    dropout_mask,
    empty_pinned,
    hvp,
    jvp,
    plan,
    softmax,
    vjp,
)
from cupyfa.arrays.block_mask import BlockMask, block_mask
from cupyfa.call.call import Devices
from cupyfa.errors import DeviceError, OutOfMemory, SimulatorFault, Unsupported, WrongResult
from cupyfa.ladder.kernel import Kernel, Launch
from cupyfa.ladder.lookup import kernel, kernels
from cupyfa.ladder.operations import Input
from cupyfa.ladder.tiles import TileChoice, cdiv
from cupyfa.planner.plan import Limits, Plan
from cupyfa.problem.problem import Problem
from cupyfa.problem.structured_arrays import Packed, Padded, Scaled
from cupyfa.runtime.prepared import Prepared
from cupyfa.score.dropout import Dropout
from cupyfa.version import __version__ as __version__

if TYPE_CHECKING:
    from cupyfa.arrays.kv_cache import KVCache, Rotary
    from cupyfa.lab.bench.benchmark import bench
    from cupyfa.lab.verify.checker import check
    from cupyfa.runtime.merging import merge, merge_vjp
    from cupyfa.runtime.simulator import Simulator

__all__ = [
    "BlockMask",
    "DeviceError",
    "Devices",
    "Dropout",
    "Input",
    "KVCache",
    "Kernel",
    "Launch",
    "Limits",
    "OutOfMemory",
    "Packed",
    "Padded",
    "Plan",
    "Prepared",
    "Problem",
    "Rotary",
    "Scaled",
    "Simulator",
    "SimulatorFault",
    "TileChoice",
    "Unsupported",
    "WrongResult",
    "attention",
    "backward",
    "bench",
    "block_mask",
    "cdiv",
    "check",
    "compile",
    "dropout_mask",
    "empty_pinned",
    "hvp",
    "jvp",
    "kernel",
    "kernels",
    "merge",
    "merge_vjp",
    "plan",
    "softmax",
    "vjp",
]

# Imported on first use, because few processes need checks, the simulator, caches and merging.
_LATER = {
    "KVCache": "arrays.kv_cache",
    "Rotary": "arrays.kv_cache",
    "Simulator": "runtime.simulator",
    "bench": "lab.bench.benchmark",
    "check": "lab.verify.checker",
    "merge": "runtime.merging",
    "merge_vjp": "runtime.merging",
}
_MODULES = {"lab": "cupyfa.lab", "transfer": "cupyfa.runtime.transfer"}
_SUBPACKAGES = {"dask", "distributed", "jax"}  # imported explicitly by users
_RAGGED = "Packed(q, cu_seqlens_q), Packed(k, cu_seqlens_k), Packed(v, cu_seqlens_k)"
# Replacements for removed names, for error messages.
_FORMER = {
    "AttentionOptions": "the options as keyword arguments, or a dict of options as **options",
    "attention_backward": "cupyfa.backward(dout, q, k, v, out, lse, …)",
    "attention_ragged": f"cupyfa.attention({_RAGGED}, …)",
    "attention_ragged_backward": f"cupyfa.backward(dout, {_RAGGED}, out, lse, …)",
    "attention_ragged_vjp": f"cupyfa.vjp({_RAGGED}, …)",
    "attention_vjp": "cupyfa.vjp(q, k, v, …)",
    "compile_backward": "cupyfa.compile(dout, q, k, v, out, lse, …)",
    "configure_transfer": "cupyfa.transfer.configure(…)",
    **{name: f"cupyfa.errors.{name}" for name in ("CompilerNotFound", "DeviceLost")},
    "decode": "cupyfa.attention(q, cache, append=(k, v), …)",
    "free_buffers": "cupyfa.transfer.release()",
    "held_buffers": "cupyfa.transfer.held()",
    "Transfer": "cupyfa.transfer.Transfer",
    "memory": "cupyfa.plan(…), whose shared memory and scratch it shows",
    "profile": "ncu and nsys, as docs/howto/profile.md shows",
    **{name: f"cupyfa.ladder.kernel.{name}" for name in ("Matmul", "padded")},
    **{
        name: f"cupyfa.lab.{name}"
        for name in (
            *("Case", "Expected", "Measurement", "accuracy", "compare", "doctor"),
            *("draw_blocks", "replay", "roofline", "tune"),
        )
    },
}


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__version__", "__doc__", *(_SUBPACKAGES & {*globals()})})


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _FORMER:  # a TypeError, as `from cupyfa import name` hides an AttributeError
        raise TypeError(f"cupyfa.{name} was removed; use {_FORMER[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
