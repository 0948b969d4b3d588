"""Settings of Sphinx; ``sphinx-build -W docs docs/_build`` builds the documentation site.

The pages are Markdown that also reads well without Sphinx: links name files of this repository.
Docstrings and the help of commands are plain text. The functions below translate both.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from difflib import unified_diff
from itertools import pairwise
from operator import attrgetter
from os.path import relpath
from pathlib import Path
from typing import Any

import click
import latex2mathml.converter
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.util.typing import stringify_annotation

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))  # of cli.py

import cupyfa  # noqa: E402
from cli import main  # noqa: E402
from cupyfa import errors  # noqa: E402
from cupyfa.lab.analysis import timeline_page, timeline_recorder  # noqa: E402
from cupyfa.lab.bench import sweeps  # noqa: E402
from cupyfa.lab.verify.case import Case  # noqa: E402
from cupyfa.ladder import LADDER  # noqa: E402
from cupyfa.runtime.simulator import Simulator  # noqa: E402

project = "cupyfa"
author = "The cupyfa authors"
project_copyright = author
version = release = cupyfa.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.linkcode",
    "sphinx_click",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
nitpicky = True
# Types in signatures that are not public: aliases of this library, and classes of others.
nitpick_ignore_regex = [("py:(class|obj)", r"(?!cupyfa\.[A-Z]\w*$).*")]
highlight_language = "none"
default_role = "literal"
smartquotes = False
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"cupyfa {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_math_renderer = "mathml"
copybutton_selector = ".highlight-sh pre, .highlight-python pre, .highlight-cuda pre"

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80

# Links and pictures of Markdown, and files outside of docs/ that pages of the site include.
LINK = re.compile(r"\[(?P<text>[^]]+)\]\((?!http)(?P<target>[^)#]+)(?P<anchor>#[^)]*)?\)")
# Terms that the search finds first at this place of a page.
INDEXED = re.compile(r"^<!-- index: (.+) -->$", re.M)
INCLUDED = {
    "README.md": "index",
    "README.zh-CN.md": "zh/README",
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "SECURITY.md": "security",
}
PUBLIC = {*cupyfa.__all__}
ERRORS = {name for name in dir(errors) if name in PUBLIC}
DOCUMENTED: set[Path] = set()  # files of what the reference describes
KERNELS = ROOT / "kernels"
# Headers by the names that #include lines and pages use for them.
HEADERS = {
    name: file
    for file in sorted(KERNELS.glob("include/**/*.cuh"))
    for name in (file.name, str(file.relative_to(KERNELS / "include")))
}
# Rungs of which a block is played, and its problem.
BLOCKS = {
    "fa2": {"M": 128, "N": 256, "dtype": "float32"},
    "mma_async": {"M": 128, "N": 256, "dtype": "float16"},
    "wgmma_overlap": {"M": 192, "N": 512, "dtype": "float16"},
}
LEXERS = {".cu": "cuda", ".cuh": "cuda", ".py": "python", ".diff": "diff"}


def translated_page(app: Sphinx, name: str, source: list[str]) -> None:
    """Markdown for Sphinx: links to files and folders outside of docs/, and pages of all rungs."""
    source[0] = _with_links(source[0], DOCS / name, (DOCS / name).parent)
    source[0] = INDEXED.sub(r"```{index} ! \1\n```", source[0])
    folder, _, rung = name.rpartition("/")
    if folder == "rungs" and rung in BLOCKS:
        source[0] += f'\n\n<a href="../blocks/{rung}.html">Step through a block of {rung}</a>\n'
    if name == "rungs/README":
        course = (DOCS / "index.md").read_text("utf-8")
        rungs = [x for kernels in LADDER.values() for x in kernels if f"rungs/{x}\n" not in course]
        records = [f"../records/{file.stem}" for file in sorted(DOCS.glob("records/*.md"))]
        source[0] += "\n".join(["\n```{toctree}", ":hidden:", "", *rungs, *records, "```", ""])


def translated_include(app: Sphinx, path: Path, parent: str, content: list[str]) -> None:
    """A file of the repository as part of a page in docs/."""
    content[0] = _with_links(content[0], ROOT / path.name, (DOCS / app.env.docname).parent)


def _with_links(text: str, page: Path, folder: Path) -> str:
    return LINK.sub(lambda link: _translated_link(link, page, folder), text)


def _translated_link(link: re.Match[str], page: Path, folder: Path) -> str:
    """A link of a page, as a page in a folder of the site writes it."""
    target, text, anchor = _target(link, page), link["text"], link["anchor"] or ""
    if included := INCLUDED.get(str(target.relative_to(ROOT))):
        target = DOCS / f"{included}.md"
    if target.is_relative_to(DOCS):
        return f"[{text}]({relpath(target, folder)}{anchor})"
    if target.suffix in LEXERS:
        return f'<a href="{relpath(DOCS / _source_page(target), folder)}.html">{text}</a>'
    if target.is_dir() or target.suffix == ".md":
        return text
    return f"[{text}]({relpath(target, folder)})"  # a download


def _target(link: re.Match[str], page: Path) -> Path:
    return (page.parent / link["target"]).resolve()


def _source_page(file: Path) -> str:
    return f"source/{file.relative_to(ROOT)}"


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for each source file that another page links to."""
    pages = [Path(app.env.doc2path(name)) for name in app.env.found_docs]
    links = [(link, page) for page in pages for link in LINK.finditer(page.read_text("utf-8"))]
    files = {*KERNELS.rglob("*.cu"), *KERNELS.rglob("*.cuh"), *DOCUMENTED}
    for file in sorted(files | {_target(link, page) for link, page in links}):
        if file.suffix in LEXERS and not file.is_relative_to(DOCS):
            title = str(file.relative_to(ROOT))
            body = [f"<h1>{title}</h1>", _with_linked_includes(app, file)]
            for before in _before(file):
                change = unified_diff(*(x.read_text("utf-8").splitlines() for x in (before, file)))
                body += [
                    f"<h2>Changes from {before.name}</h2>",
                    _highlighted(app, "\n".join([*change][2:]), ".diff"),
                ]
            yield _source_page(file), {"title": title, "body": "\n".join(body)}, "page.html"


