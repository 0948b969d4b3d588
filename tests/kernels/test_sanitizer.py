"""compute-sanitizer finds nothing in any kernel, in any dtype, on ragged shapes.

The tests marked gpu watch each kernel with one of the tools, those marked slow with the others.
"""

import os
import re
import shutil
import subprocess
import sys
from itertools import product

import pytest

from cupyfa.ladder import LADDER
from cupyfa.planner.source import ROOT

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
KERNELS = tuple(name for kernels in LADDER.values() for name in kernels)


def watched():
    """Each tool with each kernel; the mark gpu goes to another tool for each next kernel."""
    for (i, name), (j, tool) in product(enumerate(KERNELS), enumerate(TOOLS)):
        mark = pytest.mark.gpu if i % len(TOOLS) == j else pytest.mark.slow
        yield pytest.param(tool, name, marks=mark)


@pytest.mark.parametrize("tool, name", list(watched()))
def test_compute_sanitizer_finds_nothing(cuda, tool, name):
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer, a part of the CUDA toolkit, is not on the PATH")
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    command += [sys.executable, str(ROOT / "tools" / "launches.py"), name]
    where = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | where)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"SUMMARY: 0 (errors|hazards)", done.stdout)
