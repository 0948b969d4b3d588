"""compute-sanitizer finds nothing in any kernel, in any dtype, on ragged shapes."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from cupyfa.planner.source import ROOT

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")


@pytest.mark.gpu
@pytest.mark.parametrize("tool", TOOLS)
def test_compute_sanitizer_finds_nothing(cuda, tool):
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer, a part of the CUDA toolkit, is not on the PATH")
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    command += [sys.executable, str(ROOT / "tools" / "launches.py")]
    where = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | where)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"SUMMARY: 0 (errors|hazards)", done.stdout)
