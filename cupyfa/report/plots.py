"""Pictures of measurements, to be looked at on light and on dark ground."""

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
    *("#2f81f7", "#d29922", "#2da44e", "#f0554c"),
    *("#a371f7", "#db61a2", "#1f9aa5", "#e3763f"),
)
_LINES = ("-", "--", ":")
_INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
_STYLE: dict[Any, Any] = {
    **dict.fromkeys(_INKED, INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    "font.family": "sans-serif",
    "font.size": 10,
    "svg.hashsalt": "cupyfa",  # the same rows make the same file
}
_GAP = 10  # points between the end of a curve and its label


def draw(rows: Sequence[Measurement], path: str | Path, title: str = "") -> None:
    """Draws TFLOP/s over N, both axes logarithmic, one curve for each kernel, labelled at its end.

    Writes an .svg or .png file with a transparent background. Raises ValueError for another suffix
    and if no row was timed, Unsupported without matplotlib.
    """
    path = Path(path)
    check(path)
    curves = curves_of(rows)
    if not curves:
        raise ValueError("there is nothing to draw: no row was timed")
    write(lambda: _figure(curves, title), path)


def write(figure: Callable[[], Any], path: Path) -> None:
    """Writes a figure to a file, whole or not at all; equal figures give equal files."""
    import matplotlib

    file, form = io.BytesIO(), path.suffix[1:]
    metadata = {"Date": None} if form == "svg" else None
    with matplotlib.rc_context(_STYLE):
        figure().savefig(
            file, format=form, transparent=True, bbox_inches="tight", dpi=200, metadata=metadata
        )
    store.write_whole(path, file.getvalue())


def check(path: Path) -> None:
    """Raises ValueError unless the name is that of a picture, Unsupported without matplotlib."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} must end with {' or '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise Unsupported(f"pictures need matplotlib: pip install matplotlib ({error})") from None


def curves_of(rows: Sequence[Measurement]) -> dict[str, list[tuple[int, float]]]:
    """The points (N, TFLOP/s) of each kernel that was timed, in the order of N."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.tflops:
            curves.setdefault(row.kernel, []).append((row.problem.N, row.tflops))
    return {name: sorted(points) for name, points in curves.items()}


def new_axes(xlabel: str, title: str) -> Any:
    """Logarithmic axes of a new figure, TFLOP/s upwards."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes = Figure(figsize=(8, 5)).add_subplot()
    axes.set(xscale="log", yscale="log", xlabel=xlabel)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    axes.grid(color=INK, alpha=0.25, linewidth=0.8)
    axes.tick_params(length=0)
    axes.set_title(f"TFLOP/s   {title}", loc="left", fontsize=10, color=INK)
    return axes


def _figure(curves: dict[str, list[tuple[int, float]]], title: str) -> Any:
    """Curves with labels at their ends, which thin lines join to them."""
    axes = new_axes("N", title)
    axes.grid(visible=False, axis="x")
    sizes = sorted({x for points in curves.values() for x, _ in points})
    axes.set_xticks(sizes, [f"{size}" for size in sizes])
    labels = []
    for (name, points), (line, colour) in zip(curves.items(), cycle(product(_LINES, COLOURS))):
        axes.plot(*zip(*points), line, color=colour, linewidth=2, marker="o", markersize=4)
        thin = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "relpos": (0, 0.5)}
        at = {"textcoords": "offset points", "verticalalignment": "center", "color": colour}
        label = axes.annotate(
            name, points[-1], (_GAP, 0), annotation_clip=False, arrowprops=thin, **at
        )
        labels.append(label)
    _spread(labels)
    return axes.figure


def _spread(labels: Sequence[Any]) -> None:
    """Moves labels at the same N up or down until none overlaps another, as little as possible.

    Labels that would overlap move as one group, by the mean of their shifts: the sum of the squared
    shifts is minimal.
    """
    from matplotlib.text import Text

    figure = labels[0].figure
    figure.draw_without_rendering()
    for x in {label.xy[0] for label in labels}:
        column = sorted((one for one in labels if one.xy[0] == x), key=lambda one: one.xy[1])
        boxes = [Text.get_window_extent(label) for label in column]  # without the thin lines
        height = 1.1 * max(box.height for box in boxes)
        groups: list[list[float]] = []
        for i, box in enumerate(boxes):
            groups.append([box.y0 - i * height])
            while len(groups) > 1 and mean(groups[-2]) > mean(groups[-1]):
                groups[-2:] = [groups[-2] + groups[-1]]
        starts = (mean(group) for group in groups for _ in group)
        for i, (label, box, start) in enumerate(zip(column, boxes, starts)):
            label.set_position((_GAP, (start + i * height - box.y0) * 72 / figure.dpi))
