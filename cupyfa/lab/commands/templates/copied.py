"""NAME: what it changes in RUNG.

Run it with `cupyfa run NAME.py:NAME`.
"""

from dataclasses import replace
from pathlib import Path

import cupyfa

rung = cupyfa.kernel("RUNG")

# The entry points whose files are in this folder. Other files of the rung, and all headers, are
# the project's; a copy in this folder, under the same name, takes precedence.
FILES = {
    "RUNG": "NAME.cu",
}


def own_file(step):
    """Returns a launch with its file in this folder, if there is one; else the step itself."""
    file = FILES.get(getattr(step, "entry", None))
    return replace(step, file=file) if file else step


NAME = replace(
    rung,
    name="NAME",
    adds="changes in RUNG",  # the kernel's new idea, for tables
    launches=tuple(map(own_file, rung.launches)),
    folder=Path(__file__).parent,
    # Other fields of the rung's record are replaced in the same way: tiles=, features=, args of a
    # launch. A kernel whose results differ from the rung's by design also needs reference=, as in
    # the file that `cupyfa new` writes without --from.
)
