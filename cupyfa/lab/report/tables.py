"""Renders rows of data as tables, JSON, CSV or Markdown."""

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.measure import Measurement as Widths
from rich.table import Table
from rich.text import Text

from cupyfa.errors import printable
from cupyfa.lab.bench.comparison import Comparison
from cupyfa.lab.bench.results import Measurement
from cupyfa.lab.bench.trial import Trial
from cupyfa.lab.verify.case import Case
from cupyfa.lab.verify.checker import Replayed
from cupyfa.lab.verify.failures import RIGHT, Outcome
from cupyfa.ladder.kernel import Kernel, Matmul
from cupyfa.numerics.tolerance import Verdict
from cupyfa.planner.plan import Plan, PlannedLaunch
from cupyfa.problem.lengths import lengths_of, shown_lengths
from cupyfa.runtime.backend import Backend

_LONG = 20  # columns are wrapped only if a value has at least this many characters
FORMATS = ("table", "json", "csv", "md")
Row = Mapping[str, Any]


def render(rows: Sequence[Row], form: str) -> str:
    """Renders rows, whose keys are the columns, in one of FORMATS."""
    if form == "json":
        return json.dumps(_plain(rows), indent=2, allow_nan=False)
    return {"table": table_of, "csv": _csv, "md": markdown}[form](rows)


