"""Launches that split float32 operands into float16 hi and lo, and repair rows afterwards."""

from dataclasses import replace
from types import SimpleNamespace

from cupyfa.ladder.common import WARP, tiles_of
from cupyfa.ladder.kernel import Kernel, Launch
from cupyfa.ladder.tiles import cdiv
from cupyfa.problem.problem import Problem

OPERANDS = "Q_high Q_low K_high K_low V_high V_low"
PARTS = f"{OPERANDS} V_exponents.data scale2 flags"
GRADIENT = "dO_high dO_low"
UNITS = "scale2 dO_units flags"
_THREADS = 256
_ROWS = 128  # rows per block of split_operands
_REPAIRED = 32  # rows per block of repair_split_output
_REPAIRED_GRADIENTS = 256  # rows or keys per block of repair_split_gradients
# Threads per block of repair_split_gradients. They split the keys of a row or the rows of a key.
_REPAIRING = 512


def pays_for_splitting(p: Problem, c: SimpleNamespace) -> bool:
    """Returns whether each key head has enough rows for tensor cores to save more time than
    splitting and repairing cost.
    """
    return p.M * p.group > 256


def pays_for_few_rows(p: Problem, c: SimpleNamespace) -> bool:
    """Returns whether splitting pays off in the forward pass, either per head or for many heads.

    In the time of one tile on tensor cores, even of a partly filled one, a multiprocessor computes
    12 rows without tensor cores. Heads of at most 64 rows, keys and columns cost more to split than
    to compute.
    """
    is_small = max(p.M, p.N, p.d, p.dv) <= 64
    return pays_for_splitting(p, c) or (p.M >= 32 and not is_small and has_rows(p, c, each=12))


def pays_for_gradients(p: Problem, c: SimpleNamespace) -> bool:
    """Returns whether splitting pays off in the backward pass, per head or for many heads."""
    return pays_for_splitting(p, c) or (p.M >= 96 and has_rows(p, c, each=128))


def pays_for_short_gradients(p: Problem, c: SimpleNamespace) -> bool:
    """Returns whether splitting pays off in the backward pass with small tiles for short heads."""
    fits = 32 < max(p.d, p.dv) <= 64 and p.M >= 40 and p.M * p.group <= 64
    return pays_for_gradients(p, c) or (fits and has_rows(p, c, each=128))


def has_rows(p: Problem, c: SimpleNamespace, *, each: int) -> bool:
    """Returns whether all heads have `each` rows per multiprocessor; False for a ragged batch."""
    return p.sequences is None and p.batch * p.heads * p.M >= each * c.multiprocessors


def _elements(p: Problem) -> int:
    """Returns the number of batch elements or sequences, each of which has its own exponents."""
    return p.batch if p.sequences is None else p.sequences


def _slabs(p: Problem, c: SimpleNamespace) -> int:
    """Returns the number of slabs into which a head's keys are divided.

    Only a few different numbers are used, because the kernel is compiled for each of them.
    """
    return 32 if p.N > 512 else 4


def _blocks_of_rows(p: Problem, size: int) -> int:
    return tiles_of(p, p.M, size) * p.heads * p.batch


def _blocks_of_keys(p: Problem, size: int) -> int:
    return max(tiles_of(p, p.N, size), 1) * p.kv_heads * p.batch


