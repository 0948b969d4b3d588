"""The sdist and the wheel, and every way to install them."""

import importlib.util
import json
import os
import re
import site
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import cupyfa
from cupyfa.ladder import LADDER

TREE = Path(__file__).resolve().parents[2]
VERSION = cupyfa.__version__
RUN = ["run", "fa2", "-M", "9", "-N", "9", "-d", "8", "--seed", "1", "--backend", "simulator"]
# Build requirements; pip downloads them if they are not installed.
BACKEND = ("editables", "hatch_fancy_pypi_readme", "hatchling")
HAS_BACKEND = all(importlib.util.find_spec(name) for name in BACKEND)

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("build", "pip")),
    reason="packages are built with `build` and installed with `pip`",
)


def call(*command, cwd, **env):
    """Returns the output of a program that must succeed, run without PYTHONPATH."""
    plain = {k: x for k, x in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**plain, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Builds the sdist, a wheel from it, and a wheel from the tree."""
    folder = tmp_path_factory.mktemp("built")
    build = [sys.executable, "-m", "build", *(["--no-isolation"] if HAS_BACKEND else [])]
    call(*build, "--outdir", folder / "both", TREE, cwd=folder)
    call(*build, "--wheel", "--outdir", folder / "tree", TREE, cwd=folder)
    (sdist,) = (folder / "both").glob("*.tar.gz")
    (from_sdist,) = (folder / "both").glob("*.whl")
    (from_tree,) = (folder / "tree").glob("*.whl")
    return sdist, from_sdist, from_tree


def contents(wheel):
    """Maps a wheel's files to their bytes, except RECORD, whose order may vary."""
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist() if not name.endswith("RECORD")}


def texts(sdist):
    """Maps paths in the project to the texts of an sdist's files."""
    with tarfile.open(sdist) as file:
        return {
            member.name.partition("/")[2]: file.extractfile(member).read().decode()
            for member in file.getmembers()
            if member.isfile()
        }


def test_the_wheel_is_the_same_from_the_tree_and_from_the_sdist(built):
    _, from_sdist, from_tree = built
    assert from_sdist.name == from_tree.name == f"cupyfa-{VERSION}-py3-none-any.whl"
    assert contents(from_sdist) == contents(from_tree)


def test_the_wheel_has_exactly_the_package(built):
    files = set(contents(built[1]))
    expected = {"cupyfa/cli.py"}
    expected |= {f"cupyfa/{file.relative_to(TREE)}" for file in (TREE / "kernels").rglob("*.cu*")}
    endings = "*.py *.csv *.h *.cu *.cuh *.cpp *.md *.toml *.html py.typed"
    for ending in endings.split():
        expected |= {str(file.relative_to(TREE)) for file in (TREE / "cupyfa").rglob(ending)}
    info = {file for file in files if file.startswith(f"cupyfa-{VERSION}.dist-info/")}
    assert files - info == expected
    assert "cupyfa/py.typed" in files
    assert "cupyfa/runtime/simulator/runtime.cpp" in files
    assert "cupyfa/runtime/simulator/include/simulator.h" in files
    assert any(file.endswith("licenses/LICENSE") for file in info)


@pytest.mark.slow
def test_the_sdist_has_exactly_the_project(built):
    top = {name.partition("/")[0] for name in texts(built[0])}
    assert {"cli.py", "cupyfa", "kernels", "tests", "pyproject.toml", "README.md", "LICENSE"} <= top
    assert top <= {entry.name for entry in TREE.iterdir()} | {"PKG-INFO"}
    hidden = {name for name in top if name.startswith(".")}
    assert hidden <= {".ci", ".clang-format", ".gitignore"}


@pytest.mark.slow
def test_the_description_for_an_index_needs_no_other_file(built):
    markdown = pytest.importorskip("readme_renderer.markdown", reason="renders as an index does")
    name = f"cupyfa-{VERSION}.dist-info/METADATA"
    description = contents(built[1])[name].decode().partition("\n\n")[2]
    readme = (TREE / "README.md").read_text(encoding="utf-8")
    for block in re.findall(r"^```.*?^```$", readme, re.M | re.S):
        assert block in description
    html = markdown.render(description)
    assert html and "<img" not in html
    assert not re.findall(r'href="(?!https?:|#)[^"]*', html)


def test_the_metadata_name_authors_versions_and_licence(built):
    metadata = texts(built[0])["PKG-INFO"].partition("\n\n")[0]
    license = (TREE / "LICENSE").read_text()
    (author,) = re.findall(r"^Author: (.*)$", metadata, re.M)
    assert author in license
    assert "License-Expression: MIT\n" in metadata
    (oldest,) = re.findall(r"^Requires-Python: >=(.*)$", metadata, re.M)
    assert re.findall(r" :: Python :: (3\.\d+)$", metadata, re.M)[0] == oldest
    assert f'python_version = "{oldest}"' in (TREE / "pyproject.toml").read_text(encoding="utf-8")
    for readme, words in {"README.md": "Linux and", "README.zh-CN.md": "Linux 和"}.items():
        assert f"{words} Python {oldest}" in (TREE / readme).read_text(encoding="utf-8")


def test_hints_install_packages_that_an_index_has():
    """cupyfa may come from a checkout or a wheel, so hints name the packages that an extra adds."""
    code = "".join(file.read_text(encoding="utf-8") for file in (TREE / "cupyfa").rglob("*.py"))
    extras = (TREE / "pyproject.toml").read_text(encoding="utf-8")
    hints = set(re.findall(r"pip install ([\w-]+)", code))
    assert {"ziglang", "matplotlib"} <= hints
    assert {package for package in hints if f'"{package}>=' not in extras} == set()


