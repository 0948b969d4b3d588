"""The environment variables that begin with CUPYFA_, which every command checks as it begins."""

import os
from collections.abc import Callable, Mapping

from cupyfa import cache_folder
from cupyfa.errors import closest
from cupyfa.lab.commands.command_options import note
from cupyfa.runtime import choose_backend
from cupyfa.runtime.simulator import machine

_PREFIX = "CUPYFA_"
# Functions that raise an error for a wrong value. Folders and programs are checked when used.
KNOWN: Mapping[str, Callable[[], object]] = {
    choose_backend.CHOICE: choose_backend.chosen_backend,
    "CUPYFA_CACHE_DIR": lambda: None,
    "CUPYFA_CACHE_MB": cache_folder.limit,
    "CUPYFA_COMPILER": lambda: None,
    "CUPYFA_COMPILER_FLAGS": machine.given_flags,
}


def check_variables() -> None:
    """Raises ValueError for wrong values; prints a note for unknown variables."""
    for name in sorted(os.environ):
        if name in KNOWN:
            KNOWN[name]()
        elif name.upper().startswith(_PREFIX):
            meant = closest(name, KNOWN)
            remedy = f"did you mean {meant}?" if meant else f"there are {', '.join(KNOWN)}"
            note(f"{name} is no variable of cupyfa and is ignored; {remedy}")
