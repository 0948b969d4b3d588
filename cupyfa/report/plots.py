"""Pictures of measurements, to be looked at on light and on dark ground."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from itertools import cycle, product
from pathlib import Path
from statistics import mean
from typing import Any

from cupyfa import store
from cupyfa.bench.results import Measurement
from cupyfa.errors import Unsupported

SUFFIXES = (".svg", ".png")
# Of middle lightness: they stand out from white and from black.
INK = "#7d8590"
COLOURS = (
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
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "cupyfa",  # the same rows make the same file
}
GAP = 6  # points from a curve's end to its label
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
    write(lambda: _figure(curves, title), path)


def write(figure: Callable[[], Any], path: Path) -> None:
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
        for (name, points), look in zip(curves.items(), cycle(product(_LINES, COLOURS)))
    ]
    _dress(axes, sorted({x for points in curves.values() for x, _ in points}), title)
    spread_labels(figure, axes, labels)
    return figure


def _curve(axes: Any, name: str, points: list[tuple[int, float]], line: str, colour: str) -> Any:
    """One curve; returns the label at its end."""
    axes.plot(*zip(*points), line, color=colour, linewidth=2, marker="o", markersize=4)
    return axes.annotate(
        name,
        points[-1],
        (GAP, 0),
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
    axes.grid(axis="y", color=INK, alpha=0.25, linewidth=0.8)
    axes.tick_params(length=0)
    axes.set_xlabel("N")
    axes.set_title(f"TFLOP/s{'   ' if title else ''}{title}", loc="left", fontsize=10, color=INK)


def spread_labels(figure: Any, axes: Any, labels: Sequence[Any], fixed: Sequence[Any] = ()) -> None:
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
        label.set_position((GAP, up * 72 / figure.dpi))


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
