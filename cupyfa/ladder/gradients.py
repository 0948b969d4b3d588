"""Launches that compute gradients of captured arrays, added to all backward kernels."""

from dataclasses import replace
from math import prod
from types import SimpleNamespace

import numpy as np

from cupyfa.ladder.common import bias_bytes, padded_columns
from cupyfa.ladder.kernel import Formula, Kernel, Launch
from cupyfa.ladder.tiles import cdiv
from cupyfa.problem.optional_inputs import BIAS, OWN_ARRAYS, SINK, Operand
from cupyfa.problem.problem import Problem, round_up

_THREADS = 256
_ROWS = _THREADS // 32  # rows per block, one per warp
_MOST_BLOCKS = 4096  # maximum number of blocks of a launch that loops over all elements
_ROW_SUMS = "row_sums"  # scratch of Hopper kernels: lse and delta of row tiles
_WORD = 61  # bits per word of a fixed-point sum, including carry bits
_SUMS = "expression_exponents.data expression_sums.data expression_flags.data"
_SCRATCH = {
    "expression_exponents": (lambda p, c: 4 * p.modifiers.elements, "byte"),
    "expression_sums": (lambda p, c: 8 * _words(p, c) * p.modifiers.elements, "byte"),
    "expression_flags": (lambda p, c: 4 * p.modifiers.elements, "byte"),
}


def with_gradients(kernel: Kernel) -> Kernel:
    """Adds the launches for gradients of sinks and captured arrays to a kernel."""
    launches, scratch = (*kernel.launches, SINK_GRADIENT), kernel.scratch
    if "places" in kernel.features:
        of_expressions: tuple[Launch, ...] = EXPRESSION_GRADIENTS
        if _ROW_SUMS in scratch:
            of_others = (
                replace(x, when=lambda p: bool(p.modifiers.differentiated) and not _is_a_bias(p))
                for x in EXPRESSION_GRADIENTS
            )
            of_expressions = BIAS_GRADIENT, *of_others
        launches, scratch = (*launches, *of_expressions), {**scratch, **_SCRATCH}
    features = (*kernel.features, "wrt")
    return replace(kernel, launches=launches, scratch=scratch, features=features)


def _threads(p: Problem, c: SimpleNamespace) -> int:
    return _THREADS


def _sinks(p: Problem) -> list[Operand]:
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


def _terms(p: Problem, x: Operand) -> int:
    """Returns the maximum number of terms that are summed in one element of an array's gradient.

    Every pair reads one element of a bias or of ALiBi slopes, and each element is read equally
    often.
    """
    pairs = p.batch * p.heads * p.M * p.N
    if x.name in OWN_ARRAYS:
        return pairs // max(1, prod(x.shape))
    return pairs * sum(expression.count_reads(x.name) for expression in p.modifiers.score)


