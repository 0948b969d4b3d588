"""Draws timelines: rows are warps or multiprocessors, colours are phases."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from textwrap import wrap
from typing import Any

from cupyfa.lab.analysis import timeline_summary as summary
from cupyfa.lab.analysis.timeline_recorder import Arrow, Kind, Span, Timeline
from cupyfa.lab.report.plots import INK, PALE, check, new_figure, write

# The palette of Okabe and Ito, which is safe for the colour-blind.
_SKY, _GREEN = "#56b4e9", "#009e73"
_YELLOW, _BLUE, _VERMILION, _PURPLE = "#f0e442", "#0072b2", "#d55e00", "#cc79a7"
_LILAC = "#8da2e8"
Fill = tuple[str, str]  # colour, hatch pattern or ""
_FREE = "waits for a free buffer"
_OWN = ("#e69f00", "#a6611a", "#fdcf8a", "#c98300")  # colours of phases that kernels mark()
_GROUPS: Mapping[str, tuple[Fill, tuple[Kind, ...]]] = {
    "waits for a copy or a store": (
        (_YELLOW, ""),
        (Kind.BARRIER_WAIT, Kind.COPY_WAIT, Kind.STORE_WAIT),
    ),
    _FREE: ((_YELLOW, "////"), ()),
    "waits for other warps": ((_VERMILION, ""), (Kind.NAMED_WAIT, Kind.BLOCK_WAIT)),
    "waits for wgmma": ((_SKY, ""), (Kind.PRODUCT_WAIT,)),
    "loads": ((_YELLOW, "...."), (Kind.LOADS,)),
    "mma": ((_BLUE, ""), (Kind.PRODUCTS,)),
    "products": ((_BLUE, ""), (Kind.ARITHMETIC,)),
    "issue of wgmma": ((_BLUE, ""), (Kind.ISSUE,)),
    "softmax": ((_GREEN, ""), (Kind.SOFTMAX,)),
    "epilogue": ((_PURPLE, ""), (Kind.EPILOGUE,)),
    "other": ((PALE, ""), (Kind.IN_BLOCK,)),
}
_GROUP = {kind: name for name, (_, kinds) in _GROUPS.items() for kind in kinds}
_IN_FLIGHT: Mapping[str, Fill] = {"copy in flight": (INK, ""), "wgmma in flight": (_LILAC, "")}
# Legend texts and styles of arrows. The key tells whether an arrow starts at a copy.
_ARROW_LOOKS: Mapping[bool, tuple[str, dict[str, Any]]] = {
    True: ("from a copy to the wait for it", {"color": INK, "linewidth": 0.6}),
    False: (
        "from the last reader of a buffer to the wait for it",
        {"color": "#8c959f", "linewidth": 0.6, "linestyle": (0, (3, 2))},
    ),
}
_PHASES = 75  # phases per warp shown at each end of a long timeline
_NARROW = 1 / 400  # bars narrower than this fraction of the axes are drawn without edges
_ARROWS = 80  # maximum number of arrows drawn
_LINE = 120  # characters per line of the text above a picture
_CHARACTER, _MARGIN = 0.0085, 0.004  # size of a character and margins, as fractions of the width


def draw(timeline: Timeline, path: str | Path, window: tuple[float, float] | None = None) -> None:
    """Draws a timeline to an .svg or .png file.

    The timeline of one block has a row for each warp, with copies and products in flight below the
    phases. Arrows lead from the start of a copy, and from a buffer's last reader, to the end of the
    wait for it. The timeline of all blocks has a row for each multiprocessor. ``window`` holds the
    first and last time to show. The default is the whole timeline or, if it is long, its beginning
    and its end.
    Raises ValueError for other suffixes and if the window is empty or outside the timeline, and
    Unsupported if matplotlib is not installed.
    """
    path = Path(path)
    check(path)
    if not timeline.phases:
        raise ValueError(f"there is nothing to plot: no warp of {timeline.entry} recorded anything")
    if window is not None and not window[0] < window[1]:
        raise ValueError(
            f"the window {window[0]:g}:{window[1]:g} is empty; its start must precede its end"
        )
    if window is not None and not (window[0] < timeline.end and window[1] > 0):
        raise ValueError(
            f"the window {window[0]:g}:{window[1]:g} lies outside the timeline, which runs from 0 "
            f"to {timeline.end:g} {timeline.unit}; choose a window within the timeline"
        )
    said = [
        *summary.lines(timeline),
        *(f"{x.phase} {x.share:.1f} %" for x in summary.shares(timeline)),
    ]
    figure = _block_figure if timeline.is_detailed else _grid_figure
    write(lambda: figure(timeline, window), path, f"Timeline of {timeline.entry}", "; ".join(said))


def _windows(timeline: Timeline, window: tuple[float, float] | None) -> list[tuple[float, float]]:
    if window is not None:
        return [window]
    counts: dict[int, int] = defaultdict(int)
    for x in timeline.phases:
        counts[x.warp] += 1
    most = max(counts.values())
    if most <= 2 * _PHASES:
        return [(0.0, timeline.end)]
    length = timeline.end * _PHASES / most
    return [(0.0, length), (timeline.end - length, timeline.end)]


def _block_figure(timeline: Timeline, window: tuple[float, float] | None) -> Any:
    windows = _windows(timeline, window)
    warps = sorted({warp for _, warp in summary.working(timeline)})
    row = 0.26 if len(warps) <= 12 else 0.2
    height = len(windows) * (row * len(warps) + 0.55)
    figure = new_figure(height)
    axes = figure.subplots(len(windows), 1, squeeze=False)[:, 0]
    figure.subplots_adjust(
        left=0.09, right=0.995, bottom=0.3 / height, top=1, hspace=0.55 / (row * len(warps))
    )
    for one, shown in zip(axes, windows):
        _draw_window(one, timeline, warps, shown)
    if len(windows) > 1:
        _mark_break(axes[0], axes[-1], timeline.unit)
    axes[-1].set_xlabel(timeline.unit)
    kinds = {x.is_copy for x in timeline.arrows if any(_is_shown(x, y) for y in windows)}
    arrows = [(name, look) for is_copy, (name, look) in _ARROW_LOOKS.items() if is_copy in kinds]
    _add_texts(figure, timeline, _legend(timeline, windows), arrows)
    return figure


def _is_shown(x: Span | Arrow, window: tuple[float, float]) -> bool:
    return x.end > window[0] and x.start < window[1]


def _mark_break(first: Any, second: Any, unit: str) -> None:
    """Marks the break between two axes with torn edges and the length of the omitted time."""
    torn: dict[str, Any] = {"marker": [(-0.5, -1), (0.5, 1)], "markersize": 9, "linestyle": "none"}
    torn |= {"color": INK, "markeredgewidth": 1, "clip_on": False, "zorder": 5}
    for axes, at in ((first, 1.0), (second, 0.0)):
        axes.plot([at - 0.003, at + 0.003], [0, 0], transform=axes.transAxes, **torn)
    left_out = second.get_xlim()[0] - first.get_xlim()[1]
    first.annotate(
        f"{summary.rounded(left_out)} {unit} are left out \N{RIGHTWARDS ARROW}",
        (1, 0),
        (0, -12),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=7,
        horizontalalignment="right",
        verticalalignment="top",
    )


def _draw_window(
    axes: Any, timeline: Timeline, warps: Sequence[int], shown: tuple[float, float]
) -> None:
    low, high = shown
    place = {warp: row for row, warp in enumerate(warps)}

    def seen(spans: Iterable[Span]) -> list[Span]:
        return [x for x in spans if x.warp in place and x.end > low and x.start < high]

    axes.set(xlim=shown, ylim=(len(warps) - 0.5, -0.5))
    phases = seen(timeline.phases)
    fills = _fills(timeline)
    _bars(axes, [(x, place[x.warp] - 0.38, 0.56, fills[_group(x)]) for x in phases])
    copies, products = _IN_FLIGHT.values()
    under = [(x, place[x.warp] + 0.22, 0.08, copies) for x in seen(timeline.copies)]
    under += [(x, place[x.warp] + 0.31, 0.1, products) for x in seen(timeline.products)]
    _bars(axes, under)
    _draw_arrows(axes, timeline, place, shown)
    for x in phases:
        length, name = min(x.end, high) - max(x.start, low), _short(x.name)
        if name and length > (_CHARACTER * len(name) + _MARGIN) * (high - low):
            axes.text(
                max(x.start, low) + length / 2,
                place[x.warp] - 0.1,
                name,
                fontsize=6,
                color="white" if fills[_group(x)][0] == _BLUE else "black",
                horizontalalignment="center",
                verticalalignment="center",
                clip_on=True,
            )
    axes.set_yticks(range(len(warps)), [f"warp {x}" for x in warps], fontsize=8)
    axes.tick_params(length=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.spines["left"].set_visible(False)


def _group(x: Span) -> str:
    if x.kind is Kind.MARKED:
        return x.name
    if x.kind is Kind.BARRIER_WAIT and x.name.endswith(" empty"):
        return _FREE
    return _GROUP[x.kind]


def _fills(timeline: Timeline) -> dict[str, Fill]:
    """Maps legend texts of phases to fills."""
    own = dict.fromkeys(x.name for x in timeline.phases if x.kind is Kind.MARKED)
    marks = {name: (colour, "") for name, colour in zip(own, cycle(_OWN))}
    return {**marks, **{name: fill for name, (fill, _) in _GROUPS.items()}}


def _short(name: str) -> str:
    """Abbreviates a phase's name for its bar, whose colour already shows the phase's kind."""
    short = name.removeprefix("wait: ").replace("named barrier", "bar").replace("__", "")
    return {"other": "", "wgmma": ""}.get(short, short)


def _bars(axes: Any, bars: Sequence[tuple[Span, float, float, Fill]]) -> None:
    """Draws each (span, top, height, fill) as a rectangle.

    For speed, all rectangles with the same fill form one path.

    The limits of the axes must already be set.
    """
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Line

    codes = (Line.MOVETO, Line.LINETO, Line.LINETO, Line.LINETO, Line.CLOSEPOLY)
    found: dict[tuple[Fill, bool], list[tuple[float, float]]] = defaultdict(list)
    low, high = axes.get_xlim()
    for x, top, height, fill in bars:
        bottom, own = top + height, found[fill, x.length < _NARROW * (high - low)]
        own += [(x.start, top), (x.end, top), (x.end, bottom), (x.start, bottom), (x.start, top)]
    for ((colour, hatch), is_narrow), corners in found.items():
        path = Line(corners, codes * (len(corners) // len(codes)))
        edge: dict[str, Any] = {"linewidth": 0, "snap": False} if is_narrow else {"linewidth": 0.15}
        edge |= {"edgecolor": "white", "hatch": hatch}
        axes.add_patch(PathPatch(path, facecolor=colour, **edge))


def _draw_arrows(
    axes: Any, timeline: Timeline, place: Mapping[int, int], shown: tuple[float, float]
) -> None:
    """Draws the arrows that overlap the window, or every n-th arrow if there are too many."""
    from matplotlib.patches import FancyArrowPatch

    low, high = shown
    there = [
        x
        for x in timeline.arrows
        if x.start_warp in place and x.end_warp in place and low < x.end and x.start < high
    ]
    step = -(-len(there) // _ARROWS)
    in_order = sorted(there, key=lambda x: x.start)
    kinds = [[x for x in in_order if x.is_copy == is_copy] for is_copy in (True, False)]
    found = [x for own in kinds for x in own[:: step or 1]]
    for x in found:
        axes.add_patch(
            FancyArrowPatch(
                (x.start, place[x.start_warp] + 0.2),
                (x.end, place[x.end_warp] - 0.1),
                arrowstyle="-|>,head_length=0.25,head_width=0.12",
                mutation_scale=9,
                shrinkA=0,
                shrinkB=0,
                **_ARROW_LOOKS[x.is_copy][1],
            )
        )
    if len(found) < len(there):
        text = f"{len(found)} of {len(there)} arrows are shown"
        where: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
        where |= {"horizontalalignment": "right", "verticalalignment": "top"}
        axes.annotate(text, (1, 0), (0, -22), fontsize=7, **where)


def _legend(timeline: Timeline, windows: Sequence[tuple[float, float]]) -> list[tuple[str, Fill]]:
    """Returns the legend texts and fills that occur in a picture."""

    def shown(x: Span) -> bool:
        return any(_is_shown(x, window) for window in windows)

    groups = {_group(x) for x in timeline.phases if shown(x)}
    found = [x for x in _fills(timeline).items() if x[0] in groups]
    spans = (timeline.copies, timeline.products)
    return found + [x for x, own in zip(_IN_FLIGHT.items(), spans) if any(map(shown, own))]


def _add_texts(
    figure: Any,
    timeline: Timeline,
    legend: Sequence[tuple[str, Fill]],
    arrows: Sequence[tuple[str, dict[str, Any]]] = (),
) -> None:
    """Adds a summary above the picture, and a legend of colours and arrows below it."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    height = figure.get_figheight()
    text = [part for line in summary.lines(timeline) for part in wrap(line, _LINE)]
    figure.text(0.0, 1 + (0.17 * len(text) - 0.02) / height, text[0], fontsize=9, fontweight="bold")
    for number, line in enumerate(text[1:], 1):
        figure.text(0.0, 1 + (0.17 * (len(text) - number) - 0.02) / height, line, fontsize=8)
    figure.legend(
        handles=[
            Patch(facecolor=colour, hatch=hatch, edgecolor="white" if hatch else INK, linewidth=0.3)
            for _, (colour, hatch) in legend
        ]
        + [Line2D([], [], marker=">", markersize=3, **look) for _, look in arrows],
        labels=[name for name, _ in (*legend, *arrows)],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.02),
        ncols=3 if arrows else 4,
        fontsize=8,
        frameon=False,
        handlelength=1.4,
    )