FOREIGN = {
    "torch is a peer, not a part": r"^\s*(import|from)\s+torch\b",
    "a path of one machine": r"(?<![\w.])/(home|root|work|Users)/\w",
    "an index of packages": r"index[-_]url|artifactory|/simple/",
    "an address in one network": r"\b(10|127|172|192)(\.\d{1,3}){3}\b",
}

# Files that may mention torch: the how-to on gradients in other frameworks, its test, and a
# benchmark that is run by hand.
WITH_TORCH = ("docs/howto/frameworks.md", "tests/kernels/test_backward.py", "tools/host_times.py")


@pytest.mark.parametrize("what", FOREIGN)
def test_nothing_foreign_is_in_the_project(built, what):
    found = {
        f"{name}: {line}"
        for name, text in texts(built[0]).items()
        for line in text.splitlines()
        if re.search(FOREIGN[what], line)
        and name != "tests/package/test_packaging.py"
        and not ("torch" in what and name in WITH_TORCH)
    }
    assert not found, what


def libraries():
    found = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return sorted(found | set(site.getsitepackages() if site.ENABLE_USER_SITE else ()))


@pytest.fixture
def environment(tmp_path):
    """Returns a function that makes a virtual environment and installs packages into it.

    Programs in the new environment can also import the libraries of the current environment.
    """

    def make(*arguments):
        folder = tmp_path / "venv"
        venv.create(folder, symlinks=True)
        python = folder / "bin" / "python"
        packages = Path(
            call(
                python, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path
            ).strip()
        )
        (packages / "libraries.pth").write_text("\n".join(libraries()) + "\n")
        if arguments:
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
            offline = ["--no-index", "--no-build-isolation"] if HAS_BACKEND else []
            options = ["--no-deps", "--ignore-installed", *offline]
            call(*pip, "install", *options, *arguments, cwd=tmp_path)
        return python, packages

    return make


def works(command, folder):
    """Checks that a cupyfa command runs --version, list and run."""
    assert call(*command, "--version", cwd=folder) == f"cupyfa, version {VERSION}\n"
    rows = json.loads(call(*command, "list", "--format", "json", cwd=folder))
    assert {row["kernel"] for row in rows} == {k for kernels in LADDER.values() for k in kernels}
    assert call(*command, *RUN, cwd=folder).splitlines()[-1] == "PASS"


def root(python, cwd):
    """Returns the folder in which a Python finds kernels/ and cli.py."""
    return Path(
        call(python, "-c", "from cupyfa.planner.source import ROOT; print(ROOT)", cwd=cwd).strip()
    )


@pytest.mark.slow
def test_the_installed_wheel(built, environment, tmp_path):
    python, packages = environment(built[1])
    works([python.parent / "cupyfa"], tmp_path)
    works([python, "-m", "cupyfa"], tmp_path)
    assert root(python, tmp_path) == packages / "cupyfa"
    own = {entry.name for entry in packages.iterdir()} - {"libraries.pth", "__pycache__"}
    assert own == {"cupyfa", f"cupyfa-{VERSION}.dist-info"}


@pytest.mark.slow
def test_the_editable_install(environment, tmp_path):
    python, packages = environment("--editable", TREE)
    works([python.parent / "cupyfa"], tmp_path)
    assert root(python, tmp_path) == TREE
    names = {entry.name for entry in packages.iterdir()}
    assert not names & {"cli", "cli.py", "kernels"}


@pytest.mark.slow
def test_the_bare_checkout(environment, tmp_path):
    python, _ = environment()
    works([python, TREE / "cli.py"], tmp_path)
    works([python, "-m", "cupyfa"], TREE)
    assert root(python, TREE) == TREE


@pytest.mark.slow
def test_the_unpacked_sdist(built, environment, tmp_path):
    for name, text in texts(built[0]).items():
        (tmp_path / "unpacked" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "unpacked" / name).write_text(text)
    python, _ = environment()
    works([python, tmp_path / "unpacked" / "cli.py"], tmp_path)


def test_the_import_is_fast_and_imports_neither_cupy_nor_click(tmp_path):
    """Compares with NumPy's import in the same process, since both depend on the machine.

    The first process writes the bytecode of both, as an installation would.
    """
    bytecode = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    code = """
import sys, time
start = time.process_time()
import numpy
after = time.process_time()
import cupyfa
print(after - start, time.process_time() - after, *{"cupy", "click", "rich"} & set(sys.modules))
"""
    measured = [call(sys.executable, "-c", code, cwd=TREE, **bytecode).split() for _ in range(15)]
    assert all(len(words) == 2 for words in measured), measured
    of_numpy, own = (min(map(float, times)) for times in zip(*measured))
    assert own < of_numpy, measured


def test_kernel_records_are_imported_with_the_first_call_of_their_operation(tmp_path):
    code = """
import sys
import cupyfa
records = [f"cupyfa.ladder.{x}" for x in ("softmax", "forward", "backward")]
print(any(x in sys.modules for x in records))
cupyfa.plan(M=5, d=16, backend="simulator")
print(records[1] in sys.modules, records[2] in sys.modules)
"""
    assert call(sys.executable, "-c", code, cwd=TREE).split() == ["False", "True", "False"]
