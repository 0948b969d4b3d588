"""The pages: their commands run in order and print the text shown below them.

A page is README.md, CONTRIBUTING.md or a page in docs/ (translations have the same code). A comment
on a line of its own marks the block below it:

- ``<!-- mine.cu -->``: the block is a file of that name, written when the page reaches it;
- ``<!-- gpu -->``: its commands need a GPU, or minutes; they run only in the test marked gpu;
- ``<!-- exit 1 -->``: its commands end with that exit code instead of 0;
- ``<!-- continued -->``: the Python block continues the script of the Python block before it.

Commands are the lines of ``sh`` blocks, indented lines that begin with ``cupyfa`` or ``python``,
and such `code` in a paragraph. In a paragraph, a mere name (`cupyfa run`) and code with words in
capitals for the reader to fill in do not run; only their options are checked. All commands and
``python`` blocks of a page run in one folder. A ``text`` block below them shows what they print:
its lines must occur in the output in this order, but lines may be omitted. … matches anything, and
a number matches any number, except the number of a kernel's line.
"""

import os
import re
import runpy
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import click
import pytest
from helpers.cli import write_programs

import cupyfa
from cupyfa.planner.source import ROOT

MAIN = runpy.run_path(str(ROOT / "cli.py"))["main"]
DOCS = [x for x in sorted((ROOT / "docs").rglob("*.md")) if x.parent.name != "zh"]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

