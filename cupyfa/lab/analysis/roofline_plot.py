"""Draws roofline charts: the roofs of a device, and computations as points below them."""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import Any

from cupyfa.lab.analysis.roofline_model import EXPONENTIALS, NAIVE, TILED, Roof
from cupyfa.lab.report import plots

Point = tuple[float, float, bool]  # intensity, TFLOP/s, whether measured
_BOUND = "bound"
_KEYS = (_BOUND, *plots.FAMILIES)
_CLOSE = 0.98  # roofs whose ratio is between this and its inverse are drawn as one
_WIDE = 18  # characters per line of a label
_GAP = 9  # distance from a point to its label, in 1/72 inch


def draw_roofs(rows: Sequence[Roof], path: str | Path) -> None:
    """Plots TFLOP/s against FLOP per byte, on logarithmic axes, for rows of one device.

    Filled markers show measured performance, empty markers attainable performance. A dashed line is
    the roof of exponentials where it is below the roof of the arithmetic. File types and errors are
    the same as in ``plots.draw``.
    """
    path, rows = Path(path), [row for row in rows if row.tflops]
    plots.check(path)
    if not rows:
        raise ValueError("there is nothing to plot: no operation performs any work")
    listed = []
    for (_, points), names in _series(rows).items():
        where = (f"{_two_digits(y)} at {_two_digits(x)} FLOP per byte" for x, y, _ in points)
        listed.append(f"{', '.join(names)} {', '.join(where)}")
    plots.write(lambda: _figure(rows), path, f"TFLOP/s on {_title(rows)}", "; ".join(listed))


def _two_digits(value: float) -> str:
    return f"{float(f'{value:.2g}'):g}"


def _figure(rows: Sequence[Roof]) -> Any:
    """Draws labelled points, and roofs with their names at the right edge."""
    series = {key: _wrapped(names) for key, names in _series(rows).items()}
    lines = sum(1 + label.count("\n") for label in series.values())
    figure = plots.new_figure(max(5.5, 0.2 * lines))
    axes = figure.add_axes((0.07, 0.1, 0.71, 0.85))
    axes.set_xlabel("FLOP per byte")
    intensities = [x for row in rows for x in (row.intensity, row.balance) if x]
    left, right = min(intensities) / 5, 1.5 * max(intensities)
    top = max(row.peak for row in rows)
    lowest = min(y for _, points in series for _, y, _ in points)
    bottom = min(lowest / 2, left * rows[0].device.bandwidth / 1e3)
    axes.set(xlim=(left, right), ylim=(bottom, 2 * top))
    plots.set_scales(axes)
    labels = [_draw_series(axes, *key, label) for key, label in series.items()]
    width = axes.bbox.width * 72 / figure.dpi
    column = max(plots.text_size(label)[0] for label in labels) + 2 * _GAP
    right = left * (right / left) ** (width / (width - column))  # leaves room for the last labels
    axes.set_xlim(left, right)
    levels, dashed = _levels(rows)
    _place(axes, labels, [x for _, points in series for x, _, _ in points], [*levels, *dashed])
    _draw_roofs(axes, rows[0].device.bandwidth / 1e3, levels, dashed)
    _add_bandwidth(axes, rows)
    _add_texts(axes, rows)
    return figure


def _wrapped(names: Sequence[str]) -> str:
    """Joins names into wrapped lines without breaking a name."""
    unbroken = (name.replace(" ", "\N{NO-BREAK SPACE}") for name in names)
    return fill(", ".join(unbroken), _WIDE, break_long_words=False, break_on_hyphens=False)


def _draw_series(axes: Any, key: str, points: Sequence[Point], names: str) -> Any:
    """Draws points of one kernel family, joined by a line, and labels the last point."""
    colour, marker = _look(key)
    axes.plot(*zip(*(point[:2] for point in points)), color=colour, linewidth=0.8)
    for x, y, measured in points:
        face = colour if measured else "white"
        axes.plot(x, y, marker, color=colour, markerfacecolor=face, zorder=3)
    return plots.add_label(axes, names, points[-1][:2], colour)


def _key(computation: str) -> str:
    return _BOUND if computation in (NAIVE, TILED) else plots.family(computation)


def _look(key: str) -> tuple[str, str]:
    """Returns the colour and marker of a kernel family or of a bound."""
    index = _KEYS.index(key)
    return (plots.INK, *plots.COLOURS)[index], plots.MARKERS[index]


def _place(axes: Any, labels: Sequence[Any], xs: Sequence[float], levels: Sequence[float]) -> None:
    """Places labels in columns, each between its own points and the next points to the right.

    xs: x coordinates of all points. levels: heights of the roofs, which labels must not cover.
    """

    def across(x: float) -> float:
        return (axes.transData.transform((x, 1))[0] - axes.bbox.x0) * 72 / axes.figure.dpi

    column: list[Any] = []
    for x, following in pairwise([*sorted(set(xs)), math.inf]):
        column += [label for label in labels if label.xy[0] == x]
        needed = max((plots.text_size(label)[0] for label in column), default=0) + 2 * _GAP
        if column and (following == math.inf or across(following) - across(x) > needed):
            plots.place_labels(axes, column, across(x) + _GAP, levels)
            column = []


