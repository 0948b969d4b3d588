"""The table of the suite: one line for each workload, the mean ratio, and the reasons for gaps."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from cupyfa.errors import printable
from cupyfa.lab.bench.suite import Standing, mean_ratio
from cupyfa.lab.report.tables import Row, markdown, render, table_of, text, three_digits

_SPARE = ("shape", "ms")  # columns dropped in terminals of less than _WIDE characters
_WIDE = 110  # a wider terminal has room for shapes, wrapped into two lines if necessary


def suite_table(found: Sequence[Standing], about: Row, form: str) -> str:
    """Renders standings in one of FORMATS; tables have the heading ``about`` and notes below."""
    if form in ("json", "csv"):
        return render([{"device": about["device"], **x.row()} for x in found], form)
    rows, spare = [_short(x) for x in found], () if Console().width >= _WIDE else _SPARE
    table = markdown(rows) if form == "md" else table_of(rows, spare=spare, share=False)
    between = "\n\n" if form == "md" else "\n"
    return between.join(filter(None, [text(about), table, *_summary(found), *_notes(found)]))


def _short(standing: Standing) -> dict[str, Any]:
    """Returns a row without what its workload's name implies; "-" stands for a missing peer."""
    peer = standing.peer or "-"
    return {
        "model": standing.workload.model,
        "phase": standing.workload.phase,
        "shape": standing.workload.shape,
        "kernel": standing.measurement.kernel,
        "ms": three_digits(standing.measurement.time),
        "rate": _rate(standing),
        "peer": peer.removeprefix("torch "),
        "ratio": three_digits(standing.ratio) or "-",
    }


def _rate(standing: Standing) -> str:
    """Returns the rate that limits the kernel, or in short why there is none."""
    row = standing.measurement
    if not row.time:
        known = [word for word in ("WRONG", "timed out") if row.note.startswith(word)]
        return known[0] if known else "not measured"
    if standing.is_memory_bound:
        return f"{text(three_digits(standing.bandwidth))} GB/s"
    return f"{text(three_digits(row.tflops))} TFLOP/s"


def _summary(found: Sequence[Standing]) -> list[str]:
    """Returns the geometric mean of the ratios, and the workloads whose ratio is below 1."""
    ratios = [(x.workload.name, x.ratio) for x in found if x.ratio]
    if not ratios:
        return ["no other library was measured; a comparison needs torch"]
    below = [f"{name} ({ratio:.3g})" for name, ratio in ratios if ratio < 1]
    mean = f"geometric mean of {len(ratios)} ratios: {mean_ratio(found):.3g}"
    return [mean, f"below 1: {', '.join(below) or 'none'}"]


def _notes(found: Sequence[Standing]) -> list[str]:
    """Returns each reason for a missing time or peer, with the workloads that it concerns."""
    names: dict[str, list[str]] = defaultdict(list)
    for x in found:
        if x.measurement.note:
            names[x.measurement.note].append(x.workload.name)
    return [printable(f"{', '.join(alike)}: {note}") for note, alike in names.items()]
