"""FlashAttention without torch: CUDA C++ kernels from NumPy, on the GPU or in a simulator."""

from cupyfa.api import attention, kernels, plan, softmax
from cupyfa.backends import DeviceError
from cupyfa.backends.simulator import Simulator
from cupyfa.backends.simulator.machine import CompilerNotFound, SimulatorFault
from cupyfa.kernel import Kernel, Launch, Matmul, cdiv, padded
from cupyfa.planning import Limits, Plan, Unsupported
from cupyfa.problem import Problem
from cupyfa.tolerance import WrongResult

__version__ = "0.1.0"

__all__ = [
    "CompilerNotFound",
    "DeviceError",
    "Kernel",
    "Launch",
    "Limits",
    "Matmul",
    "Plan",
    "Problem",
    "Simulator",
    "SimulatorFault",
    "Unsupported",
    "WrongResult",
    "attention",
    "cdiv",
    "kernels",
    "padded",
    "plan",
    "softmax",
]
