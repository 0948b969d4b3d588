"""The notebook runs, and its cells print what is stored in it.

As a program, ``python tests/pages/test_notebook.py``, it stores what they print now.
"""

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="pip install -e '.[test]'")
nbclient = pytest.importorskip("nbclient", reason="pip install -e '.[test]'")

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "from_numpy.ipynb"
ERROR = re.compile(r"\de-\d\d")  # depends on the order in which NumPy adds


def stored():
    return nbformat.read(NOTEBOOK, as_version=4)


def executed():
    """The notebook with the outputs of now, without times and versions."""
    client = nbclient.NotebookClient(
        stored(),
        kernel_name="python3",
        resources={"metadata": {"path": NOTEBOOK.parent}},
        record_timing=False,
        coalesce_streams=True,
    )
    notebook = client.execute()
    notebook.metadata = stored().metadata
    return notebook


def shown(cell):
    """What a cell prints, and the kinds of its pictures."""
    text = "".join(x.text for x in cell.outputs if x.output_type == "stream")
    pictures = [sorted(x.data) for x in cell.outputs if x.output_type != "stream"]
    return ERROR.sub("…", text), pictures


@pytest.mark.slow
def test_the_notebook_prints_what_is_stored():
    code = [
        [cell for cell in notebook.cells if cell.cell_type == "code"]
        for notebook in (stored(), executed())
    ]
    assert any(pictures for _, pictures in map(shown, code[0]))
    for before, now in zip(*code):
        assert shown(now) == shown(before), before.source


if __name__ == "__main__":
    nbformat.write(executed(), NOTEBOOK)
