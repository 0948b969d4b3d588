"""The picture of a roofline: the roofs of a device, and where computations lie below them."""

import math
import re
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from textwrap import fill
from typing import Any

from cupyfa.analysis.roofline import EXPONENTIALS, Roof
from cupyfa.report.plots import COLOURS, INK, check, new_axes, write

_CLOSE = 0.98  # the ratio of two roofs from which on only one is drawn
_WIDE = 40  # characters in a line of the legend


def draw_roofs(rows: Sequence[Roof], path: str | Path) -> None:
    """Draws TFLOP/s over FLOP per byte, both axes logarithmic, for rows of one device.

    A disc is measured, a ring attainable performance. The dashed line is the roof of exponentials,
    where it is below that of the arithmetic. Files and errors as of ``draw``.
    """
    path = Path(path)
    check(path)
    if not any(row.tflops for row in rows):
        raise ValueError("there is nothing to draw: no computation has any work")
    write(lambda: _figure([row for row in rows if row.tflops]), path)


def _figure(rows: Sequence[Roof]) -> Any:
    device = rows[0].device
    problems = {re.sub(r" (scale|precision)=\S+", "", str(row.problem)) for row in rows}
    title = [device.name, *(problems if len(problems) == 1 else ())]
    axes = new_axes("FLOP per byte", ": ".join(title))
    found = [x for row in rows for x in (row.intensity, row.balance) if x]
    left, right = min(found) / 3, max(found) * 2
    axes.set(xlim=(left, right), ylim=(None, 2 * max(row.peak for row in rows)))
    _draw_roofs(axes, rows, left, right)
    for (points, names), colour in zip(_series(rows).items(), cycle(COLOURS)):
        for x, y, measured in points:
            axes.plot(x, y, "o", color=colour, markerfacecolor=colour if measured else "none")
        axes.plot([], [], "o", color=colour, label=fill(", ".join(names), _WIDE))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    slope = device.bandwidth / 1e3
    axes.text(
        1.3 * left,
        1.4 * left * slope,
        f"{device.bandwidth:.4g} GB/s",
        rotation=math.degrees(math.atan(slope)),
        rotation_mode="anchor",
        transform_rotates_text=True,
        fontsize=8,
    )
    return axes.figure


def _draw_roofs(axes: Any, rows: Sequence[Roof], left: float, right: float) -> None:
    """The roofs of the device, each with its TFLOP/s and the unit that it belongs to."""
    slope = rows[0].device.bandwidth / 1e3
    levels: dict[float, str] = {}
    for row in sorted(rows, key=lambda row: row.peak):
        units = "tensor cores" if row.on_tensor_cores else "without tensor cores"
        rounded = row.on_tensor_cores and row.precision not in ("", row.problem.dtype.name)
        levels[row.peak] = f"{units} in {row.precision}" if rounded else units
        corners = [(left, left * slope), (row.balance, row.peak), (right, row.peak)]
        axes.plot(*zip(*corners), color=INK, linewidth=1.5)
    for row in rows:
        if row.on_tensor_cores and EXPONENTIALS in row.times:
            level = row.flops / row.times[EXPONENTIALS] / 1e9
            apart = not any(_CLOSE < level / other < 1 / _CLOSE for other in levels)
            if level < _CLOSE * row.peak and apart:
                levels[level] = f"exponentials at d={row.problem.d}"
                axes.plot([level / slope, right], [level] * 2, "--", color=INK, linewidth=1)
    for level, unit in levels.items():
        rate = f"{level:.{0 if level >= 100 else 1}f} TFLOP/s, {unit}"
        axes.text(right, 1.08 * level, rate, horizontalalignment="right", fontsize=8)


def _series(rows: Sequence[Roof]) -> dict[tuple[tuple[float, float, bool], ...], list[str]]:
    """The points of a computation: intensity, TFLOP/s, whether measured; and all names for them."""
    d_differs = len({row.problem.d for row in rows}) > 1
    points: dict[str, list[tuple[float, float, bool]]] = {}
    for row in rows:
        reached = row.measured.tflops if row.measured else None
        name = f"{row.computation} d={row.problem.d}" if d_differs else row.computation
        x, y = (float(f"{value:.2g}") for value in (row.intensity, reached or row.tflops))
        points.setdefault(name, []).append((x, y, bool(reached)))
    names: dict[tuple[tuple[float, float, bool], ...], list[str]] = {}
    for name, its in points.items():
        names.setdefault(tuple(its), []).append(name)
    return names
