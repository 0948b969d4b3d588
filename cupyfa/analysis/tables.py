"""Tables of compiled kernels and of rooflines."""

from __future__ import annotations

from collections.abc import Sequence

from cupyfa.analysis.resources import Compiled
from cupyfa.analysis.roofline import Roof
from cupyfa.options import OPTIONS
from cupyfa.planner.plan import Plan
from cupyfa.report.tables import Row, drop, drop_followers, render, table_or_fields

_DETAILS = ("compute_ms", "memory_ms", "exponentials_ms")
_SPARE_OF_ROOFS = ("GFLOP", "measured_TFLOP/s", "ms", "balance", "MB")  # in narrow terminals


def compiled_row(plan: Plan, compiled: Compiled) -> Row:
    """One row of data for a compiled launch."""
    compiled_in = ("dtype", "d", *(name for name in OPTIONS if name != "scale"))
    row = plan.problem.row()
    return {
        "kernel": plan.kernel.name,
        "entry": compiled.launch.entry,
        **{name: row[name] for name in compiled_in},
        "arch": compiled.arch,
        "registers": compiled.registers,
        "spilled_bytes": compiled.spilled_bytes,
        "shared_bytes": compiled.launch.shared_bytes,
        "blocks_per_sm": compiled.occupancy[0],
        "limited_by": compiled.occupancy[1],
        "warnings": "; ".join(compiled.warnings) or None,
    }


def compilations(rows: Sequence[Row], form: str) -> str:
    """Rows of compiled launches in a format; a table has the compiler's warnings below it."""
    if form != "table":
        return render(rows, form)
    table = [dict(row) for row in rows]
    warnings = [row.pop("warnings") for row in table]
    below = [
        f"{row['entry']}, {row['dtype']}, sm_{row['arch']}: {words}"
        for row, words in zip(table, warnings)
        if words
    ]
    return "\n".join([table_or_fields(table), *below])


def roofs(rows: Sequence[Roof]) -> str:
    """Rooflines for people: the columns that differ between rows, and notes below.

    Numbers have three digits, since they are estimates.
    """
    table = [
        {c: _three_digits(x) if isinstance(x, float) else x for c, x in row.row().items()}
        for row in rows
    ]
    drop_followers(table)
    notes = [f"note: {x['note']}" for x in table if x["note"]]
    drop(table, "note", *_DETAILS)
    shown = table_or_fields(table, spare=_SPARE_OF_ROOFS)
    return "\n".join([shown, f"rates: {rows[0].device.source}", *notes])


def _three_digits(value: float) -> float | int:
    rounded = float(f"{value:.3g}")
    return int(rounded) if rounded >= 1000 else rounded