def linkcode_resolve(domain: str, about: dict[str, str]) -> str | None:
    """Where the source of something in the reference is shown; pages there are in one folder."""
    path = f"{about['module']}.{about['fullname']}"
    thing = attrgetter(path.removeprefix("cupyfa."))(cupyfa)  # not of sys.modules: cupyfa.transfer
    thing = getattr(thing, "fget", thing)
    if isinstance(thing, attrgetter):  # of a property, which has no lines
        return None
    file, line = Path(inspect.getsourcefile(thing)), inspect.getsourcelines(thing)[1]
    DOCUMENTED.add(file)
    return f"../{_source_page(file)}.html#line-{line}"


def _highlighted(app: Sphinx, text: str, suffix: str) -> str:
    return app.builder.highlighter.highlight_block(text, LEXERS[suffix], lineanchors="line")


def _with_linked_includes(app: Sphinx, file: Path) -> str:
    """Returns the HTML of a source file in which the names of headers are links to their pages."""

    def linked(include: re.Match[str]) -> str:
        header = HEADERS.get(include[1]) or KERNELS / include[1]
        if not header.is_file():
            return include[0]
        page = relpath(_source_page(header), _source_page(file.parent))
        return f'<a href="{page}.html">{include[0]}</a>'

    html = _highlighted(app, file.read_text("utf-8"), file.suffix)
    return re.sub(r'<span class="cpf">&lt;(.+?)&gt;</span>', linked, html)


def _before(file: Path) -> list[Path]:
    """The files of the rungs that a rung's file is read after."""
    files = {record.name: file.parent / f"{record.name}.cu" for record in cupyfa.kernels()}
    records = [record for record in cupyfa.kernels() if files[record.name] == file]
    return [files[name] for record in records for name in record.after if files[name].is_file()]


