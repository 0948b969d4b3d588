"""The example of devices=, which compares its result with that of one GPU."""

import runpy
import sys
from functools import partial
from importlib import import_module

import pytest
from helpers.far_device import FarDevice

import cupyfa
from cupyfa.planner.source import ROOT

EXAMPLE = ROOT / "examples" / "several_gpus.py"


def run(monkeypatch, options):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *options.split()])
    runpy.run_path(str(EXAMPLE), run_name="__main__")


@pytest.fixture
def training(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    return import_module("train_transformer")


def require_right(monkeypatch, capsys, options):
    run(monkeypatch, options)
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith("one GPU: ")
    assert second == "the bits are those of one GPU: True"
    assert last.startswith("gradients: (1, 4, ")


@pytest.mark.filterwarnings("ignore:no CUDA device")
def test_the_program(training, monkeypatch, capsys):
    """Runs on simulated devices with separate memory instead of GPUs."""
    monkeypatch.setattr(training, "has_gpu", lambda: True)
    for name in ("attention", "Devices"):
        monkeypatch.setattr(cupyfa, name, partial(getattr(cupyfa, name), backend=FarDevice()))
    require_right(monkeypatch, capsys, "--tokens 40 -d 8 --devices 1 0")


def test_times_of_the_simulator_are_not_compared(training, monkeypatch, capsys):
    monkeypatch.setattr(training, "has_gpu", lambda: False)
    with pytest.raises(SystemExit, match="there is no GPU, .*cupyfa doctor"):
        run(monkeypatch, "--tokens 40")
    assert capsys.readouterr().out == ""


@pytest.mark.gpu
@pytest.mark.parametrize("devices", ["", "--devices 1 0"])
def test_the_program_on_two_gpus(two_gpus, training, monkeypatch, capsys, devices):
    require_right(monkeypatch, capsys, f"--tokens 4096 -d 64 --dtype float16 {devices}")
