"""The picture of a roofline."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from textwrap import fill
from typing import Any

from cupyfa.analysis.roofline import EXPONENTIALS, Roof
from cupyfa.report.plots import COLOURS, GAP, INK, check, spread_labels, write

_BELOW = 0.98  # of the roof of the arithmetic, for another to be drawn
_WIDE = 40  # characters in a line of a label


def draw_roofs(rows: Sequence[Roof], path: str | Path) -> None:
    """Draws TFLOP/s over FLOP per byte, both by decades: the device's roofs and what is below them.

    A ring is what is attainable, if no cache catches anything. What was measured is a bar, from
    the intensity of its loops to that where caches catch every repetition. Dashed is the roof of
    the exponentials, where it is below that of the arithmetic.
    Files and errors as of ``draw``; the rows are of one device.
    """
    path = Path(path)
    check(path)
    if not any(row.tflops for row in rows):
        raise ValueError("there is nothing to draw: no computation has any work")
    write(lambda: _roofs([row for row in rows if row.tflops]), path)


def _roofs(rows: Sequence[Roof]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    found = [x for row in rows for x in (row.intensity, row.cached.intensity, row.balance) if x]
    ends = min(found) / 3, max(found) * 2
    axes.set(xscale="log", yscale="log", xlim=ends)
    notes = _ceilings(axes, rows, ends)
    series = _series(rows)
    labels = [
        _draw_bars(axes, bars, fill(", ".join(names), _WIDE), colour, ends[1])
        for (bars, names), colour in zip(series.items(), cycle(COLOURS))
    ]
    axes.set_ylim(top=2 * max(row.peak for row in rows))
    notes.append(_dress_roofs(axes, rows))
    figure.canvas.draw()  # which settles the angle of the slope
    _slant(axes, rows[0].device.bandwidth, ends[0])
    spread_labels(figure, axes, labels, notes)
    return figure


def _ceilings(axes: Any, rows: Sequence[Roof], ends: tuple[float, float]) -> list[Any]:
    """The lines that nothing is above, with what each is; returns these words."""
    left, right = ends
    bandwidth = rows[0].device.bandwidth / 1e3
    levels: dict[float, str] = {}
    for row in sorted(rows, key=lambda row: row.peak):
        units = "tensor cores" if row.on_tensor_cores else "without tensor cores"
        rounded = row.on_tensor_cores and row.precision not in ("", row.problem.dtype.name)
        levels[row.peak] = f"{units} in {row.precision}" if rounded else units
        corners = [(left, left * bandwidth), (row.balance, row.peak), (right, row.peak)]
        axes.plot(*zip(*corners), color=INK, linewidth=1.5)
    for row in rows:
        if EXPONENTIALS in row.times:
            level = row.flops / row.times[EXPONENTIALS] / 1e9
            apart = not any(_BELOW < level / other < 1 / _BELOW for other in levels)
            if row.on_tensor_cores and level < _BELOW * row.peak and apart:
                levels[level] = f"exponentials at d={row.problem.d}"
                axes.plot([level / bandwidth, right], [level] * 2, "--", color=INK, linewidth=1)
    return [
        axes.annotate(
            f"{level:.{0 if level >= 100 else 1}f} TFLOP/s, {what}",
            (right, level),
            (0, 3),
            textcoords="offset points",
            horizontalalignment="right",
            fontsize=8,
        )
        for level, what in levels.items()
    ]


@dataclass(frozen=True)
class _Bar:
    """TFLOP/s that were measured, from the intensity of the loops to that with caches.

    What is attainable without caches is a point, where the loops are.
    """

    left: float
    right: float
    height: float
    measured: bool


def _series(rows: Sequence[Roof]) -> dict[tuple[_Bar, ...], list[str]]:
    """The bars of a computation at all lengths, and the names of those with the same bars."""
    d_differs = len({row.problem.d for row in rows}) > 1
    bars: dict[str, list[_Bar]] = {}
    for row in rows:
        reached = row.measured.tflops if row.measured else None
        left, right = (float(f"{x.intensity:.2g}") for x in (row, row.cached))
        height = float(f"{reached or row.tflops:.3g}")
        bar = _Bar(left, right if reached else left, height, bool(reached))
        name = f"{row.computation} d={row.problem.d}" if d_differs else row.computation
        bars.setdefault(name, []).append(bar)
    names: dict[tuple[_Bar, ...], list[str]] = {}
    for name, its in bars.items():
        names.setdefault(tuple(its), []).append(name)
    return names


def _draw_bars(axes: Any, bars: Sequence[_Bar], name: str, colour: str, edge: float) -> Any:
    """Bars that end in discs where they were measured, else rings.

    Returns their label: beside the last one, or at the picture's edge if that is long.
    """
    for bar in bars:
        axes.plot([bar.left, bar.right], [bar.height] * 2, "-", color=colour, linewidth=1.5)
        face = colour if bar.measured else "none"
        axes.plot(bar.right, bar.height, "o", color=colour, markerfacecolor=face, markersize=5)
    last = bars[-1]
    return axes.annotate(
        name,
        (edge if last.left < last.right else last.right, last.height),
        (GAP, 0),
        textcoords="offset points",
        color=colour,
        fontsize=9,
        verticalalignment="center",
        annotation_clip=False,
    )


def _slant(axes: Any, bandwidth: float, left: float) -> None:
    """The bandwidth, along the line that it makes."""
    height = left * bandwidth / 1e3
    a, b = axes.transData.transform([(left, height), (10 * left, 10 * height)])
    angle = math.degrees(math.atan2(b[1] - a[1], b[0] - a[0]))
    axes.annotate(
        f"{bandwidth:.4g} GB/s",
        (1.3 * left, 1.3 * height),
        (0, 4),
        textcoords="offset points",
        rotation=angle,
        rotation_mode="anchor",
        fontsize=8,
    )


def _dress_roofs(axes: Any, rows: Sequence[Roof]) -> Any:
    """Returns the title."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    axes.grid(color=INK, alpha=0.25, linewidth=0.8)
    axes.tick_params(length=0)
    axes.set_xlabel("FLOP per byte of memory")
    problems = {re.sub(r" (scale|precision)=\S+", "", str(row.problem)) for row in rows}
    title = [f"TFLOP/s   {rows[0].device.name}", *(problems if len(problems) == 1 else ())]
    return axes.set_title(": ".join(title), loc="left", fontsize=10, color=INK)
