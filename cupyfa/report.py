"""Rows of data as a table for people, or as JSON, CSV or Markdown for programs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from cupyfa.kernel import Kernel
from cupyfa.planning import PlannedLaunch
from cupyfa.trial import Trial

FORMATS = ("table", "json", "csv", "md")
Row = Mapping[str, Any]


def render(rows: Sequence[Row], form: str, *, width: int | None = None) -> str:
    """The rows in one of FORMATS; their keys are the columns."""
    if form == "json":
        return json.dumps(list(rows), indent=2)
    if form == "csv":
        return _csv(rows)
    if form == "md":
        return markdown(rows)
    return _table(rows, width)


def markdown(rows: Sequence[Row]) -> str:
    """A Markdown table, as it stands in the README."""
    columns = list(rows[0]) if rows else []
    lines = [columns, ["---"] * len(columns)] + [[text(row[c]) for c in columns] for row in rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in x) + " |" for x in lines
    )


def kernel_row(kernel: Kernel, largest_d: int | None, dtype: str) -> Row:
    """What ``list`` says of a kernel."""
    return {
        "kernel": kernel.name,
        "adds": kernel.adds,
        "dtypes": [name.replace("float", "f") for name in kernel.dtypes],
        "tile": [f"{name}={value}" for name, value in kernel.tiles[0].items()],
        "rounds to": kernel.rounding or "",
        f"largest d ({dtype})": "any" if largest_d is None else largest_d,
    }


def trial_row(result: Trial, device: str, seed: int) -> Row:
    """A trial as one row of data."""
    p = result.plan.problem
    return {
        "kernel": result.plan.kernel.name,
        "device": device,
        **{name: getattr(p, name) for name in ("batch", "heads", "kv_heads", "M", "N", "d", "dv")},
        "dtype": p.dtype.name,
        "causal": p.causal,
        "scale": p.scale,
        "seed": seed,
        "constants": dict(result.plan.constants),
        "launches": [
            {
                "entry": launch.entry,
                "grid": launch.grid,
                "threads": launch.threads,
                "shared_bytes": launch.shared_bytes,
                **result.resources[launch.entry],
            }
            for launch in result.plan.launches
        ],
        "scratch_bytes": result.plan.scratch_bytes,
        "milliseconds": result.time,
        "tflops": result.tflops,
        "passed": result.passed,
        **{
            f"{verdict.name} {what}": getattr(verdict, what)
            for verdict in result.verdicts
            for what in ("error", "bound", "ratio")
        },
    }


def launch_line(launch: PlannedLaunch, resources: Mapping[str, int]) -> str:
    """A launch's geometry and resources in one line."""
    grid = " x ".join(f"{size:,}" for size in launch.grid if size != 1) or "1"
    known = "".join(f", {value:,} {name}" for name, value in resources.items())
    return (
        f"{grid} blocks of {launch.threads} threads, {launch.shared_bytes:,} bytes of shared "
        f"memory each{known}"
    )


def between_markers(document: str, name: str, content: str) -> str:
    """The document with what stands between its markers ``<!-- name -->`` replaced."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, _, rest = document.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the document has no markers {begin} … {end}")
    return f"{before}{begin}\n{content}\n{end}{after}"


def text(value: Any) -> str:
    """A value as a person reads it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return str(value)


def _csv(rows: Sequence[Row]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: text(value) for key, value in row.items()} for row in rows)
    return out.getvalue().rstrip("\n")


def _table(rows: Sequence[Row], width: int | None) -> str:
    """The first column stays whole; the others wrap to the terminal's width."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(rows[0] if rows else ()):
        table.add_column(column, no_wrap=i == 0, ratio=1 if column == "adds" else None)
    for row in rows:
        table.add_row(*(text(value) for value in row.values()))
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
