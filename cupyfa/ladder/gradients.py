"""The gradients of arrays that change scores, which backward kernels give by more launches."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

from cupyfa.ladder.kernel import Formula, Kernel, Launch
from cupyfa.ladder.tiles import cdiv
from cupyfa.modifiers import SINK, Operand
from cupyfa.problem import Problem

_THREADS = 256
_ROWS = _THREADS // 32  # of a block, a warp for each
_MOST_BLOCKS = 4096  # of a launch that goes through all elements
_SUMS = "text_largest.data text_sums.data text_flags.data"
_SCRATCH = {
    "text_largest": (lambda p, c: 8 * len(p.modifiers.differentiated), "byte"),
    "text_sums": (lambda p, c: 8 * p.modifiers.elements, "byte"),
    "text_flags": (lambda p, c: 4 * p.modifiers.elements, "byte"),
}


def with_gradients(kernel: Kernel) -> Kernel:
    """The record with the launches for gradients of sinks, and of what its texts may read."""
    launches, scratch = (*kernel.launches, SINK_GRADIENT), kernel.scratch
    if "places" in kernel.features:
        launches, scratch = (*launches, *TEXT_GRADIENTS), {**scratch, **_SCRATCH}
    features = (*kernel.features, "wrt")
    return replace(kernel, launches=launches, scratch=scratch, features=features)


def _threads(p: Problem, c: SimpleNamespace) -> int:
    return _THREADS


def _sinks(p: Problem) -> list[Operand]:
    """The sinks, if their gradient is asked for."""
    return [x for x in p.modifiers.arrays if x.name == SINK and x.gradient]


SINK_GRADIENT = Launch(
    "sink_gradient",
    args="O dO lse d_sink.data M batch mods",
    grid=lambda p, c: (p.heads, p.batch if any(len(x.shape) > 1 for x in _sinks(p)) else 1),
    threads=_threads,
    when=lambda p: bool(_sinks(p)),
)


def _of_elements(p: Problem, c: SimpleNamespace) -> int:
    return max(1, min(cdiv(p.modifiers.elements, _THREADS), _MOST_BLOCKS))


def _of_rows(p: Problem, c: SimpleNamespace) -> int:
    return cdiv(p.M, _ROWS) * p.heads * p.batch


def _bits(p: Problem, c: SimpleNamespace) -> int:
    """An element of an array gets fewer than 2**bits terms: of all pairs, in 64 accesses."""
    return (64 * p.batch * p.heads * p.M * p.N).bit_length()


def _constant(value: bool, p: Problem, c: SimpleNamespace) -> bool:
    return value


def _launch(entry: str, args: str, grid: Formula, **constants: bool) -> Launch:
    return Launch(
        entry,
        args=args,
        grid=grid,
        threads=_threads,
        numbers={"bits": _bits} if "bits" in args.split() else {},
        constants={name: partial(_constant, x) for name, x in constants.items()},
        when=lambda p: bool(p.modifiers.differentiated),
    )


_ALL = f"Q K V O dO lse {_SUMS} bits sizes heads group scale mods gradients"
TEXT_GRADIENTS = (
    _launch("clear_text_sums", f"{_SUMS} gradients", _of_elements),
    _launch("text_gradients", _ALL, _of_rows, finds_largest=True),
    _launch("text_gradients", _ALL, _of_rows, finds_largest=False),
    _launch("round_text_sums", f"{_SUMS} bits gradients", _of_elements),
)
