"""A call of a function of the library as a value: everything but its arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from cupyfa.arrays.block_mask import BlockMask
from cupyfa.ladder.kernel import BoundKernel, Kernel
from cupyfa.planner.plan import Limits
from cupyfa.problem.optional_inputs import Operand, name_of
from cupyfa.problem.options import AttentionOptions, OptionKeywords
from cupyfa.problem.wrt import QKV
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.environment import Progress

Operation = Literal["forward", "backward", "softmax"]
Tiles = Mapping[str, int]
Layout = Literal["bhsd", "bshd"]
BackendName = Literal["auto", "cuda", "simulator"]

# The names of the arrays that each operation always takes, in the order of calls.
ARRAYS: Mapping[Operation, tuple[str, ...]] = {
    "forward": ("q", "k", "v"),
    "backward": ("dout", "q", "k", "v", "out", "lse"),
    "softmax": ("x",),
}
_NO_OPTIONS: OptionKeywords = {}


class Devices(NamedTuple):
    """Where and how calls on NumPy arrays run, given as ``backend=Devices("all")``.

    numbers: the GPUs that share the work: "all", or their numbers as [0, 1]; by default the current
        one. The bits are those of one GPU, but for kernels whose sums depend on the number of heads
        or rows.
    progress: ``progress(done, total, what)`` is called as chunks of arrays are done.
    backend: the backend that they belong to.
    limits: those of the workers' devices, for Dask arrays, if the calling process has no such
        device; ``cupyfa.plan`` takes them too.
    """

    numbers: Literal["all"] | Sequence[int] | None = None
    progress: Progress | None = None
    backend: BackendName | Backend = "auto"
    limits: Limits | None = None


ANYWHERE = Devices()


class Call(NamedTuple):
    """All arguments of a call but its arrays.

    ``keywords.read_call`` checks its flags and traces its Python functions. After that the call and
    the forms of its arrays decide which Prepared runs it.
    """

    operation: Operation
    kernel: str | Kernel | BoundKernel
    backend: BackendName | Backend
    options: AttentionOptions | None = None  # all options as one value,
    asked: OptionKeywords = _NO_OPTIONS  # or those that are given by name
    layout: Layout = "bhsd"
    tiles: Tiles | None = None
    return_lse: bool = False
    return_max: bool = False
    deterministic: bool = False
    inputs: tuple[str, ...] = ()  # the names of further arrays, in the order of calls
    outputs: tuple[str, ...] = ()  # the kernel's own results that are returned
    numbers: tuple[Operand, ...] = ()  # captured numbers, which are compiled in
    blocks: BlockMask | None = None
    wrt: tuple[str, ...] = QKV  # whose gradients are returned

    @property
    def array_names(self) -> tuple[str, ...]:
        """The names of all arrays, in the order of calls."""
        return (*ARRAYS[self.operation], *self.inputs)

    @property
    def callers_names(self) -> tuple[str, ...]:
        """The same as callers name them."""
        return (*ARRAYS[self.operation], *map(name_of, self.inputs))
