"""Checks that the texts of a figure are readable."""

from itertools import combinations
from unittest import mock

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text


def assert_readable(figure):
    """Asserts that no text overlaps another text or a marker, and that labels are in their axes.

    Returns the texts that are drawn, without the texts of ticks outside the axes.
    """
    boxes = {}
    draw = Text.draw

    def record(text, renderer):
        if text.get_visible() and text.get_text().strip():
            boxes[text] = Text.get_window_extent(text, renderer)
        draw(text, renderer)

    with mock.patch.object(Text, "draw", record):
        FigureCanvasAgg(figure).draw()
    for (one, a), (other, b) in combinations(boxes.items(), 2):
        assert not a.overlaps(b), f"{one} {a} overlaps {other} {b}"
    for axes in figure.axes:
        for label in axes.texts:
            box = boxes[label]
            assert axes.bbox.y0 - 1 < box.y0 and box.y1 < axes.bbox.y1 + 1, f"{label} is outside"
        marked = [line for line in axes.lines if line.get_marker() not in ("", "None")]
        for line in marked:
            for x, y in axes.transData.transform(line.get_xydata()):
                covering = [text for text, box in boxes.items() if box.contains(x, y)]
                assert not covering, f"{covering} cover a mark"
    return {text.get_text() for text in boxes}
