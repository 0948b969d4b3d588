"""FlashAttention without torch: CUDA C++ kernels from NumPy, on the GPU or in a simulator."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cupyfa.api import (
    attention,
    attention_backward,
    attention_vjp,
    compile,
    configure_transfer,
    empty_pinned,
    free_buffers,
    held_buffers,
    kernels,
    plan,
    softmax,
)
from cupyfa.backends import DeviceError
from cupyfa.backends.transfer import Transfer
from cupyfa.binding import Bound
from cupyfa.kernel import Kernel, Launch, Matmul, cdiv, padded
from cupyfa.plans import Limits, Plan, Unsupported
from cupyfa.problem import Problem
from cupyfa.tolerance import WrongResult

if TYPE_CHECKING:
    from cupyfa.accuracies import accuracy
    from cupyfa.backends.simulator import Simulator
    from cupyfa.backends.simulator.machine import CompilerNotFound, SimulatorFault
    from cupyfa.benchmark import bench
    from cupyfa.cases import Case
    from cupyfa.checking import check, replay
    from cupyfa.comparing import compare
    from cupyfa.diagnosis import doctor
    from cupyfa.footprint import memory
    from cupyfa.measurement import Measurement
    from cupyfa.profiling import profile
    from cupyfa.roofs import roofline
    from cupyfa.tuning import tune

__version__ = "0.1.0"

__all__ = [
    "Bound",
    "Case",
    "CompilerNotFound",
    "DeviceError",
    "Kernel",
    "Launch",
    "Limits",
    "Matmul",
    "Measurement",
    "Plan",
    "Problem",
    "Simulator",
    "SimulatorFault",
    "Transfer",
    "Unsupported",
    "WrongResult",
    "accuracy",
    "attention",
    "attention_backward",
    "attention_vjp",
    "bench",
    "cdiv",
    "check",
    "compare",
    "compile",
    "configure_transfer",
    "doctor",
    "empty_pinned",
    "free_buffers",
    "held_buffers",
    "kernels",
    "memory",
    "padded",
    "plan",
    "profile",
    "replay",
    "roofline",
    "softmax",
    "tune",
]

# The tools around the kernels take as long to import as all the rest, and not every process has
# use of the simulator: they are imported when used.
_LATER = {
    "Case": "cases",
    "CompilerNotFound": "backends.simulator.machine",
    "Measurement": "measurement",
    "Simulator": "backends.simulator",
    "SimulatorFault": "backends.simulator.machine",
    "accuracy": "accuracies",
    "bench": "benchmark",
    "check": "checking",
    "compare": "comparing",
    "doctor": "diagnosis",
    "memory": "footprint",
    "profile": "profiling",
    "replay": "checking",
    "roofline": "roofs",
    "tune": "tuning",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