def markdown(rows: Sequence[Row]) -> str:
    """Renders a Markdown table; omits columns that are empty in all rows."""
    columns = [x for x in (rows[0] if rows else ()) if any(text(row[x]) for row in rows)]
    head = [printable(column.replace("_", " ")) for column in columns]
    lines = [head, ["---"] * len(columns)] + [[text(row[c]) for c in columns] for row in rows]
    cells = [["<br>".join(x.replace("|", "\\|").splitlines()) for x in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def kernel_row(kernel: Kernel, largest_d: int | str | None) -> Row:
    """Returns a kernel's row for ``list``. ``largest_d`` is None if the dtype is not supported."""
    rounded = kernel.float32_as if kernel.float32_as != ("float32",) else ()
    has_d = kernel.operation != "softmax"
    return {
        "operation": kernel.operation,
        "kernel": kernel.name,
        "adds": kernel.adds,
        "dtypes": list(kernel.dtypes),
        "tile": dict(kernel.choice.first),
        "float32_as": list(rounded) if rounded else None,
        "largest_d": largest_d if has_d else None,
    }


def listing(rows: Sequence[Row]) -> str:
    """Renders kernels by operation, two lines each: what the kernel adds, and its limits."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for i, row in enumerate(rows):
        if i == 0 or row["operation"] != rows[i - 1]["operation"]:
            table.add_row(Text(f"\n{row['operation']}" if i else row["operation"], "bold"))
        table.add_row(f"  {row['kernel']}", Text(row["adds"]))
        table.add_row("", Text(_abilities(row), "dim"))
    return _drawn(table)


def mutant_list(rows: Sequence[Row]) -> str:
    """Renders mutants: number, place and kind; the code before and after; the verdict, if any."""
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    for row in rows:
        table.add_row(str(row["number"]), Text(f"{row['place']}  {row['kind']}", "bold"))
        table.add_row("", Text(f"- {row['before']}", "red"))
        table.add_row("", Text(f"+ {row['after']}", "green"))
        if verdict := row.get("verdict"):
            case = f" by case {row['case']}" if row["case"] else ""
            table.add_row("", Text(f"{verdict}{case}: {row['why']}".removesuffix(": ")))
    return _drawn(table)


def trial_row(result: Trial, case: Case, backend: Backend) -> Row:
    plan = result.plan
    launches = [
        {
            **{name: getattr(x, name) for name in ("entry", "grid", "threads", "shared_bytes")},
            **result.resources[x.entry],
        }
        for x in plan.launches
    ]
    return {
        "kernel": plan.kernel.name,
        **case.problem.row(),
        "backend": backend.name,
        "device": backend.limits.device,
        **{name: getattr(case, name) for name in ("values", "layout", "seed")},
        "constants": dict(plan.constants),
        "launches": launches,
        "scratch_bytes": plan.scratch_bytes,
        "milliseconds": result.measurement.time,
        "tflops": result.measurement.tflops,
        "passed": result.passed,
        "checked_%": 100 * result.checked,
        **{
            f"{verdict.name}_{what}": getattr(verdict, what)
            for verdict in result.verdicts
            for what in ("error", "bound", "ratio")
        },
    }


def trial_lines(
    result: Trial, case: Case, backend: Backend, passed_over: Mapping[str, str] | None = None
) -> str:
    """Renders a trial. ``passed_over`` maps faster kernels to the reasons for their rejection."""
    plan, row = result.plan, result.measurement
    lines = {
        "kernel": f"{plan.kernel.name}: {plan.kernel.adds}",
        "not taken": _reasons(passed_over),
        "problem": str(case),
        "device": backend.limits.device,
        "constants": plan.constants,
        **{x.entry: launch_line(plan, x, result.resources[x.entry]) for x in plan.programs},
        "scratch": f"{plan.scratch_bytes:,} bytes" if plan.scratch_bytes else "",
        "time": f"{text(row.time)} ms, the median of {len(row.milliseconds)}; "
        f"{row.tflops or 0.0:.3g} TFLOP/s",
        **{verdict.name: verdict_line(verdict) for verdict in result.verdicts},
        "checked": f"{result.checked:.2%} of the rows" if result.checked < 1 else "",
    }
    return fields(lines) + _judgement(result.passed)


def replayed_lines(done: Replayed) -> str:
    """Renders the stored and the new results of a failure."""
    lines = {
        "problem": str(done.stored.case),
        **_outcome_lines("then", done.stored.outcome, done.stored.environment),
        **_outcome_lines("now", done.now, done.device),
    }
    return fields(lines) + _judgement(done.now.kind == RIGHT)


def _outcome_lines(when: str, outcome: Outcome, where: str) -> Row:
    """Returns a line for the outcome, and a line per verdict, or the reason if there are none."""
    told = {when: f"{outcome.kernel}: {outcome.kind}, on {where}"}
    if not outcome.verdicts:
        return {**told, f"{when} why": outcome.message}
    return {**told, **{f"{when} {x.name}": verdict_line(x) for x in outcome.verdicts}}


def _judgement(passed: bool) -> str:
    return _drawn(Text("PASS", "bold green") if passed else Text("FAIL", "bold red"))


def measurements(rows: Sequence[Measurement], about: Row) -> str:
    """Renders a benchmark: the heading ``about``, values shared by all rows, a table, and notes."""
    table = [short_row(row.row()) for row in rows]
    for row in table:
        rates = {column: three_digits(x) for column, x in row.items() if column != "ms"}
        failed = [word for word in ("WRONG", "timed out") if row["note"].startswith(word)]
        row.update(rates, ms=failed[0] if failed else row["ms"])
    _drop_sizes(table, rows)
    if all(row["checked_%"] in (None, 100.0) for row in table):
        drop(table, "checked_%")
    notes = [row.pop("note") for row in table]
    shown = table_or_fields(table, spare=_SPARE)
    below = [f"{x.kernel} on {x.problem}: {note}" for x, note in zip(rows, notes) if note]
    below = list(map(printable, below))
    return "\n".join([text(about), shown, *below])


def three_digits(value: Any) -> Any:
    """Rounds a float to three digits; returns any other value unchanged."""
    return float(f"{value:.3g}") if isinstance(value, float) else value


def short_row(row: Row) -> dict[str, Any]:
    """Replaces a long list of lengths in a row with their number, minimum and maximum."""
    given = row["lengths"]
    return {**row, "lengths": given and shown_lengths(lengths_of(given), short=True)}


def comparisons(rows: Sequence[Comparison]) -> str:
    table = [short_row(row.row()) for row in rows]
    _drop_sizes(table, [row.measurement for row in rows])
    drop(table, "factor", "uncertainty")
    return table_or_fields(table)


# Columns that are dropped, in this order, from a table that is too wide.
_SPARE = ("registers", "GB/s", "spread_%", "launches", "spilled_bytes", "checked_%")


def _drop_sizes(table: Sequence[dict[str, Any]], rows: Sequence[Measurement]) -> None:
    """Removes redundant sizes, a default scale, and tiles if each kernel has only one choice."""
    drop_followers(table)
    if all(x.problem.options.scale is None for x in rows):
        drop(table, "scale")
    tried = [x for x in rows if x.milliseconds or x.passed is False]
    tiles = {(x.kernel, text(x.constants)) for x in tried}
    if len(tiles) == len({kernel for kernel, _ in tiles}):
        drop(table, "constants")


def drop_followers(table: Sequence[dict[str, Any]], *kept: str) -> None:
    """Removes the columns N, kv_heads and dv that equal M, heads and d, unless in ``kept``."""
    follows = {"N": "M", "kv_heads": "heads", "dv": "d"}
    alike = [x for x in follows if all(row[x] in (None, row[follows[x]]) for row in table)]
    drop(table, *(x for x in alike if x not in kept))


def drop(table: Sequence[dict[str, Any]], *columns: str) -> None:
    for row in table:
        for column in columns:
            del row[column]


def plan_row(plan: Plan, launch: PlannedLaunch) -> Row:
    """Returns a launch as a table row, with its grid, threads, memory and arguments."""
    return {
        "kernel": plan.kernel.name,
        "launch": launch.entry,
        **plan.problem.row(),
        "constants": dict(plan.constants),
        "grid": list(launch.grid),
        "threads": launch.threads,
        "shared_bytes": launch.shared_bytes,
        **{name: getattr(plan, name) for name in ("input_bytes", "output_bytes", "scratch_bytes")},
        "arguments": launch.launch.args.split(),
        "rows_of_boxes": dict(launch.boxes),
        "numbers": dict(launch.numbers),
        "rounds": plan.rounds_of(launch),
        "speed": plan.speed,
    }


def plan_lines(plan: Plan, passed_over: Mapping[str, str] | None = None) -> str:
    """Renders the facts of a plan and then of each launch, one fact per line.

    ``passed_over`` maps faster kernels to the reasons why "auto" rejected them.
    """
    products = sum(isinstance(x, Matmul) for x in plan.steps)
    whole = {
        "kernel": f"{plan.kernel.name}: {plan.kernel.adds}",
        "not taken": _reasons(passed_over),
        "problem": str(plan.problem),
        "speed": plan.speed,
        "constants": plan.constants,
        "inputs": f"{plan.input_bytes:,} bytes",
        "outputs": f"{plan.output_bytes:,} bytes",
        "scratch": f"{plan.scratch_bytes:,} bytes",
        "products": f"{products} by cuBLAS" if products else "",
    }
    return "\n".join(fields(x) for x in (whole, *(_launch(plan, x) for x in plan.programs)))


def _reasons(passed_over: Mapping[str, str] | None) -> str:
    """Lists the kernels that "auto" rejected, grouped by reason."""
    found: dict[str, list[str]] = {}
    for name, why in (passed_over or {}).items():
        found.setdefault(why, []).append(name)
    return "; ".join(f"{', '.join(names)}: {why}" for why, names in found.items())


def _launch(plan: Plan, launch: PlannedLaunch) -> Row:
    rounds = plan.rounds_of(launch)
    return {
        "launch": launch.entry,
        "grid": " x ".join(f"{size:,}" for size in launch.grid),
        "threads": launch.threads,
        "shared memory": f"{launch.shared_bytes:,} bytes",
        "arguments": launch.launch.args,
        "rows of boxes": launch.boxes,
        "numbers": launch.numbers,
        "rounds": f"the first of {rounds:,}" if rounds > 1 else "",
        "begins": "while the launch before it ends" if launch.begins_early else "",
    }


def fields(row: Row) -> str:
    """Renders each name and value on a line; omits names with empty values."""
    shown = {printable(name): text(value) for name, value in row.items() if text(value)}
    table = Table.grid(padding=(0, 2))
    widest = max(map(len, shown), default=0)  # do not wrap names of several words
    table.add_column(no_wrap=True, min_width=widest)
    for name, value in shown.items():
        table.add_row(name, Text(value))
    return _drawn(table) + "\n"


def table_or_fields(rows: Sequence[Row], *, spare: Sequence[str] = (), rule: int = 0) -> str:
    """Renders a table with a line below the first ``rule`` rows, or the fields of a single row."""
    if len(rows) == 1:
        return fields({name.replace("_", " "): x for name, x in rows[0].items()})
    return table_of(rows, spare=spare, rule=rule)


def launch_line(plan: Plan, launch: PlannedLaunch, resources: Mapping[str, int]) -> str:
    """Describes the geometry and resources of a launch in one line."""
    rounds = plan.rounds_of(launch)
    grid = " x ".join(f"{size:,}" for size in launch.grid if size != 1)
    known = "".join(f", {value:,} {name}" for name, value in resources.items())
    return (
        f"{f'{grid} blocks' if grid else '1 block'} of {launch.threads} threads, "
        f"{launch.shared_bytes:,} bytes of shared memory each{known}"
        f"{f', the first of {rounds:,} rounds' if rounds > 1 else ''}"
    )


def verdict_line(verdict: Verdict) -> str:
    """Describes a verdict without its name: briefly if it passed, else in full."""
    if verdict.passed:
        return f"error {verdict.error:.3g}, at worst {verdict.ratio:.3g} x its bound"
    return str(verdict).removeprefix(f"{verdict.name}: ")


def text(value: Any) -> str:
    """Formats a value for a table cell."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return " ".join(f"{printable(str(key))}={text(x)}" for key, x in value.items())
    if isinstance(value, (list, tuple)):
        return ("; " if any(isinstance(x, Mapping) for x in value) else " ").join(map(text, value))
    return printable(str(value))


def _abilities(row: Row) -> str:
    """Describes a kernel's dtypes, largest d, precisions and default tile."""
    d, float32_as = row["largest_d"], text(row["float32_as"]).replace("float", "f")
    abilities = [
        text(row["dtypes"]).replace("float", "f"),
        {None: "", "any": "any d", 0: "no d fits"}.get(d, f"d up to {d}"),
        f"f32 as {float32_as}" if float32_as else "",
        text(row["tile"]),
    ]
    return ", ".join(filter(None, abilities))


def _plain(value: Any) -> Any:
    """Converts a value for JSON; NaN and infinity become None."""
    if isinstance(value, Mapping):
        return {key: _plain(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _csv(rows: Sequence[Row]) -> str:
    """Renders CSV with numbers at full precision and nested values as JSON."""
    out = io.StringIO()
    names = list(rows[0]) if rows else []
    writer = csv.DictWriter(out, fieldnames=names, lineterminator="\n")
    writer.writerow({name: printable(name) for name in names})
    for row in rows:
        nested = {k: x for k, x in row.items() if isinstance(x, (list, tuple, Mapping))}
        dumped = {k: json.dumps(_plain(x), allow_nan=False) for k, x in nested.items()}
        plain = {k: printable(x) for k, x in row.items() if isinstance(x, str)}
        writer.writerow({**row, **dumped, **plain})
    return out.getvalue().rstrip("\n")


def table_of(
    rows: Sequence[Row],
    *,
    spare: Sequence[str] = (),
    share: bool = True,
    rule: int = 0,
    shown: Callable[[Any], str] | None = None,
) -> str:
    """Renders a table; with ``share``, values that are equal in all rows are printed above it.

    Columns of ``spare`` are dropped in order until the table fits. A line is drawn below the first
    ``rule`` rows if more rows follow. ``shown`` formats a value; the default is ``text``.
    """
    if not rows:
        return ""
    share = share and len(rows) > 1
    shared = {c: x for c, x in rows[0].items() if share and all(r[c] == x for r in rows)}
    columns = [c for c in rows[0] if c not in shared]
    for column in spare:
        if column in columns and _widths(_table(rows, columns)).maximum > Console().width:
            columns.remove(column)
    caption = text({c: x for c, x in shared.items() if text(x)})
    above = f"{_drawn(Text(caption))}\n" if caption else ""
    return above + _drawn(_table(rows, columns, rule, shown or text))


def _table(
    rows: Sequence[Row],
    columns: Sequence[str],
    rule: int = 0,
    shown: Callable[[Any], str] = text,
) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    cells = {column: [printable(shown(row[column])) for row in rows] for column in columns}
    lines = []
    for column in columns:
        widest, values = max(map(len, cells[column])), [row[column] for row in rows]
        number = any(isinstance(x, int | float) and not isinstance(x, bool) for x in values)
        heading = printable(column.replace("_", " " if len(column) <= widest else "\n"))
        how: Any = {"justify": "right" if number else "left", "no_wrap": widest < _LONG}
        table.add_column(heading, overflow="fold", **how)
        lines.append("─" * max(widest, *map(len, heading.split("\n"))))
    for i, texts in enumerate(zip(*cells.values())):
        if i == rule and i:
            table.add_row(*lines)
        table.add_row(*map(Text, texts))
    return table


def _widths(content: RenderableType) -> Widths:
    """Measures the minimum and maximum width of the content in characters."""
    console = Console()
    return console.measure(content, options=console.options.update(width=10_000))


def _drawn(content: RenderableType) -> str:
    """Renders content at the terminal's width, or wider if the longest words need more."""
    console = Console(highlight=False)
    if isinstance(content, Table) and _widths(content).minimum > console.width:
        content.collapse_padding = True
    indent = 2  # indentation of names in listings
    console.width = max(console.width, _widths(content).minimum + indent)
    with console.capture() as capture:
        console.print(content)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
