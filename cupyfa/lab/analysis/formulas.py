"""The bytes of attention by formula: what naive and tiled attention hold and move.

Naive attention keeps the scores S and the probabilities P in memory, for gradients also dP and dS.
Tiled attention (FlashAttention; Dao et al., 2022, arXiv:2205.14135) keeps them on the chip: at best
every input is read once and every output is written once. Scale and mask are applied where scores
are computed and move nothing. The log-sum-exp that a forward kernel returns is not counted.
"""

from collections.abc import Iterable

from cupyfa.ladder.kernel import Kernel
from cupyfa.ladder.operations import OPERATIONS
from cupyfa.problem.problem import Problem

NAIVE, TILED = "naive", "tiled"
# Arrays of M x N numbers for each query head: how many are held, and how often any is read or
# written. Forward: S and P, each written and read. Backward: also dP and dS; P and dS are read
# twice.
_HELD = {"forward": 2, "backward": 4}
_PASSES = {"forward": 4, "backward": 10}


def common_operation(kernels: Iterable[Kernel], backward: bool) -> str:
    """The operation of all kernels; forward is the default. Raises ValueError if they differ."""
    found = {kernel.operation for kernel in kernels} | ({"backward"} if backward else set())
    if len(found) > 1:
        names = ", ".join(f"{kernel.name} computes {kernel.operation}" for kernel in kernels)
        wanted = "gradients" if backward else "one operation"
        raise ValueError(f"only kernels of {wanted} can be counted together, but {names}")
    return found.pop() if found else "forward"


def refuse_gradients(operation: str, problems: Iterable[Problem]) -> None:
    """Raises ValueError if a forward pass is asked for the gradients of arrays."""
    for p in problems:
        if operation != "backward" and p.wrt:
            names = ",".join(p.wrt)
            raise ValueError(
                f"wrt is {names}, and the forward pass gives no gradients; give backward=True, or "
                "leave wrt out"
            )


def input_sizes(operation: str, p: Problem) -> dict[str, int]:
    return {name: x.bytes(p) for name, x in OPERATIONS[operation].inputs_of(p).items()}


def output_bytes(operation: str, p: Problem) -> int:
    """Bytes of all outputs except lse."""
    outputs = OPERATIONS[operation].outputs_of(p)
    return sum(x.bytes(p) for name, x in outputs.items() if name != "lse")


def tiled_bytes(operation: str, p: Problem) -> int:
    """Bytes moved if every input is read once and every output is written once."""
    return sum(input_sizes(operation, p).values()) + output_bytes(operation, p)


def naive_bytes(operation: str, p: Problem) -> int:
    """Bytes moved if the arrays of scores go through memory."""
    return tiled_bytes(operation, p) + _PASSES.get(operation, 0) * _scores(p)


def naive_scratch(operation: str, p: Problem) -> int:
    """Bytes of the arrays of scores that naive attention holds."""
    return _HELD.get(operation, 0) * _scores(p)


def _scores(p: Problem) -> int:
    return p.heads * p.pairs * p.itemsize
