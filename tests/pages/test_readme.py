"""The README and the pages in docs: tables match the records, translations match the originals."""

import re
import runpy

from click.testing import CliRunner

from cupyfa.ladder import LADDER
from cupyfa.planner.source import ROOT

README, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
DOCS = ROOT / "docs"
TRANSLATIONS = sorted((DOCS / "zh").rglob("*.md"))
ORIGINALS = {x: DOCS / x.relative_to(DOCS / "zh") for x in TRANSLATIONS}
PAIRS = [(README, CHINESE), *((ORIGINALS[x], x) for x in TRANSLATIONS if x.name != "README.md")]
KERNELS = [(operation, name) for operation in LADDER for name in LADDER[operation]]
LINK = re.compile(r"\]\((?!http)([^)#]+)")
# Structure that a page and its translation share outside code: a pattern, and how to compare it.
STRUCTURE = {
    "headings": (r"^(#+) (?=\D)", list),
    "marks": (r"^<!-- (?!index:).* -->$", list),
    "tables": (r"^\| --- .*", len),  # the Chinese ladder has fewer columns
    "lists": (r"^- ", list),
}


def read(page):
    return page.read_text(encoding="utf-8")


def marked(text, name):
    """Returns the text between the markers of a name."""
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->\n", text, re.S)
    assert found, f"there are no markers {name}"
    return found[1]


def code(text):
    """Returns the fenced blocks with their kinds, without comment lines."""
    return re.findall(r"^```.*?^```$", re.sub(r"^# .*\n", "", text, flags=re.M), re.M | re.S)


def without_code(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def targets(page):
    """Returns the files that a page links to, with English pages in place of translations."""
    links = ((page.parent / link).resolve() for link in LINK.findall(without_code(read(page))))
    english = {CHINESE: README, **ORIGINALS}
    english |= {x: x.with_name(x.name.replace(".zh", "")) for x in (DOCS / "pictures").iterdir()}
    return {english.get(link, link) for link in links} - {README}


def test_the_readme_is_short():
    assert all(len(read(page).splitlines()) <= 150 for page in (README, CHINESE))


def test_the_ladder_matches_the_records():
    main = runpy.run_path(str(ROOT / "cli.py"))["main"]
    table = CliRunner().invoke(main, ["list", "--format", "md", "--backend", "simulator"]).stdout
    shown = marked(read(DOCS / "ladder.md"), "ladder")
    assert shown == table, "paste the output of: cupyfa list --format md"


def test_the_translated_ladder_has_the_same_rungs():
    table = marked(read(DOCS / "zh" / "ladder.md"), "ladder")
    rows = re.findall(r"^\| ([a-z]+) \| ([a-z0-9_]+) \| ", table, re.M)
    assert rows == KERNELS, "add the kernel to docs/zh/ladder.md, with its idea in Chinese"


def test_measurements_are_the_same_in_both():
    pages = [read(DOCS / "ladder.md"), read(DOCS / "zh" / "ladder.md")]
    for operation in ("forward", "backward"):
        english, chinese = (marked(page, f"measured {operation}") for page in pages)
        assert english == chinese


def test_the_code_is_the_same_in_both():
    for page, translation in PAIRS:
        english, chinese = read(page), read(translation)
        assert code(english) == code(chinese), translation
        inline = [{*re.findall(r"`(?:cupyfa|pip) [^`]+`", text)} for text in (english, chinese)]
        assert inline[0] - {"`cupyfa list --format md`"} == inline[1] - {
            "`cupyfa list --format md`"
        }, translation


def test_the_structure_is_the_same_in_both():
    for page, translation in PAIRS:
        texts = without_code(read(page)), without_code(read(translation))
        for name, (pattern, compared) in STRUCTURE.items():
            english, chinese = (compared(re.findall(pattern, text, re.M)) for text in texts)
            assert english == chinese, f"{name} of {translation}"


def test_the_links_are_the_same_in_both():
    different = {}
    for page, translation in PAIRS:
        if missing := targets(page) ^ targets(translation):
            different[translation.name] = missing
    assert different in ({}, {"ladder.md": {DOCS / "ladder.md"}})  # fewer columns in Chinese


def test_the_readmes_link_to_each_other():
    assert f"]({CHINESE.name})" in read(README).split("\n## ")[0]
    assert f"]({README.name})" in read(CHINESE).split("\n## ")[0]


def test_the_example_of_the_readme_is_the_one_that_make_runs():
    example = read(ROOT / "examples" / "attention.py")
    assert f"<!-- attention.py -->\n```python\n{example}```\n" in read(README)
    assert "python examples/attention.py" in read(ROOT / "Makefile")


def test_the_requirements_of_cuda_13_are_every_dependency():
    """With CUDA 13, pip does not install pyproject.toml's dependencies, which are for CUDA 12."""
    project = read(ROOT / "pyproject.toml")
    dependencies = re.search(r"^dependencies = \[\n(.*?)^\]", project, re.M | re.S)
    expected = set()
    for dependency in re.findall(r'"(.+?)"', dependencies[1]):
        name = dependency.replace("cuda12x", "cuda13x")
        expected.add(name.partition("-cu12")[0] + "==13.*" if "-cu12" in name else name)
    lines = read(ROOT / "requirements-cuda13.txt").splitlines()
    assert {line for line in lines if not line.startswith("#")} == expected


def test_links_have_targets():
    pages = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
    broken = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in LINK.findall(without_code(read(page)))
        if not (page.parent / link).exists()
    ]
    assert not broken
