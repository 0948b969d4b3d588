"""Runs the programs of tools/ in new processes."""

import os
import subprocess
import sys

from cupyfa.planner.source import ROOT


def printed(script, *args):
    """Runs a script and returns its output; fails if the exit code is not 0."""
    path = {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tools" / script), *map(str, args)]
    done = subprocess.run(
        command, env=os.environ | path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
