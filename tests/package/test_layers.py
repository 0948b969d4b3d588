"""Rules of the code base that tests can check."""

import ast
import graphlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import cupyfa
from cupyfa.arrays import kv_cache
from cupyfa.ladder import LADDER
from cupyfa.ladder.hvp import HVP
from cupyfa.ladder.kernel import Launch
from cupyfa.planner.evaluate import source_path
from cupyfa.planner.source import INCLUDE, KERNELS
from cupyfa.runtime import merging, tile_maps

PACKAGE = Path(cupyfa.__file__).parent
TESTS = Path(__file__).parents[1]
# Each layer imports only earlier layers. The library, which is everything outside lab, works
# without lab.
LAYERS = [
    {"version", "errors"},
    {"cache_folder"},
    {"score"},
    {"problem"},
    {"numerics"},
    {"ladder"},
    {"planner"},
    {"runtime"},
    {"arrays"},
    {"call"},
    {"api"},
    {"partition"},
    {"dask", "distributed", "jax"},
    {"__init__", "__main__"},
    {"lab.verify"},
    {"lab.bench"},
    {"lab.report"},
    {"lab.analysis"},
    {"lab.mutation"},
    {"lab.exercises"},
    {"lab.commands"},
]
LEVEL = {name: level for level, layer in enumerate(LAYERS) for name in layer}
TOP = {name.split(".")[0] for name in LEVEL}
# Templates of scripts that commands write for users; these rules do not apply to them.
HANDED_OUT = {PACKAGE / "lab" / x for x in ("commands/templates", "exercises/tasks")}
MODULES = sorted(x for x in PACKAGE.rglob("*.py") if HANDED_OUT.isdisjoint(x.parents))
# Folders of tests that are not named after a package. One named jax would stand for a missing JAX.
OTHER_TESTS = {"helpers", "jax_arrays", "kernels", "package", "pages", "tools"}


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__") if name != "__init__" else name


def layer_of(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[: 1 + (parts[0] == "lab")])


def level_of(name: str) -> int:
    return LEVEL[layer_of(name)]


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yields a node and its descendants, except code that only type checkers read."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from executed(child)


def imports(path: Path) -> set[str]:
    """Returns the names that a file imports at run time, anywhere in it."""
    names = set()
    for node in executed(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write out the package in {ast.unparse(node)}"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def own_module(name: str) -> str | None:
    """Returns the cupyfa module that an import names, or None for other packages."""
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


def test_modules_import_only_from_layers_above():
    found = {
        f"{here} imports {other}"
        for path in MODULES
        if (here := module_name(path)) != "lab"
        for other in own_imports(path)
        if layer_of(other) != layer_of(here) and level_of(other) >= level_of(here)
    }
    assert not found


def test_the_library_imports_nothing_of_the_lab():
    code = (
        "import sys, cupyfa, cupyfa.__main__\n"
        "print(*(x for x in sys.modules if x.startswith('cupyfa.lab')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.strip()


def test_no_module_imports_itself_through_others():
    graphlib.TopologicalSorter({module_name(x): own_imports(x) for x in MODULES}).prepare()


def test_every_import_statement_counts_except_those_for_type_checkers(tmp_path):
    file = tmp_path / "x.py"
    lines = ["import cupyfa", "def f():", "    from cupyfa.planner import plan"]
    typing = ["if TYPE_CHECKING:", "    from cupyfa.api import softmax"]
    file.write_text("\n".join([*lines, *typing]))
    assert own_imports(file) == {"__init__", "planner.plan"}


def test_the_top_of_the_package_has_only_its_rooms():
    own = {x.stem for x in PACKAGE.iterdir() if x.name not in ("__pycache__", "py.typed")}
    assert own <= TOP, f"{', '.join(sorted(own - TOP))}: put it into a folder"
    assert {x.stem for x in (PACKAGE / "lab").iterdir()} - {"__pycache__", "__init__"} == {
        name.removeprefix("lab.") for name in LEVEL if "." in name
    }


def test_no_file_name_stands_twice_in_the_package():
    files = (x for x in PACKAGE.rglob("*") if x.is_file() and "__pycache__" not in x.parts)
    own = Counter(
        x.name for x in files if HANDED_OUT.isdisjoint(x.parents) and "kernels" not in x.parts
    )
    twice = {name for name, count in own.items() if count > 1}
    assert not twice - {"__init__.py", "__main__.py"}


def test_tests_have_the_folders_of_the_package():
    names = {x.name: x for x in TESTS.iterdir() if x.name != "__pycache__"}
    assert {name for name, x in names.items() if x.is_file()} == {"conftest.py"}
    assert {name for name, x in names.items() if x.is_dir()} <= TOP | OTHER_TESTS
    own = {f"lab.{x.name}" for x in (TESTS / "lab").iterdir() if x.name != "__pycache__"}
    assert own <= LEVEL.keys()


def test_contributing_lists_every_layer_in_its_order_and_every_folder_of_kernels():
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    table = text.split("| layer | task |")[1].split("\n\n")[0]
    rows = [row.split("|")[1].replace("/", ".") for row in table.splitlines()[2:]]
    listed = [name for row in rows for name in re.findall(r"`([\w.]+)`", row)]
    places = [level_of(name) for name in listed]
    assert places == sorted(places)
    assert LEVEL.keys() - {*listed} == {"version", "__init__", "__main__"}
    folders = {x.name for x in KERNELS.iterdir() if x.is_dir()} - {"include"}
    assert {x for x in folders if not re.search(rf"[`/]{x}`", text)} == set()


def launches():
    return [
        (kernel, launch)
        for kernel in (*(x for of in LADDER.values() for x in of.values()), HVP)
        for launch in kernel.launches
        if isinstance(launch, Launch)
    ]


def test_every_kernel_file_belongs_to_a_record_and_every_record_has_its_files():
    files = {path for path in KERNELS.rglob("*.cu")}
    of_records = {KERNELS / source_path(kernel, launch) for kernel, launch in launches()}
    other = tile_maps.CLASSIFY, tile_maps.MAP, merging.MERGE, merging.GRADIENTS, kv_cache.APPEND
    ours = {KERNELS / x.file for x in other}
    assert files == of_records | ours


def test_the_entry_point_bears_its_files_name():
    for kernel, launch in launches():
        path = KERNELS / source_path(kernel, launch)
        entries = re.findall(r'extern "C" __global__.*?void (\w+)\(', path.read_text(), re.DOTALL)
        assert entries == [launch.entry] == [path.stem]


# Headers of instructions with up to 128 register operands, which are written by macros.
WITH_MACROS = ("wgmma.cuh", "wgmma_columns.cuh", "wgmma_rows.cuh")


def test_kernels_keep_the_rules_of_style():
    for path in KERNELS.rglob("*.cu*"):
        text, is_kernel = path.read_text(), path.suffix == ".cu"
        words = r"(ifn?def|if)" if path.name in WITH_MACROS else r"(ifn?def|if|define)"
        included = re.findall(r"#include <(.*)>", text)
        rules = {
            "begins with its name": text.startswith(
                "// " + path.stem if is_kernel else "#pragma once\n// "
            ),
            "no macros, no conditional text": not re.search(rf"#\s*{words}\b", text),
            "includes files of the project": '#include "' not in text
            and all(name.endswith((".cuh", ".h")) for name in included),
            "at most 100 columns": max(map(len, text.splitlines())) <= 100,
            "PTX belongs in kernels/include": not (is_kernel and re.search(r"\basm\b", text)),
        }
        assert not [rule for rule, is_kept in rules.items() if not is_kept], path.name


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
