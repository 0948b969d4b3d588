"""The ``Call`` tuple: all non-array arguments of a call of a public function."""

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

Operation = Literal["forward", "backward", "softmax", "tangent"]
Tiles = Mapping[str, int]
Layout = Literal["bhsd", "bshd"]
BackendName = Literal["auto", "cuda", "simulator"]

# Names of each operation's required arrays, in argument order.
ARRAYS: Mapping[Operation, tuple[str, ...]] = {
    "forward": ("q", "k", "v"),
    "backward": ("dout", "q", "k", "v", "out", "lse"),
    "softmax": ("x",),
    "tangent": ("q", "k", "v", "dq", "dk", "dv"),
}
_NO_OPTIONS: OptionKeywords = {}


class Devices(NamedTuple):
    """The GPUs that compute calls on NumPy arrays, as in ``backend=Devices("all")``.

    numbers: the GPUs that share the work: "all", or device indices such as [0, 1]; by default the
        current GPU. Results have the same bits as on one GPU, except for kernels whose order of
        summation depends on the number of heads or rows.
    progress: a function that is called as ``progress(done, total, what)`` after each chunk.
    backend: "cuda", "simulator", "auto" or a configured Simulator, as for ``attention``.
    limits: for Dask arrays, the limits of the workers' devices, if the calling process has no such
        device; ``cupyfa.plan`` also accepts such limits.
    """

    numbers: Literal["all"] | Sequence[int] | None = None
    progress: Progress | None = None
    backend: BackendName | Backend = "auto"
    limits: Limits | None = None


ANYWHERE = Devices()


class Call(NamedTuple):
    """All non-array arguments of a call.

    ``keywords.read_call`` checks the flags and traces Python functions. After that, a call together
    with the shapes, strides and dtypes of its arrays serves as the cache key for its Prepared.
    """

    operation: Operation
    kernel: str | Kernel | BoundKernel
    backend: BackendName | Backend
    options: AttentionOptions | None = None  # the options as one object, in place of ``asked``
    asked: OptionKeywords = _NO_OPTIONS  # the options that the caller passed, by name
    layout: Layout = "bhsd"
    tiles: Tiles | None = None
    return_lse: bool = False
    return_max: bool = False
    deterministic: bool = False
    inputs: tuple[str, ...] = ()  # names of the optional arrays, in argument order
    outputs: tuple[str, ...] = ()  # names of a custom kernel's extra outputs to return
    numbers: tuple[Operand, ...] = ()  # captured numbers, which are compiled into the kernel
    blocks: BlockMask | None = None
    wrt: tuple[str, ...] = QKV  # names of the arrays to differentiate

    @property
    def array_names(self) -> tuple[str, ...]:
        """The internal names of all arrays, in argument order."""
        return (*self.required_names, *self.inputs)

    @property
    def required_names(self) -> tuple[str, ...]:
        """The names of the arrays besides optional ones, without tangents that are None."""
        names = ARRAYS[self.operation]
        if self.operation != "tangent":
            return names
        given = self.asked.get("tangents", "qkv")
        return (*names[:3], *(x for x in names[3:] if x[1] in given))

    @property
    def callers_names(self) -> tuple[str, ...]:
        """The public names of all arrays, in argument order, for error messages."""
        return (*self.required_names, *map(name_of, self.inputs))
