"""The notebook runs, and its cells print their stored outputs.

``python tests/pages/test_notebook.py`` stores the current outputs.
"""

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="pip install -e '.[test]'")
nbclient = pytest.importorskip("nbclient", reason="pip install -e '.[test]'")

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "from_numpy.ipynb"
ERROR = re.compile(r"\de-\d\d")  # depends on NumPy's order of summation


def stored():
    return nbformat.read(NOTEBOOK, as_version=4)


def executed():
    """Executes the notebook and returns it without times and versions."""
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
    """Returns a cell's printed text, and the media types of its pictures."""
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
