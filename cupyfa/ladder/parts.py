"""The launches around a kernel whose operands are parts in float16: two before it, one after."""

from types import SimpleNamespace

from cupyfa.ladder.common import WARP, tiles_of
from cupyfa.ladder.kernel import Launch
from cupyfa.problem import Problem

OPERANDS = "Q_high Q_low K_high K_low V_high V_low"
PARTS = f"{OPERANDS} V_exponents.data scale2 flags"
_THREADS = 256
_ROWS = 128  # of a block that splits; a table of maxima is read for each
_MENDED = 32  # rows of a block that mends


def _elements(p: Problem) -> int:
    """The batch elements, or sequences, each of which has exponents of its own."""
    return p.batch if p.sequences is None else p.sequences


def _slabs(p: Problem, c: SimpleNamespace) -> int:
    """Into how many slabs the keys of a head are cut. It is compiled in, so it takes few values."""
    return 32 if p.N > 512 else 4


def _query_blocks(p: Problem, c: SimpleNamespace) -> int:
    return tiles_of(p, p.M, _ROWS) * p.heads * p.batch


def _key_blocks(p: Problem, c: SimpleNamespace) -> int:
    return max(tiles_of(p, p.N, _ROWS), 1) * p.kv_heads * p.batch


SPLIT = (
    Launch(
        "part_maxima",
        args="K V maxima.data sizes kv_heads mods",
        grid=lambda p, c: _slabs(p, c) * p.kv_heads * _elements(p),
        threads=lambda p, c: _THREADS,
        shared=lambda p, c: 4 * _THREADS,
        constants={"slabs": _slabs},
    ),
    Launch(
        "split_operands",
        args=f"Q K V maxima.data {PARTS} sizes query_blocks heads kv_heads group scale mods",
        grid=lambda p, c: _query_blocks(p, c) + _key_blocks(p, c),
        threads=lambda p, c: _THREADS,
        shared=lambda p, c: 4 * (p.d + p.dv),
        constants={"slabs": _slabs, "rows_of_block": lambda p, c: _ROWS},
        numbers={"query_blocks": _query_blocks},
    ),
)
MEND = Launch(
    "mend_parts",
    args="Q K V flags O lse sizes heads group scale mods",
    grid=lambda p, c: tiles_of(p, p.M, _MENDED) * p.heads * p.batch,
    threads=lambda p, c: _THREADS,
    shared=lambda p, c: 4 * (_THREADS // WARP) * (2 + p.dv) + _MENDED,
    constants={"rows_of_block": lambda p, c: _MENDED},
)
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
    "flags": ("batch heads M", "byte"),
}
