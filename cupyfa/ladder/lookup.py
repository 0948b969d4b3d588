"""Kernels by name: those of the ladder, and those that a user's script makes."""

from __future__ import annotations

import runpy
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from cupyfa.ladder import LADDER
from cupyfa.ladder.kernel import Kernel


def record_named(name: str) -> Kernel:
    """The record of a ladder's kernel, or of ``script.py:name``.

    Raises ValueError, with the names there are, if there is no such record.
    """
    if ".py" in name:
        return _from_script(name)
    for kernels in LADDER.values():
        if name in kernels:
            return kernels[name]
    known = ", ".join(kernel for kernels in LADDER.values() for kernel in kernels)
    raise ValueError(f"kernel {name!r} is unknown; there are {known}, and script.py:name")


def operation_of(name: str) -> str:
    """The operation of a kernel's name; "auto" is one that computes attention forward."""
    return "forward" if name == "auto" else record_named(name).operation


def _from_script(name: str) -> Kernel:
    script, _, variable = name.rpartition(":")
    if not script:
        raise ValueError(f"{name!r} names no record; write {name}:name for the Kernel in it")
    if not Path(script).is_file():
        raise ValueError(f"there is no file {script!r}; give the path of a script with a Kernel")
    found = _variables_of(Path(script).resolve())
    records = {key: value for key, value in found.items() if isinstance(value, Kernel)}
    if variable not in records:
        known = ", ".join(records) or "none"
        raise ValueError(f"{script} has no Kernel named {variable!r}; its Kernels: {known}")
    return records[variable]


def _variables_of(script: Path) -> dict[str, Any]:
    """What a script defines, run as Python runs a script: with its folder on the path.

    What it prints goes to stderr, for stdout is kept for data.
    """
    path = list(sys.path)
    sys.path.insert(0, str(script.parent))
    try:
        with redirect_stdout(sys.stderr):
            return runpy.run_path(str(script))
    except (Exception, SystemExit) as error:
        lines = [
            x.lineno for x in traceback.extract_tb(error.__traceback__) if x.filename == str(script)
        ]
        place = f"{script}:{lines[-1]}" if lines else str(script)
        what = " ".join(str(error).split())  # in one line
        raise ValueError(f"{place}: {type(error).__name__}: {what}; mend the script") from error
    finally:
        sys.path[:] = path
