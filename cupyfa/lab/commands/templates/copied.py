"""NAME: what it changes in RUNG.

Run it with `cupyfa run NAME.py:NAME`.
"""

from dataclasses import replace
from pathlib import Path

import cupyfa

rung = cupyfa.kernel("RUNG")

# Maps entry points to their files in this folder. Other files of the rung and all headers come from
# cupyfa, unless this folder contains a copy under the same name.
FILES = {
    "RUNG": "NAME.cu",
}


def own_file(step):
    """Points a launch to its file in this folder, if FILES lists one."""
    file = FILES.get(getattr(step, "entry", None))
    return replace(step, file=file) if file else step


NAME = replace(
    rung,
    name="NAME",
    adds="changes in RUNG",  # short description that tables print
    launches=tuple(map(own_file, rung.launches)),
    folder=Path(__file__).parent,
    # Replace other fields of the rung's record in the same way, such as tiles=, features= or a
    # launch's args. A kernel whose results differ from the rung's by design also needs reference=,
    # as in the file that `cupyfa new` writes without --from.
)
