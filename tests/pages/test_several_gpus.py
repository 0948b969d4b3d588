"""The example of devices=, which compares its result with that of one GPU."""

import runpy
import sys
from functools import partial

import pytest
from helpers.far_device import FarDevice

import cupyfa
from cupyfa.planner.source import ROOT

EXAMPLE = ROOT / "examples" / "several_gpus.py"


def require_right(monkeypatch, capsys, options):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *options.split()])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith("one GPU: ")
    assert second == "the bits are those of one GPU: True"
    assert last.startswith("gradients: (1, 4, ")


@pytest.mark.filterwarnings("ignore:no CUDA device")
def test_the_program(monkeypatch, capsys):
    """On devices whose memory is not the host's."""
    for name in ("attention", "attention_vjp"):
        monkeypatch.setattr(cupyfa, name, partial(getattr(cupyfa, name), backend=FarDevice()))
    require_right(monkeypatch, capsys, "--tokens 40 -d 8 --devices 1 0")


@pytest.mark.gpu
@pytest.mark.parametrize("devices", ["", "--devices 1 0"])
def test_the_program_on_two_gpus(two_gpus, monkeypatch, capsys, devices):
    require_right(monkeypatch, capsys, f"--tokens 4096 -d 64 --dtype float16 {devices}")
