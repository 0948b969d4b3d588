"""Rules of the code that a test can check."""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import cupyfa
from cupyfa.ladder import LADDER
from cupyfa.ladder.kernel import Launch
from cupyfa.planner.evaluate import source_path
from cupyfa.planner.source import INCLUDE, KERNELS
from cupyfa.runtime import decoding, merging, tile_maps

PACKAGE = Path(cupyfa.__file__).parent
# Each layer imports only from layers that stand before it; a module of the first one only from
# those that stand before it there.
LAYERS = [
    ["version", "errors", "store", "dtypes", "expressions", "options"]
    + ["modifiers", "forms", "problem"],
    {"numerics"},
    {"operations"},
    {"ladder"},
    {"planner"},
    {"runtime"},
    {"blocks"},
    {"call"},
    {"api"},
    {"parts"},
    {"dask", "distributed"},
    {"verify"},
    {"bench"},
    {"report"},
    {"analysis"},
    {"commands"},
    {"__init__", "__main__"},
]
LEVEL = {
    name: (level, place if level == 0 else 0)
    for level, layer in enumerate(LAYERS)
    for place, name in enumerate(layer)
}
TEMPLATES = PACKAGE / "commands" / "templates"  # files for users, which import as users do
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != TEMPLATES)


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__") if name != "__init__" else name


def level_of(name: str) -> tuple[int, int]:
    return LEVEL[name.split(".")[0]]


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """A node and those inside it, in functions too, without what only type checkers read."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from executed(child)


def imports(path: Path) -> set[str]:
    """Names that a file imports when it runs, anywhere in it."""
    names = set()
    for node in executed(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write out the package in {ast.unparse(node)}"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def own_module(name: str) -> str | None:
    """The project's module that an import names, or None for other people's."""
    if name.split(".")[0] != "cupyfa":
        return None
    parts = name.split(".")[1:]
    while parts and not (
        (PACKAGE / Path(*parts)).with_suffix(".py").exists()
        or (PACKAGE / Path(*parts) / "__init__.py").exists()
    ):
        parts.pop()
    return ".".join(parts) or "__init__"


def own_imports(path: Path) -> set[str]:
    return {other for name in imports(path) if (other := own_module(name))}


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_modules_import_only_from_layers_above(path):
    here = module_name(path)
    others = {x for x in own_imports(path) if x.split(".")[0] != here.split(".")[0]}
    assert not {x for x in others if level_of(x) >= level_of(here)}, f"{here} imports them"


def test_no_module_imports_itself_through_others():
    graphlib.TopologicalSorter({module_name(x): own_imports(x) for x in MODULES}).prepare()


def test_every_import_statement_counts_except_those_for_type_checkers(tmp_path):
    file = tmp_path / "x.py"
    lines = ["import cupyfa", "def f():", "    from cupyfa.planner import plan"]
    typing = ["if TYPE_CHECKING:", "    from cupyfa.api import softmax"]
    file.write_text("\n".join([*lines, *typing]))
    assert own_imports(file) == {"__init__", "planner.plan"}


def test_the_package_has_few_modules_of_its_own():
    own = [x.stem for x in PACKAGE.glob("*.py") if x.stem not in ("__init__", "__main__")]
    assert len(own) <= 12, f"{len(own)}: {', '.join(sorted(own))}; put one into a folder"


def test_contributing_lists_every_layer_in_its_order_and_every_folder_of_kernels():
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    table = text.split("| layer | task |")[1].split("\n\n")[0]
    listed = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in table.splitlines()[2:]]
    places = [level_of(name) for row in listed for name in row]
    assert places == sorted(places)
    missing = LEVEL.keys() - {name for row in listed for name in row}
    assert missing == {"version", "__init__", "__main__"}
    folders = {x.name for x in KERNELS.iterdir() if x.is_dir()} - {"include"}
    assert {x for x in folders if not re.search(rf"[`/]{x}`", text)} == set()


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_cupy_is_imported_by_the_cuda_backend_alone(path):
    cupy = {name for name in imports(path) if name.split(".")[0] in ("cupy", "cupyx", "cuda")}
    allowed = module_name(path).startswith("runtime.cuda")
    assert allowed or not cupy


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_only_the_command_line_prints(path):
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not [call for call in calls if getattr(call.func, "id", "") == "print"]


def launches():
    return [
        (kernel, launch)
        for kernels in LADDER.values()
        for kernel in kernels.values()
        for launch in kernel.launches
        if isinstance(launch, Launch)
    ]


def test_every_kernel_file_belongs_to_a_record_and_every_record_has_its_files():
    files = {path for path in KERNELS.rglob("*.cu")}
    of_records = {KERNELS / source_path(kernel, launch) for kernel, launch in launches()}
    other = tile_maps.CLASSIFY, tile_maps.MAP, merging.MERGE, merging.GRADIENTS, decoding.APPEND
    ours = {KERNELS / x.file for x in other}
    assert files == of_records | ours


@pytest.mark.parametrize("kernel, launch", launches(), ids=lambda x: getattr(x, "entry", None))
def test_the_entry_point_bears_its_files_name(kernel, launch):
    path = KERNELS / source_path(kernel, launch)
    assert path.stem == launch.entry
    entries = re.findall(r'extern "C" __global__.*?void (\w+)\(', path.read_text(), re.DOTALL)
    assert entries == [launch.entry]


# Instructions that name up to 128 registers are lists, which nothing else can write.
WITH_MACROS = ("wgmma.cuh", "wgmma_rows.cuh")


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.cu*")), ids=lambda path: path.name)
def test_kernels_keep_the_rules_of_style(path):
    text = path.read_text()
    assert text.startswith("// " + path.stem if path.suffix == ".cu" else "#pragma once\n// ")
    rule = r"#\s*(ifn?def|if)\b" if path.name in WITH_MACROS else r"#\s*(ifn?def|if|define)\b"
    assert not re.search(rule, text), "no macros, no conditional text"
    assert all(name.endswith((".cuh", ".h")) for name in re.findall(r"#include <(.*)>", text))
    assert '#include "' not in text
    assert max(map(len, text.splitlines())) <= 100
    if path.suffix == ".cu":
        assert not re.search(r"\basm\b", text), "PTX belongs in kernels/include"


def test_every_ptx_header_has_a_simulator_header_with_the_same_functions():
    twins = PACKAGE / "runtime" / "simulator" / "include"
    function = re.compile(r"^(?:__device__|inline|template)[^;{}]*?\b(\w+)\(", re.MULTILINE)
    for header in INCLUDE.rglob("*.cuh"):
        if re.search(r"\basm\b", header.read_text()):
            ours, twin = (
                set(function.findall(f.read_text()))
                for f in (header, twins / header.relative_to(INCLUDE))
            )
            assert ours and ours <= twin, f"{header.name}: {ours - twin}"
