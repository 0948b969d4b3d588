"""The environment variables that begin with CUPYFA_, which every command checks as it begins."""

import os
from collections.abc import Callable, Mapping

from cupyfa import store
from cupyfa.commands.options import note
from cupyfa.errors import closest
from cupyfa.runtime import select
from cupyfa.runtime.simulator import machine

_PREFIX = "CUPYFA_"
# What raises an error for a wrong value. Folders and programs are looked at where they are used.
KNOWN: Mapping[str, Callable[[], object]] = {
    select.CHOICE: select.chosen_backend,
    "CUPYFA_CACHE_DIR": lambda: None,
    "CUPYFA_CACHE_MB": store.limit,
    "CUPYFA_COMPILER": lambda: None,
    "CUPYFA_COMPILER_FLAGS": machine.given_flags,
}


def check_variables() -> None:
    """Raises ValueError for wrong values; notes variables that do not exist."""
    for name in sorted(os.environ):
        if name in KNOWN:
            KNOWN[name]()
        elif name.upper().startswith(_PREFIX):
            meant = closest(name, KNOWN)
            remedy = f"did you mean {meant}?" if meant else f"there are {', '.join(KNOWN)}"
            note(f"{name} is no variable of cupyfa and is ignored; {remedy}")
