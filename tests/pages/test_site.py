"""The documentation site: no warnings, no missing pages, no broken links, usable offline."""

import json
import re
import runpy
import subprocess
import sys
from collections import defaultdict
from html.parser import HTMLParser
from shutil import which
from urllib.parse import quote, unquote, urlsplit

import click
import pytest

import cupyfa
from cupyfa.ladder import LADDER
from cupyfa.planner.source import ROOT


def test_the_reference_names_everything_public_once():
    files = (ROOT / "docs" / "reference").glob("*.rst")
    described = re.findall(
        r"^\.\. auto\w+:: (\w+)$", "\n".join(x.read_text("utf-8") for x in files), re.M
    )
    assert sorted(described) == sorted(cupyfa.__all__), "describe new names in docs/reference"
    assert set(cupyfa.__all__) <= set(dir(cupyfa))


class Page(HTMLParser):
    """Links and anchors of a page of the site."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links, self.loaded = set(), set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors |= {given.get("id"), given.get("name")}
        self.links |= {given["href"]} if tag == "a" and "href" in given else set()
        self.loaded |= {given["src"]} if "src" in given else set()
        self.loaded |= {given["href"]} if tag == "link" and "href" in given else set()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("sphinx", reason="pip install -e '.[docs]'")
    built = tmp_path_factory.mktemp("site")
    options = ["-W", "--keep-going", "-E", "-q", "-d", built / "doctrees"]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, ROOT / "docs", built / "html"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return built / "html"


@pytest.fixture(scope="module")
def site(folder):
    return {
        str(file.relative_to(folder)): Page(file.read_text(encoding="utf-8"))
        for file in sorted(folder.rglob("*.html"))
    }


def test_every_page_is_in_the_table_of_contents():
    docs = ROOT / "docs"
    index = (docs / "index.md").read_text("utf-8")
    listed = {*re.findall(r"^(?:.+ <)?([\w/-]+)>?$", index, re.M), "index"}
    pages = {x.relative_to(docs).with_suffix("").as_posix() for x in docs.rglob("*.md")}
    others = {x for x in pages if not x.startswith(("rungs/", "records/"))}
    assert others <= listed, "add pages to docs/index.md"


def test_the_notebook_of_the_course_follows_its_exercises():
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    course = index.split(":caption: The course\n")[1].split("```")[0].split()
    assert course[-2:] == ["exercises", "colab"]


@pytest.mark.slow
def test_every_page_is_in_it(site):
    pages = {str(x.relative_to(ROOT / "docs").with_suffix("")) for x in ROOT.glob("docs/**/*.md")}
    rungs = {f"rungs/{name}" for operation in LADDER.values() for name in operation}
    assert pages | rungs <= {name.removesuffix(".html") for name in site}


@pytest.mark.slow
def test_every_public_name_is_described(site):
    assert {f"cupyfa.{name}" for name in cupyfa.__all__} <= {
        x for page in site.values() for x in page.anchors
    }


def anchors(command, path):
    """Yields the anchors of a command, its options and its subcommands."""
    yield path
    options = (x for x in command.params if isinstance(x, click.Option) and not x.hidden)
    yield from (f"cmdoption-{path}-{option.opts[-1].lstrip('-')}" for option in options)
    for name, inner in getattr(command, "commands", {}).items():
        yield from anchors(inner, f"{path}-{name}")


@pytest.mark.slow
def test_every_command_is_described_with_its_options(site):
    """Each command's page lists its options, except options that the page of `run` describes."""
    main = runpy.run_path(str(ROOT / "cli.py"))["main"]
    shared = {
        x.replace("cupyfa-run", "{}") for x in site["reference/commands/run.html"].anchors if x
    }
    for name, command in main.commands.items():
        path = f"cupyfa-{name}"
        described = site[f"reference/commands/{name}.html"].anchors
        missing = {*anchors(command, path)} - described
        assert {x.replace(path, "{}") for x in missing} <= shared, name


@pytest.mark.slow
def test_no_link_is_broken(site, folder):
    for name, page in site.items():
        for link in page.links | page.loaded:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "data"):
                continue
            target = (folder / name).parent / unquote(parts.path) if parts.path else folder / name
            assert target.resolve().is_file(), f"{name} links to {link}"
            inside = site.get(str(target.resolve().relative_to(folder.resolve())))
            if parts.fragment and inside:
                assert unquote(parts.fragment) in inside.anchors, f"{name} links to {link}"


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(site, folder):
    for name, page in site.items():
        assert not [x for x in page.loaded if re.match(r"(https?:)?//", x)], name
    for style in folder.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", style.read_text("utf-8")), (
            style
        )


@pytest.mark.slow
def test_search_finds_words_of_pages(folder):
    script = (folder / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(script.removeprefix("Search.setIndex(").removesuffix(")"))
    found = defaultdict(set)
    for words in (index["terms"], index["titleterms"]):
        for word, pages in words.items():
            pages = pages if isinstance(pages, list) else [pages]
            found[word] |= {index["docnames"][page] for page in pages}
    assert "semantics" in found["softcap"] and "rungs/mma_swizzled" in found["swizzl"]


@pytest.mark.slow
def test_headers_are_pages_and_includes_link_to_them(site):
    assert "source/kernels/include/tile/swizzle.cuh.html" in site
    kernel = site["source/kernels/forward/fa2.cu.html"]
    assert "../include/attention/online_softmax.cuh.html" in kernel.links


def first_found(folder, words):
    """Returns the first page that the site's search lists for these words."""
    found = subprocess.run(
        [
            "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
        ]
        + ["--virtual-time-budget=20000", "--dump-dom"]
        + [f"file://{folder}/search.html?q={quote(words)}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    return re.search(r'<li class="kind-\w+"><a href="(.+?)\.html', found)[1]


@pytest.mark.slow
@pytest.mark.skipif(not which("chromium"), reason="needs chromium")
@pytest.mark.parametrize(
    "words, page",
    [
        ("warp specialization", "rungs/wgmma"),
        ("varlen", "ragged"),
        ("ping-pong", "rungs/wgmma_overlap"),
        ("bank conflict", "rungs/mma_swizzled"),
        ("tile scheduler", "rungs/wgmma_persistent"),
        ("double buffering", "rungs/mma_async"),
    ],
)
def test_the_search_finds_words_first_where_they_are_taught(folder, words, page):
    assert first_found(folder, words) == page
