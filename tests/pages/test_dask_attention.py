"""The Dask example: chunks, processes, and a result that it checks itself."""

import runpy
import sys

import pytest

from cupyfa.planner.source import ROOT

pytest.importorskip("dask.array")
EXAMPLE = ROOT / "examples" / "dask_attention.py"


@pytest.mark.filterwarnings("ignore:no CUDA device")
@pytest.mark.parametrize(
    "options",
    ["", "--keys merge --dtype float16", pytest.param("--workers 1", marks=pytest.mark.slow)],
)
def test_the_program(monkeypatch, capsys, options):
    if "--workers" in options:
        pytest.importorskip("distributed")
    small = f"--tokens 40 --rows 16 -d 8 {options}"
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *small.split()])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    first, last = capsys.readouterr().out.splitlines()
    assert first == "6 chunks of (1, 2, 16, 8)"
    assert last.startswith("largest error in the last rows: ")


@pytest.mark.gpu
def test_the_program_on_a_gpu(cuda, monkeypatch, capsys):
    given = "--gpu --dtype float16 --tokens 4096 --rows 1024 -d 64"
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *given.split()])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "largest error" in capsys.readouterr().out
