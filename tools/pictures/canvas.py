"""A canvas that is 400 units wide and is written as an SVG file with a light and a dark theme.

Text is stored as text rather than outlines, so that it can be searched, selected and read aloud.
A picture of 400 units fits a phone with text of 10 pixels; wider pages scale the picture up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from xml.etree.ElementTree import Element, SubElement, indent, tostring

WIDTH = 400
SIZE = 12  # default font size
# Colours in the light and in the dark theme. "a" to "d" fill areas with text. Colour-blind readers
# can distinguish them too, and the text names each area.
THEMES = {
    "paper": ("#ffffff", "#131416"),
    "ink": ("#1f2328", "#dfe3e8"),
    "pale": ("#d0d7de", "#444c56"),
    "plain": ("#eef1f4", "#262b31"),
    "a": ("#a9cdfb", "#1d4f91"),
    "b": ("#fdc48f", "#8a4b08"),
    "c": ("#b5dfae", "#2d6a32"),
    "d": ("#dcc3f2", "#5b3a86"),
    "alert": ("#c9252d", "#ff7b72"),
}
_STYLE = "".join(
    f".{name}{{fill:{light};fill:light-dark({light},{dark})}}"
    f".line-{name}{{stroke:{light};stroke:light-dark({light},{dark});fill:none}}"
    f".edge-{name}{{stroke:{light};stroke:light-dark({light},{dark})}}"
    for name, (light, dark) in THEMES.items()
)
_FONTS = "Verdana,'DejaVu Sans','Noto Sans CJK SC','PingFang SC','Microsoft YaHei',sans-serif"


@dataclass
class Canvas:
    """Shapes of a picture in one language, "en" or "zh"; y grows downwards."""

    name: str
    language: str
    height: float = 0.0
    shapes: list[Element] = field(default_factory=list)
    texts: list[tuple[float, float, float, str]] = field(default_factory=list)

    def say(self, english: str, chinese: str) -> str:
        """Returns the text in the picture's language."""
        return english if self.language == "en" else chinese

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = "plain",
        text: str = "",
        *,
        size: float = SIZE,
        edge: str | None = "pale",
    ) -> None:
        """Draws a rectangle with centred lines of text."""
        shape = self._add("rect", x=x, y=y, width=width, height=height)
        shape.set("class", f"{fill} edge-{edge}" if edge else fill)
        lines = text.split("\n") if text else []
        top = y + height / 2 - (len(lines) - 1) * size * 0.6
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + number * size * 1.2 + size * 0.35, line, size=size)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: str = "middle",
        size: float = SIZE,
        colour: str = "ink",
        bold: bool = False,
    ) -> None:
        """Writes a line of text on the baseline y; anchor is start, middle or end."""
        shape = self._add("text", x=x, y=y)
        shape.set("class", colour)
        if anchor != "start":
            shape.set("text-anchor", anchor)
        if size != SIZE:
            shape.set("font-size", f"{size:g}")
        if bold:
            shape.set("font-weight", "bold")
        shape.text = text
        width = text_width(text, size)
        left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * width
        self.texts.append((left, left + width, y, text))
        self._reach(y + 0.3 * size)

    def line(
        self,
        *points: Sequence[float],
        colour: str = "ink",
        width: float = 1.2,
        arrow: bool = False,
        dashed: bool = False,
    ) -> None:
        """Draws a line through points, optionally with an arrowhead at the last point."""
        shape = self._add("polyline")
        shape.set("points", " ".join(f"{x:g},{y:g}" for x, y in points))
        shape.set("class", f"line-{colour}")
        shape.set("stroke-width", f"{width:g}")
        if arrow:
            shape.set("marker-end", f"url(#{self.name}-head)")
        if dashed:
            shape.set("stroke-dasharray", "4 3")
        self._reach(max(y for _, y in points))

    def legend(self, y: float, entries: Iterable[tuple[str, str]], x: float = 8) -> float:
        """Draws a row of coloured boxes with their meanings; returns the y below it."""
        for fill, meaning in entries:
            width = 16 + text_width(meaning, 11) + 12
            if x + width > WIDTH and x > 8:
                x, y = 8, y + 17
            self.box(x, y, 11, 11, fill)
            self.text(x + 16, y + 10, meaning, anchor="start", size=11)
            x += width
        return y + 20

    def svg(self, title: str, description: str) -> str:
        """Returns the SVG text; screen readers read out `title` and `description`."""
        root = Element("svg", xmlns="http://www.w3.org/2000/svg", role="img")
        root.set("viewBox", f"0 0 {WIDTH} {self.height + 8:g}")
        root.set("class", "picture")
        root.set("font-family", _FONTS)
        root.set("font-size", str(SIZE))
        SubElement(root, "title").text = title
        SubElement(root, "desc").text = description
        SubElement(root, "style").text = f":root.picture{{color-scheme:light dark}}{_STYLE}"
        head = SubElement(
            SubElement(root, "defs"),
            "marker",
            {"id": f"{self.name}-head", "viewBox": "0 0 8 8", "refX": "7", "refY": "4"},
            markerWidth="7",
            markerHeight="7",
            orient="auto",
        )
        SubElement(head, "path", {"d": "M0,0 L8,4 L0,8 z", "class": "ink"})
        background = {"width": str(WIDTH), "height": f"{self.height + 8:g}", "class": "paper"}
        SubElement(root, "rect", background)
        root.extend(self.shapes)
        indent(root, " ")
        return tostring(root, encoding="unicode") + "\n"

    def _add(self, tag: str, **places: float) -> Element:
        shape = Element(tag, {name: f"{value:g}" for name, value in places.items()})
        self.shapes.append(shape)
        self._reach(places.get("y", 0.0) + places.get("height", 0.0))
        return shape

    def _reach(self, y: float) -> None:
        self.height = max(self.height, y)


def text_width(text: str, size: float) -> float:
    """Estimates a line's width: `size` for Chinese characters, 0.58 * `size` for all others."""
    return size * sum(1.0 if ord(letter) > 0x2E7F else 0.58 for letter in text)
