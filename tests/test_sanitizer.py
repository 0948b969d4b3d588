"""compute-sanitizer finds nothing in any kernel, in any dtype, on ragged shapes."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cupyfa

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")


@pytest.mark.gpu
@pytest.mark.parametrize("tool", TOOLS)
def test_the_tool_is_silent(cuda, tool):
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer, a part of the CUDA toolkit, is not on the PATH")
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    command += [sys.executable, str(Path(__file__).with_name("launches.py"))]
    where = {"PYTHONPATH": str(Path(cupyfa.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | where)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"SUMMARY: 0 (errors|hazards)", done.stdout)
