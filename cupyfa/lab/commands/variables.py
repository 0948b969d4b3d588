"""Checks the environment variables CUPYFA_*, as every command does when it starts."""

import os
from collections.abc import Callable, Mapping

from cupyfa import cache_folder
from cupyfa.errors import closest
from cupyfa.lab.commands.command_options import note
from cupyfa.runtime import choose_backend
from cupyfa.runtime.simulator import machine

_PREFIX = "CUPYFA_"
# Maps variables to functions that raise an error for an invalid value. Folders and programs are
# checked when they are used.
KNOWN: Mapping[str, Callable[[], object]] = {
    choose_backend.CHOICE: choose_backend.chosen_backend,
    "CUPYFA_CACHE_DIR": lambda: None,
    "CUPYFA_CACHE_MB": cache_folder.limit,
    "CUPYFA_COMPILER": lambda: None,
    "CUPYFA_COMPILER_FLAGS": machine.given_flags,
}


def check_variables() -> None:
    """Raises ValueError for invalid values; prints a note for unknown variables."""
    for name in sorted(os.environ):
        if name in KNOWN:
            KNOWN[name]()
        elif name.upper().startswith(_PREFIX):
            meant = closest(name, KNOWN)
            remedy = f"did you mean {meant}?" if meant else f"cupyfa reads {', '.join(KNOWN)}"
            note(f"{name} is not a variable of cupyfa and is ignored; {remedy}")
