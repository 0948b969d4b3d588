"""Draws the pictures of the course: ``python tools/pictures`` writes docs/pictures."""

from __future__ import annotations

from canvas import Canvas
from drawings import DOCS, PICTURES

FOLDER = DOCS / "pictures"


def files() -> dict[str, str]:
    """Returns the content of each file in docs/pictures, in English and in Chinese."""
    found = {}
    for name, (draw, *titles) in PICTURES.items():
        for language, title in zip(("en", "zh"), titles):
            canvas = Canvas(name, language)
            description = draw(canvas)
            suffix = ".svg" if language == "en" else f".{language}.svg"
            found[name + suffix] = canvas.svg(title, description)
    return found


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, content in files().items():
        (FOLDER / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
