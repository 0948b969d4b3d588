"""The README: its table comes from the records, and the translation matches it."""

import re
import runpy

import pytest
from click.testing import CliRunner

from cupyfa.ladder import LADDER
from cupyfa.planner.source import ROOT

README, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
ENGLISH, TRANSLATION = (page.read_text(encoding="utf-8") for page in (README, CHINESE))
KERNELS = [(operation, name) for operation in LADDER for name in LADDER[operation]]
LINK = re.compile(r"\]\((?!http)([^)#]+)")


def marked(text, name):
    """The text between the markers of a name."""
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->\n", text, re.S)
    assert found, f"there are no markers {name}"
    return found[1]


def code(text):
    """The fenced blocks with their kinds, without the comments of commands."""
    return re.findall(r"^```.*?^```$", re.sub(r"^# .*\n", "", text, flags=re.M), re.M | re.S)


def test_the_ladder_matches_the_records():
    main = runpy.run_path(str(ROOT / "cli.py"))["main"]
    table = CliRunner().invoke(main, ["list", "--format", "md", "--backend", "simulator"]).stdout
    assert marked(ENGLISH, "ladder") == table, "paste the output of: cupyfa list --format md"


def test_the_translated_ladder_has_the_same_rungs():
    rows = re.findall(r"^\| ([a-z]+) \| ([a-z0-9_]+) \| ", marked(TRANSLATION, "ladder"), re.M)
    assert rows == KERNELS, "add the kernel to README.zh-CN.md, with its idea in Chinese"


def test_measurements_are_the_same_in_both():
    assert marked(ENGLISH, "measured forward") == marked(TRANSLATION, "measured forward")


def test_the_code_is_the_same_in_both():
    assert code(ENGLISH) == code(TRANSLATION)
    in_text = [set(re.findall(r"`(?:cupyfa|pip) [^`]+`", text)) for text in (ENGLISH, TRANSLATION)]
    assert in_text[0] == in_text[1]


@pytest.mark.parametrize(
    "what",
    [r"^#+ (?=\D)", r"^<!-- .* -->$", r"^\| --- .*", r"^- ", r"\]\((?!README)([^)]+)"],
    ids=["headings", "marks", "tables", "lists", "links"],
)
def test_the_structure_is_the_same_in_both(what):
    english, translation = (
        re.findall(what, re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
        for text in (ENGLISH, TRANSLATION)
    )
    if what.startswith(r"^\|"):
        english, translation = len(english), len(translation)  # the ladder has fewer columns there
    assert english == translation


def test_the_readmes_link_to_each_other():
    assert f"]({CHINESE.name})" in ENGLISH.split("\n## ")[0]
    assert f"]({README.name})" in TRANSLATION.split("\n## ")[0]


def test_ci_finds_what_it_runs():
    for name in ("run", "test", "cuda13"):
        assert marked(ENGLISH, name).startswith("```sh\npip install")


def test_the_recipe_for_cuda_13_names_every_dependency():
    """Its packages are installed without the dependencies of pyproject.toml, so it repeats them."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    dependencies = re.search(r"^dependencies = \[\n(.*?)^\]", project, re.M | re.S)[1]
    named = set(re.findall(r'"(.+?)"', marked(ENGLISH, "cuda13")))
    for dependency in re.findall(r'"(.+?)"', dependencies):
        expected = dependency.replace("cuda12x", "cuda13x")
        if "-cu12" in expected:
            expected = expected.partition("-cu12")[0] + "==13.*"
        assert expected in named


@pytest.mark.parametrize(
    "page, link",
    [(page, link) for page in PAGES for link in LINK.findall(page.read_text(encoding="utf-8"))],
    ids=lambda x: str(x.relative_to(ROOT)) if hasattr(x, "relative_to") else x,
)
def test_links_have_targets(page, link):
    assert (page.parent / link).exists()
