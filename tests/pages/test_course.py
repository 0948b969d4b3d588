"""The pages of the course: one outline, few words, and code that is in the sources."""

import re
from itertools import pairwise

import pytest

from cupyfa.planner.source import KERNELS, ROOT

DOCS = ROOT / "docs"
STEPS = re.findall(r"^\| \d+ \| \[(\w+)\]", (DOCS / "course.md").read_text("utf-8"), re.M)
OUTLINE = ["Idea", "Why it is faster", "Mapping", "The change", "Measured", "Exercises", "Next"]
MOST_WORDS = 800
MOST_ROWS = 4  # maximum number of rows in a table of measurements
WIDEST_DRAWING = 84


def read(name):
    return (DOCS / "rungs" / f"{name}.md").read_text("utf-8")


def headings(text):
    return re.findall(r"^## (.+)$", text, re.M)


@pytest.mark.parametrize("name", STEPS)
def test_a_page_has_the_outline_and_few_words(name):
    text = read(name)
    assert headings(text) == OUTLINE
    prose = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.M | re.S)
    assert len(prose.split()) <= MOST_WORDS
    measured = text.split("## Measured")[1].split("## Exercises")[0]
    tables = re.findall(r"(?:^\|.*\n)+", measured, re.M)
    assert all(len(table.splitlines()) - 2 <= MOST_ROWS for table in tables)


def sources():
    files = [*KERNELS.rglob("*.cu"), *KERNELS.rglob("*.cuh")]
    return {line.strip() for file in files for line in file.read_text().splitlines()}


@pytest.mark.parametrize("name", [x.stem for x in sorted((DOCS / "rungs").glob("*.md"))])
def test_every_line_of_code_on_a_page_is_in_the_sources(name):
    shown = "".join(re.findall(r"^```cuda\n(.*?)^```$", read(name), re.M | re.S))
    lines = {line.strip() for line in shown.splitlines()} - {"", "…", "// …"}
    assert not lines - sources()


@pytest.mark.parametrize("name", STEPS)
def test_drawings_fit_a_column(name):
    blocks = re.findall(r"^```(.*)\n((?:.*\n)*?)```$", read(name), re.M)
    drawings = "".join(code for kind, code in blocks if not kind)
    assert max(map(len, drawings.splitlines()), default=0) <= WIDEST_DRAWING


def test_the_site_lists_the_steps_in_their_order():
    index = (DOCS / "index.md").read_text("utf-8")
    for folder in ("", "zh/"):
        assert re.findall(rf"^{folder}rungs/(\w+)$", index, re.M) == STEPS


def test_each_page_links_to_the_next():
    for name, following in pairwise(STEPS):
        assert f"]({following}.md)" in read(name).split("## Next")[1]