# All blocks

_GRID: tuple[tuple[str, Fill], ...] = (
    ("a block or a task", (_BLUE, "")),
    ("the next block or task", (_SKY, "")),
    ("epilogue", (_PURPLE, "")),
    ("other warps of the block", (PALE, "")),
)


def _grid_figure(timeline: Timeline, window: tuple[float, float] | None) -> Any:
    """Draws a row for each multiprocessor; blocks that run at the same time get separate lanes.

    In the simulator each block has its own row.
    """
    rows = summary.rows_of_blocks(timeline)
    places = sorted({place for place, _ in rows.values()})
    lanes = 1 + max(lane for _, lane in rows.values())
    height = max(2.0, min(8.0, 0.3 * len(places) * lanes))
    figure = new_figure(height)
    axes = figure.subplots()
    figure.subplots_adjust(left=0.09, right=0.995, bottom=0.3 / height, top=1)
    order = {place: number for number, place in enumerate(places)}

    def place_of(block: int) -> tuple[float, float]:
        place, lane = rows[block]
        return order[place] + lane / lanes - 0.45, 0.9 / lanes

    bars = [
        (Span(block, 0, Kind.IN_BLOCK, "", *whole), *place_of(block), (PALE, ""))
        for block, whole in summary.extents(timeline).items()
    ]
    tasks: dict[int, int] = defaultdict(int)
    last_kind: dict[int, Kind] = {}
    warp_of, fills = summary.busiest_warps(timeline), _fills(timeline)
    for x in timeline.phases:
        if x.warp != warp_of[x.block]:
            continue
        if x.kind is not Kind.EPILOGUE and last_kind.get(x.block) is Kind.EPILOGUE:
            tasks[x.block] += 1
        last_kind[x.block] = x.kind
        shade = (x.block + tasks[x.block]) % 2
        fill = fills[_group(x)] if x.kind is not Kind.IN_BLOCK else ((_BLUE, _SKY)[shade], "")
        bars.append((x, *place_of(x.block), fill))
    axes.set(xlim=window or (0, timeline.end), ylim=(len(places) - 0.5, -0.5))
    _bars(axes, bars)
    step, row = max(1, len(places) // 12), "block" if timeline.in_steps else "SM"
    axes.set_yticks(range(0, len(places), step), [f"{row} {x}" for x in places[::step]], fontsize=8)
    axes.tick_params(length=0)
    axes.set_xlabel(timeline.unit)
    drawn = {fill for *_, fill in bars}
    own = {x.name: fills[x.name] for x in timeline.phases if x.kind is Kind.MARKED}
    _add_texts(figure, timeline, [x for x in (*_GRID, *own.items()) if x[1] in drawn])
    return figure
