"""FlashAttention without torch: CUDA C++ kernels from NumPy, on the GPU or in a simulator."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cupyfa.api import (
    attention,
    attention_backward,
    attention_ragged,
    attention_ragged_backward,
    attention_ragged_vjp,
    attention_vjp,
    compile,
    compile_backward,
    decode,
    dropout_mask,
    empty_pinned,
    plan,
    softmax,
)
from cupyfa.arrays.block_mask import BlockMask, block_mask
from cupyfa.errors import (
    CompilerNotFound,
    DeviceError,
    DeviceLost,
    OutOfMemory,
    SimulatorFault,
    Unsupported,
    WrongResult,
)
from cupyfa.ladder.kernel import Kernel, Launch, Matmul, padded
from cupyfa.ladder.lookup import kernel, kernels
from cupyfa.ladder.operations import Input
from cupyfa.ladder.tiles import TileChoice, cdiv
from cupyfa.planner.plan import Limits, Plan
from cupyfa.problem.options import AttentionOptions
from cupyfa.problem.problem import Problem
from cupyfa.runtime.prepared import Prepared
from cupyfa.version import __version__ as __version__

if TYPE_CHECKING:
    from cupyfa.arrays.kv_cache import KVCache
    from cupyfa.lab.analysis.diagnosis import doctor
    from cupyfa.lab.analysis.roofline_model import roofline
    from cupyfa.lab.bench.benchmark import bench
    from cupyfa.lab.bench.comparison import compare
    from cupyfa.lab.bench.results import Measurement
    from cupyfa.lab.bench.trial import accuracy
    from cupyfa.lab.bench.tuning import tune
    from cupyfa.lab.report.plots import draw_blocks
    from cupyfa.lab.verify.case import Case
    from cupyfa.lab.verify.checker import check, replay
    from cupyfa.numerics.tolerance import Expected
    from cupyfa.runtime.merging import merge, merge_vjp
    from cupyfa.runtime.simulator import Simulator
    from cupyfa.runtime.transfer import (
        Transfer,
        configure as configure_transfer,
        held as held_buffers,
        release as free_buffers,
    )

__all__ = [
    "AttentionOptions",
    "BlockMask",
    "Case",
    "CompilerNotFound",
    "DeviceError",
    "DeviceLost",
    "Expected",
    "Input",
    "KVCache",
    "Kernel",
    "Launch",
    "Limits",
    "Matmul",
    "Measurement",
    "OutOfMemory",
    "Plan",
    "Prepared",
    "Problem",
    "Simulator",
    "SimulatorFault",
    "TileChoice",
    "Transfer",
    "Unsupported",
    "WrongResult",
    "accuracy",
    "attention",
    "attention_backward",
    "attention_ragged",
    "attention_ragged_backward",
    "attention_ragged_vjp",
    "attention_vjp",
    "bench",
    "block_mask",
    "cdiv",
    "check",
    "compare",
    "compile",
    "compile_backward",
    "configure_transfer",
    "decode",
    "doctor",
    "draw_blocks",
    "dropout_mask",
    "empty_pinned",
    "free_buffers",
    "held_buffers",
    "kernel",
    "kernels",
    "merge",
    "merge_vjp",
    "padded",
    "plan",
    "replay",
    "roofline",
    "softmax",
    "tune",
]

# The tools around the kernels take as long to import as all the rest, and not every process has
# use of the simulator, of caches, of parts or of transfers: they are imported when used. After a
# colon is the name that they have there.
_LATER = {
    "Case": "lab.verify.case",
    "Expected": "numerics.tolerance",
    "KVCache": "arrays.kv_cache",
    "Measurement": "lab.bench.results",
    "Simulator": "runtime.simulator",
    "Transfer": "runtime.transfer",
    "accuracy": "lab.bench.trial",
    "bench": "lab.bench.benchmark",
    "check": "lab.verify.checker",
    "compare": "lab.bench.comparison",
    "configure_transfer": "runtime.transfer:configure",
    "doctor": "lab.analysis.diagnosis",
    "draw_blocks": "lab.report.plots",
    "free_buffers": "runtime.transfer:release",
    "held_buffers": "runtime.transfer:held",
    "merge": "runtime.merging",
    "merge_vjp": "runtime.merging",
    "replay": "lab.verify.checker",
    "roofline": "lab.analysis.roofline_model",
    "tune": "lab.bench.tuning",
}


_SUBPACKAGES = {"dask", "distributed"}  # which users import by themselves


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__", "__doc__", *(_SUBPACKAGES & {*globals()})})


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, there = _LATER[name].partition(":")
    return getattr(import_module(f"{__name__}.{module}"), there or name)