def linked_code(app: Sphinx, document: nodes.document) -> None:
    """Links `cupyfa.name` and `cupyfa command` to the reference, and `header.cuh` to its source."""
    for code in [*document.findall(nodes.literal)]:
        name = re.fullmatch(r"cupyfa\.(\w+)(\(.*\))?", code.astext())
        command = re.fullmatch(r"cupyfa (\w+)( .*)?", code.astext())
        if isinstance(code.parent, nodes.reference | nodes.title | pending_xref):
            continue
        if name and name[1] in PUBLIC:
            about = {"refdomain": "py", "reftype": "obj", "reftarget": f"cupyfa.{name[1]}"}
            code.replace_self(pending_xref("", code.deepcopy(), refdoc=app.env.docname, **about))
        elif command and command[1] in main.commands:
            _link_to(app, code, f"reference/commands/{command[1]}")
        elif file := HEADERS.get(code.astext()):
            _link_to(app, code, _source_page(file))


def _link_to(app: Sphinx, code: nodes.Element, page: str) -> None:
    uri = app.builder.get_relative_uri(app.env.docname, page)
    code.replace_self(nodes.reference("", "", code.deepcopy(), refuri=uri, internal=True))


def plain_signature(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """The fields of a dataclass with types and defaults; no keywords that are always refused."""
    if what == "class" and dataclasses.is_dataclass(thing):
        return f"({', '.join(map(_field, dataclasses.fields(thing)))})", returns
    return signature and re.sub(r", \*\*unknown: [\w~.\[\]]+", "", signature), returns


def _field(field: dataclasses.Field[Any]) -> str:
    default, factory = field.default, field.default_factory
    kind = field.type if isinstance(field.type, str) else stringify_annotation(field.type, "smart")
    if default is factory:  # both MISSING
        return f"{field.name}: {kind}"
    value = factory() if callable(factory) else default
    return f"{field.name}: {kind} = {'...' if callable(value) else repr(value)}"


def with_definitions(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Makes a definition list of the lines ``parameter: text`` of a docstring."""
    known = {*getattr(thing, "__dataclass_fields__", ())}
    with suppress(TypeError, ValueError):  # of properties, and of exceptions without arguments
        known |= {*inspect.signature(thing).parameters}
    written, inside = [], False
    for line, following in pairwise([*lines, ""]):
        term = re.match(r"(\w+(?:, \w+)*): (.*)", line)
        ends = re.match(r" |$|(\w+(, \w+)*): ", following)  # else it is a sentence with a colon
        if term and ends and known.issuperset(names := term[1].split(", ")):
            written += [*([] if inside else [""]), ", ".join(f"``{x}``" for x in names)]
            line, inside = f"    {term[2]}", True
        elif inside and line and not line.startswith(" "):
            written.append("")
            inside = False
        written.append(line)
    lines[:] = [_linked(line, known | {name.rpartition(".")[2]}) for line in written]


def _linked(line: str, own: set[str]) -> str:
    """A line of a docstring with links from public names in backquotes, and from errors."""
    public = "|".join(PUBLIC - own)
    line = re.sub(rf"``({public})(?:\(\))?``", r":py:obj:`\1 <cupyfa.\1>`", line)
    return re.sub(
        rf"(?<![\w`<.])({'|'.join(ERRORS - own)})(?![\w`])", r":py:exc:`\1 <cupyfa.\1>`", line
    )


def show_as_in_help(command: click.Command) -> None:
    """Has options show their types and defaults, which click keeps in other places."""
    for option in (x for x in command.params if isinstance(x, click.Option) and not x.is_flag):
        if option.metavar is None:
            has_choices = isinstance(option.type, click.Choice)
            kind = option.opts[-1].strip("-") if has_choices else option.type.name
            option.metavar = kind.split()[0]
        has_default = isinstance(option.default, int | float | str) and option.default != ""
        if has_default and option.show_default is None:
            option.show_default = True
    for inner in getattr(command, "commands", {}).values():
        show_as_in_help(inner)


def plain_help(app: Sphinx, context: Any, lines: list[str]) -> None:
    """Stars in the help of commands are no markup; defaults and choices are one line of text."""
    for number, line in enumerate(lines):
        line = re.sub(r":default: ``'?(.*?)'?``$", r"Default: ``\1``.", line.replace("*", r"\*"))
        lines[number] = re.sub(r":options: (.*)$", r"One of \1.", line)


def inline_pictures(app: Sphinx, document: nodes.document, name: str) -> None:
    """Puts the drawings of the course into the page, where they follow its theme."""
    for image in [*document.findall(nodes.image)]:
        file = DOCS / image["uri"]
        if file.parent == DOCS / "pictures":
            svg = file.read_text("utf-8").replace(":root.picture{color-scheme:light dark}", "")
            image.replace_self(nodes.raw("", svg, format="html"))


def write_blocks(app: Sphinx, exception: Exception | None) -> None:
    """Writes the pages that play blocks of some rungs, from recordings of the simulator."""
    if exception or app.builder.format != "html":
        return
    (folder := Path(app.outdir) / "blocks").mkdir(exist_ok=True)
    for name, sizes in BLOCKS.items():
        kernel = LADDER["forward"][name]
        given = {"batch": 1, "heads": 1, "d": 64, "causal": True, **sizes}
        (problem,) = sweeps.problems("forward", given, kernel, small=True)
        case = Case("forward", problem)
        found = timeline_recorder.record(kernel, case, Simulator(), block=0)
        timeline_page.save(found, case, folder / f"{name}.html")


def write_formula(translator: Any, node: nodes.Element) -> None:
    """Writes a formula as MathML, which browsers typeset without scripts or a network."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    formula = node.astext().replace("{aligned}", "{align*}")  # the name that the library knows
    translator.body.append(latex2mathml.converter.convert(formula, display=display))
    raise nodes.SkipNode


def describe_shared_options_once(app: Sphinx, context: Any, lines: list[str]) -> None:
    """Leaves options that `cupyfa run` has too to its page."""
    run, command = main.commands["run"], context.command
    if command is run or context.parent:  # a command in a group has few options
        return
    known = {(tuple(x.opts), x.help) for x in run.params if isinstance(x, click.Option)}
    options = [x for x in command.params if isinstance(x, click.Option) and not x.hidden]
    shared = [x.opts[-1] for x in options if (tuple(x.opts), x.help) in known]
    described = re.split(r"^(?=\.\. option:: )", "\n".join(lines), flags=re.M)
    kept = [x for x in described if _option_of(x) not in shared]
    note = ", ".join(f"``{x}``" for x in shared)
    lines[:] = "".join(kept).splitlines()
    if shared:
        lines += ["", f"Described at :doc:`cupyfa run <run>`: {note}.", ""]


def _option_of(block: str) -> str:
    """Returns the last name in a block that describes an option, or ""."""
    names = re.findall(r"(?<![\w-])(--?[A-Za-z][\w-]*)", block.partition("\n")[0])
    return names[-1] if names else ""


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (write_formula, None), (write_formula, None))
    show_as_in_help(main)
    app.connect("source-read", translated_page)
    app.connect("include-read", translated_include)
    app.connect("html-collect-pages", source_pages)
    app.connect("doctree-read", linked_code)
    app.connect("doctree-resolved", inline_pictures)
    app.connect("build-finished", write_blocks)
    app.connect("autodoc-process-signature", plain_signature)
    app.connect("autodoc-process-docstring", with_definitions)
    app.connect("sphinx-click-process-description", plain_help)
    app.connect("sphinx-click-process-options", plain_help)
    app.connect("sphinx-click-process-options", describe_shared_options_once)
