"""The programs of tools/ that are run by hand, each in a process of its own."""

import os
import subprocess
import sys

from cupyfa.planner.source import ROOT


def printed(script, *args):
    """What a script prints; fails with all of that unless its exit code is 0."""
    path = {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tools" / script), *map(str, args)]
    done = subprocess.run(
        command, env=os.environ | path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
