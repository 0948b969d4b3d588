"""A call of a public function as a value: all of its arguments but the arrays."""

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

# The names of the arrays that each operation always takes, in the order of arguments.
ARRAYS: Mapping[Operation, tuple[str, ...]] = {
    "forward": ("q", "k", "v"),
    "backward": ("dout", "q", "k", "v", "out", "lse"),
    "softmax": ("x",),
}
_NO_OPTIONS: OptionKeywords = {}


class Devices(NamedTuple):
    """The GPUs that calls on NumPy arrays run on, as in ``backend=Devices("all")``.

    numbers: the GPUs that share the work: "all", or their numbers as [0, 1]; by default the current
        one. The bits equal those of one GPU, except for kernels whose sums depend on the number of
        heads or rows.
    progress: ``progress(done, total, what)`` is called as chunks of arrays are done.
    backend: the backend of the devices.
    limits: for Dask arrays, the limits of the workers' devices if the calling process has no such
        device; ``cupyfa.plan`` takes them too.
    """

    numbers: Literal["all"] | Sequence[int] | None = None
    progress: Progress | None = None
    backend: BackendName | Backend = "auto"
    limits: Limits | None = None


ANYWHERE = Devices()


class Call(NamedTuple):
    """All arguments of a call but its arrays.

    ``keywords.read_call`` checks its flags and traces its Python functions. The call and the forms
    of its arrays are then the key of the Prepared that runs it.
    """

    operation: Operation
    kernel: str | Kernel | BoundKernel
    backend: BackendName | Backend
    options: AttentionOptions | None = None  # all options as one value, or None
    asked: OptionKeywords = _NO_OPTIONS  # without ``options``: those that the caller passed by name
    layout: Layout = "bhsd"
    tiles: Tiles | None = None
    return_lse: bool = False
    return_max: bool = False
    deterministic: bool = False
    inputs: tuple[str, ...] = ()  # the names of optional arrays, in the order of arguments
    outputs: tuple[str, ...] = ()  # the extra outputs of a custom kernel that are returned
    numbers: tuple[Operand, ...] = ()  # captured numbers, which are compiled into the kernel
    blocks: BlockMask | None = None
    wrt: tuple[str, ...] = QKV  # the names of the arrays whose gradients are returned

    @property
    def array_names(self) -> tuple[str, ...]:
        """The names of all arrays, in the order of arguments."""
        return (*ARRAYS[self.operation], *self.inputs)

    @property
    def callers_names(self) -> tuple[str, ...]:
        """The names of all arrays as callers write them, in the same order."""
        return (*ARRAYS[self.operation], *map(name_of, self.inputs))