def _levels(rows: Sequence[Roof]) -> tuple[dict[float, str], dict[float, str]]:
    """Returns two dicts from TFLOP/s to names: arithmetic roofs, and roofs of exponentials.

    A roof of exponentials is omitted if it is above the arithmetic roof or close to another roof.
    """
    levels: dict[float, str] = {}
    for row in sorted(rows, key=lambda row: row.peak):
        units = "tensor cores" if row.on_tensor_cores else "without tensor cores"
        rounded = row.on_tensor_cores and row.precision not in ("", row.problem.dtype.name)
        levels[row.peak] = f"{units} in {row.precision}" if rounded else units
    dashed: dict[float, str] = {}
    for row in rows:
        if row.on_tensor_cores and EXPONENTIALS in row.times:
            level = row.flops / row.times[EXPONENTIALS] / 1e9
            apart = not any(_CLOSE < level / x < 1 / _CLOSE for x in (*levels, *dashed))
            if level < _CLOSE * row.peak and apart:
                dashed[level] = f"exponentials at d={row.problem.d}"
    return levels, dashed


def _draw_roofs(
    axes: Any, slope: float, levels: dict[float, str], dashed: dict[float, str]
) -> None:
    """Draws the roofs and labels each with its TFLOP/s and its name."""
    left, right = axes.get_xlim()
    axes.plot(
        [left, max(levels) / slope], [left * slope, max(levels)], color=plots.INK, linewidth=1.2
    )
    for level in levels:
        axes.plot([level / slope, right], [level] * 2, color=plots.INK, linewidth=1.2)
    for level in dashed:
        axes.plot([level / slope, right], [level] * 2, "--", color=plots.INK, linewidth=1)
    names = []
    for level, unit in (levels | dashed).items():
        rate = f"{level:.{0 if level >= 100 else 1}f} TFLOP/s\n{unit}"
        names.append(plots.add_label(axes, rate, (right, level), plots.INK))
    plots.place_labels(axes, names, axes.bbox.width * 72 / axes.figure.dpi + _GAP)


def _add_bandwidth(axes: Any, rows: Sequence[Roof]) -> None:
    """Labels the sloped memory roof with the bandwidth, left of the first point."""
    device = rows[0].device
    slope = device.bandwidth / 1e3
    start = min(x for row in rows for x in (row.intensity, row.balance) if x) / 1.2
    axes.annotate(
        f"{device.bandwidth:.4g} GB/s",
        (start, start * slope),
        (-_GAP / 2, 0),
        textcoords="offset points",
        horizontalalignment="right",
        fontsize=8.5,
    )


def _add_texts(axes: Any, rows: Sequence[Roof]) -> None:
    """Adds the title, the legend of kernel families, and the source of the device's rates."""
    axes.set_title(f"TFLOP/s on {_title(rows)}", loc="left", fontsize=10)
    measured = {_key(row.computation) for row in rows if row.measured and row.measured.tflops}
    drawn = {_key(row.computation) for row in rows}
    for key in (key for key in _KEYS if key in drawn):
        colour, marker = _look(key)
        face = colour if key in measured else "white"
        text = plots.FAMILIES.get(key, "a bound, by formula")
        axes.plot([], [], marker, color=colour, markerfacecolor=face, label=text)
    marks = "full marks are measured, empty ones attainable" if measured else "all are attainable"
    axes.legend(
        title=f"{marks}; roofs: {rows[0].device.source}",
        loc="upper left",
        bbox_to_anchor=(0, -0.1),
        alignment="left",
        ncols=4,
        frameon=False,
        borderpad=0,
    )


def _title(rows: Sequence[Roof]) -> str:
    """Returns the device's name and the sizes and options that all problems share."""
    problems = [str(row.problem).split() for row in rows]
    common = [x for x in problems[0] if all(x in words for words in problems)]
    about = [x for x in common if not x.startswith(("scale=", "precision="))]
    return f"{rows[0].device.name}: {' '.join(about)}"


def _series(rows: Sequence[Roof]) -> dict[tuple[str, tuple[Point, ...]], list[str]]:
    """Maps each (family, points from left to right) to the names of its computations.

    Computations whose points agree to two digits share a label, but all their points are drawn.
    """
    d_differs = len({row.problem.d for row in rows}) > 1
    points: dict[tuple[str, str], list[Point]] = {}
    for row in rows:
        reached = row.measured.tflops if row.measured else None
        name = f"{row.computation} d={row.problem.d}" if d_differs else row.computation
        assert row.intensity and row.tflops  # draw_roofs drops rows without work
        point = row.intensity, reached or row.tflops, bool(reached)
        points.setdefault((_key(row.computation), name), []).append(point)
    alike: dict[Any, list[tuple[str, str]]] = {}
    for (key, name), its in points.items():
        near = [(f"{x:.2g}", f"{y:.2g}", measured) for x, y, measured in sorted(its)]
        alike.setdefault((key, *near), []).append((key, name))
    return {
        (group[0][0], tuple(sorted({x for one in group for x in points[one]}))): [
            name for _, name in group
        ]
        for group in alike.values()
    }