def _bits(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of bits such that every sum has fewer than 2**bits terms."""
    return max(_terms(p, x) for x in p.modifiers.differentiated).bit_length()


def _words(p: Problem, c: SimpleNamespace) -> int:
    """Returns the words per sum: two if truncation to one word could exceed the rounding error."""
    digits = np.finfo(p.dtype.sums).nmant + 1
    return 1 if 2 * _bits(p, c) <= _WORD - digits else 2


def _launch(entry: str, args: str, grid: Formula, **numbers: Formula) -> Launch:
    return Launch(
        entry,
        args=args,
        grid=grid,
        threads=_threads,
        numbers={**({"bits": _bits} if "bits" in args.split() else {}), **numbers},
        constants={"words": _words},
        when=lambda p: bool(p.modifiers.differentiated),
    )


_ALL = f"Q K V O dO lse {_SUMS} bits finds_largest sizes heads group scale mods gradients"
EXPRESSION_GRADIENTS = (
    _launch("clear_expression_sums", f"{_SUMS} gradients", _of_elements),
    _launch("expression_gradients", _ALL, _of_rows, finds_largest=lambda p, c: 1),
    _launch("expression_gradients", _ALL, _of_rows, finds_largest=lambda p, c: 0),
    _launch("round_expression_sums", f"{_SUMS} bits gradients", _of_elements),
)

# The gradient of a bias on Hopper's tensor cores

_STAGES = "Q_stages", "dO_stages", "KV_stages", "bias_stages"
_BIAS_ROWS, _BIAS_CHUNKS, _CHUNK = 128, 4, 64  # a tile has 128 rows and 4 chunks of 64 keys


def _bias(p: Problem) -> Operand:
    (bias,) = p.modifiers.differentiated
    return bias


def _is_a_bias(p: Problem) -> bool:
    found = p.modifiers.differentiated
    if [x.name for x in found] != [BIAS] or 0 in (p.batch, p.heads, p.M, p.N):
        return False
    return found[0].dtype == p.dtype.name and found[0].shape[2:] == (p.M, p.N)


def _bias_tiles(p: Problem, c: SimpleNamespace) -> int:
    batch, heads, M, N = _bias(p).shape
    tiles = cdiv(M, _BIAS_ROWS) * cdiv(N, _BIAS_CHUNKS * _CHUNK) * heads * batch
    return min(tiles, c.multiprocessors)


def _bias_fits(p: Problem) -> bool:
    return padded_columns(p, 64) <= 256


def _copied_bytes(p: Problem, c: SimpleNamespace) -> int:
    """Returns the element size of the bias if it is copied to shared memory, or 0."""
    return bias_bytes(p) if _bias_fits(p) and p.modifiers.held is _bias(p) else 0


def _bias_stages(p: Problem, c: SimpleNamespace) -> dict[str, int]:
    """Returns the number of stages of Q, dO, K/V, and of bias chunks (0 if not copied)."""
    width = padded_columns(p, 64)
    if width <= 128:
        found = (2, 2, 4, 6)
    elif _bias_fits(p):
        found = (2, 1, 2, 4)
    else:
        found = (1, 1, 2 if width <= 384 else 1, 0)
    copied = found[-1] if _copied_bytes(p, c) else 0
    return dict(zip(_STAGES, (*found[:-1], copied)))


def _stages_of(name: str) -> Formula:
    return lambda p, c: _bias_stages(p, c)[name]


def _bias_shared(p: Problem, c: SimpleNamespace) -> int:
    """Returns the bytes of shared memory for 16-bit tiles of Q, dO, K, V and the bias in whole TMA
    boxes, and for two mbarriers per stage.
    """
    Q, dO, KV, bias = _bias_stages(p, c).values()
    d, dv = round_up(p.d, 64), round_up(p.dv, 64)
    tiles = 2 * (_BIAS_ROWS * (Q * d + dO * dv) + _CHUNK * KV * (d + dv))
    chunks = round_up(bias * (2 * _BIAS_ROWS * _CHUNK + 16), 1024)
    return round_up(tiles + 16 * (Q + dO + 2 * KV), 1024) + chunks


BIAS_GRADIENT = Launch(
    "wgmma_bias_gradient",
    args=f"Q.map K.map V.map dO.map Q K V dO lse {_ROW_SUMS}.data d_{BIAS} sizes "
    "bias_batch bias_heads batch heads group scale mods",
    grid=_bias_tiles,
    threads=lambda p, c: 128 * (_BIAS_ROWS // 64 + 1),
    shared=_bias_shared,
    constants={
        "bias_bytes": _copied_bytes,
        **{x: _stages_of(x) for x in _STAGES},
    },
    when=_is_a_bias,
    boxes={
        **dict.fromkeys(("Q", "dO"), lambda p, c: _BIAS_ROWS),
        **dict.fromkeys(("K", "V"), lambda p, c: _CHUNK),
    },
    numbers={
        "bias_batch": lambda p, c: _bias(p).shape[0],
        "bias_heads": lambda p, c: _bias(p).shape[1],
    },
)
