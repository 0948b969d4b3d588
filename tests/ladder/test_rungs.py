"""Every rung has a page in a fixed format, whose numbers match the planner and the record."""

import math
import re

import pytest

from cupyfa.lab.analysis import resources as compiling
from cupyfa.lab.bench import sweeps
from cupyfa.ladder import LADDER
from cupyfa.planner import choose_kernel as planning
from cupyfa.planner.source import ROOT
from cupyfa.problem.problem import Problem

PAGES = ROOT / "docs" / "rungs"
RECORDS = ROOT / "docs" / "records"
RUNGS = [kernel for kernels in LADDER.values() for kernel in kernels.values()]
HEADINGS = ["Idea", "Mapping", "Worked example", "The ancestor", "Measured", "In a profile", "Next"]
OPTIONAL = {"The ancestor", "In a profile"}
EACH_RUNG = pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
H100 = compiling.limits_of("90")


def page(rung):
    return (PAGES / f"{rung.name}.md").read_text(encoding="utf-8")


def records(rung):
    """Returns the text of the rung's page in docs/records, or "" if there is none.

    For rungs of the course, that page holds most of the numbers.
    """
    file = RECORDS / f"{rung.name}.md"
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def optional(rung):
    """Returns the headings that a page may lack, including those of its records."""
    return OPTIONAL | {*re.findall(r"^## (.*)$", records(rung), re.M)}


def part(rung, heading):
    """Returns the text below a heading of a rung's page or of its records."""
    text = page(rung) + "\n" + records(rung)
    return re.split(rf"^## {heading}\n", text, flags=re.M)[1].partition("\n## ")[0]


def table(text):
    """Returns the first table's heading and rows, as lists of cells."""
    lines = re.search(r"(?:^\|.*\n?)+", text, re.M)[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len({len(row) for row in rows}) == 1, "every row has as many cells"
    return rows[0], rows[2:]


def counters_of_the_index():
    """Returns the counters that the index explains, with their units, in order."""
    text = (PAGES / "README.md").read_text(encoding="utf-8")
    return [row[0] for row in table(text.split("## How to read a profile")[1])[1]]


def problems(column, dtype="float32"):
    """Returns the problems to which a column heading, such as "d = 64", refers."""
    if column == "16384 rows of 4096":
        return [Problem.of_row_sizes(16384, 4096, "float32")]
    sizes = (64, 1024) if column == "any d" else (int(re.fullmatch(r"d = (\d+)", column)[1]),)
    return [Problem.of_sizes(batch=4, heads=16, M=2048, d=d, dtype=dtype) for d in sizes]


def worked(cell):
    """Returns the value of "4·(2 + 1) = 12" or "12"; both sides of an equation must be equal."""
    sides = cell.replace(",", "").replace("·", "*").split(" = ")
    assert all(re.fullmatch(r"[\d +*/()]+", side) for side in sides), cell
    values = {eval(side) for side in sides}
    assert len(values) == 1, cell
    return values.pop()


@EACH_RUNG
def test_a_page_has_all_parts_in_order(rung):
    text = page(rung)
    assert text.startswith(f"# {rung.name}\n")
    found = re.findall(r"^## (.*)$", text, re.M)
    if "Why it is faster" not in found:  # pages of the course: tests/pages/test_course.py
        assert found == [x for x in HEADINGS if x in found or x not in optional(rung)]
    assert all(part(rung, heading).strip() for heading in found)


@EACH_RUNG
def test_worked_numbers_are_those_of_planning(rung):
    head, rows = table(part(rung, "Worked example"))
    assert [row[0] for row in rows] == ["tile", "grid", "threads", "shared bytes", "scratch bytes"]
    for column, name in enumerate(head[1:], 1):
        tile, *numbers = (row[column] for row in rows)
        for problem in problems(name, sweeps.usual_dtype(rung)):
            plan = planning.plan(rung, problem, H100)
            listed = " ".join(f"{key}={value}" for key, value in plan.constants.items())
            assert tile == (listed or "none")
            mine = [x for x in plan.launches if x.entry.startswith(rung.name)]
            launch = (mine or plan.launches)[0]
            planned = (math.prod(launch.grid), launch.threads, launch.shared_bytes)
            assert [worked(x) for x in numbers] == [*planned, plan.scratch_bytes]


@pytest.mark.parametrize(
    "rung",
    [x for x in RUNGS if re.search(r"^\| counter ", page(x) + records(x), re.M)],
    ids=lambda rung: rung.name,
)
def test_a_page_explains_counters_by_their_names_and_units(rung):
    columns = ["counter", "predicted", "because"]
    head, rows = table(part(rung, "In a profile"))
    assert head in (columns, [*columns, "measured"])
    explained = [x for x in counters_of_the_index() if x in {row[0] for row in rows}]
    assert explained == [row[0] for row in rows], "order"


@EACH_RUNG
def test_predictions_are_for_a_problem_that_the_page_works_out(rung):
    columns = table(part(rung, "Worked example"))[0][1:]
    (standard,) = sweeps.problems(rung.operation, {}, rung)
    assert any(standard in problems(x, sweeps.usual_dtype(rung)) for x in columns)


def test_the_index_names_every_rung():
    text = (PAGES / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \[(\w+)\]\(\1\.md\)", text, re.M) == [rung.name for rung in RUNGS]
