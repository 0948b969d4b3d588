"""Cache folders for single tests."""

import shutil

from cupyfa.runtime.simulator import machine


def with_runtime(folder):
    """Makes a cache folder with the simulator's runtime, which takes seconds to compile."""
    folder.mkdir(mode=0o700, exist_ok=True)
    path, _ = machine._runtime()
    shutil.copy2(path, folder)
    return folder