_SPLITTING = {"slabs": _slabs, "rows_of_block": lambda p, c: _ROWS}
SPLIT = (
    Launch(
        "split_maxima",
        args="K V maxima.data column_bits.data sizes kv_heads group mods",
        grid=lambda p, c: _slabs(p, c) * p.kv_heads * _elements(p),
        threads=lambda p, c: _THREADS,
        shared=lambda p, c: 4 * _THREADS,
        constants={"slabs": _slabs, "sets_bits": lambda p, c: False},
        file="forward/steps/split_maxima.cu",
    ),
    Launch(
        "split_operands",
        args=f"Q K V maxima.data {PARTS} small_values.data column_bits.data sizes query_blocks "
        "heads kv_heads group scale mods",
        grid=lambda p, c: _blocks_of_rows(p, _ROWS) + _blocks_of_keys(p, _ROWS),
        threads=lambda p, c: _THREADS,
        shared=lambda p, c: 4 * (p.d + p.dv) + 32 * cdiv(p.dv, 16) + 4 * WARP,
        constants={**_SPLITTING, "sets_bits": lambda p, c: False},
        numbers={"query_blocks": lambda p, c: _blocks_of_rows(p, _ROWS)},
        file="forward/steps/split_operands.cu",
    ),
)
SPLIT_FOR_GRADIENTS = (
    *(replace(x, constants={**x.constants, "sets_bits": lambda p, c: True}) for x in SPLIT),
    Launch(
        "split_gradient",
        args=f"Q O dO maxima.data {GRADIENT} column_bits.data K_exponents.data scale2 dO_units "
        "delta flags sizes query_blocks heads kv_heads group scale mods",
        grid=lambda p, c: _blocks_of_rows(p, _ROWS) + p.kv_heads * _elements(p),
        threads=lambda p, c: _THREADS,
        shared=lambda p, c: 4 * (p.d + p.dv),
        constants=_SPLITTING,
        numbers={"query_blocks": lambda p, c: _blocks_of_rows(p, _ROWS)},
    ),
)
REPAIR_SPLIT_OUTPUT = Launch(
    "repair_split_output",
    args="Q K V flags V_exponents.data small_values.data O lse sizes heads group scale mods",
    grid=lambda p, c: _blocks_of_rows(p, _REPAIRED),
    threads=lambda p, c: _THREADS,
    shared=lambda p, c: 4 * (_THREADS // WARP) * (2 + p.dv) + _REPAIRED,
    constants={"rows_of_block": lambda p, c: _REPAIRED, "counted": lambda p, c: _ROWS},
)
REPAIR_SPLIT_GRADIENTS = Launch(
    "repair_split_gradients",
    args="Q K V dO lse delta flags dK_flags dV_flags dQ dK dV sizes query_blocks heads kv_heads "
    "group scale mods",
    grid=lambda p, c: (
        _blocks_of_rows(p, _REPAIRED_GRADIENTS) + _blocks_of_keys(p, _REPAIRED_GRADIENTS)
    ),
    threads=lambda p, c: _REPAIRING,
    shared=lambda p, c: 4 * (_REPAIRING // WARP) * max(p.d, p.dv) + 2 * _REPAIRED_GRADIENTS,
    constants={"rows_of_block": lambda p, c: _REPAIRED_GRADIENTS},
    numbers={"query_blocks": lambda p, c: _blocks_of_rows(p, _REPAIRED_GRADIENTS)},
)
_REPAIRS = {REPAIR_SPLIT_OUTPUT.entry, REPAIR_SPLIT_GRADIENTS.entry}
SCRATCH = {
    "maxima": (lambda p, c: _slabs(p, c) * p.kv_heads * _elements(p) * (p.d + p.dv + 1), "real"),
    "Q_high": ("batch heads M d16", "operand"),
    "Q_low": ("batch heads M d16", "operand"),
    "K_high": ("batch kv_heads N d16", "operand"),
    "K_low": ("batch kv_heads N d16", "operand"),
    "V_high": ("batch kv_heads N dv16", "operand"),
    "V_low": ("batch kv_heads N dv16", "operand"),
    "V_exponents": (lambda p, c: _elements(p) * p.kv_heads * p.dv, "int"),
    "scale2": ("batch heads M", "real"),
    "small_values": (lambda p, c: _blocks_of_keys(p, _ROWS) * p.dv, "byte"),
    "flags": ("batch heads M", "byte"),
    "column_bits": (lambda p, c: _elements(p) * (p.kv_heads + 2 * p.heads) * WARP, "int"),
}
GRADIENT_SCRATCH = {
    **SCRATCH,
    "dO_high": ("batch heads M dv16", "operand"),
    "dO_low": ("batch heads M dv16", "operand"),
    "K_exponents": (lambda p, c: _elements(p) * p.kv_heads * p.d, "int"),
    "dO_units": ("batch heads M", "real"),
    "delta": ("batch heads M", "real"),
    "dK_flags": ("batch kv_heads N", "byte"),
    "dV_flags": ("batch kv_heads N", "byte"),
}


def repairs_rows(kernel: Kernel) -> bool:
    """Returns whether the kernel recomputes rows or keys whose values exceed float16's range."""
    return any(isinstance(x, Launch) and x.entry in _REPAIRS for x in kernel.launches)
