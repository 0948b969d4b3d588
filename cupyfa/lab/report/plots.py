"""Plots measurements on a white background, which suits light and dark pages."""

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, cycle
from pathlib import Path
from statistics import mean
from textwrap import wrap
from typing import Any
from xml.sax.saxutils import escape

from cupyfa import cache_folder
from cupyfa.arrays.block_mask import BlockMask
from cupyfa.errors import Unsupported, described
from cupyfa.lab.bench.results import Measurement

SUFFIXES = (".svg", ".png")
INK, PALE = "#424a53", "#d8dee4"
# The colours contrast with white and can be told apart by people with and without colour-blindness.
# Curves also differ in markers and dashes.
COLOURS = ("#1c6afa", "#e60d1a", "#792191", "#521a0e", "#d10881", "#0d009e", "#a35954", "#450dff")
MARKERS = "osD^vPX"
_DASHES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)))
# Maps prefixes of kernel names ("" for all other kernels) to the units that compute the products.
FAMILIES = {"": "cuBLAS, CUDA cores, WMMA", "mma": "mma.sync", "wgmma": "wgmma"}
# SVG files store text as text rather than outlines, so they are smaller, searchable, and accessible
# to screen readers. matplotlib computes the layout with DejaVu Sans. Verdana has the same width;
# most other fonts are narrower.
_FONTS = "DejaVu Sans, Verdana, sans-serif"
_INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
_STYLE: dict[Any, Any] = {
    **dict.fromkeys(_INKED, INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    "font.size": 9,
    "grid.color": PALE,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "svg.fonttype": "none",
    "svg.hashsalt": "cupyfa",  # makes files reproducible
}
_UNDATED = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_LINE = 110  # characters per line of the text below a picture
_GAP = 8  # distance from a curve to its label, in 1/72 inch
_CLEAR = 1.5  # distance from a label to a line that it must not cover, in 1/72 inch


def draw(rows: Sequence[Measurement], path: str | Path, title: str = "") -> None:
    """Plots TFLOP/s over N in one panel per kernel family, with labels at the curves' ends.

    All axes are logarithmic. The first kernel is in every panel, for comparison. Writes an .svg or
    .png file. Raises ValueError for another suffix or if no row was timed, and Unsupported without
    matplotlib.
    """
    path = Path(path)
    check(path)
    curves = curves_of(rows)
    if not curves:
        raise ValueError("there is nothing to plot: no row was timed")
    points = (f"{name} {', '.join(f'{N}: {y:.3g}' for N, y in x)}" for name, x in curves.items())
    said, endings = f"TFLOP/s over N on {title}", _endings(rows, curves)
    write(lambda: _figure(curves, title, endings), path, said, "; ".join([*points, *endings]))


def draw_blocks(blocks: BlockMask, path: str | Path) -> None:
    """Draws the tiles of a block mask: empty (white), partial (light) or full (dark).

    Tiles have 128 queries and keys, or more if there would be too many. A tile that differs between
    batch elements or heads is drawn as partial. Writes an .svg or .png file. Raises ValueError for
    another suffix, TypeError if ``blocks`` is not a block mask, Unsupported without matplotlib.
    """
    if not isinstance(blocks, BlockMask):
        raise TypeError(
            f"blocks is {described(blocks)}; it must be a block mask: create one with "
            "block_mask(array)"
        )
    path = Path(path)
    check(path)
    text = f"{blocks.text.text}, density {blocks.density:.3g}"
    write(lambda: _tiles(blocks, text), path, "A block mask", text)


def _tiles(blocks: BlockMask, title: str) -> Any:
    """Draws a grid of tiles, with queries from top to bottom."""
    from matplotlib.colors import ListedColormap

    figure = new_figure(6)
    axes = figure.subplots()
    axes.imshow(
        blocks.drawn(256),
        cmap=ListedColormap(["white", "#a9c8fd", COLOURS[0]]),
        vmin=0,
        vmax=2,
        interpolation="nearest",
        extent=(0, blocks.N, blocks.M, 0),
        aspect="auto",
    )
    axes.set(xlabel="key", ylabel="query")
    axes.set_title(title, loc="left", fontsize=9)
    return figure


def write(figure: Callable[[], Any], path: Path, title: str, description: str) -> None:
    """Writes a figure to a file atomically; equal figures produce identical files."""
    import matplotlib

    file, form = io.BytesIO(), path.suffix[1:]
    with matplotlib.rc_context(_STYLE):
        metadata = {"Title": title, **(_UNDATED if form == "svg" else {"Description": description})}
        figure().savefig(
            file, format=form, bbox_inches="tight", pad_inches=0.15, dpi=200, metadata=metadata
        )
    content = file.getvalue()
    if form == "svg":
        content = _accessible(content.decode(), description).encode()
    cache_folder.write_whole(path, content)


def _accessible(svg: str, description: str) -> str:
    """Adds a role and a description to an SVG file, and moves its font names to the root."""
    svg = re.sub(r" font-family: [^;\"]*;?", "", svg)
    svg = svg.replace("<svg ", f'<svg role="img" font-family="{_FONTS}" ', 1)
    return svg.replace("</title>", f"</title>\n <desc>{escape(description)}</desc>", 1)


def check(path: Path) -> None:
    """Raises ValueError unless the suffix is in SUFFIXES, and Unsupported without matplotlib."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} must end with {' or '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise Unsupported(
            f"plotting requires matplotlib: pip install matplotlib ({error})"
        ) from None


def curves_of(rows: Sequence[Measurement]) -> dict[str, list[tuple[int, float]]]:
    """Maps each timed kernel to its points (N, TFLOP/s), sorted by N."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.tflops:
            curves.setdefault(row.kernel, []).append((row.problem.N, row.tflops))
    return {name: sorted(points) for name, points in curves.items()}


def _endings(
    rows: Sequence[Measurement], curves: Mapping[str, Sequence[tuple[int, float]]]
) -> list[str]:
    """Explains why curves end early.

    The reason is the note on the next length, or an estimate of a launch's time at that length.
    """
    longest = max(points[-1][0] for points in curves.values())
    said = []
    for name, points in curves.items():
        if (end := points[-1][0]) == longest:
            continue
        own = [row for row in rows if row.kernel == name]
        beyond = min((x.problem.N for x in rows if end < x.problem.N), default=longest)
        why = next((x.note for x in own if beyond == x.problem.N and x.note), "")
        if not why:
            last = next(x for x in own if end == x.problem.N and x.time)
            seconds = (last.time or 0.0) / 1e3 * (beyond / end) ** 2
            why = f"a launch at {beyond} would take about {seconds:.2g} s"
        said.append(f"{name} ends at {end}: {why}")
    return said


def family(name: str) -> str:
    """Returns the key in FAMILIES for a kernel's name."""
    first = name.split("_")[0]
    return first if first in FAMILIES else ""


def new_figure(height: float) -> Any:
    """Creates a figure 8 inches wide, with a canvas that can measure text."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    return FigureCanvasAgg(Figure(figsize=(8, height))).figure


def set_scales(axes: Any) -> None:
    """Makes both axes logarithmic, with plain numbers as tick labels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set(xscale="log", yscale="log")
    bottom, top = axes.get_ylim()
    steps = (1,) if top > 300 * bottom else (1, 2, 5)
    axes.yaxis.set_major_locator(LogLocator(subs=steps, numticks=20))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    axes.grid(linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.tick_params("x", pad=7)  # keeps labels clear of the lowest label of the y axis


def add_label(axes: Any, text: str, point: tuple[float, float], colour: str) -> Any:
    """Adds a label joined to its point by a thin line; ``place_labels`` sets its position."""
    line = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "relpos": (0, 0.5), "shrinkA": 0}
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    return axes.annotate(
        text,
        point,
        (0, 0),
        textcoords="axes fraction",
        verticalalignment="bottom",
        color=colour,
        fontsize=8.5,
        annotation_clip=False,
        arrowprops=line,
        bbox=ground,
    )


def place_labels(
    axes: Any, labels: Iterable[Any], left: float, lines: Sequence[float] = ()
) -> None:
    """Places labels in a column that begins ``left`` points from the left edge of the axes.

    Each label is placed as close to the height of its point as possible without overlap. Labels
    that would overlap are moved as one group, by the mean of their shifts, which minimizes the sum
    of squared shifts. Labels that would cover a line, at one of the data heights ``lines``, are
    moved off the line where there is room.
    """
    points_of = 72 / axes.figure.dpi
    column = sorted(labels, key=lambda label: label.xy[1])
    heights = [1.15 * height for _, height in map(text_size, column)]
    below = list(accumulate(heights, initial=0.0))

    def height_of(ys: Sequence[float]) -> list[float]:
        pixels = axes.transData.transform([(column[0].xy[0], y) for y in ys])[:, 1]
        return [float(x) for x in (pixels - axes.bbox.y0) * points_of]

    centres = height_of([label.xy[1] for label in column])
    groups: list[list[float]] = []
    for centre, height, under in zip(centres, heights, below):
        groups.append([centre - height / 2 - under])
        while len(groups) > 1 and mean(groups[-2]) > mean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    highest = axes.bbox.height * points_of - below[-1]
    shifts = (mean(group) for group in groups for _ in group)
    bottoms = [min(max(shift, 0.0), highest) + under for under, shift in zip(below, shifts)]
    if lines and column:
        bottoms = _off_lines(bottoms, heights, height_of(lines))
    size = axes.bbox.size * points_of
    for label, bottom in zip(column, bottoms):
        label.set_position((left / size[0], bottom / size[1]))


def _off_lines(
    bottoms: Sequence[float], heights: Sequence[float], lines: Sequence[float]
) -> list[float]:
    """Moves the boxes of a column, sorted from bottom to top, off the lines that they cover.

    Returns the new bottoms, or ``bottoms`` if there is not enough room below.
    """
    moved: list[float] = []
    ceiling = math.inf
    for bottom, height in zip(reversed(bottoms), reversed(heights)):
        bottom = min(bottom, ceiling - height)
        for line in sorted(lines, reverse=True):
            if bottom < line + _CLEAR and line - _CLEAR < bottom + height:
                above = line + _CLEAR
                is_nearer = above - bottom <= bottom + height - (line - _CLEAR)
                has_room = above + height <= ceiling
                bottom = above if is_nearer and has_room else line - _CLEAR - height
        moved.append(bottom)
        ceiling = bottom
    return moved[::-1] if ceiling >= 0 else list(bottoms)


def text_size(text: Any) -> tuple[float, float]:
    """Measures the width and height of a label in points, without the line to its point."""
    from matplotlib.text import Text

    box = Text.get_window_extent(text, text.figure.canvas.get_renderer())
    return box.width * 72 / text.figure.dpi, box.height * 72 / text.figure.dpi


def _figure(
    curves: Mapping[str, list[tuple[int, float]]], title: str, endings: Sequence[str] = ()
) -> Any:
    """Draws a panel for each family with kernels other than the first kernel, and notes below."""
    first = next(iter(curves))
    families: dict[str, list[str]] = {}
    for name in curves:
        families.setdefault(family(name), [first]).append(name)
    panels = {key: list(dict.fromkeys(names)) for key, names in families.items()}
    if len(panels) > 1:
        panels = {key: names for key, names in panels.items() if names != [first]}
    heights = [max(1.6, 0.4 + 0.2 * len(names)) for names in panels.values()]
    figure = new_figure(sum(heights) + 0.3 * len(heights))
    all_axes = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, height_ratios=heights
    ).flat
    figure.subplots_adjust(left=0.06, right=0.8, bottom=0, top=1, hspace=0.22)
    for axes, (key, names) in zip(all_axes, panels.items()):
        _draw_panel(axes, {name: curves[name] for name in names}, first)
        axes.set_title(FAMILIES[key], loc="left", fontsize=9, fontweight="bold")
    sizes = sorted({N for points in curves.values() for N, _ in points})
    axes.set_xticks(sizes, [f"{size}" for size in sizes])
    axes.set_xlabel("N")
    height = figure.get_figheight()
    figure.text(0.06, 1 + 0.35 / height, f"TFLOP/s on {title}", fontsize=10)
    for number, line in enumerate(x for ending in endings for x in wrap(ending, _LINE)):
        figure.text(0.06, (-0.65 - 0.17 * number) / height, line, fontsize=8)
    return figure


def _draw_panel(axes: Any, curves: Mapping[str, list[tuple[int, float]]], first: str) -> None:
    """Draws curves, with labels at the right edge joined to the curves' ends by thin lines."""
    looks = zip(cycle(COLOURS), cycle(MARKERS), cycle(_DASHES))
    labels = []
    for name, points in curves.items():
        colour, marker, dashes = (INK, "", "--") if name == first else next(looks)
        axes.plot(*zip(*points), linestyle=dashes, color=colour, marker=marker)
        labels.append(add_label(axes, name, points[-1], colour))
    set_scales(axes)
    place_labels(axes, labels, axes.bbox.width * 72 / axes.figure.dpi + _GAP)
