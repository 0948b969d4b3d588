"""compute-sanitizer reports no error in any kernel and dtype on ragged shapes.

Tests marked gpu run one of the tools on one kernel per family; all other tests are marked slow.
"""

import os
import re
import shutil
import subprocess
import sys
from itertools import product

import pytest
from helpers.problems import LIKE_OTHERS

from cupyfa.ladder import LADDER
from cupyfa.planner.source import ROOT

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
KERNELS = tuple(name for kernels in LADDER.values() for name in kernels)
FIRST = tuple(name for name in KERNELS if name not in LIKE_OTHERS)


def watched():
    """Yields every tool with every kernel; the gpu mark rotates through the tools by family."""
    for name, (j, tool) in product(KERNELS, enumerate(TOOLS)):
        is_quick = name in FIRST and FIRST.index(name) % len(TOOLS) == j
        yield pytest.param(tool, name, marks=pytest.mark.gpu if is_quick else pytest.mark.slow)


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
