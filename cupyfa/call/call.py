"""A call of a function of the library as a value: everything but its arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from cupyfa.arrays.block_mask import BlockMask
from cupyfa.ladder.kernel import Kernel
from cupyfa.problem.optional_inputs import Operand
from cupyfa.problem.options import AttentionOptions, OptionKeywords
from cupyfa.problem.wrt import QKV
from cupyfa.runtime.backend import Backend

Operation = Literal["forward", "backward", "softmax"]
Tiles = Mapping[str, int]
Own = Mapping[str, Any]  # arrays and floats of a kernel of the user's
Layout = Literal["bhsd", "bshd"]
BackendName = Literal["auto", "cuda", "simulator"]
Devices = Literal["all"] | Sequence[int]  # numbers of GPUs that share a call

# The names of the arrays that each operation always takes, in the order of calls.
ARRAYS: Mapping[Operation, tuple[str, ...]] = {
    "forward": ("q", "k", "v"),
    "backward": ("dout", "q", "k", "v", "out", "lse"),
    "softmax": ("x",),
}
_NO_OPTIONS: OptionKeywords = {}


class Call(NamedTuple):
    """All arguments of a call but its arrays.

    ``keywords.read_call`` checks its flags and traces its Python functions. After that the call and
    the forms of its arrays decide which Prepared runs it.
    """

    operation: Operation
    kernel: str | Kernel
    backend: BackendName | Backend
    options: AttentionOptions | None = None  # all options as one value,
    asked: OptionKeywords = _NO_OPTIONS  # or those that are given by name
    layout: Layout = "bhsd"
    tiles: Tiles | None = None
    return_lse: bool = False
    deterministic: bool = False
    inputs: tuple[str, ...] = ()  # the names of further arrays, in the order of calls
    outputs: tuple[str, ...] = ()  # the kernel's own results that are returned
    numbers: tuple[Operand, ...] = ()  # captured numbers, which are compiled in
    blocks: BlockMask | None = None
    wrt: tuple[str, ...] = QKV  # whose gradients are returned
    return_max: bool = False

    @property
    def array_names(self) -> tuple[str, ...]:
        """The names of all arrays, in the order of calls."""
        return (*ARRAYS[self.operation], *self.inputs)
