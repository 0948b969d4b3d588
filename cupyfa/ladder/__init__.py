"""The ladder: all kernel records in teaching order, ``LADDER[operation][name]``."""

from cupyfa.ladder import backward, forward, softmax
from cupyfa.ladder.kernel import Kernel

LADDER: dict[str, dict[str, Kernel]] = {}
for _kernel in softmax.KERNELS + forward.KERNELS + backward.KERNELS:
    LADDER.setdefault(_kernel.operation, {})[_kernel.name] = _kernel