BLOCK = re.compile(
    r"""
      ^<!--\ (?P<mark>.+?)\ -->\n
    | ^(?P<fence>```|~~~)(?P<kind>.*)\n(?P<code>(?:.*\n)*?)(?P=fence)\n
    | (?P<indented>(?:^[ ]{4}.*\n)+)
    | (?P<paragraph>(?:^(?!```|~~~|<!--|[ ]{4}).*\S.*\n)+)
    """,
    re.M | re.X,
)
# Sections and commands that only .ci/run runs: installation and tests.
ELSEWHERE = ("test",)
INSTALLS = ("pip ", "make ")
OPTIONAL = ("compute-sanitizer", "ncu", "nsys")
COMMAND = re.compile(r"(?:cupyfa|python)\s\S")
IN_A_PARAGRAPH = re.compile(r"(?<!`)`((?:cupyfa|python)\s[^`]+)`(?!`)")
PLACEHOLDER = re.compile(r"[ =\[][A-Z]{3,}\b|…")
NUMBER = re.compile(r"(?<!\d)(?<!\.cu:)(?<!\.cuh:)\d[\d,]*\.?\d*(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Block:
    """A block of a page: fenced code by its kind, "indented" code, or a "paragraph"."""

    kind: str
    text: str
    marks: tuple[str, ...]

    @property
    def file(self):
        """Name of the file that the block contains, if any."""
        return next((mark for mark in self.marks if re.fullmatch(r"[\w-]+\.\w+", mark)), None)

    @property
    def exit_code(self):
        return next((int(mark[5:]) for mark in self.marks if mark.startswith("exit ")), 0)

    @property
    def lines(self):
        """All command lines of the block, including mere command names."""
        if self.kind == "paragraph":
            return [" ".join(code.split()) for code in IN_A_PARAGRAPH.findall(self.text)]
        lines = [line.strip() for line in self.text.replace("\\\n", " ").splitlines()]
        if self.kind == "indented":
            return [line for line in lines if COMMAND.match(line)]
        return [line for line in lines if line and line[0] != "#"] if self.kind == "sh" else []

    @property
    def commands(self):
        if {*ELSEWHERE} & {*self.marks}:
            return []
        if self.kind == "paragraph":
            return [x for x in self.lines if len(x.split()) > 2 and not PLACEHOLDER.search(x)]
        return [line for line in self.lines if not line.startswith(INSTALLS)]


def blocks(text):
    found, marks = [], []
    for piece in BLOCK.finditer(text):
        if piece["mark"]:
            marks = [mark for mark in marks if f"/{mark}" != piece["mark"]]
            marks += [] if piece["mark"].startswith("/") else [piece["mark"]]
            continue
        kind = piece["kind"] if piece["fence"] else piece.lastgroup
        found.append(Block(kind, piece[piece.lastgroup], tuple(marks)))
        marks = [mark for mark in marks if mark in ELSEWHERE]
    return found


def read(page):
    return page.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """Returns environment variables that map `cupyfa` and `python` to these tests' programs."""
    programs = write_programs(tmp_path_factory.mktemp("programs"))
    return {
        **os.environ,
        # Processes of pytest-xdist share compiled kernels and measurements.
        "CUPYFA_CACHE_DIR": str(tmp_path_factory.getbasetemp().parent / "cache-of-pages"),
        "CUPYFA_COMPILER_FLAGS": "",  # flags affect which race is found first
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "COLUMNS": "80",
    }


@pytest.fixture
def folder(tmp_path):
    """Returns a folder for a page's commands, with the measurements of docs/."""
    (tmp_path / "docs").mkdir()
    for file in (ROOT / "docs").glob("*.json"):
        shutil.copy(file, tmp_path / "docs")
    return tmp_path


# Options that shorten commands on a GPU, which would otherwise measure for seconds, start many
# processes or compute NumPy's reference of many heads.
SHORT = {
    "bench": ("--budget 0.02", "-B 1"),
    "ladder": ("--budget 0.02", "-B 1"),
    "tune": ("--budget 5", "-B 1"),
    "check": ("--jobs 2",),
    "roofline": ("-B 1",),
    "run": ("--seed 1", "-B 1"),
}


# Commands in paragraphs that measure times and therefore require a GPU.
MEASURES = re.compile(r"cupyfa (bench|tune|ladder)\b(?!.*--backend)")


def shortened(line):
    """Shortens a page's command: less to compute and less time to measure."""
    program, _, rest = line.partition(" ")
    command, _, words = rest.partition(" ")
    if program != "cupyfa" or command not in SHORT:
        return line
    words = re.sub(r"--samples \d{2,}", "--samples 8", words)
    if command == "check" and not re.search("--samples|--grid|--dry-run|--all", words):
        words += " --samples 4"
    if command == "bench":  # keeps only the first value of each swept constant
        words = re.sub(r"(-p \w+=[^ ,:]+)\S*", r"\1", words)
        if "--suite" in words and "--only" not in words:
            words += " --only vit-b"
    for option in SHORT[command]:
        name = option.split()[0]
        if name == "-B" and re.search("--lengths|--from|--suite|softmax", words):
            continue
        words = re.sub(rf" ?{name} [^ ]+", "", words) + f" {option}"
    return f"cupyfa {command} {words}"


def follow(text, folder, environment, *, gpu):
    """Runs the blocks of a page in order; without a GPU, skips blocks that need one."""
    printed, script = None, ""
    for block in blocks(text):
        if block.file is not None:
            (folder / block.file).write_text(block.text)
        elif block.kind == "python":
            for library in re.findall(r"^import (dask|jax)\b", block.text, re.M):  # optional
                pytest.importorskip(library)
            script = script + block.text if "continued" in block.marks else block.text
            (folder / "example.py").write_text(script)
            output = shell("python example.py", 0, folder, environment)
            printed = None if gpu else output
        elif block.kind == "text" and printed is not None:
            assert_shows(printed, block.text)
        elif block.commands and ("gpu" in block.marks and not gpu):
            printed = None
        elif block.commands:
            done = [
                shell(shortened(line) if gpu else line, block.exit_code, folder, environment)
                for line in block.commands
                if line.split()[0] not in OPTIONAL or shutil.which(line.split()[0])
                if gpu or block.kind != "paragraph" or not MEASURES.match(line)
            ]
            printed = None if gpu else "".join(done)


def shell(line, code, folder, environment):
    """Returns a command's output including stderr; it must end with this exit code."""
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == code, f"{line}\n{done.stdout}"
    return done.stdout


def assert_shows(printed, shown):
    """Checks that the lines shown occur in the output, in order."""
    lines = iter(" ".join(line.split()) for line in printed.splitlines())
    for line in filter(None, (" ".join(line.split()) for line in shown.splitlines())):
        if line == "…":
            continue
        pieces = [NUMBER.sub("\0", piece) for piece in line.split("…")]
        pattern = ".*".join(re.escape(x).replace("\0", NUMBER.pattern) for x in pieces)
        assert any(re.fullmatch(pattern, x) for x in lines), f"not printed: {line}\n{printed}"


@pytest.mark.slow
@EACH_PAGE
def test_commands_of_a_page_work(page, environment, folder):
    follow(read(page), folder, {**environment, "CUDA_VISIBLE_DEVICES": ""}, gpu=False)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "page",
    [x for x in PAGES if re.search(r"^<!-- gpu -->|^```python", read(x), re.M)],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_commands_of_a_page_work_on_a_gpu(cuda, page, environment, folder):
    follow(read(page), folder, {**environment, "OPENBLAS_NUM_THREADS": "4"}, gpu=True)


@pytest.mark.slow
def test_roofline_tables_are_complete(environment, folder):
    found = blocks(read(ROOT / "docs" / "roofline.md"))
    for before, block in pairwise(found):
        if before.kind == "sh" and block.kind == "text":
            printed = shell(before.commands[0], 0, folder, environment)
            assert printed.split() == block.text.split()


def unknown_part(line):
    """Returns an error about an unknown command or option, or None."""
    words = line.partition(" > ")[0].split()
    command = MAIN if words.pop(0) == "cupyfa" else None
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return words[0]
        command = command.commands[words.pop(0)]
    if command is not None:
        main = click.Context(MAIN, **MAIN.context_settings)  # defines -h
        try:
            command.make_parser(click.Context(command, parent=main)).parse_args(words)
        except click.UsageError as error:
            return error.format_message()
    return None


def test_every_option_in_a_page_exists():
    lines = [(page, x) for page in PAGES for block in blocks(read(page)) for x in block.lines]
    unknown = [(page.name, line, what) for page, line in lines if (what := unknown_part(line))]
    assert not unknown


def test_every_library_name_in_a_page_exists():
    name = re.compile(r"(?<![\w/.])cupyfa\.([A-Za-z]\w*)")
    named = {(page.name, x) for page in PAGES for x in name.findall(read(page))}
    unknown = [x for x in named if not (hasattr(cupyfa, x[1]) or find_spec(f"cupyfa.{x[1]}"))]
    assert not unknown


def mistake(before, block):
    """Describes an error in a block of a page, or returns None."""
    if block.kind.startswith("{"):  # a Sphinx directive
        return None
    if block.kind not in ("sh", "text", "python", "cuda", "", "paragraph", "indented"):
        return f"a block of kind {block.kind}"
    # Blocks without a kind hold drawings and formulas.
    is_command = re.search(r"^\s*(?:\$ )?(?:cupyfa|python3?|pip) ", block.text, re.M)
    if block.kind in ("cuda", "") and is_command:
        return "a command outside of a block of kind sh"
    if block.kind == "sh" and re.search(r"^\$ ", block.text, re.M):
        return "a prompt before a command"
    if block.kind == "indented" and IN_A_PARAGRAPH.search(block.text):
        return "a list that is indented by four or more"
    is_shown = before is not None and before.kind in ("sh", "python")
    if block.kind == "text" and block.file is None and not is_shown:
        return "output after nothing that prints it"
    return None


def test_every_command_line_is_recognised():
    wrong = []
    for page in PAGES:
        found = blocks(read(page))
        fences = [block for block in found if block.kind not in ("paragraph", "indented")]
        if 2 * len(fences) != len(re.findall(r"^\s*(?:```|~~~)", read(page), re.M)):
            wrong.append((page.name, "a fence that is not at the beginning of a line"))
        for before, block in zip([None, *found], found):
            if what := mistake(before, block):
                wrong.append((page.name, what, block.text))
    assert not wrong


PAGE = Path(__file__).with_name("page.md").read_text()


def test_every_kind_of_command_is_found():
    assert [block.commands for block in blocks(PAGE) if block.commands] == [
        ["python -c 1"],
        ["exit    3"],
        ["cupyfa --help"],
        ["false"],
        ["cat note.txt"],
    ]
    lines = [line for block in blocks(PAGE) for line in block.lines]
    assert {"cupyfa list", "cupyfa run KERNEL -M 3", "pip install x"} <= {*lines}


def test_only_lines_of_kernels_are_numbers_that_may_not_differ():
    assert_shows("12 bytes at /x/a.cuh:26, b.cu:3", "345 bytes at …a.cuh:26, b.cu:3")
    for wrong in ("12 bytes at …a.cuh:28, b.cu:3", "12 bytes at …a.cuh:26, b.cu:30"):
        with pytest.raises(AssertionError, match="not printed"):
            assert_shows("12 bytes at /x/a.cuh:26, b.cu:3", wrong)


@pytest.mark.parametrize(
    "right, wrong, message",
    [
        ("", "", None),
        ("exit 3 -->", "exit 2 -->", "exit"),
        ("hello, 3 …", "hello, … they", "not printed"),
        ("-c 1", "-c 1/0", "ZeroDivisionError"),
        ("gpu", "cpu", "false"),
    ],
)
def test_a_wrong_page_is_found(environment, tmp_path, right, wrong, message):
    page = PAGE.replace(right, wrong) if right else PAGE
    if message is None:
        return follow(page, tmp_path, environment, gpu=False)
    with pytest.raises(AssertionError, match=message):
        follow(page, tmp_path, environment, gpu=False)
