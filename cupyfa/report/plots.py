"""Pictures of measurements, to be looked at on light and on dark ground."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from statistics import mean
from textwrap import fill
from typing import Any

from cupyfa import store
from cupyfa.analysis.roofline import EXPONENTIALS, Roof
from cupyfa.bench.results import Measurement
from cupyfa.planner.plan import Unsupported

SUFFIXES = (".svg", ".png")
# Of middle lightness: they stand out from white and from black.
_INK = "#7d8590"
_COLOURS = (
    "#2f81f7",
    "#d29922",
    "#2da44e",
    "#f0554c",
    "#a371f7",
    "#db61a2",
    "#1f9aa5",
    "#e3763f",
)
_LINES = ("-", "--", ":")
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "cupyfa",  # the same rows make the same file
}
_BELOW = 0.98  # of the roof of the arithmetic, for another to be drawn
_WIDE = 40  # characters in a line of a label
_GAP = 6  # points from a curve's end to its label
_STEP, _FARTHEST = 2, 800  # pixels: by how much labels are moved until they are free


def draw(rows: Sequence[Measurement], path: str | Path, title: str = "") -> None:
    """Draws TFLOP/s over N, a curve for each kernel with its name at the end, both axes by decades.

    Writes an .svg or .png file, without ground. Raises ValueError for another suffix and for rows
    of which none was timed, Unsupported without matplotlib.
    """
    path = Path(path)
    check(path)
    curves = curves_of(rows)
    if not curves:
        raise ValueError("there is nothing to draw: no row was timed")
    _write(lambda: _figure(curves, title), path)


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
    _write(lambda: _roofs([row for row in rows if row.tflops]), path)


def _write(figure: Callable[[], Any], path: Path) -> None:
    import matplotlib

    file, form = io.BytesIO(), path.suffix[1:]
    metadata = {"Date": None} if form == "svg" else None
    with matplotlib.rc_context(_STYLE):
        figure().savefig(
            file, format=form, transparent=True, bbox_inches="tight", dpi=200, metadata=metadata
        )
    store.write_whole(path, file.getvalue())


def check(path: Path) -> None:
    """Refuses a file that would not be a picture, and to draw one without matplotlib."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} is no picture; the name ends with {' or '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise Unsupported(
            f"pictures need matplotlib: pip install 'cupyfa[plot]' ({error})"
        ) from None


def curves_of(rows: Sequence[Measurement]) -> dict[str, list[tuple[int, float]]]:
    """The points (N, TFLOP/s) of each kernel that was timed, N growing."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.tflops:
            curves.setdefault(row.kernel, []).append((row.problem.N, row.tflops))
    return {name: sorted(points) for name, points in curves.items()}


def _figure(curves: dict[str, list[tuple[int, float]]], title: str) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    labels = [
        _curve(axes, name, points, *look)
        for (name, points), look in zip(curves.items(), cycle(product(_LINES, _COLOURS)))
    ]
    _dress(axes, sorted({x for points in curves.values() for x, _ in points}), title)
    _spread(figure, axes, labels)
    return figure


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
        for (bars, names), colour in zip(series.items(), cycle(_COLOURS))
    ]
    axes.set_ylim(top=2 * max(row.peak for row in rows))
    notes.append(_dress_roofs(axes, rows))
    figure.canvas.draw()  # which settles the angle of the slope
    _slant(axes, rows[0].device.bandwidth, ends[0])
    _spread(figure, axes, labels, notes)
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
        axes.plot(*zip(*corners), color=_INK, linewidth=1.5)
    for row in rows:
        if EXPONENTIALS in row.times:
            level = row.flops / row.times[EXPONENTIALS] / 1e9
            apart = not any(_BELOW < level / other < 1 / _BELOW for other in levels)
            if row.on_tensor_cores and level < _BELOW * row.peak and apart:
                levels[level] = f"exponentials at d={row.problem.d}"
                axes.plot([level / bandwidth, right], [level] * 2, "--", color=_INK, linewidth=1)
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
        (_GAP, 0),
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
    axes.grid(color=_INK, alpha=0.25, linewidth=0.8)
    axes.tick_params(length=0)
    axes.set_xlabel("FLOP per byte of memory")
    problems = {re.sub(r" (scale|precision)=\S+", "", str(row.problem)) for row in rows}
    title = [f"TFLOP/s   {rows[0].device.name}", *(problems if len(problems) == 1 else ())]
    return axes.set_title(": ".join(title), loc="left", fontsize=10, color=_INK)


def _curve(axes: Any, name: str, points: list[tuple[int, float]], line: str, colour: str) -> Any:
    """One curve; returns the label at its end."""
    axes.plot(*zip(*points), line, color=colour, linewidth=2, marker="o", markersize=4)
    return axes.annotate(
        name,
        points[-1],
        (_GAP, 0),
        textcoords="offset points",
        color=colour,
        verticalalignment="center",
        annotation_clip=False,
    )


def _dress(axes: Any, sizes: Sequence[int], title: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{size}" for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color=_INK, alpha=0.25, linewidth=0.8)
    axes.tick_params(length=0)
    axes.set_xlabel("N")
    axes.set_title(f"TFLOP/s{'   ' if title else ''}{title}", loc="left", fontsize=10, color=_INK)


def _spread(figure: Any, axes: Any, labels: Sequence[Any], fixed: Sequence[Any] = ()) -> None:
    """Moves labels up or down until none lies on another, nor on a curve if that can be.

    What is ``fixed`` stays where it is, and no label lies on it.
    """
    figure.canvas.draw()
    shifts = sorted(range(-_FARTHEST, _FARTHEST + 1, _STEP), key=abs)
    curves = [line.get_path().transformed(line.get_transform()) for line in axes.lines]
    placed: list[Any] = [one.get_window_extent() for one in fixed]
    for label, box in _apart(labels):
        places = [box.translated(0, shift) for shift in shifts]
        free = [x for x in places if not any(x.overlaps(other) for other in placed)]
        clear = [x for x in free if not any(c.intersects_bbox(x, False) for c in curves)]
        placed.append((clear or free)[0])
        up = placed[-1].y0 - label.get_window_extent().y0
        label.set_position((_GAP, up * 72 / figure.dpi))


def _apart(labels: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Labels with boxes that leave the others at the same N room, each as near as that allows.

    The sum of the squares of their ways is the least: boxes that would lie on each other move as
    one, to where the mean of their ways is 0.
    """
    boxes = []
    for x in sorted({label.xy[0] for label in labels}, reverse=True):
        column = sorted((one for one in labels if one.xy[0] == x), key=lambda one: one.xy[1])
        extents = [label.get_window_extent() for label in column]
        height = 1.1 * max(extent.height for extent in extents)
        groups: list[list[float]] = []
        for i, extent in enumerate(extents):
            groups.append([extent.y0 - i * height])
            while len(groups) > 1 and mean(groups[-2]) > mean(groups[-1]):
                groups[-2:] = [groups[-2] + groups[-1]]
        starts = [mean(group) for group in groups for _ in group]
        ways = [start + i * height - extents[i].y0 for i, start in enumerate(starts)]
        boxes += [(one, box.translated(0, up)) for one, box, up in zip(column, extents, ways)]
    return boxes
