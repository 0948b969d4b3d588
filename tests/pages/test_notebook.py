"""The notebooks run, and their cells print their stored outputs.

``python tests/pages/test_notebook.py`` stores the current outputs.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from helpers.cli import write_programs

import cupyfa

nbformat = pytest.importorskip("nbformat", reason="pip install -e '.[test]'")
nbclient = pytest.importorskip("nbclient", reason="pip install -e '.[test]'")

ROOT = Path(__file__).resolve().parents[2]
FROM_NUMPY, COURSE = (ROOT / "examples" / f"{name}.ipynb" for name in ("from_numpy", "course"))
NOTEBOOKS = (FROM_NUMPY, COURSE)
EACH = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda x: x.stem)
# Matches output that may vary: rounding errors, and the name of the next exercise.
VARIES = re.compile(r"\de-\d\d|(?<=^Next: cupyfa exercise start )\w+", re.M)
LINK = re.compile(r"\]\((?!http)([^)#]+)(?:#([^)]+))?\)")
ENVIRONMENT = {
    "COLUMNS": "80",
    "LC_ALL": "C.UTF-8",
    "PIP_NO_INDEX": "1",  # a cell that installs something fails
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
}
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def stored(notebook):
    return nbformat.read(notebook, as_version=4)


def executed(notebook, folder, environment):
    """Executes a notebook in a folder and returns it without times and versions."""
    client = nbclient.NotebookClient(
        stored(notebook),
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
    )
    result = client.execute(env=os.environ | ENVIRONMENT | environment)
    result.metadata = stored(notebook).metadata
    return result


def shown(cell):
    """Returns a cell's printed text, and the media types of its pictures."""
    text = "".join(x.text for x in cell.outputs if x.output_type == "stream")
    pictures = [sorted(x.data) for x in cell.outputs if x.output_type != "stream"]
    return VARIES.sub("…", text), pictures


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook):
    return "".join(shown(cell)[0] for cell in code_cells(notebook))


@pytest.mark.slow
@EACH
def test_a_notebook_prints_what_is_stored(notebook, tmp_path):
    before, now = stored(notebook), executed(notebook, tmp_path, NO_GPU)
    assert any(pictures for _, pictures in map(shown, code_cells(before)))
    for old, new in zip(code_cells(before), code_cells(now), strict=True):
        assert shown(new) == shown(old), old.source


@pytest.mark.gpu
def test_the_course_measures_on_a_gpu(cuda, tmp_path):
    (programs := tmp_path / "programs").mkdir()
    path = os.pathsep.join([str(write_programs(programs)), os.environ["PATH"]])
    text = printed(executed(COURSE, tmp_path, {"CUPYFA_BACKEND": "auto", "PATH": path}))
    assert "kernels run on: cuda" in text
    assert len(re.findall(r"^\w+ +\d+\.\d{3} ms$", text, re.M)) == 5


def test_each_exercise_of_the_course_is_wrong_first_and_then_right():
    notebook = stored(COURSE)
    names = re.findall(r"exercise start (\w+)", "\n".join(x.source for x in code_cells(notebook)))
    assert names == ["online_softmax", "merge", "tiled_attention", "warp_sum"]
    text = printed(notebook)
    assert [text.count(word) for word in ("Wrong: ", "Cause: ", "Right: ")] == [len(names)] * 3


def test_the_course_measures_rungs_that_run_on_sm_75():
    (source,) = (x.source for x in code_cells(stored(COURSE)) if x.source.startswith("RUNGS"))
    names = re.findall(r'"(\w+)"', source.splitlines()[0])
    assert [cupyfa.kernel(name).arch for name in names] == ["75"] * 5


@EACH
def test_links_of_a_notebook_have_targets(notebook):
    for cell in stored(notebook).cells:
        for link, anchor in LINK.findall(cell.source) if cell.cell_type == "markdown" else ():
            target = notebook.parent / link
            assert target.exists(), link
            titles = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.M) if anchor else []
            anchors = [re.sub(r"[^\w-]", "", x.lower().replace(" ", "-")) for x in titles]
            assert not anchor or anchor in anchors, f"{link}#{anchor}"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Runs the cell that installs cupyfa in an empty folder; returns the commands that it ran."""
    commands = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    (cell,) = (x for x in stored(COURSE).cells if "install" in x.metadata.get("tags", ()))

    def run():
        exec(cell.source, {})
        return commands

    return run


@pytest.fixture
def missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def write_archive(form, folder):
    """Makes an archive that looks like one of cupyfa's sources."""
    Path(folder, "cupyfa").mkdir(parents=True)
    Path(folder, "cupyfa", "version.py").touch()
    shutil.make_archive(folder, form, ".", folder)
    shutil.rmtree(folder)


def test_nothing_is_installed_where_cupyfa_is(installed):
    assert not installed()


@pytest.mark.parametrize("form", ["gztar", "zip"])
def test_the_archive_beside_the_notebook_is_installed(form, installed, missing):
    write_archive(form, "cupyfa-1.2.3")
    ((*pip, source),) = installed()
    assert pip == [sys.executable, "-m", "pip", "install", "--quiet", "-e"]
    assert source == f"{Path.cwd()}/cupyfa-1.2.3[compiler,plot]"
    assert sys.path[-1] == f"{Path.cwd()}/cupyfa-1.2.3"


def test_a_checkout_is_installed(installed, missing, monkeypatch):
    monkeypatch.chdir(COURSE.parent)
    ((*_, source),) = installed()
    assert source == f"{ROOT}[compiler,plot]"


def test_a_folder_named_cupyfa_is_not_the_package(installed, monkeypatch):
    write_archive("zip", "cupyfa")
    mere_folder = importlib.util.spec_from_loader("cupyfa", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: mere_folder)
    assert len(installed()) == 1


def test_without_sources_the_remedy_is_told(installed, missing):
    with pytest.raises(FileNotFoundError, match="upload the archive there"):
        installed()


if __name__ == "__main__":
    for notebook in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(notebook, folder, NO_GPU), notebook)
